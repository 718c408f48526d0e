"""Methods: how many samples and seconds each script needs to reach 90% accuracy, each at its own
learning rate"""
from lab.bench import OURS, Claim, at_best, best_rates, numbers, steps_to
from report import chart

SEEDS, TUNING = range(5), range(5, 8)
LEVEL = 0.9
WINDOW = 5                                      # number of batches that accuracy is averaged over
STEPS, SAMPLES_A_STEP = 36, 32 * 8
EQUAL = "base, problems and other flags"
TUNED = "the learning rate of each script, on three other seeds"
FLAGS = f"--eval_steps 1000 --max_steps {STEPS} --num_eval_problems 256"
SIDES = {"reinforce.py": (f"reinforce.py {FLAGS}", 1e-3), "ppo.py": (f"ppo.py {FLAGS}", 1e-3),
         "grpo.py": (f"grpo.py {FLAGS}", 1e-3), "gspo.py": (f"gspo.py {FLAGS}", 1e-3),
         "dpo.py --online": (f"dpo.py --online {FLAGS}", 4e-4)}
METRICS, SCORES = ["accuracy", "step_time"], ["greedy", "pass@1"]
NEEDED = f"thousand samples to {LEVEL:.0%} accuracy"
COMPARED = [(side, NEEDED) for side in SIDES]
RATIOS = (("reinforce.py", "no more samples", "ppo.py", "after Ahmadian and others"),
          ("grpo.py", "no more samples", "ppo.py", "after DeepSeekMath"),
          ("ppo.py", "more seconds", "grpo.py", "after DeepSeekMath"),
          ("dpo.py --online", "no more samples", "ppo.py", "after Guo and others"),
          ("grpo.py", "more samples", "reinforce.py", OURS))


def score(columns, what):
    """Count the samples that each run needed; higher is better. -> minus thousands, (S,)"""
    return -(1 + steps_to(columns["accuracy"], LEVEL, WINDOW)) * SAMPLES_A_STEP / 1000


def page(x):
    ends = {side: columns for (side, _), columns in at_best("methods", x).items()}
    samples = {side: -score(columns, NEEDED) for side, columns in ends.items()}
    seconds = {side: samples[side] * 1000 / SAMPLES_A_STEP * columns["step_time"].mean(axis=1)
               for side, columns in ends.items()}
    for one, more, other, source in RATIOS:
        units = seconds if more.endswith("seconds") else samples
        finding = (f"At the best learning rate of each, {one} needs {1000 * units[one].mean():.0f} "
                   f"samples to reach {LEVEL:.0%} accuracy, and {other} needs "
                   f"{1000 * units[other].mean():.0f}") * (one == "reinforce.py")
        yield Claim(f"{one} needs {more} than {other}", source, (units[one], units[other]),
                    ratio=True, finding=finding,
                    **{"at_most" if more.startswith("no") else "at_least": 1.2})
    best = best_rates("methods", x)
    yield numbers({side: {
        "best rate": best[side, NEEDED], NEEDED: samples[side],
        f"seconds to {LEVEL:.0%} accuracy": seconds[side],
        "greedy accuracy, held out": columns["greedy"], "pass@1, held out": columns["pass@1"]}
        for side, columns in ends.items()}, "script", ".2f")
    yield lambda axis: chart.dots(axis, samples, STEPS * SAMPLES_A_STEP / 1000, xlabel=NEEDED)
