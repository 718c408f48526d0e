"""Plausible mistakes, each of which the tests have to see: make mutants, or python tests/mutants.py
WORD ... for those that have all the words in file, name or files of tests.

One at a time, in a copy of the repository, a mistake is made, and the tests named with it run, the
quick ones first, until one fails: the mistake is killed. One that survives is a test that is
missing. Before, they run without a mistake; what is skipped here (no transformers) is not asked.
"""
import contextlib
import gc
import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# By itself: with the packages around it, each copy of the repository would be given ours.
sys.path.insert(0, str(ROOT / "learn/practice"))
from mistakes import MISTAKES, parse  # noqa: E402

SECONDS = 100                           # a mistake that makes the tests hang is killed, too
FORK = multiprocessing.get_context("fork")
INTERPRETED = "tests/test_kernels.py"   # here Triton's kernels run on the CPU
WORDS = {0: "SURVIVED", 1: "killed", 5: "skipped"}      # by pytest's exit code; else BROKEN
# What tests import, here once for all of them; but each imports its own copy of what is ours.
PRELOAD = ("torch", "torch._dynamo", "_pytest.junitxml", "pdb", "tiktoken", "tqdm",
           "matplotlib.pyplot", "matplotlib.backends.backend_agg", "safetensors.torch",
           "transformers.models.llama.modeling_llama", "transformers.generation.utils",
           "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict")


class Order:
    """A plugin of pytest: of the tests, only those of known seconds run, in the order of these.
    Without, all run. Remembers what each takes, and which fails first."""

    def __init__(self, known):
        self.known = known
        self.seconds = {}
        self.failed = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        if not items:
            raise pytest.UsageError("no test has these words")
        if self.known is not None:
            items[:] = [item for item in items if item.nodeid in self.known]
            items.sort(key=lambda item: self.known[item.nodeid])

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed = self.failed or report.nodeid
        elif report.when == "call" and report.passed:
            self.seconds[report.nodeid] = report.duration


def start(scratch):
    """Give a process, and its forks, a copy of the repository to work in."""
    folder = Path(scratch, str(os.getpid()))
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"))
    os.chdir(folder)
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != ROOT / "tests"]
    gc.freeze()                         # else each fork would look for garbage in all of torch


def run_tests(files, words, known, sender):
    """Run tests, and send: exit code of pytest, which test failed, seconds of each."""
    if files != [INTERPRETED]:
        os.environ.pop("TRITON_INTERPRET", None)
    output = os.open("output.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    order = Order(known)
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "--basetemp", "tmp",
                        *files, "-k", words], plugins=[order])
    sender.send((int(code), order.failed, order.seconds))


def ask(files, words, known=None):
    """Run tests in a fork. -> exit code of pytest, which test failed or why, seconds of each"""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=run_tests, args=(files, words, known, sender))
    process.start()
    sender.close()
    try:
        result = receiver.recv() if receiver.poll(SECONDS) else (1, f"no end in {SECONDS} s", {})
    except EOFError:
        result = (1, "the process died", {})
    process.kill()
    process.join()
    if known is None and result[0] not in WORDS:
        print(Path("output.txt").read_text())
    return result


def ask_with(mutant, number, known):
    """Make a mistake, and run its tests. -> as `ask`"""
    path = Path(mutant.file)
    source = path.read_text() if path.is_file() else ""
    old = "\n".join(mutant.old)
    if source.count(old) != 1 or mutant.old == mutant.new:
        return 2, f"the old text occurs {source.count(old)} times", {}
    path.write_text(source.replace(old, "\n".join(mutant.new)))
    os.utime(path, (number, number))    # by which Python knows that it has to compile it anew
    result = ask(mutant.files, mutant.words, known)
    path.write_text(source)
    return result


def main(words):
    """-> exit code, 1 if a mutant survives or is broken, or if its tests fail without it"""
    clock = time.perf_counter()
    mutants = [mutant for mutant in parse(MISTAKES.read_text())
               if all(word in " ".join([*mutant[:2], *mutant.files]) for word in words)]
    expressions = {}                    # of each file of tests, as a dict of which all values are 0
    for mutant in mutants:
        for file in mutant.files:
            expressions.setdefault(file, {})[f"({mutant.words or 'test'})"] = 0
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",     # forks break pools
                   "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TRITON_INTERPRET": "1"}
    for name in PRELOAD:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    known = {}
    count = dict.fromkeys([*WORDS.values(), "BROKEN"], 0)
    with tempfile.TemporaryDirectory() as scratch, ProcessPoolExecutor(
            os.cpu_count(), FORK, start, [scratch]) as pool:
        for code, failed, seconds in pool.map(
                ask, [[file] for file in expressions], map(" or ".join, expressions.values())):
            known |= seconds
            if code not in (0, 5):
                print(f"without a mistake: {failed or 'no such test'}")
                return 1
        results = pool.map(ask_with, mutants, range(len(mutants)), [known] * len(mutants))
        for mutant, (code, failed, _) in zip(mutants, results):
            word = WORDS.get(code, "BROKEN")
            count[word] += 1
            print(f"{word:9}{mutant.file}: {mutant.name}  [{failed.split('::')[-1]}]", flush=True)
    print(f"{count}, {time.perf_counter() - clock:.0f} s")
    return int(count["killed"] + count["skipped"] < max(1, len(mutants)))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
