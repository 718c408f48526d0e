"""What a KL penalty does, by enumeration of all that a small policy can say: the estimators, their
gradients in the loss and in the reward, and the policy that learning with each of them ends at."""
import functools
import itertools

import pytest
import torch
from conftest import f64

import dpo
import grpo
import gspo
import ppo
import reinforce

pytestmark = pytest.mark.quick

SCRIPTS = (reinforce, ppo, grpo, gspo, dpo)
ESTIMATORS = ("k1", "k2", "k3")
close = functools.partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)
golden = functools.partial(torch.testing.assert_close, atol=6e-8, rtol=0)   # written with 7 digits
every_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)

# Three actions: the reference, the rewards, and the policy with the highest E[r] - BETA KL.
REF = f64([0.5, 0.3, 0.2])
REWARDS = f64([1.0, 0.0, 0.0])
BETA = 0.5
OPTIMUM = f64([0.8807971, 0.0715218, 0.0476812])


def exact_kl(p, q):
    """KL(p || q) of the distributions in the last dimension."""
    return (p * (p / q).log()).sum(dim=-1)


def estimates(script, p, ref, estimator):
    """The estimate at every outcome, in every state. (S, V), (S, V) -> (S, V)"""
    return script.kl(p.log(), ref.log(), estimator)


def four_states():
    """Logits of a policy in 4 states of 3 actions, the probabilities of an older policy, and those
    of a reference. (4, 3) each"""
    generator = torch.Generator().manual_seed(0)
    theta, old, ref = torch.randn(3, 4, 3, generator=generator).double()
    return theta.requires_grad_(), old.softmax(dim=-1), ref.softmax(dim=-1)


def gradient(loss, theta):
    """The gradient of a loss in theta; the graph is kept for another one."""
    return torch.autograd.grad(loss, theta, retain_graph=True)[0]


# ---- the estimates ---------------------------------------------------------------------------

@every_script
@pytest.mark.parametrize("estimator, mean", [
    ("k1", 0.5108256),
    ("k2", 0.7339459),
    ("k3", 0.5108256)])
def test_k1_and_k3_average_to_the_kl_and_k2_does_not(script, estimator, mean):
    p = f64([[0.5, 0.5]])
    ref = f64([[0.9, 0.1]])
    golden((p * estimates(script, p, ref, estimator)).sum().item(), mean)


@every_script
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_average_to_the_kl_of_the_policy_from_the_reference_in_every_state(
        script, estimator):
    theta, _, ref = four_states()
    p = theta.detach().softmax(dim=-1)
    means = (p * estimates(script, p, ref, estimator)).sum(dim=-1)              # (4,)
    close(means, exact_kl(p, ref))


@every_script
@pytest.mark.parametrize("distance", [1e-2, 1e-3])
def test_k2_agrees_with_the_kl_to_second_order_in_the_distance(script, distance):
    p = f64([[0.5, 0.3, 0.2]])
    ref = p + distance * f64([[0.2, 0.1, -0.3]])
    k2 = (p * estimates(script, p, ref, "k2")).sum(dim=-1)
    kl = exact_kl(p, ref)
    assert kl > 0.2 * distance ** 2
    assert (k2 - kl).abs() < 0.2 * distance ** 3


@every_script
def test_k2_and_k3_are_never_negative_and_k1_is_where_the_reference_finds_an_action_likelier(
        script):
    theta, _, ref = four_states()
    p = theta.detach().softmax(dim=-1)
    assert (estimates(script, p, ref, "k2") >= 0).all()
    assert (estimates(script, p, ref, "k3") >= 0).all()
    k1 = estimates(script, p, ref, "k1")
    assert torch.equal(k1 > 0, p > ref)
    assert (k1 < 0).any()


@every_script
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimate_is_exactly_zero_where_the_policy_is_the_reference(script, estimator):
    _, _, ref = four_states()
    assert (estimates(script, ref, ref, estimator) == 0).all()


@every_script
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_shapes_and_types_are_those_of_the_log_probs_and_no_argument_is_changed(
        script, dtype, estimator):
    theta, _, ref = four_states()
    logps = theta.detach().log_softmax(dim=-1).to(dtype)
    ref_logps = ref.log().to(dtype)
    before = (logps.clone(), ref_logps.clone())
    kl = script.kl(logps, ref_logps, estimator)
    assert kl.shape == (4, 3)
    assert kl.dtype == dtype
    assert torch.equal(logps, before[0])
    assert torch.equal(ref_logps, before[1])


@every_script
def test_k3_is_exact_for_tiny_differences(script):
    x = torch.linspace(-0.01, 0.01, 2001)[None]     # in float32, where exp(-x) + x - 1 is rounded
    k3 = script.kl(x, torch.zeros_like(x), "k3")
    x = x.double()
    series = x ** 2 / 2 - x ** 3 / 6 + x ** 4 / 24
    torch.testing.assert_close(k3.double(), series, atol=2e-9, rtol=0)


# ---- in the loss -----------------------------------------------------------------------------

