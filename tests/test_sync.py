"""Test that code which the scripts share has one text, that functions of lessons and scripts of the
path stay short, and that no folder grows unseen."""
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
from learn.path import rungs

pytestmark = pytest.mark.quick

SOURCES = {name: (ROOT / name).read_text("utf-8") for name in sync.SCRIPTS}
# What does not fit needs a simpler idea or another file. No file has a budget of lines, because
# budgets that are met exactly fold statements into expressions.
MOST_STATEMENTS = 25                    # in a function of a lesson
MOST_LINES = {"nano.py": 215, "a rung of nano.py": 230, "real.py": 340, "a rung of real.py": 340}
MOST_DIFFERENT = 45                     # lines of make diff A=grpo B=gspo
# Lines that git tracks in a folder, with the folders in it; "." has only its files. There is room
# for 5% more. If your change needs more, look for what can go, and if nothing can, raise the number
# here, so that a reader of the change sees what it costs. docs/ is left out, because make targets
# write most of it.
MOST_PYTHON = {".": 4290, "tasks": 1540, "kernels": 730, "examples": 1340, "vectors": 1520,
               "report": 1230, "engines": 960, "measuring": 160, "learn": 3480, "lab": 3650,
               "tests": 12700}
MOST_TEXT = {".": 10, "vectors": 1600, "report": 780, "engines": 20, "learn": 7690, "lab": 100,
             "tests": 5000}
TEXT = (".txt", ".js", ".css", ".html", ".json")


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


def num_statements(function):
    """Count the statements of a function, without docstrings and functions inside it. -> int"""
    inner = [child for node in ast.walk(function) for child in ast.iter_child_nodes(node)
             if isinstance(child, ast.FunctionDef)]
    hidden = {id(node) for one in inner for node in ast.walk(one)}
    count = 0
    for node in ast.walk(function):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and node is not function and not is_text:
            count += id(node) not in hidden
    return count


def test_statements_of_a_function_are_counted_without_docstrings_and_functions_inside():
    source = '''
def outer(x):
    """Say what it does."""
    def inner(y):
        """Say what it does."""
        return y
    if x: x = inner(x); x += 1
    return x
'''
    assert num_statements(ast.parse(source).body[0]) == 4


def test_a_function_of_a_lesson_or_an_example_has_few_statements():
    texts = {name: sync.split(source)[0] for name, source in SOURCES.items()}
    texts |= {path.name: path.read_text("utf-8") for path in ROOT.glob("examples/*.py")}
    for name, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert num_statements(node) <= MOST_STATEMENTS, f"{name}: {node.name}"


def test_nano_real_and_each_rung_of_the_path_are_short():
    sources = {"nano.py": [rungs.NANO], "a rung of nano.py": map(rungs.script, rungs.RUNGS),
               "real.py": [rungs.REAL],
               "a rung of real.py": map(rungs.real_script, rungs.REAL_RUNGS)}
    assert sources.keys() == MOST_LINES.keys()
    for name, scripts in sources.items():
        for source in scripts:
            assert len(source.splitlines()) <= MOST_LINES[name], source.splitlines()[0]


def test_gspo_differs_from_grpo_in_few_lines():
    difference = sync.difference(SOURCES["grpo.py"], SOURCES["gspo.py"])
    assert 0 < len(difference) <= MOST_DIFFERENT


def test_docs_methods_says_how_many_lines_make_diff_shows():
    page = (ROOT / "docs/methods.md").read_text("utf-8")
    edges = re.findall(r"make diff A=(\w+) B=(\w+)` shows (\d+) lines", page)
    assert [edge[:2] for edge in edges] == [("reinforce", "grpo"), ("grpo", "gspo")]
    for one, other, shown in edges:
        lines = sync.difference(SOURCES[f"{one}.py"], SOURCES[f"{other}.py"])
        assert len(lines) == int(shown), f"{one} to {other}"


@pytest.mark.parametrize("endings, most", [((".py",), MOST_PYTHON), (TEXT, MOST_TEXT)])
def test_a_folder_does_not_grow_unseen(endings, most):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True)
    if tracked.returncode != 0:
        pytest.skip("needs the files that git tracks")
    lines = {}
    for name in tracked.stdout.split("\n"):
        folder = name.partition("/")[0] if "/" in name else "."
        path = ROOT / name
        if folder != "docs" and name.endswith(endings) and path.exists():
            lines[folder] = lines.get(folder, 0) + len(path.read_text("utf-8").splitlines())
    assert lines.keys() == most.keys()
    for folder, count in lines.items():
        assert count <= most[folder], folder


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
