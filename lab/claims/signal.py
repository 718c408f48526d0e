"""Signal: which prompts have a gradient, and how much each of them counts"""
import math

import numpy
import torch

import grpo
from lab.bench import OURS, Claim, at_best, numbers
from lab.training import load_base, training
from report import chart
from tasks import pass_rates

SEEDS, TUNING = (*range(5), *range(8, 15)), (5, 6, 7, 15, 16, 17)
BASE = "--task arithmetic:2-7 --base_steps 600 --max_completion_length 64 --num_eval_problems 256"
FLAGS = f"{BASE} --num_prompts 64 --num_generations 4 --num_eval_samples 2"
CHECK = f"grpo.py {FLAGS} --dynamic_sampling 4"
PLAIN, DYNAMIC = "GRPO, plain", "GRPO, dynamic sampling"
WAYS = {PLAIN: "", DYNAMIC: "--dynamic_sampling 4"}
SIDES = dict.fromkeys(WAYS, (None, 0.0005))
BUDGET, STEPS = 6400, 16                # samples in a run; about as many steps as they last for
AT_BUDGET, AT_STEPS = f"pass@1 after {BUDGET} samples", f"pass@1 after {STEPS} steps"
COMPARED = [(side, what) for what in (AT_BUDGET, AT_STEPS) for side in SIDES]
EVERY = 4                               # steps from one evaluation to the next
FIRST_AND_LAST = slice(5), slice(-5, None)              # steps that are compared
GAIN = 0.02                             # smallest difference of pass@1 that matters
SIZES = (4, 8, 16, 64)                  # G
P = numpy.arange(1, 100) / 100          # the probability of a right output


def measure(case, seed):
    """Train with BUDGET samples, and record each step."""
    way, _, rate = case.rpartition(", ")
    flags = f"{FLAGS} {WAYS[way]} --learning_rate {rate} --seed {seed} --base_seed {seed}"
    cfg, task, policy = load_base(grpo, flags)
    lines = []
    samples = 0
    for batch in training(cfg, task, policy):
        rates = [rate for _, rate in pass_rates(batch)]     # of all groups, left out or not
        samples += len(rates) * cfg.num_generations
        is_due = samples >= BUDGET or len(lines) % EVERY == EVERY - 1
        score = grpo.evaluate(policy, task, cfg)["pass@1"] if is_due else None
        lines.append((samples, *(rates.count(rate) / len(rates) for rate in (0.0, 1.0)), score))
        if samples >= BUDGET:
            return dict(zip(("samples", "all wrong", "all right", "pass@1"), zip(*lines)))


def score(columns, what):
    """Look up the pass@1 of each run: after BUDGET samples, interpolated between two evaluations;
    or after STEPS steps, or at the end of a shorter run. -> (S,)"""
    scores = []
    for samples, passed in zip(columns["samples"], columns["pass@1"]):
        is_known = ~numpy.isnan(passed)
        scores.append(numpy.interp(BUDGET, samples[is_known], passed[is_known])
                      if what == AT_BUDGET else passed[:STEPS][is_known[:STEPS]][-1])
    return numpy.array(scores)


def weight(G):
    """Compute the weight w of a prompt in GRPO for all P: its mean gradient is w times the gradient
    of the probability that an output is right. -> (99,)"""
    rewards = torch.ones(G + 1, G).tril(-1).double()        # row n: a group with n right outputs
    A = grpo.advantages(rewards).numpy()                                 # (G + 1, G)
    others = numpy.arange(G)                                                    # that are right
    ways = numpy.array([math.comb(G - 1, k) for k in others], dtype=float)
    odds = ways * P[:, None] ** others * (1 - P[:, None]) ** (G - 1 - others)   # (99, G)
    return (odds * (A[1:, 0] - A[:-1, -1])).sum(axis=1)     # of a right output, of a wrong one


def page(x):
    ends = at_best("signal", x)
    silent = {kind: ends[PLAIN, AT_BUDGET][kind] for kind in ("all wrong", "all right")}
    silent["either"] = silent["all wrong"] + silent["all right"]
    early, late = (silent["either"][:, steps].mean(axis=1) for steps in FIRST_AND_LAST)
    end = {what: {side: score(ends[side, what], what) for side in WAYS}
           for what in (AT_BUDGET, AT_STEPS)}
    behind, ahead = ((end[what][PLAIN] - end[what][DYNAMIC]).mean() for what in end)
    yield (f"After {BUDGET:,} samples, dynamic sampling is behind plain GRPO by {behind:.3f} in "
           f"pass@1, and after {STEPS} steps ahead by {-ahead:.3f}. The groups that it leaves "
           "out have been sampled, too.")
    yield Claim("the fraction of groups without a gradient grows from the first 5 steps to the "
                "last 5", "DAPO", (late, early), at_least=0.05)
    for what, text, source, region in (
            (AT_BUDGET, f"does not get a higher {AT_BUDGET}", OURS, {"at_most": GAIN}),
            (AT_STEPS, f"gets a higher {AT_STEPS}", "DAPO", {"at_least": GAIN})):
        yield Claim(f"with dynamic sampling, grpo.py {text}", source,
                    (end[what][DYNAMIC], end[what][PLAIN]),
                    rates=tuple(ends[side, what]["rate"] for side in (DYNAMIC, PLAIN)), **region)

    weights = {G: weight(G) for G in SIZES}
    edges = {G: min(w[4], w[94]) / w[49] for G, w in weights.items()}       # 5%, 95% and 50%
    yield Claim(
        "with the division by the std, prompts that are solved 5% or 95% of the time count more "
        "than prompts that are solved 50% of the time, in groups of 4, 8, 16 and 64 outputs",
        "Dr. GRPO", list(edges.values()), at_least=1, ratio=True, exact=True, computed=True)
    yield lambda axis: chart.curves(axis, silent, ylabel="fraction of groups", ylim=(0, 1),
                                    xlabel="step of GRPO with groups of 4")
    yield numbers({side: {what: end[what][side] for what in end} for side in WAYS}, "", ".3f")
