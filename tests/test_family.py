"""The losses of all scripts, compared with one table of formulas, and the relations between the
algorithms: the name of a test states under which condition one algorithm equals another."""
import functools
import inspect
import math

import pytest
import torch
from conftest import close, f64, randn

import dpo
import grpo
import gspo
import ppo
import reinforce

pytestmark = pytest.mark.quick

AVERAGES = ("sequence_mean", "token_mean", "sequence_sum", "constant")
LEVELS = ("sequence", "sequence_token")
LOSS_TYPES = {"grpo": ("clip", "sequence_mean"), "dr_grpo": ("clip", "constant"),
              "dapo": ("clip", "token_mean"), "cispo": ("cispo", "token_mean"),
              "sapo": ("sapo", "sequence_mean")}
SCRIPTS = {"reinforce": reinforce, "ppo": ppo, "grpo": grpo, "gspo": gspo}  # with an aggregate
RAGGED = f64([[1, 0, 0, 0, 0], [1, 0, 1, 1, 0], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])      # a mask
# Log ratios of tokens, and advantages of rows and tokens. Ratios, of tokens and of rows, are within
# the clip range and beyond either end, where some advantages push further out and some pull back.
LOG_RHO = f64([[0.7, 0, 0, 0, 0], [-0.4, 0, -0.6, 0.1, 0], [0.3, -0.5, 0.05, 0.8, -0.4],
               [0.6, -0.1, 0, 0, 0]])
A = f64([-1.5, -0.8, 1.2, 0.5])
TOKEN_A = A[:, None] * f64([[1, -2, 0.5, -1, 3]])


def all_losses():
    """Map names to (loss of logps, old_logps, advantages and mask; its surrogate; its level)."""
    found = {
        "reinforce": (lambda logps, _, A, mask: reinforce.policy_loss(logps, A, mask), "plain", ""),
        "ppo": (ppo.policy_loss, "clip", ""),
        "ppo-penalty": (functools.partial(ppo.penalty_loss, beta=0.7), "penalty", "")}
    for loss_type, (surrogate, _) in [*LOSS_TYPES.items(), ("delta", ("delta", ""))]:
        options = {"loss_type": loss_type}
        if loss_type == "delta":
            options = {"delta": 1.5}
        grpo_loss = functools.partial(grpo.policy_loss, **options)
        found[f"grpo-{loss_type}"] = (grpo_loss, surrogate, "")
        for level in LEVELS:
            gspo_loss = functools.partial(gspo.policy_loss, level=level, **options)
            found[f"gspo-{loss_type}-{level}"] = (gspo_loss, surrogate, level)
    return found


LOSSES = all_losses()
every_loss = pytest.mark.parametrize("name", LOSSES)
every_average = pytest.mark.parametrize("how", AVERAGES)
of_groups = pytest.mark.parametrize("script", [grpo, gspo], ids=["grpo", "gspo"])


def loss_and_weight(surrogate, x, A):
    """Compute L_t and its gradient in log pi for log pi = -1 and log rho = x >= 0, with the clip
    ranges of policy_loss. -> float or inf, float or inf"""
    rho = math.exp(x) if x < 700 else math.inf
    tau = 1.0 if A > 0 else 1.05
    if surrogate == "plain":
        return A, -A
    if surrogate == "cispo":
        return min(rho, 1.2) * A, -min(rho, 1.2) * A
    if surrogate == "sapo":
        return -4 / tau * A / (1 + math.exp(-tau * (min(rho, 99) - 1))), -A if x == 0 else 0.0
    bound = 1.2 if A > 0 else {"clip": math.inf, "delta": 1.5}[surrogate]
    return -min(rho, bound) * A, -rho * A if rho <= bound else 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("A", [2.0, 0.0, -2.0])
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "ppo-penalty"])
def test_a_loss_that_stops_growing_has_gradient_0_however_large_the_ratio_gets(name, A, dtype):
    """exp(89) is inf in float32. A loss that grows without bound must be inf, with its gradient."""
    loss, surrogate, _ = LOSSES[name]
    log_rho = (0.0, 20.0, 30.0, 88.0, 89.0, 100.0, 1000.0)
    logps = torch.full((7, 1), -1.0, dtype=dtype, requires_grad=True)
    old_logps = -1 - torch.tensor(log_rho, dtype=dtype)[:, None]
    found = loss(logps, old_logps, torch.full((7,), A, dtype=dtype), torch.ones_like(logps))
    gradient, = torch.autograd.grad(found.sum(), logps)
    expected = [loss_and_weight(surrogate, x, A) if A else (0.0, 0.0) for x in log_rho]
    torch.testing.assert_close(
        torch.cat([found, gradient], dim=1), f64(expected).to(dtype))


