"""Plant mistakes that a program makes, and check that the tests catch them.

  make mutants                      all of them, for hours: the share that is killed in each folder
  make mutants A=common.py          those with this word in their file, function or kind
  make mutants A="--sample 400"     some of them, drawn by the date, or as --seed WORD tells
  make changed BASE=main            those in functions that changed since a commit, for 3 minutes,
                                    with the tests that name most of these functions
  make mutants A=--practice         only the mistakes of learn/practice/mistakes.txt; with
                                    --changed, only those in files that changed since BASE

mutations.py makes the mistakes from the syntax trees. Each of them is planted alone: Python gets
the changed text when it imports the file, in a process of its own, so no test fails only because a
text changed; tests that start further processes run the unchanged files there. contexts.py has
recorded which tests run a changed line; the fast ones of different functions run first, for at most
BUDGET seconds in all, until one of them fails: the mistake is killed. A test that also fails
without the mistake does not count. What survives shows that a test is missing, unless
tests/equivalent.txt says why no user could see it; those mistakes are not planted.
"""
import argparse
import collections
import contextlib
import datetime
import functools
import gc
import importlib
import importlib.machinery
import json
import linecache
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import mutations
import pytest
from contexts import FOLDER, ROOT, digest, owners

# Imported alone: its package would stay imported, and hide that of each copy of the repository.
sys.path.insert(0, str(ROOT / "vectors"))
from edits import parse

BUDGET = 15                             # seconds of tests for a mistake, as recorded
FIRST = 4                               # tests that run before the files of the others are imported
SECONDS = 100                           # a mistake that makes the tests hang counts as killed
CHANGED = 180                           # seconds of make changed
NAMING = 6                              # files of tests whose lines make changed records
GOAL = 0.85                             # share that should be killed in each folder
PRACTICE = "learn/practice/mistakes.txt"
FORK = multiprocessing.get_context("fork")
INTERPRETED = "tests/test_kernels.py"   # its Triton kernels run on the CPU
SIGNATURES = "tests/test_family.py"     # it compares defaults
GONE = "a test is gone"                 # a mistake can change the names of tests
# Packages that tests import are imported once, before the forks. Our own modules are not, because
# each fork imports those of its copy of the repository.
PRELOAD = ("torch", "torch._dynamo", "_pytest.junitxml", "pdb", "tiktoken", "tqdm",
           "matplotlib.pyplot", "matplotlib.backends.backend_agg", "safetensors.torch",
           "transformers.models.llama.modeling_llama", "transformers.generation.utils")


class Mistake(NamedTuple):
    name: str
    texts: dict         # file -> its text with the mistake
    tests: list         # files of tests, or single ones


# ---- choosing tests --------------------------------------------------------------------------

