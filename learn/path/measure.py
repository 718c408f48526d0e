"""Measure the chapters of the path, and look up their numbers by name."""
import hashlib
import re
from itertools import product
from statistics import fmean

import measuring
from learn.path.rungs import BASE, CHAPTERS, ROOT, RUNGS, script, sides

FILE = ROOT / "docs" / "path.json"
RATE = float(re.search("^RATE = (.*?) ", script("nano"), re.M)[1])
SEEDS = (0, 1, 2, 3, 4)
EXERCISE_SEED = 0                   # of the answers to the exercises, and of edited scripts
CHOICE = (5, 6, 7)                  # seeds by which the best rate of each script is chosen
FACTORS = (0.25, 0.5, 1, 2, 4)      # of RATE, in a picture of all rates
BEHIND = 0.15                       # of right outputs
EVERY_FACTOR = [2.0**power for power in range(-5, 6)]               # to which a search can get
# what is stored at another rate
FINAL = ("last", "mean", "last_cut", "last_tokens", "last_made_up", "samples")


STORE = measuring.Store(FILE, {})                      # its cases are what `digest` returns


class NotMeasured(LookupError):
    """A run is not in docs/path.json yet."""


def digest(source, steps):
    """Hash what a run depends on, except for its seed: the script below its docstring, the steps.
    -> str"""
    text = source.split('"""', 2)[2]
    return hashlib.sha256(f"{text}{steps}".encode()).hexdigest()[:16]


def at_rate(source, factor):
    """Multiply the constant RATE of a script by a factor. -> script"""
    faster = f"RATE = {RATE * factor:g} "
    return source if factor == 1 else re.sub("^RATE = .*? ", faster, source, count=1, flags=re.M)


def runs_at(name, side, seeds=SEEDS, factor=1):
    """Look up the stored runs of a side of a chapter, with a factor of the rate. -> list of runs,
    one per seed. Raises NotMeasured if one of them is missing"""
    source = at_rate(sides(name)[side], factor)
    case = digest(source, CHAPTERS[name].steps)
    if any((case, seed) not in STORE.results for seed in seeds):
        raise NotMeasured(f"{name}, {side}, {factor:g} times the rate")
    return [STORE.results[case, seed] for seed in seeds]


def is_measured(name):
    """Whether all runs of a chapter are stored."""
    return all(job in STORE.results for job in jobs(name))


def runs_of(name, at_best=False):
    """Look up the stored runs of a chapter, at nano.py's rate or at the best one of each side.
    -> {side: list of runs}"""
    factors = best(name) if at_best else dict.fromkeys(sides(name), 1)
    return {side: runs_at(name, side, factor=factor) for side, factor in factors.items()}


def value(one, name):
    """Compute a number of a stored run. -> float

    accuracy is the greedy accuracy at the end, and samples counts the outputs. last, first, max and
    mean summarize the share of right outputs, where last is the mean of the last three steps;
    last_kl and so on summarize another metric.
    """
    if "steps" not in one or name == "seconds":
        return one[name]                    # of some runs, only the final numbers are stored
    if name == "accuracy":
        return one["accuracy"][-1]
    kind, _, metric = name.partition("_")
    if kind == "samples":
        return sum(one["steps"]["samples"])
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


def trained(name):
    """List the sides of a chapter that are trained, so not the base. -> list"""
    return [side for side, source in sides(name).items() if source != script(BASE)]


def ends(name, at_best=False):
    """Look up where the runs of a chapter end, but not those of the base, which learns nothing.
    -> {side: shares of right outputs, one per seed}; empty if a run is not stored yet"""
    try:
        runs = runs_of(name, at_best)
    except NotMeasured:
        return {}
    return {side: [value(one, "last") for one in runs[side]] for side in trained(name)}


def default_seed(name):
    """Choose the seed whose runs end nearest to the means of all seeds: with the smallest sum, over
    the sides, of squared distances. -> int; the first seed if runs are missing"""
    return min(SEEDS, key=lambda seed: sum(
        (shares[SEEDS.index(seed)] - fmean(shares))**2 for shares in ends(name).values()))


