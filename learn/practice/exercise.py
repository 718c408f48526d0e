"""Turn a script into an exercise by leaving blanks, which a learner fills in.

A blank is an assignment or a return whose comment contains `eq. (n)`, or `for (n)` for a part of
(n). Assignments above it that only serve the blank are removed as well, unless they make a choice,
such as torch.where. A statement that calls a function with a blank of the same number is not a
blank.
"""
import ast
import functools
import keyword
import re
from pathlib import Path
from typing import NamedTuple

from learn.script import EQUATION, Script
from vectors.edits import parse

# The mistakes that practice recognizes when a learner makes one, and that hunts and docs/why.md
# plant. A test fails on each of them.
MISTAKES = Path(__file__).with_name("mistakes.txt")
# A name or a field, but not a function, a keyword of an argument, or a word in quotes.
NAME = re.compile(r"task\.\w+\(\w+\)|(?<![\w.'])(?:batch\.|cfg\.)?[a-zA-Z_]\w*\b(?!\(|=)")


class Blank(NamedTuple):
    function: str
    number: int         # number of its equation
    name: str           # name that it assigns; "" for a return
    tag: str            # "eq. (1)", or "for (1)" for a part of (1)
    shape: str          # shape of the value, such as "(B, T)  "; may be ""
    nodes: tuple        # the right statements; the last one has the tag

    def reads(self):
        """List what the right lines read, such as "A" or "cfg.beta", in order. -> list of str"""
        text = "; ".join(ast.unparse(node.value) for node in self.nodes)
        hidden = {"torch", "F", *keyword.kwlist, *map(set_by, self.nodes[:-1])}
        return [name for name in dict.fromkeys(NAME.findall(text)) if name not in hidden]


class Exercise(Script):
    """A script with its blanks {function: list}, in the order of the script."""

    def __init__(self, file):
        super().__init__(file)
        blanks = [self.blank(function, node) for function in self.functions.values()
                  for node in statements(function) if self.tag(node)]
        homes = {(blank.function, blank.number) for blank in blanks}
        self.blanks = {}
        for blank in blanks:
            called = [name for node in blank.nodes for name in calls(node)]
            if not any((name, blank.number) in homes for name in called):
                self.blanks.setdefault(blank.function, []).append(blank)

    def tag(self, node):
        """Find the first tag of an assignment or a return. -> Tag, or None"""
        if not isinstance(node, (ast.Assign, ast.Return)):
            return None
        return next((tag for tag in self.tags if node.lineno <= tag.line <= node.end_lineno), None)

    def blank(self, function, node):
        nodes = [node]
        names = [inner.id for inner in ast.walk(function) if is_read(inner)]
        for other in reversed(statements(function)):
            is_above = other.lineno < node.lineno and other.col_offset == node.col_offset
            if is_above and isinstance(other, ast.Assign) and not self.tag(other):
                name = set_by(other)
                own = [inner.id for user in nodes for inner in ast.walk(user) if is_read(inner)]
                is_choice = isinstance(other.value, ast.IfExp)
                if name and not is_choice and names.count(name) == own.count(name):
                    nodes.insert(0, other)
        tag = self.tag(node)
        return Blank(function.name, tag.number, set_by(node), tag.text, tag.shape, tuple(nodes))

    def text(self, numbers, from_memory=False):
        """Replace the equations with these numbers, or all equations, by `...`. From memory, the
        script states no equations, blanks have no hints, and the loop of nano.py is a blank, too.
        -> the script"""
        lines = list(self.lines)
        if from_memory and self.file == "nano.py":
            [loop] = [node for node in self.functions["main"].body if isinstance(node, ast.For)]
            *step, _ = loop.body                # the last statement prints the rewards
            lines[step[0].lineno - 1:step[-1].end_lineno] = [
                "        ...     # sets rewards (B,) and mask (B, T), and makes two updates"]
        for blank in reversed([blank for blanks in self.blanks.values() for blank in blanks]):
            hint = blank.shape.strip()
            if not from_memory:
                hint = f"{blank.shape}{blank.tag}, from {', '.join(blank.reads())}"
            if not numbers or blank.number in numbers:
                code = f"{blank.name} = ..." if blank.name else "return ..."
                code = (" " * blank.nodes[-1].col_offset + code).ljust(40)
                new = [f"{code}# {hint}" if hint else code.rstrip()]
                for node in reversed(blank.nodes):
                    lines[node.lineno - 1:node.end_lineno] = new
                    new = []
        text = "\n".join(lines)
        if from_memory:         # equations, also those without a number, are set in by two spaces
            text = text.replace(self.docstring, re.sub(
                r"^  (?!python )\S.*\n", "", self.docstring, flags=re.M))
            text = re.sub(f"{EQUATION.pattern}\n", "", text, flags=re.M)
        return text


@functools.cache
def mistakes(file):
    """Read the mistakes of a script from mistakes.txt. -> list of Edit"""
    return [one for one in parse(MISTAKES.read_text("utf-8")) if one.file == file]


def statements(function):
    """List all statements in a function, in the order of the text. -> list of AST nodes"""
    nodes = [node for node in ast.walk(function) if isinstance(node, ast.stmt)]
    return sorted(nodes[1:], key=lambda node: (node.lineno, node.col_offset))


def set_by(node):
    """Return the name that an assignment sets; "" for a return or another target. -> str"""
    target = getattr(node, "targets", [None])[0]
    return target.id if isinstance(target, ast.Name) else ""


def is_read(node):
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


def calls(node):
    """List the names of the functions that a node calls. -> list of str"""
    return [call.func.id for call in ast.walk(node)
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)]