class Contexts:
    """What contexts.py recorded: the seconds of each test, and the tests that ran each line."""

    def __init__(self):
        self.seconds = {}
        self.ran = collections.defaultdict(dict)        # (file, function) -> {test: its lines}
        newest = {}
        for path in sorted(FOLDER.glob("*.jsonl")):
            records = [json.loads(line) for line in path.read_text().splitlines()]
            newest |= {record["test"]: record for record in records}
        for test, record in newest.items():
            path = test.partition("::")[0]
            if digest(path) != record["digest"]:
                continue
            self.seconds[test] = record["seconds"]
            for file, functions in record["ran"].items():
                for function, lines in functions.items():
                    self.ran[file, function][test] = lines
        self.files = {test.partition("::")[0] for test in self.seconds}

    def at(self, file, function, number):
        """Find the tests that run a line of a function. -> set"""
        return {test for test, lines in self.ran[file, function].items() if number in lines}

    def of(self, mutation, texts):
        """Find the tests that run the statement of a mutation; if no test does, those of its
        function. A statement outside functions, or a function that runs when its file is imported,
        has the tests of functions that mention its name, or else all of its file.
        texts: {(file, function): text}. -> set"""
        owners = [(edit[0], mutation.function) for edit in mutation.edits]
        found = set().union(*(self.at(*owner, mutation.statement) for owner in owners))
        found = found or {test for owner in owners for test in self.ran[owner]}
        if mutation.statement == 0:     # defaults, which some tests read without a call
            return found | {test for test in self.seconds if test.startswith(SIGNATURES)}
        names = {*mutation.function.lstrip("=").rpartition(".")[2].split()}
        for _ in range(0 if found else 2):      # also names that statements set to something of it
            word = re.compile(rf"\b(?:{'|'.join(names)})\b")
            mentions = [owner for owner, text in texts.items() if word.search(text)]
            names |= {name for _, function in mentions if function.startswith("=")
                      for name in function[1:].split()}
            found = {test for owner in mentions for test in self.ran[owner]}
        return found or {test for owner, tests in self.ran.items() if owner[0] == mutation.file
                         for test in tests}

    def choose(self, tests):
        """Choose one test of each function of tests, the fast ones first, for half of the BUDGET,
        then the fastest of all others, which often differ in a parameter; at least one. -> list"""
        firsts = {}
        for test in sorted(tests, key=self.seconds.get):
            firsts.setdefault(test.partition("[")[0], test)
        others = sorted({*tests} - {*firsts.values()}, key=self.seconds.get)
        chosen, total = [], 0
        for budget, group in ((BUDGET / 2, firsts.values()), (BUDGET, others)):
            for test in group:
                if total + self.seconds[test] <= budget or not chosen:
                    total += self.seconds[test]
                    chosen.append(test)
        return chosen


def record(files):
    """Record which lines the tests of these files run."""
    print(f"recording which lines the tests of {len(files)} files run", flush=True)
    command = [sys.executable, "-m", "pytest", "-p", "contexts", "-p", "no:cacheprovider", "-q"]
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    if len(files) > 2:
        command += ["--numprocesses", "auto", "--maxprocesses", "8", "--dist", "worksteal"]
    subprocess.run([*command, *files], cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
    if INTERPRETED in files:
        subprocess.run([*command, INTERPRETED], cwd=ROOT, stdout=subprocess.DEVNULL,
                       env=env | {"TRITON_INTERPRET": "1"})


def contexts(changed=None):
    """Read what was recorded, after recording the files of tests that are new or changed; of
    `changed` functions, {(file, name)}, only those files that name most of them."""
    found = Contexts()
    files = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/test_*.py")}
    if changed:
        words = {name.rpartition(".")[2].lstrip("=") for _, name in changed}
        named = {file: len(words & {*re.findall(r"\w+", (ROOT / file).read_text("utf-8"))})
                 for file in sorted(files)}
        files = {*sorted(named, key=named.get)[-NAMING:]}
    if files - found.files:
        record(sorted(files - found.files))
        found = Contexts()
    return found


# ---- planting --------------------------------------------------------------------------------

class Outcome:
    """A plugin of pytest, which records the first test or file that fails, and whether any test
    ran."""
    failed = ""
    has_run = False

    def pytest_collectreport(self, report):
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_runtest_logreport(self, report):
        self.pytest_collectreport(report)
        self.has_run |= report.when == "call" and not report.skipped


def start(scratch):
    """Start a process, and so its forks, in a copy of the repository."""
    folder = Path(scratch, str(os.getpid()))
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"))
    os.chdir(folder)
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != ROOT / "tests"]
    gc.freeze()                         # so that no fork searches all of torch for garbage


def import_as(texts):
    """Let Python import these texts instead of those of the files, {path: text}."""
    get_code = importlib.machinery.SourceFileLoader.get_code

    def changed_code(self, name):
        text = texts.get(os.path.realpath(self.path))
        if text is None:
            return get_code(self, name)
        return compile(text, self.path, "exec", dont_inherit=True)
    importlib.machinery.SourceFileLoader.get_code = changed_code
    for path, text in texts.items():
        if "triton.jit" in text:        # Triton reads the text of a kernel
            linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)


