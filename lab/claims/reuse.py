"""Reuse: how much more is learned from several passes over a batch

Claim. With a clipped surrogate, a batch may serve for several epochs (Schulman and others,
1707.06347), and people hope for as many times the learning from a sample; the clip is what makes
this safe.

Prediction. Two and four passes pay, each by less than their number, because later passes repeat the
direction of the first. Eight gain little over four. Without the clip eight passes are worse.

Method. grpo.py with --num_iterations 1, 2, 4, 8 on batches of 16 problems and 8 samples of each.
Accuracy is that of the next batch, whose problems are new; a level is reached by the mean of two
batches in a row. Then eight passes again without a bound. Ends are compared after equally many
batches, 12, by the mean accuracy of the last three.

Outcome. As predicted, two and four passes pay by less than their number, and without the clip eight
are far worse. What eight gain over four is less than a batch of 128 samples, and not seen. After 12
batches two passes are best in the mean.
"""
import numpy

from lab.draw import BLUE, GREEN, ORANGE, RED, curves
from lab.experiment import Experiment, numbers, ratio, steps_to_level
from lab.verdict import OURS, Claim

PPO = "[PPO](https://arxiv.org/abs/1707.06347)"
LEVEL = 0.7                                 # of accuracy, to which samples are counted
STEPS = {1: 40, 2: 24, 4: 16, 8: 12}        # passes: steps, enough to reach the level
SAMPLES_A_STEP = 16 * 8
EQUAL = slice(STEPS[8] - 3, STEPS[8])       # the batches after which all runs are compared
GAIN = 0.02                                 # of accuracy, what counts as one
FLAGS = ("grpo.py --num_prompts 16 --num_generations 8 --stop_at 2 --num_eval_samples 2 "
         "--num_eval_problems 256 --eval_steps 1000")
RUNS = {f"clip, {passes}": f"{FLAGS} --num_iterations {passes} --max_steps {steps}"
        for passes, steps in STEPS.items()}
NO_BOUND = "no bound, 8"
RUNS[NO_BOUND] = f"{RUNS['clip, 8']} --epsilon 1e9 --epsilon_high 1e9"
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(5))
EXPERIMENT.runs("runs", RUNS, ["accuracy", "kl"], ["pass@1"])


def page(runs):
    steps = {}
    last = {}
    end = {}
    for name in RUNS:
        accuracy = runs[name]["accuracy"]
        steps[name] = numpy.array([steps_to_level(row, LEVEL) for row in accuracy])
        last[name] = accuracy.shape[1]
        end[name] = accuracy[:, EQUAL].mean(axis=1)
    fewer = {passes: ratio(steps["clip, 1"], steps[f"clip, {passes}"], last["clip, 1"],
                           last[f"clip, {passes}"]) for passes in STEPS}
    assert numpy.isfinite([steps[f"clip, {passes}"] for passes in STEPS]).all()     # no bounds
    times = ", ".join(f"{numpy.exp(numpy.log(fewer[passes]['values']).mean()):.1f}"
                      for passes in (2, 4, 8))
    said = (f"With 2, 4, 8 passes over each batch, {LEVEL:.0%} accuracy takes {times} times fewer "
            "samples than with one")
    yield Claim("four passes need 4 times fewer samples than one, or nearly so", OURS,
                **fewer[4], at_least=3.6, shown=said, contradicted=said, undecided=said)
    for passes in (2, 8):
        yield Claim(f"{passes} passes need fewer samples than one", PPO, **fewer[passes],
                    at_least=1.1)
    yield Claim("with eight passes, the clip is more accurate than no bound", PPO,
                (end["clip, 8"], end[NO_BOUND]), at_least=GAIN)
    lines = {f"passes: {passes}": runs[f"clip, {passes}"]["accuracy"] for passes in STEPS}
    longest = {name: SAMPLES_A_STEP * numpy.arange(rows.shape[1]) for name, rows in lines.items()}
    yield curves(lines, said, x=longest, xlabel="samples learned from",
                 given=dict(zip(lines, (BLUE, GREEN, ORANGE, RED))), ylabel="accuracy")
    rows = {name: {"samples": SAMPLES_A_STEP * steps[name], "equal": end[name],
                   "end": runs[name]["pass@1"], "kl": runs[name]["kl"][:, -1]} for name in RUNS}
    yield numbers(rows, {"samples": f"samples to {LEVEL}", "equal": "accuracy after 12 batches",
                         "end": "pass@1 at the end, of 40, 24, 16 and 12 batches",
                         "kl": "KL to the base"}, ".4g", by="bound, passes")
