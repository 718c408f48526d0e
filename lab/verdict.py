"""Judge claims: one rule gives every verdict of the lab.

A claim names the region in which an effect lies: at least a bound, at most a bound, or between two.
The bound is the smallest effect that matters. The effect is the mean of one number for each seed.
The claim is shown if the whole 95% interval of the effect lies in the region, contradicted if none
of it does, and undecided otherwise. Numbers without an interval, such as those of an enumeration or
a count over all seeds, are judged as they are: all of them must lie in the region. A claim that a
paper does not make in this form has the source "after PAPER".

A claim gets no verdict if the set-up decides the result:
- two shares are at a floor or a ceiling: the second one is so near 0 or 1 that no value of the
  first could show the claim, or none could contradict it, or both are near the same end;
- one side of a ratio has the same value for all seeds, or the smallest value it can have (a number
  of batches cannot be below the window over which accuracy is averaged);
- all seeds have the same effect;
- a seed never reached the level, so we only know that it takes more steps than the run had.

The interval is Student's, because other rules find an effect too often with few seeds. It assumes
that effects are normally distributed, and covers the truth much less often if a run sometimes
collapses (docs/lab/seeds.md has the numbers). Times and counts are skewed, so take ratios.
"""
import functools
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy

SHOWN, CONTRADICTED, UNDECIDED = "shown", "contradicted", "undecided"
NO_VERDICT = "no verdict"
FLOOR = 0.01                    # two fractions this near to 0 or to 1 cannot be distinguished
OURS = "ours"                                   # the source of a claim that no paper makes
# The papers and threads that claims come from -> their addresses
PAPERS = json.loads(Path(__file__).with_name("papers.json").read_text("utf-8"))


@functools.cache
def student_quantile(n, p):
    """Compute the p-quantile of Student's t with n degrees of freedom. With t = sqrt(n) tan(angle),
    the density of the angle is proportional to cos(angle)^(n - 1). -> float"""
    angle = numpy.linspace(-math.pi / 2, math.pi / 2, 100_001)
    density = numpy.cos(angle) ** (n - 1)
    share = numpy.concatenate([[0], (density[1:] + density[:-1]).cumsum()])
    return math.sqrt(n) * math.tan(numpy.interp(p * share[-1], share, angle))


def student(values, comparisons=1):
    """Compute the 95% interval of the mean of independent values; it is infinite for one value.
    comparisons: how many intervals have to hold at once (Bonferroni). -> low, high"""
    n = len(values) - 1
    if n == 0:
        return -math.inf, math.inf
    t = student_quantile(n, 1 - 0.025 / comparisons)
    mean = statistics.fmean(values)
    half = t * statistics.stdev(values) / math.sqrt(n + 1)
    return mean - half, mean + half


def digits(x, number):
    """Write x with this number of significant digits, also if they are 0: 1.0, not 1. -> str"""
    return f"{x:#.{number}g}".rstrip(".")


