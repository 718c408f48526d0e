"""Scores of several answers to a problem: pass@k, and the answer that most of them give."""
import functools
import itertools

import pytest
import torch

from common import Problem, maj_at_k, majority, pass_at_k

close = functools.partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)
golden = functools.partial(torch.testing.assert_close, atol=6e-8, rtol=0)   # written with 7 digits


@pytest.mark.parametrize("n, c, k, value", [
    (4, 1, 2, 0.5),
    (8, 3, 4, 0.9285714),
    (8, 0, 8, 0),
    (8, 1, 8, 1),
    (8, 2, 1, 0.25),
    (5, 5, 2, 1)])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_answer(n, c, k, value):
    found = float(pass_at_k(n, c, k))
    golden(found, float(value))
    answers = [True] * c + [False] * (n - c)
    has_right_answer = [any(subset) for subset in itertools.combinations(answers, k)]
    close(found, sum(has_right_answer) / len(has_right_answer))


@pytest.mark.parametrize("answers, winner", [
    (["3", "5", "5"], "5"),
    (["3", "5", "5", "3"], "3"),
    (["5", "3", "3", "5"], "5"),
    ([None, None, None, "4"], "4"),
    ([None, "2", "1", None, None], "2"),
    ([None, None], None),
    ([], None)])
def test_the_majority_is_the_answer_given_most_often_and_the_first_of_those_that_tie(
        answers, winner):
    assert majority(answers) == winner


class OneNumber:
    """A task whose verifier gives a reward for each move where there is no answer to compare."""

    def verify(self, problem, text):
        if not problem.answer:
            return [1.0]
        return float(text == f"<answer>{problem.answer}</answer>")


SUM = Problem("3+4=", "7")
WALK = Problem("maze", "")


def test_problems_without_a_known_answer_are_not_voted_on():
    problems = [SUM, SUM, WALK, WALK]
    assert maj_at_k(OneNumber(), problems, ["7", "7", None, "7"], n=2, k=2) == 1.0
    assert maj_at_k(OneNumber(), [WALK, WALK], [None, "7"], n=2, k=2) is None


def test_every_block_of_k_answers_to_a_problem_votes_once_and_what_is_left_over_does_not():
    problems = [SUM] * 5
    answers = ["7", "7", "8", "8", "7"]
    assert maj_at_k(OneNumber(), problems, answers, n=5, k=1) == 3 / 5
    assert maj_at_k(OneNumber(), problems, answers, n=5, k=2) == 1 / 2
    assert maj_at_k(OneNumber(), problems, answers, n=5, k=3) == 1.0
    assert maj_at_k(OneNumber(), problems, answers, n=5, k=5) == 1.0
