"""Measure the chapters of the path, look up their numbers by name, and judge their claims."""
import hashlib
import json
import math
import os
import re
from statistics import fmean

from learn.path.rungs import CHAPTERS, ROOT, RUNGS, sides

STORED = ROOT / "docs" / "path.json"
SWEPT = ROOT / "docs" / "path-rates.json"
SEEDS = (0, 1, 2, 3, 4)
FACTORS = (0.25, 0.5, 1, 2, 4)      # of RATE
CHOICE = (5, 6, 7)                  # seeds by which the best factor of each script is chosen
FINAL = ("last", "mean", "last_kl", "mean_step_kl", "last_cut", "last_tokens", "accuracy", "samples")


def steps_of(name):
    return int(CHAPTERS[name].fields["steps"])


def digest(source, seed, steps):
    """Hash what a run depends on: the script below its docstring, the seed, the steps. -> str"""
    text = source.split('"""', 2)[2]
    return hashlib.sha256(f"{text}{seed}{steps}".encode()).hexdigest()[:16]


def load(file=None):
    file = file or STORED
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def runs_of(name, stored, seeds=SEEDS):
    """Look up the stored runs of a chapter. -> dict from side to list of runs, one per seed"""
    return {side: [stored[digest(source, seed, steps_of(name))] for seed in seeds]
            for side, source in sides(name).items()}


def save(runs, file=None):
    """Write docs/path.json in a way that never leaves half a file if you interrupt it. Runs of
    scripts that have changed since then are left out."""
    file = file or STORED
    factors, seeds = (FACTORS, CHOICE + SEEDS) if file == SWEPT else ((1,), range(100))
    current = {digest(at_rate(source, factor), seed, steps_of(name)) for name in RUNGS
               for source in sides(name).values() for factor in factors for seed in seeds}
    text = json.dumps({key: runs[key] for key in sorted(runs) if key in current})
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(text.replace('}, "', '},\n"') + "\n", encoding="utf-8")
    part.replace(file)


def measure(names, seeds=SEEDS):
    """Run what docs/path.json does not contain yet, and store it there after each run. If you stop
    it, the next call continues."""
    from learn.path.runs import run
    for name, seed in ((name, seed) for name in names for seed in seeds):
        for side, source in sides(name).items():
            key = digest(source, seed, steps_of(name))
            if key not in load():
                one = short(run(source, seed, steps_of(name)))
                save(load() | {key: one})
                print(f"{name}, {side}, seed {seed}: {value(one, 'last'):.3f} of the last outputs "
                      f"right, {one['seconds']:.0f} s", flush=True)


def at_rate(source, factor):
    """Change the constant RATE of a script by a factor. -> script"""
    rate, = re.findall("^RATE = .*? ", source, re.M)
    faster = f"RATE = {float(rate[7:]) * factor:g} "
    return source if factor == 1 else source.replace(rate, faster)


def at_best(name, side, swept):
    """Choose the factor of RATE with the highest @metric (or `last`) of a script, on average over
    the seeds of CHOICE. -> factor, dict from factor to that average"""
    metric = CHAPTERS[name].fields.get("metric", "last")
    means = {factor: fmean(swept[digest(at_rate(sides(name)[side], factor), seed, steps_of(name))]
                           [metric] for seed in CHOICE) for factor in FACTORS}
    return max(means, key=means.get), means


def sweep(names):
    """Run each script at the rates of FACTORS with the seeds of CHOICE, and then at the best of
    these rates with SEEDS, and store the final numbers in docs/path-rates.json."""
    from learn.path.runs import run

    def final(name, source, factor, seed):
        key = digest(at_rate(source, factor), seed, steps_of(name))
        one = load(SWEPT).get(key)
        if one is None:
            stored = load().get(key) or short(run(at_rate(source, factor), seed, steps_of(name)))
            one = {of: round(value(stored, of), 4) for of in FINAL
                   if of.partition("_")[2] in ("", *stored["steps"])}
            save(load(SWEPT) | {key: one}, SWEPT)
            print(f"{name}, {factor} of the rate, seed {seed}: {one['last']:.3f} of the last "
                  "outputs right", flush=True)

    for name in names:
        for factor in FACTORS:
            for seed in CHOICE:
                for source in sides(name).values():
                    final(name, source, factor, seed)
        for side, source in sides(name).items():
            factor, _ = at_best(name, side, load(SWEPT))
            for seed in SEEDS:
                final(name, source, factor, seed)


def short(result):
    """Shorten a result for docs/path.json: three digits of each number, one text. -> dict"""
    steps = result["steps"]
    metrics = {name: [float(f"{step[name]:.3g}") for step in steps]
               for name in (steps[0] if steps else ()) if name not in ("text", "step")}
    return dict(accuracy=result["accuracy"], seconds=round(result["seconds"], 1),
                text=steps[-1]["text"] if steps else "", steps=metrics)


def value(one, name):
    """Compute a number of a stored run. -> float

    accuracy and base are the greedy accuracies at the end and at the start. samples_to 0.6 counts
    outputs until the mean of three steps is at least 0.6. last, first, max and mean summarize the
    share of right outputs, where last is the mean of the last three steps; last_kl, first_kl and
    so on summarize another metric.
    """
    name, _, level = name.partition(" ")
    kind, _, metric = name.partition("_")
    values = one["steps"].get(metric or "right") or [math.nan]
    match name:
        case "accuracy" | "base":
            return one["accuracy"][-1 if name == "accuracy" else 0]
        case "seconds":
            return one["seconds"]
        case "samples":
            return sum(one["steps"]["samples"])
        case "samples_to":
            right, samples = one["steps"]["right"], one["steps"]["samples"]
            return next((sum(samples[:end]) for end in range(3, len(right) + 1)
                         if fmean(right[end - 3:end]) >= float(level)), math.inf)
    return {"last": fmean(values[-3:]), "first": values[0], "max": max(values),
            "mean": fmean(values)}[kind]


def check(names, stored, seeds):
    """Judge the claims of chapters, which are lines such as `without last < with last`. A line that
    ends with `on 4` claims that it holds on at least 4 seeds, and not on all.

    Prints for each claim on how many seeds it holds, and the differences. -> whether all hold
    """
    holds = True
    for name in names:
        runs = runs_of(name, stored, seeds)
        for line in CHAPTERS[name].fields.get("claim", "").splitlines() or ["no claim"]:
            claim, _, least = line.partition(" on ")
            (low, of_low), *other = (part.split(" ", 1) for part in claim.split(" < "))
            differences = [value(b, of_high) - value(a, of_low) for high, of_high in other
                           for a, b in zip(runs[low], runs[high])]
            count = sum(difference > 0 for difference in differences)
            holds = holds and count >= int(least or len(differences))
            print(f"{name:12} {line:44} {count} of {len(differences)}: "
                  + " ".join(f"{difference:+.3g}" for difference in differences))
    return holds
