"""Check your functions against the test vectors, files of inputs and right answers.

  python -m vectors                                            list the files
  python -m vectors MODULE:FUNCTION --recipe grpo              check all that fits the function
  python -m vectors MODULE[:FUNCTION] [FILE] [NAME=VALUE ...]  check, for example:
  python -m vectors mylosses:grpo_loss policy_loss method=clip how=token_mean

MODULE is a name or a path. Without FILE, the file has the name of the function. Without FUNCTION,
all functions of the module that have the name of a file are checked. NAME=VALUE selects the cases
with this parameter, which the function then need not take; id=NAME selects one case. A function
gets the inputs and parameters that it names, as torch tensors; if its file imports jax instead, as
JAX arrays; if it imports numpy alone, as numpy arrays, without a check of gradients. It returns the
results in the order of the file, or the losses of tokens, which are averaged for it. A case is
skipped if the function lacks one of its parameters, needs another one, or raises
NotImplementedError.

  --recipe NAME       grpo, dr_grpo, dapo, gspo, cispo, ppo, rloo or dpo
  --float32           use float32, and allow for its rounding
  --tolerance 1e-6    largest absolute and relative difference, for all cases; 1e-12 by default
"""
import importlib
import inspect
import json
import sys
from collections import Counter
from pathlib import Path

from vectors import check_case, files, library, read

RECIPES = {                             # method of policy_loss, average, method of advantages
    "grpo": ("clip", "sequence_mean", "grpo"), "dr_grpo": ("clip", "constant", "mean"),
    "dapo": ("clip", "token_mean", "grpo"), "gspo": ("gspo", "sequence_mean", "grpo"),
    "cispo": ("cispo", "token_mean", "grpo"), "ppo": ("clip", "token_mean", "given"),
    "rloo": ("reinforce", "sequence_sum", "rloo"), "dpo": ("dpo", "", "")}
MUST_TELL = {"min_max", "not_clipped", "no_cap", "mask_ignored", "padding", "over_slots",
             "other_mean", "old_grad", "weight_grad"}


class Problem(Exception):
    """A sentence for the user."""


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
    name = max(found, key=lambda name: len(names & read(name)["inputs"].keys()))
    return name, found[name]


def explained(outcome):
    """List the mistakes that give the numbers of a wrong case. -> flags"""
    case, errors, _, _, sign = outcome
    numbers = case["slopes" if "gradient" in errors[0] else "flags"]
    return [flag for flag, number in numbers.items()
            if None not in (number, sign) and abs(sign - number) <= 0.01 * abs(number)]


def describe(name, outcome, mistakes, has_gradient):
    """Print a wrong case: its parameters, the differences, and the mistakes that give them."""
    case, errors, *_ = outcome
    words = [f"{key} {json.dumps(value)}" for key, value in case["parameters"].items()]
    lines = [f"with {', '.join(words)}"] if words else []
    lines += errors
    if has_gradient and case.get("gradient") and not any("gradient" in line for line in errors):
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


def report(name, outcomes, mistakes, has_gradient):
    """Print the wrong cases of a file, a summary, and the mistakes that explain the wrong cases."""
    wrong = [one for one in outcomes if one.errors]
    right = [one for one in outcomes if not one.errors and not one.skipped]
    for outcome in wrong:
        describe(name, outcome, mistakes, has_gradient)
    skipped = Counter(one.skipped for one in outcomes if one.skipped)
    print(f"{name}: {len(right)} right, {len(wrong)} wrong, {sum(skipped.values())} skipped")
    for why, count in skipped.items():
        print(f"  {count} skipped: {why}")
    for one in right:
        if one.choice:
            print(f"  {one.case['id']} is right if {one.choice}: {one.case['convention']}")
    passed = flags_of([one.case for one in right if "convention" not in one.case], has_gradient)
    hits = Counter(flag for one in wrong for flag in explained(one) if flag not in passed)
    for flag, count in hits.most_common(3):
        print(f"likely: {mistakes[flag]} (gives {count} of the wrong answers)")


def loaded(target):
    """Import a module by its name or path."""
    path = Path(target)
    sys.path.insert(0, str(path.parent) if path.suffix == ".py" else "")
    try:
        return importlib.import_module(path.stem if path.suffix == ".py" else target)
    except Exception as error:
        raise Problem(f"cannot import {target}: {type(error).__name__}: {error}") from None


def member(module, name):
    if not callable(getattr(module, name, None)):
        raise Problem(f"{module.__name__} has no function {name or 'without a name'}")
    return getattr(module, name)


def check(function, name, chosen, options):
    """Check a function on the cases of a file that have the chosen parameters. -> outcomes"""
    if name not in files():
        raise Problem(f"there is no file {name}; the files are {', '.join(files())}")
    content = read(name)
    cases = chosen_of(content["cases"], chosen)
    if not cases:
        raise Problem(f"{name} has no such case; it has " + "; ".join(
            f"{key} {', '.join(sorted({values_of(case, key) for case in content['cases']}))}"
            for key in chosen))
    outcomes = [check_case(function, content, case, fixed=chosen, **options) for case in cases]
    report(name, outcomes, content["mistakes"], options["tool"] != "numpy")
    methods = sorted({values_of(case, "method") for case in cases})
    if len(methods) > 1 and all("method" in one.skipped for one in outcomes):
        print(f"  choose one, which the function need not take: method={', '.join(methods)}")
    return outcomes


def run(argv):
    """Run the command. -> exit code: 1 if a case is wrong, if none ran, or if the cases of a recipe
    that ran leave a mistake unseen"""
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
    names = words[1:2] or [function] if function else [
        name for name in files() if hasattr(module, name)]
    recipe = values.get("--recipe")
    if recipe:
        name, more = of_recipe(recipe, member(module, function))
        names, chosen = [name], more | chosen
    outcomes = [outcome for name in names
                for outcome in check(member(module, function or name), name, chosen, options)]
    ran = [one for one in outcomes if not one.skipped]
    unseen = set()
    if recipe:
        cases = chosen_of(read(name)["cases"], more)
        unseen = MUST_TELL & flags_of(cases, has_gradient) - flags_of(
            [one.case for one in ran], has_gradient)
        print(f"{recipe}: {len(ran)} of {len(cases)} cases of {name} ran")
        for flag in sorted(unseen):
            print(f"  they cannot tell if {read(name)['mistakes'][flag]}")
    if not has_gradient:
        print("numpy computes no gradients: only values are checked")
    return int(not ran or bool(unseen) or any(one.errors for one in ran))


def main(argv):
    try:
        return run(argv)
    except Problem as problem:
        print(problem)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
