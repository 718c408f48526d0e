"""Rates: which findings survive if each side gets a learning rate of its own? Two seeds choose
the rate, and five others judge the method at that rate."""
import numpy

from lab.bench import OURS, UNSCORED, Claim, at_best, best_rates, steps_to, tune
from report import chart

SEEDS, TUNING = range(5), range(5, 7)
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
TUNED = "the learning rate of each side, on two other seeds"
# Begin with the best rates of an earlier measurement, with other seeds
SIDES = {
    "GRPO": (f"grpo.py {FRESH}", 5e-4),
    "GSPO, 3e-4 / 4e-4": (f"gspo.py --epsilon 3e-4 --epsilon_high 4e-4 {FRESH}", 5e-4),
    "GSPO, 3e-2 / 4e-2": (f"gspo.py --epsilon 3e-2 --epsilon_high 4e-2 {FRESH}", 5e-4),
    "clip, mean of answers": (f"{REUSED} grpo", 2.5e-4),
    "clip, mean over tokens": (f"{REUSED} dapo", 2.5e-4),
    "SAPO": (f"{REUSED} sapo", 2.5e-4),
    "CISPO": (f"{REUSED} cispo", 2.5e-4),
    "clip, 8 passes": (f"{PASSES} 12 --num_iterations 8", 2.5e-4),
    "no bound, 8 passes": (f"{PASSES} 12 --num_iterations 8 {NO_BOUND}", 1.25e-4),
    "1 pass": (f"{PASSES} 16", 2e-3),
    "lag 0": (f"{LAG} 0 --max_steps 20", 5e-4),
    "lag 1": (f"{LAG} 1 --max_steps 21", 5e-4),
    "lag 8": (f"{LAG} 8 --max_steps 28", 2.5e-4),
    "lag 8, truncate": (f"{LAG} 8 --max_steps 28 --importance_sampling_correction truncate", 5e-4),
    "PPO": (PPO, 6.25e-5),
    "PPO, beta 0.1": (f"{PPO} --beta 0.1", 2.5e-4),
    "DPO, offline": (DPO, 5e-5),
    "DPO, online": (f"{DPO} --online", 4e-4),
    "clip, 32 passes": (MANY, 6.25e-5),
    "no bound, 32 passes": (f"{MANY} {NO_BOUND}", 3.125e-5),
    "clip, stale": (STALE, 1.25e-4),
    "no bound, stale": (f"{STALE} {NO_BOUND}", 3.125e-5)}
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
    (OURS, "with a lag of 8 and four passes, pass@1 ends higher with the clip",
     "clip, stale", "no bound, stale", PASS, ""),
    ("GSPO", "with its paper's clip range, GSPO ends with a higher pass@1 than GRPO",
     "GSPO, 3e-4 / 4e-4", "GRPO", PASS, "At the best learning rate of each, GRPO ends "
     "with a pass@1 of {1:.3f}, and GSPO (with its paper's clip range) with {0:.3f}"),
    ("GSPO", "with gspo.py's clip range, GSPO ends with a higher pass@1 than GRPO",
     "GSPO, 3e-2 / 4e-2", "GRPO", PASS, ""))


MOVED = (("SAPO", "clip, mean of answers"), ("CISPO", "clip, mean over tokens"))
COMPARED = list(dict.fromkeys(
    [(side, what) for _, _, *pair, what, _ in JUDGED for side in pair]
    + [(side, PASS) for pair in MOVED for side in pair]))


def score(columns, what):
    """Compute what two sides are compared by; higher is better. -> (S,)"""
    if what == BATCHES:
        return -steps_to(columns["accuracy"], LEVEL, 1)
    return columns[PASS] if what == PASS else columns["accuracy"][:, -LAST[what]:].mean(axis=1)


def page(x):
    ends, best = at_best("rates", x), best_rates("rates", x)
    for source, text, *pair, what, finding in JUDGED:
        values = [abs(score(ends[side, what], what)) for side in pair]
        least = SHARE if what == BATCHES else -GAIN if text == NO_COST else GAIN
        yield Claim(text, source, tuple(values), at_least=least, ratio=what == BATCHES,
                    finding=finding.format(*(one.mean() for one in values)),
                    rates=tuple(best[side, what] for side in pair))
    for method, clip in MOVED:
        moved = [ends[side, PASS]["max_log_ratio"].mean(axis=1) for side in (method, clip)]
        ratio = numpy.exp(numpy.log(moved[0] / moved[1]).mean())
        yield Claim(f"{method} lets log pi move farther in a batch than the clip does", OURS,
                    tuple(moved), at_least=1.2, ratio=True,
                    rates=(best[method, PASS], best[clip, PASS]),
                    finding=f"With tuned learning rates, {method} lets log pi move {ratio:.1f} "
                    "times as far in a batch as the clip does")
    tried = {side: tune("rates", x, side, END)[0]
             for side in ("clip, 8 passes", "no bound, 8 passes")}
    lines = {side: [score(x[case], END)[:len(TUNING)] for case in cases]
             for side, cases in tried.items()}
    rates = {side: [float(case.split(", ")[-1]) for case in cases] for side, cases in tried.items()}

    def draw(axis):
        chart.curves(axis, {side: numpy.stack(rows, axis=1) for side, rows in lines.items()}, rates,
                     xscale="log", ylabel="accuracy at the end",
                     xlabel="learning rate (the two seeds that tune it)")
        ticks = sorted({rate for row in rates.values() for rate in row})
        axis.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
        axis.minorticks_off()
    yield draw
