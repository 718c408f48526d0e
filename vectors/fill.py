"""Compute the right answers in the files with reference.py: python -m vectors.fill [FILE ...]

To add a case, write it into its file, with any number in place of each result and each gradient.
Its inputs are taken as the float64 numbers that a program reads from the file. mistakes.txt plants
mistakes in the reference: a case gets those whose answer differs from the right one, with a number
that shows them, or "nan". A name in its "also", a convention, gets the answer. Other flags stay.
"""
import functools
import inspect
import json
import math
import sys
from itertools import count

from mpmath import mp, mpf

from vectors import FOLDER, edits, files, reference, weighted
from vectors.reference import STEP


@functools.cache
def planted():
    """Read mistakes.txt. -> {file: {name of a mistake: Edit}}"""
    found = {}
    for mistake in edits.parse((FOLDER / "mistakes.txt").read_text("utf-8")):
        for file in mistake.words.split():
            found.setdefault(file, {})[mistake.name] = mistake
    return found


@functools.cache
def mistaken(mistake):
    """Make the reference with a mistake. -> module"""
    return edits.load(mistake.apply(inspect.getsource(reference)), "mistaken")


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


def shifted(x, step, numbers):
    """Add step times 1, 2, 3, ... to the numbers of a list or table that are finite."""
    if isinstance(x, list):
        return [shifted(v, step, numbers) for v in x]
    n = next(numbers)
    return x + step * n if mp.isfinite(x) else x


def signs(content, case, module):
    """Show an answer by a few numbers: for each result the sum of its numbers times 1, 2, 3, ...,
    and the slope of the results in this direction of their inputs, the second input's twice, and
    so on. -> list"""
    known, results = prepared(content, case, module)
    slope = 0
    for result, leaves in case.get("gradient", {}).items():
        for k, leaf in enumerate(leaves, 1):
            if leaf in module.DATA:
                continue
            up, down = (total(results(**{leaf: shifted(known[leaf], step, count(1))})[result])
                        for step in (STEP, -STEP))
            slope += k * float((up - down) / (2 * STEP))
    return [*map(weighted, convert(results(), float).values()), slope]


def filled(name, content, case):
    """Compute all that is computed of a case. -> dict"""
    changes = planted().get(name, {})
    found = {"flags": {flag: "nan" for flag in case["flags"] if flag not in changes}, "slopes": {}}
    right = signs(content, case, reference)
    for flag in [flag for flag in content["mistakes"] if flag in changes]:
        module = mistaken(changes[flag])
        try:
            wrong = signs(content, case, module)
        except (ArithmeticError, AssertionError, TypeError, ValueError):
            wrong = [math.nan]
        for kind, a, b in zip(["flags"] * (len(right) - 1) + ["slopes"], wrong, right):
            if not abs(a - b) <= 1e-9 * max(1, abs(b)):
                found[kind][flag] = float(f"{a:.6g}") if math.isfinite(a) else "nan"
                break
    if "also" in case:
        found["also"] = {choice: answer(content, case, mistaken(changes[choice]))
                         for choice in case["also"]}
    return found | answer(content, case)


def text(x):
    """Write JSON in which 0.0 and 1.0 in lists are short. -> str"""
    if isinstance(x, dict):
        return f"{{{','.join(f'{json.dumps(key)}:{text(value)}' for key, value in x.items())}}}"
    if isinstance(x, list):
        return f"[{','.join(str(int(v)) if v in (0, 1) else text(v) for v in x)}]"
    return json.dumps(x)


def layout(content):
    """Write a file, with a line for each entry of its dicts and each case. -> str"""
    def lines(x):
        dumped = [f"{json.dumps(key)}: {text(v)}" for key, v in x.items()]
        return "{\n  " + ",\n  ".join(dumped) + "}"

    blocks = {key: lines(x) if isinstance(x, dict) and x else text(x)
              for key, x in content.items()}
    blocks["cases"] = "[\n  " + ",\n  ".join(map(text, content["cases"])) + "]"
    return "{" + ",\n ".join(f'"{key}": {block}' for key, block in blocks.items()) + "}\n"


def main(names):
    for name in names or files():
        path = FOLDER / f"{name}.json"
        content = json.loads(path.read_text("utf-8"))
        for case in content["cases"]:
            case |= filled(name, content, case)
        path.write_text(layout(content), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
