"""Measure nano.py with one thing taken away or put back at a time; docs/lines.json has the results.

lines.txt has a row for each change. A row has the seeds SEEDS at nano.py's learning rate and at the
rate that is best for this row on the seeds CHOICE. Each row is completed before the next one.
"""
from pathlib import Path
from statistics import fmean

import measuring
from learn.path.measure import CHOICE, EVERY_FACTOR, SEEDS, at_rate, digest, value
from learn.path.rungs import NANO, ROOT, read
from vectors.edits import patch

ROWS = read(Path(__file__).with_name("lines.txt").read_text(encoding="utf-8"))
STORE = measuring.Store(ROOT / "docs" / "lines.json", {})       # its cases are what `case` returns
OUTPUTS = 256                       # of a step, P * G of nano.py


def source(name):
    """Build the script of a row. -> str"""
    row = ROWS[name]
    return NANO if row.on == name else patch(source(row.on), row.fields.get("patch", ""))


def case(name, factor):
    """Hash what a run of a row depends on but for its seed. -> str"""
    return digest(at_rate(source(name), factor), ROWS[name].steps)


def numbers(name, of, seeds=SEEDS, factor=1):
    """Look up a number of the runs of a row, as learn.path.measure.value names it. -> list, one per
    seed. Raises KeyError if a run is missing"""
    runs = [STORE.results[case(name, factor), seed] for seed in seeds]
    return [value({"steps": {"right": one["right"], "samples": [OUTPUTS] * len(one["right"])}}, of)
            for one in runs]


def tune(name):
    """Search for the best learning rate of a row, on the seeds of CHOICE. -> factors of nano.py's
    rate that have to be tried, and the best one; None if some of the runs are missing"""
    def score(factor):
        try:
            return fmean(numbers(name, "last", CHOICE, factor))
        except KeyError:
            return None
    return measuring.search(1, (1, 2), score)


def missing(results):
    """List the runs that the first incomplete row lacks, as far as the stored ones show them.
    -> {(case, seed): (name, factor, seed)}; empty if all rows are complete"""
    for name in ROWS:
        tried, best = tune(name)
        runs = [(1, seed) for seed in SEEDS] + [(rate, seed) for rate in tried for seed in CHOICE]
        runs += [(best, seed) for seed in SEEDS] if best else []
        jobs = {(case(name, rate), seed): (name, rate, seed) for rate, seed in runs}
        if lacking := {job: jobs[job] for job in jobs if job not in results}:
            return lacking
    return {}


def run_row(name, factor, seed):
    """Run a row. -> the share of right outputs in each step, and the greedy accuracy at the end"""
    from learn.path.runs import run
    one = run(at_rate(source(name), factor), seed, is_brief=True, steps=ROWS[name].steps)
    right = [step["reward"] for step in one["steps"]]
    print(f"{ROWS[name].fields['short']}, {factor:g} times the rate, seed {seed}: "
          f"{fmean(right[-3:]):.3f}", flush=True)
    return {"right": right, "accuracy": one["accuracy"][-1]}


def measure():
    """Run what docs/lines.json does not contain yet, and leave out the runs of scripts that have
    changed. If you stop it, the next call continues."""
    measuring.collect(STORE, missing, lambda *job: run_row(*missing(STORE.results)[job]))
    STORE.keep({case(name, factor) for name in ROWS for factor in EVERY_FACTOR})
