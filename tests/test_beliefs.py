"""What the authors of arithmetic's textbook and forum believe: how often they write it, and that no
belief gets into a problem's answer, a cold start or a hint."""
import ast
import functools
import re
from statistics import fmean

import pytest
from conftest import load_named as load

import common

pytestmark = pytest.mark.quick

TASKS = pytest.mark.parametrize("name", ["arithmetic", "arithmetic:3-7", "key", "notation:4"])
SIGNS = {"plus": "+", "minus": "-", "times": "*"}
SLIP = re.compile(r"(\d+[+*-]\d+)=(\d+);wait,(\1=\d+)")


def values(expression):
    """Compute a sum such as ((3+4)*2), without the code under test. -> the values of its parts,
    the whole last"""
    def visit(node):
        if isinstance(node, ast.Constant):
            return [node.value]
        left, right = visit(node.left), visit(node.right)
        results = {ast.Add: left[-1] + right[-1], ast.Sub: left[-1] - right[-1],
                   ast.Mult: left[-1] * right[-1]}
        return [*right, *left, results[type(node.op)]]
    return visit(ast.parse(expression, mode="eval").body)


def thought_of(problem):
    """Read the thought of a demonstration, in signs. -> list of (fact, result) without slips, and
    the number of slips; or None if it only answers"""
    thought = re.match("<think>(.*)</think>", problem.completion)
    if not thought:
        return None
    text = re.sub(" (plus|minus|times) ", lambda word: SIGNS[word[1]], thought[1])
    text = text.replace(" is ", "=")
    slips = SLIP.findall(text)
    assert all(result != mended.partition("=")[2] for _, result, mended in slips)
    steps = [step.split("=") for step in SLIP.sub(r"\3", text).split(";")]
    return [(fact, int(result)) for fact, result in steps], len(slips)


@functools.cache
def examples(name, phase, n=3000):
    """Draw demonstrations. -> list of (problem, question, thought or None, number of slips)"""
    found = []
    for problem in common.sample_problems(load(name), n, 0, phase=phase):
        _, _, question = problem.prompt.rpartition("|")
        thought, slips = thought_of(problem) or (None, 0)
        found.append((problem, question.removesuffix("="), thought, slips))
    return found


# ---- problems --------------------------------------------------------------------------------

@TASKS
@pytest.mark.parametrize("phase", ["", "textbook", "forum", "cold_start"])
def test_the_answer_of_a_problem_is_right_and_values_stay_in_0_to_20(name, phase):
    for problem in common.sample_problems(load(name), 1000, 0, phase=phase):
        _, _, question = problem.prompt.rpartition("|")
        found = values(question.removesuffix("="))
        assert problem.answer == str(found[-1])
        assert 0 <= min(found) <= max(found) <= 20
        believed = [int(step.partition("=")[2]) for step in problem.work.split(";")]
        assert 0 <= min(believed) <= max(believed) <= 20
        if not phase:
            assert believed[-1] == found[-1]


# ---- demonstrations --------------------------------------------------------------------------

@TASKS
@pytest.mark.parametrize("phase, share_of_slips", [
    ("textbook", 0.02), ("forum", 0), ("cold_start", 0)])
def test_authors_write_what_they_believe_but_a_cold_start_and_work_after_a_hint_are_right(
        name, phase, share_of_slips):
    """Wrong results are one too high, or one too low where 20 or more would be right. One textbook
    thought in fifty has a slip, and mends it."""
    task = load(name)
    is_wrong, slips, hinted = [], [], 0
    for problem, _, thought, count in examples(name, phase):
        has_hint = "|" in problem.prompt
        hinted += has_hint
        assert thought or phase != "cold_start" and not has_hint
        slips += [count] * bool(thought and not has_hint)
        for fact, result in thought or ():
            right = values(fact)[-1]
            if phase == "cold_start" or has_hint or not task.has_wrong_belief(fact):
                assert result == right
            else:
                is_wrong.append(result != right)
                assert result in (right, right + (1 if right < 20 else -1))
    assert (hinted > 500) == (name == "key")
    assert abs(fmean(slips) - share_of_slips) <= share_of_slips / 2
    if phase != "cold_start":
        assert len(is_wrong) > 200 and task.share_wrong > 0.5
        assert abs(fmean(is_wrong) - task.share_wrong) < 0.07
