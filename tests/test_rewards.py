"""How an answer is read, ToolRL's measure of tool calls, and the rows of --reward, one by one."""
import random
import re
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import takes_less_than

import common
import grpo
import ppo
from common import Problem
from tasks import block, extract
from tasks.gridworld import Gridworld
from tasks.mix import Curriculum
from tasks.rewards import REWARDS, Rewards, tool_reward

WORK = ("<search>ka</search><information>mi</information>"
        "<search>mi</search><information>to</information>")
TABLE = (("ka", "mi"), ("mi", "to"), ("to", "ka"))
TWO_HOPS = Problem("boss of boss of ka?", "to", WORK, 2, TABLE, "lookup")
SEVEN = Problem("(3+4)=", "7", "3+4=7", task="arithmetic")
PIECES = ["<answer>", "<answer>", "</answer>", "</answer>", "<think>", "</think>", "<search>",
          "</search>", "<information>", "</information>", "7", "7", "ka", " ", "\n", "\x00",
          "\u0667", "<", ">", "/"]


def load(name, **flags):
    """A task with these flags."""
    return common.load_task(grpo.Config(task=name, **flags), grpo.verify)


TASKS = {name: load(name) for name in ("arithmetic", "lookup", "gridworld")}


def reward(name, text, problem=SEVEN, verdict=0.0, step=0):
    """What a row gives a completion."""
    return REWARDS[name](TASKS[problem.task], problem, text, verdict, step)


def random_text(rng):
    if rng.random() < 0.5:
        return rng.randbytes(rng.randrange(40)).decode(errors="replace")
    return "".join(rng.choices(PIECES, k=rng.randrange(1, 12)))


# ---- how an answer is read -------------------------------------------------------------------


@pytest.mark.parametrize("text, answer", [
    ("<answer>7</answer>", "7"), ("<think>x</think><answer> mi \t</answer>", None), ("", None),
    ("7", None), ("<answer> mi </answer>", "mi"), ("<answer> </answer>", ""),
    ("<answer></answer>", None), ("</answer>7<answer>", None),
    ("<answer>7</answer></answer>", None), ("<answer>7\n</answer>", None),
    ("<answer>\u0667</answer>", None), ("<answer>" + "7" * 201 + "</answer>", None),
    ("<answer>" + "7" * 200 + "</answer>", "7" * 200), ("<answer><b>7</b></answer>", "<b>7</b>"),
    ("<answer>7</answer><answer>7</answer>", None),
    ("<ANSWER>8</ANSWER><answer>7</answer>", "7")], ids=ascii)
def test_an_answer_is_what_the_one_answer_block_holds(text, answer):
    assert extract(text) == common.extract(text) == answer


def test_an_answer_is_read_as_a_second_program_reads_it():
    rng = random.Random(0)
    num_answers = 0
    for _ in range(20_000):
        text = random_text(rng)
        inside = block(text, "answer") or ""
        is_answer = inside.isascii() and inside.isprintable() and 0 < len(inside) <= 200
        assert extract(text) == (inside.strip() if is_answer else None), text
        num_answers += extract(text) is not None
    assert num_answers > 100


# ---- ToolRL ----------------------------------------------------------------------------------


def call(name, **parameters):
    return name, parameters


def search(key):
    return "search", {"key": key}


@pytest.mark.quick
@pytest.mark.parametrize("true, predicted, expected", [
    ([call("get", a=1, b=2)], [call("get", a=1, c=3)], (1 + 1 / 3 + 1) / 4),    # golden numbers
    ([call("search", q="x")], [call("search", q="y")], 2 / 3),
    ([call("get", a=1, b=2)], [call("get", a=1, b=2)], 1),
    ([call("get", a=1, b=2)], [call("get", b=1, a=2)], (1 + 1 + 0) / 4),        # values swapped
    ([call("get", a=1, b=2)], [call("get")], (1 + 0 + 0) / 4),
    ([call("get", a=1, b=2)], [call("set", a=1, b=2)], 0),                      # another tool
    ([call("get", a=1, b=2)], [], 0),
    ([search("x"), search("y")], [search("y"), search("x")], 1),                # in any order
    ([search("x"), search("y")], [search("x")], (1 / 2 + 2) / 5),
    ([search("x"), search("x")], [search("x")], (1 / 2 + 2) / 5),               # matched only once
    ([search("x")], [search("x"), search("x")], (1 / 2 + 2) / 3),
    ([search("x")], [search("z"), search("x")], (1 / 2 + 2) / 3),               # the best is taken
    ([search("x")], [search("x"), call("get")], (1 / 2 + 2) / 3),
    ([call("now")], [call("now")], 1), ([call("now")], [call("now", tz=1)], (1 + 0 + 0) / 2),
    ([], [], 1), ([], [search("x")], 0)])
