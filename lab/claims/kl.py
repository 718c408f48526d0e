"""KL: three estimators of one distance, as numbers, as losses, as gradients

Claim. k3 is an unbiased estimate of KL(pi || pi_ref) with less variance than k1, and k2 is biased,
but little (Schulman, 2020, http://joschu.net/blog/kl-approx.html). A good estimate is no good loss
(Tang and Munos, 2506.09477): on samples of pi, k1 does nothing there in the mean, k2 has the
gradient of KL(pi || pi_ref) at each token, k3 that of KL(pi_ref || pi); none has that of the KL of
whole outputs, but k1 in the reward has. k3 times the ratio, --kl_estimator k3_ratio, has the
gradient of KL(pi || pi_ref), on samples of an older policy, too (DeepSeek-V3.2, 2512.02556).

Prediction. Near the base, k3 has the least variance. After 20 steps it has the most: answers
without thinking have become rare, and wherever one is still sampled, pi_ref / pi is large. All of
what is claimed about gradients is exact. (Predictions about runs with each penalty, and these runs,
which left open what k1 in the loss costs, were here until commit 94e1f79.)

Method. Bias and variance: exact, over the vocabulary, at the tokens that grpo.py samples, on its
way from the base without a penalty. Gradients: exactly, of all outputs of at most four of three
tokens, for 100 random policies, references and older policies; "older" has samples of the last, "by
length" 1 / |o| as GRPO has it. Two are the same if their cosine is 1 with all of them.

Outcome. k3, at first with a third of k1's deviation, has 4 to 90 times as much after 20 steps. What
papers say of gradients is exact for sums over tokens; divided by |o| it no longer holds.
"""
import copy

import numpy
import torch
import torch.nn.functional as F

import grpo
import reinforce
from lab.draw import BLUE, ORANGE, RED, curves
from lab.experiment import Experiment, numbers
from lab.training import load_base, training
from lab.verdict import OURS, Claim

SCHULMAN = "[Schulman, 2020](http://joschu.net/blog/kl-approx.html)"
TANG = "[Tang and Munos](https://arxiv.org/abs/2506.09477)"
DEEPSEEK = "[DeepSeek-V3.2](https://arxiv.org/abs/2512.02556)"
ESTIMATORS = ["k1", "k2", "k3"]
WATCHED = [1, 2, 5, 10, 20]                 # steps after which the estimates are looked at
FLAGS = ("--num_prompts 16 --stop_at 2 --num_eval_problems 1 --num_eval_samples 1 "
         "--eval_steps 1000 --max_steps 20")
# A loss and what it is compared with. These have equal gradients, says somebody:
EQUAL = {("k2", "KL(policy, base)"): TANG, ("k3", "KL(base, policy)"): TANG,
         ("k1 in the reward", "KL of outputs"): TANG,
         ("k3_ratio, older", "KL(policy, base), older"): DEEPSEEK}
BY_LENGTH = [("k2, by length", "KL(policy, base)"), ("k3, by length", "KL(base, policy)"),
             ("k3_ratio, by length", "KL(policy, base)")]
PAIRS = [*EQUAL, *BY_LENGTH]
CLOSE = 1e-9                                # of what is equal but for rounding
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(5))


# ---- 1. the estimates, at what a script samples ----------------------------------------------

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
    cfg, task, policy = load_base(grpo, f"{FLAGS} --seed {seed} --base_seed {seed}")
    reference = copy.deepcopy(policy)
    found = []
    steps = training(grpo, cfg, task, policy)
    for step in range(1, 1 + WATCHED[-1]):
        next(steps)
        if step in WATCHED:
            batch = grpo.sample_batch(policy, task, cfg, step)      # the one it learns from next
            found.append(moments(log_probs(policy, batch), log_probs(reference, batch)))
    return {column: [one[column] for one in found] for column in found[0]}


# ---- 2. gradients ----------------------------------------------------------------------------

def all_outputs():
    """All outputs of at most four tokens: 1, 2, and 0, which ends them. -> tokens, mask, and the
    token before each, 0 before the first: (N, T) each"""
    tokens = torch.cartesian_prod(*[torch.arange(3)] * 4)
    is_end = (tokens == 0).long()
    is_padding = is_end.cumsum(dim=1) - is_end > 0
    is_output = (tokens * is_padding == 0).all(dim=1)       # padding is 0, too
    tokens = tokens[is_output]
    return tokens, (~is_padding[is_output]).double(), F.pad(tokens[:, :-1], (1, 0))


TOKENS, MASK, BEFORE = all_outputs()


def output_logps(table):
    """Log-probabilities of the tokens of all outputs; they depend on the token before alone, so
    that a policy is a table of logits (3, 3). -> (N, T)"""
    return table.log_softmax(dim=-1)[BEFORE, TOKENS] * MASK


def mean_loss(x, sampler, average="constant"):
    """The mean of token losses (N, T) over all outputs of a sampler, averaged as in a script."""
    chances = output_logps(sampler.detach()).sum(dim=1, keepdim=True).exp()     # (N, 1)
    return grpo.aggregate(len(x) * chances * x, MASK, average, max_length=MASK.shape[1])


