"""All scripts on one task, from one base: python -m tools.compare --task NAME --seeds 0 1 2.

Runs every script with its defaults, but an evaluation every second step, once for each seed, one
after the other so that seconds can be compared; those of evaluations do not count. Writes
docs/compare.json, docs/compare.png (completions until 95% are right, a dot for each seed) and,
between its marks in docs/lab.md, a table (make compare). With --draw the picture is made anew.
"""
import argparse
import importlib
import itertools
import json
import statistics

import common
from lab.draw import SCRIPTS as COLOURS
from lab.draw import dots
from tools.runs import DOCS, joined, note, publish, run_all, span
from tools.sync import SCRIPTS

# name: script and flags
RUNS = {script: [script] for script in SCRIPTS} | {"dpo.py, online": ["dpo.py", "--online"]}
HEAD = ["script", "greedy, each seed", "pass@1", "thinks", "steps", "samples",
        "seconds of training"]
LEVEL = 0.95                    # greedy accuracy, to which completions are counted


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


def to_level(result, unit):
    """What a run had cost when it was first evaluated at LEVEL; half as much again as in all if it
    never was. -> number"""
    costs = [point[unit] for point in result["curve"] if point["greedy"] >= LEVEL]
    return costs[0] if costs else 1.5 * result["curve"][-1][unit]


def picture(results):
    """Completions until LEVEL, a row for each of RUNS, a dot for each seed. -> Picture"""
    rows = {}
    colours = {}
    words = {}
    for name, runs in results.items():
        samples = [to_level(run, "samples") for run in runs]
        seconds = statistics.mean(to_level(run, "seconds") for run in runs)
        label = f"{name}   {seconds:.1f} s"
        rows[label] = samples
        colours[label] = COLOURS[name]
        words.setdefault(f"{statistics.median(samples):,.0f}", []).append(name.replace(",", ""))
    said = "; ".join(f"{number} with {', '.join(names)}" for number, names in words.items())
    return dots(rows, f"Completions until {LEVEL:.0%} are right: {said}", form=",.0f",
                given=colours, xlim=(0, None), xlabel="completions sampled, looked at every 512; a "
                "dot for each seed; beside each name, its seconds of training")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="arithmetic")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--draw", action="store_true", help="measure nothing; draw again")
    args = parser.parse_args(argv)
    if not args.draw:
        results = measure(args.task, args.seeds)
        summaries = sum(results.values(), [])
        base = summaries[0]["base"]["greedy"]           # of all runs
        rows = [row(name, runs) for name, runs in results.items()]
        said = note(summaries, args.seeds, f"from one base (greedy {base:.3f})")
        publish("compare", HEAD, rows, said, task=args.task, seeds=args.seeds, results=results)
    found = json.loads((DOCS / "compare.json").read_text())
    picture(found["results"]).save(DOCS / "compare.png")


if __name__ == "__main__":
    common.start(main)
