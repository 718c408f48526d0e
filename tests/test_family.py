"""What the algorithms have to do with each other: each test is a sentence that says when one is another.
Gradients are those of the weights of a small softmax policy."""
import functools
import inspect
import itertools
import math

import pytest
import torch

import dpo
import grpo
import gspo
import ppo
import reinforce

HOWS = ("sequence_mean", "token_mean", "sequence_sum", "constant")
LEVELS = ("sequence", "sequence_token")
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo")
LOSS_TYPES = (*CLIPPED, "cispo", "sapo")
close = functools.partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)

# Losses of logps, old_logps, advantages and mask.
LOSSES = {"reinforce": lambda logps, _, A, mask: reinforce.policy_loss(logps, A, mask),
          "ppo": ppo.policy_loss, "ppo-penalty": functools.partial(ppo.penalty_loss, beta=0.7)}
LOSSES |= {f"grpo-{name}": functools.partial(grpo.policy_loss, loss_type=name) for name in LOSS_TYPES}
LOSSES |= {f"gspo-{name}-{level}": functools.partial(gspo.policy_loss, loss_type=name, level=level)
           for name in LOSS_TYPES for level in LEVELS}
SCRIPTS = {"reinforce": reinforce, "ppo": ppo, "grpo": grpo, "gspo": gspo}     # those with an aggregate
every_script = pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
every_loss = pytest.mark.parametrize("name", LOSSES)
every_how = pytest.mark.parametrize("how", HOWS)


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


RAGGED = f64([[1, 0, 0, 0, 0], [1, 0, 1, 1, 0], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])      # with a hole in a row


class Policy:
    """Logits that are features of slot and token times weights, completions, and the log-probs of a policy
    some way off; `weights` come first in a gradient."""

    def __init__(self, mask, distance=0.3):
        draw = torch.Generator().manual_seed(0)
        B, T = mask.shape
        self.mask, self.A = mask, torch.randn(B, generator=draw).double()
        self.features = torch.randn(B, T, 6, 3, generator=draw).double()            # 6 tokens, 3 weights
        self.tokens = torch.randint(6, (B, T), generator=draw)
        self.weights = torch.randn(3, generator=draw).double().requires_grad_()
        noise = distance * torch.randn(B, T, generator=draw).double()
        self.old_logps = self.logps().detach() + noise

    def logps(self):
        return grpo.logprobs(self.features @ self.weights, self.tokens)[0]          # (B, T)

    def gradient(self, loss):
        return torch.autograd.grad(loss, self.weights)[0]


def assert_same_loss_and_gradient(policy, one, other, A=None):
    """That two losses agree in every slot, and so do their gradients in every slot and in the weights."""
    found = []
    for loss in (one, other):
        logps = policy.logps()
        terms = loss(logps, policy.old_logps, policy.A if A is None else A, policy.mask)
        found.append((terms.detach(), *torch.autograd.grad(terms.sum(), (logps, policy.weights))))
    assert found[0][0].any() and found[0][2].any()
    close(found[0], found[1])


# ---- REINFORCE is where they all begin ---------------------------------------------------------------------


@every_how
@every_loss
def test_the_gradient_is_that_of_reinforce_when_the_ratio_is_one(name, how):
    policy, gradients = Policy(RAGGED), []
    for loss in (LOSSES["reinforce"], LOSSES[name]):
        logps = policy.logps()
        terms = loss(logps, logps.detach(), policy.A, policy.mask)
        gradients.append(policy.gradient(reinforce.aggregate(terms, policy.mask, how, max_length=9)))
    assert gradients[0].abs().min() > 1e-3
    close(gradients[1], gradients[0])


@pytest.mark.parametrize("name", [name for name in LOSSES if not name.startswith("gspo") or "token" in name])
def test_so_it_is_with_an_advantage_per_token_unless_the_ratio_is_that_of_the_sequence(name):
    policy, gradients = Policy(RAGGED), []
    A = policy.A[:, None] * f64([[1, -2, 0.5, -1, 3]])
    for loss in (LOSSES["reinforce"], LOSSES[name]):
        logps = policy.logps()
        gradients.append(policy.gradient(loss(logps, logps.detach(), A, policy.mask).sum()))
    close(gradients[1], gradients[0])


