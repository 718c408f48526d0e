"""docs/extending.md, its task and its algorithm, word for word in a copy of the repository. That a
script and common.py run alone is in test_cli.py."""
import re
import shlex
import shutil
import subprocess
import sys

from conftest import ROOT
from small_runs import INSTANT, arguments, lines, read_summary

PAGE = (ROOT / "docs/extending.md").read_text()
TASK, _, ALGORITHM, _ = re.split("^## ", PAGE, flags=re.M)[1:]
SOURCE = re.search(r"^```python\n(.*?)^```$", TASK, re.S | re.M)[1]
TINY = arguments({name: value for name, value in INSTANT.items() if name != "task"})


def test_your_own_task_and_your_own_algorithm_run_and_the_difference_is_your_paper(tmp_path):
    """In a copy of the repository."""
    for name in ("tasks", "report", "learn", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "report.py")      # pictures take long
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for path in [*ROOT.glob("*.py"), ROOT / "Makefile", ROOT / "pyproject.toml"]:
        shutil.copy(path, tmp_path)
    name = re.search(r"tasks/(\w+)\.py", TASK)[1]
    (tmp_path / f"tasks/{name}.py").write_text(SOURCE)
    removed, added = re.search(r"^-(.*)\n\+(.*)$", ALGORITHM, re.M).groups()
    source = (tmp_path / "grpo.py").read_text()
    assert source.count(removed) == 1
    (tmp_path / "mine.py").write_text(source.replace(removed, added))
    sync = tmp_path / "learn/sync.py"
    sync.write_text(sync.read_text().replace('"dpo.py")', '"dpo.py", "mine.py")'))

    command = re.search(rf"^python grpo.py (.*--task {name})$", TASK, re.M)[1]
    subprocess.run([sys.executable, "mine.py", *shlex.split(command), *TINY], cwd=tmp_path,
                   check=True)
    folder = tmp_path / f"runs/mine-{name}-s0"
    assert read_summary(folder)["steps"] == 1
    assert [group["answer"] for group in lines(folder / "samples.jsonl")]

    def make(*words):
        return subprocess.run(["make", "--silent", f"PYTHON={sys.executable}", *words],
                              cwd=tmp_path, text=True, capture_output=True, check=True).stdout
    shown = [line for line in make("diff", "A=grpo", "B=mine").splitlines() if line[0] in "+-"]
    assert shown == [f"- {removed}", f"+ {added}"]
    mine = (tmp_path / "mine.py").read_text()
    (tmp_path / "mine.py").write_text(mine.replace("VOCAB_SIZE = 320", "VOCAB_SIZE = 384"))
    assert "mine.py: the machinery" in make("sync", "FROM=grpo.py")
    assert (tmp_path / "mine.py").read_text() == mine
