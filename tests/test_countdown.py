"""The countdown task: problems, demonstrations, and the verifier against tricky and hostile answers."""
import ast
import inspect
import operator
import random
import re
import sys
import time
from collections import Counter
from fractions import Fraction

import pytest

import common
import grpo
from common import Problem, sample_corpus, sample_problems
from tasks import countdown
from tasks.countdown import LIMIT, TRIES, verify

PROBLEM = Problem("countdown", "2 3 4 8>14:", "(4+8)+2", "", 4)
TWINS = Problem("countdown", "5 5 7>17:", "(5+5)+7", "", 3)
PIECES = [*"0123456789", *"22334488" * 4, *"+-*()" * 6, " ", "/", "**", "//", "%", "=", "14", "07", "-1", ".",
          "\u0663", "\u00b2", "\uff12", "\u2212", "\u00d7", "\t", "\n", "\x00", "1e1", "0x4", "2.0", "2_3",
          "9" * 60, "[4]", "4,8", "lambda:", "abs", "#", "<answer>", "</answer>", "<think>", "</think>"]
SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
SAMPLED = [problem for seed in range(4) for problem in sample_problems("countdown", 250, seed)]


def answered(expression, problem=PROBLEM):
    return verify(problem, f"<answer>{expression}</answer>")


def given(problem):
    """-> (numbers, target)"""
    *numbers, target = map(int, re.findall("[0-9]+", problem.prompt))
    return numbers, target


def fractions(node):
    """The value of a syntax tree of + - * and integers. KeyError or AttributeError if there is more in it."""
    if isinstance(node, ast.BinOp):
        return SIGNS[type(node.op)](fractions(node.left), fractions(node.right))
    return Fraction(node.value)


def oracle(problem, text):
    """What verify should say, from Python's own parser."""
    blocks = re.findall("<answer>(.*?)</answer>", text, re.S)
    numbers, target = given(problem)
    if text.count("<answer>") + text.count("</answer>") != 2 or len(blocks) != 1:
        return 0.0
    if not re.fullmatch("[0-9+*() -]{1,200}", blocks[0]):
        return 0.0
    if Counter(re.findall("[0-9]+", blocks[0])) - Counter(map(str, numbers)):
        return 0.0
    try:
        return float(fractions(ast.parse(blocks[0].strip(), mode="eval").body) == target)
    except (SyntaxError, KeyError, AttributeError):
        return 0.0


# ---- the verifier ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("expression", [
    "4+8+2", "(4+8)+2", "2+(8+4)", "((2+4)+8)", " 4 + 8+2 ", "(((4))+((8))+2)", "( 4+8 ) +2", "2*3+8",
    "8+2*3", "4*3+2", "2+3*4", "2*(3+4)", "(3+4)*2", "2*(8-4+3)", "(8-4)*3+2", "8+3*(4-2)", "8-(2-4)*3",
    "2-(4-8)*3", "4-2*(3-8)", "(8-3)*2+4", "(" * 17 + "4+8+2" + ")" * 17])
def test_an_expression_of_the_given_numbers_that_hits_the_target_is_right(expression):
    assert answered(expression) == 1


@pytest.mark.parametrize("expression", [
    "4+8+3", "8-2*3", "3+4*2", "2+3*4*8", "8-(4-2)-8",                          # another value
    "14", "7*2", "4+8+1+1", "4+4+4+2", "2*2+2+8", "8+8-2", "2+3+4+8-3", "48-34", "(3+4)*2+(8-8)",   # numbers
    "", " ", "()", "4 8 2", "4+8 2", "+4+8+2", "-2+8+8", "4+8+-2", "4+8--2", "4+8+2+", "*4+8+2", "4++8+2",
    "(4+8+2", "4+8+2)", "((4+8)+2", ")4+8+2(", "4+8()+2", "2(3+4)", "(3+4)(2)", "(4+8)2", "4+8+2 4+8+2",
    "8+4/2*3", "8+4//2*3", "2**3+4+8-6", "4+8+2=14", "14=4+8+2", "4+8+2;", "4+8+2#", "4+8+2,", "x+4+8+2",
    "04+8+2", "4.0+8+2", "4_+8+2", "4e0+8+2", "0x4+8+2", "int('4')+8+2", "4+8+2 or 1", "[4+8+2][0]",
    "\uff14+8+2", "\u0664+8+2", "4+8+\u00b2", "2-(4\u22128)*3", "4\u00d73+2", "4+8\u00a0+2", "4+8\t+2",
    "4+\n8+2", "4+8+2\x00", "<think>4+8+2</think>", "(" * 18 + "4+8+2" + ")" * 18], ids=ascii)
def test_anything_else_is_wrong(expression):
    assert answered(expression) == 0


