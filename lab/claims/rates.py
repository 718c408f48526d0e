"""Rates: do two findings survive if each method gets a learning rate of its own?

Each method runs with three learning rates. Three seeds choose the rate, seven others judge the
method at that rate. docs/lab/rates.md explains the experiment.
"""
import itertools

import numpy

from lab.draw import dots
from lab.experiment import Experiment, numbers
from lab.verdict import OURS, Claim

RATES = ("2.5e-4", "5e-4", "1e-3")              # half the default, the default, twice the default
TUNING, HELD_OUT = slice(0, 3), slice(3, None)  # places in the list of seeds
GAIN = 0.02                                     # smallest difference of a pass@1 that matters
FARTHER = 1.2                                   # smallest ratio of two distances that matters
SCORED = "--eval_steps 1000 --num_eval_problems 256 --num_eval_samples 4"
FRESH = f"--max_steps 20 {SCORED}"
REUSED = f"--num_prompts 16 --num_iterations 4 --max_steps 16 {SCORED}"
METHODS = {"GRPO": f"grpo.py {FRESH}",
           "GSPO, 3e-4 / 4e-4": f"gspo.py --epsilon 3e-4 --epsilon_high 4e-4 {FRESH}",
           "GSPO, 3e-2 / 4e-2": f"gspo.py --epsilon 3e-2 --epsilon_high 4e-2 {FRESH}",
           "clip, mean of answers": f"grpo.py {REUSED}",
           "clip, mean over tokens": f"grpo.py --loss_type dapo {REUSED}",
           "SAPO": f"grpo.py --loss_type sapo {REUSED}",
           "CISPO": f"grpo.py --loss_type cispo {REUSED}"}
CLIPS = {"SAPO": "clip, mean of answers", "CISPO": "clip, mean over tokens"}  # equal averages
EXPERIMENT = Experiment(__file__, seeds=range(20, 30))
EXPERIMENT.runs("runs", {f"{method}, {rate}": f"{command} --learning_rate {rate}"
                         for method, command in METHODS.items() for rate in RATES},
                ["accuracy", "max_log_ratio"], ["pass@1"])


def page(runs):
    tuned = {method: max(RATES, key=lambda rate: runs[f"{method}, {rate}"]["pass@1"][TUNING].mean())
             for method in METHODS}
    results = {method: {name: rows[HELD_OUT] for name, rows in runs[f"{method}, {rate}"].items()}
               for method, rate in tuned.items()}
    score = {method: columns["pass@1"] for method, columns in results.items()}
    distance = {method: columns["max_log_ratio"].mean(axis=1)
                for method, columns in results.items()}
    grpo, gspo = score["GRPO"], score["GSPO, 3e-4 / 4e-4"]
    best = "(each with the best of three learning rates)"
    yield Claim(f"with its paper's clip range, GSPO ends with a higher pass@1 than GRPO {best}",
                "GSPO", (gspo, grpo), at_least=GAIN,
                contradicted="With the best of three learning rates for each, GRPO ends with a "
                f"pass@1 of {grpo.mean():.3f}, and GSPO (with its paper's clip range) with "
                f"{gspo.mean():.3f}")
    yield Claim(f"with gspo.py's clip range, GSPO ends with a higher pass@1 than GRPO {best}",
                "GSPO", (score["GSPO, 3e-2 / 4e-2"], grpo), at_least=GAIN)
    farther = {}
    for method, clip in CLIPS.items():
        ratios = distance[method] / distance[clip]
        farther[method] = Claim(
            f"{method} lets log pi move farther in a batch than the clip does {best}", OURS, ratios,
            at_least=FARTHER, times=True, said=f"With tuned learning rates, {method} lets log pi "
            f"move {numpy.exp(numpy.log(ratios).mean()):.1f} times as far in a batch as the clip "
            "does")
        yield farther[method]
    yield dots({method: distance[method] / distance[clip] for method, clip in CLIPS.items()},
               farther["SAPO"].finding, form=".1f", level=(1, "the clip"), xscale="log",
               xlabel="largest |log rho| of a batch, divided by the clip's; a dot for each seed")
    rows = {}
    for method, rate in itertools.product(METHODS, RATES):
        columns = runs[f"{method}, {rate}"]
        mark = " (tuned)" * (rate == tuned[method])
        rows[f"{method}, {rate}{mark}"] = {
            "pass@1, tuning seeds": columns["pass@1"][TUNING],
            "pass@1, other seeds": columns["pass@1"][HELD_OUT],
            "largest change of log pi in a batch, other seeds":
                columns["max_log_ratio"][HELD_OUT].mean(axis=1)}
    yield numbers(rows, by="method, learning rate")