@of_groups
def test_a_surrogate_that_nobody_wrote_is_not_taken_for_another_one(script, monkeypatch):
    monkeypatch.setitem(script.LOSS_TYPES, "mine", ("mine", "token_mean"))
    with pytest.raises(AssertionError, match="mine"):
        script.policy_loss(LOG_RHO, 0 * LOG_RHO, A, RAGGED, loss_type="mine")


# ---- one table of formulas -------------------------------------------------------------------

def token_loss(surrogate, ratio, A, logp):
    """Compute a token's loss with a clip range of 0.2, and its derivative in the log ratio."""
    if surrogate == "plain":
        return -A * logp, -A
    if surrogate == "penalty":
        return -A * ratio + 0.7 * (ratio - 1 - math.log(ratio)), -A * ratio + 0.7 * (ratio - 1)
    if surrogate == "cispo":
        return -A * min(ratio, 1.2) * logp, -A * min(ratio, 1.2)
    if surrogate == "sapo":
        tau = 1.0 if A > 0 else 1.05
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return -A * 4 / tau * gate, -A * 4 * gate * (1 - gate) * ratio
    if surrogate == "delta" and A < 0 and ratio > 1.5:
        return -A * 1.5, 0.0
    if ratio > 1.2 and A > 0:
        return -A * 1.2, 0.0
    if ratio < 0.8 and A < 0:
        return -A * 0.8, 0.0
    return -A * ratio, -A * ratio


def expected(surrogate, level, how, logps, A):
    """Compute the average loss and its gradient in the log-probs, token by token."""
    B = len(RAGGED)
    loss = 0.0
    gradient = torch.zeros_like(RAGGED)
    for i in range(B):
        slots = RAGGED[i].nonzero().flatten().tolist()
        share = {"sequence_mean": 1 / (B * len(slots)), "token_mean": 1 / RAGGED.sum().item(),
                 "sequence_sum": 1 / B, "constant": 1 / (B * 9)}[how]
        row = []
        for t in slots:
            log_ratio = LOG_RHO[i, slots].mean() if level else LOG_RHO[i, t]
            row.append(token_loss(
                surrogate, math.exp(log_ratio), A[i, t].item(), logps[i, t].item()))
        slopes = [slope for _, slope in row]
        if level == "sequence" and surrogate != "cispo":    # each moves the one ratio
            slopes = [sum(slopes) / len(slots)] * len(slots)
        gradient[i, slots] = share * f64(slopes)
        loss += share * sum(value for value, _ in row)
    return loss, gradient


def found(name, how, logps, A):
    """Compute what `expected` computes with the script's loss and average, and autograd."""
    logps = logps.clone().requires_grad_()
    loss_function, _, _ = LOSSES[name]
    script = SCRIPTS[name.split("-")[0]]
    losses = loss_function(logps, logps.detach() - LOG_RHO, A, RAGGED)
    loss = script.aggregate(losses, RAGGED, how, max_length=9)
    return loss.item(), torch.autograd.grad(loss, logps)[0]


