"""Compute the right answers in the files with reference.py: python -m vectors.fill [FILE ...]

To add a case, write it into its file, with any number in place of each result and each gradient.
Its inputs are taken as the float64 numbers that a program reads from the file. mistakes.txt plants
mistakes in the reference: a case gets those as flags whose answer differs from the right one, and
a name in its "also", a convention, gets the answer. Other flags stay as they are written.
"""
import functools
import inspect
import json
import re
import sys
import types
from itertools import count

from mpmath import mp, mpf

from vectors import FOLDER, files, flat, reference
from vectors.reference import STEP

SOURCE = inspect.getsource(reference)


@functools.cache
def planted():
    """Read mistakes.txt. -> {file: {name: the reference with this mistake}}"""
    found = {}
    text = (FOLDER / "mistakes.txt").read_text("utf-8")
    for part in re.split(r"^== ", text, flags=re.M)[1:]:
        heading, _, body = part.partition("\n")
        for name, changes in re.findall(r"^(\w.*)\n((?:[-+] .*\n)+)", body, re.M):
            source = SOURCE
            for old, new in re.findall(r"^- (.*)\n\+ (.*)", changes, re.M):
                assert source.count(old) == 1, f"{name}: {old}"
                source = source.replace(old, new)
            for file in heading.split():
                module = found.setdefault(file, {})[name] = types.ModuleType(name)
                exec(source, vars(module))
    return found


def convert(x, kind, integers=()):
    """Turn the numbers of a dict, and of its lists, into mpf or float, but not integers."""
    if isinstance(x, dict):
        return {name: value if name in integers or isinstance(value, int) else convert(value, kind)
                for name, value in x.items()}
    if isinstance(x, list):
        return [convert(value, kind) for value in x]
    return kind(x) if isinstance(x, (int, float, mpf)) or x in ("inf", "-inf") else x


def rounded(x):
    return float(f"{float(x):.13g}")


def total(x):
    return sum(map(total, x), mpf(0)) if isinstance(x, list) else x


def prepared(content, case, module):
    """Find the inputs of a case, and the function of changed inputs that computes its results."""
    function = getattr(module, content["function"])
    known = content["batches"].get(case.get("batch"), {}) | case.get("inputs", {})
    known = convert(known | case["parameters"], mpf, content["integers"])
    names = inspect.signature(function).parameters

    def results(**moved):
        sg = {"sg": known["logps"]} if "sg" in names else {}
        given = {name: value for name, value in (known | moved | sg).items()
                 if name in names or "constants" in names and name in case["parameters"]}
        found = function(**given)
        return found if isinstance(found, dict) else {next(iter(content["results"])): found}
    return known, results


def answer(content, case, module=reference):
    """Compute the results and gradients of a case. -> dict"""
    known, results = prepared(content, case, module)

    def slopes(result, leaf):
        if leaf in module.DATA:
            return reference.gradient(lambda _: mpf(0), known[leaf])
        return reference.gradient(lambda x: total(results(**{leaf: x})[result]), known[leaf])

    found = {"right": results()}
    if "gradient" in case:
        found["gradient"] = {result: {leaf: slopes(result, leaf) for leaf in leaves}
                             for result, leaves in case["gradient"].items()}
    return convert(found, rounded)


def differs(a, b):
    """Compare two answers, by more than rounding. -> bool"""
    if isinstance(b, dict):
        return any(differs(a[name], b[name]) for name in b)
    if isinstance(b, list):
        return len(a) != len(b) or any(map(differs, a, b))
    return a != b and not abs(a - b) <= 1e-9 * max(1, abs(b))


def shifted(x, step, numbers):
    """Add step times 1, 2, 3, ... to the numbers of a list or table that are finite."""
    if isinstance(x, list):
        return [shifted(v, step, numbers) for v in x]
    return x + step * next(numbers) if mp.isfinite(x) else x + 0 * next(numbers)


def caught(content, case, right, module):
    """Tell what shows a mistake in a case: "flags", "gradient_flags" (only the gradient) or None.
    Of a gradient, this compares the slope in one direction."""
    def slope(result, leaf):
        up, down = (total(results(**{leaf: shifted(known[leaf], step, count(1))})[result])
                    for step in (STEP, -STEP))
        return 0 if leaf in module.DATA else float((up - down) / (2 * STEP))

    try:
        known, results = prepared(content, case, module)
        if differs(convert(results(), float), right["right"]):
            return "flags"
        for result, leaves in right.get("gradient", {}).items():
            for leaf, gradient in leaves.items():
                along = sum(n * x for n, x in enumerate(flat(gradient)[1], 1))
                if differs(slope(result, leaf), along):
                    return "gradient_flags"
    except (ArithmeticError, AssertionError, TypeError, ValueError):
        return "flags"
    return None


def filled(name, content, case):
    """Compute all that is computed of a case. -> dict"""
    right = answer(content, case)
    modules = planted().get(name, {})
    flags = {"flags": [flag for flag in case["flags"] if flag not in modules],
             "gradient_flags": []}
    for flag in content["mistakes"].keys() & modules.keys():
        flags.get(caught(content, case, right, modules[flag]), []).append(flag)
    order = list(content["mistakes"])
    flags = {key: sorted(found, key=order.index) for key, found in flags.items() if found}
    also = {choice: answer(content, case, modules[choice]) for choice in case.get("also", {})}
    return flags | right | ({"also": also} if also else {})


def text(x):
    """Write JSON with short lists of numbers. -> str"""
    if isinstance(x, dict):
        return f"{{{', '.join(f'{json.dumps(key)}: {text(value)}' for key, value in x.items())}}}"
    if isinstance(x, list):
        return f"[{','.join(str(int(v)) if v in (0, 1) else text(v) for v in x)}]"
    return json.dumps(x)


def layout(content):
    """Write a file, with a line for each entry of its dicts and two for each case. -> str"""
    def lines(known, pad):
        return f",\n{pad}".join(f"{json.dumps(key)}: {text(x)}" for key, x in known.items())

    def two_lines(case):
        first, second = ({key: x for key, x in case.items() if (key in answers) == is_second}
                         for is_second in (False, True))
        return f"{text(first)[:-1]},\n   {text(second)[1:]}"

    answers = ("right", "gradient", "also")
    cases = ",\n  ".join(map(two_lines, content["cases"]))
    blocks = {key: f"{{\n  {lines(x, '  ')}}}" if isinstance(x, dict) and x else text(x)
              for key, x in content.items()} | {"cases": f"[\n  {cases}]"}
    return "{" + ",\n ".join(f'"{key}": {block}' for key, block in blocks.items()) + "}\n"


def main(names):
    for name in names or files():
        path = FOLDER / f"{name}.json"
        content = json.loads(path.read_text("utf-8"))
        for case in content["cases"]:
            case.pop("gradient_flags", None)
            case |= filled(name, content, case)
        path.write_text(layout(content), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
