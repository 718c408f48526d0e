"""Simulate a GPU on a machine that has none: with pretend.cuda(): ..., or in a shell,
python -m tests.pretend grpo --task arithmetic (as make gpu DRY=1 does).

A Tensor of this file reports that it is on cuda:0, but its `numbers` are on the CPU. `run` receives
all operations on it, and raises an error where CUDA would: if operands are on two devices, or if a
generator is on the CPU.

The simulation does not cover what C++ decides by the device (the kernel of attention, autocast,
zeros that autograd makes), the allocator, streams and races, real kernels and their rounding,
speed, and NCCL. It replaces the kernels of logprob.py by their definition in torch, and repeats the
step of decode.py instead of recording it. torch.func raises an error on it, so --baseline optimal
does not run.
"""
import contextlib
import runpy
import sys
from unittest import mock

import torch
import torch.nn.functional as F

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
# operations that accept a single number from the CPU, although they are not pointwise
TAKE_NUMBERS = {*INDEXING, "fill_", "masked_fill", "masked_fill_", "where"}
# operations that make a tensor; all other functions that make one call these
FACTORIES = ("empty.memory_format", "empty_strided", "arange.default", "arange.start",
             "arange.start_step")


# ---- 1. tensors ------------------------------------------------------------------------------

class Tensor(torch.Tensor):
    """A tensor on cuda:0."""

    @staticmethod
    def __new__(cls, numbers):
        assert type(numbers) is torch.Tensor, type(numbers)
        return torch.Tensor._make_wrapper_subclass(
            cls, numbers.size(), strides=numbers.stride(), dtype=numbers.dtype,
            storage_offset=numbers.storage_offset())

    def __init__(self, numbers):
        self.numbers = numbers

    is_cuda, is_cpu = True, False
    data_ptr = lambda self: self.numbers.data_ptr()
    cpu = lambda self: self.to(CPU)
    tolist = lambda self: self.cpu().tolist()
    __repr__ = lambda self: f"{self.numbers} on {CUDA}"
    __format__ = lambda self, spec: format(self.item(), spec)
    __reduce_ex__ = lambda self, protocol: self.numbers.__reduce_ex__(protocol)     # saves it
    __torch_function__ = torch._C._disabled_torch_function_impl
    __tensor_flatten__ = lambda self: (["numbers"], None)       # Module.to looks for this
    __tensor_unflatten__ = staticmethod(lambda parts, *_: Tensor(parts["numbers"]))

    def __deepcopy__(self, memo):
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        copied.__dict__ |= {k: v for k, v in vars(self).items() if k != "numbers"}
        return memo.setdefault(id(self), copied)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})


def each(function, x):
    """Apply a function to every element of nested lists. torch's tree_map is slower."""
    if isinstance(x, (list, tuple)):
        return type(x)([each(function, part) for part in x])
    return function(x)


def flat(x):
    """List every element of nested lists."""
    return [leaf for part in x for leaf in flat(part)] if isinstance(x, (list, tuple)) else [x]


def wrap(x):
    return Tensor(x) if isinstance(x, torch.Tensor) else x


def unwrap(x):
    return x.numbers if type(x) is Tensor else x


def run(function, args, kwargs):
    """Run an operation that has a Tensor among its arguments. -> its output"""
    name = function.overloadpacket.__name__
    check(function, name, args, kwargs)
    to_cpu = name == "_to_copy" and kwargs.get("device") == CPU
    named = {name: unwrap(x) for name, x in kwargs.items()}
    if named.get("device"):
        named["device"] = CPU
    output = function(*each(unwrap, args), **named)
    if function._schema.is_mutable:
        return kwargs.get("out", args[0]) if function._schema.returns else None
    return output if to_cpu else each(wrap, output)


def check(function, name, args, kwargs):
    """Raise an error where CUDA would."""
    leaves = flat((args, *kwargs.values()))
    if any(isinstance(x, torch.Generator) for x in leaves):
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    # operands on the CPU, except for empty ones, which torch itself makes there
    strangers = [x for x in leaves if type(x) is torch.Tensor and x.numel() > 0]
    if name == "copy_":
        return
    if name in INDEXING:
        if type(args[0]) is not Tensor:
            raise RuntimeError("indices should be either on cpu or on the same device as the "
                               "indexed tensor (cpu)")
        strangers = [x for x in args[2:3] if type(x) is torch.Tensor]
    takes_numbers = torch.Tag.pointwise in function.tags or name in TAKE_NUMBERS
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
    return torch.ops.aten._to_copy.default(x, device=CUDA if device.type == "cuda" else device)


def tensor(data, *, device=None, tensor=torch.tensor, **options):
    return tensor(data, device=CPU, **options).to(device or torch.empty(0).device)


def pad_sequence(rows, *options, pad_sequence=torch._C._nn.pad_sequence):
    padded = pad_sequence([getattr(x, "numbers", x) for x in rows], *options)
    return Tensor(padded) if type(rows[0]) is Tensor else padded


def attention(q, k, v, is_causal=False, attention=F.scaled_dot_product_attention, **options):
    if is_causal:                       # torch before 2.9 would make the mask on the CPU
        options["attn_mask"] = torch.ones(q.shape[-2], k.shape[-2], device=q.device).tril() > 0
    return attention(q, k, v, **options)


def factory(name):
    packet, _, overload = name.partition(".")
    function = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return lambda *args, device, **options: Tensor(
        function(*args, **{**options, "device": CPU, "pin_memory": None}))


def apply_kernel(logits, tokens, old_logps, temperature):
    """Replace the kernels of logprob.py, which would read any address, valid or not."""
    from kernels import logprob
    for x in (logits, tokens, *([] if old_logps is None else [old_logps])):
        assert type(x) is Tensor, "Pointer argument (at 0) cannot be accessed from Triton"
    return logprob.logprob_torch(logits.flatten(0, 1), tokens, old_logps, temperature)


STAND_INS = [
    (torch.cuda, {
        "_lazy_init": lambda: None, "is_available": lambda: True, "device_count": lambda: 1,
        "current_device": lambda: 0, "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "pretend", "is_bf16_supported": lambda: True,
        "device_of": lambda x: contextlib.nullcontext(), "synchronize": lambda device=None: None,
        "mem_get_info": lambda device=None: (2**34, 2**34),
        "is_current_stream_capturing": lambda: False}),
    (torch, {"tensor": tensor}), (F, {"scaled_dot_product_attention": attention}),
    (torch.Tensor, {"to": to, "device": property(
        lambda x, device=torch.Tensor.device: CUDA if type(x) is Tensor else device.__get__(x))}),
    (torch._C._nn, {"pad_sequence": pad_sequence})]


@contextlib.contextmanager
def cuda():
    """Add the simulated device to torch."""
    library = torch.library.Library("aten", "IMPL")     # reaches all threads; a mode would not
    with contextlib.ExitStack() as stack:
        stack.callback(library._destroy)
        for name in FACTORIES:
            library.impl(name.removesuffix(".default"), factory(name), "CUDA")
        for owner, values in STAND_INS:
            for name, value in values.items():
                stack.enter_context(mock.patch.object(owner, name, value))
        from kernels import decode, logprob  # now, because common.py looks for a GPU
        stack.enter_context(mock.patch.object(logprob.LogProb, "apply", apply_kernel))
        stack.enter_context(mock.patch.object(
            decode, "capture", lambda step, device: step() or step))
        yield
    if "real" in sys.modules:               # which keeps the device of the last run
        sys.modules["real"].DEVICE = CPU.type


if __name__ == "__main__":
    sys.argv.pop(0)
    with cuda():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
