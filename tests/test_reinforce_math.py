"""The algorithm of reinforce.py: what a baseline, a discount and the future's rewards do to the gradient,
worked out by hand or over everything that a small policy can do."""
import functools
import itertools

import pytest
import torch

import reinforce

BASELINES = ("none", "mean", "rloo", "batch", "optimal")
OF_THE_GROUP = ("mean", "rloo", "optimal")
close = functools.partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)
golden = functools.partial(torch.testing.assert_close, atol=6e-8, rtol=0)      # numbers written with 7 digits


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


# A policy of three actions, log pi its logits: the gradient of log pi(a) in the logits is row a of SCORES.
PI = f64([0.5, 0.3, 0.2])
SCORES = torch.eye(3).double() - PI
SQ_NORMS = SCORES.square().sum(1)


def gradient(loss, theta):
    return torch.autograd.grad(loss, theta)[0]


def score(action):
    """The gradient of log pi(action) in the logits, by way of the loss."""
    theta = PI.log().requires_grad_()
    logp = theta.log_softmax(0)[action].view(1, 1)
    return -gradient(reinforce.policy_loss(logp, f64([1.0]), torch.ones_like(logp)).sum(), theta)


def total_variance(samples, weights):
    """The summed variances of the components of vectors. (N, D), (N,) -> scalar"""
    mean = weights @ samples
    return weights @ (samples - mean).square().sum(1)


# ---- the score function ------------------------------------------------------------------------------------


def test_the_loss_is_the_log_prob_times_the_advantage_with_its_sign_turned():
    logps, mask = f64([[-1.0, -2.0], [-3.0, -4.0]]).requires_grad_(), f64([[1, 1], [1, 0]])
    loss = reinforce.policy_loss(logps, f64([2.0, -1.0]), mask)
    close(loss.detach(), f64([[2, 4], [-3, 0]]))
    close(gradient(loss.sum(), logps), f64([[-2, -2], [1, 0]]))


@pytest.mark.parametrize("G, sign", [(4.0, -1), (-4.0, 1)])
def test_a_good_action_is_made_likelier_and_a_bad_one_less_likely(G, sign):
    theta = f64([1.0, 0.0]).requires_grad_()
    logps = theta.log_softmax(0)[:1, None]                                  # of the first of two actions
    golden(logps.exp().item(), 0.7310586)
    loss = reinforce.policy_loss(logps, f64([G]), torch.ones(1, 1).double())
    golden(gradient(loss.sum(), theta), sign * f64([1.0757657, -1.0757657]))


def test_the_score_of_an_action_is_its_unit_vector_less_the_probabilities():
    rows = torch.stack([score(action) for action in range(3)])
    close(rows, f64([[0.5, -0.3, -0.2], [-0.5, 0.7, -0.2], [-0.5, -0.3, 0.8]]))
    close(PI @ rows, f64([0, 0, 0]))                                        # which is why baselines are free
    close(rows.square().sum(1), f64([0.38, 0.78, 0.98]))


def test_the_gradient_of_the_expected_reward_is_the_expected_gradient_of_the_loss():
    theta, rewards = PI.log().requires_grad_(), f64([1.0, -0.5, 2.0])
    logps = theta.log_softmax(0)[:, None]                                   # every action a row
    loss = reinforce.policy_loss(logps, rewards, torch.ones(3, 1).double())[:, 0]
    close(gradient(PI @ loss, theta), -gradient(theta.softmax(0) @ rewards, theta))


# ---- baselines ---------------------------------------------------------------------------------------------


def test_advantages_of_one_right_answer_in_four():
    rewards = f64([[0, 0, 1, 0]])
    third = 1 / 3
    for baseline, expected in (("none", [0, 0, 1, 0]), ("mean", [-0.25, -0.25, 0.75, -0.25]),
                               ("rloo", [-third, -third, 1, -third]), ("batch", [-0.25, -0.25, 0.75, -0.25])):
        close(reinforce.advantages(rewards, baseline), f64([expected]))
    close(reinforce.advantages(rewards), rewards)           # "none" if none is named


