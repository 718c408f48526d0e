"""Methods: the samples and seconds to be right 95 times in 100, or twice as often as the base

Claim. REINFORCE does as well as PPO or better, without a critic (Ahmadian and others, 2402.14740).
GRPO does without the critic, too, at a fraction of the cost (DeepSeekMath, 2402.03300). DAPO needs
half the steps of GRPO (2503.14476); of its parts, we take the mean over tokens. GSPO gets more out
of the same samples than GRPO (2507.18071). DPO on pairs of the policy itself keeps up with PPO on
comparisons (Guo and others, 2402.04792).

Prediction. On arithmetic, where an answer has 33 tokens at most, REINFORCE needs half the samples
of GRPO (make compare, known when this was written). On countdown searches have 100 tokens and
guesses ten, and GRPO weighs each token of a guess ten times as much, as it divides by the length.
So REINFORCE and the mean over tokens need half of GRPO's samples or less, and GSPO as many as GRPO,
for it divides, too. PPO needs as many as REINFORCE and three times the seconds, as it has two
networks and four minibatches. DPO online needs most samples: it learns from one pair of each group.

Method. Every script with its defaults, from one base, on arithmetic, 40 steps, and countdown, 32. A
run is there when five batches in a row, whose problems are new, are right so often on average: on
arithmetic 95 times in 100, on countdown twice as often as the base, which is what the first batches
are. Held-out ones (pass@1) are harder on countdown. One that never gets there counts as half as
many steps again as it has. Seconds are those of the steps, without evaluations. DAPO's half of the
steps is said of all its parts, and next to another baseline; what we claim of one part is ours. (At
first arithmetic was to be judged by greedy answers, every second step. But these are 95% right
after six steps with all scripts but dpo.py, which ranks none. No verdict differs for it.)

Outcome. REINFORCE needs fewest samples in the mean, on countdown hardly fewer than GRPO. Predicted
wrongly: PPO needs more than REINFORCE, on countdown twice as many, and there five times GRPO's
seconds; GRPO needs 1.4 times REINFORCE's samples on arithmetic, not twice; a mean over tokens does
not halve them; GSPO needs more than GRPO on countdown, not as many. DPO online needs most: on
arithmetic greedy answers are right, but one in four samples is not, even after 40 steps.
"""
import numpy

from lab.draw import dots
from lab.experiment import Experiment, numbers
from lab.verdict import CONTRADICTED, OURS, SHOWN, UNDECIDED, Claim

AHMADIAN = "[Ahmadian and others](https://arxiv.org/abs/2402.14740)"
DEEPSEEK = "[DeepSeekMath](https://arxiv.org/abs/2402.03300)"
GSPO = "[GSPO](https://arxiv.org/abs/2507.18071)"
GUO = "[Guo and others](https://arxiv.org/abs/2402.04792)"
LEVEL = 0.95
WINDOW = 5                                      # batches
SAMPLES_A_STEP = 32 * 8
MORE = 1.2                                      # times as many, what counts as more
OVER_TOKENS = "grpo.py, mean over tokens"
METHODS = {"reinforce.py": "reinforce.py", "ppo.py": "ppo.py", "grpo.py": "grpo.py",
           OVER_TOKENS: "grpo.py --loss_type dapo", "gspo.py": "gspo.py",
           "dpo.py, online": "dpo.py --online"}
FLAGS = {"arithmetic": "--max_steps 40 --num_eval_problems 256",
         "countdown": "--task countdown --max_steps 32 --num_eval_samples 4"}
# Of one method beside another, on both tasks: who says so, and the region.
RATIOS = (
    ("samples", "reinforce.py", "ppo.py", AHMADIAN, {"at_most": MORE}),
    ("samples", "grpo.py", "ppo.py", DEEPSEEK, {"at_most": MORE}),
    ("seconds", "ppo.py", "grpo.py", DEEPSEEK, {"at_least": MORE}),
    ("samples", "grpo.py", "gspo.py", GSPO, {"at_least": MORE}),
    ("samples", "dpo.py, online", "ppo.py", GUO, {"at_most": MORE}),
    ("samples", "grpo.py", "reinforce.py", OURS, {"at_least": 2}),
    ("samples", "grpo.py", OVER_TOKENS, OURS, {"at_least": 2}))
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(5))
for task, flags in FLAGS.items():
    commands = {name: f"{command} --stop_at 2 --eval_steps 1000 {flags}"
                for name, command in METHODS.items()}
    EXPERIMENT.runs(task, commands, ["accuracy", "step_time"], ["greedy", "pass@1", "think_share"])


def steps_needed(accuracy, level):
    """After how many steps the mean of WINDOW batches in a row is at the level; half as many again
    as there are if it never is. (S, T) -> (S,)"""
    batches = numpy.lib.stride_tricks.sliding_window_view(accuracy, WINDOW, axis=1)
    is_there = batches.mean(axis=-1) >= level
    never = 1.5 * accuracy.shape[1]
    return numpy.where(is_there.any(axis=1), WINDOW + is_there.argmax(axis=1), never)


def cost(task, runs):
    """What each seed of each run needed. -> {"samples": {name: (S,)}, "seconds": {..}}"""
    base = numpy.mean([found["accuracy"][:, 0] for found in runs.values()])
    level = LEVEL if task == "arithmetic" else 2 * base
    steps = {name: steps_needed(found["accuracy"], level) for name, found in runs.items()}
    seconds = {name: steps[name] * found["step_time"].mean(axis=1) for name, found in runs.items()}
    samples = {name: SAMPLES_A_STEP * values for name, values in steps.items()}
    return {"samples": samples, "seconds": seconds}


def page(arithmetic, countdown):
    runs = {"arithmetic": arithmetic, "countdown": countdown}
    goals = {"arithmetic": f"{LEVEL:.0%} accuracy", "countdown": "twice the base's accuracy"}
    for task, found in runs.items():
        needed = cost(task, found)
        samples = needed["samples"]
        least = min(samples, key=lambda name: samples[name].mean())
        said = (f"{task.capitalize()}: {goals[task]} takes {least} {samples[least].mean():.0f} "
                f"samples, grpo.py {samples['grpo.py'].mean():.0f}, ppo.py "
                f"{samples['ppo.py'].mean():.0f}")
        for unit, one, other, source, region in RATIOS:
            ratio = needed[unit][one] / needed[unit][other]
            told = {}
            if one == "reinforce.py":
                told = dict.fromkeys((SHOWN, CONTRADICTED, UNDECIDED), said)
            more = "no more" if "at_most" in region else "more"
            yield Claim(f"{task}: {one} needs {more} {unit} than {other}", source, ratio,
                        times=True, **region, **told)
        end = SAMPLES_A_STEP * found["grpo.py"]["accuracy"].shape[1]
        is_missed = any(values.max() > end for values in samples.values())
        yield dots(samples, said, form=".0f", xlim=(0, None),
                   level=(end, "runs end; later means never") if is_missed else None,
                   xlabel=f"completions sampled until {goals[task]}; a dot for each seed")
        rows = {name: columns | {"samples": samples[name] / 1000,
                                 "seconds": needed["seconds"][name]}
                for name, columns in found.items()}
        heads = {"samples": f"thousand samples to {goals[task]}", "seconds": "seconds",
                 "greedy": "greedy, held out", "pass@1": "pass@1", "think_share": "thinks"}
        yield numbers(rows, heads, ".2f", by=task)
