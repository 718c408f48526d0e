"""A script as a file: what it imports, that to import it does nothing, and that its equations are
tagged."""
import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPTS, every_script
from small_runs import contents

IMPORT = """
import json, os, random, sys, threading, signal
import torch
torch.set_num_threads(3)


def state():
    return [random.getstate(), torch.get_rng_state().tolist(), torch.get_num_threads(),
            torch.get_default_dtype(), torch.is_grad_enabled(), threading.active_count(),
            signal.getsignal(signal.SIGINT), dict(os.environ), os.getcwd(), os.listdir()]


before = state()
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    __import__(name)
    assert state() == before, name
print(json.dumps(sorted({"matplotlib", "transformers", "report", "tasks"} & sys.modules.keys())))
"""


def test_importing_a_script_has_no_side_effects_and_reads_nothing_that_few_runs_need(
        tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = subprocess.run([sys.executable, "-B", "-c", IMPORT, ROOT, *SCRIPTS, "nano"], text=True,
                          capture_output=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert json.loads(done.stdout) == []                # it has printed nothing else
    assert contents() == {}


@pytest.mark.parametrize("name", [*SCRIPTS, "nano"])
def test_a_script_imports_common_and_no_other_file_of_ours_and_nano_not_even_this(name):
    names = set()
    for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    ours = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert names & ours == ({"common"} if name in SCRIPTS else set())


@every_script
def test_every_equation_in_the_docstring_is_tagged_in_the_code_and_vice_versa(script):
    stated = re.findall(r"\((\d+)\)(?:   \S.*)?$", script.__doc__, re.MULTILINE)
    tagged = re.findall(r"eq\. \((\d+)\)", Path(script.__file__).read_text())
    numbers = [str(n) for n in range(1, len(stated) + 1)]
    assert stated == numbers and numbers
    assert set(stated) == set(tagged)
    assert set(re.findall(r"\((\d\d?)\)", script.__doc__)) == set(stated)       # "as in (5)"
