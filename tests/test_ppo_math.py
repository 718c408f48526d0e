"""The algorithm of ppo.py: advantages from a critic, the clip, the critic's loss, and TRPO's step, against
numbers worked out by hand and against definitions that sum over everything."""
import functools
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import f64, ragged

import ppo

close = functools.partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)
golden = functools.partial(torch.testing.assert_close, atol=6e-8, rtol=0)      # numbers written with 7 digits


def ones(*shape):
    return torch.ones(shape, dtype=torch.float64)


def gradient(loss, x):
    return torch.autograd.grad(loss.sum(), x, retain_graph=True)[0]


def one_token(loss_function, ratio, A, *options):
    """Loss, and its gradient in the log-prob, of one token whose ratio is as given. -> two floats"""
    new, old = f64([[-1.0]]).requires_grad_(), f64([[-1.0 - math.log(ratio)]])
    loss = loss_function(new, old, f64([A]), ones(1, 1), *options)
    return loss.item(), gradient(loss, new).item()


def episode():
    """Rewards and values of three rows, and masks that end early, have a hole, or neither."""
    draw = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 3, 6, generator=draw).double()
    return rewards, values, f64([[1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1]])


# ---- advantages from a critic ------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma, lam, A, returns", [
    (1, 0.5, (0.5, 0.4, 0.2), (0.7, 0.9, 1.0)), (1, 0.95, (0.7655, 0.49, 0.2), (0.9655, 0.99, 1.0)),
    (0.9, 0.5, (0.3895, 0.31, 0.2), (0.5895, 0.81, 1.0))])
def test_advantages_and_returns_of_an_answer_that_turns_out_right(gamma, lam, A, returns):
    rewards, values = f64([[0, 0, 1]]), f64([[0.2, 0.5, 0.8]])
    close(ppo.gae(rewards, values, ones(1, 3), float(gamma), lam), (f64([A]), f64([returns])))


def n_step_advantage(rewards, values, t, n, gamma):
    """Of lists: what n rewards and the value after them say, less the value before; 0 after the end."""
    rewards, values = rewards + n * [0.0], values + n * [0.0]
    return sum(gamma ** k * rewards[t + k] for k in range(n)) + gamma ** n * values[t + n] - values[t]


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_the_advantage_is_the_weighted_average_of_all_n_step_advantages_the_endless_tail_included(gamma, lam):
    rewards, values, _ = episode()
    A, _ = ppo.gae(rewards, values, ones(3, 6), gamma, lam)
    for row, t in itertools.product(range(3), range(6)):
        r, V, left = rewards[row].tolist(), values[row].tolist(), 6 - t
        steps = [n_step_advantage(r, V, t, n, gamma) for n in range(1, left + 1)]
        weights = [(1 - lam) * lam ** (n - 1) for n in range(1, left)] + [lam ** (left - 1)]
        close(sum(weights), 1.0)
        close(A[row, t].item(), sum(w * a for w, a in zip(weights, steps)))


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_with_lambda_zero_the_advantage_is_the_error_of_one_step_and_with_one_that_of_the_whole_return(gamma):
    rewards, values, _ = episode()
    following = torch.cat([values[:, 1:], torch.zeros(3, 1).double()], 1)
    close(ppo.gae(rewards, values, ones(3, 6), gamma, 0.0)[0], rewards + gamma * following - values)
    discounts = f64([[gamma ** (k - t) if k >= t else 0.0 for t in range(6)] for k in range(6)])
    A, returns = ppo.gae(rewards, values, ones(3, 6), gamma, 1.0)
    close(A, rewards @ discounts - values)
    close(returns, rewards @ discounts)                     # what the critic says has dropped out


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("wild", [0.0, 1e30])
def test_masked_slots_inside_a_row_and_behind_it_are_skipped_and_are_not_steps(lam, wild):
    rewards, values, mask = episode()
    given = [torch.where(mask == 1, x, wild) for x in (rewards, values)]
    A, returns = ppo.gae(*given, mask, 0.9, lam)
    for row, on in enumerate(mask == 1):
        squeezed = [x[row, on][None] for x in (rewards, values)]
        expected = ppo.gae(*squeezed, torch.ones_like(squeezed[0]), 0.9, lam)
        close((A[row, on][None], returns[row, on][None]), expected)
        assert (A[row, ~on] == 0).all() and (returns[row, ~on] == 0).all()


