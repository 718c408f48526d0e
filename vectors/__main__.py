"""Check your functions against the test vectors, files of inputs and right answers.

  python -m vectors mylosses.py:grpo_loss --recipe grpo    check a loss, or advantages, of a recipe
  python -m vectors mylosses.py:loss policy_loss method=clip how=token_mean    or of a file, NAME
  python -m vectors                                        list the files of vectors

A function whose arguments have the names of this project, of TRL or of verl is called as it is. For
other names, say what they are: --map logp_old=old_logps lp=logps. For what a name cannot say, the
command writes an adapter next to your file, also with --adapter. Fill its gaps, and check the
adapter instead. Nothing is guessed. Advantages have one number for each output, (B,); say
--advantages B1 or BT for (B, 1) or (B, T).

FILE.py may also be the name of a module. Without NAME and --recipe, the file of vectors is called
like the function; without FUNCTION, all such functions are checked. KEY=VALUE states a constant of
the function, such as eps=1e-4, and selects the cases that have it; id=NAME selects a case; another
KEY is a setting of your function. Inputs are torch tensors; JAX arrays if the file imports jax
instead; numpy arrays, without a check of gradients, if it imports numpy alone. A function returns
the results in the order of the file, or the losses of tokens, which are averaged for it. A case is
skipped if the function lacks one of its parameters or raises NotImplementedError.

The first line is the verdict. Only core cases decide: the exit code is 0 if all that ran are right,
1 if one is wrong, and 2 if none ran. Inputs such as old_logps are data, which your caller detaches;
--detached tests it.
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
import shlex
import signal
import sys
import warnings
from collections import Counter
from pathlib import Path

from vectors import (
    FOLDER,
    SHAPES,
    cases_of,
    check_case,
    files,
    grade,
    library,
    numbers_of,
    read,
    value,
)
from vectors.adapter import adapter, gaps_of
from vectors.contract import ALIASES, NAMES, bind, is_adapter, restored, setting

# A recipe: the method of its loss, its average, and the method of its advantages
RECIPES = {
    "grpo": ("clip", "sequence_mean", "grpo"), "dr_grpo": ("clip", "constant", "mean"),
    "dapo": ("clip", "token_mean", "grpo"), "gspo": ("gspo", "sequence_mean", "grpo"),
    "cispo": ("cispo", "token_mean", "grpo"), "ppo": ("clip", "token_mean", "given"),
    "rloo": ("reinforce", "sequence_sum", "rloo"), "dpo": ("dpo", "", "")}
MUST_TELL = {"min_max", "not_clipped", "no_cap", "mask_ignored", "padding", "over_slots",
             "other_mean", "weight_grad"}
# Mistakes that leave outputs without tokens, where the mean of nothing is 0 or nan.
EMPTY = {"mask_inverted", "mask_shifted", "mask_shifted_back", "no_eos"}
# An answer is that of a mistake if it differs from it by less than this part of the way from the
# right answer to the mistake's, and by what is lost in the six digits that the files store.
NEAR = 1e-4
ROUNDED = 1e-5
SECONDS = 60            # largest time of all cases
SHOWN = 3               # number of wrong cases that are described


def fail(message):
    """Print one line to stderr and exit with 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


# ---- 1. the function and its cases -----------------------------------------------------------

def loaded(target):
    """Import FILE.py or MODULE, with :FUNCTION or without. -> module, {name: function}"""
    path, _, name = target.rpartition(":") if ":" in target else (target, "", "")
    folder, file = os.path.split(path)
    if "." in file.removesuffix(".py") and file.endswith(".py"):
        fail(f"{path}: Python cannot import a file with another dot in its name; rename it")
    with contextlib.suppress(ImportError):
        importlib.import_module("torch")    # before a random.py in your folder hides Python's
    sys.path.insert(0, folder)
    try:
        with quiet(), restored():
            module = importlib.import_module(file.removesuffix(".py"))
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


def of_recipe(recipe, takes, name=""):
    """Find the file of a recipe by what a function takes. -> name, {parameter: value}"""
    method, how, advantage = RECIPES[recipe]
    loss = {"method": method, "how": how}
    if not name and recipe == "dpo":
        name = "pair_loss" if "mask_chosen" in takes else "preference_loss"
    elif not name and "rewards" in takes:
        name = "recipe" if "logps" in takes else "gae" if "values" in takes else "advantages"
    name = name or ("value_loss" if "returns" in takes else "policy_loss")
    return name, {
        "policy_loss": loss, "advantages": {"method": advantage},
        "recipe": loss | {"advantage": advantage}, "preference_loss": {"method": "dpo"},
        "pair_loss": {"method": "dpo", "averaged": "False"}}.get(name, {})


