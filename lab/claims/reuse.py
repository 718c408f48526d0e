"""Reuse: how many samples several passes over each batch save"""
import numpy

from lab.bench import OURS, UNSCORED, Claim, numbers, steps_to
from report import chart

SEEDS = range(5)
LEVEL = 0.7                                 # samples are counted until accuracy reaches this level
WINDOW = 1                                  # number of batches that accuracy is averaged over
STEPS = {1: 40, 2: 24, 4: 16, 8: 12}        # passes -> steps, enough of them to reach the level
SAMPLES_A_STEP = 16 * 8
LAST = 3                                    # number of batches (up to the 12th) that are compared
FLAGS = f"grpo.py --num_prompts 16 --num_generations 8 {UNSCORED}"
RUNS = {f"clip, {passes}": f"{FLAGS} --num_iterations {passes} --max_steps {steps}"
        for passes, steps in STEPS.items()}
NO_BOUND = "no bound, 8"
RUNS[NO_BOUND] = f"{RUNS['clip, 8']} --epsilon 1e9 --epsilon_high 1e9"
METRICS = ["accuracy"]


def page(x):
    steps = {name: steps_to(columns["accuracy"], LEVEL, WINDOW) for name, columns in x.items()}
    end = {name: columns["accuracy"][:, STEPS[8] - LAST:STEPS[8]].mean(axis=1)
           for name, columns in x.items()}

    def fewer(more, less):
        return steps[f"clip, {less}"] / steps[f"clip, {more}"]

    yield Claim("four passes need about 4 times fewer samples than one", OURS, fewer(4, 1),
                at_least=3.6, ratio=True, finding="Four passes over each batch need "
                f"{numpy.exp(numpy.log(fewer(4, 1)).mean()):.1f} times fewer samples than one pass "
                f"to reach {LEVEL:.0%} accuracy")
    for passes, word in ((2, "two"), (8, "eight")):
        yield Claim(f"{word} passes need fewer samples than one", "PPO", fewer(passes, 1),
                    at_least=1.1, ratio=True)
    yield Claim("eight passes need fewer samples than four", OURS, fewer(8, 4), at_least=1.1,
                ratio=True)
    yield Claim("with eight passes, accuracy ends higher with the clip than without a bound", "PPO",
                (end["clip, 8"], end[NO_BOUND]), at_least=0.02)
    lines = {f"passes: {passes}": x[f"clip, {passes}"]["accuracy"] for passes in STEPS}
    samples = {name: SAMPLES_A_STEP * numpy.arange(rows.shape[1]) for name, rows in lines.items()}
    yield lambda axis: chart.curves(axis, lines, samples, xlabel="samples learned from",
                                    ylabel="accuracy")
    yield numbers({name: {f"samples to an accuracy of {LEVEL}": SAMPLES_A_STEP * steps[name],
                          "accuracy after 12 batches": end[name]} for name in x},
                  "bound, number of passes")
