"""Check functions against the test vectors, files of inputs and right answers: see README.md."""
import os
import sys

if sys.argv[:1] == ["-m"] and sys.path[0] == os.getcwd() != os.path.dirname(
        os.path.dirname(os.path.abspath(__file__))):
    sys.path.append(sys.path.pop(0))        # a random.py of yours must not hide Python's
import ast
import importlib
import inspect
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from vectors.contract import SINGLE, Binding, bind, is_adapter

FOLDER = Path(__file__).parent
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}     # absolute and relative; a case may have its own
SMALL = 1e-6            # largest absolute difference that float32 constants make in float64
# Inputs that are data in the equations: a caller detaches them, and then they have no gradient.
DATA = {"old_logps", "ref_logps", "old_values", "returns", "ref_chosen", "ref_rejected",
        "teacher_logits", "sampler_logits"}
# Values by which parameters have no effect, for the cases that lack them.
OFF = {"beta": 0.0, "entropy_coef": 0.0, "nll_coef": 0.0, "label_smoothing": 0.0, "delta": 1e9}
# Keys under which functions return a loss, best first.
KEYS = {"loss": ("loss", "policy_loss", "pg_loss"), "losses": ("losses", "loss")}
# Functions whose kernels may free what they get. JAX's arrays cannot be changed at all.
OVERWRITTEN = {"logprobs"}
# Shapes of advantages that a function takes
SHAPES = {"B": "(B,)", "B1": "(B, 1)", "BT": "(B, T)"}
NEEDED = {"returns"}    # results without which a function is wrong, because a critic learns them


class Outcome(NamedTuple):
    case: dict
    errors: list            # sentences; none if the function is right
    skipped: str = ""       # why the function was not called
    choice: str = ""        # the convention of the case's "also" by which the function is right
    remark: str = ""        # another sentence about a function that is right
    sign: float = None      # a number of the wrong results or gradients, by which a mistake shows
    aim: float = None       # what this number should be
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


def value(case, name):
    """Look up a parameter of a case, or its id. -> text"""
    return str((case | case["parameters"]).get(name))


def is_value(case, name, text):
    """Tell whether a case has a value, written as 1e-4 or 0.0001."""
    own = value(case, name)
    try:
        return own == text or float(own) == float(text)
    except ValueError:
        return False


def cases_of(content, chosen):
    """List the cases that have all chosen parameters."""
    return [case for case in content["cases"]
            if all(is_value(case, name, text) for name, text in chosen.items())]


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
    found = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Import):
            found.update(one.name.partition(".")[0] for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.partition(".")[0])
    return next((tool for tool in ("torch", "jax", "numpy") if tool in found), "torch")


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


def given_inputs(content, case):
    """List the inputs of a case. One without a KL gets a reference for functions that need one.
    -> {name: value}"""
    inputs = case["inputs"]
    if "ref_logps" in content["inputs"] and "old_logps" in inputs:
        inputs = {"ref_logps": inputs["old_logps"]} | inputs
    return inputs


def shaped(A, mask, shape):
    """Give advantages of outputs the shape that a function takes."""
    if A.ndim > 1 or shape in ("", "B"):
        return A
    return A[:, None] if shape == "B1" else A[:, None] + 0 * mask


def arrays(inputs, integers, tool, dtype):
    """Make arrays of the inputs of a case, but not of answers, which are texts. -> dict"""
    module = module_of(tool)
    found = {}
    for name, value in inputs.items():
        if name in integers:
            found[name] = module.asarray(value, dtype=module.int64)
        elif name == "answers":
            found[name] = value
        else:
            found[name] = module.asarray(floats(value), dtype=getattr(module, dtype))
    return found


def numbers_of(content, cases):
    """List the parameters of cases, and those that can be switched off in them."""
    names, every = ([name for case in some for name in case["parameters"]]
                    for some in (cases, content["cases"]))
    return list(dict.fromkeys([*names, *(name for name in OFF if name in every)]))


