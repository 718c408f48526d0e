"""Faster versions of three functions for CUDA. The scripts use them if the device can run them.

logprob.py    computes log-probabilities, ratios and entropies from logits, in Triton
decode.py     samples rollouts, and replays a CUDA graph for each step
recorded.py   replays a CUDA graph for each batch of the base

The functions imported here are those that the scripts and plumbing.py call. `make bench` measures
how fast they are.
"""
import os
import shutil
import sys

import torch

import common
from kernels import logprob
from kernels.decode import rollout
from kernels.logprob import NEEDS, applies, can_run, logprobs
from kernels.recorded import recorded

__all__ = ["NEEDS", "applies", "can_run", "choose", "logprobs", "recorded", "rollout"]
DRIVER = "/proc/driver/nvidia/version"       # of Linux; WSL and Windows have only nvidia-smi


def choose(kernel, device, is_chosen):
    """Let "auto" mean this kernel from now on. Exits with one line if it cannot run on the device.
    Prints a line if a GPU is not used, unless the user chose the device."""
    if kernel == "triton" and not can_run(device):
        common.fail(f"--kernel triton: needs {NEEDS}; use torch")
    logprob.choice = kernel
    if not is_chosen:
        note_unused_gpu()


def note_unused_gpu():
    """Print a line if the driver of an NVIDIA GPU is installed, but torch cannot use a GPU."""
    has_driver = os.path.exists(DRIVER) or shutil.which("nvidia-smi")
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")        # by the user
    if has_driver and not (common.HAS_CUDA or is_hidden):
        print(f"note: NVIDIA's driver is installed, but torch {torch.__version__} finds no GPU, so "
              "this run takes the CPU; see docs/install.md#nvidia-gpus", file=sys.stderr)
