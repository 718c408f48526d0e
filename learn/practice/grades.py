"""Grade a learner's file: call its functions and the script's with the same made-up numbers.

A function is right if it returns the same numbers as in the script, with the same gradients, no
matter how it is written. A function whose name ends in "loss" needs only the same gradients,
because a policy learns from nothing else. They are those of the sum, and of the sum with random
weights, so that no loss can be in another's place. While one function is graded, all other
functions with blanks are the script's. If a function is wrong, the first of its blanks that differs
is named. The right numbers are computed from the batches of numbers.txt; no result is stored.
"""
import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import multiprocessing
import os
import re
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, get_args

import torch

from learn.practice import loop
from learn.practice.exercise import Exercise, mistakes, set_by
from learn.record import Recorder
from learn.script import tags
from report import escape
from vectors.edits import load

AVERAGES = {"reinforce.py": "sequence_sum", "ppo.py": "token_mean"}     # else sequence_mean
# Arguments that have gradients (the values that gae gets do not).
LEAVES = ("logps", "log_rho", "values", "chosen", "rejected", "x")
# Arguments that get no gradient where the script detaches them. Where it does not, it does not
# matter, because its callers compute them without gradients.
CONSTANTS = ("old_logps",)
LIMIT = 20              # seconds in which a file has to load, and each function has to be graded
SPAWN = multiprocessing.get_context("spawn")
# for the script, and for its texts with a planted mistake
load_script = functools.cache(functools.partial(load, name="practised"))


# ---- 1. a function, called -------------------------------------------------------------------

@functools.cache
def batches():
    """Read the batches of numbers.txt. -> list of dicts, name -> text"""
    found = [{}]
    for line in Path(__file__).with_name("numbers.txt").read_text("utf-8").splitlines():
        if line.startswith("=="):
            found.append(dict(found[-1]))
        elif line and line[0] != "#":
            found[-1] |= (entry.split(maxsplit=1) for entry in line.split(";"))
    return found[1:]


def arguments(module, function, script, batch):
    """Collect the values of a batch for a function's parameters, by their names. -> dict"""
    @functools.cache
    def value(text):
        if text in batch or text == "None":
            return value(batch[text]) if text in batch else None
        rows = [[float(word) for word in row.split()] for row in text.split("|")]
        table = torch.tensor(rows if len(rows) > 1 else rows[0], dtype=torch.float64)
        return table if table.numel() > 1 else table.item()

    known = {}
    for owner in ("", script.removesuffix(".py"), function):
        known |= {name.rpartition(".")[2]: value(name) for name in batch
                  if name.rpartition(".")[0] == owner}
    for name in known.keys() & {*LEAVES, *CONSTANTS} - {"values" if function == "gae" else ""}:
        known[name].requires_grad_()
    mask = known["mask"]
    known |= {"rows": torch.arange(3), "critic": lambda prompts, tokens: known["values"],
              "task": SimpleNamespace(token_rewards=lambda batch: known["moves"]),
              "batch": SimpleNamespace(
                  prompts=torch.arange(4)[:, None], tokens=torch.zeros(mask.shape).long(),
                  mask=mask, logps=known["old_logps"],
                  lengths=(mask * torch.arange(1, mask.shape[1] + 1)).amax(dim=1).long(),
                  rewards=torch.zeros(2, 2), is_correct=torch.tensor([[False, True], [True] * 2]))}
    module.score = lambda table, prompts, tokens, *_: (
        table[prompts[:, 0], :tokens.shape[1]], mask[prompts[:, 0], :tokens.shape[1]])
    if function == "pair_loss":
        known |= {"chosen": torch.tensor([0, 2]), "rejected": torch.tensor([1, 3])}
    if hasattr(module, "Config"):
        flags = {"device": "cpu", "nll_coef": known["nll_coef"], "micro_batch_size": 2}
        if script == "reinforce.py":
            flags["beta"] = known["beta"]
        fields = module.Config.__dataclass_fields__
        known["cfg"] = module.Config(**{name: flags[name] for name in flags.keys() & fields})
    return known


