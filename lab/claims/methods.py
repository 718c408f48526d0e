"""Methods: how many samples and seconds each script needs to reach 90% accuracy, or twice
its base's accuracy"""
import numpy

from lab.bench import OURS, Claim, numbers, steps_to
from report import chart

SEEDS = range(5)
LEVEL = 0.9
WINDOW = 5                                      # number of batches that accuracy is averaged over
SAMPLES_A_STEP = 32 * 8
OVER_TOKENS = "grpo.py with a mean over tokens"
METHODS = {"reinforce.py": "reinforce.py", "ppo.py": "ppo.py", "grpo.py": "grpo.py",
           OVER_TOKENS: "grpo.py --loss_type dapo", "gspo.py": "gspo.py",
           "dpo.py --online": "dpo.py --online"}
GOALS = {"arithmetic": f"{LEVEL:.0%} accuracy", "countdown": "twice the base's accuracy"}
FLAGS = {"arithmetic": "--max_steps 40 --num_eval_problems 256",
         "countdown": "--task countdown --max_steps 32 --num_eval_samples 4"}
TUNED = "nothing; the learning rate is 5e-4, and 1e-4 for dpo.py"
RUNS = {f"{task}, {name}": f"{command} --eval_steps 1000 {flags}"
        for task, flags in FLAGS.items() for name, command in METHODS.items()}
METRICS, SCORES = ["accuracy", "step_time"], ["greedy", "pass@1"]
# Comparisons of two methods on each task, with the source of the claim
RATIOS = {
    "arithmetic": (("reinforce.py", "no more samples", "ppo.py", "after Ahmadian and others"),
                   ("dpo.py --online", "no more samples", "ppo.py", "after Guo and others"),
                   ("grpo.py", "more samples", "reinforce.py", OURS)),
    "countdown": (("grpo.py", "no more samples", "ppo.py", "after DeepSeekMath"),
                  ("ppo.py", "more seconds", "grpo.py", "after DeepSeekMath"),
                  ("reinforce.py", "no more samples", "grpo.py", OURS),
                  ("grpo.py", "more samples", OVER_TOKENS, OURS))}


def needed(x, task):
    """Count what each run needed to reach the goal of a task. -> {unit: {name: (S,)}}"""
    accuracy, seconds = (numpy.array([x[f"{task}, {name}"][column] for name in METHODS])
                         for column in METRICS)                                 # (M, S, T)
    base = accuracy[..., :1].mean(axis=0)                                       # (S, 1)
    level = LEVEL if task == "arithmetic" else 2 * base
    steps = numpy.array([1 + steps_to(rows / level, 1, WINDOW) for rows in accuracy])   # (M, S)
    return {"samples": dict(zip(METHODS, SAMPLES_A_STEP * steps)),
            "seconds": dict(zip(METHODS, seconds.mean(axis=-1) * steps))}


def page(x):
    for task, goal in GOALS.items():
        taken = needed(x, task)
        for one, more, other, source in RATIOS[task]:
            units = taken[more.split()[-1]]
            finding = (f"With one rate for all, on {task}, {one} needs "
                       f"{units[one].mean():.0f} samples to reach {goal}, and {other} needs "
                       f"{units[other].mean():.0f}")
            yield Claim(f"on {task}, {one} needs {more} than {other}", source,
                        (units[one], units[other]), ratio=True,
                        finding=finding * (one == "reinforce.py"),
                        **{"at_most" if more.startswith("no") else "at_least": 1.2})
        yield numbers({name: {
            f"thousand samples to {goal}": taken["samples"][name] / 1000,
            f"seconds to {goal}": taken["seconds"][name],
            "greedy accuracy, held out": x[f"{task}, {name}"]["greedy"],
            "pass@1, held out": x[f"{task}, {name}"]["pass@1"]}
            for name in METHODS}, f"script, on {task}", ".2f")
    thousands = {name: samples / 1000
                 for name, samples in needed(x, "arithmetic")["samples"].items()}
    yield lambda axis: chart.dots(axis, thousands, 40 * SAMPLES_A_STEP / 1000,
                                  xlabel=f"thousand samples to {GOALS['arithmetic']}")
