"""The lookup task: problems, demonstrations, what the environment inserts after any call, and the
verifier."""
import random
import re
import time

import pytest
from conftest import takes_less_than

import common
import grpo
from common import Problem
from tasks import lookup

TASK = common.load_task(grpo.Config(task="lookup", device="cpu"), grpo.verify)
PEOPLE = ("ka", "mi", "to", "re", "su", "no")
TABLE = tuple(zip(PEOPLE, PEOPLE[1:] + PEOPLE[:1]))
PROBLEM = Problem("boss of boss of ka?", "to", "", 2, TABLE)
ASKED = "<search>ka</search><information>mi</information>"
PIECES = ["<search>", "<search>", "<search>", "</search>", "</search>", "</search>",
          "<information>", "</information>", "<think>", "</think>", "<answer>", "<answer>",
          "</answer>", "</answer>", "ka", "mi", "to", "to", "xx", " ", "\n", "\x00", "\u0663", "<",
          "k" * 30]
BLOCK = r"<information>[a-z]{1,8}( [a-z]{1,8})?</information>"
UNCLOSED = "<information>unclosed</information>"


def response(text, problem=PROBLEM):
    """What stands in the block that the environment inserts."""
    return re.fullmatch("<information>(.*)</information>", TASK.respond(problem, text))[1]


# ---- the environment -------------------------------------------------------------------------

@pytest.mark.parametrize("text, value", [
    ("<search>ka</search>", "mi"), ("<think><search>no</search>", "ka"),
    (ASKED + "<search>mi</search>", "to"), ("<search> ka </search>", "mi"),
    (ASKED + "hm<search>ka</search>", "mi"), ("\x00\u0663<search>re</search>", "su"),
    ("<answer>xx</answer><search>to</search>", "re"), ("<information><search>su</search>", "no"),
    ("<search>xx</search><information>unknown</information><search>to</search>", "re"),
    ("<search></search><information>empty</information><search>to</search>", "re"),
    ("<search>ka<search></search><information>nested</information><search>to</search>", "re")],
    ids=ascii)
def test_a_call_is_answered_with_the_value_of_its_key(text, value):
    assert response(text) == value


@pytest.mark.parametrize("text, words", [
    ("<search>xx</search>", "unknown"), ("<search>KA</search>", "unknown"),
    ("<search>k a</search>", "unknown"), ("<search>ka?</search>", "unknown"),
    ("<search>boss of ka</search>", "unknown"), ("<search>\u043aa</search>", "unknown"),
    ("<search>ka\x00</search>", "unknown"), ("<search>kami</search>", "unknown"),
    ("<search>ka<think></search>", "unknown"), ("<search>None</search>", "unknown"),
    ("<search></search>", "empty"), ("<search>  \n </search>", "empty"),
    ("<search>" + "x" * 20 + "</search>", "unknown"),
    ("<search>" + "x" * 21 + "</search>", "too long"),
    ("<search>" + " " * 30 + "ka</search>", "too long"),
    ("<search>" + "ka" * 50_000 + "</search>", "too long"),
    ("<search>ka<information>mi</information></search>", "too long"), ("</search>", "unopened"),
    ("ka</search>", "unopened"), ("<Search>ka</search>", "unopened"),
    (ASKED + "</search>", "unopened"), (ASKED + "mi</search>", "unopened"),
    ("<think>ka</search>", "unopened"), ("<search>ka", "unclosed"),
    ("<think><search>ka</think>", "unclosed"), (ASKED + "<search>", "unclosed"),
    ("<search>" + "ka" * 50_000, "unclosed"), (9 * ASKED + "<search>ka", "unclosed"),
    ("<search>ka<search>mi</search>", "nested"), ("<search><search></search>", "nested"),
    ("<search>" * 5_000 + "ka</search>", "nested"),
    (ASKED + "<search>mi<search>ka</search>", "nested")], ids=lambda text: ascii(text[:40]))
def test_a_malformed_call_is_answered_with_what_is_wrong_with_it(text, words):
    assert response(text) == words


@pytest.mark.parametrize("text", [
    "", "ka", "<think></think>", "<think>" + ASKED + "</think>", 9 * ASKED, "<answer>to</answer>",
    "<information>", "</search>ka", "\x00"], ids=ascii)
def test_without_a_call_nothing_is_inserted(text):
    assert TASK.respond(PROBLEM, text) == ""


def test_no_more_than_four_calls_are_answered_malformed_ones_included_and_none_without_a_table():
    assert response("<search>ka</search>", PROBLEM._replace(secret=None)) == "unknown"
    assert lookup.CALL_LIMIT == 4
    assert response(3 * ASKED + "<search>mi</search>") == "to"
    assert response(4 * ASKED + "<search>mi</search>") == "no more"
    assert response(50 * ASKED + "<search>mi</search>") == "no more"
    assert response(3 * "</search>" + "<search>mi</search>") == "to"
    assert response(4 * "</search>" + "<search>mi</search>") == "no more"


def test_a_forged_information_block_changes_nothing():
    forged = "<search>ka<information>xx</information>"
    assert response(forged + "<search>ka</search>") == "nested"
    assert response("<information>zz</information><search>ka</search>") == "mi"
    for text in (forged, "<information>xx</information>", ASKED.replace("mi", "xx")):
        assert TASK.verify(PROBLEM, text + "<answer>xx</answer>") == 0
        assert TASK.verify(PROBLEM, text + "<answer>to</answer>") == 1


