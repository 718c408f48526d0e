"""Seeds: what luck alone does to a comparison

Claim. The averages of five seeds and of five others of the very same setting can look like two
methods (Henderson and others, 1709.06560, figure 5), so one seed of each method ranks nothing.

Prediction. The settings differ little from GRPO to GSPO, so that one seed of each ranks them
otherwise than ten do in at least one of five pairs.

Method. Ten seeds of grpo.py and ten of gspo.py, all from one base, 20 steps each. Then all ways to
split the ten of GRPO into halves, of whose differences the median counts, and all pairs of one seed
of each method. Three rules for seeing an effect in differences of pairs of seeds are tried where
there is none: on draws from a normal distribution, and on GRPO's ten seeds dealt to two sides.

Outcome. Wrong: from this base GSPO is behind GRPO after 20 steps by more than luck, so that any
seed of each ranks them as all ten do. From an earlier base, it was otherwise in 56% of the pairs.
"""
import itertools
import statistics

import numpy

from lab.draw import GREY, RED, bars, dots
from lab.experiment import Experiment
from lab.verdict import OURS, Claim, student

HENDERSON = "[Henderson and others](https://arxiv.org/abs/1709.06560)"
SIGNS, BOOTSTRAP, STUDENT = RULES = (
    "all seeds have one sign", "bootstrap", "Student's interval")
SIZES = {f"{n} seeds": n for n in (3, 5, 8)}
DRAWS = 4000
NOISE = 0.01                                    # of a share of so many draws
RUNS = {script: f"{script} --max_steps 20 --stop_at 2" for script in ("grpo.py", "gspo.py")}
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(10))
EXPERIMENT.runs("runs", RUNS, scores=["pass@1"])


def decisive(differences):
    """How often each of RULES sees an effect in differences (N, n) that are luck. -> dict"""
    n = differences.shape[1]
    again = numpy.random.default_rng(0).integers(0, n, (1000, n))
    found = numpy.zeros(len(RULES))
    for values in differences:
        means = values[again].mean(axis=1)
        ends = [(values.min(), values.max()), numpy.quantile(means, [0.025, 0.975]),
                student(values)]
        found += [low > 0 or high < 0 for low, high in ends]
    return dict(zip(RULES, found / len(differences)))


@EXPERIMENT.measure(SIZES, seeds=[0])
def luck(seed, size):
    return decisive(numpy.random.default_rng(seed).normal(size=(DRAWS, SIZES[size])))


def deals(values, n):
    """Differences of n and n other seeds of one method, one by one. -> (DRAWS, n)"""
    rng = numpy.random.default_rng(0)
    dealt = rng.permuted(numpy.tile(values, (DRAWS, 1)), axis=1)
    return dealt[:, :n] - dealt[:, n:2 * n]


def half_differences(values):
    """How far apart the means of two halves are, for each way to split them. -> list"""
    found = []
    for half in itertools.combinations(range(len(values)), len(values) // 2):
        if 0 in half:                                           # each split once
            mean = values[list(half)].mean()
            found.append(abs(mean - numpy.delete(values, half).mean()))
    return found


def wrong_ranks(one, other, size):
    """How often `size` seeds of each rank two methods otherwise than all seeds do. -> float"""
    some = numpy.array(list(itertools.combinations(one, size))).mean(axis=1)
    others = numpy.array(list(itertools.combinations(other, size))).mean(axis=1)
    is_more = some[:, None] > others
    return (is_more != (one.mean() > other.mean())).mean()


def page(runs, luck):
    grpo, gspo = (found["pass@1"] for found in runs.values())
    share = {size: {rule: found[rule].item() for rule in RULES} for size, found in luck.items()}
    wrong = wrong_ranks(grpo, gspo, 1)
    agree = share["3 seeds"][SIGNS]
    said = (f"After 20 steps pass@1 is {grpo.mean():.3f} with GRPO, {gspo.mean():.3f} with GSPO; "
            f"of all pairs of one seed of each, {wrong:.0%} rank them the other way")
    ranks = Claim("one seed of each ranks two methods otherwise than ten, at least once in five",
                  HENDERSON, wrong, at_least=0.2, exact=True, unit="of the pairs", shown=said,
                  contradicted=said)
    signs = Claim("without any effect, three seeds have one sign at most 5 times in 100", OURS,
                  agree, at_most=0.05 + NOISE, exact=True, unit="of comparisons",
                  contradicted="Three seeds that agree prove little: where two methods do not "
                  f"differ at all, all three favour the same one {agree:.0%} of the time")
    yield from (signs, ranks)
    halves = statistics.median(half_differences(grpo))
    yield Claim("two halves of GRPO's seeds differ, in the median, as much as GRPO and GSPO",
                HENDERSON, halves / abs(grpo.mean() - gspo.mean()), at_least=1, times=True,
                exact=True)
    yield Claim("without any effect, Student's 95% interval of three, five or eight seeds leaves 0 "
                "out at most 5 times in 100", OURS, [found[STUDENT] for found in share.values()],
                at_most=0.05 + NOISE, exact=True, unit="of comparisons")
    dealt = [decisive(deals(grpo, n))[STUDENT] for n in (3, 5)]
    yield Claim("the same, with GRPO's own seeds dealt to two sides of three or of five", OURS,
                dealt, at_most=0.05 + NOISE, exact=True, unit="of comparisons")

    rows = {}
    for rule, size in itertools.product(RULES, SIZES):
        seen = share[size][rule]
        rows[f"{size}: {rule}"] = {"false alarm": seen, "undecided": 1 - seen}
    yield bars(rows, signs.finding, given={"false alarm": RED, "undecided": GREY},
               xlabel="of comparisons in which there is nothing but luck")
    yield dots({"grpo.py": grpo, "gspo.py": gspo}, ranks.finding, form=".3f",
               xlabel="pass@1 on held-out problems after 20 steps; a dot for each of ten seeds")
