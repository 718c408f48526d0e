"""Rates: which findings survive if each side gets a learning rate of its own? Three seeds choose
the rate, and seven others judge the method at that rate."""
import numpy

from lab.bench import OURS, UNSCORED, Claim, steps_to
from lab.docs import table
from report import chart

SEEDS = range(20, 30)
TUNING, HELD_OUT = slice(0, 3), slice(3, None)  # places in the list of seeds
GAIN, SHARE = 0.02, 1.1                         # smallest difference, and ratio, that matter
NO_COST = "without a correction, a lag of 1 costs no accuracy"
SCORED = "--eval_steps 1000 --num_eval_problems 256 --num_eval_samples"
FRESH = f"--max_steps 20 {SCORED} 4"
REUSED = f"grpo.py --num_prompts 16 --num_iterations 4 --max_steps 16 {SCORED} 4 --loss_type"
PASSES = f"grpo.py --num_prompts 16 --num_generations 8 {UNSCORED} --max_steps"
LAG = f"examples/lag.py --num_prompts 12 {UNSCORED} --sampler_lag"
PPO = f"ppo.py --reward model --max_steps 30 {SCORED} 4"
DPO = f"dpo.py --max_steps 40 {SCORED} 2"
MANY = f"grpo.py --num_prompts 16 --num_generations 8 --max_steps 6 --num_iterations 32 {SCORED} 4"
STALE = ("examples/lag.py --sampler_lag 8 --num_prompts 12 --max_steps 28 --num_iterations 4 "
         f"{SCORED} 4")
NO_BOUND = "--epsilon 1e9 --epsilon_high 1e9"
EQUAL = "base, problems and other flags"
TUNED = "the learning rate of each side, on three other seeds"
USUAL = "2.5e-4 5e-4 1e-3"                      # half the default, the default, twice the default
SMALLER = "3.125e-5 6.25e-5 1.25e-4 2.5e-4"
# side -> its command, the rates that are tried, and those of them that run on all seeds
SIDES = {
    "GRPO": (f"grpo.py {FRESH}", USUAL, "5e-4"),
    "GSPO, 3e-4 / 4e-4": (f"gspo.py --epsilon 3e-4 --epsilon_high 4e-4 {FRESH}", USUAL, "5e-4"),
    "GSPO, 3e-2 / 4e-2": (f"gspo.py --epsilon 3e-2 --epsilon_high 4e-2 {FRESH}", USUAL, "5e-4"),
    "clip, mean of answers": (f"{REUSED} grpo", USUAL, "2.5e-4"),
    "clip, mean over tokens": (f"{REUSED} dapo", USUAL, "2.5e-4"),
    "SAPO": (f"{REUSED} sapo", USUAL, "2.5e-4"),
    "CISPO": (f"{REUSED} cispo", USUAL, "2.5e-4"),
    "clip, 8 passes": (f"{PASSES} 12 --num_iterations 8", "6.25e-5 1.25e-4 2.5e-4 5e-4 1e-3",
                       "1.25e-4 5e-4"),
    "no bound, 8 passes": (f"{PASSES} 12 --num_iterations 8 {NO_BOUND}",
                           "6.25e-5 1.25e-4 2.5e-4 5e-4", "1.25e-4"),
    "1 pass": (f"{PASSES} 16", "5e-4 1e-3 2e-3 4e-3", "2e-3"),
    "lag 0": (f"{LAG} 0 --max_steps 20", USUAL, "5e-4"),
    "lag 1": (f"{LAG} 1 --max_steps 21", USUAL, "5e-4"),
    "lag 8": (f"{LAG} 8 --max_steps 28", "1.25e-4 2.5e-4 5e-4 1e-3", "2.5e-4"),
    "lag 8, truncate": (f"{LAG} 8 --max_steps 28 --importance_sampling_correction truncate",
                        USUAL, "5e-4"),
    "PPO": (PPO, "3.125e-5 6.25e-5 1.25e-4 2.5e-4 5e-4", "6.25e-5"),
    "PPO, beta 0.1": (f"{PPO} --beta 0.1", "1.25e-4 2.5e-4 5e-4 1e-3", "2.5e-4"),
    "DPO, offline": (DPO, "2.5e-5 5e-5 1e-4 2e-4", "5e-5"),
    "DPO, online": (f"{DPO} --online", "5e-5 1e-4 2e-4 4e-4 8e-4", "4e-4"),
    "clip, 32 passes": (MANY, SMALLER, "6.25e-5"),
    "no bound, 32 passes": (f"{MANY} {NO_BOUND}", f"1.5625e-5 {SMALLER}", "3.125e-5"),
    "clip, stale": (STALE, "6.25e-5 1.25e-4 2.5e-4", "1.25e-4"),
    "no bound, stale": (f"{STALE} {NO_BOUND}", f"1.5625e-5 {SMALLER}", "3.125e-5")}
RUNS, FEWER = {}, {}
for side, (command, tried, judged) in SIDES.items():
    for rate in tried.split():
        RUNS[f"{side}, {rate}"] = f"{command} --learning_rate {rate}"
        if rate not in judged.split():
            FEWER[f"{side}, {rate}"] = SEEDS[TUNING]
