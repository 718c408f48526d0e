"""Seeds: how much luck alone changes a comparison"""
import itertools

import numpy

from lab.bench import OURS, Claim, load, numbers, student, student_quantile, tune
from lab.claims.methods import NEEDED, score
from report import chart

SEEDS = range(5)
EQUAL, TUNED = "only luck differs", "nothing"
BASES = "which draw numbers; nothing is trained, so there is no base"
# Fall of a number that stands for a collapsed run, in standard deviations
DEPTHS = {"ordinary luck": 0.0} | {f"one in ten falls by {depth:g}": depth
                                   for depth in (3.0, 10.0, 20.0)}
NORMAL, SHALLOW, DEEP, COLLAPSING = CASES = list(DEPTHS)
SIGNS, BOOTSTRAP, STUDENT = "all seeds have one sign", "bootstrap", "Student's interval"
SIZES = (3, 5, 8)                               # seeds of a comparison
DRAWS = 4000
MOST = 0.06                                     # highest error rate allowed to a 95% interval
COLLAPSES = 0.1                                 # fraction of runs that collapse


def measure(case, seed):
    """Count how often each rule misses the true mean of numbers drawn at random.
    -> {rule: [a fraction for each of SIZES]}"""
    rng = numpy.random.default_rng(seed)
    misses = {SIGNS: [], BOOTSTRAP: [], STUDENT: []}
    for size in SIZES:
        values = rng.normal(size=(DRAWS, size))
        if case != NORMAL:                      # shifted, so that the true mean stays 0
            values += DEPTHS[case] * (COLLAPSES - (rng.random((DRAWS, size)) < COLLAPSES))
        means = values[:, rng.integers(0, size, (1000, size))].mean(axis=2)     # (DRAWS, 1000)
        ends = {SIGNS: (values.min(axis=1), values.max(axis=1)),
                BOOTSTRAP: numpy.quantile(means, [0.025, 0.975], axis=1),
                STUDENT: numpy.transpose([student(row) for row in values])}
        for rule, (low, high) in ends.items():
            misses[rule].append(((low > 0) | (high < 0)).mean())
    return misses


def deals(values):
    """Deal the seeds of one method to two sides, as pairs, in all ways. The first seed stays on the
    first side, since swapping the sides changes nothing. (S,) -> differences (deals, S // 2)"""
    n = len(values)
    apart = []
    for chosen in itertools.combinations(range(1, n), n // 2 - 1):
        others = set(range(1, n)) - set(chosen)
        apart.append(values[[0, *chosen]] - values[[*itertools.permutations(others)]])
    return numpy.concatenate(apart)


def page(x):
    of_five = {case: x[case][STUDENT][:, SIZES.index(5)] for case in CASES}     # (S,)
    missed = {case: f"{rates.mean():.0%}" for case, rates in of_five.items()}
    yield Claim("if one run in ten collapses, Student's 95% interval from five seeds misses the "
                "truth at most 6 times in 100", OURS, of_five[COLLAPSING], at_most=MOST,
                finding="If one random number in ten falls by 20 standard deviations, as if a run "
                "had collapsed, a 95% interval from five numbers misses the truth "
                f"{missed[COLLAPSING]} of the time; if it falls by 10 or by 3, {missed[DEEP]} and "
                f"{missed[SHALLOW]} (no run is trained)")
    yield Claim("with ordinary luck, Student's 95% interval from three, five or eight seeds misses "
                "the truth at most 6 times in 100 (mean of the three sizes)", OURS,
                x[NORMAL][STUDENT].mean(axis=1), at_most=MOST)
    runs, _ = load("methods")
    dealt = deals(score(runs[tune("methods", runs, "grpo.py", NEEDED)[1]], NEEDED))
    half = student_quantile(3, 0.975) * dealt.std(axis=1, ddof=1) / 4 ** 0.5
    yield Claim("if the eight runs of grpo.py in methods are dealt to two sides of four, in all "
                f"{len(dealt):,} ways, Student's 95% interval misses the truth at most 6 times in "
                "100", OURS, (abs(dealt.mean(axis=1)) > half).mean(), at_most=MOST, exact=True,
                computed=True)

    misses = {f"{case}, {size} seeds": {rule: rows[:, place] for rule, rows in x[case].items()}
              for case in CASES for place, size in enumerate(SIZES)}
    yield lambda axis: chart.dots(axis, {name: rules[STUDENT] for name, rules in misses.items()},
                                  xlabel="how often Student's interval misses the truth")
    yield numbers(misses, "how often a rule misses the truth (falls in standard deviations)", ".2f")
