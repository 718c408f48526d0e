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

KEY=VALUE may also be a setting of your function, under its own name, such as slope=0.1.

Only core cases decide, and the exit code is 0 if all of them are right. Robust cases (overflow,
infinite numbers in masked slots, outputs without tokens) and matters of convention are listed.
Inputs such as old_logps are data, which your caller detaches; --detached tests it.
"""
import argparse
import contextlib
import importlib
import inspect
import io
import json
import math
import operator
import os
import sys
from collections import Counter

from vectors import cases_of, check_case, files, fit, grade, inputs_of, library, read, value, ways
from vectors.binding import bind, meaning, opened, parameters_of, setting
from vectors.names import LOSSES, method_of
from vectors.ways import adapter, arranged, check, constants, forms_of, of_class, told_way

RECIPES = {                             # a loss of vectors.names, and the method of its advantages
    "grpo": "grpo", "dr_grpo": "mean", "dapo": "grpo", "gspo": "grpo", "cispo": "grpo",
    "ppo": "given", "rloo": "rloo", "dpo": ""}
# Inputs of files, of which a function that names others has one.
ESSENTIAL = {"policy_loss": {"logps", "old_logps", "advantages"},
             "recipe": {"logps", "old_logps"}, "gae": {"values"}, "value_loss": {"values"}}
MUST_TELL = {"min_max", "not_clipped", "no_cap", "mask_ignored", "padding", "over_slots",
             "other_mean", "weight_grad"}
# What robust cases try, by the end of their id.
LABELS = {"wild": "infinite numbers in masked slots", "empty output": "an output without tokens",
          "large": "large numbers", "tokens": "advantages of tokens",
          "token advantages": "advantages of tokens",
          "lambda of outputs": "a lambda for each output"}
# Mistakes that leave outputs without tokens, where the mean of nothing is 0 or nan.
EMPTY = {"mask_inverted", "mask_shifted", "mask_shifted_back", "no_eos"}
# An answer is that of a mistake if it differs from it by less than this part of the way from the
# right answer to the mistake's, and by what is lost in the six digits that the files store.
NEAR = 1e-4
ROUNDED = 1e-5


def fail(message):
    """Print one line to stderr and exit with 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


# ---- 1. the function and its cases -----------------------------------------------------------

def loaded(target):
    """Import FILE.py or MODULE, with :FUNCTION or without. -> module, {name: function}"""
    path = target
    name = ""
    if ":" in target:
        path, _, name = target.rpartition(":")
    folder, file = os.path.split(path)
    sys.path.insert(0, folder)
    usage = io.StringIO()               # that argparse prints before it exits
    try:
        with contextlib.redirect_stderr(usage):
            module = importlib.import_module(file.removesuffix(".py"))
        print(usage.getvalue(), end="", file=sys.stderr)
    except SystemExit as error:
        fail(f"cannot import {path}: it exits (SystemExit: {error}). Put what it runs under if "
             '__name__ == "__main__":')
    except Exception as error:
        fail(f"cannot import {path}: {type(error).__name__}: {error}")
    names = [name] if name else [one for one in files() if callable(getattr(module, one, None))]
    try:
        found = {one: operator.attrgetter(one)(module) for one in names}
    except AttributeError:
        found = {}
    if not found or not all(map(callable, found.values())):
        own = [one for one, value in vars(module).items() if inspect.isroutine(value)
               and getattr(value, "__module__", "") == module.__name__]
        fail(f"{path} has no function {name or 'that is called like a file of vectors'}; it has "
             f"{', '.join(own) or 'none'}. Name one and a recipe: {path}:FUNCTION --recipe grpo")
    return module, found


def of_recipe(recipe, function):
    """Find the file of a recipe that has most inputs of a function. -> name, {parameter: value}"""
    if recipe == "dpo":
        found = {"preference_loss": {"method": "dpo"},
                 "pair_loss": {"method": "dpo", "averaged": "False"}}
    else:
        loss = {"method": LOSSES[recipe].method, "how": LOSSES[recipe].how}
        found = {"policy_loss": loss, "advantages": {"method": RECIPES[recipe]},
                 "recipe": loss | {"advantage": RECIPES[recipe]}, "gae": {}, "value_loss": {}}

    takes = parameters_of(function)

    def number(name):
        """Count the inputs that the function names, or has in another form, or by how many
        parameters a file misses those of a function that names none."""
        content = read(name)
        of_groups = ["group_ids", "num_generations"] if name == "advantages" else []
        inputs = [*content["inputs"], *of_groups]
        bound = bind(function, inputs).names
        names = {*bound.values()}.union(one for one in takes if forms_of(one, inputs, "torch"))
        if bound and bound.keys().isdisjoint(ESSENTIAL.get(name, bound)):
            return 0
        case = next(iter(cases_of(content, found[name])), content["cases"][0])
        needs = len(inputs_of(content, case)) + len(case["parameters"].keys() - found[name].keys())
        return len(takes.keys() & names) or -abs(needs - len(takes))
    name = max(found, key=number)
    return name, found[name]


