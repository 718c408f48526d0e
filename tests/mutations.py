"""Make mistakes from the syntax trees of our files: one small change each, of a function or of a
statement outside all functions. tests/mutants.py plants them.

A mutation is named by its file, its function and its kind, such as `grpo.py policy_loss compare <
to <=`, never by a line, so that it keeps its name when lines move or are worded differently. If a
function has several of one kind, they are numbered: `compare < to <=, 2`. What the five scripts
share has one mutation, which is planted in all of them. Inside f-strings nothing is changed:
Python 3.11 does not tell where their parts are.
"""
import ast
import re
import zlib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from contexts import ROOT, functions_of

SCRIPTS = ("grpo.py", "gspo.py", "ppo.py", "reinforce.py", "dpo.py")
FOLDERS = {                             # name -> its files
    "scripts": SCRIPTS, "common": ("common.py",), "plumbing": ("plumbing.py",),
    "nano": ("nano.py",), "real": ("real.py",), "tasks": ("tasks/*.py",),
    "kernels": ("kernels/*.py",), "engines": ("engines/*.py",), "vectors": ("vectors/*.py",),
    "report": ("report/*.py",), "examples": ("examples/*.py",),
    "learn": ("learn/*.py", "learn/*/*.py"), "lab": ("lab/*.py", "lab/*/*.py"),
    "measuring": ("measuring/*.py",)}

COMPARISONS = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
               ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"),
               ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is")}
OPERATORS = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
             ast.FloorDiv: ("//", "/"), ast.Mod: ("%", "//"), ast.BitAnd: ("&", "|"),
             ast.BitOr: ("|", "&")}
# Calls whose result is of the same kind as what they get: x.detach() becomes x, and sorted(x), too.
METHODS = {
    "abs", "absolute", "bool", "casefold", "clamp", "clip", "clone", "contiguous", "copy", "cumsum",
    "detach", "double", "exp", "expanduser", "flip", "float", "log", "log_softmax", "long", "lower",
    "lstrip", "masked_fill", "nan_to_num", "removeprefix", "removesuffix", "replace", "resolve",
    "roll", "round", "rstrip", "sigmoid", "softmax", "sort", "sqrt", "square", "strip", "upper"}
CALLS = {"abs", "deepcopy", "escape", "exp", "int", "log", "logsigmoid", "max", "min", "quote",
         "relu", "reversed", "round", "set", "sigmoid", "softplus", "sorted", "sqrt"}
SYMMETRIC = {"max", "min", "maximum", "minimum", "equal", "isclose", "allclose", "gcd", "logaddexp"}


