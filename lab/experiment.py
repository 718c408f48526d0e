"""An experiment of the lab: what it measures, what it claims, and its page.

lab/claims/NAME.py is an experiment, run by `python -m lab NAME` (make lab-NAME). It has

  EXPERIMENT = Experiment(__file__, seeds=range(5))
  EXPERIMENT.runs("runs", {case: command line}, metrics)
  @EXPERIMENT.measure([case ..])
  def things(seed, case):       -> {column: a number, or a list with one for each step}
  def page(runs, things):       yields Claim; a Picture; tables as Markdown; Block

`page` gets what was found as {case: {column: array}}, in which the first axis of an array is that
of the seeds. docs/lab/NAME.json keeps it, and docs/lab.md has the findings. docs/lab/NAME.md is
written by hand first: a title, and under ## the Claim, the Prediction and the Method, before the
first run, and the Outcome, which says afterwards what of the prediction was right. The claims, the
picture and the tables are put in above.
"""
import concurrent.futures
import importlib
import json
import multiprocessing
import re
import shlex
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy
import torch

from lab.docs import DOCS, MACHINE, put, run, table
from lab.draw import Picture
from lab.verdict import NO_VERDICT, OURS, Claim
from report.logs import read_log

NAMES = ("hacking", "bugs", "sharpen", "kl", "seeds", "signal", "trust", "wrongrewards", "variance",
         "credit", "critic", "reuse", "staleness", "offline", "methods", "rates", "masking", "zero",
         "r1")
# The order of docs/lab.md, and of make lab; so many have their picture there:
FINDINGS = 5
# Of runs of which the batches alone are looked at:
UNSCORED = "--stop_at 2 --eval_steps 1000 --num_eval_problems 1 --num_eval_samples 1"
# A page: its title, what is put in, its words, and the foot, which a new page lacks.
PAGE = re.compile("(# .*?\n).*?(## Claim\n.*?\n)(?:\n`make lab-.*)?", re.S)


class Experiment:
    def __init__(self, file, seeds, one_base=False):
        """one_base: all seeds of it begin with one base; else each seed has its own."""
        self.name = Path(file).stem
        self.seeds = list(seeds)
        self.one_base = one_base
        self.measures = {}                                      # name -> function, cases, seeds
        self.commands = []                                      # of all runs

    def measure(self, cases, seeds=None):
        """Decorates a function of a seed and a case. seeds: others than those of the experiment."""
        def register(function):
            chosen = self.seeds if seeds is None else list(seeds)
            self.measures[function.__name__] = (function, list(cases), chosen)
            return function
        return register

    def runs(self, name, commands, metrics=(), scores=()):
        """Measure runs: of each step its metrics, and of the end its scores."""
        def columns(seed, case):
            own = "" if self.one_base else f" --base_seed {seed}"
            return run_once(commands[case] + own, seed, metrics, scores)
        columns.__name__ = name
        self.commands += commands.values()
        self.measure(commands)(columns)

    def found(self, processes):
        """Measure, in so many processes. -> {measure: {case: {column: a list for each seed}}}"""
        jobs = [(self.name, measure, seed, case)
                for measure, (_, cases, seeds) in self.measures.items()
                for case in cases for seed in seeds]
        done = [perform(jobs[0])]                               # which makes the first base
        context = multiprocessing.get_context("spawn")          # a fork may hang with threads
        with concurrent.futures.ProcessPoolExecutor(processes, context) as pool:
            done += pool.map(perform, jobs[1:])
        found = {}
        for (_, measure, _, case), result in zip(jobs, done):
            columns = found.setdefault(measure, {}).setdefault(case, {})
            for column, values in result.items():
                columns.setdefault(column, []).append(values)
        return found

    def path(self, ending):
        return DOCS / "lab" / f"{self.name}{ending}"

    def perform(self, processes):
        """Measure, and keep what was found in docs/lab/NAME.json, a line for each column."""
        clock = time.perf_counter()
        found = self.found(processes)
        about = {"seconds": round(time.perf_counter() - clock), "processes": processes,
                 "machine": MACHINE, "torch": torch.__version__}
        text = json.dumps({"about": about} | found)
        self.path(".json").write_text(text.replace("]], ", "]],\n").replace("}, ", "},\n") + "\n")

    def load(self):
        """-> what `page` yields, and what is known about the measurement"""
        content = json.loads(self.path(".json").read_text())
        about = content.pop("about")
        found = {measure: {case: {column: array(rows) for column, rows in columns.items()}
                           for case, columns in cases.items()}
                 for measure, cases in content.items()}
        return list(module(self.name).page(**found)), about

    def text(self, told, about):
        """The page of the experiment, whose title and words stay as they are. -> str"""
        title, words = PAGE.fullmatch(self.path(".md").read_text()).groups()
        [picture] = of(told, Picture)
        parts = [title, f"![{picture.title}]({self.name}.png)\n"]
        for heading, ours in (("What papers claim", False), ("What else we asked", True)):
            rows = [[claim.text, claim.source, claim.seen, claim.asked, claim.judged]
                    for claim in of(told, Claim) if (claim.source == OURS) == ours]
            heads = ["claim", "by", "effect (95% interval)", "claimed", "verdict"]
            if rows:
                parts += [f"## {heading}\n", table(heads, rows)]
        parts += ["## Numbers\n", *of(told, str), words]
        seeds = max((seeds for *_, seeds in self.measures.values()), key=len)
        bases = ", all from one base" if self.one_base else ", each with its own base"
        bases *= len(seeds) > 1                                 # one has no luck in it
        parts.append(f"`make lab-{self.name}`: seeds {', '.join(map(str, seeds))}{bases}; "
                     f"{about['seconds']} s in {about['processes']} process"
                     f"{'es' * (about['processes'] > 1)}; {about['machine']}, torch "
                     f"{about['torch']}. [The lab](../lab.md)\n")
        return "\n".join(parts)

    def publish(self):
        """Draw the picture, and write the pages."""
        told, about = self.load()
        [picture] = of(told, Picture)
        picture.save(self.path(".png"))
        self.path(".md").write_text(self.text(told, about))
        for block in of(told, Block):
            put(*block, f"lab-{self.name}")
        put("findings", index(), "lab")


