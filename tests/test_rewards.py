"""How an answer is read, ToolRL's measure of tool calls, and the table of rewards, row by row."""
import random
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from conftest import ROOT

import grpo
import tasks
from common import Problem
from tasks import REWARDS, extract, tool_reward

WORK = "<search>ka</search><information>mi</information><search>mi</search><information>to</information>"
TWO_HOPS = Problem("lookup", "boss of boss of ka?", "to", WORK, 2, (("ka", "mi"), ("mi", "to"), ("to", "ka")))
SEVEN = Problem("arithmetic", "(3+4)=", "7", "3+4=7")
PIECES = ["<answer>", "<answer>", "</answer>", "</answer>", "<think>", "</think>", "<search>", "</search>",
          "<information>", "</information>", "7", "7", "ka", " ", "\n", "\x00", "\u0667", "<", ">", "/"]


def reward(name, text, problem=SEVEN, verdict=0.0, progress=0.0):
    return REWARDS[name](problem, text, verdict, progress)


def random_text(rng):
    if rng.random() < 0.5:
        return rng.randbytes(rng.randrange(40)).decode(errors="replace")
    return "".join(rng.choices(PIECES, k=rng.randrange(1, 12)))


def test_rewards_need_no_torch():
    code = "import sys, tasks; sys.exit('torch' in sys.modules or 'common' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# ---- how an answer is read ------------------------------------------------------------------------------


@pytest.mark.parametrize("text, answer", [
    ("<answer>7</answer>", "7"), ("<think>x</think><answer> mi \t</answer>", None), ("", None), ("7", None),
    ("<answer> mi </answer>", "mi"), ("<answer> </answer>", ""), ("<answer></answer>", None),
    ("</answer>7<answer>", None), ("<answer>7</answer></answer>", None), ("<answer>7\n</answer>", None),
    ("<answer>\u0667</answer>", None), ("<answer>" + "7" * 201 + "</answer>", None),
    ("<answer>" + "7" * 200 + "</answer>", "7" * 200), ("<answer><b>7</b></answer>", "<b>7</b>"),
    ("<answer>7</answer><answer>7</answer>", None), ("<ANSWER>8</ANSWER><answer>7</answer>", "7")], ids=ascii)
def test_an_answer_is_what_the_one_answer_block_holds(text, answer):
    assert extract(text) == answer == grpo.extract(text)


def test_tasks_read_an_answer_as_the_scripts_do():
    rng, found = random.Random(0), 0
    for _ in range(20_000):
        text = random_text(rng)
        assert extract(text) == grpo.extract(text), text
        found += extract(text) is not None
    assert found > 100


# ---- ToolRL ---------------------------------------------------------------------------------------------


def call(name, **parameters):
    return name, parameters


def search(key):
    return "search", {"key": key}


@pytest.mark.parametrize("true, predicted, expected", [
    ([call("get", a=1, b=2)], [call("get", a=1, c=3)], (1 + 1 / 3 + 1) / 4),            # golden numbers
    ([call("search", q="x")], [call("search", q="y")], 2 / 3),
    ([call("get", a=1, b=2)], [call("get", a=1, b=2)], 1),
    ([call("get", a=1, b=2)], [call("get", b=1, a=2)], (1 + 1 + 0) / 4),                # values swapped
    ([call("get", a=1, b=2)], [call("get")], (1 + 0 + 0) / 4),
    ([call("get", a=1, b=2)], [call("set", a=1, b=2)], 0),                              # another tool
    ([call("get", a=1, b=2)], [], 0),
    ([search("x"), search("y")], [search("y"), search("x")], 1),                        # order does not count
    ([search("x"), search("y")], [search("x")], (1 / 2 + 2) / 5),
    ([search("x"), search("x")], [search("x")], (1 / 2 + 2) / 5),                       # matched only once
    ([search("x")], [search("x"), search("x")], (1 / 2 + 2) / 3),
    ([search("x")], [search("z"), search("x")], (1 / 2 + 2) / 3),                       # the best is taken
    ([search("x")], [search("x"), call("get")], (1 / 2 + 2) / 3),
    ([call("now")], [call("now")], 1), ([call("now")], [call("now", tz=1)], (1 + 0 + 0) / 2),
    ([], [], 1), ([], [search("x")], 0)])
def test_tool_reward_is_the_sum_over_names_parameters_and_values(true, predicted, expected):
    assert tool_reward(true, predicted) == pytest.approx(expected, abs=1e-12)


