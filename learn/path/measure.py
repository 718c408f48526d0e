"""Measure the chapters of the path, and look up their numbers by name."""
import contextlib
import hashlib
import json
import math
import re
from itertools import product
from statistics import fmean

import plumbing
from learn.path.rungs import BASE, CHAPTERS, ROOT, RUNGS, script, sides

FILE = ROOT / "docs" / "path.json"
RATE = float(re.search("^RATE = (.*?) ", script("nano"), re.M)[1])
SEEDS = (0, 1, 2, 3, 4)
CHOICE = (5, 6, 7)                  # seeds by which the best rate of each script is chosen
FACTORS = (0.25, 0.5, 1, 2, 4)      # of RATE, in a picture of all rates
EVERY_FACTOR = [2.0**power for power in range(-5, 6)]
FINAL = ("last", "mean", "last_kl", "mean_step_kl", "last_cut", "last_tokens", "accuracy",
         "samples")                 # what is stored of a run at another rate
BASE_THEN = CHAPTERS[BASE].fields["measured"]          # a sentence for whoever reads the numbers


def load():
    """Read docs/path.json. -> {digest of a run: its results}; empty if there is no such file"""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


STORED = load()


def digest(source, seed, steps):
    """Hash what a run depends on: the script below its docstring, the seed, the steps. -> str"""
    text = source.split('"""', 2)[2]
    return hashlib.sha256(f"{text}{seed}{steps}".encode()).hexdigest()[:16]


def at_rate(source, factor):
    """Multiply the constant RATE of a script by a factor. -> script"""
    faster = f"RATE = {RATE * factor:g} "
    return source if factor == 1 else re.sub("^RATE = .*? ", faster, source, count=1, flags=re.M)


def runs_at(name, side, seeds=SEEDS, factor=1):
    """Look up the stored runs of a side of a chapter, with a factor of the rate. -> list of runs,
    one per seed. Raises KeyError if one of them is missing"""
    source = at_rate(sides(name)[side], factor)
    return [STORED[digest(source, seed, CHAPTERS[name].steps)] for seed in seeds]


def runs_of(name, at_best=False):
    """Look up the stored runs of a chapter, at nano.py's rate or at the best one of each side.
    -> {side: list of runs}"""
    factors = best(name) if at_best else dict.fromkeys(sides(name), 1)
    return {side: runs_at(name, side, factor=factors[side]) for side in sides(name)}


def value(one, name):
    """Compute a number of a stored run. -> float

    accuracy is the greedy accuracy at the end. samples_to 0.6 counts outputs until the mean of
    three steps is at least 0.6. last, first, max and mean summarize the share of right outputs,
    where last is the mean of the last three steps; last_kl and so on summarize another metric.
    """
    if "steps" not in one or name == "seconds":
        return one[name]                    # of some runs, only the final numbers are stored
    if name == "accuracy":
        return one["accuracy"][-1]
    name, _, level = name.partition(" ")
    kind, _, metric = name.partition("_")
    if kind == "samples":
        right = one["steps"]["right"]
        samples = one["steps"]["samples"]
        if not level:
            return sum(samples)
        for end in range(3, len(right) + 1):
            if fmean(right[end - 3:end]) >= float(level):
                return sum(samples[:end])
        return math.inf
    values = one["steps"][metric or "right"]
    if kind == "last":
        return fmean(values[-3:])
    if kind == "first":
        return values[0]
    if kind == "max":
        return max(values)
    if kind == "mean":
        return fmean(values)
    raise KeyError(kind)


def ends(name, at_best=False):
    """Look up where the runs of a chapter end, but not those of the base, which learns nothing.
    -> {side: shares of right outputs, one per seed}; empty if a run is not stored yet"""
    try:
        runs = runs_of(name, at_best)
    except KeyError:
        return {}
    return {side: [value(one, "last") for one in runs[side]]
            for side, source in sides(name).items() if source != script(BASE)}


