"""What a KL penalty does, by enumeration of all that a small policy can say: the estimators, their
gradients in the loss and in the reward, and the policy that learning with each of them ends at. The
scripts have one text of kl, so most of this asks grpo.py alone."""
import functools
import importlib
import itertools

import pytest
import torch
from conftest import SCRIPTS, f64

import grpo

pytestmark = pytest.mark.quick

close = functools.partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)
golden = functools.partial(torch.testing.assert_close, atol=6e-8, rtol=0)   # written with 7 digits


def exact_kl(p, q):
    """KL(p || q) of the distributions in the last dimension."""
    return (p * (p / q).log()).sum(dim=-1)


def gradient(loss, theta):
    """The gradient of a loss in theta; the graph is kept for another one."""
    return torch.autograd.grad(loss, theta, retain_graph=True)[0]


@pytest.fixture
def states():
    """Logits of a policy in 4 states of 3 actions, the probabilities of an older policy, and those
    of a reference. (4, 3) each"""
    generator = torch.Generator().manual_seed(0)
    theta, old, ref = torch.randn(3, 4, 3, generator=generator).double()
    return theta.requires_grad_(), old.softmax(dim=-1), ref.softmax(dim=-1)


# ---- the estimates ---------------------------------------------------------------------------

@pytest.mark.parametrize("script", SCRIPTS)
def test_k1_and_k3_average_to_the_kl_of_the_policy_from_the_reference_and_k2_does_not(
        script, states):
    kl = importlib.import_module(script).kl
    p, ref = f64([[0.5, 0.5]]), f64([[0.9, 0.1]])
    for estimator, mean in (("k1", 0.5108256), ("k2", 0.7339459), ("k3", 0.5108256)):
        golden((p * kl(p.log(), ref.log(), estimator)).sum().item(), mean)
        assert (kl(ref.log(), ref.log(), estimator) == 0).all()
    theta, _, ref = states
    p = theta.detach().softmax(dim=-1)
    for estimator in ("k1", "k3"):
        close((p * kl(p.log(), ref.log(), estimator)).sum(dim=-1), exact_kl(p, ref))
    close(kl(p.log(), ref.log()), kl(p.log(), ref.log(), "k3"))         # the default
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
    log_rho = p.log() - p.log().detach()                # 0, with a gradient
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
        """The gradient of the mean over samples of the older policy."""
        return gradient((old * sampled).sum(), theta)
    close(found(k3_ratio), forward_kl)
    close(found(ratio * k1), forward_kl)
    close(found(ratio * k1.detach()), forward_kl)
    close(found(ratio.detach() * k2), forward_kl)
    close(found(ratio.detach() * k3), reverse_kl)
    close(found(ratio.detach() * k1), 0 * forward_kl)
    assert not torch.allclose(found(k3), forward_kl, atol=0.01)
    assert not torch.allclose(found(k3), reverse_kl, atol=0.01)


def test_k3_by_the_ratio_on_samples_of_another_policy_in_numbers():
    theta = f64([0.3, -0.8, 1.1]).requires_grad_()
    logps = theta.log_softmax(dim=0)
    ref_logps = f64([-0.2, 0.5, 0.4]).log_softmax(dim=0)
    old_logps = f64([0.6, -0.1, 0.2]).log_softmax(dim=0)
    mean = (old_logps.exp() * grpo.kl(logps, ref_logps, "k3_ratio", logps - old_logps)).sum()
    golden(mean.item(), 0.263452454)
    golden(gradient(mean, theta), f64([0.012166811, -0.164330733, 0.152163922]))
    without = (old_logps.exp() * grpo.kl(logps, ref_logps, "k3")).sum()
    golden(gradient(without, theta), f64([0.275374875, -0.739900732, 0.464525857]))


# ---- where learning ends ---------------------------------------------------------------------

# Three actions: the reference, the rewards, and the policy with the highest E[r] - BETA KL.
REF = f64([0.5, 0.3, 0.2])
REWARDS = f64([1.0, 0.0, 0.0])
BETA = 0.5
OPTIMUM = f64([0.8807971, 0.0715218, 0.0476812])


def test_the_value_of_the_optimum_is_beta_times_the_logarithm_of_its_normaliser():
    weights = REF * (REWARDS / BETA).exp()
    golden(weights.sum().item(), 4.1945280)
    p = weights / weights.sum()
    golden(p, OPTIMUM)
    net_rewards = REWARDS - BETA * grpo.kl(p.log()[None], REF.log()[None], "k1")[0]
    close(net_rewards, net_rewards[:1].expand(3))       # every action is worth the same
    golden((p * net_rewards).sum().item(), 0.7168904)


def mean_loss(theta, beta, place):
    """The loss of eq. (5) of grpo.py, averaged over all samples of the policy. The KL is in the
    reward, or in the loss by the estimator that `place` names."""
    logps = theta.log_softmax(dim=0)[:, None]           # (3, 1): a row of one token for each action
    ref_logps = REF.log()[:, None]
    rewards = REWARDS
    if place == "reward":
        rewards = REWARDS - beta * grpo.kl(logps.detach(), ref_logps, "k1")[:, 0]
    loss = grpo.policy_loss(logps, logps, rewards, torch.ones_like(logps))
    if place != "reward":
        loss = loss + beta * grpo.kl(logps, ref_logps, place, logps - logps.detach())
    return (logps.detach().exp() * loss).sum()


