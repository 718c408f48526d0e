"""Methods: the samples and seconds to be right 90 times in 100, or twice as often as the base

All scripts with their defaults, on arithmetic and on countdown, from the same bases.
docs/lab/methods.md says more.
"""
import numpy

from lab.draw import dots
from lab.experiment import Experiment, numbers, ratio, steps_to_level
from lab.verdict import OURS, Claim

LEVEL = 0.9
WINDOW = 5                                      # batches
SAMPLES_A_STEP = 32 * 8
MORE = 1.2                                      # times as many, what counts as more
OVER_TOKENS = "grpo.py, mean over tokens"
METHODS = {"reinforce.py": "reinforce.py", "ppo.py": "ppo.py", "grpo.py": "grpo.py",
           OVER_TOKENS: "grpo.py --loss_type dapo", "gspo.py": "gspo.py",
           "dpo.py, online": "dpo.py --online"}
FLAGS = {"arithmetic": "--max_steps 40 --num_eval_problems 256",
         "countdown": "--task countdown --max_steps 32 --num_eval_samples 4"}
# Of one method beside another: the task, who says so, and the region.
RATIOS = (
    ("arithmetic", "samples", "reinforce.py", "ppo.py", "Ahmadian and others", {"at_most": MORE}),
    ("arithmetic", "samples", "grpo.py", "gspo.py", "GSPO", {"at_least": MORE}),
    ("arithmetic", "samples", "dpo.py, online", "ppo.py", "Guo and others", {"at_most": MORE}),
    ("arithmetic", "samples", "grpo.py", "reinforce.py", OURS, {"at_least": MORE}),
    ("countdown", "samples", "grpo.py", "ppo.py", "DeepSeekMath", {"at_most": MORE}),
    ("countdown", "samples", "grpo.py", "gspo.py", "GSPO", {"at_least": MORE}),
    ("countdown", "seconds", "ppo.py", "grpo.py", "DeepSeekMath", {"at_least": MORE}),
    ("countdown", "samples", "reinforce.py", "grpo.py", OURS, {"at_most": MORE}),
    ("countdown", "samples", "grpo.py", OVER_TOKENS, OURS, {"at_least": MORE}))
EXPERIMENT = Experiment(__file__, seeds=range(5))
for task, flags in FLAGS.items():
    commands = {name: f"{command} --stop_at 2 --eval_steps 1000 {flags}"
                for name, command in METHODS.items()}
    EXPERIMENT.runs(task, commands, ["accuracy", "step_time"], ["greedy", "pass@1", "think_share"])


def cost(task, runs):
    """What each seed of each run needed, and what it had in all; and of each run inf, if a seed
    needed as few steps as can be counted, else 0. -> {"samples": {name: ((S,), (S,))},
    "seconds": {..}}, {name: float}"""
    base = numpy.mean([found["accuracy"][:, 0] for found in runs.values()], axis=0)
    found = {"samples": {}, "seconds": {}}
    smallest = {}
    for name, columns in runs.items():
        accuracy = columns["accuracy"]
        if task == "countdown":
            accuracy = LEVEL * accuracy / (2 * base[:, None])       # twice that of the seed's base
        a_step = columns["step_time"].mean(axis=1)
        steps = 1 + steps_to_level(accuracy, LEVEL, WINDOW)
        smallest[name] = numpy.inf if steps.min() <= WINDOW else 0
        for unit, each in (("samples", numpy.full_like(a_step, SAMPLES_A_STEP)),
                           ("seconds", a_step)):
            found[unit][name] = (steps * each, accuracy.shape[1] * each)
    return found, smallest


def in_words(values, end):
    """The mean of what each seed needed, of the `end` that it had. -> str"""
    bound = "" if numpy.isfinite(values).all() else "more than "
    return f"{bound}{numpy.minimum(values, end).mean():.0f}"


def page(arithmetic, countdown):
    runs = {"arithmetic": arithmetic, "countdown": countdown}
    goals = {"arithmetic": f"{LEVEL:.0%} accuracy", "countdown": "twice the base's accuracy"}
    for task, found in runs.items():
        needed, smallest = cost(task, found)
        samples = {name: values for name, (values, _) in needed["samples"].items()}
        mean = {name: in_words(*pair) for name, pair in needed["samples"].items()}
        said = (f"{task.capitalize()}: {goals[task]} takes reinforce.py {mean['reinforce.py']} "
                f"samples, grpo.py {mean['grpo.py']}, gspo.py {mean['gspo.py']}, ppo.py "
                f"{mean['ppo.py']}")
        for place, unit, one, other, source, region in RATIOS:
            if place != task:
                continue
            (values, end), (others, other_end) = needed[unit][one], needed[unit][other]
            more = "no more" if "at_most" in region else "more"
            yield Claim(f"{task}: {one} needs {more} {unit} than {other}", source,
                        **ratio(values, others, end, other_end,
                                max(smallest[one], smallest[other])), **region,
                        said=said * (one == "reinforce.py"))
        if task == "arithmetic":
            end = SAMPLES_A_STEP * found["grpo.py"]["accuracy"].shape[1]
            yield dots(samples, said, form=".0f", xlim=(0, None),
                       level=(end, "runs end; an arrow: never"),
                       xlabel=f"completions sampled until {goals[task]}; a dot for each seed")
        rows = {name: {f"thousand samples to {goals[task]}": samples[name] / 1000,
                       "seconds": needed["seconds"][name][0], "greedy, held out": columns["greedy"],
                       "pass@1": columns["pass@1"], "thinks": columns["think_share"]}
                for name, columns in found.items()}
        yield numbers(rows, form=".2f", by=task)
