"""Plant plausible mistakes, and check that the tests catch each of them: make mutants, or python
tests/mutants.py WORD ... for the mistakes that have all these words in their file, name or tests.
With --changed, plant only those that a change could hide from the tests: those that it touches, or
whose file it touches, or the file with the test that killed them last time; and all if it touches
what all tests share. tests/all-killed.txt names the last commit at which all mistakes were killed,
and lists, after each test, the mistakes that it killed (see `key`).

Each mistake is planted alone, in a copy of the repository. The tests that are named with it then
run, first the one that killed it last time, until one of them fails: the mistake is killed. A
mistake that survives shows that a test is missing. A mistake whose tests are all skipped here, for
example because transformers is not installed, counts as skipped. At the end, the tests that failed
run without a mistake, and have to pass. If no single test failed, because the tests hung, died or
could not be imported, all tests of the mistake have to pass.
"""
import contextlib
import gc
import importlib
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
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Imported alone: its package would stay imported, and hide that of each copy of the repository.
sys.path.insert(0, str(ROOT / "vectors"))
from edits import Edit, parse  # noqa: E402

# Practice and hunts plant those of the first file, too.
MISTAKES = ("learn/practice/mistakes.txt", "tests/mistakes.txt")
SECONDS = 100                           # a mistake that makes the tests hang counts as killed
FORK = multiprocessing.get_context("fork")
INTERPRETED = "tests/test_kernels.py"   # its Triton kernels run on the CPU
NONE, SKIPPED = 4, 5                    # exit codes of pytest if there is no test, or none runs
WORDS = {0: "SURVIVED", 1: "killed", SKIPPED: "skipped"}    # exit code -> result; else BROKEN
# Packages that tests import are imported once, before the forks. Our own modules are not, because
# each fork imports those of its copy of the repository.
PRELOAD = ("torch", "torch._dynamo", "_pytest.junitxml", "pdb", "tiktoken", "tqdm",
           "matplotlib.pyplot", "matplotlib.backends.backend_agg", "safetensors.torch",
           "transformers.models.llama.modeling_llama", "transformers.generation.utils")
KILLED = "tests/all-killed.txt"
# Versions of packages, and the helpers of the tests
SHARED = re.compile(r"requirements\.txt|pyproject\.toml|tests/(?!test_)\w+\.py")


class Mutant(NamedTuple):
    file: str
    name: str
    edit: Edit
    files: list         # of tests
    words: str          # expression for pytest -k


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


def without_parameters(test):
    return test.partition("[")[0]


def file_of(test):
    return test.partition("::")[0]


def start(scratch):
    """Start a process, and so its forks, in a copy of the repository."""
    folder = Path(scratch, str(os.getpid()))
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"))
    os.chdir(folder)
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != ROOT / "tests"]
    gc.freeze()                         # so that no fork searches all of torch for garbage


def run_tests(tests, words, sender):
    """Run tests, and send pytest's exit code, and the test that failed."""
    os.setsid()                         # so that the processes that tests start can be ended, too
    if {*map(file_of, tests)} != {INTERPRETED}:
        os.environ.pop("TRITON_INTERPRET", None)
    output = os.open("output.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
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


def ask(tests, words="", seconds=SECONDS):
    """Run files of tests, or single tests, in a fork. -> pytest's exit code, and the test that
    failed or the reason"""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=run_tests, args=(tests, words, sender))
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


def plant(mutant, number, killer):
    """Plant a mistake, and run the test that killed it last time, "" if none did, and then all of
    its tests. A killer that is no longer one of these does not run. -> what ask() returns"""
    path = Path(mutant.file)
    source = path.read_text("utf-8") if path.is_file() else ""
    try:
        path.write_text(mutant.edit.apply(source))
    except ValueError as error:
        return 2, str(error)
    os.utime(path, (number, number))    # a new time makes Python compile the file again
    code, failed = 0, ""
    if file_of(killer) in mutant.files:
        code, failed = ask([killer], mutant.words)
    if WORDS.get(code) != "killed":
        code, failed = ask(mutant.files, mutant.words)
    path.write_text(source)
    return code, failed


def run_correct(tests, words):
    """Run tests without a mistake, and print what they print if one fails. -> whether they pass"""
    code, failed = ask(sorted(tests), words, 10 * SECONDS)
    if code != 0:
        print(f"{Path('output.txt').read_text()}\nwithout a mistake: {failed}", flush=True)
    return code == 0


def git(*words):
    """Run git. -> what it prints; None if it fails"""
    done = subprocess.run(["git", *words], text=True, capture_output=True)
    return done.stdout if done.returncode == 0 else None


