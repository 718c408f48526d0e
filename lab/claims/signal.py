"""Signal: which prompts have a gradient, and how much each of them weighs

Claim. A group whose outputs are all right, or all wrong, has no gradient: it is silent. The share
of such groups grows in training; dynamic sampling, until all groups of a batch have signal, then
takes fewer steps (DAPO, 2503.14476, section 3.2). DAPO does not count samples. The groups that have
signal do not weigh alike: GRPO divides advantages by the std of the group's rewards, which weighs
questions that are too easy or too hard more (Dr. GRPO, 2503.20783, which does not divide). Without
the small number in the divisor, and with large groups, GRPO climbs 2 arcsin sqrt(p) instead of p,
the chance to be right (2510.13651). MaxRL (2602.02710, --scale_rewards mean) climbs a series of log
p.

Prediction. At first hard problems are all wrong, later easy ones all right, so that the share falls
before it grows. In equal steps, dynamic sampling is better. In equal samples it is not, for what it
leaves out is paid for. A curriculum refuses a problem before it is sampled, so it is a little
better in equal samples. The mean gradient of a prompt is w(p) times that of p, with w = E[A |
right] - E[A | wrong]. Undivided, w is (G - 1) / G for all p; MaxRL's is (1 - (1 - p)^(G - 1)) / p.
For large G, that of GRPO is 1 / sqrt(p (1 - p)), which has no bound; but a group of G with one
right output has an advantage of (G - 1) / sqrt(G), and w is at most that. So with G = 8 the edges
weigh only about a fifth more than the middle, and the bias is one of large groups.

Method. A base that has seen two thirds of the usual demonstrations, of 2 to 7 operands, so that
problems are hard in several degrees; groups of 4, of which many are silent. grpo.py and gspo.py as
they are, and with --dynamic_sampling 4, which replaces the silent groups by as many new ones, and
again; and grpo.py with --curriculum. All that was sampled is counted, also what was left out.
Weights are exact: grpo.advantages of all numbers of right outputs in a group, and their binomial
chances.

Outcome. Right: the share of silent groups falls, from .35 to .22 in three steps, before it grows,
and from equal samples dynamic sampling is not seen to be better: worse with gspo.py, open with
grpo.py. Equal steps show no sure gain, either, nor does a curriculum. Weights are as predicted,
except for the edges with G = 8, which weigh a third more than the middle.
"""
import math

import numpy
import torch

import grpo
import gspo
from lab.draw import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, curves
from lab.experiment import Experiment, numbers
from lab.training import load_base, training
from lab.verdict import OURS, Claim
from tasks import pass_rates

DAPO = "[DAPO](https://arxiv.org/abs/2503.14476)"
DR_GRPO = "[Dr. GRPO](https://arxiv.org/abs/2503.20783)"
ARCSIN = "[2510.13651](https://arxiv.org/abs/2510.13651)"
MAXRL = "[MaxRL](https://arxiv.org/abs/2602.02710)"
BASE = "--task arithmetic:2-7 --base_steps 600 --max_completion_length 64 --num_eval_problems 256"
FLAGS = f"{BASE} --num_prompts 64 --num_generations 4 --num_eval_samples 2"
DYNAMIC = f"{FLAGS} --dynamic_sampling 4"
WAYS = {"plain": (grpo, FLAGS), "dynamic sampling": (grpo, DYNAMIC),
        "curriculum": (grpo, f"{FLAGS} --curriculum"),
        "GSPO, plain": (gspo, FLAGS), "GSPO, dynamic sampling": (gspo, DYNAMIC)}
PAIRS = {"grpo.py": ("dynamic sampling", "plain"),
         "gspo.py": ("GSPO, dynamic sampling", "GSPO, plain")}
BUDGET = 6400                                   # samples of a run
EVERY = 4                                       # steps from one evaluation to the next
GAIN = 0.02                                     # of pass@1, what counts as one
SCALES = {"GRPO": "group", "Dr. GRPO": "none", "MaxRL": "mean"}
SIZES = (4, 8, 16, 64)                          # G
GROUP = 8
RATES = torch.arange(1, 100).double() / 100     # chances to be right
LOW, HALF, HIGH = 4, 49, 94                     # the places of 5%, 50% and 95%
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(8))


# ---- 1. silent groups ------------------------------------------------------------------------

@EXPERIMENT.measure(WAYS)
def learning(seed, way, budget=BUDGET):
    """Train with as many samples as the budget has."""
    script, flags = WAYS[way]
    cfg, task, policy = load_base(script, f"{flags} --seed {seed} --base_seed {seed}")
    found = {"samples": [], "all wrong": [], "all right": [], "pass@1": []}
    samples = 0
    for steps, (batch, _) in enumerate(training(script, cfg, task, policy), 1):
        rates = [rate for _, rate in pass_rates(batch)]  # of all groups, also those left out
        samples += len(rates) * cfg.num_generations
        found["samples"].append(samples)
        found["all wrong"].append(rates.count(0.0) / len(rates))
        found["all right"].append(rates.count(1.0) / len(rates))
        score = None
        if samples >= budget or steps % EVERY == 0:
            score = script.evaluate(policy, task, cfg)["pass@1"]
        found["pass@1"].append(score)
        if samples >= budget:
            return found


