"""Countdown: make the target from the given numbers with + - * ( ), each number used at most once.

Many answers are right, so the verifier parses and computes. Finding one takes search, which a thought does
aloud. One line is a try with all numbers: after each step the total and, behind a comma, what is left; after
the last, the target, to compare. The first try that hits is written as an expression:

  2 3 8>18:<think>8-3=5,2;5*2=10?18
  8*2=16,3;16+3=19?18
  3*2=6,8;6+8=14?18
  8-2=6,3;6*3=18?18</think><answer>(8-2)*3</answer>

The textbook searches; in the forum one in five does, and the others blurt out an expression with any signs.
RL makes searching the habit, within twenty steps; from then on it makes each try a little better.
"""
import re

from common import Problem, span
from tasks import extract

FLAGS = {"max_completion_length": 128, "base_steps": 1300, "base_batch_size": 16}
CORPUS = {}                     # the warm start samples as training does
LIMIT = 30                      # of totals and targets in problems and demonstrations; the verifier has none
TRIES = 5                       # of a demonstration at most; a policy may go on until max_completion_length
MAX_TOKENS = 40                 # of an answer: nine numbers, eight signs, and a few parentheses too many


def width(numbers="3-4"):
    """Characters of the longest prompt. ValueError for more numbers than there are digits."""
    if span(numbers, "numbers")[1] > 9:
        raise ValueError(f"--numbers {numbers}: there are only 9 different digits from 1 to 9")
    return 2 * span(numbers)[1] + len(">30:") - 1


def attempt(rng, numbers, aim=None):
    """Take the numbers in random order, with random signs, of which the last comes as near to `aim` as one
    can. Every total is in 0..LIMIT. -> (the steps of a try, the expression, the total)"""
    total, *left = rng.sample(numbers, len(numbers))
    steps, expression = [], str(total)
    while left:
        operand = left.pop()
        totals = {"+": total + operand, "-": total - operand, "*": total * operand}
        signs = [sign for sign in totals if 0 <= totals[sign] <= LIMIT]     # never none: if not -, then +
        if aim is not None and not left:
            signs = [min(signs, key=lambda sign: abs(totals[sign] - aim))]
        sign = rng.choice(signs)
        expression = (f"({expression})" if steps else expression) + f"{sign}{operand}"
        rest = "," * bool(left) + "".join(map(str, sorted(left)))
        steps.append(f"{total}{sign}{operand}={totals[sign]}{rest}")
        total = totals[sign]
    return ";".join(steps), expression, total


def sample(rng, numbers="3-4"):
    """Different digits, ascending, so that no problem is another one in disguise; a target of two digits."""
    while True:
        given = sorted(rng.sample(range(1, 10), rng.randint(*span(numbers))))
        steps, expression, target = attempt(rng, given)
        if target >= 10:
            prompt = f"{' '.join(map(str, given))}>{target}:"
            return Problem("countdown", prompt, expression, steps, len(given))


def corpus(problem, rng, phase):
    """A completion. A thinker tries with a well-chosen last sign; the last try of TRIES is given away."""
    *numbers, target = map(int, re.findall("[0-9]+", problem.prompt))
    if rng.random() > {"textbook": 1.0, "forum": 0.2}[phase]:
        return f"<answer>{attempt(rng, numbers)[1]}</answer>"
    lines, total = [], None
    while total != target:
        steps, expression, total = attempt(rng, numbers, target)
        if len(lines) == TRIES - 1:
            steps, expression, total = problem.work, problem.answer, target
        lines.append(f"{steps}?{target}")
    thought = "\n".join(lines)
    return f"<think>{thought}</think><answer>{expression}</answer>"


def verify(problem, text):
    """1.0 if the one answer block is an expression of + - * ( ) that uses given numbers only, each at most
    once (not all must be used), and whose value, exact in integers, is the target; else 0.0. Numbers are
    written as in the prompt; there may be spaces; more than MAX_TOKENS numbers and signs are no answer."""
    *numbers, target = re.findall("[0-9]+", problem.prompt)
    tokens = re.findall("[0-9]+|[^ ]", extract(text) or "")[::-1]
    try:
        return float(len(tokens) <= MAX_TOKENS and value(tokens, numbers) == int(target) and not tokens)
    except (ValueError, IndexError):                        # no expression, or a number that is not there
        return 0.0


def value(tokens, numbers, level=0):
    """Parse by recursive descent: take an expression off the end of `tokens`, which run backwards, and its
    numbers out of `numbers`. Level 0 is a sum, 1 a product, 2 a number or an expression in parentheses.
    Values are products and sums of given numbers, so they stay small. ValueError, IndexError: malformed."""
    if level == 2 and tokens[-1] != "(":
        numbers.remove(tokens[-1])                          # as text: 07, or a number of a million digits,
        return int(tokens.pop())                            # is none of them, and is never converted
    if level == 2:
        tokens.pop()
        inner = value(tokens, numbers)
        if tokens.pop() != ")":
            raise ValueError("a parenthesis is not closed")
        return inner
    result = value(tokens, numbers, level + 1)
    while tokens and tokens[-1] in ("+-", "*")[level]:
        sign, operand = tokens.pop(), value(tokens, numbers, level + 1)
        result = {"+": result + operand, "-": result - operand, "*": result * operand}[sign]
    return result
