"""The algorithm of ppo.py, TRPO included, against numbers worked out by hand, and against other
definitions."""
import functools
import itertools
import math

import pytest
import torch
from conftest import TINY, f64, ragged
from update_scenes import made_batch

import common
import ppo

pytestmark = pytest.mark.quick

WILD = f64([[-1e30, 1e30, -1e4, 1e4]])                  # log-probs that masked slots may hold
OLD_WILD = f64([[1e30, 1e30, 1e4, -1e4]])
close = functools.partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)
golden = functools.partial(torch.testing.assert_close, atol=6e-8, rtol=0)   # written with 7 digits
penalized = functools.partial(ppo.penalty_loss, beta=0.7)
clipped_values = functools.partial(ppo.value_loss, cliprange_value=0.2)


def ones(*shape):
    return torch.ones(shape, dtype=torch.float64)


def randn(*shape, seed=0):
    """Random numbers of float64, the same in each call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def loss_and_gradient(loss_function, x, *arguments):
    """A loss of x and other arguments, and its gradient in x."""
    x = x.clone().requires_grad_()
    loss = loss_function(x, *arguments)
    return loss.detach(), torch.autograd.grad(loss.sum(), x)[0]


def one_token(loss_function, ratio, A, *options):
    """Loss and gradient of one token with this ratio. -> two floats"""
    logps = f64([[-1.0]])
    old_logps = f64([[-1.0 - math.log(ratio)]])
    loss, gradient = loss_and_gradient(
        loss_function, logps, old_logps, f64([A]), ones(1, 1), *options)
    return loss.item(), gradient.item()


def episode():
    """Rewards and values (3, 6), and masks: a row that ends early, one with a hole, a full one."""
    rewards, values = randn(2, 3, 6)
    mask = f64([[1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1]])
    return rewards, values, mask


# ---- advantages from a critic ----------------------------------------------------------------

@pytest.mark.parametrize("gamma, lam, A, returns", [
    (1.0, 0.5, (0.5, 0.4, 0.2), (0.7, 0.9, 1.0)),
    (1.0, 0.95, (0.7655, 0.49, 0.2), (0.9655, 0.99, 1.0)),
    (0.9, 0.5, (0.3895, 0.31, 0.2), (0.5895, 0.81, 1.0))])
def test_advantages_and_returns_of_an_answer_that_turns_out_right(gamma, lam, A, returns):
    rewards = f64([[0, 0, 1]])
    values = f64([[0.2, 0.5, 0.8]])
    close(ppo.gae(rewards, values, ones(1, 3), gamma, lam), (f64([A]), f64([returns])))


def n_step_advantage(rewards, values, t, n, gamma):
    """What n rewards and the value after them say, less the value before. All are 0 after the end.
    """
    rewards = rewards + n * [0.0]
    values = values + n * [0.0]
    discounted = sum(gamma ** k * rewards[t + k] for k in range(n))
    return discounted + gamma ** n * values[t + n] - values[t]


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_the_advantage_is_the_weighted_average_of_all_n_step_advantages(gamma, lam):
    """The endless tail of those that go beyond the end included: they are all equal."""
    rewards, values, _ = episode()
    A, _ = ppo.gae(rewards, values, ones(3, 6), gamma, lam)
    for row, t in itertools.product(range(3), range(6)):
        left = 6 - t
        weights = [(1 - lam) * lam ** (n - 1) for n in range(1, left)] + [lam ** (left - 1)]
        close(sum(weights), 1.0)
        expected = 0.0
        for n, weight in enumerate(weights, start=1):
            expected += weight * n_step_advantage(
                rewards[row].tolist(), values[row].tolist(), t, n, gamma)
        close(A[row, t].item(), expected)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_with_lambda_zero_the_advantage_is_the_error_of_one_step(gamma):
    rewards, values, _ = episode()
    next_values = torch.cat([values[:, 1:], 0 * values[:, :1]], dim=1)
    A, _ = ppo.gae(rewards, values, ones(3, 6), gamma, 0.0)
    close(A, rewards + gamma * next_values - values)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_with_lambda_one_the_advantage_is_the_whole_return_less_the_value(gamma):
    rewards, values, _ = episode()
    to_go = torch.zeros_like(rewards)
    for t, k in itertools.product(range(6), range(6)):
        if k >= t:
            to_go[:, t] += gamma ** (k - t) * rewards[:, k]
    A, returns = ppo.gae(rewards, values, ones(3, 6), gamma, 1.0)
    close(A, to_go - values)
    close(returns, to_go)                               # what the critic says has dropped out


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("wild", [0.0, 1e30])
def test_masked_slots_inside_a_row_and_behind_it_are_no_steps(lam, wild):
    rewards, values, mask = episode()
    wild_rewards = torch.where(mask == 1, rewards, wild)
    wild_values = torch.where(mask == 1, values, wild)
    A, returns = ppo.gae(wild_rewards, wild_values, mask, 0.9, lam)
    for row in range(3):
        valid = mask[row] == 1
        squeezed = rewards[row, valid][None]
        expected = ppo.gae(
            squeezed, values[row, valid][None], torch.ones_like(squeezed), 0.9, lam)
        close((A[row, valid][None], returns[row, valid][None]), expected)
        assert (A[row, ~valid] == 0).all()
        assert (returns[row, ~valid] == 0).all()


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_returns_are_advantages_plus_values(lam):
    rewards, values, mask = episode()
    A, returns = ppo.gae(rewards, values, mask, 0.9, lam)
    close(returns * mask, (A + values) * mask)


def test_every_row_may_have_a_lambda_of_its_own():
    rewards, values, mask = episode()
    A, returns = ppo.gae(rewards, values, mask, 0.9, f64([[0.0], [0.5], [1.0]]))
    for row, lam in enumerate((0.0, 0.5, 1.0)):
        expected_A, expected_returns = ppo.gae(rewards, values, mask, 0.9, lam)
        close(A[row], expected_A[row])
        close(returns[row], expected_returns[row])


@pytest.mark.parametrize("n, lam", [(1, 0), (19, 0), (20, 0), (40, 0.5), (100, 0.8), (1000, 0.98)])
def test_the_longer_an_output_the_nearer_its_lambda_to_one(n, lam):
    close(ppo.length_adaptive_lambda(f64([n, n]), 0.05), f64([[lam], [lam]]))
    [[lam]] = ppo.length_adaptive_lambda(torch.tensor([n]), 1.0).tolist()
    assert lam == pytest.approx(1 - 1 / n)


# ---- whitening -------------------------------------------------------------------------------

@pytest.mark.parametrize("wild", [0.0, 1e9])
def test_whitened_advantages_have_mean_zero_and_variance_one_over_the_valid_tokens(wild):
    A, _, mask = episode()
    A = 3 * A + 7
    white = ppo.whiten(torch.where(mask == 1, A, wild), mask)
    valid = white[mask == 1]
    close(valid.mean().item(), 0.0)
    close(valid.var(correction=1).item(), 1.0, atol=1e-8, rtol=0)
    given = A[mask == 1]
    close(valid, (given - given.mean()) / (given.var(correction=1) + 1e-8).sqrt())
    assert (white[mask == 0] == 0).all()


def test_a_spread_too_small_to_mean_anything_is_not_blown_up():
    A = f64([[1.0, 1.0 + 2e-5]])                        # a variance of 2e-10, far below 1e-8
    expected = 1e-5 * f64([[-1, 1]]) / math.sqrt(1.02e-8)
    close(ppo.whiten(A, ones(1, 2)), expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_one_valid_token_comes_out_zero_and_so_do_none_and_equals(dtype):
    A = torch.tensor([[5.0, -3.0], [2.0, 9.0]], dtype=dtype)
    for mask in ([[0, 0], [1, 0]], [[0, 0], [0, 0]]):
        assert (ppo.whiten(A, torch.tensor(mask, dtype=dtype)) == 0).all()
    assert (ppo.whiten(torch.full_like(A, 3.0), torch.ones_like(A)) == 0).all()


# ---- explained variance ----------------------------------------------------------------------

VALUES = f64([[1, 2, 50], [3, 99, -7]])
RETURNS = f64([[2, 4, 0], [6, 0, 0]])
VALID = f64([[1, 1, 0], [1, 0, 0]])


@pytest.mark.parametrize("values, explained", [
    (VALUES, 1 - 1 / 4), (RETURNS, 1.0), (0 * VALUES + 4, 0.0), (-RETURNS, -3.0)])
def test_a_perfect_critic_explains_all_the_variance_and_one_that_knows_the_mean_none(
        values, explained):
    close(common.explained_variance(values, RETURNS, VALID), explained)
    close(common.explained_variance(values / 99, RETURNS / 99, VALID), explained)      # in any unit


def test_there_is_no_variance_to_explain_in_returns_that_are_all_but_equal():
    assert common.explained_variance(VALUES, 0 * RETURNS + 2, VALID) == 0
    assert common.explained_variance(VALUES, 1e-5 * RETURNS, VALID) == 0       # rounding, say


# ---- the clip --------------------------------------------------------------------------------

def test_the_ratio_is_new_over_old_and_one_in_masked_slots():
    logps = f64([[0.7, 0.1, 0.9]]).log()
    old_logps = f64([[0.5, 0.3, 0.1]]).log()
    ratio = ppo.log_ratio(logps, old_logps, f64([[1, 1, 0]])).exp()
    golden(ratio, f64([[1.4, 0.3333333, 1]]))


@pytest.mark.parametrize("ratio, A, objective, gradient", [
    (0.5, -10, -8, 0), (1.5, 1, 1.2, 0), (0.5, -1, -0.8, 0),
    (1.5, -1, -1.5, -1.5), (0.5, 1, 0.5, 0.5)])
def test_the_clipped_objective_and_its_gradient(ratio, A, objective, gradient):
    close(one_token(ppo.policy_loss, ratio, A), (-float(objective), -float(gradient)))


@pytest.mark.parametrize("A, ratio, has_gradient", [
    (2, 0.85, True), (2, 1.25, True), (2, 1.35, False),
    (-2, 0.85, False), (-2, 1.25, True), (-2, 1.35, True)])
def test_the_clip_stops_the_gradient_only_beyond_the_bound_that_the_advantage_pushes_to(
        A, ratio, has_gradient):
    _, gradient = one_token(ppo.policy_loss, ratio, A, 0.1, 0.3)
    close(gradient, -A * ratio * has_gradient)
    is_clipped = ppo.is_clipped(f64([[math.log(ratio)]]), f64([[A]]), 0.1, 0.3)
    assert is_clipped.item() != has_gradient


def test_the_loss_of_a_token_with_negative_advantage_is_not_bounded_above():
    close(one_token(ppo.policy_loss, 100.0, -1.0), (100.0, 100.0))


@pytest.mark.parametrize("loss_function", [ppo.policy_loss, penalized])
def test_on_fresh_samples_the_ratio_is_one_and_the_gradient_is_that_of_reinforce(loss_function):
    logps, _, A, mask = ragged()
    loss, gradient = loss_and_gradient(loss_function, logps, logps, A, mask)
    close(loss, -A[:, None] * mask)
    close(gradient, -A[:, None] * mask)


# ---- the penalty -----------------------------------------------------------------------------

@pytest.mark.parametrize("beta", [0.0, 0.7])
@pytest.mark.parametrize("A", [1.0, -2.0, 0.0])
@pytest.mark.parametrize("ratio", [0.2, 0.9, 1.0, 1.1, 5.0])
def test_the_penalty_estimates_the_kl_and_pulls_the_ratio_back_to_one(ratio, A, beta):
    kl = ratio - 1 - math.log(ratio)
    expected_loss = -ratio * A + beta * kl
    expected_gradient = -ratio * A + beta * (ratio - 1)
    close(one_token(ppo.penalty_loss, ratio, A, beta), (expected_loss, expected_gradient))


def test_the_penalty_averages_over_samples_of_the_old_policy_to_its_kl_from_the_new_one():
    old_pi = f64([0.5, 0.3, 0.2])
    theta = f64([0.2, 0.3, 0.5]).log().requires_grad_()
    logps = theta.log_softmax(dim=0)                    # a row for each action
    penalty = ppo.penalty_loss(
        logps[:, None], old_pi.log()[:, None], torch.zeros(3), ones(3, 1), 1.0)[:, 0]
    assert (penalty >= 0).all()
    mean = old_pi @ penalty
    exact = (old_pi * (old_pi.log() - logps)).sum()
    close(mean.item(), exact.item())
    gradients = [torch.autograd.grad(x, theta, retain_graph=True) for x in (mean, exact)]
    close(*gradients)


def test_the_penalty_is_exact_for_tiny_differences():
    """In float32, where exp(x) - 1 - x would mostly be rounding."""
    x = torch.linspace(-0.01, 0.01, 2001)[:, None]
    penalty = ppo.penalty_loss(x, 0 * x, torch.zeros(2001), torch.ones_like(x), 1.0)
    x = x.double()
    series = x ** 2 / 2 + x ** 3 / 6 + x ** 4 / 24
    torch.testing.assert_close(penalty.double(), series, atol=2e-9, rtol=0)


# ---- the critic's loss -----------------------------------------------------------------------

@pytest.mark.parametrize("value, target, loss, gradient", [
    (0.1, 1.0, 0.405, -0.9), (-0.1, 1.0, 0.605, -1.1),  # near the old value: squared error / 2
    (0.5, 1.0, 0.32, 0.0), (-0.5, -1.0, 0.32, 0.0),     # moved to the better: no further
    (-0.5, 1.0, 1.125, -1.5), (0.5, -1.0, 1.125, 1.5),  # moved to the worse: come back
    (0.5, 0.1, 0.08, 0.4), (-0.5, -0.1, 0.08, -0.4)])   # past the target: come back, too
def test_the_critic_is_clipped_around_its_old_value_and_the_larger_of_two_errors_counts(
        value, target, loss, gradient):
    found = loss_and_gradient(
        clipped_values, f64([[value]]), f64([[0.0]]), f64([[target]]), ones(1, 1))
    close([x.item() for x in found], [loss, gradient])


@pytest.mark.parametrize("c", [0.1, 1.0, 100.0])
def test_the_clip_of_the_critic_is_an_interval_around_the_old_value_wherever_that_is(c):
    values, old_values, returns = randn(3, 5, 7)
    near = torch.max(torch.min(values, old_values + c), old_values - c)
    expected = torch.max((values - returns) ** 2, (near - returns) ** 2) / 2
    if c == 100.0:                                      # so wide a clip does nothing
        close(expected, (values - returns) ** 2 / 2)
    close(ppo.value_loss(values, old_values, returns, ones(5, 7), c), expected)


# ---- TRPO: conjugate gradients ---------------------------------------------------------------

def positive_definite(n, shift):
    """A random symmetric matrix (n, n) with eigenvalues above `shift`."""
    root = randn(n, n, seed=n)
    return root @ root.T + shift * torch.eye(n).double()


@pytest.mark.parametrize("n", [1, 2, 5, 10])
def test_conjugate_gradients_solve_a_system_in_as_many_steps_as_it_has_unknowns(n):
    matrix = positive_definite(n, 0.5)
    b = randn(n, seed=100 + n)
    before = b.clone()
    products = []

    def product(v):
        products.append(v)
        return matrix @ v
    almost = functools.partial(torch.testing.assert_close, atol=1e-8, rtol=1e-8)
    x = ppo.conjugate_gradients(product, b)             # in 10 iterations, the default
    almost(x, torch.linalg.solve(matrix, b))
    assert len(products) <= 11
    assert torch.equal(b, before)
    almost(ppo.conjugate_gradients(product, b, iterations=n), x)
    assert (ppo.conjugate_gradients(product, 0 * b) == 0).all()


def test_conjugate_gradients_search_along_directions_that_are_conjugate():
    matrix = positive_definite(40, 1.0)
    directions = []

    def product(v):
        directions.append(v)
        return matrix @ v
    ppo.conjugate_gradients(product, randn(40), iterations=4)
    D = torch.stack(directions[:4])
    overlap = D @ matrix @ D.T                          # 0 but for the diagonal
    length = overlap.diag().sqrt()
    close(overlap / length / length[:, None], torch.eye(4).double(), atol=1e-9, rtol=0)


# ---- TRPO: the step --------------------------------------------------------------------------

class Softmax:
    """A policy in two states with three actions, linear in features; the last logit is always 0. It
    is to raise the mean of rho A over states and actions, within KL(first || now), both exact."""

    def __init__(self, seed=0):
        self.features = randn(2, 2, 3, seed=seed)       # states, free logits, weights
        self.A = 2 * randn(2, 3, seed=seed + 10)
        theta = randn(3, seed=seed + 20)
        self.weights = [theta[:2].view(1, 2).clone().requires_grad_(),      # in two pieces
                        theta[2:].clone().requires_grad_()]
        self.first = self.probabilities().detach()

    def probabilities(self):
        """-> (2, 3)"""
        theta = torch.cat([weight.flatten() for weight in self.weights])
        logits = torch.cat([self.features @ theta, torch.zeros(2, 1).double()], dim=1)
        return logits.softmax(dim=1)

    def objective(self):
        pi = self.probabilities()
        kl = self.first * (self.first / pi).log()
        return (pi * self.A).sum(dim=1).mean(), kl.sum(dim=1).mean()

    def theta(self):
        return torch.cat([weight.detach().flatten() for weight in self.weights])

    def set(self, theta):
        self.weights[0].data.copy_(theta[:2].view(1, 2))
        self.weights[1].data.copy_(theta[2:])

    def gradient(self):
        """Of the objective. -> (3,)"""
        surrogate, _ = self.objective()
        parts = torch.autograd.grad(surrogate, self.weights)
        return torch.cat([part.flatten() for part in parts])

    def fisher(self):
        """The mean over states and actions of the outer product of the score with itself. -> (3, 3)
        """
        logit_gradients = torch.cat([self.features, torch.zeros(2, 1, 3).double()], dim=1)
        mean = (self.first[:, :, None] * logit_gradients).sum(dim=1, keepdim=True)
        scores = logit_gradients - mean                                         # (2, 3, 3)
        return torch.einsum("sa,sai,saj->ij", self.first, scores, scores) / 2

    def step(self, damping, max_kl):
        """The step of eq. (11), by solving the system. -> (3,)"""
        F = self.fisher() + damping * torch.eye(3).double()
        s = torch.linalg.solve(F, self.gradient())
        return (2 * max_kl / (s @ F @ s)).sqrt() * s


@pytest.mark.parametrize("damping", [0.1, 0.0, 2.0])
def test_the_second_derivative_of_the_kl_is_the_fisher_matrix(damping, monkeypatch):
    policy = Softmax()
    systems = []

    def solve(product, b, *options):
        matrix = torch.stack([product(row) for row in torch.eye(3).double()])
        systems.append((matrix.detach(), b))
        return torch.linalg.solve(matrix, b)
    monkeypatch.setattr(ppo, "conjugate_gradients", solve)
    gradient = policy.gradient()
    ppo.trpo_step(policy.weights, policy.objective, 0.01, damping)
    [(matrix, b)] = systems
    close(matrix, policy.fisher() + damping * torch.eye(3).double())
    close(b, gradient)


def test_by_default_the_trust_region_is_a_hundredth_and_the_damping_a_tenth():
    ends = []
    for options in ((), (0.01, 0.1)):
        policy = Softmax()
        ppo.trpo_step(policy.weights, policy.objective, *options)
        ends.append(policy.theta())
    close(*ends)


@pytest.mark.parametrize("damping", [0.1, 0.0])
@pytest.mark.parametrize("max_kl", [1e-6, 0.01, 0.3, 10.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_step_is_the_longest_of_its_parts_that_stays_in_the_region_and_pays(
        damping, max_kl, seed):
    policy = Softmax(seed)
    start = policy.theta()
    step = policy.step(damping, max_kl)
    before, _ = policy.objective()
    metrics = ppo.trpo_step(policy.weights, policy.objective, max_kl, damping)
    after, kl = policy.objective()
    backtracks = int(metrics["trpo/backtracks"])
    assert after > before
    assert kl <= max_kl
    assert backtracks < 10
    torch.testing.assert_close(
        policy.theta(), start + 0.8 ** backtracks * step, atol=1e-7, rtol=1e-6)
    close((metrics["policy_kl"], metrics["loss"]), (kl.item(), -before.item()))

    if backtracks > 0:                                  # with one less, it would have been too long
        policy.set(start + 0.8 ** (backtracks - 1) * step)
        surrogate, kl = policy.objective()
        assert kl > max_kl or surrogate <= before


@pytest.mark.parametrize("A", [1.0, -1.0])
def test_a_small_step_is_the_natural_gradient_of_a_policy_with_one_free_logit(A):
    theta = f64([0.5]).requires_grad_()                 # A: of the action with the free logit
    p = theta.sigmoid().item()

    def objective():
        q = theta.sigmoid().sum()
        return q * A, p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    metrics = ppo.trpo_step([theta], objective, max_kl=1e-8, damping=0.0)
    expected = A * math.sqrt(2e-8 / (p * (1 - p))) * 0.8 ** metrics["trpo/backtracks"]
    torch.testing.assert_close(theta.item() - 0.5, expected, rtol=1e-6, atol=0)


def end_of_a_step(unit):
    """Where a softmax policy goes whose weights are measured in this unit."""
    theta = f64([0.5 / unit, -0.3 / unit]).requires_grad_()

    def probabilities():
        return torch.cat([unit * theta, f64([0.0])]).softmax(dim=0)
    first = probabilities().detach()

    def objective():
        pi = probabilities()
        return pi @ f64([1.0, -2.0, 0.5]), first @ (first / pi).log()
    ppo.trpo_step([theta], objective, max_kl=0.01, damping=0.0)
    return unit * theta.detach()


def test_the_natural_gradient_does_not_depend_on_the_units_of_the_weights():
    close(end_of_a_step(100.0), end_of_a_step(1.0), atol=1e-9, rtol=0)


@pytest.mark.parametrize("case", [
    "it never pays", "it always leaves the region", "there is no gradient"])
def test_if_nothing_helps_the_weights_stay_exactly_as_they_were(case):
    policy = Softmax()
    start = policy.theta()

    def objective():
        surrogate, kl = policy.objective()
        if case == "it never pays":
            return surrogate - surrogate.detach(), kl
        if case == "it always leaves the region":
            return surrogate, kl + 1.0
        return 0 * surrogate, kl
    metrics = ppo.trpo_step(policy.weights, objective, 0.01, 0.1)
    assert metrics["trpo/backtracks"] == 10
    assert torch.equal(policy.theta(), start)


def test_the_kl_of_a_step_is_that_of_the_old_policy_from_the_new_over_the_valid_tokens():
    cfg = ppo.Config(**(TINY | {"temperature": 0.7, "trust_region": "trpo", "max_kl": 0.02}))
    policy = ppo.GPT(cfg).double()
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(256, (3, 2), generator=generator)
    tokens = torch.randint(256, (3, 4), generator=generator)
    A = randn(3, 4)
    mask = f64([[1, 0, 0, 0], [1, 1, 1, 1], [1, 0, 1, 0]])

    def log_p():
        """Of all tokens of the vocabulary, (3, 4, V)."""
        logits = policy(torch.cat([prompts, tokens], dim=1))[:, 1:-1]
        return (logits / 0.7).log_softmax(dim=-1).detach()
    old = log_p()
    old_logps = old.gather(-1, tokens[..., None])[..., 0]
    batch = made_batch(ppo, prompts.tolist(), tokens.tolist(), mask, old_logps)
    metrics = ppo.trpo_update(policy, batch, A, cfg, 0.0)

    new = log_p()
    token_kl = (old.exp() * (old - new)).sum(dim=-1)
    kl = (token_kl * mask).sum() / mask.sum()
    torch.testing.assert_close(metrics["policy_kl"], kl.item(), rtol=1e-9, atol=0)
    assert 0.001 < kl <= 0.02
    ratio = (new - old).gather(-1, tokens[..., None])[..., 0].exp()
    assert (ratio * A * mask).sum() > (A * mask).sum()


# ---- coefficients ----------------------------------------------------------------------------

@pytest.mark.parametrize("kl, factor", [
    (0.16, 2.0), (0.14, 1.0), (0.07, 1.0), (0.06, 0.5), (0.0, 0.5), (-0.1, 0.5)])
def test_a_coefficient_doubles_above_1_5_times_the_target_and_halves_below_the_target_by_1_5(
        kl, factor):
    close(ppo.adapt_coefficient(3.0, kl, 0.1), 3.0 * factor)
    assert ppo.adapt_coefficient(3.0, kl, 0.0) == 3.0           # without a target it stays


# ---- masks, shapes, arguments ----------------------------------------------------------------

@pytest.mark.parametrize("loss_function", [ppo.policy_loss, penalized])
def test_advantages_are_per_row_or_per_token(loss_function):
    logps, old_logps, A, mask = ragged()
    token_A = A[:, None] * f64([[1, -1, 0.5, 2]])
    whole = loss_function(logps, old_logps, token_A, mask)
    for t in range(4):
        close(whole[:, t], loss_function(logps, old_logps, token_A[:, t], mask)[:, t])
    by_row = loss_function(logps, old_logps, A, mask)
    close(loss_function(logps, old_logps, A[:, None].expand(3, 4), mask), by_row)
    square = loss_function(logps[:, :3], old_logps[:, :3], A, mask[:, :3])
    close(square, by_row[:, :3])                        # B = T: they still go by row


@pytest.mark.parametrize("loss_function", [ppo.policy_loss, penalized, clipped_values])
def test_masked_slots_contribute_nothing_even_if_they_hold_wild_values(loss_function):
    logps, old_logps, A, mask = ragged()
    A = A[:, None].expand(3, 4)
    loss, gradient = loss_and_gradient(loss_function, logps, old_logps, A, mask)
    wild_loss, wild_gradient = loss_and_gradient(
        loss_function, torch.where(mask == 0, WILD, logps),
        torch.where(mask == 0, OLD_WILD, old_logps), torch.where(mask == 0, 1e6, A), mask)
    close((wild_loss, wild_gradient), (loss, gradient), atol=0, rtol=0)
    for values in (loss, gradient):
        assert (values[mask == 0] == 0).all()
        assert values.isfinite().all()
        assert values.any()


@pytest.mark.parametrize("loss_function", [ppo.policy_loss, penalized])
def test_the_old_policy_gets_no_gradient(loss_function):
    logps, old_logps, A, mask = ragged()
    logps.requires_grad_()
    old_logps.requires_grad_()
    loss_function(logps, old_logps, A, mask).sum().backward()
    assert old_logps.grad is None
    assert logps.grad.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_shapes_and_types_are_kept_and_no_argument_is_changed(dtype):
    logps, old_logps, A, mask = (x.to(dtype) for x in ragged())
    rewards = -logps
    values = 2 * old_logps
    lengths = torch.tensor([1.0, 3.0, 4.0], dtype=dtype)
    arguments = (logps, old_logps, A, mask, rewards, values, lengths)
    before = [x.clone() for x in arguments]
    lam = ppo.length_adaptive_lambda(lengths, 0.5)
    assert lam.shape == (3, 1)
    assert lam.dtype == dtype
    results = [*ppo.gae(rewards, values, mask, 0.9, 0.95),
               *ppo.gae(rewards, values, mask, 0.9, lam),
               ppo.whiten(rewards, mask), ppo.policy_loss(logps, old_logps, A, mask),
               ppo.penalty_loss(logps, old_logps, A, mask, 0.7),
               ppo.value_loss(values, 0.9 * values, rewards, mask, 0.2)]
    for result in results:
        assert result.shape == (3, 4)
        assert result.dtype == dtype
    for argument, copied in zip(arguments, before):
        assert torch.equal(argument, copied)
