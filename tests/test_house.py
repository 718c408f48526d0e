"""The house: imports go down from floor to floor, and what is installed is one folder that runs."""
import ast
import os
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest
from conftest import ROOT, SCRIPTS
from small_runs import INSTANT, arguments

# From the bottom to the top; a folder that is not named does not exist.
FLOORS = [["common"], ["nano", *SCRIPTS, "tasks", "kernels"], ["report"], ["examples"],
          ["pretrained", "learn"], ["lab"]]


def test_imports_go_down_from_floor_to_floor_and_in_no_circle():
    floors = {name: number for number, names in enumerate(FLOORS) for name in names}
    paths = [path for path in ROOT.glob("**/*.py")
             if path.relative_to(ROOT).parts[0].removesuffix(".py") in floors]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"):
               path for path in paths}
    graph = {}
    for module, path in modules.items():
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        assert "tests" not in {name.split(".")[0] for name in names}, module
        graph[module] = names & modules.keys()
        for other in graph[module]:
            assert floors[other.split(".")[0]] <= floors[module.split(".")[0]], (module, other)
    TopologicalSorter(graph).prepare()                  # CycleError names a circle


def test_what_is_installed_is_one_folder_whose_commands_start_resume_ask_and_report(tmp_path):
    pytest.importorskip("hatchling", reason="needs hatchling, which builds the wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path],
                   cwd=ROOT, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
                    "--target", tmp_path / "site", wheel], check=True)
    own = {path.name for path in (tmp_path / "site").iterdir()} - {"bin"}
    assert own == {"readable_rl", f"readable_rl-{wheel.name.split('-')[1]}.dist-info"}
    words = arguments(INSTANT | {"output_dir": "run"})
    for command in (["grpo", *words], ["grpo", "--resume_from_checkpoint", "run"],
                    ["report.ask", "run", "(3+4)="], ["report.page", "run"], ["learn.practice"]):
        done = subprocess.run([sys.executable, "-m", "readable_rl", *command], cwd=tmp_path,
                              text=True, capture_output=True,
                              env=os.environ | {"PYTHONPATH": str(tmp_path / "site")})
        assert done.returncode == 0, done.stderr
        assert command[0] != "grpo" or "  readable-rl report.ask" in done.stdout