def some_logps():
    """Draw log-probs. (4, 5)"""
    return -0.5 - torch.rand(4, 5, generator=torch.Generator().manual_seed(0)).double()


@every_average
@every_loss
def test_loss_and_gradient_are_those_of_the_formulas_with_an_advantage_a_row_and_a_token(name, how):
    _, surrogate, level = LOSSES[name]
    logps = some_logps()
    for token_A in (A[:, None].expand(4, 5), TOKEN_A):
        close(found(name, how, logps, token_A), expected(surrogate, level, how, logps, token_A))
    close(found(name, how, logps, A), found(name, how, logps, A[:, None].expand(4, 5)))


@every_loss
def test_masked_slots_never_reach_loss_or_gradient_and_arguments_stay_as_they_are(name):
    loss_function, _, _ = LOSSES[name]
    is_masked = RAGGED == 0
    results = []
    for rubbish, sign in ((0.0, 1), (1e30, 1), (1e30, -1), (-1e30, 1)):
        logps = torch.where(is_masked, rubbish, some_logps()).requires_grad_()
        old_logps = torch.where(is_masked, -rubbish, some_logps() - LOG_RHO).requires_grad_()
        token_A = torch.where(is_masked, 1e6 * sign * rubbish, TOKEN_A)
        before = [x.detach().clone() for x in (logps, old_logps, token_A, RAGGED)]
        losses = loss_function(logps, old_logps, token_A, RAGGED)
        losses.sum().backward()
        assert old_logps.grad is None                   # the old policy does not learn
        assert (losses[is_masked] == 0).all()
        assert (logps.grad[is_masked] == 0).all()
        results.append((losses.detach(), logps.grad))
        for now, was in zip((logps, old_logps, token_A, RAGGED), before):
            assert torch.equal(now, was)
    for losses, gradient in results[1:]:
        assert torch.equal(losses, results[0][0])
        assert torch.equal(gradient, results[0][1])


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_have_the_type_of_the_log_probs(name, dtype):
    loss_function, _, _ = LOSSES[name]
    losses = loss_function(*(x.to(dtype) for x in (some_logps(), some_logps(), A, RAGGED)))
    assert (losses.dtype, losses.shape) == (dtype, (4, 5))


@of_groups
def test_each_loss_type_has_the_surrogate_and_the_average_of_its_paper(script):
    assert script.LOSS_TYPES == LOSS_TYPES


# ---- averages --------------------------------------------------------------------------------

@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
@pytest.mark.parametrize("how, value", [
    ("sequence_mean", 1.5), ("token_mean", 1.75), ("sequence_sum", 3.5), ("constant", 0.875)])
def test_the_four_averages_of_a_short_and_a_long_row(script, how, value):
    x = f64([[1, 1e30, 99], [2, 2, 2], [99, -1e30, 99]])
    mask = f64([[1, 0, 0], [1, 1, 1], [0, 0, 0]])
    close(script.aggregate(x[:2], mask[:2], how, max_length=4).item(), value)
    assert script.aggregate(x, 0 * mask, how).item() == 0
    with_an_empty_row = value if how == "token_mean" else value * 2 / 3
    close(script.aggregate(x, mask, how, max_length=4).item(), with_an_empty_row)
    if how == "constant":                               # by default, divides by T
        close(script.aggregate(x[:2], mask[:2], how).item(), value * 4 / 3)
    with pytest.raises(AssertionError, match="sequence_meen"):
        script.aggregate(x, mask, "sequence_meen")


def average_of_rows(name, how, logps, rows, **counts):
    """Compute the average loss of some rows, cut to the length of the longest of them."""
    T = int(RAGGED[rows].nonzero()[:, 1].max()) + 1
    loss_function, _, _ = LOSSES[name]
    mask = RAGGED[rows, :T]
    losses = loss_function(
        logps[rows, :T], (some_logps() - LOG_RHO)[rows, :T], A[rows], mask)
    return SCRIPTS[name.split("-")[0]].aggregate(losses, mask, how, max_length=9, **counts)


