"""KL: three estimators of one distance, as numbers, as losses, as gradients

Claim. k3 is an unbiased estimate of KL(pi || pi_ref) with less variance than k1, and k2 is biased,
but little (Schulman, 2020, http://joschu.net/blog/kl-approx.html). As a penalty in the loss, k3
times the ratio learns more stably than k3 (DeepSeek-V3.2, 2512.02556), and k1 does nothing (Tang
and Munos, 2506.09477). A good estimate is no good loss: no estimate summed over tokens has the
gradient of the KL of whole outputs, as k1 in the reward has (the same). k3 in the loss is the loss
of KL(pi_ref || pi). Times the ratio, --kl_estimator k3_ratio, it is that of KL(pi || pi_ref), on
samples of an older policy, too (DeepSeek-V3.2).

Prediction. Near the base, k3 has the least variance. After 20 steps it has the most: answers
without thinking have become rare, and wherever one is still sampled, pi_ref / pi is large. In the
runs, k2, k3, k3_ratio and k1 in the reward hold the KL, k3 at the price of accuracy, because it
forbids that any answer of the base gets rare. k1 in the loss holds nothing. It is not nothing,
though, where GRPO divides by the length: there its gradient is that of the mean of 1 / |o|, which
asks for longer outputs, by too little to be seen in runs. All of what is claimed about gradients is
exact.

Method. Bias and variance: exact, over the vocabulary, at the tokens that grpo.py samples, on its
way from the base without a penalty. Then runs of grpo.py, and reinforce.py for k1 in the reward,
with beta 1 (in a pilot, 0.2 held next to nothing); all numbers are means of the last five batches.
k3 and k3_ratio are compared at the same KL, between runs with three values of beta each; how stable
they are is not looked at. Gradients: exactly, of all outputs of at most four of three tokens, for
100 random policies, references and older policies; "older" has samples of the last. Two are the
same if their cosine is 1 with all of them. The gradient of k1 on samples of an older policy was
looked at after earlier runs, to explain what k1 does in them: a batch serves for two steps.
"""
import copy
import itertools

import numpy
import torch
import torch.nn.functional as F

import grpo
import reinforce
from lab.draw import BLUE, ORANGE, RED, curves, dots
from lab.experiment import Experiment, numbers
from lab.training import load_base, training
from lab.verdict import OURS, Claim
from tools.runs import table

SCHULMAN = "[Schulman, 2020](http://joschu.net/blog/kl-approx.html)"
TANG = "[Tang and Munos](https://arxiv.org/abs/2506.09477)"
DEEPSEEK = "[DeepSeek-V3.2](https://arxiv.org/abs/2512.02556)"
ESTIMATORS = ["k1", "k2", "k3"]
WATCHED = [1, 2, 5, 10, 20]                 # steps after which the estimates are looked at
FLAGS = ("--num_prompts 16 --stop_at 2 --num_eval_problems 1 --num_eval_samples 1 "
         "--eval_steps 1000 --max_steps 20")
RUNS = {"none": f"grpo.py {FLAGS}", "none, Dr. GRPO": f"grpo.py {FLAGS} --loss_type dr_grpo",
        "none, REINFORCE": f"reinforce.py {FLAGS} --baseline mean"}
RUNS |= {k: f"{RUNS['none']} --beta 1 --kl_estimator {k}" for k in (*ESTIMATORS, "k3_ratio")}
RUNS |= {f"k3, beta {beta}": f"{RUNS['k3']} --beta {beta}" for beta in (0.1, 0.3)}
RUNS |= {f"k3_ratio, beta {beta}": f"{RUNS['k3_ratio']} --beta {beta}" for beta in (0.3, 3)}
RUNS["k1, Dr. GRPO"] = f"{RUNS['none, Dr. GRPO']} --beta 1 --kl_estimator k1"
RUNS["k1 in the reward"] = f"{RUNS['none, REINFORCE']} --beta 1"
# Pairs of a loss and what it is compared with: who says so, and whether their gradients are equal.
PAIRS = {
    ("k2", "KL(policy, base)"): (TANG, True), ("k3", "KL(base, policy)"): (TANG, True),
    ("k1 in the reward", "KL of outputs"): (TANG, True),
    ("k3_ratio, older", "KL(policy, base), older"): (DEEPSEEK, True),
    ("k1, by length", "mean of 1 / length"): (OURS, True),
    ("k1, older", "-KL(older, policy)"): (OURS, True),
    ("k2", "KL of outputs"): (TANG, False), ("k3", "KL of outputs"): (TANG, False),
    ("k3", "KL(policy, base)"): (TANG, False),
    ("k3, older", "KL(policy, base), older"): (DEEPSEEK, False),
    ("k2, by length", "KL(policy, base)"): (OURS, False),
    ("k3, by length", "KL(base, policy)"): (OURS, False),
    ("k3_ratio, by length", "KL(policy, base)"): (OURS, False)}
