"""A script as an exercise: its blanks, and what stands in their places in a learner's file.

A blank is an assignment or a return whose comment has `eq. (n)`, or `for (n)`: a part of (n). The
assignments above it that serve nothing else go, too. What calls a function that has a blank of the
same number is none.
"""
import ast
import copy
import difflib
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

    def is_end(self, node):
        """Whether a statement, or one in it, sets what the blank sets, or returns."""
        parts = list(ast.walk(node))
        if not self.name:
            return any(isinstance(part, ast.Return) for part in parts)
        return any(isinstance(part, ast.Name) and part.id == self.name
                   and isinstance(part.ctx, ast.Store) for part in parts)


class Exercise:
    """source, lines, tree: of the script; equations: number -> text; first: numbers of the first
    list in the docstring, which has no variants; blanks: in the order of the script, as are the
    keys of wanted: statement -> its first lines, or "" for a blank, what serves one left out."""

    def __init__(self, script):
        self.script = script
        self.source = (ROOT / script).read_text()
        self.lines = self.source.split("\n")
        self.tree = ast.parse(self.source)
        told = ast.get_docstring(self.tree, clean=False)
        lists = [EQUATION.findall(part) for part in told.split("\n\n")]
        self.first, *_ = [[int(number) for _, number in pairs] for pairs in lists if pairs]
        self.equations = {int(number): text for pairs in lists for text, number in pairs}
        found = [self.blank(function, node) for function in self.tree.body
                 if isinstance(function, ast.FunctionDef)
                 for node in statements(function) if self.tag(node)]
        homes = {(blank.function, blank.number) for blank in found}
        self.blanks = [blank for blank in found
                       if not any((name, blank.number) in homes for name in calls(blank.nodes[-1]))]

        self.functions = {node.name for node in ast.walk(self.tree)
                          if isinstance(node, ast.FunctionDef)}
        self.blank_of = {blank.nodes[-1]: blank for blank in self.blanks}
        serving = {node for blank in self.blanks for node in blank.nodes[:-1]}
        self.wanted = {node: "" if node in self.blank_of else head(node)
                       for node in statements(self.tree) if node not in serving}
        self.right_places, _ = self.places(self.source)

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
        for blank in reversed(self.blanks):
            if not numbers or blank.number in numbers:
                code = f"{blank.name} = ..." if blank.name else "return ..."
                code = (" " * blank.nodes[-1].col_offset + code).ljust(40)
                new = [f"{code}# {blank.shape}{blank.tag}, from {', '.join(blank.reads())}"]
                for node in reversed(blank.nodes):
                    lines[node.lineno - 1:node.end_lineno] = new
                    new = []
        return "\n".join(lines)

    def places(self, source):
        """Lay a learner's file beside the script. -> list of (blank, statements in its place), list
        of statements that are no blank, and yet are not there as in the script"""
        tree = ast.parse(source)
        helpers = {inner for node in ast.walk(tree)
                   if isinstance(node, ast.FunctionDef) and node.name not in self.functions
                   for inner in ast.walk(node)}
        own = [node for node in statements(tree) if node not in helpers]
        matcher = difflib.SequenceMatcher(
            None, list(self.wanted.values()), list(map(head, own)), autojunk=False)
        found = []
        changed = []
        for word, start, end, own_start, own_end in matcher.get_opcodes():
            nodes = []
            for node in list(self.wanted)[start:end] if word != "equal" else ():
                blank = self.blank_of.get(node)
                if blank is None:
                    changed.append(node)
                    continue
                ends = [i for i in range(own_start, own_end) if blank.is_end(own[i])]
                if ends:
                    nodes = own[own_start:ends[-1] + 1]
                    own_start = ends[-1] + 1
                elif not any(map(blank.is_end, nodes)):     # nor set together with the one before
                    nodes = []
                found.append((blank, nodes))
        return found, changed


@functools.cache
def mutants():
    """The mistakes of mistakes.txt. -> list of Mutant"""
    return parse(MISTAKES.read_text())


def statements(tree):
    """All statements in a tree, in the order of the text. -> list"""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node is not tree]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))


def head(node):
    """A statement without those in it: `if x > 0:` of that with its lines. -> str"""
    empty = copy.copy(node)
    vars(empty).update({name: [] for name in ("body", "orelse") if name in node._fields})
    return ast.unparse(empty)


def set_by(node):
    """The name that an assignment sets; "" of a return, or if that is none. -> str"""
    target = getattr(node, "target", None) or getattr(node, "targets", [None])[0]
    return target.id if isinstance(target, ast.Name) else ""


def is_read(node):
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


def calls(node):
    """The names of the functions that a node calls. -> list"""
    return [call.func.id for call in ast.walk(node)
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)]
