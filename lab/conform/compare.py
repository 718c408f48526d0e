"""Compare TRL, verl and small repositories (copied.py) with the test vectors: make conform.

Our functions return the right answers of the vectors, which tests/test_vectors.py checks, and
theirs.py gives the same inputs to the functions of TRL and verl. This file writes
docs/conformance.json, which the tests read, and the tables of docs/conformance.md. To compare more,
add a case to a file of vectors; a new method of a loss also needs a row in engines/names.py.
"""
import contextlib
import io
import re
from collections import Counter
from itertools import product

import torch

import grpo
import vectors
from engines import export
from lab.conform import copied
from lab.docs import put, record, table
from report import start
from vectors import __main__ as command

TRAINERS = ("TRL", "verl")
KINDS = ("core", "robust", "convention")


def tables(content):
    """Write the tables of the page. -> {name of a table: text}"""
    rows = []
    disputed = {}                       # a row of the table -> its cases where a trainer differs
    wrong = {}                          # the same for other cases that a trainer gets wrong
    total = Counter()
    for name, found in content["vectors"].items():
        cases = {case["id"]: case for case in vectors.read(name)["cases"]}
        counts = Counter()
        for one, answers in found.items():
            case = cases[one]
            kind = "convention" if "convention" in case else vectors.grade(case)
            for trainer, answer in answers.items():
                counts[trainer, kind] += 1
                counts[trainer, kind, "right"] += answer == "right"
                if answer != "right" and kind != "convention":
                    wrong.setdefault((name, trainer, answer), []).append(one)
            if kind == "convention":
                words = {"right": "same", None: ""}
                cells = [words.get(answers.get(trainer), "different") for trainer in TRAINERS]
                if "different" in cells:
                    disputed.setdefault((name, *cells, case["convention"]), []).append(one)
        if any(answer != "right" for answers in found.values() for answer in answers.values()):
            rows.append([name, *(of(counts, *key) for key in product(TRAINERS, KINDS))])
        total += counts
    rows.append(["all", *(of(total, *key) for key in product(TRAINERS, KINDS))])
    heads = [f"{trainer}, {kind}" for trainer, kind in product(TRAINERS, KINDS)]
    return {
        "vectors": table(["file", *heads], rows),
        "conventions": table(["case", *TRAINERS, "who does what"], joined(disputed)),
        "wrong": table(["case", "trainer", "the first wrong number"], joined(wrong)),
        "copied": table(["lines", "called as", "row and recipe", "verdict", "the difference"],
                        [[link(row), f"`{row['call']}`", f"`{name} {row['check']}`",
                          content["copied"][name], row["differs"]]
                         for name, row in copied.ROWS.items()])}


def link(row):
    """Write a link to the lines of a row. -> text"""
    repository, (first, last) = row["repository"], row["lines"]
    commit, date = copied.COMMITS[repository]
    return (f"[{repository.partition('/')[2]}](https://github.com/{repository}/blob/{commit}/"
            f"{row['path']}#L{first}-L{last}), {first} to {last}, at {commit[:7]}, {date}")


def verdicts():
    """Check the rows of copied.json. -> {name: how many core cases ran, and how many are wrong}"""
    found = {}
    for name, row in copied.ROWS.items():
        with contextlib.redirect_stdout(io.StringIO()) as out:
            command.main([f"{copied.__file__}:{name}", *row["check"].split()])
        line = re.split("[;\n]", out.getvalue())[0]
        found[name] = re.sub(r" core cases of \w+ ran", "", line)
    return found


def joined(cases):
    """List the rows of a table, each with the cases for which it holds. -> list of lists"""
    return [[f"{name} ({'; '.join(ids)})", *cells] for (name, *cells), ids in cases.items()]


def of(counts, *key):
    """Write how many cases are right. -> "3 of 4", or "" if a trainer has no function for any"""
    return f"{counts[(*key, 'right')]} of {counts[key]}" if counts[key] else ""


def compared():
    """Give both trainers the vectors. -> {"versions": ..., "vectors": ...}"""
    from lab.conform import theirs as peers  # imported here, because they need .venv-conform
    base = peers.EXPORTED.parent / "base"       # for a model whose log-probabilities are replaced
    grpo.main(f"--output_dir {base} --max_steps 0 --device cpu --base_steps 1".split())
    export.export(base, peers.EXPORTED)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return {"versions": peers.VERSIONS, "vectors": peers.results()}
    finally:
        torch.set_default_dtype(before)


def main():
    content = compared() | {"copied": verdicts()}
    record("conformance", **content)
    for name, text in tables(content).items():
        put(name, text, "conform")


if __name__ == "__main__":
    start(main)
