"""Keep the scripts in step: code that several scripts share has the same text in each of them.

  python learn/sync.py FROM          copy shared code from FROM to the rest (make sync FROM=grpo.py)
  python learn/sync.py --diff A B    show what B does differently from A (make diff A=grpo B=gspo)

Each script is self-contained, so shared code is repeated on purpose, and tests/test_sync.py fails
if the copies drift apart. All that follows the marker line is the machinery, which is the same in
all scripts. If several scripts define the same function or class above that line, its text must be
the same, too, including its decorators and the comments directly above it. Only the names in
LESSONS may differ, and assignments, such as tables of losses.
"""
import difflib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# All scripts, in the order of the papers; add the name of a new script here.
SCRIPTS = ("reinforce.py", "ppo.py", "grpo.py", "gspo.py", "dpo.py")
MARKER = "# ==== the machinery: from here on, the text is the same in all scripts ===="
MACHINERY = "the machinery"                 # what messages call the part after the marker line
# The scripts are written to show these, so they may differ. kl has the estimators that each needs.
LESSONS = {"Config", "advantages", "kl", "log_ratio", "policy_loss", "compute_advantages",
           "backward", "update", "main"}
PIECE = re.compile(r"^(?:[#@].*\n)*(?:def|class) (\w+)[\s\S]*", re.M)
USAGE = "run: make sync FROM=grpo.py, or: make diff A=grpo.py B=gspo.py"


# ---- 1. the parts of a script ----------------------------------------------------------------

def split(source):
    """Split a script at the marker line, which begins the second part. Raises a ValueError unless
    there is exactly one such line. -> the lesson (str), the machinery (str)"""
    line = "\n" + MARKER
    if source.count(line) != 1:
        raise ValueError(f"{source.count(line)} lines begin with {MARKER!r}, but exactly one must")
    lesson, _, rest = source.partition(line)
    return lesson + "\n", MARKER + rest


def pieces(lesson):
    """Find the functions and classes of a lesson that must be the same in all scripts. Two empty
    lines end each of them. -> dict of name -> text"""
    found = map(PIECE.search, lesson.split("\n\n\n"))
    return {one[1]: one[0] for one in found if one and one[1] not in LESSONS}


# ---- 2. two scripts --------------------------------------------------------------------------

def drifted(one, other):
    """List what two scripts should share, but have in different texts. -> list of names"""
    lesson, machinery = split(one)
    other_lesson, other_machinery = split(other)
    here = pieces(lesson)
    there = pieces(other_lesson)
    names = [name for name in here if name in there and here[name] != there[name]]
    return sorted(names) + [MACHINERY] * (machinery != other_machinery)


def sync(source, target):
    """Copy what `source` and `target` share from `source`. Above the marker line, nothing is added,
    moved or removed. -> the new text of `target`"""
    lesson, machinery = split(source)
    text, _ = split(target)
    here = pieces(lesson)
    there = pieces(text)
    for name in here.keys() & set(drifted(source, target)):
        text = text.replace("\n" + there[name], "\n" + here[name])     # at the start of a line
    return text + machinery


def difference(one, other):
    """List the lines that differ between two scripts: removed ones are marked -, added ones +. The
    files' docstrings and empty lines do not count. -> list"""
    bodies = [[line for line in source.split('"""', 2)[2].split("\n") if line.strip()]
              for source in (one, other)]
    return [line for line in difflib.ndiff(*bodies) if line[0] in "+-"]


# ---- 3. the commands -------------------------------------------------------------------------

def read(word):
    """Read a script, whose name may lack the .py. ValueError if it is unknown. -> its text"""
    name = word.removesuffix(".py") + ".py"
    if name not in SCRIPTS:
        raise ValueError(f"{word!r}: unknown script; choose one of {', '.join(SCRIPTS)}")
    return (ROOT / name).read_text("utf-8")


def repair(word):
    """Copy shared code from one script to all others, and print the names that were copied."""
    source = read(word)
    for name in SCRIPTS:
        old = read(name)
        print(f"{name}: {', '.join(drifted(source, old)) or 'in step'}")
        (ROOT / name).write_text(sync(source, old), "utf-8")


def main(words):
    """Run a command. Bad arguments or scripts give one line on stderr and exit code 2."""
    try:
        if len(words) == 3 and words[0] == "--diff":
            lines = difference(read(words[1]), read(words[2]))
            print(*lines, f"{len(lines)} lines", sep="\n")
        elif len(words) == 1:
            repair(words[0])
        else:
            raise ValueError(USAGE)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main(sys.argv[1:])
