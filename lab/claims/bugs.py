"""Bugs: what ten planted mistakes look like in the metrics of a run

Each mistake of bugs.txt (which has the format of learn/practice/mistakes.txt) replaces a line in a
copy of grpo.py.
"""
from pathlib import Path

import numpy

import grpo
from lab.docs import ROOT, table
from lab.draw import GREY, dots
from lab.experiment import UNSCORED, Experiment
from lab.training import load_base, run_text
from lab.verdict import OURS, Claim, student
from learn.practice.hunt import planted
from learn.practice.mistakes import parse

FLAGS = ("--loss_type dapo --beta 0.05 --num_iterations 2 --num_prompts 16 --micro_batch_size 16 "
         f"--max_steps 20 {UNSCORED}")
METRICS = ("reward", "signal", "completions/mean_length", "entropy", "kl",
           "clip_ratio/region_mean", "max_log_ratio", "grad_norm")
FIRST, LAST = "the first 5 steps", "the last 5 steps"
WINDOWS = {FIRST: slice(5), LAST: slice(-5, None)}
MOST = 0.8                                      # fraction of the seeds that counts as most seeds
RISE = 0.05                                     # smallest rise of the reward that matters
CORRECT = "no mistake"
CONTROL = "no mistake, other seeds"
RANGE = (CORRECT,)                              # the runs whose range counts as correct
MISTAKES = {mistake.name.split(": ")[0]: mistake
            for mistake in parse(Path(__file__).with_suffix(".txt").read_text("utf-8"))}
EXPERIMENT = Experiment(__file__, seeds=range(5), one_base=True)


def text_with(name):
    """Plant the mistake with this name, if there is one, in the text of grpo.py. -> str"""
    source = (ROOT / "grpo.py").read_text("utf-8")
    return planted(source, MISTAKES[name])[0] if name in MISTAKES else source


@EXPERIMENT.measure([CORRECT, *MISTAKES, CONTROL])
def runs(seed, name):
    """Run the script, with or without a mistake, from the base of the correct script."""
    *_, base = load_base(grpo)
    seed += 100 * (name == CONTROL)
    log = run_text("grpo.py", text_with(name), base, f"{FLAGS} --seed {seed}")
    return {metric: [line[metric] for line in log] for metric in METRICS}


def means(columns):
    """Average each metric over each window. -> {(metric, window): (S,)}"""
    return {(metric, window): columns[metric][:, steps].mean(axis=1)
            for metric in METRICS for window, steps in WINDOWS.items()}


def symptoms(averages, name):
    """Find the averages that are too high or too low with most seeds: outside the range of the
    correct ones, even if it is extended at both ends by its width.
    -> {(metric, window): "high" or "low"}"""
    found = {}
    for place, values in averages[name].items():
        correct = numpy.concatenate([averages[other][place] for other in RANGE])
        width = correct.max() - correct.min()
        if (values > correct.max() + width).mean() >= MOST:
            found[place] = "high"
        elif (values < correct.min() - width).mean() >= MOST:
            found[place] = "low"
    return found


def page(runs):
    averages = {name: means(columns) for name, columns in runs.items()}
    with_most = {name: symptoms(averages, name) for name in runs}
    rise = {name: values["reward", LAST] - values["reward", FIRST]
            for name, values in averages.items()}
    learning = [name for name in MISTAKES if student(rise[name])[0] > RISE]
    unseen = [name for name in MISTAKES if not with_most[name]]
    counted = "of 10, a count over five seeds"
    yield Claim("with most of ten bugs, planted one at a time, the reward still rises", OURS,
                len(learning), at_least=6, exact=True, unit=counted,
                said=f"The reward still rises with {len(learning)} of 10 bugs that we planted in "
                "grpo.py, one at a time")
    yield Claim("for some bugs, no metric shows them with at least 4 of 5 seeds, so only a "
                "test catches them", OURS, len(unseen), at_least=1, exact=True, unit=counted,
                said=f"For {len(unseen)} of the 10 bugs, no metric shows them with at least 4 of "
                f"5 seeds, so only a test catches them: {', '.join(unseen)}")
    yield Claim("the correct script raises at most one false alarm with other seeds", OURS,
                len(with_most[CONTROL]), at_most=1, exact=True, unit="of 16 averages, a count over "
                "five seeds")
    yield dots(rise, given={CORRECT: GREY, CONTROL: GREY}, level=(0, "no rise"),
               xlabel="rise of the reward in 20 steps; a dot for each seed")
    rows = []
    for name, mistake in MISTAKES.items():
        shows = dict.fromkeys(f"`{metric}` too {which}"
                              for (metric, _), which in with_most[name].items())
        rows.append([*mistake.name.split(": ", 1), ", ".join(shows) or "no metric"])
    yield table(["bug", "what is wrong", "metrics that show it"], rows)