def test_a_number_may_be_used_as_often_as_it_is_given():
    assert answered("5+5+7", TWINS) == answered("(7+5)+5", TWINS) == 1
    assert answered("5+5+5+2", TWINS) == answered("7+7+3", TWINS) == answered("5*5-7-1", TWINS) == 0
    assert answered("5+5+5", TWINS._replace(prompt="5 5 7>15:")) == 0
    assert answered("7+7", TWINS._replace(prompt="5 5 7>14:")) == 0


def test_signs_of_one_rank_bind_from_the_left_and_products_before_sums():
    assert answered("9-3-2", Problem("countdown", "2 3 9>4:", "")) == 1
    assert answered("9-3-2", Problem("countdown", "2 3 9>8:", "")) == 0
    assert answered("9-3+2", Problem("countdown", "2 3 9>8:", "")) == 1
    assert answered("2+3*9", Problem("countdown", "2 3 9>29:", "")) == 1
    assert answered("2+3*9", Problem("countdown", "2 3 9>45:", "")) == 0
    assert answered("2-3-9", Problem("countdown", "2 3 9>10:", "")) == 0        # -10: no sign is dropped


@pytest.mark.parametrize("text, value", [
    ("<answer>4+8+2</answer>", 1), ("<think>3+4=7</think><answer>2*(3+4)</answer>", 1),
    ("<think>(((</think>hm <answer>4+8+2</answer>...", 1), ("\x00\u0663<answer>4+8+2</answer>", 1),
    ("4+8+2", 0), ("<answer>4+8+2", 0), ("4+8+2</answer>", 0), ("</answer>4+8+2<answer>", 0),
    ("<Answer>4+8+2</Answer>", 0), ("<answer >4+8+2</answer>", 0), ("<think>4+8+2</think>", 0),
    ("<answer>4+8+2</answer><answer>4+8+2</answer>", 0), ("<answer>4+8+3</answer><answer>4+8+2</answer>", 0),
    ("<answer>4+8+2</answer><answer>", 0), ("<answer><answer>4+8+2</answer></answer>", 0)], ids=ascii)
def test_one_answer_block_counts(text, value):
    assert verify(PROBLEM, text) == grpo.verify(PROBLEM, text) == value


def random_text(rng, problem):
    """Half of them pieces, the other half expressions of the numbers, of which one character may be off."""
    if rng.random() < 0.5:
        text = "".join(rng.choices(PIECES, k=rng.randrange(14)))
        return f"<answer>{text}</answer>" if rng.random() < 0.8 else text
    numbers, _ = given(problem)
    parts = list(map(str, rng.sample(numbers, rng.randint(2, len(numbers)))))
    while len(parts) > 1:
        at = rng.randrange(len(parts) - 1)
        joined = rng.choice("+-*").join(parts[at:at + 2])
        parts[at:at + 2] = [f"({joined})" if rng.random() < 0.6 else joined]
    text, at = parts[0], rng.randrange(len(parts[0]))
    if rng.random() < 0.4:
        text = text[:at] + rng.choice(PIECES) + text[at + rng.randrange(2):]
    return f"<answer>{text}</answer>"


def test_the_verifier_agrees_with_pythons_parser_on_100_000_random_texts_and_is_fast():
    rng = random.Random(0)
    cases = [(problem, random_text(rng, problem)) for problem in rng.choices(SAMPLED, k=100_000)]
    start = time.process_time()
    verdicts = [verify(*case) for case in cases]
    assert time.process_time() - start < 100                        # 1 ms each
    assert verdicts == [oracle(*case) for case in cases]
    assert 500 < sum(verdicts) < 10_000                             # and not all of them are garbage


@pytest.mark.parametrize("text", [
    "<answer>" + "(" * 190, "(" * 190, "(" * 190 + "4", "(" * 40 + "4" + ")" * 40, "(" * 1_000_000, "-" * 190,
    "4+" * 90 + "4", "4*" * 500_000, "9" * 190, "9" * 1_000_000, "9**9**9**9**9", "9*" * 90, " " * 1_000_000,
    " " * 190 + "4", "()" * 90, "<answer>" * 100_000, "<answer></answer>" * 100_000, "((4+8)+2)" * 100_000,
    "\u0663" * 100_000, "\ud83d" * 100], ids=lambda text: ascii(text[:12]))
def test_no_text_is_slow_or_raises(text):
    start = time.process_time()
    assert answered(text) == verify(PROBLEM, text) == 0
    assert time.process_time() - start < 0.2


def test_nesting_cannot_exhaust_the_stack():
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 150)
    try:
        deep = ["(" * 40, "(" * 200, "(" * 100_000, "(" * 17 + "4+8+2" + ")" * 17]
        verdicts = [answered(text) for text in deep]
    finally:
        sys.setrecursionlimit(before)
    assert verdicts == [0, 0, 0, 1]


