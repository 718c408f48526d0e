"""Plant mistakes, one at a time, and run tests until one fails.

  make mutants             the mistakes of learn/practice/mistakes.txt, with the tests they name
  make changed BASE=main   for 3 minutes, those in files that changed since a commit, and mistakes
                           in the lines that changed, with all files of tests that name the function
                           or its file: first those that name the function most often

The tests have to pass before. No file changes: a process of Python gets the mistake when it imports
the file, but not if it runs the file as a script. A mistake in what several scripts share is
planted in all of them.
"""
import ast
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
from learn.sync import SCRIPTS  # noqa: E402
from vectors.edits import parse  # noqa: E402

CHANGED, SECONDS = 180, 100         # of make changed; of the tests of a mistake
SWAPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+",
         "*": "/", "/": "*", "//": "/", "&": "|", "|": "&", "and": "or", "or": "and", "not": "",
         "True": "False", "False": "True", "min": "max", "max": "min", "0": "1", "1": "2",
         "detach": "clone", "sorted": "list"}
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
    statement that is left out. Yields the first and the last line, and the text instead"""
    rows = source.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        (row, start), (_, end) = token.start, token.end
        if row in lines and token.type != tokenize.STRING and token.string in SWAPS:
            yield row, row, rows[row - 1][:start] + SWAPS[token.string] + rows[row - 1][end:]
    for node in ast.walk(ast.parse(source)):
        test = getattr(node, "test", None)
        row = test.lineno if test and test.lineno == test.end_lineno else None
        if row in lines:
            before, after = rows[row - 1][:test.col_offset], rows[row - 1][test.end_col_offset:]
            yield row, row, f"{before}False{after}"
        is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        if (is_call or isinstance(node, ast.AugAssign | ast.Raise)) and node.lineno in lines:
            yield node.lineno, node.end_lineno, node.col_offset * " " + "pass"


def of_lines(file, lines):
    """Plant the mistakes of some lines. Yields a name, {file: text}, and files of tests"""
    source, words = read(file), {}
    rows = source.split("\n")
    for path in ROOT.glob("tests/test_*.py"):
        words[path] = re.findall(r"\w+", path.read_text("utf-8"))
    for first, last, new in edits_of(source, lines):
        around = [node for node in ast.walk(ast.parse(source))
                  if isinstance(node, ast.stmt) and node.lineno <= first <= node.end_lineno]
        old = "\n".join(rows[around[0].lineno - 1:around[0].end_lineno])
        planted = "\n".join(
            [*rows[around[0].lineno - 1:first - 1], new, *rows[last:around[0].end_lineno]])
        texts = {one: read(one).replace(old, planted, 1) for one in {file, *SCRIPTS}
                 if one == file or file in SCRIPTS and old in read(one)}
        with contextlib.suppress(SyntaxError):
            compile(texts[file], file, "exec")
            names = {one.name for one in around if hasattr(one, "name")}
            count = {path: sum(map(some.count, names)) for path, some in words.items()
                     if {*names, Path(file).stem} & {*some}}
            yield f"{file}:{first}: {new.strip()}", texts, sorted(count, key=count.get)[::-1]


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
    mistakes = [*of_practice(lines if argv else None)]
    for file in lines:                  # what scripts share has changed in several of them
        of_file = {repr(sorted(one[1].items())): one for one in of_lines(file, lines[file])}
        planted = {repr(sorted(texts.items())) for _, texts, _ in mistakes}
        mistakes += [one for key, one in of_file.items() if key not in planted]
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
