"""The table of seeds and the example of README.md: python tools/seeds.py 0 1 2 3 4 (make seeds).

Runs the main job once for each seed, in an empty folder, so that every run warm-starts a base of its own
(--base_seed is the seed, too). Writes docs/seeds.json, docs/curve.png (of the first seed) and, between their
marks in README.md, the table and what the first seed printed, its middle left out.
"""
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEAD = ("| seed | greedy, base | greedy, trained | pass@1 | thinks | tokens | steps | warm start | all |\n"
        + "|---" * 9 + "|\n")


def row(seed, summary):
    base, trained = summary["base"], summary["trained"]
    pairs = " | ".join(f"{base[key]:{form}} -> {trained[key]:{form}}" for key, form in (
        ("pass@1", ".3f"), ("think_share", ".2f"), ("mean_length", ".0f")))
    return (f"| {seed} | {base['greedy']:.3f} | {trained['greedy']:.3f} | {pairs} | {summary['steps']} | "
            f"{summary['seconds_warm_start']:.0f} s | {summary['seconds_total']:.0f} s |\n")


def put(name, text, target="seeds"):
    """Replace what stands in README.md between the marks `made by make TARGET: NAME` and `end of NAME`."""
    readme = (ROOT / "README.md").read_text()
    start, end = f"<!-- made by make {target}: {name} -->\n", f"<!-- end of {name} -->"
    before, after = readme.split(start)[0], readme.split(end)[1]
    (ROOT / "README.md").write_text(before + start + text + end + after)


def example(printed):
    """Of a run's console: the base, the first step and its samples, the last step, what has changed."""
    lines = printed.splitlines()

    def at(pattern):
        return [i for i, line in enumerate(lines) if re.match(pattern, line)]

    base, head, table, greedy, end = (at(pattern)[0] for pattern in (
        "base: ", " step ", " +base trained", " +greedy ", "[0-9]+ steps, "))
    last = at(" *[0-9]+ +[0-9.]+ ")[-1]
    shown = [base, *range(head, head + 4), None, last, table, greedy, end, end + 1]
    return "```\n" + "\n".join("  ..." if i is None else lines[i] for i in shown) + "\n```\n"


def main(seeds):
    results = {}
    (ROOT / "docs").mkdir(exist_ok=True)
    for seed in seeds:
        with tempfile.TemporaryDirectory() as empty:
            command = [sys.executable, ROOT / "grpo.py", "--seed", seed, "--base_seed", seed]
            printed = subprocess.run(command, cwd=empty, check=True, capture_output=True, text=True).stdout
            folder = Path(empty, f"runs/grpo-arithmetic-s{seed}")
            results[seed] = json.loads((folder / "summary.json").read_text())
            if seed == seeds[0]:
                put("example", example(printed))
                shutil.copyfile(folder / "curve.png", ROOT / "docs" / "curve.png")
        print(HEAD + row(seed, results[seed]), flush=True)
    problems = results[seeds[0]]["base"]["problems"]
    machine = f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}"
    seconds = statistics.median(summary["seconds_total"] for summary in results.values())
    record = json.dumps({"machine": machine, "seeds": results}, indent=2)
    (ROOT / "docs" / "seeds.json").write_text(record + "\n")
    table = "".join(row(seed, summary) for seed, summary in results.items())
    put("table", f"{HEAD}{table}\n{problems} held-out problems; {machine}; median {seconds:.0f} s.\n")


if __name__ == "__main__":
    main(sys.argv[1:] or list("01234"))
