"""Problems from a file of records {"prompt": ..., "answer": ...}: --data of pretrained/train.py.

The file holds JSON lines, or is in Parquet. Answers are numbers or words; if a
--reward_file judges the completions, they may be anything. A prompt is a text or a conversation: a
list of messages {"role": ..., "content": ...}, which is kept as JSON.

The scripts cannot use such a file, because it has no demonstrations to make a base from.
"""
import functools
import json
import math
import random
import re
import string
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import common
from tasks import Task, block

MOST = 1_000            # characters that a number or a box may have, and of a text's end that count
NUMBER = (r"(-?)(?:\\?\$)?(\.[0-9]+|"
          r"(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.[0-9]+|/0*[1-9][0-9]*)?)")
# What separates words: anything that is not part of a number or formula. 6+1=7 and Answer:5 are two
# words each, but 12:30 and 3\sqrt{2} are one.
BETWEEN = (r"[^!-;?-~\u00b2\u00b3\u00b9\u00bc-\u00be\u03c0\u2070-\u209c\u2150-\u215e\u2212\u221a]+|"
           r"(?<![0-9]):|:(?![0-9])|\\[()\[\]%]")
AFTER = string.ascii_letters + string.punctuation.replace("\\", "")     # 5km. but not 2\pi


class FromFile(Task):
    """The problems of --data, whose answers are numbers or words."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.name = Path(cfg.data).stem
        self.seed = cfg.seed
        self.keeps_lines = cfg.reward_file != ""        # as secrets, for the functions in the file
        self.columns = set()                            # the keys of all lines
        self.train = self.read("data", cfg.data)
        if cfg.eval_data:
            self.test = self.read("eval_data", cfg.eval_data)
        else:
            by_hash = super().is_held_out
            first = {}                                  # of the problems that read the same
            for problem in self.train:
                first.setdefault(reading(problem.prompt), problem)
            self.test = [problem for problem in self.train
                         if by_hash(first[reading(problem.prompt)])]
        self.is_judged = any(problem.answer for problem in self.train)
        num_tex = sum("\\" in problem.answer for problem in self.train)
        if num_tex > 0 and not self.keeps_lines:
            print(f"--data: {num_tex} of {len(self.train)} answers are in TeX, which is compared "
                  "letter by letter; to compare formulas, see math-verify in docs/recipes.md")
        self.test_prompts = {reading(problem.prompt) for problem in self.test}
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
        return reading(problem.prompt) in self.test_prompts

    def passes(self, first, n):
        """Take n training problems, from number `first` of an endless sequence on. -> list"""
        return passes(self.train, first, n, self.seed)

    def verify(self, problem, text, is_truncated=False):
        """Whether the answer in a text is the right number, or the same text. -> 1.0 or 0.0"""
        answer = last_box(problem.answer) or problem.answer
        found = find_answers(text, is_truncated)
        return float(answer != "" and any(is_same(given, answer) for given in found))

    verdict = verify


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
    """Read a prompt's messages. [] if it isn't a conversation to continue. -> list of dicts"""
    try:
        chat = json.loads(prompt) if prompt.startswith("[{") else []
        texts = [message[key] for message in chat for key in ("role", "content")]
        is_valid = all(type(text) is str for text in texts) and chat[-1]["role"] != "assistant"
        return chat if is_valid else []
    except (ValueError, KeyError, TypeError, RecursionError, IndexError):
        return []


def reading(prompt):
    """Find what a model reads: a text is what the user says, and spaces around it do not count.
    -> tuple, which is equal for problems that must not be divided into training and held-out"""
    chat = messages(prompt) or [{"role": "user", "content": prompt}]
    return tuple((message["role"], message["content"].strip()) for message in chat)


def read_lines(flag_name, path):
    """Read a file as a list of JSON texts, one for each record. Exits with one line if the file
    can't be read. -> list of str"""
    try:
        if Path(path).suffix == ".parquet":
            from pyarrow import parquet
            return [json.dumps(row, default=str) for row in parquet.read_table(path).to_pylist()]
        return Path(path).read_text(encoding="utf-8-sig").split("\n")
    except ImportError:
        common.fail(f"--{flag_name} {path}: needs pyarrow: pip install pyarrow")
    except (OSError, ValueError) as error:                      # pyarrow's errors are ValueErrors
        common.fail(f"--{flag_name} {path}: cannot be read ({' '.join(str(error).split())})")


def find_answers(text, is_truncated=False):
    """Find what may be the answer in a text, after its thought: the content of its only answer
    block. If it has no answer tag, its last \\boxed{} counts, or else its last number, or the whole
    text. The last two don't count if the text is truncated, because 6 may be the start of 60.
    -> list of str"""
    _, _, text = text.rpartition("</think>")
    if "<think>" in text:
        return []
    has_tag = "<answer>" in text or "</answer>" in text
    if has_tag:
        text = block(text, "answer") or ""
    if "\\boxed{" in text:
        return [last_box(text).strip()]
    if has_tag:
        return [text.strip()]
    text = text.strip()
    return [] if is_truncated else [last_number(text), text]


def last_box(text):
    """Extract the content of a text's last \\boxed{}. -> str, "" if there is no box, or if it does
    not end after MOST characters"""
    _, boxed, rest = text.rpartition("\\boxed{")
    depth = 1
    for end, letter in enumerate(rest[:MOST] if boxed else ""):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return rest[:end]
    return ""


def last_number(text):
    """Find the last word of a text with a digit, and strip what surrounds its number. 12:30, 3/4/5,
    10 000 and 2\\pi are no numbers, but that is better than to take a part of them, such as 30, for
    the answer. -> str, "" if there is none"""
    near = re.sub(r"(?<=[0-9])[^\S\n](?=[0-9])", "_", text[-MOST:])
    words = re.split(BETWEEN, near)
    if len(text) > MOST:
        words = words[1:]                                       # the first one may have been cut
    words = [word.lstrip("#*$([{|~+\"'`") for word in words]
    numbers = [word for word in words if re.search("[0-9]", word) and not word[0].isalpha()]
    return numbers[-1].rstrip(AFTER) if numbers else ""


def is_same(given, answer):
    """Whether two answers are the same text or the same number. -> bool"""
    number = to_number(answer)
    return given == answer or number is not None and number == to_number(given)


def to_number(text):
    """Read a text as an exact number: $1,200.00 is 1200. -> Fraction, None if it isn't a number"""
    if len(text) > MOST:
        return None
    match = re.fullmatch(NUMBER, text.replace("\u2212", "-").removesuffix(".").strip(" $"))
    return Fraction(match[1] + match[2].replace(",", "")) if match else None
