"""What the algorithms have to do with each other: each test is a sentence that says when one is
another. Gradients are those of the weights of a small softmax policy."""
import functools
import inspect
import math

import pytest
import torch
from conftest import f64

import dpo
import grpo
import gspo
import ppo
import reinforce

pytestmark = pytest.mark.quick

AVERAGES = ("sequence_mean", "token_mean", "sequence_sum", "constant")
LEVELS = ("sequence", "sequence_token")
CLIPPING = ("grpo", "bnpo", "dr_grpo", "dapo")          # the loss types with eq. (3)
LOSS_TYPES = (*CLIPPING, "cispo", "sapo")
SCRIPTS = {"reinforce": reinforce, "ppo": ppo, "grpo": grpo, "gspo": gspo}  # that have an aggregate
RAGGED = f64([[1, 0, 0, 0, 0], [1, 0, 1, 1, 0], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])      # a mask
FACTORS = f64([[1, -2, 0.5, -1, 3]])                    # they make an advantage differ by token
close = functools.partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)


def reinforce_loss(logps, old_logps, advantages, mask):
    """REINFORCE's loss, called as the others are: it has no use for old log-probs."""
    return reinforce.policy_loss(logps, advantages, mask)


def all_losses():
    """Name -> a loss of logps, old_logps, advantages and mask."""
    losses = {"reinforce": reinforce_loss,
              "ppo": ppo.policy_loss,
              "ppo-penalty": functools.partial(ppo.penalty_loss, beta=0.7)}
    for loss_type in LOSS_TYPES:
        losses[f"grpo-{loss_type}"] = functools.partial(grpo.policy_loss, loss_type=loss_type)
        for level in LEVELS:
            losses[f"gspo-{loss_type}-{level}"] = functools.partial(
                gspo.policy_loss, loss_type=loss_type, level=level)
    return losses


LOSSES = all_losses()
WITH_TOKEN_ADVANTAGES = [name for name in LOSSES if not name.endswith("-sequence")]
every_script = pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
both_of_groups = pytest.mark.parametrize("script", [grpo, gspo], ids=["grpo", "gspo"])
every_loss = pytest.mark.parametrize("name", LOSSES)
every_loss_type = pytest.mark.parametrize("loss_type", LOSS_TYPES)
every_level = pytest.mark.parametrize("level", LEVELS)
every_average = pytest.mark.parametrize("how", AVERAGES)


class Policy:
    """A softmax policy with three weights, completions of it, advantages, and the log-probs of an
    older policy. Logits are the features of a slot and a token times the weights."""

    def __init__(self, mask):
        generator = torch.Generator().manual_seed(0)
        B, T = mask.shape
        self.mask = mask
        self.A = torch.randn(B, generator=generator).double()
        self.features = torch.randn(B, T, 6, 3, generator=generator).double()       # of 6 tokens
        self.tokens = torch.randint(6, (B, T), generator=generator)
        self.weights = torch.randn(3, generator=generator).double().requires_grad_()
        noise = torch.randn(B, T, generator=generator).double()
        self.old_logps = self.logps().detach() + 0.3 * noise

    def logps(self):
        """Of the completions. (B, T)"""
        logps, _ = grpo.logprobs(self.features @ self.weights, self.tokens)
        return logps

    def gradient(self, loss):
        """Of a loss that was computed from logps(). (3,)"""
        return torch.autograd.grad(loss, self.weights)[0]


def loss_and_gradients(policy, loss, A):
    """The loss in every slot, and the gradients of their sum in every slot and in the weights."""
    logps = policy.logps()
    token_loss = loss(logps, policy.old_logps, A, policy.mask)
    gradients = torch.autograd.grad(token_loss.sum(), (logps, policy.weights))
    return token_loss.detach(), *gradients


def assert_same_loss_and_gradient(policy, one, other, A=None):
    """That two losses agree in every slot, and so do their gradients."""
    if A is None:
        A = policy.A
    expected = loss_and_gradients(policy, one, A)
    token_loss, _, gradient = expected
    assert token_loss.any()
    assert gradient.any()
    close(loss_and_gradients(policy, other, A), expected)


