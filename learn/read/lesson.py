"""Analyze a script for its page: the text of the lesson, the equations and their lines, the values
that the lines compute on the worked example, and the lines that a first reading needs."""
import ast
import importlib
import re

import torch

from learn import sync
from learn.read import example, watch, words
from learn.read.watch import first_line
from learn.script import Script


class Lesson(Script):
    """A script, and its lesson, which is the part above the machinery.

    sections: name of the first function -> words.Section of the text file
    where: number of an equation -> line; first: line -> the first number on it
    body: AST nodes of the lesson; functions: name -> AST node, of the lesson's functions alone
    statements: line -> AST node
    losses: last line of a statement -> name of the losses of tokens or pairs that it computes
    ran: first lines of the statements that run with the flags of the page
    calls: extra flags -> function name -> the watch.Call whose values are shown
    notes: last line of a statement, or of a function's head -> values by name
    called, hidden: names of the functions that main calls, and of all other functions
    folded: lines that do not run
    """

    def __init__(self, name):
        super().__init__(f"{name}.py")
        self.name = name
        end = sync.split(self.source)[0].count("\n")
        self.body = [node for node in self.tree.body if node.lineno <= end]
        self.functions = {name: node for name, node in self.functions.items() if node in self.body}
        self.where = {tag.number: tag.line for tag in self.tags
                      if tag.line <= end and tag.text.startswith("eq.")}
        self.first = {line: number for number, line in reversed(self.where.items())}
        self.statements = watch.statements(part for node in self.functions.values()
                                           for part in node.body)
        self.losses = {self.statements[line].end_lineno: re.match(r"\w+", self.equations[number])[0]
                       for number, line in self.where.items() if self.equations[number][0] == "L"}
        self.script = importlib.import_module(name)
        self.cfg = example.config(name)
        if hasattr(self.cfg, "epsilon"):                # the range of the clip
            self.limits = 1 - self.cfg.epsilon, 1 + self.cfg.epsilon_high
        self.run_example()
        self.read_words()

    def run_example(self):
        """Run the example, and find which lines run, what they compute, and which are folded."""
        calls = example.run(self, "")
        self.calls = {"": best_calls(calls)}
        self.notes = {line: values for call in self.calls[""].values()
                      for line, values in call.values.items()}
        self.called = list(dict.fromkeys(call.function.name for call in calls))
        self.hidden = set(self.functions).difference(self.called)
        docstrings = {node.body[0].lineno for node in self.functions.values()}
        self.ran = docstrings.union(*(call.ran for call in calls))
        self.folded = set()
        for node in map(self.functions.get, self.called):
            is_folded = False                   # a blank line or an else is treated like the next
            for line in range(node.end_lineno, node.body[0].lineno - 1, -1):
                if line in self.statements:
                    is_folded = self.is_idle(self.statements[line])
                if is_folded:
                    self.folded.add(line)

    def is_idle(self, statement):
        """Whether a first reading does not need a statement: it does not run, nothing inside it
        runs, or it is a function inside another function."""
        if isinstance(statement, (ast.If, ast.For)):
            return not any(part.lineno in self.ran for part in statement.body + statement.orelse)
        return isinstance(statement, ast.FunctionDef) or statement.lineno not in self.ran

    def value(self, function, name, flags=""):
        """Find a value that a function assigned, with extra flags for a variant, and its line.
        -> a tensor or a number, int"""
        if flags not in self.calls:
            self.calls[flags] = best_calls(example.run(self, flags))
        if function in self.calls[flags]:
            for line, values in sorted(self.calls[flags][function].values.items()):
                for label, value in values.items():
                    if label.replace(" ", "") == name.replace(" ", ""):
                        return value, line
        raise ValueError(f"{self.name}.txt: {self.name}.py has no value {function}.{name} {flags}")

    def rows(self, function, name):
        """The numbers of a value, by output and token. -> list of lists"""
        return in_batch(self.value(function, name)[0])

    def clipped(self):
        """Which tokens have an advantage but no gradient; None without a clip. -> lists of bool"""
        if "is_clipped" not in self.functions:
            return None
        loss = self.equations[3].partition("=")[0]
        A, gradients = (self.rows("policy_loss", name) for name in ("A", f"∂{loss}/∂log π"))
        return [[g == 0 and a != 0 for g, a in zip(row, values * 3)]
                for row, values in zip(gradients, A)]

    def read_words(self):
        """Read the text file. ValueError if it names a function that does not exist, or leaves out
        a function of the script."""
        self.sections = {section.names[0]: section for section in words.read(self.name)}
        explained = {name for section in self.sections.values() for name in section.names}
        explained -= {"algorithm", "map", "numbers", "flags", "next", self.name}
        for name in explained - self.by_name.keys():
            raise ValueError(f"{self.name}.txt: {self.name}.py has no function {name}")
        for name in self.functions.keys() - explained - {"main"}:
            raise ValueError(f"{self.name}.txt: no section explains {name}; add one")

    def line_of(self, word):
        """The last visible line of main that calls `word`, or loops while it is below a number."""
        pattern = re.compile(rf"\b{word}(\(| < )")
        lines = [line for line in span(self.by_name["main"])
                 if line not in self.folded and pattern.search(self.lines[line - 1])]
        if not lines:
            raise ValueError(f"{self.name}.txt: main has no {word}")
        return lines[-1]


def best_calls(calls):
    """Choose for each function the call whose values are shown: the one that runs the most
    statements. Ties go to calls from backward, then to the earliest line, then to the last pass, so
    that the values of different functions fit together. -> dict"""
    return {call.function.name: call for call in sorted(
        calls, key=lambda call: (len(call.ran), call.by == "backward", -call.site))}


def in_batch(tensor):
    """Arrange a value by outputs: four lists of up to three numbers, without numbers after the end
    of an output. The number of a pair goes to its chosen output, which is the first or the second.
    None if the value has no rows, is a single number, or contains row numbers."""
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