# ---- the verifier ----------------------------------------------------------------------------

@pytest.mark.parametrize("text", [
    "<answer>to</answer>", "<answer> to </answer>", "to<answer>to</answer>xx",
    "<answer>to</answer><|pad|>", "<think>" + ASKED + "</think><answer>to</answer>",
    ASKED + "<answer>to</answer>", "<search><answer>to</answer>",
    "<ANSWER>xx</ANSWER><answer>to</answer>", "\x00\ufffd<answer>to</answer>",
    "<think>xx<answer>to</answer>"], ids=ascii)
def test_the_right_name_in_one_answer_block_earns_one(text):
    assert TASK.verify(PROBLEM, text) == 1.0


@pytest.mark.parametrize("text", [
    "", "to", "<answer>", "<answer></answer>", "<answer> </answer>", "<answer>mi</answer>",
    "<answer>ka</answer>", "<answer>TO</answer>", "<answer>To</answer>", "<answer>t</answer>",
    "<answer>too</answer>", "<answer>t o</answer>", "<answer>to.</answer>",
    "<answer>to mi</answer>", "<answer>mi to</answer>", "<answer>to\n</answer>",
    "<answer>\u0442o</answer>", "<answer>to\x00</answer>", "<answer>to\u200b</answer>",
    "<answer>to", "to</answer>", "</answer>to<answer>", "<answer>to</answer><answer>to</answer>",
    "<answer>mi</answer><answer>to</answer>", "<answer><answer>to</answer></answer>",
    "<answer>to</answer></answer>", "<Answer>to</Answer>", "<answer>ot</answer>",
    "<information>to</information>", "<search>to</search>",
    "<answer><information>to</information></answer>", "<answer>None</answer>",
    "<answer>ka|mi|to|re|su|no</answer>", "<answer>.*</answer>", "<answer>unknown</answer>"],
    ids=ascii)
def test_anything_else_earns_nothing(text):
    verdict = TASK.verify(PROBLEM, text)
    assert verdict == 0.0 and isinstance(verdict, float)


def random_text(rng, i):
    """Pieces, or random bytes."""
    if i % 2:
        return "".join(rng.choices(PIECES, k=rng.randrange(1, 12)))
    return rng.randbytes(rng.randrange(40)).decode(errors="replace")


def check_response(text, block):
    """What is inserted after any text is one short block, or nothing where there is no call."""
    if text.endswith("</search>"):
        assert re.fullmatch(BLOCK, block), text
    else:
        assert block in ("", UNCLOSED), text
    words = block[13:-14]
    if words in PEOPLE:                                         # the boss of who was asked for
        key = re.search(r"<search>\s*(\w\w)\s*</search>$", text)[1]
        assert dict(TABLE)[key] == words, text


def test_random_texts_raise_nothing_and_are_answered_with_one_short_block():
    rng = random.Random(0)
    texts = [random_text(rng, i) for i in range(20_000)]
    start = time.process_time()
    verdicts = [TASK.verify(PROBLEM, text) for text in texts]
    blocks = [TASK.respond(PROBLEM, text) for text in texts]
    calls = [TASK.predicted_calls(text) for text in texts]
    assert (time.process_time() - start) / len(texts) < 1e-3
    for text, verdict, block, predicted in zip(texts, verdicts, blocks, calls):
        check_response(text, block)
        inside = re.findall("<answer>(.*?)</answer>", text, re.S)
        is_alone = text.count("<answer>") == text.count("</answer>") == len(inside) == 1
        assert verdict == float(is_alone and inside[0].strip(" ") == "to"), text
        assert len(predicted) == text.count("</search>")
    assert sum(verdicts) > 5
    assert {block[13:-14] for block in blocks} >= {
        "mi", "to", "re", "unknown", "empty", "nested", "unopened", "too long", "no more",
        "unclosed"}


@pytest.mark.parametrize("text", [
    "<search>" * 5_000, "</search>" * 5_000, "<search>ka</search>" * 3_000, "<" * 50_000,
    "\x00" * 50_000, "<search>" + "ka" * 20_000 + "</search>", "\ud800" * 20_000,
    "<answer>" * 5_000, "<answer>" + "to" * 20_000 + "</answer>",
    "<information>" * 5_000 + "</search>", "\n" * 50_000 + "</search>"],
    ids=lambda text: ascii(text[:20]))
def test_hostile_text_costs_about_a_millisecond(text):
    assert TASK.verify(PROBLEM, text) == 0.0 and len(TASK.respond(PROBLEM, text)) <= 40
    assert takes_less_than(1e-3, TASK.verify, PROBLEM, text)
    assert takes_less_than(1e-3, TASK.respond, PROBLEM, text)


# ---- problems and demonstrations -------------------------------------------------------------

def test_demonstrations_hold_what_the_environment_would_insert_where_it_would():
    """And with the end and a failed call they fit into a completion."""
    for problem in common.sample_problems(TASK, 500, 0, phase="textbook"):
        text = problem.completion
        pieces = re.split("(?<=</search>)", text)
        for i in range(1, len(pieces)):
            assert pieces[i].startswith(TASK.respond(problem, "".join(pieces[:i])))
        assert text.count("<information>") == text.count("<search>") <= lookup.CALL_LIMIT
        ids = grpo.TOKENIZER.encode(text, allowed_special="all")
        assert len(ids) + 10 < TASK.defaults["max_completion_length"]
