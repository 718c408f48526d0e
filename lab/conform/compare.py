"""Compare TRL and verl with the test vectors: make conform.

Our functions return the right answers of the vectors, which tests/test_vectors.py checks, and
theirs.py gives the same inputs to the functions of TRL and verl. This file writes
docs/conformance.json, which the tests read, and the tables of docs/conformance.md. To compare more,
add a case to a file of vectors; a new method also needs a row in a table of theirs.py, such as
TRL_LOSSES.
"""
from collections import Counter

import torch

import grpo
import vectors
from engines import export
from lab.docs import put, record, table
from report import start

TRAINERS = ("TRL", "verl")
KINDS = ("core", "robust", "convention")


def tables(content):
    """Write the tables of the page. -> {name of a table: text}"""
    rows = []
    disputed = []                       # cases with a convention
    wrong = []                          # other cases that a trainer gets wrong
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
                    wrong.append([trainer, kind, f"{name} ({one})", answer])
            if kind == "convention":
                words = {"right": "same", None: ""}
                cells = [words.get(answers.get(trainer), "different") for trainer in TRAINERS]
                disputed.append([f"{name} ({one})", *cells, case["convention"]])
        rows.append([name, *(of(counts, trainer, kind) for trainer in TRAINERS for kind in KINDS)])
        total += counts
    summary = " ".join(
        f"{trainer} agrees to 1e-6 in {of(total, trainer, 'core')} core cases, in "
        f"{of(total, trainer, 'robust')} robust cases, which try overflow, infinite numbers and "
        f"empty outputs, and in {of(total, trainer, 'convention')} cases on which papers or "
        "trainers disagree." for trainer in TRAINERS)
    heads = [f"{trainer}, {kind}" for trainer in TRAINERS for kind in KINDS]
    return {
        "vectors": f"{summary}\n\n" + table(["file", *heads], rows),
        "conventions": table(["case", *TRAINERS, "who does what"], disputed),
        "wrong": table(["trainer", "grade", "case", "the first wrong number"], wrong)}


def of(counts, *key):
    """Write how many cases are right. -> "3 of 4", or "" if a trainer has no function for any"""
    return f"{counts[(*key, 'right')]} of {counts[key]}" if counts[key] else ""


def main():
    from lab.conform import theirs as peers  # imported here, because they need .venv-conform
    base = peers.EXPORTED.parent / "base"       # for a model whose log-probabilities are replaced
    grpo.main(f"--output_dir {base} --max_steps 0 --device cpu --base_steps 1".split())
    export.export(base, peers.EXPORTED)
    torch.set_default_dtype(torch.float64)
    content = {"versions": peers.VERSIONS, "vectors": peers.results()}
    record("conformance", **content)
    for name, text in tables(content).items():
        put(name, text, "conform")


if __name__ == "__main__":
    start(main)