@pytest.mark.parametrize("A", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [0.7, 1.0, 1.1, 1.3])
def test_only_the_clip_stops_a_gradient_and_only_on_the_side_that_pays(ratio, A):
    new, old, one = f64([[-1.0]]).requires_grad_(), f64([[-1.0 - math.log(ratio)]]), f64([[1.0]])
    out = ratio > 1.2 if A > 0 else ratio < 0.8
    for name, loss in LOSSES.items():
        slope = torch.autograd.grad(loss(new, old, f64([A]), one).sum(), new)[0].item()
        soft = any(word in name for word in ("reinforce", "penalty", "cispo", "sapo"))
        if "penalty" not in name:                           # which may pull back
            assert (slope * A < 0) == (soft or not out) and (slope == 0) == (out and not soft)
        if "reinforce" in name:
            close(slope, -A)
        elif "cispo" in name:
            close(slope, -A * min(ratio, 1.2))
        elif "penalty" in name:
            close(slope, -A * ratio + 0.7 * (ratio - 1))
        elif "sapo" in name:
            p = 1 / (1 + math.exp(-(1.0 if A > 0 else 1.05) * (ratio - 1)))
            close(slope, -A * 4 * p * (1 - p) * ratio)
        elif not out:
            close(slope, -A * ratio)


# ---- GRPO, PPO, GSPO ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilons", [(0.2, 0.2), (0.2, 0.28), (0.1, 0.4), (3e-4, 4e-4)])
@pytest.mark.parametrize("per_token", [False, True])
def test_the_policy_loss_of_ppo_is_that_of_grpo_given_the_same_advantages(epsilons, per_token):
    policy, (low, high) = Policy(RAGGED), epsilons
    A = policy.A[:, None] * f64([[1, -2, 0.5, -1, 3]]) if per_token else policy.A
    for loss_type in CLIPPED:
        assert_same_loss_and_gradient(
            policy, lambda *batch: ppo.policy_loss(*batch, epsilon=low, epsilon_high=high),
            lambda *batch, name=loss_type: grpo.policy_loss(*batch, name, epsilon=low, epsilon_high=high), A)


def test_the_clip_has_the_same_width_in_every_script_if_none_is_given():
    policy = Policy(RAGGED)
    assert_same_loss_and_gradient(policy, ppo.policy_loss, grpo.policy_loss)
    one_token = Policy(torch.ones(8, 1).double())
    assert_same_loss_and_gradient(one_token, grpo.policy_loss, gspo.policy_loss)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_gspo_is_grpo_on_completions_of_one_token(loss_type, level):
    first = torch.zeros(8, 3).double()
    first[torch.arange(8), torch.arange(8) % 3] = 1         # wherever it stands
    for mask in (torch.ones(8, 1).double(), first):
        for epsilons in ({}, {"epsilon": 0.1, "epsilon_high": 0.4}):
            assert_same_loss_and_gradient(
                Policy(mask), functools.partial(grpo.policy_loss, loss_type=loss_type, **epsilons),
                functools.partial(gspo.policy_loss, loss_type=loss_type, level=level, **epsilons))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_gspo_is_grpo_when_all_tokens_of_an_answer_have_the_same_ratio_and_not_else(loss_type):
    policy = Policy(RAGGED)
    policy.old_logps = policy.logps().detach() - f64([[0.1], [-0.15], [0.3], [-0.4]])
    for how, spread in itertools.product(HOWS, (0.0, 0.3)):
        gradients, old_logps = [], policy.old_logps + spread * f64([[1, 0, -1, 0, 0]])
        for script in (grpo, gspo):
            loss = script.policy_loss(policy.logps(), old_logps, policy.A, policy.mask, loss_type)
            gradients.append(policy.gradient(script.aggregate(loss, policy.mask, how)))
        assert torch.allclose(*gradients, atol=1e-12) == (spread == 0)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_gspo_by_token_is_gspo_while_the_advantage_is_constant_over_an_answer_and_else_is_not(loss_type):
    policy = Policy(RAGGED)
    for constant in (True, False):
        A = policy.A[:, None] * (f64([[1, 1, 1, 1, 1]]) if constant else f64([[1, -2, 0.5, -1, 3]]))
        values, gradients = [], []
        for level in LEVELS:
            terms = gspo.policy_loss(policy.logps(), policy.old_logps, A, policy.mask, loss_type, level=level)
            loss = gspo.aggregate(terms, policy.mask, "sequence_mean")
            values.append(loss.detach())
            gradients.append(policy.gradient(loss))
        close(*values)                                      # the value is the same either way
        same = constant or loss_type == "cispo"             # whose ratio has no gradient
        assert torch.allclose(*gradients, atol=1e-12) == same


