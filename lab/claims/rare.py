"""Rare: how often must the right result occur, so that RL finds it?"""
import itertools

import numpy

import common
import grpo
from lab.bench import OURS, Claim, numbers
from lab.claims.beliefs import sums_of, wrong_sums
from lab.training import load_base, training
from report import chart, replaced

SEEDS = range(8)
SHARES = (0.6, 0.8, 0.9, 0.97)          # of wrong results of a wrong sum, in the base's texts
EIGHT, MANY, BY_MEAN = "groups of 8", "groups of 64", "groups of 8, divided by the mean"
FLAGS = {EIGHT: "--num_prompts 32 --num_generations 8",
         MANY: "--num_prompts 4 --num_generations 64",
         BY_MEAN: "--num_prompts 32 --num_generations 8 --scale_rewards mean"}
CASES = [f"{share}, {groups}" for share in SHARES for groups in (EIGHT, MANY)]
CASES += [f"{SHARES[-1]}, {BY_MEAN}"]
STEPS = 60
GAIN = 0.1                              # smallest difference of mended sums that matters
TUNED = "nothing; the learning rate is 5e-4 also for groups of 64"


def measure(case, seed):
    """Train grpo.py from a base whose authors write a share of wrong results. -> columns with the
    share of right results of each wrong sum before and after, and the accuracy of each batch"""
    share, groups = case.split(", ", 1)
    with replaced(common.Arithmetic, share_wrong=float(share)):
        cfg, task, policy = load_base(grpo, f"{FLAGS[groups]} --seed {seed} --base_seed {seed}")
        sums = wrong_sums(task)
        before = sums_of(policy, task, cfg, sums)
        batches = list(itertools.islice(training(cfg, task, policy), STEPS))
        return {"before": before, "after": sums_of(policy, task, cfg, sums),
                "accuracy": [batch.is_correct.double().mean().item() for batch in batches]}


def mended(columns):
    """Compute which part of the sums that a base gets wrong more often than right is right more
    often than wrong after RL. Sums that hardly occur are left out. -> (S,)"""
    parts = []
    for before, after in zip(columns["before"], columns["after"]):
        is_wrong = (before < 0.5) & numpy.isfinite(after)
        parts.append((after[is_wrong] > 0.5).mean())
    return numpy.array(parts)


def page(x):
    part = {case: mended(columns) for case, columns in x.items()}
    most = SHARES[-1]
    few, many, by_mean = (part[f"{most}, {groups}"] for groups in FLAGS)
    yield Claim(f"if authors write the wrong result in {most:.0%} of the cases, RL with groups of "
                "8 mends less than half of the sums that the base gets wrong", OURS, few,
                at_most=0.5,
                finding=f"If the base's authors write the wrong result of a sum in {most:.0%} of "
                f"the cases, RL mends {few.mean():.0%} of these sums with groups of 8 outputs, and "
                f"{many.mean():.0%} with groups of 64 and as many outputs")
    for share in SHARES[:3]:
        yield Claim(f"if they write it in {share:.0%}, RL with groups of 8 mends at least nine in "
                    "ten", OURS, part[f"{share}, {EIGHT}"], at_least=0.9)
    yield Claim(f"with {most:.0%}, groups of 64 mend more of them than groups of 8, with as many "
                "outputs", OURS, (many, few), at_least=GAIN)
    yield Claim(f"with {most:.0%}, groups of 8 mend more of them if the advantages are divided by "
                "the mean reward of a group, not by its std", "after MaxRL", (by_mean, few),
                at_least=GAIN)
    lines = {groups: numpy.array([part[f"{share}, {groups}"] for share in SHARES]).T
             for groups in (EIGHT, MANY)}
    yield lambda axis: chart.curves(
        axis, lines, SHARES, ylim=(0, 1.03), xlabel="share of wrong results in the base's texts",
        ylabel="part of the sums that RL mends")
    yield numbers({case: {
        "right results of wrong sums, base": numpy.nanmean(columns["before"], axis=1),
        "after RL": numpy.nanmean(columns["after"], axis=1), "mended": part[case],
        "accuracy of the last 3 batches": columns["accuracy"][:, -3:].mean(axis=1)}
        for case, columns in x.items()}, "wrong results in the texts", ".2f")