def on_policy_gradient(policy, loss, A, how):
    """The gradient of an averaged loss when the policy itself has sampled."""
    logps = policy.logps()
    token_loss = loss(logps, logps.detach(), A, policy.mask)
    return policy.gradient(reinforce.aggregate(token_loss, policy.mask, how, max_length=9))


# ---- when the ratio is one, all of them are REINFORCE ----------------------------------------

@every_average
@every_loss
def test_the_gradient_is_that_of_reinforce_when_the_ratio_is_one(name, how):
    policy = Policy(RAGGED)
    expected = on_policy_gradient(policy, reinforce_loss, policy.A, how)
    assert expected.abs().min() > 1e-3
    close(on_policy_gradient(policy, LOSSES[name], policy.A, how), expected)


@pytest.mark.parametrize("name", WITH_TOKEN_ADVANTAGES)
def test_so_it_is_with_an_advantage_for_each_token_unless_the_ratio_is_of_the_sequence(name):
    policy = Policy(RAGGED)
    A = policy.A[:, None] * FACTORS
    expected = on_policy_gradient(policy, reinforce_loss, A, "sequence_sum")
    close(on_policy_gradient(policy, LOSSES[name], A, "sequence_sum"), expected)


def expected_slope(name, ratio, A):
    """The derivative of a loss in the log-prob of a single token, for a clip range of 0.2."""
    if name == "reinforce":
        return -A
    if name == "ppo-penalty":
        return -A * ratio + 0.7 * (ratio - 1)
    if "cispo" in name:
        return -A * min(ratio, 1.2)
    if "sapo" in name:
        tau = 1.0 if A > 0 else 1.05
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return -A * 4 * gate * (1 - gate) * ratio
    is_clipped = ratio > 1.2 if A > 0 else ratio < 0.8
    return 0.0 if is_clipped else -A * ratio


@every_loss
@pytest.mark.parametrize("A", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [0.7, 1.0, 1.1, 1.3])
def test_only_the_clip_stops_a_gradient_and_only_on_the_side_that_the_advantage_pushes_to(
        ratio, A, name):
    logps = f64([[-1.0]]).requires_grad_()
    old_logps = f64([[-1.0 - math.log(ratio)]])
    loss = LOSSES[name](logps, old_logps, f64([A]), f64([[1.0]]))
    slope = torch.autograd.grad(loss.sum(), logps)[0].item()
    expected = expected_slope(name, ratio, A)
    close(slope, expected)
    assert (slope == 0) == (expected == 0)


# ---- GRPO, PPO, GSPO -------------------------------------------------------------------------

@pytest.mark.parametrize("loss_type", CLIPPING)
@pytest.mark.parametrize("has_token_advantages", [False, True])
@pytest.mark.parametrize("epsilon, epsilon_high", [
    (0.2, 0.2), (0.2, 0.28), (0.1, 0.4), (3e-4, 4e-4)])
def test_the_policy_loss_of_ppo_is_that_of_grpo_given_the_same_advantages(
        epsilon, epsilon_high, has_token_advantages, loss_type):
    policy = Policy(RAGGED)
    A = policy.A[:, None] * FACTORS if has_token_advantages else policy.A
    clip = {"epsilon": epsilon, "epsilon_high": epsilon_high}
    assert_same_loss_and_gradient(
        policy,
        functools.partial(ppo.policy_loss, **clip),
        functools.partial(grpo.policy_loss, loss_type=loss_type, **clip), A)


def test_the_clip_range_is_the_same_in_every_script_if_none_is_given():
    assert_same_loss_and_gradient(Policy(RAGGED), ppo.policy_loss, grpo.policy_loss)
    one_token_each = Policy(torch.ones(8, 1).double())
    assert_same_loss_and_gradient(one_token_each, grpo.policy_loss, gspo.policy_loss)