def test_the_batch_baseline_is_the_mean_of_all_rewards_and_the_others_are_those_of_the_group():
    rewards, weights = f64([[0, 0, 1, 0], [1, 1, 1, 0]]), torch.ones(2, 4).double()
    close(reinforce.advantages(rewards, "batch"), rewards - 0.5)
    close(reinforce.advantages(rewards, "mean"), rewards - f64([[0.25], [0.75]]))
    for baseline in OF_THE_GROUP:
        together = reinforce.advantages(rewards, baseline, weights)
        for group in range(2):
            alone = reinforce.advantages(rewards[group:][:1], baseline, weights[group:][:1])
            close(together[group:][:1], alone)


def test_leave_one_out_is_the_group_mean_stretched():
    rewards = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).double()
    close(reinforce.advantages(rewards, "rloo"), 6 / 5 * reinforce.advantages(rewards, "mean"))


def test_the_optimal_baseline_of_a_sample_weighs_the_others_by_their_squared_gradients():
    draw = torch.Generator().manual_seed(0)
    rewards = torch.randn(3, 4, generator=draw).double()
    weights = torch.rand(3, 4, generator=draw).double()
    A = reinforce.advantages(rewards, "optimal", weights)
    for p, g in itertools.product(range(3), range(4)):
        others = [h for h in range(4) if h != g]
        b = sum(weights[p, h] * rewards[p, h] for h in others) / sum(weights[p, h] for h in others)
        close(A[p, g], rewards[p, g] - b)
    close(reinforce.advantages(rewards, "optimal", 1e-3 * weights), A)      # only their proportions count
    close(reinforce.advantages(rewards, "optimal", torch.ones(3, 4).double()),
          reinforce.advantages(rewards, "rloo"))


def test_without_any_weight_the_optimal_baseline_is_the_plain_mean_of_the_others():
    rewards, zeros = f64([[0, 0, 1, 0], [3, 1, 0, 2]]), torch.zeros(2, 4).double()
    close(reinforce.advantages(rewards, "optimal", zeros), reinforce.advantages(rewards, "rloo"))
    one = f64([[0, 0, 5, 0], [1, 1, 1, 1]])                 # of the third sample, the others weigh nothing
    A = reinforce.advantages(rewards, "optimal", one)
    close(A[0], f64([-1, -1, 1, -1]))
    close(A[1], reinforce.advantages(rewards, "rloo")[1])


def test_a_sample_whose_gradient_dwarfs_those_of_the_others_is_judged_by_the_others_own_proportions():
    rewards, weights = torch.tensor([[5.0, 1.0, 2.0]]), torch.tensor([[1e8, 1.0, 3.0]])      # in float32
    A = reinforce.advantages(rewards, "optimal", weights)
    torch.testing.assert_close(A, torch.tensor([[5 - 1.75, 1 - 5, 2 - 5]]))


@pytest.mark.parametrize("baseline", OF_THE_GROUP)
def test_a_group_of_equal_rewards_gets_exactly_no_advantage(baseline):
    values = torch.tensor([0.07, 1 / 3, *(k / 100 for k in range(-200, 1001))])     # in float32
    for G in (2, 3, 7, 8):
        rewards = values[:, None].expand(-1, G)
        weights = torch.rand(len(values), G, generator=torch.Generator().manual_seed(G))
        for sq_grad_norms in (weights, 0 * weights):
            assert (reinforce.advantages(rewards, baseline, sq_grad_norms) == 0).all()


def test_a_group_of_equal_rewards_is_judged_by_the_other_groups_if_the_baseline_is_that_of_the_batch():
    close(reinforce.advantages(f64([[1, 1], [0, 0]]), "batch"), f64([[0.5, 0.5], [-0.5, -0.5]]))
    close(reinforce.advantages(f64([[1, 1], [0, 0]]), "none"), f64([[1, 1], [0, 0]]))


@pytest.mark.parametrize("baseline, share", [("none", 1), ("rloo", 1), ("optimal", 1),
                                             ("mean", 2 / 3), ("batch", 5 / 6)])
