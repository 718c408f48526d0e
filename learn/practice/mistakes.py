"""Read the planted mistakes of mistakes.txt: those that practice recognizes when a learner makes
one, and those that hunts and docs/why.md plant. `make mutants` checks that a test fails on each of
them, and on those of tests/mistakes.txt, which has all others.

A line `== file | tests` names the file of the mistakes that follow and the tests that should fail:
files of tests, and an expression for pytest -k. Each mistake has a name, the lines that are
replaced (-), and the lines that replace them (+).
"""
from pathlib import Path
from typing import NamedTuple

MISTAKES = Path(__file__).with_name("mistakes.txt")


class Mutant(NamedTuple):
    file: str
    name: str
    old: list           # lines that are replaced
    new: list
    files: list         # files of tests
    words: str          # expression for pytest -k


def parse(text):
    """Parse a text like mistakes.txt. -> list of Mutant"""
    mutants = []
    for line in text.splitlines():
        mark = line[:2].strip()
        if mark == "==":
            file, tests = line[3:].split(" | ")
            files = [f"tests/{word}" for word in tests.split() if word.endswith(".py")]
            words = " ".join(tests.split()[len(files):])
        elif mark in ("-", "+"):
            (mutants[-1].old if mark == "-" else mutants[-1].new).append(line[2:])
        elif line:
            mutants.append(Mutant(file, line, [], [], files, words))
    return mutants
