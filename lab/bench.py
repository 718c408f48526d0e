"""Run experiments of the lab, judge their claims, and write their pages: python -m lab NAME (make
lab-NAME), or all of them (make lab).

An experiment is a module lab/claims/NAME.py. It has SEEDS, which may leave out numbers, page, and
whatever differs from DEFAULTS:
  CASES, measure    names, and a function measure(case, seed) -> {column: a number or a list}
  FEWER             {case or side: its seeds}, for those that do not have all SEEDS
  SIDES, COMPARED   {side: (command line of a script, or None for measure, a learning rate to begin
                    with)}, and pairs (side, what) that are compared by score(columns, what), with
                    SEEDS, at the rate that is best on the seeds TUNING; cases are "SIDE, RATE".
                    METRICS are kept of each step of a script, and SCORES of the trained policy
  ONE_BASE = True   if all seeds start from one base; else each seed has its own
  OTHER_SEEDS       seeds that measure uses besides SEEDS and TUNING
  CHECK             a command whose first two steps show whether the code has changed, if none of
                    SIDES does
  page(x)           yields the answer of its page, in two sentences; Claims; one or two functions
                    that draw on an axis; and a table in Markdown, of at most 14 rows
  PAGE              the page in docs/lab/ where its claims stand, if it is not its own
x is {case: {column: array}}, whose first axis counts the seeds: what was measured, as stored in
docs/lab/NAME.json. What can be computed exactly is computed in page.

You write docs/lab/NAME.md yourself, in the order of docs/lab/kl.md: the marks of the answer, the
picture and the table; what this means; where it may not hold; what was predicted, which you write
before the first run; and, folded, how it was measured. All verdicts go to docs/lab/ledger.html.
"""
import contextlib
import functools
import importlib
import itertools
import json
import math
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

import dpo
import grpo
import gspo
import measuring
import ppo
import reinforce
from lab import docs
from lab.docs import put, run_once, table
from report import chart, replaced

# The experiments, in the order of docs/lab.md and of make lab
NAMES = ("hacking", "tests", "wrongrewards", "kl", "rates", "methods", "credit", "signal",
         "masking", "hints", "abstain", "imitation", "sharpen", "beliefs", "rare", "bugs")
# The questions that readers come with, chosen before any run with twelve seeds: the experiment, and
# the first words of the claim that answers it
ASKED = {
    "Does the clip help, if each side has its best learning rate?":
        ("rates", "with eight passes, accuracy ends higher with the clip"),
    "Is GSPO ahead of GRPO?": ("rates", "with its paper's clip range, GSPO"),
    "What do old samples cost?": ("rates", "samples that are 8 batches old"),
    "Does a critic save samples?": ("methods", "with most seeds, grpo.py needs at most"),
    "Does a KL penalty protect against the mistakes of a reward model?":
        ("rates", "PPO ends with a higher pass@1 if the KL is penalized"),
    "Does DPO gain from fresh pairs?": ("rates", "online DPO ends with a higher pass@1"),
    "Does dynamic sampling save samples?":
        ("signal", "with dynamic sampling, grpo.py does not get a higher pass@1 after 6400"),
    "Can the base solve more than the policy after RL, if it may try often?":
        ("sharpen", "on countdown, there is a k up to 128"),
    "Must the loss leave out a tool's tokens?":
        ("masking", "the accuracy of the last 10 steps is higher if the tool's tokens are masked"),
    "Does a policy deceive a reward model?":
        ("hacking", "against a frozen reward model, accuracy rises and then falls")}
