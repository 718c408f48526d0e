"""All scripts on one task, from one base: python -m tools.compare --task NAME --seeds 0 1 2 (make compare).

Runs every script with its defaults, but an evaluation every second step, once for each seed, one after the
other so that seconds can be compared; those of evaluations do not count. Writes docs/compare.json,
docs/compare.png (accuracy against samples and against seconds) and, between its marks in README.md, a table.
"""
import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy

from tools.seeds import ROOT, put

RUNS = {"reinforce.py": [], "ppo.py": [], "grpo.py": [], "gspo.py": [], "dpo.py": [],
        "dpo.py, online": ["--online", "yes"]}
HEAD = ("| script | greedy, each seed | pass@1 | thinks | steps | samples | seconds of training |\n"
        + "|---" * 7 + "|\n")


def run(name, seed, task, folder):
    """Run a row of RUNS in `folder`, whose base it shares. -> its summary, and the curve of its accuracy"""
    script = name.split(",")[0]
    flags = ["--task", task, "--seed", str(seed), "--eval_steps", "2", *RUNS[name]]
    subprocess.run([sys.executable, ROOT / script, *flags], cwd=folder, check=True, capture_output=True)
    made = max(Path(folder, "runs").glob(f"{Path(script).stem}-*"), key=lambda path: path.stat().st_mtime)
    config = json.loads((made / "config.json").read_text())["config"]
    summary = json.loads((made / "summary.json").read_text())
    lines = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
    seconds = numpy.cumsum([0.0] + [line["step_time"] for line in lines if "step_time" in line])
    points = {line["step"]: line["eval/greedy"] for line in lines if "eval/greedy" in line}
    points[summary["steps"]] = summary["trained"]["greedy"]
    per_step = config["num_prompts"] * config["num_generations"]
    return summary | {"curve": [{"step": step, "samples": step * per_step, "seconds": float(seconds[step]),
                                 "greedy": greedy} for step, greedy in sorted(points.items())]}


def row(name, results):
    """A line of the table, from the summaries of a row of RUNS."""
    def span(values, form):
        low, high = (f"{value:{form}}" for value in (min(values), max(values)))
        return low if low == high else f"{low} - {high}"
    trained = [result["trained"] for result in results]
    return "| " + " | ".join([
        name, ", ".join(f"{scores['greedy']:.3f}" for scores in trained),
        span([scores["pass@1"] for scores in trained], ".3f"),
        span([scores["think_share"] for scores in trained], ".2f"),
        span([result["steps"] for result in results], "d"),
        span([result["curve"][-1]["samples"] for result in results], "d"),
        span([result["curve"][-1]["seconds"] for result in results], ".0f")]) + " |\n"


def draw(results, path):
    """Accuracy against samples and against seconds: seeds faint, their mean strong, the base dashed."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    labels = {"samples": "completions sampled", "seconds": "seconds of training"}
    for axis, (unit, label) in zip(axes, labels.items()):
        for i, (name, runs) in enumerate(results.items()):
            curves = [([point[unit] for point in run["curve"]], [point["greedy"] for point in run["curve"]])
                      for run in runs]
            grid = numpy.geomspace(min(xs[0] for xs, _ in curves), max(xs[-1] for xs, _ in curves), 200)
            for xs, ys in curves:
                axis.plot(xs, ys, color=f"C{i}", alpha=0.25, linewidth=1)
            average = numpy.mean([numpy.interp(grid, xs, ys) for xs, ys in curves], 0)  # ended: as it ended
            axis.plot(grid, average, color=f"C{i}", linewidth=2, label=name)
        base = next(iter(results.values()))[0]["base"]
        axis.axhline(base["greedy"], color="gray", linestyle="--", label="base")
        axis.set_xscale("log")
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("greedy accuracy, held-out problems")
    axes[0].set_ylim(0, 1.02)
    axes[1].legend(fontsize="small", loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="arithmetic")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args(argv)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        base_only = [sys.executable, ROOT / "grpo.py", "--task", args.task, "--max_steps", "0"]
        subprocess.run(base_only, cwd=folder, check=True, capture_output=True)
        print(HEAD, end="", flush=True)
        for name in RUNS:
            results[name] = [run(name, seed, args.task, folder) for seed in args.seeds]
            print(row(name, results[name]), end="", flush=True)
    machine = f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}"
    record = {"machine": machine, "task": args.task, "seeds": args.seeds, "results": results}
    (ROOT / "docs").mkdir(exist_ok=True)
    (ROOT / "docs" / "compare.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(results, ROOT / "docs" / "compare.png")
    base = next(iter(results.values()))[0]["base"]
    table = "".join(row(name, runs) for name, runs in results.items())
    put("compare", f"{HEAD}{table}\nFrom one base (greedy {base['greedy']:.3f}), seeds "
        f"{', '.join(map(str, args.seeds))}; {base['problems']} held-out problems; {machine}.\n", "compare")


if __name__ == "__main__":
    main()
