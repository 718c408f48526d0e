"""The countdown task: problems, demonstrations, and the verifier against hostile answers."""
import ast
import inspect
import itertools
import operator
import random
import re
import sys
import time
from collections import Counter
from fractions import Fraction

import pytest
from conftest import takes_less_than

import common
import grpo
from common import Problem
from tasks.countdown import LIMIT, MAX_TOKENS, TRIES, combine, parse, total


def load(**flags):
    """The task countdown with these flags."""
    return common.load_task(grpo.Config(task="countdown", **flags), grpo.verify)


TASK = load()
PROBLEM = Problem("2 3 4 8>14:", "(4+8)+2", difficulty=4)
TWINS = Problem("5 5 7>17:", "(5+5)+7", difficulty=3)
PIECES = [*"0123456789", *"22334488" * 4, *"+-*()" * 6, " ", "/", "**", "//", "%", "=", "14", "07",
          "-1", ".", "\u0663", "\u00b2", "\uff12", "\u2212", "\u00d7", "\t", "\n", "\x00", "1e1",
          "0x4", "2.0", "2_3", "9" * 60, "[4]", "4,8", "lambda:", "abs", "#", "<answer>",
          "</answer>", "<think>", "</think>"]
SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
SAMPLED = list(itertools.chain.from_iterable(
    common.sample_problems(TASK, 250, seed) for seed in range(4)))


def answered(expression, problem=PROBLEM):
    """The verdict on an expression."""
    return TASK.verify(problem, f"<answer>{expression}</answer>")


def given(problem):
    """The numbers of a problem and its target."""
    *numbers, target = map(int, re.findall("[0-9]+", problem.prompt))
    return numbers, target


def exact_value(node):
    """The value of a syntax tree of + - * and integers. KeyError or AttributeError if there is
    more in it."""
    if isinstance(node, ast.BinOp):
        return SIGNS[type(node.op)](exact_value(node.left), exact_value(node.right))
    return Fraction(node.value)


def expected_verdict(problem, text):
    """What verify should return, by Python's own parser."""
    blocks = re.findall("<answer>(.*?)</answer>", text, re.S)
    numbers, target = given(problem)
    if text.count("<answer>") + text.count("</answer>") != 2 or len(blocks) != 1:
        return 0.0
    if not re.fullmatch("[0-9+*() -]{1,200}", blocks[0]):
        return 0.0
    if Counter(re.findall("[0-9]+", blocks[0])) - Counter(map(str, numbers)):
        return 0.0
    try:
        tree = ast.parse(blocks[0].strip(), mode="eval")
        return float(exact_value(tree.body) == target)
    except (SyntaxError, KeyError, AttributeError):
        return 0.0


# ---- the verifier ----------------------------------------------------------------------------


@pytest.mark.parametrize("expression", [
    "4+8+2", "(4+8)+2", "2+(8+4)", "((2+4)+8)", " 4 + 8+2 ", "(((4))+((8))+2)", "( 4+8 ) +2",
    "2*3+8", "8+2*3", "4*3+2", "2+3*4", "2*(3+4)", "(3+4)*2", "2*(8-4+3)", "(8-4)*3+2", "8+3*(4-2)",
    "8-(2-4)*3", "2-(4-8)*3", "4-2*(3-8)", "(8-3)*2+4", "(" * 17 + "4+8+2" + ")" * 17])
def test_an_expression_of_the_given_numbers_that_hits_the_target_is_right(expression):
    assert answered(expression) == 1


