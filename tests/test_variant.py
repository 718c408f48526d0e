"""The recipe of docs/extending.md adds a loss variant: its diffs apply to today's files, and the
function and the reference that they change compute the same."""
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

PAGE = (ROOT / "docs/extending.md").read_text("utf-8")
RECIPE = PAGE.partition("### A loss variant\n")[2].partition("\n## ")[0]
FILES = ("grpo.py", "docs/methods.md", "vectors/reference.py", "learn/practice/mistakes.txt")
TESTS = ("test_mutants.py", "test_vectors.py::test_our_functions_give_the_right_answers")


def applied(diff, text):
    """Apply the hunks of a diff, between which there is an empty line. -> the new text"""
    for hunk in re.split(r"\n\n", diff.rstrip("\n")):
        lines = hunk.split("\n")
        old = "\n".join(line[1:] for line in lines if line[0] in " -")
        new = "\n".join(line[1:] for line in lines if line[0] in " +")
        assert text.count(old + "\n") == 1, old
        text = text.replace(old + "\n", new + "\n")
    return text


FILL = """
import json, sys
from vectors import FOLDER, fill
path = FOLDER / "policy_loss.json"
content = json.loads(path.read_text("utf-8"))
case = json.loads(sys.argv[1])
content["cases"].append(case | fill.answer(content, case))
path.write_text(fill.layout(content), "utf-8")
"""


def test_the_recipe_of_the_page_adds_a_loss_that_computes_what_its_reference_says(tmp_path):
    pytest.importorskip("mpmath", reason="computes the answers of a vector")
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"))
    if '"taper"' in (ROOT / "grpo.py").read_text("utf-8"):
        pytest.skip("the recipe has been carried out here, so all tests test it")
    diffs = re.findall(r"^```diff\n(.*?)^```$", RECIPE, re.S | re.M)
    for name, diff in zip(FILES, diffs, strict=True):
        assert name in RECIPE
        (copy / name).write_text(applied(diff, (ROOT / name).read_text("utf-8")), "utf-8")
    [case] = re.findall(r"^```json\n(.*?)^```$", RECIPE, re.S | re.M)
    subprocess.run([sys.executable, "-c", FILL, case], cwd=copy, check=True)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "mutants or taper",
         *(f"tests/{name}" for name in TESTS)], cwd=copy, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout[-3000:]
