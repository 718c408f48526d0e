"""What a KL penalty does, by enumeration of all that a small policy can say: the estimators, their gradients
in the loss and in the reward, and the policy each of them comes to rest at."""
import functools
import itertools

import pytest
import torch

import dpo
import grpo
import gspo
import ppo
import reinforce

SCRIPTS = (reinforce, ppo, grpo, gspo, dpo)
ESTIMATORS = ("k1", "k2", "k3")
close = functools.partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)
golden = functools.partial(torch.testing.assert_close, atol=6e-8, rtol=0)      # numbers written with 7 digits
every_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


REF, REWARDS, BETA = f64([0.5, 0.3, 0.2]), f64([1.0, 0.0, 0.0]), 0.5
OPTIMUM = f64([0.8807971, 0.0715218, 0.0476812])


def exact_kl(p, q):
    """KL(p || q) of the distributions in the last dimension."""
    return (p * (p / q).log()).sum(-1)


def estimates(script, p, ref, estimator):
    """The estimator at every outcome. (S, V) -> (S, V)"""
    return script.kl(p.log(), ref.log(), estimator)


def states():
    """Logits of a policy in 4 states of 3 actions, and the probabilities of another and of a reference."""
    draw = torch.Generator().manual_seed(0)
    theta, old, ref = torch.randn(3, 4, 3, generator=draw).double()
    return theta.requires_grad_(), old.softmax(-1), ref.softmax(-1)


def gradient(loss, theta):
    return torch.autograd.grad(loss, theta)[0]


# ---- the estimates -----------------------------------------------------------------------------------------


@every_script
def test_k1_and_k3_average_to_the_kl_of_the_policy_from_the_reference_and_k2_does_not(script):
    p, ref = f64([[0.5, 0.5]]), f64([[0.9, 0.1]])
    for estimator, mean in (("k1", 0.5108256), ("k3", 0.5108256), ("k2", 0.7339459)):
        golden((p * estimates(script, p, ref, estimator)).sum().item(), mean)
    theta, _, ref = states()
    p = theta.detach().softmax(-1)
    for estimator in ("k1", "k3"):
        close((p * estimates(script, p, ref, estimator)).sum(-1), exact_kl(p, ref))


@every_script
def test_k2_agrees_with_the_kl_to_second_order_in_the_distance(script):
    p, shift = f64([[0.5, 0.3, 0.2]]), f64([[0.2, 0.1, -0.3]])
    for step in (1e-2, 1e-3):
        ref = p + step * shift
        kl, k2 = exact_kl(p, ref), (p * estimates(script, p, ref, "k2")).sum(-1)
        assert kl > 0.2 * step ** 2 and (k2 - kl).abs() < 0.2 * step ** 3


@every_script
def test_k2_and_k3_are_never_negative_and_k1_is_what_the_policy_thinks_likelier(script):
    theta, _, ref = states()
    p = theta.detach().softmax(-1)
    assert (estimates(script, p, ref, "k2") >= 0).all() and (estimates(script, p, ref, "k3") >= 0).all()
    k1 = estimates(script, p, ref, "k1")
    assert torch.equal(k1 > 0, p > ref) and (k1 < 0).any()
    for estimator in ESTIMATORS:
        assert (estimates(script, ref, ref, estimator) == 0).all()


@every_script
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_shapes_and_types_are_those_of_the_log_probs_and_no_argument_is_changed(script, dtype):
    theta, _, ref = states()
    arguments = (theta.detach().log_softmax(-1).to(dtype), ref.log().to(dtype))
    before = [x.clone() for x in arguments]
    for estimator in ESTIMATORS:
        kl = script.kl(*arguments, estimator)
        assert kl.shape == (4, 3) and kl.dtype == dtype
    assert all(torch.equal(x, y) for x, y in zip(arguments, before))


@every_script
def test_k3_is_exact_for_tiny_differences(script):
    x = torch.linspace(-0.01, 0.01, 2001)[None]         # in float32, where exp(-x) + x - 1 is mostly rounding
    k3 = script.kl(x, torch.zeros_like(x), "k3")
    series = x.double() ** 2 / 2 - x.double() ** 3 / 6 + x.double() ** 4 / 24
    torch.testing.assert_close(k3.double(), series, atol=2e-9, rtol=0)


# ---- in the loss -------------------------------------------------------------------------------------------


@every_script
def test_in_a_loss_k1_does_nothing_k2_has_the_gradient_of_the_kl_and_k3_that_of_the_reverse_kl(script):
    theta, _, ref = states()
    p = theta.softmax(-1)
    for state in range(4):
        for estimator, exact in (("k1", 0 * p), ("k2", exact_kl(p, ref)), ("k3", exact_kl(ref, p))):
            sampled = p.detach() * estimates(script, p, ref, estimator)         # the sampler stands still
            close(torch.autograd.grad(sampled[state].sum(), theta, retain_graph=True)[0],
                  torch.autograd.grad(exact[state].sum(), theta, retain_graph=True)[0])
    assert gradient((exact_kl(p, ref) - exact_kl(ref, p)).sum(), theta).abs().max() > 0.1


