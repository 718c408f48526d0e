"""Methods: what each script needs until it is twice as good as the base, on countdown

Claim. REINFORCE does as well as PPO or better, without a critic (Ahmadian and others, 2402.14740).
GRPO does without the critic, too, at a fraction of the cost (DeepSeekMath, 2402.03300). DAPO needs
half the steps of GRPO (2503.14476); of its parts, we take the mean over tokens. GSPO gets more out
of the same samples than GRPO (2507.18071). DPO on pairs of the policy itself keeps up with PPO on
comparisons (Guo and others, 2402.04792).

Prediction. On arithmetic, where an answer has 33 tokens at most, REINFORCE needs half the samples
of GRPO (make compare, known when this was written). Here searches have 100 tokens and guesses ten,
and GRPO weighs each token of a guess ten times as much, as it divides by the length. So REINFORCE
and the mean over tokens need half of GRPO's samples or less, and GSPO as many as GRPO, for it
divides, too. PPO needs as many as REINFORCE and three times the seconds, as it has two networks
and four minibatches. DPO online needs most samples: it learns from one pair of each group.

Method. Every script with its defaults, 32 steps from one base, two runs at a time on two cores. A
run is there when five batches in a row have twice the pass@1 of the base, each batch on problems of
its own; seconds are those of its steps until then. What the base has is what it had in the first
batches. (At first the level was twice its pass@1 on held-out problems. More of these have four
numbers and not three, so that all runs were there from the start; the rule was mended after the
runs.) A run that never is there counts as half as many steps again as it had. DAPO's half is of
another baseline than GRPO as it is here, so that this claim is ours.
"""
import numpy

from lab.draw import INK, curves, dots
from lab.experiment import Experiment, numbers
from lab.verdict import OURS, Claim

AHMADIAN = "[Ahmadian and others](https://arxiv.org/abs/2402.14740)"
DEEPSEEK = "[DeepSeekMath](https://arxiv.org/abs/2402.03300)"
GSPO = "[GSPO](https://arxiv.org/abs/2507.18071)"
GUO = "[Guo and others](https://arxiv.org/abs/2402.04792)"
WINDOW = 5                                      # batches
SAMPLES_A_STEP = 32 * 8
FLAGS = "--task countdown --max_steps 32 --stop_at 2 --eval_steps 1000 --num_eval_samples 4"
MEAN = "grpo.py, mean over tokens"
RUNS = {f"{name}.py": f"{name}.py {FLAGS}" for name in ("reinforce", "ppo", "grpo", "gspo")}
RUNS |= {MEAN: f"grpo.py {FLAGS} --loss_type dapo", "dpo.py, online": f"dpo.py {FLAGS} --online"}
# Of which method more is said to be needed than of which other, by whom.
SLOWER = (("grpo.py", MEAN, "samples", OURS), ("grpo.py", "gspo.py", "samples", GSPO),
          ("ppo.py", "reinforce.py", "samples", AHMADIAN),
          ("ppo.py", "reinforce.py", "seconds", AHMADIAN),
          ("ppo.py", "grpo.py", "seconds", DEEPSEEK))
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(5))
EXPERIMENT.runs("runs", RUNS, ["accuracy", "step_time"], ["pass@1"])


def steps_needed(accuracy, level):
    """How many batches were sampled when WINDOW in a row had this mean; half as many again as there
    were if none did. (T,) -> number"""
    means = numpy.lib.stride_tricks.sliding_window_view(accuracy, WINDOW).mean(axis=-1)
    is_there = means >= level
    return WINDOW + int(is_there.argmax()) if is_there.any() else 1.5 * len(accuracy)


def page(runs):
    base = numpy.mean([found["accuracy"][:, 0] for found in runs.values()])
    steps = {}
    for name, found in runs.items():
        steps[name] = numpy.array([steps_needed(row, 2 * base) for row in found["accuracy"]])
    needed = {"samples": {name: SAMPLES_A_STEP * steps[name] for name in RUNS},
              "seconds": {name: steps[name] * numpy.median(found["step_time"], axis=1)
                          for name, found in runs.items()}}
    samples = {name: values.mean() for name, values in needed["samples"].items()}
    first = Claim(f"until twice as good as the base, grpo.py needs more samples than {MEAN}", OURS,
                  needed["samples"]["grpo.py"] / needed["samples"][MEAN], at_least=1.2, times=True,
                  shown=f"Until twice as good as the base on countdown: {samples['grpo.py']:,.0f} "
                  f"samples with GRPO's 1/length, {samples[MEAN]:,.0f} with a mean over tokens")
    yield first
    for name, other, unit, source in SLOWER[1:]:
        yield Claim(f"until then, {name} needs more {unit} than {other}", source,
                    needed[unit][name] / needed[unit][other], at_least=1.2, times=True)
    yield Claim("until then, dpo.py, online needs as few samples as ppo.py, or fewer", GUO,
                needed["samples"]["dpo.py, online"] / needed["samples"]["ppo.py"], at_most=1.2,
                times=True)
    ends = {name: found["pass@1"] for name, found in runs.items()}
    for name, source in (("reinforce.py", AHMADIAN), ("gspo.py", GSPO)):
        other = "ppo.py" if name == "reinforce.py" else "grpo.py"
        yield Claim(f"after 32 steps, {name} has as high a pass@1 as {other}, or higher", source,
                    ends[name] - ends[other], at_least=-0.02)
    yield dots(needed["samples"], first.finding, form=",.0f", given={MEAN: INK}, xlim=(0, None),
               xlabel="samples until twice as good as the base; a dot for each seed")
    yield curves({name: found["accuracy"] for name, found in runs.items()},
                 f"On countdown, pass@1 of the samples; the base has {base:.2f}", given={MEAN: INK},
                 ylabel="accuracy")
    rows = {name: {unit: needed[unit][name] for unit in needed} for name in RUNS}
    yield numbers(rows, {unit: f"{unit} until then" for unit in needed}, ".0f", by="method")
    yield numbers(runs, {"pass@1": "pass@1 after 32 steps"}, by="method")