@pytest.mark.parametrize("expression", [
    # another value
    "4+8+3", "8-2*3", "3+4*2", "2+3*4*8", "8-(4-2)-8",
    # other numbers, or too many of them
    "14", "7*2", "4+8+1+1", "4+4+4+2", "2*2+2+8", "8+8-2", "2+3+4+8-3", "48-34", "(3+4)*2+(8-8)",
    # no expression
    "", " ", "()", "4 8 2", "4+8 2", "+4+8+2", "-2+8+8", "4+8+-2", "4+8--2", "4+8+2+", "*4+8+2",
    "4++8+2", "(4+8+2", "4+8+2)", "((4+8)+2", ")4+8+2(", "4+8()+2", "2(3+4)", "(3+4)(2)", "(4+8)2",
    "4+8+2 4+8+2",
    # other signs and other notations
    "8+4/2*3", "8+4//2*3", "2**3+4+8-6", "4+8+2=14", "14=4+8+2", "4+8+2;", "4+8+2#", "4+8+2,",
    "x+4+8+2", "04+8+2", "4.0+8+2", "4_+8+2", "4e0+8+2", "0x4+8+2", "int('4')+8+2", "4+8+2 or 1",
    "[4+8+2][0]", "\uff14+8+2", "\u0664+8+2", "4+8+\u00b2", "2-(4\u22128)*3", "4\u00d73+2",
    "4+8\u00a0+2", "4+8\t+2", "4+\n8+2", "4+8+2\x00", "<think>4+8+2</think>",
    "(" * 18 + "4+8+2" + ")" * 18], ids=ascii)
def test_anything_else_is_wrong(expression):
    assert answered(expression) == 0


def test_a_number_may_be_used_as_often_as_it_is_given():
    assert answered("5+5+7", TWINS) == answered("(7+5)+5", TWINS) == 1
    assert answered("5+5+5+2", TWINS) == answered("7+7+3", TWINS) == 0
    assert answered("5*5-7-1", TWINS) == 0
    assert answered("5+5+5", TWINS._replace(prompt="5 5 7>15:")) == 0
    assert answered("7+7", TWINS._replace(prompt="5 5 7>14:")) == 0


@pytest.mark.parametrize("expression, target, verdict", [
    ("9-3-2", 4, 1), ("9-3-2", 8, 0), ("9-3+2", 8, 1), ("2+3*9", 29, 1), ("2+3*9", 45, 0),
    ("9-(3-2)", 8, 1), ("9-(3-2)", 4, 0), ("9+(3-2)", 10, 1),
    ("2-3-9", 10, 0)])                                          # -10: no sign is dropped
def test_signs_of_one_rank_bind_from_the_left_and_products_before_sums(expression, target, verdict):
    assert answered(expression, Problem(f"2 3 9>{target}:", "")) == verdict


@pytest.mark.parametrize("text, verdict", [
    ("<answer>4+8+2</answer>", 1), ("<think>3+4=7</think><answer>2*(3+4)</answer>", 1),
    ("<think>(((</think>hm <answer>4+8+2</answer>...", 1),
    ("\x00\u0663<answer>4+8+2</answer>", 1),
    ("4+8+2", 0), ("<answer>4+8+2", 0), ("4+8+2</answer>", 0), ("</answer>4+8+2<answer>", 0),
    ("<Answer>4+8+2</Answer>", 0), ("<answer >4+8+2</answer>", 0), ("<think>4+8+2</think>", 0),
    ("<answer>4+8+2</answer><answer>4+8+2</answer>", 0),
    ("<answer>4+8+3</answer><answer>4+8+2</answer>", 0),
    ("<answer>4+8+2</answer><answer>", 0), ("<answer><answer>4+8+2</answer></answer>", 0)],
    ids=ascii)
def test_one_answer_block_counts(text, verdict):
    assert TASK.verify(PROBLEM, text) == verdict


def random_expression(rng, numbers):
    """An expression of some of the numbers. -> str"""
    parts = list(map(str, rng.sample(numbers, rng.randint(2, len(numbers)))))
    while len(parts) > 1:
        i = rng.randrange(len(parts) - 1)
        joined = rng.choice("+-*").join(parts[i:i + 2])
        parts[i:i + 2] = [f"({joined})" if rng.random() < 0.6 else joined]
    return parts[0]


def random_text(rng, problem):
    """Half of them pieces, the other half expressions of the numbers, of which one character may
    be another one."""
    if rng.random() < 0.5:
        text = "".join(rng.choices(PIECES, k=rng.randrange(14)))
        return f"<answer>{text}</answer>" if rng.random() < 0.8 else text
    numbers, _ = given(problem)
    text = random_expression(rng, numbers)
    if rng.random() < 0.4:
        i = rng.randrange(len(text))
        text = text[:i] + rng.choice(PIECES) + text[i + rng.randrange(2):]
    return f"<answer>{text}</answer>"


