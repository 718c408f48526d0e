"""The table of seeds in README.md: python tools/seeds.py 0 1 2 3 4 (make seeds).

Runs the main job once for each seed, in an empty folder, so that every run warm-starts a base of its own
(--base_seed is the seed, too). Writes docs/seeds.json and the table between the marks in README.md.
"""
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARKS = "<!-- made by make seeds -->\n", "<!-- end of make seeds -->"
COLUMNS = ("| seed | base greedy | trained greedy | base thinks | trained thinks | mean length | seconds |\n"
           + "|---" * 7 + "|\n")


def row(seed, summary):
    base, trained = summary["base"], summary["trained"]
    return (f"| {seed} | {base['greedy']:.3f} | {trained['greedy']:.3f} | {base['think_share']:.2f} | "
            f"{trained['think_share']:.2f} | {base['mean_length']:.1f} -> {trained['mean_length']:.1f} | "
            f"{summary['seconds_total']:.0f} |\n")


def main(seeds):
    results = {}
    for seed in seeds:
        with tempfile.TemporaryDirectory() as empty:
            flags = ["--seed", seed, "--base_seed", seed, "--output_dir", "run"]
            subprocess.run([sys.executable, ROOT / "grpo.py", *flags], cwd=empty, check=True)
            results[seed] = json.loads(Path(empty, "run", "summary.json").read_text())
    problems = results[seeds[0]]["base"]["problems"]
    machine = f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}"
    seconds = statistics.median(summary["seconds_total"] for summary in results.values())
    (ROOT / "docs").mkdir(exist_ok=True)
    record = json.dumps({"machine": machine, "seeds": results}, indent=2)
    (ROOT / "docs" / "seeds.json").write_text(record + "\n")
    readme, (start, end) = (ROOT / "README.md").read_text(), MARKS
    before, after = readme.split(start)[0], readme.split(end)[1]
    table = "".join(row(seed, summary) for seed, summary in results.items())
    note = f"\n{problems} held-out problems, {machine}; median {seconds:.0f} s, warm start included.\n"
    (ROOT / "README.md").write_text(before + start + COLUMNS + table + note + end + after)
    print(COLUMNS + table + note)


if __name__ == "__main__":
    main(sys.argv[1:] or list("01234"))
