"""Judge every claim again with other choices, and count the verdicts that change: python -m
lab.choices (make choices). It uses the stored numbers, runs nothing, and writes a table in
docs/lab-sceptic.md.

CHOICES lists other values for the constants of lab/claims/NAME.py; one constant changes at a time.
In the other rows of the table, the bound or the interval of every claim changes.
"""
import collections
import copy
import itertools
import math
import statistics
from unittest import mock

import numpy

from lab import verdict
from lab.docs import put, table
from lab.experiment import measured, module
from report import start

# Experiment -> constant -> its other values
CHOICES = {
    "hacking": {"WINDOW": (1, 3, 10)},
    "bugs": {"MOST": (0.6, 1.0), "RISE": (0.025, 0.1),
             "RANGE": (("no mistake", "no mistake, other seeds"),), "WINDOWS": tuple(
        {"the first 5 steps": slice(n), "the last 5 steps": slice(-n, None)} for n in (3, 10))},
    "sharpen": {"MANY": tuple([place] for place in range(1, 8))},
    "kl": {"PLACE": (0, 1, 2, 3)},
    "signal": {"EARLY": (3, 10)},
    "trust": {"FIRST": (8,)},
    "wrongrewards": {"LAST": (1, 3, 10)},
    "credit": {"EIGHT": tuple(f"rollouts, K = {K}" for K in (1, 2, 4, 16))},
    "critic": {"LAST": (1, 3, 8)},
    "reuse": {"LEVEL": (0.5, 0.6, 0.65), "WINDOW": (2, 3), "LAST": (1, 5)},
    "staleness": {"LAST": (1, 2, 8)},
    "methods": {"LEVEL": (0.7, 0.8, 0.85, 0.95), "WINDOW": (1, 3, 10)},
    "rates": {"TUNING": (slice(0, 5),)},
    "masking": {"LEVEL": (0.6, 0.7, 0.8, 0.95), "WINDOW": (1, 3), "LATE": (3, 5, 20)},
    "zero": {"END": (2, 3, 4, 5)}}


def bootstrap(values, comparisons=1):
    """Compute the percentile bootstrap's 95% interval of the mean. -> low, high"""
    again = numpy.random.default_rng(0).integers(0, len(values), (4000, len(values)))
    means = numpy.asarray(values)[again].mean(axis=1)
    part = 0.025 / comparisons
    return tuple(numpy.quantile(means, [part, 1 - part]))


def signed_ranks(values, comparisons=1):
    """Compute the 95% interval of Wilcoxon's signed-rank test: sort the means of all pairs of
    values, and leave out as many at each end as the test allows. With fewer than six values no
    result of the test is that rare, and the interval is infinite. -> low, high"""
    n = len(values)
    ways = numpy.array([1])                     # number of sign patterns for each sum of ranks
    for rank in range(1, n + 1):
        ways = numpy.pad(ways, (0, rank)) + numpy.pad(ways, (rank, 0))
    cut = int((ways.cumsum() / 2**n <= 0.025 / comparisons).sum())
    means = sorted(statistics.fmean(pair)
                   for pair in itertools.combinations_with_replacement(values, 2))
    return (means[cut - 1], means[-cut]) if cut else (-math.inf, math.inf)


def with_bound(claim, factor):
    """Judge a claim with a bound that is `factor` times as far from no effect. -> verdict"""
    other = copy.copy(claim)
    move = (lambda x: math.copysign(abs(x)**factor, x)) if claim.times else (lambda x: x * factor)
    other.at_least = move(claim.at_least)
    other.at_most = move(claim.at_most)
    return other.verdict


def with_interval(claim, rule):
    """Judge a claim with a different rule for the interval. -> verdict"""
    other = copy.copy(claim)
    vars(other).pop("interval", None)                   # computed by the usual rule
    with mock.patch.object(verdict, "INTERVAL", rule):
        return other.verdict


def compare():
    """Judge all claims with all other choices. -> {what changes: [(old verdict, new verdict)]}, for
    each experiment the number of claims whose verdict some value in CHOICES changes, and the number
    of claims that depend on CHOICES"""
    verdicts = {"the level, step, k or window": []}
    changed = collections.Counter()
    total = 0
    plain = []
    for name in measured():
        usual, *_ = module(name).EXPERIMENT.load()
        plain += [claim for claim in usual if not claim.exact]
        others = []
        for constant, values in CHOICES.get(name, {}).items():
            for value in values:
                with mock.patch.object(module(name), constant, value):
                    others.append(module(name).EXPERIMENT.load()[0])
        for claim, *again in zip(usual, *others, strict=True):
            pairs = [(claim.verdict, other.verdict) for other in again]
            verdicts["the level, step, k or window"] += pairs
            total += bool(pairs)
            changed[name] += any(one != other for one, other in pairs)
    for choice, factor in (("bounds half as large", 0.5), ("bounds twice as large", 2)):
        verdicts[choice] = [(claim.verdict, with_bound(claim, factor)) for claim in plain]
    for choice, rule in (("a bootstrap interval", bootstrap),
                         ("an interval by signed ranks", signed_ranks)):
        verdicts[choice] = [(claim.verdict, with_interval(claim, rule)) for claim in plain]
    return verdicts, changed, total


def text():
    """Write the table of docs/lab-sceptic.md. -> str"""
    verdicts, changed, total = compare()
    rows = []
    for choice, pairs in verdicts.items():
        moved = [pair for pair in pairs if pair[0] != pair[1]]
        flipped = [pair for pair in moved if set(pair) == {verdict.SHOWN, verdict.CONTRADICTED}]
        rows.append([choice, len(pairs), len(moved), len(flipped)])
    where = ", ".join(f"[{name}](lab/{name}.md) {n}" for name, n in changed.most_common() if n)
    return (f"{total} claims depend on a level, step, k or window. Of these, "
            f"{total - changed.total()} keep their verdict at every stored value, and "
            f"{changed.total()} do not: {where}.\n\n"
            + table(["what we change", "verdicts compared", "verdicts that change",
                     "of these, changes between shown and contradicted"], rows))


if __name__ == "__main__":
    start(lambda: put("choices", text(), "choices"))
