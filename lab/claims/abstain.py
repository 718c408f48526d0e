"""Abstention: which ways of learning stop making things up, and when?"""
import functools
import tempfile
import zlib

import grpo
import measuring
from lab.bench import OURS, Claim, at_best, cell, numbers
from lab.claims.imitation import SCORED as UNUSED
from lab.claims.imitation import SCRIPTS, STEPS, imitation, positive
from lab.docs import run_once, table
from report import chart, replaced
from report.logs import read_summary

SEEDS, TUNING = range(220, 232), (216, 217, 218)
EQUAL = ("base, questions, and 15,360 outputs, those for PPO's critic included; the number of "
         "updates is in the table")
TUNED = ("the learning rate of each way, on three other seeds, by the mean mark that it learns "
         "from; PPO's critic keeps its rate of 2e-3; the table of costs has one rate, 5e-4")
SCORES = ["marks", "right", "abstained", "hallucinated", "needless", "pass@1", "greedy_right",
          "greedy_hallucinated"]
# of 1,536 questions, about 550 hide a number
SCORED = "--eval_steps 1000 --save_steps 60 --num_eval_problems 1536 --num_eval_samples 1"
GAIN = 0.02                             # smallest difference of two fractions that matters

# A way to learn: its command line, its number of updates, and the learning rate to begin with
# under marks, without a cost, at a cost of 3, and under points with levels; 0: it is left out
THREE, TEN, EACH, RIGHT, NOT_WRONG = (
    "imitation of the best, 3 rounds, 3 passes", "imitation of the best, 10 rounds, 3 passes",
    "imitation of the best, each step, 1 pass", "imitation of all right ones, 10 rounds, 3 passes",
    "imitation of all that are not wrong, 10 rounds, 3 passes")
FROM_6, FROM_11 = (f"imitation of {n} points and more, 10 rounds, 3 passes" for n in (6, 11))
NONE, BATCH, SHIFTED = (
    "REINFORCE", "REINFORCE, batch's mean as baseline", "REINFORCE, weights 2, 1 and 0")
GRPO, POSITIVE, COLD, WARM = "GRPO", "GRPO, positive advantages alone", "PPO", "PPO, critic first"
WAYS = {
    THREE: (imitation(3, 3), 360, 5e-4, 0, 0, 0),
    TEN: (imitation(10, 3), 360, 5e-4, 0, 0, 2.5e-4),
    EACH: (imitation(STEPS, 1), 120, 5e-4, 0, 0, 0),
    RIGHT: (imitation(10, 3), 360, 0, 5e-4, 0, 0),
    NOT_WRONG: (imitation(10, 3), 360, 5e-4, 0, 0, 0),
    FROM_6: (imitation(10, 3), 360, 0, 0, 0, 5e-4),
    FROM_11: (imitation(10, 3), 360, 0, 0, 0, 5e-4),
    NONE: ("reinforce.py", 120, 5e-4, 0, 0, 0),
    BATCH: ("reinforce.py --baseline batch", 120, 5e-4, 0, 0, 2.5e-4),
    SHIFTED: ("reinforce.py", 120, 5e-4, 0, 0, 0),
    GRPO: ("grpo.py", 120, 5e-4, 5e-4, 5e-4, 5e-4),
    POSITIVE: ("grpo.py", 120, 5e-4, 0, 0, 0),
    COLD: ("ppo.py", 120, 5e-4, 0, 0, 0),
    WARM: ("ppo.py --critic_pretrain_steps 10 --max_steps 50", 100, 5e-4, 0, 0, 0)}
MARKS, FREE, DEAR, LEVELS = "marks", "no cost", "cost 3", "levels"
REWARDS = {MARKS: "--task abstain", FREE: "--task abstain:cost=0", DEAR: "--task abstain:cost=3",
           LEVELS: "--task abstain --reward points"}
SIDES = {f"{reward}: {way}": (None, rates[place])
         for place, reward in enumerate(REWARDS)
         for way, (_, _, *rates) in WAYS.items() if rates[place]}
COMPARED = [(side, "marks") for side in SIDES]

# When does a policy switch from answering to abstaining? A case has all COSTS, from the base and
# from a policy that has learned without a cost
LARGEST, COSTS = (2, 3, 9), (0.1, 0.25, 1, 3)
AT_COSTS = {f"x up to {largest}": largest for largest in LARGEST}
CASES = ("base", *AT_COSTS)
FEWER = ({side: SEEDS[:6] for side in SIDES if side.startswith(LEVELS)}
         | dict.fromkeys(AT_COSTS, SEEDS[:3]))
STARTS = BASE, ABLE = "from the base", "from a policy that has learned without a cost"
CHECK = "grpo.py --task abstain"