@pytest.mark.parametrize("script", (grpo, gspo), ids=lambda script: script.__name__)
def test_grpo_bnpo_dapo_and_up_to_its_constant_dr_grpo_are_one_when_all_rows_are_full(script):
    policy, results = Policy(torch.ones(4, 5).double()), {}
    for loss_type in CLIPPED:
        loss = script.policy_loss(policy.logps(), policy.old_logps, policy.A, policy.mask, loss_type)
        averaging = script.LOSS_TYPES[loss_type][1]
        value = script.aggregate(loss, policy.mask, averaging, max_length=20)       # of which they use 5
        results[loss_type] = (value.detach(), policy.gradient(value))
    for loss_type in ("bnpo", "dapo"):
        close(results[loss_type], results["grpo"])
    close([4 * x for x in results["dr_grpo"]], list(results["grpo"]))


def test_on_rows_of_unequal_length_dapo_is_dr_grpo_but_for_the_length_of_the_step_and_grpo_is_another():
    policy, gradients = Policy(RAGGED), {}
    for loss_type in ("grpo", "dapo", "dr_grpo"):
        loss = grpo.policy_loss(policy.logps(), policy.old_logps, policy.A, policy.mask, loss_type)
        averaging = grpo.LOSS_TYPES[loss_type][1]
        gradients[loss_type] = policy.gradient(grpo.aggregate(loss, policy.mask, averaging, max_length=20))
    close(gradients["dapo"] * RAGGED.sum() / (4 * 20), gradients["dr_grpo"])
    directions = [gradients[loss_type] / gradients[loss_type].norm() for loss_type in ("grpo", "dapo")]
    assert (directions[0] - directions[1]).norm() > 0.01


def test_the_penalty_of_trpo_is_the_k3_of_the_old_policy_from_the_new():
    policy = Policy(RAGGED)
    penalty = ppo.penalty_loss(policy.logps(), policy.old_logps, 0 * policy.A, policy.mask, 1.0)
    close(penalty, grpo.kl(policy.old_logps, policy.logps(), "k3") * policy.mask)


# ---- baselines and critics ---------------------------------------------------------------------------------


def some_rewards():
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).double()


def test_leave_one_out_is_grpo_without_the_standard_deviation_stretched():
    centred = grpo.advantages(some_rewards(), "none")
    close(reinforce.advantages(some_rewards(), "rloo"), 4 / 3 * centred)
    close(reinforce.advantages(some_rewards(), "mean"), centred)
    close(reinforce.advantages(some_rewards(), "mean"), gspo.advantages(some_rewards(), "none"))


def test_grpo_divides_the_advantage_over_the_group_mean_by_the_spread():
    rewards = some_rewards()
    centred = reinforce.advantages(rewards, "mean")
    for script in (grpo, gspo):
        close(script.advantages(rewards), centred / (rewards.std(1, keepdim=True) + 1e-4))
        close(script.advantages(rewards, "batch"), centred / (rewards.std() + 1e-4))
        close(script.advantages(rewards, eps=0.5), centred / (rewards.std(1, keepdim=True) + 0.5))


def test_with_one_question_the_batch_is_the_group():
    rewards = some_rewards()[:1]
    close(reinforce.advantages(rewards, "batch"), reinforce.advantages(rewards, "mean"))
    close(grpo.advantages(rewards, "batch"), grpo.advantages(rewards, "group"))


@pytest.mark.parametrize("advantages", [
    *(functools.partial(script.advantages, scale_rewards=scale)
      for script in (grpo, gspo) for scale in ("group", "batch", "none")),
    *(functools.partial(reinforce.advantages, baseline=baseline) for baseline in ("mean", "rloo")),
    lambda rewards: reinforce.advantages(rewards, "optimal", 1 + rewards.square())],
    ids=[*(f"{script}-{scale}" for script in ("grpo", "gspo") for scale in ("group", "batch", "none")),
         "mean", "rloo", "optimal"])
def test_a_group_of_equal_rewards_gets_exactly_no_advantage_beside_one_that_gets_some(advantages):
    equal = torch.tensor([k / 100 for k in range(-101, 102)])[:, None].expand(-1, 7)    # in float32
    A = advantages(torch.cat([equal, torch.arange(7.0)[None]]))
    assert (A[:-1] == 0).all() and A[-1].abs().sum() > 1


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_with_lambda_one_the_advantage_of_ppo_is_the_reward_to_go_of_reinforce_less_the_value(gamma):
    rewards, values = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0)).double()
    to_go = reinforce.rewards_to_go(rewards, RAGGED, gamma)
    for V in (0 * values, values):
        A, returns = ppo.gae(rewards, V, RAGGED, gamma, 1.0)
        close(A * RAGGED, (to_go - V) * RAGGED)
        close(returns * RAGGED, to_go * RAGGED)


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_a_critic_that_always_says_the_mean_of_the_other_answers_makes_of_ppo_leave_one_out(lam):
    verdicts = f64([[0, 1, 1, 0]])
    A = reinforce.advantages(verdicts, "rloo")              # (1, 4)
    rewards, last = torch.zeros(4, 5).double(), RAGGED.cumsum(1).argmax(1)
    rewards[range(4), last] = verdicts[0]
    values = (verdicts - A).T.expand(4, 5)                  # V = R - A, of every token
    found, _ = ppo.gae(rewards, values, RAGGED, 1.0, lam)
    close(found[range(4), last], A[0])                      # at the end for any lambda,
    if lam == 1:
        close(found * RAGGED, A.T * RAGGED)                 # and with one all the way


