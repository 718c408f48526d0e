"""Problems from a file of JSON lines, {"prompt": ..., "answer": ...}, whose answers are numbers or
words: what --data of pretrained/train.py names.

The scripts have no use for it, since a file has no demonstrations from which a base could be made.
"""
import functools
import json
import math
import random
import re
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import common
from tasks import Task, block

WHOLE = r"(?:[0-9]{1,50}|[0-9]{1,3}(?:,[0-9]{3}){1,16})"
NUMBER = rf"-?\$?(?:{WHOLE}(?:\.[0-9]{{1,50}}|/0{{0,9}}[1-9][0-9]{{0,49}})?|\.[0-9]{{1,50}})"
# in a text; some are none, as 1,2 and 3/4/5, which is better than to take the last part for one
LIKE_A_NUMBER = r"(?:(?<![0-9])-)?\$?(?:(?<![\w.])\.)?[0-9]+(?:[.,/][0-9]+)*"


class FromFile(Task):
    """Problems of --data, whose answers are numbers or words."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.name = Path(cfg.data).stem
        self.seed = cfg.seed
        self.keeps_lines = cfg.reward_file != ""        # whole, as secrets; answers may be missing
        self.train = self.read("data", cfg.data)
        if cfg.eval_data:
            self.test = self.read("eval_data", cfg.eval_data)
        else:
            by_hash = super().is_held_out
            self.test = [problem for problem in self.train if by_hash(problem)]
        self.is_judged = any(problem.answer for problem in self.train)
        self.test_prompts = {problem.prompt for problem in self.test}
        self.train = [problem for problem in self.train if not self.is_held_out(problem)]
        for split, problems in (("held-out", self.test), ("training", self.train)):
            if not problems:
                common.fail(f"--data {cfg.data}: there are no {split} problems; name more lines, "
                            "or another --eval_data")

    def read(self, flag_name, path):
        """The problems of a file. Exits with one line at a line that is none. -> list"""
        try:
            lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            common.fail(f"--{flag_name} {path}: cannot be read ({error})")
        problems = []
        for number, line in enumerate(lines, start=1):
            try:
                if line.strip():
                    prompt, answer = parse(line, needs_answer=not self.keeps_lines)
                    secret = line if self.keeps_lines else None
                    problems.append(common.Problem(prompt, answer, secret=secret, task=self.name))
            except (ValueError, KeyError, TypeError, RecursionError):
                common.fail(f"--{flag_name} {path}: line {number} is not "
                            f'{{"prompt": "...", "answer": "..."}}: {line[:40]!a}')
        return problems

    def sample(self, rng):
        return rng.choice(self.train if rng.random() < 0.5 else self.test)

    def is_held_out(self, problem):
        return problem.prompt in self.test_prompts

    def passes(self, first, n):
        """n training problems from the first-th on. -> list"""
        return passes(self.train, first, n, self.seed)

    def in_parts(self, size=1000):
        """All problems, so many at a time. -> list of lists"""
        problems = self.train + self.test
        return [problems[start:start + size] for start in range(0, len(problems), size)]

    def verify(self, problem, text):
        """Whether the answer in a text is the right number, or to the letter. -> 1.0 or 0.0"""
        given = find_answer(text).strip()
        is_equal = given == problem.answer != ""
        number = to_number(given)
        return float(is_equal or number is not None and number == to_number(problem.answer))


def passes(items, first, n, seed):
    """n items from the first-th on; each pass over them has an order of its own. -> list"""
    found = []
    for place in range(first, first + n):
        number, i = divmod(place, len(items))
        found.append(items[shuffled(len(items), seed, number)[i]])
    return found


@functools.lru_cache(2)
def shuffled(n, *seed):
    """The numbers below n in random order, a function of the arguments. -> list"""
    return random.Random(repr((seed, "pass"))).sample(range(n), n)


def parse(line, needs_answer=True):
    """The prompt and the answer of a line, "" where it needs none. ValueError, KeyError, TypeError
    or RecursionError if it has none. -> str, str"""
    record = json.loads(line)
    prompt = record["prompt"]
    answer = record["answer"] if needs_answer else record.get("answer", "")
    if type(prompt) is not str or type(answer) not in (str, int, float):
        raise TypeError
    if type(answer) is float:
        answer = format(Decimal(str(answer)), "f") if math.isfinite(answer) else ""
    answer = str(answer).strip()                                # 0.00001, not 1e-05
    if not prompt or needs_answer and not answer:
        raise ValueError
    (prompt + answer).encode()                                  # half a surrogate pair is no text
    return prompt, answer


def find_answer(text):
    """What stands in the one answer block of a text; without a tag of it, in its last \\boxed{};
    without one, its last number. -> str, "" if there is none"""
    text = text.replace("\u2212", "-")                          # the minus of typesetters
    if "<answer>" in text or "</answer>" in text:
        return block(text, "answer") or ""
    _, boxed, rest = text.rpartition("\\boxed{")
    if boxed:
        depth = 1
        for end, letter in enumerate(rest):
            depth += (letter == "{") - (letter == "}")
            if depth == 0:
                return rest[:end]
        return ""
    numbers = re.findall(LIKE_A_NUMBER, text)
    return numbers[-1] if numbers else ""


def to_number(text):
    """The number that a text is, exactly: 1200 for $1,200.00. -> Fraction, None if it is none"""
    plain = text.lstrip(" $\\").rstrip(" .%$\\")                # in TeX, $5 is \$5, and 18% is 18\%
    is_number = re.fullmatch(NUMBER, plain)
    return Fraction(re.sub("[$,]", "", plain)) if is_number else None