def test_the_verifier_agrees_with_pythons_parser_on_20_000_random_texts_and_is_fast():
    rng = random.Random(0)
    cases = [(problem, random_text(rng, problem)) for problem in rng.choices(SAMPLED, k=20_000)]
    start = time.process_time()
    verdicts = [TASK.verify(*case) for case in cases]
    assert time.process_time() - start < 20                     # 1 ms each
    assert verdicts == [expected_verdict(*case) for case in cases]
    assert 100 < sum(verdicts) < 2_000                          # and not all of them are garbage


@pytest.mark.parametrize("text", [
    "<answer>" + "(" * 190, "(" * 190, "(" * 190 + "4", "(" * 40 + "4" + ")" * 40, "(" * 1_000_000,
    "-" * 190, "4+" * 90 + "4", "4*" * 500_000, "9" * 190, "9" * 1_000_000, "9**9**9**9**9",
    "9*" * 90, " " * 1_000_000, " " * 190 + "4", "()" * 90, "<answer>" * 100_000,
    "<answer></answer>" * 100_000, "((4+8)+2)" * 100_000, "\u0663" * 100_000, "\ud83d" * 100],
    ids=lambda text: ascii(text[:12]))
def test_no_text_is_slow_or_raises(text):
    assert answered(text) == TASK.verify(PROBLEM, text) == 0
    assert takes_less_than(0.2, answered, text)
    assert takes_less_than(0.2, TASK.verify, PROBLEM, text)


def test_nesting_cannot_exhaust_the_stack():
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 150)
    try:
        texts = ["(" * 40, "(" * 200, "(" * 100_000, "(" * 17 + "4+8+2" + ")" * 17]
        verdicts = [answered(text) for text in texts]
    finally:
        sys.setrecursionlimit(before)
    assert verdicts == [0, 0, 0, 1]


# ---- the canonical form ----------------------------------------------------------------------


def canonical(answer):
    """The form of an answer in which maj@k counts it."""
    return TASK.canonical(PROBLEM, answer)


@pytest.mark.parametrize("answers", [
    ("(8-2)*3", "3*(8-2)", "((8-2))*3", "(3)*(8-2)", " 3 * (8-2)"),
    ("8-2+3", "3+8-2", "8+3-2", "8-(2-3)", "(8-2)+3", "3-(2-8)", "3-2+8"),
    ("8-2", "(8-2)", "8-(2)", "8 - 2"), ("8-(2+3)", "8-2-3", "8-3-2", "(8-3)-2"),
    ("2*3*4", "4*(3*2)", "(2*4)*3", "((2)*((4*3)))"), ("2*3+4*8", "8*4+3*2", "(4*8)+2*3"),
    ("8-2*(4-(3-1))", "8-(1+4-3)*2"), ("8-(2-(4-3))", "8+4-2-3"), ("4", "(4)", " 4"),
    ("12+3", "3+12"), ("4-(2-2)", "4-2+2")])
def test_expressions_are_one_vote_up_to_order_and_superfluous_parentheses(answers):
    assert len({canonical(answer) for answer in answers}) == 1


@pytest.mark.parametrize("answers", [
    ("8-2", "2-8"), ("8-2+3", "8-(2+3)"), ("(8-2)*3", "8-2*3"), ("2*3", "2+3"), ("8-2-3", "8-2+3"),
    ("2*(3+4)", "2*3+4"), ("2*(3+4)", "2*3+2*4"), ("3*(8-2)", "3*(2-8)"), ("12+3", "1+23"),
    ("1*23", "12*3"), ("4*4", "4+4"), ("4", "4*1"), ("4-3", "4-3+0"), ("07+8", "7+8"),
    ("8-2", "+8-2"), ("3+8-2", "3+8-2="), ("-2+8", "8-2"), ("8+3", "8 + 3,"), ("8-2", "8-\uff12"),
    ("8-2", "8 -2\t"), ("8-2", "(8-2"), ("8-2", ""), ("8*2", "8(2)"), ("8-2", "8--2")], ids=ascii)
