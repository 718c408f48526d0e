"""Test the task abstain: which numbers are hidden, what its authors write, its marks and shares."""
import re
from collections import Counter

import pytest
from conftest import load_named as load
from small_runs import steps
from test_beliefs import values
from test_scores import answered, batch_of

import common
from common import Problem
from report import page
from tasks.rewards import REWARDS

KNOWN = Problem("((3+4)-2)=", "5", task="abstain")
HIDDEN = Problem("((3+4)-x)=", "5", task="abstain")         # x is 2
STEP = r"(wait,)?\d+[+*-][1-9x]=\d+"
TEXT = (rf"(<think>{STEP}(;{STEP})*</think>)?<answer>\d+</answer>"
        rf"|<think>({STEP};)*\d+[+*-]x=[?]</think><answer>[?]</answer>")


@pytest.mark.parametrize("name, largest", [("abstain", 3), ("abstain:2", 2), ("abstain:9", 9)])
def test_a_hidden_number_has_equally_likely_values_with_different_answers(name, largest):
    hidden = [problem for problem in common.sample_problems(load(name), 4000, 0)
              if "x" in problem.prompt]
    assert 0.31 < len(hidden) / 4000 < 0.36
    counts = Counter()
    for problem in hidden:
        question = problem.prompt.removesuffix("=")
        found = [values(question.replace("x", str(x))) for x in range(1, largest + 1)]
        assert all(0 <= min(each) <= max(each) <= 20 for each in found)
        answers = [str(each[-1]) for each in found]
        assert len({*answers}) == largest and problem.work.count("x=") == 1
        counts.update([("true", answers.index(problem.answer)),
                       ("imagined", answers.index(problem.work.rpartition("=")[2]))])
    assert len(counts) == 2 * largest and min(counts.values()) > 0.7 * len(hidden) / largest


@pytest.mark.parametrize("phase, share", [("textbook", 0.15), ("forum", 0.15), ("cold_start", 1)])
def test_some_thoughts_that_meet_an_x_stop_there_and_no_other_text_abstains(phase, share):
    examples = common.sample_problems(load("abstain"), 6000, 0, phase=phase)
    assert all(re.fullmatch(TEXT, example.completion) for example in examples)
    stops = ["?" in example.completion for example in examples
             if "x" in example.prompt and "<think>" in example.completion]
    assert len(stops) > 400 and abs(sum(stops) / len(stops) - share) < 0.03


@pytest.mark.parametrize("text, mark, points, of_known, of_hidden", [
    ("<answer>5</answer>", 1, 7, (1, 0), (0, 0)), ("<answer>6</answer>", -0.25, 5, (0, 0), (0, 1)),
    ("<think>7-x=?</think><answer> ? </answer>", 0, 6, (0, 1), (1, 0)),
    ("?", -0.25, 1, (0, 0), (0, 0)), ("<answer>??</answer>", -0.25, 5, (0, 0), (0, 1)),
    ("<answer>5</answer><answer>?</answer>", -0.25, 1, (0, 0), (0, 0))])
def test_marks_points_and_shares_of_a_text(text, mark, points, of_known, of_hidden):
    """A right answer to a question with a hidden number is luck, and in neither of its shares."""
    task = load("arithmetic,abstain:cost=0.25")
    verified = float(mark == 1)
    for problem, names, shares in ((KNOWN, ("right", "needless"), of_known),
                                   (HIDDEN, ("abstained", "hallucinated"), of_hidden)):
        expected = {"marks": mark} | dict(zip(names, shares))
        assert task.parts["abstain"].shares(problem, text) == expected
        assert task.verify(problem, text) == verified
        assert task.reward(problem, text, verified, 0) == mark
        assert REWARDS["points"](task, problem, text, verified, 0) == points
    plain = HIDDEN._replace(task="arithmetic")              # whose judge knows no abstention
    assert REWARDS["points"](task, plain, text, 0.0, 0) == min(points, 5)
    assert str(load("abstain:cost=0").reward(HIDDEN, "", 0.0, 0)) == "0.0"      # not -0.0


def test_a_run_shows_the_shares_and_no_report_calls_an_abstention_wrong(new_run, capsys):
    task = load("abstain")
    found = task.scores(batch_of(task, [KNOWN, HIDDEN, HIDDEN], answered(*"??6")), greedy=True)
    assert [each["right"] for each in found["examples"]] == [None, None, False]
    folder = new_run(task="abstain", max_steps=4, base_steps=20, num_eval_problems=30)
    sentence = page.sum_up([page.read_run(folder)])     # its accuracies don't count luck
    assert "made-up answers" in sentence and "greedy accuracy went" not in sentence
    names = {"greedy_right", "greedy_abstained", "greedy_hallucinated"}
    assert {f"eval/{name}" for name in names} <= steps(folder)[1].keys()
    lines = re.findall("^(?:base|held out): .*", capsys.readouterr().out, re.M)
    for line, samples in zip(lines, (True, False, True), strict=True):
        found = {part.split()[-2] for part in line.split(",")}
        assert found >= names and ({"right", "abstained", "hallucinated"} <= found) == samples