def run_tests(tests, texts, sender):
    """Run tests, and send the test that failed, or "", and whether any test ran."""
    os.setsid()                         # so that the processes that tests start can be ended, too
    if not tests[0].startswith(INTERPRETED):
        os.environ.pop("TRITON_INTERPRET", None)
    output = os.open("output.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import_as({os.path.realpath(file): text for file, text in texts.items()})
    outcome = Outcome()
    temporary = f"../{Path.cwd().name}-tmp"     # outside: a test copies the repository there
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "--basetemp",
                        temporary, *tests], plugins=[outcome])
    if code == pytest.ExitCode.USAGE_ERROR:
        outcome.failed = GONE
    sender.send((outcome.failed, outcome.has_run))


def ask(tests, texts, seconds=SECONDS):
    """Run files of tests, or single tests, in a fork. -> the test that failed or the reason, ""
    if all passed; whether any test ran"""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=run_tests, args=(tests, texts, sender))
    process.start()
    sender.close()
    try:
        result = receiver.recv() if receiver.poll(seconds) else (f"no end in {seconds} s", True)
    except EOFError:
        result = ("the process died", True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return result


@functools.cache
def fails_without(test):
    """Check whether a test also fails without a mistake."""
    return ask([test], {})[0] != ""


def plant(mistake):
    """Plant a mistake, and run its tests. -> a word for the result, the test that failed or what
    happened"""
    of_kernels = [test for test in mistake.tests if test.startswith(INTERPRETED)]
    others = [test for test in mistake.tests if test not in of_kernels]
    has_run = False
    for group in filter(None, (others[:FIRST], of_kernels, others[FIRST:])):
        failed = True
        while failed:
            failed, any_ran = ask(group, mistake.texts)
            has_run |= any_ran
            if failed == GONE == ask(group, {})[0]:
                return "BROKEN", failed
            if failed and ("::" not in failed or not fails_without(failed)):
                return "killed", failed
            group = [*group, f"--deselect={failed}"]
    word = "SURVIVED" if has_run else "skipped" if mistake.tests else "UNTESTED"
    return word, f"{len(mistake.tests)} tests"


def run(mistakes, seconds=math.inf):
    """Plant mistakes, and print a line for each, until the time is over. -> {mistake's name: (word,
    what failed)}"""
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",     # forks break pools
                   "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TRITON_INTERPRET": "1"}
    for name in PRELOAD:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    results = {}
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as scratch, ProcessPoolExecutor(
            os.cpu_count(), FORK, start, [scratch]) as pool:
        # No variable may hold what map returns: it cancels the rest when it is freed, at Ctrl-C.
        for mistake, (word, failed) in zip(mistakes, pool.map(plant, mistakes)):
            results[mistake.name] = (word, failed)
            print(f"{len(results)} of {len(mistakes)} {word:9}{mistake.name}  "
                  f"[{failed.split('::')[-1]}]", flush=True)
            if time.monotonic() > end:
                pool.shutdown(cancel_futures=True)
                break
    return results


# ---- choosing mistakes -----------------------------------------------------------------------

def of_practice(contexts):
    """Read the mistakes that readers meet. Each names its tests; of these, the fast ones that run
    its lines come first. -> list of Mistake"""
    found = []
    for edit in parse((ROOT / PRACTICE).read_text("utf-8")):
        source = mutations.read(edit.file)
        lines = [source.count("\n", 0, source.index(old)) + 1 for old, _ in edit.hunks]
        known = owners(ROOT / edit.file)
        files, _ = edit.tests
        run_it = set().union(*(contexts.at(edit.file, *known[line]) for line in lines
                               if line in known))
        tests = [test for test in run_it if test.partition("::")[0] in files]
        found.append(Mistake(f"practice {edit.file} {edit.name}",
                             {edit.file: edit.apply(source)}, contexts.choose(tests) + files))
    return found


