"""The warm start on CUDA: a batch is recorded as a graph and replayed for all batches of its shape.
decode.py explains what that saves."""
import functools

import torch

from kernels import decode


def recorded(function, device):
    """Return a function that does what function(*inputs) does. The inputs are numbers and tensors
    of the CPU; function gets copies of them on the device, as tensors. It returns nothing, changes
    tensors in place, and must not wait for the device. Inputs of new shapes are recorded; if that
    fails, function itself is called."""
    graphs = {}                         # shapes -> (the copies, replay)

    def run(*inputs):
        inputs = [torch.as_tensor(x) for x in inputs]
        shapes = tuple(x.shape for x in inputs)
        if shapes in graphs:
            copies, replay = graphs[shapes]
            for x, new in zip(copies, inputs):
                x.copy_(new, non_blocking=True)         # Python continues while the GPU works
            replay()
        else:
            copies = [x.to(device) for x in inputs]
            step = functools.partial(function, *copies)
            try:
                graphs[shapes] = copies, decode.capture(step, copies[0].device)     # calls it once
            except RuntimeError as error:
                print(f"warning: the base is made without CUDA graphs: {error}")
                graphs[shapes] = copies, step
    return run
