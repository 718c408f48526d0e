"""Test examples/trpo.py: the step on a policy whose Fisher matrix is known. test_resume.py tests a
resumed run."""
import importlib

import pytest
import torch
from conftest import close, randn
from small_runs import INSTANT, arguments, steps
from torch.nn.functional import pad

trpo = importlib.import_module("examples.trpo")
pytestmark = pytest.mark.quick


# ---- the step --------------------------------------------------------------------------------

def softmax_policy(seed=0):
    """Make a policy with three actions in two states; the last logit is always 0. The step should
    raise L, the mean of rho A over states and actions, and keep D, the KL, small. Both are exact.
    -> the free logits (4,), L and D, which are functions of such logits"""
    A = 2 * randn(2, 3, seed=seed + 10)
    start = randn(4, seed=seed + 20)

    def probabilities(theta):
        return pad(theta.view(2, 2), (0, 1)).softmax(dim=1)
    first = probabilities(start)

    def L(theta):
        return (probabilities(theta) * A).sum(dim=1).mean()

    def D(theta):
        return (first * (first / probabilities(theta)).log()).sum(dim=1).mean()
    return start, L, D


def step(start, L, D, max_kl, damping):
    """Take the step, with the weights in two pieces. -> weights (4,), metrics"""
    weights = [start[:2].view(1, 2).clone().requires_grad_(), start[2:].clone().requires_grad_()]

    def objective():
        theta = trpo.flatten(weights)
        return L(theta), D(theta)
    metrics = trpo.trust_region_step(weights, objective, max_kl, damping)
    return trpo.flatten(weights).detach(), metrics


@pytest.mark.parametrize("damping", [0.1, 0.0])
@pytest.mark.parametrize("max_kl", [1e-6, 0.01, 0.3, 10.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_step_is_the_longest_of_its_parts_that_stays_in_the_region_and_pays(
        damping, max_kl, seed):
    start, L, D = softmax_policy(seed)
    F = torch.autograd.functional.hessian(D, start) + damping * torch.eye(4).double()
    x = torch.linalg.solve(F, torch.autograd.functional.jacobian(L, start))
    whole = (2 * max_kl / (x @ F @ x)).sqrt() * x
    end, metrics = step(start, L, D, max_kl, damping)
    backtracks = int(metrics["trpo/backtracks"])
    assert L(end) > L(start) and D(end) <= max_kl and backtracks < 10
    torch.testing.assert_close(end, start + 0.8 ** backtracks * whole, atol=1e-7, rtol=1e-6)
    close((metrics["policy_kl"], metrics["loss"]), (D(end).item(), -L(start).item()))

    if backtracks > 0:                                  # one backtrack less was not enough
        longer = start + 0.8 ** (backtracks - 1) * whole
        assert D(longer) > max_kl or L(start) >= L(longer)


@pytest.mark.parametrize("case", [
    "it never pays", "it always leaves the region", "there is no gradient"])
def test_if_nothing_helps_the_weights_stay_exactly_as_they_were(case):
    start, L, D = softmax_policy()
    functions = {
        "it never pays": (lambda theta: L(theta) - L(theta).detach(), D),
        "it always leaves the region": (L, lambda theta: D(theta) + 1),
        "there is no gradient": (lambda theta: 0 * L(theta), D)}[case]
    end, metrics = step(start, *functions, 0.01, 0.1)
    assert metrics["trpo/backtracks"] == 10
    assert torch.equal(end, start)


# ---- the update ------------------------------------------------------------------------------

def test_beta_adapts_to_the_kl_from_the_base_and_not_to_that_of_the_step(own_folder):
    trpo.main(arguments(INSTANT | {"task": "gridworld", "beta": 0.1, "kl_target": 1e-5,
                                   "max_steps": 2, "output_dir": "run"}))
    first, second = steps("run")
    assert abs(first["kl"]) < 1e-6 < 1e-4 < first["policy_kl"]
    assert (first["beta"], second["beta"]) == (0.1, 0.05)
