"""Test that code which the scripts share has one text, that functions of lessons and scripts of the
path stay short, and that neither code nor tests grow unseen."""
import ast
import dataclasses
import importlib
import inspect
import re
import subprocess

import pytest
from conftest import ROOT

import grpo
import gspo
from learn import sync
from learn.path import rungs

pytestmark = pytest.mark.quick

SOURCES = {name: (ROOT / name).read_text("utf-8") for name in sync.SCRIPTS}
# What does not fit needs a simpler idea or another file. Few files have a budget of lines, because
# budgets that are met exactly fold statements into expressions.
MOST_STATEMENTS = 25                    # in a function of a lesson
MOST_LINES = {"nano.py": 215, "a rung of nano.py": 230, "real.py": 420, "a rung of real.py": 430,
              "the agent": 517}
MOST_SHARED = 869                       # in common.py and plumbing.py, which every copier carries
MOST_DIFFERENT = 45                     # lines of make diff A=grpo B=gspo
# Lines of .py and .txt files, as make count has them. Whoever deletes lines lowers these numbers;
# only a new capability raises them.
MOST_OF_CODE = 28180                    # outside tests/
MOST_OF_TESTS = 11784


# The scripts are written to show these, so they may differ. kl has the estimators that each needs.
LESSONS = {"Config", "advantages", "kl", "log_ratio", "policy_loss", "compute_advantages",
           "objective", "backward", "update", "main"}


def test_the_machinery_has_one_text():
    for name, source in SOURCES.items():
        assert sync.sync(SOURCES["grpo.py"], source) == source, f"{name}: make sync FROM=..."


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
    count, left = 0, [*ast.iter_child_nodes(function)]
    while left:
        node = left.pop()
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not isinstance(node, ast.FunctionDef):
            count += isinstance(node, ast.stmt) and not is_text
            left += ast.iter_child_nodes(node)
    return count


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
               "a rung of real.py": map(rungs.real_script, rungs.REAL_RUNGS[:-1]),
               "the agent": [rungs.real_script(rungs.AGENT, more) for more in ("", "turns")]}
    assert sources.keys() == MOST_LINES.keys()
    for name, scripts in sources.items():
        for source in scripts:
            assert len(source.splitlines()) <= MOST_LINES[name], source.splitlines()[0]


def test_what_every_copier_carries_is_short():
    lines = [(ROOT / name).read_text("utf-8").splitlines() for name in ("common.py", "plumbing.py")]
    assert sum(map(len, lines)) <= MOST_SHARED


def test_gspo_differs_from_grpo_in_few_lines_and_docs_methods_says_in_how_many():
    page = (ROOT / "docs/methods.md").read_text("utf-8")
    edges = re.findall(r"make diff A=(\w+) B=(\w+)` shows (\d+) lines", page)
    found = [len(sync.difference(SOURCES[f"{one}.py"], SOURCES[f"{other}.py"]))
             for one, other, _ in edges]
    assert [int(shown) for *_, shown in edges] == found and found[-1] <= MOST_DIFFERENT
    assert [edge[:2] for edge in edges] == [("reinforce", "grpo"), ("grpo", "gspo")]
    assert inspect.getsource(grpo.kl) == inspect.getsource(gspo.kl)
    assert grpo.LOSS_TYPES == gspo.LOSS_TYPES


# Words of Markdown outside docs/path, and in it.
MOST_OF_WORDS = 45960, 24070


def test_neither_the_code_nor_the_tests_nor_the_pages_grow_unseen():
    if not (ROOT / ".git").exists():
        pytest.skip("needs the files that git tracks")
    lines = {folder: kinds.get(".py", 0) + kinds.get(".txt", 0)
             for folder, kinds in sync.count_lines().items()}
    tests = lines.pop("tests")
    assert sum(lines.values()) <= MOST_OF_CODE and tests <= MOST_OF_TESTS
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True)
    words = [0, 0]
    for name in listed.stdout.split():
        words[name.startswith("docs/path/")] += len((ROOT / name).read_text("utf-8").split())
    assert words[0] <= MOST_OF_WORDS[0] and words[1] <= MOST_OF_WORDS[1], words


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
