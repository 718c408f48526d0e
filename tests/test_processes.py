"""Two processes do what one does, and a job that was killed goes on."""
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from small_models import LIKE_SMALL, NEEDS, load_example
from small_runs import arguments, difference, lines, steps

import common

transformers = pytest.importorskip("transformers", reason=NEEDS)
from safetensors.torch import load_file  # noqa: E402  (behind the line that may skip)
from test_pretrained_runs import outcome  # noqa: E402

from tools import processes  # noqa: E402

pretrained = load_example()
FLAGS = LIKE_SMALL | {"stop_at": 2, "max_steps": 3, "num_mini_batches": 2, "eval_steps": 1,
                      "num_eval_problems": 15, "micro_batch_size": 5, "sample_batch_size": 7}

# Keeps the gradients of each optimizer step, whole.
KEEPING = """
import sys
import torch
from examples import pretrained
from tools import processes

kept = []
plain = processes.clip_gradients

def clip(weights, max_norm):
    kept.append([getattr(weight.grad, "full_tensor", weight.grad.clone)() for weight in weights])
    return plain(weights, max_norm)

processes.clip_gradients = clip
processes.start(lambda: pretrained.main(sys.argv[1:]))
torch.save(kept, f"gradients-{processes.RANK}.pt")
"""


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def job(warm_transformers, folder, *words, size=2):
    """The words of python in `size` processes that know of each other, as torchrun starts them.
    -> returncode, stdout, stderr of each"""
    port = str(free_port())
    commands = []
    for rank in range(size):
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none",
               "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
        commands.append(warm_transformers.start(*words, cwd=folder, env=env))
    ended = []
    for command in commands:
        said = command.stdout.read()
        ended.append((command.wait(), said, command.stderr()))
        command.end()
    return ended


def assert_all_ended_well(ended):
    for code, _, stderr in ended:
        assert code == 0, stderr


@pytest.fixture(scope="module")
def alone(small_llama, tmp_path_factory, warm_transformers):
    """alone(**flags): the run of one process. -> folder"""
    def make(**flags):
        folder = tmp_path_factory.mktemp("alone")
        words = arguments(FLAGS | {"model": small_llama, "output_dir": "run"} | flags)
        done = warm_transformers.run(
            "-c", KEEPING, *words, cwd=folder, env={"PYTHONPATH": str(ROOT)})
        assert done.returncode == 0, done.stderr
        return folder
    return make


def weights_of(folder):
    [path] = folder.glob("run/checkpoint-*")
    assert "lm_head.weight" not in load_file(path / "model.safetensors")    # the embedding serves
    return transformers.AutoModelForCausalLM.from_pretrained(path).state_dict()


@pytest.mark.parametrize("flags", [
    {}, {"beta": 0.1, "importance_sampling_correction": "truncate", "loss_type": "dapo"}], ids=str)
