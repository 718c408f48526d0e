"""docs/extending.md, its "Your own task" and "Your own algorithm", followed word for word in a copy
of the repository. That a script and common.py run alone is in test_alone.py."""
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT
from small_runs import INSTANT, arguments, lines

import common

PAGE = (ROOT / "docs/extending.md").read_text()
TINY = arguments(INSTANT | {"operands": "5", "base_steps": 2, "base_batch_size": 4,
                            "num_generations": 4, "max_completion_length": 8,
                            "num_eval_problems": 8, "max_steps": 2})


def section(title):
    """The text below a heading of the page."""
    return re.search(rf"^## {title}\n(.*?)^## ", PAGE, re.DOTALL | re.MULTILINE)[1]


@pytest.fixture
def tree(tmp_path):
    """A copy of the repository, as after a clone; it draws no pictures, which would take longer
    than everything else."""
    for name in ("tasks", "tools", "tests"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.suffix in (".py", ".md", ".toml") or path.name == "Makefile":
            shutil.copy(path, tmp_path)
    (tmp_path / "tools/report.py").unlink()
    return tmp_path


@pytest.fixture
def shell(tree, warm_python):
    """shell(command, *more): run a command of the page in the copy. -> returncode, stdout,
    stderr"""
    def run(command, *more):
        words = [*shlex.split(command), *more]
        if words[0] == "python":
            return warm_python.run(*words[1:], cwd=tree)
        if words[0] == "make":
            words.append(f"PYTHON={sys.executable}")
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(words, cwd=tree, env=environment, capture_output=True, text=True,
                              timeout=120)
    return run


# ---- your own task ---------------------------------------------------------------------------

def read_task():
    """Name and text of the task that the page shows."""
    text = section("Your own task")
    name = re.search(r"tasks/(\w+)\.py", text)[1]
    return name, re.search(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[1]


def test_your_own_task_is_a_file_of_about_20_lines_that_runs(tree, shell):
    name, source = read_task()
    assert len(source.splitlines()) <= 25
    (tree / f"tasks/{name}.py").write_text(source)
    command = re.search(rf"^python .* --task {name}$", section("Your own task"), re.MULTILINE)[0]
    done = shell(command, *TINY)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    folder = tree / f"runs/grpo-{name}-s0"
    assert json.loads((folder / "summary.json").read_text())["steps"] == 2
    groups = lines(folder / "samples.jsonl")
    assert groups
    for group in groups:
        assert "".join(sorted(group["prompt"][:-1])) == group["answer"]


@pytest.fixture
def own_task(script):
    """The task of the page."""
    name, source = read_task()
    module = {"__name__": f"tasks.{name}"}
    exec(compile(source, name, "exec"), module)
    [task_class] = [value for value in module.values() if isinstance(value, type)
                    and value.__module__ == module["__name__"]]
    return task_class(script.Config())


def test_the_base_of_your_own_task_is_right_sometimes(own_task):
    rng = random.Random(0)
    problems = [own_task.sample(rng) for _ in range(200)]
    assert max(len(problem.prompt) for problem in problems) == own_task.prompt_width
    for phase, low, high in (("textbook", 0.8, 1.0), ("forum", 0.2, 0.4)):
        is_correct = []
        for problem in problems:
            text = own_task.demonstration(problem, rng, phase)
            is_correct.append(own_task.is_correct(problem, own_task.verify(problem, text)))
        assert low <= common.mean(is_correct) <= high


@pytest.mark.parametrize("text", [
    "", "<answer>", "<answer></answer>", "<answer>1</answer>" * 2, "\ud800", "\u0663" * 10_000],
    ids=ascii)
def test_nothing_breaks_the_verifier_of_your_own_task(own_task, text):
    problem = own_task.sample(random.Random(0))
    assert own_task.verify(problem, text) == 0.0


# ---- your own algorithm ----------------------------------------------------------------------

@pytest.fixture
def mine(tree, shell):
    """mine.py in the copy, made as steps 1 to 3 say; the lines that were removed and added."""
    text = section("Your own algorithm")
    assert re.findall(r"^(\d)\. ", text, re.MULTILINE) == ["1", "2", "3", "4"]
    copying = re.search(r"`(cp [^`]+)`", text)[1]
    assert shell(copying).returncode == 0                                               # 1.
    [removed] = re.findall(r"^-(.*)$", text, re.MULTILINE)
    [added] = re.findall(r"^\+(.*)$", text, re.MULTILINE)
    path = tree / "mine.py"
    source = path.read_text()
    assert source.count(removed) == 1
    path.write_text(source.replace(removed, added))                                     # 2.
    sync = tree / "tools/sync.py"
    before = sync.read_text()
    after = re.sub(r'^(SCRIPTS = .*)\)$', r'\1, "mine.py")', before, flags=re.MULTILINE)
    assert after != before
    sync.write_text(after)                                                              # 3.
    return path, removed, added


def test_your_own_algorithm_runs_and_the_difference_is_your_paper(tree, shell, mine):
    _, removed, added = mine
    done = shell("python mine.py", *TINY)                                               # 4.
    assert done.returncode == 0 and done.stderr == "", done.stderr
    summary = tree / "runs/mine-arithmetic-s0/summary.json"
    assert json.loads(summary.read_text())["steps"] == 2
    shown = shell("make diff A=grpo B=mine").stdout.splitlines()
    assert [line.rstrip() for line in shown if line[0] in "+-"] == [f"- {removed}", f"+ {added}"]


def test_a_test_says_when_your_own_algorithm_has_drifted_and_make_sync_repairs_it(shell, mine):
    path, _, _ = mine
    tests = "python -m pytest -q -p no:cacheprovider --noconftest tests/test_sync.py -k"
    kept = shell(tests, "every_shared_name or one_text or marker_line or twice")
    assert kept.returncode == 0, kept.stdout
    edited = path.read_text()
    for old, new, test, name in (
            ("VOCAB_SIZE = 320", "VOCAB_SIZE = 384", "machinery_has_one_text", "[mine.py]"),
            ('estimator="k3"', 'estimator="k2"', "every_shared_name", "kl is not the same")):
        assert edited.count(old) == 1
        path.write_text(edited.replace(old, new))
        drifted = shell(tests, test)
        assert drifted.returncode == 1 and name in drifted.stdout, drifted.stdout
        assert shell("make sync FROM=grpo.py").returncode == 0
        assert path.read_text() == edited
