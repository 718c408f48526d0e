"""The scripts are copies of each other but for their lessons; tools/sync.py finds and repairs drift."""
import difflib
import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tools import sync  # noqa: E402

SOURCES = {name: (ROOT / name).read_text() for name in sync.present()}
TEXTS = {name: sync.texts(source) for name, source in SOURCES.items()}
SHARED = {name: {piece: text for piece, text in texts.items() if piece not in sync.LESSONS and any(
    piece in TEXTS[other] for other in TEXTS if other != name)} for name, texts in TEXTS.items()}
BUDGETS = {("grpo", "gspo"): 40, ("reinforce", "grpo"): 120, ("ppo", "grpo"): 300}     # changed lines at most

# Two scripts in small, with every kind of piece and of what is none.
ONE = '''"""One."""
import math
import os

# A legend, which is free.

# ---- 1. a section -----

# about X
X = 1   # here
A, B = (1,
        2)
C: int = 3


@staticmethod
@property
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


if __name__ == "__main__":
    f(1)
'''
OTHER = '''"""Other."""
import sys

# Another legend.

def update():
    return "other"


# an outdated remark
# of two lines
class K:
    y = 3

# ---- 7. another section -----

C = 30
def f(x): return x
A, B = 1, 3
X = 10

def only_other():
    return 1
'''
SYNCED = '''"""Other."""
import sys

# Another legend.

def update():
    return "other"


class K(object):
    # not attached
    y = 2

# ---- 7. another section -----

C: int = 3
@staticmethod
@property
def f(x):
    """of f"""

    return x + 1
A, B = (1,
        2)
# about X
X = 1   # here

def only_other():
    return 1
'''


# ---- the scripts ------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def each_text_is_parsed_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sync, "pieces", functools.cache(sync.pieces))
        yield


def test_all_five_scripts_are_there():
    assert list(SOURCES)[:5] == ["reinforce.py", "ppo.py", "grpo.py", "gspo.py", "dpo.py"]


def test_every_shared_name_has_one_text_in_all_scripts():
    drifted = [f"{name} is not the same in {one} and {other}: make sync FROM={one}"
               for one in SOURCES for other in SOURCES if one < other
               for name in sync.drifted(SOURCES[one], SOURCES[other])]
    assert not drifted, "\n".join(drifted)


def test_there_is_much_to_share():
    for name, shared in SHARED.items():
        assert {"GPT", "rollout", "logprobs", "verify", "evaluate", "EOS", "VOCAB"} <= shared.keys(), name


def test_no_script_defines_a_name_twice():
    for name, source in SOURCES.items():
        defined = [name for node in sync.ast.parse(source).body for name in sync.names(node)]
        assert len(defined) == len(set(defined)), name


def test_a_lesson_differs_between_two_scripts_else_it_would_be_shared():
    for lesson in sync.LESSONS:
        versions = [texts[lesson] for texts in TEXTS.values() if lesson in texts]
        assert len(set(versions)) > 1, f"{lesson} is the same in all scripts: take it out of LESSONS"


@pytest.mark.parametrize("pair", BUDGETS, ids="/".join)
def test_the_lesson_between_two_scripts_is_short(pair):
    one, other = (SOURCES[f"{name}.py"] for name in pair)
    lines = sync.difference(one, other)
    assert len(lines) <= BUDGETS[pair], "make diff A={} B={}".format(*pair)


@pytest.mark.parametrize("pair", BUDGETS, ids="/".join)
def test_the_count_of_a_lesson_is_about_that_of_gnu_diff(pair, tmp_path):
    for name in pair:
        source = SOURCES[f"{name}.py"]
        end = sync.ast.parse(source).body[0].end_lineno
        lines = [line for line in source.split("\n")[end:] if line.strip()]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    found = subprocess.run(["diff", "--minimal", *pair], cwd=tmp_path, capture_output=True, text=True)
    changed = re.findall("^[<>]", found.stdout, re.M)
    counted = len(sync.difference(*(SOURCES[f"{name}.py"] for name in pair)))
    assert len(changed) <= counted <= 1.25 * len(changed) + 5       # diff finds the fewest, ndiff the likest


# ---- drift ------------------------------------------------------------------------------------------------


def drifts(text):
    """Ways in which a piece may drift: in its first line, in its last, and in its length."""
    first, *rest = text.split("\n")
    yield "\n".join([first + "  # drifted", *rest])
    yield text + " "
    yield "# a remark\n" + text


