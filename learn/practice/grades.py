"""What is wrong in a learner's file: its functions and the script's get the same made-up numbers.

Each blank is graded in a copy of the file in which the others are as in the script. It is right if
its function returns the same numbers, with the same gradients, however it is written; else the
value that it sets tells first. What is right is what the script computes from numbers.txt: nowhere
is a result written down.
"""
import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import re
import signal
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple, get_args

import torch

from learn.practice.exercise import mutants
from report import escape

SECONDS = 3                             # for a function with a learner's lines, which may not end
AVERAGES = {"reinforce.py": "sequence_sum", "ppo.py": "token_mean"}     # else sequence_mean
# What has gradients, but for those that a function gets from a torch.no_grad.
LEAVES = ("logps", "old_logps", "values", "chosen", "rejected", "x")
FROZEN = {"grpo_loss": ("old_logps",), "gae": ("values",)}
# What is asked for, too.
EDGES = {"overlong_penalty": {"buffer": (10, 0)}, "aggregate": {"max_length": (6, None)}}


# ---- 1. a function, asked --------------------------------------------------------------------

def arguments(module, function, script):
    """What a function is asked with, by the names of its parameters. -> dict"""
    known = {}
    owners = ("", function, script.removesuffix(".py"))
    for line in Path(__file__).with_name("numbers.txt").read_text().splitlines():
        name, _, text = line.partition(" ")
        owner, _, own = name.rpartition(".")
        if name not in ("", "#") and owner in owners and (owner or own not in known):
            known[own] = known.get(text.strip())        # if it is the name of another line
            if known[own] is None:
                rows = [[float(word) for word in row.split()] for row in text.split("|")]
                table = torch.tensor(rows if len(rows) > 1 else rows[0], dtype=torch.float64)
                known[own] = table if table.numel() > 1 else table.item()
    for name in known.keys() & set(LEAVES) - set(FROZEN.get(function, ())):
        known[name].requires_grad_()
    mask = known["mask"]
    known |= {"rows": torch.arange(3), "critic": lambda prompts, tokens: known["values"],
              "task": SimpleNamespace(token_rewards=lambda batch: known["moves"]),
              "batch": SimpleNamespace(
                  prompts=torch.arange(4)[:, None], tokens=torch.zeros(4, 4).long(), mask=mask,
                  logps=known["old_logps"], lengths=torch.tensor([4, 4, 2, 4]),
                  is_correct=torch.tensor([[True, True], [False, True]]))}
    module.score = lambda table, prompts, tokens, *_: (
        table[prompts[:, 0], :tokens.shape[1]], mask[prompts[:, 0], :tokens.shape[1]])
    if function == "pair_loss":
        known |= {"chosen": torch.tensor([0, 2]), "rejected": torch.tensor([1, 3])}
    if hasattr(module, "Config"):
        flags = {"device": "cpu", "nll_coef": 0.2, "micro_batch_size": 2}
        fields = module.Config.__dataclass_fields__
        known["cfg"] = module.Config(**{name: flags[name] for name in flags.keys() & fields})
    return known


@functools.lru_cache(maxsize=4)
def module_of(text):
    module = sys.modules["practised"] = ModuleType("practised")         # where dataclasses look
    code = compile(text, "practised", "exec")
    limit(SECONDS)
    try:
        exec(code, vars(module))
    finally:
        limit(0)
    return module


@functools.lru_cache(maxsize=1024)
def ask(script, text, function, name=""):
    """Call a function of a text, in which a blank sets `name`, with each choice of a loss_type and
    the like, those of the script's name first. -> list of cases, as `call` returns them"""
    module = module_of(text)
    code = getattr(module, function, None)
    if not inspect.isfunction(code):
        raise ValueError(f"it has no function {function}")
    options = [("sequence_mean", "token_mean", "sequence_sum", "constant")]
    if hasattr(module, "Config"):
        options += [get_args(field.type) for field in dataclasses.fields(module.Config)]
    chosen = dict(EDGES.get(function, {}))
    for word, parameter in inspect.signature(code).parameters.items():
        usual = AVERAGES.get(script, "sequence_mean") if word == "how" else parameter.default
        for words in options:
            if isinstance(usual, str) and usual in words:
                chosen[word] = sorted(words, key=lambda word: word != usual)
    return [call(module, script, function, name, dict(zip(chosen, words)))
            for words in itertools.product(*chosen.values())]


