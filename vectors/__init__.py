"""Check functions against the test vectors, files of inputs and right answers: see README.md."""
import ast
import importlib
import inspect
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from vectors.binding import bind, meaning, parameters_of, words_of
from vectors.unpack import Model

FOLDER = Path(__file__).parent
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}     # absolute and relative; a case may have its own
SMALL = 1e-6            # largest absolute difference that float32 constants make in float64
# Inputs that are data in the equations: a caller detaches them, and then they have no gradient.
DATA = {"old_logps", "ref_logps", "old_values", "returns", "ref_chosen", "ref_rejected",
        "teacher_logits", "sampler_logits"}
# Values by which parameters have no effect, for the cases that lack them.
OFF = {"beta": 0.0, "entropy_coef": 0.0, "nll_coef": 0.0, "label_smoothing": 0.0, "delta": 1e9}
# Keys under which functions return a loss, if there is no key "loss".
LOSS_KEYS = ("loss", "losses", "policy_loss", "pg_loss", "actor_loss", "total_loss")
# Words of keys, such as kl_loss, that are not the loss, and those of a critic's.
OTHER_LOSS = {"kl", "entropy", "ent", "aux", "reg", "nll", "sft", "lm", "std", "min", "max", "var"}
OF_CRITIC = {"value", "vf", "critic", "baseline"}

# Functions whose kernels may free what they get. JAX's arrays cannot be changed at all.
OVERWRITTEN = {"logprobs"}
ALIASES = {"torch": "torch", "jax": "jnp", "numpy": "np"}       # library -> its name in a text


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


def cases_of(content, chosen):
    """List the cases that have all chosen parameters."""
    return [case for case in content["cases"]
            if all(value(case, name) == text for name, text in chosen.items())]


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
    return next((tool for tool in ALIASES if tool in found), "torch")


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


def as_tables(known):
    """Give advantages of outputs the shape (B, T)."""
    known = as_columns(known)
    if "mask" in known and "advantages" in known:
        known = known | {"advantages": known["advantages"] + 0 * known["mask"]}
    return known


def as_bools(known):
    """Make the mask boolean."""
    return known | {"mask": known["mask"] > 0} if "mask" in known else known


def as_rows(known):
    """Give rewards the shape (B,)."""
    return known | {"rewards": known["rewards"].reshape(-1)} if "rewards" in known else known


def with_uids(known):
    """Give rewards the shape (B,), and the groups names, in an array of numpy."""
    uids = [f"prompt {n}" for n in known.get("group_ids", ())]
    uids = {"group_ids": importlib.import_module("numpy").array(uids, dtype=object)} if uids else {}
    return as_rows(known) | uids


def as_groups(known):
    """Give tables of tokens the shape (P, G, T) of a step whose rewards have the shape (P, G)."""
    shape = getattr(known.get("rewards"), "shape", ())
    return {name: x.reshape(*shape, -1) if getattr(x, "ndim", 0) == 2 and name != "rewards"
            and len(x) == math.prod(shape) else x for name, x in known.items()}


def as_ends(known):
    """Give rewards to the only token of each output, (B, 1)."""
    known = with_uids(known)
    return known | {"rewards": known["rewards"][:, None]} if "rewards" in known else known


# Ways to call a function, tried in this order. What the inputs mean stays the same.
SHAPES = {"": lambda known: known, "advantages of the shape (B, 1)": as_columns,
          "advantages of the shape (B, T)": as_tables}
WAYS = SHAPES | {"a boolean mask": as_bools} | {
    f"{name} and a boolean mask": lambda known, shape=shape: as_bools(shape(known))
    for name, shape in SHAPES.items() if name} | {
    "rewards of the shape (B,)": as_rows,
    "rewards of the shape (B,), and names of the groups in an array of numpy": with_uids,
    "rewards of outputs with one token, (B, 1)": as_ends,
    "tokens of the shape (P, G, T), and rewards of the shape (P, G)": as_groups}


