"""What make quick runs, the tests that are marked quick: the golden numbers and what else each
script's equations are checked by, the scripts against each other, and a run of each script."""
import ast
from pathlib import Path

import pytest
import test_run
from conftest import ROOT, SCRIPTS

pytestmark = pytest.mark.quick

FILES = {path.stem: ast.parse(path.read_text()) for path in Path(__file__).parent.glob("test_*.py")}


def is_quick(node):
    """Whether a statement of a test file says pytest.mark.quick, as pytestmark or decorator."""
    parts = getattr(node, "decorator_list", [])
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
        parts = [node.value]
    return any("pytest.mark.quick" in ast.unparse(part) for part in parts)


def quick_tests(file):
    """The names of the tests of a file that are marked quick, and of those that are not."""
    functions = [node for node in FILES[file].body
                 if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    all_are = any(is_quick(node) for node in FILES[file].body if isinstance(node, ast.Assign))
    quick = {node.name for node in functions if all_are or is_quick(node)}
    return quick, {node.name for node in functions} - quick


@pytest.mark.parametrize("file", FILES)
def test_every_test_with_golden_numbers_is_quick(file):
    _, others = quick_tests(file)
    golden = {node.name for node in FILES[file].body if isinstance(node, ast.FunctionDef)
              and "golden" in ast.unparse(node).lower()}
    assert golden & others == set()


@pytest.mark.parametrize("file", ["family", "kl", "sync", *SCRIPTS])
def test_each_scripts_equations_and_the_scripts_against_each_other_are_quick(file):
    quick, others = quick_tests(f"test_{file}")
    assert len(quick) >= 5
    assert others == set()


def test_a_run_of_each_script_is_quick():
    marks = {mark.name: mark for mark in test_run.test_main_returns_the_summary.pytestmark}
    assert "quick" in marks
    assert marks["parametrize"].args[:2] == ("script", SCRIPTS)


def test_make_quick_runs_what_is_marked_quick():
    assert "\t$(PY) $(PYTEST) -m quick\n" in (ROOT / "Makefile").read_text()
