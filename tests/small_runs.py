"""Runs that learn something within a second, and functions that compare two of them. Fixtures and
helpers; no tests."""
import contextlib
import hashlib
import importlib
import itertools
import json
import multiprocessing
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ROOT

import plumbing

# The base has learned the form of an answer, so some groups have signal.
SMALL = {"device": "cpu", "task": "arithmetic:2", "hidden_size": 32,
         "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32,
         "base_steps": 150, "base_batch_size": 16, "num_prompts": 4, "num_generations": 8,
         "max_completion_length": 16, "num_mini_batches": 1, "num_eval_problems": 16,
         "num_eval_samples": 2, "eval_steps": 2, "save_steps": 3, "max_steps": 10}

# A run that takes almost no time, and learns nothing.
INSTANT = SMALL | {"hidden_size": 16, "intermediate_size": 16, "base_steps": 0, "num_prompts": 2,
                   "num_generations": 2, "max_completion_length": 4, "num_eval_problems": 4,
                   "eval_steps": 1, "max_steps": 1}


def arguments(flags):
    """Convert a dict of flags to the words of a command line. -> list"""
    words = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", str(value)]
    return words


# ---- the files a run writes, and how two runs differ -----------------------------------------

def load(path):
    """Load the tensors and plain values of a file."""
    return torch.load(path, weights_only=True)


def policy_of(folder):
    """Load the policy's weights from the checkpoint of a run."""
    return load(Path(folder, "checkpoint.pt"))["policy"]


def lines(path):
    """Read the records of a log. -> list of dicts"""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def steps(folder):
    """Read the lines of metrics.jsonl, but not that of the base. -> list of dicts"""
    return [line for line in lines(Path(folder, "metrics.jsonl")) if line["step"] > 0]


def read_summary(folder):
    return json.loads(Path(folder, "summary.json").read_text())


def leaves(value, path=""):
    """Flatten nested dicts and lists to {path: value}. Tensors become hashes of all their bits."""
    if isinstance(value, torch.Tensor):
        digest = hashlib.sha256(value.cpu().numpy().tobytes()).hexdigest()
        return {path: (value.dtype, value.shape, digest[:16])}
    if not isinstance(value, (dict, list, tuple)):
        return {path: value}
    found = {}
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        found |= leaves(part, f"{path}/{key}")
    return found


def outcome(folder):
    """Read everything that a run writes, except for its times and its folder. -> {path: value}"""
    folder = Path(folder)
    checkpoint = load(folder / "checkpoint.pt")
    logs = [path for path in folder.glob("*.jsonl") if path.name != "evaluation.jsonl"]
    checkpoint["logs"].pop("evaluation.jsonl", None)        # is written after the checkpoint
    sizes = {path.name: path.stat().st_size for path in logs}
    last_line = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)[-1]
    sizes["metrics.jsonl"] -= len(last_line)                # a resumed run writes it again
    assert checkpoint.pop("logs") == sizes
    record = json.loads((folder / "config.json").read_text())
    everything = leaves({
        "checkpoint": checkpoint, "base": load(folder / "base.pt"), "summary": read_summary(folder),
        "config": record["config"], "script": (folder / record["script"]).read_text(),
        "logs": {path.name: lines(path) for path in folder.glob("*.jsonl")}})
    time_or_place = re.compile(r"/(step_time|seconds\w*|output_dir)$")
    return {path: value for path, value in everything.items() if not time_or_place.search(path)}


def difference(one, other):
    """List the paths at which two outcomes differ."""
    return sorted(path for path in one.keys() | other.keys() if one.get(path) != other.get(path))


def changed_weights(one, other):
    """List the names of the weights that differ between two state dicts."""
    return difference(leaves(one), leaves(other))


# ---- running ---------------------------------------------------------------------------------

@contextlib.contextmanager
def at_work(folder):
    """Work in the folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield


def resume(folder, **flags):
    """Resume a run. -> its summary"""
    script, _ = plumbing.read_config(folder)
    main = importlib.import_module(script.removesuffix(".py")).main
    return main(arguments({"resume_from_checkpoint": folder} | flags))


def mortal(function, number, die, file=""):
    """Make a function that calls die(*args) before one of its calls: that with this number among
    those with an argument whose name ends like `file`."""
    calls = itertools.count(1)

    def called(*args, **options):
        names = (str(getattr(value, "name", value)) for value in args)
        if any(name.endswith(file) for name in names) and next(calls) == number:
            die(*args)
        return function(*args, **options)
    return called


def child(function):
    """Call a function in a process of its own. -> its exit code"""
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    process.join()
    return process.exitcode


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The folder of a run of grpo.py, which is made once, and which no test may change."""
    folder = tmp_path_factory.mktemp("finished")
    with at_work(folder):
        importlib.import_module("grpo").main(arguments(INSTANT | {"output_dir": "run"}))
    return folder / "run"


@pytest.fixture
def run(finished, tmp_path):
    """A copy of the finished run in the test's folder, which a test may damage."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture(scope="session")
def work(tmp_path_factory):
    """A folder that all tests share, so its runs/base is made only once."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture
def at_work_folder(work, monkeypatch):
    """Run the test in the folder `work`."""
    monkeypatch.chdir(work)
    return work


@pytest.fixture
def copied(tmp_path):
    """A folder with copies of grpo.py and all that it uses, to be edited and run in processes."""
    for name in ("common.py", "plumbing.py", "grpo.py", "tasks", "report", "kernels"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def own_bases(own_folder):
    """Work in an empty folder whose runs/base no other test uses. -> runs/base"""
    folder = own_folder / "runs/base"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def whole(script, work):
    """The folder of an uninterrupted run of 10 steps, which is made once for each script."""
    folder = work / f"whole-{script.__name__}"
    if not folder.exists():
        with at_work(work):
            script.main(arguments(SMALL | {"output_dir": folder}))
    return folder


@pytest.fixture
def new_run(script, tmp_path):
    """new_run(**flags): makes a run in the test's folder: run0, run1 and so on. -> its folder"""
    numbers = itertools.count()

    def run(**flags):
        folder = tmp_path / f"run{next(numbers)}"
        script.main(arguments(SMALL | {"output_dir": folder} | flags))
        return folder
    return run
