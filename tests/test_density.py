"""Code is easy to read where a line holds one thought: limits on how dense the text may be."""
import density
import pytest
from conftest import ROOT

LESSONS = density.Density(nodes=9.0, deep=0.03, tuples=0.04, columns=100)
OTHERS = density.Density(nodes=9.3, deep=0.04, tuples=0.05, columns=100)
LIMITS = dict.fromkeys(["*.py", "examples/*.py"], LESSONS) | dict.fromkeys(
    ["tasks/*.py", "tools/**/*.py", "lab/*.py", "kernels/*.py"], OTHERS)
FILES = {path.relative_to(ROOT).as_posix(): limit for pattern, limit in LIMITS.items()
         for path in sorted(ROOT.glob(pattern))}


@pytest.mark.parametrize("name", FILES)
def test_a_file_keeps_within_its_limits(name):
    found = density.measure((ROOT / name).read_text())
    for measure, value, limit in zip(found._fields, found, FILES[name]):
        assert value <= limit, measure


def test_syntax_nodes_are_counted_without_operators_and_prose_costs_nothing():
    code = "x = y + 1\n"                                # Assign, Name, BinOp, Name, Constant
    assert density.measure(code).nodes == 5
    assert density.measure('"""A docstring\nof two lines."""\n\n# a comment\n' + code).nodes == 5
    assert density.measure("x = (y +\n     1)\n").nodes == 2.5


@pytest.mark.parametrize("statement, deep, tuples", [
    ("y = f(f(f(f(1))))", 0, 0), ("y = f(f(f(f(f(1)))))", 1, 0), ("y = [[[[[[1]]]]]]", 0, 0),
    ("y = f(x=g(y=h(z=-(1 + 2))))", 1, 0), ("a, b = 1, 2", 0, 1), ("a, b = f(x)", 0, 0),
    ("a = 1, 2", 0, 0), ("a: int = 1", 0, 0), ("if f(f(f(f(f(1))))):\n    x", 0, 0)])
def test_deep_statements_and_tuple_assignments_are_seen(statement, deep, tuples):
    found = density.measure(statement + "\n")
    assert (found.deep, found.tuples) == (deep, tuples)