def test_returns_are_the_advantages_before_whitening_plus_the_values():
    rewards, values, mask = episode()
    for lam in (0.0, 0.5, 1.0):
        A, returns = ppo.gae(rewards, values, mask, 0.9, lam)
        close(returns * mask, (A + values) * mask)


def test_every_row_may_have_a_lambda_of_its_own():
    rewards, values, mask = episode()
    together = ppo.gae(rewards, values, mask, 0.9, f64([[0.0], [0.5], [1.0]]))
    for row, lam in enumerate((0.0, 0.5, 1.0)):
        alone = ppo.gae(rewards, values, mask, 0.9, lam)
        close((together[0][row], together[1][row]), (alone[0][row], alone[1][row]))


@pytest.mark.parametrize("n, lam", [(20, 0.0), (40, 0.5), (100, 0.8), (1000, 0.98), (1, 0.0), (19, 0.0)])
def test_the_longer_an_answer_the_nearer_its_lambda_to_one(n, lam):
    close(ppo.length_adaptive_lambda(f64([n, 10 * n]), 0.05), f64([[lam], [1 - 2 / n if n > 1 else 0]]))
    assert ppo.length_adaptive_lambda(torch.tensor([n]), 1.0).tolist() == [[pytest.approx(1 - 1 / n)]]


# ---- whitening ---------------------------------------------------------------------------------------------


def test_whitened_advantages_have_mean_zero_and_variance_one_over_the_valid_tokens():
    x, _, mask = episode()
    x = 3 * x + 7
    for wild in (0.0, 1e9):
        white = ppo.whiten(torch.where(mask == 1, x, wild), mask)
        valid, given = white[mask == 1], x[mask == 1]
        close(valid.mean().item(), 0.0)
        close(valid.var(correction=1).item(), 1.0, atol=1e-8, rtol=0)
        close(valid, (given - given.mean()) / (given.var(correction=1) + 1e-8).sqrt())
        assert (white[mask == 0] == 0).all()


