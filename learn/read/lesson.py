"""A script as what its page shows: the lesson's text, the equations and their lines, the values
that the lines take on the worked example, and which lines a first reading needs."""
import ast
import importlib
import re
import types
from pathlib import Path

import torch

from learn import sync
from learn.read import example, watch, words
from learn.read.watch import first_line

ROOT = Path(__file__).resolve().parents[2]
EQUATION = re.compile(r"^  (\S.*?)\s+\((\d+)\)$", re.M)
TAG = re.compile(r"eq\. \((\d+)\)")


class Lesson:
    """The part of a script above the machinery.

    sections: of its text file, name of the first function -> words.Section; docstring;
    equations: number -> text; where: number -> line; first: line -> its first number; by_name: name
    -> AST node of a function or a class, those of the machinery, too; functions: name ->
    watch.Function; statements: line -> AST node; ran: first lines of statements that run with the
    flags of the page; calls: more flags -> function -> watch.Call whose values are shown; notes:
    the last line of a statement or of a head -> values by name; called: names of functions that
    main calls; hidden: of the others; folded: lines that do not run.
    """

    def __init__(self, name):
        self.name = name
        self.source = (ROOT / f"{name}.py").read_text()
        self.lines = self.source.split("\n")
        self.text, _ = sync.split(self.source)
        self.module = ast.parse(self.text)
        self.docstring = ast.get_docstring(self.module, clean=False)
        self.equations = {number: text for text, number in EQUATION.findall(self.docstring)}
        self.where = self.find_equations()
        self.first = {line: number for number, line in reversed(self.where.items())}
        self.by_name = {node.name: node for node in ast.parse(self.source).body
                        if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        self.functions = {node.name: watch.Function(node) for node in self.module.body
                          if isinstance(node, ast.FunctionDef)}
        self.statements = {line: statement for function in self.functions.values()
                           for line, statement in function.statements.items()}
        self.losses = {self.statements[line].end_lineno: re.match(r"\w+", self.equations[number])[0]
                       for number, line in self.where.items() if self.equations[number][0] == "L"}
        self.script = importlib.import_module(name)
        self.cfg = example.config(name)
        self.run_example()
        self.read_words()

    def find_equations(self):
        """The line of each equation. ValueError unless it has one, and each tag an equation."""
        tags = [(number, line) for line, text in enumerate(self.text.split("\n"), start=1)
                for number in TAG.findall(text)]
        for number, line in tags:
            if number not in self.equations:
                raise ValueError(f"{self.name}.py, line {line}: the docstring has no equation "
                                 f"({number})")
        for number in self.equations:
            count = [of for of, _ in tags].count(number)
            if count != 1:
                raise ValueError(f"{self.name}.py: eq. ({number}) is on {count} lines, instead of "
                                 "on one")
        return dict(tags)

    def run_example(self):
        """Run the example, and find which lines run, what they compute, and which the page
        folds."""
        calls = example.run(self.name, "", self.functions.values(), self.losses)
        self.calls = {"": best_calls(calls)}
        self.notes = {line: values for call in self.calls[""].values()
                      for line, values in call.values.items()}
        self.called = list(dict.fromkeys(call.function.name for call in calls))
        self.hidden = set(self.functions).difference(self.called)
        self.ran = set().union(*(call.ran for call in calls))
        self.folded = set()
        for function in map(self.functions.get, self.called):
            is_folded = False                   # a blank line, or an else, is like the next line
            for line in range(function.node.end_lineno, function.head, -1):
                if line in function.statements:
                    is_folded = self.is_idle(function.statements[line])
                if is_folded:
                    self.folded.add(line)

    def is_idle(self, statement):
        """Whether a first reading can do without a statement: it does not run, or nothing inside it
        does, or it is a function inside another."""
        if isinstance(statement, (ast.If, ast.For)):
            return not any(part.lineno in self.ran for part in statement.body + statement.orelse)
        return isinstance(statement, ast.FunctionDef) or (
            statement.lineno not in self.ran and not is_docstring(statement))

    def value(self, function, name, flags=None):
        """What a function assigned, also with the flags of a variant, and on which line.
        -> a tensor or a number, int"""
        flags = flags or ""
        if flags not in self.calls:
            self.calls[flags] = best_calls(
                example.run(self.name, flags, self.functions.values(), self.losses))
        if function in self.calls[flags]:
            for line, values in sorted(self.calls[flags][function].values.items()):
                for label, value in values.items():
                    if label.replace(" ", "") == name.replace(" ", ""):
                        return value, line
        raise ValueError(f"{self.name}.txt: {self.name}.py has no value {function}.{name} {flags}")

    def rows(self, function, name):
        """The same, as numbers of outputs and tokens. -> list of lists"""
        return in_batch(self.value(function, name)[0])

    @property
    def limits(self):
        """The range of the clip. -> pair of floats"""
        return 1 - self.cfg.epsilon, 1 + self.cfg.epsilon_high

    def tokens(self):
        """The tokens of the example, with what the clip does to them; `kind` has the classes of one
        in a drawing. -> list"""
        A, ratio, loss = (self.rows("policy_loss", name) for name in ("A", "ratio", "token_loss"))
        clipped = self.clipped()
        found = []
        for i, tokens in enumerate(example.ANSWERS):
            for t, text in enumerate(tokens):
                worth = A[i][t % len(A[i])]
                kind = f"tok {'up' if worth > 0 else 'down'}{' hit' * clipped[i][t]}"
                found.append(types.SimpleNamespace(
                    row=i + 1, place=t + 1, text=text, kind=kind, A=worth, ratio=ratio[i][t],
                    loss=loss[i][t], is_clipped=clipped[i][t]))
        return found

    def clipped(self):
        """Which tokens have an advantage and no gradient; None without a clip. -> lists of bool"""
        if "is_clipped" not in self.functions:
            return None
        loss = self.equations["3"].partition("=")[0]
        A, gradients = (self.rows("policy_loss", name) for name in ("A", f"∂{loss}/∂log π"))
        return [[g == 0 and a != 0 for g, a in zip(of_row, values * 3)]
                for of_row, values in zip(gradients, A)]

    def read_words(self):
        """ValueError unless the words are about functions that exist, and each function is in
        them."""
        self.sections = {section.names[0]: section for section in words.read(self.name)}
        about = {name for section in self.sections.values() for name in section.names}
        for name in about - {"algorithm", "map", "flags", self.name}:
            if not hasattr(self.script, name):
                raise ValueError(f"{self.name}.txt: {self.name}.py has no {name}")
        for name in self.functions:
            if name not in about | {"main"}:
                raise ValueError(f"{self.name}.txt: nothing is said about {name}")

    def line_of(self, word):
        """The last line of main that calls a word, or loops while it is small, and is not folded.
        -> int"""
        pattern = re.compile(rf"\b{word}(\(| < )")
        found = [line for line in span(self.by_name["main"])
                 if line not in self.folded and pattern.search(self.lines[line - 1])]
        if not found:
            raise ValueError(f"{self.name}.txt: main has no {word}")
        return found[-1]


def is_docstring(statement):
    """Whether a statement is no more than a text."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def best_calls(calls):
    """The call of each function whose values are shown, so that they fit each other: that which
    runs most statements, then by backward, on the first line, in the last pass. -> dict"""
    return {call.function.name: call for call in sorted(
        calls, key=lambda call: (len(call.ran), call.by == "backward", -call.site))}


def in_batch(tensor):
    """A value in the places of the outputs: four lists of up to three numbers, without those behind
    the end of an output. A number for a pair stands at the chosen output, which is the first or the
    second. None if the value has no rows, or is one number, or numbers of rows."""
    if not isinstance(tensor, torch.Tensor) or tensor.numel() == 1:
        return None
    if tensor.shape == (1, 4):                          # (P, G)
        tensor = tensor.T
    are_rows = tensor.dtype == torch.long and tensor[0].numel() == 1
    if are_rows or len(tensor) > 4 or tensor.dim() > 2 or tensor[0].numel() > 3:
        return None
    rows = tensor.reshape(len(tensor), -1).tolist() + [[]] * (4 - len(tensor))
    return [row[:len(tokens)] for row, tokens in zip(rows, example.ANSWERS)]


def span(node):
    """The lines of a function or a class. -> range"""
    return range(first_line(node), node.end_lineno + 1)
