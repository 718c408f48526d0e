"""reinforce.py: what a baseline, a discount, the rewards to come and a teacher do to the gradient,
worked out by hand or over everything that a small policy can do."""
import functools
import itertools
import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import f64

import common
import reinforce

pytestmark = pytest.mark.quick

BASELINES = ("none", "batch", "mean", "rloo", "optimal")
OF_THE_GROUP = ("mean", "rloo", "optimal")
close = functools.partial(torch.testing.assert_close, atol=1e-11, rtol=1e-11)
golden = functools.partial(torch.testing.assert_close, atol=6e-8, rtol=0)   # written with 7 digits

# A policy of three actions whose logits are log pi: the gradient of log pi(a) in the logits is row
# a of SCORES.
PI = f64([0.5, 0.3, 0.2])
SCORES = torch.eye(3).double() - PI
SQ_NORMS = SCORES.square().sum(dim=1)
REWARDS = f64([1.0, 0, 0])


def gradient(loss, theta):
    """The gradient of a loss, whose graph is kept."""
    return torch.autograd.grad(loss, theta, retain_graph=True)[0]


def random_tensors(*shape, count):
    """So many tensors of this shape, always the same."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).double() for _ in range(count)]


def total_variance(samples, weights):
    """The summed variances of the components of vectors. (N, D), (N,) -> scalar"""
    mean = weights @ samples
    return weights @ (samples - mean).square().sum(dim=1)


def ones(*shape):
    return torch.ones(shape, dtype=torch.float64)


# ---- the score function ----------------------------------------------------------------------

def test_the_loss_is_minus_the_log_prob_times_the_advantage_of_the_row_or_of_the_token():
    logps = f64([[-1, -2], [-3, -4]]).requires_grad_()
    mask = f64([[1, 1], [1, 0]])
    loss = reinforce.policy_loss(logps, f64([2.0, -1.0]), mask)
    close(loss.detach(), f64([[2, 4], [-3, 0]]))
    close(gradient(loss.sum(), logps), f64([[-2, -2], [1, 0]]))
    by_token = reinforce.policy_loss(logps, f64([[2.0, 5.0], [-1.0, 7.0]]), mask)
    close(by_token.detach(), f64([[2, 10], [-3, 0]]))


@pytest.mark.parametrize("A, sign", [(4.0, -1), (-4.0, 1)])
def test_a_good_action_is_made_likelier_and_a_bad_one_less_likely(A, sign):
    theta = f64([1.0, 0.0]).requires_grad_()
    logps = theta.log_softmax(dim=0)[:1, None]                  # of the first of two actions
    golden(logps.exp().item(), 0.7310586)
    loss = reinforce.policy_loss(logps, f64([A]), ones(1, 1))
    golden(gradient(loss.sum(), theta), sign * f64([1.0757657, -1.0757657]))


def test_the_gradient_of_the_expected_reward_is_the_expected_gradient_of_the_loss():
    theta = PI.log().requires_grad_()
    rewards = f64([1.0, -0.5, 2.0])
    logps = theta.log_softmax(dim=0)[:, None]                   # every action has a row
    loss = reinforce.policy_loss(logps, rewards, ones(3, 1))[:, 0]
    close(gradient(PI @ loss, theta), -gradient(theta.softmax(dim=0) @ rewards, theta))


@pytest.mark.parametrize("A", [f64([2.0, 3.0]), f64([[2, 1e6, 2], [1e6, 1e6, 1e6]])])
def test_masked_slots_contribute_nothing_even_if_they_hold_wild_values(A):
    mask = f64([[1, 0, 1], [0, 0, 0]])
    wild = f64([[0, 1e30, 0], [-1e30, 1e4, -1e4]])
    logps = torch.where(mask == 1, -0.5, wild).requires_grad_()
    loss = reinforce.policy_loss(logps, A, mask)
    close(loss.detach(), mask, atol=0, rtol=0)
    close(gradient(loss.sum(), logps), -2 * mask, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_shapes_and_types_are_kept_and_no_argument_is_changed(dtype):
    rewards, weights, logps = (x.to(dtype) for x in random_tensors(2, 3, count=3))
    weights = weights.square()
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]]).to(dtype)
    arguments = (rewards, weights, logps, mask)
    before = [x.clone() for x in arguments]
    results = [reinforce.advantages(rewards, baseline, weights) for baseline in BASELINES]
    results.append(reinforce.policy_loss(logps, rewards, mask))
    results.append(reinforce.policy_loss(logps, rewards[:, 0], mask))
    results.append(reinforce.rewards_to_go(rewards, mask, 0.9))
    assert {(x.shape, x.dtype) for x in results} == {((2, 3), dtype)}
    b = reinforce.optimal_baseline(rewards[0], weights[0], weights[1])
    assert (b.shape, b.dtype) == ((), dtype)
    assert all(torch.equal(x, y) for x, y in zip(arguments, before))


# ---- baselines -------------------------------------------------------------------------------

@pytest.mark.parametrize("baseline, expected", [
    ("none", [[0, 0, 1, 0], [1, 1, 1, 1]]),
    ("batch", [[-5 / 8, -5 / 8, 3 / 8, -5 / 8], [3 / 8] * 4]),
    ("mean", [[-1 / 4, -1 / 4, 3 / 4, -1 / 4], [0] * 4]),
    ("rloo", [[-1 / 3, -1 / 3, 1, -1 / 3], [0] * 4])])
def test_advantages_of_one_right_answer_in_four_and_of_four(baseline, expected):
    rewards = f64([[0, 0, 1, 0], [1, 1, 1, 1]])
    close(reinforce.advantages(rewards, baseline), f64(expected))
    close(reinforce.advantages(rewards), rewards)


def test_the_optimal_baseline_of_a_sample_weighs_the_others_by_their_squared_gradients():
    rewards, weights = random_tensors(3, 4, count=2)
    weights = weights.square()
    A = reinforce.advantages(rewards, "optimal", weights)
    for p, g in itertools.product(range(3), range(4)):
        others = [h for h in range(4) if h != g]
        weighted = sum(weights[p, h] * rewards[p, h] for h in others)
        b = weighted / sum(weights[p, h] for h in others)
        close(A[p, g], rewards[p, g] - b)
    close(reinforce.advantages(rewards, "optimal", 1e-3 * weights), A)      # only ratios count
    for equal in (ones(3, 4), 0 * weights):
        close(reinforce.advantages(rewards, "optimal", equal),
              reinforce.advantages(rewards, "rloo"))


def test_a_gradient_that_dwarfs_the_others_is_judged_by_the_proportions_of_the_others():
    rewards = torch.tensor([[5.0, 1.0, 2.0]])
    weights = torch.tensor([[1e8, 1.0, 3.0]])                   # a float32 has no place for both
    A = reinforce.advantages(rewards, "optimal", weights)
    torch.testing.assert_close(A, torch.tensor([[5 - 1.75, 1 - 5, 2 - 5]]))


@pytest.mark.parametrize("baseline", OF_THE_GROUP)
@pytest.mark.parametrize("G", [2, 3, 7, 8])
def test_a_group_of_equal_rewards_gets_exactly_no_advantage(G, baseline):
    hundredths = [k / 100 for k in range(-200, 1001)]
    values = torch.tensor([0.07, 1 / 3, *hundredths])           # float32: means are rounded
    rewards = values[:, None].expand(-1, G)
    weights = torch.rand(rewards.shape, generator=torch.Generator().manual_seed(G))
    assert (reinforce.advantages(rewards, baseline, weights) == 0).all()
    assert (reinforce.advantages(rewards, baseline, 0 * weights) == 0).all()


def all_batches(P, G):
    """All batches of P groups of G actions, and their probabilities. -> (N, P, G), (N,)"""
    batches = torch.tensor(list(itertools.product(range(3), repeat=P * G))).view(-1, P, G)
    return batches, PI[batches].flatten(1).prod(dim=1)


@pytest.mark.parametrize("baseline, share", [
    ("none", 1), ("batch", 5 / 6), ("mean", 2 / 3), ("rloo", 1), ("optimal", 1)])
def test_a_baseline_keeps_the_expected_gradient_but_for_the_share_of_the_own_reward(
        baseline, share):
    batches, chances = all_batches(2 if baseline == "batch" else 1, 3)
    rewards = f64([1.0, -0.5, 2.0])
    A = torch.stack([
        reinforce.advantages(rewards[batch], baseline, SQ_NORMS[batch]) for batch in batches])
    theta = PI.log().requires_grad_()
    rows = batches.view(-1, 1)                                  # each completion is one token
    loss = reinforce.policy_loss(theta.log_softmax(dim=0)[rows], A.view(-1), ones(*rows.shape))
    batch_losses = loss.view(len(batches), -1).mean(dim=1)
    exact = gradient(theta.softmax(dim=0) @ rewards, theta)
    close(gradient(chances @ batch_losses, theta), -share * exact)


@pytest.mark.parametrize("baseline", BASELINES[1:])
def test_with_a_baseline_a_constant_added_to_all_rewards_changes_nothing(baseline):
    rewards, weights = random_tensors(3, 4, count=2)
    A = reinforce.advantages(rewards, baseline, weights.square())
    close(reinforce.advantages(rewards + 8, baseline, weights.square()), A)


def test_the_optimal_baseline_is_the_mean_reward_and_a_covariance():
    b = reinforce.optimal_baseline(REWARDS, SQ_NORMS, PI)
    golden(b.item(), 0.3064516)
    value = PI @ REWARDS
    mean_norm = PI @ SQ_NORMS
    close(b, value + (PI @ (REWARDS * SQ_NORMS) - value * mean_norm) / mean_norm)
    close(reinforce.optimal_baseline(REWARDS + 7, 9 * SQ_NORMS, 4 * PI), b + 7)
    rows = torch.stack([REWARDS, REWARDS + 1])
    close(reinforce.optimal_baseline(rows, SQ_NORMS, PI), torch.stack([b, b + 1]))


def test_no_other_constant_has_less_variance_than_the_optimal_baseline():
    def variance_with(b):
        return total_variance((REWARDS - b)[:, None] * SCORES, PI).item()
    best = reinforce.optimal_baseline(REWARDS, SQ_NORMS, PI).item()
    close(variance_with(0), 0.095)
    close(variance_with((PI @ REWARDS).item()), 0.06)
    golden(variance_with(best), 0.0367742)
    for b in torch.linspace(-1, 2, 301).tolist():
        assert variance_with(b) > variance_with(best)


def test_leave_one_out_is_not_the_baseline_of_least_variance():
    groups, chances = all_batches(1, 4)
    groups = groups[:, 0]                                       # (81, 4)

    def variance_of_the_mean(A):
        means = (A[..., None] * SCORES[groups]).mean(dim=1)     # (81, 3) the gradient of each group
        return total_variance(means, chances).item()
    least = variance_of_the_mean(
        REWARDS[groups] - reinforce.optimal_baseline(REWARDS, SQ_NORMS, PI))
    golden(least, 0.0367742 / 4)
    assert variance_of_the_mean(reinforce.advantages(REWARDS[groups], "rloo")) > 1.5 * least


# ---- rewards before the end ------------------------------------------------------------------

def test_the_reward_to_go_of_a_walk_in_the_grid_world():
    rewards = f64([[-1, -1, -1, 5]])
    to_go = reinforce.rewards_to_go(rewards, ones(1, 4), 1.0)
    close(to_go, f64([[2, 3, 4, 5]]))
    close(reinforce.rewards_to_go(rewards, ones(1, 4), 0.9), f64([[0.935, 2.15, 3.5, 5]]))
    close(reinforce.rewards_to_go(rewards, ones(1, 4), 0.0), rewards)
    loss = reinforce.policy_loss(f64([[0.4, 0.3, 0.5, 0.7]]).log(), to_go, ones(1, 4))
    torch.testing.assert_close(loss.sum().item(), 10.000463, atol=6e-7, rtol=0)


@pytest.mark.parametrize("wild", [0.0, 1e30])
def test_masked_slots_inside_a_row_and_behind_it_are_no_steps(wild):
    [rewards] = random_tensors(3, 6, count=1)
    mask = f64([[1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 0, 0], [1, 0, 1, 1, 1, 0]])
    to_go = reinforce.rewards_to_go(torch.where(mask == 1, rewards, wild), mask, 0.9)
    for row, is_step in enumerate(mask == 1):
        alone = rewards[row, is_step][None]
        expected = reinforce.rewards_to_go(alone, torch.ones_like(alone), 0.9)
        close(to_go[row, is_step][None], expected)
        assert (to_go[row, ~is_step] == 0).all()


def walks():
    """Everything that a policy of two actions can do in three steps, with a reward for each move,
    which depends on all moves so far.
    -> theta, log-probs (8, 3), chances (8,), rewards (8, 3)"""
    theta, value = random_tensors(7, 2, count=2)                # a state is what was done before
    theta.requires_grad_()
    moves = torch.tensor(list(itertools.product(range(2), repeat=3)))       # (8, 3)
    first, second, _ = moves.unbind(dim=1)
    states = torch.stack([0 * first, 1 + first, 3 + 2 * first + second], dim=1)
    logps = theta.log_softmax(dim=1)[states, moves]
    return theta, logps, logps.detach().sum(dim=1).exp(), 1 + value[states, moves]


def test_rewards_of_the_past_may_be_left_out_without_bias_and_with_less_variance():
    theta, logps, chances, rewards = walks()
    exact = -gradient(logps.sum(dim=1).exp() @ rewards.sum(dim=1), theta)

    def variance_of(A):
        losses = reinforce.policy_loss(logps, A, ones(8, 3)).sum(dim=1)
        samples = torch.stack([gradient(loss, theta).flatten() for loss in losses])     # (8, 14)
        close(chances @ samples, exact.flatten())
        return total_variance(samples, chances).item()
    to_go = reinforce.rewards_to_go(rewards, ones(8, 3), 1.0)
    assert variance_of(to_go) < 0.9 * variance_of(rewards.sum(dim=1))


# ---- from a batch to its advantages ----------------------------------------------------------

HALF = math.log(2)              # log pi / pi_ref where the base finds a token half as likely
PRICE = 0.1 * HALF              # of such a token, with beta = 0.1
FLAGS = {"device": "cpu", "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16,
         "num_prompts": 1}


class Table(torch.nn.Module):
    """A policy whose logits are table[last token]."""

    def __init__(self, table):
        super().__init__()
        self.table = torch.nn.Parameter(table)
        self.embed = SimpleNamespace(weight=torch.eye(len(table)).to(table))

    def hidden(self, tokens, cache=None):
        return self.table[tokens]


def random_table(known=slice(None)):
    """A Table that says only the `known` tokens, and finds no two of them equally likely."""
    V = reinforce.VOCAB_SIZE
    table = torch.full((V, V), -900.0, dtype=torch.float64)
    table[:, known] = random_tensors(*table[:, known].shape, count=1)[0]
    return Table(table)


def made_batch(tokens, mask, logps, rewards):
    """A batch of given rows, in groups of as many as the rewards have columns."""
    tokens = torch.tensor(tokens)
    return common.Batch(
        tokens, mask, logps * mask, 0 * mask, mask.sum(dim=1).long(), mask[:, 0] == 0,
        prompts=torch.ones(len(tokens), 1, dtype=torch.long), texts=[""] * len(tokens),
        verdicts=rewards.flatten().tolist(), is_correct=rewards == 1, rewards=rewards)


@pytest.fixture
def four_answers():
    """four_answers(**flags) -> the advantages of four answers, of which the third is right. The
    base finds each token half as likely as the policy that sampled."""
    EOS, PAD = reinforce.EOS, reinforce.PAD
    reference = random_table()
    mask = f64([[1, 1, 1], [1, 0, 0], [1, 1, 1], [1, 1, 0]])
    batch = made_batch([[7, 8, EOS], [EOS, PAD, PAD], [5, 6, 7], [7, EOS, PAD]], mask, mask,
                       f64([[0, 0, 1, 0]]))
    logps, _ = reinforce.score(reference, batch.prompts, batch.tokens)
    batch.logps = (logps.detach() + HALF) * mask

    def advantages(rewards=None, **flags):
        batch.rewards = batch.rewards if rewards is None else f64(rewards)
        cfg = reinforce.Config(**(FLAGS | flags))
        task = common.load_task(cfg, reinforce.verify)
        r = reinforce.token_rewards(task, None, batch, cfg)
        A, metrics = reinforce.compute_advantages(reference, reference, batch, r, cfg)
        assert metrics["kl"] == pytest.approx(HALF)
        assert not A.requires_grad
        return A
    return advantages


@pytest.mark.parametrize("flags, expected", [
    ({}, [[0, 0, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0]]),
    ({"baseline": "rloo"},
     [[-1 / 3] * 3, [-1 / 3, 0, 0], [1, 1, 1], [-1 / 3, -1 / 3, 0]]),
    ({"view": "token", "gamma": 0.5}, [[0, 0, 0], [0, 0, 0], [0.25, 0.5, 1], [0, 0, 0]]),
    ({"gamma": 0.5}, [[0, 0, 0], [0, 0, 0], [0.25, 0.25, 0.25], [0, 0, 0]]),
    ({"view": "token", "gamma": 0.5, "baseline": "mean"},
     [[-1 / 16] * 3, [-1 / 16, 0, 0], [3 / 16, 7 / 16, 15 / 16], [-1 / 16, -1 / 16, 0]]),
    ({"beta": 0.1},
     [[-3 * PRICE] * 3, [-PRICE, 0, 0], [1 - 3 * PRICE] * 3, [-2 * PRICE] * 2 + [0]]),
    ({"beta": 0.1, "view": "token"},
     [[-3 * PRICE, -2 * PRICE, -PRICE], [-PRICE, 0, 0],
      [1 - 3 * PRICE, 1 - 2 * PRICE, 1 - PRICE], [-2 * PRICE, -PRICE, 0]]),
    ({"method": "rejection", "rewards": [[0.1, 0.0, 1.3, 1.0]]},
     [[0] * 3, [0] * 3, [4] * 3, [0] * 3])], ids=str)
def test_a_token_is_worth_what_comes_after_it_or_all_that_came_of_its_row(
        four_answers, flags, expected):
    close(four_answers(**flags), f64(expected))


@pytest.mark.parametrize("task", ["gridworld", "gridworld,arithmetic"])
def test_rejection_pays_a_right_row_even_where_a_task_pays_each_move(task):
    cfg = reinforce.Config(**(FLAGS | {"task": task, "method": "rejection", "num_prompts": 2}))
    moves = common.sample_problems(common.load_task(cfg, reinforce.verify), 9, 0)
    [problem] = [problem for problem in moves if problem.task == "gridworld"][:1]
    batch = made_batch([[7, 8]] * 4, ones(4, 2), ones(4, 2), f64([[1, 0], [0, 0]]))
    batch.problems = [problem] * 4
    batch.verdicts = [[-1.0, 5.0]] * 4
    r = reinforce.token_rewards(common.load_task(cfg, reinforce.verify), None, batch, cfg)
    close(r, f64([[0, 4], [0, 0], [0, 0], [0, 0]]))


def tiny_policy(flags, **changes):
    """A policy in float64, a task and flags."""
    cfg = reinforce.Config(**(FLAGS | {"num_prompts": 4, "num_generations": 3, "temperature": 0.7,
                                       "max_completion_length": 6} | flags | changes))
    policy = reinforce.GPT(cfg).double()
    policy.embed.weight.data *= 20                              # so that tokens differ
    return policy, common.load_task(cfg, reinforce.verify), cfg


def test_squared_norms_are_those_of_the_gradient_of_each_completion():
    policy, task, cfg = tiny_policy({}, micro_batch_size=3)
    batch = reinforce.sample_batch(policy, task, cfg, 0)
    batch.mask[::2, 3:] = 0
    norms = reinforce.squared_gradient_norms(policy, batch, cfg)
    assert norms.shape == (4, 3)
    for row, norm in enumerate(norms.flatten()):
        logps, _ = reinforce.score(policy, batch.prompts[[row]], batch.tokens[[row]], 0.7)
        gradients = torch.autograd.grad(
            (logps * batch.mask[row]).sum(), list(policy.parameters()))
        close(norm, sum(part.square().sum() for part in gradients), atol=0, rtol=1e-9)
    assert norms.max() > 1.1 * norms.min() > 0


@pytest.mark.parametrize("entropy_coef", [0.0, 0.3])
def test_the_gradient_of_an_update_is_that_of_equation_5_whatever_the_micro_batches(entropy_coef):
    policy, task, cfg = tiny_policy({"entropy_coef": entropy_coef})
    batch = reinforce.sample_batch(policy, task, cfg, 0)
    batch.mask[::2, 3:] = 0
    batch.lengths = batch.mask.sum(dim=1).long()
    A = random_tensors(12, 6, count=1)[0] * batch.mask
    A[5:7] = 0
    rows = torch.arange(2, 11)
    logps, entropy = reinforce.score(policy, batch.prompts, batch.tokens, 0.7)
    loss = ((-A * logps - entropy_coef * entropy) * batch.mask)[rows].sum() / 9
    expected = torch.cat([part.flatten() for part in
                          torch.autograd.grad(loss, list(policy.parameters()))])
    for size in (1, 4, 32):
        policy.zero_grad()
        cfg = reinforce.Config(**(vars(cfg) | {"micro_batch_size": size}))
        metrics = reinforce.backward(policy, batch, A, rows, cfg)
        found = torch.cat([weight.grad.flatten() for weight in policy.parameters()])
        close(found, expected, atol=1e-10, rtol=0)
        assert metrics["loss"] == pytest.approx(loss.item())


# ---- a teacher -------------------------------------------------------------------------------

FOUR = [4, 5, 6, 7]             # the tokens that the small policies know


class Outputs:
    """All 64 outputs of three tokens of a small policy, and its teacher."""

    def __init__(self):
        self.policy = random_table(FOUR)
        self.teacher = random_table(FOUR)
        self.teacher.table.data[:, FOUR] = self.teacher.table[:, FOUR].flip(0, 1).detach()
        self.tokens = torch.cartesian_prod(*[torch.tensor(FOUR)] * 3)           # (64, 3)
        self.ids = torch.cat([torch.ones(64, 1, dtype=torch.long), self.tokens], dim=1)
        self.mask = ones(64, 3)
        self.chances = self.logps(self.policy).detach().sum(dim=1).exp()        # (64,)

    def log_p(self, model, temperature=1.0):
        """Of every next token, at each place. (64, 3, V)"""
        return (model.table[self.ids[:, :-1]] / temperature).log_softmax(dim=-1)

    def logps(self, model, temperature=1.0):
        log_p = self.log_p(model, temperature)
        return log_p.gather(-1, self.tokens[..., None])[..., 0]                 # (64, 3)

    def rewards(self, **flags):
        """-> r_t (64, 3), the batch, flags"""
        cfg = reinforce.Config(**(FLAGS | {"num_prompts": 32, "teacher": "t"} | flags))
        batch = made_batch(self.tokens.tolist(), self.mask, self.logps(self.policy).detach(),
                           torch.zeros(32, 2))
        return reinforce.token_rewards(None, self.teacher, batch, cfg), batch, cfg

    def mean_gradient(self, **flags):
        """That of the loss, over samples of the policy."""
        rewards, batch, cfg = self.rewards(**flags)
        A, _ = reinforce.compute_advantages(self.policy, self.policy, batch, rewards, cfg)
        losses = reinforce.policy_loss(self.logps(self.policy), A, self.mask).sum(dim=1)
        return gradient((self.chances * losses).sum(), self.policy.table)


def test_with_gamma_0_a_step_goes_down_the_kl_to_the_teacher_at_each_prefix():
    """Although the prefixes, too, depend on the policy, which the gradient leaves out."""
    outputs = Outputs()
    log_p = outputs.log_p(outputs.policy)
    log_t = outputs.log_p(outputs.teacher).detach()
    kl = (log_p.exp() * (log_p - log_t))[..., FOUR].sum(dim=-1)                 # (64, 3)
    expected = gradient((outputs.chances[:, None] * kl).sum(), outputs.policy.table)
    close(outputs.mean_gradient(view="token", gamma=0.0), expected)
    assert expected.abs().max() > 0.01


@pytest.mark.parametrize("view", ["sequence", "token"])
@pytest.mark.parametrize("baseline", ["none", "batch"])
def test_with_gamma_1_a_step_goes_down_the_kl_of_whole_outputs(baseline, view):
    """A baseline that is the same for all outputs changes nothing."""
    outputs = Outputs()
    logps = outputs.logps(outputs.policy).sum(dim=1)
    teacher_logps = outputs.logps(outputs.teacher).detach().sum(dim=1)
    expected = gradient((logps.exp() * (logps - teacher_logps)).sum(), outputs.policy.table)
    close(outputs.mean_gradient(view=view, baseline=baseline), expected)


def test_the_reward_of_a_sampled_token_is_how_much_likelier_the_teacher_finds_it():
    outputs = Outputs()
    outputs.mask[:8, 1] = 0                             # inserted by an environment
    for temperature in (1.0, 2.0):
        rewards, batch, _ = outputs.rewards(temperature=temperature)
        teacher_logps = outputs.logps(outputs.teacher, temperature)
        close(rewards, (teacher_logps.detach() - batch.logps) * outputs.mask)
        assert not rewards.requires_grad


# ---- runs ------------------------------------------------------------------------------------

SMALL = ("--device cpu --task arithmetic:2 --hidden_size 16 --num_hidden_layers 1 --base_steps 20 "
         "--intermediate_size 16 --num_prompts 4 --num_generations 4 --max_completion_length 8 "
         "--num_eval_problems 8 --num_eval_samples 2 --num_iterations 2 --learning_rate 0.003 ")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run that may teach."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        reinforce.main((SMALL + "--max_steps 2 --output_dir teacher").split())
    return folder


def weights(run):
    return torch.load(run / "checkpoint.pt", weights_only=True)


def test_a_run_whose_teacher_is_gone_goes_on_with_the_one_that_it_has_saved(folder, monkeypatch):
    monkeypatch.chdir(folder)
    shutil.copytree("teacher", "copied")
    distil = SMALL + "--teacher copied --view token --gamma 0 --save_steps 2 "
    reinforce.main((distil + "--max_steps 6 --output_dir six").split())
    reinforce.main((distil + "--max_steps 3 --output_dir three").split())
    shutil.rmtree("copied")
    reinforce.main(["--resume_from_checkpoint", "three", "--max_steps", "6"])
    six, three = weights(folder / "six"), weights(folder / "three")
    for name, weight in six["policy"].items():
        assert torch.equal(weight, three["policy"][name])
        assert torch.equal(three["teacher"][name], weights(folder / "teacher")["policy"][name])
    logs = [(folder / run / "metrics.jsonl").read_text().splitlines() for run in ("six", "three")]
    found = [[json.loads(line)["teacher_kl"] for line in log] for log in logs]
    assert found[0] == found[1] and len(found[0]) == 6


@pytest.mark.parametrize("flags, words", [
    ("--teacher nobody", "nobody/checkpoint.pt: "),
    ("--teacher teacher --method rejection", "--teacher: "),
    ("--teacher teacher --reward fine", "--reward fine: "),
    ("--method rejection --reward fine", "--reward fine: "),
    ("--teacher teacher --hidden_size 32", "teacher/checkpoint.pt: "),
    ("--gamma 1.5", "--gamma 1.5: ")])
def test_flags_that_cannot_work_get_one_line_and_nothing_is_written(
        folder, monkeypatch, capsys, flags, words):
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    with pytest.raises(SystemExit) as stopped:
        reinforce.main((SMALL + flags).split())
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert words in message and message.count("\n") == 1
    assert sorted(folder.rglob("*")) == before
