"""All scripts on one task, from one base: python -m tools.compare --task NAME --seeds 0 1 2.

Runs every script with its defaults, but an evaluation every second step, once for each seed, one
after the other so that seconds can be compared; those of evaluations do not count. Writes
docs/compare.json, docs/compare.png (accuracy against samples and against seconds) and, between its
marks in docs/lab.md, a table (make compare).
"""
import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy

import common
from tools.runs import (
    DOCS,
    ROOT,
    import_pyplot,
    joined,
    note,
    put,
    read_log,
    read_summary,
    record,
    span,
    table,
)

RUNS = {                                    # name: script and flags
    "reinforce.py": ["reinforce.py"],
    "ppo.py": ["ppo.py"],
    "grpo.py": ["grpo.py"],
    "gspo.py": ["gspo.py"],
    "dpo.py": ["dpo.py"],
    "dpo.py, online": ["dpo.py", "--online"]}
HEAD = ["script", "greedy, each seed", "pass@1", "thinks", "steps", "samples",
        "seconds of training"]
UNITS = {"samples": "completions sampled", "seconds": "seconds of training"}


# ---- 1. the runs -----------------------------------------------------------------------------

def start(folder, script, *flags):
    """Run a script in `folder`, where all runs find the same base."""
    subprocess.run([sys.executable, ROOT / script, *flags], cwd=folder, check=True,
                   stdout=subprocess.DEVNULL)


def accuracy_curve(run_folder, summary):
    """The greedy accuracy of a run at each evaluation, and what it had cost until then. -> list of
    dicts"""
    config = json.loads((run_folder / "config.json").read_text())["config"]
    samples_a_step = config["num_prompts"] * config["num_generations"]
    seconds = [0.0]                                     # after step 0, 1, 2 ...
    greedy = {}                                         # by step
    for line in read_log(run_folder, "metrics"):
        seconds.append(seconds[-1] + line["step_time"])
        if "eval/greedy" in line:
            greedy[line["step"]] = line["eval/greedy"]
    greedy[summary["steps"]] = summary["trained"]["greedy"]
    return [{"step": step, "samples": step * samples_a_step, "seconds": seconds[step],
             "greedy": greedy[step]} for step in sorted(greedy)]


def run(name, seed, task, folder):
    """Run a row of RUNS. -> its summary, with the curve of its accuracy"""
    script, *flags = RUNS[name]
    start(folder, script, "--task", task, "--seed", str(seed), "--eval_steps", "2", *flags)
    made = Path(folder, "runs").glob(f"{Path(script).stem}-*")
    run_folder = max(made, key=lambda path: path.stat().st_mtime)
    summary = read_summary(run_folder)
    return summary | {"curve": accuracy_curve(run_folder, summary)}


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


def draw(results, path):
    """Draw accuracy against samples and against seconds, the base dashed."""
    pyplot = import_pyplot()
    base = first_base(results)
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for axis, (unit, label) in zip(axes, UNITS.items()):
        for number, (name, runs) in enumerate(results.items()):
            draw_runs(axis, name, runs, unit, color=f"C{number}")
        axis.axhline(base["greedy"], color="gray", linestyle="--", label="base")
        axis.set_xscale("log")
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("greedy accuracy, held-out problems")
    axes[0].set_ylim(0, 1.02)
    axes[1].legend(fontsize="small", loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def first_base(results):
    """The scores of the base, which all runs share. -> dict"""
    runs = next(iter(results.values()))
    return runs[0]["base"]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="arithmetic")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args(argv)

    results = {}
    with tempfile.TemporaryDirectory() as folder:
        start(folder, "grpo.py", "--task", args.task, "--max_steps", "0")       # makes the base
        for name in RUNS:
            results[name] = [run(name, seed, args.task, folder) for seed in args.seeds]
            print(table(HEAD, [row(name, results[name])]), flush=True)

    record("compare", task=args.task, seeds=args.seeds, results=results)
    draw(results, DOCS / "compare.png")
    base = f"from one base (greedy {first_base(results)['greedy']:.3f})"
    rows = [row(name, runs) for name, runs in results.items()]
    said = note(sum(results.values(), []), args.seeds, base)
    put("compare", f"{table(HEAD, rows)}\n{said}", "compare")


if __name__ == "__main__":
    common.start(main)
