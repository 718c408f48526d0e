"""A script as what its page shows: the lesson's text, the equations and their lines, and the values
that the lines take on the worked example."""
import ast
import dataclasses
import re
from pathlib import Path

import torch

import common
from tools.read import example, paper, watch

ROOT = Path(__file__).resolve().parents[2]
# Functions in whose values the tokens are marked at which the clip of the policy acts.
CLIPPED = ("log_ratio", "policy_loss", "is_clipped", "aggregate", "backward")


@dataclasses.dataclass
class Note:
    """What a statement assigned, name -> watch.Value, and the first of its lines. `origin` is
    "with" and the flags, if not by default, or "called by" and who, if by another than the values
    around it."""
    values: dict
    first: int
    origin: str = ""


class Lesson:
    """The part of a script above the machinery, as it is when the example runs.

    sections: titles, first and last lines; blocks: of the docstring; equations: number -> text;
    where: number -> lines with that tag; functions: list of watch.Function; notes: the last line of
    a statement -> Note; idle: lines that do not run by default; silent: names of functions that
    never run, as they need a network or an optimizer; clipped: bool (4, 3), or None.
    """

    def __init__(self, name):
        self.name = name
        self.source = (ROOT / f"{name}.py").read_text()
        self.lines = self.source.split("\n")
        text = self.source.partition(common.MACHINERY)[0]
        self.sections = sections(text)
        self.blocks = paper.blocks(ast.get_docstring(ast.parse(text), clean=False))
        self.equations = {block.number: block.text for block in self.blocks if block.number}
        self.where = {}
        for line, numbers in tags(text).items():
            for number in numbers:
                self.where.setdefault(number, []).append(line)
        self.check_equations()
        self.functions = watch.functions(text)
        self.notes = {}
        self.run_example()

    def check_equations(self):
        """ValueError unless each equation has one line, and each tag an equation."""
        for number in self.equations.keys() | self.where.keys():
            lines = self.where.get(number, [])
            if number not in self.equations:
                raise ValueError(f"{self.name}.py, line {lines[0]}: the docstring has no equation "
                                 f"({number})")
            if len(lines) != 1:
                raise ValueError(f"{self.name}.py: eq. ({number}) is on {len(lines)} lines, "
                                 "instead of on one")

    def run_example(self):
        """By default, then with each of the flags that let other lines run."""
        by_default = example.run(self.name, "", self.functions)
        self.ran = {call.function.name: set() for call in by_default}
        for call in by_default:
            self.ran[call.function.name] |= call.ran
        self.take_notes(by_default, "")
        self.clipped = returned(by_default, "is_clipped")

        reached = set(self.ran)
        for flags in example.variants(self.name)[1:]:
            calls = example.run(self.name, flags, self.functions)
            reached |= {call.function.name for call in calls}
            self.take_notes(calls, flags)
        self.silent = []
        self.idle = set()
        for function in self.functions:
            if function.name in reached:
                self.idle |= set(self.unreached(function))
            else:
                self.silent.append(function.name)

    def take_notes(self, calls, flags):
        """Keep values for statements that have none; with flags, only for those that do not run
        without. A function may be called several times. Its values come from one call, so that they
        fit each other: from the one that runs most statements, else that by the example itself or
        by backward. Other calls have the rest, and say so."""
        seen = set()
        for call in sorted(calls, key=rank):
            name = call.function.name
            origin = f"with {flags}" if flags else ""
            if name in seen and not flags:
                origin = f"called by {call.caller}"
            seen.add(name)
            for line, values in call.values.items():
                first = call.function.statements[line].lineno
                is_new = first not in self.ran.get(name, ())
                if line not in self.notes and (is_new or not flags):
                    self.notes[line] = Note(values, first, origin)

    def unreached(self, function):
        """The lines of a function that do not run by default. -> list"""
        ran = self.ran.get(function.name, set())
        bodies = function.body_lines()
        lines = []
        for line, statement in function.statements.items():
            if statement.lineno in bodies - ran:
                lines.append(line)
                if self.lines[line - 2].strip() == "else:":
                    lines.append(line - 1)
        return lines

    def clipped_on(self, line):
        """Which tokens to mark in the values of a line. -> bool (4, 3), or None"""
        is_marked = any(line in function.statements for function in self.functions
                        if function.name in CLIPPED)
        return self.clipped if is_marked and not self.notes[line].origin else None

    def numbers_of(self, line):
        """The equations that a line computes. -> list"""
        return [number for number, lines in self.where.items() if line in lines]


def sections(text):
    """Titles, first and last lines of the sections of a lesson. -> list"""
    lines = text.rstrip().split("\n")
    heads = {}
    for number, line in enumerate(lines, start=1):
        head = re.fullmatch(r"# ---- (\d+\. .*?) -+", line)
        if head:
            heads[number] = head[1]
    ends = [*heads][1:] + [len(lines) + 1]
    found = []
    for start, end in zip(heads, ends):
        first, last = start + 1, end - 1
        while not lines[first - 1].strip():
            first += 1
        while not lines[last - 1].strip():
            last -= 1
        found.append((heads[start], first, last))
    return found


def tags(text):
    """The equations named by the comments of a text: line -> numbers. -> dict"""
    found = {}
    for number, line in enumerate(text.split("\n"), start=1):
        equations = re.findall(r"eq\. \((\d+)\)", line)
        if equations:
            found[number] = equations
    return found


def returned(calls, name):
    """What the first call of a function returned; None if there is none. -> tensor"""
    for call in calls:
        for values in call.values.values():
            if call.function.name == name and f"-> {name}" in values:
                return values[f"-> {name}"].tensor
    return None


def rank(call):
    """What puts calls in order, those first whose values are shown. -> tuple"""
    by_whom = {"": 0, "backward": 1}
    return -len(call.ran), by_whom.get(call.caller, 2)


def in_batch(value):
    """A value in the places of the batch: a list of four rows of up to three numbers, None for rows
    that it does not have. A number for a pair stands at the chosen one. None if the value has no
    rows, or is one number, or numbers of rows."""
    tensor = value.tensor
    if not isinstance(tensor, torch.Tensor) or tensor.numel() == 1:
        return None
    if tensor.shape == (10,):                           # one number for each token
        whole = torch.zeros_like(example.MASK)
        whole[example.MASK > 0] = tensor.to(whole)
        return whole.tolist()
    if tensor.shape == (1, 4):                          # (P, G)
        tensor = tensor.T
    is_of_batch = len(tensor) <= 4 and tensor.dim() <= 2 and tensor[0].numel() <= 3
    are_rows = tensor.dtype == torch.long and tensor[0].numel() == 1
    if not is_of_batch or are_rows:
        return None
    has_all = value.rows is None or len(value.rows) != len(tensor)
    rows = range(len(tensor)) if has_all else value.rows
    found = [None] * 4
    for row, numbers in zip(rows, tensor.reshape(len(tensor), -1).tolist()):
        found[row] = numbers
    return found
