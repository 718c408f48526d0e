"""The algorithm of reinforce.py: what a baseline, a discount and the rewards to come do to the
gradient, worked out by hand or over everything that a small policy can do."""
import functools
import itertools

import pytest
import torch
from conftest import f64

import reinforce

pytestmark = pytest.mark.quick

BASELINES = ("none", "batch", "mean", "rloo", "optimal")
OF_THE_GROUP = ("mean", "rloo", "optimal")
close = functools.partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)
golden = functools.partial(torch.testing.assert_close, atol=6e-8, rtol=0)   # written with 7 digits

# A policy of three actions whose logits are log pi: the gradient of log pi(a) in the logits is row
# a of SCORES.
PI = f64([0.5, 0.3, 0.2])
SCORES = torch.eye(3).double() - PI
SQ_NORMS = SCORES.square().sum(dim=1)


def gradient(loss, theta):
    """The gradient of a loss, whose graph is kept."""
    return torch.autograd.grad(loss, theta, retain_graph=True)[0]


def random_tensors(*shape, count):
    """So many tensors of this shape, always the same."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).double() for _ in range(count)]


def score(action):
    """The gradient of log pi(action) in the logits, by way of the loss."""
    theta = PI.log().requires_grad_()
    logp = theta.log_softmax(dim=0)[action].view(1, 1)
    loss = reinforce.policy_loss(logp, f64([1.0]), torch.ones_like(logp))
    return -gradient(loss.sum(), theta)


def total_variance(samples, weights):
    """The summed variances of the components of vectors. (N, D), (N,) -> scalar"""
    mean = weights @ samples
    return weights @ (samples - mean).square().sum(dim=1)


# ---- the score function ----------------------------------------------------------------------

def test_the_loss_is_minus_the_log_prob_times_the_advantage():
    logps = f64([[-1, -2], [-3, -4]]).requires_grad_()
    mask = f64([[1, 1], [1, 0]])
    loss = reinforce.policy_loss(logps, f64([2.0, -1.0]), mask)
    close(loss.detach(), f64([[2, 4], [-3, 0]]))
    close(gradient(loss.sum(), logps), f64([[-2, -2], [1, 0]]))


@pytest.mark.parametrize("A, sign", [(4.0, -1), (-4.0, 1)])
def test_a_good_action_is_made_likelier_and_a_bad_one_less_likely(A, sign):
    theta = f64([1.0, 0.0]).requires_grad_()
    logps = theta.log_softmax(dim=0)[:1, None]                  # of the first of two actions
    golden(logps.exp().item(), 0.7310586)
    loss = reinforce.policy_loss(logps, f64([A]), torch.ones(1, 1).double())
    golden(gradient(loss.sum(), theta), sign * f64([1.0757657, -1.0757657]))


def test_the_score_of_an_action_is_its_unit_vector_less_the_probabilities():
    rows = torch.stack([score(action) for action in range(3)])
    close(rows, f64([[0.5, -0.3, -0.2], [-0.5, 0.7, -0.2], [-0.5, -0.3, 0.8]]))
    close(PI @ rows, f64([0, 0, 0]))                            # so a baseline adds no bias
    close(rows.square().sum(dim=1), f64([0.38, 0.78, 0.98]))


def test_the_gradient_of_the_expected_reward_is_the_expected_gradient_of_the_loss():
    theta = PI.log().requires_grad_()
    rewards = f64([1.0, -0.5, 2.0])
    logps = theta.log_softmax(dim=0)[:, None]                   # every action has a row
    loss = reinforce.policy_loss(logps, rewards, torch.ones(3, 1).double())[:, 0]
    close(gradient(PI @ loss, theta), -gradient(theta.softmax(dim=0) @ rewards, theta))


# ---- baselines -------------------------------------------------------------------------------

@pytest.mark.parametrize("baseline, expected", [
    ("none", [0, 0, 1, 0]),
    ("batch", [-1 / 4, -1 / 4, 3 / 4, -1 / 4]),
    ("mean", [-1 / 4, -1 / 4, 3 / 4, -1 / 4]),
    ("rloo", [-1 / 3, -1 / 3, 1, -1 / 3])])
def test_advantages_of_one_right_answer_in_four(baseline, expected):
    close(reinforce.advantages(f64([[0, 0, 1, 0]]), baseline), f64([expected]))


def test_without_a_named_baseline_there_is_none():
    rewards = f64([[0, 0, 1, 0]])
    close(reinforce.advantages(rewards), rewards)


def test_the_batch_baseline_is_the_mean_of_all_rewards():
    rewards = f64([[0, 0, 1, 0], [1, 1, 1, 0]])
    close(reinforce.advantages(rewards, "batch"), rewards - 0.5)


def test_the_mean_baseline_is_that_of_the_group():
    rewards = f64([[0, 0, 1, 0], [1, 1, 1, 0]])
    close(reinforce.advantages(rewards, "mean"), rewards - f64([[0.25], [0.75]]))


@pytest.mark.parametrize("baseline", OF_THE_GROUP)
def test_a_group_has_the_advantages_that_it_has_alone(baseline):
    rewards = f64([[0, 0, 1, 0], [1, 1, 1, 0]])
    weights = f64([[1, 2, 3, 4], [4, 3, 2, 1]])
    together = reinforce.advantages(rewards, baseline, weights)
    for p in range(2):
        alone = reinforce.advantages(rewards[p:p + 1], baseline, weights[p:p + 1])
        close(together[p:p + 1], alone)


def test_leave_one_out_is_the_group_mean_stretched():
    [rewards] = random_tensors(5, 6, count=1)
    stretched = 6 / 5 * reinforce.advantages(rewards, "mean")
    close(reinforce.advantages(rewards, "rloo"), stretched)


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


def test_with_equal_squared_gradients_the_optimal_baseline_is_leave_one_out():
    [rewards] = random_tensors(3, 4, count=1)
    A = reinforce.advantages(rewards, "optimal", torch.ones(3, 4).double())
    close(A, reinforce.advantages(rewards, "rloo"))


def test_without_any_gradient_the_optimal_baseline_is_leave_one_out():
    rewards = f64([[0, 0, 1, 0], [3, 1, 0, 2]])
    A = reinforce.advantages(rewards, "optimal", torch.zeros(2, 4).double())
    close(A, reinforce.advantages(rewards, "rloo"))


def test_where_only_one_sample_has_a_gradient_it_is_the_baseline_of_the_others():
    rewards = f64([[0, 0, 1, 0]])
    A = reinforce.advantages(rewards, "optimal", f64([[0, 0, 5, 0]]))
    close(A, f64([[-1, -1, 1, -1]]))                    # to the third, the others are all alike


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


@pytest.mark.parametrize("baseline, expected", [
    ("none", [[1, 1], [0, 0]]),
    ("batch", [[0.5, 0.5], [-0.5, -0.5]])])
def test_a_group_of_equal_rewards_has_advantages_if_the_baseline_is_not_of_the_group(
        baseline, expected):
    close(reinforce.advantages(f64([[1, 1], [0, 0]]), baseline), f64(expected))


def all_batches(P, G):
    """All batches of P groups of G actions, and their probabilities. -> (N, P, G), (N,)"""
    batches = torch.tensor(list(itertools.product(range(3), repeat=P * G))).view(-1, P, G)
    return batches, PI[batches].flatten(1).prod(dim=1)


@pytest.mark.parametrize("baseline, share", [
    ("none", 1),
    ("batch", 5 / 6),
    ("mean", 2 / 3),
    ("rloo", 1),
    ("optimal", 1)])
def test_a_baseline_keeps_the_expected_gradient_but_for_the_share_of_the_own_reward(
        baseline, share):
    batches, chances = all_batches(2 if baseline == "batch" else 1, 3)
    close(chances.sum().item(), 1.0)
    rewards = f64([1.0, -0.5, 2.0])
    A = torch.stack([
        reinforce.advantages(rewards[batch], baseline, SQ_NORMS[batch]) for batch in batches])
    theta = PI.log().requires_grad_()
    rows = batches.view(-1, 1)                                  # each completion is one token
    mask = torch.ones(rows.shape).double()
    loss = reinforce.policy_loss(theta.log_softmax(dim=0)[rows], A.view(-1), mask)
    batch_losses = loss.view(len(batches), -1).mean(dim=1)
    exact = gradient(theta.softmax(dim=0) @ rewards, theta)
    close(gradient(chances @ batch_losses, theta), -share * exact)


@pytest.mark.parametrize("baseline", BASELINES[1:])
def test_with_a_baseline_a_constant_added_to_all_rewards_changes_nothing(baseline):
    rewards, weights = random_tensors(3, 4, count=2)
    A = reinforce.advantages(rewards, baseline, weights.square())
    close(reinforce.advantages(rewards + 8, baseline, weights.square()), A)


# ---- the baseline of least variance ----------------------------------------------------------

REWARDS = f64([1.0, 0, 0])


def test_the_optimal_baseline_is_the_mean_reward_and_a_covariance():
    b = reinforce.optimal_baseline(REWARDS, SQ_NORMS, PI)
    golden(b.item(), 0.3064516)
    value = PI @ REWARDS
    mean_norm = PI @ SQ_NORMS
    covariance = PI @ (REWARDS * SQ_NORMS) - value * mean_norm
    close(b, value + covariance / mean_norm)
    close(reinforce.optimal_baseline(REWARDS, torch.ones(3).double(), PI), value)


def test_the_optimal_baseline_moves_with_the_rewards_and_not_with_the_scale_of_the_weights():
    b = reinforce.optimal_baseline(REWARDS, SQ_NORMS, PI)
    close(reinforce.optimal_baseline(REWARDS + 7, SQ_NORMS, PI), b + 7)
    close(reinforce.optimal_baseline(REWARDS, 9 * SQ_NORMS, 4 * PI), b)


def test_several_optimal_baselines_are_those_of_each():
    rewards, norms, weights = random_tensors(5, 3, count=3)
    b = reinforce.optimal_baseline(rewards, norms.square(), weights.square())
    for row in range(5):
        alone = reinforce.optimal_baseline(
            rewards[row], norms[row].square(), weights[row].square())
        close(b[row], alone)


def variance_with(b):
    """The variance of the gradient of one sample with this baseline."""
    return total_variance((REWARDS - b)[:, None] * SCORES, PI).item()


def test_no_other_constant_has_less_variance_than_the_optimal_baseline():
    best = reinforce.optimal_baseline(REWARDS, SQ_NORMS, PI).item()
    close(variance_with(0), 0.095)
    close(variance_with((PI @ REWARDS).item()), 0.06)
    golden(variance_with(best), 0.0367742)
    for b in torch.linspace(-1, 2, 301).tolist():
        assert variance_with(b) > variance_with(best)
    close(variance_with(best + 0.1), variance_with(best) + 0.01 * (PI @ SQ_NORMS).item())


def test_leave_one_out_is_not_the_baseline_of_least_variance():
    G = 4
    groups, chances = all_batches(1, G)
    groups = groups[:, 0]                                       # (81, G)
    best = reinforce.optimal_baseline(REWARDS, SQ_NORMS, PI)

    def variance_of_the_mean(A):
        means = (A[..., None] * SCORES[groups]).mean(dim=1)     # (81, 3) the gradient of each group
        return total_variance(means, chances).item()
    least = variance_of_the_mean(REWARDS[groups] - best)
    golden(least, 0.0367742 / G)
    assert variance_of_the_mean(reinforce.advantages(REWARDS[groups], "rloo")) > 1.5 * least


# ---- rewards before the end ------------------------------------------------------------------

def test_the_reward_to_go_of_a_walk_in_the_grid_world():
    rewards = f64([[-1, -1, -1, 5]])
    mask = torch.ones(1, 4).double()
    to_go = reinforce.rewards_to_go(rewards, mask, 1.0)
    close(to_go, f64([[2, 3, 4, 5]]))
    close(reinforce.rewards_to_go(rewards, mask, 0.9), f64([[0.935, 2.15, 3.5, 5]]))
    close(reinforce.rewards_to_go(rewards, mask, 0.0), rewards)
    loss = reinforce.policy_loss(f64([[0.4, 0.3, 0.5, 0.7]]).log(), to_go, mask)
    torch.testing.assert_close(loss.sum().item(), 10.000463, atol=6e-7, rtol=0)


def test_rows_of_unequal_length_end_each_at_its_own_end():
    mask = f64([[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    rewards = f64([[3, 0, 0, 0], [1, 2, 4, 0], [0, 0, 0, 8], [0, 0, 0, 0]])
    expected = f64([[3, 0, 0, 0], [3, 4, 4, 0], [1, 2, 4, 8], [0, 0, 0, 0]])
    close(reinforce.rewards_to_go(rewards, mask, 0.5), expected)


@pytest.mark.parametrize("wild", [0.0, 1e30])
def test_masked_slots_inside_a_row_are_skipped_and_are_no_steps(wild):
    [rewards] = random_tensors(3, 6, count=1)
    mask = f64([[1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 0, 0], [1, 0, 1, 1, 1, 0]])
    given = torch.where(mask == 1, rewards, wild)
    to_go = reinforce.rewards_to_go(given, mask, 0.9)
    for row, is_step in enumerate(mask == 1):
        alone = rewards[row, is_step][None]
        expected = reinforce.rewards_to_go(alone, torch.ones_like(alone), 0.9)
        close(to_go[row, is_step][None], expected)
        assert (to_go[row, ~is_step] == 0).all()


@pytest.mark.parametrize("gamma", [0.0, 0.3, 0.99, 1.0])
def test_the_reward_to_go_is_the_reward_now_and_the_discounted_rest(gamma):
    [rewards] = random_tensors(2, 7, count=1)
    to_go = reinforce.rewards_to_go(rewards, torch.ones_like(rewards), gamma)
    close(to_go[:, -1], rewards[:, -1])
    close(to_go[:, :-1], rewards[:, :-1] + gamma * to_go[:, 1:])


def test_a_discount_on_a_final_reward_prefers_short_right_answers_and_long_wrong_ones():
    def return_of(reward, length):
        rewards = torch.zeros(1, length).double()
        rewards[0, -1] = reward
        return reinforce.rewards_to_go(rewards, torch.ones_like(rewards), 0.9)[0, 0].item()
    close(return_of(1.0, 5), 0.9 ** 4)
    assert return_of(1.0, 1) > return_of(1.0, 5) > 0
    assert 0 > return_of(-1.0, 5) > return_of(-1.0, 1)


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
    mask = torch.ones(8, 3).double()
    exact = -gradient(logps.sum(dim=1).exp() @ rewards.sum(dim=1), theta)

    def variance_of(A):
        losses = reinforce.policy_loss(logps, A, mask).sum(dim=1)
        samples = torch.stack([gradient(loss, theta).flatten() for loss in losses])     # (8, 14)
        close(chances @ samples, exact.flatten())
        return total_variance(samples, chances).item()
    to_go = reinforce.rewards_to_go(rewards, mask, 1.0)
    assert variance_of(to_go) < 0.9 * variance_of(rewards.sum(dim=1))


@pytest.mark.parametrize("baseline", ["rloo", "optimal"])
def test_a_baseline_of_the_returns_may_be_subtracted_from_every_reward_to_go_without_bias(
        baseline):
    theta, logps, chances, rewards = walks()
    exact = -gradient(logps.sum(dim=1).exp() @ rewards.sum(dim=1), theta)
    pairs = torch.cartesian_prod(torch.arange(8), torch.arange(8))          # (64, 2) groups of two
    returns = rewards.sum(dim=1)[pairs]                                     # (64, 2)
    b = returns - reinforce.advantages(returns, baseline, 1 + returns.square())
    to_go = reinforce.rewards_to_go(rewards, torch.ones(8, 3).double(), 1.0)
    A = to_go[pairs] - b[..., None]                                         # (64, 2, 3)
    loss = reinforce.policy_loss(
        logps[pairs].view(-1, 3), A.view(-1, 3), torch.ones(128, 3).double())
    group_losses = loss.sum(dim=1).view(64, 2).mean(dim=1)
    close(gradient(chances[pairs].prod(dim=1) @ group_losses, theta), exact)


# ---- masks, shapes, arguments ----------------------------------------------------------------

def test_advantages_are_per_row_or_per_token():
    logps, A = random_tensors(3, 4, count=2)
    mask = f64([[1, 0, 0, 0], [1, 0, 1, 1], [1, 1, 1, 1]])
    close(reinforce.policy_loss(logps, A, mask), -A * logps * mask)
    close(reinforce.policy_loss(logps, A[:, 0], mask), -A[:, :1] * logps * mask)


def test_one_advantage_per_row_is_told_from_one_per_token_where_there_are_as_many_rows_as_slots():
    logps, A = random_tensors(3, 3, count=2)
    loss = reinforce.policy_loss(logps, A[:, 0], torch.ones(3, 3).double())
    close(loss, -A[:, :1] * logps)


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
    for x in results:
        assert x.shape == (2, 3)
        assert x.dtype == dtype
    b = reinforce.optimal_baseline(rewards[0], weights[0], weights[1])
    assert b.shape == ()
    assert b.dtype == dtype
    assert all(torch.equal(x, y) for x, y in zip(arguments, before))


def test_a_log_prob_has_the_gradient_of_its_softmax_at_the_temperature():
    logits = f64([[[0.3, -0.7, 1.1]]]).requires_grad_()
    logps, entropy = reinforce.logprobs(logits, torch.tensor([[2]]), 0.5)
    p = (logits.detach() / 0.5).softmax(dim=-1)
    close(logps.item(), p[0, 0, 2].log().item())
    close(entropy.item(), -(p * p.log()).sum().item())
    loss = reinforce.policy_loss(logps, f64([1.0]), torch.ones(1, 1).double())
    close(gradient(loss.sum(), logits), -(f64([[[0, 0, 1]]]) - p) / 0.5)