@every_level
@every_loss_type
@pytest.mark.parametrize("clip", [{}, {"epsilon": 0.1, "epsilon_high": 0.4}])
@pytest.mark.parametrize("T", [1, 3])
def test_gspo_is_grpo_on_completions_of_one_token(T, clip, loss_type, level):
    mask = torch.zeros(8, T).double()
    mask[range(8), torch.arange(8) % T] = 1             # wherever it stands
    assert_same_loss_and_gradient(
        Policy(mask),
        functools.partial(grpo.policy_loss, loss_type=loss_type, **clip),
        functools.partial(gspo.policy_loss, loss_type=loss_type, level=level, **clip))


@every_average
@every_loss_type
@pytest.mark.parametrize("spread, is_same", [(0.0, True), (0.3, False)])
def test_gspo_is_grpo_when_all_tokens_of_an_answer_have_the_same_ratio_and_not_else(
        spread, is_same, loss_type, how):
    policy = Policy(RAGGED)
    row_log_ratios = f64([[0.1], [-0.15], [0.3], [-0.4]])
    log_ratios = row_log_ratios - spread * f64([[1, 0, -1, 0, 0]])
    policy.old_logps = policy.logps().detach() - log_ratios
    gradients = []
    for script in (grpo, gspo):
        token_loss = script.policy_loss(
            policy.logps(), policy.old_logps, policy.A, policy.mask, loss_type)
        gradients.append(policy.gradient(script.aggregate(token_loss, policy.mask, how)))
    assert torch.allclose(*gradients, atol=1e-12) == is_same


@every_loss_type
@pytest.mark.parametrize("is_constant", [True, False])
def test_gspo_token_is_gspo_while_the_advantage_is_constant_over_an_answer_and_else_is_not(
        is_constant, loss_type):
    policy = Policy(RAGGED)
    A = policy.A[:, None] * (torch.ones_like(FACTORS) if is_constant else FACTORS)
    losses = []
    gradients = []
    for level in LEVELS:
        token_loss = gspo.policy_loss(
            policy.logps(), policy.old_logps, A, policy.mask, loss_type, level=level)
        loss = gspo.aggregate(token_loss, policy.mask, "sequence_mean")
        losses.append(loss.detach())
        gradients.append(policy.gradient(loss))
    close(*losses)                                      # the value is the same either way
    is_same = is_constant or loss_type == "cispo"       # whose ratio has no gradient
    assert torch.allclose(*gradients, atol=1e-12) == is_same


def average_of(script, policy, loss_type):
    """The loss of a loss type with its own average, for completions of at most 20 tokens."""
    token_loss = script.policy_loss(
        policy.logps(), policy.old_logps, policy.A, policy.mask, loss_type)
    _, how = script.LOSS_TYPES[loss_type]
    return script.aggregate(token_loss, policy.mask, how, max_length=20)


@both_of_groups
@pytest.mark.parametrize("loss_type, factor", [("bnpo", 1), ("dapo", 1), ("dr_grpo", 4)])
def test_grpo_bnpo_dapo_and_dr_grpo_up_to_a_constant_are_one_when_all_rows_are_full(
        script, loss_type, factor):
    policy = Policy(torch.ones(4, 5).double())          # 5 of 20 tokens
    expected = average_of(script, policy, "grpo")
    found = factor * average_of(script, policy, loss_type)
    close(found.detach(), expected.detach())
    close(policy.gradient(found), policy.gradient(expected))


def test_on_rows_of_unequal_length_dapo_is_dr_grpo_up_to_a_constant_and_grpo_is_another():
    policy = Policy(RAGGED)
    gradients = {}
    for loss_type in ("grpo", "dapo", "dr_grpo"):
        gradients[loss_type] = policy.gradient(average_of(grpo, policy, loss_type))
    close(gradients["dapo"] * RAGGED.sum() / (4 * 20), gradients["dr_grpo"])
    direction_of_grpo = gradients["grpo"] / gradients["grpo"].norm()
    direction_of_dapo = gradients["dapo"] / gradients["dapo"].norm()
    assert (direction_of_grpo - direction_of_dapo).norm() > 0.01


