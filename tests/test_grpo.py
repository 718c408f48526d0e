"""The algorithm of grpo.py against golden numbers, and against other definitions. What it has in
common with the other scripts is in test_family.py, the KL in test_kl.py."""
import functools
import itertools
import math

import pytest
import torch
from conftest import f64

import grpo

pytestmark = pytest.mark.quick

close = functools.partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)
golden = functools.partial(torch.testing.assert_close, atol=6e-8, rtol=0)   # written with 7 digits


def one_token(ratio, A, log_pi=-1.0, **options):
    """Loss and gradient of one token whose probability is exp(log_pi). -> two floats"""
    logps = f64([[log_pi]]).requires_grad_()
    old_logps = f64([[log_pi - math.log(ratio)]])
    loss = grpo.policy_loss(logps, old_logps, f64([A]), torch.ones_like(logps), **options)
    return loss.item(), torch.autograd.grad(loss.sum(), logps)[0].item()


# ---- advantages ------------------------------------------------------------------------------

@pytest.mark.parametrize("rewards, options, expected", [
    ([0, 0, 1, 0], {}, [-0.4999, -0.4999, 1.4997, -0.4999]),
    ([0, 0, 1, 0], {"eps": 0.0}, [-0.5, -0.5, 1.5, -0.5]),
    ([0, 0, 1, 0], {"scale_rewards": "none"}, [-0.25, -0.25, 0.75, -0.25]),
    ([0, 0, 1, 0], {"scale_rewards": "mean"}, [-1, -1, 3, -1]),
    ([0.5, 0, 0, 0.5], {"scale_rewards": "mean"}, [1, -1, -1, 1]),
    ([1, 1, 0, 1, 0], {}, [0.7301634, 0.7301634, -1.0952452, 0.7301634, -1.0952452]),   # ddof 1
    ([0.50, 0.51, 0.50, 0.51], {}, [-0.851, 0.851, -0.851, 0.851]),     # the spread counts
    ([-1, 0, 0, 0], {"scale_rewards": "mean"}, [0, 0, 0, 0]),   # by a divisor below 0, good is bad
    ([-0.5, 0.5, 0, 0], {"scale_rewards": "mean"}, [0, 0, 0, 0])], ids=str)
def test_advantages_of_a_group(rewards, options, expected):
    digits = max(len(str(x)) for x in expected) - 3
    found = grpo.advantages(f64([rewards]), **options)
    torch.testing.assert_close(found, f64([expected]), atol=0.6 * 10.0 ** -digits, rtol=0)


def test_a_group_is_scaled_by_its_own_spread_or_mean():
    rewards = f64([[0, 0, 1, 0], [0, 10, 20, 30], [7, 7, 7, 7]])
    for scale_rewards in ("group", "mean", "none"):
        together = grpo.advantages(rewards, scale_rewards)
        for p in range(3):
            close(grpo.advantages(rewards[p:p + 1], scale_rewards), together[p:p + 1])


@pytest.mark.parametrize("is_right", [(0, 0, 1), (0, 1, 1)])
@pytest.mark.parametrize("G", [2, 3, 5])
def test_scale_rewards_mean_has_the_gradient_of_a_truncated_log_likelihood_of_being_right(
        G, is_right):
    """log p = -sum_k (1 - p)^k / k; a group of G takes the terms k < G. By enumeration of all
    groups of G outputs, of three."""
    theta = f64([0.3, -0.2, -1.1]).requires_grad_()
    logps = theta.log_softmax(dim=0)
    groups = torch.tensor(list(itertools.product(range(3), repeat=G)))          # (3^G, G)
    A = grpo.advantages(f64(is_right)[groups], "mean")
    chances = logps.detach()[groups].sum(dim=1).exp()
    gains = (A * logps[groups]).mean(dim=1)
    found = torch.autograd.grad((chances * gains).sum(), theta, retain_graph=True)[0]
    wrong = 1 - (logps.exp() * f64(is_right)).sum()
    log_likelihood = -sum(wrong ** k / k for k in range(1, G))
    close(found, torch.autograd.grad(log_likelihood, theta)[0])