def test_tool_reward_is_the_sum_over_names_parameters_and_values(true, predicted, expected):
    assert tool_reward(true, predicted) == pytest.approx(expected, abs=1e-12)


@pytest.mark.quick
def test_in_the_units_of_the_paper_the_golden_calls_earn_a_half_and_one():
    half = tool_reward([call("get", a=1, b=2)], [call("get", a=1, c=3)])
    one = tool_reward([call("search", q="x")], [call("search", q="y")])
    assert (6 * half - 3, 6 * one - 3) == pytest.approx((0.5, 1.0))


def random_calls(rng):
    """Up to three calls of two tools, with up to two parameters."""
    calls = []
    for _ in range(rng.randrange(4)):
        name = rng.choice("fg")
        calls.append((name, {key: rng.randrange(2) for key in "ab"[:rng.randrange(3)]}))
    return calls


def test_tool_reward_is_one_for_the_same_calls_in_any_order_and_for_nothing_else():
    rng = random.Random(0)
    for _ in range(3000):
        true = random_calls(rng)
        other = random_calls(rng)
        is_same = sorted(map(repr, true)) == sorted(map(repr, other))
        assert (tool_reward(true, other) == 1.0) == is_same
        assert 0 <= tool_reward(true, other) <= 1
        assert tool_reward(true, rng.sample(true, len(true))) == 1.0


# ---- the rows --------------------------------------------------------------------------------


def test_accuracy_is_the_verdict_or_the_sum_of_a_list():
    assert reward("accuracy", "", verdict=1.0) == 1 and reward("accuracy", "", verdict=0.0) == 0
    walk = Problem("A b3 7", "", task="gridworld")
    assert reward("accuracy", "", walk, [-1.0, -1.0, 5.0]) == 3
    assert reward("accuracy", "", walk, []) == 0


def test_accuracy_is_the_reward_of_a_task_that_has_one_of_its_own():
    task = SimpleNamespace(reward=lambda problem, text, verdict, step: verdict / 2 + step)
    assert REWARDS["accuracy"](task, SEVEN, "", 1.0, 3) == 3.5


@pytest.mark.parametrize("text", [
    "<think>3+4=7</think><answer>7</answer>", "<think></think><answer>8</answer>",
    "<think>\n</think><answer></answer>", "<think>" + WORK + "</think><answer>to</answer>",
    "<think>None</think><answer>None</answer>", "<think>\u0667 <b></think><answer>\x00</answer>"],
    ids=ascii)
def test_format_is_one_think_block_then_one_answer_block(text):
    assert reward("format", text) == 1.0


