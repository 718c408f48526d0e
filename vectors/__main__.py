"""Check your functions against the test vectors, files of inputs and right answers.

  python -m vectors mylosses.py:grpo_loss --recipe grpo    check a loss, or advantages, of a recipe
  python -m vectors FILE.py[:FUNCTION] [NAME] [KEY=VALUE ...]    check, for example:
  python -m vectors mylosses.py:loss policy_loss method=clip how=token_mean
  python -m vectors                                        list the files of vectors (NAME)

FILE.py may also be the name of a module. Without NAME, the file of vectors is the one that is
called like the function. Without FUNCTION, all functions that are called like a file are checked.
KEY=VALUE selects the cases with this parameter, which the function then need not take; id=NAME
selects one case. A function gets the inputs and parameters that it names, as torch tensors; if its
file imports jax instead, as JAX arrays; if it imports numpy alone, as numpy arrays, without a check
of gradients. It returns the results in the order of the file, or the losses of tokens, which are
averaged for it. A case is skipped if the function lacks one of its parameters, needs another one,
or raises NotImplementedError.

Only core cases decide, and the exit code is 0 if all of them are right. Robust cases (overflow,
infinite numbers in masked slots, outputs without tokens) and matters of convention are listed.
Inputs such as old_logps are data, which your caller detaches; this is tested if the function's own
text detaches something.

  --recipe NAME       grpo, dr_grpo, dapo, gspo, cispo, ppo, rloo or dpo
  --robust            robust cases decide, too
  --detached          old_logps and other data must get no gradient, even if the caller forgets it
  --float32           use float32, and allow for its rounding
  --tolerance 1e-6    largest absolute and relative difference, for all cases; 1e-12 by default
"""
import importlib
import inspect
import json
import math
import sys
from collections import Counter
from pathlib import Path

from vectors import WAYS, check_case, files, grade, library, read, renamed

RECIPES = {                             # method of policy_loss, average, method of advantages
    "grpo": ("clip", "sequence_mean", "grpo"), "dr_grpo": ("clip", "constant", "mean"),
    "dapo": ("clip", "token_mean", "grpo"), "gspo": ("gspo", "sequence_mean", "grpo"),
    "cispo": ("cispo", "token_mean", "grpo"), "ppo": ("clip", "token_mean", "given"),
    "rloo": ("reinforce", "sequence_sum", "rloo"), "dpo": ("dpo", "", "")}
MUST_TELL = {"min_max", "not_clipped", "no_cap", "mask_ignored", "padding", "over_slots",
             "other_mean", "weight_grad"}
LABELS = {"wild": "infinite numbers in masked slots", "empty output": "an output without tokens",
          "large": "large numbers", "tokens": "advantages of tokens",
          "token advantages": "advantages of tokens"}   # of robust cases, by the end of their id


class Problem(Exception):
    """Sentences for the user."""


def of_recipe(recipe, function):
    """Find the file of a recipe that has most inputs of a function. -> name, {parameter: value}"""
    if recipe not in RECIPES:
        raise Problem(f"there is no recipe {recipe}; the recipes are {', '.join(RECIPES)}")
    method, how, advantage = RECIPES[recipe]
    found = {
        "policy_loss": {"method": method, "how": how}, "advantages": {"method": advantage},
        "recipe": {"method": method, "how": how, "advantage": advantage}, "gae": {},
        "value_loss": {}, "preference_loss": {"method": "dpo"},
        "pair_loss": {"method": "dpo", "averaged": "False"}}
    names = inspect.signature(function).parameters.keys()

    def fit(name):
        case = read(name)["cases"][0]
        return len((names | renamed(function, case).keys()) & read(name)["inputs"].keys())
    name = max(found, key=fit)
    return name, found[name]


# ---- 1. what is wrong ------------------------------------------------------------------------

def numbers_of(outcome):
    """Look up what mistakes give in a wrong case, in its results or in its gradients. -> dict"""
    case, errors, *_ = outcome
    return case["slopes" if "gradient" in errors[0] else "flags"]