def test_in_the_units_of_the_paper_the_golden_calls_earn_a_half_and_one():
    half = tool_reward([call("get", a=1, b=2)], [call("get", a=1, c=3)])
    one = tool_reward([call("search", q="x")], [call("search", q="y")])
    assert (6 * half - 3, 6 * one - 3) == pytest.approx((0.5, 1.0))


def test_tool_reward_is_one_for_the_same_calls_in_any_order_and_for_nothing_else():
    rng = random.Random(0)
    for _ in range(3000):
        true, other = ([(rng.choice("fg"), {key: rng.randrange(2) for key in "ab"[:rng.randrange(3)]})
                        for _ in range(rng.randrange(4))] for _ in range(2))
        same = sorted(map(repr, true)) == sorted(map(repr, other))
        assert (tool_reward(true, other) == 1.0) == same
        assert 0 <= tool_reward(true, other) <= 1
        assert tool_reward(true, rng.sample(true, len(true))) == 1.0


# ---- the table ------------------------------------------------------------------------------------------


def test_accuracy_is_the_verdict_or_the_sum_of_a_list():
    assert reward("accuracy", "", verdict=1.0) == 1 and reward("accuracy", "", verdict=0.0) == 0
    assert reward("accuracy", "", verdict=[-1.0, -1.0, 5.0]) == 3 and reward("accuracy", "", verdict=[]) == 0


@pytest.mark.parametrize("text", [
    "<think>3+4=7</think><answer>7</answer>", "<think></think><answer>8</answer>",
    "<think>\n</think><answer></answer>", "<think>" + WORK + "</think><answer>to</answer>",
    "<think>None</think><answer>None</answer>", "<think>\u0667 <b></think><answer>\x00</answer>"], ids=ascii)
def test_format_is_one_think_block_then_one_answer_block(text):
    assert reward("format", text) == 1.0


@pytest.mark.parametrize("text", [
    "", "7", "<answer>7</answer>", "<think>7</think>", "<answer>7</answer><think>3+4=7</think>",
    "<think>3+4=7</think> <answer>7</answer>", " <think>3+4=7</think><answer>7</answer>",
    "<think>3+4=7</think><answer>7</answer>\n", "<think>3+4=7</think><answer>7</answer><answer>7</answer>",
    "<think>3</think><think>4</think><answer>7</answer>", "<think><think>3</think><answer>7</answer>",
    "<think>3<answer>7</answer></think>", "<think>3<answer>7</think></answer>",
    "3</think><answer>7</answer>", "<think>3</think><answer>7", "<think>3</think>4<answer>7</answer>",
    "<think>3<answer>7</answer>", "<Think>3</Think><answer>7</answer>",
    "</think>3<think><answer>7</answer>", "<think>None</think><answer><think></answer>",
    "<think></answer></think><answer>None</answer>"], ids=ascii)
def test_anything_else_is_not_the_format(text):
    assert reward("format", text) == 0.0


@pytest.mark.parametrize("text, fixed, at_start, halfway", [
    ("<answer>7</answer>", 0, 0, 0), ("<think></think>", 0, 0, 0), ("<think>0123456789", 0, 0, 0),
    ("<think>0123456789</think>", 0.025, 0.05, 0.1 / 3),
    ("<think>" + 20 * "x" + "</think>", 0.05, 0.1, 0.2 / 3),
    ("<think>" + 30 * "x" + "</think><answer>7</answer>", 0.075, 0.1, 0.1),
    ("<think>" + 40 * "x" + "</think>", 0.1, 0.1, 0.1),
    ("<think>" + 10_000 * "x" + "</think>", 0.1, 0.1, 0.1),
    ("<think>xxxx</think><think>yyyy</think>", 0, 0, 0), ("</think>xxxxxxxx<think>", 0, 0, 0),
    ("thi<think>nk>456789</think>", 0.0225, 0.045, 0.03),
    ("<think><information>" + 99 * "x" + "</information>0123</think>", 0.01, 0.02, 0.04 / 3),
    ("<answer>" + 99 * "7" + "</answer><think>0123</think>", 0.01, 0.02, 0.04 / 3)], ids=ascii)
