"""Simulate a GPU on a machine that has none: with pretend.cuda(): ...

All tensors stay on the CPU, but the storage of some is marked, and these report that they are on
cuda:0. `Simulation` receives all operations, marks what CUDA would make, and raises an error where
CUDA would: if operands are on two devices, or if a generator is on the CPU.

The simulation does not cover what C++ decides by the device (the kernel of attention, autocast),
the allocator, streams and races, real kernels and their rounding, speed, NCCL, and other threads
than the first. It replaces the kernels of logprob.py by their definition in torch, and repeats the
step of decode.py instead of recording it. torch.func raises an error on it, so --baseline optimal
does not run.
"""
import contextlib
from unittest import mock

import torch
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
# operations that accept a single number from the CPU, although they are not pointwise
TAKE_NUMBERS = {"fill_", "masked_fill", "masked_fill_", "where"}


# ---- 1. operations ---------------------------------------------------------------------------

def is_marked(x):
    return isinstance(x, torch.Tensor) and hasattr(x.untyped_storage(), "is_on_cuda")


class Simulation(TorchDispatchMode):
    """Runs every operation on the CPU, and marks its outputs if it belongs on cuda:0."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        device = kwargs.get("device")
        leaves = tree_leaves((args, kwargs))
        # C++ asks for the CPU where it should ask for the device of an operand
        if device is None or device == CPU and name != "_to_copy":
            is_on_cuda = any(map(is_marked, leaves))
        else:
            is_on_cuda = device.type == "cuda"
        if is_on_cuda:
            check(function, name, args, leaves)
        output = function(*args, **kwargs if device is None else kwargs | {"device": CPU})
        if is_on_cuda and name != "copy_":              # which may write to the CPU
            for x in tree_leaves(output):
                if isinstance(x, torch.Tensor):
                    x.untyped_storage().is_on_cuda = True
        return output


def check(function, name, args, leaves):
    """Raise an error where CUDA would, if the output or an operand of an operation is there."""
    if any(isinstance(x, torch.Generator) for x in leaves):
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    if name == "copy_" or not any(map(is_marked, leaves)):
        return
    if name in INDEXING:                                # the indices may be on the CPU
        if not is_marked(args[0]):
            raise RuntimeError("indices should be either on cpu or on the same device as the "
                               "indexed tensor (cpu)")
        leaves = args[2:3]
    # operands on the CPU, except for empty ones, which torch itself makes there
    strangers = [x for x in leaves
                 if isinstance(x, torch.Tensor) and not is_marked(x) and x.numel() > 0]
    takes_numbers = torch.Tag.pointwise in function.tags or name in INDEXING | TAKE_NUMBERS
    if any(x.dim() > 0 or not takes_numbers for x in strangers):
        raise RuntimeError(f"{function}: expected all tensors to be on the same device, but found "
                           "at least two devices, cuda:0 and cpu!")


# ---- 2. functions of torch that depend on the device -----------------------------------------

def to(self, *args, copy=False, to=torch.Tensor.to, **kwargs):
    if args and isinstance(args[0], torch.Tensor):
        device, dtype = args[0].device, args[0].dtype
    else:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    x = self.clone() if copy else self
    x = x if dtype is None else to(x, dtype)
    if device is None or device.type == x.device.type:
        return x
    return torch.ops.aten._to_copy.default(x, device=device)


def tensor(data, *, device=None, tensor=torch.tensor, **options):
    return tensor(data, device=CPU, **options).to(device or torch.empty(0).device)


def clone_storage(self, clone=torch.UntypedStorage.clone):
    """Let copy.deepcopy keep the mark."""
    copied = clone(self)
    copied.__dict__ |= vars(self)
    return copied


def group(lists, *options, group=torch._C._group_tensors_by_device_and_dtype):
    """Group the tensors of an optimizer, which are all on one device."""
    found = group(lists, *options)
    return {(lists[0][0].device, dtype): parts for (_, dtype), parts in found.items()}


def apply_kernel(logits, tokens, old_logps, temperature):
    """Replace the kernels of logprob.py, which would read any address, valid or not."""
    from kernels import logprob
    for x in (logits, tokens, *([] if old_logps is None else [old_logps])):
        assert x.is_cuda, "Pointer argument (at 0) cannot be accessed from Triton"
    return logprob.logprob_torch(logits.flatten(0, 1), tokens, old_logps, temperature)


STAND_INS = [
    (torch.cuda, {
        "_lazy_init": lambda: None, "is_available": lambda: True,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "pretend",
        "device_of": lambda x: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False}),
    (torch, {"tensor": tensor}),
    (torch._C, {"_group_tensors_by_device_and_dtype": group}),
    (torch.UntypedStorage, {"clone": clone_storage}),
    (torch.Tensor, {
        "to": to, "cpu": lambda self: self.to(CPU),
        "is_cuda": property(is_marked), "is_cpu": property(lambda x: not is_marked(x)),
        "device": property(lambda x: CUDA if is_marked(x) else CPU)})]


@contextlib.contextmanager
def cuda():
    """Add the simulated device to torch."""
    _device_constructors()              # keeps torch.tensor before it is replaced
    with contextlib.ExitStack() as stack:
        for owner, values in STAND_INS:
            for name, value in values.items():
                stack.enter_context(mock.patch.object(owner, name, value))
        from kernels import decode, logprob  # now, because common.py looks for a GPU
        stack.enter_context(mock.patch.object(logprob.LogProb, "apply", apply_kernel))
        stack.enter_context(mock.patch.object(
            decode, "capture", lambda step, device: step() or step))
        stack.enter_context(Simulation())
        yield
