"""How much a reader has to take in a line: python tests/density.py FILE ... prints the measures."""
import ast
import io
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

COMPOUND = (ast.For, ast.While, ast.If, ast.With, ast.Try, ast.FunctionDef, ast.ClassDef)
NOT_COUNTED = (ast.expr_context, ast.operator, ast.cmpop, ast.unaryop, ast.boolop, ast.Module)
LEVELS = (ast.Call, ast.BinOp, ast.BoolOp, ast.UnaryOp, ast.Compare, ast.Subscript, ast.IfExp,
          ast.Lambda, ast.NamedExpr, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
LAYOUT = (tokenize.COMMENT, tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT,
          tokenize.ENDMARKER)
DEEP = 5                                    # levels of an expression that a reader has to unfold


class Density(NamedTuple):
    nodes: float                # syntax nodes a line of code, on average
    deep: float                 # share of simple statements with DEEP levels of expressions
    tuples: float               # share of assignments like a, b = f(x), g(y)
    columns: int                # of the longest line


def is_prose(node):
    """Whether a statement is a string, as docstrings are."""
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", 0), str)


def depth(node):
    """How many levels of expressions stand in one another: 2 of f(x + 1)."""
    inner = [depth(child) for child in ast.iter_child_nodes(node)
             if isinstance(child, (ast.expr, ast.comprehension, ast.keyword))]
    return isinstance(node, LEVELS) + max(inner, default=0)


def is_tuple_assignment(node):
    targets = getattr(node, "targets", [])
    return isinstance(node.value, ast.Tuple) and isinstance(targets and targets[0], ast.Tuple)


def share(flags):
    return sum(flags) / max(1, len(flags))


def measure(source):
    """The measures of a text. -> Density"""
    tree = ast.parse(source)
    prose = set()
    for node in filter(is_prose, ast.walk(tree)):
        prose |= set(range(node.lineno, node.end_lineno + 1))
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            code |= set(range(token.start[0], token.end[0] + 1))

    nodes = [node for node in ast.walk(tree) if not isinstance(node, NOT_COUNTED)
             and getattr(node, "lineno", 0) not in prose]
    simple = [node for node in nodes
              if isinstance(node, ast.stmt) and not isinstance(node, COMPOUND)]
    assignments = [node for node in nodes
                   if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign))]
    return Density(
        nodes=len(nodes) / max(1, len(code - prose)),
        deep=share([depth(node) >= DEEP for node in simple]),
        tuples=share([is_tuple_assignment(node) for node in assignments]),
        columns=max([len(line) for line in source.splitlines()], default=0))


def main(paths):
    for path in paths:
        found = measure(Path(path).read_text())
        print(f"{path:28}{found.nodes:6.2f} nodes{found.deep:7.1%} deep{found.tuples:7.1%} tuples"
              f"{found.columns:5d} columns")


if __name__ == "__main__":
    main(sys.argv[1:])
