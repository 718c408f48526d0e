"""Reuse: how much more is learned from several passes over a batch.

Claim. With a clipped surrogate, a batch may serve for several epochs (Schulman and others,
1707.06347), and people hope for as many times the learning from a sample; the clip is what makes
this safe. CISPO (2506.13585) and SAPO (2511.20347) are softer bounds with the same purpose.

Prediction. Two and four passes pay, each by less than their number, because later passes repeat
the direction of the first. Eight gain little over four. Without the clip eight passes are worse.

Method. grpo.py with --num_iterations 1, 2, 4, 8, from one base, on batches of 16 problems and 8
samples of each. Accuracy is that of the next batch, whose problems are new. Then eight passes
again without a bound, with CISPO, with SAPO, and with --delta 2.
"""
import math

from lab.entry import (
    Claim,
    compared,
    mean_and_spread,
    mean_curve,
    minus,
    run_all,
    seconds_a_step,
    sign_test,
)
from lab.experiment import steps_to_level

SEEDS = [0, 1, 2, 3, 4]
LEVEL = 0.7                                 # of accuracy, to which samples are counted
STEPS = {1: 40, 2: 24, 4: 16, 8: 12}        # passes: steps, enough to reach the level
SAMPLES_A_STEP = 16 * 8
COMMON = ["grpo.py", "--num_prompts", 16, "--num_generations", 8, "--stop_at", 2,
          "--num_eval_samples", 2, "--num_eval_problems", 256, "--eval_steps", 1000]
OTHERS = {
    "no bound": ["--epsilon", 1e9, "--epsilon_high", 1e9],
    "CISPO": ["--loss_type", "cispo"],
    "SAPO": ["--loss_type", "sapo"],
    "delta": ["--delta", 2]}
METRICS = ["accuracy", "kl", "entropy"]


def variants():
    """{name: script and flags}: the passes with the clip, then the other bounds with eight."""
    named = {}
    for passes, steps in STEPS.items():
        flags = ["--num_iterations", passes, "--max_steps", steps]
        named[f"clip, {passes}"] = COMMON + flags
    for name, flags in OTHERS.items():
        named[f"{name}, 8"] = COMMON + ["--num_iterations", 8, "--max_steps", STEPS[8]] + flags
    return named


def measure(seeds):
    found = {}
    for name, results in run_all(variants(), seeds, METRICS).items():
        found[name] = {metric: [result[metric] for result in results] for metric in METRICS}
        trained = [result["summary"]["trained"] for result in results]
        found[name]["pass@1"] = [scores["pass@1"] for scores in trained]
        found[name]["problems"] = trained[0]["problems"]
    return {"runs": found, "seconds a step": seconds_a_step(variants(), seeds[0])}


def costs(found, name):
    """What each seed needed until LEVEL. -> {"samples": list, "seconds": list}"""
    steps = [steps_to_level(accuracy, LEVEL) for accuracy in found["runs"][name]["accuracy"]]
    seconds = found["seconds a step"][name]
    return {"samples": [SAMPLES_A_STEP * n for n in steps],
            "seconds": [seconds * n for n in steps]}


def tables(found):
    heads = ["bound, passes", f"samples to {LEVEL}", f"seconds to {LEVEL}",
             f"pass@1 after {STEPS[8]} steps or more", "KL to the base", "entropy"]
    rows = []
    for name, run in found["runs"].items():
        needed = costs(found, name)
        ends = [[values[-1] for values in run[metric]] for metric in ("kl", "entropy")]
        rows.append([name, mean_and_spread(needed["samples"], ".0f"),
                     mean_and_spread(needed["seconds"], ".1f"), mean_and_spread(run["pass@1"]),
                     *[mean_and_spread(end) for end in ends]])
    return [(heads, rows)]


def gain(found, name, unit):
    """How many times less than one pass a variant needed, seed by seed, as a logarithm: 0 if as
    much. -> list"""
    one = costs(found, "clip, 1")[unit]
    other = costs(found, name)[unit]
    return [math.log(a / b) for a, b in zip(one, other)]


def times(gains):
    """Logarithms of factors as their mean and spread. -> str"""
    return mean_and_spread([math.exp(value) for value in gains], ".2f")


def claims(found):
    listed = []
    for passes in list(STEPS)[1:]:
        gains = gain(found, f"clip, {passes}", "samples")
        listed.append(Claim(f"{passes} passes need fewer samples than one",
                            f"{times(gains)} times fewer", sign_test(gains)))
        full = [value - math.log(passes) for value in gains]
        listed.append(Claim(f"{passes} passes need {passes} times fewer",
                            f"{times(gains)} times fewer", sign_test(full)))
    for passes in list(STEPS)[1:]:
        gains = gain(found, f"clip, {passes}", "seconds")
        listed.append(Claim(f"{passes} passes need less time than one",
                            f"{times(gains)} times less", sign_test(gains)))
    clip = found["runs"]["clip, 8"]["pass@1"]
    for name in OTHERS:
        other = found["runs"][f"{name}, 8"]["pass@1"]
        listed.append(compared(f"after eight passes, the clip has a higher pass@1 than {name}",
                               minus(clip, other)))
    return listed


def note(found):
    problems = found["runs"]["clip, 1"]["problems"]
    return f"Held-out problems, all different: {problems}; {SAMPLES_A_STEP} samples a step"


def panels(found):
    def draw(axis, names, title):
        for name in names:
            mean = mean_curve(found["runs"][name]["accuracy"])
            samples = [SAMPLES_A_STEP * step for step in range(len(mean))]
            axis.plot(samples, mean, label=name)
        axis.set(title=title, xlabel="samples learned from", ylabel="accuracy", ylim=(0, 1))
        axis.legend(frameon=False, fontsize=8, loc="lower left", ncols=2)

    clipped = [name for name in found["runs"] if name.startswith("clip")]
    others = ["clip, 8", *(f"{name}, 8" for name in OTHERS)]
    return [lambda axis: draw(axis, clipped, "passes over a batch"),
            lambda axis: draw(axis, others, "bounds, eight passes")]
