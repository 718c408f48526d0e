"""The scripts share one machinery and some functions; tools/sync.py finds and repairs drift."""
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

pytestmark = pytest.mark.quick

SOURCES = {name: (ROOT / name).read_text() for name in sync.present()}
PAIRS = [("grpo", "gspo"), ("reinforce", "grpo"), ("ppo", "grpo")]
MOST_LINES = 60                         # that gspo.py may remove from grpo.py and add to it

# Two scripts in small, with every kind of piece and of what is none.
MACHINERY = sync.MARKER + '''====

EOS = 264


def rollout():
    return EOS


if __name__ == "__main__":
    main()
'''
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

C = 30
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


''' + MACHINERY
SHARED_TOYS = ["A", "B", "C", "K", "X", "f"]


def lesson_of(name):
    return sync.split(SOURCES[name])[0]


def machinery_of(name):
    return sync.split(SOURCES[name])[1]


@functools.cache
def shared_pieces(script):
    """The pieces above the line that another script defines, too, and that are no lessons."""
    pieces = sync.pieces(lesson_of(script))
    others = set()
    for other in SOURCES:
        if other != script:
            others |= sync.pieces(lesson_of(other)).keys()
    return {name: pieces[name] for name in sync.shared_names(pieces, dict.fromkeys(others))}


# ---- the scripts -----------------------------------------------------------------------------

@pytest.fixture(autouse=True, scope="module")
def each_text_is_parsed_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sync, "pieces", functools.cache(sync.pieces))
        yield


def test_all_five_scripts_are_there():
    assert list(SOURCES)[:5] == ["reinforce.py", "ppo.py", "grpo.py", "gspo.py", "dpo.py"]


@pytest.mark.parametrize("name", SOURCES)
def test_the_marker_line_occurs_once(name):
    lines = [line for line in SOURCES[name].split("\n") if sync.MARKER in line]
    assert lines == [sync.MARKER.ljust(96, "=")]


@pytest.mark.parametrize("name", SOURCES)
def test_the_machinery_has_one_text(name):
    assert machinery_of(name) == machinery_of("grpo.py"), "make sync FROM=grpo.py, or the other"


def test_every_shared_name_above_the_line_has_one_text():
    drifted = []
    for one in SOURCES:
        for other in SOURCES:
            if one < other:
                for name in sync.drifted(SOURCES[one], SOURCES[other]):
                    drifted.append(f"{name} is not the same in {one} and {other}: "
                                   f"make sync FROM={one}")
    assert not drifted, "\n".join(drifted)


def test_the_machinery_is_all_that_no_paper_is_about():
    names = sync.pieces(machinery_of("grpo.py")).keys()
    assert {"EOS", "PAD", "VOCAB_SIZE", "verify", "GPT", "Cache", "logprobs", "score", "rollout",
            "warm_start", "evaluate"} <= names
    assert not names & sync.LESSONS
    assert machinery_of("grpo.py").endswith(
        '\n\n\nif __name__ == "__main__":\n    common.start(main)\n')


def test_the_base_that_scripts_share_is_keyed_by_the_text_below_the_line():
    import common
    assert f"\n{sync.MARKER}".startswith(common.MACHINERY)
    for source in SOURCES.values():
        assert source.count(common.MACHINERY) == 1


def test_no_script_defines_a_name_twice():
    for name, source in SOURCES.items():
        defined = []
        for node in sync.ast.parse(source).body:
            defined += sync.names(node)
        assert len(defined) == len(set(defined)), name


def test_a_lesson_differs_between_two_scripts_else_it_would_be_shared():
    pieces = {name: sync.pieces(lesson_of(name)) for name in SOURCES}
    for lesson in sync.LESSONS:
        texts = {found[lesson].text for found in pieces.values() if lesson in found}
        assert len(texts) > 1, f"{lesson} is the same in all scripts: take it out of LESSONS"


def test_what_gspo_changes_is_short_and_all_of_it_above_the_line():
    lines = sync.difference(SOURCES["grpo.py"], SOURCES["gspo.py"])
    assert 0 < len(lines) <= MOST_LINES, "make diff A=grpo B=gspo"
    assert machinery_of("grpo.py") == machinery_of("gspo.py")


@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
def test_the_count_of_a_lesson_is_about_that_of_gnu_diff(pair, tmp_path):
    for name in pair:
        (tmp_path / name).write_text("\n".join(sync.body(SOURCES[f"{name}.py"])) + "\n")
    found = subprocess.run(["diff", "--minimal", *pair], cwd=tmp_path, capture_output=True,
                           text=True)
    fewest = len(re.findall("^[<>]", found.stdout, re.M))
    counted = len(sync.difference(*(SOURCES[f"{name}.py"] for name in pair)))
    assert fewest <= counted <= 1.25 * fewest + 5       # ndiff finds the likest lines instead


@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
def test_the_readme_says_how_many_lines_a_lesson_has(pair):
    count = len(sync.difference(*(SOURCES[f"{name}.py"] for name in pair)))
    readme = (ROOT / "README.md").read_text()
    rows = [line for line in readme.splitlines() if f"| {count} lines (" in line]
    assert any(f"[{one}.py]" in row and f"({other})" in row
               for row in rows for one, other in (pair, pair[::-1]))


# ---- drift -----------------------------------------------------------------------------------

def drifts(text):
    """Ways in which a piece may drift: in its first line, in its last, and in its length."""
    first, *rest = text.split("\n")
    yield "\n".join([first + "  # drifted", *rest])
    yield text + " "
    yield "# a remark\n" + text


def replaced(source, piece, text):
    """The source with another text in place of a piece."""
    lines = source.split("\n")
    return "\n".join(lines[:piece.first] + text.split("\n") + lines[piece.end:])


@pytest.mark.parametrize("script", SOURCES)
def test_drift_of_any_shared_piece_is_named_and_repaired(script):
    """Another text of it is put in, and taken out again by a sync from a script that has it."""
    pieces = shared_pieces(script)
    assert pieces.keys() or script == "dpo.py"
    for name, piece in pieces.items():
        other = next(other for other in SOURCES
                     if other != script and name in shared_pieces(other))
        together = [name for name in pieces if pieces[name] == piece]       # of one statement
        for number, text in enumerate(drifts(piece.text)):
            changed = replaced(SOURCES[script], piece, text)
            assert sync.drifted(SOURCES[other], changed) == together, (script, name, number)
            if number == 0:
                assert sync.sync(SOURCES[other], changed) == SOURCES[script], (script, name)


@pytest.mark.parametrize("script", SOURCES)
@pytest.mark.parametrize("old, new", [
    ("====\n", "=====\n"), ("def rollout(", "def roll_out("), ("return", "yield"),
    ("\n    common.start(main)\n", "\n    common.start(main)\n\n")])
def test_drift_of_the_machinery_is_named_and_repaired(script, old, new):
    before, _, after = machinery_of(script).rpartition(old)
    changed = lesson_of(script) + before + new + after
    other = next(other for other in SOURCES if other != script)
    assert sync.drifted(SOURCES[other], changed) == [sync.MACHINERY]
    assert sync.sync(SOURCES[other], changed) == SOURCES[script]


def test_scripts_in_step_are_left_as_they_are():
    for one in SOURCES:
        for other in SOURCES:
            assert sync.sync(SOURCES[one], SOURCES[other]) == SOURCES[other]


# ---- sync ------------------------------------------------------------------------------------

def test_sync_replaces_the_machinery_and_every_kind_of_piece_and_nothing_else():
    assert sync.drifted(ONE, OTHER) == [*SHARED_TOYS, sync.MACHINERY]
    assert sync.sync(ONE, OTHER) == SYNCED
    assert sync.drifted(ONE, SYNCED) == []


def test_sync_is_idempotent_and_goes_both_ways():
    assert sync.sync(ONE, SYNCED) == SYNCED
    assert sync.sync(SYNCED, ONE) == ONE
    assert sync.sync(sync.sync(OTHER, ONE), OTHER) == OTHER


def test_sync_changes_no_lesson_no_docstring_no_import_and_no_name_that_only_one_script_has():
    for one, other in ((ONE, OTHER), (OTHER, ONE)):
        old, _ = sync.split(other)
        new, machinery = sync.split(sync.sync(one, other))
        before = sync.pieces(old)
        after = sync.pieces(new)
        assert machinery == sync.split(one)[1]
        assert list(before) == list(after)
        changed = [name for name in sorted(before) if before[name].text != after[name].text]
        assert changed == SHARED_TOYS
        assert old[:old.index("legend")] == new[:new.index("legend")]


def test_a_name_below_the_line_is_no_piece_above_it():
    lesson = '"""x"""\nEOS = 1\n\n\ndef rollout():\n    return 2\n\n\n'
    assert sync.sync(ONE, lesson + MACHINERY) == lesson + MACHINERY
    assert sync.sync(lesson + MACHINERY, ONE) == ONE


def test_names_that_one_script_defines_together_and_another_apart_are_refused():
    together = '"""x"""\nA, B = 1, 2\n' + MACHINERY
    apart = '"""x"""\nA = 1\nB = 2\n' + MACHINERY
    assert sync.drifted(together, apart) == ["A", "B"]
    for one, other in ((together, apart), (apart, together)):
        with pytest.raises(ValueError, match="by hand: A, B"):
            sync.sync(one, other)


@pytest.mark.parametrize("source, count", [
    ('"""x"""\nA = 1\n', 0),
    ("# " + sync.MARKER + "\n", 0),
    ('"""x"""\n' + MACHINERY * 2, 2)])
def test_a_script_without_one_marker_line_is_refused(source, count):
    with pytest.raises(ValueError, match=f"^{count} lines begin with '# ==== the machinery"):
        sync.split(source)


def test_a_script_is_its_lesson_and_its_machinery():
    lesson, machinery = sync.split(OTHER)
    assert lesson == OTHER_LESSON
    assert machinery == MACHINERY.replace("264", "265")


def test_a_difference_is_what_is_removed_and_added_without_docstrings_and_empty_lines():
    one = '"""Old."""\nabove = 1\n\nthis = "long"\nbelow = 3\n'
    other = '"""New.\n\nLonger."""\n\n\nabove = 1\nthis = "longer"\nbelow = 3\nlast = 4\n'
    assert sync.difference(one, other) == ['- this = "long"', '+ this = "longer"', "+ last = 4"]
    assert sync.difference(one, one) == []
    lines = sync.difference(ONE, OTHER)
    assert {line[0] for line in lines} == {"+", "-"}
    assert all(line[2:].strip() for line in lines)
    bodies = [text.split("\n")[1:] for text in (ONE, OTHER)]
    assert [*difflib.restore(difflib.ndiff(*bodies), 2)] == bodies[1]


# ---- the commands ----------------------------------------------------------------------------

TOYS = {"reinforce.py": ONE.replace("One.", "Reinforce."), "ppo.py": ONE.replace("K", "L"),
        "grpo.py": ONE, "gspo.py": OTHER, "dpo.py": '"""Dpo."""\nBETA = 1\n\n\n' + MACHINERY}


@pytest.fixture
def tree(tmp_path):
    """What the commands need: the tool, the Makefile, five small scripts, one of which drifted."""
    (tmp_path / "tools").mkdir()
    for name in ("Makefile", "tools/sync.py"):
        shutil.copy2(ROOT / name, tmp_path / name)
    for name, source in TOYS.items():
        (tmp_path / name).write_text(source)
    return tmp_path


def make(tree, *words):
    return subprocess.run(["make", "--silent", f"PYTHON={sys.executable}", *words], cwd=tree,
                          text=True, capture_output=True)


def contents(tree):
    """Path -> text, time of the last change, permissions, for every file."""
    found = {}
    for path in tree.rglob("*"):
        if path.is_file():
            status = path.stat()
            name = path.relative_to(tree).as_posix()
            found[name] = (path.read_text(), status.st_mtime_ns, status.st_mode)
    return found


def test_make_sync_repairs_the_other_scripts_and_says_what_it_did(tree):
    (tree / "gspo.py").chmod(0o755)
    before = contents(tree)
    done = make(tree, "sync", "FROM=grpo")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "reinforce.py: in step", "ppo.py: in step", "grpo.py: in step",
        "gspo.py: A, B, C, K, X, f, the machinery", "dpo.py: in step"]
    after = contents(tree)
    text, _, mode = after.pop("gspo.py")
    assert text == SYNCED
    assert mode == before.pop("gspo.py")[2]
    assert after == before                          # no other file was touched, none left behind


def test_make_sync_of_scripts_in_step_writes_nothing(tree):
    for name, source in SOURCES.items():
        (tree / name).write_text(source)
    before = contents(tree)
    for name in SOURCES:
        done = make(tree, "sync", f"FROM={name}")
        assert done.returncode == 0
        assert done.stdout == "".join(f"{other}: in step\n" for other in SOURCES)
    assert contents(tree) == before


def test_make_sync_passes_over_a_script_that_is_not_there(tree):
    (tree / "gspo.py").unlink()
    done = make(tree, "sync", "FROM=grpo.py")
    assert done.returncode == 0 and "gspo" not in done.stdout
    assert not (tree / "gspo.py").exists()


def test_make_diff_prints_the_lesson_and_its_length(tree):
    lines = sync.difference(ONE, OTHER)
    for words in (("A=grpo", "B=gspo"), ("A=grpo.py", "B=gspo.py")):
        done = make(tree, "diff", *words)
        assert done.returncode == 0
        assert done.stdout.splitlines() == [*lines, f"{len(lines)} lines"]
    assert make(tree, "diff", "A=grpo", "B=grpo").stdout == "0 lines\n"


@pytest.mark.parametrize("words, said", [
    (["sync"], "FROM=grpo.py"),
    (["sync", "FROM=chess"], "'chess' is none of the scripts"),
    (["sync", "FROM=common.py"], "'common.py' is none"),
    (["sync", "FROM=../grpo"], "'../grpo' is none"),
    (["sync", "FROM=--diff"], "FROM=grpo.py"),
    (["sync", "FROM=grpo.py gspo.py"], "FROM=grpo.py"),
    (["diff"], "A=grpo.py B=gspo.py"),
    (["diff", "A=grpo"], "A=grpo.py B=gspo.py"),
    (["diff", "A=grpo", "B=chess"], "'chess' is none")])
def test_a_bad_name_is_one_line_and_nothing_is_written(tree, words, said):
    before = contents(tree)
    done = make(tree, *words)
    error, *rest = done.stderr.splitlines()
    assert done.returncode == 2 and done.stdout == "" and contents(tree) == before
    assert error.startswith("error: ") and said in error
    assert all(line.startswith("make") for line in rest)


@pytest.mark.parametrize("broken, said", [
    ('"""x"""\ndef f(:\n\n' + MACHINERY, "gspo.py, line 2"),
    ('"""x"""\nB = 0\nA = 1\n\n' + MACHINERY, "by hand: A, B"),
    ('"""x"""\nA = 1\n', "gspo.py: 0 lines begin with '# ==== the machinery"),
    ('"""x"""\n' + MACHINERY * 2, "gspo.py: 2 lines begin with")])
def test_scripts_that_cannot_be_synced_are_one_line_and_nothing_is_written(tree, broken, said):
    (tree / "gspo.py").write_text(broken)
    (tree / "reinforce.py").write_text(OTHER)                           # this one could be
    before = contents(tree)
    done = make(tree, "sync", "FROM=grpo.py")
    assert done.returncode == 2 and done.stdout == "" and contents(tree) == before
    assert done.stderr.startswith("error: ") and said in done.stderr.splitlines()[0]