# Flags for runs whose batches are measured, so that no time is spent on evaluations
UNSCORED = "--eval_steps 1000 --num_eval_problems 1 --num_eval_samples 1"
SHOWN, CONTRADICTED, UNDECIDED = "shown", "contradicted", "undecided"
NOT_FOUND = "not found here"    # instead of contradicted, because papers speak of large models
SAME = "the same"               # instead of contradicted, if fractions differ by less than matters
NO_VERDICT = "no verdict"
FLOOR = 0.01                    # two fractions this near to 0 or to 1 cannot be distinguished
# What an experiment has unless its module says something else
DEFAULTS = {"CASES": (), "FEWER": {}, "SIDES": {}, "COMPARED": (), "TUNING": (),
            "ONE_BASE": False, "OTHER_SEEDS": (), "CHECK": "grpo.py", "PAGE": "",
            "score": lambda columns, what: columns[what]}
# The first two steps after a short base, and what they show
SHORT = ("--base_steps 5 --max_steps 2 --num_prompts 4 --num_eval_problems 4 --num_eval_samples 1 "
         "--device cpu")
SHOWN_BY = "reward", "entropy", "loss", "grad_norm"
OURS = "ours"                                       # the source of a claim that no paper makes
PAPERS = json.loads(Path(__file__).with_name("papers.json").read_text("utf-8"))  # -> addresses


def module(name):
    """Import an experiment, with DEFAULTS for what its module does not say. -> module"""
    one = importlib.import_module(f"lab.claims.{name}")
    for key, value in DEFAULTS.items():
        vars(one).setdefault(key, value)
    return one


# ---- 1. measuring ----------------------------------------------------------------------------

def perform(name, case, seed):
    """Measure a case of an experiment with one seed. -> {column: values with six digits}"""
    torch.set_num_threads(1)
    print(f"{name}: {case}, seed {seed}", flush=True)
    one = module(name)
    side, _, rate = case.rpartition(", ")
    command, _ = one.SIDES.get(side, (None, None))
    if command:
        columns = run_once(f"{command} --learning_rate {rate} --base_seed {seed}", seed,
                           one.METRICS, one.SCORES)
    else:
        columns = one.measure(case, seed)
    return json.loads(json.dumps(columns), parse_float=lambda text: float(f"{float(text):.6g}"))


def first_steps(name):
    """Run the first two steps of an experiment's scripts: in float64, so that two computers get
    nearly the same numbers, and rewarding odd lengths, because so short a base is never right.
    -> list of numbers"""
    one = module(name)
    commands = {command.split()[0]: command for command, _ in one.SIDES.values()
                if command and "--reward model" not in command}     # whose base has to be right
    numbers = []
    torch.set_default_dtype(torch.float64)
    with tempfile.TemporaryDirectory() as work, contextlib.ExitStack() as rewards:
        os.chdir(work)                                  # for bases of its own
        for script in (reinforce, ppo, grpo, gspo, dpo):
            rewards.enter_context(replaced(script, reward=lambda *x: len(x[1]) % 2))
        for command in commands.values() or [one.CHECK]:
            columns = run_once(f"{command} {SHORT}", 0, SHOWN_BY)
            numbers += itertools.chain(*zip(*columns.values()))
        os.chdir(docs.ROOT)
    torch.set_default_dtype(torch.float32)
    return numbers


def check(name):
    """Compare the first steps of an experiment with those of the code that it was measured with.
    -> whether they agree"""
    return numpy.allclose(first_steps(name), load(name)[1]["first steps"], rtol=1e-6, atol=1e-9)


def tune(name, x, side, what):
    """Search for the best learning rate of a side on the seeds TUNING, beginning with the rate of
    SIDES, its half and its double. -> the names of the cases that have to be tried, in the order of
    their rates, and the best one; None if some of them are not measured yet"""
    one = module(name)
    start = one.SIDES[side][1]
    n = len(one.TUNING)

    def score(rate):
        found = {column: rows[:n] for column, rows in x.get(f"{side}, {rate:g}", {}).items()}
        is_measured = any(len(rows) == n for rows in found.values())    # with all of these seeds
        return one.score(found, what).mean() if is_measured else None
    tried, best = measuring.search(start, (start / 2, start, start * 2), score)
    return [f"{side}, {rate:g}" for rate in tried], best and f"{side}, {best:g}"