# ---- 2. what is wrong ------------------------------------------------------------------------

def shown_by(outcome):
    """Look up what mistakes give in a wrong case, in its results or in its gradients. -> dict"""
    return outcome.case["slopes" if "gradient" in outcome.errors[0] else "flags"]


def explained(outcome):
    """List the mistakes that give the numbers of a wrong case. An answer that is nearer to the
    right one than to a mistake's does not show the mistake. -> set"""
    sign, aim, shown = outcome.sign, outcome.aim, shown_by(outcome).items()
    if sign is None:
        return set()
    if not math.isfinite(sign):
        return {flag for flag, number in shown if number == "nan" or flag in EMPTY}
    return {flag for flag, number in shown if number not in (None, "nan")
            and abs(sign - number) <= NEAR * abs(number - aim) + ROUNDED * abs(number)
            and abs(sign - number) < abs(sign - aim)}


def flags_of(cases, has_gradient):
    """Collect the mistakes that cases catch. -> set"""
    kinds = ("flags", "slopes") if has_gradient else ("flags",)
    return {flag for case in cases for kind in kinds for flag in case[kind]}


def likely(outcomes, has_gradient):
    """List the mistakes that give the numbers of all wrong cases, and that no right case rules out,
    because it would show them. -> flags"""
    wrong = [one for one in outcomes if one.errors]
    right = [one.case for one in outcomes if not one.errors and "convention" not in one.case]
    if not wrong:
        return []
    common = set.intersection(*map(explained, wrong)) - flags_of(right, has_gradient)
    if not any(math.isfinite(one.sign or 0) for one in wrong):
        common -= EMPTY
    return [flag for flag in shown_by(wrong[0]) if flag in common]


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


def report(file, recipe, every, outcomes, mistakes, has_gradient):
    """Print the verdict, the mistakes that explain the wrong cases, and these cases.
    every: the cases that decide. -> outcomes of those that ran, exit code"""
    ran = [one for one in outcomes if one.case in every and not one.skipped]
    wrong = [one for one in ran if one.errors]
    flags = likely(ran, has_gradient)[:2]
    told = flags_of([one.case for one in ran] if recipe and ran else every, has_gradient)
    unseen = MUST_TELL & flags_of(every, has_gradient) - told
    word = "NOT PASSED" if wrong or unseen else "PASSED" if ran else "NOTHING RAN"
    skipped = Counter(one.skipped for one in outcomes if one.skipped and one.case in every)
    skipped["they have other constants"] = len(every) - len(ran) - skipped.total()
    end = f", {len(wrong) or 'none'} wrong" * bool(ran)
    print(f"{word}: {len(ran)} of {len(every)} core cases of {file} ran{end}"
          + "".join(f"; {n} skipped: {why}" for why, n in skipped.items() if n))
    for flag in flags:
        print(f"likely: {mistakes[flag]} (this gives all wrong answers)")
    for flag in sorted(unseen):
        print(f"the cases that ran cannot tell if {mistakes[flag]}")

    differ = [one for one in wrong if not one.raised]
    for one in differ[:SHOWN]:
        describe(file, one, has_gradient, bool(flags))
    same = {"also wrong": [one.case["id"] for one in differ[SHOWN:]]}
    for one in wrong:
        if one.raised:
            same.setdefault(one.errors[0], []).append(one.case["id"])
    for one in outcomes:
        if one.errors and one.case not in every:
            is_own = grade(one.case) == "convention"
            same.setdefault("conventions of your own" if is_own else "not robust", []).append(
                one.case["id"])
        elif one.choice:
            same.setdefault(f"right if {one.choice}: {one.case['convention']}", []).append(
                one.case["id"])
        elif one.remark and one.case in every:
            same.setdefault(one.remark, []).append(one.case["id"])
    for words, ids in same.items():
        if ids:
            print(f"{words}: {'; '.join(dict.fromkeys(ids))}")
    return ran, 1 if wrong or unseen else 0 if ran else 2


# ---- 3. the command --------------------------------------------------------------------------

