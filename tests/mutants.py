"""Plant mistakes, one at a time, and run tests until one fails.

  make mutants             the mistakes of learn/practice/mistakes.txt, with the tests they name
  make changed BASE=main   for 3 minutes, those in files that changed since a commit, and mistakes
                           in the lines that changed, with all files of tests that name the function
                           or its file: first those that name the function most often

The tests have to pass before. No file changes: a process of Python gets the mistake when it imports
the file, but not if it runs the file as a script.
"""
import contextlib
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import tokenize
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from vectors.edits import parse  # noqa: E402

CHANGED, SECONDS = 180, 100         # of make changed; of the tests of a mistake
SWAPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+",
         "+=": "-=", "*": "/", "/": "*", "//": "/", "&": "|", "|": "&", "and": "or", "or": "and",
         "not": "", "True": "False", "False": "True", "min": "max", "max": "min", "0": "1",
         "1": "2", "detach": "clone", "sorted": "list", "raise": "lambda:",
         "if": "if False and", "elif": "elif False and", "while": "while False and"}
HOOK = """
import importlib.machinery, json, linecache, os
texts = json.load(open(os.environ["PLANTED"]))
get_code = importlib.machinery.SourceFileLoader.get_code
def planted(self, name):
    text = texts.get(os.path.realpath(self.path))
    if text is None:
        return get_code(self, name)
    linecache.cache[self.path] = len(text), None, text.splitlines(True), self.path
    return compile(text, self.path, "exec", dont_inherit=True)
importlib.machinery.SourceFileLoader.get_code = planted
"""


def read(file):
    return (ROOT / file).read_text("utf-8")


def changed_lines(base):
    """Find the lines of our files that changed since a commit. -> {file: their numbers}"""
    command = ["git", "diff", "--unified=0", base, "--", "*.py", ":!tests", ":!docs"]
    found, file = {}, ""
    for line in subprocess.run(command, cwd=ROOT, capture_output=True, text=True,
                               check=True).stdout.splitlines():
        if line.startswith("+++ "):
            file = line[6:]
        elif line.startswith("@@ "):
            first, number = re.search(r" \+(\d+)(?:,(\d+))? ", line).groups("1")
            found.setdefault(file, set()).update(range(int(first), int(first) + int(number)))
    return {file: lines for file, lines in found.items() if lines}


def edits_of(source, lines):
    """Make mistakes in some lines: another operator or number, a condition that never holds, a
    statement that has no effect. Yields the number of a line, and the text instead"""
    rows, before = source.split("\n"), tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        (row, start), (_, end) = token.start, token.end
        words = [SWAPS[token.string]] if token.string in SWAPS else []
        if before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            words.append(f"lambda: {token.string}")
        if row in lines and token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER):
            yield from ((row, rows[row - 1][:start] + word + rows[row - 1][end:]) for word in words)
        before = before if token.type in (tokenize.NL, tokenize.COMMENT) else token.type


def of_lines(changed):
    """Plant the mistakes of changed lines; if scripts share a line, in one of them. Yields a name,
    {file: text}, and the files of tests that name the function or the file"""
    words = {path: re.findall(r"\w+", path.read_text("utf-8"))
             for path in ROOT.glob("tests/test_*.py")}
    planted = set()
    for file, lines in changed.items():
        for row, new in edits_of(read(file), lines):
            rows = read(file).split("\n")
            name = re.findall(r"(?:def|class) (\w+)|$", "\n".join(rows[:row]))[-2:][0]
            key, rows[row - 1] = (name, rows[row - 1], new), new
            with contextlib.suppress(SyntaxError):
                compile("\n".join(rows), file, "exec")
                tests = [path for path, some in words.items() if {name, Path(file).stem} & {*some}]
                tests.sort(key=lambda path: -words[path].count(name))
                if key not in planted:
                    yield f"{file}:{row}: {new.strip()}", {file: "\n".join(rows)}, tests
                planted.add(key)


def of_practice(files=None):
    """Plant the mistakes that readers meet, or those in some files."""
    for edit in parse(read("learn/practice/mistakes.txt")):
        if files is None or edit.file in files:
            tests, words = edit.tests
            yield (f"practice, {edit.file}: {edit.name}", {edit.file: edit.apply(read(edit.file))},
                   [*tests, *["-k", words] * bool(words)])


def verdict(mistake):
    """Run the tests of a mistake until one fails, and print whether one has. -> str"""
    name, texts, tests = mistake
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(HOOK)
        planted = Path(folder, "planted.json")
        planted.write_text(json.dumps({f"{ROOT / file}": text for file, text in texts.items()}))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=SECONDS,
                                  env=os.environ | {"PYTHONPATH": path, "PLANTED": str(planted)})
            word = {0: "SURVIVED", 5: "NO TEST"}.get(done.returncode, "caught")
        except subprocess.TimeoutExpired:
            word = f"no failure in {SECONDS} s"
    print(f"{word:9} {name}", flush=True)
    return word


def main(argv):
    lines = changed_lines(os.environ.get("BASE") or "HEAD") if argv else {}
    mistakes = [*of_practice(lines if argv else None), *of_lines(lines)]
    mistakes.sort(key=lambda one: zlib.crc32(one[0].encode()))          # in no order
    end = time.monotonic() + (CHANGED if argv else math.inf)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        words = [*pool.map(lambda one: verdict(one) if time.monotonic() < end else "not planted",
                           mistakes)]
    counts = [f"{n} {word}" for word, n in Counter(words).items()]
    print(", ".join(counts) or "no line of code has changed")
    return any(word == "SURVIVED" and one[0].startswith("practice")
               for word, one in zip(words, mistakes))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
