"""Rates: which findings survive if each side gets a learning rate of its own?

Each method runs with three learning rates or more. Three seeds choose the rate, seven others judge
the method at that rate. docs/lab/rates.md explains the experiment.
"""
import itertools

import numpy

from lab.docs import table
from lab.draw import dots
from lab.experiment import UNSCORED, Experiment, module, numbers, of, ratio, steps_to_level
from lab.verdict import OURS, Claim

RATES = ("2.5e-4", "5e-4", "1e-3")              # half the default, the default, twice the default
TUNING, HELD_OUT = slice(0, 3), slice(3, None)  # places in the list of seeds
GAIN = 0.02                                     # smallest difference of a pass@1 that matters
BEST = "(each with the best of three learning rates)"
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
SEEDS = range(20, 30)
# The sides of claims that other experiments judged at one shared rate: the command, and the rates
PASSES = f"grpo.py --num_prompts 16 --num_generations 8 {UNSCORED} --max_steps"
LAG = f"examples/lag.py --num_prompts 12 {UNSCORED} --sampler_lag"
PPO = ("ppo.py --reward model --max_steps 30 --eval_steps 1000 --num_eval_problems 256 "
       "--num_eval_samples 4")
SIDES = {"clip, 8 passes": (f"{PASSES} 12 --num_iterations 8",
                            ("1.25e-4", "2.5e-4", "5e-4", "1e-3")),
         "no bound, 8 passes": (f"{PASSES} 12 --num_iterations 8 --epsilon 1e9 --epsilon_high 1e9",
                                ("1.25e-4", "2.5e-4", "5e-4")),
         "1 pass": (f"{PASSES} 16", ("5e-4", "1e-3", "2e-3")),
         "lag 0": (f"{LAG} 0 --max_steps 20", ("2.5e-4", "5e-4", "1e-3")),
         "lag 8": (f"{LAG} 8 --max_steps 28", ("2.5e-4", "5e-4", "1e-3")),
         "lag 8, truncate": (f"{LAG} 8 --max_steps 28 --importance_sampling_correction truncate",
                             ("2.5e-4", "5e-4", "1e-3")),
         "PPO": (PPO, ("1.25e-4", "2.5e-4", "5e-4")),
         "PPO, beta 0.1": (f"{PPO} --beta 0.1", ("2.5e-4", "5e-4", "1e-3"))}
CASES = {f"{side}, {rate}": f"{command} --learning_rate {rate}"
         for side, (command, rates) in SIDES.items() for rate in rates}
# The cases with the best rates, which the other seeds judge
JUDGED = ()
END, SAMPLES, PASS = "accuracy at the end", "batches to an accuracy of 0.7", "pass@1"
# The claim -> its experiment, its two sides, and what is compared
AGAIN = {
    "with eight passes, accuracy ends higher with the clip than without a bound":
        ("reuse", "clip, 8 passes", "no bound, 8 passes", END),
    "eight passes need fewer samples than one": ("reuse", "1 pass", "clip, 8 passes", SAMPLES),
    "samples that are 8 batches old (a lag of 8) cost accuracy":
        ("staleness", "lag 0", "lag 8", END),
    "with a lag of 8, weighting the tokens (truncate) gives a higher accuracy than no correction":
        ("staleness", "lag 8, truncate", "lag 8", END),
    "PPO ends with a higher pass@1 if the KL is penalized":
        ("offline", "PPO, beta 0.1", "PPO", PASS)}
EXPERIMENT = Experiment(__file__, seeds=SEEDS, rate="")
EXPERIMENT.runs("runs", {f"{method}, {rate}": f"{command} --learning_rate {rate}"
                         for method, command in METHODS.items() for rate in RATES},
                ["accuracy", "max_log_ratio"], ["pass@1"])
EXPERIMENT.runs("tuning", CASES, ["accuracy"], ["pass@1"], SEEDS[TUNING])
EXPERIMENT.runs("judging", {case: CASES[case] for case in JUDGED}, ["accuracy"], ["pass@1"],
                SEEDS[HELD_OUT])


