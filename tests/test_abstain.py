"""Test the task abstain: which numbers are hidden, what its authors write, its marks and shares."""
import re
from collections import Counter

import pytest
from conftest import load_named as load
from small_runs import steps
from test_beliefs import values
from test_scores import batch_of

import common
from common import Problem
from tasks.rewards import REWARDS

KNOWN = Problem("((3+4)-2)=", "5", task="abstain")
HIDDEN = Problem("((3+4)-x)=", "5", task="abstain")         # x is 2


@pytest.mark.parametrize("name, largest, least", [("abstain", 3, 300), ("abstain:2", 2, 450),
                                                  ("abstain:9+cost=0.5", 9, 80)])
def test_every_hidden_number_is_possible_and_equally_likely_and_leads_to_another_answer(
        name, largest, least):
    problems = common.sample_problems(load(name), 4000, 0)
    hidden = [problem for problem in problems if "x" in problem.prompt]
    assert 0.31 < len(hidden) / 4000 < 0.36
    true, imagined = Counter(), Counter()
    for problem in hidden:
        question = problem.prompt.removesuffix("=")
        found = [values(question.replace("x", str(x))) for x in range(1, largest + 1)]
        assert all(0 <= min(each) <= max(each) <= 20 for each in found)
        answers = [str(each[-1]) for each in found]
        assert len({*answers}) == largest and problem.work.count("x=") == 1
        true[answers.index(problem.answer)] += 1
        imagined[answers.index(problem.work.rpartition("=")[2])] += 1
    assert len(true) == len(imagined) == largest and min(true.values()) > least
    assert min(imagined.values()) > least


@pytest.mark.parametrize("phase, share", [("textbook", 0.15), ("forum", 0.15), ("cold_start", 1)])
def test_some_thoughts_that_meet_an_x_stop_there_and_no_other_text_abstains(phase, share):
    task = load("abstain")
    stops = []
    for problem in common.sample_problems(task, 6000, 0, phase=phase):
        text = re.fullmatch("(<think>(.*)</think>)?<answer>([0-9]+|[?])</answer>",
                            problem.completion)
        *before, last = (text[2] or "").split(";")
        assert all(re.fullmatch(r"(wait,)?\d+[+*-][1-9x]=\d+", step) for step in before)
        assert (text[3] == "?") == (last.endswith("x=?")) and "x=?" not in "".join(before)
        if "x" in problem.prompt and text[1]:
            stops.append(text[3] == "?")
        if phase == "cold_start":
            assert task.reward(problem, text[0], task.verify(problem, text[0]), 0) >= 0
    assert len(stops) > 400 and abs(sum(stops) / len(stops) - share) < 0.03


@pytest.mark.parametrize("text, mark, points, of_known, of_hidden", [
    ("<answer>5</answer>", 1, 7, (1, 0), (0, 0)), ("<answer>6</answer>", -0.25, 5, (0, 0), (0, 1)),
    ("<think>7-x=?</think><answer>?</answer>", 0, 6, (0, 1), (1, 0)),
    ("<answer> ? </answer>", 0, 6, (0, 1), (1, 0)), ("?", -0.25, 1, (0, 0), (0, 0)),
    ("<answer>x</answer>", -0.25, 5, (0, 0), (0, 1)), ("", -0.25, 1, (0, 0), (0, 0)),
    ("<answer>??</answer>", -0.25, 5, (0, 0), (0, 1)),
    ("<answer>5</answer><answer>?</answer>", -0.25, 1, (0, 0), (0, 0))])
def test_marks_points_and_shares_of_a_text(text, mark, points, of_known, of_hidden):
    """A right answer to a question with a hidden number is luck, and in neither of its shares."""
    task, mixed = load("abstain:cost=0.25"), load("arithmetic,abstain:cost=0.25")
    for problem, names, shares in ((KNOWN, ("right", "needless"), of_known),
                                   (HIDDEN, ("abstained", "hallucinated"), of_hidden)):
        verified = task.verify(problem, text)
        assert verified == (mark == 1)
        assert task.shares(problem, text) == dict(zip(("marks", *names), (mark, *shares)))
        for each in (task, mixed):
            assert each.reward(problem, text, verified, 0) == mark
            assert REWARDS["points"](each, problem, text, verified, 0) == points
    sum_alone = Problem("(3+2)=", "5", task="arithmetic")       # whose judge knows no abstention
    assert REWARDS["points"](mixed, sum_alone, text, 0.0, 0) == min(points, 5)
    free = load("abstain:cost=0").reward(HIDDEN, text, task.verify(HIDDEN, text), 0)
    assert str(free) == str(float(mark == 1))                   # not -0.0


def test_a_run_shows_the_shares_and_no_report_calls_an_abstention_wrong(new_run, capsys):
    task = load("abstain")
    texts = [f"<answer>{answer}</answer>" for answer in ("5", "?", "?", "6")]
    found = task.scores(batch_of(task, [KNOWN, HIDDEN], texts, 2))
    assert (found["marks"], found["right"], found["needless"]) == (0, 0.5, 0.5)
    assert (found["abstained"], found["hallucinated"], found["pass@1"]) == (0.5, 0.5, 0.25)
    found = task.scores(batch_of(task, [KNOWN, HIDDEN, HIDDEN], texts[1:]), greedy=True)
    assert [each["right"] for each in found["examples"]] == [None, None, False]
    folder = new_run(task="abstain", max_steps=4, base_steps=20, max_completion_length=8)
    printed = re.findall("^(?:base|held out): .*", capsys.readouterr().out, re.M)
    names = {"right", "abstained", "hallucinated"}
    greedy = {f"greedy_{name}" for name in names}
    for line, shown in zip(printed, (greedy | names, greedy, greedy | names), strict=True):
        assert {part.split()[-2] for part in line.split(",")} >= shown
    for line, more in zip(steps(folder)[1::2], ((), names), strict=True):
        assert line.keys() >= {f"eval/{name}" for name in (greedy | {*more} | {"greedy_marks"})}
