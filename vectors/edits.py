"""Change a text at a place that is named by its old text, which has to occur exactly once: plant a
mistake, or apply a patch. Run the changed text as a module.

Files of edits, such as mistakes.txt, have one format. A line `== FILE | WORDS` begins the edits of
a file. WORDS are for the program that reads the edits; with most of them, they name the tests that
should fail. Each edit is a name and below it a diff. In a diff, "- " marks an old line, "+ " a new
one, and two spaces mark a line that stays; @@ separates two hunks. The old text of an edit may be a
part of a line. An edit without a diff names one of another file. What is above the first `==` is a
comment. The path, practice, the lab and fill.py read such files; this one is in vectors/ because
they may all import vectors/, which imports nothing of ours.
"""
import re
import sys
from types import ModuleType
from typing import NamedTuple

LINE = r"(?:[-+ ](?: .*)?|@@|)\n"       # of a diff; an empty line stays, too
EDIT = re.compile(rf"^(?!{LINE})(.+)\n((?:{LINE})*)", re.MULTILINE)


class Edit(NamedTuple):
    file: str
    name: str
    hunks: tuple        # pairs of old and new text
    words: str          # what follows the file in the heading

    @property
    def tests(self):
        """The tests that should fail: their files, and an expression for pytest -k."""
        words = self.words.split()
        files = [f"tests/{word}" for word in words if word.endswith(".py")]
        return files, " ".join(words[len(files):])

    def apply(self, text):
        """Make the edit. ValueError unless each old text occurs exactly once. -> str"""
        for old, new in self.hunks:
            text = replace_once(text, old, new)
        return text


def parse(text):
    """Read a file of edits. -> list of Edit"""
    edits = []
    for part in re.split(r"^== ", text, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        file, _, words = heading.partition(" | ")
        for name, diff in EDIT.findall(f"{body}\n"):
            pieces = ((old[:-1], new[:-1]) for old, new in hunks(diff.rstrip("\n")))
            edits.append(Edit(file, name, tuple(pieces), words))
    return edits


def hunks(diff):
    """Read the hunks of a diff. -> list of (old lines, new lines), each with its line break"""
    pairs = []
    for hunk in diff.split("\n@@\n") if diff else ():
        lines = [line or " " for line in hunk.split("\n")]
        old, new = ("".join(f"{line[2:]}\n" for line in lines if line[0] in marks)
                    for marks in (" -", " +"))
        pairs.append((old, new))
    return pairs


def replace_once(text, old, new):
    """Replace a text that occurs exactly once, else raise a ValueError. -> str"""
    if text.count(old) != 1:
        raise ValueError(f"this occurs {text.count(old)} times, not once: {old}")
    return text.replace(old, new)


def patch(text, diff):
    """Apply a diff of whole lines. ValueError if a hunk does not fit. -> str"""
    for old, new in hunks(diff):
        text = replace_once(f"\n{text}", f"\n{old}", f"\n{new}")[1:]
    return text


def load(text, name, file=None):
    """Run a text as the module of this name. file: its __file__. -> module"""
    module = sys.modules[name] = ModuleType(name)       # dataclasses and inspect look there
    module.__file__ = str(file or f"{name}.py")
    exec(compile(text, module.__file__, "exec"), vars(module))
    return module
