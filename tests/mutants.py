"""Plausible mistakes, each of which the tests have to see: make mutants, or python tests/mutants.py
WORD ...

One at a time, in a copy of the repository, the old text of a mistake is replaced by the new, and
the tests named with it run until one fails: the mistake is killed. One that survives is a test that
is missing. It is an error if the old text does not occur exactly once, if the mistake breaks the
import (that, anyone sees), if it names no test, or if they fail without it. A function that several
scripts share is changed in the one that the tests look at; tests/test_sync.py, which would see any
change of it, is not asked. A WORD is of the script, name or tests.

All these tests run without a mistake first, each file once, which says what each takes. With a
mistake, the quick ones are asked first, and earlier than they cost those that have killed others.

The mistakes are in mistakes.txt. `== script | tests` says whose mistakes follow and who should see
them: a file, and an expression for pytest -k. Then, of each, its name, the lines that are replaced
(-), and those that take their place (+).
"""
import gc
import importlib.util
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from multiprocessing import connection
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MISTAKES = Path(__file__).with_name("mistakes.txt").read_text()
SECONDS = 120                           # a mistake that makes the tests hang is killed, too
FORK = sys.platform == "linux"          # elsewhere each process imports torch itself
# What all that runs imports, here once for all forks; the second by the first optimizer step.
PRELOAD = ("torch", "torch._dynamo", "pytest", "_pytest.junitxml", "pdb", "tiktoken",
           "tiktoken_ext.openai_public", "matplotlib.pyplot", "matplotlib.backends.backend_agg",
           "transformers.models.llama.modeling_llama", "transformers.generation.utils",
           "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "safetensors.torch")


# Tests that are skipped without it.
OF_TRANSFORMERS = ("test_pretrained", "test_processes", "test_export", "test_real",
                   "test_gpu.py pretrained")


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
    path.unlink()                       # the file itself is that of the other copies, too
    path.write_text(source.replace(mutant.old, mutant.new))
    # by its length and its second, what was compiled without the mistake may pass for up to date
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink()
    return ""


# ---- one process that runs tests -------------------------------------------------------------

class Order:
    """A plugin of pytest that runs the tests in order of their price, and remembers what each took
    and which one failed first. Without prices the last one is the first: a test that passes only
    after another fails here, and not later, as if it had seen a mistake."""

    def __init__(self, prices):
        self.prices = prices
        self.seconds = {}
        self.failed = ""

    def pytest_collection_modifyitems(self, items):
        items.reverse()
        items.sort(key=lambda item: self.prices.get(item.nodeid, 0.0))

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed and not self.failed:
            self.failed = report.nodeid


def run_tests(folder, tests, prices):
    """In a process of its own: run them in the folder, and leave in result.json [exit code, test
    that failed, seconds of each]."""
    import pytest
    with open(folder / "output.txt", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(folder)
    # the copy's modules, not ours; but what is installed in ROOT/.venv stays
    ours = (ROOT, ROOT / "tests")
    sys.path[:] = [path for path in sys.path if Path(path).resolve() not in ours]
    sys.dont_write_bytecode = False         # whatever the environment says: see keep_compiled
    file, _, words = tests.partition(" ")
    order = Order(prices)
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "--basetemp",
                        str(folder / "tmp"), f"tests/{file}", "-k", words], plugins=[order])
    (folder / "result.json").write_text(json.dumps([int(code), order.failed, order.seconds]))


def start(folder, tests, prices):
    """A process that runs the tests."""
    context = multiprocessing.get_context("fork" if FORK else "spawn")
    process = context.Process(target=run_tests, args=(folder, tests, prices))
    gc.freeze()                     # else each fork would look for garbage in all of torch
    process.start()
    gc.unfreeze()
    return process


def verdict(process, folder, seconds, limit):
    """What came of the tests. -> "passed", "failed" or "broken"; which test failed, or why; and how
    long each took, {test: seconds}. None while they run"""
    if process.is_alive():
        if seconds < limit:
            return None
        process.kill()
        process.join()
        return "failed", f"no end after {limit} s", {}
    if not (folder / "result.json").is_file():
        return "broken", f"the process died with {process.exitcode}", {}
    code, failed, seconds_of_tests = json.loads((folder / "result.json").read_text())
    if code == 0:
        return "passed", "", seconds_of_tests
    if code == 1 and failed:
        return "failed", failed, seconds_of_tests
    return "broken", f"pytest ends with {code}", seconds_of_tests


# ---- all of them -----------------------------------------------------------------------------

