"""tasks/program.py: the interpreter, the tests of a program, and what the levels reward."""
import random

import pytest
from conftest import load_named as load

import common
from common import Problem
from tasks import program as task_file
from tasks.program import INPUTS, run

ASKED = Problem("1>3,2>5,4>9=", "x2*1+")


def written(rng, depth):
    """Draw a formula. -> in postfix notation, and as Python writes it"""
    if depth == 0 or rng.random() < 0.3:
        leaf = rng.choice("xx0123456789")
        return leaf, leaf
    (a, left), (b, right) = written(rng, depth - 1), written(rng, depth - 1)
    sign = rng.choice("+-*")
    return f"{a}{b}{sign}", f"({left}{sign}{right})"


def answered(program):
    return f"<answer>{program}</answer>"


# ---- the interpreter -------------------------------------------------------------------------

def test_formulas_have_the_values_that_python_computes():
    rng = random.Random(0)
    lengths = set()
    for _ in range(10_000):
        postfix, infix = written(rng, 3)
        x = rng.choice(INPUTS)
        assert run(postfix, x) == eval(infix, {"x": x}), postfix
        lengths.add(len(postfix))
    assert lengths == {1, 3, 5, 7, 9, 11, 13, 15}


@pytest.mark.parametrize("program, results", [
    ("1:3,2:5,4:9", {1: 3, 2: 5, 4: 9, 0: None, 3: None}), ("0:-7", {0: -7, 7: None}),
    ("3:007", {3: 7}), ("1:3,1:5", {1: 5}), ("9" * 8 + "*" * 7, {0: 9**8})])
def test_a_program_gives_these_results(program, results):
    assert {x: run(program, x) for x in results} == results


NO_PROGRAMS = [
    "", "+", "x+", "x2", "x2**", "x 2*", "x2/", "y2*", "X2*", "-1", "x1.5*", "\u0663", "x\u00b2",
    "x" * 16, "9" * 10**5, "1:", ":3", "1:3,", "1:3,,2:5", "1:3;2:5", "10:3", "1:x", "1:--3",
    "1:1234", "1:3,2:x2*", ",".join(["1:3"] * 11), "1:\u0663", "1:3\n", "__import__('os')", "x\x00"]


def test_a_text_that_is_no_program_has_no_result_and_passes_no_test():
    for program in NO_PROGRAMS:
        assert {run(program, x) for x in INPUTS} == {None}, ascii(program)
        assert load("program").verify(ASKED, answered(program)) == 0
        assert load("program:shown").verify(ASKED, answered(program)) == 0


# ---- tests -----------------------------------------------------------------------------------

@pytest.mark.parametrize("program, shown, hidden", [
    ("xx+1+", True, 7), ("1:3,2:5,4:9", True, 0), ("1:3,2:5", False, 0), ("x2*", False, 0),
    ("0:1,1:3,2:5,3:7,4:9,5:11,6:13,7:15,8:17,9:19", True, 7), ("21-x*3+", False, 1)])
def test_a_program_is_right_if_it_passes_the_tests_of_the_level(program, shown, hidden):
    text = answered(program)
    assert load("program:shown").verify(ASKED, text) == shown
    assert load("program").verify(ASKED, text) == (shown and hidden == 7)
    said = load("program").shares(ASKED, text)
    assert said == {"shown_tests": shown, "all_tests": shown and hidden == 7,
                    "cases": ":" in program}


# ---- problems and demonstrations -------------------------------------------------------------

@pytest.mark.parametrize("level, kinds", [
    ("", {1}), (":2", {1, 2}), (":3+shown", {1, 2, 3}), (":hidden=2+2", {1, 2})])
def test_a_problem_has_a_formula_of_its_kind_that_passes_and_a_prompt_that_fits(level, kinds):
    task = load(f"program{level}")
    problems = common.sample_problems(task, 500, 0)
    assert {problem.difficulty for problem in problems} == kinds
    for problem in problems:
        assert len(problem.prompt) <= task.prompt_width and task.verify(problem, answered(
            problem.answer)) == 1
        kind = 3 if problem.answer[1] == "x" else 2 if problem.answer[-1] == "-" else 1
        assert problem.difficulty == kind and len(task_file.tests(problem)) == 10


@pytest.mark.parametrize("level", [
    "4", "0", "1-3", "hidden=0", "hidden=8", "hidden", "Shown", "1+2", "shown+hidden=2", "1+"])
def test_another_level_is_refused(level, refused):
    refused("the level must be 1, 2 or 3", load, f"program:{level}")
