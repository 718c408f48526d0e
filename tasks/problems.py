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
import unicodedata
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import common
from tasks import Task, block

# What TeX, Markdown and typesetters write in several ways -> one way. U+2064, the invisible plus,
# joins the parts of a mixed number such as 2 1/2.
FRACTION = r"\\frac *(?:\{ *(-?[0-9]+) *\}|([0-9])) *(?:\{ *([0-9]+) *\}|([0-9]))(?! *[0-9])"
POWER = r"10\^(?:\{(-?[0-9]{1,2})\}|([0-9]))(?![0-9^])"
REWRITES = [(re.compile(pattern), plain) for pattern, plain in (
    (r"\\(?:left|right)\b|\\!|(?<![0-9])\*\*|\*\*(?![0-9])", ""),
    (r"\\[,;: ]|\\q?quad\b|[~\u00a0\u2009\u202f]", " "),
    ("[\u2010-\u2013\u2212]", "-"),
    (r"\{,\}", ","),
    (r"\\([%$])", r"\1"),
    (r"\\[()\[\]]", "$"),
    (r"\^ ?\\circ\b|\^\{ ?\\circ ?\}|\\degree\b", "\u00b0"),
    (r"\\(?:mathrm|mathbf|textbf|textit|mbox)\b", r"\\text"),
    (r"\\[dtc]frac(?![a-z])", r"\\frac"),
    (r"(?<=[0-9]) *(?=\\frac)|(?<=[0-9]) (?=[0-9]{1,2}/[0-9])", "\u2064"),
    (FRACTION, r"\1\2/\3\4"),
    (rf"(?<=[0-9]) *(?:\\times|\\cdot|[\u00d7\u00b7*]) *{POWER}", r"e\1\2"),
    (rf"(?<![0-9.,]){POWER}", r"1e\1\2"),
    (r"(?<! ) *, +(?![0-9]{3}(?![0-9]))", ","))]
HALVES = {letter: re.sub("(.*)\u2044(.*)", r"\\frac{\1}{\2}", unicodedata.normalize("NFKC", letter))
          for letter in map(chr, (0xbc, 0xbd, 0xbe, *range(0x2150, 0x215f)))}

WHOLE = r"(?:[0-9]{1,50}|[0-9]{1,3}(?:,[0-9]{3}){1,16}|[0-9]{1,3}(?: [0-9]{3}){1,16})"
NUMBER = re.compile(
    rf"(-?) ?\$?(?:({WHOLE})\u2064)?"
    rf"({WHOLE}(?:\.[0-9]{{1,50}}|/0{{0,9}}[1-9][0-9]{{0,49}})?|\.[0-9]{{1,50}})"
    r"(?:[eE]([+-]?[0-9]{1,2}))?")
# x = 5 \text{ cm}: 5, and the parts around it. 5 \text{ million} has no unit: it isn't 5.
PARTS = re.compile(
    r"(?:(\\?[A-Za-z]\w{0,20}(?:\([a-z]\))?)? ?= ?)?(.+?) ?"
    r"(%|\u00b0|\\text\{(?! *(?:hundred|thousand|[a-z]{1,9}illion|dozen|or)\b)[A-Za-z. ]{1,30}\}"
    r"(?:\^[0-9])?)?", re.DOTALL)