def line_of(error, module):
    """Find the last line of a module's text in the traceback of an error. -> int, or 0"""
    frames = traceback.walk_tb(error.__traceback__)
    return ([0] + [line for frame, line in frames if frame.f_globals is vars(module)])[-1]


def cases(exercise, function, module):
    """Call a function of a module with each batch and each value of parameters such as loss_type,
    the script's own value first. -> iterator of Case"""
    options = [("sequence_mean", "token_mean", "sequence_sum", "constant")]
    if hasattr(module, "Config"):
        options += [get_args(field.type) for field in dataclasses.fields(module.Config)]
    chosen = {}
    for word, parameter in inspect.signature(getattr(module, function)).parameters.items():
        usual = (AVERAGES.get(exercise.file, "sequence_mean") if word == "how"
                 else parameter.default)
        for words in options:
            if isinstance(usual, str) and usual in words:
                chosen[word] = sorted(words, key=lambda word: word != usual)
    for batch, words in itertools.product(batches(), itertools.product(*chosen.values())):
        yield Case(exercise, function, module, batch, dict(zip(chosen, words)))


class Case:
    """A call of a function.

    words: the options and single numbers that it gets; given: the names of its arguments
    scope: its variables at the end; lines: name -> the line that set it last; "" -> the last line
    values: of its blanks, up to the first open one; results (both name -> tensor)
    loss: the name of the result that is a loss, or ""; error: a message, or ""
    """

    def __init__(self, exercise, function, module, batch, words):
        known = arguments(module, function, exercise.file, batch) | words
        code = getattr(module, function)
        self.code = inspect.unwrap(code).__code__
        self.is_loss = function.endswith("loss")
        self.leaves = {leaf: known[leaf] for leaf in LEAVES + CONSTANTS
                       if leaf in known and known[leaf].requires_grad}
        self.given = [name for name in inspect.signature(code).parameters if name in known]
        self.words = words | {name: numbers(known[name]) for name in self.given
                              if isinstance(known[name], float)}
        self.scope = {}
        self.lines = {}
        self.values = {}
        self.results = {}
        self.loss = ""
        self.error = ""
        tensors = {name: known[name] for name in sorted(self.given) if torch.is_tensor(known[name])}
        try:
            with Recorder(lambda frame: self if frame.f_code is self.code else None):
                result = code(**{name: known[name] for name in self.given})
            self.keep(result)
            self.results |= {f"{name} after the call": tensor.detach()
                             for name, tensor in tensors.items()}
        except BaseException as raised:         # a learner's line may raise anything
            first = str(raised).partition("\n")[0]
            shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
            self.error = escape(f"{type(raised).__name__}: {first}  (shapes: {shapes})")
            self.lines[""] = line_of(raised, module) or self.lines.get("", 0)
        with contextlib.suppress(Exception):            # a blank is open
            self.keep_values(blank.name for blank in exercise.blanks[function])

    def step(self, frame, _event, _arg):
        """Keep the variables, and the lines that set them, before each line and at the end."""
        for name, value in frame.f_locals.items():
            if value is not self.scope.get(name):
                self.lines[name] = self.lines.get("", 0)
        self.scope.update(frame.f_locals)
        self.lines[""] = frame.f_lineno

    def keep(self, result):
        """Keep what the function returned, with gradients."""
        if result is None:
            raise TypeError("the function returns nothing: is its return line missing?")
        parts = result if isinstance(result, tuple) else [result]
        names = [f"result {number + 1}" for number in range(len(parts))]
        for name, part in zip(names if len(parts) > 1 else ["the result"], parts):
            part = torch.tensor([*part.values()]) if isinstance(part, dict) else part
            part = torch.as_tensor(part)
            self.results |= {name: part.detach().double()} | self.gradients(name, part)
        self.loss = next(iter(self.results)) if self.is_loss else ""

    def keep_values(self, names):
        """Keep the values of blanks; of a loss, its gradients."""
        mask = self.scope.get("mask")
        for name in dict.fromkeys(name for name in names if name in self.scope):
            value = torch.as_tensor(self.scope[name])
            if torch.is_tensor(mask) and mask.shape == value.shape:
                value = torch.where(mask > 0, value, 0.0)
            self.values |= (self.gradients(name, value) if name.endswith("loss")
                            else {name: value.detach().double()})

    def gradients(self, what, value):
        """Compute the gradients in all leaves of the sum of a value, and of its sum with fixed
        random weights. -> {name: gradient}"""
        weights = torch.rand(value.shape, generator=torch.Generator().manual_seed(0))
        totals = {what: value.sum()}
        if value.dim() > 0:
            totals[f"{what} with random weights"] = (weights * value).sum()
        result = {}
        for name, total in totals.items():
            found = map(torch.zeros_like, self.leaves.values())
            if value.requires_grad:
                found = torch.autograd.grad(total, list(self.leaves.values()), retain_graph=True,
                                            materialize_grads=True)
            result |= {f"the gradient of {name} with respect to {leaf}": gradient
                       for leaf, gradient in zip(self.leaves, found)}
        return result


