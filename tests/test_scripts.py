"""A script as a file: what it imports, that to import it does nothing, and that its equations are
tagged."""
import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from conftest import ROOT, SCRIPTS, every_script
from small_runs import contents

IMPORT = """
import json, os, random, sys, time, threading, signal
import torch
torch.set_num_threads(3)


def state():
    return [random.getstate(), torch.get_rng_state().tolist(), torch.get_num_threads(),
            torch.get_default_dtype(), torch.is_grad_enabled(), threading.active_count(),
            signal.getsignal(signal.SIGINT), dict(os.environ), os.getcwd(), os.listdir()]


before = state()
seconds = {}
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    start = time.process_time()                     # not of others, who may use the machine
    __import__(name)
    seconds[name] = time.process_time() - start
    assert state() == before, name
print(json.dumps({"seconds": seconds, "drew": "matplotlib" in sys.modules}))
"""


def test_importing_a_script_is_quick_and_has_no_side_effects(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    slowest = []
    for _ in range(3):                              # one run alone may be held up by the machine
        done = subprocess.run(
            [sys.executable, "-B", "-c", IMPORT, ROOT, *SCRIPTS], text=True, capture_output=True,
            timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0 and done.stderr == "", done.stderr
        result = json.loads(done.stdout)            # it has printed nothing else
        assert not result["drew"]
        assert contents() == {}
        slowest.append(max(result["seconds"].values()))
        if slowest[-1] < 0.6:
            break
    assert min(slowest) < 0.6


def test_any_module_of_tasks_can_be_the_first_that_a_process_imports(warm_python):
    names = ["common", "kernels", "tasks"]
    names += [f"tasks.{path.stem}" for path in (ROOT / "tasks").glob("[a-z]*.py")]
    assert {"tasks.mix", "tasks.rewards", "tasks.preferences"} < set(names)
    for name in names:
        done = warm_python.run("-c", f"import {name}", cwd=ROOT)
        assert (done.returncode, done.stderr) == (0, ""), name


@every_script
def test_a_script_imports_common_and_what_is_in_tasks_and_kernels_but_no_other_script(script):
    names = set()
    for node in ast.walk(ast.parse(Path(script.__file__).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    ours = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert {name.split(".")[0] for name in names} & ours <= {"common", "tasks", "kernels"}
    assert "common" in names


@every_script
def test_every_equation_in_the_docstring_is_tagged_in_the_code_and_vice_versa(script):
    stated = re.findall(r"\((\d+)\)(?:   \S.*)?$", script.__doc__, re.MULTILINE)
    tagged = re.findall(r"eq\. \((\d+)\)", Path(script.__file__).read_text())
    numbers = [str(n) for n in range(1, len(stated) + 1)]
    assert stated == numbers and numbers
    assert set(stated) == set(tagged)
    assert set(re.findall(r"\((\d\d?)\)", script.__doc__)) == set(stated)       # "as in (5)"
