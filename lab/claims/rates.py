"""Rates: which findings survive if each side gets a learning rate of its own? Four seeds choose
the rate, and twelve others judge the method at that rate."""
from lab.bench import OURS, UNSCORED, Claim, at_best, numbers
from report import chart

SEEDS, TUNING = (*range(5), *range(8, 15)), (5, 6, 7, 15)
GAIN = 0.02                                     # smallest difference that matters
SCORED = "--eval_steps 1000 --num_eval_problems 256 --num_eval_samples"
FRESH = f"--max_steps 20 {SCORED} 4"
PASSES = (f"grpo.py --num_prompts 16 --num_generations 8 {UNSCORED} --max_steps 12 "
          "--num_iterations 8")
LAG = f"examples/lag.py --num_prompts 12 {UNSCORED} --sampler_lag"
PPO = f"ppo.py --reward model --max_steps 30 {SCORED} 4"
DPO = f"dpo.py --max_steps 40 {SCORED} 2"
MANY = f"grpo.py --num_prompts 16 --num_generations 8 --max_steps 6 --num_iterations 32 {SCORED} 4"
NO_BOUND = "--epsilon 1e9 --epsilon_high 1e9"
# Begin with the best rates of an earlier measurement, with other seeds
SIDES = {
    "GRPO": (f"grpo.py {FRESH}", 5e-4),
    "GSPO, 3e-4 / 4e-4": (f"gspo.py --epsilon 3e-4 --epsilon_high 4e-4 {FRESH}", 5e-4),
    "clip, 8 passes": (PASSES, 2.5e-4),
    "no bound, 8 passes": (f"{PASSES} {NO_BOUND}", 1.25e-4),
    "lag 0": (f"{LAG} 0 --max_steps 20", 5e-4),
    "lag 8": (f"{LAG} 8 --max_steps 28", 2.5e-4),
    "PPO": (PPO, 6.25e-5),
    "PPO, beta 0.1": (f"{PPO} --beta 0.1", 2.5e-4),
    "DPO, offline": (DPO, 5e-5),
    "DPO, online": (f"{DPO} --online", 4e-4),
    "clip, 32 passes": (MANY, 6.25e-5),
    "no bound, 32 passes": (f"{MANY} {NO_BOUND}", 3.125e-5)}
METRICS, SCORES = ["accuracy"], ["pass@1"]
PASS = "pass@1"
LAST = {"accuracy in the last 3 batches": 3, "accuracy in the last 4 batches": 4}
END, LAGGED = LAST
# a claim's source; the claim; the two sides; what they are compared by
JUDGED = (
    ("after PPO", "with eight passes, accuracy ends higher with the clip than without a bound",
     "clip, 8 passes", "no bound, 8 passes", END),
    (OURS, "with 32 passes, pass@1 ends higher with the clip", "clip, 32 passes",
     "no bound, 32 passes", PASS),
    (OURS, "samples that are 8 batches old (a lag of 8) cost accuracy", "lag 0", "lag 8", LAGGED),
    ("after InstructGPT", "PPO ends with a higher pass@1 if the KL is penalized", "PPO, beta 0.1",
     "PPO", PASS),
    ("Guo and others", "online DPO ends with a higher pass@1 than offline DPO", "DPO, online",
     "DPO, offline", PASS),
    ("GSPO", "with its paper's clip range, GSPO ends with a higher pass@1 than GRPO",
     "GSPO, 3e-4 / 4e-4", "GRPO", PASS))
COMPARED = [(side, what) for _, _, *pair, what in JUDGED for side in pair]


def score(columns, what):
    """Compute what two sides are compared by; higher is better. -> (S,)"""
    return columns[PASS] if what == PASS else columns["accuracy"][:, -LAST[what]:].mean(axis=1)


def page(x):
    best = at_best("rates", x)
    clip, free, *_, gspo, plain = (score(best[side, what], what).mean() for side, what in COMPARED)
    yield (f"At the best learning rate of each, eight passes end with an accuracy of {clip:.2f} "
           f"with a clip, and {free:.2f} without one. GSPO is not ahead of GRPO: {gspo:.3f} "
           f"against {plain:.3f} after as many samples.")
    rows = {}
    for source, text, *pair, what in JUDGED:
        values = tuple(score(best[side, what], what) for side in pair)
        yield Claim(text, source, values, at_least=GAIN,
                    rates=tuple(best[side, what]["rate"] for side in pair))
        rows |= {side: {"learning rate": best[side, what]["rate"], "at the end": value}
                 for side, value in zip(pair, values)}
    yield numbers(rows, "accuracy or pass@1", ".2f")
    ends = {side: score(best[side, what], what) for side, what in COMPARED}
    yield lambda axis: chart.dots(axis, ends, xlim=(0, 1.03),
                                  xlabel="accuracy or pass@1 at the end, at the best rate of each")
