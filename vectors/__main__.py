"""Check your functions against the test vectors, files of inputs and right answers.

  python -m vectors                                            list the files
  python -m vectors MODULE[:FUNCTION] [FILE] [NAME=VALUE ...]  check, for example:
  python -m vectors mylosses:grpo_loss policy_loss method=clip how=token_mean

Without FILE, the file has the name of the function. Without FUNCTION, all functions of the module
that have the name of a file are checked. NAME=VALUE selects the cases with this parameter, which
the function then need not take; id=NAME selects one case. A function gets the inputs and parameters
that it names, as torch tensors if its module imports torch, as JAX arrays if it imports jax, else
as numpy arrays, without a check of gradients. It returns the results in the order of the file. A
case is skipped if the function lacks one of its parameters or raises NotImplementedError.

  --float32           use float32, and allow for its rounding
  --tolerance 1e-6    largest absolute and relative difference; 1e-12 by default
"""
import importlib
import json
import sys
from collections import Counter

from vectors import check_case, files, library, read


def describe(name, case, errors, mistakes):
    """Print a wrong case: its parameters, the differences, and the mistakes that it catches."""
    words = [f"{key} {json.dumps(value)}" for key, value in case["parameters"].items()]
    lines = [f"with {', '.join(words)}"] if words else []
    lines += errors
    if case.get("gradient") and not any("gradient" in line for line in errors):
        lines.append("its gradient is not wrong")
    if "convention" in case:
        lines.append(f"a matter of convention: {case['convention']}")
    lines += ["this case is known to catch:", *(f"- {mistakes[flag]}" for flag in case["flags"])]
    source = f" ({case['source']})" if "source" in case else ""
    print(f"WRONG  {name}, case {case['id']}: {case['comment']}{source}")
    print(*(f"  {line}" for line in lines), sep="\n")


def report(name, outcomes, mistakes):
    """Print the wrong cases of a file, a summary, and the mistakes that explain the wrong cases."""
    wrong = [outcome for outcome in outcomes if outcome.errors]
    right = [outcome for outcome in outcomes if not outcome.errors and not outcome.skipped]
    for case, errors, _ in wrong:
        describe(name, case, errors, mistakes)
    skipped = Counter(outcome.skipped for outcome in outcomes if outcome.skipped)
    print(f"{name}: {len(right)} right, {len(wrong)} wrong, {sum(skipped.values())} skipped")
    for why, count in skipped.items():
        print(f"  {count} skipped: {why}")
    passed = {flag for case, *_ in right if "convention" not in case for flag in case["flags"]}
    counts = Counter(flag for case, *_ in wrong for flag in case["flags"] if flag not in passed)
    if counts:
        print("most likely, because no case that is right catches them:")
        print(*(f"- {mistakes[flag]}" for flag, _ in counts.most_common()), sep="\n")


def main(argv):
    """Run the command. -> exit code: 1 if a case is wrong or none was checked"""
    dtype = "float32" if "--float32" in argv else "float64"
    tolerance = None
    if "--tolerance" in argv:
        tolerance = float(argv.pop(argv.index("--tolerance") + 1))
    words = [word for word in argv if not word.startswith("--") and "=" not in word]
    chosen = dict(word.split("=", 1) for word in argv if "=" in word)
    if not words:
        print(__doc__)
        for name in files():
            print(f"{name:23}{len(read(name)['cases']):3} cases  {read(name)['about']}")
        return 0
    sys.path.insert(0, "")
    target, _, function = words[0].partition(":")
    module = importlib.import_module(target)
    names = words[1:2] or [function] if function else [
        name for name in files() if hasattr(module, name)]
    checked = []
    for name in names:
        if name not in files():
            print(f"there is no file {name}; the files are {', '.join(files())}")
            return 2
        content = read(name)
        outcomes = [check_case(getattr(module, function or name), content, case, library(module),
                               dtype, tolerance, chosen)
                    for case in content["cases"]
                    if all(str((case | case["parameters"]).get(key)) == value
                           for key, value in chosen.items())]
        report(name, outcomes, content["mistakes"])
        checked += [outcome for outcome in outcomes if not outcome.skipped]
    return int(not checked or any(outcome.errors for outcome in checked))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