@every_script
def test_on_samples_of_an_older_policy_the_estimates_need_the_ratio_to_have_their_gradients(script):
    theta, old, ref = states()
    p = theta.softmax(-1)
    ratio = grpo.log_ratio(p.log(), old.log(), torch.ones_like(p)).exp()
    forward, reverse = exact_kl(p, ref).sum(), exact_kl(ref, p).sum()
    k1, k2, k3 = (estimates(script, p, ref, estimator) for estimator in ESTIMATORS)
    for sampled, exact in ((ratio * k1, forward), (ratio * k3, forward), (ratio * k1.detach(), forward),
                           (ratio.detach() * k2, forward), (ratio.detach() * k3, reverse),
                           (ratio.detach() * k1, 0 * forward)):
        close(torch.autograd.grad((old * sampled).sum(), theta, retain_graph=True)[0],
              torch.autograd.grad(exact, theta, retain_graph=True)[0])
    without = torch.autograd.grad((old * k3).sum(), theta, retain_graph=True)[0]
    for exact in (forward, reverse):
        assert not torch.allclose(without, torch.autograd.grad(exact, theta, retain_graph=True)[0], atol=0.01)


# ---- in the reward -----------------------------------------------------------------------------------------


@every_script
def test_the_further_from_the_reference_the_lower_the_reward_less_its_k1(script):
    means = []
    for share in (0.0, 0.3, 0.6, 0.9):
        p = (1 - share) * REF + share * f64([0.0, 0.0, 1.0])
        means.append((p * -BETA * estimates(script, p[None], REF[None], "k1")[0]).sum().item())
    assert means[0] == 0 and means == sorted(means, reverse=True) and means[-1] < -0.3


@every_script
def test_the_value_of_the_optimum_is_beta_times_the_logarithm_of_its_normaliser(script):
    weights = REF * (REWARDS / BETA).exp()
    golden(weights.sum().item(), 4.1945280)
    p = weights / weights.sum()
    golden(p, OPTIMUM)
    net = REWARDS - BETA * estimates(script, p[None], REF[None], "k1")[0]
    close(net, net[:1].expand(3))                           # whatever is said, it is worth the same
    golden((p * net).sum().item(), 0.7168904)


def mean_loss(script, theta, beta, place):
    """The loss of eq. (5) of grpo.py averaged over all samples of the policy, the KL being in the reward or,
    by one of the estimators, in the loss."""
    logps = theta.log_softmax(0)[:, None]                               # (3, 1): every outcome a row
    k1 = script.kl(logps.detach(), REF.log()[:, None], "k1")[:, 0]
    rewards = REWARDS - beta * k1 if place == "reward" else REWARDS
    loss = grpo.policy_loss(logps, logps, rewards, torch.ones_like(logps))
    if place != "reward":
        loss = loss + beta * script.kl(logps, REF.log()[:, None], place)
    return (logps.detach().exp() * loss).sum()


@every_script
@pytest.mark.parametrize("place, rest, digits", [("reward", OPTIMUM, 1e-7), ("k2", OPTIMUM, 1e-7),
                                                 ("k3", f64([0.8090, 0.1146, 0.0764]), 6e-5)])
def test_k1_in_the_reward_and_k2_in_the_loss_rest_at_the_optimum_and_k3_in_the_loss_elsewhere(
        script, place, rest, digits):
    theta = f64([0.0, 0.0, 0.0]).requires_grad_()
    for _ in range(400):
        theta.data -= 4 * gradient(mean_loss(script, theta, BETA, place), theta)
    torch.testing.assert_close(theta.detach().softmax(0), rest, atol=digits, rtol=0)
    assert gradient(mean_loss(script, theta, BETA, place), theta).abs().max() < 1e-9


@every_script
def test_k1_in_the_loss_lets_the_policy_drift_as_if_there_were_no_penalty(script):
    theta = f64([0.3, -0.8, 1.1]).requires_grad_()
    free, k1, reward = (gradient(mean_loss(script, theta, beta, place), theta)
                        for beta, place in ((0, "k1"), (BETA, "k1"), (BETA, "reward")))
    close(k1, free)
    assert not torch.allclose(reward, free, atol=0.01)


# ---- sequences ---------------------------------------------------------------------------------------------


@every_script
def test_over_several_tokens_only_k1_summed_in_the_reward_and_the_square_of_the_sum_are_exact(script):
    draw = torch.Generator().manual_seed(0)
    theta = torch.randn(4, 3, generator=draw).double().requires_grad_()     # at the start, after each token
    ref = torch.randn(4, 3, generator=draw).double().log_softmax(-1)
    said = torch.tensor(list(itertools.product(range(3), range(3))))        # (9, 2): all there is to say
    at = torch.stack([torch.zeros(9, dtype=torch.long), 1 + said[:, 0]], 1)
    logps, ref_logps = theta.log_softmax(-1)[at, said], ref[at, said]       # (9, 2)
    chances = logps.sum(1).exp()                                            # (9,)
    exact = gradient((chances * (logps - ref_logps).sum(1)).sum(), theta)   # of the KL of whole sequences
    logps = theta.log_softmax(-1)[at, said]
    weights = logps.detach().sum(1).exp()
    by_token = {name: script.kl(logps, ref_logps, name) for name in ESTIMATORS}         # (9, 2)
    penalty = by_token["k1"].sum(1).detach()
    in_reward = grpo.policy_loss(logps, logps, -penalty, torch.ones_like(logps)).sum(1)
    square = script.kl(logps.sum(1, keepdim=True), ref_logps.sum(1, keepdim=True), "k2")[:, 0]
    for loss, is_exact in ((in_reward, True), (square, True), (by_token["k2"].sum(1), False),
                           (by_token["k3"].sum(1), False), (by_token["k1"].sum(1), False)):
        found = torch.autograd.grad((weights * loss).sum(), theta, retain_graph=True)[0]
        assert torch.allclose(found, exact, atol=1e-12) == is_exact
    first = torch.autograd.grad((weights * by_token["k2"].sum(1)).sum(), theta)[0][1:]
    close(first, exact[1:])                                 # where no later state is left to depend on it