# ---- 2. what is wrong ------------------------------------------------------------------------

def numbers_of(outcome):
    """Look up what mistakes give in a wrong case, in its results or in its gradients. -> dict"""
    return outcome.case["slopes" if "gradient" in outcome.errors[0] else "flags"]


def explained(outcome):
    """List the mistakes that give the numbers of a wrong case. An answer that is nearer to the
    right one than to a mistake's does not show the mistake. -> flags"""
    if outcome.sign is None:
        return []
    if not math.isfinite(outcome.sign):
        return [flag for flag, number in numbers_of(outcome).items()
                if number == "nan" or flag in EMPTY]
    sign, aim = outcome.sign, outcome.aim
    return [flag for flag, number in numbers_of(outcome).items() if number not in (None, "nan")
            and abs(sign - number) <= NEAR * abs(number - aim) + ROUNDED * abs(number)
            and abs(sign - number) < abs(sign - aim)]


def has_raised(outcomes):
    """Tell whether all cases that ran raised an exception."""
    return all(one.raised for one in outcomes if not one.skipped)


def flags_of(cases, has_gradient):
    """Collect the mistakes that cases catch. -> set"""
    kinds = ("flags", "slopes") if has_gradient else ("flags",)
    return {flag for case in cases for kind in kinds for flag in case[kind]}


def likely(outcomes, has_gradient):
    """List the mistakes that give the numbers of all wrong cases, and that no right case rules out,
    because it would show them. -> flags"""
    wrong = [one for one in outcomes if one.errors]
    right = [one.case for one in outcomes if not one.errors and "convention" not in one.case]
    if not any(math.isfinite(one.sign or 0) for one in wrong):
        wrong = [one._replace(case=one.case | {"flags": {
            flag: number for flag, number in one.case["flags"].items() if number == "nan"}})
            for one in wrong]
    found = [set(explained(one)) for one in wrong]
    common = set.intersection(*found) - flags_of(right, has_gradient) if found else ()
    return [flag for flag in numbers_of(wrong[0]) if flag in common] if wrong else []


def label(case):
    """Name what a robust case tries, or a convention."""
    end = case["id"].rpartition(", ")[2]
    return LABELS.get(end, end)


def describe(file, outcome, has_gradient, is_named):
    """Print a wrong case: its parameters and the differences, and the convention that may be meant
    if no mistake is named."""
    case = outcome.case
    source = f" ({case['source']})" if "source" in case else ""
    print(f"WRONG  {file}, case {case['id']}: {case['comment']}{source}")
    words = [f"{key} {json.dumps(value)}" for key, value in case["parameters"].items()]
    lines = [f"with {', '.join(words)}"] if words else []
    lines += outcome.errors
    if has_gradient and case.get("gradient") and "gradient" not in " ".join(outcome.errors):
        lines.append("its gradient is not wrong")
    if "convention" in case and not is_named:
        lines.append(f"a matter of convention: {case['convention']}")
    print(*(f"  {line}" for line in lines), sep="\n")


def report(file, outcomes, decides, mistakes, has_gradient):
    """Print the wrong cases of a file, a summary, and the mistakes that explain the wrong cases.
    decides(case): whether the exit code depends on it. -> outcomes of such cases that ran"""
    ran = [one for one in outcomes if not one.skipped]
    deciding = [one for one in ran if decides(one.case)]
    outputs = [one for one in deciding if grade(one.case) == "core"]
    flags = likely(deciding, has_gradient)[:2]
    where = "" if flags else " for advantages of outputs"
    flags = flags or likely(outputs, has_gradient)[:2]
    raised = {}
    for one in deciding:
        if one.raised:
            raised.setdefault(one.errors[0], []).append(one.case["id"])
        elif one.errors:
            describe(file, one, has_gradient, bool(flags))
    for error, cases in raised.items():
        print(f"WRONG  {file}, {'; '.join(cases)}: {error}")
    parts = [f"{file}: right: {sum(not one.errors for one in deciding)} of {len(deciding)}"]
    for words, is_own in (("not robust", False), ("conventions of your own", True)):
        others = [label(one.case) for one in ran if one.errors and not decides(one.case)
                  and (grade(one.case) == "convention") == is_own]
        if others:
            parts.append(f"{words}: {', '.join(dict.fromkeys(others))}")
    print("; ".join(parts))
    for why, count in Counter(one.skipped for one in outcomes if one.skipped).items():
        print(f"  {count} skipped: {why}")
    for one in ran:
        if one.choice:
            print(f"  {one.case['id']} is right if {one.choice}: {one.case['convention']}")
    for remark in dict.fromkeys(one.remark for one in deciding if one.remark):
        print(f"  {remark}: {', '.join(one.case['id'] for one in ran if one.remark == remark)}")
    for flag in flags:
        print(f"likely: {mistakes[flag]} (this gives all wrong answers{where})")
    return deciding


