"""Check functions against the test vectors, files of inputs and right answers: see README.md."""
import importlib
import inspect
import json
import math
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}     # absolute and relative; a case may have its own


class Outcome(NamedTuple):
    case: dict
    errors: list            # sentences; none if the function is right
    skipped: str            # why the function was not called, or ""


def files():
    """List the names of the files."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read(name):
    """Read a file. Each case gets the inputs of its batch. -> dict"""
    content = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    for case in content["cases"]:
        case["inputs"] = content["batches"].get(case.get("batch"), {}) | case.get("inputs", {})
    return content


def library(module):
    """Find the library whose arrays a module uses: "torch", "jax" or "numpy"."""
    return next((name for name in ("torch", "jax") if hasattr(module, name)), "numpy")


# ---- 1. calling a function -------------------------------------------------------------------

def floats(x):
    """Turn numbers and the texts "inf" and "-inf", also in lists, into floats."""
    return [floats(part) for part in x] if isinstance(x, list) else float(x)


def arrays(case, integers, tool, dtype):
    """Make arrays of a case's inputs; lists of texts stay lists. -> dict, its module"""
    module = importlib.import_module({"jax": "jax.numpy"}.get(tool, tool))
    if tool == "jax":
        importlib.import_module("jax").config.update("jax_enable_x64", True)
    make = module.tensor if tool == "torch" else module.array
    found = {}
    for name, value in case["inputs"].items():
        is_text = isinstance(value, list) and any(
            one is None or isinstance(one, str) for one in value)
        kind = getattr(module, "int64" if name in integers else dtype)
        found[name] = value if is_text else make(
            value if name in integers else floats(value), dtype=kind)
    return found


def call(function, case, content, tool, dtype, names):
    """Call a function with those inputs and parameters of a case that are in `names`.
    -> {result: array}, {result: {input: gradient}} or None if numpy computes no gradients"""
    inputs = arrays(case, content["integers"], tool, dtype)
    known = {name: x for name, x in (inputs | case["parameters"]).items() if name in names}
    slopes = {result: [leaf for leaf in leaves if leaf in known]
              for result, leaves in case.get("gradient", {}).items()}

    def run(**leaves):
        found = function(**known | leaves)
        if isinstance(found, dict):
            return found
        return dict(zip(content["results"], found if isinstance(found, tuple) else [found]))

    if tool == "numpy":
        return run(), None
    if tool == "jax":
        jax = importlib.import_module("jax")
        return run(), {
            result: jax.grad(lambda leaves: run(**leaves)[result].sum())(  # noqa: B023
                {leaf: known[leaf] for leaf in leaves}) for result, leaves in slopes.items()}
    torch = importlib.import_module("torch")
    for leaf in sum(slopes.values(), []):
        known[leaf].requires_grad_()
    results = run()
    gradients = {}
    for result, leaves in slopes.items():
        sum_of_all = torch.as_tensor(results[result]).sum()
        found = [None] * len(leaves)
        if sum_of_all.requires_grad:
            found = torch.autograd.grad(sum_of_all, [known[leaf] for leaf in leaves],
                                        retain_graph=True, allow_unused=True)
        gradients[result] = {leaf: torch.zeros_like(known[leaf]) if x is None else x
                             for leaf, x in zip(leaves, found)}
    return results, gradients


# ---- 2. comparing ----------------------------------------------------------------------------

def flat(value):
    """Flatten an array or nested lists. -> shape, list of numbers"""
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, (list, tuple)):
        return (), [value]
    parts = [flat(one) for one in value]
    inner = parts[0][0] if parts else ()
    return (len(parts), *inner), [x for _, numbers in parts for x in numbers]


def show(x):
    if isinstance(x, list):
        return f"[{', '.join(map(show, x))}]"
    return f"{x:.6g}" if isinstance(x, float) else str(x)


def difference(what, found, right, inputs, relative, absolute):
    """Compare a result or a gradient. -> list of sentences: the first wrong number, the numbers
    that it is made from, and what all wrong numbers have in common"""
    (shape, found), (size, right) = flat(found), flat(right)
    if len(found) != len(right):
        return [f"{what} has the shape {shape}, should have {size}"]
    wrong = [n for n, (a, b) in enumerate(zip(found, right))
             if a != b and not abs(a - b) <= absolute + relative * abs(b)]
    if not wrong:
        return []
    first = wrong[0]
    place = [first // math.prod(size[n + 1:]) % size[n] for n in range(len(size))]
    a, b = show(found[first]), show(right[first])
    if a == b:
        a, b = repr(found[first]), repr(right[first])
    sentences = [f"{what}{f' at {place}' if place else ''} is {a}, should be {b}"]
    given = []
    for name, value in inputs.items():
        depth = len(flat(value)[0])
        for n, i in enumerate(place[:max(1, depth - 1)]):   # the row of a table, not one number
            if isinstance(value, list) and len(value) == size[n]:
                value = value[i]
        if place and len(flat(value)[1]) <= 8:
            given.append(f"{name} {show(value)}")
    if given:
        sentences.append(f"made from {', '.join(given)}")
    factors = {f"{found[n] / right[n]:.4g}" if right[n] else "inf" for n in wrong}
    if not any(found) and what.startswith("the gradient"):
        sentences.append("no gradient arrives there: is something detached?")
    elif len(factors) == 1 and len(wrong) > 1 and factors.isdisjoint({"inf", "nan"}):
        sentences.append(f"each of the {len(wrong)} wrong numbers is {factors.pop()} times the "
                         "right one")
    return sentences


def check_case(function, content, case, tool="torch", dtype="float64", tolerance=None, fixed=()):
    """Call a function for a case, and compare. fixed: names of parameters that it need not take.
    -> Outcome"""
    own = case.get("tolerance", {})
    limit = tolerance or own.get(dtype, TOLERANCE[dtype])
    if isinstance(limit, str):
        return Outcome(case, [], f"{dtype}: {limit}")
    parameters = inspect.signature(function).parameters
    names = case["inputs"].keys() | case["parameters"].keys()
    if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        names &= parameters.keys()
    missing = case["parameters"].keys() - names - set(fixed)
    if missing:
        return Outcome(case, [], f"the function does not take {', '.join(sorted(missing))}")
    try:
        results, gradients = call(function, case, content, tool, dtype, names)
    except NotImplementedError as error:
        return Outcome(case, [], str(error) or "not implemented")
    except Exception as error:
        return Outcome(case, [f"{type(error).__name__}: {error}"], "")
    given = {name: x for name, x in case["inputs"].items() if name in names}
    bounds = (given, limit, own.get("absolute", limit))
    errors = []
    for name, right in case["right"].items():
        if name in results:
            errors += difference(name, results[name], right, *bounds)
    for name, leaves in (gradients or {}).items():
        for leaf, found in leaves.items():
            errors += difference(f"the gradient of {name} in {leaf}", found,
                                 case["gradient"][name][leaf], *bounds)
    return Outcome(case, errors, "")
