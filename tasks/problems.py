"""Problems from a file of records {"prompt": ..., "answer": ...}: --data of pretrained/train.py.

The file holds JSON lines, a JSON array, or Parquet. Answers are numbers or words; if a
--reward_file judges the completions, they may be anything. A prompt is a text or a conversation: a
list of messages {"role": ..., "content": ...}, which is kept as JSON.

The scripts cannot use such a file, because it has no demonstrations to make a base from.
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
# What looks like a number in a text. It includes 1,2 and 3/4/5, which are not numbers. That is
# better than to take the last part, 2 or 5, for the answer.
LIKE_A_NUMBER = r"(?:(?<![0-9])-)?\$?(?:(?<![\w.])\.)?[0-9]+(?:[.,/][0-9]+)*"


class FromFile(Task):
    """The problems of --data, whose answers are numbers or words."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.name = Path(cfg.data).stem
        self.seed = cfg.seed
        self.keeps_lines = cfg.reward_file != ""        # as secrets, for the functions in the file
        self.columns = set()                            # the keys of all lines
        self.places = {}                                # prompt -> its file and line, for messages
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
                common.fail(f"--data {cfg.data}: there are no {split} problems; use a file with "
                            "more lines, or a different --eval_data")

    def read(self, flag_name, path):
        """Read the problems of a file. Exits with one line if a line isn't a problem. -> list"""
        problems = []
        for number, line in enumerate(read_lines(flag_name, path), start=1):
            try:
                if line.strip():
                    record, prompt, answer = parse(line, needs_answer=not self.keeps_lines)
                    self.columns |= record.keys()
                    self.places.setdefault(prompt, f"line {number} of {path}")
                    secret = line if self.keeps_lines else None
                    problems.append(common.Problem(prompt, answer, secret=secret, task=self.name))
            except (ValueError, KeyError, TypeError, RecursionError):
                common.fail(f"--{flag_name} {path}: line {number} is not "
                            f'{{"prompt": "...", "answer": "..."}}: {line[:40]!a}; '
                            "without a --reward_file, the answer must be a text or a number")
        return problems

    def sample(self, rng):
        return rng.choice(self.train if rng.random() < 0.5 else self.test)

    def is_held_out(self, problem):
        return problem.prompt in self.test_prompts

    def passes(self, first, n):
        """Take n training problems, from number `first` of an endless sequence on. -> list"""
        return passes(self.train, first, n, self.seed)

    def leave_out(self, lengths, most):
        """Leave out problems whose prompts have more than `most` tokens, and print how many there
        are. Exits with one line if no problems are left. `lengths` maps each prompt to its number
        of tokens. -> tokens of the longest prompt that is left"""
        too_long = [place for prompt, place in self.places.items() if lengths[prompt] > most]
        if too_long:
            message = (f"{len(too_long)} of {len(self.places)} prompts have more than {most} "
                       f"tokens and are left out, the first in {too_long[0]}")
            self.train, self.test = ([one for one in split if lengths[one.prompt] <= most]
                                     for split in (self.train, self.test))
            if not (self.train and self.test):
                common.fail(f"--max_completion_length: {message}; no problems are left")
            print(message)
        return max(lengths[problem.prompt] for problem in (*self.train, *self.test))

    def verify(self, problem, text):
        """Whether the answer in a text is the right number, or the same text. -> 1.0 or 0.0"""
        given = find_answer(text).strip()
        is_equal = given == problem.answer != ""
        number = to_number(given)
        return float(is_equal or number is not None and number == to_number(problem.answer))


def passes(items, first, n, seed):
    """Take n items of an endless sequence, from number `first` on. The sequence goes through all
    items again and again, each time in a different random order. -> list"""
    taken = []
    for place in range(first, first + n):
        pass_number, i = divmod(place, len(items))
        taken.append(items[shuffled(len(items), seed, pass_number)[i]])
    return taken


@functools.lru_cache(2)
def shuffled(n, *seed):
    """Shuffle the numbers below n. The same arguments give the same order. -> list"""
    return random.Random(repr((seed, "pass"))).sample(range(n), n)


def parse(line, needs_answer=True):
    """Read the record on a line, its prompt and its answer. An answer that isn't needed may be
    missing, and is "" then. Raises ValueError, KeyError, TypeError or RecursionError if the line
    isn't a problem. -> dict, str, str"""
    record = json.loads(line)
    prompt = record["prompt"]
    answer = record["answer"] if needs_answer else record.get("answer", "")
    if isinstance(prompt, list):
        prompt = json.dumps(prompt, ensure_ascii=False)
        if not messages(prompt):
            raise TypeError
    if not needs_answer and type(answer) not in (str, int, float):
        answer = ""                     # the functions of the reward file take it from the line
    if type(prompt) is not str or type(answer) not in (str, int, float):
        raise TypeError
    if type(answer) is float:                                   # 0.00001, not 1e-05
        answer = format(Decimal(str(answer)), "f") if math.isfinite(answer) else ""
    answer = str(answer).strip()
    if not prompt or needs_answer and not answer:
        raise ValueError
    (prompt + answer).encode()                  # raises a ValueError for half a surrogate pair
    return record, prompt, answer


def messages(prompt):
    """Read the messages of a prompt. [] if it isn't a conversation that a model can continue.
    -> list of dicts"""
    try:
        chat = json.loads(prompt) if prompt.startswith("[{") else []
        texts = [message[key] for message in chat for key in ("role", "content")]
        is_valid = all(type(text) is str for text in texts) and chat[-1]["role"] != "assistant"
        return chat if is_valid else []
    except (ValueError, KeyError, TypeError, RecursionError, IndexError):
        return []


def read_lines(flag_name, path):
    """Read a file as a list of JSON texts, one for each record. Exits with one line if the file
    can't be read. -> list of str"""
    try:
        if Path(path).suffix == ".parquet":
            from pyarrow import parquet
            return [json.dumps(row, default=str) for row in parquet.read_table(path).to_pylist()]
        text = Path(path).read_text(encoding="utf-8-sig")
        if text.lstrip().startswith("["):
            return list(map(json.dumps, json.loads(text)))
        return text.split("\n")
    except ImportError:
        common.fail(f"--{flag_name} {path}: needs pyarrow: pip install pyarrow")
    except (OSError, ValueError, RecursionError) as error:      # pyarrow's errors are ValueErrors
        common.fail(f"--{flag_name} {path}: cannot be read ({' '.join(str(error).split())})")


def find_answer(text):
    """Find the answer in a text: the content of its only answer block. If it has no answer tag, its
    last \\boxed{} counts, or else its last number. -> str, "" if there is none"""
    text = text.replace("\u2212", "-")                          # U+2212 is a typeset minus sign
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
    """Read a text as an exact number: $1,200.00 is 1200. -> Fraction, None if it isn't a number"""
    plain = text.lstrip(" $\\").rstrip(" .%$\\")        # TeX writes \$5 for $5, and 18\% for 18%
    is_number = re.fullmatch(NUMBER, plain)
    return Fraction(re.sub("[$,]", "", plain)) if is_number else None
