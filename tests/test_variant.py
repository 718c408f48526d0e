"""The recipe of docs/extending.md adds a loss variant: its diffs apply to today's files, and the
function and the reference that they change compute the same."""
import importlib.util
import json
import re
import sys

import pytest
from conftest import ROOT
from small_vectors import OURS

import grpo
import vectors

PAGE = (ROOT / "docs/extending.md").read_text("utf-8")
RECIPE = PAGE.partition("### A loss variant\n")[2].partition("\n## ")[0]
FILES = ("grpo.py", "docs/methods.md", "vectors/reference.py", "learn/practice/mistakes.txt")


def applied(diff, text):
    """Apply the hunks of a diff, between which there is an empty line. -> the new text"""
    for hunk in re.split(r"\n\n", diff.rstrip("\n")):
        lines = hunk.split("\n")
        old = "\n".join(line[1:] for line in lines if line[0] in " -")
        new = "\n".join(line[1:] for line in lines if line[0] in " +")
        assert text.count(old + "\n") == 1, old
        text = text.replace(old + "\n", new + "\n")
    return text


def test_the_recipe_of_the_page_adds_a_loss_that_computes_what_its_reference_says(
        tmp_path, monkeypatch):
    fill = pytest.importorskip("vectors.fill", reason="computes the answers of a vector")
    if "taper" in grpo.LOSS_TYPES:
        pytest.skip("the recipe has been carried out here, so all tests test it")
    modules = []
    diffs = re.findall(r"^```diff\n(.*?)^```$", RECIPE, re.S | re.M)
    for name, diff in zip(FILES, diffs, strict=True):
        text = applied(diff, (ROOT / name).read_text("utf-8"))
        if name.endswith(".py"):
            path = tmp_path / f"edited_{len(modules)}.py"
            path.write_text(text, "utf-8")
            spec = importlib.util.spec_from_file_location(path.stem, path)
            modules.append(importlib.util.module_from_spec(spec))
            monkeypatch.setitem(sys.modules, path.stem, modules[-1])
            spec.loader.exec_module(modules[-1])
    script, reference = modules
    [case] = map(json.loads, re.findall(r"^```json\n(.*?)^```$", RECIPE, re.S | re.M))
    content = json.loads((vectors.FOLDER / "policy_loss.json").read_text("utf-8"))
    content["cases"] = [case | fill.answer(content, case, reference)]
    (tmp_path / "policy_loss.json").write_text(json.dumps(content))
    monkeypatch.setattr(vectors, "FOLDER", tmp_path)
    monkeypatch.setattr(grpo, "policy_loss", script.policy_loss)
    content = vectors.read("policy_loss")
    [case] = content["cases"]
    [function] = OURS["policy_loss"](**case["parameters"])
    outcome = vectors.check_case(function, content, case, fixed=case["parameters"])
    assert not outcome.errors and not outcome.skipped, outcome