def replaced(source, name, text):
    lines, (first, end) = source.split("\n"), sync.pieces(source)[name]
    return "\n".join(lines[:first] + text.split("\n") + lines[end:])


@pytest.mark.parametrize("script", SOURCES)
def test_drift_of_any_shared_piece_of_any_script_is_named_and_repaired(script):
    """Another text of the piece is put in, found, and taken out again by a sync from a script that has it."""
    for name, text in SHARED[script].items():
        other = next(other for other in SHARED if other != script and name in SHARED[other])
        together = {piece for piece in SHARED[script] if SHARED[script][piece] == text}     # EOS, PAD, VOCAB
        for way, new in enumerate(drifts(text)):
            changed = replaced(SOURCES[script], name, new)
            assert set(sync.drifted(SOURCES[other], changed)) == together, (script, name, way)
            if way == 0:
                assert sync.sync(SOURCES[other], changed) == SOURCES[script], (script, name)


@pytest.mark.parametrize("script", SOURCES)
def test_drift_of_everything_at_once_is_repaired(script):
    changed = SOURCES[script]
    for name, text in SHARED[script].items():
        if next(piece for piece in SHARED[script] if SHARED[script][piece] == text) == name:
            changed = replaced(changed, name, [*drifts(text)][2])
    for other in SOURCES:
        if other != script:
            changed = sync.sync(SOURCES[other], changed)
    assert changed == SOURCES[script]


def test_scripts_in_step_are_left_as_they_are():
    for one in SOURCES:
        for other in SOURCES:
            assert sync.sync(SOURCES[one], SOURCES[other]) == SOURCES[other]


# ---- sync -------------------------------------------------------------------------------------------------


def test_sync_replaces_every_kind_of_piece_and_nothing_else():
    assert sync.drifted(ONE, OTHER) == ["A", "B", "C", "K", "X", "f"]
    assert sync.sync(ONE, OTHER) == SYNCED
    assert sync.drifted(ONE, SYNCED) == []


def test_sync_is_idempotent_and_goes_both_ways():
    assert sync.sync(ONE, SYNCED) == SYNCED
    assert sync.sync(SYNCED, ONE) == ONE
    assert sync.sync(sync.sync(OTHER, ONE), OTHER) == OTHER


def test_sync_changes_no_lesson_no_docstring_no_import_and_no_name_that_only_one_script_has():
    for one, other in ((ONE, OTHER), (OTHER, ONE)):
        before, after = sync.texts(other), sync.texts(sync.sync(one, other))
        assert list(before) == list(after)
        assert {name for name in before if before[name] != after[name]} == {"A", "B", "C", "K", "X", "f"}
        heads = [text[:text.index("legend")] for text in (other, sync.sync(one, other))]
        assert heads[0] == heads[1]


def test_names_that_one_script_defines_together_and_another_apart_are_refused():
    together, apart = '"""x"""\nA, B = 1, 2\n', '"""x"""\nA = 1\nB = 2\n'
    assert sync.drifted(together, apart) == ["A", "B"]
    for one, other in ((together, apart), (apart, together)):
        with pytest.raises(ValueError, match="by hand: A, B"):
            sync.sync(one, other)


def test_a_difference_is_what_is_removed_and_added_without_docstrings_and_empty_lines():
    one = '"""Old."""\nabove = 1\n\nthis = "long"\nbelow = 3\n'
    other = '"""New.\n\nLonger."""\n\n\nabove = 1\nthis = "longer"\nbelow = 3\nlast = 4\n'
    assert sync.difference(one, other) == ['- this = "long"', '+ this = "longer"', "+ last = 4"]
    assert sync.difference(one, one) == []
    lines = sync.difference(ONE, OTHER)
    assert {line[0] for line in lines} == {"+", "-"} and all(line[2:].strip() for line in lines)
    bodies = [text.split("\n")[1:] for text in (ONE, OTHER)]
    assert [*difflib.restore(difflib.ndiff(*bodies), 2)] == bodies[1]


# ---- the commands -----------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path):
    """A copy of what the commands need: the scripts, the tool, the Makefile."""
    (tmp_path / "tools").mkdir()
    for name in ("Makefile", "tools/sync.py", *SOURCES):
        shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


def make(tree, *words):
    return subprocess.run(["make", "--silent", "PYTHON=" + sys.executable, *words], cwd=tree, text=True,
                          capture_output=True)


def contents(tree):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_mode)
            for path in tree.rglob("*") if path.is_file()}


