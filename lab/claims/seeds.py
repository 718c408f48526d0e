"""Seeds: how much luck alone changes a comparison, and how much a clip range does"""
import itertools

import numpy

from lab.draw import dots
from lab.experiment import Experiment, numbers
from lab.verdict import OURS, Claim, student, student_quantile

SIGNS, BOOTSTRAP, STUDENT = RULES = (
    "all seeds have one sign", "bootstrap", "Student's interval")
SIZES = (3, 5, 8)                               # seeds of a comparison
DRAWS = 4000
MOST = 0.06                                     # highest error rate allowed to a 95% interval
COLLAPSES = 0.1                                 # fraction of runs that collapse
DEPTH = 20.0                                    # depth of a collapse, in standard deviations
NORMAL, COLLAPSING = CASES = ("ordinary luck", "one run in ten collapses")
RUNS = {"grpo.py": "grpo.py --max_steps 20"}
RUNS |= {f"gspo.py, {low} / {high}": f"gspo.py --max_steps 20 --epsilon {low} --epsilon_high {high}"
         for low, high in (("3e-4", "4e-4"), ("3e-3", "4e-3"), ("3e-2", "4e-2"))}
EXPERIMENT = Experiment(__file__, seeds=range(10))
EXPERIMENT.runs("runs", RUNS, scores=["pass@1"])


@EXPERIMENT.measure(CASES, seeds=range(5))
def luck(seed, case):
    """Count how often each rule misses the true mean of numbers drawn at random.
    -> {rule: [a fraction for each of SIZES]}"""
    rng = numpy.random.default_rng(seed)
    misses = {rule: [] for rule in RULES}
    for size in SIZES:
        values = rng.normal(size=(DRAWS, size))
        if case == COLLAPSING:                  # shifted, so that the true mean stays 0
            values += DEPTH * (COLLAPSES - (rng.random((DRAWS, size)) < COLLAPSES))
        again = rng.integers(0, size, (1000, size))
        wrong = numpy.zeros(len(RULES))
        for row in values:
            ends = [(row.min(), row.max()), numpy.quantile(row[again].mean(axis=1), [0.025, 0.975]),
                    student(row)]
            wrong += [low > 0 or high < 0 for low, high in ends]
        for rule, number in zip(RULES, wrong / DRAWS):
            misses[rule].append(number)
    return misses


def matchings(places):
    """Generate all ways to put an even number of places into pairs. Yields lists of pairs"""
    if not places:
        yield []
    for i in range(1, len(places)):
        for pairs in matchings(places[1:i] + places[i + 1:]):
            yield [(places[0], places[i]), *pairs]


def deals(values):
    """Deal the seeds of one method to two sides, as pairs, in all ways. The sign of the first pair
    is fixed, since swapping the sides changes nothing. (S,) -> differences (deals, S // 2)"""
    pairs = numpy.array(list(matchings(list(range(len(values))))))
    apart = values[pairs[..., 0]] - values[pairs[..., 1]]                       # (ways, S // 2)
    signs = [(1, *rest) for rest in itertools.product((1, -1), repeat=apart.shape[1] - 1)]
    return (apart[:, None] * numpy.array(signs)).reshape(-1, apart.shape[1])


def page(runs, luck):
    score = {name: columns["pass@1"] for name, columns in runs.items()}
    grpo = score.pop("grpo.py")
    paper, _, hundredfold = (values.mean() - grpo.mean() for values in score.values())
    finding = (f"GSPO's pass@1 differs from GRPO's by {paper:+.3f} with the paper's clip range, "
               f"and by {hundredfold:+.3f} with a hundred times that range")
    of_five = luck[COLLAPSING][STUDENT][:, SIZES.index(5)]                      # (S,)
    yield Claim("if one run in ten collapses, Student's 95% interval from five seeds misses the "
                "truth at most 6 times in 100", OURS, of_five, at_most=MOST,
                unit="of the comparisons", said="If one run in ten collapses, a 95% interval from "
                f"five seeds misses the truth {of_five.mean():.0%} of the time")
    for name, values in score.items():
        script, clip_range = name.split(", ")
        yield Claim(f"{script} with the clip range {clip_range} gets a higher pass@1 than grpo.py "
                    "from the same number of samples", "GSPO", (values, grpo), at_least=0.02,
                    said=finding * ("3e-4" in name))
    yield Claim("with ordinary luck, Student's 95% interval from three, five or eight seeds misses "
                "the truth at most 6 times in 100 (mean of the three sizes)", OURS,
                luck[NORMAL][STUDENT].mean(axis=1), at_most=MOST, unit="of the comparisons")
    dealt = deals(grpo)
    half = student_quantile(dealt.shape[1] - 1, 0.975) * dealt.std(axis=1, ddof=1)
    wrong = (abs(dealt.mean(axis=1)) > half / dealt.shape[1] ** 0.5).mean()
    yield Claim("if GRPO's own ten seeds are dealt to two sides of five, in all "
                f"{len(dealt):,} ways, Student's 95% interval misses the truth at most 6 times in "
                "100", OURS, wrong, at_most=MOST, exact=True, unit="of the comparisons")

    missed = {f"{case}, {size} seeds": {rule: luck[case][rule][:, place] for rule in RULES}
              for case in CASES for place, size in enumerate(SIZES)}
    yield dots({name: rules[STUDENT] for name, rules in missed.items()}, xlim=(0, None),
               level=(0.05, "5 times in 100"),
               xlabel="fraction of comparisons in which Student's interval misses the truth")
    pairs = ("fraction of pairs (one of its seeds, one of grpo.py's) that rank the two scripts "
             "differently from all ten seeds")
    rows = {"grpo.py": {"pass@1": grpo, pairs: 0}}
    for name, values in score.items():
        is_more = values[:, None] > grpo                                        # (S, S)
        rows[name] = {"pass@1": values, pairs: (is_more != (values.mean() > grpo.mean())).mean()}
    yield numbers(rows, by="script")
    yield numbers(missed, by="how often a rule misses the truth")