def seeds_of(one, case):
    """Look up the seeds of a case of an experiment."""
    return one.FEWER.get(case) or one.FEWER.get(case.rpartition(", ")[0]) or one.SEEDS


def wanted(name, results):
    """List what has to be measured, as far as the results of jobs show it. -> pairs of a case and a
    seed"""
    one = module(name)
    x = arrays(results)
    jobs = [(case, seed) for case in one.CASES for seed in seeds_of(one, case)]
    found = [tune(name, x, *pair) for pair in one.COMPARED]
    jobs += [(case, seed) for tried, _ in found for case in tried for seed in one.TUNING]
    if all(best for _, best in found):
        jobs += [(best, seed) for _, best in found for seed in seeds_of(one, best)]
    return list(dict.fromkeys(jobs))


def measure(name, processes):
    """Measure an experiment, and store the results in docs/lab/NAME.json."""
    store = docs.measured(f"lab-{name}", functools.partial(wanted, name),
                          functools.partial(perform, name), docs.describe(processes), processes)
    store.about["first steps"] = first_steps(name)
    store.move(docs.DOCS / f"lab/{name}.json")


def replicate(name, first, processes):
    """Repeat an experiment with as many new seeds, from `first` on, each side at its best rate, and
    add the results to docs/lab/NAME.json."""
    one = module(name)
    x, about = load(name)
    used = {*one.SEEDS, *one.TUNING, *one.OTHER_SEEDS, *added(about)}
    unused = [seed for seed in range(first, first + len(used) + len(one.SEEDS)) if seed not in used]
    cases = [*one.CASES, *(tune(name, x, *pair)[1] for pair in one.COMPARED)]
    jobs = [(case, seed) for case in dict.fromkeys(cases)
            for seed in unused[:len(seeds_of(one, case))]]
    more = docs.describe(processes) | {"seeds": sorted({seed for _, seed in jobs})}
    store = docs.measured(f"replicate-{name}", lambda _: jobs, functools.partial(perform, name),
                          more, processes)
    path = docs.DOCS / f"lab/{name}.json"
    content = measuring.read(path, "measure it again")
    content["about"].setdefault("repeated", []).append(store.about)
    content["jobs"] += store.content()["jobs"]
    measuring.write(path, content)
    store.path.unlink()


def added(about):
    """List the seeds that `replicate` added."""
    return [seed for more in about.get("repeated", ()) for seed in more["seeds"]]


def load(name, without=()):
    """Load the stored results, without those of some seeds. -> {case: {column: array}}, a dict
    about the measurement"""
    results, about = docs.load(f"lab/{name}", f"run: python -m lab {name}")
    return arrays({job: one for job, one in results.items() if job[1] not in without}), about


def arrays(results):
    """Group the results of jobs. -> {case: {column: array with an entry for each seed}}"""
    found = {}
    for (case, _), result in results.items():
        for column, values in result.items():
            found.setdefault(case, {}).setdefault(column, []).append(values)
    return {case: {column: array(rows) for column, rows in columns.items()}
            for case, columns in found.items()}


def array(rows):
    """Make an array of numbers or lists, and pad shorter lists with nan. -> float array"""
    if isinstance(rows[0], list):
        longest = max(map(len, rows))
        rows = [row + [None] * (longest - len(row)) for row in rows]
    return numpy.array(rows, dtype=float)


# ---- 2. judging ------------------------------------------------------------------------------

def binomial(n, p):
    """Compute the probability of each number of successes in n trials. -> (n + 1,)"""
    return numpy.array([math.comb(n, k) * p**k * (1 - p)**(n - k) for k in range(n + 1)])