@pytest.mark.parametrize("buffer, expected", [
    (10, [0, 0, 0, -0.1, -0.5, -0.9, -1, -1]), (2, [0, 0, 0, 0, 0, -0.5, -1, -1]),
    (1, [0, 0, 0, 0, 0, 0, -1, -1]), (0, [0, 0, 0, 0, 0, 0, 0, 0])])
def test_the_overlong_penalty_is_a_ramp_over_the_buffer(buffer, expected):
    lengths = torch.tensor([0, 29, 30, 31, 35, 39, 40, 41]).view(2, 4)
    if buffer == 0:
        lengths = lengths.clamp(max=40)                 # which no completion is longer than
    found = grpo.overlong_penalty(lengths.double(), 40, buffer)
    close(found, f64(expected).view(2, 4))
    assert grpo.overlong_penalty(lengths, 40, buffer).shape == (2, 4)


# ---- ratio and surrogates --------------------------------------------------------------------

WIDE = {"epsilon": 0.2, "epsilon_high": 0.28, "delta": 3.0}


@pytest.mark.parametrize("ratio, A, options, objective, gradient", [
    (0.5, -10, {}, -8.0, 0.0),
    (1.5, 1, {}, 1.2, 0.0),
    (0.5, -1, {}, -0.8, 0.0),
    (1.5, -1, {}, -1.5, -1.5),
    (0.5, 1, {}, 0.5, 0.5),
    (100, -1, {}, -100, -100),              # not bounded from above
    (4, -1, WIDE, -3, 0),
    (4, -2, WIDE, -6, 0),
    (2.5, -1, WIDE, -2.5, -2.5),
    (0.5, -1, WIDE, -0.8, 0),
    (4, 1, WIDE, 1.28, 0)], ids=str)
def test_the_clipped_objective_and_its_gradient(ratio, A, options, objective, gradient):
    close(one_token(ratio, A, **options), (-float(objective), -float(gradient)))


def test_tokens_count_as_clipped_exactly_where_the_range_stops_the_gradient():
    log_rho = torch.linspace(-0.5, 0.5, 41).double().expand(3, -1)              # (3, 41)
    A = f64([1.5, -2.0, 0.0])
    logps = torch.full_like(log_rho, -1.0).requires_grad_()
    loss = grpo.policy_loss(
        logps, logps.detach() - log_rho, A, torch.ones_like(logps), epsilon=0.2, epsilon_high=0.28)
    gradient = torch.autograd.grad(loss.sum(), logps)[0]
    clipped = grpo.is_clipped(log_rho, A[:, None], 0.2, 0.28)
    assert torch.equal(clipped[:2], gradient[:2] == 0)
    assert clipped.any(dim=1).tolist() == [True, True, False]


def test_cispo_bounds_the_weight_of_a_token_above_only_and_never_stops_its_gradient():
    golden(one_token(1.5, 2.0, math.log(0.6), loss_type="cispo"), (1.2259815, -2.4))
    close(one_token(1.5, -2.0, loss_type="cispo", epsilon_high=0.3), (-2.6, 2.6))
    close(one_token(0.01, 2.0, loss_type="cispo"), (0.02, -0.02))


@pytest.mark.parametrize("A, ratio, gate, weight", [
    (1, 0.5, 1.5101627, 0.4700074),
    (1, 1.0, 2.0, 1.0),
    (1, 1.5, 2.4898373, 1.4100223),
    (-1, 2.0, 2.8219996, 1.5362196)])
def test_sapo_is_a_soft_gate_with_a_higher_temperature_where_the_advantage_is_negative(
        A, ratio, gate, weight):
    golden(one_token(ratio, A, loss_type="sapo"), (-gate * A, -weight * A))
