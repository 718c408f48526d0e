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


def tables(content):
    """Write the tables of the page. -> {name of a table: text}"""
    counts = []
    disputed = []                       # cases with a convention
    wrong = []                          # other cases that a trainer gets wrong
    shares = {trainer: [] for trainer in TRAINERS}
    for name, found in content["vectors"].items():
        conventions = {case["id"]: case.get("convention") for case in vectors.read(name)["cases"]}
        for case, answers in found.items():
            place = f"{name} ({case})"
            if conventions[case]:
                words = {"right": "same", None: ""}
                cells = [words.get(answers.get(trainer), "different") for trainer in TRAINERS]
                disputed.append([place, *cells, conventions[case]])
            else:
                wrong += [[trainer, place, answer] for trainer, answer in answers.items()
                          if answer != "right"]
        row = [name]
        for trainer in TRAINERS:
            right = [one[trainer] == "right" for one in found.values() if trainer in one]
            shares[trainer] += right
            row.append(f"{sum(right)} of {len(right)}" if right else "")
        counts.append(row)
    wrongs = Counter(trainer for trainer, *_ in wrong)
    summary = " ".join(
        f"{trainer} agrees to 1e-6 in {sum(right)} of the {len(right)} cases for which it has a "
        f"function; of the others, {len(right) - sum(right) - wrongs[trainer]} are conventions and "
        f"{wrongs[trainer]} are wrong numbers." for trainer, right in shares.items())
    return {
        "vectors": f"{summary}\n\n" + table(["file", *TRAINERS], counts),
        "conventions": table(["case", *TRAINERS, "who does what"], disputed),
        "wrong": table(["trainer", "case", "the first wrong number"], wrong)}


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
