"""Bugs: what ten mistakes look like from outside

Each mistake of bugs.txt, which is written like learn/practice/mistakes.txt, replaces a line in a
copy of grpo.py. The metrics of its runs are compared with those of runs of the correct script, and
so are the metrics of the correct script with other seeds, which show how often a metric raises a
false alarm. docs/lab/bugs.md says more.
"""
import tempfile
from pathlib import Path

import torch

from lab.docs import ROOT, table
from lab.draw import GREY, dots
from lab.experiment import UNSCORED, Block, Experiment, numbers, run_once
from lab.training import make_base
from lab.verdict import OURS, Claim, student
from learn.practice.mistakes import parse

FLAGS = ("--loss_type dapo --beta 0.05 --num_iterations 2 --num_prompts 16 --micro_batch_size 16 "
         f"--max_steps 20 {UNSCORED}")
METRICS = ("reward", "signal", "completions/mean_length", "entropy", "kl",
           "clip_ratio/region_mean", "max_log_ratio", "grad_norm")
FIRST, LAST = "the first 5 steps", "the last 5 steps"
WINDOWS = {FIRST: slice(5), LAST: slice(-5, None)}
MOST = 0.8                                      # of the seeds
RISE = 0.05                                     # of the reward, what counts as one
RIGHT = "no mistake"
CONTROL = "no mistake, other seeds"
MISTAKES = {mistake.name.split(": ")[0]: mistake
            for mistake in parse(Path(__file__).with_suffix(".txt").read_text())}
EXPERIMENT = Experiment(__file__, seeds=range(5), one_base=True)


def plant(name, folder):
    """Make a folder with common.py and a grpo.py that has the mistake. -> path of the latter"""
    source = (ROOT / "grpo.py").read_text()
    if name in MISTAKES:
        [old], [new] = MISTAKES[name].old, MISTAKES[name].new
        assert source.count(old) == 1, name
        source = source.replace(old, new)
    folder.mkdir()
    (folder / "common.py").write_text((ROOT / "common.py").read_text())
    (folder / "grpo.py").write_text(source)
    return folder / "grpo.py"


@EXPERIMENT.measure([RIGHT, *MISTAKES, CONTROL])
def runs(seed, name):
    """Runs from the base of the right code."""
    base = make_base(["grpo.py"])
    with tempfile.TemporaryDirectory() as work:
        torch.save({"policy": base}, Path(work, "checkpoint.pt"))
        script = plant(name, Path(work, "copy"))
        return run_once(f"{script} {FLAGS} --init_from {work}", seed + 100 * (name == CONTROL),
                        METRICS, ())


def means(found):
    """The mean of each metric over each window. -> {(metric, window): (S,)}"""
    return {(metric, window): found[metric][:, steps].mean(axis=1)
            for metric in METRICS for window, steps in WINDOWS.items()}


def side(values, right, share=1.0):
    """On which side of the widened span of the right values this share of the others lies, or more.
    -> str, "" if none"""
    width = max(right) - min(right)
    if (values > max(right) + width).mean() >= share:
        return "high"
    if (values < min(right) - width).mean() >= share:
        return "low"
    return ""


def signs(of_runs, share):
    """Where the means of runs are too high or too low, with this share of the seeds.
    -> {name: {(metric, window): which}}"""
    found = {}
    for name, wrong in of_runs.items():
        sides = {place: side(wrong[place], right, share) for place, right in of_runs[RIGHT].items()}
        found[name] = {place: which for place, which in sides.items() if which}
    return found


def page(runs):
    of_runs = {name: means(found) for name, found in runs.items()}
    told = signs(of_runs, 1.0)
    hinted = signs(of_runs, MOST)
    rise = {name: of["reward", LAST] - of["reward", FIRST] for name, of in of_runs.items()}
    learning = [name for name in MISTAKES if student(rise[name])[0] > RISE]
    unseen = [name for name in MISTAKES if not hinted[name]]
    said = (f"Of 10 bugs planted in grpo.py, one at a time, {len(learning)} let the reward rise "
            "all the same")
    yield Claim("with most of ten bugs, one at a time, the reward still rises", OURS,
                len(learning), at_least=6, exact=True, unit="of 10", shown=said)
    yield Claim("some bugs show in no metric with most seeds, only in a test", OURS, len(unseen),
                at_least=1, exact=True, unit="of 10", shown=f"{len(unseen)} of these 10 bugs show "
                f"in no metric with most seeds, only in a test: {', '.join(unseen)}")
    yield Claim("right code with other seeds raises a false alarm at most once", OURS,
                len(hinted[CONTROL]), at_most=1, exact=True, unit="of 16 numbers")
    yield dots(rise, said, given={RIGHT: GREY, CONTROL: GREY}, level=(0, "no rise"),
               xlabel="rise of the reward in 20 steps; a dot for each seed")

    rows = []
    looks = {}
    for name, mistake in MISTAKES.items():
        shows = [dict.fromkeys(f"`{metric}`" for metric, _ in found[name])
                 for found in (told, hinted)]
        [file] = mistake.files
        rows.append([*mistake.name.split(": ", 1),
                     *(", ".join(metrics) or "nothing" for metrics in shows),
                     f"`{file.removeprefix('tests/')}::{mistake.words}`"])
        for (metric, window), which in told[name].items():
            looks.setdefault((f"`{metric}` too {which}", window), []).append(name)
    yield table(["bug", "what is wrong", "metrics that show it with every seed", "with most",
                 "the test that fails"], rows)
    yield numbers({name: {f"`{metric}`": found[metric, LAST].mean() for metric in METRICS}
                   for name, found in of_runs.items()}, by=LAST)
    rows = [[*look, ", ".join(names)] for look, names in sorted(looks.items())]
    yield Block("symptoms", table(["what you see", "when", "mistakes that look like that"], rows))