def test_the_penalty_of_trpo_is_the_k3_of_the_old_policy_from_the_new():
    policy = Policy(RAGGED)
    penalty = ppo.penalty_loss(
        policy.logps(), policy.old_logps, 0 * policy.A, policy.mask, 1.0)
    close(penalty, grpo.kl(policy.old_logps, policy.logps(), "k3") * policy.mask)


# ---- baselines and critics -------------------------------------------------------------------

def some_rewards():
    """(5, 4)"""
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).double()


def test_leave_one_out_is_grpo_without_the_std_times_a_constant():
    rewards = some_rewards()
    centred = grpo.advantages(rewards, "none")
    close(reinforce.advantages(rewards, "rloo"), 4 / 3 * centred)
    close(reinforce.advantages(rewards, "mean"), centred)
    close(reinforce.advantages(rewards, "mean"), gspo.advantages(rewards, "none"))


@both_of_groups
def test_grpo_divides_the_advantage_over_the_group_mean_by_the_std(script):
    rewards = some_rewards()
    centred = reinforce.advantages(rewards, "mean")
    std = rewards.std(dim=1, keepdim=True)
    close(script.advantages(rewards), centred / (std + 1e-4))
    close(script.advantages(rewards, eps=0.5), centred / (std + 0.5))
    close(script.advantages(rewards, "batch"), centred / (rewards.std() + 1e-4))


def test_with_one_question_the_batch_is_the_group():
    rewards = some_rewards()[:1]
    close(reinforce.advantages(rewards, "batch"), reinforce.advantages(rewards, "mean"))
    close(grpo.advantages(rewards, "batch"), grpo.advantages(rewards, "group"))


def optimal_advantages(rewards):
    """Those of the optimal baseline, for some squared lengths of the gradients."""
    return reinforce.advantages(rewards, "optimal", 1 + rewards.square())


def all_advantages():
    """Name -> advantages of rewards (P, G)."""
    found = {"optimal": optimal_advantages}
    for baseline in ("mean", "rloo"):
        found[baseline] = functools.partial(reinforce.advantages, baseline=baseline)
    for script in (grpo, gspo):
        for scale in ("group", "batch", "none"):
            found[f"{script.__name__}-{scale}"] = functools.partial(
                script.advantages, scale_rewards=scale)
    return found


@pytest.mark.parametrize("advantages", all_advantages().values(), ids=all_advantages())
def test_a_group_of_equal_rewards_gets_exactly_no_advantage_beside_one_that_gets_some(advantages):
    hundredths = torch.tensor([k / 100 for k in range(-101, 102)])      # in float32
    equal_groups = hundredths[:, None].expand(-1, 7)
    unequal_group = torch.arange(7.0)[None]
    A = advantages(torch.cat([equal_groups, unequal_group]))
    assert (A[:-1] == 0).all()
    assert A[-1].abs().sum() > 1


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("has_critic", [False, True])
def test_with_lambda_one_the_advantage_of_ppo_is_the_reward_to_go_of_reinforce_less_the_value(
        has_critic, gamma):
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 4, 5, generator=generator).double()
    if not has_critic:
        values = 0 * values
    to_go = reinforce.rewards_to_go(rewards, RAGGED, gamma)
    A, returns = ppo.gae(rewards, values, RAGGED, gamma, 1.0)
    close(A * RAGGED, (to_go - values) * RAGGED)
    close(returns * RAGGED, to_go * RAGGED)


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_a_critic_that_always_says_the_mean_of_the_other_answers_makes_of_ppo_leave_one_out(lam):
    verdicts = f64([[0, 1, 1, 0]])
    expected = reinforce.advantages(verdicts, "rloo")[0]                        # (4,)
    last = RAGGED.cumsum(dim=1).argmax(dim=1)                                   # (4,)
    rewards = torch.zeros(4, 5).double()
    rewards[range(4), last] = verdicts[0]
    values = (verdicts[0] - expected)[:, None].expand(4, 5)         # V = R - A, of every token
    A, _ = ppo.gae(rewards, values, RAGGED, 1.0, lam)
    close(A[range(4), last], expected)                  # at the end for every lambda,
    if lam == 1:
        close(A * RAGGED, expected[:, None] * RAGGED)   # and at every token if it is one