def call(module, script, function, name, words):
    """Call a function. -> its words; names: those at the blank, whenever it is reached; values that
    this sets, and results: lists of (what it is, tensor, names); error: str"""
    known = arguments(module, function, script) | words
    leaves = {leaf: known[leaf] for leaf in LEAVES
              if leaf in known and known[leaf].requires_grad}
    case = SimpleNamespace(words=words, names=[], values=[], results=[], error="")

    def compared(what, value):
        value = torch.as_tensor(value)
        gradients = [leaf.grad for leaf in leaves.values()]
        if value.requires_grad:
            gradients = torch.autograd.grad(
                value.sum(), list(leaves.values()), retain_graph=True, allow_unused=True)
        names = case.names[-1] if case.names else {}
        yield what, value.detach().double(), names
        for (leaf, like), gradient in zip(leaves.items(), gradients):
            gradient = torch.zeros_like(like) if gradient is None else gradient.clone()
            yield f"the gradient in {leaf}", gradient, names

    def after(scope):
        value = torch.as_tensor(scope[name])
        mask = scope.get("mask")
        if torch.is_tensor(mask) and mask.shape == value.shape:
            value = torch.where(mask > 0, value, 0.0)
        case.values.extend(compared(name, value))

    module._before = lambda scope: case.names.append(dict(scope))
    module._after = after
    code = getattr(module, function)
    limit(SECONDS)
    try:
        given = inspect.signature(code).parameters.keys() & known
        result = code(**{name: known[name] for name in given})
        for part in result if isinstance(result, tuple) else [result]:
            part = torch.tensor([*part.values()]) if isinstance(part, dict) else part
            case.results.extend(compared(f"what {function} returns", part))
        case.results += [(f"{word} after the call", known[word].detach(), {})
                         for word in sorted(given) if torch.is_tensor(known[word])]
    except (Exception, SystemExit) as raised:           # a learner's line may raise anything
        first = str(raised).partition("\n")[0]
        case.error = escape(f"{type(raised).__name__}: {first}")
    limit(0)
    return case


def limit(seconds):
    """Let what runs end in so many seconds with a TimeoutError, where there are alarms; 0: not."""
    def stop(*_):
        raise TimeoutError(f"no end in {SECONDS} seconds")
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, stop)
        signal.alarm(seconds)


def alone(exercise, source, places, blank):
    """Ask a text in which all other blanks are as in the script. -> as `ask`"""
    lines = source.split("\n")
    edits = {}                          # first and last line -> what comes there
    for other, nodes in places:
        region = nodes[0].lineno - 1, nodes[-1].end_lineno
        for node in other.nodes:
            edits.setdefault(region, []).extend(exercise.lines[node.lineno - 1:node.end_lineno])
        if other == blank:
            own = region
    edits[own] = framed(blank, lines[slice(*own)])
    for region in sorted(edits, reverse=True):
        lines[slice(*region)] = edits[region]
    return ask(exercise.script, "\n".join(lines), blank.function, blank.name)


def framed(blank, lines):
    """The lines of a blank, between those by which they are watched. -> list"""
    indent = " " * blank.nodes[-1].col_offset
    after = [f"{indent}_after(locals())"] * bool(blank.name)
    return [f"{indent}_before(locals())", *lines, *after]


# ---- 2. the grades ---------------------------------------------------------------------------

class Wrong(NamedTuple):
    words: dict
    names: dict
    what: str
    found: torch.Tensor
    should: torch.Tensor


def difference(right, mine):
    """Compare cases: what a function returns, and if that is wrong first what the blank sets.
    -> None, a sentence, or Wrong"""
    def compare(one, two):
        for (what, should, names), (_, found, _) in zip(one, two):
            if found.shape != should.shape:
                return f"{what} has the shape {tuple(found.shape)}, should be {tuple(should.shape)}"
            if not torch.allclose(found, should, 1e-6, 1e-9, equal_nan=True):
                return Wrong(case.words, names, what, found, should)
        return None if len(one) == len(two) else "it has to be reached as often as in the script"

    for case, own in zip(right, mine):
        wrong = compare(case.results, own.results)
        if wrong:
            values = compare(case.values, own.values)
            return values if isinstance(values, Wrong) else own.error or values or wrong
    return None


