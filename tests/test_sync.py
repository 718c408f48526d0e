"""The scripts share one machinery and some functions; tools/sync.py finds and repairs drift. What a
reader has to read stays within its budget."""
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tools import sync  # noqa: E402

pytestmark = pytest.mark.quick

SOURCES = {name: (ROOT / name).read_text() for name in sync.SCRIPTS}
MOST_LINES = {"common.py": 730, "machinery": 302, "reinforce.py": 276, "ppo.py": 360,
              "grpo.py": 272, "gspo.py": 267, "dpo.py": 266}      # of scripts, the lesson's

# Two scripts in small, with every kind of piece and of what is none.
MACHINERY = sync.MARKER + '''====

EOS = 264


def rollout():
    return EOS
'''
ONE = '''"""One."""
import math

# A legend, which is free.

# about X
X = 1   # here
A, B = (1,
        2)


@staticmethod
def f(x):
    """of f"""

    return x + 1


class K(object):
    # not attached
    y = 2


def update():
    return "one"


def only_one():
    A = 5
    return A


''' + MACHINERY
OTHER_LESSON = '''"""Other."""
import sys

# Another legend.

def update():
    return "other"


# an outdated remark
# of two lines
class K:
    y = 3

# ---- 7. another section -----

def f(x): return x
A, B = 1, 3
X = 10

def only_other():
    return 1


'''
OTHER = OTHER_LESSON + MACHINERY.replace("264", "265")
SYNCED = '''"""Other."""
import sys

# Another legend.

def update():
    return "other"


class K(object):
    # not attached
    y = 2

# ---- 7. another section -----

@staticmethod
def f(x):
    """of f"""

    return x + 1
A, B = (1,
        2)
# about X
X = 1   # here

def only_other():
    return 1


''' + MACHINERY


# ---- the scripts -----------------------------------------------------------------------------

@pytest.mark.parametrize("name", SOURCES)
def test_what_scripts_share_has_one_text(name):
    drifted = sync.drifted(SOURCES["grpo.py"], SOURCES[name])
    for other, source in SOURCES.items():
        drifted += [f"{piece} of {other}" for piece in sync.drifted(SOURCES[name], source)]
    assert not drifted, "make sync FROM=grpo.py, or from the one that is right"


def test_only_lessons_differ_and_each_does():
    pieces = [sync.pieces(sync.split(source)[0]) for source in SOURCES.values()]
    for lesson in sync.LESSONS:
        texts = {found[lesson].text for found in pieces if lesson in found}
        assert len(texts) > 1, f"{lesson} is the same in all scripts: take it out of LESSONS"


@pytest.mark.parametrize("name", SOURCES)
def test_a_lesson_and_the_machinery_are_short(name):
    lesson, machinery = sync.split(SOURCES[name])
    assert len(lesson.splitlines()) <= MOST_LINES[name]
    assert len(machinery.splitlines()) <= MOST_LINES["machinery"]


def test_common_py_is_short():
    assert len((ROOT / "common.py").read_text().splitlines()) <= MOST_LINES["common.py"]


def test_what_gspo_changes_is_short():
    assert 0 < len(sync.difference(SOURCES["grpo.py"], SOURCES["gspo.py"])) <= 45


# ---- drift -----------------------------------------------------------------------------------

def test_sync_replaces_the_machinery_and_every_kind_of_piece_and_nothing_else():
    names = ["(A, B)", "K", "X", "f", sync.MACHINERY]
    assert sync.drifted(ONE, OTHER) == names
    assert sync.sync(ONE, OTHER) == SYNCED
    assert sync.drifted(ONE, SYNCED) == []
    assert sync.sync(ONE, SYNCED) == SYNCED
    assert sync.sync(SYNCED, ONE) == ONE
    assert sync.sync(sync.sync(OTHER, ONE), OTHER) == OTHER