# ---- preferences -----------------------------------------------------------------------------

def test_where_the_policy_is_the_reference_dpo_is_reinforce_on_plus_and_minus_one():
    policy = Policy(RAGGED)
    beta = 0.1
    chosen, rejected = dpo.sequence_logps(policy.logps(), RAGGED).view(2, 2)    # of two pairs
    assert (chosen > rejected).tolist() == [True, False]        # the policy prefers one of them
    loss = dpo.dpo_loss(chosen, rejected, chosen.detach(), rejected.detach(), beta)
    close(loss.detach(), f64([math.log(2)] * 2))
    is_chosen = f64([[1, 0], [1, 0]])
    A = reinforce.advantages(is_chosen, "rloo")                 # 1 where chosen, -1 where rejected
    token_loss = reinforce.policy_loss(policy.logps(), A.T.reshape(4), RAGGED)
    close(policy.gradient(loss.sum()), beta / 2 * policy.gradient(token_loss.sum()))


def test_the_reward_that_dpo_implies_is_the_one_whose_kl_regularised_optimum_the_policy_is():
    generator = torch.Generator().manual_seed(0)
    ref_logps, logps = torch.randn(2, 5, generator=generator).double().log_softmax(dim=1)
    beta = 0.3
    implied_rewards = beta * (logps - ref_logps)                                # (5,)
    close((ref_logps + implied_rewards / beta).log_softmax(dim=0), logps)       # the optimum
    penalty = beta * reinforce.kl(logps[None], ref_logps[None], "k1")[0]
    close(implied_rewards - penalty, torch.zeros(5).double())   # all answers are worth the same

    # the loss is that of the Bradley-Terry model on these rewards
    chosen, rejected = torch.cartesian_prod(torch.arange(5), torch.arange(5)).T
    loss = dpo.dpo_loss(
        logps[chosen], logps[rejected], ref_logps[chosen], ref_logps[rejected], beta)
    difference = implied_rewards[chosen] - implied_rewards[rejected]
    close((-loss).exp(), difference.sigmoid())


# ---- averages, and how they add up over the micro-batches of a step --------------------------

@every_script
@pytest.mark.parametrize("how, value", [
    ("sequence_mean", 1.5),
    ("token_mean", 1.75),
    ("sequence_sum", 3.5),
    ("constant", 0.875)])
def test_the_four_averages_of_a_short_and_a_long_row(script, how, value):
    x = f64([[1, 99, 99], [2, 2, 2]])
    mask = f64([[1, 0, 0], [1, 1, 1]])
    close(script.aggregate(x, mask, how, max_length=4).item(), value)
    assert script.aggregate(x, 0 * mask, how, max_length=4).item() == 0
    one_token = script.aggregate(x[:1], mask[:1], how, max_length=1)
    close(one_token.item(), 1.0)

    # a row without tokens is a row
    x = torch.cat([x, f64([[99, 99, 99]])])
    mask = torch.cat([mask, f64([[0, 0, 0]])])
    if how != "token_mean":
        value = value * 2 / 3
    close(script.aggregate(x, mask, how, max_length=4).item(), value)