def test_a_spread_too_small_to_mean_anything_is_not_blown_up():
    x = f64([[1.0, 1.0 + 2e-5]])                            # a variance of 2e-10, far below 1e-8
    close(ppo.whiten(x, ones(1, 2)), 1e-5 * f64([[-1, 1]]) / math.sqrt(1.02e-8), atol=1e-9, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_one_valid_token_comes_out_zero_and_so_do_none_and_equals(dtype):
    x = torch.tensor([[5.0, -3.0], [2.0, 9.0]], dtype=dtype)
    for mask in ([[0, 0], [1, 0]], [[0, 0], [0, 0]]):
        assert (ppo.whiten(x, torch.tensor(mask, dtype=dtype)) == 0).all()
    assert (ppo.whiten(torch.full_like(x, 3.0), torch.ones_like(x)) == 0).all()


def test_the_explained_variance_is_one_of_a_perfect_critic_and_zero_of_one_that_knows_the_mean():
    values, mask = f64([[1, 2, 50], [3, 99, -7]]), f64([[1, 1, 0], [1, 0, 0]])
    returns = f64([[2, 4, 0], [6, 0, 0]])
    close(float(ppo.explained_variance(values, returns, mask)), 1 - 1 / 4)
    close(float(ppo.explained_variance(returns, returns, mask)), 1.0)
    close(float(ppo.explained_variance(values / 99, returns / 99, mask)), 1 - 1 / 4)    # in any unit
    close(float(ppo.explained_variance(0 * values + 4, returns, mask)), 0.0)
    close(float(ppo.explained_variance(-returns, returns, mask)), -3.0)
    assert float(ppo.explained_variance(values, 0 * returns + 2, mask)) == 0      # nothing to explain


# ---- the clip ----------------------------------------------------------------------------------------------


def test_the_ratio_is_new_over_old_and_one_in_masked_slots():
    new, old = f64([[0.7, 0.1, 0.9]]).log(), f64([[0.5, 0.3, 0.1]]).log()
    golden(ppo.log_ratio(new, old, f64([[1, 1, 0]])).exp(), f64([[1.4, 0.3333333, 1]]))


@pytest.mark.parametrize("ratio, A, objective, slope", [
    (0.5, -10, -8, 0), (1.5, 1, 1.2, 0), (0.5, -1, -0.8, 0), (1.5, -1, -1.5, -1.5), (0.5, 1, 0.5, 0.5)])
def test_the_clipped_objective_and_its_gradient(ratio, A, objective, slope):
    close(one_token(ppo.policy_loss, ratio, A), (-float(objective), -float(slope)))


@pytest.mark.parametrize("A, ratio, live", [
    (2, 0.85, True), (2, 1.25, True), (2, 1.35, False),
    (-2, 0.85, False), (-2, 1.25, True), (-2, 1.35, True)])
def test_clipping_stops_the_gradient_only_where_the_ratio_has_moved_out_on_the_side_that_pays(A, ratio, live):
    _, slope = one_token(ppo.policy_loss, ratio, A, 0.1, 0.3)
    close(slope, -A * ratio * live)


def test_the_loss_of_a_bad_token_made_likelier_is_not_bounded():
    close(one_token(ppo.policy_loss, 100.0, -1.0), (100.0, 100.0))


def test_on_fresh_samples_the_ratio_is_one_and_the_gradient_is_that_of_reinforce():
    logps, _, A, mask = ragged()
    fresh = logps.requires_grad_()
    for loss in (ppo.policy_loss(fresh, fresh, A, mask), ppo.penalty_loss(fresh, fresh, A, mask, 3.0)):
        close(loss.detach(), -A[:, None] * mask)
        close(gradient(loss, fresh), -A[:, None] * mask)


# ---- the penalised form ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.2, 0.9, 1.0, 1.1, 5.0])
def test_the_penalty_is_an_estimate_of_the_kl_that_pulls_the_ratio_back_to_one(ratio):
    for A, beta in itertools.product((1.0, -2.0, 0.0), (0.0, 0.7)):
        kl = ratio - 1 - math.log(ratio)
        close(one_token(ppo.penalty_loss, ratio, A, beta),
              (-ratio * A + beta * kl, -ratio * A + beta * (ratio - 1)))


def test_the_penalty_averages_over_samples_of_the_old_policy_to_its_kl_from_the_new_one():
    old, new = f64([0.5, 0.3, 0.2]), f64([0.2, 0.3, 0.5])
    theta = new.log().requires_grad_()
    logps = theta.log_softmax(0)
    penalty = ppo.penalty_loss(logps[:, None], old.log()[:, None], torch.zeros(3), ones(3, 1), 1.0)[:, 0]
    exact = (old * (old.log() - logps)).sum()
    assert (penalty >= 0).all()
    close((old @ penalty).item(), exact.item())
    close(gradient(old @ penalty, theta), gradient(exact, theta))


def test_the_penalty_is_exact_for_tiny_differences():
    x = torch.linspace(-0.01, 0.01, 2001)[:, None]      # in float32, where exp(x) - 1 - x is mostly rounding
    penalty = ppo.penalty_loss(x, 0 * x, torch.zeros(2001), torch.ones_like(x), 1.0)
    series = x.double() ** 2 / 2 + x.double() ** 3 / 6 + x.double() ** 4 / 24
    torch.testing.assert_close(penalty.double(), series, atol=2e-9, rtol=0)


# ---- the critic's loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize("V, R, loss, slope", [
    (0.1, 1.0, 0.405, -0.9), (-0.1, 1.0, 0.605, -1.1),      # near the old value: half the squared error
    (0.5, 1.0, 0.32, 0.0), (-0.5, -1.0, 0.32, 0.0),         # moved out to the better: no further
    (-0.5, 1.0, 1.125, -1.5), (0.5, -1.0, 1.125, 1.5),      # moved out to the worse: come back
    (0.5, 0.1, 0.08, 0.4), (-0.5, -0.1, 0.08, -0.4)])       # past the target: come back, too
