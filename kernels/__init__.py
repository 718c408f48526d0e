"""Kernels for CUDA that the scripts use where they can run, each below its definition in plain torch."""
import functools


@functools.lru_cache
def choose(kernel, device):
    """logprob.logprob if that is what `kernel` means on a device, None for plain torch: "torch", "triton", or
    "auto", Triton on CUDA. ValueError for another name, and for Triton where it cannot run."""
    from kernels import logprob
    if kernel not in ("auto", "triton", "torch"):
        raise ValueError(f"--kernel {kernel}: must be auto, triton or torch")
    there = kernel != "torch" and logprob.available(device)
    if kernel == "triton" and not there:
        raise ValueError(f"--kernel triton: on {device} needs the package triton and CUDA 8.0; take torch")
    return logprob.logprob if there and (kernel == "triton" or device.type == "cuda") else None


@functools.lru_cache
def choose_linear(fused_linear, num_logits):
    """linear_logprob.linear_logprob, or None for logits in memory: "on", "off", or "auto", from 2^28 logits
    on, a gigabyte. ValueError for another name."""
    from kernels.linear_logprob import linear_logprob
    if fused_linear not in ("auto", "on", "off"):
        raise ValueError(f"--fused_linear {fused_linear}: must be auto, on or off")
    return linear_logprob if fused_linear == "on" or fused_linear == "auto" and num_logits >= 2**28 else None


def captured_decode():
    """decode.decode, which only a rollout on CUDA needs."""
    from kernels.decode import decode
    return decode
