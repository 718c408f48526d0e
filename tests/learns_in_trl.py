"""Run the commands of docs/engines.md in a copy of the checkout: make learns-in-trl.
A loss of your own learns here and in TRL, until nine of ten outputs are right."""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/engines.md").read_text("utf-8")
_, SOURCE = re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M)
COMMANDS = [command for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.S | re.M)
            for command in block.replace("\\\n", "").splitlines()]


def test_the_commands_of_the_page_run_and_the_loss_learns(tmp_path, monkeypatch):
    shutil.copytree(ROOT, tmp_path, dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"))
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    printed = {}
    for command in COMMANDS:
        print(command, flush=True)
        done = subprocess.run(command, shell=True, cwd=tmp_path, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        assert done.returncode == 0, done.stdout
        printed[command.split()[2]] = done.stdout
    rewards = [float(x) for x in re.findall(r"'reward': '([0-9.]+)'", printed["engines.trl"])]
    assert rewards[0] < 0.5 and min(rewards[-3:]) > 0.9
    assert "right: 3 of 3" in printed["vectors"]
    assert float(re.findall("greedy ([0-9.]+)", printed["engines.here"])[-1]) > 0.9
