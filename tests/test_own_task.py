"""A task is one file of tasks/ with a subclass of common.Task, and runs with every script."""
import importlib.util
import inspect
import json
import re
import sys
from pathlib import Path

import pytest
from conftest import every_script
from small_runs import INSTANT, arguments, lines, steps

import common

TASK = '''
from common import Problem, Task


class Parrot(Task):
    prompt_width = 6
    defaults = {"save_steps": 7, "learning_rate": 1, "max_steps": 99, "a_flag_of_no_script": 3}

    def sample(self, rng):
        digit = str(rng.randint(0, 9))
        return Problem(f"{rng.choice(['say', 'cry', 'sob'])} {digit}:", digit)

    def demonstration(self, problem, rng, phase):
        return problem.answer

    def verify(self, problem, text):
        assert problem.task == "parrot"
        return float(text > "P")
'''
PER_MOVE = TASK.replace('''float(text > "P")''', '''[0.5 * (letter > "P") for letter in text]
''') + '''
    def is_correct(self, problem, verdict):
        return sum(verdict) >= 2

    def best_return(self, problem):
        return 2.0
'''


@pytest.fixture
def put(tmp_path, monkeypatch, restored_ctrl_c):
    """put(source): the module tasks/parrot.py of this text, next to common.py."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    monkeypatch.setattr(common, "HERE", tmp_path)
    monkeypatch.chdir(tmp_path)

    def write(source):
        path = folder / "parrot.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("tasks.parrot", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "tasks.parrot", module)
        spec.loader.exec_module(module)
        return module
    return write


@every_script
@pytest.mark.parametrize("source", [TASK, PER_MOVE], ids=["at the end", "for each move"])
def test_a_task_is_one_file_and_may_reward_each_move(script, put, load_task, source):
    put(source)
    flags = {"task": "parrot", "operands": "5", "base_steps": 3, "num_prompts": 8, "max_steps": 2}
    script.main(arguments(INSTANT | flags))
    folder = Path(f"runs/{script.__name__}-parrot-s0")
    assert sum("loss" in line for line in steps(folder)) == 2

    # its own verifier judged its own problems
    groups = lines(folder / "samples.jsonl")
    rewards = set()
    parrot = load_task(script.Config(task="parrot"))
    problem = common.Problem("", "", task="parrot")
    for group in groups:
        assert re.fullmatch("(say|cry|sob) [0-9]:", group["prompt"])
        for made in group["completions"]:
            verdict = parrot.verify(problem, made["text"])
            assert made["reward"] == (sum(verdict) if source is PER_MOVE else verdict)
            rewards.add(made["reward"])
    assert len(rewards) > 1

    # and the run can be resumed
    script.main(["--resume_from_checkpoint", str(folder), "--max_steps", "3"])


@every_script
def test_a_task_has_defaults_of_flags_which_what_is_given_overrides(script, put):
    put(TASK)
    script.main(arguments(INSTANT | {"task": "parrot", "operands": "5"}))
    folder = Path(f"runs/{script.__name__}-parrot-s0")
    config = json.loads((folder / "config.json").read_text())["config"]
    assert config["save_steps"] == 7
    assert config["max_steps"] == 1                 # was given
    assert config["learning_rate"] == 1 and isinstance(config["learning_rate"], float)
    assert "a_flag_of_no_script" not in config      # it may be another script's


def test_of_several_tasks_the_largest_default_counts_and_ours_for_a_task_without_one(script, put):
    put(TASK.replace('"save_steps": 7', '"save_steps": 12').replace(
        '"learning_rate": 1', '"learning_rate": 1e-6'))
    default = script.Config()
    cfg = common.parse_flags(script.Config, ["--task", "arithmetic,parrot"])
    assert cfg.save_steps == 12 > default.save_steps
    assert cfg.learning_rate == default.learning_rate
    assert common.parse_flags(script.Config, ["--task", "parrot"]).learning_rate == 1e-6
    twice = common.parse_flags(script.Config, ["--task", "parrot,parrot"])
    assert twice.learning_rate == 1e-6


@pytest.mark.parametrize("method", ["sample", "demonstration", "verify"])
def test_a_task_without_a_method_is_refused_with_what_it_lacks(script, put, capsys, method):
    put(TASK.replace(f"def {method}(", f"def other_{method}("))
    with pytest.raises(SystemExit) as stop:
        script.main(arguments(INSTANT | {"task": "parrot"}))
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --task parrot: ") and error.count("\n") == 1
    assert f"parrot.py is no task, for it does not define {method}" in error


@pytest.mark.parametrize("source, words", [
    (TASK.replace("prompt_width = 6", ""), "does not define prompt_width"),
    (TASK.replace("class Parrot(Task)", "class Parrot"), "does not define one subclass"),
    (TASK + "\n\nclass Crow(Parrot):\n    pass\n", "does not define one subclass"),
    ("", "does not define one subclass")], ids=["no width", "no Task", "two", "empty"])
def test_a_file_without_one_complete_task_is_refused(script, put, capsys, source, words):
    put(source)
    with pytest.raises(SystemExit) as stop:
        script.main(arguments(INSTANT | {"task": "parrot"}))
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_the_tasks_that_there_are_are_listed_where_one_is_not(put, script, capsys):
    put(TASK)
    with pytest.raises(SystemExit):
        script.main(["--task", "chess"])
    assert "take one of arithmetic, parrot\n" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["arithmetic", "countdown", "gridworld", "lookup"])
def test_a_task_of_ours_defines_no_other_methods_by_the_names_of_a_task(name):
    """Each can be called as a method of common.Task: what it takes besides has a default."""
    task = common.find_task(name, name)
    for method, function in inspect.getmembers(common.Task, inspect.isfunction):
        if not method.startswith("_"):
            expected = list(inspect.signature(function).parameters)
            found = inspect.signature(getattr(task, method)).parameters
            assert list(found)[:len(expected)] == expected
            assert all(found[name].default is not inspect.Parameter.empty
                       for name in list(found)[len(expected):])


@pytest.mark.parametrize("name", ["arithmetic", "countdown", "gridworld", "lookup"])
def test_a_correct_answer_in_its_block_is_right_whatever_the_task(script, load_task, name):
    task = load_task(script.Config(task=name))
    for problem in common.sample_problems(task, 20, 0):
        assert problem.task == name
        if problem.answer:
            text = f"<answer>{problem.answer}</answer>"
            assert task.is_correct(problem, task.verify(problem, text))
