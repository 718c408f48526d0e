"""Methods: how many samples three scripts need to reach 75% accuracy, each at its own learning
rate"""
from lab.bench import Claim, at_best, steps_to

SEEDS, TUNING = (*range(5), *range(8, 15)), range(5, 8)
LEVEL = 0.75                                    # a base that always thinks answers 69%
PAGE = "rates"
WINDOW = 5                                      # number of batches that accuracy is averaged over
STEPS, SAMPLES_A_STEP = 40, 32 * 8
TIMES = 1.2                                     # as many samples as the other script, at most
FLAGS = f"--eval_steps 1000 --max_steps {STEPS} --num_eval_problems 256"
SIDES = {name: (f"{name} {FLAGS}", 5e-4) for name in ("reinforce.py", "ppo.py", "grpo.py")}
METRICS, SCORES = ["accuracy"], ["greedy", "pass@1"]
NEEDED = f"thousand samples to {LEVEL:.0%} accuracy"
COMPARED = [(side, NEEDED) for side in SIDES]
SOURCES = {"reinforce.py": "after Ahmadian and others", "grpo.py": "after DeepSeekMath"}


def score(columns, what):
    """Count the samples that each run needed; higher is better. -> minus thousands, (S,)"""
    return -(1 + steps_to(columns["accuracy"], LEVEL, WINDOW)) * SAMPLES_A_STEP / 1000


def page(x):
    ends = {side: columns for (side, _), columns in at_best("methods", x).items()}
    samples = {side: -score(columns, NEEDED) for side, columns in ends.items()}
    for one, source in SOURCES.items():
        is_met = (samples[one] <= TIMES * samples["ppo.py"]).astype(float)
        yield Claim(f"with most seeds, {one} needs at most {TIMES} times the samples of ppo.py",
                    source, is_met, share=True, at_least=0.5,
                    sides=(samples[one], samples["ppo.py"]),
                    rates=(ends[one]["rate"], ends["ppo.py"]["rate"]))