def untold(content, fixed, ran, recipe, has_gradient):
    """Print how many core cases of a recipe ran, and the mistakes that they cannot tell, although
    all of its cases can. -> flags"""
    cases = [case for case in cases_of(content, fixed) if grade(case, recipe) == "core"]
    ran = [one.case for one in ran]
    print(f"{recipe}: {sum(case in cases for case in ran)} of {len(cases)} core cases ran")
    flags = MUST_TELL & flags_of(cases, has_gradient) - flags_of(ran, has_gradient)
    for flag in sorted(flags):
        print(f"  they cannot tell if {content['mistakes'][flag]}")
    return flags


def other_recipe(function, file, recipe, options):
    """Find another recipe whose core cases a function passes. -> name, or "" """
    content = read(file)
    for other in RECIPES:
        name, fixed = of_recipe(other, function)
        if name == file and other not in (recipe, "ppo"):
            cases = [case for case in cases_of(content, fixed) if grade(case, other) == "core"]
            found, _, _ = check(function, content, cases, bool, options | {"fixed": fixed})
            ran = [one for one in found if not one.skipped]
            if ran and not any(one.errors for one in ran):
                return other
    return ""


# ---- 3. the command --------------------------------------------------------------------------

def arguments(argv):
    parser = argparse.ArgumentParser(
        prog="python -m vectors", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD",
                        help="FILE.py[:FUNCTION], NAME and KEY=VALUE, as above")
    parser.add_argument("--recipe", choices=RECIPES, help="recipe whose core cases decide")
    parser.add_argument("--robust", action="store_true", help="robust cases decide, too")
    parser.add_argument("--detached", action="store_true", help="old_logps and other data must "
                        "get no gradient, even if the caller forgets to detach them")
    parser.add_argument("--float32", action="store_true",
                        help="use float32, and allow for its rounding")
    parser.add_argument("--tolerance", type=float, metavar="1e-6", help="largest absolute and "
                        "relative difference, for all cases; 1e-12 by default")
    return parser.parse_intermixed_args(argv)


def chosen_cases(function, file, chosen, args):
    """Find the file, and the cases that are chosen by a recipe and by KEY=VALUE; other keys are
    settings. -> file, content, cases, parameters of the recipe, of KEY=VALUE, settings"""
    fixed = {}
    if args.recipe:
        file, fixed = of_recipe(args.recipe, function)
    if file not in files():
        fail(f"there is no file {file}; the files are {', '.join(files())}; or name a recipe, as "
             "in --recipe grpo")
    content = read(file)
    content["cases"] = [case for case in content["cases"] if not fit(function, content, case).extra]
    known = {"id"}.union(*(case["parameters"] for case in content["cases"]))
    takes = parameters_of(function)
    for key, text in chosen.copy().items():     # eps_clip=0.2 says epsilon_low=0.2
        ours = meaning(key, known) if key in takes else None
        if ours and cases_of(content, fixed | {ours: text}):
            chosen = {name: one for name, one in chosen.items() if name != key} | {ours: text}
    try:
        settings = {key: setting(key, text, takes[key]) for key, text in chosen.items()
                    if key in takes and key not in known}
    except ValueError as error:
        fail(error)
    chosen = {key: text for key, text in chosen.items() if key not in settings}
    method = method_of(chosen.get("method"))
    if method and not cases_of(content, {"method": chosen["method"]}):
        chosen |= {"method": method}            # as another project calls it
    cases = cases_of(content, fixed | chosen)
    if not cases:
        keys = chosen.keys() & known or known - {"id"}
        has = [f"{key} {', '.join(sorted({value(case, key) for case in content['cases']}))}"
               for key in sorted(keys)]
        fail(f"{file} has no such case; it has {'; '.join(has)}")
    if "method" in fixed | chosen:      # then a word that all cases share has no alternative
        fixed |= {key: text for key, text in cases[0]["parameters"].items()
                  if isinstance(text, str) and all(value(case, key) == text for case in cases)}
    return file, content, cases, fixed, chosen, settings


