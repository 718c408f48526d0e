"""Run the main command, python grpo.py, with several seeds: python -m lab.main_job 0 1 2 3 4
(make seeds).

Each run starts in an empty folder, so it makes its own base (--base_seed is the seed, too). Writes
docs/seeds.json and, between their marks, a table in docs/lab.md and parts of the first seed's
output in README.md. The first seed's run is then repeated with evaluations, as runs/example.
docs/learning.svg and docs/play.html are made from it, so both show its policy. With --nano (make
nano-seeds), it runs nano.py instead, and the results go to docs/nano-seeds.json and docs/nano.md.
"""
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lab.docs import MACHINE, ROOT, put, record, table
from report import parser, start
from report.logs import read_summary

EXAMPLE = Path("runs/example")          # in the repository, so its report shows no other folder


def seeds_table(results):
    """Write the table of docs/lab.md. results: seed -> summary of its run. -> str"""
    rows = []
    for seed, summary in results.items():
        base, trained = summary["base"], summary["trained"]
        rows.append([
            seed, f"{base['greedy']:.3f}", f"{trained['greedy']:.3f}",
            f"{base['pass@1']:.3f} -> {trained['pass@1']:.3f}",
            f"{base['think_share']:.2f} -> {trained['think_share']:.2f}",
            f"{base['mean_length']:.0f} -> {trained['mean_length']:.0f}", summary["steps"],
            f"{summary['seconds_warm_start']:.0f} s", f"{summary['seconds_total']:.0f} s"])
    heads = ["seed", "greedy accuracy, base", "greedy accuracy, after RL", "pass@1",
             "fraction that thinks", "mean tokens", "steps", "time for the base", "total time"]
    seconds = statistics.median(summary["seconds_total"] for summary in results.values())
    return (f"{table(heads, rows)}\nThe median of the total times is {seconds:.0f} s. The policies "
            f"are scored on {trained['problems']} held-out problems, all different. Machine: "
            f"{MACHINE}.\n")


def example(printed):
    """Select the lines of a run that README.md shows: the base, the first step and its samples, the
    last step, the last evaluation, and the end, with the interpreter of make run. -> str"""
    base = re.search("^base: .*\n", printed, re.MULTILINE)[0]
    first = re.search("^ step .*\n(.*\n){3}", printed, re.MULTILINE)[0]
    last = re.findall("^ *[0-9]+ +[0-9.]+ .*\n", printed, re.MULTILINE)[-1]
    end = printed[printed.rindex("held out: "):]
    end = re.sub("^  .* -m report.ask", "  .venv/bin/python -m report.ask", end, flags=re.MULTILINE)
    return f"```\n{base}{first}  ...\n{last}{end}```\n"


def printed_by(folder, *words):
    """Run python in a folder. -> what it prints"""
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, encoding="utf-8")
    return done.stdout


def main_job(seeds):
    """Run grpo.py with each seed, and write the results to docs/."""
    results = {}
    for seed in seeds:
        with tempfile.TemporaryDirectory() as empty:
            command = (ROOT / "grpo.py", "--seed", seed, "--base_seed", seed)
            printed = printed_by(empty, *command)
            results[seed] = read_summary(Path(empty, f"runs/grpo-arithmetic-s{seed}"))
            if seed == seeds[0]:
                put("example", example(printed), "seeds")
                shutil.rmtree(ROOT / EXAMPLE, ignore_errors=True)
                printed_by(ROOT, *command, "--eval_steps", "2", "--output_dir", EXAMPLE)
                printed_by(ROOT, "-m", "learn.film", EXAMPLE)
                printed_by(ROOT, "-m", "learn.play", EXAMPLE)
    record("seeds", seeds=results)
    put("table", seeds_table(results), "seeds")


def nano(seeds):
    """Run nano.py with each seed, and write the results to docs/."""
    results = {}
    outputs = []
    for seed in seeds:
        began = time.perf_counter()
        outputs.append(printed_by(ROOT, "-c", f"import nano; nano.main(seed={seed})"))
        before, after = re.findall("(?:before|after): +([0-9.]+) right", outputs[-1])
        results[seed] = {"before": float(before), "after": float(after),
                         "seconds": time.perf_counter() - began}
    record("nano-seeds", seeds=results)
    lines = outputs[0].splitlines()
    steps = [line for line in lines if line.startswith("step")]
    before = next(line for line in lines if "before:" in line)
    shown = [*lines[:2], "...", before, *steps[:11:5], "...", *lines[-2:]]
    columns = {name: [one[name] for one in results.values()] for name in results[seeds[0]]}
    rows = [[f"{word} of {len(seeds)} seeds", f"{end(columns['before']):.3f}",
             f"{end(columns['after']):.3f}", f"{end(columns['seconds']):.0f} s"]
            for word, end in (("lowest", min), ("highest", max))]
    text = table(["", "right before", "right after", "seconds"], rows)
    put("nano", "```\n" + "\n".join(shown) + f"\n```\n\n{text}\n{MACHINE}.\n", "nano-seeds")


def main():
    flags = parser(__doc__)
    flags.add_argument("seeds", nargs="*", type=int, default=[0, 1, 2, 3, 4], metavar="SEED")
    flags.add_argument("--nano", action="store_true", help="run nano.py instead of grpo.py")
    args = flags.parse_args()
    seeds = [str(seed) for seed in args.seeds]
    (nano if args.nano else main_job)(seeds)


if __name__ == "__main__":
    start(main)