def clopper_pearson(k, n):
    """Compute the exact 95% interval of a probability that gave k successes in n trials, by
    bisection. -> low, high"""
    def where(too_low):
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if too_low(middle) else (low, middle)
        return (low + high) / 2
    return (where(lambda p: binomial(n, p)[k:].sum() < 0.025) if k > 0 else 0.0,
            where(lambda p: binomial(n, p)[:k + 1].sum() > 0.025) if k < n else 1.0)


@dataclass
class Claim:
    """A sentence, and the numbers that it is judged by. It names the region in which an effect
    lies; the bound is the smallest effect that matters. The claim is shown if the whole 95%
    interval of the effect lies in the region, contradicted if none of it does, and undecided
    otherwise. The interval is Student's, because other rules find an effect too often with few
    seeds; but it misses the truth more often if a run sometimes collapses.

    Instead of contradicted, the difference of two fractions, such as accuracies, is *the same* if
    the whole interval is nearer to 0 than the smallest effect that matters. Ratios, returns,
    lengths and counts cannot be the same, and neither can the largest of several differences,
    because it says nothing about the smallest.

    If a run may never arrive, no mean exists. Then the effect is the share of the seeds in which
    one side comes first, whose interval is that of Clopper and Pearson (1934)."""
    text: str
    source: str                     # a name in papers.json, "after NAME" if the paper does not make
                                    # the claim in this form, or OURS
    effect: object                  # a number for each seed; or a pair of lists, whose ratio is the
                                    # effect, or whose difference, if they are fractions from 0 to 1
    at_least: float = -math.inf
    at_most: float = math.inf
    ratio: bool = False             # the mean of the seeds is the geometric one
    share: bool = False             # the numbers are 0 or 1, whose mean is the effect
    exact: bool = False             # the numbers are no sample: all must lie in the region
    computed: bool = False          # the numbers do not depend on the seeds of the experiment
    comparisons: int = 1            # number of effects that were compared; this is the largest
    sides: tuple = ()               # the two sides, if the effect is not given as a pair
    rates: tuple = ()               # the learning rates of the sides

    def __post_init__(self):
        values = self.effect
        with numpy.errstate(all="ignore"):                      # a run that never got there is inf
            if isinstance(values, tuple):
                if not self.ratio and not 0 <= numpy.min(values) <= numpy.max(values) <= 1:
                    raise ValueError(f"{self.text}: the two sides have to be fractions")
                values = (numpy.divide if self.ratio else numpy.subtract)(*values)
            values = numpy.ravel(values).astype(float)
            self.values = numpy.log(values) if self.ratio else values
            self.mean = self.values.mean()
            if self.exact:
                self.interval = self.values.min(), self.values.max()
            elif self.share:
                self.interval = clopper_pearson(int(self.values.sum()), len(self.values))
            else:
                self.interval = measuring.student(self.values, self.comparisons)

    @property
    def fractions(self):
        """The means of the two fractions whose difference is the effect; else ()."""
        is_pair = isinstance(self.effect, tuple) and not self.ratio
        return tuple(map(numpy.mean, self.effect)) if is_pair else ()

    @property
    def reason(self):
        """The reason why there is no verdict; "" if there is one."""
        never = int((~numpy.isfinite(self.values)).sum())
        if never > 0:
            return f"with {never} of {len(self.values)} seeds, a run never reached the level"
        if math.isclose(*self.interval, abs_tol=1e-9) and not self.exact:
            return "all seeds have the same effect"
        if self.fractions:
            first, second = self.fractions
            is_decided = self.judge(-second, 1 - second) != UNDECIDED   # whatever the first one is
            if max(first, second) < FLOOR or is_decided and second < 0.5:
                return "at the floor"
            if min(first, second) > 1 - FLOOR or is_decided:
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
    def smallest(self):
        """The smallest effect that matters, as the region says; 0 if it does not."""
        ends = [abs(end) for end in (self.at_least, self.at_most) if math.isfinite(end)]
        return min(ends, default=0)

    def is_same(self, low, high):
        """Check if two fractions are the same, although they are not both so near to 0 or to 1 that
        they could hardly differ."""
        near = self.smallest
        return (len(self.fractions) == 2 and self.comparisons == 1
                and -near < low <= high < near
                and max(self.fractions) > near and min(self.fractions) < 1 - near)

    @property
    def verdict(self):
        ends = numpy.exp(self.interval) if self.ratio else self.interval
        verdict = NO_VERDICT if self.reason else self.judge(*ends)
        if verdict == CONTRADICTED and self.is_same(*ends):
            return SAME
        return NOT_FOUND if verdict == CONTRADICTED and self.source != OURS else verdict

    @property
    def measured(self):
        """The effect with its interval, as a text."""
        if not numpy.isfinite(self.values).all():
            return "none"
        numbers = numpy.array([self.mean, *self.interval])
        effect, low, high = (f"{x:.3g}" for x in (numpy.exp(numbers) if self.ratio else numbers))
        times = " times" if self.ratio else ""
        if self.exact:
            return " to ".join(dict.fromkeys((low, high))) + times
        return f"{effect}{times} ({low} to {high})"

    @property
    def region(self):
        """The claimed range, as a text."""
        if self.at_most == math.inf:
            return f"≥ {self.at_least:g}"
        return f"{self.at_least:g} to {self.at_most:g}".replace("-inf to ", "≤ ")

    @property
    def compared(self):
        """The mean of each side, and its learning rate, as texts."""
        sides = self.sides or (self.effect if isinstance(self.effect, tuple) else [self.effect])
        return [f"{numpy.mean(values):.3g}{f' at {rate}' if rate else ''}"
                for values, rate in itertools.zip_longest(sides, self.rates)
                if rate or len(sides) > 1]


