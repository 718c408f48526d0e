"""Runs of a second, in which something is learned, and how two of them are compared. Fixtures and
helpers; no tests."""
import contextlib
import dataclasses
import hashlib
import importlib
import itertools
import json
import random
import re
import signal
import sys
from pathlib import Path

import pytest
import torch

import common

# The base knows what an answer looks like, so that some groups have signal.
SMALL = {"device": "cpu", "num_threads": 1, "operands": "2", "hidden_size": 32,
         "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32,
         "base_steps": 150, "base_batch_size": 16, "num_prompts": 4, "num_generations": 8,
         "max_completion_length": 16, "num_mini_batches": 1, "num_eval_problems": 16,
         "num_eval_samples": 2, "eval_steps": 2, "save_steps": 3, "max_steps": 10}

# All that has a state between steps, or could have. Some scripts have several ways to learn.
STATEFUL = {"num_mini_batches": 2, "num_iterations": 2, "dynamic_sampling": 8, "beta": 0.05,
            "warmup_steps": 7}
BONUS = {"entropy_coef": 0.01, "entropy_decay_steps": 8}
EVERYTHING = {
    "reinforce": [STATEFUL | BONUS | {"baseline": "optimal", "view": "token", "gamma": 0.9}],
    "ppo": [STATEFUL | BONUS | {
                "trust_region": "penalty", "target_kl": 0.001, "kl_target": 0.001,
                "nll_coef": 0.1, "critic_pretrain_steps": 2, "length_adaptive": True,
                "critic_lam": 1},
            {"trust_region": "trpo", "kl_target": 0.001, "beta": 0.05}],
    "grpo": [STATEFUL | BONUS | {"overlong_buffer": 8, "sampler_lag": 2}],
    "gspo": [STATEFUL | BONUS | {"overlong_buffer": 8, "sampler_lag": 4,
                                 "importance_sampling_correction": "truncate"}],
    "dpo": [STATEFUL | {"online": True}, {"loss_type": "ipo", "num_mini_batches": 3}]}

# A run that takes no time, and learns nothing.
INSTANT = {"device": "cpu", "num_threads": 1, "operands": "2", "hidden_size": 16,
           "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16,
           "base_steps": 0, "num_prompts": 2, "num_generations": 2, "max_completion_length": 4,
           "num_eval_problems": 4, "num_eval_samples": 2, "eval_steps": 1, "max_steps": 1}


# ---- flags -----------------------------------------------------------------------------------

# name -> field of the flags that every script has
COMMON_FIELDS = {field.name: field for field in dataclasses.fields(common.Config)}


def own_fields(script):
    """The flags that only this script has, or that it has changed: name -> field."""
    names = script.Config.__annotations__
    return {field.name: field for field in dataclasses.fields(script.Config)
            if field.name in names}


def all_fields(script):
    """All flags of a script: name -> field."""
    return COMMON_FIELDS | own_fields(script)


def other_value(field):
    """A value of a flag that is not its default, nor that of INSTANT. -> str"""
    if field.name in ("task", "operands", "device"):
        return {"task": "arithmetic,arithmetic", "operands": "7", "device": "cuda"}[field.name]
    if field.type is bool:
        return str(not field.default)
    if field.metadata["choices"]:
        return [word for word in field.metadata["choices"] if word != field.default][-1]
    return "other" if field.type is str else "77"


def arguments(flags):
    """A dict of flags as the words of a command line."""
    words = []
    for name, value in flags.items():
        words += [f"--{name}", str(value)]
    return words


def begun_from(folder, flags):
    """The flags of a run that begins with the policy of another one: it makes no base."""
    idle = ("base_steps", "base_batch_size")
    return {name: value for name, value in flags.items() if name not in idle} | {
        "init_from": folder}


# ---- what a run leaves -----------------------------------------------------------------------

def load(path):
    """The tensors and plain values of a file."""
    return torch.load(path, weights_only=True)


def policy_of(folder):
    """The weights in the checkpoint of a run."""
    return load(folder / "checkpoint.pt")["policy"]


