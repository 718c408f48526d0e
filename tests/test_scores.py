"""Test the scores of an evaluation: majority votes, the steps of thoughts, and tasks in which luck
decides, alone or in a mix."""
import math

import pytest
import torch
from conftest import load_named

import common
from common import Problem
from tasks.scores import count_steps

pytestmark = pytest.mark.quick

SUM = Problem("3+4=", "7", task="arithmetic")
WALK = Problem("A b3 7", "", task="gridworld")       # gets -1 for a wasted move
ARITHMETIC = load_named()


def batch_of(task, problems, texts, G=1):
    """Make a batch of judged completions; only their texts matter."""
    B = len(texts)
    slots = torch.ones(B, 2)
    ended = torch.zeros(B, dtype=torch.bool)
    problems = [problem for problem in problems for _ in range(G)]
    batch = common.Batch(slots.long(), slots, slots, slots, slots.sum(dim=1), ended, problems,
                         slots.long(), texts)
    return task.judge(batch, G, "evaluation")


def answered(*answers):
    """Make completions that give these answers."""
    return [f"<answer>{answer}</answer>" for answer in answers]


def test_the_scores_of_four_samples_are_those_computed_by_hand():
    """Of the four samples of problem n, the first n % 5 are right, and all think if n % 5 is 2 or
    more. The wrong samples agree if n is odd, and all differ if n is even."""
    texts = []
    for n in range(100):
        thought = "<think></think>" if n % 5 >= 2 else ""
        wrong = [30 + g if n % 2 == 0 else 30 for g in range(4)]
        texts += [thought + text for text in answered(*[7] * (n % 5), *wrong[n % 5:])]
    batch = batch_of(ARITHMETIC, [SUM] * 100, texts, 4)
    found = ARITHMETIC.scores(batch)
    assert found["pass@1"] == pytest.approx(0.5) and found["pass@4"] == pytest.approx(0.8)
    # If c of four samples are right, two of them contain a right one with probability
    # 1 - C(4 - c, 2) / C(4, 2).
    expected = [0.5, (0 + 3 + 5 + 6 + 6) / 30, (0 + 3 + 4 + 4 + 4) / 20, 0.8]
    assert found["pass@k"] == pytest.approx(expected)
    # n % 10:  0 1 2 3 4 5 6 7 8 9
    # maj@4:   0 0 1 1 1 0 1 1 1 1
    # One right sample of four is outvoted if the others agree (1), but not if all differ (6).
    # Two right samples win a tie because they come first (7). maj@2 votes over samples 1 and 2,
    # then over 3 and 4: of these two votes, 0, 1, 1, 2 and 2 are right. maj@3 votes over 1 to 3.
    expected = [0.5, (0 + 1 + 1 + 2 + 2) / 10, (0 + 0.5 + 3) / 5, 0.7]
    assert found["maj@k"] == pytest.approx(expected) and found["maj@4"] == pytest.approx(0.7)
    assert found["accuracy_given_think"] == pytest.approx((2 + 3 + 4) / 12)
    assert found["accuracy_given_direct"] == pytest.approx((0 + 1) / 8)
    assert (found["samples_given_think"], found["samples_given_direct"]) == (12 * 20, 8 * 20)
    assert (found["think_share"], found["mean_length"]) == (pytest.approx(0.6), 2.0)
    assert (found["problems"], found["samples"]) == (100, 4)


def test_training_and_evaluation_average_lengths_and_entropy_over_sampled_tokens_alone():
    batch = batch_of(ARITHMETIC, [SUM], answered(7, 8), 2)
    batch.mask = torch.tensor([[1.0, 0.0], [1.0, 1.0]])         # an environment inserted a token
    batch.entropy = torch.tensor([[0.3, 90.0], [0.5, 0.7]])
    assert ARITHMETIC.scores(batch)["mean_length"] == 1.5
    assert ARITHMETIC.scores(batch, greedy=True)["greedy_length"] == 1.5
    metrics = common.describe(batch)
    assert metrics["completions/mean_length"] == 1.5
    assert metrics["entropy"] == pytest.approx((0.3 + 0.5 + 0.7) / 3)


# ---- thoughts --------------------------------------------------------------------------------

@pytest.mark.parametrize("text, steps", [
    ("<think>8+5=13;13-9=5;5*2=10</think><answer>10</answer>",
     {"8+5": [1, 1], "13-9": [1, 0], "5*2": [1, 1]}),
    ("<think>3+4=9;wait,3+4=7;7*2=14</think>", {"3+4": [2, 1], "7*2": [1, 1]}),
    ("8+5=13<think></think>8+5=13<answer>8+5=13</answer>", {}),     # outside the thought
    ("<think>8+5=13</think>8+5=13<think>8+5=12</think>", {"8+5": [2, 1]}),
    ("<think>8+5=13;1+1=2", {"8+5": [1, 1], "1+1": [1, 1]}),        # unclosed
    ("<think>8+5=1", {}), ("<think>8+5=", {}), ("<think>8-7=1", {"8-7": [1, 1]}),   # cut off
    ("<think>8+5=;8+5=130;8+5=013;8+5=13x\n8+5=13", {"8+5": [5, 2]}),
    ("<think>13+8=21;2-3=-1;7*3=21;3+10=13;4/2=2</think>", {}),     # cannot occur
    ("<think>113+4=117;2*3+4=10;08+5=13;-8+5=3;13+4=17</think>", {"13+4": [1, 1]}),
    ("<think>\u0668+5=13;8+5=\u0661\u0663;</think>", {"8+5": [1, 0]})])
def test_steps_are_counted_in_thoughts_once_each_and_right_if_their_result_is(text, steps):
    assert count_steps([text]) == steps
    assert count_steps([text, "8+5=13", text]) == {
        step: [2 * written, 2 * right] for step, (written, right) in steps.items()}


# ---- completions that are neither right nor wrong --------------------------------------------

def test_of_a_mix_only_what_is_judged_is_scored_and_each_task_by_itself():
    task = load_named("arithmetic,countdown,gridworld")
    task.is_judged = task.parts["gridworld"].is_judged = False
    problems = [WALK, SUM, Problem("2 3>6:", "2*3", task="countdown")]
    texts = ["ab", "a", *answered(7, 8, 9, 9)]
    found = task.scores(batch_of(task, problems, texts, 2))
    assert (found["pass@1"], found["pass@2"], found["maj@2"]) == (0.25, 0.5, 0.5)
    assert (found["pass@1/arithmetic"], found["pass@1/countdown"]) == (0.5, 0.0)
    assert (found["return"], found["problems"]) == (-1.5, 3)
    assert found["best_return"] == task.parts["gridworld"].best_return(WALK)
    unknown = Problem("A b3 9", "", task="gridworld")           # one of several
    best_return = task.parts["gridworld"].best_return
    task.parts["gridworld"].best_return = lambda problem: (
        math.inf if problem is unknown else best_return(problem))
    both = task.scores(batch_of(task, [WALK, unknown], ["ab"] * 4, 2))
    assert both["best_return"] == best_return(WALK)
    found = task.scores(batch_of(task, problems, texts[1:4]), greedy=True)
    assert (found["greedy"], found["greedy/countdown"], found["greedy_return"]) == (0.5, 0.0, -1.0)
    assert [e["right"] for e in found["examples"]] == [None, True, False]
    task = task.parts["gridworld"]
    found = task.scores(batch_of(task, [WALK], ["abc", "a"], 2))
    assert found["return"] == -2.0
    assert not [name for name in found if "@" in name or "accuracy" in name]
