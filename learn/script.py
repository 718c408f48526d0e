"""Read a script: its equations, the lines that compute them, and its functions.

The docstring states the equations of the method, and a comment above the line those of a variant. A
line has the tag `eq. (n)` in its comment if it computes equation n, or `for (n)` if it computes a
part of it. A function that is an equation may have the tag in its docstring.
"""
import ast
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
EQUATION = re.compile(r"^(?:  | +# )(\S.*?)\s+\((\d+)\)$", re.MULTILINE)
# The shape that a comment gives before a tag may not begin in the code before the comment.
TAG = re.compile(r"((?:\([A-Z][^#]*?\)  )?)((?:eq\.|for) \((\d+)\))")


class Tag(NamedTuple):
    line: int
    shape: str          # of the value, such as "(B, T)  "; may be ""
    text: str           # "eq. (1)", or "for (1)"
    number: int


class Script:
    """The script of a file, such as grpo.py.

    source, lines: its text; tree: its module as an AST node; docstring: of the module
    equations: number -> text, in order; tags: list of Tag, in the order of the lines
    by_name: name -> AST node of a function or a class; functions: name -> AST node of a function
    """

    def __init__(self, file):
        self.file = file
        self.source = (ROOT / file).read_text("utf-8")
        self.lines = self.source.split("\n")
        self.tree = ast.parse(self.source)
        self.docstring = ast.get_docstring(self.tree, clean=False)
        found = [(int(number), text) for text, number in EQUATION.findall(self.source)]
        self.equations = dict(sorted(found))
        self.tags = tags(self.lines)
        self.by_name = {node.name: node for node in self.tree.body
                        if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        self.functions = {name: node for name, node in self.by_name.items()
                          if isinstance(node, ast.FunctionDef)}


def tags(lines):
    """Find the tags in lines. -> list of Tag"""
    return [Tag(i, shape, text, int(number)) for i, line in enumerate(lines, start=1)
            for shape, text, number in TAG.findall(line)]