# ---- 2. the grades ---------------------------------------------------------------------------

class Wrong(NamedTuple):
    case: SimpleNamespace
    what: str
    found: torch.Tensor
    should: torch.Tensor
    lines: dict             # of the right case: name -> line


def difference(right, mine, is_open=False):
    """Compare the cases of a function: its results and, if these differ, the values of its blanks,
    of which the first wrong one is reported. If a blank is open, the results of a case that needs
    it are not compared. -> None, a sentence, or Wrong"""
    def compare(case, own, kind):
        there = getattr(own, kind)
        for what, should in getattr(case, kind).items():
            found = there.get(what, should)
            if what.endswith(CONSTANTS) and should.any():
                continue
            if what == own.loss and found.shape == should.shape:
                found = torch.where(found.isfinite(), should, found)
            if found.shape != should.shape or not torch.allclose(
                    found, should, 1e-6, 1e-9, equal_nan=True):
                return Wrong(own, what, found, should, case.lines)
        return None

    for case, own in zip(right, mine):
        wrong = (f"line {own.lines.get('')}: {own.error}" if own.error != case.error
                 else compare(case, own, "results"))
        if is_open:
            wrong = (own.values.keys() - case.values.keys() or compare(case, own, "values")
                     or (None if own.error else compare(case, own, "results")))
        if wrong:
            return compare(case, own, "values") or wrong
    return None


def grades_of(path, exercise):
    """Grade a learner's file in a child process, because the file may end its process, or never
    end. ValueError with one line if it does, or cannot run. -> iterator of what `grades` yields"""
    receiver, sender = SPAWN.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        stack = Path(folder, "stack")
        child = SPAWN.Process(target=send_grades, daemon=True,
                              args=(sender, stack, path, exercise.file, LIMIT))
        child.start()
        sender.close()
        try:
            while True:
                is_there = receiver.poll(100 + LIMIT)      # a slow machine loads torch for a minute
                graded = receiver.recv() if is_there else ": cannot be stopped"
                if isinstance(graded, str):
                    raise ValueError(f"{path}{graded}")
                if graded is None:              # all functions are graded
                    return
                yield graded
        except EOFError:
            child.join()
            written = stack.read_text("utf-8") if stack.exists() else ""
            line = ([""] + re.findall(r'"practised.py", line (\d+)', written))[-1]
            raise ValueError(f"{path}{f', line {line}' if line else ''}: " + (
                f"has not ended after {LIMIT} seconds" if written
                else "ends the program before it is graded")) from None
        finally:
            child.kill()