@pytest.mark.parametrize("text", [
    "", "7", "<answer>7</answer>", "<think>7</think>", "<answer>7</answer><think>3+4=7</think>",
    "<think>3+4=7</think> <answer>7</answer>", " <think>3+4=7</think><answer>7</answer>",
    "<think>3+4=7</think><answer>7</answer>\n",
    "<think>3+4=7</think><answer>7</answer><answer>7</answer>",
    "<think>3</think><think>4</think><answer>7</answer>",
    "<think><think>3</think><answer>7</answer>", "<think>3<answer>7</answer></think>",
    "<think>3<answer>7</think></answer>", "3</think><answer>7</answer>",
    "<think>3</think><answer>7", "<think>3</think>4<answer>7</answer>",
    "<think>3<answer>7</answer>",
    "<Think>3</Think><answer>7</answer>", "</think>3<think><answer>7</answer>",
    "<think>None</think><answer><think></answer>",
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
def test_the_length_bonus_grows_with_the_policys_own_thought_up_to_a_cap(
        text, fixed, at_start, halfway):
    for step in (0, 25, 50, 1000):
        assert reward("length", text, step=step) == pytest.approx(fixed)
    assert reward("growing_length", text, step=0) == pytest.approx(at_start)
    assert reward("growing_length", text, step="pairs") == pytest.approx(at_start)
    assert reward("growing_length", text, step=25) == pytest.approx(halfway)
    assert reward("growing_length", text, step=50) == pytest.approx(fixed)
    assert reward("growing_length", text, step=1000) == pytest.approx(fixed)


@pytest.mark.parametrize("text, fine, coarse", [
    ("<think>" + WORK + "</think><answer>to</answer>", 2, 1),
    ("<think>" + WORK + "</think><answer>xx</answer>", 2, 1),           # rates no answer
    (WORK, 1, 1), ("<answer>to</answer>", 0, 0), ("", 0, 0),
    ("<think></think><answer>to</answer>", 1, 0),
    ("<search>mi</search><search> ka </search>", 1, 1),
    ("<search>ka</search>", 0.5, 0), ("<search>zz</search>", (1 / 2 + 1) / 5, 0),
    ("<search>ka</search><search>zz</search>", (1 + 2 + 1) / 5, 0),
    (WORK + "<search>to</search>", (2 / 3 + 4) / 5, 0), (WORK + "</search>", (2 / 3 + 4) / 5, 0),
    (WORK + "<search>", 1, 1), ("<search>ka<search>mi</search>", (1 / 2 + 1) / 5, 0),
    ("<search></search><search></search>", (1 + 2) / 5, 0), ("</search></search>", 0, 0)],
    ids=ascii)
def test_fine_rates_each_part_of_a_call_and_coarse_only_all_of_them(text, fine, coarse):
    assert reward("fine", text, TWO_HOPS) == pytest.approx(fine, abs=1e-12)
    assert reward("coarse", text, TWO_HOPS) == coarse


# ---- --reward --------------------------------------------------------------------------------

THOUGHT = "<think>3+4=7</think><answer>7</answer>"


def test_rows_are_added_up_by_name():
    assert load("arithmetic", reward="accuracy").reward(SEVEN, THOUGHT, 1.0, 0) == 1
    task = load("arithmetic", reward="accuracy+format+length")
    assert task.reward(SEVEN, THOUGHT, 1.0, 0) == pytest.approx(2.0125)
    assert task.reward(SEVEN, "7", 0.0, 0) == 0
    task = load("lookup", reward="fine+coarse")
    assert task.reward(TWO_HOPS, WORK, 0.0, 0) == pytest.approx(2.0)
    assert isinstance(load("lookup", reward="fine"), Rewards)


def test_the_step_reaches_the_rows():
    task = load("arithmetic", reward="growing_length")
    text = "<think>" + 20 * "x" + "</think>"
    assert task.reward(SEVEN, text, 0.0, 0) == pytest.approx(0.1)
    assert task.reward(SEVEN, text, 0.0, 50) == pytest.approx(0.05)


def test_but_for_the_reward_the_task_is_the_one_that_it_was():
    plain = load("lookup")
    task = load("lookup", reward="fine")
    assert (task.name, task.prompt_width, task.call_tokens) \
        == (plain.name, plain.prompt_width, plain.call_tokens)
    assert common.sample_problems(task, 20, 0) == common.sample_problems(plain, 20, 0)
    assert task.respond(TWO_HOPS, "<search>ka</search>") == "<information>mi</information>"
    assert task.verify(TWO_HOPS, "<answer>to</answer>") == 1.0
    task.state = {"seen": 3}
    assert task.state == task.task.state == {"seen": 3}


def test_in_a_mix_each_completion_is_rated_by_its_own_task():
    task = load("lookup,arithmetic", reward="accuracy+format")
    assert task.reward(SEVEN, THOUGHT, 1.0, 0) == 2
    assert task.reward(TWO_HOPS, WORK, 0.0, 0) == 0
    task = load("lookup,lookup", reward="fine")
    assert task.reward(TWO_HOPS, WORK, 0.0, 0) == 1


@pytest.mark.parametrize("names", [
    "", "acuracy", "accuracy+", "+accuracy", "accuracy,format", "Accuracy", "accuracy + format",
    "__doc__"])
def test_an_unknown_reward_is_named_with_those_that_there_are(names):
    cfg = grpo.Config(reward=names)
    with pytest.raises(ValueError, match="growing_length") as error:
        Rewards(cfg, TASKS["arithmetic"])
    assert f"--reward {names}: " in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["fine", "coarse"])
def test_a_reward_of_tool_calls_is_refused_for_a_task_without_them(name):
    for task in (TASKS["arithmetic"], load("lookup,arithmetic")):
        with pytest.raises(ValueError, match=f"{name}.*arithmetic"):
            Rewards(grpo.Config(reward=f"accuracy+{name}"), task)


def test_the_row_of_a_reward_model_adds_nothing_before_the_model_has_rated():
    for names, expected in (("model", 0.0), ("accuracy+model", 1.0)):
        task = Rewards(ppo.Config(reward=names), TASKS["arithmetic"])
        found = task.reward(SEVEN, THOUGHT, 1.0, 0)
        assert found == expected and isinstance(found, float)


def test_a_reward_model_is_refused_where_nothing_is_right_or_wrong():
    for slip, names in ((0.2, "model"), (0.2, "accuracy+model")):
        cfg = ppo.Config(task="gridworld", slip=slip, reward=names)
        with pytest.raises(ValueError, match=f"--reward {re.escape(names)}: .*right and wrong"):
            Rewards(cfg, Gridworld(cfg))
    cfg = ppo.Config(task="gridworld", reward="model")
    Rewards(cfg, Gridworld(cfg))


def test_of_several_rows_the_mean_of_each_is_logged():
    texts = [f"<think>{'1' * 20}</think><answer>7</answer>", "<answer>7</answer>", "7",
             "<think>8</think>"]
    batch = SimpleNamespace(problems=[TWO_HOPS] * 4, texts=texts, verdicts=[1.0, 1.0, 0.0, 0.0],
                            rewards=torch.tensor([[1.5, 2.0], [0.75, 0.0]]))
    found = load("lookup", reward="accuracy+format+length").describe(batch, 5)
    del found["tools/call_frequency"]
    assert found == pytest.approx({"rewards/accuracy/mean": 0.5, "rewards/format/mean": 0.25,
                                   "rewards/length/mean": 0.1 * (0.5 + 1 / 40) / 4})
    assert load("lookup", reward="fine").describe(batch, 5) == {"tools/call_frequency": 0}


def test_the_mean_of_a_reward_model_is_that_of_its_ratings_whatever_else_is_in_a_reward():
    """Such as the overlong penalty; and where a curriculum wraps the task, too."""
    batch = SimpleNamespace(problems=[TWO_HOPS] * 2, texts=["7"] * 2, verdicts=[1.0, 0.0],
                            rewards=torch.tensor([[1.5, -2.0]]))
    task = Rewards(ppo.Config(reward="accuracy+model"), load("lookup"))
    around = Curriculum(task)
    around.reward_model = SimpleNamespace(rewards=lambda batch: torch.tensor([[0.5, 1.0]]))
    assert task.describe(batch, 5) == {
        "tools/call_frequency": 0, "rewards/accuracy/mean": 0.5, "rewards/model/mean": 0.75}


# ---- hostile text ----------------------------------------------------------------------------


def test_a_hundred_thousand_random_texts_are_rated_within_bounds():
    rng = random.Random(0)
    highest = {"accuracy": 1, "format": 1, "length": 0.1, "growing_length": 0.1, "fine": 2,
               "coarse": 1}
    found = {name: set() for name in REWARDS}
    start = time.process_time()
    for _ in range(100_000):
        text = random_text(rng)
        step = rng.randrange(60)
        for name in REWARDS:
            value = reward(name, text, TWO_HOPS, 0.0, step)
            assert isinstance(value, float) and 0 <= value <= highest[name], (name, text)
            found[name].add(round(value, 2))
    assert time.process_time() - start < 100                            # 1 ms each
    assert len(found["format"]) == 2 and len(found["length"]) > 3 and len(found["fine"]) > 4


@pytest.mark.parametrize("text", [
    "<think>" + "<information>" * 20_000 + "</think>", "<search>" * 20_000, "<" * 200_000,
    "</search>" * 2_000, "<search>ka</search>" * 2_000, "<think>" * 20_000,
    "<think>" + "<information></information>" * 10_000 + "</think>"], ids=lambda text: text[:30])
def test_huge_texts_are_rated_in_a_moment(text):
    for name in REWARDS:
        assert takes_less_than(0.2, reward, name, text, TWO_HOPS)
