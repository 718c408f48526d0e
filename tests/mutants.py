"""Plant mistakes that a program makes, and check that the tests catch them.

  make mutants                      all of them, for hours: the share that is killed in each folder
  make mutants A=common.py          those with this word in their file, function or kind
  make mutants A="--sample 400"     some of them, drawn by the date, or as --seed WORD tells
  make changed BASE=main            those in functions that changed since a commit, for 3 minutes,
                                    with the tests that name most of these functions
  make mutants A=--practice         only the mistakes of learn/practice/mistakes.txt; with
                                    --changed, only those in files that changed since BASE

mutations.py makes the mistakes from the syntax trees. Each of them is planted alone: Python gets
the changed text when it imports the file, in a process of its own, while the file stays as it is.
So no test fails only because a text changed. contexts.py has recorded which tests run a changed
line; the fast ones of different functions run first, for at most BUDGET seconds in all, until one
of them fails: the mistake is killed. What survives shows that a test is missing. A test that also
fails without the mistake does not count. tests/equivalent.txt lists the mistakes that change
nothing that a user could see, with the reasons; they are not planted.

Tests that start further processes run the unchanged files there.
"""
import argparse
import collections
import contextlib
import datetime
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
NONE, SKIPPED = 4, 5                    # exit codes of pytest if there is no test, or none runs
# Packages that tests import are imported once, before the forks. Our own modules are not, because
# each fork imports those of its copy of the repository.
PRELOAD = ("torch", "torch._dynamo", "_pytest.junitxml", "pdb", "tiktoken", "tqdm",
           "matplotlib.pyplot", "matplotlib.backends.backend_agg", "safetensors.torch",
           "transformers.models.llama.modeling_llama", "transformers.generation.utils")


class Mistake(NamedTuple):
    name: str
    texts: dict         # file -> its text with the mistake
    tests: list
    words: str = ""     # expression for pytest -k


# ---- choosing tests --------------------------------------------------------------------------

class Contexts:
    """What contexts.py recorded: the seconds of each test, and the tests that ran each line."""

    def __init__(self):
        self.seconds = {}
        self.imports = {}                               # file of tests -> seconds
        self.ran = collections.defaultdict(dict)        # (file, function) -> {test: its lines}
        newest = {}
        for path in sorted(FOLDER.glob("*.jsonl")):
            for line in path.read_text().splitlines():
                record = json.loads(line)
                newest[record["test"]] = record
        digests = {test.partition("::")[0]: None for test in newest}
        digests = {file: digest(file) for file in digests if (ROOT / file).exists()}
        for test, record in newest.items():
            if digests.get(test.partition("::")[0]) != record["digest"]:
                continue
            self.seconds[test] = record["seconds"]
            self.imports[test.partition("::")[0]] = record["import"]
            for file, functions in record["ran"].items():
                for function, lines in functions.items():
                    self.ran[file, function][test] = lines
        self.files = {test.partition("::")[0] for test in self.seconds}

    def of(self, mutation, texts):
        """Find the tests that run the statement of a mutation; if no test does, or for defaults,
        all that run its function; and for a statement outside functions, or a function that no test
        runs, those of the functions in which its name occurs. texts: {(file, function): text}.
        -> set"""
        owners = [(edit[0], mutation.function) for edit in mutation.edits]
        found = {test for owner in owners for test, lines in self.ran[owner].items()
                 if mutation.statement in lines and mutation.statement > 0}
        found = found or {test for owner in owners for test in self.ran[owner]}
        if not found:
            names = {*mutation.names} or {mutation.function.rpartition(".")[2]}
            for _ in range(2):          # also under names that statements set to something of it
                word = re.compile(rf"\b(?:{'|'.join(names)})\b")
                mentions = [owner for owner, text in texts.items() if word.search(text)]
                names |= {name for _, function in mentions if function.startswith("=")
                          for name in function[1:].split()}
            found = {test for owner in mentions for test in self.ran[owner]}
        return found

    def at(self, places, source):
        """Find the tests that run the lines of a file at these places: (file, position). -> set"""
        found = set()
        for file, position in places:
            line = source.count("\n", 0, position) + 1
            function, number = owners(ROOT / file).get(line, ("", 0))
            found |= {test for test, lines in self.ran[file, function].items() if number in lines}
        return found

    def within(self, files):
        """List the tests of some files of tests. -> set"""
        return {test for test in self.seconds if test.partition("::")[0] in files}

    def choose(self, tests):
        """Choose one test of each function of tests, the fast ones first, for half of the BUDGET,
        then the fastest of all others, which often differ in a parameter; at least one. -> list"""
        def cost(test):
            return self.seconds[test] + self.imports[test.partition("::")[0]]
        firsts = {}
        for test in sorted(tests, key=cost):
            firsts.setdefault(test.partition("[")[0], test)
        others = sorted({*tests} - {*firsts.values()}, key=self.seconds.get)
        chosen, files, total = [], set(), 0
        for budget, group in ((BUDGET / 2, firsts.values()), (BUDGET, others)):
            for test in group:
                file = test.partition("::")[0]
                more = self.seconds[test] if file in files else cost(test)
                if total + more <= budget or not chosen:
                    total += more
                    chosen.append(test)
                    files.add(file)
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

    def __init__(self):
        self.failed = ""
        self.has_run = self.is_skipped = False

    def pytest_collectreport(self, report):
        self.is_skipped |= report.skipped               # a whole file
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed = self.failed or report.nodeid
        self.is_skipped |= report.skipped
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