def explained(outcome):
    """List the mistakes that give the numbers of a wrong case. -> flags"""
    if outcome.sign is None:
        return []
    is_nan = not math.isfinite(outcome.sign)
    return [flag for flag, number in numbers_of(outcome).items() if number is not None and (
        is_nan if number == "nan" else abs(outcome.sign - number) <= 0.01 * abs(number))]


def likely(outcomes, has_gradient):
    """Rank mistakes by how many wrong cases they give, less the cases in which they would give
    another number. A right case that would show a mistake rules it out. -> {flag: count}"""
    wrong = [one for one in outcomes if one.errors]
    right = [one.case for one in outcomes if not one.errors and not one.skipped
             and "convention" not in one.case]
    hits = Counter(flag for one in wrong for flag in explained(one))
    misses = Counter(flag for one in wrong for flag, number in numbers_of(one).items()
                     if number is not None and flag not in explained(one))
    for flag in flags_of(right, has_gradient):
        hits.pop(flag, None)
    ranked = sorted(hits, key=lambda flag: (misses[flag] - hits[flag], misses[flag]))
    return {flag: hits[flag] for flag in ranked}


def describe(name, outcome, mistakes, has_gradient):
    """Print a wrong case: its parameters, the differences, and the mistakes that give them."""
    case, errors, *_ = outcome
    words = [f"{key} {json.dumps(value)}" for key, value in case["parameters"].items()]
    lines = [f"with {', '.join(words)}"] if words else []
    lines += errors
    is_checked = has_gradient and case.get("gradient") and not outcome.raised
    if is_checked and not any("gradient" in line for line in errors):
        lines.append("its gradient is not wrong")
    if "convention" in case:
        lines.append(f"a matter of convention: {case['convention']}")
    lines += [f"this comes out if {mistakes[flag]}" for flag in explained(outcome)]
    source = f" ({case['source']})" if "source" in case else ""
    print(f"WRONG  {name}, case {case['id']}: {case['comment']}{source}")
    print(*(f"  {line}" for line in lines), sep="\n")


def flags_of(cases, has_gradient):
    """Collect the mistakes that cases catch. -> set"""
    kinds = ("flags", "slopes") if has_gradient else ("flags",)
    return {flag for case in cases for kind in kinds for flag in case[kind]}


def values_of(case, name):
    return str((case | case["parameters"]).get(name))


def chosen_of(cases, chosen):
    """List the cases that have all chosen parameters."""
    return [case for case in cases if all(values_of(case, name) == value
                                          for name, value in chosen.items())]


def label(case):
    """Name what a robust case tries."""
    end = case["id"].rpartition(", ")[2]
    return LABELS.get(end, end)


def report(name, outcomes, counts, mistakes, options):
    """Print the wrong cases of a file, a summary, and the mistakes that explain the wrong cases.
    counts(case): whether a case decides."""
    has_gradient = options["tool"] != "numpy"
    ran = [one for one in outcomes if not one.skipped]
    core = [one for one in ran if counts(one.case)]
    raised = Counter(one.errors[0] for one in core if one.raised)
    for outcome in core:
        if outcome.raised and raised[outcome.errors[0]] > 1:
            if raised[outcome.errors[0]] < len(core) + 1:       # once for all of its cases
                print(f"WRONG  {name}, {raised[outcome.errors[0]]} cases: {outcome.errors[0]}")
            raised[outcome.errors[0]] = len(core) + 1
        elif outcome.errors and raised[outcome.errors[0]] <= len(core):
            describe(name, outcome, mistakes, has_gradient)
    parts = [f"{sum(not one.errors for one in core)} of {len(core)}"]
    for what, words in (("robust", "not robust"), ("convention", "conventions of your own")):
        others = [one.case for one in ran if one.errors and not counts(one.case)
                  and (grade(one.case) == "convention") == (what == "convention")]
        if others:
            parts.append(f"{words}: {', '.join(dict.fromkeys(map(label, others)))}")
    print(f"{name}: right: {'; '.join(parts)}")
    for why, count in Counter(one.skipped for one in outcomes if one.skipped).items():
        print(f"  {count} skipped: {why}")
    for one in ran:
        if one.choice:
            print(f"  {one.case['id']} is right if {one.choice}: {one.case['convention']}")
    data = sorted({leaf for one in ran for leaf in one.data})
    if data and not options["detached"]:
        print(f"  {', '.join(data)}: your caller has to detach what is data (--detached tests it)")
    for flag, count in list(likely(core, has_gradient).items())[:3]:
        print(f"likely: {mistakes[flag]} (gives {count} of the wrong answers)")