@every_average
@every_loss
def test_the_micro_batches_of_a_step_add_up_to_its_gradient_however_it_is_divided(name, how):
    logps = some_logps().requires_grad_()
    whole = average_of_rows(name, how, logps, [0, 1, 2, 3])
    gradient = torch.autograd.grad(whole, logps)[0]
    counts = {"num_sequences": 4, "num_tokens": RAGGED.sum().item()}
    for division in ([[0], [1], [2], [3]], [[3, 1], [2], [0]], [[2], [0, 3, 1]], [[0, 1, 2, 3]]):
        parts = sum(average_of_rows(name, how, logps, rows, **counts) for rows in division)
        close(parts.detach(), whole.detach())
        close(torch.autograd.grad(parts, logps)[0], gradient)
    apart = sum(average_of_rows(name, how, logps, rows) for rows in ([0], [1, 2, 3])) / 2
    assert (apart - whole).abs() > 1e-3                 # so the counts matter


# ---- GRPO and PPO ----------------------------------------------------------------------------

def test_the_policy_loss_of_ppo_is_that_of_grpo_given_the_same_advantages():
    logps = some_logps()
    inputs = (logps, logps - LOG_RHO, TOKEN_A, RAGGED, 3e-4, 4e-1)
    close(ppo.policy_loss(*inputs), grpo.policy_loss(*inputs[:4], "grpo", *inputs[4:]))


# ---- baselines, critics, preferences ---------------------------------------------------------

@of_groups
def test_leave_one_out_is_grpo_without_the_std_times_a_constant_and_grpo_divides_by_it(script):
    rewards = randn(5, 4)
    centred = reinforce.advantages(rewards, "mean")
    close(script.advantages(rewards, "none"), centred)
    close(reinforce.advantages(rewards, "rloo"), 4 / 3 * centred)
    close(script.advantages(rewards), centred / (rewards.std(dim=1, keepdim=True) + 1e-4))
    close(script.advantages(rewards, eps=0.5), centred / (rewards.std(dim=1, keepdim=True) + 0.5))
    close(script.advantages(rewards, "batch"), centred / (rewards.std() + 1e-4))
    above_0 = rewards.abs()
    by_mean = reinforce.advantages(above_0, "mean") / above_0.mean(dim=1, keepdim=True)
    close(script.advantages(above_0, "mean"), by_mean)
    one = rewards[:1]                                   # the batch is one group
    close(script.advantages(one, "batch"), script.advantages(one))
    close(reinforce.advantages(one, "batch"), reinforce.advantages(one, "mean"))


def all_advantages():
    """Map names to functions of rewards (P, G) that subtract a baseline of each group."""
    found = {"optimal": lambda R: reinforce.advantages(R, "optimal", 1 + R.square())}
    for baseline in ("mean", "rloo"):
        found[baseline] = functools.partial(reinforce.advantages, baseline=baseline)
    for script in (grpo, gspo):
        for scale in ("group", "batch", "mean", "none"):
            for eps in (1e-4, 0.0):
                found[f"{script.__name__}-{scale}-{eps}"] = functools.partial(
                    script.advantages, scale_rewards=scale, eps=eps)
    return found


@pytest.mark.parametrize("advantages", all_advantages().values(), ids=all_advantages())
@pytest.mark.parametrize("G", [2, 3, 7])
def test_a_group_of_equal_rewards_gets_exactly_no_advantage_beside_one_that_gets_some(
        advantages, G):
    hundredths = torch.tensor([1 / 3, *(k / 100 for k in range(-101, 302))])    # in float32
    equal_groups = hundredths[:, None].expand(-1, G)
    A = advantages(torch.cat([equal_groups, torch.arange(G)[None]]))
    assert (A[:-1] == 0).all()
    assert A[-1].abs().sum() > 0.5
    assert (advantages(equal_groups[:1]) == 0).all()    # the whole batch has no spread


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_with_lambda_one_the_advantage_of_ppo_is_the_reward_to_go_of_reinforce_less_the_value(
        gamma):
    rewards, values = randn(2, 4, 5)
    to_go = reinforce.rewards_to_go(rewards, RAGGED, gamma)
    advantages, returns = ppo.gae(rewards, values, RAGGED, gamma, 1.0)
    close(advantages * RAGGED, (to_go - values) * RAGGED)
    close(returns * RAGGED, to_go * RAGGED)


