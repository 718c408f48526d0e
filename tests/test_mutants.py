"""mutants.py itself: all its mistakes can be made, and it tells mistakes that tests see from those
that no test sees."""
import os
import py_compile
import subprocess
import sys
from collections import Counter
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import SimpleNamespace

import mutants
import pytest

ROOT = Path(__file__).resolve().parent.parent
ALL = mutants.parse(mutants.MISTAKES)
TOY = '''"""Two functions."""


def double(x):
    return 2 * x


def triple(x):
    return 3 * x
'''
TEST = '''import toy


def test_double():
    assert toy.double(1) == 2


def test_triple():
    assert toy.triple(0) == 0


def test_that_fails_anyway():
    assert False
'''
TEST_OF_ORDER = '''import time

import toy

called = []


def test_slow():
    called.append("slow")
    time.sleep(1)
    assert toy.double(1) == 2


def test_quick():
    called.append("quick")
    assert toy.double(1) == 2


def test_after_the_quick_one():
    assert "quick" in called
'''


def test_every_mistake_can_be_made_where_it_says():
    wrong = []
    for mutant in ALL:
        count = (ROOT / mutant.script).read_text().count(mutant.old)
        if count != 1:
            wrong.append(f"{mutant.script}: {mutant.mistake}: the old text occurs {count} times")
    assert not wrong, "\n".join(wrong)
    assert all(mutant.new != mutant.old for mutant in ALL)


def test_there_are_many_mistakes_in_every_script():
    assert len(ALL) >= 250
    count = Counter(mutant.script for mutant in ALL)
    for script in ("reinforce.py", "ppo.py", "grpo.py", "gspo.py", "dpo.py", "common.py"):
        assert count[script] >= 7, script


def test_no_mistake_is_made_twice():
    count = Counter((mutant.script, mutant.old, mutant.new) for mutant in ALL)
    assert [mistake for mistake, times in count.items() if times > 1] == []


@pytest.mark.parametrize("file", sorted({mutant.tests.split(" ")[0] for mutant in ALL}))
def test_the_tests_of_a_mistake_are_of_what_its_script_computes(file):
    assert (ROOT / "tests" / file).is_file()
    assert file != "test_sync.py"


def test_that_the_old_text_is_gone_does_not_kill_a_mistake():
    asked = {mutant.tests for mutant in ALL if mutant.tests.startswith("test_mutants.py")}
    assert asked == {"test_mutants.py not can_be_made_where"}


def test_mistakes_are_read_line_by_line():
    one = ("a.py", "one", "x", "y", "test_a.py this or that")
    two = ("a.py", "two", "x\n  z", "", "test_a.py this or that")
    three = ("b.py", "three", "- x", "+ x", "test_b.py")
    text = "== a.py | test_a.py this or that\none\n- x\n+ y\ntwo\n- x\n-   z\n+"
    more = "== b.py | test_b.py\nthree\n- - x\n+ + x\n"
    assert mutants.parse(f"\n{text}\n\n{more}") == [one, two, three]


@pytest.fixture
def toy(tmp_path):
    """toy(mistakes, seconds) -> what make mutants prints about them, and its exit code, in a tree
    of one script. A mutant's tests may take that many seconds."""
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_toy.py").write_text(TEST)
    (tmp_path / "tests" / "test_order.py").write_text(TEST_OF_ORDER)
    # options of plugins that are not loaded
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "-n 2"\n')

    def run(mistakes, seconds=60):
        code = f"""
import mutants
mutants.ROOT = mutants.Path({str(tmp_path)!r})
mutants.SECONDS = {seconds}
mutants.PRELOAD = ()
mutants.MISTAKES = {mistakes!r}
raise SystemExit(mutants.main([]))
"""
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT / "tests", text=True, capture_output=True)
        assert not done.stderr
        assert (tmp_path / "toy.py").read_text() == TOY
        return done.stdout.splitlines(), done.returncode
    return run


HALF = "half\n- 2 * x\n+ x / 2\n"


