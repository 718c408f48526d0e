"""Seeds: what luck alone does to a comparison, and what one number of a setting does

Ten seeds of grpo.py, and of gspo.py with three clip ranges. Three rules for seeing an effect are
tried on numbers whose mean is known, with ordinary luck and with runs that collapse.
docs/lab/seeds.md explains the experiment.
"""
import itertools

import numpy

from lab.draw import dots
from lab.experiment import Experiment, numbers
from lab.verdict import OURS, Claim, student, student_quantile

SIGNS, BOOTSTRAP, STUDENT = RULES = (
    "all seeds have one sign", "bootstrap", "Student's interval")
SIZES = (3, 5, 8)                               # seeds of a comparison
DRAWS = 4000
MOST = 0.06                                     # most errors that an interval of 95% may make
COLLAPSES, DEPTH = 0.1, 20.0                    # share of runs that collapse, and by how many
NORMAL, COLLAPSING = CASES = (                  # standard deviations of the others
    "ordinary luck", "one run in ten collapses")
SAME = "--max_steps 20 --stop_at 2"
RANGES = {"3e-4 / 4e-4": "--epsilon 3e-4 --epsilon_high 4e-4",
          "3e-3 / 4e-3": "--epsilon 3e-3 --epsilon_high 4e-3",
          "3e-2 / 4e-2": "--epsilon 3e-2 --epsilon_high 4e-2"}
FIRST = "gspo.py, 3e-4 / 4e-4"
RUNS = {"grpo.py": f"grpo.py {SAME}"}
RUNS |= {f"gspo.py, {name}": f"gspo.py {SAME} {flags}" for name, flags in RANGES.items()}
EXPERIMENT = Experiment(__file__, seeds=range(10))
EXPERIMENT.runs("runs", RUNS, scores=["pass@1"])


@EXPERIMENT.measure(CASES, seeds=range(5))
def luck(seed, case):
    """How often each rule leaves out the true mean of numbers drawn at random. -> {rule: [a share
    for each of SIZES]}"""
    rng = numpy.random.default_rng(seed)
    found = {rule: [] for rule in RULES}
    for size in SIZES:
        values = rng.normal(size=(DRAWS, size))
        if case == COLLAPSING:                  # so that the true mean is 0 again
            values += DEPTH * (COLLAPSES - (rng.random((DRAWS, size)) < COLLAPSES))
        again = rng.integers(0, size, (1000, size))
        wrong = numpy.zeros(len(RULES))
        for row in values:
            ends = [(row.min(), row.max()), numpy.quantile(row[again].mean(axis=1), [0.025, 0.975]),
                    student(row)]
            wrong += [low > 0 or high < 0 for low, high in ends]
        for rule, number in zip(RULES, wrong / DRAWS):
            found[rule].append(number)
    return found


def matchings(places):
    """All ways to put an even number of places into pairs. -> iterator of lists of pairs"""
    if not places:
        yield []
    for i in range(1, len(places)):
        for pairs in matchings(places[1:i] + places[i + 1:]):
            yield [(places[0], places[i]), *pairs]


def deals(values):
    """All ways to deal the seeds of one method to two sides, as pairs: their differences, where the
    sign of the first pair is fixed. (S,) -> (deals, S // 2)"""
    pairs = numpy.array(list(matchings(list(range(len(values))))))
    apart = values[pairs[..., 0]] - values[pairs[..., 1]]                       # (ways, S // 2)
    signs = [(1, *rest) for rest in itertools.product((1, -1), repeat=apart.shape[1] - 1)]
    return (apart[:, None] * numpy.array(signs)).reshape(-1, apart.shape[1])


def wrong_ranks(one, other, size):
    """How often `size` seeds of each rank two methods differently from all seeds. -> float"""
    some = numpy.array(list(itertools.combinations(one, size))).mean(axis=1)
    others = numpy.array(list(itertools.combinations(other, size))).mean(axis=1)
    is_more = some[:, None] > others
    return (is_more != (one.mean() > other.mean())).mean()


def page(runs, luck):
    score = {name: found["pass@1"] for name, found in runs.items()}
    grpo = score.pop("grpo.py")
    told = ", ".join(f"{values.mean() - grpo.mean():+.3f} with {name[9:]}"
                     for name, values in score.items())
    said = f"GSPO's place depends on its clip range: its pass@1 less GRPO's is {told}"
    misses = {case: luck[case][STUDENT] for case in CASES}                      # (S, sizes)
    of_five = misses[COLLAPSING][:, SIZES.index(5)]
    collapsed = Claim(
        "if one run in ten collapses, Student's 95% interval of five seeds misses the truth at "
        "most 6 times in 100", OURS, of_five, at_most=MOST, unit="of comparisons",
        contradicted="If one run in ten collapses, a 95% interval from five seeds misses the truth "
        f"{of_five.mean():.0%} of the time")
    yield collapsed
    for name, values in score.items():
        yield Claim(f"{name}: a higher pass@1 than grpo.py after as many samples", "GSPO",
                    (values, grpo), at_least=0.02, said=said * (name == FIRST))
    yield Claim("with ordinary luck, this is so for three, five or eight seeds", OURS,
                misses[NORMAL].mean(axis=1), at_most=MOST, unit="of comparisons")
    dealt = deals(grpo)
    half = student_quantile(dealt.shape[1] - 1, 0.975) * dealt.std(axis=1, ddof=1)
    wrong = (abs(dealt.mean(axis=1)) > half / dealt.shape[1] ** 0.5).mean()
    yield Claim("it is so if GRPO's own ten seeds are dealt to two sides of five, in all "
                f"{len(dealt):,} ways", OURS, wrong, at_most=MOST, exact=True,
                unit="of comparisons")

    errors = {f"{case}, {size} seeds": misses[case][:, place]
              for case in CASES for place, size in enumerate(SIZES)}
    yield dots(errors, collapsed.finding, level=(0.05, "5 times in 100"), xlim=(0, None),
               xlabel="share of the comparisons in which Student's interval misses the truth")
    pairs = "pairs of one seed of each ranked differently from all ten"
    rows = {name: {"pass@1": values, pairs: wrong_ranks(values, grpo, 1)}
            for name, values in score.items()}
    yield numbers({"grpo.py": {"pass@1": grpo, pairs: 0}} | rows, by="script")
    yield numbers({f"{case}, {size} seeds": {rule: luck[case][rule][:, place] for rule in RULES}
                   for case in CASES for place, size in enumerate(SIZES)}, by="misses the truth")
