"""Simulate a GPU on a machine that has none: with pretend.cuda() as gpu: ..., or in a shell,
python -m tests.pretend grpo --task arithmetic (as make gpu DRY=1 does).

A Tensor of this file reports that it is on cuda:0, but its `numbers` are on the CPU. `run` receives
all operations on it, and raises an error where CUDA would: if operands are on two devices, if a
generator is on the CPU, or if an operation waits for the device while a graph is recorded. A graph
replays the recorded operations on the same addresses. gpu.waits lists the operations that waited.

The simulation does not cover what C++ decides by the device (the kernel of attention, autocast,
zeros that autograd makes), the allocator, streams and races, real kernels and their rounding,
speed, and NCCL. It replaces the kernels of logprob.py by their definition in torch. torch.func
raises an error on it, so --baseline optimal does not run.
"""
import contextlib
import runpy
import sys
from unittest import mock

import torch
from torch.utils._pytree import tree_map

from kernels import logprob

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
aten = torch.ops.aten
# operations that look up a size or a value for Python, so they wait for the device
WAITS = {"_local_scalar_dense", "_unique2", "bincount", "equal", "masked_select", "nonzero",
         "repeat_interleave", "unique_consecutive", "unique_dim"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
# operations that accept a single number from the CPU, although they are not pointwise
TAKE_NUMBERS = {*INDEXING, "fill_", "masked_fill", "masked_fill_", "where"}
# operations that make a tensor; all other functions that make one call these
FACTORIES = ("empty.memory_format", "empty_strided", "arange.default", "arange.start",
             "arange.start_step")


class GPU:
    """The state of the simulated GPU: the operations that waited, and the graph being recorded."""

    def __init__(self):
        self.waits = []
        self.recording = None
        self.saved = set()              # storages that torch.save is writing

    def wait(self, what):
        if self.recording:
            raise RuntimeError(f"{what}: operation not permitted when stream is capturing")
        self.waits.append(what)

    def do(self, function, *args, **kwargs):
        """Carry out an operation on the numbers, and add it to the graph being recorded, if any."""
        output = function(*args, **kwargs)
        if self.recording:
            self.recording.calls.append((function, args, kwargs, output))
        return output


gpu = GPU()


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
    __torch_function__ = torch._C._disabled_torch_function_impl
    __tensor_flatten__ = lambda self: (["numbers"], None)       # Module.to looks for this
    __tensor_unflatten__ = staticmethod(lambda parts, *_: Tensor(parts["numbers"]))

    def numpy(self, **_):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")

    def __deepcopy__(self, memo):
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        copied.__dict__ |= {k: v for k, v in vars(self).items() if k != "numbers"}
        return memo.setdefault(id(self), copied)

    def __reduce_ex__(self, protocol):
        gpu.wait("save")
        gpu.saved.add(self.numbers.untyped_storage()._cdata)
        return self.numbers.__reduce_ex__(protocol)

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
    if to_cpu or name in WAITS:
        gpu.wait("to the CPU" if to_cpu else name)
    plain, named = each(unwrap, args), {name: unwrap(x) for name, x in kwargs.items()}
    if named.get("device"):
        named["device"] = CPU
    if not function._schema.is_mutable:
        output = gpu.do(function, *plain, **named)
        return output if to_cpu else each(wrap, output)
    changed = kwargs.get("out", args[0])
    if gpu.recording:
        gpu.recording.before += [(x.numbers, x.numbers.clone()) for x in flat(changed)]
    gpu.do(function, *plain, **named)
    return changed


def check(function, name, args, kwargs):
    """Raise an error where CUDA would."""
    leaves = flat((args, *kwargs.values()))
    if any(isinstance(x, torch.Generator) for x in leaves):
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    # operands on the CPU, except for empty ones, which torch itself makes there
    strangers = [x for x in leaves if type(x) is torch.Tensor and x.numel() > 0]
    if name == "copy_":
        return gpu.wait("from the CPU") if strangers else None
    if name in INDEXING:
        if type(args[0]) is not Tensor:
            raise RuntimeError("indices should be either on cpu or on the same device as the "
                               "indexed tensor (cpu)")
        for x in args[1]:                       # copies a CPU index, counts a mask
            if type(x) is torch.Tensor or x is not None and x.dtype == torch.bool:
                gpu.wait(f"{name} by {'a mask' if x.dtype == torch.bool else 'the CPU'}")
        strangers = [x for x in args[2:3] if type(x) is torch.Tensor]
    takes_numbers = torch.Tag.pointwise in function.tags or name in TAKE_NUMBERS
    if any(x.dim() > 0 or not takes_numbers for x in strangers):
        raise RuntimeError(f"{function}: expected all tensors to be on the same device, but found "
                           "at least two devices, cuda:0 and cpu!")


# ---- 2. graphs -------------------------------------------------------------------------------

class Graph:
    """Replaces torch.cuda.CUDAGraph. It stores operations and addresses, but no Python code."""

    def __init__(self):
        self.calls = []
        self.before = []                # (changed tensor, its value before), in order

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, output in self.calls:
            again = function(*args, **kwargs)
            for kept, new in zip(flat(output), flat(again)):
                if isinstance(kept, torch.Tensor) and kept.data_ptr() != new.data_ptr():
                    kept.copy_(new)                     # a view needs no copy


@contextlib.contextmanager
def record(graph, stream=None):
    """Replace torch.cuda.graph. Recording undoes its operations, as CUDA only records them."""
    gpu.wait("synchronize")
    gpu.recording = graph
    try:
        yield
    finally:
        gpu.recording = None
        for x, value in reversed(graph.before):
            x.copy_(value)


class Stream:
    def wait_stream(self, stream):
        pass


# ---- 3. other functions of torch that depend on the device -----------------------------------

def to(self, *args, copy=False, to=torch.Tensor.to, **kwargs):
    if args and isinstance(args[0], torch.Tensor):
        device, dtype = args[0].device, args[0].dtype
    else:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    x = self.clone() if copy else self
    x = x if dtype is None else to(x, dtype)
    if device is None or device.type == x.device.type:
        return x
    return aten._to_copy.default(x, device=CUDA if device.type == "cuda" else device)


def tensor(data, *, device=None, tensor=torch.tensor, **options):
    return tensor(data, device=CPU, **options).to(device or torch.empty(0).device)


def pad_sequence(rows, *options, pad_sequence=torch._C._nn.pad_sequence):
    padded = pad_sequence([getattr(x, "numbers", x) for x in rows], *options)
    return Tensor(padded) if type(rows[0]) is Tensor else padded


def load(path, map_location=None, load=torch.load, **options):
    """Load a file. Without map_location, its tensors return to the devices stored in it."""
    on_cuda = set()

    def place(storage, location):
        if torch.device(map_location or location).type == "cuda":
            on_cuda.add(storage._cdata)
        return storage
    found = load(path, map_location=place, **options)
    return tree_map(lambda x: Tensor(x) if type(x) is torch.Tensor
                    and x.untyped_storage()._cdata in on_cuda else x, found)


def location_tag(storage, location_tag=torch.serialization.location_tag):
    return "cuda:0" if storage._cdata in gpu.saved else location_tag(storage)


def factory(name):
    packet, _, overload = name.partition(".")
    function = getattr(getattr(aten, packet), overload)
    return lambda *args, device, **options: Tensor(
        gpu.do(function, *args, **{**options, "device": CPU, "pin_memory": None}))


def apply_kernel(logits, tokens, old_logps, temperature, inplace):
    """Replace the kernels of logprob.py, which would read any address, valid or not."""
    for x in (logits, tokens, *([] if old_logps is None else [old_logps])):
        assert type(x) is Tensor, "Pointer argument (at 0) cannot be accessed from Triton"
    return logprob.logprob_torch(logits.flatten(0, 1), tokens, old_logps, temperature)


STAND_INS = [
    (torch.cuda, {
        "_lazy_init": lambda: None, "is_available": lambda: True, "device_count": lambda: 1,
        "current_device": lambda: 0, "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "pretend", "is_bf16_supported": lambda: True,
        "device_of": lambda x: contextlib.nullcontext(),
        "Stream": Stream, "current_stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "CUDAGraph": Graph, "graph": record,
        "synchronize": lambda device=None: gpu.wait("synchronize")}),
    (torch, {"load": load, "tensor": tensor}),
    (torch.Tensor, {"to": to, "device": property(
        lambda x, device=torch.Tensor.device: CUDA if type(x) is Tensor else device.__get__(x))}),
    (torch.serialization, {"location_tag": location_tag}),
    (torch._C._nn, {"pad_sequence": pad_sequence}),
    (logprob.LogProb, {"apply": apply_kernel})]


@contextlib.contextmanager
def cuda():
    """Add the simulated device to torch. Yields the GPU."""
    gpu.__init__()
    library = torch.library.Library("aten", "IMPL")     # reaches all threads; a mode would not
    with contextlib.ExitStack() as stack:
        stack.callback(library._destroy)
        for name in FACTORIES:
            library.impl(name.removesuffix(".default"), factory(name), "CUDA")
        for owner, values in STAND_INS:
            for name, value in values.items():
                stack.enter_context(mock.patch.object(owner, name, value))
        yield gpu


if __name__ == "__main__":
    sys.argv.pop(0)
    with cuda():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