def arguments(argv):
    parser = argparse.ArgumentParser(
        prog="python -m vectors", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD",
                        help="FILE.py[:FUNCTION], NAME and KEY=VALUE, as above")
    parser.add_argument("--recipe", choices=RECIPES, help="recipe whose core cases decide")
    parser.add_argument("--map", metavar="NAME=WORD", nargs="+", action="extend", default=[],
                        help="what an argument of your function is: one of our names")
    parser.add_argument("--adapter", action="store_true", help="write an adapter, and stop")
    parser.add_argument("--advantages", choices=SHAPES, help="shape of the advantages that your "
                        "function takes: BT for ppo, and B for other recipes, by default")
    parser.add_argument("--robust", action="store_true", help="robust cases decide, too")
    parser.add_argument("--detached", action="store_true",
                        help="old_logps and other data must get no gradient")
    parser.add_argument("--float32", action="store_true",
                        help="use float32, and allow for its rounding")
    parser.add_argument("--tolerance", type=float, metavar="1e-6", help="largest absolute and "
                        "relative difference, for all cases; 1e-12 by default")
    return parser.parse_intermixed_args(argv)


def written(module, name, target, file, content, cases, words, shape, why):
    """Write an adapter next to the user's file, or, for a module that is named without a path, in
    this folder, and print how to check it."""
    folder = os.path.dirname(module.__file__) if ".py" in target else os.getcwd()
    own = f"{module.__name__.rpartition('.')[2]}_{name}".replace(".", "_")
    path = os.path.join(os.path.realpath(folder), f"adapt_{own}.py")
    command = f"python -m vectors {shlex.join([path, *words])}"
    if not {"site-packages", "dist-packages"} & {*FOLDER.parts}:        # of a clone
        command = f"cd {shlex.quote(str(FOLDER.parent))} && {command}"
    is_new = not os.path.exists(path)
    if is_new:
        try:
            with open(path, "w", encoding="utf-8") as out:
                out.write(adapter(module, name, file, content, cases, library(module), command,
                                  shape))
        except OSError as error:
            fail(f"cannot write the adapter: {error}")
    print(f"NOTHING RAN: {name}: {why}\nIts adapter is {path}{'' if is_new else ', as it was'}\n"
          f"Fill its gaps (...), and run, in any folder: {command}\nIt is checked as {file}. If it "
          f"computes something else, delete it, and name one of {', '.join(files())}.\n"
          "If only the names of its arguments differ, say what they mean: --map NAME=WORD.\n")
    print(Path(path).read_text("utf-8"))


@contextlib.contextmanager
def quiet():
    """Drop what a module or a function prints, and end it after SECONDS, where signals exist."""
    has_timer = hasattr(signal, "setitimer")
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if has_timer:
            signal.signal(signal.SIGALRM,
                          lambda *_: sys.exit(f"it takes more than {SECONDS} seconds"))
            signal.setitimer(signal.ITIMER_REAL, SECONDS, 1)    # then each case gets a second
        try:
            yield
        finally:
            if has_timer:
                signal.setitimer(signal.ITIMER_REAL, 0)


