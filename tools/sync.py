"""Keep the scripts in step: a top-level name that two scripts define has one text, unless it is a lesson.

  python tools/sync.py FROM.py             copy FROM's shared pieces into the other scripts (make sync FROM=..)
  python tools/sync.py --diff A.py B.py    what B does differently, docstrings left out (make diff A=.. B=..)

A script is self-contained, so code stands in several on purpose; tests/test_sync.py fails when it drifts.
"""
import ast
import difflib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("reinforce.py", "ppo.py", "grpo.py", "gspo.py", "dpo.py")
# What a script is there to teach, and so may differ.
LESSONS = {"Config", "LOSS_TYPES", "COLUMNS", "advantages", "log_ratio", "policy_loss", "backward", "update",
           "main"}


def pieces(source):
    """Top-level names of a script's text -> (first line, last line) counted from 0, decorators included."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno] + [decorator.lineno for decorator in node.decorator_list])
            found[node.name] = (first - 1, node.end_lineno)
        elif isinstance(node, ast.Assign):
            targets = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else node.targets
            found[", ".join(target.id for target in targets)] = (node.lineno - 1, node.end_lineno)
    return found


def text_of(source, name):
    first, last = pieces(source)[name]
    return "\n".join(source.split("\n")[first:last])


def drifted(one, other):
    """The names that are no lessons and have different texts in two scripts' sources."""
    shared = pieces(one).keys() & pieces(other).keys() - LESSONS
    return sorted(name for name in shared if text_of(one, name) != text_of(other, name))


def sync(source, target):
    """`target` with its shared pieces replaced by those of `source`; nothing is added or taken away."""
    for name in drifted(source, target):
        lines, (first, last) = target.split("\n"), pieces(target)[name]
        target = "\n".join(lines[:first] + text_of(source, name).split("\n") + lines[last:])
    return target


def difference(one, other):
    """The added and removed lines between two scripts' sources, outside their docstrings."""
    bodies = [source.split("\n")[ast.parse(source).body[0].end_lineno:] for source in (one, other)]
    return [line for line in difflib.ndiff(*bodies) if line[0] in "+-" and line[2:].strip()]


def main(words):
    if len(words) == 3 and words[0] == "--diff" and set(words[1:]) <= set(SCRIPTS):
        lines = difference(*((ROOT / name).read_text() for name in words[1:]))
        print("\n".join(lines) + f"\n{len(lines)} lines")
    elif len(words) == 1 and words[0] in SCRIPTS:
        for name in SCRIPTS:
            old = (ROOT / name).read_text()
            changed = drifted((ROOT / words[0]).read_text(), old)
            (ROOT / name).write_text(sync((ROOT / words[0]).read_text(), old))
            print(f"{name}: {', '.join(changed) or 'in step'}")
    else:
        print(__doc__, f"\nThe scripts are {', '.join(SCRIPTS)}.", file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