def test_where_the_policy_is_the_reference_dpo_is_reinforce_on_plus_and_minus_one():
    logps = some_logps().requires_grad_()
    chosen, rejected = dpo.sequence_logps(logps, RAGGED).view(2, 2)     # two pairs
    loss = dpo.dpo_loss(chosen, rejected, chosen.detach(), rejected.detach(), 0.1)
    close(loss.detach(), f64([math.log(2)] * 2))
    is_chosen = f64([[1, 0], [1, 0]])
    plus_minus_one = reinforce.advantages(is_chosen, "rloo").T.reshape(4)
    losses = reinforce.policy_loss(logps, plus_minus_one, RAGGED)
    gradient = torch.autograd.grad(losses.sum(), logps, retain_graph=True)[0]
    close(torch.autograd.grad(loss.sum(), logps)[0], 0.1 / 2 * gradient)


# ---- functions that other code calls ---------------------------------------------------------

EVERYWHERE = {
    "logprobs": "logits, tokens, temperature=1.0, kernel='auto'",
    "kl": "logps, ref_logps, estimator='k3', log_rho=None"}
AVERAGED = EVERYWHERE | {
    "aggregate": "x, mask, how, num_sequences=None, num_tokens=None, max_length=None"}
GROUPED = AVERAGED | {
    "advantages": "rewards, scale_rewards='group', eps=0.0001",
    "overlong_penalty": "lengths, max_length, buffer"}
RATIO = "logps, old_logps, advantages, mask"
CLIP = "epsilon=0.2, epsilon_high=0.2"
CALLED = {
    "reinforce": AVERAGED | {
        "advantages": "rewards, baseline='none', sq_grad_norms=None",
        "optimal_baseline": "rewards, sq_grad_norms, weights",
        "rewards_to_go": "rewards, mask, gamma",
        "policy_loss": "logps, advantages, mask"},
    "ppo": AVERAGED | {
        "gae": "rewards, values, mask, gamma, lam",
        "whiten": "x, mask",
        "length_adaptive_lambda": "lengths, alpha",
        "policy_loss": f"{RATIO}, {CLIP}",
        "penalty_loss": f"{RATIO}, beta",
        "value_loss": "values, old_values, returns, mask, cliprange_value"},
    "grpo": GROUPED | {
        "log_ratio": "logps, old_logps, mask",
        "policy_loss": f"{RATIO}, loss_type='grpo', {CLIP}, delta=0.0"},
    "gspo": GROUPED | {
        "log_ratio": "logps, old_logps, mask, level='sequence'",
        "policy_loss": f"{RATIO}, loss_type='grpo', {CLIP}, delta=0.0, level='sequence'"},
    "dpo": EVERYWHERE | {
        "sequence_logps": "logps, mask, average=False",
        "dpo_loss": "chosen, rejected, ref_chosen, ref_rejected, beta, loss_type='sigmoid', "
                    "label_smoothing=0.0, gamma=0.0"}}


@pytest.mark.parametrize("script", [*SCRIPTS.values(), dpo], ids=[*SCRIPTS, "dpo"])
def test_functions_that_are_called_from_outside_keep_their_names_arguments_and_defaults(script):
    for name, arguments in CALLED[script.__name__].items():
        signature = str(inspect.signature(getattr(script, name)))
        assert signature == f"({arguments})", name
