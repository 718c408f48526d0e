"""The main job with several seeds: python -m lab.main_job 0 1 2 3 4 (make seeds).

Runs the main job once for each seed, in an empty folder, so that every run makes a base of its own
(--base_seed is the seed, too). Writes docs/seeds.json, docs/curve.png (of the first seed) and,
between their marks, a table in docs/lab.md and parts of what the first seed printed in README.md.
With --nano (make nano-seeds), nano.py is run instead, and docs/nano-seeds.json and docs/nano.md
have what it did.
"""
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lab.docs import DOCS, MACHINE, ROOT, put, record, table
from report import parser, start
from report.logs import read_summary


def row(seed, summary):
    """What the table says of a seed. -> {heading: cell}"""
    base = summary["base"]
    trained = summary["trained"]
    return {
        "seed": seed,
        "greedy, base": f"{base['greedy']:.3f}",
        "greedy, trained": f"{trained['greedy']:.3f}",
        "pass@1": f"{base['pass@1']:.3f} -> {trained['pass@1']:.3f}",
        "thinks": f"{base['think_share']:.2f} -> {trained['think_share']:.2f}",
        "tokens": f"{base['mean_length']:.0f} -> {trained['mean_length']:.0f}",
        "steps": summary["steps"],
        "warm start": f"{summary['seconds_warm_start']:.0f} s",
        "all": f"{summary['seconds_total']:.0f} s"}


def example(printed):
    """What README.md shows of a run's console: the base, the first step and its samples, the last
    step, the last evaluation, and the end. -> str"""
    base = re.search("^base: .*\n", printed, re.MULTILINE)[0]
    first = re.search("^ step .*\n(.*\n){3}", printed, re.MULTILINE)[0]
    last = re.findall("^ *[0-9]+ +[0-9.]+ .*\n", printed, re.MULTILINE)[-1]
    end = printed[printed.rindex("held out: "):]
    return f"```\n{base}{first}  ...\n{last}{end}```\n"


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


def main_job(seeds):
    """Run the main job, and write down what it did."""
    results = {}
    rows = []
    for seed in seeds:
        results[seed] = run_seed(seed, is_first=seed == seeds[0])
        rows.append(row(seed, results[seed]))
        print(*rows[-1].values(), sep=", ", flush=True)
    record("seeds", seeds=results)
    seconds = statistics.median(summary["seconds_total"] for summary in results.values())
    problems = results[seeds[0]]["trained"]["problems"]
    found = table(rows[0], [one.values() for one in rows])
    put("table", f"{found}\nMedian of all: {seconds:.0f} s. Held-out problems, all different: "
        f"{problems}; {MACHINE}.\n", "seeds")


def nano(seeds):
    """Run nano.py, and write down what it did."""
    results = {}
    for seed in seeds:
        began = time.perf_counter()
        command = [sys.executable, "-c", f"import nano; nano.main(seed={seed})"]
        done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        before, after = re.findall("(?:before|after): +([0-9.]+) right", done.stdout)
        results[seed] = {"before": float(before), "after": float(after),
                         "seconds": time.perf_counter() - began}
        print(seed, *results[seed].values(), sep=", ", flush=True)
        if seed == seeds[0]:
            lines = done.stdout.splitlines()
            steps = [line for line in lines if line.startswith("step")]
            shown = [lines[0], lines[1], "...", steps[0], steps[5], steps[10], "...", *lines[-3:]]
    record("nano-seeds", seeds=results)
    rows = [[seed, f"{one['before']:.3f}", f"{one['after']:.3f}", f"{one['seconds']:.0f} s"]
            for seed, one in results.items()]
    found = table(["seed", "right before", "right after", "seconds"], rows)
    put("nano", "```\n" + "\n".join(shown) + f"\n```\n\n{found}\n{MACHINE}.\n", "nano-seeds")


def main():
    words = parser(__doc__)
    words.add_argument("seeds", nargs="*", type=int, default=[0, 1, 2, 3, 4], metavar="SEED")
    words.add_argument("--nano", action="store_true", help="nano.py, instead of the main job")
    options = words.parse_args()
    seeds = [str(seed) for seed in options.seeds]
    if options.nano:
        nano(seeds)
    else:
        main_job(seeds)


if __name__ == "__main__":
    start(main)
