"""Runs for tables and pictures: start a script, read what it left."""
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

from tools.seeds import ROOT

MACHINE = f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}"


def run(script, folder, *flags, cwd=ROOT, quiet=False):
    """Run a script into a new `folder`, its lines going where ours go, or nowhere. -> its summary. Exits as
    the script does if it fails."""
    command = [sys.executable, ROOT / script, *map(str, flags), "--output_dir", folder]
    print(f"$ python {script} {' '.join(map(str, flags))} --output_dir {folder}", flush=True)
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.DEVNULL if quiet else None)
    if done.returncode:
        raise SystemExit(done.returncode)
    return json.loads(Path(cwd, folder, "summary.json").read_text())


def curve(folder, *names):
    """The metrics `names` of a run step by step. -> list of steps, one list of values for each name"""
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "step_time" in line]
    return [line["step"] for line in lines], *([line.get(name) for line in lines] for name in names)


def record(name, **content):
    """Write docs/NAME.json, with the machine."""
    (ROOT / "docs").mkdir(exist_ok=True)
    (ROOT / "docs" / f"{name}.json").write_text(json.dumps({"machine": MACHINE} | content, indent=2) + "\n")


def table(head, rows):
    """A table of README.md: head, a list of headings; rows, lists of cells."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def picture(name, panels, width=4.2):
    """Draw docs/NAME.png: panels, a list of functions that fill an axis each."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(1, len(panels), figsize=(width * len(panels), 3.4), squeeze=False)
    for axis, fill in zip(axes[0], panels):
        fill(axis)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / f"{name}.png", dpi=110)
    pyplot.close(figure)
