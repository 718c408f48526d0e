"""Check functions against the test vectors, files of inputs and right answers: see README.md."""
import importlib
import inspect
import json
import math
import re
from pathlib import Path
from typing import NamedTuple

from vectors.names import ALIASES

FOLDER = Path(__file__).parent
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}     # absolute and relative; a case may have its own
# Inputs that are data in the equations: a caller detaches them, and then they have no gradient.
DATA = {"old_logps", "ref_logps", "old_values", "returns", "ref_chosen", "ref_rejected",
        "teacher_logits", "sampler_logits"}


class Outcome(NamedTuple):
    case: dict
    errors: list            # sentences; none if the function is right
    skipped: str = ""       # why the function was not called
    choice: str = ""        # the convention of the case's "also" by which the function is right
    sign: float = None      # a number of the wrong results or gradients, by which a mistake shows
    raised: bool = False    # whether the only error is an exception
    data: tuple = ()        # inputs of DATA that get a gradient


def files():
    """List the names of the files."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read(name):
    """Read a file. Each case gets the inputs of its batch. -> dict"""
    content = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    for case in content["cases"]:
        case["inputs"] = content["batches"].get(case.get("batch"), {}) | case.get("inputs", {})
    return content


def grade(case, recipe=""):
    """Tell what a case is about: "core", "robust" or "convention". Advantages of tokens are the
    core of PPO, and an extra of other losses."""
    own = case.get("grade", "core")
    if own == "tokens":
        return "core" if recipe == "ppo" else "robust"
    return own


def library(module):
    """Find the library of a module's arrays by what its file imports: "torch", also if it imports
    none of them, "jax" or "numpy"."""
    source = inspect.getsource(module)
    return next((tool for tool in ("torch", "jax", "numpy")
                 if re.search(rf"^ *(import|from) {tool}\b", source, re.MULTILINE)), "torch")


# ---- 1. calling a function -------------------------------------------------------------------

def floats(x):
    """Turn numbers and the texts "inf" and "-inf", also in lists, into floats."""
    return [floats(part) for part in x] if isinstance(x, list) else float(x)


def module_of(tool):
    """Import torch, jax.numpy in float64, or numpy."""
    if tool == "jax":
        importlib.import_module("jax").config.update("jax_enable_x64", True)
        return importlib.import_module("jax.numpy")
    return importlib.import_module(tool)


def arrays(case, integers, tool, dtype):
    """Make arrays of a case's inputs, but not of answers, which are texts. -> dict"""
    module = module_of(tool)
    found = {}
    for name, value in case["inputs"].items():
        if name in integers:
            found[name] = module.asarray(value, dtype=module.int64)
        elif name == "answers":
            found[name] = value
        else:
            found[name] = module.asarray(floats(value), dtype=getattr(module, dtype))
    return found


def average(x, case, tool):
    """Average the losses of tokens (B, T) that a function returns, as the case says. -> scalar"""
    mask = case["inputs"]["mask"]
    counts = [sum(row) for row in mask]
    B = len(mask)
    how = case["parameters"]["how"]
    if how == "sequence_mean":
        divisors = [B * max(1, n) for n in counts]
    elif how == "token_mean":
        divisors = [max(1, sum(counts))] * B
    elif how == "sequence_sum":
        divisors = [B] * B
    else:
        assert how == "constant", how
        divisors = [B * case["parameters"].get("max_length", len(mask[0]))] * B
    weights = [[m / d for m in row] for row, d in zip(mask, divisors)]
    module = module_of(tool)
    weights = module.asarray(weights, dtype=x.dtype)
    return (module.where(weights > 0, x, 0.0) * weights).sum()


def as_columns(known):
    """Give advantages of outputs the shape (B, 1)."""
    A = known.get("advantages")
    return known if getattr(A, "ndim", 2) > 1 else known | {"advantages": A[:, None]}


def as_bools(known):
    """Make the mask boolean."""
    return known | {"mask": known["mask"] > 0} if "mask" in known else known


# Ways to call a function, tried in this order. What the inputs mean stays the same.
WAYS = {"": lambda known: known, "advantages of the shape (B, 1)": as_columns,
        "a boolean mask": as_bools,
        "advantages of the shape (B, 1) and a boolean mask": lambda x: as_bools(as_columns(x))}


def renamed(function, case):
    """Find the arguments that a function calls by other names. -> {our name: its name}"""
    known = case["inputs"].keys() | case["parameters"].keys()
    parameters = inspect.signature(function).parameters
    return {ALIASES[name.lower()]: name for name in parameters
            if name not in known and ALIASES.get(name.lower()) in known - parameters.keys()}


def unfit(function, case, fixed):
    """Tell why a function cannot be called for a case, or "". -> sentence, names it can get"""
    theirs = renamed(function, case)
    parameters = inspect.signature(function).parameters.values()
    takes = {one.name for one in parameters} - {*theirs.values()} | theirs.keys()
    names = case["inputs"].keys() | case["parameters"].keys()
    if not any(one.kind is one.VAR_KEYWORD for one in parameters):
        names &= takes
    missing = case["parameters"].keys() - names - {*fixed, *case.get("optional", ())}
    low, high = (case["parameters"].get(f"epsilon_{end}") for end in ("low", "high"))
    if low == high and "epsilon_low" in names:              # one epsilon for both bounds
        missing -= {"epsilon_high"}
    if missing:
        return f"the function does not take {', '.join(sorted(missing))}", names
    needed = [one.name for one in parameters if one.default is one.empty
              and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
              and one.name not in {*names, *theirs.values()}]
    return f"the function needs {', '.join(needed)}" if needed else "", names