def test_the_critic_is_clipped_around_its_old_value_and_the_worse_of_two_errors_counts(V, R, loss, slope):
    V, old = f64([[V]]).requires_grad_(), f64([[0.0]])
    found = ppo.value_loss(V, old, f64([[R]]), ones(1, 1), 0.2)
    close((found.item(), gradient(found, V).item()), (loss, slope))


def test_the_clip_of_the_critic_is_an_interval_around_the_old_value_wherever_that_is():
    draw = torch.Generator().manual_seed(0)
    V, old, R = torch.randn(3, 5, 7, generator=draw).double()
    for c in (0.1, 1.0, 100.0):
        clipped = torch.max(torch.min(V, old + c), old - c)
        close(ppo.value_loss(V, old, R, ones(5, 7), c), torch.max((V - R) ** 2, (clipped - R) ** 2) / 2)
    close(ppo.value_loss(V, old, R, ones(5, 7), 100.0), (V - R) ** 2 / 2)


# ---- TRPO --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 5, 10])
def test_conjugate_gradients_solve_a_positive_definite_system_in_as_many_steps_as_it_has_unknowns(n):
    draw = torch.Generator().manual_seed(n)
    root, b = torch.randn(n, n, generator=draw).double(), torch.randn(n, generator=draw).double()
    matrix = root @ root.T + 0.5 * torch.eye(n).double()
    before, products = b.clone(), []

    def product(v):
        products.append(v)
        return matrix @ v

    x = ppo.conjugate_gradients(product, b)                                 # 10 iterations if not told
    torch.testing.assert_close(x, torch.linalg.solve(matrix, b), atol=1e-8, rtol=1e-8)
    assert len(products) <= 11 and torch.equal(b, before)
    torch.testing.assert_close(ppo.conjugate_gradients(product, b, iterations=n), x, atol=1e-8, rtol=1e-8)
    assert (ppo.conjugate_gradients(product, 0 * b) == 0).all()


def test_conjugate_gradients_search_along_directions_that_do_not_disturb_each_other():
    draw = torch.Generator().manual_seed(0)
    root, b = torch.randn(40, 40, generator=draw).double(), torch.randn(40, generator=draw).double()
    matrix, directions = root @ root.T + torch.eye(40).double(), []

    def product(v):
        directions.append(v)
        return matrix @ v

    ppo.conjugate_gradients(product, b, iterations=4)
    D = torch.stack(directions[:4])
    overlap = D @ matrix @ D.T
    close(overlap / overlap.diag().sqrt() / overlap.diag().sqrt()[:, None], torch.eye(4).double(),
          atol=1e-9, rtol=0)


