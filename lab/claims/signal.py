"""Signal: which prompts have a gradient, and how much each of them counts"""
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
WAYS = {"GRPO, plain": (grpo, FLAGS), "GRPO, dynamic sampling": (grpo, DYNAMIC),
        "GRPO, curriculum": (grpo, f"{FLAGS} --curriculum"),
        "GSPO, plain": (gspo, FLAGS), "GSPO, dynamic sampling": (gspo, DYNAMIC)}
BUDGET = 6400                                   # samples in a run
EVERY = 4                                       # steps from one evaluation to the next
EARLY = 5                                       # steps in the first and in the last window
GAIN = 0.02                                     # smallest difference of pass@1 that matters
SCALES = {"GRPO": "group", "MaxRL": "mean"}
SIZES = (4, 8, 16, 64)                          # G
RATES = torch.arange(1, 100).double() / 100     # p, the probability of a right output
LOW, HALF, HIGH = 4, 49, 94                     # places of 5%, 50% and 95% in RATES
EXPERIMENT = Experiment(__file__, seeds=range(8))


@EXPERIMENT.measure(WAYS)
def learning(seed, way):
    """Train with BUDGET samples, and record each step."""
    script, flags = WAYS[way]
    cfg, task, policy = load_base(script, f"{flags} --seed {seed} --base_seed {seed}")
    steps = training(script, cfg, task, policy)
    lines = []
    samples = 0
    while samples < BUDGET:
        batch, _ = next(steps)
        rates = [rate for _, rate in pass_rates(batch)]     # of all groups, left out or not
        samples += len(rates) * cfg.num_generations
        is_due = samples >= BUDGET or len(lines) % EVERY == EVERY - 1
        lines.append({"samples": samples, "all wrong": rates.count(0.0) / len(rates),
                      "all right": rates.count(1.0) / len(rates),
                      "pass@1": script.evaluate(policy, task, cfg)["pass@1"] if is_due else None})
    return transposed(lines)


def after_budget(columns):
    """Interpolate pass@1 of each seed after BUDGET samples between two evaluations. -> (S,)"""
    ends = []
    for samples, scores in zip(columns["samples"], columns["pass@1"]):
        is_known = ~numpy.isnan(scores)
        ends.append(numpy.interp(BUDGET, samples[is_known], scores[is_known]))
    return numpy.array(ends)


def at_equal_steps(one, other):
    """Subtract pass@1 of `other` from that of `one`, after the last step at which both were
    evaluated. -> (S,)"""
    steps = min(one["pass@1"].shape[1], other["pass@1"].shape[1])
    gains = one["pass@1"][:, :steps] - other["pass@1"][:, :steps]
    return numpy.array([row[~numpy.isnan(row)][-1] for row in gains])


def weight(p, G, scale):
    """Compute the weight w of a prompt: its mean gradient is w times the gradient of p, the
    probability that an output is right. (N,) -> (N,)"""
    rewards = torch.ones(G + 1, G).tril(-1).double()        # row n: a group with n right outputs
    A = grpo.advantages(rewards, scale)                                         # (G + 1, G)
    if_right = A[1:, 0]                                     # (G,)  0 .. G - 1 others are right
    if_wrong = A[:-1, -1]                                                       # (G,)
    k = torch.arange(G)
    ways = torch.tensor([math.comb(G - 1, others) for others in range(G)])
    p = p[:, None]
    probabilities = ways * p ** k * (1 - p) ** (G - 1 - k)                      # (N, G)
    return (probabilities * (if_right - if_wrong)).sum(dim=1)


@EXPERIMENT.measure(SCALES, seeds=[0])
def weights(seed, method):
    """Compute w for all of RATES, for each size of a group."""
    return {str(G): weight(RATES, G, SCALES[method]).tolist() for G in SIZES}


def page(learning, weights):
    silent = {kind: learning["GRPO, plain"][kind] for kind in ("all wrong", "all right")}
    silent["either"] = silent["all wrong"] + silent["all right"]
    early, late = (silent["either"][:, steps].mean(axis=1)
                   for steps in (slice(EARLY), slice(-EARLY, None)))
    yield Claim(f"the fraction of groups without a gradient grows from the first {EARLY} steps to "
                f"the last {EARLY}", "DAPO", (late, early), at_least=0.05,
                said=f"The fraction of groups without a gradient grows from {early.mean():.0%} in "
                f"the first {EARLY} steps to {late.mean():.0%} in the last {EARLY}")
    yield curves(silent, given=dict(zip(silent, (RED, GREEN, GREY))),
                 xlabel="step of GRPO with groups of 4, without dynamic sampling",
                 ylabel="fraction of groups", ylim=(0, 1))
    end = {way: after_budget(learning[way]) for way in WAYS}
    for script, name in (("grpo.py", "GRPO"), ("gspo.py", "GSPO")):
        yield Claim(f"with dynamic sampling, {script} does not get a higher pass@1 from equally "
                    "many samples", OURS, (end[f"{name}, dynamic sampling"], end[f"{name}, plain"]),
                    at_most=GAIN)
    plain, dynamic, *_ = learning.values()
    yield Claim("with dynamic sampling, grpo.py gets a higher pass@1 after equally many steps",
                "DAPO", at_equal_steps(dynamic, plain), at_least=GAIN)

    of_grpo, of_maxrl = ({G: weights[method][str(G)][0] for G in SIZES}
                         for method in ("GRPO", "MaxRL"))
    edges = {G: w[[LOW, HIGH]].min() / w[HALF] for G, w in of_grpo.items()}
    yield Claim(
        "with the division by the std, prompts that are solved 5% or 95% of the time count more "
        "than prompts that are solved 50% of the time, in groups of 4, 8, 16 and 64 outputs",
        "Dr. GRPO", list(edges.values()), at_least=1, times=True, exact=True,
        said="Because GRPO divides by the std, prompts that are solved 5% or 95% of the time "
        f"count more than prompts that are solved 50% of the time: {edges[64]:.1f} times as much "
        f"in groups of 64 outputs, and {edges[8]:.1f} times as much in groups of 8")
    p = RATES.numpy()
    slope = (1 - (1 - p) ** (8 - 1)) / p
    yield Claim("MaxRL weighs a prompt by the slope of a truncated series for log p (weight minus "
                "slope)", "MaxRL", of_maxrl[8] - slope, at_least=-1e-5, at_most=1e-5, exact=True)
    for G, source in ((8, OURS), (64, "Davis and Recht")):
        ratios = of_grpo[G] * (p * (1 - p)) ** 0.5
        yield Claim(f"in groups of {G}, GRPO weighs a prompt by the slope of 2 arcsin sqrt(p), for "
                    "p from 5% to 95% (weight divided by slope)", source,
                    ratios[LOW:HIGH + 1], at_least=0.9, at_most=1.1, times=True, exact=True)
    yield numbers({way: {
        f"steps with {BUDGET} samples": numpy.isfinite(columns["samples"]).sum(axis=1),
        f"pass@1 after {BUDGET} samples": end[way]} for way, columns in learning.items()},
        ".3g", "run")
