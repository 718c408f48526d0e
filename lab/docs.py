"""Helpers for all measurements: run a script, store the numbers in docs/NAME.json, and write tables
between their marks into README.md or a page in docs/."""
import contextlib
import importlib
import io
import json
import os
import platform
import re
import shlex
import tempfile
from pathlib import Path

import common
import plumbing
from report.logs import read_log

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def processor():
    """Name the processor, because its arithmetic decides the bits of a base. -> str"""
    if common.CPU.is_file():
        names = re.findall("^model name.*: (.*)", common.CPU.read_text("utf-8", "replace"), re.M)
        if names:
            return names[0]
    return platform.machine()


MACHINE = f"{os.cpu_count()} CPU cores ({processor()}), Python {platform.python_version()}"


# ---- 1. runs ---------------------------------------------------------------------------------

def run_once(command, seed, metrics=(), scores=()):
    """Run a command line in this process. -> columns with the metrics of each step and the scores
    of the trained policy"""
    script, *flags = shlex.split(command)
    main = importlib.import_module(script.removesuffix(".py").replace("/", ".")).main
    with tempfile.TemporaryDirectory() as work, contextlib.redirect_stdout(io.StringIO()):
        folder = Path(work, "run")
        summary = main([*flags, "--seed", str(seed), "--output_dir", str(folder)])
        log = read_log(folder, "metrics", "reward")
    columns = {name: [line.get(name) for line in log] for name in metrics}
    return columns | {name: summary["trained"][name] for name in scores}


# ---- 2. docs/ --------------------------------------------------------------------------------

def record(name, **content):
    """Write docs/NAME.json, with the machine on which the numbers were measured."""
    text = json.dumps({"machine": MACHINE} | content, indent=2)
    plumbing.write(DOCS / f"{name}.json", text + "\n")


def table(head, rows):
    """Write a table in Markdown. head: list of headings; rows: lists of cells. -> str"""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in lines)


def put(name, text, target):
    """Replace the text between the marks `made by make TARGET: NAME` and `end of NAME`. Raises
    ValueError unless each mark occurs exactly once, both on the same page."""
    start = f"<!-- made by make {target}: {name} -->\n"
    end = f"<!-- end of {name} -->"
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    [page] = [page for page in pages if start in page.read_text("utf-8")]
    before, rest = page.read_text("utf-8").split(start)
    _, after = rest.split(end)
    page.write_text(f"{before}{start}{text}{end}{after}", "utf-8")
