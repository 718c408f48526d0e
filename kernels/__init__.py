"""Kernels for CUDA, which the scripts use where they can run. This file is what the scripts call.

logprob.py          log-probabilities and entropies of logits, in Triton
decode.py           rollouts, one step of which is a CUDA graph
linear_logprob.py   log-probabilities without the logits in memory; no script calls it
bench.py            how fast all this is: make bench
scaling.py          what it costs as completions and policies grow; a part of the same
"""
import functools

from kernels import logprob


def check(kernel, device):
    """ValueError, with a remedy, unless `kernel` is a name that --kernel knows and can run on the
    device (a torch.device or its name)."""
    if kernel not in ("auto", "torch", "triton"):
        raise ValueError(f"--kernel {kernel}: must be auto, torch or triton")
    if kernel == "triton" and not logprob.available(device):
        raise ValueError(f"--kernel triton: on {device} needs the package triton and CUDA 8.0; "
                         "take torch")


@functools.cache
def uses_triton(kernel, device):
    """What `applies` returns for logits on a torch.device; looked up once."""
    check(kernel, device)
    if kernel == "torch":
        return False
    if kernel == "auto" and device.type != "cuda":
        return False
    return logprob.available(device)


def applies(kernel, logits):
    """Whether Triton computes the log-probabilities of these logits. `kernel` is "torch", "triton"
    or "auto", which is Triton on CUDA. ValueError for another name, or if it cannot run here."""
    return uses_triton(kernel, logits.device)


def logprobs(logits, tokens, temperature):
    """Log-probability of each token and entropy of softmax(logits / temperature), differentiable.
    (..., V), (...) -> (...), (...)"""
    logps, _, entropy = logprob.logprob(logits, tokens, temperature=temperature)
    return logps, entropy


def captures(prompts, task, cfg):
    """Whether the rollout of these prompts is replayed as a CUDA graph. A graph cannot hold the
    Python of an environment that responds to call tokens. -> bool"""
    return cfg.kernel != "torch" and prompts.is_cuda and not task.call_tokens


def captured_rollout(model, prompts, cfg, uniforms, eos, pad):
    """The rollout of prompts (B, W) as a CUDA graph, see decode.py.
    -> tokens, mask, logps, entropy (B, T), lengths (B,)"""
    # Not at the top, since decode.py imports this file.
    from kernels.decode import decode
    tokens, mask, logps, entropy = decode(
        model, prompts, cfg.max_completion_length, cfg.temperature, uniforms, eos, pad, cfg.kernel)
    return tokens, mask, logps, entropy, mask.sum(dim=1).long()