CLOSE = 1e-9                                # of what is equal but for rounding
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(5))
EXPERIMENT.runs("penalties", RUNS, ["kl", "accuracy", "completions/mean_length"])


# ---- 1. the estimates, at what a script samples ----------------------------------------------

@torch.no_grad()
def log_probs(policy, batch):
    """Of all tokens of the vocabulary, at each token of a batch. -> (B, T, V)"""
    states = grpo.completion_states(policy, batch.prompts, batch.tokens)
    return F.linear(states, policy.embed.weight).double().log_softmax(dim=-1)


def moments(log_p, log_ref, mask):
    """Mean and standard deviation of each estimate, exact over the vocabulary, averaged over the
    tokens of the mask; the mean of k1 is the KL. (B, T, V) twice, (B, T) -> {name: (mean, std)}"""
    found = {}
    for name in ESTIMATORS:
        estimate = grpo.kl(log_p, log_ref, name)
        mean = (log_p.exp() * estimate).sum(dim=-1)                             # (B, T)
        error = estimate - mean[..., None]
        variance = (log_p.exp() * error.square()).sum(dim=-1)
        mean = (mean * mask).sum() / mask.sum()
        deviation = ((variance * mask).sum() / mask.sum()).sqrt()
        found[name] = mean.item(), deviation.item()
    return found


@EXPERIMENT.measure(["on the way"])
def estimates(seed, case):
    """Means and deviations of the estimates of a token, as the policy leaves the base."""
    cfg, task, policy = load_base(grpo, f"{FLAGS} --seed {seed}")
    reference = copy.deepcopy(policy)
    found = {}
    for step, _ in enumerate(training(grpo, cfg, task, policy), 1):
        if step in WATCHED:
            batch = grpo.sample_batch(policy, task, cfg, step)      # the one it learns from next
            log_p = log_probs(policy, batch)
            for name, pair in moments(log_p, log_probs(reference, batch), batch.mask).items():
                for kind, value in zip(("mean", "deviation"), pair):
                    found.setdefault(f"{kind} of {name}", []).append(value)
        if step == WATCHED[-1]:
            return found


# ---- 2. gradients ----------------------------------------------------------------------------

class Outputs:
    """All outputs of at most four tokens: 1, 2, and 0, which ends them. The chances of a token
    depend on the one before it; a policy is a table of logits (3, 3)."""
    LENGTH = 4

    def __init__(self):
        rows = []
        for length in range(1, self.LENGTH + 1):
            rows += [[*words, 0] for words in itertools.product([1, 2], repeat=length - 1)]
        rows += [[*words] for words in itertools.product([1, 2], repeat=self.LENGTH)]
        padding = [0] * self.LENGTH
        self.tokens = torch.tensor([(row + padding)[:self.LENGTH] for row in rows])     # (N, T)
        self.before = F.pad(self.tokens[:, :-1], (1, 0))        # 0 before the first token
        lengths = torch.tensor([len(row) for row in rows])
        self.mask = (torch.arange(self.LENGTH) < lengths[:, None]).double()     # (N, T)

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
    on_policy = torch.zeros_like(log_rho) + logps - logps.detach()
    losses = {}
    for name in (*ESTIMATORS, "k3_ratio"):
        estimate = grpo.kl(logps, ref_logps, name, on_policy)
        losses[name] = outputs.mean(estimate, theta)
        losses[f"{name}, by length"] = outputs.mean(estimate, theta, "sequence_mean")
        estimate = grpo.kl(logps, ref_logps, name, log_rho)
        losses[f"{name}, older"] = outputs.mean(estimate, old)
    k1 = grpo.kl(logps, ref_logps, "k1").detach()
    in_reward = reinforce.policy_loss(logps, -k1.sum(dim=1), outputs.mask)
    losses["k1 in the reward"] = outputs.mean(in_reward, theta)
    # what they are compared with
    losses["KL(policy, base)"] = outputs.mean(outputs.kl(theta, ref), theta)
    losses["KL(policy, base), older"] = outputs.mean(outputs.kl(theta, ref), old)
    losses["KL(base, policy)"] = outputs.mean(outputs.kl(ref, theta), theta)
    losses["-KL(older, policy)"] = -outputs.mean(outputs.kl(old, theta), old)
    chances = logps.sum(dim=1).exp()
    losses["KL of outputs"] = (chances * (logps - ref_logps).sum(dim=1)).sum()
    losses["mean of 1 / length"] = (chances / outputs.mask.sum(dim=1)).sum()
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