@pytest.mark.parametrize("parallel", ["replicate", "fsdp"])
def test_two_processes_make_the_steps_of_one(
        parallel, flags, alone, small_llama, warm_transformers, tmp_path):
    """Three steps, with sampling between them; 4 prompts, parts of 5 rows, so that the processes
    have unequally many, and an evaluation of 15 problems."""
    one = alone(**flags)
    words = arguments(FLAGS | {"model": small_llama, "output_dir": "run", "parallel": parallel}
                      | flags)
    ended = job(warm_transformers, tmp_path, "-c", KEEPING, *words)
    assert_all_ended_well(ended)
    assert "trained" in ended[0][1] and ended[1][1] == ""           # one of them speaks
    expected = torch.load(one / "gradients-0.pt")
    for rank in range(2):
        found = torch.load(tmp_path / f"gradients-{rank}.pt")
        assert len(found) == len(expected) == 6
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert max(gradient.abs().max() for step in expected for gradient in step) > 1e-3
    for name, weight in weights_of(one).items():
        torch.testing.assert_close(weights_of(tmp_path)[name], weight, rtol=0, atol=1e-5)
    for a, b in zip(steps(one / "run"), steps(tmp_path / "run"), strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            if isinstance(value, float) and name != "step_time":
                assert b[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    for name in ("samples", "greedy", "evaluation"):
        texts = [[json.dumps(line.get(key)) for key in ("prompt", "examples", "step", "trained")]
                 for line in lines(one / f"run/{name}.jsonl")]
        assert texts == [
            [json.dumps(line.get(key)) for key in ("prompt", "examples", "step", "trained")]
            for line in lines(tmp_path / f"run/{name}.jsonl")]


def test_with_fsdp_each_process_keeps_half_of_weights_gradients_and_optimizer(
        small_llama, warm_transformers, tmp_path):
    code = KEEPING + """
assert all(sharded) and len(sharded) > 3, sharded
found = torch.tensor([0, 0, 0])
for weight in held[0].param_groups[0]["params"]:
    state = held[0].state[weight]["exp_avg"]
    sizes = [x.to_local().numel() for x in (weight, weight.grad, state)]
    found += torch.tensor(sizes)
(open(f"sizes-{processes.RANK}", "w")).write(str(found.tolist()))
"""
    code = code.replace("kept = []", """kept = []
held = []
sharded = []                                        # after each time that it sampled
plain_rollout = pretrained.rollout

def rollout(policy, *rest):
    found = plain_rollout(policy, *rest)
    sharded.append(all(hasattr(weight, "to_local") for weight in policy.model.parameters()))
    return found

pretrained.rollout = rollout
Plain = torch.optim.AdamW
torch.optim.AdamW = lambda *args, **options: held.append(Plain(*args, **options)) or held[0]
""")
    words = arguments(FLAGS | {"model": small_llama, "output_dir": "run", "parallel": "fsdp"})
    assert_all_ended_well(job(warm_transformers, tmp_path, "-c", code, *words))
    whole = sum(gradient.numel() for gradient in torch.load(tmp_path / "gradients-0.pt")[0])
    sizes = [json.loads((tmp_path / f"sizes-{rank}").read_text()) for rank in range(2)]
    for one, other in zip(*sizes):
        assert one + other == whole
        assert 0.4 * whole < one < 0.6 * whole


def test_fsdp_works_in_one_process_too_and_in_bfloat16(small_llama, warm_transformers, tmp_path):
    words = arguments(FLAGS | {"model": small_llama, "output_dir": "run", "parallel": "fsdp",
                               "dtype": "bfloat16", "gradient_checkpointing": "true"})
    assert_all_ended_well(job(warm_transformers, tmp_path, "-c", KEEPING, *words, size=1))
    for line in steps(tmp_path / "run"):
        assert 0 < line["sampling/sampling_logp_difference/mean"] < 0.01
    assert {weight.dtype for weight in weights_of(tmp_path).values()} == {torch.float32}


def test_prompts_that_cannot_be_shared_are_refused_by_one_process_in_one_line(
        small_llama, warm_transformers, tmp_path):
    words = arguments(FLAGS | {"model": small_llama, "num_prompts": 3})
    ended = job(warm_transformers, tmp_path, ROOT / "examples/pretrained.py", *words)
    assert [code for code, _, _ in ended] == [2, 2]
    assert [said for _, said, _ in ended] == ["", ""]
    assert ended[0][2] == (
        "error: --num_prompts 3: must be a multiple of the number of processes, 2\n")
    assert ended[1][2] == f"process 1: {ended[0][2]}"       # torchrun would have ended it before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("parallel", ["replicate", "fsdp"])
def test_a_job_whose_worker_is_killed_goes_on_to_the_same_end(
        parallel, small_llama, warm_transformers, tmp_path):
    """As docs/real-models.md says: torchrun ends when a worker does, and a loop resumes the run."""
    flags = LIKE_SMALL | {"model": small_llama, "stop_at": 2, "max_steps": 24, "save_steps": 2,
                          "eval_steps": 100, "parallel": parallel, "output_dir": "run"}
    whole = tmp_path / "whole"
    whole.mkdir()
    ended = job(warm_transformers, whole, ROOT / "examples/pretrained.py", *arguments(flags))
    assert_all_ended_well(ended)

    page = (ROOT / "docs/real-models.md").read_text()
    [loop] = re.findall("^until .*", page, re.MULTILINE)
    for old, new in (("torchrun", f"{sys.executable} -m torch.distributed.run"),
                     ("_node 8", f"_node 2 --master_port {free_port()}"), ("runs/big", "run"),
                     ("examples/pretrained.py", str(ROOT / "examples/pretrained.py"))):
        assert loop.count(old) == 1
        loop = loop.replace(old, new)
    torchrun = loop.removeprefix("until ").partition(" --resume")[0].split()
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    first = subprocess.Popen([*torchrun, *arguments(flags)], cwd=tmp_path, env=env,
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = tmp_path / "run/metrics.jsonl"
    while first.poll() is None and not (log.exists() and log.read_text().count("\n") >= 5):
        time.sleep(0.005)
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    assert first.wait(timeout=60) == 1
    assert not (tmp_path / "run/summary.json").exists()
    done = subprocess.run(["bash", "-c", loop], cwd=tmp_path, env=env, capture_output=True,
                          text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert not difference(outcome(tmp_path / "run"), outcome(whole / "run"))


# ---- shares ----------------------------------------------------------------------------------

@pytest.mark.parametrize("n", [1, 2, 5, 6, 7])
def test_shares_are_equally_large_and_together_are_all_rows_in_order(n, monkeypatch):
    size = 3
    monkeypatch.setattr(processes, "WORLD_SIZE", size)
    x = 10 * torch.arange(n)
    shares = []
    for rank in range(size):
        monkeypatch.setattr(processes, "RANK", rank)
        shares.append(x[processes.share(n)])
    assert len({len(rows) for rows in shares}) == 1
    monkeypatch.setattr(processes, "gathered", lambda _: shares)
    assert torch.equal(processes.merged(shares[0], n), x)


@pytest.mark.parametrize("n", [0, 1, 3, 4, 7])
def test_rounds_are_equally_many_and_each_part_is_real_once(n, monkeypatch):
    size = 3
    monkeypatch.setattr(processes, "WORLD_SIZE", size)
    parts = [torch.tensor([i]) for i in range(n)]
    counted = []
    numbers = set()
    for rank in range(size):
        monkeypatch.setattr(processes, "RANK", rank)
        found = processes.rounds(parts)
        numbers.add(len(found))
        counted += [part.item() for part, is_real in found if is_real == 1.0]
        assert all(is_real in (0.0, 1.0) for _, is_real in found)
    assert len(numbers) == 1
    assert sorted(counted) == list(range(n))


def test_the_last_checkpoint_is_that_of_the_highest_step(tmp_path):
    assert processes.last_checkpoint(tmp_path) is None
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-11.tmp", "checkpoint-best", "12"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.pt").touch()
    (tmp_path / "checkpoint-500").mkdir()               # another trainer's
    assert processes.last_checkpoint(tmp_path).name == "checkpoint-10"
    assert processes.last_checkpoint(str(tmp_path)).name == "checkpoint-10"


def test_a_process_that_is_not_the_first_is_silent_unless_it_fails(monkeypatch, capsys):
    def talk():
        print("said")
        print("complained", file=sys.stderr)
        raise ValueError("a bug")
    monkeypatch.setattr(processes, "RANK", 1)
    monkeypatch.setattr(processes.time, "sleep", lambda seconds: None)
    with pytest.raises(ValueError, match="a bug"):
        processes.start(talk)
    assert capsys.readouterr() == ("", "")
    with pytest.raises(SystemExit):
        processes.start(lambda: common.fail("--data x: cannot be read"))
    assert capsys.readouterr() == ("", "process 1: error: --data x: cannot be read\n")
    with pytest.raises(SystemExit):
        processes.start(sys.exit)                       # as after Ctrl-C
    assert capsys.readouterr() == ("", "")
