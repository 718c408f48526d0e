"""All scripts on one task, from one base: python -m tools.compare --task NAME --seeds 0 1 2.

Runs every script with its defaults, but an evaluation every second step, once for each seed, one
after the other so that seconds can be compared; those of evaluations do not count. Writes
docs/compare.json, docs/compare.png (accuracy against samples and against seconds) and, between its
marks in docs/lab.md, a table (make compare).
"""
import argparse
import importlib
import itertools

import numpy

import common
from tools.runs import joined, note, publish, run_all, span
from tools.sync import SCRIPTS

# name: script and flags
RUNS = {script: [script] for script in SCRIPTS} | {"dpo.py, online": ["dpo.py", "--online"]}
HEAD = ["script", "greedy, each seed", "pass@1", "thinks", "steps", "samples",
        "seconds of training"]
UNITS = {"samples": "completions sampled", "seconds": "seconds of training"}


# ---- 1. the runs -----------------------------------------------------------------------------

def measure(task, seeds):
    """-> {name: [summary of each seed, with the curve of its accuracy]}"""
    variants = {name: [*words, "--task", task, "--eval_steps", 2] for name, words in RUNS.items()}
    found = {}
    metrics = ["step_time", "eval/greedy"]
    for name, results in run_all(variants, seeds, metrics, at_once=1).items():
        script, *flags = variants[name]
        module = importlib.import_module(script.removesuffix(".py"))
        cfg = common.parse_flags(module.Config, [str(flag) for flag in flags])
        samples_a_step = cfg.num_prompts * cfg.num_generations
        found[name] = [result["summary"] | {"curve": accuracy_curve(result, samples_a_step)}
                       for result in results]
    return found


def accuracy_curve(result, samples_a_step):
    """The greedy accuracy of a run at each evaluation, and what it had cost until then. -> list of
    dicts"""
    summary = result["summary"]
    greedy = result["eval/greedy"][:-1] + [summary["trained"]["greedy"]]
    seconds = itertools.accumulate(result["step_time"])
    return [{"step": step, "samples": step * samples_a_step, "seconds": total, "greedy": value}
            for step, (total, value) in enumerate(zip(seconds, greedy), start=1)
            if value is not None]


# ---- 2. table and picture --------------------------------------------------------------------

def row(name, results):
    """The cells of a row of RUNS, from the summaries of its seeds. -> list"""
    trained = [result["trained"] for result in results]
    ends = [result["curve"][-1] for result in results]
    return [name,
            joined([scores["greedy"] for scores in trained], ".3f"),
            span([scores["pass@1"] for scores in trained], ".3f"),
            span([scores["think_share"] for scores in trained], ".2f"),
            span([result["steps"] for result in results], "d"),
            span([end["samples"] for end in ends], "d"),
            span([end["seconds"] for end in ends], ".0f")]


def draw_runs(axis, name, results, unit, color):
    """Draw the accuracy of each seed faintly and their mean strongly, against `unit`."""
    lines = []
    for result in results:
        x = [point[unit] for point in result["curve"]]
        y = [point["greedy"] for point in result["curve"]]
        lines.append((x, y))
        axis.plot(x, y, color=color, alpha=0.25, linewidth=1)

    # a run that has ended stays in the mean as good as it was
    first = min(x[0] for x, _ in lines)
    last = max(x[-1] for x, _ in lines)
    grid = numpy.geomspace(first, last, 200)
    mean = numpy.mean([numpy.interp(grid, x, y) for x, y in lines], axis=0)
    axis.plot(grid, mean, color=color, linewidth=2, label=name)


def panel(results, base, unit, label):
    """A function that draws accuracy against `unit` into an axis, the base dashed."""
    def fill(axis):
        for number, (name, runs) in enumerate(results.items()):
            draw_runs(axis, name, runs, unit, color=f"C{number}")
        axis.axhline(base, color="gray", linestyle="--", label="base")
        axis.set(xscale="log", xlabel=label, ylabel="greedy accuracy, held out", ylim=(0, 1.02))
        axis.grid(alpha=0.3)
        if unit == list(UNITS)[-1]:                     # where there is room
            axis.legend(fontsize="small", loc="lower right")
    return fill


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="arithmetic")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args(argv)

    results = measure(args.task, args.seeds)
    summaries = sum(results.values(), [])
    base = summaries[0]["base"]["greedy"]               # of all runs
    rows = [row(name, runs) for name, runs in results.items()]
    said = note(summaries, args.seeds, f"from one base (greedy {base:.3f})")
    panels = [panel(results, base, unit, label) for unit, label in UNITS.items()]
    publish("compare", HEAD, rows, said, panels, width=5.5, task=args.task, seeds=args.seeds,
            results=results)


if __name__ == "__main__":
    common.start(main)