class Mutation(NamedTuple):
    file: str
    function: str       # "GPT.forward"; of a statement outside functions, the names that it sets
    kind: str
    statement: int      # the number of the changed statement's line, counted from the function
    edits: tuple        # (file, number of its first changed character, that of the last, new text)

    def __str__(self):
        return f"{self.file} {self.function} {self.kind}"

    @property
    def names(self):
        """What a statement outside functions sets; () if the mutation is in a function."""
        return tuple(self.function[1:].split()) if self.function.startswith("=") else ()

    def order(self, salt=""):
        """A random number that does not change from run to run."""
        return zlib.crc32(f"{salt} {self}".encode())


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
        start, end = self.span(left)[1], self.span(right)[0]
        pattern = r"\s+".join(map(re.escape, old.split()))
        found = re.search(pattern, self.source[start:end])
        if found:
            self.add(kind, start + found.start(), start + found.end(), new)

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
            old, new = COMPARISONS[type(operator)]
            if not self.text(left).endswith("random()"):        # < and <= hardly ever differ
                self.between(f"compare {old} to {new}", left, right, old, new)

    def of_BinOp(self, node):
        is_text = any(isinstance(side, ast.JoinedStr | ast.List | ast.Tuple)
                      or isinstance(getattr(side, "value", None), str)
                      for side in (node.left, node.right))
        if type(node.op) in OPERATORS and not is_text:
            old, new = OPERATORS[type(node.op)]
            self.between(f"operator {old} to {new}", node.left, node.right, old, new)
        if isinstance(node.op, ast.Mult) and not isinstance(node.right, ast.Constant):
            self.replace("drop a factor", node, self.text(node.left))

    def of_AugAssign(self, node):
        if type(node.op) in OPERATORS:
            old, new = OPERATORS[type(node.op)]
            self.between(f"operator {old}= to {new}=", node.target, node.value, old, new)

    def of_UnaryOp(self, node):
        if isinstance(node.op, ast.Not):
            self.replace("drop not", node, f"({self.text(node.operand)})")
        elif isinstance(node.op, ast.Invert):
            self.replace("drop ~", node, f"({self.text(node.operand)})")
        elif isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
            self.replace("drop minus", node, f"({self.text(node.operand)})")

    def of_If(self, node):
        """Negate a condition that is a name, an attribute or a call; the others have mutations."""
        if isinstance(node.test, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
            self.replace("negate a condition", node.test, f"(not {self.text(node.test)})")

    of_While = of_If

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
        elif value == "utf-8-sig":
            self.replace("drop the BOM", node, '"utf-8"')

    def of_arguments(self, node):
        for default in [*node.defaults, *node.kw_defaults]:
            self.default(default)

    def of_AnnAssign(self, node):
        self.default(node.value)

    def default(self, node):
        if isinstance(node, ast.Constant) and isinstance(node.value, float):
            new = 2 * node.value or 1.0
            self.replace(f"default {node.value} to {new}", node, str(new))

    def sequence(self, node):
        """Drop each of several words."""
        words = [getattr(item, "value", None) for item in node.elts]
        if len(words) < 2 or not all(isinstance(word, str) for word in words):
            return
        start, end = self.span(node.elts[0])[0], self.span(node.elts[-1])[1]
        for number, word in enumerate(words):
            rest = [self.text(item) for i, item in enumerate(node.elts) if i != number]
            has_comma = self.source[end:].lstrip().startswith(",")
            comma = "," if len(rest) == 1 and not has_comma else ""         # of a tuple
            new = ", ".join(rest) + comma
            breaks = self.source[start:end].count("\n") - new.count("\n")
            self.found.append((f"drop {word!r}", self.statement, start, end, new + "\n" * breaks))

    of_Tuple = of_List = of_Set = sequence

    def of_Call(self, node):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name == "suppress":
            for argument in node.args:
                self.replace(f"suppress all but {self.text(argument)}", argument, "()")
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
            self.replace(f"drop call {getattr(function, 'attr', getattr(function, 'id', ''))}",
                         node, "pass")

    def of_ExceptHandler(self, node):
        if isinstance(node.type, ast.Tuple):
            for one in node.type.elts:
                self.replace(f"except all but {self.text(one)}", one, "()")
        elif node.type:
            self.replace(f"except all but {self.text(node.type)}", node.type, "()")


def units(source):
    """Split a file into functions and the statements outside functions. -> [(name, node)]"""
    tree = ast.parse(source)
    functions = functions_of(tree)
    inside = {id(node) for node in functions.values()}
    found = [*functions.items()]

    def visit(node, prefix):
        for child in node.body:
            if id(child) in inside or isinstance(child, ast.Import | ast.ImportFrom):
                continue
            if isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")
                continue
            targets = getattr(child, "targets", [getattr(child, "target", None)])
            names = {node.id for target in targets if target
                     for node in ast.walk(target) if isinstance(node, ast.Name)}
            if names and getattr(child, "value", None):
                found.append((f"={' '.join(sorted(names))}", child))
    visit(tree, "")
    return found


def without_docstring(node):
    body = getattr(node, "body", None)
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body.pop(0)
    return node


def of_file(file, source):
    """Make the mutations of a file. -> list of Mutation"""
    made = []
    for name, node in units(source):
        maker = Maker(source)
        maker.statement = node.lineno
        maker.visit(without_docstring(node))
        count = Counter()
        for kind, statement, start, end, new in maker.found:
            count[kind] += 1
            numbered = kind if count[kind] == 1 else f"{kind}, {count[kind]}"
            edit = (file, start, end, new)
            made.append(Mutation(file, name, numbered, statement - node.lineno, (edit,)))
    return made


def files_of(folder):
    return [path.relative_to(ROOT).as_posix() for pattern in FOLDERS[folder]
            for path in sorted(ROOT.glob(pattern))]


def text_of(source, node):
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
    return "\n".join(source.split("\n")[first - 1:node.end_lineno])


def of_folder(folder):
    """Make the mutations of a folder; what several scripts share has those of the first script,
    which change all of them. -> list of Mutation"""
    made = []
    first = {}                          # (name, text of a unit) -> its mutations
    for file in files_of(folder):
        source = (ROOT / file).read_text("utf-8")
        texts = {name: text_of(source, node) for name, node in units(source)}
        own = {}
        for mutation in of_file(file, source):
            own.setdefault(mutation.function, []).append(mutation)
        for name, mutations in own.items():
            key = (name, texts[name])
            if folder != "scripts" or key not in first:
                first[key] = [len(made), len(mutations)]
                made += mutations
                continue
            start, number = first[key]
            for i, twin in enumerate(mutations, start):
                made[i] = made[i]._replace(edits=made[i].edits + twin.edits)
    return made


def apply(mutation, read=lambda file: (ROOT / file).read_text("utf-8")):
    """Change the texts of a mutation's files. -> {file: new text}"""
    texts = {}
    for file, start, end, new in mutation.edits:
        source = read(file)
        texts[file] = source[:start] + new + source[end:]
    return texts


def shown(mutation):
    """The changed lines of a mutation, as a diff."""
    file, start, end, new = mutation.edits[0]
    source = Path(ROOT, file).read_text("utf-8")
    first = source.rfind("\n", 0, start) + 1
    last = source.find("\n", end)
    after = source[first:start] + new + source[end:last]
    lines = [f"- {line}" for line in source[first:last].split("\n")]
    return "\n".join(lines + [f"+ {line}" for line in after.split("\n") if line.strip(" )") or 1])
