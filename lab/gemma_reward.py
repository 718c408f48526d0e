"""What is right in lab/gemma.py: an expression with the given numbers and the given value, such as
5 * 8. pretrained/train.py reads this file, as its --reward_file."""
import re

FORM = re.compile(r"[1-9]\d{0,2}( [-+*] [1-9]\d{0,2})+", re.ASCII)


def _is_right(text, answer):
    """Whether a completion is right. answer: the numbers and the value. -> float"""
    text = text.strip()
    if FORM.fullmatch(text) is None:
        return 0.0
    *numbers, value = answer
    found = sorted(map(int, re.findall("[0-9]+", text)))
    return float(found == sorted(numbers) and eval(text) == value)


def correct(completions, answer, **columns):
    return [*map(_is_right, completions, answer)]


def reward(correct, **columns):
    return correct
