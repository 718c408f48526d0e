"""Methods: what each script needs until it is twice as good as the base, on countdown.

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
runs.) The median of five seeds lies between the least and the greatest of them with a chance of
94%, whatever their distribution.
"""
import statistics

from lab.entry import (
    Claim,
    compared,
    draw_curves,
    mean_and_spread,
    minus,
    sign_test,
)
from tools.runs import run_all

SEEDS = [0, 1, 2, 3, 4]
STEPS = 32
WINDOW = 5                                      # batches
SAMPLES_A_STEP = 32 * 8
FLAGS = ["--task", "countdown", "--max_steps", STEPS, "--stop_at", 2, "--eval_steps", 1000,
         "--num_eval_samples", 4]
METHODS = {
    "reinforce.py": ["reinforce.py", *FLAGS],
    "ppo.py": ["ppo.py", *FLAGS],
    "grpo.py": ["grpo.py", *FLAGS],
    "grpo.py, mean over tokens": ["grpo.py", *FLAGS, "--loss_type", "dapo"],
    "gspo.py": ["gspo.py", *FLAGS],
    "dpo.py, online": ["dpo.py", *FLAGS, "--online"]}
# Of which method more is said to be needed than of which other.
SLOWER = (("grpo.py", "grpo.py, mean over tokens", "samples"),
          ("grpo.py", "gspo.py", "samples"),
          ("ppo.py", "reinforce.py", "samples"),
          ("ppo.py", "reinforce.py", "seconds"),
          ("ppo.py", "grpo.py", "seconds"),
          ("ppo.py", "dpo.py, online", "samples"))


def measure(seeds):
    found = {}
    for name, results in run_all(METHODS, seeds, ["accuracy", "step_time"]).items():
        trained = [result["summary"]["trained"] for result in results]
        found[name] = {"accuracy": [result["accuracy"] for result in results],
                       "step_time": [result["step_time"] for result in results],
                       "pass@1": [round(scores["pass@1"], 5) for scores in trained]}
    base = results[0]["summary"]["base"]
    return {"runs": found, "base": round(base["pass@1"], 5), "problems": base["problems"]}


def moving_mean(values):
    """The mean of WINDOW values in a row; the first of them ends with value number WINDOW - 1."""
    return [statistics.mean(values[end - WINDOW:end]) for end in range(WINDOW, 1 + len(values))]


def steps_needed(accuracy, level):
    """How many batches were sampled when WINDOW in a row had this mean. -> int, None if never"""
    for later, mean in enumerate(moving_mean(accuracy)):
        if mean >= level:
            return WINDOW + later
    return None


def level(found):
    """Twice the pass@1 of the base, which wrote the first batch of each run. -> float"""
    firsts = []
    for run in found["runs"].values():
        firsts += [accuracy[0] for accuracy in run["accuracy"]]
    return 2 * statistics.mean(firsts)


def needed(found, name, unit):
    """What each seed needed until it was twice as good as the base, in samples or seconds; a run
    that never was counts as infinitely many. -> list"""
    run = found["runs"][name]
    amounts = []
    for accuracy, step_time in zip(run["accuracy"], run["step_time"]):
        steps = steps_needed(accuracy, level(found))
        if steps is None:
            amounts.append(float("inf"))
        else:
            amounts.append(SAMPLES_A_STEP * steps if unit == "samples" else sum(step_time[:steps]))
    return amounts


def median_and_range(amounts):
    """The median, and from the least to the greatest: 2560 (1280 - never). -> str"""
    words = ["never" if amount == float("inf") else f"{amount:.0f}"
             for amount in (statistics.median(amounts), min(amounts), max(amounts))]
    return f"{words[0]} ({words[1]} - {words[2]})"


def tables(found):
    heads = ["method", "samples, median (range)", "seconds, median (range)",
             f"pass@1 after {STEPS} steps, held out", "seconds a step"]
    rows = []
    for name, run in found["runs"].items():
        a_step = [statistics.median(times) for times in run["step_time"]]
        rows.append([name, median_and_range(needed(found, name, "samples")),
                     median_and_range(needed(found, name, "seconds")),
                     mean_and_spread(run["pass@1"]), mean_and_spread(a_step, ".2f")])
    return [(heads, rows)]


def more(amount, other):
    """1 if an amount is more than another, -1 if it is less. -> int"""
    return (amount > other) - (amount < other)


def claims(found):
    listed = []
    for name, other, unit in SLOWER:
        slow = needed(found, name, unit)
        quick = needed(found, other, unit)
        listed.append(Claim(f"{name} needs more {unit} than {other}",
                            f"{median_and_range(slow)} and {median_and_range(quick)}",
                            sign_test(list(map(more, slow, quick)))))
    ends = {name: run["pass@1"] for name, run in found["runs"].items()}
    return listed + [
        compared(f"after {STEPS} steps, {name} has a higher pass@1 than grpo.py",
                 minus(ends[name], ends["grpo.py"]))
        for name in ("reinforce.py", "ppo.py", "grpo.py, mean over tokens", "gspo.py")]


def note(found):
    return (f"Held-out problems, all different: {found['problems']}; of these the base solves "
            f"{found['base']:.3f}, of those of its batches {level(found) / 2:.3f}; "
            f"{SAMPLES_A_STEP} samples a step; REINFORCE's first two runs and PPO's last took up "
            "to twice as long at first, as something else ran, too")


def panels(found):
    def by_step(axis):
        smooth = {}
        for name, run in found["runs"].items():
            smooth[name] = [moving_mean(accuracy) for accuracy in run["accuracy"]]
        draw_curves(axis, smooth, ylabel="pass@1 of five batches", title="countdown, same colours")
        axis.axhline(level(found), color="0.5", linestyle=":")
        axis.get_legend().remove()                      # the other two name the colours
        axis.set(xlabel="steps of 256 samples", ylim=(0, None))
        axis.set_xticks([1, 6, 16, 26], [5, 10, 20, 30])

    def points(unit):
        def fill(axis):
            for row, name in enumerate(found["runs"]):
                amounts = [amount for amount in needed(found, name, unit)
                           if amount < float("inf")]
                axis.plot(amounts, [row] * len(amounts), "o", color=f"C{row}", alpha=0.5)
            axis.set_yticks(range(len(found["runs"])), found["runs"])
            axis.invert_yaxis()
            axis.set(xlabel=f"{unit} to twice the base's pass@1", xlim=(0, None))
        return fill
    return [by_step, points("samples"), points("seconds")]