def at_equal_kl(kl, accuracy, one, other):
    """How much more accurate `one` is than `other`, lists of runs, in the middle of the KL that
    both have, on a scale of logarithms; between two runs if need be. -> (S,)"""
    gains = []
    for seed in range(len(kl[one[0]])):
        found = []
        for names in (one, other):
            points = sorted((numpy.log(kl[name][seed]), accuracy[name][seed]) for name in names)
            found.append(numpy.array(points).T)
        low = max(x[0] for x, _ in found)
        high = min(x[-1] for x, _ in found)
        if low > high:
            raise ValueError(f"seed {seed}: {one} and {other} have no KL in common")
        more, less = (numpy.interp((low + high) / 2, x, y) for x, y in found)
        gains.append(more - less)
    return numpy.array(gains)


def page(penalties, estimates, cosines):
    kl, accuracy, length = ({name: found[metric][:, -5:].mean(axis=1)
                             for name, found in penalties.items()}
                            for metric in ("kl", "accuracy", "completions/mean_length"))
    way = estimates["on the way"]
    noise = way["deviation of k1"] / way["deviation of k3"]
    late = Claim("after 20 steps, k3 deviates less than k1", SCHULMAN, noise[:, -1], at_least=1.1,
                 times=True, contradicted="After 20 steps from the base, k3 is "
                 f"{1 / numpy.exp(numpy.log(noise[:, -1]).mean()):.0f} times as noisy an estimate "
                 "of the KL as k1")
    yield late
    yield Claim("after one step, k3 deviates less than k1", SCHULMAN, noise[:, 0], at_least=1.1,
                times=True)
    yield Claim("after 20 steps, the bias of k2 is below a tenth of the KL", SCHULMAN,
                way["mean of k2"][:, -1] / way["mean of k1"][:, -1], at_least=0.9, at_most=1.1,
                times=True)
    for name, source in {"k3_ratio": DEEPSEEK, "k1 in the reward": TANG, "k2": OURS,
                         "k3": OURS}.items():
        without = "none, REINFORCE" if name == "k1 in the reward" else "none"
        yield Claim(f"{name} holds the KL below that without", source, kl[without] / kl[name],
                    at_least=1.25, times=True)
    for name, without in {"k1": "none", "k1, Dr. GRPO": "none, Dr. GRPO"}.items():
        yield Claim(f"{name}: in the loss, it changes the KL by less than a fifth", TANG,
                    kl[name] / kl[without], at_least=1 / 1.2, at_most=1.2, times=True)
    matched = [[name for name in RUNS if name.split(",")[0] == k] for k in ("k3_ratio", "k3")]
    yield Claim("at the same KL, k3_ratio is more accurate than k3", OURS,
                at_equal_kl(kl, accuracy, *matched), at_least=0.02)
    found = {name: values[0] for name, values in cosines["policies"].items()}
    yield Claim("k1 in the loss has no gradient in the mean", TANG, found["norm of k1"].max(),
                at_most=CLOSE, exact=True)
    cosine = {pair: 1 - found[" / ".join(pair)] for pair in PAIRS}
    for (one, other), (source, is_equal) in PAIRS.items():
        if is_equal:
            yield Claim(f"in the loss, {one} has the gradient of {other}: the cosine is 1", source,
                        cosine[one, other], at_least=1, exact=True)
        else:
            yield Claim(f"in the loss, {one} has not the gradient of {other}: the least cosine",
                        source, cosine[one, other].min(), at_most=0.99, exact=True)

    worst = min(values.min() for values in cosine.values())
    yield curves({name: way[f"deviation of {name}"] for name in ESTIMATORS}, late.finding,
                 x=WATCHED, given=dict(zip(ESTIMATORS, (BLUE, ORANGE, RED))), yscale="log",
                 xlabel="steps from the base", ylabel="standard deviation, nats a token")
    yield dots({f"{one} | {other}": values for (one, other), values in cosine.items()},
               "An estimate in the loss may pull elsewhere than the KL, with a cosine down to "
               f"{worst:.2f}", xlabel="cosine of two gradients; a dot for each of 100 policies")
    rows = {name: {"kl": kl[name], "accuracy": accuracy[name], "length": length[name]}
            for name in RUNS}
    yield numbers(rows, {"kl": "KL a token", "accuracy": "accuracy", "length": "tokens"},
                  by="penalty")
    columns = list(way)
    yield table(["steps from the base", *columns],
                [[step, *(f"{way[name][:, i].mean():.4f}" for name in columns)]
                 for i, step in enumerate(WATCHED)])
