"""Test what the KL estimators and their gradients in the loss are on average, by enumerating all
outputs of a small policy. The estimates themselves are among the test vectors."""
import pytest
import torch
from conftest import close, gradient, randn

import grpo

pytestmark = pytest.mark.quick


def exact_kl(p, q):
    """Compute KL(p || q) of the distributions in the last dimension."""
    return (p * (p / q).log()).sum(dim=-1)


@pytest.fixture
def states():
    """Logits of a policy with 3 actions in each of 4 states, and the probabilities of an older
    policy and of a reference. -> (4, 3) each"""
    theta, old, ref = randn(3, 4, 3)
    return theta.requires_grad_(), old.softmax(dim=-1), ref.softmax(dim=-1)


def test_in_a_loss_k1_does_nothing_k2_has_the_gradient_of_the_kl_and_k3_of_the_reverse_kl(states):
    theta, _, ref = states
    p = theta.softmax(dim=-1)
    expected = {"k1": 0 * exact_kl(p, ref), "k2": exact_kl(p, ref), "k3": exact_kl(ref, p),
                "k3_ratio": exact_kl(p, ref)}
    log_rho = p.log() - p.log().detach()                # 0, but with a gradient
    for estimator in ("k1", "k3"):
        close((p * grpo.kl(p.log(), ref.log(), estimator)).sum(dim=-1), exact_kl(p, ref))
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
