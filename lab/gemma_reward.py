"""What is right in lab/gemma.py: an expression with two given numbers and a given value, such as
5 * 8. pretrained/train.py reads this file, as its --reward_file."""
import re

FORM = re.compile(r"(\d{1,3}) ([-+*]) (\d{1,3})", re.ASCII)


def _is_right(text, answer):
    """Whether a completion is right. answer: the two numbers and the value. -> float"""
    form = FORM.fullmatch(text.strip())
    if form is None:
        return 0.0
    a, sign, b = int(form[1]), form[2], int(form[3])
    found = {"+": a + b, "-": a - b, "*": a * b}[sign]
    *numbers, value = answer
    return float(sorted((a, b)) == sorted(numbers) and found == value)


def correct(completions, answer, **columns):
    return [*map(_is_right, completions, answer)]


def reward(correct, **columns):
    return correct