def exact_kl(table, other):
    """KL(table || other) at each token of the outputs. -> (N, T)"""
    log_p = table.log_softmax(dim=-1)
    return (log_p.exp() * (log_p - other.log_softmax(dim=-1))).sum(dim=-1)[BEFORE]


def gradients(theta, ref, old):
    """{name: gradient in theta (9,)} of estimates as losses, and of what they might stand for."""
    logps = output_logps(theta)
    ref_logps = output_logps(ref)
    losses = {}
    for name in (*ESTIMATORS, "k3_ratio"):
        estimate = grpo.kl(logps, ref_logps, name, logps - logps.detach())
        losses[name] = mean_loss(estimate, theta)
        losses[f"{name}, by length"] = mean_loss(estimate, theta, "sequence_mean")
    k1 = grpo.kl(logps, ref_logps, "k1")
    log_rho = grpo.log_ratio(logps, output_logps(old), MASK)
    losses["k3_ratio, older"] = mean_loss(grpo.kl(logps, ref_logps, "k3_ratio", log_rho), old)
    in_reward = reinforce.policy_loss(logps, -k1.detach().sum(dim=1), MASK)
    losses["k1 in the reward"] = mean_loss(in_reward, theta)
    # what they are compared with
    losses["KL(policy, base)"] = mean_loss(exact_kl(theta, ref), theta)
    losses["KL(policy, base), older"] = mean_loss(exact_kl(theta, ref), old)
    losses["KL(base, policy)"] = mean_loss(exact_kl(ref, theta), theta)
    losses["KL of outputs"] = (logps.sum(dim=1).exp() * k1.sum(dim=1)).sum()
    return {name: torch.autograd.grad(loss, theta, retain_graph=True)[0].flatten()
            for name, loss in losses.items()}


@EXPERIMENT.measure(["policies"], seeds=[0])
def cosines(seed, case, draws=100):
    """The cosines of PAIRS, and the norm of k1, for random policies."""
    generator = torch.Generator().manual_seed(seed)
    found = {"norm of k1": []}
    for _ in range(draws):
        theta, ref, old = torch.randn(3, 3, 3, generator=generator).double()
        gradient = gradients(theta.requires_grad_(), ref, old)
        found["norm of k1"].append(gradient["k1"].norm().item())
        for one, other in PAIRS:
            cosine = F.cosine_similarity(gradient[one], gradient[other], dim=0).item()
            # six digits are kept: what is 1 but for rounding is 1 in them, and nothing else is
            off = 0.0 if abs(1 - cosine) < CLOSE else 1 - cosine
            found.setdefault(f"{one} / {other}", []).append(off)
    return found


# ---- 3. what was found -----------------------------------------------------------------------

def page(estimates, cosines):
    [way] = estimates.values()
    noise = way["deviation of k1"] / way["deviation of k3"]
    first, last = 1 / numpy.exp(numpy.log(noise).mean(axis=0))[[0, -1]]
    said = (f"One step from the base, the KL estimate k3 is {first:.2g} times as noisy as k1; "
            f"after 20 steps, {last:.2g} times (geometric means)")
    yield Claim("after 20 steps, k3 is less noisy than k1 (deviation of k1 / of k3)", SCHULMAN,
                noise[:, -1], at_least=1.1, times=True, shown=said, contradicted=said,
                undecided=said)
    yield Claim("after 20 steps, k2's mean is within a tenth of the KL", SCHULMAN,
                way["mean of k2"][:, -1] / way["mean of k1"][:, -1], at_least=0.9, at_most=1.1,
                times=True)
    found = {name: values[0] for name, values in cosines["policies"].items()}
    yield Claim("on samples of pi, k1 in the loss has no gradient in the mean: the largest norm",
                TANG, found["norm of k1"].max(), at_most=CLOSE, exact=True)
    cosine = {pair: 1 - found[" / ".join(pair)] for pair in PAIRS}
    equal = numpy.concatenate([cosine[pair] for pair, source in EQUAL.items() if source == TANG])
    yield Claim("on samples of pi, k2, k3 and k1 in the reward have the gradients of KL(pi, ref), "
                "KL(ref, pi) and the KL of outputs: the cosines are 1", TANG, equal, at_least=1,
                exact=True)
    yield Claim("on samples of an older policy, k3_ratio has the gradient of KL(pi, ref): the "
                "cosine is 1", DEEPSEEK, cosine["k3_ratio, older", "KL(policy, base), older"],
                at_least=1, exact=True)
    by_length = [cosine[pair].min() for pair in BY_LENGTH]
    yield Claim("divided by length, k2, k3, k3_ratio do not have these gradients: lowest cosines",
                OURS, by_length, at_most=0.99, exact=True)

    yield curves({name: way[f"deviation of {name}"] for name in ESTIMATORS}, said,
                 x=WATCHED, given=dict(zip(ESTIMATORS, (BLUE, ORANGE, RED))), yscale="log",
                 xticks=WATCHED, xlabel="steps from the base",
                 ylabel="standard deviation, nats a token")
    rows = {name: {"mean": way[f"mean of {name}"][:, -1],
                   "deviation": way[f"deviation of {name}"][:, -1]} for name in ESTIMATORS}
    yield numbers(rows, {"mean": "mean, nats a token", "deviation": "standard deviation"},
                  by="after 20 steps")