def run(module, name, function, target, file, chosen, args, words):
    """Check a function on the cases of a file, or of a recipe. -> exit code: 1 if one is wrong, or
    if those of a recipe leave a mistake unseen; 2 if none ran"""
    if gaps := gaps_of(function):
        print(f"NOTHING RAN: fill the gaps (...) of {', '.join(gaps)} in {module.__file__}")
        return 2
    own, why = None, "a class needs an adapter, which makes an object of it"
    said = dict(pair.split("=", 1) for pair in args.map if "=" in pair)
    if not inspect.isclass(function):
        try:
            own, why = bind(function, {*NAMES, "rewards", "returns", "mask_chosen"}, (),
                            said=said), ""
        except ValueError as error:
            why = f"its arguments are not known ({error})"
    of_all = {}
    if args.recipe:
        file, of_all = of_recipe(args.recipe, own.takes() if own else (), file)
    if file not in files():
        fail(f"there is no file {file}; the files are {', '.join(files())}; or name a recipe, as "
             "in --recipe grpo")

    # what the user says
    content = read(file)
    known = {"id", *numbers_of(content, content["cases"])}
    for pair in args.map:
        theirs, _, ours = pair.partition("=")
        words = {*content["inputs"], *known} - {"id"}
        if own and (theirs not in own.parameters or ours not in words
                    or len({*said.values()}) < len(args.map)):
            fail(f"--map {pair}: has to be NAME=WORD, where NAME is one of "
                 f"{', '.join(own.parameters)}, and WORD, once, one of {', '.join(sorted(words))}")
    chosen = {next((one for one in (key, *ALIASES.get(key, ())) if one in known), key): text
              for key, text in chosen.items()}
    try:
        settings = {key: setting(key, text, own and own.parameters.get(key))
                    for key, text in chosen.items() if key not in known}
    except ValueError as error:
        fail(error)
    chosen = {key: text for key, text in chosen.items() if key in known}
    fixed = of_all | chosen
    cases = cases_of(content, fixed)
    if not cases:
        has = [f"{key} {', '.join(sorted({value(one, key) for one in cases_of(content, of_all)}))}"
               for key in chosen]
        fail(f"{file} has no such case; it has {'; '.join(has)}")
    if "method" in fixed:               # then a word that all cases share has no alternative
        fixed |= {key: text for key, text in cases[0]["parameters"].items()
                  if isinstance(text, str) and all(value(case, key) == text for case in cases)}
    shape = args.advantages or ("BT" if args.recipe == "ppo" else "B")
    binding = None if why else bind(function, content["inputs"], numbers_of(content, cases),
                                    said=said)
    if binding:
        takes = binding.takes()
        has_weight = "beta" not in known or takes & {"beta"} or "beta" in fixed
        unknown = [one for one in binding.unknown if one not in settings]
        if unknown:
            why = f"{', '.join(unknown)}: not a name of this project, TRL or verl"
        elif "ref_logps" in takes and not has_weight and not is_adapter(function):
            why = "it takes a reference, and beta, the weight of the KL, under no known name"
    if why or args.adapter:
        written(module, name, target, file, content, cases, words, SHAPES[shape],
                why or "you asked for an adapter")
        return 2

    # the check
    tool = library(module)
    has_gradient = tool != "numpy"
    every = [case for case in cases_of(content, of_all or fixed) if args.robust
             or grade(case, args.recipe) == "core" or case["id"] == chosen.get("id")]
    with quiet():
        outcomes = [check_case(
            binding, content, case, tool, "float32" if args.float32 else "float64",
            args.tolerance, fixed, shape, args.detached, settings) for case in cases]
    ran, code = report(file, args.recipe, every, outcomes, content["mistakes"], has_gradient)

    # what it was given
    called = [f"{its} for {ours}" for its, ours in binding.names.items() if its != ours]
    used = bind(function, binding.parameters, ()).names if is_adapter(function) else (
        binding.parameters)             # an adapter lists all arguments
    left = [f"{key}={one.default!r}" for key, one in binding.parameters.items()
            if key not in binding.names and key not in settings and key in used
            and one.default is not inspect.Parameter.empty]
    for words, found in (("called with", called), ("left as it is, so not checked:", left)):
        if found:
            print(f"{words} {', '.join(found)}")
    if not ran:
        lost = min((case["parameters"].keys() - takes - {*fixed} for case in cases), key=len)
        values = [f"{key}={'|'.join(sorted({value(case, key) for case in cases}))}"
                  for key in sorted(lost)]
        print(f"if it has constants of its own, state them: {' '.join(values)}; if it has other "
              "names for them, add --adapter")
    if "advantages" in takes and args.advantages:
        print(f"advantages had the shape {SHAPES[shape]}, as you say: your trainer has to pass the "
              "same")
    data = sorted({leaf for one in outcomes for leaf in one.data})
    if data and not args.detached:
        print(f"{', '.join(data)}: your caller has to detach what is data (--detached tests it)")
    if not has_gradient:
        print("numpy computes no gradients: only values are checked")
    if code and ran and not likely(ran, has_gradient):
        if "advantages" in takes:
            print(f"advantages had the shape {SHAPES[shape]}: if your function takes another one, "
                  "say --advantages B, B1 or BT")
        print("if an argument means something else, --adapter writes a file where you say what")
    return code


def main(argv=None):
    """Run the command. -> exit code. Functions for which nothing ran count only if none did."""
    argv = sys.argv[1:] if argv is None else argv
    args = arguments(argv)
    words = [word for word in args.words if "=" not in word]
    if not words:
        print(__doc__)
        for name in files():
            print(f"{name:23}{len(read(name)['cases']):3} cases  {read(name)['about']}")
        return 0
    target = words[0]
    chosen = dict(word.split("=", 1) for word in args.words if "=" in word)
    rest = [word for word in argv if word not in (target, "--adapter", "--map", *args.map)]
    module, functions = loaded(target)
    codes = []
    for name, function in functions.items():
        file = "" if args.recipe and not is_adapter(function) else name
        file = words[1] if len(words) > 1 else file
        codes.append(run(module, name, function, target, file, chosen, args, rest))
    return max((code for code in codes if code < 2), default=2)


if __name__ == "__main__":
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")   # a compiled function is tested uncompiled
    sys.exit(main())
