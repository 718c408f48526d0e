"""Plausible mistakes, each of which the tests have to see: make mutants, or python tests/mutants.py
WORD ...

One at a time, in a copy of the repository, the old text of a mistake is replaced by the new, and
the tests named with it run until one fails: the mistake is killed. One that survives is a test that
is missing. It is an error if the old text does not occur exactly once, if the mistake breaks the
import (that, anyone sees), or if its tests fail without it. A function that several scripts share
is changed in the one that the tests look at; tests/test_sync.py, which would see any change of it,
is not asked. A WORD is of the script, name or tests.

The mistakes are in mistakes.txt. `== script | tests` says whose mistakes follow and who should see
them: a file, and an expression for pytest -k. Then, of each, its name, the lines that are replaced
(-), and those that take their place (+).
"""
import gc
import importlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MISTAKES = Path(__file__).with_name("mistakes.txt").read_text()
SECONDS = 120                           # a mistake that makes the tests hang is killed, too
FORK = sys.platform == "linux"          # elsewhere each process imports torch itself
# The second by the first optimizer step; here once, for all forks.
PRELOAD = ("torch", "torch._dynamo")


class Mutant(NamedTuple):
    script: str
    mistake: str
    old: str
    new: str
    tests: str


def parse(text):
    """The mutants of a text like MISTAKES."""
    mutants = []
    for line in text.strip().split("\n"):
        mark = line[:2].strip()
        rest = line[2:]
        if mark == "==":
            script, tests = rest.strip().split(" | ")
        elif mark == "-":
            old = f"{mutants[-1].old}\n{rest}".removeprefix("\n")
            mutants[-1] = mutants[-1]._replace(old=old)
        elif mark == "+":
            new = f"{mutants[-1].new}\n{rest}".removeprefix("\n")
            mutants[-1] = mutants[-1]._replace(new=new)
        elif line:
            mutants.append(Mutant(script, line, "", "", tests))
    return mutants


def make_mistake(mutant, folder):
    """Make the mistake in the copy. -> what is wrong with the mutant, "" if nothing is"""
    path = folder / mutant.script
    source = path.read_text() if path.is_file() else ""
    count = source.count(mutant.old)
    if count != 1 or mutant.old == mutant.new:
        return f"the old text occurs {count} times"
    path.write_text(source.replace(mutant.old, mutant.new))
    return ""


# ---- one process that runs tests -------------------------------------------------------------

class FirstFailure:
    """A plugin of pytest that remembers the first test that failed."""
    name = ""

    def pytest_runtest_logreport(self, report):
        if report.failed and not self.name:
            self.name = report.nodeid.split("::")[-1]


def run_tests(folder, tests):
    """In a process of its own: run them in the folder, and leave in result.json [exit code, name of
    the test that failed]."""
    import pytest
    with open(folder / "output.txt", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(folder)
    # the copy's modules, not ours; but what is installed in ROOT/.venv stays
    ours = (ROOT, ROOT / "tests")
    sys.path[:] = [path for path in sys.path if Path(path).resolve() not in ours]
    file, _, words = tests.partition(" ")
    failure = FirstFailure()
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--basetemp", str(folder / "tmp"),
                        f"tests/{file}", "-k", words], plugins=[failure])
    (folder / "result.json").write_text(json.dumps([int(code), failure.name]))


def start(folder, tests):
    """A process that runs the tests."""
    context = multiprocessing.get_context("fork" if FORK else "spawn")
    process = context.Process(target=run_tests, args=(folder, tests))
    gc.freeze()                     # else each fork would look for garbage in all of torch
    process.start()
    gc.unfreeze()
    return process


