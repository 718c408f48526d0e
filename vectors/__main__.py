"""Check your functions against the test vectors, files of inputs and right answers.

  python -m vectors                                            list the files
  python -m vectors MODULE:FUNCTION --recipe grpo              all that a loss of GRPO can be
                                                               checked on, or its advantages
  python -m vectors MODULE[:FUNCTION] [FILE] [NAME=VALUE ...]  check, for example:
  python -m vectors mylosses:grpo_loss policy_loss method=clip how=token_mean

MODULE is a name or a path. Without FILE, the file has the name of the function. Without FUNCTION,
all functions of the module that have the name of a file are checked. NAME=VALUE selects the cases
with this parameter, which the function then need not take; id=NAME selects one case. A function
gets the inputs and parameters that it names, as torch tensors or JAX arrays if its module uses
these, else as numpy arrays, without a check of gradients. It returns the results in the order of
the file, or the losses of tokens, which are averaged for it. A case is skipped if the function
lacks one of its parameters, needs another one, or raises NotImplementedError.

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
    "rloo": ("reinforce", "sequence_sum", "rloo")}
MUST_TELL = {                           # flags of policy_loss, recipe and pair_loss
    "min_max", "not_clipped", "weight_not_clipped", "mask_ignored", "padding", "mean_over_slots",
    "mean_of_means", "old_has_gradient", "weight_not_detached", "reference_has_gradient"}
NO_GRADIENTS = "numpy computes no gradients: only values are checked"


class Problem(Exception):
    """A sentence for the user."""


def selected(recipe, function):
    """Find the file of a recipe whose inputs a function takes. -> name, {parameter: value}"""
    if recipe == "dpo":
        found = {"preference_loss": {"method": "dpo"},
                 "pair_loss": {"method": "dpo", "averaged": "False"}}
    elif recipe in RECIPES:
        method, how, advantage = RECIPES[recipe]
        found = {"policy_loss": {"method": method, "how": how}, "advantages": {"method": advantage},
                 "recipe": {"method": method, "how": how, "advantage": advantage},
                 "gae": {}, "value_loss": {}}
    else:
        raise Problem(f"there is no recipe {recipe}; the recipes are {', '.join(RECIPES)}, dpo")
    names = inspect.signature(function).parameters.keys()
    name = max(found, key=lambda name: len(names & read(name)["inputs"].keys()))
    return name, found[name]


def describe(name, case, errors, mistakes, flags, has_gradient):
    """Print a wrong case: its parameters, the differences, and the mistakes that it catches."""
    words = [f"{key} {json.dumps(value)}" for key, value in case["parameters"].items()]
    lines = [f"with {', '.join(words)}"] if words else []
    lines += errors
    if has_gradient and case.get("gradient") and not any("gradient" in line for line in errors):
        lines.append("its gradient is not wrong")
    if "convention" in case:
        lines.append(f"a matter of convention: {case['convention']}")
    lines += ["this case is known to catch:", *(f"- {mistakes[flag]}" for flag in flags)]
    source = f" ({case['source']})" if "source" in case else ""
    print(f"WRONG  {name}, case {case['id']}: {case['comment']}{source}")
    print(*(f"  {line}" for line in lines), sep="\n")


def flags_of(case, has_gradient):
    return case["flags"] + (case.get("gradient_flags", []) if has_gradient else [])


def explanations(wrong, right, mistakes, has_gradient):
    """Rank the mistakes that no right case catches by the wrong cases that they explain. One that
    changes only a gradient, or gives nan, explains only such an error. -> at most three flags"""
    passed = {flag for case, _, _, choice in right if "convention" not in case and not choice
              for flag in flags_of(case, has_gradient)}
    explained = {}
    for n, (case, errors, *_) in enumerate(wrong):
        kind = "gradient_flags" if errors[0].startswith("the gradient") else "flags"
        for flag in case.get(kind, []):
            if "nan" not in mistakes[flag] or "nan" in " ".join(errors):
                explained.setdefault(flag, set()).add(n)
    fits = {flag: found for flag, found in explained.items() if flag not in passed}
    whole = [flag for flag, found in fits.items() if len(found) == len(wrong)]
    names = []
    left = set() if whole else set(range(len(wrong)))
    while left and len(names) < 3 and any(found & left for found in fits.values()):
        names.append(max(fits, key=lambda flag: len(fits[flag] & left)))
        left -= fits[names[-1]]
    return whole[:3] or names


def report(name, outcomes, mistakes, tool):
    """Print the wrong cases of a file, a summary, and the mistakes that explain the wrong cases."""
    has_gradient = tool != "numpy"
    wrong = [outcome for outcome in outcomes if outcome.errors]
    right = [outcome for outcome in outcomes if not outcome.errors and not outcome.skipped]
    for case, errors, *_ in wrong:
        describe(name, case, errors, mistakes, flags_of(case, has_gradient), has_gradient)
    skipped = Counter(outcome.skipped for outcome in outcomes if outcome.skipped)
    print(f"{name}: {len(right)} right, {len(wrong)} wrong, {sum(skipped.values())} skipped")
    for why, count in skipped.items():
        print(f"  {count} skipped: {why}")
    for case, _, _, choice in right:
        if choice:
            print(f"  {case['id']} is right if {choice}: {case['convention']}")
    names = explanations(wrong, right, mistakes, has_gradient)
    if names:
        print("most likely, because no case that is right catches it:")
        print(*(f"- {mistakes[flag]}" for flag in names), sep="\n")


def cannot_tell(outcomes, tool):
    """List the mistakes in MUST_TELL that only cases which did not run can catch."""
    caught = [{flag for outcome in part for flag in flags_of(outcome.case, tool != "numpy")}
              for part in (outcomes, [one for one in outcomes if not one.skipped])]
    return sorted((caught[0] - caught[1]) & MUST_TELL)


def loaded(target):
    """Import a module by its name or path."""
    sys.path.insert(0, str(Path(target).parent) if target.endswith(".py") else "")
    try:
        return importlib.import_module(Path(target).stem if target.endswith(".py") else target)
    except Exception as error:
        raise Problem(f"cannot import {target}: {type(error).__name__}: {error}") from None


def check(module, function, name, chosen, options):
    """Check a function on the cases of a file that have the chosen parameters. -> outcomes"""
    if name not in files():
        raise Problem(f"there is no file {name}; the files are {', '.join(files())}")
    if not callable(getattr(module, function, None)):
        raise Problem(f"{module.__name__} has no function {function}")
    content = read(name)
    cases = [case for case in content["cases"]
             if all(str((case | case["parameters"]).get(key)) == value
                    for key, value in chosen.items())]
    if not cases:
        known = {key: {str((case | case["parameters"]).get(key)) for case in content["cases"]}
                 for key in chosen}
        raise Problem(f"no case of {name} has " + ", ".join(
            f"{key}={value} (there are {', '.join(sorted(known[key]))})"
            for key, value in chosen.items()))
    tool = library(module)
    outcomes = [check_case(getattr(module, function), content, case, tool, fixed=chosen, **options)
                for case in cases]
    report(name, outcomes, content["mistakes"], tool)
    return outcomes


def run(argv):
    """Run the command. -> exit code: 1 if a case is wrong or none was checked"""
    options = {"dtype": "float32" if "--float32" in argv else "float64"}
    values = {flag: argv.pop(argv.index(flag) + 1) for flag in ("--tolerance", "--recipe")
              if flag in argv[:-1]}
    options["tolerance"] = float(values.get("--tolerance", 0))
    words = [word for word in argv if not word.startswith("--") and "=" not in word]
    chosen = dict(word.split("=", 1) for word in argv if "=" in word)
    if not words:
        print(__doc__)
        for name in files():
            print(f"{name:23}{len(read(name)['cases']):3} cases  {read(name)['about']}")
        return 0
    target, _, function = words[0].rpartition(":") if ":" in words[0] else (words[0], "", "")
    module = loaded(target)
    tool = library(module)
    recipe = values.get("--recipe")
    if tool == "numpy":
        print(NO_GRADIENTS)
    names = words[1:2] or [function] if function else [
        name for name in files() if hasattr(module, name)]
    if recipe:
        if not callable(getattr(module, function, None)):
            raise Problem(f"{target} has no function {function}: name one, as MODULE:FUNCTION")
        name, more = selected(recipe, getattr(module, function))
        names, chosen = [name], more | chosen
    outcomes = [outcome for name in names
                for outcome in check(module, function or name, name, chosen, options)]
    ran = [outcome for outcome in outcomes if not outcome.skipped]
    unseen = cannot_tell(outcomes, tool) if recipe else []
    if recipe:
        print(f"{recipe}: {len(ran)} of {len(outcomes)} cases of {names[0]} ran")
        mistakes = read(names[0])["mistakes"]
        print(*(f"  they cannot tell if {mistakes[flag]}" for flag in unseen), sep="\n", end="")
    if tool == "numpy":
        print(NO_GRADIENTS)
    return int(not ran or bool(unseen) or any(outcome.errors for outcome in ran))


def main(argv):
    try:
        return run(argv)
    except Problem as problem:
        print(problem)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
