"""Test that two processes compute what one process computes, and that a stopped job resumes."""
import multiprocessing
import os
import re
import signal
import socket
import sys

import pytest
import torch
from small_models import LIKE_SMALL, NEEDS, load_example
from small_runs import arguments, lines, read_summary, steps, wait_until

transformers = pytest.importorskip("transformers", reason=NEEDS)

from pretrained import models  # noqa: E402
from pretrained import run as processes  # noqa: E402

pretrained = load_example()
FLAGS = LIKE_SMALL | {"max_steps": 2, "num_mini_batches": 2, "eval_steps": 1,
                      "num_eval_problems": 15, "micro_batch_size": 5, "sample_batch_size": 7,
                      "output_dir": "run"}


# ---- two processes compute what one does -----------------------------------------------------

def work(rank, size, port, folder, flags):
    """Run one process of a job, and store its gradients."""
    os.chdir(folder)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{name}-{rank}", os.O_CREAT | os.O_WRONLY), number)
        setattr(sys, name, getattr(sys, f"__{name}__"))         # writes to this file
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                   "TORCHELASTIC_RUN_ID": "none", "GLOO_SOCKET_IFNAME": "lo"}
    processes.IS_SHARED = True
    processes.RANK = rank
    processes.WORLD_SIZE = size
    kept = []
    plain = torch.nn.utils.clip_grad_norm_

    def clip(weights, max_norm):
        kept.append([weight.grad.clone() for weight in weights])
        return plain(weights, max_norm)
    torch.nn.utils.clip_grad_norm_ = clip
    processes.start(lambda: pretrained.main(arguments(flags)))
    torch.save(kept, f"kept-{rank}.pt")


def job(folder, flags, size=2, look=None):
    """Run several processes that are connected, as torchrun starts them, and call look(workers)
    while they run. -> their exit codes"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    fork = multiprocessing.get_context("fork")          # children inherit the imports
    workers = [fork.Process(target=work, args=(rank, size, port, folder, flags))
               for rank in range(size)]
    for worker in workers:
        worker.start()
    if look:
        look(workers)
    for worker in workers:
        worker.join(120)
        worker.kill()
    return [worker.exitcode for worker in workers]


@pytest.mark.parametrize("flags", [
    {"importance_sampling_correction": "truncate", "loss_type": "dapo"}, {"lora_rank": 4}], ids=str)
def test_two_processes_make_the_steps_of_one(flags, small_llama, tmp_path):
    """There are two steps, with sampling between them. 4 prompts in micro-batches of 5 rows and an
    evaluation of 15 problems give the processes unequal shares."""
    flags = FLAGS | {"model": small_llama, "beta": 0.1} | flags
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    assert job(one, flags, size=1) == [0]
    assert job(two, flags) == [0, 0], (two / "stderr-0").read_text()
    assert (two / "stdout-1").read_text() == ""         # only process 0 prints
    expected = torch.load(one / "kept-0.pt")
    assert len(expected) == 4
    assert max(gradient.abs().max() for step in expected for gradient in step) > 1e-3
    for rank in range(2):
        torch.testing.assert_close(
            torch.load(two / f"kept-{rank}.pt"), expected, rtol=0, atol=1e-6)
    weights = []
    for folder in (one, two):
        [path] = folder.glob("run/checkpoint-*/")
        weights.append(transformers.AutoModelForCausalLM.from_pretrained(path).state_dict())
    torch.testing.assert_close(*weights, rtol=0, atol=1e-5)
    for a, b in zip(steps(one / "run"), steps(two / "run"), strict=True):
        for name in a.keys() - {"step_time"}:
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-5), name
    texts, expected = ([line["examples"] for line in lines(folder / "run/greedy.jsonl")]
                       for folder in (two, one))
    assert texts == expected and "trained" in read_summary(two / "run")


# ---- stopped jobs ----------------------------------------------------------------------------

def test_after_ctrl_c_in_one_process_the_step_is_finished_and_saved_by_all(
        small_llama, tmp_path):
    flags = FLAGS | {"model": small_llama, "max_steps": 300, "save_steps": 1000, "eval_steps": 1000}

    def interrupt(workers):
        log = tmp_path / "run/metrics.jsonl"
        assert wait_until(lambda: log.exists() and log.read_text().count("\n") >= 2)
        os.kill(workers[1].pid, signal.SIGINT)
    assert job(tmp_path, flags, look=interrupt) == [130, 130]
    done = len(steps(tmp_path / "run"))
    assert 2 <= done < 300 and (tmp_path / f"run/checkpoint-{done}").is_dir()
    said = (tmp_path / "stderr-0").read_text()
    assert re.search("-m torch.distributed.run --nproc_per_node 2 .*train.py --resume_.* run", said)
    resumed = {"resume_from_checkpoint": "run", "max_steps": done + 1}
    assert job(tmp_path, resumed) == [0, 0]
    assert [line["step"] for line in steps(tmp_path / "run")] == list(range(1, done + 2))


def test_the_last_checkpoint_is_that_of_the_highest_step_of_a_run(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-11.tmp", "checkpoint-best", "12"):
        (tmp_path / name).mkdir()
    assert models.last_checkpoint(tmp_path) is None              # a different trainer wrote them
    (tmp_path / "checkpoint.pt").touch()
    assert models.last_checkpoint(str(tmp_path)).name == "checkpoint-10"