def send_grades(sender, stack, path, file, limit):
    """Send the grades of a file, or what it raises. After the limit, write the stack, and exit."""
    exercise = Exercise(file)
    right = load_script(exercise.source)
    grading = threading.get_ident()

    def stop():
        with open(stack, "w", encoding="utf-8") as lines:
            traceback.print_stack(sys._current_frames()[grading], file=lines)
        os._exit(1)

    timer = threading.Timer(limit, stop)
    timer.start()
    try:
        for graded in grades(exercise, path.read_text(encoding="utf-8-sig")):
            sender.send(graded)
            timer.cancel()
            timer = threading.Timer(limit, stop)
            timer.start()
        sender.send(None)
    except SyntaxError as error:
        sender.send(f", line {error.lineno}: {error.msg}")
    except BaseException as error:              # a file may raise anything
        line = line_of(error, sys.modules.get("practised", right))
        sender.send(f", line {line}: {type(error).__name__}: {escape(str(error))}")
    timer.cancel()


def grades(exercise, source):
    """Grade a learner's text. Raises SyntaxError, and what the text itself raises when it runs.
    -> iterator of (function, *what `grade` returns)"""
    tree = ast.parse(source)
    right = load_script(exercise.source)
    mine = load(source, "practised")
    own = dict(vars(mine))
    for function, blanks in exercise.blanks.items():
        vars(mine).update({name: getattr(right, name) for name in exercise.blanks} | {
            function: own.get(function)})
        left = [number for part in tree.body if getattr(part, "name", "") == function
                for node in ast.walk(part) if isinstance(node, (ast.Assign, ast.Return))
                and isinstance(node.value, ast.Constant) and node.value.value is ...
                for number in numbers_of(blanks, node, source.split("\n"))]
        yield function, *grade(exercise, mine, function, left)
    if exercise.file == "nano.py" and exercise.docstring not in source:      # from memory
        is_open = re.search(r"^        \.\.\.", source, re.MULTILINE)
        try:
            found = [] if is_open else loop.fault(mine, load(exercise.source, "right"))
        except BaseException as error:
            found = [f"line {line_of(error, mine)}: {type(error).__name__}: {escape(str(error))}"]
        yield "main", "open" if is_open else "WRONG" if found else "right", found, {}


def numbers_of(blanks, node, lines):
    """Find the equation of an open blank by its comment or, if that is gone, all equations whose
    blanks set the same name. -> list of int"""
    found = tags([lines[node.lineno - 1]])
    return ([found[0].number] if found else
            [one.number for one in blanks if one.name == set_by(node)])


def grade(exercise, mine, function, left=()):
    """Grade a function of a module. left: the numbers of the equations that are still open.
    -> "right" or "WRONG" or "open", sentences, {number of an equation: "is wrong" or "is open"}"""
    if not inspect.isfunction(getattr(mine, function)):
        return "WRONG", [f"the file has no function {function}: copy it from {exercise.file}, "
                         "and write its equations yourself"], {}
    ask = functools.partial(cases, exercise, function)
    right = load_script(exercise.source)
    wrong = difference(ask(right), ask(mine))
    if wrong is None:
        return "right", [], {}
    marks = dict.fromkeys(left, "is open")
    if left:
        wrong = difference(ask(right), ask(mine), is_open=True)
        if not isinstance(wrong, Wrong):
            return "open", [], marks
    blanks = concerned(exercise.blanks[function], wrong)
    equations = {blank.number for blank in blanks}
    if isinstance(wrong, Wrong) or len(equations) == 1:     # an error may come from any of them
        marks |= dict.fromkeys(equations, "is wrong")
    same, first = [], []                # mistakes that explain all numbers, or the first wrong one
    for mistake, its in planted(exercise, exercise.functions[function]):
        known = difference(ask(right), ask(its))
        if difference(ask(its), ask(mine), bool(left)) is None:
            same.append(f"a known mistake gives the same numbers: {mistake.name}")
        elif (isinstance(known, Wrong) and isinstance(wrong, Wrong) and known.what == wrong.what
              and torch.equal(known.found, wrong.found)):
            first.append(f"a known mistake gives this number: {mistake.name}")
    said = dict.fromkeys(same or first)
    return "WRONG", [*explain(blanks, wrong), *[*said][:2]], marks


