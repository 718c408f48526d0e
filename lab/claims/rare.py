"""Rare: how often must the right result occur, so that RL finds it?"""
import itertools

import numpy

import common
import grpo
from lab.bench import OURS, Claim, at_best, numbers
from lab.claims.beliefs import sums_of, wrong_sums
from lab.training import load_base, training
from report import chart, replaced

SEEDS, TUNING = range(12), (12, 13, 14, 15)
EIGHT, MANY, BY_MEAN = "groups of 8", "groups of 64", "groups of 8, divided by the mean"
FLAGS = {EIGHT: "--num_prompts 32 --num_generations 8",
         MANY: "--num_prompts 4 --num_generations 64",
         BY_MEAN: "--num_prompts 32 --num_generations 8 --scale_rewards mean"}
# The first number is the share of wrong results of a wrong sum, in the base's texts
EASY = ("0.6, groups of 8", "0.8, groups of 8")
HARD, FEW, LARGE, MEAN = (f"{share}, {groups}" for share, groups in (
    (0.9, EIGHT), (0.97, EIGHT), (0.97, MANY), (0.97, BY_MEAN)))
HARD_LARGE = f"0.9, {MANY}"
CASES = tuple(f"{case}, 0.0005" for case in EASY)
SIDES = dict.fromkeys((HARD, HARD_LARGE, FEW, LARGE, MEAN), (None, 5e-4))
MENDED = "mended sums"
COMPARED = [(side, MENDED) for side in SIDES]
STEPS = 60
GAIN = 0.1                              # smallest difference of mended sums that matters


def measure(case, seed):
    """Train grpo.py from a base whose authors write a share of wrong results. -> columns with the
    share of right results of each wrong sum before and after, and the accuracy of each batch"""
    side, _, rate = case.rpartition(", ")
    share, groups = side.split(", ", 1)
    with replaced(common.Arithmetic, share_wrong=float(share)):
        cfg, task, policy = load_base(grpo, f"{FLAGS[groups]} --learning_rate {rate} "
                                            f"--seed {seed} --base_seed {seed}")
        sums = wrong_sums(task)
        before = sums_of(policy, task, cfg, sums)
        batches = list(itertools.islice(training(cfg, task, policy), STEPS))
        return {"before": before, "after": sums_of(policy, task, cfg, sums),
                "accuracy": [batch.is_correct.double().mean().item() for batch in batches]}


def score(columns, what):
    """Compute which part of the sums that a base gets wrong more often than right is right more
    often than wrong after RL. Sums that hardly occur are left out. -> (S,)"""
    parts = []
    for before, after in zip(columns["before"], columns["after"]):
        is_wrong = (before < 0.5) & numpy.isfinite(after)
        parts.append((after[is_wrong] > 0.5).mean())
    return numpy.array(parts)


def page(x):
    best = {side: found for (side, _), found in at_best("rare", x).items()}
    best = {case.removesuffix(", 0.0005"): x[case] for case in CASES} | best
    part = {case: score(columns, MENDED) for case, columns in best.items()}
    few, many = part[FEW].mean(), part[LARGE].mean()
    yield (f"If 97% of a sum's results in the base's texts are wrong, RL mends {few:.0%} of "
           f"these sums with groups of 8, and {many:.0%} with groups of 64. With as many "
           "outputs, larger groups mean fewer questions; learning fades as right results get "
           "rarer, but it does not stop.")
    for text, source, side, other in (
            ("with 97% wrong results, groups of 64 mend more sums than groups of 8, with as many "
             "outputs", OURS, LARGE, FEW),
            ("with 90%, groups of 64 mend more of them than groups of 8, with as many outputs",
             OURS, HARD_LARGE, HARD),
            ("with 97%, groups of 8 mend more of them if the advantages are divided by the mean "
             "reward of a group, not by its std", "after MaxRL", MEAN, FEW)):
        yield Claim(text, source, (part[side], part[other]), at_least=GAIN,
                    rates=tuple(best[one]["rate"] for one in (side, other)))
    yield Claim("with 97%, RL with groups of 8 mends less than half of the sums that the base gets "
                "wrong", OURS, part[FEW], at_most=0.5, rates=(best[FEW]["rate"],))
    for case, share in zip((*EASY, HARD), (60, 80, 90)):
        yield Claim(f"with {share}%, RL with groups of 8 mends at least nine in ten", OURS,
                    part[case], at_least=0.9, rates=(best[case].get("rate"),))
    yield lambda axis: chart.dots(axis, part, xlim=(0, 1.03),
                                  xlabel="part of the wrong sums that RL mends")
    yield numbers({case: {
        "right results of wrong sums, base": numpy.nanmean(columns["before"], axis=1),
        "after RL": numpy.nanmean(columns["after"], axis=1), "mended": part[case]}
        for case, columns in best.items()}, "wrong results in the texts", ".2f")
