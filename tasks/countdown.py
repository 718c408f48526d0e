"""Countdown: make a target from given numbers with + - * ( ), each number used at most once.

Many answers are right, so the verifier parses an answer and computes its value. It takes a search
to find one, and a thought searches aloud. Each line is a try with all numbers. Each step ends with
the total and, after a comma, the numbers that are left; the last step ends with the target, to
compare. The first try that hits the target is written as an expression:

  2 3 8>18:<think>8-3=5,2;5*2=10?18
  8*2=16,3;16+3=19?18
  3*2=6,8;6+8=14?18
  8-2=6,3;6*3=18?18</think><answer>(8-2)*3</answer>

The textbook searches. In the forum only one in five searches; the others answer at once, with
random signs. RL makes searching a habit within twenty steps, and then improves each try a little.
"""
import ast
import re
from collections import Counter
from typing import NamedTuple

import common
from common import Problem
from tasks import Task, extract, span

LIMIT = 30          # bounds totals and targets of problems and demonstrations, not of answers
TRIES = 5           # most tries of a demonstration; a policy may try more often
MAX_TOKENS = 40     # of an expression: enough for nine numbers, eight signs, and parentheses


class Countdown(Task):
    """The numbers are different digits in ascending order, so that no two problems are equal in
    disguise. Targets have two digits. The level is the number of numbers, or a range."""
    defaults = {"max_completion_length": 128, "base_steps": 1300, "base_batch_size": 16}
    held_out_tenths = 2     # about 550 of the 2600 different problems

    def __init__(self, cfg, level=""):
        super().__init__(cfg, level)
        self.min_numbers, self.max_numbers = span("countdown", level or "3-4")
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
        """Draw a problem with a completion: a search in the textbook and a cold start, and in one
        forum post in five. A search chooses the last sign of each try well, and its last try is the
        solution from which the problem was made."""
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
        """Return 1.0 if the only answer block is an expression of + - * ( ) whose value is the
        target and which uses given numbers only, each at most once; else 0.0. Numbers are written
        as in the prompt, and spaces are allowed. An answer of more than MAX_TOKENS numbers and
        signs is wrong."""
        *numbers, target = re.findall("[0-9]+", problem.prompt)
        answer = extract(text) or ""
        terms = parse(answer)
        if terms is None:
            return 0.0
        are_given = Counter(re.findall("[0-9]+", answer)) <= Counter(numbers)       # 07 is not 7
        return float(are_given and total(terms) == int(target))

    def canonical(self, problem, answer):
        """Rewrite an expression with sums and products in one order, and only necessary
        parentheses: 3*(8-2) as (8-2)*3, 8-(2-3) as 3+8-2. Other texts are returned unchanged."""
        terms = parse(answer)
        return answer if terms is None else spell(terms)


class Try(NamedTuple):
    """Numbers that are combined one after another."""
    steps: str              # 8-3=5,2;5*2=10
    expression: str         # (8-3)*2
    total: int


def combine(rng, numbers, aim=None):
    """Combine the numbers in random order and with random signs; every total is in 0..LIMIT. If an
    aim is given, the last sign is the one that comes closest to it. -> Try"""
    total, *left = rng.sample(numbers, len(numbers))
    expression = str(total)
    steps = []
    while left:
        operand = left.pop()
        totals = {"+": total + operand, "-": total - operand, "*": total * operand}
        signs = [sign for sign in totals if 0 <= totals[sign] <= LIMIT]     # at least + or -
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
    """A product that a sum adds or subtracts."""
    sign: int               # 1 or -1
    value: int              # product of the factors
    factors: list           # their canonical spelling: ["(8-2)", "3"]


def parse(answer):
    """Parse an expression of + - * ( ) and numbers. Python's parser reads it, but nothing is run.
    -> list of Term, or None for any other text"""
    tokens = re.findall("[0-9]+|[^ ]", answer)
    if len(tokens) > MAX_TOKENS or not re.fullmatch("[0-9 +*()-]*", answer):
        return None
    try:
        return terms_of(ast.parse(" ".join(tokens), mode="eval").body)
    except (SyntaxError, ValueError):
        return None


def terms_of(node):
    """List the terms of a syntax tree. Raises ValueError for anything but a sum or product, such
    as a sign without a number before it. -> list of Term"""
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
    for terms in (left, right):                         # flatten a product, put a sum in ( )
        factors += terms[0].factors if len(terms) == 1 else [f"({spell(terms)})"]
    return [Term(1, total(left) * total(right), factors)]


def total(terms):
    """Compute the value of a sum. -> int"""
    return sum(term.sign * term.value for term in terms)


def spell(terms):
    """Spell a sum canonically. This is an expression again, because its first term is never
    subtracted, and + comes before - in ASCII. -> str"""
    signs = {1: "+", -1: "-"}
    products = [signs[term.sign] + "*".join(sorted(term.factors)) for term in terms]
    return "".join(sorted(products)).removeprefix("+")
