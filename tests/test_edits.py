"""Test the edits of texts: files of planted mistakes, patches, and texts that run as modules."""
import sys

import pytest

from vectors.edits import Edit, load, parse, patch, replace_once

pytestmark = pytest.mark.quick

FILE = """A comment.
== grpo.py | test_ppo.py test_dpo.py far or near
two places change, and one line goes
- a = 1
+ a = 2
@@
- b

- c
+ d

--robust has no effect
- x
+ y
  z
== ppo.py | 2
named in another file"""


def test_a_file_of_edits_is_read_with_all_hunks_and_an_edit_knows_its_tests():
    words = "test_ppo.py test_dpo.py far or near"
    edits = parse(FILE)
    assert edits == [
        Edit("grpo.py", "two places change, and one line goes",
             (("a = 1", "a = 2"), ("b\n\nc", "\nd")), words),
        Edit("grpo.py", "--robust has no effect", (("x\nz", "y\nz"),), words),
        Edit("ppo.py", "named in another file", (), "2")]
    assert edits[0].tests == (["tests/test_ppo.py", "tests/test_dpo.py"], "far or near")
    assert edits[0].apply("(a = 1)(b\n\nc)") == "(a = 2)(\nd)"
    with pytest.raises(ValueError, match="this occurs 0 times"):
        edits[0].apply("(a = 1)")                       # the second hunk does not fit


@pytest.mark.parametrize("text", ["", "a", "abab"])
def test_a_text_that_does_not_occur_exactly_once_is_not_replaced(text):
    assert replace_once("aba", "b", "") == "aa"
    with pytest.raises(ValueError, match=f"this occurs {text.count('b')} times, not once: b"):
        replace_once(text, "b", "c")


def test_a_patch_replaces_whole_lines_and_removes_them():
    text = "one\n  two\nthree\n"
    assert patch(text, "- one\n@@\n  three\n+ four") == "  two\nthree\nfour\n"
    assert patch(text, "") == text
    for piece in ("- two", "- on", "- tw"):
        with pytest.raises(ValueError, match="this occurs 0 times"):
            patch(text, piece)


def test_a_text_runs_as_a_module_with_its_name_and_its_file_in_errors(tmp_path):
    text = "import dataclasses\n\n\n@dataclasses.dataclass\nclass A:\n    x: 'int' = 1\n"
    module = load(text, "loaded", tmp_path / "a.py")
    assert sys.modules.pop("loaded") is module and module.A().x == 1
    assert module.A.__module__ == "loaded" and module.__file__ == str(tmp_path / "a.py")
    with pytest.raises(ZeroDivisionError) as error:
        load("1 / 0", "loaded")
    assert error.traceback[-1].frame.code.raw.co_filename == "loaded.py"
    del sys.modules["loaded"]