def means(rows, window):
    """Average over each `window` steps in a row. (S, T) -> (S, T - window + 1)"""
    return numpy.lib.stride_tricks.sliding_window_view(rows, window, axis=1).mean(axis=-1)


def steps_to(rows, level, window):
    """Count the batches that each run learned from before its mean accuracy over `window` batches
    in a row crossed `level`. Interpolates between two means; inf if the run never got there.
    (S, T) -> (S,)"""
    counts = []
    for row in means(rows, window):
        place = int((row >= level).argmax())            # the first mean that reaches the level
        before = row[max(place - 1, 0)]
        part = (row[place] - level) / (row[place] - before) if place > 0 else 0.0
        counts.append(window - 1 + place - part if row[place] >= level else numpy.inf)
    return numpy.array(counts)


# ---- 3. the pages ----------------------------------------------------------------------------

def cell(values, form=".3g"):
    """Write the mean of the seeds, and the lowest and highest seed; or a text as it is. -> str"""
    if isinstance(values, str):
        return values
    low, mean, high = (f"{x:{form}}" for x in (values.min(), values.mean(), values.max()))
    text = low if low == high else f"{mean} ({low} to {high})"
    return text.replace("inf", "never")


def numbers(cases, by="", form=".3g"):
    """Write a table with a row for each case, {column: a number for each seed, or a text}.
    -> Markdown"""
    return table([by, *next(iter(cases.values()))],
                 [[case, *(cell(values, form) for values in columns.values())]
                  for case, columns in cases.items()])


def at_best(name, x):
    """Look up what each of COMPARED has with SEEDS at its best learning rate.
    -> {(side, what): {"rate": a text, column: array}}"""
    one = module(name)
    found = {}
    for side, what in one.COMPARED:
        (first, *_, last), best = tune(name, x, side, what)
        rate = best.removeprefix(f"{side}, ")
        if best in (first, last):
            rate += ", at an end"
        columns = {column: rows[len(one.TUNING):] for column, rows in x[best].items()}
        found[side, what] = {"rate": rate} | columns
    return found


