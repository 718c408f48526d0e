"""Beliefs: does RL only bring out what the base already does?"""
import functools
import itertools

import numpy
import torch

import common
import grpo
from lab.bench import OURS, Claim, at_best, numbers
from lab.training import load_base, training
from report import chart
from tasks.scores import RESULTS, count_steps, mean

SEEDS, TUNING = range(12), (229, 230, 231)
CASES = ("base", "arithmetic")
SIDES = dict.fromkeys(("accuracy", "majority", "points", "format"), (None, 5e-4))
COMPARED = [(reward, "pass@1") for reward in SIDES]
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
    if case != "arithmetic":
        return turned(case, f"--num_eval_samples 4 --seed {seed} --base_seed {seed}")
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
        "lost": ((after == 0) & (solved > 0)).float().mean().item(),
        "pass@1": solved.mean().item() / K, "pass@1 after": after.mean().item() / K}


def turned(case, own):
    """Train grpo.py with a reward and a rate, or not at all. A sum of any kind is mended if it is
    wrong more often than right before RL, and right more often than wrong after it, and broken if
    the reverse. -> {column: a number}"""
    reward, _, rate = case.partition(", ")
    learning = f"--reward {reward} --learning_rate {rate}" if rate else "--max_steps 0"
    _, before = after_training(f"{own} --max_steps 0")
    scores, after = after_training(f"{own} {learning}")
    pairs = [pair for pair in zip(before, after) if None not in pair]
    wrong, right = ([late for early, late in pairs if (early - 0.5) * sign > 0]
                    for sign in (-1, 1))
    return scores | {
        "wrong sums": len(wrong), "mended": sum(late > 0.5 for late in wrong),
        "right results of wrong sums": mean(wrong),
        "right sums": len(right), "broken": sum(late < 0.5 for late in right)}


@functools.cache
def after_training(flags):
    """Train grpo.py, and evaluate. -> {score: share of right outputs}, shares as in sums_of"""
    cfg, task, policy = load_base(grpo, flags)
    for _ in itertools.islice(training(cfg, task, policy), cfg.max_steps):
        pass
    scores = {"pass@1": grpo.evaluate(policy, task, cfg)["pass@1"]}
    for name, opening in (("greedy", ""), ("greedy, thought forced", "<think>")):
        scores[name] = grpo.evaluate(policy, task, cfg, True, opening)["greedy"]
    return scores, sums_of(policy, task, cfg, RESULTS)


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


def known(x):
    """Leave out the sums that hardly occur, for each seed. -> [(before, early, late, written)]"""
    names = ["right 0", f"right {EARLY}", f"right {LATE}", "written"]
    return [rows[:, numpy.isfinite(rows).all(axis=0)]
            for rows in numpy.stack([x[name] for name in names], axis=1)]


def page(x):
    best = {reward: columns for (reward, _), columns in at_best("beliefs", x).items()}
    base, x = x["base"], x["arithmetic"]

    def rates(*sides):
        return {"rates": tuple(best[side]["rate"] for side in sides)}
    seeds = known(x)
    rarely = [late[before < 0.5] for before, _, late, _ in seeds]
    mended = numpy.array([(late > 0.5).mean() for late in rarely])
    labels, majority = ((best[one]["mended"] / best[one]["wrong sums"]).mean()
                        for one in ("accuracy", "majority"))
    yield (f"With {K} outputs the base solves each problem, and yet RL mends {labels:.0%} of the "
           "sums that it gets wrong more often than right. Without labels, if the most frequent "
           f"answer counts as right, RL mends {majority:.0%}.")
    yield Claim("with most seeds, RL makes at least nine in ten of the sums that the base gets "
                "wrong more often than right, right more often than wrong", OURS, mended >= 0.9,
                at_least=0.5, share=True)
    yield Claim(f"with most seeds, {K} outputs of the base solve each of {PROBLEMS} held-out "
                "problems, so RL solves none that the base could not", "after Yue and others",
                x["unsolved"] == 0, at_least=0.5, share=True)
    yield Claim("the more often the base has the right result of a sum, the more often it is "
                f"right after {EARLY} steps: the correlation of the ranks is at least 0.3", OURS,
                [numpy.corrcoef(ranks(before), ranks(early))[0, 1] for before, early, *_ in seeds],
                at_least=0.3)
    gains = [(early - before, written > numpy.median(written))
             for before, early, _, written in seeds]
    yield Claim(f"in {EARLY} steps, the sums that batches contain more often than the median gain "
                "at least 0.05 more than the others", OURS,
                [gain[often].mean() - gain[~often].mean() for gain, often in gains], at_least=0.05)
    yield Claim(f"RL loses no problem: at most 2% of the problems that one of {K} outputs of the "
                "base solves are solved by none after RL", "after Yue and others", x["lost"],
                at_most=GAIN)

    yield Claim("with the majority as the reward, RL brings out what the base can do: the share of "
                "right greedy outputs is within 0.1 of the base's after a forced `<think>`", OURS,
                (best["majority"]["greedy"], base["greedy, thought forced"]),
                at_least=-0.1, at_most=0.1,
                rates=(best["majority"]["rate"],))
    yield Claim("of the sums that the base gets wrong more often than right, RL with the verifier "
                "mends at least 0.5 more than with the majority", OURS,
                tuple(best[one]["mended"] / best[one]["wrong sums"]
                      for one in ("accuracy", "majority")), at_least=0.5,
                **rates("accuracy", "majority"))
    yield Claim("the majority makes mistakes firmer: the share of right results of these sums ends "
                "at least 0.05 lower than with the format as the reward", OURS,
                tuple(best[one]["right results of wrong sums"]
                      for one in ("format", "majority")), at_least=0.05,
                **rates("format", "majority"))
    yield Claim("with points, RL breaks at least one sum more than with the verifier", OURS,
                best["points"]["broken"] - best["accuracy"]["broken"], at_least=1,
                sides=(best["points"]["broken"], best["accuracy"]["broken"]),
                **rates("points", "accuracy"))

    lines = {name: [] for name in ("base", f"after {EARLY} steps", f"after {LATE} steps")}
    for *shares, _ in seeds:
        groups = numpy.array_split(numpy.argsort(shares[0]), GROUPS)
        for name, values in zip(lines, shares):
            lines[name].append([values[group].mean() for group in groups])
    yield lambda axis: chart.curves(
        axis, lines, ylim=(0, 1.03), ylabel="share of right results",
        xlabel="wrong sums in six groups, the rarest right first")
    heads = "pass@1", "greedy", "mended", "broken", "right results of wrong sums"
    yield numbers({name: {head: columns[head] for head in heads}
                   for name, columns in ({"base": base} | best).items()}, "reward")
