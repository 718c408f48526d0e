"""KL: three estimators of one distance, as numbers, as losses, as gradients

The bias and the variance of an estimate are exact, over the vocabulary, at the tokens that grpo.py
samples. Gradients are exact, too: the mean over all outputs of at most four of three tokens.
docs/lab/kl.md says more.
"""
import copy
import itertools

import numpy
import torch
import torch.nn.functional as F

import grpo
import reinforce
from lab.draw import BLUE, ORANGE, RED, curves
from lab.experiment import Experiment, transposed
from lab.training import load_base, training
from lab.verdict import OURS, Claim

SCHULMAN = "[Schulman, 2020](http://joschu.net/blog/kl-approx.html)"
ESTIMATORS = ["k1", "k2", "k3"]
WATCHED = [1, 2, 5, 10, 20]                 # steps after which the estimates are looked at
# Pairs of losses whose gradients are equal, says a paper; and some whose gradients are not:
TANGS = [("k2", "KL(policy, base)"), ("k3", "KL(base, policy)"),
         ("k1 in the reward", "KL of outputs")]
OLDER = ("k3_ratio, older", "KL(policy, base), older")
BY_LENGTH = [("k2, by length", "KL(policy, base)"), ("k3, by length", "KL(base, policy)"),
             ("k3_ratio, by length", "KL(policy, base)")]
PLACE = -1                                  # in WATCHED, where the claims are judged
CLOSE = 1e-9                                # of what is equal but for rounding
EXPERIMENT = Experiment(__file__, seeds=range(5))


@torch.no_grad()
def log_probs(policy, batch):
    """Of all tokens of the vocabulary, at each of the N tokens of a batch. -> (N, V)"""
    states = grpo.completion_states(policy, batch.prompts, batch.tokens)[batch.mask > 0]
    return F.linear(states, policy.embed.weight).double().log_softmax(dim=-1)


def moments(log_p, log_ref):
    """Mean and standard deviation of each estimate, exact over the vocabulary, averaged over the
    tokens; the mean of k1 is the KL. (N, V) twice -> {column: float}"""
    found = {}
    for name in ESTIMATORS:
        estimate = grpo.kl(log_p, log_ref, name)
        mean = (log_p.exp() * estimate).sum(dim=-1, keepdim=True)               # (N, 1)
        variance = (log_p.exp() * (estimate - mean).square()).sum(dim=-1)       # (N,)
        found[f"mean of {name}"] = mean.mean().item()
        found[f"deviation of {name}"] = variance.mean().sqrt().item()
    return found


@EXPERIMENT.measure(["on the way"])
def estimates(seed, case):
    """Means and deviations of the estimates of a token, as the policy leaves the base."""
    cfg, task, policy = load_base(grpo, f"--num_prompts 16 --seed {seed} --base_seed {seed}")
    reference = copy.deepcopy(policy)
    found = []
    for step, _ in zip(range(1, 1 + WATCHED[-1]), training(grpo, cfg, task, policy)):
        if step in WATCHED:
            batch = grpo.sample_batch(policy, task, cfg, step)      # the one it learns from next
            found.append(moments(log_probs(policy, batch), log_probs(reference, batch)))
    return transposed(found)


# All outputs of at most four tokens: 1, 2, and 0, which ends them, and pads. (N, T) each
TOKENS = torch.tensor([ids for ids in itertools.product(range(3), repeat=4)
                       if all(one > 0 or other == 0 for one, other in itertools.pairwise(ids))])
MASK = ((TOKENS == 0).cumsum(dim=1) <= 1).double()
BEFORE = F.pad(TOKENS[:, :-1], (1, 0))      # the token before each, 0 before the first


def output_logps(table):
    """Log-probabilities of the tokens of all outputs; they depend on the token before alone, so
    that a policy is a table of logits (3, 3). -> (N, T)"""
    return table.log_softmax(dim=-1)[BEFORE, TOKENS] * MASK


def mean_loss(x, sampler, average="constant"):
    """The mean of token losses (N, T) over all outputs of a sampler, averaged as in a script."""
    chances = output_logps(sampler.detach()).sum(dim=1, keepdim=True).exp()     # (N, 1)
    return grpo.aggregate(len(x) * chances * x, MASK, average, max_length=MASK.shape[1])