def concerned(blanks, wrong):
    """Select the blanks that compute a wrong number: by its name, and by the lines that ran."""
    if isinstance(wrong, str):
        return blanks
    blanks = ([blank for blank in blanks if blank.name in wrong.what.split()]
              or [blank for blank in blanks if not blank.name] or blanks)
    ran = [blank for blank in blanks for node in blank.nodes[-1:]
           if node.lineno <= wrong.lines.get(blank.name, 0) <= node.end_lineno]
    return ran or blanks


def planted(exercise, node):
    """Plant each known mistake that is in a function: those of its script and those of grpo.py,
    with which all scripts share functions. -> iterator of (Edit, module)"""
    known = {mistake.hunks: mistake for mistake in mistakes("grpo.py")}
    known |= {mistake.hunks: mistake for mistake in mistakes(exercise.file)}
    for mistake in known.values():
        [(old, _)] = mistake.hunks
        line = exercise.source.partition(old)[0].count("\n") + 1
        if exercise.source.count(old) == 1 and node.lineno <= line <= node.end_lineno:
            yield mistake, load_script(mistake.apply(exercise.source))


def explain(blanks, wrong):
    """Describe a Wrong: the first wrong number, the numbers that it is made from, and whether all
    wrong numbers are off by the same factor. -> list of sentences"""
    if isinstance(wrong, str):
        return [wrong]
    case, what, found, should, _ = wrong
    lines = [case.lines.get(name) for name in what.split()]         # 0 for an argument
    line = next(filter(None, lines), case.lines[""])
    if found.shape != should.shape:
        return [f"line {line}: {what} has the shape {tuple(found.shape)}, but should have "
                f"{tuple(should.shape)}"]
    differ = ~torch.isclose(found, should, 1e-6, 1e-9, equal_nan=True)
    index = tuple(differ.nonzero()[0].tolist())
    text = " ".join(ast.unparse(node) for blank in blanks for node in blank.nodes)
    given = {}
    names = [name for blank in blanks for name in blank.reads() if name != what]
    if {name.partition(".")[0] for name in names} - case.scope.keys():
        names += case.given             # the learner chose other names, so show the arguments
    for name in names:
        with contextlib.suppress(Exception):            # a name that is not a number, or not set
            value = torch.as_tensor(eval(name, {}, case.scope)).detach()
            is_row = re.search(rf"\b{name}(\[.*?\])?\)*\.(mean|std|sum)\(", text)
            is_cell = value.dim() <= differ.dim() and all(
                size in (1, full) for size, full in zip(value.shape[::-1], differ.shape[::-1]))
            if is_cell and not is_row:
                value = value.broadcast_to(differ.shape)[index]
            elif index and value.dim() > 1 and len(value) == len(differ):
                value = value[index[0]]
            given |= {name: numbers(value.tolist())} if value.numel() <= 12 else {}
    given |= {name: value for name, value in case.words.items() if name not in given}
    pair = [table[index].item() for table in (found, should)]
    count = 5 if numbers(pair[0]) != numbers(pair[1]) else 10
    where = f"{what} at {list(index)}" if index else what
    sentences = [f"with {', '.join(map(' '.join, given.items()))}:"] if given else []
    sentences.append("line {}: {} is {}, should be {}".format(
        line, where, *(numbers(x, count) for x in pair)))
    ratios = (found / should)[differ]
    if what.startswith("the gradient") and not found.any():
        sentences.append("no gradient arrives there: is something detached?")
    elif what.startswith("the gradient") and what.endswith(CONSTANTS):
        sentences.append("no gradient should arrive there: is a detach missing?")
    elif (len(ratios) > 2 and 0 < ratios[0].abs() < torch.inf
          and ratios.isclose(ratios[0], rtol=1e-4).all()):
        factor = numbers(ratios[0].item())
        sentences.append(f"every wrong number is {factor} times what it should be")
    return sentences


def numbers(value, count=5):
    """Format a number, or a list of numbers, with `count` digits. -> str"""
    if isinstance(value, list):
        return f"[{', '.join(numbers(part) for part in value)}]"
    return f"{round(value, 9) + 0.0:.{count}g}"