def at_least(threshold, problem, text, given):
    """Give 1 to all outputs whose reward reaches a threshold, so that imitation keeps them all."""
    return float(given >= threshold)


def shifted(problem, text, given):
    """Give 2 for a right answer, 1 for an abstention, and 0 for a wrong answer."""
    return given + 1


def with_level(problem, text, given):
    """Add what this judge gives to all outputs for a question: 0 to 10 points, by its hash."""
    return given + zlib.crc32(problem.prompt.encode()) % 11


def level_at_least(threshold, problem, text, given):
    return at_least(threshold, problem, text, with_level(problem, text, given))


CHANGES = {NOT_WRONG: functools.partial(at_least, 0), SHIFTED: shifted,
           FROM_6: functools.partial(level_at_least, 6),
           FROM_11: functools.partial(level_at_least, 11)}


def measure(case, seed):
    """Train in one way under one reward, or not at all, or at all costs. -> {score: a number, or a
    list with one for each cost}"""
    if case == "base":
        return run_once(f"grpo.py --task abstain --max_steps 0 {SCORED} --base_seed {seed}", seed,
                        (), SCORES)
    if case in AT_COSTS:
        return at_costs(AT_COSTS[case], seed)
    side, _, rate = case.rpartition(", ")
    reward, _, way = side.partition(": ")
    script = SCRIPTS[WAYS[way][0].partition(".py")[0]]
    changes = {}
    if way in CHANGES or reward == LEVELS:
        changes["reward"] = CHANGES.get(way, with_level)
    if way == POSITIVE:
        changes["advantages"] = functools.partial(positive, script.advantages)
    with replaced(script, **changes):
        return run_once(f"{WAYS[way][0]} {REWARDS[reward]} {SCORED} --learning_rate {rate} "
                        f"--base_seed {seed}", seed, (), SCORES)


def at_costs(largest, seed):
    """Train grpo.py at each cost from both STARTS. -> {"START: score": a list}"""
    def learn(cost, folder, *flags):
        words = [f"--task=abstain:{largest}+cost={cost}", *SCORED.split(), "--seed", str(seed),
                 "--base_seed", str(seed), *flags]
        return measuring.run(grpo.main, words, lambda one: read_summary(one)["trained"], folder)
    with tempfile.TemporaryDirectory() as able:
        learn(0, able, "--output_dir", able)
        found = {BASE: [learn(cost, None) for cost in COSTS],
                 ABLE: [learn(cost, None, "--init_from", able) for cost in COSTS]}
    return {f"{start}: {score}": [run[score] for run in runs]
            for start, runs in found.items() for score in SCORES}


def score(columns, what):
    """Compute what chooses the rates: the mean mark that a way learns from. -> (S,)"""
    return columns[what]


def mark_at(columns, cost):
    """Compute the mean mark at a cost, from the share that is right and the mark at a cost of 1."""
    return columns["pass@1"] - cost * (columns["pass@1"] - columns["marks"])


MADE_UP = "makes up at least 0.3 more of the answers to questions that hide a number than GRPO"
PLAIN = "makes up at most 0.1 of the answers to questions that hide a number"
GUESSES = "makes up at least half of the answers to questions that hide a number"
# a reward; a way; another way, or none; the score; the bounds of the difference, or of the score
JUDGED = (
    (MARKS, TEN, GRPO, "hallucinated", 0.3, 1, f"imitation of the best in 10 rounds {MADE_UP}",
     "Where a third of the questions cannot be answered, imitation of the best output makes up "
     "{:.0%} of the answers to them, and GRPO {:.0%}"),
    (MARKS, THREE, GRPO, "hallucinated", 0.3, 1, f"imitation of the best in 3 rounds {MADE_UP}",
     ""),
    (MARKS, EACH, GRPO, "hallucinated", 0.3, 1, f"imitation of the best of each step {MADE_UP}",
     ""),
    (MARKS, GRPO, None, "hallucinated", 0, 0.1, f"GRPO {PLAIN}", ""),
    (MARKS, NONE, None, "hallucinated", 0, 0.1, f"REINFORCE {PLAIN}", ""),
    (MARKS, COLD, None, "hallucinated", 0, 0.1, f"PPO {PLAIN}", ""),
    (MARKS, NONE, GRPO, "right", -GAIN, 1, "REINFORCE is not behind GRPO in the share of right "
     "answers where there is one", ""),
    (MARKS, NOT_WRONG, None, "hallucinated", 0, 0.1, f"imitation of all that are not wrong {PLAIN}",
     ""),
    (MARKS, SHIFTED, None, "hallucinated", 0, 0.1, "REINFORCE with the weights 2, 1 and 0 "
     f"{PLAIN}", ""),
    (MARKS, GRPO, POSITIVE, "right", 0.05, 1, "GRPO is right more often if it also makes bad "
     "outputs less likely", ""),
    (MARKS, POSITIVE, GRPO, "hallucinated", 0.05, 1, "GRPO makes up less if it also makes bad "
     "outputs less likely", ""),
    (FREE, GRPO, None, "hallucinated", 0.5, 1, f"if nothing is lost by a guess, GRPO {GUESSES}",
     "With a reward of 1 for right answers and 0 for all others, GRPO makes up {:.0%} of the "
     "answers to questions that hide a number"),
    (FREE, RIGHT, None, "hallucinated", 0.5, 1, "if nothing is lost by a guess, imitation of all "
     f"right ones {GUESSES}", ""),
    (LEVELS, GRPO, None, "hallucinated", 0, 0.1, f"under points with levels, GRPO {PLAIN}", ""))
