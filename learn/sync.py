"""Keep the scripts in step: code that several of them need has one text.

  python learn/sync.py FROM          copy it from FROM to the others (make sync FROM=grpo.py)
  python learn/sync.py --diff A B    the lesson: what B does differently (make diff A=grpo B=gspo)

A script is self-contained, so the same code stands in several on purpose; tests/test_sync.py fails
when the copies drift apart. Below the marker line is the machinery, one text for all scripts. Above
the line, a function, class or assignment that several scripts define also has one text, which
includes its decorators and the comments directly above it; only the names in LESSONS may differ.
Of those in BRANCHES a script has the branches that it uses, and then a text of its own.
Docstrings, imports, comments that stand alone and the order of definitions are each script's own.
"""
import ast
import difflib
import re
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# All scripts, in the order of the papers; a new one is a word here.
SCRIPTS = ("reinforce.py", "ppo.py", "grpo.py", "gspo.py", "dpo.py")
MARKER = "# ==== the machinery: from here on, the text is the same in all scripts ===="
MACHINERY = "the machinery"                 # the name of what is below the line, in messages
# What the scripts are written to show, and so may differ.
LESSONS = {"Config", "COLUMNS", "advantages", "log_ratio", "policy_loss", "compute_advantages",
           "backward", "update", "main"}
BRANCHES = {"kl"}
USAGE = "say make sync FROM=grpo.py, or make diff A=grpo.py B=gspo.py"


# ---- 1. the parts of a script ----------------------------------------------------------------

def split(source):
    """The lesson, and the machinery from the marker line on; together they are the whole text.
    ValueError if there is not exactly one such line. -> (str, str)"""
    line = "\n" + MARKER
    if source.count(line) != 1:
        raise ValueError(f"{source.count(line)} lines begin with {MARKER!r}, instead of one")
    lesson, _, rest = source.partition(line)
    return lesson + "\n", MARKER + rest


def pieces(lesson):
    """The functions, classes and assignments of a text. -> dict of name -> text"""
    lines = lesson.split("\n")
    found = {}
    for node in ast.parse(lesson).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            name = node.name
        elif isinstance(node, ast.Assign):
            name = ast.unparse(node.targets[0])
        else:
            continue
        decorators = getattr(node, "decorator_list", [])
        first = min(part.lineno for part in [node, *decorators]) - 1
        while first > 0 and lines[first - 1].startswith("#"):   # a comment directly above it
            first -= 1
        found[name] = "\n".join(lines[first:node.end_lineno]) + "\n"
    return found


# ---- 2. two scripts --------------------------------------------------------------------------

def drifted(one, other):
    """What two scripts should have in common, but have in different texts. -> list of names"""
    lesson, machinery = split(one)
    other_lesson, other_machinery = split(other)
    here = pieces(lesson)
    there = pieces(other_lesson)
    found = [name for name in here if name in there and here[name] != there[name]
             and name not in LESSONS and not (name in BRANCHES and
                                              branches(here[name]) != branches(there[name]))]
    return sorted(found) + [MACHINERY] * (machinery != other_machinery)


def branches(text):
    """The words with which a function compares an argument. -> list"""
    return re.findall('== "([a-z0-9_]+)"', text)


def sync(source, target):
    """`target` with all that it shares with `source` in the text of `source`. Nothing is added,
    moved or removed above the line. -> str"""
    lesson, machinery = split(source)
    text, _ = split(target)
    here = pieces(lesson)
    there = pieces(text)
    for name in here.keys() & set(drifted(source, target)):
        text = text.replace("\n" + there[name], "\n" + here[name])     # it begins a line
    return text + machinery


def difference(one, other):
    """The lines that were removed and added between two scripts, marked - and +. Docstrings of the
    files and empty lines do not count. -> list"""
    bodies = [[line for line in source.split("\n")[ast.parse(source).body[0].end_lineno:]
               if line.strip()] for source in (one, other)]
    return [line for line in difflib.ndiff(*bodies) if line[0] in "+-"]


# ---- 3. the commands -------------------------------------------------------------------------

def read(word):
    """The text of a script, which may be named without .py. ValueError if it cannot be used."""
    name = word.removesuffix(".py") + ".py"
    if name not in SCRIPTS:
        raise ValueError(f"{word!r} is none of the scripts, {', '.join(SCRIPTS)}")
    source = (ROOT / name).read_text()
    try:
        ast.parse(source)
        split(source)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None
    return source


def repair(word):
    """Copy what scripts share from one into the others, and print what was done. Nothing is
    written before it is known that all scripts can be."""
    source = read(word)
    old = {name: read(name) for name in SCRIPTS}
    new = {name: sync(source, text) for name, text in old.items()}
    for name in SCRIPTS:
        print(f"{name}: {', '.join(drifted(source, old[name])) or 'in step'}")
        if new[name] != old[name]:
            (ROOT / name).write_text(new[name])


def main(words):
    """Exits with 2 and one line on stderr if words or scripts make no sense."""
    try:
        if len(words) == 3 and words[0] == "--diff":
            lines = difference(read(words[1]), read(words[2]))
            print(*lines, f"{len(lines)} lines", sep="\n")
        elif len(words) == 1 and words[0] != "--diff":
            repair(words[0])
        else:
            raise ValueError(USAGE)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):          # a closed pipe (| head -1) ends it without a traceback
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main(sys.argv[1:])