class Softmax:
    """A policy in two states of three actions, by features of few weights; the last logit is 0. It maximises
    the mean of rho A over all actions of its first self, within KL(first || now), both exact."""

    def __init__(self, seed=0, size=2.0):
        draw = torch.Generator().manual_seed(seed)
        self.features = torch.randn(2, 2, 3, generator=draw).double()       # states, free logits, weights
        self.A = size * torch.randn(2, 3, generator=draw).double()
        self.weights = [torch.randn(1, 2, generator=draw).double().requires_grad_(),        # in two pieces
                        torch.randn(1, generator=draw).double().requires_grad_()]
        self.first = self.probabilities().detach()

    def probabilities(self):
        free = self.features @ torch.cat([weight.view(-1) for weight in self.weights])      # (2, 2)
        return torch.cat([free, torch.zeros(2, 1).double()], 1).softmax(1)                  # (2, 3)

    def objective(self):
        pi = self.probabilities()
        return (pi * self.A).sum(1).mean(), (self.first * (self.first / pi).log()).sum(1).mean()

    def flat(self):
        return torch.cat([weight.detach().view(-1) for weight in self.weights])

    def fisher(self):
        """The mean over states and actions of the outer product of the score with itself. -> (3, 3)"""
        logits = torch.cat([self.features, torch.zeros(2, 1, 3).double()], 1)               # (2, 3, 3)
        scores = logits - (self.first[:, :, None] * logits).sum(1, keepdim=True)
        return (self.first[:, :, None, None] * scores[..., None] * scores[:, :, None]).sum(1).mean(0)

    def step(self, damping, max_kl):
        """The step of eq. (10), by solving the system."""
        g = torch.cat([x.view(-1) for x in torch.autograd.grad(self.objective()[0], self.weights)])
        F = self.fisher() + damping * torch.eye(3).double()
        s = torch.linalg.solve(F, g)
        return (2 * max_kl / (s @ F @ s)).sqrt() * s


@pytest.mark.parametrize("damping", [0.1, 0.0, 2.0])
def test_the_second_derivative_of_the_kl_is_the_fisher_matrix(damping, monkeypatch):
    policy, seen = Softmax(), {}

    def spy(product, b, *options):
        seen["F"] = torch.stack([product(row) for row in torch.eye(3).double()])
        seen["g"] = b
        return torch.linalg.solve(seen["F"], b)

    monkeypatch.setattr(ppo, "conjugate_gradients", spy)
    gradients = torch.autograd.grad(policy.objective()[0], policy.weights)
    ppo.trpo_step(policy.weights, policy.objective, 0.01, damping)
    close(seen["F"].detach(), policy.fisher() + damping * torch.eye(3).double())
    close(seen["g"].detach(), torch.cat([x.view(-1) for x in gradients]))


def test_the_trust_region_is_a_hundredth_and_the_damping_a_tenth_if_none_are_given():
    ends = []
    for options in ((), (0.01, 0.1)):
        policy = Softmax()
        ppo.trpo_step(policy.weights, policy.objective, *options)
        ends.append(policy.flat())
    close(*ends)


