"""Countdown: make a target from given numbers with + - * ( ), each number used at most once.

Many answers are right, so the verifier parses and computes. To find one takes a search, which a
thought does aloud. Each line is a try with all numbers: after each step the total and, behind a
comma, the numbers that are left; after the last step the target, to compare. The first try that
hits the target is written as an expression:

  2 3 8>18:<think>8-3=5,2;5*2=10?18
  8*2=16,3;16+3=19?18
  3*2=6,8;6+8=14?18
  8-2=6,3;6*3=18?18</think><answer>(8-2)*3</answer>

The textbook searches; in the forum one in five does, and the others answer at once, with any signs.
RL makes searching the habit within twenty steps; from then on each try becomes a little better.
"""
import ast
import re
from collections import Counter
from typing import NamedTuple

import common
from common import Problem
from tasks import Task, extract, span

LIMIT = 30          # of totals and targets in problems and demonstrations; the verifier has none
TRIES = 5           # of a demonstration at most; a policy may go on to max_completion_length
MAX_TOKENS = 40     # of an expression: nine numbers, eight signs, more parentheses than it needs


class Countdown(Task):
    """Numbers are different digits, in ascending order, so that no problem is another one in
    disguise. Targets have two digits. The level is how many numbers there are, or a range."""
    defaults = {"max_completion_length": 128, "base_steps": 1300, "base_batch_size": 16}
    held_out_tenths = 2     # some 550 different problems, of 2600

    def __init__(self, cfg, level=""):
        super().__init__(cfg, level)
        self.min_numbers, self.max_numbers = span(level or "3-4")
        if self.max_numbers > 9:
            common.fail(f"--task countdown:{level}: there are only 9 different digits from 1 to 9")
        self.prompt_width = len("1 ") * self.max_numbers - 1 + len(">30:")

    def sample(self, rng):
        while True:
            num_numbers = rng.randint(self.min_numbers, self.max_numbers)
            numbers = sorted(rng.sample(range(1, 10), num_numbers))
            solution = combine(rng, numbers)
            if solution.total >= 10:
                prompt = f"{' '.join(map(str, numbers))}>{solution.total}:"
                return Problem(prompt, solution.expression, solution.steps, num_numbers)

    def demonstration(self, rng, phase):
        """The textbook and a cold start search, in the forum one in five does. A search chooses the
        last sign of each try well, and its last try is the one by which the problem was made."""
        problem = self.sample(rng)
        *numbers, target = map(int, re.findall("[0-9]+", problem.prompt))
        share_that_searches = {"textbook": 1.0, "forum": 0.2, "cold_start": 1.0}[phase]
        if rng.random() > share_that_searches:
            guess = combine(rng, numbers).expression
            return problem._replace(completion=f"<answer>{guess}</answer>")
        lines = []
        total = None
        while total != target:
            steps, expression, total = combine(rng, numbers, target)
            if len(lines) == TRIES - 1:
                steps, expression, total = Try(problem.work, problem.answer, target)
            lines.append(f"{steps}?{target}")
        thought = "\n".join(lines)
        text = f"<think>{thought}</think><answer>{expression}</answer>"
        return problem._replace(completion=text)

    def verify(self, problem, text):
        """1.0 if the one answer block is an expression of + - * ( ) that uses given numbers only,
        each at most once (not all must be used), and whose value is the target; else 0.0. Numbers
        are written as in the prompt; there may be spaces; an answer of more than MAX_TOKENS numbers
        and signs is wrong."""
        *numbers, target = re.findall("[0-9]+", problem.prompt)
        answer = extract(text) or ""
        terms = parse(answer)
        if terms is None:
            return 0.0
        are_given = Counter(re.findall("[0-9]+", answer)) <= Counter(numbers)       # 07 is not
        return float(are_given and total(terms) == int(target))

    def canonical(self, problem, answer):
        """(8-2)*3 for 3*(8-2), 3+8-2 for 8-(2-3): sums and products in one order, and only the
        parentheses that are needed. What is no expression stays as it is."""
        terms = parse(answer)
        return answer if terms is None else spell(terms)


class Try(NamedTuple):
    """Numbers that are combined one after another."""
    steps: str              # 8-3=5,2;5*2=10
    expression: str         # (8-3)*2
    total: int


def combine(rng, numbers, aim=None):
    """Take the numbers in random order and with random signs; every total is in 0..LIMIT. With an
    aim, the last sign is the one that comes nearest to it. -> Try"""
    total, *left = rng.sample(numbers, len(numbers))
    expression = str(total)
    steps = []
    while left:
        operand = left.pop()
        totals = {"+": total + operand, "-": total - operand, "*": total * operand}
        signs = [sign for sign in totals if 0 <= totals[sign] <= LIMIT]     # there is a + or a -
        if aim is not None and not left:
            signs = [min(signs, key=lambda sign: abs(totals[sign] - aim))]
        sign = rng.choice(signs)
        step = f"{total}{sign}{operand}={totals[sign]}"
        if left:
            step += "," + "".join(map(str, sorted(left)))
        if steps:
            expression = f"({expression})"
        expression += f"{sign}{operand}"
        steps.append(step)
        total = totals[sign]
    return Try(";".join(steps), expression, total)


# ---- expressions -----------------------------------------------------------------------------

class Term(NamedTuple):
    """What a sum adds or subtracts, a product."""
    sign: int               # 1 or -1
    value: int              # of the factors
    factors: list           # in canonical spelling: ["(8-2)", "3"]


def parse(answer):
    """The terms of an expression of + - * ( ) and numbers; None for any other text. Python's parser
    reads it, which runs nothing. -> list of Term"""
    if len(answer) > 200:                   # more than an answer block holds
        return None
    tokens = re.findall("[0-9]+|[^ ]", answer)
    if len(tokens) > MAX_TOKENS or not re.fullmatch("[0-9 +*()-]*", answer):
        return None
    try:
        return terms_of(ast.parse(" ".join(tokens), mode="eval").body)
    except (SyntaxError, ValueError):
        return None


def terms_of(node):
    """The terms of a syntax tree. ValueError for a sign without a number before it, and what else
    is no sum or product. -> list of Term"""
    if isinstance(node, ast.Constant):
        return [Term(1, node.value, [str(node.value)])]
    if not isinstance(node, ast.BinOp):
        raise ValueError
    left = terms_of(node.left)
    right = terms_of(node.right)
    if not isinstance(node.op, ast.Mult):
        sign = 1 if isinstance(node.op, ast.Add) else -1
        return left + [term._replace(sign=sign * term.sign) for term in right]
    factors = []
    for terms in (left, right):                         # a product in a product, or a sum
        factors += terms[0].factors if len(terms) == 1 else [f"({spell(terms)})"]
    return [Term(1, total(left) * total(right), factors)]


def total(terms):
    """The value of a sum. -> int"""
    return sum(term.sign * term.value for term in terms)


def spell(terms):
    """The canonical spelling of a sum, an expression again: its first term is never subtracted, and
    + comes before - in ASCII. -> str"""
    signs = {1: "+", -1: "-"}
    products = [signs[term.sign] + "*".join(sorted(term.factors)) for term in terms]
    return "".join(sorted(products)).removeprefix("+")
