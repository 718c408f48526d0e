"""An experiment of the lab: what it measures, what it claims, and its page.

lab/claims/NAME.py is an experiment, run by `python -m lab NAME` (make lab-NAME). It has

  EXPERIMENT = Experiment(__file__, seeds=range(5))
  EXPERIMENT.runs("runs", {case: command line}, metrics)
  @EXPERIMENT.measure([case ..])
  def things(seed, case):       -> {column: a number, or a list with one number for each step}
  def page(runs, things):       yields Claims, a Picture, and tables as Markdown

`page` gets the results of each measure as {case: {column: array}}, where the first axis of an array
counts the seeds. The results are stored in docs/lab/NAME.json, and docs/lab.md lists the findings.

You write docs/lab/NAME.md yourself: a title, and the sections Claim, Prediction and Method before
the first run; afterwards the section Outcome, which says what you predicted correctly. The claims,
the picture, whose title is the finding of the first claim, and the tables are then inserted above
these sections.
"""
import concurrent.futures
import importlib
import json
import multiprocessing
import re
import time
from pathlib import Path

import numpy
import torch

from lab.bench import NAMES, UNSCORED, is_old  # noqa: F401
from lab.docs import DOCS, MACHINE, run_once, table
from lab.draw import Picture, show
from lab.verdict import OURS, Claim

# A page: its title, the generated part, the sections written by hand, and the last line, which a
# new page lacks
PAGE = re.compile("(# .*?\n).*?(## Claim\n.*?\n)(?:\n`make lab-.*)?", re.S)
OUTCOME = re.compile("## Outcome\n.*?(?=## |\n`make lab-|$)", re.S)    # shown below the picture

RANGE = re.compile(r" \(\S+ to \S+\) \|")             # a cell of `numbers` that has a range


class Experiment:
    def __init__(self, file, seeds, one_base=False, rate="5e-4"):
        """one_base: all seeds start from one base; else each seed has its own. rate: the learning
        rate that both sides of its comparisons share, or the rates of its scripts; "" if none."""
        self.name = Path(file).stem
        self.seeds = list(seeds)
        self.one_base = one_base
        self.rate = rate
        self.measures = {}                                      # name -> function, cases, seeds
        self.commands = []                                      # command lines of all runs

    def measure(self, cases, seeds=None, name=""):
        """Register a function of a seed and a case, as a decorator. seeds: used instead of the
        experiment's seeds; name: of the measure, instead of the function's name."""
        def register(function):
            chosen = self.seeds if seeds is None else list(seeds)
            self.measures[name or function.__name__] = (function, list(cases), chosen)
            return function
        return register

    def runs(self, name, commands, metrics=(), scores=(), seeds=None):
        """Measure runs: the metrics of each step, and the scores of the trained policy. seeds: used
        instead of the experiment's seeds."""
        def columns(seed, case):
            own = "" if self.one_base else f" --base_seed {seed}"
            return run_once(commands[case] + own, seed, metrics, scores)
        self.commands += commands.values()
        self.measure(commands, seeds, name)(columns)

    def results(self, processes):
        """Measure in several processes. -> {measure: {case: {column: [values of each seed]}}}"""
        jobs = [(self.name, measure, seed, case)
                for measure, (_, cases, seeds) in self.measures.items()
                for case in cases for seed in seeds]
        done = [perform(jobs[0])]           # alone, so that only one process makes the first base
        context = multiprocessing.get_context("spawn")          # a fork can hang with threads
        with concurrent.futures.ProcessPoolExecutor(processes, context) as pool:
            done += pool.map(perform, jobs[1:])
        results = {}
        for (_, measure, _, case), result in zip(jobs, done):
            columns = results.setdefault(measure, {}).setdefault(case, {})
            for column, values in result.items():
                columns.setdefault(column, []).append(values)
        return results

    def path(self, ending):
        return DOCS / "lab" / f"{self.name}{ending}"

    def perform(self, processes):
        """Measure, and store the results in docs/lab/NAME.json, with a line for each column."""
        clock = time.perf_counter()
        results = self.results(processes)
        about = {"seconds": round(time.perf_counter() - clock), "processes": processes,
                 "machine": MACHINE, "torch": torch.__version__}
        text = json.dumps({"about": about} | results)
        text = text.replace("]], ", "]],\n").replace("}, ", "},\n") + "\n"
        self.path(".json").write_text(text, "utf-8")

    def load(self):
        """Load the stored results. -> claims, picture and tables of the page, and a dict about the
        measurement"""
        content = json.loads(self.path(".json").read_text("utf-8"))
        about = content.pop("about")
        results = {measure: {case: {column: array(rows) for column, rows in columns.items()}
                             for case, columns in cases.items()}
                   for measure, cases in content.items()}
        parts = list(module(self.name).page(**results))
        claims, [picture], tables = ([part for part in parts if type(part) is kind]
                                     for kind in (Claim, Picture, str))
        picture.title = picture.title or claims[0].finding
        return claims, picture, tables, about

    def text(self):
        """Write the page of the experiment. Its title and the sections written by hand stay
        unchanged. -> str"""
        page = self.path(".md").read_text("utf-8")
        title, by_hand = PAGE.fullmatch(OUTCOME.sub("", page)).groups()
        [first, *others], picture, tables, about = self.load()
        asked = f"the claim needs {first.claimed_range}"
        texts = [title, f"{answer(first)} Effect: {first.effect}; {asked}.\n",
                 show(self.name, picture.title),
                 *(outcome.rstrip() + "\n" for outcome in OUTCOME.findall(page))]
        papers = "What papers claim" if first.source == OURS else "What else papers claim"
        for heading, is_ours in ((papers, False), ("What else we asked", True)):
            heads = ["claim", "verdict", "effect (95% interval)", "claimed range"]
            heads += ["source"] * (not is_ours)
            rows = [[claim.text, claim.judged, claim.effect, claim.claimed_range, claim.source]
                    [:len(heads)] for claim in others if (claim.source == OURS) == is_ours]
            if rows:
                texts += [f"## {heading}\n", table(heads, rows)]
        if self.rate:
            texts.append(f"Verdicts hold at a learning rate of {self.rate}.\n")
        if tables:
            texts.append("## Numbers\n")
        if any(RANGE.search(text) for text in tables):
            texts.append("Brackets contain the lowest and the highest seed.\n")
        texts += [*tables, by_hand]
        first, *_, last = max((seeds for *_, seeds in self.measures.values()), key=len)
        bases = "all from one base" if self.one_base else "each with its own base"
        texts.append(f"`make lab-{self.name}` repeats this experiment with seeds {first} to {last}"
                     f", {bases}. It took {about['seconds']} s in {about['processes']} process"
                     f"{'es' * (about['processes'] > 1)}, with {about['machine'].split(' (')[0]}."
                     " [The lab](../lab.md)\n")
        return "\n".join(texts)

    def publish(self):
        """Draw the pictures, and write the pages."""
        _, picture, *_ = self.load()
        picture.save(self.path(".svg"))
        self.path(".md").write_text(self.text(), "utf-8")