def fit(binding, content, case, fixed=(), shape=""):
    """Find what a function gets in a case. fixed: our names of parameters that it need not take.
    -> {our name of a parameter: value}, why the function cannot be called, or "" """
    own, takes = case["parameters"], binding.takes()
    missing = own.keys() - takes - {*fixed, *case.get("optional", ())}
    singles = {name for name, ours in binding.names.items() if ours == "epsilon_low"}
    if own.get("epsilon_low") == own.get("epsilon_high") and (
            singles & SINGLE or is_adapter(binding.function)):
        missing -= {"epsilon_high"}                         # one epsilon for both bounds
    given = {name: x for name, x in own.items() if name in takes}
    for name, ours in binding.names.items():
        one = binding.parameters.get(name)
        if ours in OFF.keys() - own.keys() and one and one.default:     # 0 and None are off, too
            given[ours] = OFF[ours]
    lacking = [name for name, ours in binding.names.items()
               if ours not in given_inputs(content, case) and ours not in given and getattr(
                   binding.parameters.get(name), "default", None) is inspect.Parameter.empty]
    why = ""
    if missing:
        why = f"it takes no {', '.join(sorted(missing))}"
    elif lacking:
        why = f"it needs {', '.join(lacking)}"
    elif takes & {*case.get("without", ())}:
        why = f"it is for functions without {', '.join(sorted(takes & {*case['without']}))}"
    elif shape == "B" and case.get("grade") == "tokens":
        why = "its advantages are of tokens, (B, T), and the function takes (B,)"
    return given, why


def named(found, content, is_traced):
    """Find the results in what a function returned: by their keys; or, of a tuple, by their order,
    but a loss is only the first. TypeError if there are none. -> {result: array}"""
    first = next(iter(content["results"]))
    is_loss = first in KEYS
    if isinstance(found, Mapping):
        results = {name: found[name] for name in content["results"] if name in found}
        key = next((key for key in KEYS.get(first, (first,)) if key in found), None)
        if key is None:
            raise TypeError(f"{first} is not returned: got the keys {', '.join(map(str, found))}")
        results[first] = found[key]
    elif isinstance(found, tuple) or is_loss and isinstance(found, list):
        results = dict(zip([first] if is_loss else content["results"], found))
    else:
        results = {first: found}
    for name in [first, *results]:
        if results.get(name) is None:
            raise TypeError(f"{name} is not returned")
        if not is_traced and {type(x) for x in flat(results[name])[1]} - {bool, int, float}:
            raise TypeError(f"{name} is not made of numbers")
    return results


def call(binding, case, content, tool, dtype, parameters, shape="", settings=()):
    """Call a function with the inputs and parameters of a case that it takes.
    -> {result: array}, {result: {input: gradient}}, but no gradients from numpy"""
    takes = binding.takes()
    slopes = {} if tool == "numpy" else {
        result: [leaf for leaf in leaves if leaf in takes]
        for result, leaves in case.get("gradient", {}).items()}

    def given():
        known = arrays(given_inputs(content, case), content["integers"], tool, dtype)
        if tool == "torch":
            for leaf in {leaf for leaves in slopes.values() for leaf in leaves}:
                known[leaf].requires_grad_()
        return known | parameters

    def run(known, is_traced=True):
        if "advantages" in known and "mask" in known:
            known = known | {"advantages": shaped(known["advantages"], known["mask"], shape)}
        is_kept = tool != "jax" and content["function"] not in OVERWRITTEN
        before = {name: flat(known[name]) for name in takes & known.keys()} if is_kept else {}
        found = binding.call(known, settings)
        changed = [name for name, x in before.items() if flat(known[name]) != x]
        if changed:
            raise RuntimeError(f"it changes its argument {', '.join(changed)} in place, so the "
                               "next call gets something else")
        results = named(found, content, is_traced)
        if content["function"] == "policy_loss":
            results["loss"] = averaged(results["loss"], case, tool)
        return results

    # a kernel may free its inputs, and what it keeps for a gradient, so all are new
    results = run(given(), is_traced=False)
    return results, {result: gradient(run, given(), result, leaves, tool)
                     for result, leaves in slopes.items() if result in results}


def averaged(x, case, tool):
    """Average a loss of tokens (B, T) as the case says, or of outputs (B,). -> scalar"""
    shape = tuple(getattr(x, "shape", ()))
    mask = case["inputs"]["mask"]
    counts = [sum(row) for row in mask]
    B = len(mask)
    how = case["parameters"]["how"]
    if shape == (B,) and how != "token_mean":
        return x.mean()
    if len(shape) != 2:
        return x
    divisors = {
        "sequence_mean": [B * max(1, n) for n in counts],
        "token_mean": [max(1, sum(counts))] * B, "sequence_sum": [B] * B,
        "constant": [B * case["parameters"].get("max_length", len(mask[0]))] * B}[how]
    module = module_of(tool)
    weights = module.asarray([[m / d for m in row] for row, d in zip(mask, divisors)],
                             dtype=x.dtype)
    return (module.where(weights > 0, x, 0.0) * weights).sum()