class Block(NamedTuple):
    """What an experiment writes on another page, between the marks with this name."""
    name: str
    text: str


def of(told, kind):
    return [one for one in told if type(one) is kind]


def array(rows):
    """Of lists of unequal lengths, the shorter ones are filled up with nan. -> float array"""
    if isinstance(rows[0], list):
        longest = max(map(len, rows))
        rows = [row + [None] * (longest - len(row)) for row in rows]
    return numpy.array(rows, dtype=float)


def module(name):
    return importlib.import_module(f"lab.claims.{name}")


def measured():
    """Those of NAMES that have been measured. -> list"""
    return [name for name in NAMES if (DOCS / "lab" / f"{name}.json").exists()]


def perform(job):
    """-> {column: values}, with six digits"""
    experiment, measure, seed, case = job
    torch.set_num_threads(1)
    function, *_ = module(experiment).EXPERIMENT.measures[measure]
    print(f"{experiment}: {measure}, {case}, seed {seed}", flush=True)
    return {column: rounded(values) for column, values in function(seed, case).items()}


def rounded(values):
    if isinstance(values, (list, tuple)):
        return [rounded(value) for value in values]
    return values if values is None else float(f"{values:.6g}")


def run_once(command, seed, metrics, scores):
    """Run a command line: metrics of each step, and scores of the trained policy. -> columns"""
    script, *flags = shlex.split(command)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work, "run")
        summary = run(script, folder, *flags, "--seed", seed)
        log = read_log(folder, "metrics")
    columns = {name: [line.get(name) for line in log] for name in metrics}
    return columns | {name: summary["trained"][name] for name in scores}


def means(rows, window):
    """The means of so many steps in a row. (S, T) -> (S, T - window + 1)"""
    return numpy.lib.stride_tricks.sliding_window_view(rows, window, axis=1).mean(axis=-1)


def steps_to_level(rows, level, window=2):
    """Count the batches that a run learned from before the mean accuracy of `window` batches in a
    row crossed `level`, interpolated between two means; inf if it never did. (S, T) -> (S,)"""
    found = []
    for row in means(rows, window):
        place = int((row >= level).argmax())            # the first mean that reaches the level
        before = row[max(place - 1, 0)]
        part = (row[place] - level) / (row[place] - before) if place > 0 else 0.0
        found.append(window - 1 + place - part if row[place] >= level else numpy.inf)
    return numpy.array(found)


def transposed(rows):
    """-> {column: a list with one for each row}, of rows that are dicts"""
    return {column: [row[column] for row in rows] for column in rows[0]}


def ratio(one, other, end, other_end=None, smallest=1):
    """How many times as much `one` took as `other`, for a Claim. What is inf took more than `end`,
    or more than `other_end` if it is in `other`. smallest: the least that a run can take, which for
    steps_to_level is window - 1. -> dict"""
    other_end = end if other_end is None else other_end
    sides = {(False, False): "", (True, False): ">", (False, True): "<", (True, True): "?"}
    bounds = [sides[pair] for pair in zip(numpy.isinf(one).tolist(), numpy.isinf(other).tolist())]
    values = (numpy.minimum(one, end), numpy.minimum(other, other_end))
    return {"values": values, "times": True, "bounds": bounds, "smallest": smallest}


def numbers(cases, columns=None, form=".3f", by=""):
    """A row for each case {column: a number for each seed}, with all columns, or {column: heading}:
    the mean of the seeds and their span; of what is inf, how many never arrived. -> a table in
    Markdown"""
    columns = columns or {column: column for column in next(iter(cases.values()))}
    rows = []
    for case, found in cases.items():
        row = [case]
        for column in columns:
            values = numpy.ravel(found[column])
            low, mean, high = (f"{x:{form}}" for x in (values.min(), values.mean(), values.max()))
            span = mean if low == high else f"{mean} ({low} - {high})"
            never = int(numpy.isinf(values).sum())
            if never:
                some = f"from {low}; {never} of {len(values)} " * (never < len(values))
                span = f"{some}never"
            row.append(span)
        rows.append(row)
    return table([by, *columns.values()], rows)


def index():
    """The top of docs/lab.md: findings with their pictures, then all experiments. -> str"""
    parts = []
    rows = []
    for name in measured():
        experiment = module(name).EXPERIMENT
        claims = of(experiment.load()[0], Claim)
        first = claims[0]
        if len(parts) < FINDINGS:
            source = "Ours" if first.source == OURS else first.source
            parts.append(f"![{first.finding}](lab/{name}.png)\n\n{source}: {first.text}. Here "
                         f"{first.judged}, {first.seen}. [More](lab/{name}.md)\n")
        for claim in claims:
            if claim is first or claim.told and claim.verdict != NO_VERDICT:
                rows.append([claim.finding, f"{claim.source}: {claim.text}", claim.seen,
                             claim.judged, f"[{name}](lab/{name}.md)"])
    heads = ["what was found", "claim", "effect (95% interval)", "verdict", "page"]
    return "\n".join([*parts, "## All experiments\n", table(heads, rows)])
