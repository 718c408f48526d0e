"""Test the KL estimators and their gradients in the loss, by enumerating all outputs of a small
policy. grpo.py has all estimators, so most tests use only this script."""
import importlib

import pytest
import torch
from conftest import SCRIPTS, close, f64, golden, gradient, randn

import grpo

pytestmark = pytest.mark.quick

ESTIMATORS = {"reinforce": ["k1", "k3"], "ppo": ["k1", "k3"], "dpo": ["k3"]}    # others have all


def exact_kl(p, q):
    """Compute KL(p || q) of the distributions in the last dimension."""
    return (p * (p / q).log()).sum(dim=-1)


@pytest.fixture
def states():
    """Logits of a policy with 3 actions in each of 4 states, and the probabilities of an older
    policy and of a reference. -> (4, 3) each"""
    theta, old, ref = randn(3, 4, 3)
    return theta.requires_grad_(), old.softmax(dim=-1), ref.softmax(dim=-1)


# ---- the estimates ---------------------------------------------------------------------------

@pytest.mark.parametrize("script", SCRIPTS)
def test_k1_and_k3_average_to_the_kl_of_the_policy_from_the_reference_and_k2_does_not(
        script, states):
    kl = importlib.import_module(script).kl
    p, ref = f64([[0.5, 0.5]]), f64([[0.9, 0.1]])
    means = {"k1": 0.5108256, "k2": 0.7339459, "k3": 0.5108256}
    for estimator in ESTIMATORS.get(script, means):
        golden((p * kl(p.log(), ref.log(), estimator)).sum().item(), means[estimator])
        assert (kl(ref.log(), ref.log(), estimator) == 0).all()
    theta, _, ref = states
    p = theta.detach().softmax(dim=-1)
    for estimator in {"k1", "k3"}.intersection(ESTIMATORS.get(script, means)):
        close((p * kl(p.log(), ref.log(), estimator)).sum(dim=-1), exact_kl(p, ref))
    close(kl(p.log(), ref.log()), kl(p.log(), ref.log(), "k3"))         # k3 is the default
    with pytest.raises(AssertionError, match="k9"):
        kl(p.log(), ref.log(), "k9")


def test_k3_is_never_negative_and_exact_for_tiny_differences():
    x = torch.linspace(-0.01, 0.01, 2001)[None]     # in float32, where exp(-x) + x - 1 is rounded
    k3 = grpo.kl(x, torch.zeros_like(x), "k3")
    assert (k3 >= 0).all()
    x = x.double()
    series = x ** 2 / 2 - x ** 3 / 6 + x ** 4 / 24
    torch.testing.assert_close(k3.double(), series, atol=2e-9, rtol=0)


# ---- gradients at a given prefix -------------------------------------------------------------

def test_in_a_loss_k1_does_nothing_k2_has_the_gradient_of_the_kl_and_k3_of_the_reverse_kl(states):
    theta, _, ref = states
    p = theta.softmax(dim=-1)
    expected = {"k1": 0 * exact_kl(p, ref), "k2": exact_kl(p, ref), "k3": exact_kl(ref, p),
                "k3_ratio": exact_kl(p, ref)}
    log_rho = p.log() - p.log().detach()                # 0, but with a gradient
    for estimator, exact in expected.items():
        sampled = p.detach() * grpo.kl(p.log(), ref.log(), estimator, log_rho)
        for state in range(4):
            close(gradient(sampled[state].sum(), theta), gradient(exact[state], theta))
    assert gradient((expected["k2"] - expected["k3"]).sum(), theta).abs().max() > 0.1


def test_on_samples_of_an_older_policy_the_estimates_need_the_ratio_to_have_their_gradients(states):
    theta, old, ref = states
    p = theta.softmax(dim=-1)
    log_rho = grpo.log_ratio(p.log(), old.log(), torch.ones_like(p))
    k1, k2, k3, k3_ratio = (grpo.kl(p.log(), ref.log(), name, log_rho)
                            for name in ("k1", "k2", "k3", "k3_ratio"))
    ratio = log_rho.exp()
    forward_kl = gradient(exact_kl(p, ref).sum(), theta)
    reverse_kl = gradient(exact_kl(ref, p).sum(), theta)

    def found(sampled):
        """Differentiate the mean over samples of the older policy. -> (4, 3)"""
        return gradient((old * sampled).sum(), theta)
    close(found(k3_ratio), forward_kl)
    close(found(ratio * k1), forward_kl)
    close(found(ratio * k1.detach()), forward_kl)
    close(found(ratio.detach() * k2), forward_kl)
    close(found(ratio.detach() * k3), reverse_kl)
    close(found(ratio.detach() * k1), 0 * forward_kl)
    assert not torch.allclose(found(k3), forward_kl, atol=0.01)
    assert not torch.allclose(found(k3), reverse_kl, atol=0.01)