@every_script
def test_in_a_loss_k1_does_nothing_k2_has_the_gradient_of_the_kl_and_k3_of_the_reverse_kl(script):
    theta, _, ref = four_states()
    p = theta.softmax(dim=-1)
    expected = {"k1": 0 * exact_kl(p, ref), "k2": exact_kl(p, ref), "k3": exact_kl(ref, p)}
    for estimator, exact in expected.items():
        sampled = p.detach() * estimates(script, p, ref, estimator)     # samples of a fixed policy
        for state in range(4):
            close(gradient(sampled[state].sum(), theta), gradient(exact[state], theta))
    difference = (exact_kl(p, ref) - exact_kl(ref, p)).sum()
    assert gradient(difference, theta).abs().max() > 0.1


@every_script
def test_on_samples_of_an_older_policy_the_estimates_need_the_ratio_to_have_their_gradients(script):
    theta, old, ref = four_states()
    p = theta.softmax(dim=-1)
    ratio = grpo.log_ratio(p.log(), old.log(), torch.ones_like(p)).exp()
    weight = ratio.detach()
    k1 = estimates(script, p, ref, "k1")
    k2 = estimates(script, p, ref, "k2")
    k3 = estimates(script, p, ref, "k3")
    forward_kl = gradient(exact_kl(p, ref).sum(), theta)
    reverse_kl = gradient(exact_kl(ref, p).sum(), theta)

    def found(sampled):
        """The gradient of the mean over samples of the older policy."""
        return gradient((old * sampled).sum(), theta)
    close(found(ratio * k1), forward_kl)
    close(found(ratio * k3), forward_kl)
    close(found(ratio * k1.detach()), forward_kl)
    close(found(weight * k2), forward_kl)
    close(found(weight * k3), reverse_kl)
    close(found(weight * k1), 0 * forward_kl)
    assert not torch.allclose(found(k3), forward_kl, atol=0.01)
    assert not torch.allclose(found(k3), reverse_kl, atol=0.01)


@every_script
def test_k3_by_the_ratio_has_the_value_and_the_gradient_of_the_kl_on_samples_of_another_policy(
        script):
    theta = f64([0.3, -0.8, 1.1]).requires_grad_()
    logps = theta.log_softmax(dim=0)
    ref_logps = f64([-0.2, 0.5, 0.4]).log_softmax(dim=0)
    old_logps = f64([0.6, -0.1, 0.2]).log_softmax(dim=0)
    old = old_logps.exp()
    mean = (old * script.kl(logps, ref_logps, "k3_ratio", logps - old_logps)).sum()
    golden(mean.item(), 0.263452454)
    golden(gradient(mean, theta), f64([0.012166811, -0.164330733, 0.152163922]))
    close(mean, exact_kl(logps.exp(), ref_logps.exp()))
    without = (old * script.kl(logps, ref_logps, "k3")).sum()
    golden(gradient(without, theta), f64([0.275374875, -0.739900732, 0.464525857]))


@every_script
def test_k3_by_a_ratio_of_one_is_k3_with_the_gradient_of_the_kl(script):
    theta, _, ref = four_states()
    p = theta.softmax(dim=-1)
    log_rho = p.log() - p.log().detach()
    k3 = estimates(script, p, ref, "k3")
    found = script.kl(p.log(), ref.log(), "k3_ratio", log_rho)
    close(found, k3)
    sampled = p.detach() * found
    close(gradient(sampled.sum(), theta), gradient(exact_kl(p, ref).sum(), theta))


# ---- in the reward ---------------------------------------------------------------------------

@every_script
def test_the_further_from_the_reference_the_larger_the_penalty_by_k1_in_the_reward(script):
    means = []
    for share in (0.0, 0.3, 0.6, 0.9):
        p = (1 - share) * REF + share * f64([0.0, 0.0, 1.0])
        k1 = estimates(script, p[None], REF[None], "k1")[0]
        means.append((p * -BETA * k1).sum().item())
    assert means[0] == 0
    assert means == sorted(means, reverse=True)
    assert means[-1] < -0.3


@every_script
def test_the_value_of_the_optimum_is_beta_times_the_logarithm_of_its_normaliser(script):
    weights = REF * (REWARDS / BETA).exp()
    golden(weights.sum().item(), 4.1945280)
    p = weights / weights.sum()
    golden(p, OPTIMUM)
    net_rewards = REWARDS - BETA * estimates(script, p[None], REF[None], "k1")[0]
    close(net_rewards, net_rewards[:1].expand(3))       # every action is worth the same
    golden((p * net_rewards).sum().item(), 0.7168904)


def mean_loss(script, theta, beta, place):
    """The loss of eq. (5) of grpo.py, averaged over all samples of the policy. The KL is in the
    reward, or in the loss by the estimator that `place` names."""
    logps = theta.log_softmax(dim=0)[:, None]           # (3, 1): a row of one token for each action
    ref_logps = REF.log()[:, None]
    rewards = REWARDS
    if place == "reward":
        rewards = REWARDS - beta * script.kl(logps.detach(), ref_logps, "k1")[:, 0]
    loss = grpo.policy_loss(logps, logps, rewards, torch.ones_like(logps))
    if place != "reward":
        loss = loss + beta * script.kl(logps, ref_logps, place)
    return (logps.detach().exp() * loss).sum()