def score(columns, what, name):
    """Compute what the claim of an experiment compares. -> (S,)"""
    if what == END:
        return columns["accuracy"][:, -module(name).LAST:].mean(axis=1)
    if what == SAMPLES:
        return steps_to_level(columns["accuracy"], module(name).LEVEL, module(name).WINDOW)
    return columns["pass@1"]


def best_rate(tuning, side, what, name):
    """Choose the rate with the best mean of the tuning seeds. -> str"""
    _, rates = SIDES[side]
    means = {rate: score(tuning[f"{side}, {rate}"], what, name).mean() for rate in rates}
    return min(means, key=means.get) if what == SAMPLES else max(means, key=means.get)


def again(tuning, judging):
    """Judge each claim of AGAIN at the best rate of each side. Yields the claims, and tables"""
    verdicts, sides = [], {}
    for text, (name, *pair, what) in AGAIN.items():
        claims = of(module(name).EXPERIMENT.load()[0], Claim)
        [old] = [claim for claim in claims if claim.text == text]
        rates = [best_rate(tuning, side, what, name) for side in pair]
        runs = [judging[f"{side}, {rate}"] for side, rate in zip(pair, rates)]
        values = tuple(score(columns, what, name) for columns in runs)
        ends = [columns["accuracy"].shape[1] for columns in runs]
        effect = ratio(*values, *ends, smallest=0) if what == SAMPLES else {"values": values}
        claim = Claim(f"{text} (each at its best learning rate)", old.source, **effect,
                      at_least=old.at_least)
        yield claim
        verdicts.append([text, old.judged, old.effect, " and ".join(rates), claim.judged,
                         claim.effect])
        for side, rate, columns in zip(pair, rates, runs):
            tried = [f"{one}: {score(tuning[f'{side}, {one}'], what, name).mean():.3f}"
                     for one in SIDES[side][1]]
            values = score(columns, what, name)
            sides[side, what] = [side, what, ", ".join(tried), rate, f"{values.mean():.3f} "
                                 f"({values.min():.3f} to {values.max():.3f})"]
    yield table(["claim", "verdict at the shared rate", "effect", "best rates",
                 "verdict at the best rates", "effect"], verdicts)
    yield table(["side", "measure", "mean of the tuning seeds at each rate", "best rate",
                 "other seeds at this rate"], sides.values())


def page(runs, tuning=None, judging=None):
    tuned = {method: max(RATES, key=lambda rate: runs[f"{method}, {rate}"]["pass@1"][TUNING].mean())
             for method in METHODS}
    results = {method: {name: rows[HELD_OUT] for name, rows in runs[f"{method}, {rate}"].items()}
               for method, rate in tuned.items()}
    score = {method: columns["pass@1"] for method, columns in results.items()}
    distance = {method: columns["max_log_ratio"].mean(axis=1)
                for method, columns in results.items()}
    grpo, gspo = score["GRPO"], score["GSPO, 3e-4 / 4e-4"]
    yield Claim(f"with its paper's clip range, GSPO ends with a higher pass@1 than GRPO {BEST}",
                "GSPO", (gspo, grpo), at_least=GAIN,
                contradicted="With the best of three learning rates for each, GRPO ends with a "
                f"pass@1 of {grpo.mean():.3f}, and GSPO (with its paper's clip range) with "
                f"{gspo.mean():.3f}")
    yield Claim(f"with gspo.py's clip range, GSPO ends with a higher pass@1 than GRPO {BEST}",
                "GSPO", (score["GSPO, 3e-2 / 4e-2"], grpo), at_least=GAIN)
    farther = {}
    for method, clip in CLIPS.items():
        ratios = distance[method] / distance[clip]
        farther[method] = Claim(
            f"{method} lets log pi move farther in a batch than the clip does {BEST}", OURS, ratios,
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
    if tuning:
        yield from again(tuning, judging)