def inputs_of(content, case):
    """List the inputs that matter in a case. The sentence on an input ends with the parameters or
    methods that need it, if not all do."""
    words = {*case["parameters"], *map(str, case["parameters"].values())}
    notes = {name: re.search(r" \(([a-z][\w, ]*)\)$", about)
             for name, about in content["inputs"].items() if name in case["inputs"]}
    return [name for name, note in notes.items()
            if note is None or words & {*note[1].split(", ")}]


class Fit(NamedTuple):
    binding: tuple          # vectors.binding.Binding
    parameters: dict        # {our name: value} of a case that the function gets
    missing: set            # our names of parameters that the function lacks
    extra: set              # our names of parameters that it must not have for this case
    needed: list            # its own names of arguments that the case lacks
    made: dict              # {its name: text that makes the argument from ours}

    def why(self):
        """Tell why the function cannot be called, or return ""."""
        if self.missing:
            return f"the function does not take {', '.join(sorted(self.missing))}"
        if self.needed:
            return f"the function needs {', '.join(self.needed)}"
        extra = ", ".join(sorted(self.extra))
        return f"it is for functions without {extra}" if extra else ""


def used(text):
    """List the names that occur in an expression. -> set"""
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}


def fit(function, content, case, fixed=(), settings=(), names=()):
    """Bind the arguments of a function for a case. fixed: our names of parameters that it need not
    take; settings: its own names of those that it gets besides; names: {its name: one of our names,
    or a text that makes it from ours} of arguments with unknown names. -> Fit"""
    own = case["parameters"]
    others = {name for one in content["cases"] for name in one["parameters"]}
    off = {name: value for name, value in OFF.items() if name in others - own.keys()}
    if isinstance(case["inputs"].get("rewards", [0])[0], list):
        groups = case["inputs"]["rewards"]
        off["num_generations"] = len(groups[0])
        off["group_ids"] = [p for p, group in enumerate(groups) for _ in group]
        off["mask"] = [[1.0] for _ in off["group_ids"]]             # of outputs with one token
        off = {name: value for name, value in off.items() if name not in case["inputs"]}
    known = {**given_inputs(content, case), **own, **off}
    binding = bind(function, known, inputs_of(content, case))
    bound = () if binding.by_position else binding.names
    names = dict(names)
    made = {other: text for other, text in names.items()
            if text in bound or not used(text) or not text.isidentifier()}
    of_made = set().union(*map(used, made.values()))
    binding = binding.also({text: other for other, text in names.items() if other not in made})
    takes = parameters_of(function)
    is_wrapper = any(one.kind is one.VAR_POSITIONAL for one in takes.values())
    given = {name: x for name, x in (own | off).items() if name in of_made}
    for name in (own.keys() | off.keys()) & binding.names.keys():
        theirs = takes.get(binding.names[name])
        default = getattr(theirs, "default", None)
        if theirs is None:                  # it goes into **kwargs
            is_given = name in own and not (is_wrapper and name in fixed)
        elif name in off:                   # None and 0 are off, too, but not of what is looked up
            is_given = (default is inspect.Parameter.empty or bool(default)
                        or binding.names[name] not in binding.function.own)
        else:                               # another word than ours is a choice of its own
            is_given = not isinstance(default, str) or default in {
                one["parameters"].get(name) for one in content["cases"]}
        if is_given:
            given[name] = known[name]
    missing = own.keys() - given.keys() - {*fixed, *case.get("optional", ())}
    low, high = (own.get(f"epsilon_{end}") for end in ("low", "high"))
    if low == high and "low" not in words_of(binding.names.get("epsilon_low", "low")):
        missing -= {"epsilon_high"}                         # one epsilon for both bounds
    if content["function"] == "gae" and "mask" not in binding.names and not all(
            flat(case["inputs"]["mask"])[1]):
        missing |= {"mask"}
    needed = [name for name in binding.needed() if name not in settings and name not in made]
    extra = given.keys() & {*case.get("without", ())}
    return Fit(binding, given, missing, extra, needed, made)


