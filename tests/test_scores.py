"""Scores of several answers to a problem: pass@k, and the answer that most of them give, however it
is written."""
import functools
import itertools

import pytest
import torch

import grpo
from common import Arithmetic, Problem, maj_at_k, majority, pass_at_k, scores, votes

pytestmark = pytest.mark.quick

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


# ---- answers that are the same ---------------------------------------------------------------

ARITHMETIC = Arithmetic(grpo.Config(), grpo.verify)


@pytest.mark.parametrize("answer, same", [
    ("07", "7"), ("007", "7"), ("7", "7"), ("0", "0"), ("00", "0"), ("-07", "-7"), ("10", "10"),
    ("100", "100"), ("-0", "0"), ("-00", "0"), ("x07", "x07"), ("seven", "seven"), ("", "")])
def test_arithmetic_writes_a_number_in_one_way(answer, same):
    assert ARITHMETIC.canonical(SUM, answer) == same


def answered(*answers):
    """Completions that give these answers."""
    return [f"<think>3+4=7</think><answer>{answer}</answer>" for answer in answers]


def test_answers_that_are_the_same_are_written_as_the_first_of_them_is():
    texts = [*answered("07", "7"), "no answer", *answered("8", "007")]
    assert votes(ARITHMETIC, [SUM] * 5, texts, n=5) == ["07", "07", None, "8", "07"]


def test_each_problem_has_a_first_answer_of_its_own():
    problems = [SUM, SUM, Problem("2+5=", "7"), Problem("2+5=", "7")]
    found = votes(ARITHMETIC, problems, answered("07", "7", "7", "07"), n=2)
    assert found == ["07", "07", "7", "7"]


def test_answers_that_are_the_same_do_not_split_the_vote():
    texts = answered("8", "7", "8", "07", "007")
    found = scores(ARITHMETIC, [SUM] * 5, texts, [1] * 5, num_samples=5)
    assert found["maj@5"] == 1.0
    assert found["maj@k"] == [3 / 5, 0.0, 0.0, 0.0, 1.0]    # of two and of four, a tie


class Product(Arithmetic):
    """The answer is a product of two factors, in any order; as text, only so: 3*4."""

    def __init__(self):
        super().__init__(grpo.Config(), grpo.verify)
        self.verify = self.is_product

    def is_product(self, problem, text):
        return float(text in ("<answer>3*4</answer>", "<answer>4*3</answer>"))

    def canonical(self, problem, answer):
        return "product of " + " and ".join(sorted(answer.split("*")))


def test_a_task_says_which_answers_are_the_same_and_its_verifier_sees_one_of_them_as_written():
    texts = [f"<answer>{answer}</answer>" for answer in ("2*6", "4*3", "2*6", "3*4", "4*3")]
    found = scores(Product(), [Problem("12", "3*4")] * 5, texts, [1] * 5, num_samples=5)
    assert found["pass@1"] == 3 / 5
    assert found["maj@5"] == 1.0


# ---- what is neither right nor wrong ---------------------------------------------------------

class Luck(Arithmetic):
    """Each character earns a half. What is of the task luck is not judged; what is of walk is."""

    def __init__(self):
        super().__init__(grpo.Config(), grpo.verify)
        self.verify = self.moves

    def moves(self, problem, text):
        return grpo.verify(problem, text) if problem.task == "sum" else [0.5] * len(text)

    def is_correct(self, problem, verdict):
        return {"luck": None, "walk": verdict == [0.5], "sum": verdict == 1}[problem.task]

    def best_return(self, problem):
        return 2.0


LUCK = Problem("luck", "", task="luck")
MIXED = [LUCK, SUM._replace(task="sum"), LUCK, SUM._replace(task="sum")]


def test_where_luck_decides_there_are_returns_and_nothing_that_is_right():
    found = scores(Luck(), [LUCK] * 2, ["ab", "abcd"], [2, 4], num_samples=0)
    examples = found.pop("examples")
    assert found == {"greedy_return": 1.5, "best_return": 2.0, "think_share": 0.0,
                     "mean_length": 3.0, "problems": 2, "samples": 0}
    assert [example["right"] for example in examples] == [None, None]
    found = scores(Luck(), [LUCK] * 4, ["ab", "abcd", "", "ab"], [2, 4, 0, 2], num_samples=2)
    assert found == {"return": 1.0, "best_return": 2.0, "think_share": 0.0, "mean_length": 2.0,
                     "problems": 2, "samples": 2}


def test_of_a_mix_only_what_is_judged_is_scored():
    texts = ["ab", "<answer>7</answer>", "abcd", "<think></think>"]
    found = scores(Luck(), MIXED, texts, [2, 4, 4, 2], num_samples=0)
    assert found["greedy"] == 0.5
    assert found["greedy_return"] == 1.5
    assert [example["right"] for example in found["examples"]] == [None, True, None, False]
    assert (found["think_share"], found["mean_length"], found["problems"]) == (0.25, 3.0, 4)
    assert not [name for name in found if "luck" in name]


def test_of_the_samples_of_a_mix_only_those_that_are_judged_are_scored():
    problems = [problem for problem in MIXED for _ in range(2)]
    texts = ["ab", "a", "<think></think><answer>7</answer>", "<answer>8</answer>",
             "abcd", "a", "<answer>9</answer>", "<answer>7</answer>"]
    found = scores(Luck(), problems, texts, [1] * 8, num_samples=2)
    assert found["pass@1"] == 0.5
    assert found["pass@2"] == 1.0
    assert found["maj@2"] == 0.5                                # of two that differ, the first
    assert (found["accuracy_given_think"], found["accuracy_given_direct"]) == (1.0, 1 / 3)
    assert found["return"] == 1.0                               # of 2, 1, 4 and 1 characters
    assert (found["problems"], found["samples"], found["think_share"]) == (4, 2, 1 / 8)


def test_a_mix_of_two_tasks_that_are_judged_has_a_score_of_each():
    problems = [MIXED[0]._replace(task="walk"), *MIXED[:2]]
    found = scores(Luck(), problems, ["a", "ab", "<answer>8</answer>"], [1] * 3, num_samples=0)
    assert (found["greedy/walk"], found["greedy/sum"], found["greedy"]) == (1.0, 0.0, 0.5)
    assert not [name for name in found if "luck" in name]
