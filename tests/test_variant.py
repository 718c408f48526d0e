"""A loss variant can be added by following docs/extending.md, and no test fails that the page does
not name: a reader's dozen lines must not need a tour of the tests."""
import re
import shutil
import subprocess
import sys

import mutants
import pytest
from conftest import ROOT

PAGE = (ROOT / "docs/extending.md").read_text("utf-8")
RECIPE = PAGE.partition("### A loss variant\n")[2].partition("\n## ")[0]
SOLUTIONS = mutants.parse((ROOT / "tests/solutions.txt").read_text("utf-8"))
FILES = ("grpo.py", "docs/methods.md", "vectors/reference.py", "learn/practice/mistakes.txt")
TESTS = (
    "test_sync.py", "test_family.py", "test_mutants.py",
    "test_house.py::test_every_equation_in_the_docstring_is_tagged_in_the_code_and_vice_versa[grpo]",
    "test_pages.py::test_the_map_has_every_equation_with_the_function_that_computes_it[grpo]",
    "test_practice.py::test_the_script_itself_passes_and_its_blanks_are_blank[grpo]",
    "test_vectors.py::test_our_functions_give_the_right_answers[policy_loss: taper-float64]",
    "test_vectors.py::test_our_functions_give_the_right_answers[policy_loss: taper-float32]")


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


def test_the_recipe_of_the_page_adds_a_loss_and_breaks_no_test(tmp_path):
    pytest.importorskip("mpmath", reason="computes the answers of a vector")
    ignored = shutil.ignore_patterns(".*", "runs", "__pycache__")
    shutil.copytree(ROOT, tmp_path / "copy", ignore=ignored)
    copy = tmp_path / "copy"

    def edit(name, change):
        (copy / name).write_text(change((copy / name).read_text("utf-8")), "utf-8")
    diffs = re.findall(r"^```diff\n(.*?)^```$", RECIPE, re.S | re.M)
    assert len(diffs) == len(FILES)
    lesson = (copy / "grpo.py").read_text("utf-8")
    if '"taper"' in lesson:
        pytest.skip("the recipe has been carried out here, so all tests test it")
    stated = lesson.split('"""')[1]
    last = re.findall(r"^  .*\(\d+\)$", stated, re.M)[-1]         # perhaps of somebody's variant
    number = int(last[last.rindex("(") + 1:-1]) + 1
    diffs[0] = diffs[0].replace(diffs[0].partition("\n")[0], f" {last}")
    diffs = [diff.replace("(9)", f"({number})").replace("| 9 |", f"| {number} |") for diff in diffs]
    for name, diff in zip(FILES, diffs):
        assert name in RECIPE
        edit(name, lambda text, diff=diff: applied(diff, text))
    [case] = re.findall(r"^```json\n(.*?)^```$", RECIPE, re.S | re.M)
    subprocess.run([sys.executable, "-c", FILL, case], cwd=copy, check=True)
    edit("docs/practice.md", lambda text: re.sub(
        r"(`grpo` \()(\d+)", lambda found: f"{found[1]}{int(found[2]) + 1}", text))
    source = (copy / "grpo.py").read_text("utf-8")
    for solution in SOLUTIONS:
        assert solution.file != "grpo.py" or source.count("\n".join(solution.old)) == 1
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
         *(f"tests/{name}" for name in TESTS)], cwd=copy, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout[-3000:]