def array(rows):
    """Make an array of lists, and pad shorter lists with nan. -> float array"""
    if isinstance(rows[0], list):
        longest = max(map(len, rows))
        rows = [row + [None] * (longest - len(row)) for row in rows]
    return numpy.array(rows, dtype=float)


def module(name):
    return importlib.import_module(f"lab.claims.{name}")


def measured():
    """List the experiments that have been measured, in the order of NAMES. -> list"""
    return [name for name in NAMES if (DOCS / "lab" / f"{name}.json").exists() and is_old(name)]


def perform(job):
    """Run one measure with one seed and case. -> {column: values with six digits}"""
    experiment, measure, seed, case = job
    torch.set_num_threads(1)
    function, *_ = module(experiment).EXPERIMENT.measures[measure]
    print(f"{experiment}: {measure}, {case}, seed {seed}", flush=True)
    return {column: rounded(values) for column, values in function(seed, case).items()}


def rounded(values):
    if isinstance(values, (list, tuple)):
        return [rounded(value) for value in values]
    return values if values is None else float(f"{values:.6g}")


def means(rows, window):
    """Average over each `window` steps in a row. (S, T) -> (S, T - window + 1)"""
    return numpy.lib.stride_tricks.sliding_window_view(rows, window, axis=1).mean(axis=-1)


def steps_to_level(rows, level, window=2):
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


def transposed(rows):
    """Turn a list of dicts into a dict of lists. -> {column: [a value for each row]}"""
    return {column: [row[column] for row in rows] for column in rows[0]}


def at_best_rates(tuning, judging, sides, rates, cost):
    """Choose the rate of each side: the one with the lowest mean cost(columns) on the tuning seeds.
    -> {side: its columns on the judging seeds}"""
    best = {}
    for side in sides:
        cases = [f"{side}, {rate}" for rate in rates]
        best[side] = judging[min(cases, key=lambda case: cost(tuning[case]).mean())]
    return best


def ratio(one, other, end, other_end=None, smallest=1):
    """Divide what `one` took by what `other` took. Values of inf are replaced by a bound: `end` in
    `one`, and `other_end` in `other`. smallest: the least that a run can take, window - 1 for
    steps_to_level. -> dict of arguments for a Claim"""
    other_end = end if other_end is None else other_end
    sides = {(False, False): "", (True, False): ">", (False, True): "<", (True, True): "?"}
    bounds = [sides[pair] for pair in zip(numpy.isinf(one).tolist(), numpy.isinf(other).tolist())]
    values = (numpy.minimum(one, end), numpy.minimum(other, other_end))
    return {"values": values, "times": True, "bounds": bounds, "smallest": smallest}


def numbers(cases, form=".3f", by=""):
    """Write a table with a row for each case, {column: a number for each seed}. A cell has the mean
    of the seeds and their range. If some seeds are inf, it has the lowest number, and counts the
    inf. -> Markdown"""
    rows = []
    for case, columns in cases.items():
        row = [case]
        for values in map(numpy.ravel, columns.values()):
            low, mean, high = (f"{x:{form}}" for x in (values.min(), values.mean(), values.max()))
            span = mean if low == high else f"{mean} ({low} to {high})"
            never = int(numpy.isinf(values).sum())
            if never == len(values):
                span = "never"
            elif never > 0:
                span = f"{low} or more; never in {never} of {len(values)} runs"
            row.append(span)
        rows.append(row)
    return table([by, *next(iter(cases.values()))], rows)


def answer(claim):
    """Say who claims what, and whether it holds. -> str"""
    source = f"Claim by {claim.source}".replace("by after", "after")
    source = "Our claim" if claim.source == OURS else source
    return f"{source}: {claim.text}. Verdict: {claim.judged}."