@dataclass
class Claim:
    """A sentence, its source (a paper, or OURS), and the numbers that it is judged by."""
    text: str
    source: str
    values: list                # or a pair of lists: the effect is their difference (fractions in
                                # 0..1) or, with times, their ratio
    at_least: float = -math.inf     # bounds of the region in which the effect should lie
    at_most: float = math.inf
    times: bool = False         # the values are ratios, so take their geometric mean
    bounds: list = ()           # for each value: "" if known, ">" or "<" if a bound, "?" if unknown
    exact: bool = False         # the values have no interval: an enumeration, or a count
    comparisons: int = 1        # number of effects that were compared; this is the largest
    smallest: float = None      # the smallest value that either side of a ratio can have
    unit: str = ""
    said: str = ""              # the finding, as a sentence

    def __post_init__(self):
        paper = self.source.removeprefix("after ")
        if paper in PAPERS:
            self.source = self.source.replace(paper, f"[{paper}]({PAPERS[paper]})")
        self.sides = self.values if isinstance(self.values, tuple) else None
        if self.sides:
            self.values = (numpy.divide if self.times else numpy.subtract)(*self.sides)

    @functools.cached_property
    def interval(self):
        """-> effect, low and high end of its interval"""
        values = numpy.ravel(self.values).astype(float)
        if not numpy.isfinite(values).all() or self.times and values.min() <= 0:
            raise ValueError(f"{self.text}: {self.values}")
        if self.times:
            values = numpy.log(values)
        low, high = (min(values), max(values)) if self.exact else student(values, self.comparisons)
        three = numpy.array([values.mean(), low, high])
        return tuple((numpy.exp(three) if self.times else three).tolist())

    @property
    def moot(self):
        """The reason why there is no verdict; "" if there is one."""
        _, low, high = self.interval
        if any(self.bounds):
            known, number = self.bounds.count(""), len(self.bounds)
            seeds = f"{number - known} of {number} seeds" if known else "every seed"
            return f"with {seeds}, a run never reached the level"
        if math.isclose(low, high, abs_tol=1e-9) and not self.exact:
            return "all seeds have the same effect"
        if self.sides and self.times:
            for side in map(numpy.asarray, self.sides):
                if self.smallest is not None and side.min() <= self.smallest:
                    return "one side has its smallest possible value"
                if len(side) > 1 and side.min() == side.max():
                    return "one side is the same for all seeds"
        elif self.sides:
            first, second = map(numpy.mean, self.sides)
            can_be_shown = max(self.at_least, -second) <= min(self.at_most, 1 - second)
            can_be_contradicted = -second < self.at_least or 1 - second > self.at_most
            is_open = can_be_shown and can_be_contradicted
            if max(first, second) < FLOOR or not is_open and second < 0.5:
                return "at the floor"
            if min(first, second) > 1 - FLOOR or not is_open:
                return "at the ceiling"
        return ""

    def judge(self, low, high):
        """Judge an interval with these ends. -> verdict"""
        if self.at_least <= low and high <= self.at_most:
            return SHOWN
        if high < self.at_least or low > self.at_most or self.exact:
            return CONTRADICTED
        return UNDECIDED

    @property
    def verdict(self):
        return NO_VERDICT if self.moot else self.judge(*self.interval[1:])

    def agrees(self, low, high):
        """Check that an interval with these ends has the same verdict. -> bool, True without one"""
        return bool(self.moot) or self.verdict == self.judge(low, high)

    # ---- texts ----

    @property
    def finding(self):
        """The finding, as a sentence that adds its verdict unless it contains it."""
        if self.said and self.verdict != NO_VERDICT:
            return self.said + " (undecided)" * (self.verdict == UNDECIDED)
        return f"{self.text[0].upper()}{self.text[1:]}: {self.verdict}"

    @property
    def judged(self):
        """The verdict, or the reason why there is none. Adds "no difference" if the interval
        contains 0 and only effects that are smaller than the claimed one."""
        if self.moot:
            return f"**{NO_VERDICT}**: {self.moot}"
        _, low, high = self.interval
        bound = self.at_most if self.at_least == -math.inf else self.at_least
        is_small = low <= 0 <= high and max(-low, high) < abs(bound) and not self.exact
        is_none = is_small and not self.times and self.verdict == CONTRADICTED
        return f"**{self.verdict}**" + ": no difference" * is_none

    @property
    def claimed_range(self):
        """The region, as text."""
        unit = " times" * self.times
        if self.at_least == -math.inf:
            return f"≤ {self.at_most:g}{unit}"
        if self.at_most == math.inf:
            return f"≥ {self.at_least:g}{unit}"
        return f"{self.at_least:.3g} to {self.at_most:.3g}{unit}"

    @property
    def effect(self):
        """The effect and its interval, as text. The interval's half-width has two digits, and more
        if the rounded interval would have a different verdict."""
        effect, low, high = self.interval
        unit = " times" if self.times else self.unit and f" {self.unit}"
        if any(self.bounds):
            [bound, *others] = {*self.bounds} - {""}
            is_bound = bound != "?" and not others
            words = {">": "more than", "<": "less than"}
            return f"{words[bound]} {digits(effect, 2)}{unit}" if is_bound else "unknown"
        if self.exact:
            return " to ".join(dict.fromkeys((f"{low:.3g}", f"{high:.3g}"))) + unit
        if self.times:
            for number in range(2, 7):
                texts = [digits(x, number) for x in (effect, low, high)]
                if self.agrees(*map(float, texts[1:])):
                    break
            return "{}{} ({} to {})".format(texts[0], unit, *texts[1:])
        form = "+.3f"
        if 0 < high - low < math.inf:
            decimals = max(0, 2 - math.ceil(math.log10((high - low) / 2)))
            while decimals < 6 and not self.agrees(round(low, decimals), round(high, decimals)):
                decimals += 1
            form = f"+.{min(6, decimals)}f"
        return f"{effect:{form}}{unit} ({low:{form}} to {high:{form}})"