# ---- 2. the function -------------------------------------------------------------------------

def loaded(target):
    """Import a module by its name or path."""
    path = Path(target)
    sys.path.insert(0, str(path.parent) if path.suffix == ".py" else "")
    try:
        return importlib.import_module(path.stem if path.suffix == ".py" else target)
    except Exception as error:
        raise Problem(f"cannot import {target}: {type(error).__name__}: {error}") from None


def functions_of(module):
    return [name for name, value in vars(module).items() if inspect.isroutine(value)
            and getattr(value, "__module__", "") == module.__name__]


def member(module, name):
    """Find a function. A class, or a method, needs an adapter."""
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not name or not callable(found):
        has = f"; it has {', '.join(functions_of(module))}" if functions_of(module) else ""
        raise Problem(f"{module.__name__} has no function {name or 'of that name'}{has}")
    if inspect.isclass(found) or "." in name:
        raise Problem(adapter(module, name, found, "policy_loss"))
    return found


def adapter(module, name, function, file):
    """Write a function that has our names and calls `function`, with gaps to fill. -> str"""
    first = name.split(".")[0]
    made = f"{first}(...)" + "".join(f".{part}" for part in name.split(".")[1:])
    parameters = [one for one in inspect.signature(function).parameters if one != "self"]
    theirs = {}
    if inspect.isclass(function):
        call = f"{made}(logps, old_logps, advantages, mask)"
    else:
        case = read(file)["cases"][0]
        case = case | {"inputs": dict.fromkeys(read(file)["inputs"])}
        theirs = {one: our for our, one in renamed(function, case).items()}
        known = {*case["inputs"], *PARAMETERS[file]}
        words = [f"{one}={theirs.get(one, one if one in known else '...')}" for one in parameters]
        call = f"{made if '.' in name else name}({', '.join(words)})"
    ours = ", ".join([*list(read(file)["inputs"])[:4], *PARAMETERS[file]])
    return (f"{name}({', '.join(parameters)}) does not fit: fill in the gaps (...), and check "
            f"adapted\n\n    from {module.__name__} import {first}\n    def adapted({ours}):\n"
            f"        return {call}")


PARAMETERS = {"policy_loss": ["epsilon_low", "epsilon_high"], "preference_loss": ["beta"]}


def best_way(function, content, cases, recipe, options):
    """Choose the way to call a function by which most core cases are right, or come close to a
    known mistake. -> key of WAYS"""
    def count(way):
        found = [check_case(function, content, case, way=way, **options) for case in cases
                 if grade(case, recipe) == "core"]
        return (sum(not one.errors and not one.skipped for one in found),
                sum(bool(explained(one)) for one in found if one.errors),
                -sum(one.raised for one in found))
    return max(WAYS, key=count)


def check(module, name, function, file, chosen, recipe, is_robust, options):
    """Check a function on the cases of a file that have the chosen parameters. -> outcomes of the
    cases that decide, skipped ones included"""
    if file not in files():
        raise Problem(f"there is no file {file}; the files are {', '.join(files())}")
    content = read(file)
    cases = chosen_of(content["cases"], chosen)
    if not cases:
        raise Problem(f"{file} has no such case; it has " + "; ".join(
            f"{key} {', '.join(sorted({values_of(case, key) for case in content['cases']}))}"
            for key in chosen))
    options = options | {"fixed": chosen}
    way = best_way(function, content, cases, recipe, options)
    outcomes = [check_case(function, content, case, way=way, **options) for case in cases]
    asked = {key: value for key, value in chosen.items() if key == "id"}

    def counts(case):
        return is_robust or bool(asked) or grade(case, recipe) == "core"
    if all(one.skipped for one in outcomes) and file in PARAMETERS and (
            "the function needs" in outcomes[0].skipped
            or "epsilon" in outcomes[0].skipped or "beta" in outcomes[0].skipped):
        raise Problem(adapter(module, name, function, file))
    theirs = [f"{other} for {our}" for our, other in renamed(function, cases[0]).items()]
    if theirs or way:
        print(f"called with {', '.join(theirs + [way] * bool(way))}")
    report(file, outcomes, counts, content["mistakes"], options)
    methods = sorted({values_of(case, "method") for case in cases})
    if len(methods) > 1 and all("method" in one.skipped for one in outcomes):
        print(f"  choose one, which the function need not take: method={', '.join(methods)}")
    return [one for one in outcomes if counts(one.case)]


