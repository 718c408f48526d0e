"""The main job with several seeds: python -m tools.seeds 0 1 2 3 4 (make seeds).

Runs the main job once for each seed, in an empty folder, so that every run makes a base of its own
(--base_seed is the seed, too). Writes docs/seeds.json, docs/curve.png (of the first seed) and,
between their marks, a table in docs/lab.md and parts of what the first seed printed in README.md.
"""
import argparse
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tools import start
from tools.runs import DOCS, MACHINE, ROOT, put, read_summary, record, table

HEAD = ["seed", "greedy, base", "greedy, trained", "pass@1", "thinks", "tokens", "steps",
        "warm start", "all"]


def row(seed, summary):
    """The cells of a seed. -> list"""
    base = summary["base"]
    trained = summary["trained"]
    cells = [seed, f"{base['greedy']:.3f}", f"{trained['greedy']:.3f}"]
    for name, form in (("pass@1", ".3f"), ("think_share", ".2f"), ("mean_length", ".0f")):
        cells.append(f"{base[name]:{form}} -> {trained[name]:{form}}")
    cells.append(summary["steps"])
    for name in ("seconds_warm_start", "seconds_total"):
        cells.append(f"{summary[name]:.0f} s")
    return cells


def example(printed):
    """What README.md shows of a run's console: the base, the first step and its samples, the last
    step, the last evaluation, and the end. -> str"""
    lines = printed.splitlines()

    def last(pattern):
        """The number of the last line that matches."""
        return max(number for number, line in enumerate(lines) if re.match(pattern, line))

    head = last(" step ")
    step = last(" *[0-9]+ +[0-9.]+ ")
    end = last("[0-9]+ steps, ")
    shown = [lines[last("base: ")], *lines[head:head + 4], "  ...", lines[step],
             lines[last("held out: ")], *lines[end:]]
    return "```\n" + "\n".join(shown) + "\n```\n"


def run_seed(seed, is_first):
    """Run the main job in an empty folder; the first one is also the example. -> its summary"""
    with tempfile.TemporaryDirectory() as empty:
        command = [sys.executable, ROOT / "grpo.py", "--seed", seed, "--base_seed", seed]
        done = subprocess.run(command, cwd=empty, check=True, stdout=subprocess.PIPE, text=True)
        folder = Path(empty, f"runs/grpo-arithmetic-s{seed}")
        if is_first:
            put("example", example(done.stdout), "seeds")
            shutil.copyfile(folder / "curve.png", DOCS / "curve.png")
        return read_summary(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seeds", nargs="*", type=int, default=[0, 1, 2, 3, 4], metavar="SEED")
    seeds = [str(seed) for seed in parser.parse_args().seeds]
    results = {}
    for seed in seeds:
        results[seed] = run_seed(seed, is_first=seed == seeds[0])
        print(table(HEAD, [row(seed, results[seed])]), flush=True)
    record("seeds", seeds=results)
    seconds = statistics.median(summary["seconds_total"] for summary in results.values())
    rows = [row(seed, summary) for seed, summary in results.items()]
    problems = results[seeds[0]]["trained"]["problems"]
    put("table", f"{table(HEAD, rows)}\nMedian of all: {seconds:.0f} s. Held-out problems, all "
        f"different: {problems}; {MACHINE}.\n", "seeds")


if __name__ == "__main__":
    start(main)
