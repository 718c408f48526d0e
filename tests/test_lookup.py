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


def test_no_key_is_known_without_a_table():
    problem = PROBLEM._replace(secret=None)
    assert TASK.respond(problem, "<search>ka</search>") == "<information>unknown</information>"


# ---- the verifier ----------------------------------------------------------------------------

@pytest.mark.parametrize("verdict, texts", [
    (1.0, ["<answer>to</answer>", "<answer> to </answer>", "<answer>to</answer><|pad|>",
           "<think>" + ASKED + "</think><answer>to</answer>", "<search><answer>to</answer>"]),
    (0.0, ["", "to", "<answer></answer>", "<answer>mi</answer>", "<answer>To</answer>",
           "<answer>too</answer>", "<answer>to\n</answer>", "<answer>\u0442o</answer>",
           "<answer>to\x00</answer>", "<answer>to", "</answer>to<answer>",
           "<answer>to</answer>\n<answer>to</answer>", "<answer><answer>to</answer></answer>",
           "<information>to</information>", "<search>to</search>", "<answer>.*</answer>",
           "<information>xx</information><answer>xx</answer>"])])
def test_the_right_name_in_one_answer_block_earns_one_and_anything_else_nothing(verdict, texts):
    for text in texts:
        found = TASK.verify(PROBLEM, text)
        assert found == verdict and isinstance(found, float), ascii(text)