def read_mistakes(read=lambda path: (ROOT / path).read_text("utf-8")):
    """Read the mistakes of both files. -> list of Mutant"""
    return [Mutant(edit.file, edit.name, edit, *edit.tests)
            for edit in parse("\n".join(map(read, MISTAKES)))]


def key(mutant):
    """Compute a short name of a mistake, from its file and its name. -> 8 characters"""
    return f"{zlib.crc32(f'{mutant.file}: {mutant.name}'.encode()):08x}"


def read_killed():
    """Read tests/all-killed.txt. -> the commit, {key of a mistake: the test that killed it}"""
    commit, *rows = (ROOT / KILLED).read_text().splitlines()
    return commit, {one: test for test, *keys in map(str.split, rows) for one in keys}


def write_killed(killed):
    """Store which tests killed the mistakes, {key: test}, unless files are not committed. A mistake
    that no test killed, for example because it hung, is left out."""
    if git("status", "--porcelain", "--", ".", f":!{KILLED}") != "":
        return print(f"{KILLED} is not written, because some changes are not committed")
    rows = {}
    for one, test in killed.items():
        if "::" in test:
            rows.setdefault(without_parameters(test), []).append(one)
    lines = [" ".join([test, *keys]) for test, keys in sorted(rows.items())]
    (ROOT / KILLED).write_text("\n".join([git("rev-parse", "HEAD").strip(), *lines, ""]))


def choose(mutants):
    """Choose the mistakes that the change since a commit could hide, and print how many. The commit
    is that of BASE or of tests/all-killed.txt. -> list"""
    commit, killed = read_killed()
    base = os.environ.get("BASE") or commit
    changed = git("diff", "--name-only", "--no-renames", base, "--")
    if changed is None:
        print(f"all {len(mutants)} mistakes are planted, because the history lacks the commit")
        return mutants
    changed = {*changed.splitlines(),
               *git("ls-files", "--others", "--exclude-standard").splitlines()}
    old = [] if any(map(SHARED.fullmatch, changed)) else read_mistakes(
        lambda path: git("show", f"{base}:{path}") or "")
    chosen = []
    for mutant in mutants:
        killer = file_of(killed.get(key(mutant), ""))
        of_mutant = {mutant.file, *([killer] if killer else mutant.files)}
        if mutant not in old or changed & of_mutant:
            chosen.append(mutant)
    print(f"{len(chosen)} of {len(mutants)} mistakes are planted for the change since {base}",
          flush=True)
    return chosen


def main(words):
    """Plant the mistakes that have these words, and print a line for each. -> exit code: 1 if a
    mistake survives or cannot be planted, or if its tests fail without it"""
    clock = time.perf_counter()
    os.chdir(ROOT)
    mutants = [mutant for mutant in read_mistakes()
               if all(word in " ".join([*mutant[:2], *mutant.files])
                      for word in words if word != "--changed")]
    if "--changed" in words:
        mutants = choose(mutants)
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",     # forks break pools
                   "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TRITON_INTERPRET": "1"}
    for name in PRELOAD:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    _, killers = read_killed()
    known = [killers.get(key(mutant), "") for mutant in mutants]
    count = Counter()
    killed = {}
    tests = {}                          # (file, words) -> the tests that have to pass at the end
    with tempfile.TemporaryDirectory() as scratch, ProcessPoolExecutor(
            os.cpu_count(), FORK, start, [scratch]) as pool:
        # No variable may hold what map returns: it cancels the rest when it is freed, at Ctrl-C.
        for mutant, (code, failed) in zip(
                mutants, pool.map(plant, mutants, range(len(mutants)), known)):
            word = WORDS.get(code, "BROKEN")
            count[word] += 1
            killed[key(mutant)] = failed
            place, names = (file_of(failed), ""), [without_parameters(failed)]
            if "::" not in failed:
                place, names = (mutant.files[0], mutant.words), mutant.files
            if word in ("killed", "BROKEN"):
                tests.setdefault(place, set()).update(names)
            print(f"{count.total()} of {len(mutants)} {word:9}{mutant.file}: {mutant.name}  "
                  f"[{failed.split('::')[-1]}]", flush=True)
        words_of = [its_words for _, its_words in tests]
        is_correct = all(list(pool.map(run_correct, tests.values(), words_of)))
    print(f"{dict(count)}, {time.perf_counter() - clock:.0f} s")
    is_empty = not mutants and "--changed" not in words     # a change may touch none
    if not is_correct or count["killed"] + count["skipped"] < len(mutants) or is_empty:
        return 1
    if not words:
        write_killed(killed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
