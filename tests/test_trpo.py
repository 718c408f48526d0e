"""Test examples/trpo.py: the step on a policy whose Fisher matrix is known, and the bound on the
exact KL. test_resume.py tests a resumed run."""
import importlib

import pytest
import torch
from conftest import TINY, close, randn
from small_runs import INSTANT, arguments, steps
from torch.nn.functional import pad

import common
import ppo

trpo = importlib.import_module("examples.trpo")
pytestmark = pytest.mark.quick


# ---- the step --------------------------------------------------------------------------------

class Softmax:
    """A policy with three actions in two states; the last logit is always 0. The step should raise
    the mean of rho A over states and actions, and keep KL(first || now) small. Both are exact."""

    def __init__(self, seed=0):
        self.A = 2 * randn(2, 3, seed=seed + 10)
        theta = randn(4, seed=seed + 20)                # the free logits, in two pieces
        self.weights = [theta[:2].view(1, 2).clone().requires_grad_(),
                        theta[2:].clone().requires_grad_()]
        self.first = self.probabilities().detach()

    def probabilities(self):
        """Compute the probabilities of all actions in both states. -> (2, 3)"""
        return pad(trpo.flatten(self.weights).view(2, 2), (0, 1)).softmax(dim=1)

    def objective(self):
        pi = self.probabilities()
        kl = self.first * (self.first / pi).log()
        return (pi * self.A).sum(dim=1).mean(), kl.sum(dim=1).mean()

    def theta(self):
        return trpo.flatten(self.weights).detach()

    def set(self, theta):
        self.weights[0].data.copy_(theta[:2].view(1, 2))
        self.weights[1].data.copy_(theta[2:])

    def gradient(self):
        """Compute the gradient of the objective. -> (4,)"""
        L, _ = self.objective()
        return trpo.flatten(torch.autograd.grad(L, self.weights))

    def fisher(self):
        """Average the covariance of the scores over the states. -> (4, 4)"""
        p = self.first[:, :2]
        return torch.block_diag(*(torch.diag(x) - torch.outer(x, x) for x in p)) / 2


@pytest.mark.parametrize("damping", [0.1, 0.0])
@pytest.mark.parametrize("max_kl", [1e-6, 0.01, 0.3, 10.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_step_is_the_longest_of_its_parts_that_stays_in_the_region_and_pays(
        damping, max_kl, seed):
    policy = Softmax(seed)
    start = policy.theta()
    F = policy.fisher() + damping * torch.eye(4).double()
    x = torch.linalg.solve(F, policy.gradient())
    step = (2 * max_kl / (x @ F @ x)).sqrt() * x
    before, _ = policy.objective()
    metrics = trpo.trust_region_step(policy.weights, policy.objective, max_kl, damping)
    after, kl = policy.objective()
    backtracks = int(metrics["trpo/backtracks"])
    assert after > before and kl <= max_kl and backtracks < 10
    torch.testing.assert_close(
        policy.theta(), start + 0.8 ** backtracks * step, atol=1e-7, rtol=1e-6)
    close((metrics["policy_kl"], metrics["loss"]), (kl.item(), -before.item()))

    if backtracks > 0:                                  # one backtrack less was not enough
        policy.set(start + 0.8 ** (backtracks - 1) * step)
        L, kl = policy.objective()
        assert kl > max_kl or before >= L


@pytest.mark.parametrize("case", [
    "it never pays", "it always leaves the region", "there is no gradient"])
def test_if_nothing_helps_the_weights_stay_exactly_as_they_were(case):
    policy = Softmax()
    start = policy.theta()

    def objective():
        L, D = policy.objective()
        if case == "it never pays":
            return L - L.detach(), D
        if case == "it always leaves the region":
            return L, D + 1.0
        return 0 * L, D
    metrics = trpo.trust_region_step(policy.weights, objective, 0.01, 0.1)
    assert metrics["trpo/backtracks"] == 10
    assert torch.equal(policy.theta(), start)


# ---- the update ------------------------------------------------------------------------------

@pytest.mark.parametrize("micro_batch_size", [3, 32])
def test_an_update_goes_uphill_within_the_exact_kl_of_the_valid_tokens(micro_batch_size):
    flags = TINY | {"task": "gridworld", "temperature": 0.7, "max_kl": 0.02}
    cfg = trpo.Config(**flags, micro_batch_size=micro_batch_size)
    policy = ppo.GPT(cfg).double()
    policy.embed.weight.data *= 20                      # so that tokens differ
    batch = ppo.sample_batch(policy, common.load_task(cfg, ppo.verify), cfg, 0)
    batch.lengths = torch.tensor([1, 4, 6, 8] * 4)
    batch.mask = (torch.arange(8) < batch.lengths[:, None]).to(batch.mask)
    batch.mask[::3, 1] = 0                              # inserted by an environment
    A = randn(16, 8)

    def log_p():
        """Compute the log-probabilities of all tokens of the vocabulary. -> (16, 8, V)"""
        logits = policy(torch.cat([batch.prompts, batch.tokens], dim=1))[:, -9:-1]
        return (logits / 0.7).log_softmax(dim=-1).detach()

    def mean(x):
        return ((x * batch.mask).sum() / batch.mask.sum()).item()
    old = log_p()
    batch.logps = old.gather(-1, batch.tokens[..., None])[..., 0] * batch.mask
    metrics = trpo.update(policy, batch, A, cfg)
    new = log_p()
    kl = mean((old.exp() * (old - new)).sum(dim=-1))
    assert metrics["policy_kl"] == pytest.approx(kl, rel=1e-6)
    assert 0.3 * 0.02 < kl <= 0.02
    ratio = (new - old).gather(-1, batch.tokens[..., None])[..., 0].exp()
    assert mean(ratio * A) > mean(A) + 0.01
    assert metrics["loss"] == pytest.approx(-mean(A), abs=1e-6)


def test_beta_adapts_to_the_kl_from_the_base_and_not_to_that_of_the_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trpo.main(arguments(INSTANT | {"task": "gridworld", "beta": 0.1, "kl_target": 1e-5,
                                   "max_steps": 2, "output_dir": "run"}))
    first, second = steps("run")
    assert abs(first["kl"]) < 1e-6 < 1e-4 < first["policy_kl"]
    assert (first["beta"], second["beta"]) == (0.1, 0.05)