@every_script
@pytest.mark.parametrize("place, optimum, tolerance", [
    ("reward", OPTIMUM, 1e-7),
    ("k2", OPTIMUM, 1e-7),
    ("k3", f64([0.8090, 0.1146, 0.0764]), 6e-5)])
def test_k1_in_the_reward_and_k2_in_the_loss_end_at_the_optimum_and_k3_in_the_loss_elsewhere(
        script, place, optimum, tolerance):
    theta = f64([0.0, 0.0, 0.0]).requires_grad_()
    for _ in range(400):
        theta.data -= 4 * gradient(mean_loss(script, theta, BETA, place), theta)
    p = theta.detach().softmax(dim=0)
    torch.testing.assert_close(p, optimum, atol=tolerance, rtol=0)
    assert gradient(mean_loss(script, theta, BETA, place), theta).abs().max() < 1e-9


@every_script
def test_with_k1_in_the_loss_the_policy_learns_as_if_there_were_no_penalty(script):
    theta = f64([0.3, -0.8, 1.1]).requires_grad_()
    without = gradient(mean_loss(script, theta, 0.0, "k1"), theta)
    in_loss = gradient(mean_loss(script, theta, BETA, "k1"), theta)
    in_reward = gradient(mean_loss(script, theta, BETA, "reward"), theta)
    close(in_loss, without)
    assert not torch.allclose(in_reward, without, atol=0.01)


# ---- sequences -------------------------------------------------------------------------------

class Sequences:
    """All nine sequences of two tokens, of three, with the log-probs of a policy and a reference.
    A policy has four states: the start, and after each first token."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.theta = torch.randn(4, 3, generator=generator).double().requires_grad_()
        ref = torch.randn(4, 3, generator=generator).double().log_softmax(dim=-1)
        self.tokens = torch.tensor(list(itertools.product(range(3), range(3))))     # (9, 2)
        start = torch.zeros(9, dtype=torch.long)
        self.states = torch.stack([start, 1 + self.tokens[:, 0]], dim=1)            # (9, 2)
        self.ref_logps = ref[self.states, self.tokens]                              # (9, 2)

    def logps(self):
        return self.theta.log_softmax(dim=-1)[self.states, self.tokens]             # (9, 2)

    def gradient_of_kl(self):
        """That of the exact KL of whole sequences. (4, 3)"""
        logps = self.logps().sum(dim=1)
        kl = (logps.exp() * (logps - self.ref_logps.sum(dim=1))).sum()
        return gradient(kl, self.theta)

    def gradient_of_mean(self, loss):
        """That of the mean of a loss (9,), over samples of the policy as it is. (4, 3)"""
        chances = self.logps().detach().sum(dim=1).exp()
        return gradient((chances * loss).sum(), self.theta)


@every_script
def test_over_several_tokens_k1_summed_in_the_reward_has_the_gradient_of_the_kl(script):
    sequences = Sequences()
    logps = sequences.logps()
    k1 = script.kl(logps.detach(), sequences.ref_logps, "k1").sum(dim=1)
    loss = grpo.policy_loss(logps, logps, -k1, torch.ones_like(logps)).sum(dim=1)
    close(sequences.gradient_of_mean(loss), sequences.gradient_of_kl())


@every_script
def test_over_several_tokens_k2_of_the_whole_sequence_has_the_gradient_of_the_kl(script):
    sequences = Sequences()
    logps = sequences.logps().sum(dim=1, keepdim=True)
    ref_logps = sequences.ref_logps.sum(dim=1, keepdim=True)
    k2 = script.kl(logps, ref_logps, "k2")[:, 0]
    close(sequences.gradient_of_mean(k2), sequences.gradient_of_kl())


@every_script
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_over_several_tokens_no_estimate_summed_in_the_loss_has_the_gradient_of_the_kl(
        script, estimator):
    sequences = Sequences()
    token_kl = script.kl(sequences.logps(), sequences.ref_logps, estimator)
    found = sequences.gradient_of_mean(token_kl.sum(dim=1))
    exact = sequences.gradient_of_kl()
    assert not torch.allclose(found, exact, atol=1e-12)
    if estimator == "k2":           # exact at the last token: no later state depends on it
        close(found[1:], exact[1:])


@every_script
def test_an_unknown_estimator_is_refused(script):
    with pytest.raises(AssertionError, match="k9"):
        script.kl(REF.log(), REF.log(), "k9")


@pytest.mark.parametrize("script", (reinforce, ppo, grpo, gspo), ids=lambda script: script.__name__)
def test_an_unknown_average_is_refused(script):
    losses = torch.ones(2, 3)
    with pytest.raises(AssertionError, match="sequence_meen"):
        script.aggregate(losses, losses, "sequence_meen")
