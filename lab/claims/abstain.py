"""Abstention: which ways of learning stop making things up, and when?"""
import functools
import re
import tempfile
import zlib

import grpo
import measuring
import reinforce
from lab.bench import OURS, Claim, at_best, numbers
from lab.claims.imitation import STEPS, imitation, positive, train, weighted
from lab.docs import run_once
from report import chart
from report.logs import read_summary

SEEDS, TUNING = range(220, 232), (216, 217, 218)
SCORES = ["marks", "right", "abstained", "hallucinated", "needless", "pass@1", "greedy_right",
          "greedy_hallucinated"]
# of 1,536 questions, 550 hide a number
SCORED = "--eval_steps 1000 --save_steps 60 --num_eval_problems 1536 --num_eval_samples 1"

# A way to learn: its command line, and the learning rate to begin with under marks, without a cost,
# at a cost of 3, and under points with levels; 0: it is left out
THREE, TEN, EACH, RIGHT, NOT_WRONG = (
    "imitation of the best, 3 rounds, 3 passes", "imitation of the best, 10 rounds, 3 passes",
    "imitation of the best, each step, 1 pass", "imitation of all right ones, 10 rounds, 3 passes",
    "imitation of all that are not wrong, 10 rounds, 3 passes")
FROM_6, FROM_11 = (f"imitation of {n} points and more, 10 rounds, 3 passes" for n in (6, 11))
NONE, BATCH, SHIFTED = (
    "REINFORCE", "REINFORCE, batch's mean as baseline", "REINFORCE, weights 2, 1 and 0")
GRPO, POSITIVE, COLD, WARM = "GRPO", "GRPO, positive advantages alone", "PPO", "PPO, critic first"
MEAN, MORE_ONLY, THRICE = (
    "REINFORCE, group's mean as baseline",
    "REINFORCE, group's mean as baseline, positive advantages alone",
    "GRPO, 3 passes over each batch")
ABOVE, WEIGHTED = ("imitation of all above the group's mean, 10 rounds, 3 passes",
                   "imitation weighted by the positive advantage, 10 rounds, 3 passes")
WAYS = {
    THREE: (imitation(3, 3), 5e-4, 0, 0, 0),
    TEN: (imitation(10, 3), 5e-4, 0, 0, 2.5e-4),
    EACH: (imitation(STEPS, 1), 5e-4, 0, 0, 0),
    RIGHT: (imitation(10, 3), 0, 5e-4, 0, 0),
    NOT_WRONG: (imitation(10, 3), 5e-4, 0, 0, 0),
    FROM_6: (imitation(10, 3), 0, 0, 0, 5e-4),
    FROM_11: (imitation(10, 3), 0, 0, 0, 5e-4),
    NONE: ("reinforce.py", 5e-4, 0, 0, 0),
    BATCH: ("reinforce.py --baseline batch", 5e-4, 0, 0, 2.5e-4),
    SHIFTED: ("reinforce.py", 5e-4, 0, 0, 0),
    GRPO: ("grpo.py", 5e-4, 5e-4, 5e-4, 5e-4),
    POSITIVE: ("grpo.py", 5e-4, 0, 0, 0),
    COLD: ("ppo.py", 5e-4, 0, 0, 0),
    WARM: ("ppo.py --critic_pretrain_steps 10 --max_steps 50", 5e-4, 0, 0, 0),
    MEAN: ("reinforce.py --baseline mean", 5e-4, 0, 0, 5e-4),
    MORE_ONLY: ("reinforce.py --baseline mean", 5e-4, 0, 0, 5e-4),
    ABOVE: (imitation(10, 3), 5e-4, 0, 0, 5e-4),
    WEIGHTED: (imitation(10, 3), 5e-4, 0, 0, 5e-4),
    THRICE: ("grpo.py --num_iterations 3", 5e-4, 0, 0, 0)}
MARKS, FREE, DEAR, LEVELS = "marks", "no cost", "cost 3", "levels"
REWARDS = {MARKS: "--task abstain", FREE: "--task abstain:cost=0", DEAR: "--task abstain:cost=3",
           LEVELS: "--task abstain --reward points"}
SIDES = {f"{reward}: {way}": (None, rates[place])
         for place, reward in enumerate(REWARDS)
         for way, (_, *rates) in WAYS.items() if rates[place]}
COMPARED = [(side, "marks") for side in SIDES]
DRAWN = [f"{reward}: {way}" for reward, ways in (
    (MARKS, (TEN, NOT_WRONG, NONE, GRPO)),
    (LEVELS, (TEN, ABOVE, BATCH, MORE_ONLY, MEAN, GRPO))) for way in ways]
LONG = " as baseline|, 10 rounds, 3 passes| advantages| by the .*"   # in a picture
# When does a policy switch from answering to abstaining? A case has all COSTS, from the base and
# from a policy that has learned without a cost
COSTS = (0.1, 0.25, 1, 3)
AT_COSTS = {f"x up to {largest}": largest for largest in (2, 3, 9)}
CASES = ("base", *AT_COSTS)
FEWER = dict.fromkeys(AT_COSTS, SEEDS[:3]) | {f"{MARKS}: {THRICE}": SEEDS[:8]}
STARTS = BASE, ABLE = "from the base", "from a policy that has learned without a cost"
CHECK = "grpo.py --task abstain"


