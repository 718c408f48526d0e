"""Methods: how many samples and seconds each script needs to reach 90% accuracy, or twice
its base's accuracy

All scripts run with their defaults, and from the same bases: on arithmetic until their accuracy is
90%, and on countdown until it is twice the accuracy of the base. docs/lab/methods.md explains the
claims and the outcome.
"""
import numpy

from lab.draw import dots
from lab.experiment import Experiment, numbers, ratio, steps_to_level
from lab.verdict import OURS, Claim

LEVEL = 0.9
WINDOW = 5                                      # number of batches that accuracy is averaged over
SAMPLES_A_STEP = 32 * 8
MORE = 1.2                                      # smallest ratio that counts as more
OVER_TOKENS = "grpo.py, mean over tokens"
METHODS = {"reinforce.py": "reinforce.py", "ppo.py": "ppo.py", "grpo.py": "grpo.py",
           OVER_TOKENS: "grpo.py --loss_type dapo", "gspo.py": "gspo.py",
           "dpo.py, online": "dpo.py --online"}
FLAGS = {"arithmetic": "--max_steps 40 --num_eval_problems 256",
         "countdown": "--task countdown --max_steps 32 --num_eval_samples 4"}
# The names of METHODS that read differently in a sentence
NAMES = {"dpo.py, online": "dpo.py --online", OVER_TOKENS: "grpo.py with a mean over tokens"}
# Comparisons of two methods: task, what is compared, the methods, source and range of the claim
RATIOS = (
    ("arithmetic", "samples", "reinforce.py", "ppo.py", "after Ahmadian and others",
     {"at_most": MORE}),
    ("arithmetic", "samples", "grpo.py", "gspo.py", "after GSPO", {"at_least": MORE}),
    ("arithmetic", "samples", "dpo.py, online", "ppo.py", "after Guo and others",
     {"at_most": MORE}),
    ("arithmetic", "samples", "grpo.py", "reinforce.py", OURS, {"at_least": MORE}),
    ("countdown", "samples", "grpo.py", "ppo.py", "after DeepSeekMath", {"at_most": MORE}),
    ("countdown", "samples", "grpo.py", "gspo.py", "after GSPO", {"at_least": MORE}),
    ("countdown", "seconds", "ppo.py", "grpo.py", "after DeepSeekMath", {"at_least": MORE}),
    ("countdown", "samples", "reinforce.py", "grpo.py", OURS, {"at_most": MORE}),
    ("countdown", "samples", "grpo.py", OVER_TOKENS, OURS, {"at_least": MORE}))
EXPERIMENT = Experiment(__file__, seeds=range(5), rate="5e-4, but 1e-4 for dpo.py")
for task, flags in FLAGS.items():
    commands = {name: f"{command} --eval_steps 1000 {flags}"
                for name, command in METHODS.items()}
    EXPERIMENT.runs(task, commands, ["accuracy", "step_time"], ["greedy", "pass@1"])


def cost(task, runs):
    """Compute what each seed of each method needed to reach the level, and what its whole run took.
    smallest: inf if a seed needed as few steps as can be counted, else 0.
    -> costs {"samples": {name: ((S,), (S,))}, "seconds": {..}}, smallest {name: float}"""
    base = numpy.mean([columns["accuracy"][:, 0] for columns in runs.values()], axis=0)
    costs = {"samples": {}, "seconds": {}}
    smallest = {}
    for name, columns in runs.items():
        accuracy = columns["accuracy"]
        if task == "countdown":             # twice the accuracy of the seed's base becomes LEVEL
            accuracy = LEVEL * accuracy / (2 * base[:, None])
        seconds_a_step = columns["step_time"].mean(axis=1)
        steps = 1 + steps_to_level(accuracy, LEVEL, WINDOW)
        smallest[name] = numpy.inf if steps.min() <= WINDOW else 0
        for unit, a_step in (("samples", numpy.full_like(seconds_a_step, SAMPLES_A_STEP)),
                             ("seconds", seconds_a_step)):
            costs[unit][name] = (steps * a_step, accuracy.shape[1] * a_step)
    return costs, smallest


def in_words(values, end):
    """Write the mean of what the seeds needed, where `end` is what their whole runs took. -> str"""
    bound = "" if numpy.isfinite(values).all() else "more than "
    return f"{bound}{numpy.minimum(values, end).mean():.0f}"


def page(arithmetic, countdown):
    runs = {"arithmetic": arithmetic, "countdown": countdown}
    goals = {"arithmetic": f"{LEVEL:.0%} accuracy", "countdown": "twice the base's accuracy"}
    titles = {}
    for task, results in runs.items():
        needed, smallest = cost(task, results)
        samples = {name: values for name, (values, _) in needed["samples"].items()}
        for place, unit, one, other, source, region in RATIOS:
            if place != task:
                continue
            (values, end), (others, other_end) = needed[unit][one], needed[unit][other]
            more = "no more" if "at_most" in region else "more"
            title = ""
            if one == "reinforce.py":
                mean = {name: in_words(*needed["samples"][name]) for name in (one, other)}
                parts = [f"{one} needs {mean[one]} samples to reach {goals[task]}",
                         f"{other} needs {mean[other]}",
                         *(f"{NAMES.get(name, name)} never reaches it"
                           for name, values in samples.items() if numpy.isinf(values).all())]
                title = titles[task] = f"On {task}, {', '.join(parts[:-1])}, and {parts[-1]}"
            yield Claim(f"on {task}, {NAMES.get(one, one)} needs {more} {unit} than "
                        f"{NAMES.get(other, other)}", source,
                        **ratio(values, others, end, other_end,
                                max(smallest[one], smallest[other])), **region, said=title)
        if task == "arithmetic":
            end = SAMPLES_A_STEP * results["grpo.py"]["accuracy"].shape[1]
            yield dots(samples, titles[task], form=".0f", xlim=(0, None),
                       level=(end, "end of the run"),
                       xlabel=f"samples until a run reaches {goals[task]}; a dot for each seed")
        rows = {name: {f"thousand samples to {goals[task]}": samples[name] / 1000,
                       f"seconds to {goals[task]}": needed["seconds"][name][0],
                       "greedy accuracy, held out": columns["greedy"],
                       "pass@1, held out": columns["pass@1"]}
                for name, columns in results.items()}
        yield numbers(rows, form=".2f", by=f"script, on {task}")