def default_seed(name):
    """Choose the seed whose runs end nearest to the means of all seeds: with the smallest sum, over
    the sides, of squared distances. -> int; the first seed if runs are missing"""
    return min(SEEDS, key=lambda seed: sum(
        (shares[SEEDS.index(seed)] - fmean(shares))**2 for shares in ends(name).values()))


def by_rate(name, side):
    """Average the share of right outputs at the end over the seeds of CHOICE. -> {factor: mean}"""
    means = {}
    for factor in EVERY_FACTOR:
        with contextlib.suppress(KeyError):                 # there are no runs at this rate
            means[factor] = fmean(value(one, "last")
                                  for one in runs_at(name, side, CHOICE, factor))
    return means


def highest(means):
    """Choose the factor with the highest mean. If several are equal, because nothing was learned at
    any rate, choose the one nearest to 1. -> float"""
    return max(means, key=lambda factor: (means[factor], -abs(math.log2(factor))))


def best(name):
    """Choose for each side of a chapter the factor that is best on the seeds of CHOICE. -> dict"""
    return {side: highest(by_rate(name, side)) for side in sides(name)}


def measure(names):
    """Run what docs/path.json does not contain yet. If you stop it, the next call continues."""
    for name in names:
        for side in sides(name):
            for seed in SEEDS:
                store(name, side, seed)
            if name != RUNGS[0]:                            # before which nothing is trained
                sweep(name, side)


def sweep(name, side):
    """Run a script at further rates, with the seeds of CHOICE, until both neighbours of the best
    rate were run. Then run it at the best rate with SEEDS."""
    is_drawn = any("x=rate" in line and f"| {side}=" in line
                   for line in CHAPTERS[name].fields["picture"].splitlines())
    factors = {*FACTORS} if is_drawn else {0.5, 1}
    while factors:
        for factor, seed in product(factors, CHOICE):
            store(name, side, seed, factor)
        means = by_rate(name, side)
        best = highest(means)
        factors = {best / 2, best * 2} & {*EVERY_FACTOR} - means.keys()
    for seed in SEEDS:
        store(name, side, seed, best)


def store(name, side, seed, factor=None):
    """Run a script unless docs/path.json contains the run, and store it there. With a factor, run
    the script at this rate, and store only the final numbers."""
    from learn.path.runs import run
    source, steps = at_rate(sides(name)[side], factor or 1), CHAPTERS[name].steps
    key = digest(source, seed, steps)
    if key in STORED and (factor or "steps" in STORED[key]):
        return
    one = rounded(run(source, seed, steps=steps))
    if factor:
        one = {of: round(value(one, of), 4) for of in FINAL
               if of.partition("_")[2] in ("", *one["steps"])}
    save({key: one})
    print(f"{name}, {side}, {factor or 1:g} times the rate, seed {seed}: stored", flush=True)


def rounded(result):
    """Round the numbers of a run to three digits (samples: four), and keep one text. -> dict"""
    steps = result["steps"]
    metrics = {name: [float(f"{step[name]:.{4 if name == 'samples' else 3}g}") for step in steps]
               for name in (steps[0] if steps else ()) if name not in ("text", "step")}
    return dict(accuracy=result["accuracy"], seconds=round(result["seconds"], 1),
                text=steps[-1]["text"] if steps else "", steps=metrics)


def save(runs):
    """Add runs to docs/path.json, to which a second process may add others, and leave out those of
    scripts that have changed since."""
    current = {digest(at_rate(source, factor), seed, CHAPTERS[name].steps) for name in RUNGS
               for source in sides(name).values() for factor in EVERY_FACTOR
               for seed in SEEDS + CHOICE}
    STORED.update(load() | runs)
    text = json.dumps({key: STORED[key] for key in sorted(STORED) if key in current})
    plumbing.write(FILE, text.replace('}, "', '},\n"') + "\n")