def loss_keys(keys, content):
    """List the keys under which there may be a loss, best first: one such as actor/grpo_loss only
    if it is the only one."""
    others = OTHER_LOSS if content["function"] == "value_loss" else OTHER_LOSS | OF_CRITIC
    words = {key: {*re.split("[^a-z]+", str(key).lower())} for key in keys}
    own = [key for key, its in words.items() if {"loss", "losses"} & its and not its & others]
    return [key for key in LOSS_KEYS if key in keys] + (own if len(own) == 1 else [])


def named(found, content, case, tool):
    """Find the results in what a function returned: by their keys; or, of a tuple or a list, by
    their order, but a loss is only the first. ValueError if there are none. -> {result: array}"""
    first = next(iter(content["results"]))
    if hasattr(found, "_asdict"):
        found = found._asdict()
    elif hasattr(found, "__dict__") and not hasattr(found, "shape"):
        found = found if isinstance(found, Mapping) else vars(found)
    if isinstance(found, Mapping):
        results = {name: x for name, x in found.items() if name in content["results"]}
        keys = loss_keys(found, content) if first in LOSS_KEYS else []
        keys += [key for key in found if meaning(str(key), (first,)) == first]
        if first not in results and keys:
            results[first] = found[keys[0]]
        got = f"the keys {', '.join(map(str, found)) or 'of an empty dict'}"
    elif isinstance(found, (tuple, list)):
        count = len(flat(case["right"][first])[1])
        if isinstance(found, list) and len(found) > 1 and count > 1:    # the parts of an array
            found = [module_of(tool).stack(found) if hasattr(found[0], "shape") else found]
        names = [first] if first in LOSS_KEYS else content["results"]
        results = dict(zip(names, found))
        got = f"{len(found)} values"
    else:
        results = {first: found}
        got = "None"
    results = {name: x for name, x in results.items() if x is not None}
    if not results:
        raise ValueError(f"there is no {first} in what it returned: {got}")
    return results


def other_reading(found, content, case, tool, is_given):
    """Read what a function returned otherwise: a sum over tokens that is not yet divided by the
    largest length, if the function is not given that (is_given); of two values, a sum of losses and
    the number of tokens, which gives the loss; or the second one as the result, such as advantages
    behind their baseline. -> {result: array}, sentence; {} if there is no other reading"""
    own = case["parameters"]
    if own.get("how") == "constant" and not is_given:
        loss = named(found, content, case, tool)["loss"]
        largest = own.get("max_length", len(case["inputs"]["mask"][0]))
        return {"loss": averaged(loss, case, tool) / largest}, (
            "right if your trainer divides it by the largest length")
    if not isinstance(found, tuple) or len(found) < 2:
        return {}, ""
    second = flat(found[1])[1]
    tokens = sum(m > 0 for m in flat(case["inputs"].get("mask", []))[1])
    if case["parameters"].get("how") == "token_mean" and second == [tokens]:
        return {"loss": found[0] / found[1]}, (
            "right if your trainer divides it by the second value, the number of tokens")
    names = [*content["results"]]
    is_like = hasattr(found[1], "shape") and len(second) == len(flat([*case["right"].values()])[1])
    if len(names) == 1 and names[0] not in LOSS_KEYS and is_like:
        return {names[0]: found[1]}, "right if the second value is meant"
    return {}, ""


