"""Make mistakes from the syntax trees of our files: one small change each, of a function or of a
statement outside all functions. tests/mutants.py plants them.

A mutation is named by its file, its function and its kind, such as `grpo.py policy_loss compare <
to <=`, never by a line, so that it keeps its name when lines move or are worded differently. If a
function has several of one kind, they are numbered: `compare < to <=, 2`. What the five scripts
share has one mutation, which is planted in all of them. Inside f-strings nothing is changed,
because Python 3.11 does not report where their parts are. A condition is not negated as a whole:
nearly every test of its function catches that.
"""
import ast
import difflib
import functools
from collections import Counter
from typing import NamedTuple

from contexts import ROOT, units

SCRIPTS = ("grpo.py", "gspo.py", "ppo.py", "reinforce.py", "dpo.py")
FOLDERS = {                             # name -> its files
    "scripts": SCRIPTS,
    **{name: [f"{name}.py"] for name in ("common", "plumbing", "nano", "real")},
    **{name: [f"{name}/*.py", f"{name}/*/*.py"] for name in (
        "tasks", "kernels", "engines", "vectors", "report", "examples", "learn", "lab",
        "measuring")}}

COMPARISONS = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
               ast.Eq: ("==", "!="), ast.NotEq: ("!=", "==")}
OPERATORS = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
             ast.FloorDiv: ("//", "/"), ast.Mod: ("%", "//"), ast.BitAnd: ("&", "|"),
             ast.BitOr: ("|", "&")}
# Calls whose result is of the same kind as what they get: x.detach() becomes x, and sorted(x), too.
METHODS = {
    "abs", "clamp", "clip", "clone", "contiguous", "copy", "cumsum", "detach", "double", "exp",
    "float", "log", "log_softmax", "long", "lower", "lstrip", "masked_fill", "nan_to_num",
    "removeprefix", "removesuffix", "replace", "resolve", "round", "rstrip", "sigmoid", "softmax",
    "sort", "sqrt", "square", "strip", "upper"}
CALLS = {"abs", "deepcopy", "escape", "exp", "int", "log", "logsigmoid", "max", "min", "relu",
         "reversed", "round", "set", "softplus", "sorted", "sqrt"}
SYMMETRIC = {"max", "min", "maximum", "minimum", "equal", "isclose", "allclose", "gcd", "logaddexp"}


class Mutation(NamedTuple):
    file: str
    function: str       # "GPT.forward"; of a statement outside functions, the names that it sets
    kind: str
    statement: int      # the number of the changed statement's line, counted from the function
    edits: tuple        # (file, number of its first changed character, that of the last, new text)

    def __str__(self):
        return f"{self.file} {self.function} {self.kind}"