# ---- preferences -------------------------------------------------------------------------------------------


def test_where_the_policy_is_the_reference_dpo_is_reinforce_on_plus_and_minus_one():
    policy, beta = Policy(RAGGED), 0.1
    chosen, rejected = dpo.sequence_logps(policy.logps(), RAGGED).view(2, 2)            # of two pairs
    assert (chosen > rejected).tolist() == [True, False]    # it likes one of them the way round that it is
    loss = dpo.dpo_loss(chosen, rejected, chosen.detach(), rejected.detach(), beta)
    close(loss.detach(), f64([math.log(2)] * 2))
    wins = reinforce.advantages(f64([[1, 0], [1, 0]]), "rloo")              # 1 and -1: chosen, rejected
    terms = reinforce.policy_loss(policy.logps(), wins.T.reshape(4), RAGGED)
    close(policy.gradient(loss.sum()), beta / 2 * policy.gradient(terms.sum()))


def test_the_reward_that_dpo_implies_is_the_one_whose_kl_regularised_optimum_the_policy_is():
    draw = torch.Generator().manual_seed(0)
    ref, pi = torch.randn(2, 5, generator=draw).double().log_softmax(1)
    beta, h = 0.3, pi - ref
    optimum = (ref + beta * h / beta).log_softmax(0)        # ref exp(R / beta) / Z with R = beta h
    close(optimum, pi)
    pairs = torch.cartesian_prod(torch.arange(5), torch.arange(5)).T
    loss = dpo.dpo_loss(*(pi[side] for side in pairs), *(ref[side] for side in pairs), beta)
    close((-loss).exp(), (beta * h[pairs[0]] - beta * h[pairs[1]]).sigmoid())       # Bradley-Terry on R
    net = beta * h - beta * reinforce.kl(pi[None], ref[None], "k1")[0]             # reward less penalty
    close(net, torch.zeros(5).double())


# ---- averaging, and cutting a step into pieces -------------------------------------------------------------


@every_script
@pytest.mark.parametrize("how, value", [("sequence_mean", 1.5), ("token_mean", 1.75), ("sequence_sum", 3.5),
                                        ("constant", 0.875)])
def test_the_four_averages_of_a_short_and_a_long_row(script, how, value):
    x, mask = f64([[1, 99, 99], [2, 2, 2]]), f64([[1, 0, 0], [1, 1, 1]])
    close(script.aggregate(x, mask, how, max_length=4).item(), value)
    empty = torch.zeros(1, 3).double()                      # a row without tokens is a row
    more = script.aggregate(torch.cat([x, 99 + empty]), torch.cat([mask, empty]), how, max_length=4).item()
    close(more, value if how == "token_mean" else value * 2 / 3)
    assert script.aggregate(x, 0 * mask, how, max_length=4).item() == 0
    close(script.aggregate(x[:1], mask[:1], how, max_length=1).item(), 1.0)         # a single token


@every_script
def test_bnpo_weighs_the_pooled_mean_of_each_piece_by_its_rows_so_that_the_cut_counts(script):
    x, means = torch.arange(20.0).view(4, 5).double(), []
    for cut in ([[0], [1, 2, 3]], [[0, 1], [2, 3]]):
        pieces = [script.aggregate(x[rows], RAGGED[rows], "micro_batch_mean", 4) for rows in cut]
        close(sum(pieces), sum(len(rows) / 4 * x[rows][RAGGED[rows] > 0].mean() for rows in cut))
        means.append(sum(pieces))
    assert abs(means[0] - means[1]) > 0.1
    assert script.aggregate(x, 0 * RAGGED, "micro_batch_mean").item() == 0


CUTS = ([[0], [1], [2], [3]], [[0, 1], [2, 3]], [[3, 1], [2], [0]], [[2], [0, 3, 1]], [[0, 1, 2, 3]])


