"""Methods: how many samples and seconds each script needs to reach 90% accuracy, or twice
its base's accuracy"""
import numpy

from lab.draw import dots
from lab.experiment import Experiment, numbers, ratio, steps_to_level
from lab.verdict import OURS, Claim

LEVEL = 0.9
WINDOW = 5                                      # number of batches that accuracy is averaged over
SAMPLES_A_STEP = 32 * 8
OVER_TOKENS = "grpo.py, mean over tokens"
METHODS = {"reinforce.py": "reinforce.py", "ppo.py": "ppo.py", "grpo.py": "grpo.py",
           OVER_TOKENS: "grpo.py --loss_type dapo", "gspo.py": "gspo.py",
           "dpo.py, online": "dpo.py --online"}
FLAGS = {"arithmetic": "--max_steps 40 --num_eval_problems 256",
         "countdown": "--task countdown --max_steps 32 --num_eval_samples 4"}
# The names of METHODS that read differently in a sentence
NAMES = {"dpo.py, online": "dpo.py --online", OVER_TOKENS: "grpo.py with a mean over tokens"}
# Comparisons of two methods on each task, with the source of the claim
RATIOS = {
    "arithmetic": (("reinforce.py", "no more samples", "ppo.py", "after Ahmadian and others"),
                   ("grpo.py", "more samples", "gspo.py", "after GSPO"),
                   ("dpo.py, online", "no more samples", "ppo.py", "after Guo and others"),
                   ("grpo.py", "more samples", "reinforce.py", OURS)),
    "countdown": (("grpo.py", "no more samples", "ppo.py", "after DeepSeekMath"),
                  ("grpo.py", "more samples", "gspo.py", "after GSPO"),
                  ("ppo.py", "more seconds", "grpo.py", "after DeepSeekMath"),
                  ("reinforce.py", "no more samples", "grpo.py", OURS),
                  ("grpo.py", "more samples", OVER_TOKENS, OURS))}
EXPERIMENT = Experiment(__file__, seeds=range(5), rate="5e-4, but 1e-4 for dpo.py")
for task, flags in FLAGS.items():
    commands = {name: f"{command} --eval_steps 1000 {flags}"
                for name, command in METHODS.items()}
    EXPERIMENT.runs(task, commands, ["accuracy", "step_time"], ["greedy", "pass@1"])


def steps_needed(task, runs):
    """Count the batches that each run needed to reach the level. -> {name: (S,)}"""
    accuracy = {name: columns["accuracy"] for name, columns in runs.items()}
    if task == "countdown":                 # twice the accuracy of the seed's base becomes LEVEL
        base = numpy.mean([rows[:, :1] for rows in accuracy.values()], axis=0)          # (S, 1)
        accuracy = {name: LEVEL * rows / (2 * base) for name, rows in accuracy.items()}
    return {name: 1 + steps_to_level(rows, LEVEL, WINDOW) for name, rows in accuracy.items()}


def in_words(steps, last):
    """Write the mean number of samples of runs that have `last` steps. -> str"""
    bound = "" if numpy.isfinite(steps).all() else "more than "
    return f"{bound}{SAMPLES_A_STEP * numpy.minimum(steps, last).mean():.0f}"


def page(arithmetic, countdown):
    runs = {"arithmetic": arithmetic, "countdown": countdown}
    goals = {"arithmetic": f"{LEVEL:.0%} accuracy", "countdown": "twice the base's accuracy"}
    for task, results in runs.items():
        steps = steps_needed(task, results)
        last = results["grpo.py"]["accuracy"].shape[1]
        a_step = {"samples": dict.fromkeys(results, SAMPLES_A_STEP),
                  "seconds": {name: columns["step_time"].mean(axis=1)
                              for name, columns in results.items()}}
        needed = {unit: {name: steps[name] * each[name] for name in steps}
                  for unit, each in a_step.items()}
        for one, more, other, source in RATIOS[task]:
            unit = more.split()[-1]
            said = ""
            if one == "reinforce.py":
                mean, others_mean = (in_words(steps[name], last) for name in (one, other))
                parts = [f"{one} needs {mean} samples to reach {goals[task]}",
                         f"{other} needs {others_mean}",
                         *(f"{NAMES.get(name, name)} never reaches it"
                           for name, values in steps.items() if numpy.isinf(values).all())]
                said = f"On {task}, {', '.join(parts[:-1])}, and {parts[-1]}"
            is_smallest = min(steps[one].min(), steps[other].min()) <= WINDOW
            effect = ratio(needed[unit][one], needed[unit][other], last * a_step[unit][one],
                           last * a_step[unit][other], numpy.inf if is_smallest else 0)
            yield Claim(f"on {task}, {NAMES.get(one, one)} needs {more} than "
                        f"{NAMES.get(other, other)}", source, **effect, said=said,
                        **{"at_most" if more.startswith("no") else "at_least": 1.2})
        if task == "arithmetic":
            yield dots(needed["samples"], form=".0f", xlim=(0, None),
                       level=(SAMPLES_A_STEP * last, "end of the run"),
                       xlabel=f"samples until a run reaches {goals[task]}; a dot for each seed")
        rows = {name: {f"thousand samples to {goals[task]}": needed["samples"][name] / 1000,
                       f"seconds to {goals[task]}": needed["seconds"][name],
                       "greedy accuracy, held out": columns["greedy"],
                       "pass@1, held out": columns["pass@1"]}
                for name, columns in results.items()}
        yield numbers(rows, form=".2f", by=f"script, on {task}")