def equivalent():
    """Read tests/equivalent.txt. -> names of mutations"""
    lines = mutations.read("tests/equivalent.txt").splitlines()
    return {line.partition(": ")[0] for line in lines if not line.startswith("#")}


def text_at(base, file):
    """Read a file as it was at a commit; "" if it did not exist."""
    return subprocess.run(["git", "show", f"{base}:{file}"], text=True, capture_output=True,
                          cwd=ROOT).stdout


def all_texts(read=mutations.read):
    """Read all functions, and statements outside functions. -> {(file, name): text}"""
    files = [file for folder in mutations.FOLDERS for file in mutations.files_of(folder)]
    return {(file, name): text for file in files
            for name, text in mutations.texts_of(read(file)).items()}


def changed_since(base, texts):
    """Find the functions that changed since a commit. -> set of (file, name)"""
    before = all_texts(functools.partial(text_at, base))
    return {key for key, text in texts.items() if before.get(key) != text}


def report(results):
    """Print the share killed in each folder. -> whether each folder may reach its goal, if those
    planted are a sample: whether no fewer than 1.96 standard deviations below it were killed; and
    whether no mistake of practice survived, and each recorded test still exists."""
    is_reached = not any(word == "BROKEN" or name.startswith("practice") and word == "SURVIVED"
                         for name, (word, _) in results.items())
    for folder in mutations.FOLDERS:
        files = mutations.files_of(folder)
        words = [word for name, (word, _) in results.items() if name.split()[0] in files]
        number = len(words) - words.count("skipped")
        if number:
            killed = words.count("killed")
            print(f"{folder:9} {killed:5} of {number:5} killed: {killed / number:6.1%}")
            deviation = math.sqrt(GOAL * (1 - GOAL) * number)
            is_reached &= killed + 0.5 >= GOAL * number - 1.96 * deviation
    return is_reached


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--sample", type=int, help="number of mistakes")
    parser.add_argument("--seed", default=str(datetime.date.today()), help="draws the sample")
    parser.add_argument("--changed", action="store_true")
    parser.add_argument("--practice", action="store_true", help=f"only those of {PRACTICE}")
    parser.add_argument("--show", action="store_true", help="print the mistakes that survive")
    args = parser.parse_args(argv)
    clock = time.monotonic()
    known = equivalent()
    made = [one for folder in mutations.FOLDERS for one in mutations.of_folder(folder)
            if not args.practice and str(one) not in known
            and all(word in str(one) for word in args.words)]
    texts = all_texts()
    base = os.environ.get("BASE", "HEAD")
    changed = changed_since(base, texts) if args.changed else texts.keys()
    if not changed:
        print(f"no function has changed since {base}")
        return 0
    made = [one for one in made
            if any((file, one.function) in changed for file, *_ in one.edits)]
    made.sort(key=lambda one: zlib.crc32(f"{args.seed} {one}".encode()))
    made = made[:args.sample]
    found = contexts(changed if args.changed else None)
    mistakes = [Mistake(str(one), mutations.apply(one), found.choose(found.of(one, texts)))
                for one in made]
    if args.practice or not (args.changed or args.sample):
        files = {file for file, _ in changed}
        mistakes += [one for one in of_practice(found) if not files.isdisjoint(one.texts)
                     and all(word in one.name for word in args.words)]
    left = CHANGED - (time.monotonic() - clock) if args.changed else math.inf
    results = run(mistakes, left)
    for one in made:
        if args.show and results.get(str(one), ("",))[0] in ("SURVIVED", "UNTESTED"):
            print(f"\n{results[str(one)][0]} {one}\n{mutations.shown(one)}")
    is_reached = report(results)
    print(f"{len(results)} planted, {time.monotonic() - clock:.0f} s")
    if len(results) < len(mistakes):
        print(f"{len(mistakes) - len(results)} were not planted, because {CHANGED} s were over")
    return 0 if is_reached or args.changed else 1       # a few functions need not reach a goal


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
