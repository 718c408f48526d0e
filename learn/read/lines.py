"""Which lines of a script a first reading needs; nothing is marked by hand.

A page shows the shortest script that trains in the same way: from its end, statements are taken
away one after the other, as long as all gradients of the example stay what they are. What is taken
away belongs to a variant, if that needs it, or else to the log.
"""
import ast
import functools

import torch


def is_kept(statement):
    """Whether it always stays: a docstring, and the return of a tuple with metrics. -> bool"""
    if isinstance(statement, ast.Return):
        return isinstance(statement.value, ast.Tuple) and isinstance(
            statement.value.elts[-1], ast.Dict)
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


class Without(ast.NodeTransformer):
    """Takes away the statements that begin on some lines. What a function returns as a dict, or in
    one at the end of a tuple, are metrics: of these an empty dict is left."""

    def __init__(self, lines):
        self.lines = lines

    def visit(self, node):
        if isinstance(node, ast.stmt) and node.lineno in self.lines:
            return self.without_metrics(node) if isinstance(node, ast.Return) else None
        self.generic_visit(node)
        if isinstance(node, ast.stmt) and getattr(node, "body", None) == []:
            node.body = [ast.copy_location(ast.Pass(), node)]
        return node

    def without_metrics(self, statement):
        empty = ast.Dict([], [])
        if is_kept(statement):
            empty = ast.Tuple([*statement.value.elts[:-1], empty], ast.Load())
        return ast.copy_location(ast.Return(empty), statement)


@functools.cache
def without(text, lines, path):
    """A text, a function where it stands in its file, without some lines. -> code"""
    tree = Without(lines).visit(ast.parse(text))
    return compile(ast.fix_missing_locations(tree), path, "exec")


def shorten(train, lines, removed=frozenset()):
    """As many of the lines on which statements begin as can be taken away, besides `removed`, the
    last ones first. train: lines without which the script runs -> its gradients. -> frozenset"""
    wanted = train(removed)

    def can_do_without(lines):
        try:
            found = train(lines)
        except Exception:                   # whatever goes wrong, it went wrong without them
            return False
        return len(found) == len(wanted) and all(map(torch.equal, found, wanted))

    def without(lines, removed):
        if can_do_without(removed.union(lines)):
            return removed.union(lines)
        if len(lines) < 2:
            return removed
        middle = len(lines) // 2
        return without(lines[:middle], without(lines[middle:], removed))

    return without(sorted(lines), removed)
