"""Reuse: how much more is learned from several passes over a batch

Claim. With a clipped surrogate, a batch may serve for several epochs (Schulman and others,
1707.06347), and people hope for as many times the learning from a sample; the clip is what makes
this safe. CISPO (2506.13585) and SAPO (2511.20347) are softer bounds with the same purpose.

Prediction. Two and four passes pay, each by less than their number, because later passes repeat
the direction of the first. Eight gain little over four. Without the clip eight passes are worse.

Method. grpo.py with --num_iterations 1, 2, 4, 8 on batches of 16 problems and 8 samples of each.
Accuracy is that of the next batch, whose problems are new; a level is reached by the mean of two
batches in a row. Then eight passes again without a bound,
with CISPO, with SAPO, and with --delta 2. Ends are compared after equally many batches, 12, by the
mean accuracy of the last three. (At commit 437be3d eight passes over 12 batches were set beside one
pass over 40.) The seconds of a step are the median of its run.

Outcome. As predicted, two and four passes pay by less than their number, and without the clip eight
are far worse. What eight gain over four is less than a batch of 128 samples, and not seen. Not
predicted: with their default ranges SAPO and CISPO are far from the clip, and CISPO is not surely
better than no bound. After equally many batches eight passes are as good as one, or hardly worse,
and two are best in the mean. No number of passes is seen to save seconds.
"""
import numpy

from lab.draw import BLUE, GREEN, ORANGE, RED, curves, dots
from lab.experiment import Experiment, numbers, ratio, steps_to_level
from lab.verdict import OURS, Claim

PPO = "[PPO](https://arxiv.org/abs/1707.06347)"
CISPO = "[CISPO](https://arxiv.org/abs/2506.13585)"
SAPO = "[SAPO](https://arxiv.org/abs/2511.20347)"
LEVEL = 0.7                                 # of accuracy, to which samples are counted
STEPS = {1: 40, 2: 24, 4: 16, 8: 12}        # passes: steps, enough to reach the level
SAMPLES_A_STEP = 16 * 8
EQUAL = slice(STEPS[8] - 3, STEPS[8])       # the batches after which all runs are compared
GAIN = 0.02                                 # of accuracy, what counts as one
FLAGS = ("grpo.py --num_prompts 16 --num_generations 8 --stop_at 2 --num_eval_samples 2 "
         "--num_eval_problems 256 --eval_steps 1000")
RUNS = {f"clip, {passes}": f"{FLAGS} --num_iterations {passes} --max_steps {steps}"
        for passes, steps in STEPS.items()}
OTHERS = {"no bound, 8": ("--epsilon 1e9 --epsilon_high 1e9", PPO),
          "CISPO, 8": ("--loss_type cispo", CISPO), "SAPO, 8": ("--loss_type sapo", SAPO),
          "delta, 8": ("--delta 2", OURS)}
RUNS |= {name: f"{RUNS['clip, 8']} {flags}" for name, (flags, _) in OTHERS.items()}
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(5))
EXPERIMENT.runs("runs", RUNS, ["accuracy", "kl", "step_time"], ["pass@1"])


def page(runs):
    steps = {}
    last = {}
    for name, found in runs.items():
        accuracy = found["accuracy"]
        steps[name] = numpy.array([steps_to_level(row, LEVEL) for row in accuracy])
        last[name] = accuracy.shape[1]
    a_step = {name: numpy.median(found["step_time"], axis=1) for name, found in runs.items()}
    end = {name: found["accuracy"][:, EQUAL].mean(axis=1) for name, found in runs.items()}
    one = "clip, 1"
    fewer = {name: ratio(steps[one], steps[name], last[one], last[name]) for name in RUNS}
    mean = {name: numpy.exp(numpy.log(of["values"]).mean()) for name, of in fewer.items()}
    assert numpy.isfinite([steps[f"clip, {passes}"] for passes in STEPS]).all()     # no bounds
    times = ", ".join(f"{mean[f'clip, {passes}']:.1f}" for passes in (2, 4, 8))
    said = (f"With 2, 4, 8 passes over each batch, {LEVEL:.0%} accuracy takes {times} times fewer "
            "samples than with one")
    yield Claim("four passes need 4 times fewer samples than one, or nearly so", OURS,
                **fewer["clip, 4"], at_least=3.6, shown=said, contradicted=said, undecided=said)
    for passes in (2, 8):
        name = f"clip, {passes}"
        yield Claim(f"{passes} passes need fewer samples than one", PPO, **fewer[name],
                    at_least=1.1)
    seconds = {name: steps[name] * a_step[name] for name in RUNS}
    yield Claim("four passes need fewer seconds than one", OURS,
                **ratio(seconds[one], seconds["clip, 4"], last[one] * a_step[one],
                        last["clip, 4"] * a_step["clip, 4"]), at_least=1.1)
    yield Claim("after as many batches, eight passes are as accurate as one, or more", OURS,
                (end["clip, 8"], end[one]), at_least=-GAIN)
    for name, (_, source) in OTHERS.items():
        if name == "no bound, 8":
            yield Claim("with eight passes, the clip is more accurate than no bound", source,
                        (end["clip, 8"], end[name]), at_least=GAIN)
        elif source != OURS:
            yield Claim(f"with eight passes, {name[:-3]} is as accurate as the clip", source,
                        (end[name], end["clip, 8"]), at_least=-GAIN)
    lines = {f"passes: {passes}": runs[f"clip, {passes}"]["accuracy"] for passes in STEPS}
    longest = {name: SAMPLES_A_STEP * numpy.arange(rows.shape[1]) for name, rows in lines.items()}
    yield curves(lines, said, x=longest, xlabel="samples learned from",
                 given=dict(zip(lines, (BLUE, GREEN, ORANGE, RED))), ylabel="accuracy")
    ends = {name[:-3]: end[name] for name in ("clip, 8", *OTHERS)}
    yield dots(ends, f"After 12 batches, with eight passes over each, accuracy is "
               f"{ends['clip'].mean():.2f} with the clip, {ends['no bound'].mean():.2f} without "
               "any bound", xlabel="accuracy; delta: the clip and --delta 2; a dot for each seed")
    rows = {name: {"samples": SAMPLES_A_STEP * steps[name], "seconds": seconds[name],
                   "equal": end[name], "end": found["pass@1"], "kl": found["kl"][:, -1]}
            for name, found in runs.items()}
    yield numbers(rows, {"samples": f"samples to {LEVEL}", "seconds": f"seconds to {LEVEL}",
                         "equal": "accuracy after 12 batches",
                         "end": "pass@1 at the end, of 40, 24, 16 and 12 batches",
                         "kl": "KL to the base"}, ".4g", by="bound, passes")
