"""The equations of a script are tagged, and the tasks and algorithm of docs/extending.md work."""
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPTS
from small_runs import INSTANT, arguments, lines, read_summary


@pytest.mark.parametrize("script", [
    *SCRIPTS, "examples.distill", "examples.trpo", "examples.turns"], indirect=True)
def test_every_equation_in_the_docstring_is_tagged_in_the_code_and_vice_versa(script):
    stated = re.findall(r"\((\d+)\)(?:   \S.*)?$", script.__doc__, re.MULTILINE)
    tagged = re.findall(r"eq\. \((\d+)\)", Path(script.__file__).read_text())
    numbers = [str(n) for n in range(1, len(stated) + 1)]
    assert stated == numbers and numbers
    assert set(stated) == set(tagged)
    assert set(re.findall(r"\((\d\d?)\)", script.__doc__)) == set(stated)       # e.g. "as in (5)"


# ---- the code in docs/extending.md -----------------------------------------------------------

PAGE = (ROOT / "docs/extending.md").read_text()
TASK, _, _, ALGORITHM, _ = re.split("^## ", PAGE, flags=re.M)[1:]
SOURCE, TURNS = re.findall(r"^```python\n(.*?)^```$", TASK, re.S | re.M)
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
RUN = """
import json, os, runpy, sys
for words in json.loads(sys.argv[1]):
    sys.argv = words
    sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    runpy.run_path(words[0], run_name="__main__")
"""
TINY = arguments({name: value for name, value in INSTANT.items() if name != "task"})


def test_the_game_of_the_page_can_be_won_and_its_demonstrations_are_games():
    found = {"__name__": "tasks.nim"}
    exec(TURNS, found)
    task = found["Nim"](None)
    problem = task.sample(random.Random(0))._replace(prompt="9 matches")
    for game, end in (("2.-2;2.-1;2.", "won"), ("2.-2;3.", "lost"), ("4.", "lost"), ("1.", "-3;")):
        assert task.respond(problem, game) == end
        assert task.verify(problem, game) == (end == "won")
    problems = [task.demonstration(random.Random(seed), "forum") for seed in range(300)]
    for one in problems:
        assert task.play(one, one.completion)[-1].response in ("won", "lost")
    wins = sum(task.verify(one, one.completion) for one in problems) / 300
    assert 0.1 < wins < 0.9 and max(len(one.completion) for one in problems) < 48


def test_your_own_tasks_and_your_own_algorithm_run_and_the_difference_is_your_paper(tmp_path):
    """The test works in a copy of the repository."""
    for name in ("tasks", "report", "learn", "tests", "examples"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for path in [*ROOT.glob("*.py"), ROOT / "Makefile", ROOT / "pyproject.toml"]:
        shutil.copy(path, tmp_path)
    name, game = re.findall(r"as\s+tasks/(\w+)\.py:", TASK)
    (tmp_path / f"tasks/{game}.py").write_text(TURNS)
    source = SOURCE.replace('"""', '"""\u00e9 ', 1)            # in a locale that has no accents
    (tmp_path / f"tasks/{name}.py").write_text(source, "utf-8")
    removed, added = re.search(r"^-(.*)\n\+(.*)$", ALGORITHM, re.M).groups()
    source = (tmp_path / "grpo.py").read_text()
    assert source.count(removed) == 1
    (tmp_path / "mine.py").write_text(source.replace(removed, added))
    sync = tmp_path / "learn/sync.py"
    sync.write_text(sync.read_text().replace('"dpo.py")', '"dpo.py", "mine.py")'))

    command = re.search(rf"^python grpo.py (.*--task {name})$", TASK, re.M)[1]
    [played] = re.findall(rf"^python (examples/.* --task {game})$", TASK, re.M)
    scripts = [["mine.py", *shlex.split(command), *TINY], [*shlex.split(played), *TINY]]
    subprocess.run([sys.executable, "-c", RUN, json.dumps(scripts)], cwd=tmp_path, check=True,
                   env=os.environ | ASCII)
    folder = tmp_path / f"runs/mine-{name}-s0"
    assert read_summary(folder)["steps"] == 1
    assert [group["answer"] for group in lines(folder / "samples.jsonl")]

    [step] = lines(tmp_path / f"runs/turns-{game}-s0/metrics.jsonl")
    assert step["turns/mean"] >= 1 and step["turns/shared_states"] == 1     # all in the first state

    def make(*words):
        return subprocess.run(["make", "--silent", f"PYTHON={sys.executable}", *words],
                              cwd=tmp_path, text=True, capture_output=True, check=True).stdout
    shown = [line for line in make("diff", "A=grpo", "B=mine").splitlines() if line[0] in "+-"]
    assert shown == [f"- {removed}", f"+ {added}"]
    mine = (tmp_path / "mine.py").read_text()
    (tmp_path / "mine.py").write_text(mine.replace("10_000.0 **", "20_000.0 **"))
    assert "mine.py: the machinery" in make("sync", "FROM=grpo.py")
    assert (tmp_path / "mine.py").read_text() == mine