def tune(name, side):
    """Search for the best learning rate of a side of a chapter, on the seeds of CHOICE. A rate that
    is BEHIND another one on the first of these seeds is not the best, so the other seeds are left
    out. -> runs that are needed so far, [(factor of RATE, seed)]; the best factor, or None if some
    of these runs are missing"""
    picture = CHAPTERS[name].fields["picture"]
    is_drawn = "x=rate" in picture and f"| {side}=" in picture

    def last(factor, seeds):
        try:
            return fmean(value(one, "last") for one in runs_at(name, side, seeds, factor))
        except NotMeasured:
            return None
    factors = FACTORS if is_drawn else (0.5, 1)
    first = {factor: last(factor, CHOICE[:1]) for factor in factors}

    def seeds_of(factor):
        if is_drawn:
            return CHOICE
        is_behind = None in first.values() or first[factor] < max(first.values()) - BEHIND
        return CHOICE[:1] if is_behind else CHOICE

    def score(factor):
        first[factor] = last(factor, CHOICE[:1])
        shares = None if None in first.values() else last(factor, seeds_of(factor))
        return shares if shares is None or seeds_of(factor) == CHOICE else shares - 1
    tried, chosen = measuring.search(1, factors, score)
    return [(factor, seed) for factor in tried for seed in seeds_of(factor)], chosen


def best(name):
    """Choose for each trained side of a chapter the factor that is best on the seeds of CHOICE.
    -> dict.
    Raises NotMeasured if a run of the search is missing"""
    factors = {side: tune(name, side)[1] for side in trained(name)}
    if None in factors.values():
        raise NotMeasured(name)
    return factors


def jobs(name):
    """List the runs of a chapter, as far as the stored ones show them: SEEDS at nano.py's rate, the
    search for the best rate of each side, and SEEDS at this rate.
    -> {(case, seed): (name, side, factor)}"""
    found = {}
    for side, source in sides(name).items():
        runs = [*product((1,), SEEDS)]
        if side in trained(name):
            searched, chosen = tune(name, side)
            runs += searched
            runs += product((chosen,), SEEDS) if chosen else ()
        for factor, seed in runs:
            case = digest(at_rate(source, factor), CHAPTERS[name].steps)
            found.setdefault((case, seed), (name, side, factor))
    return found


def measure(names):
    """Run what docs/path.json does not contain yet, and leave out the runs of scripts that have
    changed. If you stop it, the next call continues."""
    wanted = {}

    def jobs_of(_):
        for name in names:
            wanted.update(jobs(name))
        return wanted

    def perform(case, seed):
        return measured(*wanted[case, seed], seed)
    measuring.collect(STORE, jobs_of, perform)
    STORE.keep({digest(at_rate(source, factor), CHAPTERS[name].steps) for name in RUNGS
                for source in sides(name).values() for factor in EVERY_FACTOR})


def cases_with_kl():
    """List the cases of the chapters that show a KL, because only their runs measure it. -> set"""
    return {digest(source, CHAPTERS[name].steps) for name in RUNGS
            for source in sides(name).values()
            if re.search(r"_kl\b|^kl ", "\n".join(CHAPTERS[name].fields[key] for key in (
                "picture", "claim", "relief", "fair") if key in CHAPTERS[name].fields), re.M)}


def measured(name, side, factor, seed):
    """Run a side of a chapter. -> its numbers; only the final ones, unless the page draws its
    steps"""
    from learn.path.runs import run
    source = at_rate(sides(name)[side], factor)
    steps = CHAPTERS[name].steps
    is_drawn = factor == 1 and seed in SEEDS
    has_kl = is_drawn and digest(source, steps) in cases_with_kl()
    one = rounded(run(source, seed, has_kl=has_kl, evaluates=is_drawn, steps=steps))
    print(f"{name}, {side}, {factor:g} times the rate, seed {seed}", flush=True)
    if is_drawn:
        return one
    return {of: round(value(one, of), 4) for of in FINAL
            if of.partition("_")[2] in ("", *one["steps"])}


def rounded(result):
    """Round the numbers of a run to three digits (samples: four), and keep one text. -> dict"""
    steps = result["steps"]
    metrics = {name: [float(f"{step[name]:.{4 if name == 'samples' else 3}g}") for step in steps]
               for name in (steps[0] if steps else ()) if name not in ("text", "step")}
    return dict(accuracy=result["accuracy"], seconds=round(result["seconds"], 1),
                text=steps[-1]["text"] if steps else "", steps=metrics)
