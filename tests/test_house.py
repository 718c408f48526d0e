"""The equations of a script are tagged, imports run one way, and the tasks and algorithm of
docs/extending.md work."""
import ast
import importlib
import random
import re
import shlex
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPTS
from small_runs import INSTANT, SMALL, arguments, lines, load, read_summary, steps

import common
import grpo
import tasks
from vectors.edits import replace_once


@pytest.mark.parametrize("script", [
    *SCRIPTS, "examples.distill", "examples.trpo", "examples.turns"], indirect=True)
def test_every_equation_is_stated_once_and_tagged_where_it_is_computed(script):
    """The docstring states an equation, or a comment above the line that computes it."""
    source = Path(script.__file__).read_text()
    stated = re.findall(r"\((\d+)\)(?:   \S.*)?$", script.__doc__, re.MULTILINE)
    above = re.findall(r"^ +# \S.* \((\d+)\)\n(?=((?:.*\n){,9}))", source, re.MULTILINE)
    assert all(f"eq. ({number})" in below for number, below in above)
    stated += [number for number, _ in above]
    assert sorted(map(int, stated)) == [*range(1, len(stated) + 1)] and stated
    assert set(stated) == set(re.findall(r"eq\. \((\d+)\)", source))
    assert set(re.findall(r"\((\d\d?)\)", script.__doc__)) <= set(stated)       # e.g. "as in (5)"


def test_a_file_imports_only_files_of_its_own_folder_and_of_those_before_it():
    floors = ["common", "plumbing", "kernels", "tasks", "report", "reinforce", "ppo", "grpo",
              "gspo", "dpo", "nano", "real", "vectors", "examples", "engines", "measuring",
              "learn", "lab"]
    for place, floor in enumerate(floors):
        for path in [*ROOT.glob(f"{floor}.py"), *ROOT.glob(f"{floor}/**/*.py")]:
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [
                    one.name for one in node.names] if isinstance(node, ast.Import) else []
                assert not {name.split(".")[0] for name in names} & {*floors[place + 1:]}, path


def test_nothing_is_found_by_a_module_or_by_looking_for_a_method():
    """common.load_task and plumbing.parse_flags import tasks.flags; each script has its kernels
    and its observers in sight; a run draws its curve at the end, and imports the tracker it names.
    The hooks of a task are declared."""
    allowed = {"common.py": 4, "plumbing.py": 3, "tasks/flags.py": 1, "report/observers.py": 2,
               "report/page.py": 1} | {f"{name}.py": 3 for name in SCRIPTS}
    for path in [*ROOT.glob("*.py"), *(path for folder in ("tasks", "report", "kernels")
                                       for path in ROOT.glob(f"{folder}/*.py"))]:
        name, text = path.relative_to(ROOT).as_posix(), path.read_text("utf-8")
        found = re.findall(r"\boptional\(|\bimport_module\(|sys\.modules\[type", text)
        assert len(found) == allowed.get(name, 0), name
        assert name == "real.py" or not re.search(r"hasattr\((part|module|task), \"", text), name


MY_GPT = """
import grpo
class MyGPT(grpo.GPT):
    pass
"""


def test_a_gpt_of_another_file_plays_with_an_environment(own_folder, monkeypatch):
    found = {"__name__": "somewhere.else"}
    exec(MY_GPT, found)
    monkeypatch.setattr(grpo, "GPT", found["MyGPT"])
    grpo.main(arguments(INSTANT | {"task": "lookup", "max_completion_length": 40}))
    assert lines("runs/grpo-lookup-s0/samples.jsonl")


def test_a_task_of_common_alone_runs_with_observers(own_folder, monkeypatch):
    """It may be written into a copy of a script."""
    monkeypatch.setattr(common, "load_task", lambda cfg, verify: common.Arithmetic(verify, 2, 2))
    grpo.main(arguments(INSTANT))
    summary = read_summary("runs/grpo-arithmetic-s0")
    assert summary["steps"] == 1 and "pass@1" in summary["trained"]


def test_a_reward_model_is_fitted_without_report(own_folder, monkeypatch, capsys):
    optional = common.optional
    monkeypatch.setattr(common, "optional", lambda name: None if name.startswith("report")
                        else optional(name))
    grpo.main(arguments(SMALL | {"reward": "model", "max_steps": 1}))
    assert "reward model: " in capsys.readouterr().out
    assert "reward_model" in load("runs/grpo-arithmetic-s0/checkpoint.pt")


# ---- the code in docs/extending.md -----------------------------------------------------------

PAGE = (ROOT / "docs/extending.md").read_text("utf-8")
PARTS = re.split("^## ", PAGE, flags=re.M)[1:]
[TASK], [ALGORITHM] = ([part for part in PARTS if part.startswith(f"Your own {word}\n")]
                       for word in ("task", "algorithm"))
SOURCE, TURNS = re.findall(r"^```python\n(.*?)^```$", TASK, re.S | re.M)
TINY = arguments({name: value for name, value in INSTANT.items() if name != "task"})


def test_the_game_of_the_page_can_be_won_and_its_demonstrations_are_games():
    found = {"__name__": "tasks.nim"}
    exec(TURNS, found)
    task = found["Nim"](None)
    problem = task.sample(random.Random(0))._replace(prompt="9 matches")
    for game, end in (("2.-2;2.-1;2.", "won"), ("2.-2;3.", "lost"), ("4.", "lost"), ("1.", "-3;")):
        assert task.respond(problem, game) == end
        assert task.verify(problem, game) == (end == "won")
    one = task.demonstration(random.Random(0), "forum")
    assert task.play(one, one.completion)[-1].response in ("won", "lost")


def test_your_own_tasks_and_your_own_algorithm_run(own_folder, monkeypatch):
    monkeypatch.syspath_prepend(own_folder)
    monkeypatch.setattr(tasks, "__file__", str(own_folder / "tasks/__init__.py"))
    monkeypatch.setattr(tasks, "__path__", [str(own_folder / "tasks"), *tasks.__path__])
    name, game = re.findall(r"as\s+tasks/(\w+)\.py:", TASK)
    Path("tasks").mkdir()
    Path(f"tasks/{game}.py").write_text(TURNS)
    Path(f"tasks/{name}.py").write_text(SOURCE)
    removed, added = re.search(r"^-(.*)\n\+(.*)$", ALGORITHM, re.M).groups()
    Path("mine.py").write_text(replace_once((ROOT / "grpo.py").read_text(), removed, added))
    command = re.search(rf"^python grpo.py (.*--task {name})$", TASK, re.M)[1]
    importlib.import_module("mine").main([*shlex.split(command), *TINY])
    folder = Path(f"runs/mine-{name}-s0")
    assert read_summary(folder)["steps"] == 1
    assert [group["answer"] for group in lines(folder / "samples.jsonl")]
    [played] = re.findall(rf"^python examples/turns.py (.*--task {game})$", TASK, re.M)
    importlib.import_module("examples.turns").main([*shlex.split(played), *TINY])
    [step] = steps(f"runs/turns-{game}-s0")
    assert step["turns/mean"] >= 1 and step["turns/shared_states"] == 1     # all in the first state
    for module in ("mine", f"tasks.{name}", f"tasks.{game}"):
        del sys.modules[module]
