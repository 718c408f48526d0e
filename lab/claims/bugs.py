"""Bugs: what ten planted mistakes look like in the metrics of a run

Each mistake of bugs.txt (which has the format of vectors/edits.py) replaces a line in a
copy of grpo.py.
"""
import itertools
from pathlib import Path

import numpy

import grpo
from lab.bench import OURS, UNSCORED, Claim
from lab.docs import ROOT, table
from lab.training import load_base
from learn.practice.hunt import metrics_of, planted, run_text
from measuring import student
from report import chart
from report.check import PARTS, check, parts
from report.formats import read
from vectors.edits import parse

SEEDS = range(5)
OTHER_SEEDS = range(100, 105)                           # of correct runs, as a control
FLAGS = ("--loss_type dapo --beta 0.05 --num_iterations 2 --num_prompts 16 --micro_batch_size 16 "
         f"--max_steps 20 {UNSCORED}")
CHECK = f"grpo.py {FLAGS}"
WINDOWS = FIRST, LAST = slice(5), slice(-5, None)       # the first and the last five steps
NAMED = 3                                       # number of metrics that a table names
MOST = 0.8                                      # fraction of the seeds that counts as most seeds
RISE = 0.05                                     # smallest rise of the reward that matters
VAGUE = {"flat", "rate"}        # parts that name no cause of these bugs
CORRECT, CONTROL = "no mistake", "no mistake, other seeds"
MISTAKES = {mistake.name.split(": ")[0]: mistake
            for mistake in parse(Path(__file__).with_suffix(".txt").read_text("utf-8"))}
CASES = [CORRECT, *MISTAKES, CONTROL]


def text_with(name):
    """Plant the mistake with this name, if there is one, in the text of grpo.py. -> str"""
    source = (ROOT / "grpo.py").read_text("utf-8")
    return planted(source, MISTAKES[name])[0] if name in MISTAKES else source


def measure(case, seed):
    """Run the script, with or without a mistake, from the base of the correct script, which each
    seed has its own. -> each metric of all steps but the time, and 1 for each part of why.md to
    which report.check sends"""
    if case == CONTROL:
        seed += 100
    *_, base = load_base(grpo, f"--base_seed {seed}")
    log, found = run_text("grpo.py", text_with(case), f"{FLAGS} --seed {seed}", base,
                          lambda folder: (metrics_of(folder), parts(check(read(folder)))))
    names = set.intersection(*map(set, log)) - {"step", "step_time"}
    return ({name: [line[name] for line in log] for name in sorted(names)}
            | {f"check {part}": int(part in found) for part in PARTS})


def metrics(columns):
    return [name for name in columns if not name.startswith("check ")]


def symptoms(columns, correct):
    """Find the averages that are too high or too low with most seeds: outside the range of the
    correct ones, even if it is extended at both ends by its width. -> list of texts"""
    found = []
    for metric, steps in itertools.product(metrics(correct), WINDOWS):
        here, usual = (rows[metric][:, steps].mean(axis=1) for rows in (columns, correct))
        width = numpy.ptp(usual)
        if (here > usual.max() + width).mean() >= MOST:
            found.append(f"`{metric}` too high")
        if (here < usual.min() - width).mean() >= MOST:
            found.append(f"`{metric}` too low")
    return found


def named(columns):
    """List the parts of why.md to which report.check sends with most seeds. -> list of str"""
    return [part for part in PARTS
            if f"check {part}" in columns and columns[f"check {part}"].mean() >= MOST]


def page(x):
    shows = {name: symptoms(columns, x[CORRECT]) for name, columns in x.items()}
    rise = {name: columns["reward"][:, LAST].mean(axis=1) - columns["reward"][:, FIRST].mean(axis=1)
            for name, columns in x.items()}
    learning = sum(student(rise[name])[0] > RISE for name in MISTAKES)
    unseen = [name for name in MISTAKES if not shows[name]]
    found = [name for name in MISTAKES if {*named(x[name])} - VAGUE]
    flat = [name for name in MISTAKES if "flat" in named(x[name]) and name not in found]
    alarms = sum(values.sum() for name in (CORRECT, CONTROL) for column, values in x[name].items()
                 if column.startswith("check "))
    yield (f"The reward still rises with {learning} of 10 bugs that we planted in grpo.py, one "
           f"at a time. {len(unseen)} of them show in none of the {len(metrics(x[CORRECT]))} "
           f"metrics that a run logs; report.check names {len(found)}, and of {len(flat)} more "
           "it says that the reward does not rise.")
    yield Claim("with most of ten bugs, planted one at a time, the reward still rises", OURS,
                learning, at_least=6, exact=True)
    yield Claim("for some bugs, no logged metric shows them with at least 4 of 5 seeds", OURS,
                len(unseen), at_least=1, exact=True)
    yield Claim("report.check names at least half of the bugs with at least 4 of 5 seeds", OURS,
                len(found), at_least=5, exact=True)
    yield Claim("report.check finds at most one thing in ten correct runs", OURS, alarms,
                at_most=1, exact=True)
    yield Claim("the correct script raises at most one false alarm with other seeds", OURS,
                len(shows[CONTROL]), at_most=1, exact=True)
    yield lambda axis: chart.dots(axis, rise, xlabel="rise of the reward in 20 steps")
    rows = []
    for name, mistake in MISTAKES.items():
        metric = list(dict.fromkeys(shows[name]))
        shown = ", ".join(metric[:NAMED]) or "no metric"
        if len(metric) > NAMED:
            shown += f", {len(metric) - NAMED} more"
        rows.append([*mistake.name.split(": ", 1), shown, ", ".join(named(x[name])) or "nothing"])
    yield table(["bug", "what is wrong", "metrics that show it", "`report.check` names"], rows)
