"""A script as what its page shows: the lesson's text, the equations and their lines, the values
that the lines take on the worked example, and which lines a first reading needs."""
import ast
import dataclasses
import importlib
import re
from pathlib import Path

import torch

import common
from tools.read import example, lines, watch, words

ROOT = Path(__file__).resolve().parents[2]
EQUATION = re.compile(r"^  (\S.*?)\s+\((\d+)\)$", re.M)
TAG = re.compile(r"eq\. \((\d+)\)")


@dataclasses.dataclass
class Note:
    """What a statement assigned, name -> watch.Value, and the flags of the variant to which that
    belongs, if it is not what the page shows."""
    values: dict
    flags: str = ""


@dataclasses.dataclass
class Token:
    """One token of the example, of an output and at a place in it, which count from 1."""
    row: int
    place: int
    text: str
    ratio: float
    loss: float
    A: float
    is_clipped: bool

    @property
    def name(self):
        """Its class, by which it lights up everywhere."""
        return f"t{self.row}{self.place}"


class Lesson:
    """The part of a script above the machinery.

    sections: of its text file, name of the first function -> words.Section; docstring;
    equations: number -> text; where: number -> line; by_name: of functions and classes,
    name -> AST node; functions: name -> watch.Function; runs: flags -> list of watch.Call; calls:
    flags -> function -> that whose values are shown; notes: the last line of a statement -> Note;
    given: function -> Note of its arguments; kinds: line -> variant, log, or idle if it changes
    nothing in any run; flags: first line of a statement -> flags of variants with which it acts;
    called: names of functions in the order in which main calls them; hidden: of functions that only
    variants call, or only the log -> which.
    """

    def __init__(self, name):
        self.name = name
        self.source = (ROOT / f"{name}.py").read_text()
        self.lines = self.source.split("\n")
        text = self.source.partition(common.MACHINERY)[0]
        self.module = ast.parse(text)
        self.docstring = ast.get_docstring(self.module, clean=False)
        self.equations = {number: text for text, number in EQUATION.findall(self.docstring)}
        self.where = self.find_equations(text)
        self.by_name = {node.name: node for node in self.module.body
                        if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        self.functions = {function.name: function for function in watch.functions(text)}
        self.script = importlib.import_module(name)
        self.cfg = common.parse_flags(self.script.Config, example.words(name, ""))
        self.runs = self.run_example()
        self.sort_lines()
        self.notes, self.given = {}, {}
        for flags in self.runs:
            self.take_notes(flags)
        self.sections = {section.names[0]: section for section in words.read(name)}
        self.check_words()

    def find_equations(self, text):
        """The line of each equation. ValueError unless it has one, and each tag an equation."""
        found = {number: [] for number in self.equations}
        for line, code in enumerate(text.split("\n"), start=1):
            for number in TAG.findall(code):
                if number not in found:
                    raise ValueError(f"{self.name}.py, line {line}: the docstring has no equation "
                                     f"({number})")
                found[number].append(line)
        for number, places in found.items():
            if len(places) != 1:
                raise ValueError(f"{self.name}.py: eq. ({number}) is on {len(places)} lines, "
                                 "instead of on one")
        return {number: places[0] for number, places in found.items()}

    def run_example(self):
        """As the page shows it, and with the flags of each variant. Below losses of tokens or pairs
        stands their derivative. -> dict"""
        losses = {}
        for number, text in self.equations.items():
            left = text.partition("=")[0].strip()
            if left.startswith("L"):
                losses[self.where[number]] = left
        return {flags: example.run(self.name, flags, self.functions.values(), losses)
                for flags in example.variants(self.name)}

    # ---- which lines ---------------------------------------------------------------------------

    def sort_lines(self):
        """Which lines and functions are of variants, which for the log. A call from a line for the
        log does not make its callee run, so this goes on until no more lines are for the log."""
        with_effects = lines.with_effects(self.functions.values())
        log = {}
        while True:
            kept = {flags: reached(calls, log) for flags, calls in self.runs.items()}
            acts = {flags: by_function(calls, "acts") for flags, calls in kept.items()}
            idle = {name: lines.idle(self.functions[name], of) for name, of in acts[""].items()}
            found = {name: lines.for_the_log(self.functions[name], of, with_effects) - idle[name]
                     for name, of in acts[""].items()}
            if found == log:
                break
            log = found
        ran = {flags: by_function(calls, "ran") for flags, calls in kept.items()}
        self.calls = {flags: best_calls(calls) | best_calls(kept[flags])
                      for flags, calls in self.runs.items()}
        self.called = list(acts[""])
        self.flags = {}
        for flags in self.runs:
            for name, of in ran[flags].items():
                new = of - ran[""].get(name, set()) | acts[flags].get(name, set())
                for line in new - acts[""].get(name, set()):
                    self.flags.setdefault(line, []).append(flags)
        self.kinds = {}
        for name in self.called:
            function = self.functions[name]
            self.kinds |= dict.fromkeys(log[name], "log")
            for line in idle[name]:
                first = function.statements.get(line, function.node).lineno
                is_idle = first in ran[""][name] and first not in self.flags
                is_idle = is_idle and isinstance(function.statements[line], ast.Assign)
                self.kinds[line] = "idle" if is_idle else "variant"
            self.kinds |= dict.fromkeys(lines.preparing(function, self.kinds), "variant")
        for_log = {call.function.name for call in self.runs[""]}
        self.hidden = {name: "log" if name in for_log else "variant" for name in self.functions
                       if name not in self.called}
        for of in acts.values():
            self.hidden |= {name: "variant" for name in of if name in self.hidden}

    def names_read(self, function):
        """The names that those of its lines read which are not folded. -> set"""
        shown = [(statement, heads) for statement, heads in lines.simple(function.node.body)
                 if not self.kinds.get(statement.lineno)]
        return set().union(*(lines.loaded(part) for statement, heads in shown
                             for part in [statement, *map(lines.condition, heads)]))

    # ---- values --------------------------------------------------------------------------------

    def take_notes(self, flags):
        """Keep values of statements that act only with these flags, or with those of the page, and
        what functions are given."""
        for name, call in self.calls[flags].items():
            if not flags and self.hidden.get(name) == "variant":
                continue
            self.given.setdefault(name, Note(call.given, flags))
            for line, values in call.values.items():
                first = call.function.statements[line].lineno
                if line not in self.notes and (not flags or flags in self.flags.get(first, ())):
                    self.notes[line] = Note(values, flags)

    def value(self, function, name, flags=""):
        """What a function assigned, also with the flags of a variant, and on which line.
        -> watch.Value, int"""
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

    def tokens(self):
        """The tokens of the example, with what the clip does to them. -> list of Token"""
        A, ratio, loss = (self.rows("policy_loss", name) for name in ("A", "ratio", "token_loss"))
        clipped = self.clipped()
        return [Token(i + 1, t + 1, text, ratio[i][t], loss[i][t], A[i][t % len(A[i])],
                      clipped[i][t])
                for i, answer in enumerate(example.ANSWERS) for t, text in enumerate(answer)]

    def clipped(self):
        """Which tokens have an advantage and no gradient; None without a clip. -> lists of bool"""
        if "is_clipped" not in self.functions:
            return None
        (name,) = (name for values in self.calls[""]["policy_loss"].values.values()
                   for name in values if name.startswith("∂"))
        A, gradients = self.rows("policy_loss", "A"), self.rows("policy_loss", name)
        return [[g == 0 and a != 0 for g, a in zip(of_row, values * 3)]
                for of_row, values in zip(gradients, A)]

    # ---- words ---------------------------------------------------------------------------------

    def check_words(self):
        """ValueError unless the words are about functions that exist, each function is in them, and
        those that are not hidden come as main calls them."""
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

    def line_of(self, function, word):
        """The first line of a function that calls a word, or loops over it, in the loop of the
        function if it is there. -> int"""
        function = self.functions[function]
        for line in sorted(function.statements, key=lambda line: (line < function.loop, line)):
            is_folded = self.kinds.get(line) == "variant"
            if not is_folded and re.search(rf"\b{word}(\(| in )", self.lines[line - 1]):
                return line
        raise ValueError(f"{self.name}.txt: {function.name} has no {word}")


def reached(calls, log):
    """The calls but for those from lines that do not act, or for the log, and what these call. log:
    function -> lines. -> list"""
    kept = {}
    for call in calls:
        above = call.above
        if above is not None:
            site = above.function.statements[call.site]
            if (id(above) not in kept or call.site not in above.acts
                    or call.site in log.get(above.function.name, ())
                    or call.function.name not in lines.read_besides_dicts(site)):
                continue
        kept[id(call)] = call
    return list(kept.values())


def by_function(calls, which):
    """The first lines of the statements that act, or only ran. -> dict: function -> set"""
    found = {}
    for call in calls:
        found.setdefault(call.function.name, set()).update(getattr(call, which))
    return found


def best_calls(calls):
    """The call of each function whose values are shown, one, so that they fit each other: that
    which runs most statements, then by backward, on the first line, in the last pass. -> dict"""
    best = {}
    for index, call in enumerate(calls):
        by = call.above.function.name if call.above else ""
        rank = len(call.ran), by == "backward", -call.site, index
        best[call.function.name] = max(best.get(call.function.name, ((), None)), (rank, call),
                                       key=lambda pair: pair[0])
    return {name: call for name, (_, call) in best.items()}


def in_batch(value):
    """A value in the places of the outputs: four lists of up to three numbers, without those behind
    the end of an output. A number for a pair stands at the chosen output. None if the value has no
    rows, or is one number, or numbers of rows."""
    tensor = value.tensor
    if not isinstance(tensor, torch.Tensor) or tensor.numel() == 1:
        return None
    if tensor.shape == (1, 4):                          # (P, G)
        tensor = tensor.T
    is_of_batch = len(tensor) <= 4 and tensor.dim() <= 2 and tensor[0].numel() <= 3
    are_rows = tensor.dtype == torch.long and tensor[0].numel() == 1
    if not is_of_batch or are_rows:
        return None
    has_all = value.rows is None or len(value.rows) != len(tensor)
    rows = range(len(tensor)) if has_all else value.rows
    found = [[], [], [], []]
    for row, numbers in zip(rows, tensor.reshape(len(tensor), -1).tolist()):
        found[row] = numbers[:len(example.ANSWERS[row])]
    return found
