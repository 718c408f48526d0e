"""How much a reader has to take in: syntax nodes a line, nested expressions, tuple assignments.

Docstrings, comments and empty lines are free; what is measured is the code. The limits, and why
they are there, are in test_density.py. python tests/density.py FILE ... prints the measures.
"""
import ast
import dataclasses
import io
import sys
import tokenize
from pathlib import Path

# Operators and the like: they come with the expression that they belong to, so they do not count.
NOT_COUNTED = (ast.Module, ast.expr_context, ast.operator, ast.cmpop, ast.unaryop, ast.boolop)
COMPOUND = (ast.For, ast.While, ast.If, ast.With, ast.Try,
            ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# Each of these puts what stands in it one level deeper. Attributes, lists and tuples do not.
LEVELS = (ast.Call, ast.BinOp, ast.BoolOp, ast.UnaryOp, ast.Compare, ast.Subscript, ast.IfExp,
          ast.Lambda, ast.NamedExpr, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
LAYOUT = (tokenize.COMMENT, tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT,
          tokenize.ENDMARKER)
DEEP = 5                                    # levels of an expression that a reader has to unfold


@dataclasses.dataclass
class Density:
    """The measures of a text. Shares are of simple statements, and of assignments."""
    lines: int                  # all of them
    code_lines: int             # with code on them
    longest_line: int           # columns
    nodes_a_line: float         # syntax nodes a code line, on average
    deep_share: float           # of simple statements at least DEEP expression levels deep
    tuple_share: float          # of assignments that assign a tuple to a tuple, a, b = f(x), g(y)


def prose_lines(tree):
    """The numbers of the lines on which docstrings stand, or other strings that are statements."""
    found = set()
    for node in ast.walk(tree):
        is_string = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) \
            and isinstance(node.value.value, str)
        if is_string:
            found.update(range(node.lineno, node.end_lineno + 1))
    return found


def code_lines(source, prose):
    """The numbers of the lines on which a token of code stands."""
    found = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            found.update(range(token.start[0], token.end[0] + 1))
    return found - prose


def depth(node):
    """How many levels of expressions stand in one another: 2 of f(x + 1)."""
    inner = [depth(child) for child in ast.iter_child_nodes(node)
             if isinstance(child, (ast.expr, ast.comprehension, ast.keyword))]
    return isinstance(node, LEVELS) + max(inner, default=0)


def is_tuple_assignment(node):
    """Whether it is like a, b = x, y; to unpack a call, a, b = f(x), is another thing."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return any(isinstance(target, ast.Tuple) for target in node.targets)


def share(flags):
    """The share of true ones in a list, 0 of an empty one."""
    return sum(flags) / max(1, len(flags))


def measure(source):
    """The measures of a text. -> Density"""
    tree = ast.parse(source)
    prose = prose_lines(tree)
    code = code_lines(source, prose)
    nodes = []
    for node in ast.walk(tree):
        if getattr(node, "lineno", 0) not in prose and not isinstance(node, NOT_COUNTED):
            nodes.append(node)

    statements = [node for node in nodes if isinstance(node, ast.stmt)]
    simple = [node for node in statements if not isinstance(node, COMPOUND)]
    assignments = [node for node in statements
                   if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign))]
    lines = source.splitlines()
    return Density(
        lines=len(lines),
        code_lines=len(code),
        longest_line=max([len(line) for line in lines], default=0),
        nodes_a_line=len(nodes) / max(1, len(code)),
        deep_share=share([depth(node) >= DEEP for node in simple]),
        tuple_share=share([is_tuple_assignment(node) for node in assignments]))


def main(paths):
    print(f"{'file':28}{'lines':>7}{'code':>7}{'columns':>9}{'nodes':>7}{'deep':>7}{'tuples':>8}")
    for path in paths:
        found = measure(Path(path).read_text())
        print(f"{path:28}{found.lines:7d}{found.code_lines:7d}{found.longest_line:9d}"
              f"{found.nodes_a_line:7.2f}{found.deep_share:7.1%}{found.tuple_share:8.1%}")


if __name__ == "__main__":
    main(sys.argv[1:])