def with_level(problem, text, given):
    """Add what this judge gives to all outputs for a question: 0 to 10 points, by its hash."""
    return given + zlib.crc32(problem.prompt.encode()) % 11


# What some ways put in the place of a reward; imitation keeps all outputs with a 1
REPLACED = {NOT_WRONG: lambda problem, text, given: float(given >= 0),
            SHIFTED: lambda problem, text, given: given + 1,
            FROM_6: lambda *judged: float(with_level(*judged) >= 6),
            FROM_11: lambda *judged: float(with_level(*judged) >= 11)}
# What some ways put in the place of another function of their script
CHANGES = {POSITIVE: {"advantages": functools.partial(positive, grpo.advantages)},
           MORE_ONLY: {"advantages": functools.partial(positive, reinforce.advantages)},
           ABOVE: {"token_rewards": functools.partial(weighted, lambda A: (A > 0).to(A))},
           WEIGHTED: {"token_rewards": functools.partial(weighted, lambda A: A.clamp(min=0))}}


def measure(case, seed):
    """Train in one way under one reward, or not at all, or at all costs. -> {score: a number, or a
    list with one for each cost}"""
    if case in AT_COSTS:
        return at_costs(AT_COSTS[case], seed)
    if case == "base":
        return run_once(f"grpo.py --task abstain --max_steps 0 {SCORED} --base_seed {seed}", seed,
                        (), SCORES)
    side, _, rate = case.rpartition(", ")
    reward, _, way = side.partition(": ")
    changes = dict(CHANGES.get(way, {}))
    if way in REPLACED or reward == LEVELS:
        changes["reward"] = REPLACED.get(way, with_level)
    return train(f"{WAYS[way][0]} {REWARDS[reward]} {SCORED}", rate, changes, seed, SCORES)


def at_costs(largest, seed):
    """Train grpo.py at each cost from both STARTS. -> {"START: score": a list}"""
    def learn(cost, folder, *flags):
        words = [f"--task=abstain:{largest}+cost={cost}", *SCORED.split(), "--seed", str(seed),
                 "--base_seed", str(seed), *flags]
        return measuring.run(grpo.main, words, lambda one: read_summary(one)["trained"], folder)
    with tempfile.TemporaryDirectory() as folder:
        able = f"{folder}/able"
        learn(0, able, "--output_dir", able)
        found = {BASE: [learn(cost, None) for cost in COSTS],
                 ABLE: [learn(cost, None, "--init_from", able) for cost in COSTS]}
    return {f"{start}: {name}": [run[name] for run in runs]
            for start, runs in found.items() for name in SCORES}


MORE = "makes up at least 0.3 more than GRPO"
LITTLE = "makes up at most 0.1"
BOTH = "with negative advantages, too"
THAN_MEAN = "makes up at least 0.3 more than REINFORCE with the group's mean"
GUESSES = "makes up at least half"
HIGHER = "with levels, GRPO's mean mark is at least 0.1 above that of"
INF = float("inf")
# a reward; a way; another one, or none; the score; the bounds of the difference, or of the score
JUDGED = (
    (MARKS, TEN, GRPO, "hallucinated", 0.3, INF, f"imitation of the best in 10 rounds {MORE}"),
    (MARKS, THREE, GRPO, "hallucinated", 0.3, INF, f"imitation of the best in 3 rounds {MORE}"),
    (MARKS, EACH, GRPO, "hallucinated", 0.3, INF, f"imitation of the best of each step {MORE}"),
    (MARKS, GRPO, None, "hallucinated", -INF, 0.1, f"GRPO {LITTLE}"),
    (MARKS, NONE, None, "hallucinated", -INF, 0.1, f"REINFORCE {LITTLE}"),
    (MARKS, COLD, None, "hallucinated", -INF, 0.1, f"PPO {LITTLE}"),
    (MARKS, NONE, GRPO, "right", -0.02, INF, "REINFORCE is not behind GRPO in the share of right "
     "answers where there is one"),
    (MARKS, NOT_WRONG, None, "hallucinated", -INF, 0.1,
     f"imitation of all that are not wrong {LITTLE}"),
    (MARKS, NOT_WRONG, GRPO, "marks", -0.02, INF, "imitation of all that are not wrong is not "
     "behind GRPO in the mean mark"),
    (MARKS, SHIFTED, None, "hallucinated", -INF, 0.1,
     f"REINFORCE with weights 2, 1 and 0 {LITTLE}"),
    (MARKS, GRPO, POSITIVE, "right", 0.05, INF, f"GRPO is right more often {BOTH}"),
    (MARKS, POSITIVE, GRPO, "hallucinated", 0.05, INF, f"GRPO makes up less {BOTH}"),
    (MARKS, MEAN, None, "hallucinated", -INF, 0.1, f"REINFORCE with the group's mean {LITTLE}"),
    (MARKS, MORE_ONLY, MEAN, "hallucinated", 0.05, INF,
     f"REINFORCE with the group's mean makes up less {BOTH}"),
    (MARKS, ABOVE, None, "hallucinated", -INF, 0.1,
     f"imitation of all above the group's mean {LITTLE}"),
    (MARKS, WEIGHTED, MEAN, "hallucinated", 0.3, INF,
     f"imitation weighted by the positive advantage {THAN_MEAN}"),
    (MARKS, NONE, MEAN, "right", 0.02, INF, "REINFORCE is right more often, by at least 0.02, "
     "without the group's mean"),
    (MARKS, THRICE, GRPO, "right", 0.02, INF, "GRPO is right more often, by at least 0.02, if it "
     "passes over each batch three times"),
    (FREE, GRPO, None, "hallucinated", 0.5, INF, f"if guessing costs nothing, GRPO {GUESSES}"),
    (FREE, RIGHT, None, "hallucinated", 0.5, INF, "if guessing costs nothing, imitation of all "
     f"right ones {GUESSES}"),
    (LEVELS, GRPO, None, "hallucinated", -INF, 0.1, f"with levels, GRPO {LITTLE}"),
    (LEVELS, MEAN, None, "hallucinated", -INF, 0.1,
     f"with levels, REINFORCE with the group's mean {LITTLE}"),
    (LEVELS, MORE_ONLY, MEAN, "hallucinated", 0.1, INF, "with levels, REINFORCE with "
     f"the group's mean makes up at least 0.1 less {BOTH}"),
    (LEVELS, ABOVE, MEAN, "hallucinated", 0.3, INF,
     f"with levels, imitation of all above the group's mean {THAN_MEAN}"),
    (LEVELS, WEIGHTED, MEAN, "hallucinated", 0.3, INF,
     f"with levels, imitation weighted by the positive advantage {THAN_MEAN}"),
    *((LEVELS, GRPO, way, "marks", 0.1, INF, f"{HIGHER} {way.partition(', 10')[0]}")
      for way in (FROM_6, FROM_11, TEN, BATCH)))