def run(module, name, function, file, chosen, args):
    """Check a function on the cases of a file, or of a recipe. -> whether a case that decides ran,
    exit code: 1 if one is wrong, if none ran, or if those of a recipe leave a mistake unseen"""
    owner, _, part = name.rpartition(".")
    owner = operator.attrgetter(owner)(module) if owner else None
    if inspect.isclass(function):
        part = "forward" if hasattr(function, "forward") else "__call__"
        name, function = of_class(name, function, part)
    elif inspect.isclass(owner):
        name, function = of_class(name.rpartition(".")[0], owner, part)
    elif hasattr(function, "forward"):
        name, function = f"{name}.forward", function.forward
    try:
        function = opened(function)
    except ValueError as error:
        fail(f"{name}: {error}")
    file, content, cases, of_all, chosen, settings = chosen_cases(function, file, chosen, args)
    fixed = of_all | chosen

    # the check
    tool = library(module)
    options = {"tool": tool, "dtype": "float32" if args.float32 else "float64",
               "tolerance": args.tolerance, "fixed": fixed, "detached": args.detached,
               "settings": settings}

    def decides(case):
        return args.robust or "id" in chosen or grade(case, args.recipe) == "core"

    def checked(tool):
        """Check with the arrays of a library, and if the function has constants of its own, where
        the cases have them. -> values of these, as `check`"""
        given = options | {"tool": tool}
        found = check(function, content, cases, decides, given)
        own = {}
        if all(one.skipped.startswith("the function does not take") for one in found[0]):
            own = constants(function, content, cases, decides, given,
                            lambda ran: likely(ran, tool != "numpy"))
        if own:
            found = check(function, content, cases_of(content, fixed | own), decides,
                          given | {"fixed": fixed | own})
        return own, *found
    own, outcomes, way, first = checked(tool)
    if tool == "numpy" and has_raised(outcomes):        # it may call a loss of torch
        of_torch = checked("torch")
        if not has_raised(of_torch[1]):
            tool = options["tool"] = "torch"
            own, outcomes, way, first = of_torch
    has_gradient = tool != "numpy"
    kinds = {one.kind for one in parameters_of(function).values()}
    if has_raised(outcomes) and kinds == {
            inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        fail(f"{name} takes only *args and **kwargs; add functools.wraps to its decorator, so that "
             "its arguments are known")
    is_right = not any(one.errors for one in outcomes if decides(one.case))
    whys = {one.skipped for one in outcomes}
    if own:
        options["fixed"] = fixed = fixed | own
        cases = cases_of(content, fixed)
        print(f"checked where {', '.join(f'{key} is {text}' for key, text in own.items())}, as in "
              "the function, which does not take it")
    fitted = fit(function, content, cases[0], fixed, settings)
    is_unfit = all(why.startswith("the function") and "method" not in why for why in whys)
    names, is_found, mistake = {}, False, ""
    if all(whys) or not is_right:       # nothing ran, or it is wrong
        names, own, is_found, mistake = arranged(
            function, content, cases, decides, options, lambda ran: likely(ran, has_gradient))
        fixed = fixed | own
        cases = cases_of({"cases": cases}, {key: x for key, x in own.items() if key == "method"})
        fitted = fit(function, content, cases[0], fixed, settings)
    is_guessed = fitted.binding.by_position and len(inputs_of(content, cases[0])) > 1
    is_named = likely([one for one in outcomes if decides(one.case)], has_gradient)
    weights = ways.weights_of(fitted, settings)
    if weights and not (is_right or is_found or mistake or is_named):
        fail(f"{name} takes ref_logps, but none of its names is known as the weight of the KL. It "
             f"may be {' or '.join(weights)}: call it beta, and check it again")
    if is_unfit or is_found or not is_right and (is_guessed or mistake and names and not is_named):
        why = fitted.why() or "its arguments have other names"
        signature = inspect.Signature([*function.own.values()])
        bound = {*fitted.binding.names, *names.values()}
        inputs = [*inputs_of(content, cases[0]), *(
            one for case in cases for one in inputs_of(content, case) if one in bound)]
        names |= {key: repr(x) for key, x in settings.items()}
        called = "adapted" if name != "adapted" else "adapter"
        gaps = adapter(called, module, name, function, cases[0], inputs, fitted, names, fixed, tool)
        told = "Fill in the gaps (...)"
        if is_found:
            told = "This adapter is right"
        elif mistake:
            told = (f"Likely, {content['mistakes'][mistake]} (this adapter gives the numbers of "
                    "this mistake)")
        elif "..." not in gaps and fitted.missing:
            values = [f"{key} {', '.join(sorted({value(case, key) for case in cases} - {'None'}))}"
                      for key in sorted(fitted.missing)]
            one = check_case(function, content, cases[0],
                             **options | {"fixed": cases[0]["parameters"]})
            raised = f" Called without them, {one.errors[0]}." if one.raised else ""
            print(f"{name}{signature} does not fit {args.recipe or file}: {why}. The cases have "
                  f"{'; '.join(values)}, and it is right for none of these. If it has other values "
                  f"of its own, let it take them, and check it again.{raised}")
            return False, 2
        elif "..." not in gaps:
            told = "This adapter is wrong, and its check shows how"
        left = [one for one, parameter in fitted.binding.settings.items()
                if parameter.default is None and one not in {*names, *fitted.binding.twins}]
        print(f"{name}{signature} does not fit {args.recipe or file}: {why}. {told}.")
        if is_found and left:
            print(f"It leaves out {', '.join(left)}, so what the function does with that is not "
                  "checked.")
        zeros = [one for one, text in names.items() if "0 * logps" in text]
        if is_found and zeros:
            print(f"It gives {', '.join(zeros)} as 0, so what the function does with them is not "
                  "checked.")
        if is_found and "log1p" in gaps and "[:, -1:]" not in gaps and "Model(" not in gaps:
            print("The logits at t are for the token at t: cut off a model's last logits, and the "
                  "first token.")
        path = os.path.join(os.path.dirname(args.words[0].partition(":")[0]), "adapter.py")
        words = [f"--recipe {args.recipe}" if args.recipe else file,
                 *(f"{key}={text}" for key, text in (chosen | {
                     key: text for key, text in own.items() if key == "method"}).items())]
        print(f"Save it as {path}, and run: python -m vectors {path}:{called} {' '.join(words)}\n\n"
              f"{gaps}")
        return False, 1 if mistake else 2
    if way and any(decides(one.case) and not one.errors and not one.skipped for one in outcomes):
        print(told_way(function, content, way, first, decides, options))
    theirs = [f"{other} for {our}" for our, other in fitted.binding.names.items() if our != other]
    if theirs:
        print(f"called with {', '.join(theirs)}")

    # its results
    ran = report(file, outcomes, decides, content["mistakes"], has_gradient)
    if all("method" in why for why in whys):
        methods = sorted({value(case, "method") for case in cases})
        print(f"  choose one, which the function need not take: method={', '.join(methods)}")
    data = sorted({leaf for one in outcomes for leaf in one.data})
    if data and not options["detached"]:
        print(f"  {', '.join(data)}: your caller has to detach what is data (--detached tests it)")
    if not has_gradient:
        print("numpy computes no gradients: only values are checked")
    is_wrong = any(one.errors for one in ran)
    unseen = set()
    if args.recipe:
        unseen = untold(content, of_all, ran, args.recipe, has_gradient)
    if args.recipe and is_wrong:
        other = other_recipe(function, file, args.recipe, options)
        if other:
            words = "or it is meant as" if likely(ran, has_gradient) else "likely: this is"
            print(f"{words} the loss of {other} (--recipe {other} is right)")
    return bool(ran), int(not ran or bool(unseen) or is_wrong)


def main(argv=None):
    """Run the command. -> exit code. Of several functions, those of which no case ran count only
    if there are no others."""
    args = arguments(argv)
    words = [word for word in args.words if "=" not in word]
    if not words:
        print(__doc__)
        for name in files():
            print(f"{name:23}{len(read(name)['cases']):3} cases  {read(name)['about']}")
        return 0
    target = words[0]
    chosen = dict(word.split("=", 1) for word in args.words if "=" in word)
    module, functions = loaded(target)
    ends = []
    for name, function in functions.items():
        file = words[1] if len(words) > 1 else name
        ends.append(run(module, name, function, file, chosen, args))
    return max((code for has_run, code in ends if has_run), default=ends[0][1])


if __name__ == "__main__":
    sys.exit(main())