def call(function, case, content, tool, dtype, names, way=""):
    """Call a function with those inputs and parameters of a case that are in `names`.
    -> {result: array}, {result: {input: gradient}}, but no gradients from numpy"""
    theirs = renamed(function, case)
    slopes = {} if tool == "numpy" else {
        result: [leaf for leaf in leaves if leaf in names]
        for result, leaves in case.get("gradient", {}).items()}

    def given():
        known = arrays(case, content["integers"], tool, dtype) | case["parameters"]
        if tool == "torch":
            for leaf in {leaf for leaves in slopes.values() for leaf in leaves}:
                known[leaf].requires_grad_()
        return {name: x for name, x in known.items() if name in names}

    def run(known):
        found = function(**{theirs.get(name, name): x for name, x in WAYS[way](known).items()})
        if isinstance(found, dict):
            return found
        found = found if isinstance(found, tuple) else [found]
        if content["function"] == "policy_loss" and len(getattr(found[0], "shape", ())) == 2:
            found = [average(found[0], case, tool)]
        return dict(zip(content["results"], found))

    # a function may change its inputs, or free what it keeps for a gradient, so all are new
    return run(given()), {result: gradient(run, given(), result, leaves, tool)
                          for result, leaves in slopes.items()}


def gradient(function, known, result, leaves, tool):
    """Compute the gradient of the sum of a result of function(known). -> {leaf: gradient}"""
    leaves = {leaf: known[leaf] for leaf in leaves}
    if tool == "jax":
        jax = importlib.import_module("jax")
        return jax.grad(lambda leaves: function(known | leaves)[result].sum())(leaves)
    torch = importlib.import_module("torch")
    total = torch.as_tensor(function(known).get(result, 0.0)).sum()
    if not total.requires_grad:
        return {name: torch.zeros_like(x) for name, x in leaves.items()}
    slopes = torch.autograd.grad(total, [*leaves.values()], materialize_grads=True)
    return dict(zip(leaves, slopes))


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


def difference(what, found, right, given, relative, absolute):
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
    sources = []
    for name, x in given.items():
        depth = len(flat(x)[0])
        for n, i in enumerate(place[:max(1, depth - 1)]):   # the row of a table, not one number
            if isinstance(x, list) and len(x) == size[n]:
                x = x[i]
        if place and len(flat(x)[1]) <= 8:
            sources.append(f"{name} {show(x)}")
    if sources:
        sentences.append(f"made from {', '.join(sources)}")
    factors = {f"{found[n] / right[n]:.4g}" if right[n] else "inf" for n in wrong}
    if not any(found) and what.startswith("the gradient"):
        sentences.append("no gradient arrives there: is something detached?")
    elif len(factors) == 1 and len(wrong) > 1 and factors.isdisjoint({"inf", "nan"}):
        sentences.append(f"each of the {len(wrong)} wrong numbers is {factors.pop()} times the "
                         "right one")
    return sentences


def weighted(values):
    """Add up the numbers of arrays or lists times 1, 2, 3, ..., but of one list just so."""
    shape, numbers = flat([*values])
    return sum(numbers) if len(shape) == 2 else sum(n * x for n, x in enumerate(numbers, 1))


def slope_sign(gradients):
    """Show gradients by one number, in which those of the second input count twice."""
    return sum(k * weighted([[x]]) for found in gradients.values()
               for k, x in enumerate(found.values(), 1))


def compare(case, results, gradients, names, relative, absolute):
    """Compare results and gradients with the answers in a case. A scalar result is compared with
    the mean of a list. -> list of sentences, a number of the wrong results or gradients"""
    limits = ({name: x for name, x in case["inputs"].items() if name in names}, relative, absolute)
    errors = []
    size = 1
    for name in case["right"].keys() & results.keys():
        right = case["right"][name]
        if isinstance(right, list) and not flat(results[name])[0]:
            size = len(right)
            right = sum(right) / size
        errors += difference(name, results[name], right, *limits)
    sign = weighted(results.values()) if errors else slope_sign(gradients)
    for name, found in gradients.items():
        for leaf, x in found.items():
            right = case["gradient"][name][leaf]
            if size > 1:
                right = [slope / size for slope in right]
            errors += difference(f"the gradient of {name} in {leaf}", x, right, *limits)
    return errors, sign * size


def check_case(function, content, case, tool="torch", dtype="float64", tolerance=None, fixed=(),
               way="", detached=True):
    """Call a function for a case, and compare. fixed: names of parameters that it need not take;
    way: a key of WAYS; detached: whether a gradient in DATA is an error. -> Outcome"""
    why, names = unfit(function, case, fixed)
    if why:
        return Outcome(case, [], why)
    own = {} if tolerance else case.get("tolerance", {})
    limit = tolerance or own.get(dtype, TOLERANCE[dtype])
    if isinstance(limit, str):
        return Outcome(case, [], f"{dtype}: {limit}")
    try:
        results, gradients = call(function, case, content, tool, dtype, names, way)
    except NotImplementedError as error:
        return Outcome(case, [], str(error) or "not implemented")
    except Exception as error:
        return Outcome(case, [f"{type(error).__name__}: {error}"], raised=True)
    bounds = (names, limit, own.get("absolute", limit))
    data = tuple(leaf for found in gradients.values() for leaf, x in found.items()
                 if leaf in DATA and any(flat(x)[1]))
    if not detached:
        gradients = {name: {leaf: x for leaf, x in found.items() if leaf not in DATA}
                     for name, found in gradients.items()}
    errors, sign = compare(case, results, gradients, *bounds)
    for choice, answer in case.get("also", {}).items() if errors else ():
        if not compare(case | answer, results, gradients, *bounds)[0]:
            return Outcome(case, [], choice=choice, data=data)
    return Outcome(case, errors, sign=sign, data=data)