def spans(seeds):
    """Write seeds as a text, such as 0 to 4 and 8 to 14."""
    starts = [seed for seed in seeds if seed - 1 not in seeds]
    ends = [seed for seed in seeds if seed + 1 not in seeds]
    return " and ".join(f"{start} to {end}" if start < end else f"{start}"
                        for start, end in zip(starts, ends))


def parts(name, without=()):
    """Judge the claims of an experiment. -> claims, functions that draw, texts"""
    found = list(module(name).page(load(name, without)[0]))
    return [[part for part in found if is_kind(part)]
            for is_kind in (lambda part: isinstance(part, Claim), callable,
                            lambda part: isinstance(part, str))]


def claims(name):
    """Judge the claims of an experiment by all seeds. -> [(Claim, its verdict with the reason; if
    it was another one before make replicate, with that, too)]"""
    new = added(load(name)[1])
    found = parts(name)[0]
    rows = []
    for claim, before in zip(found, parts(name, new)[0] if new else found):
        verdict = f"{claim.verdict}: {claim.reason}" if claim.reason else claim.verdict
        if before.verdict != claim.verdict:
            verdict += f" ({before.verdict} with the first {len(before.values)} seeds)"
        rows.append((claim, verdict))
    return rows


def commits(about):
    """List the commits at which an experiment was measured, in parts."""
    return re.findall(r"\b[0-9a-f]{7,8}\b", f"{about['commit']} {about.get('before', '')}")


def how(name):
    """Write how an experiment was measured. -> Markdown"""
    one, (_, about) = module(name), load(name)
    bases = "all from one base" if one.ONE_BASE else "each with its own base"
    chosen = f" Seeds {spans(one.TUNING)} chose the learning rates." if one.TUNING else ""
    more = f" `make replicate` added the seeds {spans(added(about))}." if added(about) else ""
    return (f"`make lab-{name}` repeats this with seeds {spans(one.SEEDS)}, {bases}: "
            f"{about['seconds']} s in {about['processes']} process"
            f"{'es' * (about['processes'] > 1)} on {about['machine'].split(' (')[0]}, at "
            f"{', '.join(commits(about))}.{chosen}{more} [All verdicts](ledger.html#{name})\n")


def page(name):
    """Write the parts of an experiment's page: the answer with pictures and the table, and how it
    was measured. -> {name of the part: Markdown}, {file: function that draws}"""
    _, draws, texts = parts(name)
    found = {f"{name}-run": how(name)}
    if texts:                                   # else they are on another page
        answer, rows = texts
        found[name] = f"**{answer}**\n\n![chart]({name}.svg)\n\n{rows}"
    return found, dict(zip([f"{name}.svg", f"{name}-2.svg"], draws))


def overview():
    """Write the generated parts of docs/lab.md: the questions ASKED, and a line for each page.
    -> str, str"""
    rows, lines = [], []
    for question, (name, words) in ASKED.items():
        [(claim, verdict)] = [pair for pair in claims(name) if pair[0].text.startswith(words)]
        rows.append([f"{question} [{name}](lab/{module(name).PAGE or name}.md)",
                     f"**{verdict}**: {claim.text}", claim.measured])
    for name in NAMES:
        if texts := parts(name)[2]:
            first, *_ = texts[0].split(". ")
            lines.append(f"- [{name}](lab/{name}.md): {first}.\n")
    return table(["question", "verdict and claim", "effect (95% interval)"], rows), "".join(lines)


def publish(name):
    """Draw the charts of an experiment, and write its parts of a page."""
    texts, draws = page(name)
    for file, draw in draws.items():
        with chart.figure(docs.DOCS / "lab" / file) as axis:
            draw(axis)
    for part, text in texts.items():
        put(part, text, f"lab-{name}")


def publish_overview():
    """Write the generated parts of docs/lab.md."""
    for part, text in zip(("asked", "pages"), overview()):
        put(part, text, "lab")