@pytest.mark.parametrize("place, optimum, tolerance", [
    ("reward", OPTIMUM, 1e-7),
    ("k2", OPTIMUM, 1e-7),
    ("k3_ratio", OPTIMUM, 1e-7),
    ("k3", f64([0.8090, 0.1146, 0.0764]), 6e-5)])
def test_k1_in_the_reward_and_k2_in_the_loss_end_at_the_optimum_and_k3_in_the_loss_elsewhere(
        place, optimum, tolerance):
    theta = f64([0.0, 0.0, 0.0]).requires_grad_()
    for _ in range(400):
        theta.data -= 4 * gradient(mean_loss(theta, BETA, place), theta)
    torch.testing.assert_close(theta.detach().softmax(dim=0), optimum, atol=tolerance, rtol=0)
    assert gradient(mean_loss(theta, BETA, place), theta).abs().max() < 1e-9


def test_with_k1_in_the_loss_the_policy_learns_as_if_there_were_no_penalty():
    theta = f64([0.3, -0.8, 1.1]).requires_grad_()
    without = gradient(mean_loss(theta, 0.0, "k1"), theta)
    close(gradient(mean_loss(theta, BETA, "k1"), theta), without)
    in_reward = gradient(mean_loss(theta, BETA, "reward"), theta)
    assert not torch.allclose(in_reward, without, atol=0.01)


# ---- completions of several tokens -----------------------------------------------------------

EOS = 2
T = 3


class World:
    """All completions of two tokens and an EOS in at most three slots, with the log-probs of a
    policy and of a reference, which have a state for each prefix."""

    def __init__(self, seed):
        prefixes = [prefix for n in range(T) for prefix in itertools.product((0, 1), repeat=n)]
        ended = [(*prefix, EOS) for prefix in prefixes]
        outputs = ended + list(itertools.product((0, 1), repeat=T))             # N of them
        generator = torch.Generator().manual_seed(seed)
        self.theta, ref = torch.randn(2, len(prefixes), 3, generator=generator).double()
        self.theta.requires_grad_()
        self.p = self.theta.softmax(dim=-1)                                     # (7, 3)
        self.ref = ref.softmax(dim=-1)
        self.mask = f64([[float(t < len(output)) for t in range(T)] for output in outputs])
        self.states = torch.tensor([[prefixes.index(output[:t]) if t < len(output) else 0
                                     for t in range(T)] for output in outputs])     # (N, T)
        tokens = torch.tensor([[*output, 0, 0][:T] for output in outputs])
        self.logps = self.p.log()[self.states, tokens]                          # (N, T)
        self.ref_logps = self.ref.log()[self.states, tokens]
        self.chances = (self.logps * self.mask).sum(dim=1, keepdim=True).exp().detach()     # (N, 1)

    def mean_gradient(self, x, how):
        """The gradient of the mean over all completions, as often as they are sampled, of token
        losses x that are averaged over the tokens of each."""
        loss = grpo.aggregate(self.chances * x, self.mask, how, num_sequences=1, max_length=1)
        return gradient(loss, self.theta)

    def cosine(self, estimator, how):
        """Between the gradient of an estimator in the loss, and the one that its name promises: of
        the exact KL at the same prefixes with the same weights."""
        log_rho = self.logps - self.logps.detach()
        token_kl = grpo.kl(self.logps, self.ref_logps, estimator, log_rho)
        exact = exact_kl(self.ref, self.p) if estimator == "k3" else exact_kl(self.p, self.ref)
        found = self.mean_gradient(token_kl, how)
        named = self.mean_gradient(exact[self.states], how)
        return torch.cosine_similarity(found.flatten(), named.flatten(), dim=0).item()


@pytest.mark.parametrize("estimator, worst", [("k2", 0.6), ("k3", 0.9), ("k3_ratio", 0.6)])
def test_the_estimators_have_their_gradients_for_sums_over_tokens_and_not_for_means_over_outputs(
        estimator, worst):
    """The weight 1/|o| of a token depends on itself, and on tokens that are sampled after it."""
    for how in ("sequence_sum", "constant"):
        assert min(World(seed).cosine(estimator, how) for seed in range(20)) > 1 - 1e-12
    cosines = [World(seed).cosine(estimator, "sequence_mean") for seed in range(100)]
    assert min(cosines) < worst
    assert 0.9 < sum(cosines) / 100 < 0.99


def test_the_gradient_of_the_kl_of_whole_outputs_is_that_of_k1_in_the_reward_or_k2_of_the_sum():
    world = World(0)
    torch.testing.assert_close(world.chances.sum().item(), 1.0)         # these are all
    sums = (world.logps * world.mask).sum(dim=1, keepdim=True)                  # (N, 1)
    ref_sums = (world.ref_logps * world.mask).sum(dim=1, keepdim=True)
    whole = gradient((sums.exp() * (sums - ref_sums)).sum(), world.theta)
    k1 = grpo.kl(sums.detach(), ref_sums, "k1")[:, 0]
    losses = grpo.policy_loss(world.logps, world.logps, -k1, world.mask)
    close(world.mean_gradient(losses, "sequence_sum"), whole)
    k2 = grpo.kl(sums, ref_sums, "k2")
    close(gradient((world.chances * k2).sum(), world.theta), whole)
    for estimator in ("k1", "k2", "k3"):                # summed over tokens, none of them has it
        token_kl = grpo.kl(world.logps, world.ref_logps, estimator)
        assert not torch.allclose(world.mean_gradient(token_kl, "sequence_sum"), whole, atol=1e-3)
