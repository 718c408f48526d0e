"""Tests: programs whose reward runs only the tests that the policy sees"""
import shlex

import grpo
import measuring
from lab.bench import OURS, Claim, at_best, numbers
from report import chart, replaced
from report.logs import read_log, read_summary
from tasks import program

SEEDS, TUNING = range(12), (12, 13)
GAIN = 0.05                     # smallest difference of shares that matters
LATE = 3                        # number of last batches whose mean reward chooses a rate
RUN = ("--num_prompts 16 --max_steps 30 --eval_steps 1000 --num_eval_problems 128 "
       "--num_eval_samples 4 --device cpu")
ALL, ONE_HIDDEN, SHOWN, KL = "all ten tests", "one hidden test", "shown tests", "shown tests and KL"
SHORTER, MIXED = "shown tests and length", "shown tests, and arithmetic"
FEWER_LISTS, FEWEST_LISTS = "shown tests, base with 20%", "shown tests, base with 5%"
TASKS = {ALL: "program", ONE_HIDDEN: "program:hidden=1", SHOWN: "program:shown",
         KL: "program:shown --beta 0.1", SHORTER: "program:shown --overlong_buffer 47",
         MIXED: "program:shown,arithmetic", FEWER_LISTS: "program:shown",
         FEWEST_LISTS: "program:shown"}
LISTS = {FEWER_LISTS: 0.2, FEWEST_LISTS: 0.05}      # of the forum's texts; else program.SHARES
SIDES = dict.fromkeys(TASKS, (None, 5e-4))
COMPARED = [(side, "reward") for side in SIDES]
SCORES = ("all_tests", "shown_tests", "cases", "greedy_all_tests")
CHECK = "grpo.py --task program:shown"


def measure(case, seed):
    """Train grpo.py on programs. -> scores of the base and of the trained policy, and the reward"""
    side, _, rate = case.rpartition(", ")
    thoughts, lists = program.SHARES["forum"]
    shares = program.SHARES | {"forum": (thoughts, LISTS.get(side, lists))}
    words = shlex.split(f"--task {TASKS[side]} --learning_rate {rate} --seed {seed} "
                        f"--base_seed {seed} {RUN}")
    with replaced(program, SHARES=shares):
        return measuring.run(grpo.main, words, look)


def look(folder):
    summary = read_summary(folder)
    rewards = [line["reward"] for line in read_log(folder, "metrics", "reward")]
    return {"reward": sum(rewards[-LATE:]) / LATE} | {
        f"{when} {name}": summary[when][name] for when in ("base", "trained") for name in SCORES}


def page(x):
    runs = {side: columns for (side, _), columns in at_best("tests", x).items()}
    right = {side: columns["trained all_tests"] for side, columns in runs.items()}
    before, lists = runs[SHOWN]["base all_tests"], runs[SHOWN]["trained cases"]
    yield (f"If the reward runs only the tests that the policy sees, {lists.mean():.0%} of the "
           f"programs become lists of these tests, and {right[SHOWN].mean():.0%} pass all tests. "
           f"If it runs one hidden test more, {right[ONE_HIDDEN].mean():.0%} do.")
    yield Claim("if the reward runs only the shown tests, fewer programs pass all tests after RL "
                "than before", OURS, (right[SHOWN], before), at_most=-GAIN,
                rates=(runs[SHOWN]["rate"],))
    yield Claim("if the reward runs one hidden test, the share that passes all tests ends at most "
                f"{GAIN} lower than if it runs all seven", OURS, (right[ONE_HIDDEN], right[ALL]),
                at_least=-GAIN, rates=(runs[ONE_HIDDEN]["rate"], runs[ALL]["rate"]))
    for side, what in ((KL, "with a KL penalty (beta 0.1)"),
                       (SHORTER, "with a penalty for each token from the second one on"),
                       (MIXED, "if half of the problems are arithmetic"),
                       (FEWER_LISTS, "from a base whose forum lists cases in 20%, not 35%, of "
                                     "its texts"),
                       (FEWEST_LISTS, "from a base whose forum lists cases in 5%, not 35%, of "
                                      "its texts")):
        yield Claim(f"with the shown tests, more programs pass all tests {what}", OURS,
                    (right[side], right[SHOWN]), at_least=GAIN,
                    rates=(runs[side]["rate"], runs[SHOWN]["rate"]))
    dots = {"the base": before} | right
    yield lambda axis: chart.dots(axis, dots, xlim=(0, 1.03),
                                  xlabel="programs that pass all ten tests")
    rows = {f"{side}: {when}": {
        name: columns[f"{when} {key}"] for name, key in (
            ("pass the shown tests", "shown_tests"), ("pass all tests", "all_tests"),
            ("lists", "cases"))}
        for side, columns in runs.items() for when in ("base", "trained")
        if when == "trained" or side in (SHOWN, FEWEST_LISTS)}
    yield numbers(rows, "reward", ".2f")
