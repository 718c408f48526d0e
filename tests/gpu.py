"""Check for the first time that the project works on a machine with a GPU: make gpu.

Each test is a command, a process with a time limit. So a command that fails, crashes or hangs
doesn't stop the others, and all of them end within eight minutes. What matters most comes first:
the first command, without and with its base, a step of real.py, and the kernels. After each
command, the report is written again to docs/gpu-DEVICE.json and docs/speed.md; the logs go to
runs/gpu, which is emptied first. Without a GPU, tests/test_pretend.py runs the scripts on a
simulated one.
"""
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
import torch

from engines import task
from lab.docs import ROOT, put, record
from lab.measure import NAME, ON_DEVICE, SLUG, tables
from learn.sync import SCRIPTS

FOLDER = ROOT / "runs" / "gpu"
END = time.monotonic() + 480    # of all commands together
LIMIT = 120                     # seconds for one command
LONG = 200                      # for a step on a real model, of up to three trainers
# Flags that make a base in seconds, which is right now and then, and train it for two steps
SHORT = ("--task arithmetic:2 --textbook_share 0 --base_steps 300 --base_batch_size 16 "
         "--max_steps 2 --num_eval_problems 64 --num_eval_samples 2")
TRL = ("grpo --model_name_or_path runs/gpu/model --dataset_name runs/gpu/problems.jsonl "
       "--reward_funcs engines/task.py:right --max_steps 2 --num_generations 4 "
       "--per_device_train_batch_size 8 --max_completion_length 16 --report_to none "
       "--output_dir runs/gpu/trl")
ROWS = []                       # of the report


def commands():
    """List the commands. -> {name: the arguments of `python -m`}"""
    args = {"main": "grpo --task arithmetic", "main-with-base": "grpo --task arithmetic"}
    if find_spec("transformers"):
        args["step"] = "lab.measure step 64"
    args["tests"] = "pytest -rs tests/test_kernels.py tests/test_decode.py -n 4"
    args["bench"] = "lab.measure kernels"
    for module in [script.removesuffix(".py") for script in SCRIPTS]:
        for kernel in ("triton", "torch"):
            args[f"{module}-{kernel}"] = f"{module} {SHORT} --kernel {kernel}"
    args |= {
        "one-step": f"grpo {SHORT} --kernel triton --max_steps 1",
        "resumed": "grpo --resume_from_checkpoint runs/gpu/one-step --max_steps 2",
        "countdown": "grpo --task countdown"}
    if find_spec("transformers"):
        args["export"] = "engines.export runs/gpu/grpo-triton runs/gpu/model"
    if find_spec("trl"):
        args["trl"] = f"engines.trl {TRL}"
    if find_spec("trl") and find_spec("vllm"):          # vLLM's kernels need wide heads
        args |= {
            "wide": f"grpo {SHORT} --num_attention_heads 2",
            "wide-export": "engines.export runs/gpu/wide runs/gpu/wide-model",
            "vllm": f"engines.trl {TRL} --model_name_or_path runs/gpu/wide-model --use_peft "
                    "--use_vllm --vllm_mode colocate"}
    args |= {"optimal": f"reinforce {SHORT} --baseline optimal", "nano": "nano"}
    return {name: f"{line} --output_dir runs/gpu/{name}" if "--task" in line else line
            for name, line in args.items()}


def run(command, limit, log):
    """Run a command for at most `limit` seconds, and write its output to `log`.
    -> "ok", or how it failed"""
    env = {"CUDA_VISIBLE_DEVICES": "0"} | os.environ | {"PYTHONFAULTHANDLER": "1"}
    with open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command.split()], cwd=ROOT, env=env, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        code = process.wait(limit)
        return "ok" if code == 0 else f"ended with {code}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)          # the tracebacks show where it hangs
        process.wait()
        return f"stopped after {limit:.0f} s"


@pytest.fixture(scope="module", autouse=True)
def folder():
    if NAME == "cpu":
        pytest.exit(f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, finds no "
                    "GPU. Check whether nvidia-smi lists one.", 2)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    with (open(FOLDER / "problems.jsonl", "w", encoding="utf-8") as file,
          contextlib.redirect_stdout(file)):
        task.main(["arithmetic:2", "64"])


@pytest.mark.parametrize("name, command", commands().items(), ids=commands())
def test_a_command_ends_well(name, command):
    began = time.monotonic()
    log = FOLDER / f"{name}.log"
    left = max(0, END - began)
    outcome = run(command, min(left, LONG if name == "step" else LIMIT), log)
    text = log.read_text("utf-8", "replace").strip()
    *_, last = re.findall("^held out.*", text, re.MULTILINE) or text.split("\n")
    seconds = f"{time.monotonic() - began:.0f}"
    ROWS.append([name, outcome, seconds, last[:160]])
    record(f"gpu-{SLUG}", machine=f"{ON_DEVICE}, CUDA {torch.version.cuda}", rows=ROWS)
    put("report", tables("gpu"), "gpu")
    assert outcome == "ok", f"{outcome}:\n{text[-6000:]}"
    if name == "resumed":
        whole, resumed = (torch.load(FOLDER / run / "checkpoint.pt", weights_only=True)["policy"]
                          for run in ("grpo-triton", "one-step"))
        assert all(torch.equal(whole[part].cpu(), resumed[part].cpu()) for part in whole)