METRICS, SCORES = ["accuracy", "max_log_ratio"], ["pass@1"]
LEVEL = 0.7                                     # batches are counted until the accuracy gets there
PASS, BATCHES = "pass@1", f"batches to an accuracy of {LEVEL}"
LAST = {"accuracy in the last 3 batches": 3, "accuracy in the last 4 batches": 4}
END, LAGGED = LAST
# a claim's source; the claim; the two sides; what they are compared by; the finding
JUDGED = (
    ("after PPO", "with eight passes, accuracy ends higher with the clip than without a bound",
     "clip, 8 passes", "no bound, 8 passes", END, "At the best learning rate of each, eight "
     "passes end with an accuracy of {:.2f} with a clip, and {:.2f} without one"),
    ("after PPO", "eight passes need fewer samples than one", "1 pass", "clip, 8 passes", BATCHES,
     ""),
    (OURS, "samples that are 8 batches old (a lag of 8) cost accuracy",
     "lag 0", "lag 8", LAGGED, "At the best learning rate of each, the accuracy ends at {:.2f} "
     "with fresh samples, and at {:.2f} with samples that are 8 batches old"),
    ("after AReaL", "with a lag of 8, weighting the tokens (truncate) gives a higher accuracy than "
     "no correction", "lag 8, truncate", "lag 8", LAGGED, ""),
    ("after InstructGPT", "PPO ends with a higher pass@1 if the KL is penalized", "PPO, beta 0.1",
     "PPO", PASS, "From the same pairs, PPO gets a pass@1 of {:.2f} with a KL penalty, and {:.2f} "
     "without one, each at its best learning rate"),
    (OURS, NO_COST, "lag 1", "lag 0", LAGGED, ""),
    ("Guo and others", "online DPO ends with a higher pass@1 than offline DPO", "DPO, online",
     "DPO, offline", PASS, ""),
    (OURS, "with 32 passes, pass@1 ends higher with the clip", "clip, 32 passes",
     "no bound, 32 passes", PASS, ""),
    (OURS, "with samples that are 8 batches old and four passes, pass@1 ends higher with the clip",
     "clip, stale", "no bound, stale", PASS, ""),
    ("GSPO", "with its paper's clip range, GSPO ends with a higher pass@1 than GRPO",
     "GSPO, 3e-4 / 4e-4", "GRPO", PASS, "With the best of three learning rates for each, GRPO ends "
     "with a pass@1 of {1:.3f}, and GSPO (with its paper's clip range) with {0:.3f}"),
    ("GSPO", "with gspo.py's clip range, GSPO ends with a higher pass@1 than GRPO",
     "GSPO, 3e-2 / 4e-2", "GRPO", PASS, ""))


def score(columns, what):
    """Compute what two sides are compared by. -> (S,)"""
    if what == BATCHES:
        return steps_to(columns["accuracy"], LEVEL, 1)
    return columns[PASS] if what == PASS else columns["accuracy"][:, -LAST[what]:].mean(axis=1)


def best(x, side, what):
    """Choose the best rate of a side on the tuning seeds. -> rate"""
    sign = -1 if what == BATCHES else 1
    return max(SIDES[side][1].split(),
               key=lambda rate: sign * score(x[f"{side}, {rate}"], what)[TUNING].mean())


def page(x):
    sides = {}
    for source, text, *pair, what, finding in JUDGED:
        values = [score(x[f"{side}, {best(x, side, what)}"], what)[HELD_OUT] for side in pair]
        least = SHARE if what == BATCHES else -GAIN if text == NO_COST else GAIN
        yield Claim(f"{text} (at the best rate of each)", source, tuple(values), at_least=least,
                    ratio=what == BATCHES,
                    finding=finding.format(*(one.mean() for one in values)))
        sides |= {(side, what): one for side, one in zip(pair, values)}
    for method, clip in (("SAPO", "clip, mean of answers"), ("CISPO", "clip, mean over tokens")):
        one, other = (x[f"{side}, {best(x, side, PASS)}"] for side in (method, clip))
        moved = [columns["max_log_ratio"][HELD_OUT].mean(axis=1) for columns in (one, other)]
        ratio = numpy.exp(numpy.log(moved[0] / moved[1]).mean())
        yield Claim(f"{method} lets log pi move farther in a batch than the clip does (at the best "
                    "rate of each)", OURS, tuple(moved), at_least=1.2, ratio=True,
                    finding=f"With tuned learning rates, {method} lets log pi move {ratio:.1f} "
                    "times as far in a batch as the clip does")
        sides |= {(method, PASS): one[PASS][HELD_OUT], (clip, PASS): other[PASS][HELD_OUT]}

    rates = {side: SIDES[side][1].split() for side in ("clip, 8 passes", "no bound, 8 passes")}
    lines = {side: numpy.stack([score(x[f"{side}, {rate}"], END)[TUNING] for rate in tried], axis=1)
             for side, tried in rates.items()}
    yield lambda axis: chart.curves(
        axis, lines, {side: list(map(float, tried)) for side, tried in rates.items()},
        xscale="log", xlabel="learning rate", ylabel="accuracy at the end")
    yield table(["side", "judged by", "rates tried", "best rate", "other seeds at it"], [
        [side, what, SIDES[side][1].replace(" ", ", "), best(x, side, what),
         f"{values.mean():.3g} ({values.min():.3g} to {values.max():.3g})".replace("inf", "never")]
        for (side, what), values in sides.items()])
