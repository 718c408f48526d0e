"""Code is easy to read where a line holds one thought: limits on how dense the text may be."""
import dataclasses

import pytest
from conftest import ROOT, SCRIPTS
from density import measure

from tools import sync


@dataclasses.dataclass
class Limits:
    """What a file may have at most; it has to stay below tuple_share."""
    nodes_a_line: float
    deep_share: float
    tuple_share: float
    longest_line: int = 100
    lines: float = float("inf")
    lesson: float = float("inf")            # lines above the marker


SCRIPT = Limits(9.0, 0.03, 0.04, lines=730, lesson=340)
LIMITS = {f"{name}.py": SCRIPT for name in SCRIPTS} | {
    "ppo.py": dataclasses.replace(SCRIPT, lines=835, lesson=445),
    "common.py": Limits(9.0, 0.03, 0.04),
    "examples/pretrained.py": Limits(9.0, 0.03, 0.04, lines=400)}
ELSEWHERE = Limits(9.3, 0.04, 0.05)
FOLDERS = ("tasks", "tools", "lab", "kernels", "examples")
FILES = [*LIMITS] + [path.relative_to(ROOT).as_posix() for folder in FOLDERS
                     for path in sorted((ROOT / folder).rglob("*.py"))]


def excesses(name, source):
    """What is too much in the text of a file, as a list of sentences."""
    limits = LIMITS.get(name, ELSEWHERE)
    found = measure(source)
    problems = []
    if found.nodes_a_line > limits.nodes_a_line:
        problems.append(f"{found.nodes_a_line:.2f} syntax nodes a line, at most "
                        f"{limits.nodes_a_line}")
    if found.deep_share > limits.deep_share:
        problems.append(f"{found.deep_share:.2%} of its statements are deep expressions, at most "
                        f"{limits.deep_share:.0%}")
    if found.tuple_share >= limits.tuple_share:
        problems.append(f"{found.tuple_share:.2%} of its assignments are of tuples, less than "
                        f"{limits.tuple_share:.0%} wanted")
    if found.lines > limits.lines:
        problems.append(f"{found.lines} lines, at most {limits.lines}")
    for number, line in enumerate(source.splitlines(), start=1):
        if len(line) > limits.longest_line:
            problems.append(f"line {number} has {len(line)} columns, at most {limits.longest_line}")
    if "\n" + sync.MARKER in source:
        lesson = len(sync.split(source)[0].splitlines())
        if lesson > limits.lesson:
            problems.append(f"a lesson of {lesson} lines, at most {limits.lesson}")
    return [f"{name}: {problem}" for problem in problems]


# ---- the repository --------------------------------------------------------------------------

@pytest.mark.parametrize("name", FILES)
def test_a_file_keeps_within_its_limits(name):
    problems = excesses(name, (ROOT / name).read_text())
    assert not problems, "\n".join(problems)


# ---- each excess is seen ---------------------------------------------------------------------

def list_of(numbers):
    """A line of numbers + 3 syntax nodes."""
    return "x = [" + ", ".join("1" * numbers) + "]\n"


def lesson_of(lines):
    """A script with so many lines above the marker."""
    return "x = 1\n" * lines + sync.MARKER + "\n"


TUPLE = "a, b = 1, 2\n"
DEEP = "f(f(f(f(f(1)))))\n"
# the most that is allowed, the least that is not, what is said of it
AT_THE_LIMIT = {
    "grpo.py": [
        (list_of(6) * 10, list_of(6) * 9 + list_of(7), "9.10 syntax nodes"),
        (DEEP * 3 + "f(1)\n" * 97, DEEP * 4 + "f(1)\n" * 96, "4.00% of its statements are deep"),
        (TUPLE * 3 + "x = 1\n" * 97, TUPLE * 4 + "x = 1\n" * 96, "4.00% of its assignments"),
        ("#" * 100, "#\n" + "#" * 101, "line 2 has 101 columns"),
        ("#\n" * 730, "#\n" * 731, "731 lines, at most 730"),
        (lesson_of(340), lesson_of(341), "a lesson of 341 lines, at most 340")],
    "ppo.py": [
        ("#\n" * 835, "#\n" * 836, "836 lines, at most 835"),
        (lesson_of(445), lesson_of(446), "a lesson of 446 lines, at most 445")],
    "tools/report.py": [
        (list_of(6) * 7 + list_of(7) * 3, list_of(6) * 6 + list_of(7) * 4, "9.40 syntax nodes"),
        (DEEP * 4 + "f(1)\n" * 96, DEEP * 5 + "f(1)\n" * 95, "5.00% of its statements are deep"),
        (TUPLE * 4 + "x = 1\n" * 96, TUPLE * 5 + "x = 1\n" * 95, "5.00% of its assignments"),
        ("#" * 100, "#" * 101, "line 1 has 101 columns")]}