def test_different_answers_are_different_votes(answers):
    assert len(set(map(canonical, answers))) == 2


def test_what_is_no_expression_is_its_own_canonical_form():
    for text in ("", " ", "8-", "-2+8", "8/2", "2**3", "eight", "8 2", "(" * 500, "\uff18+2",
                 "8-2" * 30, "(" * 20 + "4" + ")" * 20, "9" * 5000, "\ud83d"):
        assert canonical(text) == text


def shuffled(node, rng):
    """The expression of a syntax tree, with the sides of + and * in any order, and parentheses that
    are not all needed. -> str"""
    if isinstance(node, ast.Constant):
        return rng.choice([str(node.value), f"({node.value})"])
    sign = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}[type(node.op)]
    left = f"({shuffled(node.left, rng)})"
    right = f"({shuffled(node.right, rng)})"
    if sign != "-" and rng.random() < 0.5:
        left, right = right, left
    return left + sign + right


def test_of_random_expressions_those_that_are_one_vote_have_one_value_for_any_numbers():
    """And each is one vote with itself in another order."""
    rng = random.Random(0)
    values = {number: rng.getrandbits(40) for number in range(1, 10)}
    votes = {}
    for _ in range(10_000):
        expression = random_expression(rng, [1, 2, 3, 4])
        form = canonical(expression)
        assert canonical(form) == form
        again = shuffled(ast.parse(expression, mode="eval").body, rng)
        assert canonical(again) == form or len(re.findall("[0-9]|[^ ]", again)) > MAX_TOKENS
        for_any_numbers = re.sub("[0-9]", lambda found: str(values[int(found[0])]), expression)
        assert votes.setdefault(form, eval(for_any_numbers)) == eval(for_any_numbers)
        assert total(parse(form)) == eval(expression)
    assert 300 < len(votes) < 5000


def test_a_canonical_form_of_any_text_is_found_in_no_time_and_is_its_own():
    rng = random.Random(1)
    texts = ["".join(rng.choices(PIECES, k=rng.randrange(14))) for _ in range(20_000)]
    texts += ["(" * 1_000_000, "4*" * 500_000, "9" * 1_000_000, "9*" * 19 + "9", "\u0663" * 100_000,
              "9" * 4000 + ("*" + "9" * 4000) * 19, "(" * 10 + "4" + ")-(4-3)" * 5, "4\n+8"]
    for text in texts:
        assert takes_less_than(0.2, canonical, text)
        form = canonical(text)
        assert canonical(form) == form and (form == text or parse(text) is not None)


# ---- problems --------------------------------------------------------------------------------


def test_every_problem_is_solved_by_its_own_answer():
    for problem in SAMPLED:
        text = f"<answer>{problem.answer}</answer>"
        assert TASK.verify(problem, text) == expected_verdict(problem, text) == 1


def test_problems_have_three_or_four_different_digits_and_a_target_of_two():
    for problem in SAMPLED:
        numbers, target = given(problem)
        assert problem.task == "countdown" and problem.difficulty == len(numbers) in (3, 4)
        assert numbers == sorted(set(numbers)) and set(numbers) <= set(range(1, 10))
        assert 10 <= target <= LIMIT
    assert len({problem.prompt for problem in SAMPLED}) > 600


@pytest.mark.parametrize("numbers, counts", [
    ("3", {3}), ("4", {4}), ("3-4", {3, 4}), ("2-5", {2, 3, 4, 5})])
def test_numbers_are_as_many_as_the_flag_says(numbers, counts):
    task = load(numbers=numbers)
    problems = common.sample_problems(task, 100, 0)
    assert {problem.difficulty for problem in problems} == counts
    assert max(len(problem.prompt) for problem in problems) == task.prompt_width


@pytest.mark.parametrize("numbers", [
    "", "1", "1-3", "4-3", "three", "3-", "3-10", "10", "-3", "3-4-5"])
def test_numbers_that_cannot_be_are_refused(numbers, capsys):
    with pytest.raises(SystemExit) as stopped:
        load(numbers=numbers)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.startswith(f"error: --numbers {numbers}: ")
    assert ("9 different digits" if "10" in numbers else "number from 2") in error


