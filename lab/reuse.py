"""Reuse: how much more is learned from several passes over a batch

Claim. With a clipped surrogate, a batch may serve for several epochs (Schulman and others,
1707.06347), and people hope for as many times the learning from a sample; the clip is what makes
this safe. CISPO (2506.13585) and SAPO (2511.20347) are softer bounds with the same purpose.

Prediction. Two and four passes pay, each by less than their number, because later passes repeat
the direction of the first. Eight gain little over four. Without the clip eight passes are worse.

Method. grpo.py with --num_iterations 1, 2, 4, 8, from one base, on batches of 16 problems and 8
samples of each. Accuracy is that of the next batch, whose problems are new. Then eight passes
again without a bound, with CISPO, with SAPO, and with --delta 2. The seconds of a step are the
median of its run.

Outcome. As predicted, two and four passes pay by less than their number, eight gain nothing over
four, and without the clip eight are far worse. Not predicted: the softer bounds of CISPO and SAPO
end anywhere from 0 to .8 then, more like no bound than like the clip, and with the clip, too, eight
passes end at .86, where one pass ends at .96. No number of passes is seen to save seconds.
"""
import numpy

from lab.draw import BLUE, GREEN, ORANGE, RED, curves, dots
from lab.experiment import Experiment, numbers, steps_to_level
from lab.verdict import OURS, Claim

PPO = "[PPO](https://arxiv.org/abs/1707.06347)"
CISPO = "[CISPO](https://arxiv.org/abs/2506.13585)"
SAPO = "[SAPO](https://arxiv.org/abs/2511.20347)"
LEVEL = 0.7                                 # of accuracy, to which samples are counted
STEPS = {1: 40, 2: 24, 4: 16, 8: 12}        # passes: steps, enough to reach the level
SAMPLES_A_STEP = 16 * 8
GAIN = 0.02                                 # of pass@1, what counts as one
FLAGS = ("grpo.py --num_prompts 16 --num_generations 8 --stop_at 2 --num_eval_samples 2 "
         "--num_eval_problems 256 --eval_steps 1000")
RUNS = {f"clip, {passes}": f"{FLAGS} --num_iterations {passes} --max_steps {steps}"
        for passes, steps in STEPS.items()}
OTHERS = {"no bound, 8": ("--epsilon 1e9 --epsilon_high 1e9", PPO),
          "CISPO, 8": ("--loss_type cispo", CISPO), "SAPO, 8": ("--loss_type sapo", SAPO),
          "delta, 8": ("--delta 2", OURS)}
RUNS |= {name: f"{RUNS['clip, 8']} {flags}" for name, (flags, _) in OTHERS.items()}
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(5))
EXPERIMENT.runs("runs", RUNS, ["accuracy", "kl", "entropy", "step_time"], ["pass@1"])


def page(runs):
    steps = {}
    for name, found in runs.items():
        steps[name] = numpy.array([steps_to_level(row, LEVEL) for row in found["accuracy"]])
    seconds = {name: steps[name] * numpy.median(found["step_time"], axis=1)
               for name, found in runs.items()}
    fewer = {name: steps["clip, 1"] / steps[name] for name in RUNS}
    mean = {name: numpy.exp(numpy.log(values).mean()) for name, values in fewer.items()}
    times = ", ".join(f"{mean[f'clip, {passes}']:.1f}" for passes in (2, 4, 8))
    said = (f"With 2, 4, 8 passes over each batch, {LEVEL:.0%} accuracy takes {times} times fewer "
            "samples than with one")
    yield Claim("four passes need 4 times fewer samples than one", OURS, fewer["clip, 4"],
                at_least=3.6, times=True, shown=said, contradicted=said, undecided=said)
    for passes in (2, 4, 8):
        name = f"clip, {passes}"
        yield Claim(f"{passes} passes need fewer samples than one", PPO, fewer[name], at_least=1.1,
                    times=True)
        yield Claim(f"{passes} passes need fewer seconds than one", OURS,
                    seconds["clip, 1"] / seconds[name], at_least=1.1, times=True)
    clip = runs["clip, 8"]["pass@1"]
    for name, (_, source) in OTHERS.items():
        other = runs[name]["pass@1"]
        if name == "no bound, 8":
            yield Claim("with eight passes, the clip ends with a higher pass@1 than no bound",
                        source, clip - other, at_least=GAIN)
        else:
            yield Claim(f"with eight passes, {name[:-3]} ends with as high a pass@1 as the clip",
                        source, other - clip, at_least=-GAIN)
    lines = {f"passes: {passes}": runs[f"clip, {passes}"]["accuracy"] for passes in STEPS}
    longest = {name: SAMPLES_A_STEP * numpy.arange(rows.shape[1]) for name, rows in lines.items()}
    yield curves(lines, said, x=longest, xlabel="samples learned from",
                 given=dict(zip(lines, (BLUE, GREEN, ORANGE, RED))), ylabel="accuracy")
    ends = {name[:-3]: runs[name]["pass@1"] for name in ("clip, 8", *OTHERS)}
    yield dots(ends, f"With eight passes over a batch, pass@1 ends at {clip.mean():.2f} with the "
               f"clip, at {ends['no bound'].mean():.2f} without any bound",
               xlabel="pass@1; delta: the clip and --delta 2; a dot for each seed")
    rows = {name: {"samples": SAMPLES_A_STEP * steps[name], "seconds": seconds[name],
                   "pass@1": found["pass@1"], "kl": found["kl"][:, -1],
                   "entropy": found["entropy"][:, -1]} for name, found in runs.items()}
    yield numbers(rows, {"samples": f"samples to {LEVEL}", "seconds": f"seconds to {LEVEL}",
                         "pass@1": "pass@1 at the end", "kl": "KL to the base",
                         "entropy": "entropy"}, ".4g", by="bound, passes")