def test_a_baseline_leaves_the_expected_gradient_as_it_is_but_own_samples_in_it_shrink_it(baseline, share):
    P, G, rewards = 2, 3, f64([1.0, -0.5, 2.0])
    groups = torch.tensor(list(itertools.product(range(3), repeat=G)))      # (27, G): all there are
    draws = torch.cartesian_prod(torch.arange(27), torch.arange(27)) if baseline == "batch" else None
    draws = groups[draws].view(-1, P, G) if baseline == "batch" else groups[:, None]    # (N, P, G) batches
    theta = PI.log().requires_grad_()
    A = torch.stack([reinforce.advantages(rewards[draw], baseline, SQ_NORMS[draw]) for draw in draws])
    rows = draws.reshape(-1, 1)                                             # every completion is one token
    loss = reinforce.policy_loss(theta.log_softmax(0)[rows], A.view(-1), torch.ones(rows.shape).double())
    loss = loss.view(len(draws), -1).mean(1)                                # of every batch
    chances = PI[draws].flatten(1).prod(1)
    close(chances.sum().item(), 1.0)
    close(gradient(chances @ loss, theta), -share * gradient(theta.softmax(0) @ rewards, theta))


# ---- the baseline of least variance ------------------------------------------------------------------------


def test_the_optimal_baseline_weighs_rewards_by_squared_gradients_and_is_the_mean_plus_a_covariance():
    rewards = f64([1.0, 0, 0])
    b = reinforce.optimal_baseline(rewards, SQ_NORMS, PI)
    golden(b.item(), 0.3064516)
    V, E = PI @ rewards, PI @ SQ_NORMS
    close(b, V + (PI @ (rewards * SQ_NORMS) - V * E) / E)
    close(reinforce.optimal_baseline(rewards + 7, SQ_NORMS, PI), b + 7)
    close(reinforce.optimal_baseline(rewards, 9 * SQ_NORMS, 4 * PI), b)     # weights need not sum to 1
    close(reinforce.optimal_baseline(rewards, torch.ones(3).double(), PI), V)


def test_no_other_constant_has_less_variance_than_the_optimal_baseline():
    rewards = f64([1.0, 0, 0])
    best = reinforce.optimal_baseline(rewards, SQ_NORMS, PI).item()

    def variance(b):
        return total_variance((rewards - b)[:, None] * SCORES, PI).item()

    V = (PI @ rewards).item()
    close([variance(0), variance(V)], [0.095, 0.06])
    golden(variance(best), 0.0367742)
    for b in torch.linspace(-1, 2, 301).tolist():
        assert variance(b) > variance(best)
    close(variance(best + 0.1), variance(best) + 0.01 * (PI @ SQ_NORMS).item())      # a parabola


def test_leave_one_out_is_not_the_baseline_of_least_variance():
    rewards, G = f64([1.0, 0, 0]), 4
    groups = torch.tensor(list(itertools.product(range(3), repeat=G)))      # (81, G)
    best = reinforce.optimal_baseline(rewards, SQ_NORMS, PI)
    variances = []
    for A in (rewards[groups] - best, reinforce.advantages(rewards[groups], "rloo")):
        means = (A[..., None] * SCORES[groups]).mean(1)     # (81, 3): the gradient of each group
        variances.append(total_variance(means, PI[groups].prod(1)).item())
    golden(variances[0], 0.0367742 / G)
    assert variances[1] > 1.5 * variances[0]


@pytest.mark.parametrize("baseline", ("mean", "rloo", "optimal", "batch"))
def test_a_constant_added_to_all_rewards_changes_nothing_if_there_is_a_baseline(baseline):
    draw = torch.Generator().manual_seed(0)
    rewards, weights = torch.randn(3, 4, generator=draw).double(), torch.rand(3, 4, generator=draw).double()
    A, same = (reinforce.advantages(rewards + constant, baseline, weights) for constant in (0, 8))
    close(same, A)


# ---- rewards that come on the way --------------------------------------------------------------------------


def test_the_reward_to_go_of_a_walk_in_the_grid_world():
    rewards, mask = f64([[-1, -1, -1, 5]]), torch.ones(1, 4).double()
    G = reinforce.rewards_to_go(rewards, mask, 1.0)
    close(G, f64([[2, 3, 4, 5]]))
    close(reinforce.rewards_to_go(rewards, mask, 0.9), f64([[0.935, 2.15, 3.5, 5]]))
    close(reinforce.rewards_to_go(rewards, mask, 0.0), rewards)
    loss = reinforce.policy_loss(f64([[0.4, 0.3, 0.5, 0.7]]).log(), G, mask)
    torch.testing.assert_close(loss.sum().item(), 10.000463, atol=6e-7, rtol=0)