def after_budget(found):
    """pass@1 of each seed after BUDGET samples, between two evaluations if need be. -> (S,)"""
    ends = []
    for samples, scores in zip(found["samples"], found["pass@1"]):
        is_known = ~numpy.isnan(scores)
        ends.append(numpy.interp(BUDGET, samples[is_known], scores[is_known]))
    return numpy.array(ends)


def at_equal_steps(one, other):
    """How much more pass@1 `one` has after the last step at which both were evaluated. -> (S,)"""
    steps = min(one["pass@1"].shape[1], other["pass@1"].shape[1])
    gains = one["pass@1"][:, :steps] - other["pass@1"][:, :steps]
    return numpy.array([row[~numpy.isnan(row)][-1] for row in gains])


# ---- 2. weights ------------------------------------------------------------------------------

def weight(p, G, scale):
    """w: the mean gradient of a prompt that is solved with chance p is w times that of p.
    (N,) -> (N,)"""
    rewards = torch.ones(G + 1, G).tril(-1).double()        # of groups with 0 .. G right outputs
    A = grpo.advantages(rewards, scale)                                         # (G + 1, G)
    if_right = A[1:, 0]                                     # where 0 .. G - 1 others are right
    if_wrong = A[:-1, -1]                                                       # (G,)
    k = torch.arange(G)
    ways = torch.tensor([math.comb(G - 1, others) for others in range(G)])
    p = p[:, None]
    chances = ways * p ** k * (1 - p) ** (G - 1 - k)                            # (N, G)
    return (chances * (if_right - if_wrong)).sum(dim=1)


@EXPERIMENT.measure(SCALES, seeds=[0])
def weights(seed, method):
    """w for all of RATES, for each size of a group."""
    return {str(G): weight(RATES, G, SCALES[method]).tolist() for G in SIZES}


# ---- 3. what was found -----------------------------------------------------------------------

def page(learning, weights):
    silent = {kind: learning["plain"][kind] for kind in ("all wrong", "all right")}
    silent["either"] = silent["all wrong"] + silent["all right"]
    early = silent["either"][:, :5].mean(axis=1)
    late = silent["either"][:, -5:].mean(axis=1)
    said = (f"{early.mean():.0%} of the groups in the first 5 steps, and {late.mean():.0%} in the "
            "last 5, have no gradient, because their outputs are all right or all wrong")
    yield Claim("the share of silent groups grows from the first five steps to the last", DAPO,
                (late, early), at_least=0.05, shown=said)
    end = {way: after_budget(learning[way]) for way in WAYS}
    for script, (more, less) in PAIRS.items():
        yield Claim(f"{script}: after equally many samples, pass@1 is not higher with dynamic "
                    "sampling", OURS, (end[more], end[less]), at_most=GAIN)
        yield Claim(f"{script}: after equally many steps, pass@1 is higher with dynamic sampling",
                    DAPO, at_equal_steps(learning[more], learning[less]), at_least=GAIN)

    w = {(method, int(G)): rows[0] for method, found in weights.items()
         for G, rows in found.items()}
    relative = {way: values / values[HALF] for way, values in w.items()}
    edges = {G: relative["GRPO", G][[LOW, HIGH]].min() for G in SIZES}
    biased = Claim(
        "divided by the std, prompts solved 5% and 95% of the time weigh more than those of 50%, "
        "with 4, 8, 16 and 64 outputs", DR_GRPO, list(edges.values()), at_least=1, times=True,
        exact=True, shown="Divided by the std, prompts solved 5% or 95% of the time weigh more "
        f"than those of 50%: {edges[64]:.1f} times as much with groups of 64, {edges[8]:.1f} times "
        "with 8")
    yield biased
    p = RATES.numpy()
    slope = (1 - (1 - p) ** (GROUP - 1)) / p
    yield Claim("MaxRL's weight is the slope of a series of log p: how far off", MAXRL,
                w["MaxRL", GROUP] - slope, at_least=-1e-5, at_most=1e-5, exact=True)
    for G, source in ((GROUP, OURS), (64, ARCSIN)):
        ratios = w["GRPO", G] * (p * (1 - p)) ** 0.5
        yield Claim(f"G = {G}: GRPO weighs by the slope of 2 arcsin sqrt(p), p 5% to 95%", source,
                    ratios[LOW:HIGH + 1], at_least=0.9, at_most=1.1, times=True, exact=True)

    yield curves(silent, said, given=dict(zip(silent, (RED, GREEN, GREY))),
                 xlabel="step of plain GRPO, G = 4", ylabel="share of groups", ylim=(0, 1))
    lines = {f"GRPO, G = {G}": relative["GRPO", G][None] for G in SIZES}
    lines["Dr. GRPO, any G"] = relative["Dr. GRPO", GROUP][None]
    lines[f"MaxRL, G = {GROUP}"] = relative["MaxRL", GROUP][None]
    yield curves(lines, biased.finding, x=RATES, xlabel="p, chance to be right", ylim=(0, 3.6),
                 ylabel="weight of a prompt, 1 at p = 0.5", height=3.2,
                 given=dict(zip(lines, (SKY, BLUE, ORANGE, RED, GREEN, PINK))))
    rows = {way: {"steps": numpy.isfinite(learning[way]["samples"]).sum(axis=1),
                  "pass@1": end[way]} for way in WAYS}
    yield numbers(rows, {"steps": f"steps with {BUDGET} samples",
                         "pass@1": f"pass@1 after {BUDGET} samples"}, ".3g", by="run")