WRAPPED = (r"\\text\{ {0,9}([^{}]{0,200}?) {0,9}\}", r"\(([A-Z])\)")
# What looks like a number in a text. It includes 1,2 and 3/4/5 and 3\sqrt{2}, which are not
# numbers. That is better than to take a part, such as 2 or 5, for the answer.
ROOT = r"(?:\\sqrt|\u221a) *(?:\{[^{}]{0,50}\}|[0-9]+)"
RAISED = r"(?:\*\*|[\^_])(?:\{[^{}]{0,50}\}|-?[0-9]+)"
LIKE_A_NUMBER = re.compile(
    rf"{ROOT}|[)\]}}]{RAISED}|(?:(?<![0-9])-)?\$?(?:(?<![\w.])\.)?"
    r"(?:(?<![0-9])[0-9]{1,3}(?: [0-9]{3})+(?![0-9])|[0-9]+)(?:[.,/\u2064][0-9]+)*"
    rf"(?:[eE][+-]?[0-9]+)?(?:{RAISED}| ?\\pi\b|\u03c0)?")


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
            first = {}                                  # of the problems that read the same
            for problem in self.train:
                first.setdefault(reading(problem.prompt), problem)
            self.test = [problem for problem in self.train
                         if by_hash(first[reading(problem.prompt)])]
        self.is_judged = any(problem.answer for problem in self.train)
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
        return reading(problem.prompt) in self.test_prompts

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

    def verify(self, problem, text, is_truncated=False):
        """Whether the answer in a text is the right number, or the same text. -> 1.0 or 0.0"""
        given = find_answer(text, is_truncated).strip()
        return float(given == problem.answer != "" or is_same(given, problem.answer))

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


def find_answer(text, is_truncated=False):
    """Find the answer in a text, after its thought: the content of its only answer block. If it has
    no answer tag, its last \\boxed{} counts, or else its last number. If the text is truncated, the
    last number doesn't count, because it may be 6 of 60. -> str, "" if there is none"""
    _, _, text = text.rpartition("</think>")
    if "<think>" in text:
        return ""
    if "<answer>" in text or "</answer>" in text:
        inside = block(text, "answer") or ""
        before, boxed, after = split_box(inside)
        return boxed if boxed and not re.search("[0-9]", before + after) else inside
    if not is_truncated:
        text = re.sub(r"\\boxed +([^\s{}$]+)", r"\\boxed{\1}", text)
    _, boxed, _ = split_box(text)
    if boxed is not None or is_truncated:
        return boxed or ""
    text = re.sub(rf"(?<=[A-Za-z]){RAISED}", "", plain(text))       # the last number of 9 m^2 is 9
    numbers = LIKE_A_NUMBER.findall(text)
    return numbers[-1] if numbers else ""


def split_box(text):
    """Split a text at its last \\boxed{}. -> the texts before, in and after it; the second is None
    if there is no box, and "" if the box does not end"""
    before, boxed, rest = re.sub(r"\\(?:boxed|fbox) *\{", r"\\boxed{", text).rpartition("\\boxed{")
    depth = 1
    for end, letter in enumerate(rest if boxed else ""):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return before, rest[:end], rest[end + 1:]
    return before, "" if boxed else None, rest


def plain(text):
    """Write a text as REWRITES prescribes. -> str"""
    text = text.translate(str.maketrans(HALVES))
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    return text


def is_same(given, answer):
    """Whether two answers are the same number or the same text. A name or a unit may be missing in
    one of them, but if both have one, it must be the same. -> bool"""
    *mine, value = parts(given)
    *right, right_value = parts(split_box(answer)[1] or answer)
    number = to_number(value)
    is_equal = value == right_value != "" or (
        number is not None and number == to_number(right_value))
    return is_equal and all(a == b or "" in (a, b) for a, b in zip(mine, right))


def parts(text):
    """Split an answer such as x = 5 \\text{ cm}. -> name, unit, value; name and unit may be \"\""""
    match = PARTS.fullmatch(plain(text).lstrip(" $\n").rstrip(" $.\n"))
    name, value, unit = match.groups("") if match else ("", "", "")
    for pattern in WRAPPED:
        value = re.sub(rf"\A{pattern}\Z", r"\1", value)
    return name, unit.replace(" ", ""), value


def to_number(text):
    """Read a text as an exact number: $1,200.00 is 1200. -> Fraction, None if it isn't a number"""
    match = NUMBER.fullmatch(text.strip(" $"))
    if not match:
        return None
    sign, whole, rest, exponent = match.groups("0")
    number = Fraction(re.sub("[, ]", "", whole)) + Fraction(re.sub("[, ]", "", rest))
    return (-number if sign == "-" else number) * Fraction(10) ** int(exponent)
