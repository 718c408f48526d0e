"""Signal: which prompts have a gradient, and how much each of them counts"""
import math

import numpy
import torch

import grpo
import gspo
from lab.bench import OURS, Claim, numbers
from lab.training import load_base, training
from report import chart
from tasks import pass_rates

SEEDS = range(8)
BASE = "--task arithmetic:2-7 --base_steps 600 --max_completion_length 64 --num_eval_problems 256"
FLAGS = f"{BASE} --num_prompts 64 --num_generations 4 --num_eval_samples 2"
WAYS = {"GRPO, plain": (grpo, ""), "GRPO, dynamic sampling": (grpo, "--dynamic_sampling 4"),
        "GRPO, curriculum": (grpo, "--curriculum"),
        "GSPO, plain": (gspo, ""), "GSPO, dynamic sampling": (gspo, "--dynamic_sampling 4")}
CASES = list(WAYS)
BUDGET = 6400                           # samples in a run
EVERY = 4                               # steps from one evaluation to the next
EARLY = 5                               # steps in the first and in the last window
GAIN = 0.02                             # smallest difference of pass@1 that matters
SIZES = (4, 8, 16, 64)                  # G
P = numpy.arange(1, 100) / 100          # the probability of a right output
LOW, HALF, HIGH = 4, 49, 94             # places of 5%, 50% and 95% in P


def measure(way, seed):
    """Train with BUDGET samples, and record each step."""
    script, flags = WAYS[way]
    cfg, task, policy = load_base(script, f"{FLAGS} {flags} --seed {seed} --base_seed {seed}")
    columns = {"samples": [], "all wrong": [], "all right": [], "pass@1": []}
    samples = 0
    for batch, _ in training(script, cfg, task, policy):
        rates = [rate for _, rate in pass_rates(batch)]     # of all groups, left out or not
        samples += len(rates) * cfg.num_generations
        is_due = samples >= BUDGET or len(columns["samples"]) % EVERY == EVERY - 1
        score = script.evaluate(policy, task, cfg)["pass@1"] if is_due else None
        columns["samples"].append(samples)
        columns["all wrong"].append(rates.count(0.0) / len(rates))
        columns["all right"].append(rates.count(1.0) / len(rates))
        columns["pass@1"].append(score)
        if samples >= BUDGET:
            return columns


def after_budget(columns):
    """Interpolate pass@1 of each seed after BUDGET samples between two evaluations. -> (S,)"""
    ends = []
    for samples, scores in zip(columns["samples"], columns["pass@1"]):
        is_known = ~numpy.isnan(scores)
        ends.append(numpy.interp(BUDGET, samples[is_known], scores[is_known]))
    return numpy.array(ends)


def weight(G, scale):
    """Compute the weight w of a prompt for all P: its mean gradient is w times the gradient of the
    probability that an output is right. -> (99,)"""
    rewards = torch.ones(G + 1, G).tril(-1).double()        # row n: a group with n right outputs
    A = grpo.advantages(rewards, scale).numpy()                                 # (G + 1, G)
    if_right = A[1:, 0]                                     # (G,)  0 .. G - 1 others are right
    if_wrong = A[:-1, -1]                                                       # (G,)
    k = numpy.arange(G)
    ways = numpy.array([math.comb(G - 1, others) for others in range(G)], dtype=float)
    odds = ways * P[:, None] ** k * (1 - P[:, None]) ** (G - 1 - k)             # (99, G)
    return (odds * (if_right - if_wrong)).sum(axis=1)


def page(x):
    silent = {kind: x["GRPO, plain"][kind] for kind in ("all wrong", "all right")}
    silent["either"] = silent["all wrong"] + silent["all right"]
    early = silent["either"][:, :EARLY].mean(axis=1)
    late = silent["either"][:, -EARLY:].mean(axis=1)
    yield Claim(f"the fraction of groups without a gradient grows from the first {EARLY} steps to "
                f"the last {EARLY}", "DAPO", (late, early), at_least=0.05,
                finding="The fraction of groups without a gradient grows from "
                f"{early.mean():.0%} in the first {EARLY} steps to {late.mean():.0%} in the last "
                f"{EARLY}")
    end = {way: after_budget(x[way]) for way in WAYS}
    for script, name in (("grpo.py", "GRPO"), ("gspo.py", "GSPO")):
        yield Claim(f"with dynamic sampling, {script} does not get a higher pass@1 from equally "
                    "many samples", OURS, (end[f"{name}, dynamic sampling"], end[f"{name}, plain"]),
                    at_most=GAIN)
    dynamic, plain = (x[f"GRPO, {way}"]["pass@1"] for way in ("dynamic sampling", "plain"))
    gains = dynamic - plain[:, :dynamic.shape[1]]           # nan where one was not evaluated
    yield Claim("with dynamic sampling, grpo.py gets a higher pass@1 after equally many steps",
                "DAPO", [row[~numpy.isnan(row)][-1] for row in gains], at_least=GAIN)

    weights = {G: weight(G, "group") for G in SIZES}
    edges = {G: min(w[LOW], w[HIGH]) / w[HALF] for G, w in weights.items()}
    yield Claim(
        "with the division by the std, prompts that are solved 5% or 95% of the time count more "
        "than prompts that are solved 50% of the time, in groups of 4, 8, 16 and 64 outputs",
        "Dr. GRPO", list(edges.values()), at_least=1, ratio=True, exact=True,
        finding="Because GRPO divides by the std, prompts that are solved 5% or 95% of the time "
        f"count more than prompts that are solved 50% of the time: {edges[64]:.1f} times as much "
        f"in groups of 64 outputs, and {edges[8]:.1f} times as much in groups of 8")
    yield Claim("MaxRL weighs a prompt by the slope of a truncated series for log p (weight minus "
                "slope)", "MaxRL", weight(8, "mean") - (1 - (1 - P) ** 7) / P, at_least=-1e-9,
                at_most=1e-9, exact=True)
    for G, source in ((8, OURS), (64, "Davis and Recht")):
        slope = 1 / (P * (1 - P)) ** 0.5
        yield Claim(f"in groups of {G}, GRPO weighs a prompt by the slope of 2 arcsin sqrt(p), for "
                    "p from 5% to 95% (weight divided by slope)", source,
                    (weights[G] / slope)[LOW:HIGH + 1], at_least=0.9, at_most=1.1, ratio=True,
                    exact=True)
    yield lambda axis: chart.curves(axis, silent, ylabel="fraction of groups", ylim=(0, 1),
                                    xlabel="step of GRPO with groups of 4")
    yield numbers({way: {
        f"steps with {BUDGET} samples": numpy.isfinite(x[way]["samples"]).sum(axis=1),
        f"pass@1 after {BUDGET} samples": end[way]} for way in WAYS}, "run")
