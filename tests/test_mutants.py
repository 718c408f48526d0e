"""mutants.py itself: all its mistakes can be made, and it tells seen ones from those that no test sees."""
import subprocess
import sys
from pathlib import Path

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


def test_every_mistake_can_be_made_where_it_says():
    sources = {mutant.script: (ROOT / mutant.script).read_text() for mutant in ALL}
    wrong = [(mutant.script, mutant.mistake, sources[mutant.script].count(mutant.old)) for mutant in ALL]
    wrong = [f"{script}: {mistake}: the old text occurs {n} times" for script, mistake, n in wrong if n != 1]
    assert not wrong, "\n".join(wrong)
    assert all(mutant.new != mutant.old for mutant in ALL)


def test_there_are_many_of_every_script_each_with_a_name_and_tests_of_what_it_computes():
    assert len({(mutant.script, mutant.mistake) for mutant in ALL}) >= len(ALL) - 2      # in two rows each
    for script in ("reinforce.py", "ppo.py", "grpo.py", "gspo.py", "dpo.py", "common.py"):
        assert sum(mutant.script == script for mutant in ALL) >= 7, script
    for mutant in ALL:
        file = mutant.tests.split(" ")[0]
        assert (ROOT / "tests" / file).is_file() and file not in ("test_sync.py", "test_mutants.py"), mutant


def test_mistakes_are_read_line_by_line():
    one = ("a.py", "one", "x", "y", "test_a.py this or that")
    two = ("a.py", "two", "x\n  z", "", "test_a.py this or that")
    three = ("b.py", "three", "- x", "+ x", "test_b.py")
    text = "== a.py | test_a.py this or that\none\n- x\n+ y\ntwo\n- x\n-   z\n+"
    assert mutants.parse(f"\n{text}\n\n== b.py | test_b.py\nthree\n- - x\n+ + x\n") == [one, two, three]


@pytest.fixture
def toy(tmp_path):
    """toy(mistakes) -> what make mutants says of them, and its exit code, in a tree of one script"""
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_toy.py").write_text(TEST)

    def run(mistakes):
        code = (f"import mutants; mutants.ROOT = mutants.Path({str(tmp_path)!r}); "
                "mutants.SECONDS, mutants.PRELOAD = 3, (); "
                f"mutants.MISTAKES = {mistakes!r}; raise SystemExit(mutants.main([]))")
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT / "tests", text=True, capture_output=True)
        assert not done.stderr and (tmp_path / "toy.py").read_text() == TOY
        return done.stdout.splitlines(), done.returncode
    return run


def test_a_mistake_is_killed_by_a_test_that_fails_and_by_one_that_does_not_end(toy):
    said, code = toy("== toy.py | test_toy.py double\nhalf\n- 2 * x\n+ x / 2\nforever\n- return 2 * x\n"
                     "+ while True:\n+         pass")
    assert code == 0 and said[-1].startswith("2/2 killed")
    assert sorted(line.split()[-1] for line in said[1:-1]) == ["[test_double]", "s]"]
    assert all(line.startswith("killed") for line in said[1:-1])


def test_a_mistake_survives_if_no_test_sees_it_and_is_broken_if_it_cannot_be_made_or_imported(toy):
    said, code = toy("== toy.py | test_toy.py double or triple\nfour\n- 3 * x\n+ 4 * x\nnowhere\n- 5 * x\n+\n"
                     "twice\n- x):\n+ y):\nhalf a line\n- 2 * x\n+ 2 *\nhalf\n- 2 * x\n+ x / 2")
    words = {line.split("toy.py: ")[1].split("  [")[0]: line.split()[0] for line in said[1:-1]}
    assert words == {"four": "SURVIVED", "nowhere": "BROKEN", "twice": "BROKEN", "half a line": "BROKEN",
                     "half": "killed"}
    assert code == 1 and said[-1].startswith("1/5 killed")


def test_tests_that_fail_or_are_not_there_without_a_mistake_tell_nothing(toy):
    said, code = toy("".join(f"== toy.py | {tests}\nhalf\n- 2 * x\n+ x / 2\n" for tests in (
        "test_toy.py anyway", "test_toy.py nothing_of_this_name", "test_no.py", "test_toy.py double")))
    words = {line.split("no mistake: ")[1].split("  ")[0]: line.split()[0] for line in said if "no m" in line}
    assert words == {"test_toy.py anyway": "failed", "test_toy.py nothing_of_this_name": "broken",
                     "test_no.py": "broken", "test_toy.py double": "passed"}
    assert code == 1 and said[-1].startswith("tests have to be there") and "killed" not in "".join(said)
