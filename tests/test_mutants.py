"""make mutants: every mistake can be planted, and the report names those that the tests catch."""
import subprocess
import sys
from collections import Counter

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
    for words in (["init", "-q"], ["add", "."],
                  ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=tmp_path, text=True).strip()
    assert toy(half)[0] == 0
    rows = [head, "toy.py: half | tests/test_toy.py::test_double"]
    assert stored.read_text().splitlines() == rows
    code, printed = toy(half.replace("x / 2", "x / 3"))
    assert code == 0 and "not committed" in printed[-1]
    assert stored.read_text().splitlines() == rows


def test_tests_that_fail_without_a_mistake_tell_nothing(toy):
    code, printed = toy("== toy.py | test_toy.py anyway\nhalf\n- 2 * x\n+ x / 2\n")
    assert code == 1 and printed[-1].startswith("without a mistake: ")


OLD = """== near.py | test_near.py
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
"""
NAMES = ["two", "three", "four"]


@pytest.fixture
def choose(monkeypatch, capsys):
    """choose(*files, head, sample, now): choose mistakes after a change of these files.
    -> names of the mistakes, what it prints"""
    killers = {"near.py: two": "tests/test_near.py::test_two[1]",
               "far.py: four": "tests/test_far.py::test_four"}
    monkeypatch.setattr(changes, "read_killed", lambda: ("abc", killers))
    monkeypatch.delenv("BASE", raising=False)

    def call(*files, head="abc", sample=0, now=OLD):
        answers = {"rev-parse": head, "diff": "\n".join(files), "ls-files": "", "show": OLD}
        monkeypatch.setattr(changes, "git", lambda *words: answers[words[0]])
        monkeypatch.setattr(changes, "SAMPLE", sample)
        found = [mutant.name for mutant in changes.choose(mutants.parse(now), "mistakes.txt")]
        return found, capsys.readouterr().out
    return call


@pytest.mark.parametrize("file, now, names", [
    ("far.py", OLD, ["four"]), ("tests/test_far.py", OLD, ["four"]),
    ("tests/test_near.py", OLD, ["two", "three"]),                  # test_far.py kills four
    ("mistakes.txt", OLD.replace("+ 5 *", "+ 6 *"), ["four"]),
    ("tests/conftest.py", OLD, NAMES), ("requirements.txt", OLD, NAMES)])
def test_a_change_chooses_the_mistakes_that_it_could_hide(choose, file, now, names):
    found, printed = choose(file, now=now)
    assert sorted(found) == sorted(names)
    assert f"{len(names)} " in printed or " changed\n" in printed


def test_without_a_base_all_mistakes_are_planted_and_others_are_drawn(choose):
    assert choose()[0] == []
    assert len({choose(head=head, sample=1)[0][0] for head in "abcdefgh"}) > 1
    found, printed = choose(head=None)
    assert found == NAMES and "the history lacks the commit abc" in printed