def grades(exercise, source):
    """Grade a text. Raises SyntaxError, and what the text raises outside of functions. -> list of
    (blank, its line in the text, right or WRONG or open, sentences), variants last; statements of
    the script that are no blank, and yet not there"""
    places, changed = exercise.places(source)
    found = []
    usual = []                          # those that are reached with the words of the script's name
    for blank, nodes in places:
        right = alone(exercise, exercise.source, exercise.right_places, blank)
        usual += [blank] * bool(right[0].names)
        wrong = difference(right, ask(exercise.script, source, blank.function))
        values = [node.value for node in nodes if isinstance(node, (ast.Assign, ast.Return))]
        is_open = any(isinstance(value, ast.Constant) and value.value is ... for value in values)
        state = "open" if is_open else "right"
        said = []
        missing = [other for other, its in places if other.function == blank.function and not its]
        if wrong and missing and not is_open:
            state = "later"
            if blank in missing:
                said = [f"nothing {f'sets {blank.name}' if blank.name else 'is returned'} here: if "
                        f"another line does it, write the rest of {blank.function}, too"]
        elif wrong and not is_open:
            mine = alone(exercise, source, places, blank)
            wrong = difference(right, mine)
            if wrong:
                state = "WRONG"
                said = explain(blank, wrong) + known_mistakes(exercise, blank, mine)
        found.append((blank, nodes[-1].lineno if nodes else 0, state, said))
    numbers = [blank.number for blank in usual]
    plain = [blank for blank, *_ in found if blank.number in exercise.first
             and (blank in usual or blank.number not in numbers)]
    return sorted(found, key=lambda grade: (grade[0] not in plain, grade[0].number)), changed


def known_mistakes(exercise, blank, mine):
    """The planted mistakes in the right lines that give a learner's numbers. -> list of sentences
    """
    start = blank.nodes[0].lineno - 1
    end = blank.nodes[-1].end_lineno
    found = []
    for mutant in mutants():
        old = "\n".join(mutant.old)
        line = exercise.source.partition(old)[0].count("\n")
        if mutant.file == exercise.script and start <= line < end:
            lines = exercise.source.replace(old, "\n".join(mutant.new)).split("\n")
            stop = end + len(lines) - len(exercise.lines)
            lines[start:stop] = framed(blank, lines[start:stop])
            its = ask(exercise.script, "\n".join(lines), blank.function, blank.name)
            if difference(its, mine) is None:
                found.append(f"the same numbers as a known mistake: {mutant.name}")
    return found[:2]


def explain(blank, wrong):
    """What to say of a Wrong: the first wrong number, what it is made from, and what all wrong ones
    have in common. -> list of sentences"""
    if isinstance(wrong, str):
        return [wrong]
    differ = ~torch.isclose(wrong.found, wrong.should, 1e-6, 1e-9, equal_nan=True)
    index = tuple(differ.nonzero()[0].tolist())
    text = " ".join(map(ast.unparse, blank.nodes))
    given = []
    common = []
    for name in blank.reads():
        if name in wrong.words:
            continue
        with contextlib.suppress(Exception):            # a function, or not set yet
            value = torch.as_tensor(eval(name, {}, wrong.names)).detach()
            is_row = re.search(rf"\b{name}(\[.*?\])?\)*\.(mean|std|sum)\(", text)
            fits = zip(reversed(value.shape), reversed(differ.shape))
            if not is_row and value.dim() <= differ.dim() and all(n in (1, m) for n, m in fits):
                value = value.broadcast_to(differ.shape)
                tests = {"< 0": value < 0, "> 0": value > 0, "0": value == 0}
                if name == "ratio":
                    tests = {"> 1": value > 1, "< 1": value < 1}
                common += [f"{name} {test}" for test, holds in tests.items()
                           if holds[differ].all() and not holds.all()]
                value = value[index]
            elif index and value.dim() > 1 and len(value) == len(differ):
                value = value[index[0]]
            given += [f"{name} {numbers(value.tolist())}"] if value.numel() <= 12 else []
    given += [f"{name} {value}" for name, value in wrong.words.items()]
    pair = [table[index].item() for table in (wrong.found, wrong.should)]
    count = 5 if numbers(pair[0]) != numbers(pair[1]) else 10
    yours, should = (numbers(number, count) for number in pair)
    where = f"{wrong.what} at {list(index)}" if index else wrong.what
    said = [f"with {', '.join(given)}:"] if given else []
    said.append(f"{where} is {yours}, should be {should}")
    ratios = (wrong.found / wrong.should)[differ]
    if wrong.what.startswith("the gradient") and not wrong.found.any():
        said.append("no gradient arrives there: is something detached?")
    elif ratios[0].isfinite() and ratios.isclose(ratios[0], rtol=1e-4).all():
        times = f"{numbers(ratios[0].item())} times what they should be"
        said.append(f"all that are wrong are {times}" if len(ratios) > 2 else times)
    elif common:
        count = f"{int(differ.sum())} of {differ.numel()} numbers are wrong"
        said.append(f"{count}, all with {' and '.join(common)}")
    return said


def numbers(value, count=5):
    """A number, or a list, with so many digits. -> str"""
    if isinstance(value, list):
        return f"[{', '.join(numbers(part) for part in value)}]"
    return f"{round(value, 9) + 0.0:.{count}g}"
