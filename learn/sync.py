"""Keep the scripts in step: their machinery has the same text in each of them.

  python learn/sync.py FROM          copy the machinery of FROM to the rest (make sync FROM=grpo.py)
  python learn/sync.py --diff A B    show what B does differently from A (make diff A=grpo B=gspo)
  python learn/sync.py --count       count the lines of each folder by kind of file (make count)

Each script is self-contained, so shared code is repeated on purpose, and tests/test_sync.py fails
if the copies drift apart. All that follows the marker line is the machinery, which is the same in
all scripts, and is copied. Functions above that line are copied by hand.
"""
import difflib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# All scripts, in the order of the papers; add the name of a new script here.
SCRIPTS = ("reinforce.py", "ppo.py", "grpo.py", "gspo.py", "dpo.py")
# Kinds of files whose lines are counted
KINDS = (".py", ".txt", ".js", ".css", ".html", ".json")
MARKER = "# ==== the machinery: from here on, the text is the same in all scripts ===="


def split(source):
    """Split a script at the marker line, which begins the second part. Raises a ValueError unless
    there is exactly one such line. -> the lesson (str), the machinery (str)"""
    line = "\n" + MARKER
    if source.count(line) != 1:
        raise ValueError(f"{source.count(line)} lines begin with {MARKER!r}, but exactly one must")
    lesson, _, rest = source.partition(line)
    return lesson + "\n", MARKER + rest


def sync(source, target):
    """Copy the machinery of `source` into `target`. -> the new text of `target`"""
    return split(target)[0] + split(source)[1]


def difference(one, other):
    """List the lines that differ between two scripts: removed ones are marked -, added ones +. The
    files' docstrings and empty lines do not count. -> list"""
    bodies = [[line for line in source.split('"""', 2)[2].split("\n") if line.strip()]
              for source in (one, other)]
    return [line for line in difflib.ndiff(*bodies) if line[0] in "+-"]


def read(word):
    """Read a script, whose name may lack the .py. ValueError if it is unknown. -> its text"""
    name = word.removesuffix(".py") + ".py"
    if name not in SCRIPTS:
        raise ValueError(f"{word!r}: unknown script; choose one of {', '.join(SCRIPTS)}")
    return (ROOT / name).read_text("utf-8")


def count_lines():
    """Count the lines that git tracks in each folder, with the folders in it; "." has only its own
    files. docs/ is left out, because make targets write most of it. ValueError if git fails.
    -> {folder: {kind: lines}}"""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True)
    if listed.returncode != 0:
        raise ValueError("git does not list the files of this folder: clone the repository")
    counts = {}
    for path in map(Path, listed.stdout.splitlines()):
        folder = path.parts[0] if len(path.parts) > 1 else "."
        if folder != "docs" and path.suffix in KINDS and (ROOT / path).exists():
            lines = len((ROOT / path).read_text("utf-8").splitlines())
            kinds = counts.setdefault(folder, {})
            kinds[path.suffix] = kinds.get(path.suffix, 0) + lines
    return counts


def table(counts):
    """Lay out what `count_lines` counts, with the sum of each kind. -> list of lines"""
    rows = [(folder, *map(kinds.get, KINDS)) for folder, kinds in counts.items()]
    totals = [sum(filter(None, column)) for column in list(zip(*rows))[1:]]
    return ["".join([f"{name:12}", *(f"{number or '':>7}" for number in numbers)])
            for name, *numbers in [("", *KINDS), *rows, ("all", *totals)]]


def main(words):
    """Run a command: copy the machinery to all scripts, compare two of them, or count lines."""
    match words:
        case ["--diff", one, other]:
            lines = difference(read(one), read(other))
            print(*lines, f"{len(lines)} lines", sep="\n")
        case ["--count"]:
            print(*table(count_lines()), sep="\n")
        case [word]:
            source = read(word)
            for name in SCRIPTS:
                old = read(name)
                new = sync(source, old)
                print(f"{name}: {'in step' if new == old else 'changed'}")
                (ROOT / name).write_text(new, "utf-8")
        case _:
            raise ValueError("run: make sync FROM=grpo.py, or: make diff A=grpo.py B=gspo.py")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
