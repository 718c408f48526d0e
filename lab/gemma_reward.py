"""What is right in lab/gemma.py: an expression with the given numbers and the given value, such as
5 * 8. pretrained/train.py reads this file, as its --reward_file."""
import re

FORM = re.compile(r"[1-9]\d{0,2}( [-+*] [1-9]\d{0,2})+", re.ASCII)


def reward(completions, answer, **columns):
    """Judge completions. answer: the numbers and the value of each. -> list of floats"""
    rewards = []
    for text, (*numbers, value) in zip(map(str.strip, completions), answer):
        has_form = FORM.fullmatch(text) is not None
        found = sorted(map(int, re.findall("[0-9]+", text))) if has_form else []
        rewards.append(float(found == sorted(numbers) and eval(text) == value))
    return rewards