# ---- problems -------------------------------------------------------------------------------------------


def test_every_problem_is_solved_by_its_own_answer():
    for problem in SAMPLED:
        assert grpo.verify(problem, f"<answer>{problem.answer}</answer>") == 1
        assert oracle(problem, f"<answer>{problem.answer}</answer>") == 1


def test_problems_have_three_or_four_different_digits_and_a_target_of_two():
    for problem in SAMPLED:
        numbers, target = given(problem)
        assert problem.task == "countdown" and problem.difficulty == len(numbers) in (3, 4)
        assert numbers == sorted(set(numbers)) and set(numbers) <= set(range(1, 10))
        assert 10 <= target <= LIMIT
    assert len({problem.prompt for problem in SAMPLED}) > 600


@pytest.mark.parametrize("numbers, counts", [("3", {3}), ("4", {4}), ("3-4", {3, 4}), ("2-5", {2, 3, 4, 5})])
def test_numbers_are_as_many_as_the_option_says(numbers, counts):
    problems = sample_problems("countdown", 100, 0, numbers=numbers)
    assert {problem.difficulty for problem in problems} == counts
    assert max(len(problem.prompt) for problem in problems) == countdown.width(numbers)


@pytest.mark.parametrize("numbers", ["", "1", "1-3", "4-3", "three", "3-", "3-10", "10", "-3", "3-4-5"])
def test_numbers_that_cannot_be_are_refused(numbers):
    with pytest.raises(ValueError, match="10|number from 2"):
        countdown.width(numbers)


def test_problems_are_a_function_of_the_seed():
    assert sample_problems("countdown", 50, 3) == sample_problems("countdown", 50, 3)
    assert sample_problems("countdown", 50, 3) != sample_problems("countdown", 50, 4)
    assert sample_corpus("countdown", 20, 3, "forum") == sample_corpus("countdown", 20, 3, "forum")


def test_held_out_problems_occur_in_training_in_no_order_of_their_numbers():
    def posed(problems):
        return {(tuple(sorted(numbers)), target) for numbers, target in map(given, problems)}
    held_out = posed(sample_problems("countdown", 400, "evaluation", "test"))
    trained = posed(sample_problems("countdown", 4000, 0))
    for phase in ("textbook", "forum"):
        trained |= posed(problem for problem, _ in sample_corpus("countdown", 2000, 0, phase))
    assert held_out and not held_out & trained


# ---- demonstrations -------------------------------------------------------------------------------------


def thoughts(problem, text):
    """The tries of a demonstration: for each its steps (left, sign, right, total, rest), and what it asks."""
    for line in re.findall("<think>(.*)</think>", text, re.S)[0].split("\n"):
        steps, asked = line.split("?")
        yield [re.fullmatch(r"([0-9]+)([-+*])([0-9])=([0-9]+)(?:,([0-9]+))?", step).groups("")
               for step in steps.split(";")], int(asked)


def test_the_textbook_thinks_and_is_right_and_the_forum_mostly_guesses():
    for phase, right, thinks in (("textbook", (1.0, 1.0), (1.0, 1.0)), ("forum", (0.2, 0.35), (0.15, 0.25))):
        demonstrations = sample_corpus("countdown", 1000, 1, phase)
        assert right[0] <= common.mean([verify(*shown) for shown in demonstrations]) <= right[1]
        assert thinks[0] <= common.mean(["<think>" in text for _, text in demonstrations]) <= thinks[1]
        assert all(verify(*shown) == 1 for shown in demonstrations if "<think>" in shown[1])


def test_a_thought_adds_up_and_ends_with_the_first_try_that_hits():
    lines = []
    for problem, text in sample_corpus("countdown", 1000, 2, "textbook"):
        (numbers, target), totals = given(problem), []
        for steps, asked in thoughts(problem, text):
            left, total = Counter(map(str, numbers)) - Counter([steps[0][0]]), steps[0][0]
            for a, sign, b, result, rest in steps:
                assert a == total and left[b] and eval(a + sign + b) == int(result) <= LIMIT
                left, total = left - Counter([b]), result
                assert rest == "".join(sorted(left.elements()))
            assert not left and asked == target
            totals.append(int(total))
        assert totals.index(target) == len(totals) - 1
        lines.append(len(totals))
    assert set(lines) == set(range(1, TRIES + 1))


def test_the_last_sign_of_a_try_comes_as_near_to_the_target_as_one_can():
    for problem, text in sample_corpus("countdown", 500, 3, "textbook"):
        for steps, target in thoughts(problem, text):
            a, sign, b, result, _ = steps[-1]
            totals = [eval(a + sign + b) for sign in "+-*"]
            assert abs(int(result) - target) == min(abs(t - target) for t in totals if 0 <= t <= LIMIT)
