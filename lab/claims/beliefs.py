"""Beliefs: does RL only bring out what the base already does?"""
import functools
import itertools

import numpy
import torch

import common
import grpo
from lab.bench import OURS, Claim, numbers
from lab.training import load_base, training
from report import chart, replaced
from tasks.scores import RESULTS, count_steps, mean

SEEDS, TUNING = range(12), (229, 230, 231)
TUNED = "the learning rate of each reward, on three other seeds; with 256 outputs it is 5e-4"
# A reward: its flags, what it replaces in the script, and the learning rate to begin with
VERIFIER, POINTS, MAJORITY, THINK = "verifier", "points", "majority", "think"
REWARDS = {VERIFIER: ("", {}, 5e-4), POINTS: ("--reward points", {}, 1e-3),
           MAJORITY: ("--reward majority", {}, 5e-4),
           THINK: ("", {"reward": lambda problem, text, _: float(text[:7] == "<think>")}, 5e-4)}
SIDES = {reward: (None, rate) for reward, (*_, rate) in REWARDS.items()}
SCORED = "--num_eval_samples 4"
COMPARED = [(reward, "pass@1") for reward in REWARDS]
CASES = ("arithmetic",)
EARLY, LATE = STEPS = (20, 60)          # steps of training after which we look at the sums
K = 256                                 # outputs to each of PROBLEMS
PROBLEMS = 64
QUESTIONS, THOUGHTS = 512, 8            # thoughts, from which the sums are read
ENOUGH = 5                              # times that a sum has to occur in them
GROUPS = 6                              # of sums, in the chart
GAIN = 0.02                             # smallest difference of two fractions that matters


def wrong_sums(task):
    """List the sums of which the base's authors believe a wrong result."""
    return [step for step in RESULTS if task.has_wrong_belief(step)]


def measure(case, seed):
    """Train grpo.py, and look at the policy before, and after EARLY and LATE steps. `right` has the
    share of right results of each wrong sum, `written` how often a batch contained the sum."""
    if case not in CASES:
        return turned(*case.split(", "), seed)
    cfg, task, policy = load_base(grpo, f"--seed {seed} --base_seed {seed}")
    sums = wrong_sums(task)
    solved = solved_by(policy, task, cfg, K)
    columns = {"unsolved": (solved == 0).float().mean().item(),
               "right 0": sums_of(policy, task, cfg, sums)}
    written = dict.fromkeys(sums, 0)
    for step, batch in enumerate(itertools.islice(training(cfg, task, policy), LATE), 1):
        if step <= EARLY:
            for name, (count, _) in count_steps(batch.texts).items():
                if name in written:
                    written[name] += count
        if step in STEPS:
            columns[f"right {step}"] = sums_of(policy, task, cfg, sums)
    after = solved_by(policy, task, cfg, K)
    return columns | {
        "written": [count / EARLY for count in written.values()],
        "unsolved after": (after == 0).float().mean().item(),
        "new": ((solved == 0) & (after > K / 2)).float().mean().item(),
        "lost": ((after == 0) & (solved > 0)).float().mean().item(),
        "pass@1": solved.mean().item() / K, "pass@1 after": after.mean().item() / K}


def turned(reward, rate, seed):
    """Train grpo.py with a reward, and count the sums of all kinds that it mends and breaks: their
    results are wrong more often than right before, and the other way round after RL, or the
    reverse. -> {column: a number}"""
    flags, changes, _ = REWARDS[reward]
    cfg, task, policy = load_base(
        grpo, f"{flags} {SCORED} --learning_rate {rate} --seed {seed} --base_seed {seed}")
    with replaced(grpo, **changes):
        for _ in itertools.islice(training(cfg, task, policy), LATE):
            pass
    base, scores = dict(look_at_base(seed)), look(cfg, task, policy)
    pairs = [pair for pair in zip(base.pop("sums"), scores.pop("sums")) if None not in pair]
    wrong = [after for before, after in pairs if before < 0.5]
    right = [after for before, after in pairs if before > 0.5]
    return scores | {f"base {name}": score for name, score in base.items()} | {
        "wrong": len(wrong), "mended": sum(after > 0.5 for after in wrong), "results": mean(wrong),
        "right": len(right), "broken": sum(after < 0.5 for after in right)}


def look(cfg, task, policy):
    """Evaluate a policy. -> the shares of right outputs: sampled, greedy, and greedy after a forced
    <think>; the share of right results of each sum"""
    return {"pass@1": grpo.evaluate(policy, task, cfg)["pass@1"],
            "greedy": grpo.evaluate(policy, task, cfg, True)["greedy"],
            "forced": grpo.evaluate(policy, task, cfg, True, "<think>")["greedy"],
            "sums": sums_of(policy, task, cfg, RESULTS)}