def lines(path):
    """The records of a log."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def steps(folder):
    """The lines of metrics.jsonl, one for each step."""
    return lines(folder / "metrics.jsonl")


def read_summary(folder):
    return json.loads((folder / "summary.json").read_text())


def script_of(folder):
    """The file name of the script that made the run."""
    return json.loads((Path(folder) / "config.json").read_text())["script"]


def contents(folder="."):
    """Every path below a folder, with its bytes and the time of its last change."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        content = path.read_bytes() if path.is_file() else None
        found[str(path)] = (content, path.stat().st_mtime_ns)
    return found


# ---- how two runs differ ---------------------------------------------------------------------

def leaves(value, path=""):
    """A nest of dicts and lists as {path: value}. A tensor becomes a hash: equal is bit for bit."""
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)
    elif isinstance(value, torch.Tensor):
        digest = hashlib.sha256(value.numpy().tobytes()).hexdigest()
        return {path: (value.dtype, value.shape, digest[:16])}
    else:
        return {path: value}
    found = {}
    for key, part in parts:
        found |= leaves(part, f"{path}/{key}")
    return found


def outcome(folder):
    """All that a run leaves, except how long it took and where. -> {path: value}"""
    folder = Path(folder)
    checkpoint = load(folder / "checkpoint.pt")
    sizes = checkpoint.pop("logs")
    assert sizes == {name: (folder / name).stat().st_size
                     for name in ("metrics.jsonl", "samples.jsonl", "greedy.jsonl")}
    everything = leaves({
        "checkpoint": checkpoint,
        "base": load(folder / "base.pt"),
        "metrics": lines(folder / "metrics.jsonl"),
        "samples": lines(folder / "samples.jsonl"),
        "greedy": lines(folder / "greedy.jsonl"),
        "evaluation": lines(folder / "evaluation.jsonl"),
        "summary": read_summary(folder),
        "config": json.loads((folder / "config.json").read_text())["config"],
        "script": (folder / script_of(folder)).read_text()})
    time_or_place = re.compile(r"/(step_time|seconds\w*|output_dir)$")
    return {path: value for path, value in everything.items() if not time_or_place.search(path)}


def difference(one, other):
    """The paths at which two outcomes differ."""
    return sorted(path for path in one.keys() | other.keys() if one.get(path) != other.get(path))


def difference_but_for_flags(one, other):
    """The paths at which two outcomes differ, but for the config of the run."""
    return [path for path in difference(one, other) if not path.startswith("/config")]


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
        patch.setitem(sys.modules, "tools.report", None)
        yield
    signal.signal(signal.SIGINT, on_ctrl_c)


def resume(folder, **flags):
    """Go on with a run. -> its summary"""
    script = importlib.import_module(script_of(folder).removesuffix(".py"))
    return script.main(arguments({"resume_from_checkpoint": folder} | flags))


def shuffle_the_global_generators(seed):
    """What a run draws must not depend on them: another process has others."""
    torch.manual_seed(seed)
    random.seed(seed)


@pytest.fixture(scope="session")
def work(tmp_path_factory):
    """The folder with runs/base, so that the base is made once."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture
def at_work_folder(work):
    """The test is at work there."""
    with at_work(work):
        yield work


@pytest.fixture(scope="session")
def whole_runs():
    """What `whole` has made: name of a script -> folder."""
    return {}


@pytest.fixture
def whole(script, work, whole_runs):
    """The folder of an uninterrupted run of 10 steps."""
    name = script.__name__
    if name not in whole_runs:
        with at_work(work):
            script.main(arguments(SMALL | {"output_dir": f"whole-{name}"}))
        whole_runs[name] = work / f"whole-{name}"
    return whole_runs[name]


@pytest.fixture
def new_run(script, tmp_path):
    """new_run(**flags): the folder of a new run, run0, run1 and so on in the folder of the test."""
    numbers = itertools.count()

    def run(init_from=None, **flags):
        folder = tmp_path / f"run{next(numbers)}"
        small = begun_from(init_from, SMALL) if init_from else SMALL
        script.main(arguments(small | {"output_dir": folder} | flags))
        return folder
    return run