def page(x):
    best = {side: columns for (side, _), columns in at_best("abstain", x).items()}
    made_up = {side: columns["hallucinated"].mean() for side, columns in best.items()}
    yield ("Imitate the best of eight outputs, and the policy learns to guess: it makes up "
           f"{made_up[f'{MARKS}: {TEN}']:.0%} of the answers that nobody can know. GRPO makes up "
           f"{made_up[f'{MARKS}: {GRPO}']:.0%}, and so does imitation, if somebody marks the "
           "wrong outputs.")
    for reward, way, other, column, low, high, text in JUDGED:
        sides = [best[f"{reward}: {one}"] for one in (way, other) if one]
        # both may have fewer seeds than all, the first ones
        number = min(len(columns[column]) for columns in sides)
        effect, *others = (columns[column][:number] for columns in sides)
        if not others:
            means = {"effect": effect}
        elif column == "marks":                         # no fractions
            means = {"effect": effect - others[0], "sides": (effect, others[0])}
        else:
            means = {"effect": (effect, others[0])}
        yield Claim(text, OURS, **means, at_least=low, at_most=high,
                    rates=tuple(columns["rate"] for columns in sides))
    dear = best[f"{DEAR}: {GRPO}"]["marks"]
    kept = {name: best[f"{MARKS}: {NOT_WRONG}"][name][:len(dear)] for name in ("pass@1", "marks")}
    at_3 = kept["pass@1"] - 3 * (kept["pass@1"] - kept["marks"])        # these outputs are wrong
    yield Claim("at a cost of 3, GRPO's mean mark is at least 0.02 above that of imitation of all "
                "that are not wrong", OURS, dear - at_3,
                sides=(dear, at_3), at_least=0.02)
    at_quarter = [x["x up to 3"][f"{start}: abstained"][:, COSTS.index(0.25)] for start in STARTS]
    yield Claim("at a cost of 0.25, a policy from the base abstains at least 0.3 more often than "
                "one that has learned without a cost", OURS, tuple(at_quarter), at_least=0.3)
    shown = {"base": x["base"]} | {side: best[side] for side in DRAWN}
    yield lambda axis: chart.dots(
        axis, {re.sub(LONG, "", side): columns["hallucinated"] for side, columns in shown.items()},
        xlim=(0, 1.03), xlabel="share that is made up")
    yield lambda axis: chart.curves(
        axis, {f"{case}, {name}": x[case][f"{start}: abstained"] for case in AT_COSTS
               for start, name in ((BASE, "base"), (ABLE, "trained"))},
        x=COSTS, xscale="log", ylim=(0, 1.03), xlabel="cost of a wrong answer",
        ylabel="share that abstains")
    yield numbers({side.removesuffix(", 10 rounds, 3 passes"): {
        "right": columns["right"], "made up": columns["hallucinated"]}
        for side, columns in shown.items()}, "15,360 outputs, best rate of each", ".2f")