def test_problems_are_a_function_of_the_seed():
    assert common.sample_problems(TASK, 50, 3) == common.sample_problems(TASK, 50, 3)
    assert common.sample_problems(TASK, 50, 3) != common.sample_problems(TASK, 50, 4)
    shown = common.sample_demonstrations(TASK, 20, 3, "forum")
    assert shown == common.sample_demonstrations(TASK, 20, 3, "forum")


def test_held_out_problems_occur_in_training_in_no_order_of_their_numbers():
    def posed(problems):
        return {(tuple(sorted(numbers)), target) for numbers, target in map(given, problems)}
    held_out = posed(common.held_out_problems(TASK, 512))
    trained = posed(common.sample_problems(TASK, 4000, 0))
    for phase in ("textbook", "forum"):
        shown = common.sample_demonstrations(TASK, 2000, 0, phase)
        trained |= posed(problem for problem, _ in shown)
    assert len(held_out) == 512 and not held_out & trained


# ---- demonstrations --------------------------------------------------------------------------


def tries(text):
    """The tries of a demonstration: for each its steps (left, sign, right, total, what is left),
    and the target that is written behind it."""
    thought = re.search("<think>(.*)</think>", text, re.S)[1]
    for line in thought.split("\n"):
        steps, target = line.split("?")
        found = []
        for step in steps.split(";"):
            parts = re.fullmatch(r"([0-9]+)([-+*])([0-9])=([0-9]+)(?:,([0-9]+))?", step)
            found.append(parts.groups(""))
        yield found, int(target)


@pytest.mark.parametrize("phase, right, thinks", [
    ("textbook", (1.0, 1.0), (1.0, 1.0)), ("cold_start", (1.0, 1.0), (1.0, 1.0)),
    ("forum", (0.2, 0.35), (0.15, 0.25))])
def test_the_textbook_thinks_and_is_right_and_the_forum_mostly_guesses(phase, right, thinks):
    shown = common.sample_demonstrations(TASK, 1000, 1, phase)
    verdicts = [TASK.verify(problem, text) for problem, text in shown]
    does_think = ["<think>" in text for _, text in shown]
    assert right[0] <= common.mean(verdicts) <= right[1]
    assert thinks[0] <= common.mean(does_think) <= thinks[1]
    assert all(verdict == 1 for verdict, thinks in zip(verdicts, does_think) if thinks)


def test_a_thought_adds_up_and_ends_with_the_first_try_that_hits():
    num_lines = []
    for problem, text in common.sample_demonstrations(TASK, 1000, 2, "textbook"):
        numbers, target = given(problem)
        totals = []
        for steps, compared in tries(text):
            total = steps[0][0]
            left = Counter(map(str, numbers)) - Counter([total])
            for a, sign, b, result, rest in steps:
                assert a == total and left[b] and eval(a + sign + b) == int(result) <= LIMIT
                left = left - Counter([b])
                total = result
                assert rest == "".join(sorted(left.elements()))
            assert not left and compared == target
            totals.append(int(total))
        assert totals.index(target) == len(totals) - 1
        num_lines.append(len(totals))
    assert set(num_lines) == set(range(1, TRIES + 1))


def test_the_last_sign_of_a_try_comes_as_near_to_the_target_as_one_can():
    for _, text in common.sample_demonstrations(TASK, 500, 3, "textbook"):
        for steps, target in tries(text):
            a, sign, b, result, _ = steps[-1]
            totals = [eval(a + other + b) for other in "+-*"]
            distances = [abs(total - target) for total in totals if 0 <= total <= LIMIT]
            assert abs(int(result) - target) == min(distances)


def test_a_try_says_how_its_total_is_reached():
    rng = random.Random(0)
    for numbers in ([2, 3], [1, 5, 9], [2, 3, 4, 8]):
        for _ in range(200):
            steps, expression, total = combine(rng, numbers)
            assert eval(expression) == total and 0 <= total <= LIMIT
            assert steps.split("=")[-1] == str(total) and steps.count(";") == len(numbers) - 2
            assert sorted(re.findall("[0-9]+", expression)) == list(map(str, numbers))
