"""The countdown task: the verifier with correct and hostile answers, and the form in which maj@k
counts votes."""
from conftest import load_named

from common import Problem

TASK = load_named("countdown")
PROBLEM = Problem("2 3 4 8>14:", "(4+8)+2", difficulty=4)
TWINS = Problem("5 5 7>17:", "(5+5)+7", difficulty=3)


def answered(expression, problem=PROBLEM):
    """Verify an expression as the answer to a problem. -> verdict"""
    return TASK.verify(problem, f"<answer>{expression}</answer>")


# ---- the verifier ----------------------------------------------------------------------------

RIGHT = [
    "4+8+2", " 4 + 8+2 ", "(((4))+((8))+2)", "2*3+8", "2+3*4", "(3+4)*2", "2*(8-4+3)",
    "(8-4)*3+2", "8+3*(4-2)", "8-(2-4)*3", "(8-3)*2+4", "(" * 17 + "4+8+2" + ")" * 17]
WRONG = [
    # a different value, or numbers that were not given or are used too often
    "4+8+3", "8-2*3", "3+4*2", "14", "7*2", "4+4+4+2", "48-34", "(3+4)*2+(8-8)",
    # not an expression
    "", "()", "4+8 2", "-2+8+8", "4+8--2", "4+8+2+", "*4+8+2", "(4+8+2", "4+8+2)", "4+8()+2",
    "2(3+4)",
    # other operators and notations
    "8+4//2*3", "2**3+4+8-6", "2* *3+8", "4+8+2=14", "x+4+8+2", "04+8+2", "4.0+8+2", "4_+8+2",
    "\u0664+8+2", "4+8\t+2", "4+8+2\x00", "(" * 18 + "4+8+2" + ")" * 18]


def test_only_an_expression_of_the_given_numbers_that_hits_the_target_is_right():
    assert [expression for expression in RIGHT if answered(expression) != 1] == []
    assert [expression for expression in WRONG if answered(expression) != 0] == []
    # a number may be used as often as it is given
    assert answered("5+5+7", TWINS) == answered("(7+5)+5", TWINS) == 1
    assert answered("5+5+5+2", TWINS) == answered("7+7+3", TWINS) == 0
    assert answered("5+5+5", TWINS._replace(prompt="5 5 7>15:")) == 0


ONE_VOTE = [
    ("(8-2)*3", "3*(8-2)", "((8-2))*3", " 3 * (8-2)"), ("8-2+3", "3+8-2", "8-(2-3)", "3-(2-8)"),
    ("8-(2+3)", "8-2-3", "8-3-2"), ("2*3*4", "4*(3*2)"), ("2*3+4*8", "8*4+3*2"),
    ("8-2*(4-(3-1))", "8-(1+4-3)*2"), ("4", "(4)", " 4"), ("12+3", "3+12"), ("4-(2-2)", "4-2+2")]
TWO_VOTES = [
    ("8-2", "2-8"), ("8-2+3", "8-(2+3)"), ("(8-2)*3", "8-2*3"), ("2*3", "2+3"),
    ("2*(3+4)", "2*3+2*4"), ("12+3", "1+23"), ("1*23", "12*3"), ("4", "4*1"), ("07+8", "7+8"),
    ("-2+8", "8-2"), ("8-2", "(8-2"), ("8-2)", "(8-2"), ("8-2", ""), ("3*(8-2)", "3*8-2")]


def test_expressions_are_one_vote_up_to_order_and_superfluous_parentheses():
    for count, groups in ((1, ONE_VOTE), (2, TWO_VOTES)):
        for answers in groups:
            votes = {TASK.canonical(PROBLEM, answer) for answer in answers}
            assert len(votes) == count, ascii(answers)