def call(function, case, content, tool, dtype, fitted, way="", settings=(), read=None):
    """Call a function with the inputs and parameters of a case that it takes. read: finds the
    results in what it returned, instead of `named`.
    -> {result: array}, {result: {input: gradient}}, but no gradients from numpy"""
    names = {*fitted.binding.names}.union(*map(used, fitted.made.values()))
    slopes = {} if tool == "numpy" else {
        result: [leaf for leaf in leaves if leaf in names]
        for result, leaves in case.get("gradient", {}).items()}

    def given():
        inputs = given_inputs(content, case)
        known = arrays(inputs, content["integers"], tool, dtype) | fitted.parameters
        for name in {"group_ids", "mask"} & fitted.parameters.keys():
            known[name] = module_of(tool).asarray(known[name])
        if tool == "torch":
            for leaf in {leaf for leaves in slopes.values() for leaf in leaves}:
                known[leaf].requires_grad_()
        return {name: x for name, x in known.items() if name in names}

    def run(known, is_traced=True):
        known = WAYS[way](known)
        library = {ALIASES[tool]: module_of(tool), "Model": Model}
        made = {name: eval(text, library | known) for name, text in fitted.made.items()
                if name != "return"}
        inputs = {fitted.binding.names.get(name, name): x for name, x in known.items()} | made
        is_kept = tool != "jax" and content["function"] not in OVERWRITTEN
        before = {name: flat(x) for name, x in inputs.items()} if is_kept else {}
        found = fitted.binding.call(known, **dict(settings) | made)
        changed = [name for name, x in before.items() if flat(inputs[name]) != x]
        if changed:
            raise RuntimeError(f"it changes its argument {', '.join(changed)} in place, so the "
                               "next call gets something else")
        found = eval(fitted.made.get("return", "found"), known | {"found": found})
        if read:
            return read(found)
        results = named(found, content, case, tool)
        if not is_traced:
            for name, x in results.items():
                needs_numbers(name, x)
        if content["function"] == "policy_loss":
            results["loss"] = averaged(results["loss"], case, tool)
        return results

    # a kernel may free its inputs, and what it keeps for a gradient, so all are new
    results = run(given(), is_traced=False)
    return results, {result: gradient(run, given(), result, leaves, tool)
                     for result, leaves in slopes.items() if result in results}


def needs_numbers(name, x):
    """Raise TypeError if a result is not an array or a list of real numbers."""
    try:
        kinds = {type(one) for one in flat(x)[1]} - {bool, int, float}
    except Exception as error:          # of another device or layout
        raise TypeError(f"{name} cannot be read: {error}") from None
    if kinds:
        raise TypeError(f"{name} is not made of numbers: there is a {kinds.pop().__name__}")


def averaged(x, case, tool):
    """Average a loss of tokens (B, T) as the case says, or of outputs (B,). -> scalar"""
    shape = tuple(getattr(x, "shape", ()))
    if len(shape) == 2:
        return average(x, case, tool)
    is_of_outputs = shape == (len(case["inputs"]["mask"]),)
    if is_of_outputs and case["parameters"]["how"] != "token_mean":
        return x.mean()
    return x


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


def with_sums(case, results):
    """Add up the right answers for tokens of those results that have one number for each output,
    (B,). -> case"""
    right = {}
    for name, x in case["right"].items():
        first, *others = *flat(x)[0], None
        is_summed = "tokens" in case["inputs"] and len(others) == 2 and name in results and (
            flat(results[name])[0] == (first,))
        right[name] = [sum(row) for row in x] if is_summed else x
    return case | {"right": right}


def with_other_std(case, fitted):
    """Normalize rewards by a std that divides by G, as numpy's does, in a case of GRPO, if the
    function is not told by what (ddof). -> case"""
    if case["parameters"].get("method") != "grpo" or case["right"].keys() != {"advantages"} or (
            "ddof" in fitted.binding.names):
        return case
    A = []
    for group in case["inputs"]["rewards"]:
        mean = sum(group) / len(group)
        std = (sum((r - mean) ** 2 for r in group) / len(group)) ** 0.5
        A.append([(r - mean) / (std + case["parameters"]["eps"]) if std else 0.0 for r in group])
    return case | {"right": {"advantages": A}}


