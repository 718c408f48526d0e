"""Seeds: what luck alone does to a comparison, and what one number of a setting does

Ten seeds of grpo.py, and of gspo.py with three clip ranges. Three rules for seeing an effect are
tried where there is none. docs/lab/seeds.md says more.
"""
import itertools

import numpy

from lab.draw import dots
from lab.experiment import Experiment, numbers
from lab.verdict import OURS, Claim, student

SIGNS, BOOTSTRAP, STUDENT = RULES = (
    "all seeds have one sign", "bootstrap", "Student's interval")
SIZES = {f"{n} seeds": n for n in (3, 5, 8)}
DRAWS = 4000
MOST = 0.06                                     # false alarms, for an interval of 95%
SAME = "--max_steps 20 --stop_at 2"
RANGES = {"3e-4 / 4e-4": "--epsilon 3e-4 --epsilon_high 4e-4",
          "3e-3 / 4e-3": "--epsilon 3e-3 --epsilon_high 4e-3",
          "3e-2 / 4e-2": "--epsilon 3e-2 --epsilon_high 4e-2"}
FIRST = "gspo.py, 3e-4 / 4e-4"
RUNS = {"grpo.py": f"grpo.py {SAME}"}
RUNS |= {f"gspo.py, {name}": f"gspo.py {SAME} {flags}" for name, flags in RANGES.items()}
EXPERIMENT = Experiment(__file__, seeds=range(10))
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


@EXPERIMENT.measure(SIZES, seeds=range(5))
def luck(seed, size):
    return decisive(numpy.random.default_rng(seed).normal(size=(DRAWS, SIZES[size])))


def deals(values, n):
    """Differences of n and n other seeds of one method, one by one. -> (DRAWS, n)"""
    rng = numpy.random.default_rng(0)
    dealt = rng.permuted(numpy.tile(values, (DRAWS, 1)), axis=1)
    return dealt[:, :n] - dealt[:, n:2 * n]


def wrong_ranks(one, other, size):
    """How often `size` seeds of each rank two methods otherwise than all seeds do. -> float"""
    some = numpy.array(list(itertools.combinations(one, size))).mean(axis=1)
    others = numpy.array(list(itertools.combinations(other, size))).mean(axis=1)
    is_more = some[:, None] > others
    return (is_more != (one.mean() > other.mean())).mean()


def page(runs, luck):
    score = {name: found["pass@1"] for name, found in runs.items()}
    grpo = score.pop("grpo.py")
    share = {size: {rule: found[rule] for rule in RULES} for size, found in luck.items()}
    agree = share["3 seeds"][SIGNS]
    signs = Claim("without any effect, three seeds have one sign at most 6 times in 100", OURS,
                  agree, at_most=MOST, unit="of comparisons",
                  contradicted="Three seeds that agree prove little: where two methods do not "
                  f"differ at all, all three favour the same one {agree.mean():.0%} of the time")
    yield signs
    told = ", ".join(f"{values.mean() - grpo.mean():+.3f} with {name[9:]}"
                     for name, values in score.items())
    said = f"GSPO's place depends on its clip range: pass@1 beside GRPO's is {told}"
    for name, values in score.items():
        yield Claim(f"{name}: a higher pass@1 than grpo.py after as many samples", "GSPO",
                    (values, grpo), at_least=0.02, said=said * (name == FIRST))
    alarms = [share[size][STUDENT] for size in SIZES]
    yield Claim("without any effect, Student's 95% interval of three, five or eight seeds leaves 0 "
                "out at most 6 times in 100", OURS, numpy.mean(alarms, axis=0), at_most=MOST,
                unit="of comparisons")
    dealt = decisive(deals(grpo, 5))[STUDENT]
    yield Claim("the same, with GRPO's own ten seeds dealt to two sides of five in many ways", OURS,
                dealt, at_most=MOST, exact=True, unit="of comparisons")

    alarms = {f"{size}: {rule}": share[size][rule]
              for rule, size in itertools.product(RULES, SIZES)}
    yield dots(alarms, signs.finding, level=(0.05, "5 times in 100"), xlim=(0, None),
               xlabel="share of the comparisons without any effect in which the rule sees one")
    wrong = "pairs of one seed of each ranked otherwise than by all ten"
    rows = {name: {"pass@1": values, wrong: wrong_ranks(values, grpo, 1)}
            for name, values in score.items()}
    yield numbers({"grpo.py": {"pass@1": grpo, wrong: 0}} | rows, by="script")
