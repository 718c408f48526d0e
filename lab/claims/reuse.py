"""Reuse: how much more is learned from several passes over a batch

grpo.py with 1, 2, 4 and 8 passes, and 8 passes without a clip. docs/lab/reuse.md says more.
"""
import numpy

from lab.draw import BLUE, GREEN, ORANGE, RED, curves
from lab.experiment import Experiment, numbers, ratio, steps_to_level
from lab.verdict import OURS, Claim

LEVEL = 0.7                                 # the accuracy up to which samples are counted
WINDOW = 1                                  # batches over which accuracy is averaged for this
STEPS = {1: 40, 2: 24, 4: 16, 8: 12}        # passes: steps, enough to reach the level
SAMPLES_A_STEP = 16 * 8
LAST = 3                                    # batches of the first 12 at which runs are compared
GAIN = 0.02                                 # of accuracy, what counts as one
FLAGS = ("grpo.py --num_prompts 16 --num_generations 8 --stop_at 2 --num_eval_samples 2 "
         "--num_eval_problems 256 --eval_steps 1000")
RUNS = {f"clip, {passes}": f"{FLAGS} --num_iterations {passes} --max_steps {steps}"
        for passes, steps in STEPS.items()}
NO_BOUND = "no bound, 8"
RUNS[NO_BOUND] = f"{RUNS['clip, 8']} --epsilon 1e9 --epsilon_high 1e9"
EXPERIMENT = Experiment(__file__, seeds=range(5))
EXPERIMENT.runs("runs", RUNS, ["accuracy", "kl"], ["pass@1"])


def page(runs):
    steps = {name: steps_to_level(found["accuracy"], LEVEL, WINDOW)
             for name, found in runs.items()}
    end = {name: found["accuracy"][:, STEPS[8] - LAST:STEPS[8]].mean(axis=1)
           for name, found in runs.items()}

    def fewer(more, less):
        return ratio(steps[f"clip, {less}"], steps[f"clip, {more}"], STEPS[less], STEPS[more],
                     WINDOW - 1)

    saved = [numpy.log(numpy.divide(*fewer(passes, 1)["values"])) for passes in (2, 4, 8)]
    times = ", ".join(f"{numpy.exp(logs.mean()):.1f}" for logs in saved)
    said = (f"With 2, 4, 8 passes over each batch, {LEVEL:.0%} accuracy takes {times} times fewer "
            "samples than with one")
    yield Claim("four passes need 4 times fewer samples than one, or nearly so", OURS,
                **fewer(4, 1), at_least=3.6, said=said)
    for passes in (2, 8):
        yield Claim(f"{passes} passes need fewer samples than one", "PPO", **fewer(passes, 1),
                    at_least=1.1)
    yield Claim("eight passes need fewer samples than four", OURS, **fewer(8, 4), at_least=1.1)
    yield Claim("with eight passes, the clip is more accurate than no bound", "PPO",
                (end["clip, 8"], end[NO_BOUND]), at_least=GAIN)
    lines = {f"passes: {passes}": runs[f"clip, {passes}"]["accuracy"] for passes in STEPS}
    longest = {name: SAMPLES_A_STEP * numpy.arange(rows.shape[1]) for name, rows in lines.items()}
    yield curves(lines, said, x=longest, xlabel="samples learned from",
                 given=dict(zip(lines, (BLUE, GREEN, ORANGE, RED))), ylabel="accuracy")
    rows = {name: {f"samples to {LEVEL}": SAMPLES_A_STEP * steps[name],
                   "accuracy after 12 batches": end[name],
                   "pass@1 at the end, of 40, 24, 16 and 12 batches": found["pass@1"],
                   "KL to the base": found["kl"][:, -1]} for name, found in runs.items()}
    yield numbers(rows, form=".4g", by="bound, passes")
