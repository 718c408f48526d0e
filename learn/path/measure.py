"""Measure the chapters of the path, and look up their numbers by name."""
import hashlib
import itertools
import json
import math
import re
from statistics import fmean

import plumbing
from learn.path.rungs import CHAPTERS, ROOT, RUNGS, script, sides

STORED = ROOT / "docs" / "path.json"
RATE = float(re.search("^RATE = (.*?) ", script("nano"), re.M)[1])
SEEDS = (0, 1, 2, 3, 4)
CHOICE = (5, 6, 7)                  # seeds by which the best rate of each script is chosen
FACTORS = (0.25, 0.5, 1, 2, 4)      # which multiply RATE; beyond them if the best is at an end
EVERY_FACTOR = [2.0**power for power in range(-5, 6)]
FINAL = ("last", "mean", "last_kl", "mean_step_kl", "last_cut", "last_tokens", "accuracy",
         "samples")                 # what is stored of a run at another rate


def steps_of(name):
    return int(CHAPTERS[name].fields["steps"])


def digest(source, seed, steps):
    """Hash what a run depends on: the script below its docstring, the seed, the steps. -> str"""
    text = source.split('"""', 2)[2]
    return hashlib.sha256(f"{text}{seed}{steps}".encode()).hexdigest()[:16]


def at_rate(source, factor):
    """Multiply the constant RATE of a script by a factor. -> script"""
    faster = f"RATE = {RATE * factor:g} "
    return source if factor == 1 else re.sub("^RATE = .*? ", faster, source, count=1, flags=re.M)


def load():
    return json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}


def runs_at(name, side, stored, seeds=SEEDS, factor=1):
    """Look up the stored runs of a side of a chapter, with a factor of the rate. -> list of runs,
    one per seed. Raises KeyError if one of them is missing"""
    source = at_rate(sides(name)[side], factor)
    return [stored[digest(source, seed, steps_of(name))] for seed in seeds]


def runs_of(name, stored, factors=None):
    """Look up the stored runs of a chapter, at a factor for each side. -> {side: list of runs}"""
    return {side: runs_at(name, side, stored, factor=(factors or {}).get(side, 1))
            for side in sides(name)}


def default_seed(name, stored):
    """Choose the stored seed whose runs end nearest to the means of all seeds: with the smallest
    sum, over the sides, of squared distances of `last`. -> int; the first seed if runs are missing
    """
    try:
        runs = [one for one in runs_of(name, stored).values() if "steps" not in one[0]
                or one[0]["steps"]]                     # the base has no steps
    except KeyError:
        return SEEDS[0]
    lasts = [[value(one, "last") for one in side] for side in runs]
    return min(SEEDS, key=lambda seed: sum(
        (side[SEEDS.index(seed)] - fmean(side))**2 for side in lasts))


def save(runs):
    """Add runs to docs/path.json, and leave out the runs of scripts that have changed since."""
    current = {digest(at_rate(source, factor), seed, steps_of(name)) for name in RUNGS
               for source in sides(name).values() for factor in EVERY_FACTOR
               for seed in SEEDS + CHOICE}
    runs = load() | runs
    text = json.dumps({key: runs[key] for key in sorted(runs) if key in current})
    plumbing.write(STORED, text.replace('}, "', '},\n"') + "\n")


def store(name, side, source, seed, factor=None):
    """Run a script unless docs/path.json contains the run, and store it there. With a factor, run
    the script at this rate, and store only the final numbers."""
    from learn.path.runs import run
    source = at_rate(source, factor or 1)
    key = digest(source, seed, steps_of(name))
    if key not in load() or not factor and "steps" not in load()[key]:
        one = short(run(source, seed, steps_of(name)))
        last = value(one, "last")
        if factor:
            one = {of: round(value(one, of), 4) for of in FINAL
                   if of.partition("_")[2] in ("", *one["steps"])}
        save({key: one})
        print(f"{name}, {side}, {factor or 1:g} times the rate, seed {seed}: {last:.3f} of the "
              "last outputs right", flush=True)


def measure(names):
    """Run what docs/path.json does not contain yet. If you stop it, the next call continues."""
    for name, seed in itertools.product(names, SEEDS):
        for side, source in sides(name).items():
            store(name, side, source, seed)


def sweep(names):
    """Search for the best rate of each script, by factors of 2 and with the seeds of CHOICE, and
    run it at this rate with SEEDS. Then run it at the rates of FACTORS that are still missing."""
    scripts = [(name, side, source) for name in names for side, source in sides(name).items()]
    for name, side, source in scripts:
        factors = {0.5, 1}
        while factors:
            for factor, seed in itertools.product(factors, CHOICE):
                store(name, side, source, seed, factor)
            means = by_rate(name, side, load())
            best = highest(means)
            factors = {best / 2, best * 2} & {*EVERY_FACTOR} - means.keys()
        for seed in SEEDS:
            store(name, side, source, seed, best)
    for one, factor, seed in itertools.product(scripts, FACTORS, CHOICE):
        store(*one, seed, factor)


def by_rate(name, side, stored):
    """Average the share of right outputs at the end over the seeds of CHOICE. -> {factor: mean}"""
    source, steps = sides(name)[side], steps_of(name)
    is_stored = lambda factor: all(digest(at_rate(source, factor), seed, steps) in stored
                                   for seed in CHOICE)
    return {factor: fmean(value(one, "last") for one in runs_at(name, side, stored, CHOICE, factor))
            for factor in EVERY_FACTOR if is_stored(factor)}


def highest(means):
    """Choose the factor with the highest mean. If several are equal, because nothing was learned at
    any rate, choose the one nearest to 1. -> float"""
    return max(means, key=lambda factor: (means[factor], -abs(math.log2(factor))))


def best(name, stored):
    """Choose for each side of a chapter the factor that is best on the seeds of CHOICE. -> dict"""
    return {side: highest(by_rate(name, side, stored)) for side in sides(name)}


def short(result):
    """Shorten a result for docs/path.json: three digits (of samples: four), one text. -> dict"""
    steps = result["steps"]
    metrics = {name: [float(f"{step[name]:.{4 if name == 'samples' else 3}g}") for step in steps]
               for name in (steps[0] if steps else ()) if name not in ("text", "step")}
    return dict(accuracy=result["accuracy"], seconds=round(result["seconds"], 1),
                text=steps[-1]["text"] if steps else "", steps=metrics)


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
    values = one["steps"].get(metric or "right") or [math.nan]
    if kind == "samples":
        right, samples = one["steps"]["right"], one["steps"]["samples"]
        return sum(samples) if not level else next(
            (sum(samples[:end]) for end in range(3, len(right) + 1)
             if fmean(right[end - 3:end]) >= float(level)), math.inf)
    return {"last": fmean(values[-3:]), "first": values[0], "max": max(values),
            "mean": fmean(values)}[kind]