def run_tests(tests, words, texts, sender):
    """Run tests, and send pytest's exit code, and the test that failed."""
    os.setsid()                         # so that the processes that tests start can be ended, too
    if {test.partition("::")[0] for test in tests} != {INTERPRETED}:
        os.environ.pop("TRITON_INTERPRET", None)
    output = os.open("output.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import_as({os.path.realpath(file): text for file, text in texts.items()})
    outcome = Outcome()
    temporary = f"../{Path.cwd().name}-tmp"     # outside: a test copies the repository there
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "--basetemp",
                        temporary, *tests, "-k", words], plugins=[outcome])
    if code in (0, SKIPPED) and not outcome.has_run:
        code = SKIPPED if outcome.is_skipped else NONE
    reason = outcome.failed
    if code == NONE and not reason:
        reason = "no test ran"
    sender.send((int(code), reason))


def ask(tests, words, texts, seconds=SECONDS):
    """Run files of tests, or single tests, in a fork. -> pytest's exit code, and the test that
    failed or the reason"""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=run_tests, args=(tests, words, texts, sender))
    process.start()
    sender.close()
    try:
        result = receiver.recv() if receiver.poll(seconds) else (1, f"no end in {seconds} s")
    except EOFError:
        result = (1, "the process died")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return result


trusted = {}            # test -> whether it passes without a mistake


def fails_without(test):
    """Check whether a test also fails without a mistake."""
    if test not in trusted:
        trusted[test] = ask([test], "", {})[0] == 0
    return not trusted[test]


def plant(mistake):
    """Plant a mistake, and run its tests. -> a word for the result, the test that failed or what
    happened"""
    tests = [*mistake.tests]
    of_kernels = [test for test in tests if test.startswith(INTERPRETED)]
    single = [test for test in tests if "::" in test and test not in of_kernels]
    files = [test for test in tests if "::" not in test and test not in of_kernels]
    has_run = False
    for group in filter(None, (single[:FIRST], of_kernels, single[FIRST:], files)):
        while group:
            code, failed = ask(group, mistake.words, mistake.texts)
            has_run |= code in (0, 1)
            if code == SKIPPED or code == 0:
                break
            if "::" in failed and fails_without(failed):
                group = [test for test in group if test != failed]
                continue
            if code == NONE and ask(group, mistake.words, {})[0] == NONE:
                return "BROKEN", failed
            return "killed", failed
    return ("SURVIVED" if has_run else "skipped" if tests else "UNTESTED"), f"{len(tests)} tests"


