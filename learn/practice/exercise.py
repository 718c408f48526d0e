"""A script as an exercise: its blanks, of which a learner writes what they stood for.

A blank is an assignment or a return whose comment has `eq. (n)`, or `for (n)`: a part of (n). The
assignments above it that serve nothing else go, too. A statement that calls a function which has a
blank of the same number is none.
"""
import ast
import functools
import keyword
import re
from typing import NamedTuple

from common import HERE as ROOT
from learn.practice.mistakes import MISTAKES, parse

TAG = re.compile(r"#.*?((?:\([A-Z].*?\)  )?)((?:eq\.|for) \((\d+)\))")
EQUATION = re.compile(r"^  (\S.*?)\s+\((\d+)\)$", re.MULTILINE)
# A name or a field, but no function, keyword of an argument, or word in quotes.
NAME = re.compile(r"task\.\w+\(\w+\)|(?<![\w.'])(?:batch\.|cfg\.)?[a-zA-Z_]\w*\b(?!\(|=)")


class Blank(NamedTuple):
    function: str
    number: int         # of its equation
    name: str           # what it sets; "" of a return
    tag: str            # "eq. (1)", or "for (1)" of a part of it
    shape: str          # of the value, as "(B, T)  "; may be ""
    nodes: tuple        # the right statements, of which the last has the tag

    def reads(self):
        """What the right lines read, as "A" or "cfg.beta", in the order of the text. -> list"""
        text = "; ".join(ast.unparse(node.value) for node in self.nodes)
        hidden = {"torch", "F", *keyword.kwlist, *map(set_by, self.nodes[:-1])}
        return [name for name in dict.fromkeys(NAME.findall(text)) if name not in hidden]


class Exercise:
    """source, lines: of the script; equations: number -> text; nodes: function -> AST node;
    blanks: function -> its blanks, in the order of the script."""

    def __init__(self, script):
        self.script = script
        self.source = (ROOT / script).read_text()
        self.lines = self.source.split("\n")
        tree = ast.parse(self.source)
        pairs = EQUATION.findall(ast.get_docstring(tree, clean=False))
        self.equations = {int(number): text for text, number in pairs}
        self.nodes = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        found = [self.blank(function, node) for function in self.nodes.values()
                 for node in statements(function) if self.tag(node)]
        homes = {(blank.function, blank.number) for blank in found}
        self.blanks = {}
        for blank in found:
            if not any((name, blank.number) in homes for name in calls(blank.nodes[-1])):
                self.blanks.setdefault(blank.function, []).append(blank)

    def tag(self, node):
        """-> match, if an assignment or a return has a tag"""
        text = "\n".join(self.lines[node.lineno - 1:node.end_lineno])
        return isinstance(node, (ast.Assign, ast.Return)) and TAG.search(text)

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
        return Blank(function.name, int(tag[3]), set_by(node), tag[2], tag[1], tuple(nodes))

    def text(self, numbers):
        """The script with `...` for the equations of these numbers, or of all. -> str"""
        lines = list(self.lines)
        for blank in reversed([blank for blanks in self.blanks.values() for blank in blanks]):
            if not numbers or blank.number in numbers:
                code = f"{blank.name} = ..." if blank.name else "return ..."
                code = (" " * blank.nodes[-1].col_offset + code).ljust(40)
                new = [f"{code}# {blank.shape}{blank.tag}, from {', '.join(blank.reads())}"]
                for node in reversed(blank.nodes):
                    lines[node.lineno - 1:node.end_lineno] = new
                    new = []
        return "\n".join(lines)


@functools.cache
def mutants():
    """The mistakes of mistakes.txt. -> list of Mutant"""
    return parse(MISTAKES.read_text())


def statements(function):
    """All statements in a function, in the order of the text. -> list"""
    found = [node for node in ast.walk(function) if isinstance(node, ast.stmt)]
    return sorted(found[1:], key=lambda node: (node.lineno, node.col_offset))


def set_by(node):
    """The name that an assignment sets; "" of a return, or if that is none. -> str"""
    target = getattr(node, "targets", [None])[0]
    return target.id if isinstance(target, ast.Name) else ""


def is_read(node):
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


def calls(node):
    """The names of the functions that a node calls. -> list"""
    return [call.func.id for call in ast.walk(node)
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)]