@every_how
@every_loss
def test_cutting_a_step_into_pieces_never_changes_its_gradient(name, how):
    policy, script = Policy(RAGGED), SCRIPTS[name.split("-")[0]]
    counts = {"num_sequences": 4, "num_tokens": policy.mask.sum().item(), "max_length": 9}

    def average(rows, **counts):
        T = int(max(policy.mask[rows].nonzero()[:, 1])) + 1                 # cut to the longest row, too
        logps, old_logps, mask = (x[rows, :T] for x in (policy.logps(), policy.old_logps, policy.mask))
        return script.aggregate(LOSSES[name](logps, old_logps, policy.A[rows], mask), mask, how, **counts)

    whole = average([0, 1, 2, 3], max_length=9)
    value, gradient = whole.detach(), policy.gradient(whole)
    for cut in CUTS:
        pieces = [average(rows, **counts) for rows in cut]
        close(sum(pieces).detach(), value)
        close(sum(policy.gradient(piece) for piece in pieces), gradient)


@every_script
@every_how
def test_without_the_counts_of_the_whole_step_every_piece_is_averaged_for_itself(script, how):
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).double()
    pieces = [script.aggregate(x[rows], RAGGED[rows], how, max_length=9) for rows in ([0], [1, 2, 3])]
    assert (sum(pieces) / 2 - script.aggregate(x, RAGGED, how, max_length=9)).abs() > 1e-3
    counts = {"num_sequences": 4, "num_tokens": 11.0, "max_length": 9}
    assert RAGGED.sum() == 11
    close(script.aggregate(x, RAGGED, how, **counts), script.aggregate(x, RAGGED, how, max_length=9))


@every_loss
def test_masked_slots_never_leak_into_the_gradient_of_any_weight(name):
    policy, gradients = Policy(RAGGED), []
    off = (1 - RAGGED) * f64([[1, -1, 1, -1, 1]])
    for wild in (0, 1e30):
        batch = (policy.logps() + wild * off, policy.old_logps - wild * off,
                 policy.A[:, None] + 1e-24 * wild * off, RAGGED)
        loss = LOSSES[name](*batch)
        assert (loss[RAGGED == 0] == 0).all()
        gradients.append(policy.gradient(reinforce.aggregate(loss, RAGGED, "token_mean")))
    assert gradients[0].isfinite().all()
    close(gradients[1], gradients[0], atol=0, rtol=0)


# ---- what others call --------------------------------------------------------------------------------------

EVERYWHERE = {"logprobs": "logits, tokens, temperature=1.0, kernel='auto'",
              "kl": "logps, ref_logps, estimator='k3'"}
AVERAGED = EVERYWHERE | {"aggregate": "x, mask, how, num_sequences=None, num_tokens=None, max_length=None"}
GROUPED = AVERAGED | {"advantages": "rewards, scale_rewards='group', eps=0.0001",
                      "overlong_penalty": "lengths, max_length, buffer"}
OLD, CLIP = "logps, old_logps, advantages, mask", "epsilon=0.2, epsilon_high=0.2"
CALLED = {
    "reinforce": AVERAGED | {
        "advantages": "rewards, baseline='none', sq_grad_norms=None",
        "policy_loss": "logps, advantages, mask",
        "optimal_baseline": "rewards, sq_grad_norms, weights", "rewards_to_go": "rewards, mask, gamma"},
    "ppo": AVERAGED | {
        "gae": "rewards, values, mask, gamma, lam", "whiten": "x, mask", "policy_loss": f"{OLD}, {CLIP}",
        "length_adaptive_lambda": "lengths, alpha", "penalty_loss": f"{OLD}, beta",
        "value_loss": "values, old_values, returns, mask, cliprange_value"},
    "grpo": GROUPED | {
        "log_ratio": "logps, old_logps, mask", "policy_loss": f"{OLD}, loss_type='grpo', {CLIP}"},
    "gspo": GROUPED | {
        "log_ratio": "logps, old_logps, mask, level='sequence'",
        "policy_loss": f"{OLD}, loss_type='grpo', {CLIP}, level='sequence'"},
    "dpo": EVERYWHERE | {
        "sequence_logps": "logps, mask",
        "dpo_loss": "chosen, rejected, ref_chosen, ref_rejected, beta"
                    ", loss_type='sigmoid', label_smoothing=0.0"}}


@pytest.mark.parametrize("name", CALLED)
def test_functions_that_are_called_from_outside_keep_their_names_arguments_and_defaults(name):
    script = (SCRIPTS | {"dpo": dpo})[name]
    assert {f: str(inspect.signature(getattr(script, f)))[1:-1] for f in CALLED[name]} == CALLED[name]
