"""Which estimates of the KL have its gradient, as a loss or in the reward: all outputs of two
tokens are enumerated, in float64."""
import math

import pytest
import torch
from conftest import ROOT, close, f64
from conftest import gradient as slope

import dpo
import grpo
import gspo
import ppo
import reinforce

# of x = log pi - log pi_ref = -1/2 and 1, with pi / pi_old = 2: the estimate, its slope in log pi
ESTIMATES = {"k1": ([-0.5, 1.0], [1.0, 1.0]),
             "k2": ([0.125, 0.5], [-0.5, 1.0]),
             "k3": ([math.exp(0.5) - 1.5, math.exp(-1)], [1 - math.exp(0.5), 1 - math.exp(-1)]),
             "k3_ratio": ([2 * math.exp(0.5) - 3, 2 * math.exp(-1)], [-1.0, 2.0])}


def two_tokens(theta):
    """Compute the log-probabilities of the tokens of all outputs; row 0 of theta has the logits of
    the first token, row 1 + i those of the second token after token i. (1 + V, V) -> (V * V, 2)"""
    first, second = theta[0].log_softmax(dim=-1), theta[1:].log_softmax(dim=-1)
    V = len(first)
    return torch.stack([first[:, None].expand(V, V), second], dim=-1).view(-1, 2)


def kls_of_tokens(theta, ref, old):
    """Compute the mean of KL(pi || pi_ref) at each token, exactly, over prefixes of pi_old."""
    log_p, log_ref = theta.log_softmax(dim=-1), ref.log_softmax(dim=-1)
    kl = (log_p.exp() * (log_p - log_ref)).sum(dim=-1)                          # (1 + V,)
    return kl[0] + (old[0].softmax(dim=-1) * kl[1:]).sum()


def kl_of_outputs(theta, ref):
    logps = two_tokens(theta).sum(dim=1)
    return (logps.exp() * (logps - two_tokens(ref).sum(dim=1))).sum()


def mean_of_loss(estimator, theta, ref, old):
    """Average the sum over tokens of an estimate, as a loss, over all outputs of pi_old."""
    logps, ref_logps, old_logps = map(two_tokens, (theta, ref, old))
    log_rho = grpo.log_ratio(logps, old_logps, torch.ones_like(logps))
    p = old_logps.sum(dim=1, keepdim=True).exp()
    return (p * grpo.kl(logps, ref_logps, estimator, log_rho)).sum()


def policies(seed):
    """Draw pi, pi_ref and pi_old. -> three tables of logits"""
    torch.manual_seed(seed)
    theta, ref, old = (2 * torch.randn(4, 3, dtype=torch.float64) for _ in range(3))
    return theta.requires_grad_(), ref, old


@pytest.mark.parametrize("script, estimators", [
    (reinforce, ["k1"]), (ppo, ["k1", "k3"]), (dpo, ["k3"]), (grpo, ESTIMATES), (gspo, ESTIMATES)])
def test_every_scripts_own_estimates_have_their_values_for_both_signs(script, estimators):
    logps, old_logps = f64([-1.5, -1.0]).requires_grad_(), f64([-1.5, -1.0]) - math.log(2)
    ref_logps = f64([-1.0, -2.0])
    for estimator in estimators:
        ratio = [logps - old_logps] if estimator == "k3_ratio" else []
        found = script.kl(logps, ref_logps, estimator, *ratio)
        for one, expected in zip((found, slope(found, logps)), ESTIMATES[estimator]):
            close(one, f64(expected))


def test_k3_ratio_has_the_gradient_of_the_kl_at_each_token_with_the_tokens_before_it_fixed():
    theta, ref, old = policies(0)
    exact = slope(kls_of_tokens(theta, ref, old), theta)
    close(slope(mean_of_loss("k3_ratio", theta, ref, old), theta), exact)
    on_policy = slope(kls_of_tokens(theta, ref, theta.detach()), theta)
    close(slope(mean_of_loss("k2", theta, ref, theta.detach()), theta), on_policy)
    assert not torch.allclose(slope(mean_of_loss("k3", theta, ref, theta.detach()), theta),
                              on_policy, rtol=0.1)


def test_only_the_kl_in_the_reward_has_the_gradient_of_the_kl_between_whole_outputs():
    cosines = []
    for seed in range(300):
        theta, ref, _ = policies(seed)
        exact = slope(kl_of_outputs(theta, ref), theta)
        found = slope(mean_of_loss("k3_ratio", theta, ref, theta.detach()), theta)
        cosines.append(torch.cosine_similarity(found.flatten(), exact.flatten(), dim=0))
    logps = two_tokens(theta)
    mask = torch.ones_like(logps)
    rewards = -reinforce.kl(logps, two_tokens(ref)).detach()
    A = reinforce.rewards_to_go(rewards, mask, 1.0)
    p = logps.detach().sum(dim=1, keepdim=True).exp()
    close(slope((p * reinforce.policy_loss(logps, A, mask)).sum(), theta), exact)
    low, median = torch.stack(cosines).quantile(torch.tensor([0.0, 0.5]).double()).tolist()
    page = " ".join((ROOT / "docs/methods.md").read_text("utf-8").split())
    assert f"is {median:.3f} in the median, and {low:.2f} in the worst case" in page
