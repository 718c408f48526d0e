"""Kernels for CUDA, which the scripts use where they can run. What is imported here is what scripts
and common.py call.

logprob.py    log-probabilities, ratios and entropies of logits, in Triton
decode.py     rollouts, one step of which is a CUDA graph
bench.py      how fast all this is: make bench
"""
from kernels.decode import rollout
from kernels.logprob import NEEDS, applies, can_run, logprobs

__all__ = ["NEEDS", "applies", "can_run", "logprobs", "rollout"]