# a reward, and the ways whose mean marks GRPO's exceed by at least so much, by prediction
BEHIND = {LEVELS: {FROM_6: 0.1, FROM_11: 0.1, TEN: 0.1, BATCH: 0.1}, MARKS: {NOT_WRONG: -GAIN}}
TITLES = {MARKS: "1, 0 or -1", FREE: "1 or 0", DEAR: "1, 0 or -3", LEVELS: "points with levels"}


def page(x):
    best = {side: columns for (side, _), columns in at_best("abstain", x).items()}
    for reward, way, other, column, low, high, text, finding in JUDGED:
        sides = [best[f"{reward}: {one}"] for one in (way, other) if one]
        values = tuple(columns[column] for columns in sides)
        yield Claim(text, OURS, values if other else values[0], at_least=low, at_most=high,
                    finding=finding.format(*(value.mean() for value in values)),
                    rates=tuple(columns["rate"] for columns in sides) if other else ())
    for reward, ways in BEHIND.items():
        marks = best[f"{reward}: {GRPO}"]["marks"]
        for way, gain in ways.items():
            yield Claim(f"under {TITLES[reward]}, GRPO's mean mark is at least {gain:g} above that "
                        f"of {way}", OURS, marks - best[f"{reward}: {way}"]["marks"],
                        at_least=gain)
    yield Claim("GRPO that learns at a cost of 3 gets a mean mark, at this cost, at least 0.02 "
                "above that of imitation of all that are not wrong, which no cost changes", OURS,
                best[f"{DEAR}: {GRPO}"]["marks"] - mark_at(best[f"{MARKS}: {NOT_WRONG}"], 3),
                at_least=GAIN)
    early = [x["x up to 3"][f"{start}: abstained"][:, COSTS.index(0.25)] for start in STARTS]
    yield Claim("at a cost of 0.25, where it pays to guess one number of three, a policy that "
                "starts from the base abstains at least 0.3 more often than one that has learned "
                "without a cost", OURS, tuple(early), at_least=0.3)
    shown = {side.partition(": ")[2]: columns["hallucinated"] for side, columns in best.items()
             if side.startswith(MARKS)}
    yield lambda axis: chart.dots(
        axis, {"base": x["base"]["hallucinated"]} | shown, xlim=(0, 1.03),
        xlabel="share of made-up answers to questions that hide a number")
    for reward, title in TITLES.items():
        ways = {side.partition(": ")[2]: columns for side, columns in best.items()
                if side.startswith(f"{reward}:")}
        rows = {way: {"updates": str(WAYS[way][1]), "best rate": columns["rate"]}
                | cells(columns) for way, columns in ways.items()}
        if reward == MARKS:
            rows = {"base": {"updates": "0", "best rate": "–"} | cells(x["base"])} | rows
        yield numbers(rows, title, ".2f")
    for start in STARTS:
        yield table([f"{start}: abstained (right)", *(f"cost {cost}" for cost in COSTS)],
                    [[case, *(f"{cell(abstained, '.2f')} ({cell(right, '.2f')})"
                              for abstained, right in zip(x[case][f"{start}: abstained"].T,
                                                          x[case][f"{start}: right"].T))]
                     for case in AT_COSTS])
    yield table(["way", "command, without the rate, `--base_seed` and the reward"],
                [[way, f"`python {command.replace(f' {UNUSED}', '')}`"] for way, (command, *_)
                 in WAYS.items() if way not in (*CHANGES, RIGHT, POSITIVE)])


def cells(columns):
    """Choose the scores that the tables show. -> {heading: values}"""
    return {"mean mark": columns["marks"], "right": columns["right"],
            "greedy": columns["greedy_right"], "abstained": columns["abstained"],
            "made up": columns["hallucinated"], "made up, greedy": columns["greedy_hallucinated"]}
