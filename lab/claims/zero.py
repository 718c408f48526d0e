"""R1-Zero: why answers get longer when nothing rewards length"""
import dataclasses
import itertools

import numpy

import common
import grpo
import plumbing
from lab.bench import Claim, at_best, best_rates, numbers
from lab.claims.signal import BASE
from lab.training import load_base, training
from report import chart

SEEDS, TUNING = range(5), range(5, 7)
TO_7 = "--task arithmetic:3-7 --curriculum"
CHECK = f"grpo.py {TO_7}"
FLAGS = {"GRPO": TO_7, "Dr. GRPO": f"{TO_7} --loss_type dr_grpo"}
GRPO, _ = FLAGS
SIDES = dict.fromkeys(FLAGS, (None, 0.0005))
COMPARED = [(side, "pass@1") for side in SIDES]
TUNED = "the learning rate of each side, on two other seeds"
STEPS, WINDOW = 60, 10
FEWEST = 10                             # outputs whose mean length counts
PARTS = ("tokens from more thinking", "tokens from harder problems",
         "tokens from longer answers of the same kind")


def measure(case, seed):
    """Train, and look at the outputs of the base and then of each window of steps: count them and
    their tokens, by the number of operands and by whether they think, as lists (5, 2). Also compute
    the fraction of all outputs that check themselves, and the pass@1 at the end."""
    _, known, policy = load_base(grpo, f"{BASE} --base_seed {seed}")
    side, _, rate = case.rpartition(", ")
    flags = f"{FLAGS[side]} --max_completion_length 64 --learning_rate {rate} --seed {seed}"
    cfg = plumbing.parse_flags(grpo.Config, flags.split())
    task = common.load_task(cfg, grpo.verify)
    task.prompt_width = known.prompt_width      # pads prompts to the width that the base knows
    large = dataclasses.replace(cfg, num_prompts=4 * cfg.num_prompts)
    steps = training(cfg, task, policy)
    columns = {"number": [], "tokens": [], "checks": []}
    for window in range(1 + STEPS // WINDOW):
        batches = [grpo.sample_batch(policy, task, large, "before")] if window == 0 else [
            *itertools.islice(steps, WINDOW)]
        number, tokens = numpy.zeros((2, 5, 2))              # 3 to 7 operands
        checks = 0
        for batch in batches:
            for problem, text, length in zip(batch.problems, batch.texts, batch.mask.sum(dim=1)):
                cell = problem.difficulty - 3, int(text.startswith("<think>"))
                number[cell] += 1
                tokens[cell] += length.item()
                checks += ";wait," in text
        columns["number"].append(number.tolist())
        columns["tokens"].append(tokens.tolist())
        columns["checks"].append(checks / number.sum())
    return columns | {"pass@1": grpo.evaluate(policy, task, cfg)["pass@1"]}


def score(columns, what):
    return columns[what]


def parts(columns):
    """Split the growth of the mean length from the base to the last window. Three factors change
    one after the other: for each cell (5, 2), its fraction of the outputs of its level, the
    fraction of the level, and the mean length. A length of fewer than FEWEST outputs counts as
    unchanged, because the split gives the cells of the base a large weight, even if they are nearly
    empty at the end. -> {part: its mean over all orders, (S,)}"""
    number, tokens = (columns[name][:, [0, -1]] for name in ("number", "tokens"))  # (S, 2, 5, 2)
    of_level = number.sum(axis=3, keepdims=True)
    levels = of_level / number.sum(axis=(2, 3), keepdims=True)
    with numpy.errstate(invalid="ignore"):              # nan where there are too few outputs
        lengths = numpy.where(number < FEWEST, numpy.nan, tokens / number)
        factors = numpy.array([number / of_level, numpy.broadcast_to(levels, number.shape),
                               lengths])
    first, last = numpy.moveaxis(factors, 2, 0)                                 # (3, S, 5, 2)
    # a factor that is missing in one window counts as unchanged
    first, last = (numpy.nan_to_num(numpy.where(numpy.isnan(one), other, one))
                   for one, other in ((first, last), (last, first)))
    orders = list(itertools.permutations(range(len(PARTS))))
    added = numpy.zeros(first.shape[:2])
    for order in orders:
        now = first.copy()
        for which in order:
            before = now.prod(axis=0).sum(axis=(1, 2))
            now[which] = last[which]
            added[which] += (now.prod(axis=0).sum(axis=(1, 2)) - before) / len(orders)
    return dict(zip(PARTS, added))


def page(x):
    runs = {side: columns for (side, _), columns in at_best("zero", x).items()}
    length = {side: columns["tokens"].sum(axis=(2, 3)) / columns["number"].sum(axis=(2, 3))
              for side, columns in runs.items()}                                # (S, W)
    part = {side: parts(columns) for side, columns in runs.items()}
    thinks = {side: columns["number"][..., 1].sum(axis=2) / columns["number"].sum(axis=(2, 3))
              for side, columns in runs.items()}                                # (S, W)
    growth = length[GRPO][:, -1] - length[GRPO][:, 0]                           # (S,)
    yield Claim("answers get longer, although only right ones are rewarded", "DeepSeek-R1", growth,
                at_least=1, finding=f"With a curriculum, answers grow by {growth.mean():.1f} "
                "tokens although only right ones are rewarded; "
                f"{part[GRPO][PARTS[0]].mean():.1f} of these tokens come from more thinking")
    yield lambda axis: chart.curves(
        axis, length, range(0, STEPS + 1, WINDOW),
        ylim=(0, 40), ylabel="tokens of an answer",
        xlabel=f"step of training (mean of {WINDOW}; 0 is the base)")
    checks = runs[GRPO]["checks"]
    yield Claim(f"more outputs check themselves in the last {WINDOW} steps than in the first "
                f"{WINDOW}", "DeepSeek-R1", (checks[:, -1], checks[:, 1]), at_least=0.01)
    best = best_rates("zero", x)
    yield numbers({side: {"best rate": best[side, "pass@1"], "pass@1": runs[side]["pass@1"],
                          "fraction that thinks, before RL": thinks[side][:, 0],
                          "fraction that thinks, at the end": thinks[side][:, -1],
                          "mean tokens, before RL": length[side][:, 0],
                          "mean tokens, at the end": length[side][:, -1]} for side in runs},
                  "run", ".2f")
    yield numbers(part, "run", "+.1f")
