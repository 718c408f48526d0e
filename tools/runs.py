"""What the tools that measure have in common: run scripts, read what they left, write down what was
found in docs/ and, between its marks, on the page that has them, README.md or one in docs/."""
import contextlib
import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path

import common

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
MACHINE = f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}"


# ---- 1. runs ---------------------------------------------------------------------------------

def run(script, folder, *flags):
    """Run a script into a new `folder`. Exits as the script does if it fails. -> its summary"""
    words = [str(flag) for flag in flags] + ["--output_dir", str(folder)]
    print(f"$ python {script} {' '.join(words)}", flush=True)
    command = [sys.executable, ROOT / script, *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    if done.returncode != 0:
        raise SystemExit(done.returncode)
    return read_summary(folder)


def read_summary(folder):
    """The scores of base and trained policy, and the times. -> dict; None before the run's end"""
    path = Path(folder, "summary.json")
    return loads(path.read_text(encoding="utf-8")) if path.exists() else None


def read_log(folder, name, *keys):
    """The records of NAME.jsonl that have these keys; [] without such a log. Lines that are no
    record, such as the half of one that a kill left, are skipped. -> list of dicts"""
    path = Path(folder, f"{name}.jsonl")
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    records = []
    for line in text.split("\n"):
        with contextlib.suppress(ValueError):
            record = loads(line)
            if isinstance(record, dict) and record.keys() >= set(keys):
                records.append(record)
    return records


def loads(text):
    """json.loads, in which NaN and infinities become None, as a browser's JSON lacks them."""
    return json.loads(text, parse_constant=finite, parse_float=finite)


def finite(number):
    """The number, or the digits of one, as a float; None if it is not finite, as 1e999."""
    number = float(number)
    return number if math.isfinite(number) else None


# ---- 2. docs/ --------------------------------------------------------------------------------

def record(name, **content):
    """Write docs/NAME.json, which says on which machine the numbers were found."""
    text = json.dumps({"machine": MACHINE} | content, indent=2)
    common.write(DOCS / f"{name}.json", text + "\n")


def table(head, rows):
    """A table in Markdown. head: list of headings; rows: lists of cells. -> str"""
    rule = ["---"] * len(head)
    text = ""
    for row in [head, rule, *rows]:
        cells = " | ".join(str(cell) for cell in row)
        text += f"| {cells} |\n"
    return text


def put(name, text, target):
    """Replace what stands between the mark `made by make TARGET: NAME` and the mark `end of NAME`.
    ValueError unless both are once on one page."""
    start = f"<!-- made by make {target}: {name} -->\n"
    end = f"<!-- end of {name} -->"
    pages = [ROOT / "README.md", *DOCS.glob("*.md")]
    [page] = [page for page in pages if start in page.read_text()]
    before, rest = page.read_text().split(start)
    _, after = rest.split(end)
    page.write_text(f"{before}{start}{text}{end}{after}")
