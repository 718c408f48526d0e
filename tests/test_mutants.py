"""make mutants: every mistake can be planted, and the report names those that the tests catch."""
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import mutants
import pytest
from conftest import ROOT
from mutants import changes

ALL = mutants.parse(mutants.MISTAKES.read_text())
TOY = "def double(x):\n    return 2 * x\n"
TESTS = """import pytest
import toy


def test_double():
    assert toy.double(2) == 4


def test_what_is_missing_here():
    pytest.skip("not here")


def test_that_fails_anyway():
    assert False
"""
MISTAKES = """== toy.py | test_toy.py double
half
- 2 * x
+ x / 2
forever
- return 2 * x
+ while True:
+         pass
squared
- 2 * x
+ x * x
nowhere
- 5 * x
+
twice
- x
+ y
half a line
- 2 * x
+ 2 *
== toy.py | test_toy.py missing
unseen
- 2 * x
+ x
"""
SEEN = {"half": "killed", "forever": "killed", "squared": "SURVIVED", "nowhere": "BROKEN",
        "twice": "BROKEN", "half a line": "BROKEN", "unseen": "skipped"}


def test_every_mistake_can_be_made_where_it_says_and_has_its_tests():
    wrong = []
    for mutant in ALL:
        count = (ROOT / mutant.file).read_text().count("\n".join(mutant.old))
        is_tested = all((ROOT / file).is_file() for file in mutant.files)
        if count != 1 or not is_tested:
            wrong.append(f"{mutant.file}: {mutant.name}: {count} times, {mutant.files}")
    assert not wrong, "\n".join(wrong)
    count = Counter((mutant.file, *mutant.old, "", *mutant.new) for mutant in ALL)
    assert [mistake for mistake, times in count.items() if times > 1] == []


def commit(folder):
    """Make a repository of a folder. -> the hash of its commit"""
    for words in (["init", "-q"], ["add", "."],
                  ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=folder, text=True).strip()


@pytest.fixture
def toy(tmp_path):
    """Run make mutants with some mistakes in a small tree: toy(mistakes). -> exit code, the lines
    that it prints"""
    (tmp_path / "tests").mkdir()
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "tests/test_toy.py").write_text(TESTS)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = "."\n')

    def run(mistakes):
        (tmp_path / "mistakes.txt").write_text(mistakes)
        code = (f"import mutants; mutants.ROOT = mutants.Path({str(tmp_path)!r}); "
                "mutants.MISTAKES = mutants.ROOT / 'mistakes.txt'; mutants.SECONDS = 4; "
                "mutants.PRELOAD = (); raise SystemExit(mutants.main([]))")
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tests", text=True,
                              capture_output=True)
        assert not done.stderr
        assert (tmp_path / "toy.py").read_text() == TOY
        return done.returncode, done.stdout.splitlines()
    return run


def test_what_tests_see_is_killed_and_all_else_is_said(toy):
    code, printed = toy(MISTAKES)
    found = {line.split("toy.py: ")[1].split("  [")[0]: line.split()[0] for line in printed[:-1]}
    assert found == SEEN
    assert code == 1


def test_the_tests_that_killed_all_mistakes_are_stored_and_run_first(toy, tmp_path):
    half, _ = MISTAKES.split("forever")
    squared = half.replace("half", "squared").replace("x / 2", "x * x")
    stored = tmp_path / changes.KILLED
    stored.write_text("\ntoy.py: squared | tests/test_toy.py::test_double\n")
    assert toy(squared)[0] == 1                 # that test no longer kills it, nor does another one
    (tmp_path / "mistakes.txt").write_text(half)
    stored.write_text("\ntoy.py: half | tests/test_toy.py::test_gone\n")
    head = commit(tmp_path)
    assert toy(half)[0] == 0
    rows = [head, "toy.py: half | tests/test_toy.py::test_double"]
    assert stored.read_text().splitlines() == rows
    code, printed = toy(half.replace("x / 2", "x / 3"))
    assert code == 0 and "not committed" in printed[-1]
    assert stored.read_text().splitlines() == rows


def test_tests_that_fail_without_a_mistake_tell_nothing(toy):
    code, printed = toy("== toy.py | test_toy.py anyway\nhalf\n- 2 * x\n+ x / 2\n")
    assert code == 1 and printed[-1].startswith("without a mistake: ")


TREE = {
    "near.py": "2 * 3\n3 * 4\n",
    "far.py": "4 * 5\n",
    "requirements.txt": "torch\n",
    "mistakes.txt": """== near.py | test_near.py
two
- 2 *
+ 1 *
three
- 3 * 4
+ 3 * 5
== far.py | test_near.py test_far.py
four
- 4 *
+ 5 *
""",
    "tests/conftest.py": "",
    "tests/test_near.py": "def test_two():\n    pass\n",
    "tests/test_far.py": "def test_four():\n    pass\n",
    changes.KILLED: "HEAD\nnear.py: two | tests/test_near.py::test_two[1]\n"
                    "far.py: four | tests/test_far.py::test_four\n"}
NAMES = ["two", "three", "four"]


@pytest.fixture
def chosen(tmp_path, monkeypatch, capsys):
    """chosen({path: (old, new)}, sample, base): choose mistakes in a small repository after edits.
    -> names of the mistakes, what it prints"""
    for path, text in TREE.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BASE", raising=False)
    head = commit(tmp_path)

    def choose(edits, sample=0, base=None):
        if base is not None:
            monkeypatch.setenv("BASE", base)
        monkeypatch.setattr(changes, "SAMPLE", sample)
        for path, (old, new) in edits.items():
            text = (tmp_path / path).read_text()
            assert old in text
            (tmp_path / path).write_text(text.replace(old, new))
        mutants_now = mutants.parse((tmp_path / "mistakes.txt").read_text())
        found = [mutant.name for mutant in changes.choose(mutants_now, "mistakes.txt")]
        return found, capsys.readouterr().out
    choose.head = head
    return choose


@pytest.mark.parametrize("edits, names", [
    ({"far.py": ("4 *", "5 *")}, ["four"]),
    ({"tests/test_near.py": ("pass", "return")}, ["two", "three"]),      # test_far.py kills four
    ({"tests/test_far.py": ("pass", "return")}, ["four"]),
    ({"mistakes.txt": ("+ 5 *", "+ 6 *")}, ["four"]),
    ({"tests/conftest.py": ("", "import os")}, NAMES),
    ({"requirements.txt": ("torch", "torch>2")}, NAMES)])
def test_a_change_chooses_the_mistakes_that_it_could_hide(chosen, edits, names):
    found, printed = chosen(edits)
    assert sorted(found) == sorted(names)
    assert f"{len(names)} " in printed or " changed\n" in printed


def test_without_a_base_all_mistakes_are_planted_and_others_are_drawn(chosen, monkeypatch):
    seeds = []
    monkeypatch.setattr(changes.random, "Random", lambda seed: seeds.append(seed) or random)
    assert {*chosen({}, sample=2)[0]} < {*NAMES} and seeds == [chosen.head]
    assert chosen({}, base="HEAD")[0] == []
    found, printed = chosen({}, base="0" * 40)
    assert found == NAMES and "the history lacks the commit 000" in printed
    Path(changes.KILLED).unlink()
    assert chosen({}, base="")[0] == NAMES