def verdict(process, folder, seconds):
    """What came of the tests. -> "passed", "failed" or "broken", and which test failed, or why;
    None while they run"""
    if process.is_alive():
        if seconds < SECONDS:
            return None
        process.kill()
        process.join()
        return "failed", f"no end after {SECONDS} s"
    if not (folder / "result.json").is_file():
        return "failed", f"the process died with {process.exitcode}"
    code, failed = json.loads((folder / "result.json").read_text())
    if code == 0:
        return "passed", ""
    if code == 1 and failed:
        return "failed", failed
    return "broken", f"pytest ends with {code}"


# ---- all of them -----------------------------------------------------------------------------

class Job:
    """Tests that run in a copy of the repository, with a mistake or without."""

    def __init__(self, mutant, tests, base, folder):
        self.mutant = mutant
        self.tests = tests
        self.folder = folder
        self.start_time = time.perf_counter()
        shutil.copytree(base, folder)
        wrong = make_mistake(mutant, folder) if mutant else ""
        self.result = ("broken", wrong) if wrong else None
        self.process = None if wrong else start(folder, tests)
        self.output = ""
        self.seconds = 0.0

    def is_done(self):
        """Whether the result is there; the copy is then gone. -> bool"""
        self.seconds = time.perf_counter() - self.start_time
        if self.result is None:
            self.result = verdict(self.process, self.folder, self.seconds)
            if self.result is None:
                return False
            self.output = (self.folder / "output.txt").read_text()
        shutil.rmtree(self.folder)
        return True


def run_all(orders, base, scratch):
    """Run the tests of orders, (mutant or None, tests), as many at a time as there are cores.
    Yields a Job as it ends."""
    waiting = list(orders)
    running = []
    started = 0
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            mutant, tests = waiting.pop(0)
            running.append(Job(mutant, tests, base, scratch / str(started)))
            started += 1
        for job in list(running):
            if job.is_done():
                running.remove(job)
                yield job
        time.sleep(0.01)


def tests_pass_without_mistakes(mutants, base, scratch):
    """Run all tests on the repository as it is, and print what they say. -> bool"""
    all_pass = True
    all_tests = dict.fromkeys(mutant.tests for mutant in mutants)
    for job in run_all([(None, tests) for tests in all_tests], base, scratch):
        word, detail = job.result
        print(f"{word:9}{job.seconds:5.1f} s  no mistake: {job.tests}  {detail}", flush=True)
        if word != "passed":
            print(job.output)
            all_pass = False
    return all_pass


def count_killed(mutants, base, scratch):
    """Make each mistake, and print what came of it. -> how many were killed"""
    words = {"failed": "killed", "passed": "SURVIVED", "broken": "BROKEN"}
    killed = 0
    for job in run_all([(mutant, mutant.tests) for mutant in mutants], base, scratch):
        word, detail = job.result
        killed += word == "failed"
        line = f"{words[word]:9}{job.seconds:5.1f} s  {job.mutant.script}: {job.mutant.mistake}"
        print(f"{line}  [{detail or job.tests}]"[:160], flush=True)
    return killed


def main(words):
    """-> exit code, 1 if a mutant survives or is broken, or if its tests fail without it"""
    mutants = []
    for mutant in parse(MISTAKES):
        text = f"{mutant.script} {mutant.mistake} {mutant.tests}"
        if all(word in text for word in words):
            mutants.append(mutant)
    if not mutants:
        print(f"no mistake has all of these words: {' '.join(words)}")
        return 1
    begin = time.perf_counter()
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}     # forks break pools
    for name in PRELOAD if FORK else ():
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        scratch = Path(folder, "work")
        ignored = shutil.ignore_patterns(".*", "runs", "docs", "__pycache__")
        shutil.copytree(ROOT, base, ignore=ignored)
        if not tests_pass_without_mistakes(mutants, base, scratch):
            print("tests have to be there, and to pass, before a mistake tells anything")
            return 1
        killed = count_killed(mutants, base, scratch)
    print(f"{killed}/{len(mutants)} killed, {time.perf_counter() - begin:.0f} s")
    return int(killed < len(mutants))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
