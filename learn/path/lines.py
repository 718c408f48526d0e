"""Measure nano.py with one thing taken away or put back at a time; docs/lines.json has the results.

lines.txt has a row for each change. A row has the seeds SEEDS at nano.py's learning rate and at the
rate that is best for this row on the seeds CHOICE, and then, with a judge's points as the reward,
at the rate that is best for this row then. Each row is completed before the next one.
"""
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import measuring
from learn.path.measure import CHOICE, EVERY_FACTOR, SEEDS, at_rate, digest, value
from learn.path.rungs import BASE, CHAPTERS, NANO, ROOT, read, script
from vectors.edits import patch

ROWS = read(Path(__file__).with_name("lines.txt").read_text(encoding="utf-8"))
STORE = measuring.Store(ROOT / "docs" / "lines.json", {})       # its cases are what `case` returns
DIRECTIONS = {"smaller": (-1, 0), "larger": (0, 1), "none": (-1, 1)}


def source(name, is_judged=False):
    """Build the script of a row. is_judged: whether the reward is a judge's points. -> str"""
    row = ROWS[name]
    on = source if row.on in ROWS else script
    text = NANO if row.on == name else patch(on(row.on), row.fields.get("patch", ""))
    if is_judged:
        text = patch(text, CHAPTERS[BASE].fields["judge"])
        text = patch(text, row.fields.get("judged", ""))
    return text


def case(name, factor, is_judged=False):
    """Hash what a run of a row depends on, except for its seed. -> str"""
    return digest(at_rate(source(name, is_judged), factor), ROWS[name].steps)


def ends(name, seeds=SEEDS, factor=1, is_judged=False):
    """Look up where the runs of a row end. -> shares of right outputs, one per seed. Raises
    KeyError if a run is missing"""
    return [value({"steps": STORE.results[case(name, factor, is_judged), seed]}, "last")
            for seed in seeds]


def tune(name, is_judged=False):
    """Search for the best learning rate of a row, on the seeds of CHOICE. -> factors of nano.py's
    rate that have to be tried, and the best one; None if some of the runs are missing"""
    def score(factor):
        try:
            return fmean(ends(name, CHOICE, factor, is_judged))
        except KeyError:
            return None
    return measuring.search(1, (1, 2), score)


def predicted(name):
    """Read what we predicted for a row: the ranges of its differences, in points, at nano.py's
    rate, at the best rates and, if the row is measured there, under a judge's points.
    -> two or three pairs"""
    text = ROWS[name].fields.get("predicted", "none 0 | none 0 | none 0")
    return [tuple(end * float(bound) for end in DIRECTIONS[direction])
            for direction, bound in map(str.split, text.split(" | "))]


def missing(results):
    """List the runs that the first incomplete row lacks, as far as the stored ones show them.
    -> {(case, seed): (name, factor, is_judged, seed)}; empty if all rows are complete"""
    for is_judged, name in product((False, True), ROWS):
        if is_judged and len(predicted(name)) < 3:
            continue
        tried, best = tune(name, is_judged)
        runs = [] if is_judged else [(1, seed) for seed in SEEDS]
        runs += [(rate, seed) for rate in tried for seed in CHOICE]
        runs += [(best, seed) for seed in SEEDS] if best else []
        jobs = {(case(name, rate, is_judged), seed): (name, rate, is_judged, seed)
                for rate, seed in runs}
        if lacking := {job: jobs[job] for job in jobs if job not in results}:
            return lacking
    return {}


class Effect(NamedTuple):
    """The share of right outputs at the end of a row, compared with another row on the same seeds.
    Differences are in points, which are hundredths."""
    factor: float       # of nano.py's learning rate
    shares: list        # of right outputs at the end, one per seed
    difference: float   # their mean difference; nan for nano.py itself
    interval: tuple     # its 95% interval
    predicted: tuple    # the ends of the predicted range

    def is_contradicted(self):
        """Whether the whole interval is outside the predicted range."""
        return self.interval[1] < self.predicted[0] or self.interval[0] > self.predicted[1]


def against(name):
    """Name the row with which a row is compared; nano.py is compared with none. -> str"""
    return ROWS[name].fields.get("against", "" if name == "nano" else "nano")


def effects(name):
    """Compare a row with another one, at nano.py's rate, at the best rates of both and, if these
    runs are stored, at the best rates under a judge's points. -> two or three Effects. Raises
    KeyError if another run is missing"""
    found = []
    for (is_best, is_judged), span in zip(((False, False), (True, False), (True, True)),
                                          predicted(name)):
        rows = [name, against(name)] if against(name) else [name]
        factors = [tune(row, is_judged)[1] if is_best else 1 for row in rows]
        try:
            if None in factors:
                raise KeyError(name)
            shares = [ends(row, SEEDS, factor, is_judged)
                      for row, factor in zip(rows, factors)]
        except KeyError:
            if is_judged:
                return found
            raise
        gains = [100 * (a - b) for a, b in zip(shares[0], shares[-1])]
        found.append(Effect(factors[0], shares[0], fmean(gains),
                            tuple(map(float, measuring.student(gains))), span))
    return found


def complete():
    """List the rows whose runs are all stored, and those of the rows with which they are compared.
    -> names"""
    names = []
    for name in ROWS:
        try:
            effects(name)
        except KeyError:
            continue
        names.append(name)
    return names


def run_row(name, factor, is_judged, seed):
    """Run a row. -> the share of right outputs in each step, and the greedy accuracy at the end"""
    from learn.path.runs import run
    one = run(at_rate(source(name, is_judged), factor), seed, has_kl=False,
              steps=ROWS[name].steps)
    right = [round(step["right"], 3) for step in one["steps"]]
    judge = ", a judge's points" if is_judged else ""
    print(f"{ROWS[name].fields['short']}{judge}, {factor:g} times the rate, seed {seed}: "
          f"{fmean(right[-3:]):.3f}", flush=True)
    return {"right": right, "accuracy": one["accuracy"][-1]}


def measure():
    """Run what docs/lines.json does not contain yet, and leave out the runs of scripts that have
    changed. If you stop it, the next call continues."""
    measuring.collect(STORE, missing, lambda *job: run_row(*missing(STORE.results)[job]))
    STORE.keep({case(*of) for of in product(ROWS, EVERY_FACTOR, (False, True))})
