"""Plant the mistakes of learn/practice/mistakes.txt, one at a time, and run the tests that they
name until one fails: make mutants.

The tests have to pass before. No file changes: a process of Python gets the mistake when it imports
the file, but not if it runs the file as a script.
"""
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from vectors.edits import parse  # noqa: E402

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


def verdict(edit):
    """Run the tests of a mistake until one fails, and print whether one has. -> str"""
    text = edit.apply((ROOT / edit.file).read_text("utf-8"))
    tests, words = edit.tests
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(HOOK)
        planted = Path(folder, "planted.json")
        planted.write_text(json.dumps({f"{ROOT / edit.file}": text}))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests,
                   *["-k", words] * bool(words)]
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        code = subprocess.run(command, cwd=ROOT, capture_output=True, env=os.environ | {
            "PYTHONPATH": path, "PLANTED": str(planted)}).returncode
    word = {0: "SURVIVED", 5: "NO TEST"}.get(code, "caught")
    print(f"{word:9} {edit.file}: {edit.name}", flush=True)
    return word


if __name__ == "__main__":
    edits = parse((ROOT / "learn/practice/mistakes.txt").read_text("utf-8"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        counts = Counter(pool.map(verdict, edits))
    print(", ".join(f"{n} {word}" for word, n in counts.items()))
    raise SystemExit(counts.keys() != {"caught"})