def test_a_mistake_is_killed_by_a_test_that_fails_and_by_one_that_does_not_end(toy):
    forever = "forever\n- return 2 * x\n+ while True:\n+         pass"
    printed, code = toy(f"== toy.py | test_toy.py double\n{HALF}{forever}", seconds=8)
    assert code == 0
    assert printed[-1].startswith("2/2 killed")
    assert all(line.startswith("killed") for line in printed[1:-1])
    assert sorted(line.split()[-1] for line in printed[1:-1]) == ["[test_double]", "s]"]


def test_a_mistake_survives_if_no_test_sees_it_and_is_broken_if_it_cannot_be_made_or_imported(toy):
    printed, code = toy(f"""== toy.py | test_toy.py double or triple
four
- 3 * x
+ 4 * x
nowhere
- 5 * x
+
twice
- x):
+ y):
half a line
- 2 * x
+ 2 *
{HALF}
== toy.py | test_toy.py nothing_of_this_name
double
- 2 * x
+ 4 * x
""")
    words = {}
    for line in printed[1:-1]:
        mistake = line.split("toy.py: ")[1].split("  [")[0]
        words[mistake] = line.split()[0]
    assert words == {"four": "SURVIVED", "nowhere": "BROKEN", "twice": "BROKEN",
                     "half a line": "BROKEN", "half": "killed", "double": "BROKEN"}
    assert code == 1
    assert printed[-1].startswith("1/6 killed")


def test_tests_that_fail_or_are_not_there_without_a_mistake_tell_nothing(toy):
    all_tests = ("test_toy.py anyway", "test_no.py", "test_toy.py double", "test_order.py quick")
    printed, code = toy("".join(f"== toy.py | {tests}\n{HALF}" for tests in all_tests))
    words = {}
    for line in printed:
        if "no mistake: " in line:
            file = line.split("no mistake: ")[1].split()[0]
            assert file not in words            # each file is run once
            words[file] = line.split()[0]
    assert words == {"test_toy.py": "failed", "test_no.py": "broken", "test_order.py": "failed"}
    assert code == 1
    assert printed[-1].startswith("tests have to be there")
    assert "killed" not in "".join(printed)


def test_a_quick_test_is_asked_before_a_slow_one(toy):
    printed, code = toy(f"== toy.py | test_order.py slow or quick and not after\n{HALF}")
    assert code == 0
    assert printed[1].split()[-1] == "[test_quick]"


def test_a_test_is_asked_earlier_after_each_mistake_that_it_has_killed(monkeypatch):
    seen = []

    def run_all(orders, prices, base, scratch):
        for mutant, _ in orders:
            seen.append(dict(prices))
            yield SimpleNamespace(mutant=mutant, result=("failed", "slow", {}), seconds=4.0)
    monkeypatch.setattr(mutants, "run_all", run_all)
    assert mutants.count_killed(ALL[:3], {"slow": 4.0, "quick": 1.0}, None, None) == 3
    assert seen == [{"slow": price, "quick": 1.0} for price in (4.0, 2.0, 1.0)]


def test_what_was_compiled_without_the_mistake_is_not_run_for_it(tmp_path):
    path = tmp_path / "toy.py"
    path.write_text(TOY)
    before = path.stat()
    compiled = Path(py_compile.compile(path))
    mistake = mutants.Mutant("toy.py", "half", "2 * x", "x / 2", "")
    assert mutants.make_mistake(mistake, tmp_path) == ""
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    names = {}
    exec(SourceFileLoader("toy", str(path)).get_code("toy"), names)
    assert names["double"](1) == 0.5
    assert compiled.parent.is_dir()


def test_what_a_run_without_mistakes_compiled_is_there_for_the_others(tmp_path):
    for cache in ("__pycache__", "tests/__pycache__", "tmp/test0/__pycache__"):
        (tmp_path / "copy" / cache).mkdir(parents=True)
        (tmp_path / "copy" / cache / "toy.pyc").write_text(cache)
    (tmp_path / "base" / "tests" / "__pycache__").mkdir(parents=True)
    mutants.keep_compiled(tmp_path / "copy", tmp_path / "base")
    kept = sorted(path for path in (tmp_path / "base").rglob("*") if path.is_file())
    assert kept == [tmp_path / "base" / "__pycache__" / "toy.pyc",
                    tmp_path / "base" / "tests" / "__pycache__" / "toy.pyc"]