for name in ("reinforce.py", "gspo.py", "dpo.py"):
    AT_THE_LIMIT[name] = AT_THE_LIMIT["grpo.py"]
AT_THE_LIMIT["ppo.py"] += AT_THE_LIMIT["grpo.py"][:4]
AT_THE_LIMIT["common.py"] = AT_THE_LIMIT["grpo.py"][:4]
AT_THE_LIMIT["examples/pretrained.py"] = [
    *AT_THE_LIMIT["grpo.py"][:4], ("#\n" * 400, "#\n" * 401, "401 lines, at most 400")]
CASES = [(name, *case) for name, cases in AT_THE_LIMIT.items() for case in cases]


@pytest.mark.parametrize("name, allowed, excess, words", CASES)
def test_the_limit_is_allowed_and_a_little_more_is_seen(name, allowed, excess, words):
    assert excesses(name, allowed) == []
    [problem] = excesses(name, excess)
    assert problem.startswith(f"{name}: {words}")


# ---- what is measured ------------------------------------------------------------------------

def test_prose_costs_nothing():
    code = "def f(x):\n    return x\n"
    prose = '"""A docstring\nof two lines."""\n\n# a comment\n' + code + '\n\n"""A remark."""\n'
    assert measure(prose).nodes_a_line == measure(code).nodes_a_line
    assert measure(prose).code_lines == 2


def test_syntax_nodes_are_counted_without_operators():
    assert measure("x = y + 1\n").nodes_a_line == 5     # Assign, Name, BinOp, Name, Constant
    assert measure("x = (y +\n     1)\n").nodes_a_line == 2.5
    assert measure("x.y(z=1)\n").nodes_a_line == 6              # Expr, Call, Attribute, Name ...


@pytest.mark.parametrize("expression, is_deep", [
    ("f(f(f(f(1))))", False), ("f(f(f(f(f(1)))))", True), ("f(f(f(f(1))))[0]", True),
    ("-(1 + (2 if (3 < x and y) else 4))", True), ("a.b.c.d.e.f", False), ("[[[[[[1]]]]]]", False),
    ("[f(g(y)) for y in (x if x else z)]", False), ("{f(g(h(-y))) for y in x}", True),
    ("f(x=g(y=h(z=-(1 + 2))))", True), ("[x for x in f(g(h(y[0])))]", True)])
def test_a_deep_statement_is_of_five_levels(expression, is_deep):
    assert measure(f"y = {expression}\n").deep_share == is_deep


def test_compound_statements_do_not_count_as_statements():
    deep = "f(f(f(f(f(1)))))"
    assert measure(f"if x:\n    {deep}\n").deep_share == 1
    assert measure(f"if {deep}:\n    x\n").deep_share == 0


@pytest.mark.parametrize("statement, share", [
    ("a, b = 1, 2", 1), ("a, b = f(x)", 0), ("a = 1, 2", 0), ("a = b, c = 1, 2", 1),
    ("a: int = 1", 0), ("a, b = b, a\nc = 1", 0.5), ("a += 1\na, b = 1, 2", 0.5)])
def test_a_tuple_assignment_assigns_several_values_at_once(statement, share):
    assert measure(statement + "\n").tuple_share == share


def test_an_empty_file_has_no_density():
    found = measure("")
    assert (found.nodes_a_line, found.deep_share, found.tuple_share) == (0, 0, 0)
    assert (found.lines, found.longest_line) == (0, 0)