def run(mistakes, processes=None, seconds=math.inf):
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
            processes or os.cpu_count(), FORK, start, [scratch]) as pool:
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
    its lines come first. -> [(Mistake, its edits)]"""
    found = []
    for edit in parse((ROOT / PRACTICE).read_text("utf-8")):
        source = (ROOT / edit.file).read_text("utf-8")
        places = [(edit.file, source.index(old)) for old, _ in edit.hunks]
        files, words = edit.tests
        tests = [*files]
        if not words:
            tests = contexts.choose(contexts.at(places, source) & contexts.within(files)) + tests
        mistake = Mistake(f"practice {edit.file} {edit.name}", {edit.file: edit.apply(source)},
                          tests, words)
        found.append((mistake, places))
    return found


def mistake_of(mutation, contexts, texts):
    """Choose the tests of a mutation. -> Mistake"""
    tests = contexts.choose(contexts.of(mutation, texts))
    return Mistake(str(mutation), mutations.apply(mutation), tests)


def equivalent():
    """Read tests/equivalent.txt. -> {name of a mutation: reason}"""
    lines = (ROOT / "tests/equivalent.txt").read_text("utf-8").splitlines()
    pairs = [line.split(": ", 1) for line in lines if line and not line.startswith("#")]
    return dict(pairs)


def git(*words):
    """Run git. -> what it prints; None if it fails"""
    done = subprocess.run(["git", *words], text=True, capture_output=True, cwd=ROOT)
    return done.stdout if done.returncode == 0 else None


def texts_of(file, source):
    return {(file, name): mutations.text_of(source, node)
            for name, node in mutations.units(source)}


def all_texts():
    """Read all functions, and statements outside functions. -> {(file, name): text}"""
    texts = {}
    for folder in mutations.FOLDERS:
        for file in mutations.files_of(folder):
            texts |= texts_of(file, (ROOT / file).read_text("utf-8"))
    return texts


def changed_since(base, texts):
    """Find the functions that changed since a commit. -> set of (file, name)"""
    changed = set()
    for file in {file for file, _ in texts}:
        before = texts_of(file, git("show", f"{base}:{file}") or "")
        changed |= {key for key, text in texts.items() if key[0] == file
                    and before.get(key) != text}
    return changed


def report(results, folders):
    """Print the share killed in each folder. -> whether each folder may reach its goal, if those
    planted are a sample: whether no fewer than 1.96 standard deviations below it were killed."""
    is_reached = True
    for folder in mutations.FOLDERS:
        words = [word for name, (word, _) in results.items() if folders.get(name) == folder
                 and word != "skipped"]
        if not words:
            continue
        killed = words.count("killed")
        share = killed / len(words)
        margin = 1.96 * math.sqrt(share * (1 - share) / len(words))
        print(f"{folder:9} {killed:5} of {len(words):5} killed: {share:6.1%} +- {margin:.1%}")
        deviation = math.sqrt(GOAL * (1 - GOAL) * len(words))
        is_reached &= killed + 0.5 >= GOAL * len(words) - 1.96 * deviation
    broken = [name for name, (word, _) in results.items()
              if word == "BROKEN" or (name.startswith("practice") and word == "SURVIVED")]
    return is_reached and not broken


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--sample", type=int, help="number of mistakes")
    parser.add_argument("--seed", default=str(datetime.date.today()), help="draws the sample")
    parser.add_argument("--changed", action="store_true")
    parser.add_argument("--practice", action="store_true", help=f"only those of {PRACTICE}")
    parser.add_argument("--show", action="store_true", help="print the mistakes that survive")
    parser.add_argument("--processes", type=int)
    args = parser.parse_args(argv)
    clock = time.monotonic()
    folders = () if args.practice else mutations.FOLDERS
    made = [(folder, one) for folder in folders for one in mutations.of_folder(folder)]
    known = equivalent()
    made = [(folder, one) for folder, one in made if str(one) not in known
            and all(word in f"{folder} {one}" for word in args.words)]
    texts = all_texts()
    base = os.environ.get("BASE", "HEAD")
    if args.changed:
        changed = changed_since(base, texts)
        if not changed:
            print(f"no function has changed since {base}")
            return 0
        made = [(folder, one) for folder, one in made
                if any((file, one.function) in changed for file, *_ in one.edits)]
    made.sort(key=lambda pair: pair[1].order(args.seed))
    made = made[:args.sample]
    found = contexts(changed) if args.changed else contexts()
    mistakes = [mistake_of(one, found, texts) for _, one in made]
    if args.practice or not (args.changed or args.sample):
        edited = (git("diff", "--name-only", base) or "").split() if args.changed else None
        mistakes += [one for one, _ in of_practice(found)
                     if all(word in one.name for word in args.words)
                     and (edited is None or not one.texts.keys().isdisjoint(edited))]
    left = CHANGED - (time.monotonic() - clock) if args.changed else math.inf
    results = run(mistakes, args.processes, left)
    for _, one in made:
        if args.show and results.get(str(one), ("",))[0] in ("SURVIVED", "UNTESTED"):
            print(f"\n{results[str(one)][0]} {one}\n{mutations.shown(one)}")
    is_reached = report(results, {str(one): folder for folder, one in made})
    print(f"{len(results)} planted, {time.monotonic() - clock:.0f} s")
    if len(results) < len(mistakes):
        print(f"{len(mistakes) - len(results)} were not planted, because {CHANGED} s were over")
    return 0 if is_reached or args.changed else 1       # a few functions need not reach a goal


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