class Maker:
    """Collects the mutations of one statement or function."""

    def __init__(self, source):
        self.source = source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.lines = source.split("\n")
        self.found = []                 # kind, statement, start, end, new text

    def place(self, line, column):
        """Convert a line and a column in bytes to the number of the character."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def span(self, node):
        return (self.place(node.lineno, node.col_offset),
                self.place(node.end_lineno, node.end_col_offset))

    def text(self, node):
        return self.source[slice(*self.span(node))]

    def add(self, kind, start, end, new):
        breaks = self.source[start:end].count("\n") - new.count("\n")
        if breaks > 0:                  # so that the lines below keep their numbers
            new = f"({new}" + "\n" * breaks + ")" if new != "pass" else new + "\n" * breaks
        self.found.append((kind, self.statement, start, end, new))

    def replace(self, kind, node, new):
        self.add(kind, *self.span(node), new)

    def between(self, kind, left, right, old, new):
        """Replace an operator between two nodes."""
        start = self.source.find(old, self.span(left)[1], self.span(right)[0])
        if start >= 0:
            self.add(f"{kind} {old} to {new}", start, start + len(old), new)

    def visit(self, node):
        """Find the mutations of a node and of the nodes in it."""
        if isinstance(node, ast.JoinedStr):
            return
        if isinstance(node, ast.stmt):
            self.statement = node.lineno
        method = getattr(self, f"of_{type(node).__name__}", None)
        if method:
            method(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    statement = self.statement
                    self.visit(child)
                    self.statement = statement

    def of_Compare(self, node):
        sides = [node.left, *node.comparators]
        for left, operator, right in zip(sides, node.ops, sides[1:]):
            is_draw = self.text(left).endswith("random()")      # < and <= hardly ever differ
            if type(operator) in COMPARISONS and not is_draw:
                self.between("compare", left, right, *COMPARISONS[type(operator)])

    def of_BinOp(self, node):
        is_text = any(isinstance(side, ast.JoinedStr | ast.List | ast.Tuple)
                      or isinstance(getattr(side, "value", None), str)
                      for side in (node.left, node.right))
        if type(node.op) in OPERATORS and not is_text:
            self.between("operator", node.left, node.right, *OPERATORS[type(node.op)])
        if isinstance(node.op, ast.Mult) and not isinstance(node.right, ast.Constant):
            self.replace("drop a factor", node, self.text(node.left))

    def of_IfExp(self, node):
        for word, value in (("true", node.body), ("false", node.orelse)):
            self.replace(f"condition is {word}", node, f"({self.text(value)})")

    def of_BoolOp(self, node):
        word = "and" if isinstance(node.op, ast.And) else "or"
        for number in range(len(node.values)):
            rest = [f"({self.text(value)})" for i, value in enumerate(node.values) if i != number]
            new = f"({f' {word} '.join(rest)})" if len(rest) > 1 else rest[0]
            self.replace(f"drop condition {number + 1} of {word}", node, new)

    def of_Constant(self, node):
        value = node.value
        if isinstance(value, bool):
            self.replace(f"flag {value} to {not value}", node, str(not value))
        elif isinstance(value, int):
            new = value + 1 if value <= 10 else 2 * value
            self.replace(f"number {value} to {new}", node, str(new))

    def of_Call(self, node):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name not in SYMMETRIC:
            for number, (one, other) in enumerate(zip(node.args, node.args[1:]), 1):
                is_alike = type(one) is type(other) and isinstance(one, ast.Name | ast.Attribute)
                if is_alike and self.text(one) != self.text(other):
                    middle = self.source[self.span(one)[1]:self.span(other)[0]]
                    self.add(f"swap arguments {number} and {number + 1} of {name}",
                             self.span(one)[0], self.span(other)[1],
                             self.text(other) + middle + self.text(one))
        is_module = isinstance(getattr(node.func, "value", None), ast.Name) and (
            node.func.value.id in ("torch", "F", "math", "copy", "html", "shlex", "tl"))
        if isinstance(node.func, ast.Attribute) and not is_module and name in METHODS:
            self.replace(f"drop {name}", node, f"({self.text(node.func.value)})")
        elif (is_module or isinstance(node.func, ast.Name)) and name in CALLS:
            arguments = [one for one in node.args if not isinstance(one, ast.Constant)]
            if arguments and len(node.args) <= 2 and not isinstance(arguments[0], ast.Starred
                                                                    | ast.GeneratorExp):
                self.replace(f"drop {name}", node, f"({self.text(arguments[0])})")

    def of_Expr(self, node):
        if isinstance(node.value, ast.Call):
            function = node.value.func
            name = getattr(function, "attr", getattr(function, "id", ""))
            self.replace(f"drop call {name}", node, "pass")

    def of_ExceptHandler(self, node):
        for one in getattr(node.type, "elts", [node.type]):
            if one:
                self.replace(f"except all but {self.text(one)}", one, "()")


def of_file(file, source):
    """Make the mutations of a file. -> list of Mutation"""
    made = []
    for name, node in units(source):
        maker = Maker(source)
        maker.statement = node.lineno
        maker.visit(node)
        count = Counter()
        for kind, statement, start, end, new in maker.found:
            count[kind] += 1
            numbered = kind if count[kind] == 1 else f"{kind}, {count[kind]}"
            edit = (file, start, end, new)
            made.append(Mutation(file, name, numbered, statement - node.lineno, (edit,)))
    return made


@functools.cache
def read(file):
    return (ROOT / file).read_text("utf-8")


def files_of(folder):
    return [path.relative_to(ROOT).as_posix() for pattern in FOLDERS[folder]
            for path in sorted(ROOT.glob(pattern))]


def texts_of(source):
    """Map the names of a file's units to their texts. -> dict"""
    lines = source.split("\n")
    texts = {}
    for name, node in units(source):
        first, *_ = [*getattr(node, "decorator_list", []), node]
        texts[name] = "\n".join(lines[first.lineno - 1:node.end_lineno])
    return texts


def of_folder(folder):
    """Make the mutations of a folder; what several scripts share has those of the first script,
    which change all of them. -> list of Mutation"""
    made = {}
    for file in files_of(folder):
        source = read(file)
        texts = texts_of(source)
        for number, one in enumerate(of_file(file, source)):
            key = (file, number)
            if folder == "scripts":
                key = (one.function, texts[one.function], one.kind)
            twin = made.get(key)
            made[key] = twin._replace(edits=twin.edits + one.edits) if twin else one
    return [*made.values()]


def apply(mutation):
    """Change the texts of a mutation's files. -> {file: new text}"""
    return {file: read(file)[:start] + new + read(file)[end:]
            for file, start, end, new in mutation.edits}


def shown(mutation):
    """The changed lines of a mutation, as a diff."""
    file, text = next(iter(apply(mutation).items()))
    lines = difflib.unified_diff(read(file).split("\n"), text.split("\n"), n=0, lineterm="")
    return "\n".join([*lines][3:])