@pytest.mark.parametrize("old, new, name", [
    ("    A = rewards - means\n", "    A = rewards\n", ""),           # of a lesson
    ("return x.sum() / num_tokens\n", "return x.mean()\n", "aggregate"),
    ("VOCAB_SIZE = 320", "VOCAB_SIZE = 384", sync.MACHINERY),
    ("\ndef kl(", "\n@torch.no_grad()\ndef kl(", "kl"),
    ("ratio < 1 - ", "ratio < 1 + ", "is_clipped")])
def test_drift_of_a_script_is_named_and_repaired(old, new, name):
    changed = SOURCES["grpo.py"].replace(old, new)
    assert sync.drifted(SOURCES["ppo.py"], changed) == ([name] if name else [])
    if name:
        assert changed != SOURCES["grpo.py"] == sync.sync(SOURCES["ppo.py"], changed)


def test_a_difference_is_what_is_removed_and_added_without_docstrings_and_empty_lines():
    one = '"""Old."""\nabove = 1\n\nthis = "long"\nbelow = 3\n'
    other = '"""New.\n\nLonger."""\n\n\nabove = 1\nthis = "longer"\nbelow = 3\nlast = 4\n'
    assert sync.difference(one, other) == ['- this = "long"', '+ this = "longer"', "+ last = 4"]
    assert sync.difference(one, one) == []


# ---- the commands ----------------------------------------------------------------------------

@pytest.fixture
def tree(tmp_path):
    """What the commands need: the tool, the Makefile, five small scripts, one of which drifted."""
    (tmp_path / "tools").mkdir()
    for name in ("Makefile", "tools/sync.py"):
        shutil.copy2(ROOT / name, tmp_path / name)
    for name in sync.SCRIPTS:
        (tmp_path / name).write_text(OTHER if name == "gspo.py" else ONE)
    return tmp_path


def make(tree, *words):
    return subprocess.run(["make", "--silent", f"PYTHON={sys.executable}", *words], cwd=tree,
                          text=True, capture_output=True)


def contents(tree):
    return {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}


def test_make_sync_repairs_the_other_scripts_and_says_what_it_did(tree):
    before = contents(tree)
    done = make(tree, "sync", "FROM=grpo")
    assert done.returncode == 0, done.stderr
    assert "gspo.py: (A, B), K, X, f, the machinery" in done.stdout.splitlines()
    assert done.stdout.count("in step") == 4
    assert contents(tree) == before | {tree / "gspo.py": SYNCED.encode()}


def test_make_diff_prints_the_lesson_and_its_length(tree):
    lines = sync.difference(ONE, OTHER)
    done = make(tree, "diff", "A=grpo", "B=gspo.py")
    assert done.stdout.splitlines() == [*lines, f"{len(lines)} lines"]


@pytest.mark.parametrize("words, said", [
    (["sync"], "FROM=grpo.py"), (["sync", "FROM=chess"], "'chess' is none of the scripts"),
    (["sync", "FROM=../grpo"], "'../grpo' is none"), (["diff", "A=grpo"], "A=grpo.py B=gspo.py")])
def test_a_bad_name_is_one_line_and_nothing_is_written(tree, words, said):
    before = contents(tree)
    done = make(tree, *words)
    assert done.returncode == 2 and done.stdout == "" and contents(tree) == before
    assert done.stderr.startswith("error: ") and said in done.stderr.splitlines()[0]


@pytest.mark.parametrize("broken, said", [
    ('"""x"""\ndef f(:\n\n' + MACHINERY, "line 2"),
    ('"""x"""\nA = 1\n', "0 lines begin with '# ==== the machinery"),
    ('"""x"""\n' + MACHINERY * 2, "2 lines begin with")])
def test_scripts_that_cannot_be_synced_are_one_line_and_nothing_is_written(tree, broken, said):
    (tree / "gspo.py").write_text(broken)
    (tree / "reinforce.py").write_text(OTHER)                           # this one could be
    before = contents(tree)
    done = make(tree, "sync", "FROM=grpo.py")
    assert done.returncode == 2 and done.stdout == "" and contents(tree) == before
    assert done.stderr.startswith("error: gspo.py") and said in done.stderr.splitlines()[0]
