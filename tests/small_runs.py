"""Runs of a second, in which something is learned, and how two of them are compared. Fixtures and
helpers; no tests."""
import contextlib
import hashlib
import importlib
import itertools
import json
import re
import signal
import sys
from pathlib import Path

import pytest
import torch

import common

# The base knows what an answer looks like, so that some groups have signal.
SMALL = {"device": "cpu", "task": "arithmetic:2", "hidden_size": 32,
         "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32,
         "base_steps": 150, "base_batch_size": 16, "num_prompts": 4, "num_generations": 8,
         "max_completion_length": 16, "num_mini_batches": 1, "num_eval_problems": 16,
         "num_eval_samples": 2, "eval_steps": 2, "save_steps": 3, "max_steps": 10}

# A run that takes no time, and learns nothing.
INSTANT = SMALL | {"hidden_size": 16, "intermediate_size": 16, "base_steps": 0, "num_prompts": 2,
                   "num_generations": 2, "max_completion_length": 4, "num_eval_problems": 4,
                   "eval_steps": 1, "max_steps": 1}


def arguments(flags):
    """A dict of flags as the words of a command line."""
    words = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", str(value)]
    return words


# ---- what a run leaves, and how two runs differ ----------------------------------------------

def load(path):
    """The tensors and plain values of a file."""
    return torch.load(path, weights_only=True)


def policy_of(folder):
    """The weights in the checkpoint of a run."""
    return load(Path(folder, "checkpoint.pt"))["policy"]


def lines(path):
    """The records of a log."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def steps(folder):
    """The lines of metrics.jsonl, one for each step."""
    return lines(Path(folder, "metrics.jsonl"))


def read_summary(folder):
    return json.loads(Path(folder, "summary.json").read_text())


def leaves(value, path=""):
    """A nest of dicts and lists as {path: value}. A tensor becomes a hash: equal is bit for bit."""
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
    """All that a run leaves, except how long it took and where. -> {path: value}"""
    folder = Path(folder)
    checkpoint = load(folder / "checkpoint.pt")
    logs = [path for path in folder.glob("*.jsonl") if path.name != "evaluation.jsonl"]
    checkpoint["logs"].pop("evaluation.jsonl", None)        # which is written behind the checkpoint
    assert checkpoint.pop("logs") == {path.name: path.stat().st_size for path in logs}
    record = json.loads((folder / "config.json").read_text())
    everything = leaves({
        "checkpoint": checkpoint, "base": load(folder / "base.pt"), "summary": read_summary(folder),
        "config": record["config"], "script": (folder / record["script"]).read_text(),
        "logs": {path.name: lines(path) for path in folder.glob("*.jsonl")}})
    time_or_place = re.compile(r"/(step_time|seconds\w*|output_dir)$")
    return {path: value for path, value in everything.items() if not time_or_place.search(path)}


def difference(one, other):
    """The paths at which two outcomes differ."""
    return sorted(path for path in one.keys() | other.keys() if one.get(path) != other.get(path))


def changed_weights(one, other):
    """The names of the weights that differ in two state dicts."""
    return difference(leaves(one), leaves(other))


# ---- running ---------------------------------------------------------------------------------

@contextlib.contextmanager
def at_work(folder):
    """In the folder, without pictures, which take longer than these runs; puts Ctrl-C back."""
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setitem(sys.modules, "report.page", None)
        yield
    signal.signal(signal.SIGINT, on_ctrl_c)


def resume(folder, **flags):
    """Go on with a run. -> its summary"""
    script, _ = common.read_config(folder)
    main = importlib.import_module(script.removesuffix(".py")).main
    return main(arguments({"resume_from_checkpoint": folder} | flags))


@pytest.fixture(scope="session")
def work(tmp_path_factory):
    """The folder with runs/base, so that the base is made once."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture
def at_work_folder(work):
    """The test is at work there."""
    with at_work(work):
        yield work


@pytest.fixture
def whole(script, work):
    """The folder of an uninterrupted run of 10 steps; each script makes it once."""
    folder = work / f"whole-{script.__name__}"
    if not folder.exists():
        with at_work(work):
            script.main(arguments(SMALL | {"output_dir": folder}))
    return folder


@pytest.fixture
def new_run(script, tmp_path):
    """new_run(**flags): the folder of a new run, run0, run1 and so on in the folder of the test."""
    numbers = itertools.count()

    def run(**flags):
        folder = tmp_path / f"run{next(numbers)}"
        script.main(arguments(SMALL | {"output_dir": folder} | flags))
        return folder
    return run
