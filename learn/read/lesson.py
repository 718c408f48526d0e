"""A script as what its page shows: the lesson's text, the equations and their lines, the values
that the lines take on the worked example, and which lines a first reading needs."""
import ast
import importlib
import re
import types
from pathlib import Path

import torch

from learn import sync
from learn.read import example, lines, watch, words
from learn.read.watch import first_line

ROOT = Path(__file__).resolve().parents[2]
EQUATION = re.compile(r"^  (\S.*?)\s+\((\d+)\)$", re.M)
TAG = re.compile(r"eq\. \((\d+)\)")


class Lesson:
    """The part of a script above the machinery.

    sections: of its text file, name of the first function -> words.Section; docstring;
    equations: number -> text; where: number -> line; first: line -> its first number; by_name: name
    -> AST node of a function or a class, those of the machinery, too; functions: name ->
    watch.Function; statements: line -> AST node; ran: first lines of statements that run without
    more flags; calls: flags -> function -> watch.Call whose values are shown; notes: the last line
    of a statement or of a head -> values by name, and the flags of a variant; folded: lines without
    effect on the gradient; flags: first line of a statement -> flags of variants that need it;
    called: names of functions in the order in which main calls them; hidden: those that it calls
    only for variants or the log.
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
        self.take_notes()
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

    def text_of(self, name):
        """A function in its place: behind as many empty lines as stand before it. -> str"""
        place = span(self.by_name[name])
        before = place[0] - 1
        return "\n" * before + "\n".join(self.lines[before:place[-1]])

    def run(self, flags="", removed=frozenset(), is_watched=True):
        """The example without some lines. -> what it does, list of watch.Call"""
        functions = [lines.without(self.text_of(name), removed.intersection(span(function.node)),
                                   self.script.__file__)
                     for name, function in self.functions.items()]
        watched = self.functions.values() if is_watched else ()
        return example.run(self.name, flags, functions, watched, self.losses)

    def shorten(self, flags, candidates, removed=frozenset()):
        """As lines.shorten."""
        return lines.shorten(lambda lines: self.run(flags, lines, False)[0], candidates, removed)

    def run_example(self):
        """Find which lines and functions are of variants, which for the log, and what all compute.
        Asserts are not taken away."""
        _, calls = self.run()
        ran = lines_of(calls)
        never = {statement.lineno for statement in self.statements.values()} - ran
        lines_that_act = {line for line in ran if not isinstance(self.statements[line], ast.Assert)}
        removed = self.shorten("", lines_that_act, frozenset(never))
        idle = removed - never
        _, short = self.run("", removed)
        self.ran = ran
        self.calls = {"": best_calls(calls) | best_calls(short)}
        self.called = list(dict.fromkeys(call.function.name for call in short))
        self.hidden = set(self.functions).difference(self.called)
        self.flags = {}
        for flags in example.variants(self.name)[1:]:
            new = lines_of(self.run(flags)[1]) - ran
            idle_here = self.shorten(flags, idle)
            _, calls = self.run(flags, idle_here)
            for line in new | (idle - idle_here):
                self.flags.setdefault(line, []).append(flags)
            self.calls[flags] = best_calls(calls)
        self.find_folded(removed)

    def find_folded(self, removed):
        """Find the lines that the page folds; a blank one, or an else, is like the next."""
        self.folded = set()
        for name in self.called:
            function = self.functions[name]
            is_folded = False
            for line in range(function.node.end_lineno, function.head, -1):
                statement = function.statements.get(line)
                if statement is not None:
                    is_folded = isinstance(statement, ast.FunctionDef) or (
                        statement.lineno in removed and not lines.is_kept(statement))
                if is_folded:
                    self.folded.add(line)

    def take_notes(self):
        """Keep values of statements that act only with the flags of a variant, or with those of the
        page, and what functions are given."""
        self.notes = {}
        first, *variants = self.calls.items()
        for flags, calls in [*variants, first]:
            for name, call in calls.items():
                for line, values in call.values.items():
                    acts = not flags or name in self.hidden and line == call.function.head
                    statement = self.statements.get(line, call.function.node)
                    if acts or flags in self.flags.get(statement.lineno, ()):
                        self.notes.setdefault(line, (values, flags))

    def value(self, function, name, flags=""):
        """What a function assigned, also with the flags of a variant, and on which line.
        -> a tensor or a number, int"""
        if function in self.calls.get(flags or "", ()):
            for line, values in sorted(self.calls[flags or ""][function].values.items()):
                for label, value in values.items():
                    if label.replace(" ", "") == name.replace(" ", ""):
                        return value, line
        raise ValueError(f"{self.name}.txt: {self.name}.py has no value {function}.{name} "
                         f"{flags or ''}")

    def rows(self, function, name, flags=""):
        """The same, as numbers of outputs and tokens. -> list of lists"""
        return in_batch(self.value(function, name, flags)[0])

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
        """ValueError unless the words are about functions that exist, each function is in them, and
        those that are not hidden come as main calls them."""
        self.sections = {section.names[0]: section for section in words.read(self.name)}
        about = [name for section in self.sections.values() for name in section.names]
        about = [name for name in about if name not in ("algorithm", "map", "flags", self.name)]
        for name in about:
            if not hasattr(self.script, name):
                raise ValueError(f"{self.name}.txt: {self.name}.py has no {name}")
        for name in self.functions:
            if name not in (*about, "main"):
                raise ValueError(f"{self.name}.txt: nothing is said about {name}")
        firsts = [name for name in self.sections if name in self.called]
        if firsts != sorted(firsts, key=self.called.index):
            raise ValueError(f"{self.name}.txt: main calls {', '.join(self.called)}")

    def line_of(self, word):
        """The last line of main that calls a word, or loops while it is small, and is not folded.
        -> int"""
        pattern = re.compile(rf"\b{word}(\(| < )")
        found = [line for line in span(self.by_name["main"])
                 if line not in self.folded and pattern.search(self.lines[line - 1])]
        if not found:
            raise ValueError(f"{self.name}.txt: main has no {word}")
        return found[-1]


def lines_of(calls):
    """The first lines of the statements that ran. -> set"""
    return set().union(*(call.ran for call in calls))


def best_calls(calls):
    """The call of each function whose values are shown, one, so that they fit each other: that
    which runs most statements, then by backward, on the first line, in the last pass. -> dict"""
    def rank(call):
        return len(call.ran), call.by == "backward", -call.site

    return {call.function.name: call for call in sorted(calls, key=rank)}


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
