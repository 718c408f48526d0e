"""Test the scores of an evaluation: majority votes, and tasks in which luck decides, alone or in a
mix."""
import pytest
import torch
from conftest import load_named

import common
from common import Problem
from tasks.scores import maj_at_k

pytestmark = pytest.mark.quick

SUM = Problem("3+4=", "7", task="arithmetic")
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


def test_problems_without_an_answer_do_not_vote():
    walk = Problem("maze", "", task="arithmetic")
    assert maj_at_k(ARITHMETIC, [SUM, SUM, walk, walk], ["7", "7", None, "7"], n=2, k=2) == 1.0
    assert maj_at_k(ARITHMETIC, [walk, walk], [None, "7"], n=2, k=2) is None


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


# ---- completions that are neither right nor wrong --------------------------------------------

WALK = Problem("A b3 7", "", task="gridworld")       # gets -1 for a wasted move


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
    found = task.scores(batch_of(task, problems, texts[1:4]), greedy=True)
    assert (found["greedy"], found["greedy/countdown"], found["greedy_return"]) == (0.5, 0.0, -1.0)
    assert [e["right"] for e in found["examples"]] == [None, True, False]
    task = task.parts["gridworld"]
    found = task.scores(batch_of(task, [WALK], ["abc", "a"], 2))
    assert found["return"] == -2.0
    assert not [name for name in found if "@" in name or "accuracy" in name]