def without_masked(results, case):
    """Set the masked slots of tables (B, T) to 0 where the right answers are 0. -> dict"""
    mask = case["inputs"].get("mask", [])
    found = {}
    for name, x in results.items():
        shape, numbers = flat(x)
        m, right = (flat(y)[1] for y in (mask, case["right"].get(name, [])))
        if numbers and shape == flat(mask)[0] and not any(y for y, one in zip(right, m) if not one):
            numbers = [x if one else 0.0 for x, one in zip(numbers, m)]
            x = [numbers[n:n + shape[1]] for n in range(0, len(numbers), shape[1])]
        found[name] = x
    return found


def check_case(function, content, case, tool="torch", dtype="float64", tolerance=None, fixed=(),
               way="", detached=True, settings=(), names=()):
    """Call a function for a case, and compare. way: a key of WAYS; detached: whether a gradient in
    DATA is an error; fixed, settings and names as in `fit`. -> Outcome"""
    fitted = fit(function, content, case, fixed, settings, names)
    if fitted.why():
        return Outcome(case, [], fitted.why())
    own = {} if tolerance else case.get("tolerance", {})
    limit = tolerance or own.get(dtype, TOLERANCE[dtype])
    if isinstance(limit, str):
        return Outcome(case, [], f"{dtype}: {limit}")
    try:
        results, gradients = call(function, case, content, tool, dtype, fitted, way, settings)
    except NotImplementedError as error:
        return Outcome(case, [], str(error) or "not implemented")
    except (Exception, SystemExit) as error:
        for word in case["parameters"].values():    # it knows some methods, and this is another
            if isinstance(error, (KeyError, ValueError)) and isinstance(word, str) and (
                    re.search(rf"\b{word}\b", str(error))):
                return Outcome(case, [], f"the function does not know {word}")
        return Outcome(case, [f"{type(error).__name__}: {error}"], raised=True)
    data = tuple(leaf for found in gradients.values() for leaf, x in found.items()
                 if leaf in DATA and any(flat(x)[1]))

    def judged(gradients):
        return gradients if detached else {
            name: {leaf: x for leaf, x in found.items() if leaf not in DATA}
            for name, found in gradients.items()}
    found = (results, judged(gradients), fitted.binding.names)
    errors, sign, aim = compare(case, *found, limit, own.get("absolute", limit))
    for choice, answer in case.get("also", {}).items() if errors else ():
        if not compare(case | answer, *found, limit, own.get("absolute", limit))[0]:
            return Outcome(case, [], choice=choice, data=data)
    if errors:
        remarks = []

        def read(found):
            is_given = "max_length" in fitted.binding.names
            results, remark = other_reading(found, content, case, tool, is_given)
            remarks.append(remark)
            return results
        try:
            others, slopes = call(function, case, content, tool, dtype, fitted, way, settings, read)
        except Exception:               # what it returned cannot be read so
            others, slopes = {}, {}
        if others and not compare(case, others, judged(slopes), *found[2:], limit,
                                  own.get("absolute", limit))[0]:
            return Outcome(case, [], remark=remarks[0], data=data)
    of_numpy = "right if the std divides by G, as numpy's does, not by G - 1"
    for other, remark in ((with_sums(case, results), "right as sums over tokens"),
                          (with_other_std(case, fitted), of_numpy)):
        if errors and other["right"] != case["right"] and not compare(
                other, *found, limit, own.get("absolute", limit))[0]:
            return Outcome(case, [], remark=remark, data=data)
    inside = without_masked(results, case)
    if errors and not compare(case, inside, *found[1:], limit, own.get("absolute", limit))[0]:
        return Outcome(case, [], remark="right where the mask is 1, so use it with the mask",
                       data=data)
    rough = own.get("float32", TOLERANCE["float32"])
    is_strict = tolerance or dtype == "float32" or isinstance(rough, str)
    if errors and not is_strict and not compare(
            case, *found, rough, own.get("absolute", SMALL))[0]:
        return Outcome(case, [], remark="right in float32, but not in float64", data=data)
    lost = content["results"].keys() - results.keys()
    remark = f"not returned, so not checked: {', '.join(sorted(lost))}" if lost else ""
    return Outcome(case, errors, remark=remark, sign=sign, aim=aim, data=data)
