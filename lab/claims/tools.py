"""Tools: does it help to reward each part of a tool call, or longer thoughts?"""
import grpo
from lab.bench import Claim, at_best, numbers
from lab.training import load_base
from report import chart

SEEDS, TUNING = range(5), range(5, 8)
STEPS = 24
GAIN = 0.03                             # smallest difference of accuracies that matters
TUNED = "the learning rate of each reward, on three other seeds"
FLAGS = f"--task lookup --eval_steps 1000 --max_steps {STEPS} --num_eval_problems 256"
FINE, COARSE, OUTCOME = "fine", "coarse+format", "accuracy"
LONGER = ("fine+length", "fine+growing_length")
SIDES = {reward: (f"grpo.py {FLAGS} --reward {reward}", 5e-4)
         for reward in (FINE, COARSE, OUTCOME, *LONGER)}
METRICS, SCORES = ["accuracy"], ["pass@1", "greedy"]
MEAN = f"mean accuracy of {STEPS} steps"
COMPARED = [(side, MEAN) for side in SIDES]


CASES = ["the base"]


def measure(case, seed):
    """Sample a batch of the base, and compute for each reward the share of the outputs that have
    another advantage than with the fine reward."""
    found = {}
    for reward in SIDES:
        flags = f"--task lookup --reward {reward} --seed {seed} --base_seed {seed}"
        cfg, task, base = load_base(grpo, flags)
        batch = grpo.sample_batch(base, task, cfg, 0)
        found[reward] = grpo.advantages(batch.rewards, cfg.scale_rewards)
    return {reward: ((A - found[FINE]).abs() > 1e-6).double().mean().item()
            for reward, A in found.items()}


def score(columns, what):
    """Average the accuracy over all steps of each run: it counts how early a run learns. -> (S,)"""
    return columns["accuracy"].mean(axis=1)


def page(x):
    ends = {side: columns for (side, _), columns in at_best("tools", x).items()}
    means = {side: score(columns, MEAN) for side, columns in ends.items()}
    for other in (COARSE, OUTCOME):
        finding = (f"With the fine reward, {means[FINE].mean():.0%} of the outputs of {STEPS} "
                   f"steps are right, and with the coarse one {means[COARSE].mean():.0%}")
        yield Claim(f"GRPO learns faster with the reward {FINE} than with {other}", "ToolRL",
                    (means[FINE], means[other]), at_least=GAIN,
                    differing=x["the base"][other].mean(),
                    finding=finding if other == COARSE else "")
    for other in LONGER:
        yield Claim(f"a bonus for length does not help ({other})", "ToolRL",
                    (means[other], means[FINE]), at_most=GAIN,
                    differing=x["the base"][other].mean())
    yield numbers({side: {"best rate": columns["rate"], MEAN: means[side],
                          "pass@1, held out": columns["pass@1"],
                          "greedy accuracy, held out": columns["greedy"]}
                   for side, columns in ends.items()}, "reward", ".2f")
    yield lambda axis: chart.curves(
        axis, {side: columns["accuracy"] for side, columns in ends.items()},
        ylabel="accuracy", ylim=(0, 1))