def test_rows_of_unequal_length_end_each_at_its_own_end():
    mask = f64([[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    rewards = f64([[3, 0, 0, 0], [1, 2, 4, 0], [0, 0, 0, 8], [0, 0, 0, 0]])
    G = reinforce.rewards_to_go(rewards, mask, 0.5)
    close(G, f64([[3, 0, 0, 0], [3, 4, 4, 0], [1, 2, 4, 8], [0, 0, 0, 0]]))


def test_masked_slots_inside_a_row_are_skipped_and_are_not_steps():
    draw = torch.Generator().manual_seed(0)
    rewards, mask = torch.randn(3, 6, generator=draw).double(), f64([[1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 0, 0],
                                                                     [1, 0, 1, 1, 1, 0]])
    for wild in (0.0, 1e30):
        given = torch.where(mask == 1, rewards, wild)
        G = reinforce.rewards_to_go(given, mask, 0.9)
        for row, on in enumerate(mask == 1):
            squeezed = rewards[row, on][None]
            close(G[row, on][None], reinforce.rewards_to_go(squeezed, torch.ones_like(squeezed), 0.9))
            assert (G[row, ~on] == 0).all()


def test_the_reward_to_go_is_the_reward_of_now_and_what_is_left_of_that_to_come():
    rewards, mask = torch.randn(2, 7, generator=torch.Generator().manual_seed(0)).double(), torch.ones(2, 7)
    for gamma in (0.0, 0.3, 0.99, 1.0):
        G = reinforce.rewards_to_go(rewards, mask.double(), gamma)
        close(G[:, -1], rewards[:, -1])
        close(G[:, :-1], rewards[:, :-1] + gamma * G[:, 1:])


def test_a_discount_on_a_final_reward_prefers_short_right_answers_and_long_wrong_ones():
    first = {}
    for reward, n in itertools.product((1.0, -1.0), (1, 5)):
        rewards = torch.zeros(1, n).double()
        rewards[0, -1] = reward
        first[reward, n] = reinforce.rewards_to_go(rewards, torch.ones_like(rewards), 0.9)[0, 0].item()
    close(first[1.0, 5], 0.9 ** 4)
    assert first[1.0, 1] > first[1.0, 5] > 0 > first[-1.0, 5] > first[-1.0, 1]


def walks():
    """Everything that a policy of two actions does in three steps, and a reward for each move, which depends
    on all moves so far. -> theta, log-probs (8, 3), chances (8,), rewards (8, 3)"""
    draw = torch.Generator().manual_seed(0)
    theta = torch.randn(7, 2, generator=draw).double().requires_grad_()     # a state is what was done before
    value = torch.randn(7, 2, generator=draw).double() + 1
    moves = torch.tensor(list(itertools.product(range(2), repeat=3)))       # (8, 3)
    states = torch.stack([0 * moves[:, 0], 1 + moves[:, 0], 3 + 2 * moves[:, 0] + moves[:, 1]], 1)
    logps = theta.log_softmax(1)[states, moves]
    return theta, logps, logps.detach().sum(1).exp(), value[states, moves]


def test_rewards_of_the_past_may_be_left_out_without_bias_and_with_less_variance():
    theta, logps, chances, rewards = walks()
    mask = torch.ones(8, 3).double()
    exact = -torch.autograd.grad(logps.sum(1).exp() @ rewards.sum(1), theta, retain_graph=True)[0]
    spread = []
    for A in (rewards.sum(1), reinforce.rewards_to_go(rewards, mask, 1.0)):
        losses = reinforce.policy_loss(logps, A, mask).sum(1)
        each = [torch.autograd.grad(loss, theta, retain_graph=True)[0].view(-1) for loss in losses]
        each = torch.stack(each)                            # (8, 14)
        close(chances @ each, exact.view(-1))
        spread.append(total_variance(each, chances).item())
    assert spread[1] < 0.9 * spread[0]


def test_a_baseline_of_the_returns_may_be_subtracted_from_every_reward_to_go_without_bias():
    theta, logps, chances, rewards = walks()
    exact = -torch.autograd.grad(logps.sum(1).exp() @ rewards.sum(1), theta, retain_graph=True)[0]
    pairs = torch.cartesian_prod(torch.arange(8), torch.arange(8))          # (64, 2): all groups of two
    returns = rewards.sum(1)[pairs]                                         # (64, 2)
    for baseline in ("rloo", "optimal"):
        b = returns - reinforce.advantages(returns, baseline, 1 + returns.square())     # (64, 2)
        A = reinforce.rewards_to_go(rewards, torch.ones(8, 3).double(), 1.0)[pairs] - b[..., None]
        loss = reinforce.policy_loss(logps[pairs].view(-1, 3), A.view(-1, 3), torch.ones(128, 3).double())
        mean = chances[pairs].prod(1) @ loss.sum(1).view(64, 2).mean(1)
        close(torch.autograd.grad(mean, theta, retain_graph=True)[0], exact)


# ---- masks, shapes, arguments ------------------------------------------------------------------------------


def test_advantages_are_per_row_or_per_token():
    draw = torch.Generator().manual_seed(0)
    logps, A = -torch.rand(3, 4, generator=draw).double(), torch.randn(3, 4, generator=draw).double()
    mask = f64([[1, 0, 0, 0], [1, 0, 1, 1], [1, 1, 1, 1]])
    close(reinforce.policy_loss(logps, A, mask), -A * logps * mask)
    close(reinforce.policy_loss(logps, A[:, 0], mask), -A[:, :1] * logps * mask)
    square = reinforce.policy_loss(logps[:, :3], A[:, 0], torch.ones(3, 3).double())    # B = T: still by row
    close(square, -A[:, :1] * logps[:, :3])


def test_masked_slots_contribute_nothing_even_if_they_hold_wild_values():
    mask = f64([[1, 0, 1], [0, 0, 0]])
    logps = torch.where(mask == 1, -0.5, f64([[0, 1e30, 0], [-1e30, 1e4, -1e4]])).requires_grad_()
    for A in (f64([2.0, 3.0]), torch.where(mask == 1, 2.0, 1e6)):
        loss = reinforce.policy_loss(logps, A, mask)
        close(loss.detach(), mask, atol=0, rtol=0)
        close(gradient(loss.sum(), logps), -2 * mask, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_shapes_and_types_are_kept_and_no_argument_is_changed(dtype):
    draw = torch.Generator().manual_seed(0)
    rewards, weights = torch.randn(2, 3, generator=draw).to(dtype), torch.rand(2, 3, generator=draw).to(dtype)
    logps, mask = -torch.rand(2, 3, generator=draw).to(dtype), torch.tensor([[1, 0, 1], [1, 1, 0]]).to(dtype)
    arguments = (rewards, weights, logps, mask)
    before = [x.clone() for x in arguments]
    results = [reinforce.advantages(rewards, baseline, weights) for baseline in BASELINES]
    results += [reinforce.policy_loss(logps, A, mask) for A in (rewards, rewards[:, 0])]
    results += [reinforce.rewards_to_go(rewards, mask, 0.9)]
    assert all(x.shape == (2, 3) and x.dtype == dtype for x in results)
    b = reinforce.optimal_baseline(rewards[0], weights[0], weights[1])
    assert b.shape == () and b.dtype == dtype
    assert all(torch.equal(x, y) for x, y in zip(arguments, before))


def test_a_fresh_log_prob_has_the_gradient_of_its_softmax_at_the_temperature():
    logits, tokens = f64([[[0.3, -0.7, 1.1]]]).requires_grad_(), torch.tensor([[2]])
    logps, entropy = reinforce.logprobs(logits, tokens, 0.5)
    p = (logits.detach() / 0.5).softmax(-1)
    close(logps.item(), p[0, 0, 2].log().item())
    close(entropy.item(), -(p * p.log()).sum().item())
    loss = reinforce.policy_loss(logps, f64([1.0]), torch.ones(1, 1).double())
    close(gradient(loss.sum(), logits), -(f64([[[0, 0, 1]]]) - p) / 0.5)
