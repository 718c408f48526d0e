"""Write an adapter for a function whose arguments are not known: a file that lists our inputs, with
a gap (...) for each argument. A person fills the gaps, and may call what HELPERS lists.
"""
import ast
import contextlib
import importlib
import inspect
import operator

from vectors import value
from vectors.contract import ADAPTER, STARS, bind, is_adapter, tree_of

# ---- 1. what an adapter may call -------------------------------------------------------------

class Bag(dict):
    """Bag(a=logps, b=mask): a batch, a config or a self, with x["a"], x.a and x.get("a")."""

    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(f"the adapter's Bag has no {name}: add {name}=...")
        return self[name]


def library_of(x):
    name = type(x).__module__.partition(".")[0]
    return importlib.import_module(name if name in ("torch", "numpy") else "jax.numpy")


def logits_of(logps):
    """logits_of(logps): logits (B, T, 2) that give token 0 these log-probs."""
    tool = library_of(logps)
    return tool.stack([logps, tool.log1p(-tool.exp(logps))], -1)


def model_of(logps):
    """model_of(logps): a model. The logits (B, 1 + T, 2) that it returns give token 0 these
    log-probs after a prompt of one token: its input is mask.new_zeros(B, 1 + T).long()."""
    x = logits_of(logps)
    x = library_of(x).concatenate([x, 0 * x[:, :1]], 1)
    return lambda *_, **__: Bag(logits=x)


def rows(x, mask):
    """rows(logps, mask): a list of B rows without masked slots, for one that takes no holes."""
    return [row[there > 0] for row, there in zip(x, mask)]


def pack(x, mask):
    """pack(logps, mask): these rows in one, (N,)."""
    return library_of(x).concatenate(rows(x, mask))


def unpack(packed, mask):
    """unpack(packed, mask): such a row (N,) back as a table (B, T), 0 in masked slots."""
    tool = library_of(mask)
    at = tool.cumsum((mask > 0).reshape(-1), 0).reshape(mask.shape) - 1
    return tool.where(mask > 0, packed[tool.clip(at, 0, len(packed) - 1)], 0.0)


HELPERS = (Bag, logits_of, model_of, rows, pack, unpack)


# ---- 2. its gaps and its text ----------------------------------------------------------------

def gaps_of(function):
    """List the arguments of an adapter that are still gaps. An index such as x[..., 0] is none."""
    if not is_adapter(function):
        return []
    nodes = [*ast.walk(tree_of(function))]
    inside = {id(part) for node in nodes if isinstance(node, ast.Subscript)
              for part in ast.walk(node.slice)}

    def is_gap(node):
        return any(isinstance(part, ast.Constant) and part.value is ... and id(part) not in inside
                   for part in ast.walk(node))
    named = [node for node in nodes if isinstance(node, ast.keyword) and is_gap(node.value)]
    others = [node for node in nodes if isinstance(node, ast.Call) for node in node.args
              if is_gap(node)]
    return [node.arg or "**" for node in named] + ["an argument without a name" for _ in others]


def lines_of(binding, shape):
    """Write the arguments of a call, a line for each, with a gap for each that is not known."""
    lines = []
    for name, one in binding.parameters.items():
        label = "" if one.kind is one.POSITIONAL_ONLY else f"{name}="
        if one.kind in STARS:
            lines.append(f"# {one}: add what it reads")
        elif name in binding.names:
            note = f"  # {shape}" * (binding.names[name] == "advantages")
            lines.append(f"{label}{binding.names[name]},{note}")
        elif one.default is not one.empty:
            lines.append(f"{label}...,  # {one.default!r} by default")
        elif name == "self":
            lines.append("...,  # self: an object of yours, or a Bag of what is read from it")
        else:
            lines.append(f"{label}...,{'' if label else f'  # {name}'}")
    return lines


def calls(path, module, inputs, numbers, shape):
    """Write the call of a function, of a method, or of an object of a class. -> str"""
    found = operator.attrgetter(path)(module)
    parts = {f"yours.{path}": found}
    if inspect.isclass(found):
        parts[""] = getattr(found, "forward", found.__call__)
    text = ""
    for name, function in parts.items():
        try:
            binding = bind(function, inputs, numbers)
            if not name:
                binding.parameters.pop("self", None)
            lines = lines_of(binding, shape)
        except ValueError:
            lines = ["...,  # its arguments are not known: list them, as in *[...] or **{...}"]
        text += f"{name}({''.join(f'{chr(10)}        {line}' for line in lines)}\n    )"
    return text


def defaults_of(function, inputs, numbers):
    """List the defaults of a function that a text can state, so that they survive in its adapter.
    -> {our number: its default}, {its other setting: its default}"""
    own, settings = {}, {}
    with contextlib.suppress(ValueError):               # Python does not know its parameters
        binding = bind(function, inputs, numbers)
        for name, one in binding.parameters.items():
            ours = binding.names.get(name, name)
            is_plain = type(one.default) in (int, float, bool, str, type(None))
            if is_plain and repr(one.default) not in ("inf", "-inf", "nan") and ours not in inputs:
                (own if ours in numbers else settings)[ours] = one.default
    return own, settings


def adapter(module, path, file, content, cases, tool, command, shape):
    """Write the text of an adapter. path: the name of the function in its module; command: what
    checks the adapter; shape: what advantages it gets. -> str"""
    inputs = [name for name in content["inputs"] if any(name in case["inputs"] for case in cases)]
    numbers = list(dict.fromkeys(
        name for case in cases for name, x in case["parameters"].items()
        if isinstance(x, (int, float)) and not isinstance(x, bool)))
    about = [f"{name}: {content['inputs'][name]}" for name in inputs]
    for name in numbers:
        values = dict.fromkeys(value(case, name) for case in cases if name in case["parameters"])
        about.append(f"{name}: {' or '.join(values)}")
    own, settings = defaults_of(operator.attrgetter(path)(module), inputs, numbers)
    about += [f"{name}: a setting of yours, {x!r} by default" for name, x in settings.items()]
    about += [f"it returns {name}: {what}" for name, what in content["results"].items()]
    given = [f"{name}={own[name]!r}" if name in own else name for name in numbers]
    given += [f"{name}={x!r}" for name, x in settings.items()]
    return f'''"""Fill each gap (...) with one of our arguments, with what you make of it, such as
advantages[:, None] or mask.bool(), or with a number of your own. Change anything else that is not
as you mean it, such as a mean that your caller takes. Then run, in any folder:

  {command}

The arguments are arrays of the library that this file imports. You may also call:

{"".join(f"  {inspect.getdoc(one)}{chr(10)}" for one in HELPERS)}"""
from importlib import import_module

import {tool}
from vectors.adapter import {', '.join(one.__name__ for one in HELPERS)}

yours = import_module("{module.__name__}")


def {file}({", ".join([*inputs, *["*"] * bool(given), *given])}):
    """{ADAPTER}{path}. What it does not use counts as not taken. Our arguments:

{"".join(f"    {line}{chr(10)}" for line in about)}    """
    return {calls(path, module, inputs, numbers, shape)}
'''
