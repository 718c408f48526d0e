"""What numbers say of a claim: the one rule of all verdicts.

A claim says where an effect lies: at least so much, at most so much, or between the two, where so
much is the smallest effect that matters, set before the run. The effect is the mean of a number for
each seed (or each problem, if one policy is looked at). The claim is shown if all of the effect's
95% interval lies there, contradicted if none does, else undecided. Numbers which no luck is in, as
of an enumeration, or of a count of what intervals say, are exact: all have to lie there.

There is no verdict where the set-up decides: at a floor or a ceiling, which is where the second of
two shares is so near 0 or 1 that no value of the first could show the claim, or none contradict it,
or where both are there; where all seeds are equal; and where some seed never arrived, so that its
number of steps is that of the run. Nor is there one where no bound was set.

The interval is Student's: with 3, 5, 8 seeds 2.5, 1.2, 0.8 standard deviations to each side. Luck
alone leaves 0 outside 5 times in 100. That all seeds have one sign is luck 25, 6, 1 times in 100;
a bootstrap errs 25, 16, 11 times, because with three values it is the rule of signs (see
lab/claims/seeds.py). The price: to be seen four times in five, an effect needs 3.3, 1.7, 1.2
standard deviations. Student supposes that seeds scatter evenly to both sides, as differences of
runs do where there is only luck. Of what is long to one side, as times and counts, take ratios.
"""
import functools
import math
import statistics
from dataclasses import dataclass

import numpy

SHOWN, CONTRADICTED, UNDECIDED = "shown", "contradicted", "undecided"
NO_VERDICT = "no verdict"
FLOOR = 0.01                    # two shares that are as near to 0 or to 1 cannot be told apart
OURS = "ours"                                   # the source of a claim that no paper makes
# The papers that claims come from, at arXiv:
PAPERS = {"2510.13651": "2510.13651", "Ahmadian and others": "2402.14740",
          "Amodei and others": "1606.06565", "AReaL": "2505.24298", "DAPO": "2503.14476",
          "DeepSeek-R1": "2501.12948", "DeepSeek-V3.2": "2512.02556", "DeepSeekMath": "2402.03300",
          "DPO": "2305.18290", "Dr. GRPO": "2503.20783", "Gao and others": "2210.10760",
          "GSPO": "2507.18071", "Guo and others": "2402.04792", "IcePop": "2510.18855",
          "InstructGPT": "2203.02155", "MaxRL": "2602.02710", "OPO": "2505.23585",
          "PPO": "1707.06347", "Razin and others": "2410.08847", "ReTool": "2504.11536",
          "robust DPO": "2403.00409", "Search-R1": "2503.09516", "Skalse and others": "2209.13085",
          "Tang and Munos": "2506.09477", "ToolRL": "2504.13958", "TRPO": "1502.05477",
          "VAPO": "2504.05118", "VinePPO": "2410.01679", "Wang and Zhou": "2402.10200",
          "Yue and others": "2504.13837"}
# The 97.5% quantiles of Student's t with 1, 2 .. 9 degrees of freedom, and of the normal.
T = [12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622]
Z = 1.959964


def student(values):
    """The 95% interval of the mean of independent values; of one, all numbers. -> low, high"""
    n = len(values) - 1
    if n == 0:
        return -math.inf, math.inf
    # With many degrees of freedom, Cornish and Fisher's expansion has three digits or more.
    t = Z + (Z**3 + Z) / (4 * n) + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * n**2)
    if n <= len(T):
        t = T[n - 1]
    mean = statistics.fmean(values)
    half = t * statistics.stdev(values) / math.sqrt(n + 1)
    return mean - half, mean + half


