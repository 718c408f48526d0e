"""make mutants: every mistake can be planted, and the report names those that the tests catch."""
import subprocess
import sys
from collections import Counter

import mutants
import pytest
from conftest import ROOT

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


@pytest.mark.parametrize("mistakes", [MISTAKES, MISTAKES.replace("double", "anyway")],
                         ids=["tests pass", "tests fail"])
def test_what_tests_see_is_killed_and_all_else_is_said(mistakes, tmp_path):
    """If a test fails without a mistake, nothing is said about the mistakes."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "tests/test_toy.py").write_text(TESTS)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = "."\n')
    (tmp_path / "mistakes.txt").write_text(mistakes)
    code = (f"import mutants; mutants.ROOT = mutants.Path({str(tmp_path)!r}); "
            "mutants.MISTAKES = mutants.ROOT / 'mistakes.txt'; mutants.SECONDS = 4; "
            "mutants.PRELOAD = (); raise SystemExit(mutants.main([]))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tests", text=True,
                          capture_output=True)
    *printed, last = done.stdout.splitlines()
    found = {line.split("toy.py: ")[1].split("  [")[0]: line.split()[0] for line in printed}
    assert done.returncode == 1 and not done.stderr
    assert found == SEEN if mistakes == MISTAKES else last.startswith("without a mistake: ")
    assert (tmp_path / "toy.py").read_text() == TOY