class Job:
    """Tests that run in a copy of the repository, with a mistake or without."""

    def __init__(self, mutant, tests, prices, base, folder):
        self.mutant = mutant
        self.tests = tests
        self.base = base
        self.folder = folder
        self.limit = SECONDS if mutant else 4 * SECONDS     # the tests of all of a file's mistakes
        self.start_time = time.perf_counter()
        self.seconds = 0.0
        self.output = ""
        shutil.copytree(base, folder, copy_function=os.link)     # 40 ms less than copies
        wrong = make_mistake(mutant, folder) if mutant else ""
        self.result = ("broken", wrong, {}) if wrong else None
        self.process = None if wrong else start(folder, tests, prices)

    def is_done(self):
        """Whether the result is there; the copy is then gone. -> bool"""
        self.seconds = time.perf_counter() - self.start_time
        if self.result is None:
            self.result = verdict(self.process, self.folder, self.seconds, self.limit)
            if self.result is None:
                return False
            self.output = (self.folder / "output.txt").read_text()
        if self.mutant is None:
            keep_compiled(self.folder, self.base)
        shutil.rmtree(self.folder)
        return True


def keep_compiled(folder, base):
    """Move to the base what Python and pytest have compiled in a copy without a mistake."""
    for cache in [*folder.glob("__pycache__"), *folder.glob("*/__pycache__")]:
        shutil.copytree(cache, base / cache.relative_to(folder), copy_function=os.replace,
                        dirs_exist_ok=True)


def run_all(orders, prices, base, scratch):
    """Run the tests of orders, (mutant or None, tests), as many at a time as there are cores.
    Yields a Job as it ends."""
    waiting = list(enumerate(orders))
    running = []
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            number, (mutant, tests) = waiting.pop(0)
            running.append(Job(mutant, tests, prices, base, scratch / str(number)))
        for job in list(running):
            if job.is_done():
                running.remove(job)
                yield job
        connection.wait([job.process.sentinel for job in running], timeout=0.1)


def seconds_without_mistakes(mutants, base, scratch):
    """Run the tests of all mutants on the repository as it is, each file once, and print what they
    say. -> {test: seconds}; {} if some fail"""
    words = {}
    for mutant in mutants:
        file, _, expression = mutant.tests.partition(" ")
        words.setdefault(file, {})[f"({expression or 'test'})"] = None      # every name has test_
    orders = [(None, f"{file} {' or '.join(together)}") for file, together in words.items()]
    seconds = {}
    all_pass = True
    for job in run_all(orders, {}, base, scratch):
        word, detail, seconds_of_tests = job.result
        seconds |= seconds_of_tests
        file = job.tests.split()[0]
        print(f"{word:9}{job.seconds:5.1f} s  no mistake: {file}  {detail}", flush=True)
        if word != "passed":
            print(job.output)
            all_pass = False
    return seconds if all_pass else {}


def count_killed(mutants, seconds, base, scratch):
    """Make each mistake, and print what came of it. -> how many were killed"""
    words = {"failed": "killed", "passed": "SURVIVED", "broken": "BROKEN"}
    killed = 0
    prices = dict(seconds)
    for job in run_all([(mutant, mutant.tests) for mutant in mutants], prices, base, scratch):
        word, detail, _ = job.result
        killed += word == "failed"
        if detail in prices:
            prices[detail] /= 2         # the same test often kills the neighbours, too
        line = f"{words[word]:9}{job.seconds:5.1f} s  {job.mutant.script}: {job.mutant.mistake}"
        print(f"{line}  [{detail.split('::')[-1] or job.tests}]"[:160], flush=True)
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
    if importlib.util.find_spec("transformers") is None:
        able = [mutant for mutant in mutants if not mutant.tests.startswith(OF_TRANSFORMERS)]
        if len(able) < len(mutants):
            print(f"{len(mutants) - len(able)} mistakes are left out, as transformers is missing")
        mutants = able
    begin = time.perf_counter()
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}     # forks break pools
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"      # pytest-xdist has no work here
    for name in PRELOAD if FORK else ():
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        scratch = Path(folder, "work")
        ignored = shutil.ignore_patterns(".*", "runs", "__pycache__")
        shutil.copytree(ROOT, base, ignore=ignored)
        seconds = seconds_without_mistakes(mutants, base, scratch)
        if not seconds:
            print("tests have to be there, and to pass, before a mistake tells anything")
            return 1
        killed = count_killed(mutants, seconds, base, scratch)
    print(f"{killed}/{len(mutants)} killed, {time.perf_counter() - begin:.0f} s")
    return int(killed < len(mutants))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