def test_the_length_bonus_grows_with_the_policys_own_thought_up_to_a_cap(text, fixed, at_start, halfway):
    for progress in (0.0, 0.5, 1.0):
        assert reward("length", text, progress=progress) == pytest.approx(fixed)
    assert reward("growing_length", text, progress=0.0) == pytest.approx(at_start)
    assert reward("growing_length", text, progress=0.5) == pytest.approx(halfway)
    assert reward("growing_length", text, progress=1.0) == pytest.approx(fixed)


@pytest.mark.parametrize("text, fine, coarse", [
    ("<think>" + WORK + "</think><answer>to</answer>", 2, 1),
    ("<think>" + WORK + "</think><answer>xx</answer>", 2, 1),           # rates no answer
    (WORK, 1, 1), ("<answer>to</answer>", 0, 0), ("", 0, 0), ("<think></think><answer>to</answer>", 1, 0),
    ("<search>mi</search><search> ka </search>", 1, 1),
    ("<search>ka</search>", 0.5, 0), ("<search>zz</search>", (1 / 2 + 1) / 5, 0),
    ("<search>ka</search><search>zz</search>", (1 + 2 + 1) / 5, 0),
    (WORK + "<search>to</search>", (2 / 3 + 4) / 5, 0), (WORK + "</search>", (2 / 3 + 4) / 5, 0),
    (WORK + "<search>", 1, 1), ("<search>ka<search>mi</search>", (1 / 2 + 1) / 5, 0),
    ("<search></search><search></search>", (1 + 2) / 5, 0), ("</search></search>", 0, 0)], ids=ascii)
def test_fine_rates_each_part_of_a_call_and_coarse_only_all_of_them(text, fine, coarse):
    assert reward("fine", text, TWO_HOPS) == pytest.approx(fine, abs=1e-12)
    assert reward("coarse", text, TWO_HOPS) == coarse


def test_rows_are_summed_by_name():
    module = SimpleNamespace(predicted=None)
    assert tasks.rows("accuracy", {"arithmetic": SimpleNamespace()}) == [REWARDS["accuracy"]]
    text = "<think>3+4=7</think><answer>7</answer>"
    rows = tasks.rows("accuracy+format+length", {"arithmetic": SimpleNamespace()})
    assert sum(row(SEVEN, text, 1.0, 0.0) for row in rows) == pytest.approx(2.0125)
    assert tasks.rows("fine+coarse", {"lookup": module}) == [REWARDS["fine"], REWARDS["coarse"]]


@pytest.mark.parametrize("names", [
    "", "acuracy", "accuracy+", "+accuracy", "accuracy,format", "Accuracy", "accuracy + format", "__doc__"])
def test_an_unknown_reward_is_named_with_those_that_there_are(names):
    with pytest.raises(ValueError, match="growing_length") as error:
        tasks.rows(names, {})
    assert f"--reward {names}: " in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["fine", "coarse"])
def test_a_reward_of_tool_calls_is_refused_for_a_task_without_them(name):
    with pytest.raises(ValueError, match=f"{name}.*arithmetic"):
        tasks.rows("accuracy+" + name,
                   {"lookup": SimpleNamespace(predicted=None), "arithmetic": SimpleNamespace()})


def test_a_hundred_thousand_random_texts_are_rated_within_bounds():
    rng, seen, start = random.Random(0), {name: set() for name in REWARDS}, time.perf_counter()
    highest = {"accuracy": 1, "format": 1, "length": 0.1, "growing_length": 0.1, "fine": 2, "coarse": 1}
    for _ in range(100_000):
        text, progress = random_text(rng), rng.random()
        for name, row in REWARDS.items():
            value = row(TWO_HOPS, text, 0.0, progress)
            assert isinstance(value, float) and 0 <= value <= highest[name], (name, text)
            seen[name].add(round(value, 2))
    assert time.perf_counter() - start < 100                            # 1 ms each
    assert len(seen["format"]) == 2 and len(seen["length"]) > 3 and len(seen["fine"]) > 4


@pytest.mark.parametrize("text", [
    "<think>" + "<information>" * 20_000 + "</think>", "<search>" * 20_000, "<" * 200_000,
    "</search>" * 2_000, "<search>ka</search>" * 2_000, "<think>" * 20_000,
    "<think>" + "<information></information>" * 10_000 + "</think>"], ids=lambda text: text[:30])
def test_huge_texts_are_rated_in_a_moment(text):
    for name in REWARDS:
        start = time.perf_counter()
        reward(name, text, TWO_HOPS)
        assert time.perf_counter() - start < 0.2
