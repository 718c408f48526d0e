"""Helpers for all measurements: run a command, measure an experiment, store its numbers in
docs/NAME.json, and write tables between their marks into README.md or a page in docs/.

An experiment has a function measure, which is called for each job, and a function page, which
writes its part of a page from the stored numbers."""
import hashlib
import importlib
import json
import os
import platform
import re
import shlex
import subprocess
from pathlib import Path

import torch

import common
import measuring
from report.logs import read_log, read_summary

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

    def columns(folder):
        log = read_log(folder, "metrics", "reward")
        trained = read_summary(folder)["trained"]
        return ({name: [line.get(name) for line in log] for name in metrics}
                | {name: trained[name] for name in scores})
    return measuring.run(main, [*flags, "--seed", str(seed)], columns)


# ---- 2. experiments --------------------------------------------------------------------------

def commit():
    """Name the commit that is measured, and whether files differ from it. -> str; "" without git"""
    found, changes = (subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        for words in (["describe", "--always"], ["status", "--porcelain", "--", ".", ":!docs"]))
    return f"{found}-dirty" if changes else found


def describe(processes):
    """Describe a measurement that begins now. -> dict"""
    return {"processes": processes, "machine": MACHINE, "torch": torch.__version__,
            "commit": commit()}


def begin(name, about):
    """Begin a measurement, or continue the interrupted one with the same `about`. Its results are
    kept in runs/ until they can be published. Those of other measurements stay there, because hours
    may have gone into them. -> Store"""
    digest = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:8]
    path = ROOT / "runs" / f"{name}-{digest}.json"
    for other in path.parent.glob(f"{name}-{'[0-9a-f]' * 8}.json"):
        if other != path:
            before = measuring.read(other, "delete it")["about"]
            began = [f"{key} {before.get(key)}" for key in measuring.different(before, about)]
            print(f"{other}: stays, but does not continue, because it began with "
                  f"{', '.join(began)}")
    return measuring.Store(path, {"seconds": 0} | about)


def measured(name, jobs_of, perform, about, processes=None):
    """Measure an experiment. -> Store in runs/ with all results, which can be moved"""
    store = begin(name, about)
    measuring.collect(store, jobs_of, perform, processes)
    return store


def load(name, remedy):
    """Load the stored results of an experiment. -> {(case, seed): result}, a dict about the
    measurement"""
    content = measuring.read(DOCS / f"{name}.json", remedy)
    return measuring.results_of(content), content["about"]


# ---- 3. docs/ --------------------------------------------------------------------------------

def record(name, **content):
    """Write docs/NAME.json, with the machine and the commit on which the numbers were measured."""
    measuring.write(DOCS / f"{name}.json", {"machine": MACHINE, "commit": commit()} | content)


def table(head, rows):
    """Write a table in Markdown. head: list of headings; rows: lists of cells. -> str"""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in lines)


def put(name, text, target):
    """Replace the text between the marks `made by make TARGET: NAME` and `end of NAME`. Raises
    ValueError unless each mark occurs exactly once, both on the same page."""
    start = f"<!-- made by make {target}: {name} -->\n"
    end = f"<!-- end of {name} -->"
    pages = [ROOT / "README.md", ROOT / "tests/logs/README.md", *DOCS.rglob("*.md")]
    [page] = [page for page in pages if start in page.read_text("utf-8")]
    before, rest = page.read_text("utf-8").split(start)
    _, after = rest.split(end)
    page.write_text(f"{before}{start}{text}{end}{after}", "utf-8")
