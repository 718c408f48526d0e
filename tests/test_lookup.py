"""Test the lookup task: the text that the environment inserts after a call, and the verifier."""
import pytest
from conftest import load_named

from common import Problem

TASK = load_named("lookup")
PEOPLE = ("ka", "mi", "to", "re", "su", "no")
TABLE = tuple(zip(PEOPLE, PEOPLE[1:] + PEOPLE[:1]))
PROBLEM = Problem("boss of boss of ka?", "to", "", 2, TABLE)
ASKED = "<search>ka</search><information>mi</information>"


# ---- the environment -------------------------------------------------------------------------

@pytest.mark.parametrize("words, texts", [
    ("mi", ["<search>ka</search>", "<search> ka </search>",
            "<information>zz</information><search>ka</search>"]),
    ("su", ["\x00\u0663<search>re</search>"]),
    ("to", [ASKED + "<search>mi</search>", 3 * ASKED + "<search>mi</search>",
            3 * "</search>" + "<search>mi</search>"]),
    ("re", ["<answer>xx</answer><search>to</search>",
            "<search></search><information>empty</information><search>to</search>",
            "<search>ka<search></search><information>nested</information><search>to</search>"]),
    # malformed calls count, too
    ("no more", [4 * ASKED + "<search>mi</search>", 50 * ASKED + "<search>mi</search>",
                 4 * "</search>" + "<search>mi</search>"]),
    ("unknown", ["<search>xx</search>", "<search>KA</search>", "<search>\u043aa</search>",
                 "<search>ka\x00</search>", "<search>" + "x" * 20 + "</search>"]),
    ("empty", ["<search></search>", "<search>  \n </search>"]),
    ("too long", ["<search>" + "x" * 21 + "</search>", "<search>" + "ka" * 50_000 + "</search>",
                  "<search>ka<information>mi</information></search>"]),
    ("unopened", ["</search>", "<Search>ka</search>", ASKED + "</search>"]),
    ("unclosed", ["<search>ka", "<think><search>ka</think>", "<search>" + "ka" * 50_000,
                  9 * ASKED + "<search>ka"]),
    ("nested", ["<search>ka<search>mi</search>", "<search>" * 5_000 + "ka</search>",
                "<search>ka<information>xx</information><search>ka</search>"]),
    (None, ["", "ka", "<think></think>", "<think>" + ASKED + "</think>", 9 * ASKED, "\x00",
            "<answer>to</answer>", "<information>", "</search>ka"])])
def test_a_call_is_answered_with_the_value_of_its_key_or_what_is_wrong_with_it(words, texts):
    for text in texts:
        expected = f"<information>{words}</information>" if words else ""
        assert TASK.respond(PROBLEM, text) == expected, ascii(text[:40])
