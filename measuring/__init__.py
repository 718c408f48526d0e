"""Measure experiments: keep the results of their jobs in a file, search for the best learning rate,
compute intervals, and run scripts in this process.

A job is a case of an experiment and a seed, and its result is a dict. A Store keeps the results of
an experiment in a file, {"about": a dict that describes the measurement, "jobs": [[case, seed,
result], ...]}, which is written whenever a job has ended. So after Ctrl-C or kill -9, the same
command continues, and two processes may share a file.
"""
import concurrent.futures
import contextlib
import functools
import io
import json
import math
import multiprocessing
import os
import tempfile
import time
from types import SimpleNamespace

import numpy

import common
import plumbing

FARTHEST = 32           # times the rate with which a search starts: it goes neither above nor below


# ---- 1. files --------------------------------------------------------------------------------

def layout(value, levels):
    """Write JSON with a line for each entry of the first levels. -> str"""
    if levels > 0 and isinstance(value, dict):
        entries = [f"{json.dumps(key)}: {layout(one, levels - 1)}" for key, one in value.items()]
        return "{" + ",\n".join(entries) + "}"
    if levels > 0 and isinstance(value, (list, tuple)):
        return "[" + ",\n".join(layout(one, levels - 1) for one in value) + "]"
    return json.dumps(value)


def write(path, content, levels=2):
    """Write a file of JSON, such as a store with a line for each job, so that a diff shows which
    results are new. Two processes may write at once."""
    plumbing.write(path, layout(content, levels) + "\n", f".{os.getpid()}.tmp")


def results_of(content):
    """Read the content of a store. -> {(case, seed): result}"""
    return {(case, seed): result for case, seed, result in content["jobs"]}


def read(path, remedy):
    """Read a file of JSON. If this fails, exit with one line. -> dict"""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        common.fail(f"{path}: missing or damaged; restore it with git, or {remedy}")


def different(before, about):
    """List the keys in which two descriptions of measurements differ, apart from their time."""
    return [key for key in {**before, **about}
            if key != "seconds" and before.get(key) != about.get(key)]


class Store:
    """The results of an experiment in a file, {(case, seed): result}. If the file exists, the
    measurement continues, unless another `about` describes it: then the command ends with one line,
    and the file stays as it is. If `about` has "seconds", they are counted."""

    def __init__(self, path, about):
        self.path = path
        self.about = about
        self.results = {}
        if path.exists():
            before = read(path, "delete it")
            if other := different(before["about"], about):
                common.fail(f"{path}: was measured with other {', '.join(other)}; move it away")
            self.about = before["about"]
            self.results = results_of(before)
        self.clock = time.perf_counter() - self.about.get("seconds", 0)

    def content(self):
        return {"about": self.about,
                "jobs": [[*job, result] for job, result in self.results.items()]}

    def add(self, case, seed, result):
        """Keep the result of a job, also in the file, to which a second process may add others."""
        if self.path.exists():
            self.results |= results_of(read(self.path, "delete it"))
        self.results[case, seed] = result
        if "seconds" in self.about:
            self.about["seconds"] = round(time.perf_counter() - self.clock)
        write(self.path, self.content())

    def keep(self, cases):
        """Leave out the results of all other cases, such as a script that has changed, and sort."""
        self.results = {(case, seed): self.results[case, seed]
                        for case, seed in sorted(self.results) if case in cases}
        write(self.path, self.content())

    def move(self, path):
        """Write all results to another file, replacing those of an earlier measurement."""
        write(path, self.content())
        self.path.unlink()


# ---- 2. jobs ---------------------------------------------------------------------------------

def make_pool(processes):
    """Make a pool of processes; None calls functions in this one."""
    if processes is None:
        return contextlib.nullcontext(SimpleNamespace(map=map))
    if processes < 1:
        common.fail(f"--processes {processes}: must be at least 1")
    context = multiprocessing.get_context("spawn")              # a fork can hang with threads
    return concurrent.futures.ProcessPoolExecutor(processes, context)


def collect(store, jobs_of, perform, processes=None):
    """Measure the jobs that jobs_of lists from the results so far, until none is missing.
    jobs_of: {(case, seed): result} -> pairs of a case and a seed; perform: case, seed -> result"""
    with make_pool(processes) as pool:
        while jobs := [job for job in jobs_of(store.results) if job not in store.results]:
            for job, result in zip(jobs, pool.map(perform, *zip(*jobs))):
                store.add(*job, result)


def search(start, rates, score):
    """Search for the best learning rate. Begin with `rates`; while half or twice the best one was
    not tried, try it as well, up to FARTHEST times `start`. If several are equally good, the one
    nearest to `start` is the best.
    score: rate -> a number, higher is better, or None if it is not measured yet
    -> the rates that have to be tried, sorted; the best one, or None if some are not measured"""
    tried = sorted(rates)
    while True:
        scores = {rate: score(rate) for rate in tried}
        if None in scores.values():
            return tried, None
        best = max(tried, key=lambda rate: (scores[rate], -abs(math.log2(rate / start))))
        missing = [rate for rate in (best / 2, best * 2)
                   if rate not in tried and start / FARTHEST <= rate <= start * FARTHEST]
        if not missing:
            return tried, best
        tried = sorted([*tried, *missing])


# ---- 3. intervals ----------------------------------------------------------------------------

@functools.cache
def student_quantile(n, p):
    """Compute the p-quantile of Student's t with n degrees of freedom. With t = sqrt(n) tan(angle),
    the density of the angle is proportional to cos(angle)^(n - 1). -> float"""
    angle = numpy.linspace(-math.pi / 2, math.pi / 2, 100_001)
    density = numpy.cos(angle) ** (n - 1)
    share = numpy.concatenate([[0], (density[1:] + density[:-1]).cumsum()])
    return math.sqrt(n) * math.tan(numpy.interp(p * share[-1], share, angle))


def student(values, comparisons=1):
    """Compute the 95% interval of the mean of independent values.
    comparisons: how many intervals have to hold at once (Bonferroni). -> low, high"""
    n = len(values) - 1
    mean = numpy.mean(values)
    half = student_quantile(n, 1 - 0.025 / comparisons) * numpy.std(values) / math.sqrt(n)
    return mean - half, mean + half


# ---- 4. runs ---------------------------------------------------------------------------------

def run(main, words, look, folder=None):
    """Run the main of a script in this process, with these arguments and without printing. The run
    has a folder for itself, unless the arguments name `folder`. -> what look(folder) returns"""
    with tempfile.TemporaryDirectory() as work, contextlib.redirect_stdout(io.StringIO()):
        if folder is None:
            folder = f"{work}/run"
            words = [*words, "--output_dir", folder]
        main(words)
        return look(folder)