def gradients(theta, ref, old):
    """{name: gradient in theta (9,)} of estimates as losses, and of what they might stand for."""
    logps, ref_logps, old_logps = map(output_logps, (theta, ref, old))
    losses = {}
    for name in (*ESTIMATORS, "k3_ratio"):
        estimate = grpo.kl(logps, ref_logps, name, logps - logps.detach())
        losses[name] = mean_loss(estimate, theta)
        losses[f"{name}, by length"] = mean_loss(estimate, theta, "sequence_mean")
    log_rho = grpo.log_ratio(logps, old_logps, MASK)
    losses["k3_ratio, older"] = mean_loss(grpo.kl(logps, ref_logps, "k3_ratio", log_rho), old)
    k1 = (logps - ref_logps).sum(dim=1)
    losses["k1 in the reward"] = mean_loss(reinforce.policy_loss(logps, -k1.detach(), MASK), theta)
    # what they are compared with
    log_p, log_ref = (table.log_softmax(dim=-1)[BEFORE] for table in (theta, ref))  # (N, T, 3)
    kl, reverse = (F.kl_div(other, one, log_target=True, reduction="none").sum(dim=-1)
                   for one, other in ((log_p, log_ref), (log_ref, log_p)))
    losses["KL(policy, base)"] = mean_loss(kl, theta)
    losses["KL(policy, base), older"] = mean_loss(kl, old)
    losses["KL(base, policy)"] = mean_loss(reverse, theta)
    losses["KL of outputs"] = (logps.sum(dim=1).exp() * k1).sum()
    return {name: torch.autograd.grad(loss, theta, retain_graph=True)[0].flatten()
            for name, loss in losses.items()}


@EXPERIMENT.measure(["policies"], seeds=[0])
def cosines(seed, case, draws=100):
    """By how much cosines are below 1, and the norm of k1, for random policies."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(draws):
        theta, ref, old = torch.randn(3, 3, 3, generator=generator).double()
        gradient = gradients(theta.requires_grad_(), ref, old)
        row = {"norm of k1": gradient["k1"].norm().item()}
        for pair in (*TANGS, OLDER, *BY_LENGTH):
            off = 1 - F.cosine_similarity(*map(gradient.get, pair), dim=0).item()
            # six digits are kept: what is 1 but for rounding is 1 in them, and nothing else is
            row[" / ".join(pair)] = off * (abs(off) >= CLOSE)
        found.append(row)
    return transposed(found)


def page(estimates, cosines):
    [way] = estimates.values()
    noise = way["deviation of k1"] / way["deviation of k3"]
    first, last = 1 / numpy.exp(numpy.log(noise).mean(axis=0))[[0, -1]]
    said = (f"One step from the base, the KL estimate k3 is {first:.2g} times as noisy as k1; "
            f"after 20 steps, {last:.2g} times (geometric means)")
    yield Claim("after 20 steps, k3 is less noisy than k1 (deviation of k1 / of k3)", SCHULMAN,
                noise[:, PLACE], at_least=1.1, times=True, said=said)
    yield curves({name: way[f"deviation of {name}"] for name in ESTIMATORS}, said,
                 x=WATCHED, given=dict(zip(ESTIMATORS, (BLUE, ORANGE, RED))), yscale="log",
                 xticks=WATCHED, xlabel="steps from the base",
                 ylabel="standard deviation, nats a token")
    yield Claim("after 20 steps, k2's mean is within a tenth of the KL", SCHULMAN,
                way["mean of k2"][:, PLACE] / way["mean of k1"][:, PLACE], at_least=0.9,
                at_most=1.1, times=True)
    found = {name: values[0] for name, values in cosines["policies"].items()}

    def cosine(pairs):
        return numpy.concatenate([1 - found[" / ".join(pair)] for pair in pairs])
    yield Claim("on samples of pi, k1 in the loss has no gradient in the mean: the largest norm",
                "Tang and Munos", found["norm of k1"].max(), at_most=CLOSE, exact=True)
    yield Claim("on samples of pi, k2, k3 and k1 in the reward have the gradients of KL(pi, ref), "
                "KL(ref, pi) and the KL of outputs: the cosines are 1", "Tang and Munos",
                cosine(TANGS), at_least=1, exact=True)
    yield Claim("on samples of an older policy, k3_ratio has the gradient of KL(pi, ref): the "
                "cosine is 1", "DeepSeek-V3.2", cosine([OLDER]), at_least=1, exact=True)
    by_length = [cosine([pair]).min() for pair in BY_LENGTH]
    yield Claim("divided by length, k2, k3, k3_ratio do not have these gradients: lowest cosines",
                OURS, by_length, at_most=0.99, exact=True)