@pytest.mark.parametrize("damping", [0.1, 0.0])
@pytest.mark.parametrize("max_kl", [1e-6, 0.01, 0.3, 10.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_step_is_the_longest_of_its_backtracks_that_stays_in_the_region_and_pays(damping, max_kl, seed):
    policy = Softmax(seed)
    start, step, (before, _) = policy.flat(), policy.step(damping, max_kl), policy.objective()
    metrics = ppo.trpo_step(policy.weights, policy.objective, max_kl, damping)
    after, kl = policy.objective()
    n = int(metrics["trpo/backtracks"])
    assert after > before and kl <= max_kl and n < 10
    torch.testing.assert_close(policy.flat(), start + 0.8 ** n * step, atol=1e-7, rtol=1e-6)
    close((metrics["policy_kl"], metrics["loss"]), (kl.item(), -before.item()))
    if n:                                                   # one backtrack less would have been too long
        for weight, part in zip(policy.weights, (start + 0.8 ** (n - 1) * step).split([2, 1])):
            weight.data.copy_(part.view_as(weight))
        surrogate, kl = policy.objective()
        assert kl > max_kl or surrogate <= before


def test_a_small_step_is_the_natural_gradient_of_a_policy_with_one_free_logit():
    for A, sign in ((1.0, 1), (-1.0, -1)):                  # of the action with the free logit
        theta = f64([0.5]).requires_grad_()
        p = theta.sigmoid().item()

        def objective(theta=theta, A=A, p=p):
            q = theta.sigmoid().sum()
            return q * A, p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()

        metrics = ppo.trpo_step([theta], objective, max_kl=1e-8, damping=0.0)
        moved = sign * math.sqrt(2e-8 / (p * (1 - p))) * 0.8 ** metrics["trpo/backtracks"]
        torch.testing.assert_close(theta.item() - 0.5, moved, rtol=1e-6, atol=0)


def test_the_natural_gradient_does_not_depend_on_the_units_of_the_weights():
    ends = []
    for unit in (1.0, 100.0):
        theta = f64([0.5 / unit, -0.3 / unit]).requires_grad_()
        first = torch.cat([unit * theta.detach(), f64([0.0])]).softmax(0)

        def objective(theta=theta, first=first, unit=unit):
            pi = torch.cat([unit * theta, f64([0.0])]).softmax(0)
            return pi @ f64([1.0, -2.0, 0.5]), first @ (first / pi).log()

        ppo.trpo_step([theta], objective, max_kl=0.01, damping=0.0)
        ends.append(unit * theta.detach())
    close(ends[1], ends[0], atol=1e-9, rtol=0)


@pytest.mark.parametrize("case", ["it never pays", "it always leaves the region", "there is no gradient"])
def test_if_nothing_helps_the_weights_stay_exactly_as_they_were(case):
    policy = Softmax()
    start = [weight.detach().clone() for weight in policy.weights]

    def objective():
        surrogate, kl = policy.objective()
        return {"it never pays": (surrogate - surrogate.detach(), kl),
                "it always leaves the region": (surrogate, kl + 1.0),
                "there is no gradient": (0 * surrogate, kl)}[case]

    metrics = ppo.trpo_step(policy.weights, objective, 0.01, 0.1)
    assert metrics["trpo/backtracks"] == 10
    assert all(torch.equal(weight, old) for weight, old in zip(policy.weights, start))


def test_the_kl_of_a_trust_region_step_is_that_of_the_old_policy_from_the_new_over_the_valid_tokens():
    cfg = ppo.Config(device="cpu", num_threads=1, temperature=0.7, trust_region="trpo", max_kl=0.02,
                     hidden_size=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=16)
    policy, draw = ppo.GPT(cfg).double(), torch.Generator().manual_seed(0)
    prompts, tokens = (torch.randint(256, shape, generator=draw) for shape in ((3, 2), (3, 4)))
    A, mask = torch.randn(3, 4, generator=draw).double(), f64([[1, 0, 0, 0], [1, 1, 1, 1], [1, 0, 1, 0]])

    def logp():
        logits = policy(torch.cat([prompts, tokens], 1))[:, 1:-1]
        return (logits / 0.7).log_softmax(-1).detach()                      # (3, 4, V)

    old = logp()
    old_logps = old.gather(-1, tokens[..., None])[..., 0]
    out = ppo.Rollout(tokens, mask, old_logps, 0 * old_logps, torch.tensor([1, 4, 4]))
    batch = SimpleNamespace(prompts=prompts, of=torch.arange(3), out=out)
    metrics = ppo.trpo_update(policy, batch, A, torch.zeros(3, 1), torch.arange(3), cfg,
                              {"entropy": 0.0, "penalty": 0.0})
    new = logp()
    kl = ((old.exp() * (old - new)).sum(-1) * mask).sum() / mask.sum()
    torch.testing.assert_close(metrics["policy_kl"], kl.item(), rtol=1e-9, atol=0)
    ratio = (new - old).gather(-1, tokens[..., None])[..., 0].exp()
    assert 0.001 < kl <= 0.02 and (ratio * A * mask).sum() > (A * mask).sum()


@pytest.mark.parametrize("kl, factor", [(0.16, 2.0), (0.14, 1.0), (0.07, 1.0), (0.06, 0.5), (0.0, 0.5)])
def test_a_coefficient_doubles_beyond_1_5_times_the_target_and_halves_below_the_target_by_1_5(kl, factor):
    close(ppo.adapted(3.0, kl, 0.1), 3.0 * factor)
    assert ppo.adapted(3.0, kl, 0.0) == 3.0                 # without a target it is fixed


# ---- masks, shapes, arguments ------------------------------------------------------------------------------


def test_advantages_are_per_row_or_per_token():
    logps, old_logps, A, mask = ragged()
    per_token = A[:, None] * f64([[1, -1, 0.5, 2]])
    for loss in (ppo.policy_loss, functools.partial(ppo.penalty_loss, beta=0.7)):
        whole = loss(logps, old_logps, per_token, mask)
        columns = [loss(logps, old_logps, per_token[:, t], mask)[:, t] for t in range(4)]
        close(whole, torch.stack(columns, 1))
        close(loss(logps, old_logps, A[:, None].expand(3, 4), mask), loss(logps, old_logps, A, mask))
        square = [x[:, :3] for x in (logps, old_logps, mask)]                       # B = T: still by row
        close(loss(*square[:2], A, square[2]), loss(logps, old_logps, A, mask)[:, :3])


def test_masked_slots_contribute_nothing_even_if_they_hold_wild_values():
    logps, old_logps, A, mask = ragged()
    wild = torch.where(mask == 0, f64([[-1e30, 1e30, -1e4, 1e4]]), logps)
    old_wild = torch.where(mask == 0, f64([[1e30, 1e30, 1e4, -1e4]]), old_logps)
    A_wild = torch.where(mask == 0, 1e6, A[:, None].expand(3, 4))
    for loss in (ppo.policy_loss, functools.partial(ppo.penalty_loss, beta=0.7),
                 functools.partial(ppo.value_loss, cliprange_value=0.2)):
        found = []
        for new, old, advantages in ((logps, old_logps, A[:, None].expand(3, 4)), (wild, old_wild, A_wild)):
            new = new.clone().requires_grad_()
            terms = loss(new, old, advantages, mask)
            found.append((terms.detach(), gradient(terms, new)))
        close(found[1], found[0], atol=0, rtol=0)
        assert all((x[mask == 0] == 0).all() and x.isfinite().all() and x.any() for x in found[1])


def test_the_old_policy_and_the_old_critic_get_no_gradient():
    logps, old_logps, A, mask = ragged()
    for loss in (ppo.policy_loss, functools.partial(ppo.penalty_loss, beta=0.7)):
        new, old = logps.clone().requires_grad_(), old_logps.clone().requires_grad_()
        loss(new, old, A, mask).sum().backward()
        assert old.grad is None and new.grad.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_shapes_and_types_are_kept_and_no_argument_is_changed(dtype):
    logps, old_logps, A, mask = (x.to(dtype) for x in ragged())
    rewards, values = -logps, 2 * old_logps
    lengths = torch.tensor([1.0, 3.0, 4.0], dtype=dtype)
    arguments = (logps, old_logps, A, mask, rewards, values, lengths)
    before = [x.clone() for x in arguments]
    lam = ppo.length_adaptive_lambda(lengths, 0.5)
    assert lam.shape == (3, 1) and lam.dtype == dtype
    results = [*ppo.gae(rewards, values, mask, 0.9, 0.95), *ppo.gae(rewards, values, mask, 0.9, lam),
               ppo.whiten(rewards, mask), ppo.policy_loss(logps, old_logps, A, mask),
               ppo.penalty_loss(logps, old_logps, A, mask, 0.7),
               ppo.value_loss(values, 0.9 * values, rewards, mask, 0.2)]
    assert all(x.shape == (3, 4) and x.dtype == dtype for x in results)
    assert all(torch.equal(x, y) for x, y in zip(arguments, before))
