"""Compute the right answers in the files with reference.py: python -m vectors.fill

To add a case, write it into its file, with any number in place of each result and each gradient.
Its inputs are taken as the float64 numbers that a program reads from the file.
"""
import inspect
import json

from mpmath import mpf

from vectors import FOLDER, files, reference


def convert(x, kind):
    """Turn the numbers in lists and dicts that are not integers into mpf or float."""
    if isinstance(x, dict):
        return {name: convert(value, kind) for name, value in x.items()}
    if isinstance(x, list):
        return [convert(value, kind) for value in x]
    return kind(x) if isinstance(x, (float, mpf)) or x in ("inf", "-inf") else x


def total(x):
    return sum(map(total, x), mpf(0)) if isinstance(x, list) else x


def answer(content, case):
    """Compute the results and gradients of a case. -> dict"""
    function = getattr(reference, content["function"])
    known = content["batches"].get(case.get("batch"), {}) | case.get("inputs", {})
    known = convert(known | case["parameters"], mpf)
    names = inspect.signature(function).parameters

    def results(**moved):
        sg = {"sg": known["logps"]} if "sg" in names else {}
        given = {name: value for name, value in (known | moved | sg).items()
                 if name in names or "constants" in names and name in case["parameters"]}
        found = function(**given)
        return found if isinstance(found, dict) else {next(iter(content["results"])): found}

    def slopes(result, leaf):
        if leaf in ("old_logps", "teacher_logits"):     # they have no gradient in any equation
            return reference.gradient(lambda _: mpf(0), known[leaf])
        return reference.gradient(lambda x: total(results(**{leaf: x})[result]), known[leaf])

    found = {"right": results()}
    if "gradient" in case:
        found["gradient"] = {result: {leaf: slopes(result, leaf) for leaf in leaves}
                             for result, leaves in case["gradient"].items()}
    return convert(found, float)


def layout(content):
    """Write a file, with a line for each entry of its dicts and of its cases. -> str"""
    def entries(known, pad):
        return f",\n{pad}".join(f"{json.dumps(key)}: {json.dumps(x)}" for key, x in known.items())
    blocks = {key: f"{{\n    {entries(x, '    ')}}}" if isinstance(x, dict) and x else json.dumps(x)
              for key, x in content.items() if key != "cases"}
    cases = ",\n    ".join(f"{{{entries(case, '     ')}}}" for case in content["cases"])
    blocks["cases"] = f"[\n    {cases}]"
    return "{" + ",\n ".join(f'"{key}": {text}' for key, text in blocks.items()) + "}\n"


def main():
    for name in files():
        path = FOLDER / f"{name}.json"
        content = json.loads(path.read_text("utf-8"))
        for case in content["cases"]:
            case |= answer(content, case)
        path.write_text(layout(content), "utf-8")


if __name__ == "__main__":
    main()
