"""Signal: which prompts have a gradient, and how much each of them weighs

Runs with and without dynamic sampling count the groups without a gradient; the weights of prompts
are exact. docs/lab/signal.md says more.
"""
import math

import numpy
import torch

import grpo
import gspo
from lab.draw import GREEN, GREY, RED, curves
from lab.experiment import Experiment, numbers, transposed
from lab.training import load_base, training
from lab.verdict import OURS, Claim
from tasks import pass_rates

BASE = "--task arithmetic:2-7 --base_steps 600 --max_completion_length 64 --num_eval_problems 256"
FLAGS = f"{BASE} --num_prompts 64 --num_generations 4 --num_eval_samples 2"
DYNAMIC = f"{FLAGS} --dynamic_sampling 4"
WAYS = {"plain": (grpo, FLAGS), "dynamic sampling": (grpo, DYNAMIC),
        "curriculum": (grpo, f"{FLAGS} --curriculum"),
        "GSPO, plain": (gspo, FLAGS), "GSPO, dynamic sampling": (gspo, DYNAMIC)}
BUDGET = 6400                                   # samples of a run
EVERY = 4                                       # steps from one evaluation to the next
EARLY = 5                                       # first and last steps that are compared
GAIN = 0.02                                     # of pass@1, what counts as one
SCALES = {"GRPO": "group", "MaxRL": "mean"}
SIZES = (4, 8, 16, 64)                          # G
RATES = torch.arange(1, 100).double() / 100     # chances to be right
LOW, HALF, HIGH = 4, 49, 94                     # the places of 5%, 50% and 95%
EXPERIMENT = Experiment(__file__, seeds=range(8))


@EXPERIMENT.measure(WAYS)
def learning(seed, way):
    """Train with BUDGET samples."""
    script, flags = WAYS[way]
    cfg, task, policy = load_base(script, f"{flags} --seed {seed} --base_seed {seed}")
    steps = training(script, cfg, task, policy)
    found = []
    samples = 0
    while samples < BUDGET:
        batch, _ = next(steps)
        rates = [rate for _, rate in pass_rates(batch)]  # of all groups, also those left out
        samples += len(rates) * cfg.num_generations
        is_due = samples >= BUDGET or len(found) % EVERY == EVERY - 1
        found.append({"samples": samples, "all wrong": rates.count(0.0) / len(rates),
                      "all right": rates.count(1.0) / len(rates),
                      "pass@1": script.evaluate(policy, task, cfg)["pass@1"] if is_due else None})
    return transposed(found)


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


def page(learning, weights):
    silent = {kind: learning["plain"][kind] for kind in ("all wrong", "all right")}
    silent["either"] = silent["all wrong"] + silent["all right"]
    early, late = (silent["either"][:, steps].mean(axis=1)
                   for steps in (slice(EARLY), slice(-EARLY, None)))
    said = (f"{early.mean():.0%} of the groups in the first {EARLY} steps, and {late.mean():.0%} "
            f"in the last {EARLY}, have no gradient, because their outputs are all right or all "
            "wrong")
    yield Claim("the share of silent groups grows from the first steps to the last", "DAPO",
                (late, early), at_least=0.05, shown=said)
    yield curves(silent, said, given=dict(zip(silent, (RED, GREEN, GREY))),
                 xlabel="step of plain GRPO, G = 4", ylabel="share of groups", ylim=(0, 1))
    end = {way: after_budget(learning[way]) for way in WAYS}
    for script, prefix in (("grpo.py", ""), ("gspo.py", "GSPO, ")):
        more, less = f"{prefix}dynamic sampling", f"{prefix}plain"
        yield Claim(f"{script}: after equally many samples, pass@1 is not higher with dynamic "
                    "sampling", OURS, (end[more], end[less]), at_most=GAIN)
    yield Claim("grpo.py: after equally many steps, pass@1 is higher with dynamic sampling", "DAPO",
                at_equal_steps(learning["dynamic sampling"], learning["plain"]), at_least=GAIN)

    of_grpo, of_maxrl = ({G: weights[method][str(G)][0] for G in SIZES}
                         for method in ("GRPO", "MaxRL"))
    edges = {G: w[[LOW, HIGH]].min() / w[HALF] for G, w in of_grpo.items()}
    yield Claim(
        "divided by the std, prompts solved 5% and 95% of the time weigh more than those of 50%, "
        "with 4, 8, 16 and 64 outputs", "Dr. GRPO", list(edges.values()), at_least=1, times=True,
        exact=True, shown="Divided by the std, prompts solved 5% or 95% of the time weigh more "
        f"than those of 50%: {edges[64]:.1f} times as much with groups of 64, {edges[8]:.1f} times "
        "with 8")
    p = RATES.numpy()
    slope = (1 - (1 - p) ** (8 - 1)) / p
    yield Claim("MaxRL's weight is the slope of a series of log p: how far off", "MaxRL",
                of_maxrl[8] - slope, at_least=-1e-5, at_most=1e-5, exact=True)
    for G, source in ((8, OURS), (64, "2510.13651")):
        ratios = of_grpo[G] * (p * (1 - p)) ** 0.5
        yield Claim(f"G = {G}: GRPO weighs by the slope of 2 arcsin sqrt(p), p 5% to 95%", source,
                    ratios[LOW:HIGH + 1], at_least=0.9, at_most=1.1, times=True, exact=True)
    rows = {way: {f"steps with {BUDGET} samples": numpy.isfinite(found["samples"]).sum(axis=1),
                  f"pass@1 after {BUDGET} samples": end[way]} for way, found in learning.items()}
    yield numbers(rows, form=".3g", by="run")