def gradient(function, known, result, leaves, tool):
    """Compute the gradient of the sum of a result of function(known). -> {leaf: gradient}"""
    leaves = {leaf: known[leaf] for leaf in leaves}
    if tool == "jax":
        jax = importlib.import_module("jax")
        return jax.grad(lambda leaves: function(known | leaves)[result].sum())(leaves)
    torch = importlib.import_module("torch")
    total = torch.as_tensor(function(known)[result]).sum()
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


def weighted(x, answer=None):
    """Add up the numbers of a table times 1, 2, 3, ..., but those of a list just so, as the answer
    shows, whose numbers may also be in one row."""
    (shape, _), (_, numbers) = flat(x if answer is None else answer), flat(x)
    return sum(numbers) if len(shape) < 2 else sum(n * x for n, x in enumerate(numbers, 1))


def slope_sign(gradients):
    """Show gradients by one number, in which those of the second input count twice."""
    return sum(k * weighted([[x]]) for found in gradients.values()
               for k, x in enumerate(found.values(), 1))


def compare(case, results, gradients, names, relative, absolute):
    """Compare results and gradients with the answers in a case. A scalar result is compared with
    the mean of a list. -> list of sentences, a number of the wrong results or gradients, and what
    it should be"""
    limits = ({name: x for name, x in case["inputs"].items() if name in names}, relative, absolute)
    errors = []
    size = 1
    sign = slope_sign(gradients)
    aim = slope_sign({name: {leaf: case["gradient"][name][leaf] for leaf in found}
                      for name, found in gradients.items()})
    for name, answer in case["right"].items():
        if name not in results:
            continue
        right = answer
        if len(flat(answer)[0]) == 1 and not flat(results[name])[0]:
            size = len(answer)
            right = sum(answer) / size
        sentences = difference(name, results[name], right, *limits)
        if sentences and not errors:            # the first result that is wrong
            sign, aim = weighted(results[name], answer), weighted(answer)
        errors += sentences
    for name, found in gradients.items():
        for leaf, x in found.items():
            right = case["gradient"][name][leaf]
            if size > 1:
                right = [slope / size for slope in right]
            errors += difference(f"the gradient of {name} in {leaf}", x, right, *limits)
    return errors, sign * size, aim


def check_case(function, content, case, tool="torch", dtype="float64", tolerance=None, fixed=(),
               shape="", detached=True, settings=()):
    """Call a function, or a Binding, for a case, and compare. shape: of SHAPES, or "" for that of
    the file; detached: whether a gradient in DATA is an error; fixed as in `fit`. -> Outcome"""
    binding = function if isinstance(function, Binding) else bind(
        function, content["inputs"], numbers_of(content, [case]), has_rest=True)
    parameters, why = fit(binding, content, case, fixed, shape)
    own = {} if tolerance else case.get("tolerance", {})
    limit = tolerance or own.get(dtype, TOLERANCE[dtype])
    if why or isinstance(limit, str):
        return Outcome(case, [], why or f"{dtype}: {limit}")
    try:
        results, gradients = call(binding, case, content, tool, dtype, parameters, shape, settings)
    except NotImplementedError as error:
        return Outcome(case, [], str(error) or "not implemented")
    except (Exception, SystemExit) as error:
        return Outcome(case, [f"{type(error).__name__}: {error}"], raised=True)
    data = tuple(leaf for found in gradients.values() for leaf, x in found.items()
                 if leaf in DATA and any(flat(x)[1]))
    if not detached:
        gradients = {name: {leaf: x for leaf, x in found.items() if leaf not in DATA}
                     for name, found in gradients.items()}

    def compared(case, limit, absolute):
        return compare(case, results, gradients, binding.takes(), limit, absolute)
    errors, sign, aim = compared(case, limit, own.get("absolute", limit))
    for choice, answer in case.get("also", {}).items() if errors else ():
        if not compared(case | answer, limit, own.get("absolute", limit))[0]:
            return Outcome(case, [], choice=choice, data=data)
    rough = own.get("float32", TOLERANCE["float32"])
    is_strict = tolerance or dtype == "float32" or isinstance(rough, str)
    if errors and not is_strict and not compared(case, rough, own.get("absolute", SMALL))[0]:
        return Outcome(case, [], remark="right in float32, but not in float64", data=data)
    lost = content["results"].keys() - results.keys()
    errors += [f"{name} is not returned: {content['results'][name]}" for name in lost & NEEDED]
    remark = f"not returned, so not checked: {', '.join(sorted(lost))}" if lost else ""
    return Outcome(case, errors, remark=remark, sign=sign, aim=aim, data=data)
