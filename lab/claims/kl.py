"""KL: three estimators of one distance, as numbers, as losses, as gradients

Claim. k3 is an unbiased estimate of KL(pi || pi_ref) with less variance than k1, and k2 is biased,
but little (Schulman, 2020, http://joschu.net/blog/kl-approx.html). A good estimate is no good loss
(Tang and Munos, 2506.09477): on samples of pi, k1 does nothing there in the mean, k2 has the
gradient of KL(pi || pi_ref) at each token, k3 that of KL(pi_ref || pi); none has that of the KL of
whole outputs, but k1 in the reward has. k3 times the ratio, --kl_estimator k3_ratio, has the
gradient of KL(pi || pi_ref), on samples of an older policy, too (DeepSeek-V3.2, 2512.02556).

Prediction. Near the base, k3 has the least variance. After 20 steps it has the most: answers
without thinking have become rare, and wherever one is still sampled, pi_ref / pi is large. In the
runs, k2, k3, k3_ratio and k1 in the reward hold the KL, k3 at the price of accuracy, because it
forbids that any answer of the base gets rare. k1 in the loss holds nothing. All of what is claimed
about gradients is exact.

Method. Bias and variance: exact, over the vocabulary, at the tokens that grpo.py samples, on its
way from the base without a penalty. Then runs of grpo.py, and reinforce.py for k1 in the reward,
with beta 1 (in a pilot, 0.2 held next to nothing); all numbers are means of the last five batches.
Gradients: exactly, of all outputs of at most four of three tokens, for 100 random policies,
references and older policies; "older" has samples of the last, "by length" 1 / |o| as GRPO has it.
Two are the same if their cosine is 1 with all of them. (The older policy for k1 came later: the
scripts take two steps a batch, so that the second one is on samples of pi_old, where k1 as a loss
is not without effect.)

Outcome. k3, at first with a third of k1's deviation, has 4 to 90 times as much after 20 steps. k2,
k3, k3_ratio and k1 in the reward hold the KL; with this beta, which is not the same strength in
each, k3 and k1 in the reward hold it closest, and cost most accuracy. What papers say of gradients
is exact for sums over tokens; divided by |o| it no longer holds. k1 in the loss holds nothing; one
of five runs with it is lost, and the other four are .02 to .14 less accurate than without, but the
one run makes the interval so wide that what it costs is open.
"""
import copy

import numpy
import torch
import torch.nn.functional as F

import grpo
import reinforce
from lab.draw import BLUE, ORANGE, RED, curves, dots
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
RUNS = {"none": f"grpo.py {FLAGS}", "none, Dr. GRPO": f"grpo.py {FLAGS} --loss_type dr_grpo",
        "none, REINFORCE": f"reinforce.py {FLAGS} --baseline mean"}
RUNS |= {k: f"{RUNS['none']} --beta 1 --kl_estimator {k}" for k in ("k2", "k3", "k3_ratio")}
RUNS["k1, Dr. GRPO"] = f"{RUNS['none, Dr. GRPO']} --beta 1 --kl_estimator k1"
RUNS["k1 in the reward"] = f"{RUNS['none, REINFORCE']} --beta 1"
# A loss and what it is compared with. These have equal gradients, says somebody:
EQUAL = {("k2", "KL(policy, base)"): TANG, ("k3", "KL(base, policy)"): TANG,
         ("k1 in the reward", "KL of outputs"): TANG,
         ("k3_ratio, older", "KL(policy, base), older"): DEEPSEEK,
         ("k1, older", "-KL(older, policy)"): OURS}
OUTPUTS = ("k2", "KL of outputs")
BY_LENGTH = [("k2, by length", "KL(policy, base)"), ("k3, by length", "KL(base, policy)"),
             ("k3_ratio, by length", "KL(policy, base)")]
PAIRS = [*EQUAL, OUTPUTS, *BY_LENGTH]
CLOSE = 1e-9                                # of what is equal but for rounding
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(5))
EXPERIMENT.runs("penalties", RUNS, ["kl", "accuracy", "completions/mean_length"])


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

class Outputs:
    """All outputs of at most four tokens: 1, 2, and 0, which ends them. The chances of a token
    depend on the one before it; a policy is a table of logits (3, 3)."""
    LENGTH = 4

    def __init__(self):
        tokens = torch.cartesian_prod(*[torch.arange(3)] * self.LENGTH)
        is_end = (tokens == 0).long()
        is_behind = is_end.cumsum(dim=1) - is_end > 0           # behind an end, 0 is padding
        is_output = (tokens * is_behind == 0).all(dim=1)
        self.tokens = tokens[is_output]                                         # (N, T)
        self.mask = (~is_behind[is_output]).double()                            # (N, T)
        self.before = F.pad(self.tokens[:, :-1], (1, 0))        # 0 before the first token

    def logps(self, table):
        return table.log_softmax(dim=-1)[self.before, self.tokens] * self.mask

    def mean(self, x, sampler, average="constant"):
        """The mean of token losses over all outputs of a sampler, averaged as in a script."""
        chances = self.logps(sampler.detach()).sum(dim=1, keepdim=True).exp()   # (N, 1)
        return grpo.aggregate(len(x) * chances * x, self.mask, average, max_length=self.LENGTH)

    def kl(self, table, other):
        """KL(table || other), exact, at each token of the outputs. -> (N, T)"""
        log_p = table.log_softmax(dim=-1)
        log_q = other.log_softmax(dim=-1)
        return (log_p.exp() * (log_p - log_q)).sum(dim=-1)[self.before]


