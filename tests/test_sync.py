"""Test that code which the scripts share has one text, that the files which a reader has to read
stay short, and that no folder grows unseen."""
import ast
import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
from typing import get_args

import pytest
from conftest import ROOT

import grpo
import gspo
from learn import sync

pytestmark = pytest.mark.quick

SOURCES = {name: (ROOT / name).read_text("utf-8") for name in sync.SCRIPTS}
# What does not fit needs a simpler idea or another file.
MOST_LINES = {"common.py": 400, "plumbing.py": 505, "machinery": 235, "nano.py": 200,
              "real.py": 312}
MOST_STATEMENTS = 25                    # of a function of a lesson, without those inside it
# Python that git tracks in a folder, with the folders in it; "." has only its files. If your change
# needs more, look for what can go, and if nothing can, raise the number here, so that a reader of
# the change sees what it costs.
MOST_OF_A_FOLDER = {".": 4060, "tasks": 1485, "kernels": 710, "examples": 1310, "vectors": 1370,
                    "report": 1180, "engines": 1025, "learn": 3330, "lab": 3530, "tests": 11650}


# The scripts are written to show these, so they may differ. kl has the estimators that each needs.
LESSONS = {"Config", "advantages", "kl", "log_ratio", "policy_loss", "compute_advantages",
           "objective", "backward", "update", "main"}


def test_the_machinery_has_one_text():
    for name, source in SOURCES.items():
        assert sync.sync(SOURCES["grpo.py"], source) == source, f"{name}: make sync FROM=..."


def test_a_script_without_one_marker_line_is_not_copied():
    source = SOURCES["grpo.py"]
    for text in (source + sync.MARKER, source.replace(sync.MARKER, "")):
        with pytest.raises(ValueError, match="but exactly one must"):
            sync.sync(text, source)


@pytest.mark.parametrize("words, message", [
    ([], "run: make sync FROM=grpo.py"), (["nano"], "'nano': unknown script; choose one of"),
    (["--diff", "grpo", "grpoo"], "'grpoo': unknown script")])
def test_wrong_words_get_one_line(words, message):
    done = subprocess.run([sys.executable, "learn/sync.py", *words], cwd=ROOT, text=True,
                          capture_output=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(f"error: {message}")


def test_a_function_of_several_lessons_has_one_text():
    texts = {}
    for name in SOURCES:
        module = importlib.import_module(name.removesuffix(".py"))
        for word, value in vars(module).items():
            if getattr(value, "__module__", "") == module.__name__ and word not in LESSONS:
                text = inspect.getsource(value)
                comment = inspect.getcomments(value)
                first = texts.setdefault(word, (name, text, comment))
                assert first[1:] == (text, comment), f"{word} of {name} is not that of {first[0]}"


def test_files_and_the_machinery_are_short():
    texts = {name: (ROOT / name).read_text("utf-8") for name in MOST_LINES if name.endswith(".py")}
    texts["machinery"] = sync.split(SOURCES["grpo.py"])[1]
    for name, text in texts.items():
        assert len(text.splitlines()) <= MOST_LINES[name], name


def num_statements(function):
    """Count the statements of a function, its docstring included, but not those of functions
    inside it. -> int"""
    inner = [child for node in ast.walk(function) for child in ast.iter_child_nodes(node)
             if isinstance(child, ast.FunctionDef)]
    hidden = {id(node) for one in inner for node in ast.walk(one)}
    return sum(isinstance(node, ast.stmt) and id(node) not in hidden
               for node in ast.walk(function)) - 1


def test_a_function_of_a_lesson_or_an_example_has_few_statements():
    texts = {name: sync.split(source)[0] for name, source in SOURCES.items()}
    texts |= {path.name: path.read_text("utf-8") for path in ROOT.glob("examples/*.py")}
    for name, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert num_statements(node) <= MOST_STATEMENTS, f"{name}: {node.name}"


def test_docs_methods_says_how_many_lines_make_diff_shows():
    page = (ROOT / "docs/methods.md").read_text("utf-8")
    edges = re.findall(r"make diff A=(\w+) B=(\w+)` shows (\d+) lines", page)
    assert [edge[:2] for edge in edges] == [("reinforce", "grpo"), ("grpo", "gspo")]
    for one, other, shown in edges:
        lines = sync.difference(SOURCES[f"{one}.py"], SOURCES[f"{other}.py"])
        assert len(lines) == int(shown), f"{one} to {other}"


@pytest.mark.parametrize("folder", MOST_OF_A_FOLDER)
def test_a_folder_does_not_grow_unseen(folder):
    tracked = subprocess.run(["git", "ls-files", folder], cwd=ROOT, text=True, capture_output=True)
    if tracked.returncode != 0:
        pytest.skip("needs the files that git tracks")
    paths = [ROOT / name for name in tracked.stdout.split() if name.endswith(".py")
             and (folder != "." or "/" not in name)]
    lines = [len(path.read_text("utf-8").splitlines()) for path in paths if path.exists()]
    assert sum(lines) <= MOST_OF_A_FOLDER[folder]


def test_grpo_and_gspo_have_the_same_estimators_of_the_kl_and_the_same_losses():
    assert inspect.getsource(grpo.kl) == inspect.getsource(gspo.kl)
    assert grpo.LOSS_TYPES == gspo.LOSS_TYPES


@pytest.mark.parametrize("name", [
    *(name.removesuffix(".py") for name in SOURCES),
    *(f"examples.{path.stem}" for path in ROOT.glob("examples/*.py") if path.stem != "coldstart")])
def test_the_default_of_a_parameter_is_that_of_its_flag(name):
    module = importlib.import_module(name)
    flags = {field.name: field.default for field in dataclasses.fields(module.Config)}
    for function in vars(module).values():
        if inspect.isfunction(function) and function.__module__ == name:
            for word, one in inspect.signature(function).parameters.items():
                if word in flags and one.default is not one.empty:
                    assert one.default == flags[word], f"{function.__name__}({word})"


@pytest.mark.parametrize("name", ["grpo", "gspo", "examples.zoo"])
def test_the_flag_of_the_losses_lists_all_rows_of_their_table(name):
    module = importlib.import_module(name)
    assert get_args(module.Config.__annotations__["loss_type"]) == tuple(module.LOSS_TYPES)