def test_make_sync_repairs_the_other_scripts_and_says_what_it_did(tree):
    path = tree / "gspo.py"
    path.chmod(0o755)
    before = contents(tree)
    for old, new in (("EOS, PAD, VOCAB = 264, 265, 320", "EOS, PAD, VOCAB = 264, 265, 384"),
                     ("once = text.count", "once = not text.count"), ("def update(", "def update(more, ")):
        assert path.read_text().count(old) == 1
        path.write_text(path.read_text().replace(old, new))
    done = make(tree, "sync", "FROM=grpo")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{name}: " + ("EOS, PAD, VOCAB, extract" if name == "gspo.py" else "in step") for name in SOURCES]
    after = contents(tree)
    expected = SOURCES["gspo.py"].replace("def update(", "def update(more, ")           # its own lesson stays
    assert after.pop("gspo.py")[::2] == (expected.encode(), before.pop("gspo.py")[2])
    assert after == before                                  # no other file was touched, none was left behind


def test_make_sync_of_scripts_in_step_writes_nothing(tree):
    before = contents(tree)
    for name in SOURCES:
        done = make(tree, "sync", f"FROM={name}")
        assert done.returncode == 0 and done.stdout == "".join(f"{other}: in step\n" for other in SOURCES)
    assert contents(tree) == before


def test_make_sync_passes_over_a_script_that_is_not_there(tree):
    (tree / "gspo.py").unlink()
    done = make(tree, "sync", "FROM=grpo.py")
    assert done.returncode == 0 and "gspo" not in done.stdout and not (tree / "gspo.py").exists()


def test_make_diff_prints_the_lesson_and_its_length(tree):
    lines = sync.difference(SOURCES["grpo.py"], SOURCES["gspo.py"])
    for words in (("A=grpo", "B=gspo"), ("A=grpo.py", "B=gspo.py")):
        done = make(tree, "diff", *words)
        assert done.returncode == 0 and done.stdout.splitlines() == [*lines, f"{len(lines)} lines"]
    assert make(tree, "diff", "A=grpo", "B=grpo").stdout == "0 lines\n"


@pytest.mark.parametrize("words, said", [
    (["sync"], "FROM=grpo.py"), (["sync", "FROM=chess"], "'chess' is none of the scripts"),
    (["sync", "FROM=common.py"], "'common.py' is none"), (["sync", "FROM=../grpo"], "'../grpo' is none"),
    (["sync", "FROM=grpo.py gspo.py"], "FROM=grpo.py"), (["diff"], "A=grpo.py B=gspo.py"),
    (["diff", "A=grpo"], "A=grpo.py B=gspo.py"), (["diff", "A=grpo", "B=chess"], "'chess' is none")])
def test_a_bad_name_is_one_line_and_nothing_is_written(tree, words, said):
    before = contents(tree)
    done = make(tree, *words)
    error, *rest = done.stderr.splitlines()
    assert done.returncode == 2 and done.stdout == "" and contents(tree) == before
    assert error.startswith("error: ") and said in error and all(line.startswith("make") for line in rest)


@pytest.mark.parametrize("broken, said", [
    ("def f(:\n", "gspo.py, line"), ("PAD = 0\nEOS, VOCAB = 1, 2\n", "by hand: EOS, PAD, VOCAB")])
def test_scripts_that_cannot_be_synced_are_one_line_and_nothing_is_written(tree, broken, said):
    line = next(line for line in SOURCES["gspo.py"].split("\n") if line.startswith("EOS, PAD, VOCAB"))
    (tree / "gspo.py").write_text(SOURCES["gspo.py"].replace(line, broken).replace("once = ", "once = not "))
    (tree / "reinforce.py").write_text(SOURCES["grpo.py"].replace("once = ", "once = not "))    # could be
    before = contents(tree)
    done = make(tree, "sync", "FROM=grpo.py")
    assert done.returncode == 2 and done.stdout == "" and contents(tree) == before
    assert done.stderr.startswith("error: ") and said in done.stderr.splitlines()[0]


@pytest.mark.parametrize("pair", BUDGETS, ids="/".join)
def test_the_readme_says_how_many_lines_a_lesson_has(pair):
    count = len(sync.difference(*(SOURCES[f"{name}.py"] for name in pair)))
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if f"| {count} lines (" in line]
    assert any(f"[{one}.py]" in row and f"({other})" in row
               for row in rows for one, other in (pair, pair[::-1]))
