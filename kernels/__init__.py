"""Faster versions of three functions for CUDA. The scripts use them if the device can run them.

logprob.py    computes log-probabilities, ratios and entropies from logits, in Triton
decode.py     samples rollouts, and replays a CUDA graph for each step
recorded.py   replays a CUDA graph for each batch of the base

The functions imported here are those that the scripts and plumbing.py call. `make bench` measures
how fast they are.
"""
import sys

import common
from kernels.decode import rollout
from kernels.logprob import NEEDS, applies, can_run, logprobs
from kernels.recorded import recorded

__all__ = ["NEEDS", "applies", "can_run", "logprobs", "recorded", "rollout"]
common.kernels = sys.modules[__name__]