@functools.cache
def look_at_base(seed):
    return look(*load_base(grpo, f"{SCORED} --seed {seed} --base_seed {seed}"))


def solved_by(policy, task, cfg, n):
    """Count the right ones of n outputs to each of PROBLEMS held-out problems. -> (PROBLEMS,)"""
    problems = [problem for problem in common.held_out_problems(task, PROBLEMS) for _ in range(16)]
    counts = torch.zeros(PROBLEMS)
    for part in range(n // 16):
        generator = common.generator(cfg.seed, ("outputs", part))
        texts = grpo.complete(policy, task, cfg, problems, generator).texts
        is_right = [task.verify(*pair) == 1 for pair in zip(problems, texts)]
        counts += torch.tensor(is_right).view(PROBLEMS, 16).sum(dim=1)
    return counts


def sums_of(policy, task, cfg, sums):
    """Let a policy think, and count how often it writes the right result of each sum. -> list of
    shares, None for a sum that hardly occurs"""
    problems = common.sample_problems(task, QUESTIONS, ("thoughts", cfg.seed), "test")
    texts = []
    for part in range(THOUGHTS):
        generator = common.generator(cfg.seed, ("thoughts", part))
        texts += grpo.complete(policy, task, cfg, problems, generator, "<think>").texts
    counts = count_steps(texts)
    found = [counts.get(name, (0, 0)) for name in sums]
    return [right / written if written >= ENOUGH else None for written, right in found]


def ranks(values):
    """Rank numbers from 0 on; equal numbers share the mean of their ranks. -> array"""
    values = numpy.asarray(values)[:, None]
    smaller, equal = ((values > values.T).sum(axis=1), (values == values.T).sum(axis=1))
    return smaller + (equal - 1) / 2


def spearman(first, second):
    """Compute the correlation of the ranks of two lists."""
    return numpy.corrcoef(ranks(first), ranks(second))[0, 1]


def known(x):
    """Leave out the sums that hardly occur, for each seed. -> [(before, early, late, written)]"""
    found = []
    for rows in zip(*(x[name] for name in ("right 0", f"right {EARLY}", f"right {LATE}",
                                           "written"))):
        rows = numpy.array(rows)
        found.append(rows[:, numpy.isfinite(rows).all(axis=0)])
    return found


def page(x):
    x = x["arithmetic"]
    seeds = known(x)
    rarely = [late[before < 0.5] for before, _, late, _ in seeds]
    mended = numpy.array([(late > 0.5).mean() for late in rarely])
    yield Claim("with most seeds, RL makes at least nine in ten of the sums that the base gets "
                "wrong more often than right, right more often than wrong", OURS, mended >= 0.9,
                at_least=0.5, share=True,
                finding=f"With {K} outputs, the base solves each problem. Yet RL mends: of the "
                "sums that the base gets wrong more often than right, "
                f"{mended.mean():.0%} are right more often than wrong after it")
    yield Claim(f"with most seeds, {K} outputs of the base solve each of {PROBLEMS} held-out "
                "problems, so RL solves none that the base could not", "after Yue and others",
                x["unsolved"] == 0, at_least=0.5, share=True)
    yield Claim("the more often the base has the right result of a sum, the more often it is "
                f"right after {EARLY} steps: the correlation of the ranks is at least 0.3", OURS,
                [spearman(before, early) for before, early, *_ in seeds], at_least=0.3)
    gains = []
    for before, early, _, written in seeds:
        is_often = written > numpy.median(written)
        gain = early - before
        gains.append(gain[is_often].mean() - gain[~is_often].mean())
    yield Claim(f"in {EARLY} steps, the sums that batches contain more often than the median gain "
                "at least 0.05 more than the others", OURS, gains, at_least=0.05)
    yield Claim(f"RL loses no problem: at most 2% of the problems that one of {K} outputs of the "
                "base solves are solved by none after RL", "after Yue and others", x["lost"],
                at_most=GAIN)

    lines = {name: [] for name in ("base", f"after {EARLY} steps", f"after {LATE} steps")}
    for *shares, _ in seeds:
        groups = numpy.array_split(numpy.argsort(shares[0]), GROUPS)
        for name, values in zip(lines, shares):
            lines[name].append([values[group].mean() for group in groups])
    yield lambda axis: chart.curves(
        axis, lines, ylim=(0, 1.03), ylabel="share of right results",
        xlabel="wrong sums in six groups, the rarest right first")
    means = numpy.array([row.mean(axis=1) for row in seeds]).T                  # (4, S)
    yield numbers({"base": {"right of one output": x["pass@1"],
                            f"solved by none of {K}": x["unsolved"],
                            "results of wrong sums": means[0]},
                   "after RL": {"right of one output": x["pass@1 after"],
                                f"solved by none of {K}": x["unsolved after"],
                                "results of wrong sums": means[2]}},
                  "arithmetic", ".3f")