@every_script
def test_bnpo_weighs_the_mean_over_the_tokens_of_a_micro_batch_by_its_rows(script):
    x = torch.arange(20.0).view(4, 5).double()
    totals = []
    for parts in ([[0], [1, 2, 3]], [[0, 1], [2, 3]]):
        total = 0.0
        expected = 0.0
        for rows in parts:
            total += script.aggregate(x[rows], RAGGED[rows], "micro_batch_mean", 4)
            expected += len(rows) / 4 * x[rows][RAGGED[rows] > 0].mean()
        close(total, expected)
        totals.append(total)
    assert abs(totals[0] - totals[1]) > 0.1             # so it depends on the parts
    assert script.aggregate(x, 0 * RAGGED, "micro_batch_mean").item() == 0


def average_of_rows(policy, name, how, rows, **counts):
    """The average loss of some rows, in as many slots as the longest of them uses."""
    script = SCRIPTS[name.split("-")[0]]
    T = int(policy.mask[rows].nonzero()[:, 1].max()) + 1
    mask = policy.mask[rows, :T]
    token_loss = LOSSES[name](
        policy.logps()[rows, :T], policy.old_logps[rows, :T], policy.A[rows], mask)
    return script.aggregate(token_loss, mask, how, max_length=9, **counts)


@every_average
@every_loss
def test_the_micro_batches_of_a_step_add_up_to_its_gradient_however_it_is_divided(name, how):
    policy = Policy(RAGGED)
    whole = average_of_rows(policy, name, how, [0, 1, 2, 3])
    expected = policy.gradient(whole)
    counts = {"num_sequences": 4, "num_tokens": RAGGED.sum().item()}
    for division in (
            [[0], [1], [2], [3]],
            [[0, 1], [2, 3]],
            [[3, 1], [2], [0]],
            [[2], [0, 3, 1]],
            [[0, 1, 2, 3]]):
        parts = [average_of_rows(policy, name, how, rows, **counts) for rows in division]
        close(sum(parts).detach(), whole.detach())
        close(sum(policy.gradient(part) for part in parts), expected)


@every_script
@every_average
def test_without_the_counts_of_the_whole_step_every_part_is_averaged_by_itself(script, how):
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).double()
    whole = script.aggregate(x, RAGGED, how, max_length=9)
    total = 0.0
    for rows in ([0], [1, 2, 3]):
        total += script.aggregate(x[rows], RAGGED[rows], how, max_length=9)
    assert (total / 2 - whole).abs() > 1e-3


@every_script
@every_average
def test_the_default_counts_are_those_of_the_call(script, how):
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).double()
    assert RAGGED.sum() == 11
    given = script.aggregate(x, RAGGED, how, num_sequences=4, num_tokens=11.0, max_length=9)
    close(given, script.aggregate(x, RAGGED, how, max_length=9))


@every_loss
def test_masked_slots_never_reach_the_gradient_of_any_weight(name):
    policy = Policy(RAGGED)
    noise = (1 - RAGGED) * f64([[1, -1, 1, -1, 1]])             # in masked slots only
    gradients = []
    for size in (0, 1e30):
        logps = policy.logps() + size * noise
        old_logps = policy.old_logps - size * noise
        A = policy.A[:, None] + 1e-24 * size * noise
        token_loss = LOSSES[name](logps, old_logps, A, RAGGED)
        assert (token_loss[RAGGED == 0] == 0).all()
        gradients.append(policy.gradient(reinforce.aggregate(token_loss, RAGGED, "token_mean")))
    assert gradients[0].isfinite().all()
    assert torch.equal(gradients[0], gradients[1])


# ---- what others call ------------------------------------------------------------------------

EVERYWHERE = {
    "logprobs": "logits, tokens, temperature=1.0, kernel='auto'",
    "kl": "logps, ref_logps, estimator='k3', log_rho=None"}
AVERAGED = EVERYWHERE | {
    "aggregate": "x, mask, how, num_sequences=None, num_tokens=None, max_length=None"}
GROUPED = AVERAGED | {
    "advantages": "rewards, scale_rewards='group', eps=0.0001",
    "overlong_penalty": "lengths, max_length, buffer",
    "is_clipped": "log_rho, A, epsilon, epsilon_high",
    "importance_weights": "old_logps, sampler_logps, mask, correction='truncate', cap=2.0"}
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
