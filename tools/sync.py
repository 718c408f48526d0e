"""Keep the scripts in step: a top-level name that two scripts define has one text, unless it is a lesson.

  python tools/sync.py FROM          copy FROM's shared pieces into the other scripts (make sync FROM=grpo.py)
  python tools/sync.py --diff A B    the lesson: what B does otherwise than A (make diff A=grpo B=gspo)

A script is self-contained, so code stands in several on purpose; tests/test_sync.py fails when it drifts. A
piece is an assignment, function or class with its decorators and the comments directly above it. Docstrings,
imports, comments that stand alone (section rules, the legend) and the order of pieces are each script's own.
"""
import ast
import difflib
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("reinforce.py", "ppo.py", "grpo.py", "gspo.py", "dpo.py")
# What a script is there to teach, and so may differ.
LESSONS = {"Config", "COLUMNS", "advantages", "log_ratio", "policy_loss", "backward", "update", "main"}


def names(node):
    """The names that a top-level statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = getattr(node, "targets", [getattr(node, "target", None)])     # as an assignment has
    return [x.id for target in targets if target for x in ast.walk(target) if isinstance(x, ast.Name)]


def pieces(source):
    """Every top-level name of a script's text -> the lines of its piece, (first, after the last) from 0."""
    lines, found = source.split("\n"), {}
    for node in ast.parse(source).body:
        first = min(part.lineno for part in (node, *getattr(node, "decorator_list", ()))) - 1
        while first and lines[first - 1].startswith("#"):                   # a comment attached to it
            first -= 1
        found |= dict.fromkeys(names(node), (first, node.end_lineno))
    return found


def texts(source):
    """Every top-level name of a script's text -> the text of its piece."""
    lines = source.split("\n")
    return {name: "\n".join(lines[first:end]) for name, (first, end) in pieces(source).items()}


def drifted(one, other):
    """The names that are no lessons and have different texts in two scripts' sources."""
    one, other = texts(one), texts(other)
    return sorted(name for name in one.keys() & other.keys() - LESSONS if one[name] != other[name])


def sync(source, target):
    """`target` with its shared pieces replaced by those of `source`; nothing comes, moves or goes."""
    here, there, wanted, lines = pieces(source), pieces(target), texts(source), target.split("\n")
    shared = here.keys() & there.keys() - LESSONS
    spans = {there[name]: wanted[name] for name in shared}
    for first, end in sorted(spans, reverse=True):                          # from below: what is above stays
        lines[first:end] = spans[first, end].split("\n")
    result = "\n".join(lines)
    if len({here[name] for name in shared}) != len(spans) or pieces(result).keys() != there.keys():
        raise ValueError("what one statement defines here, several define there; make these alike by hand: "
                         + ", ".join(drifted(source, target)))
    return result


def difference(one, other):
    """The removed and added lines between two scripts' sources, without docstrings and empty lines."""
    bodies = [source.split("\n")[ast.parse(source).body[0].end_lineno:] for source in (one, other)]
    lines = difflib.ndiff(*([line for line in body if line.strip()] for body in bodies))
    return [line for line in lines if line[0] in "+-"]


def present():
    return [name for name in SCRIPTS if (ROOT / name).is_file()]


def read(word):
    """The text of a script, which may be named without .py."""
    name = word.removesuffix(".py") + ".py"
    if name not in present():
        raise ValueError(f"{word!r} is none of the scripts, {', '.join(present())}")
    source = (ROOT / name).read_text()
    try:
        ast.parse(source)
    except SyntaxError as error:
        raise ValueError(f"{name}, line {error.lineno}: {error.msg}") from None
    return source


def write(path, text):
    """The whole text or nothing of it, under the file's old permissions."""
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    part.write_text(text)
    shutil.copymode(path, part)
    os.replace(part, path)


def main(words):
    """Exits with 2 and one line on stderr if words or scripts make no sense; then nothing was written."""
    try:
        if len(words) != 1 + 2 * (words[:1] == ["--diff"]):
            raise ValueError("say make sync FROM=grpo.py, or make diff A=grpo.py B=gspo.py")
        if words[0] == "--diff":
            lines = difference(*map(read, words[1:]))
            return print(*lines, f"{len(lines)} lines", sep="\n")
        source, old = read(words[0]), {name: read(name) for name in present()}
        new = {name: sync(source, text) for name, text in old.items()}
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    for name, text in old.items():
        print(f"{name}: {', '.join(drifted(source, text)) or 'in step'}")
        if new[name] != text:
            write(ROOT / name, new[name])


if __name__ == "__main__":
    main(sys.argv[1:])