@dataclass
class Claim:
    """A sentence, who says it (a paper, or OURS), and the numbers that tell whether it is so."""
    text: str
    source: str
    values: list                # or two lists of shares in 0..1: the effect is their difference
    at_least: float = None      # the region in which the effect lies
    at_most: float = None
    times: bool = False         # values are ratios: their mean is that of their logarithms
    bounds: list = ()           # for each value "", or ">" or "<" if it is a bound, "?" if neither
    exact: bool = False         # no luck is in the values
    unit: str = ""
    shown: str = ""             # what was found, in a sentence, if this is the verdict
    contradicted: str = ""
    said: str = ""              # or whatever the verdict is

    def __post_init__(self):
        if self.source in PAPERS:
            self.source = f"[{self.source}](https://arxiv.org/abs/{PAPERS[self.source]})"
        self.sides = self.values if isinstance(self.values, tuple) else None
        if self.sides:
            self.values = numpy.subtract(*self.sides)

    @functools.cached_property
    def interval(self):
        """-> effect, and from where to where it may lie"""
        values = numpy.ravel(self.values).astype(float)
        if not numpy.isfinite(values).all() or self.times and values.min() <= 0:
            raise ValueError(f"{self.text}: {self.values}")
        if self.times:
            values = numpy.log(values)
        low, high = (min(values), max(values)) if self.exact else student(values)
        found = numpy.array([values.mean(), low, high])
        return tuple((numpy.exp(found) if self.times else found).tolist())

    @property
    def region(self):
        """-> from where to where the effect lies, as claimed"""
        return (-math.inf if self.at_least is None else self.at_least,
                math.inf if self.at_most is None else self.at_most)

    @property
    def moot(self):
        """Why there is no verdict; "" if there is one. -> str"""
        _, low, high = self.interval
        least, most = self.region
        if (least, most) == (-math.inf, math.inf):
            return "no bound was set"
        if any(self.bounds):
            known = self.bounds.count("")
            some = f"{len(self.bounds) - known} of {len(self.bounds)} " * (known > 0)
            return f"{some}never arrived"
        if math.isclose(low, high, abs_tol=1e-9) and not self.exact:
            return "all seeds are equal"
        if self.sides:
            first, second = map(numpy.mean, self.sides)
            can_be_shown = max(least, -second) <= min(most, 1 - second)
            can_be_contradicted = -second < least or 1 - second > most
            is_told = can_be_shown and can_be_contradicted
            if max(first, second) < FLOOR or not is_told and second < 0.5:
                return "at the floor"
            if min(first, second) > 1 - FLOOR or not is_told:
                return "at the ceiling"
        return ""

    @property
    def verdict(self):
        if self.moot:
            return NO_VERDICT
        _, low, high = self.interval
        least, most = self.region
        if least <= low and high <= most:
            return SHOWN
        if high < least or low > most or self.exact:
            return CONTRADICTED
        return UNDECIDED

    # ---- in words ----

    @property
    def told(self):
        """What the experiment says was found, in a sentence, or ""."""
        return {SHOWN: self.shown, CONTRADICTED: self.contradicted}.get(self.verdict) or self.said

    @property
    def finding(self):
        """What was found, in a sentence."""
        return self.told or f"{self.text[0].upper()}{self.text[1:]}: {self.verdict}"

    @property
    def judged(self):
        """The verdict, or why there is none; and whether an effect that was claimed is too small to
        matter."""
        if self.moot:
            return f"**{NO_VERDICT}**: {self.moot}"
        _, low, high = self.interval
        bound = self.at_least or self.at_most or 0
        is_small = low <= 0 <= high and max(-low, high) < abs(bound) and not self.exact
        is_told = is_small and not self.times and self.verdict == CONTRADICTED
        return f"**{self.verdict}**" + ": no difference" * is_told

    @property
    def asked(self):
        """The region."""
        unit = " times" * self.times
        if self.at_least is None:
            return "" if self.at_most is None else f"≤ {self.at_most:g}{unit}"
        if self.at_most is None:
            return f"≥ {self.at_least:g}{unit}"
        return f"{self.at_least:.3g} to {self.at_most:.3g}{unit}"

    @property
    def seen(self):
        """The effect, with the two digits that its interval leaves open, and the interval."""
        effect, low, high = self.interval
        unit = " times" if self.times else self.unit and f" {self.unit}"
        if any(self.bounds):
            [bound, *others] = {*self.bounds} - {""}
            is_bound = bound != "?" and not others
            return f"{bound} {effect:.2g}{unit}, {self.moot}" if is_bound else "unknown"
        form = "+.3f"
        if self.times or self.exact:
            form = ".3g" if self.exact else ".2g"
        elif 0 < high - low < math.inf:
            digits = 2 - math.ceil(math.log10((high - low) / 2))
            form = f"+.{min(6, max(0, digits))}f"
        if self.exact:
            ends = dict.fromkeys((f"{low:{form}}", f"{high:{form}}"))
            return " to ".join(ends) + unit
        return f"{effect:{form}}{unit} ({low:{form}} to {high:{form}})"