def other_recipe(function, file, recipe, options):
    """Find another recipe whose core cases a function passes. -> name, or None"""
    for other in RECIPES:
        name, chosen = of_recipe(other, function)
        if name == file and other not in (recipe, "ppo"):
            content = read(file)
            cases = [case for case in chosen_of(content["cases"], chosen) if grade(case) == "core"]
            options = options | {"fixed": chosen}
            way = best_way(function, content, cases, other, options)
            found = [check_case(function, content, case, way=way, **options) for case in cases]
            ran = [one for one in found if not one.skipped]
            if ran and not any(one.errors for one in ran):
                return other
    return None


# ---- 3. the command --------------------------------------------------------------------------

def run(argv):
    """Run the command. -> exit code: 1 if a case that decides is wrong, if none ran, or if the
    cases of a recipe that ran leave a mistake unseen"""
    values = {flag: argv.pop(argv.index(flag) + 1) for flag in ("--tolerance", "--recipe")
              if flag in argv[:-1]}
    words = [word for word in argv if not word.startswith("--") and "=" not in word]
    chosen = dict(word.split("=", 1) for word in argv if "=" in word)
    if not words:
        print(__doc__)
        for name in files():
            print(f"{name:23}{len(read(name)['cases']):3} cases  {read(name)['about']}")
        return 0
    target, _, function = words[0].rpartition(":") if ":" in words[0] else (words[0], "", "")
    module = loaded(target)
    options = {"tool": library(module), "dtype": "float32" if "--float32" in argv else "float64",
               "tolerance": float(values.get("--tolerance", 0))}
    has_gradient = options["tool"] != "numpy"
    recipe = values.get("--recipe", "")
    names = words[1:2] or [function] if function else [
        name for name in files() if hasattr(module, name)]
    if not names:
        raise Problem(f"no function of {module.__name__} is called like a file of vectors; it has "
                      f"{', '.join(functions_of(module)) or 'none'}. Name one, and a recipe: "
                      f"{target}:FUNCTION --recipe grpo")
    more = {}
    if recipe:
        file, more = of_recipe(recipe, member(module, function))
        names, chosen = [file], more | chosen
    outcomes = []
    for name in names:
        one = member(module, function or name)
        options["detached"] = "--detached" in argv or says_detached(one)
        outcomes += check(module, function or name, one, name, chosen, recipe, "--robust" in argv,
                          options)
    ran = [one for one in outcomes if not one.skipped]
    unseen = set()
    if recipe:
        cases = [case for case in chosen_of(read(file)["cases"], more)
                 if grade(case, recipe) == "core"]
        unseen = MUST_TELL & flags_of(cases, has_gradient) - flags_of(
            [one.case for one in ran], has_gradient)
        print(f"{recipe}: {sum(grade(one.case, recipe) == 'core' for one in ran)} of {len(cases)} "
              f"core cases of {file} ran")
        for flag in sorted(unseen):
            print(f"  they cannot tell if {read(file)['mistakes'][flag]}")
        if any(one.errors for one in ran):
            other = other_recipe(member(module, function), file, recipe, options)
            if other:
                print(f"likely: this is the loss of {other} (--recipe {other} is right)")
    if not has_gradient:
        print("numpy computes no gradients: only values are checked")
    return int(not ran or bool(unseen) or any(one.errors for one in ran))


def says_detached(function):
    """Whether a function detaches something itself."""
    try:
        text = inspect.getsource(function)
    except OSError:
        return False
    return any(word in text for word in ("detach", "no_grad", "stop_gradient"))


def main(argv):
    try:
        return run(argv)
    except Problem as problem:
        print(problem)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