def gradients(theta, ref, old, outputs):
    """{name: gradient in theta (9,)} of estimates as losses, and of what they might stand for."""
    logps = outputs.logps(theta)
    ref_logps = outputs.logps(ref)
    log_rho = grpo.log_ratio(logps, outputs.logps(old), outputs.mask)
    on_policy = logps - logps.detach()
    losses = {}
    for name in (*ESTIMATORS, "k3_ratio"):
        estimate = grpo.kl(logps, ref_logps, name, on_policy)
        losses[name] = outputs.mean(estimate, theta)
        losses[f"{name}, by length"] = outputs.mean(estimate, theta, "sequence_mean")
    estimate = grpo.kl(logps, ref_logps, "k3_ratio", log_rho)
    losses["k3_ratio, older"] = outputs.mean(estimate, old)
    losses["k1, older"] = outputs.mean(grpo.kl(logps, ref_logps, "k1"), old)
    k1 = grpo.kl(logps, ref_logps, "k1").detach()
    in_reward = reinforce.policy_loss(logps, -k1.sum(dim=1), outputs.mask)
    losses["k1 in the reward"] = outputs.mean(in_reward, theta)
    # what they are compared with
    losses["KL(policy, base)"] = outputs.mean(outputs.kl(theta, ref), theta)
    losses["KL(policy, base), older"] = outputs.mean(outputs.kl(theta, ref), old)
    losses["KL(base, policy)"] = outputs.mean(outputs.kl(ref, theta), theta)
    losses["-KL(older, policy)"] = -outputs.mean(outputs.kl(old, theta), old)
    difference = (logps - ref_logps).sum(dim=1)
    losses["KL of outputs"] = (logps.sum(dim=1).exp() * difference).sum()
    return {name: torch.autograd.grad(loss, theta, retain_graph=True)[0].flatten()
            for name, loss in losses.items()}


@EXPERIMENT.measure(["policies"], seeds=[0])
def cosines(seed, case, draws=100):
    """The cosines of PAIRS, and the norm of k1, for random policies."""
    outputs = Outputs()
    generator = torch.Generator().manual_seed(seed)
    found = {"norm of k1": []}
    for _ in range(draws):
        theta, ref, old = torch.randn(3, 3, 3, generator=generator).double()
        gradient = gradients(theta.requires_grad_(), ref, old, outputs)
        found["norm of k1"].append(gradient["k1"].norm().item())
        for one, other in PAIRS:
            cosine = F.cosine_similarity(gradient[one], gradient[other], dim=0).item()
            # six digits are kept: what is 1 but for rounding is 1 in them, and nothing else is
            off = 0.0 if abs(1 - cosine) < CLOSE else 1 - cosine
            found.setdefault(f"{one} / {other}", []).append(off)
    return found


# ---- 3. what was found -----------------------------------------------------------------------

def page(penalties, estimates, cosines):
    late = {name: {metric: values[:, -5:].mean(axis=1) for metric, values in found.items()}
            for name, found in penalties.items() if name in RUNS}
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
    yield Claim("k1 as a loss on samples of an older policy pulls away from it, by -KL(older, pi): "
                "the cosine is 1", OURS, cosine["k1, older", "-KL(older, policy)"], at_least=1,
                exact=True)
    accuracy = {name: row["accuracy"] for name, row in late.items()}
    yield Claim("k1 in the loss of Dr. GRPO, two steps a batch, costs accuracy", OURS,
                (accuracy["k1, Dr. GRPO"], accuracy["none, Dr. GRPO"]), at_most=-0.02)

    yield curves({name: way[f"deviation of {name}"] for name in ESTIMATORS}, said,
                 x=WATCHED, given=dict(zip(ESTIMATORS, (BLUE, ORANGE, RED))), yscale="log",
                 xticks=WATCHED, xlabel="steps from the base",
                 ylabel="standard deviation, nats a token")
    worst = min(values.min() for values in cosine.values())
    yield dots({" vs ".join(pair): values for pair, values in cosine.items()},
               "The gradient of an estimate in the loss need not be that of the KL: their cosine "
               f"goes down to {worst:.2f}, divided by length to {min(by_length):.2f}",
               xlabel="cosine; a dot for each of 100 policies")
    yield numbers(late, {"kl": "KL a token", "accuracy": "accuracy",
                         "completions/mean_length": "tokens"}, by="penalty")
