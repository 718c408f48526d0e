"""Compare the fused log-probability, ratio and entropy with their definition in float64.

Without a GPU, test_all_of_this_holds_in_tritons_interpreter runs this file a second time, in a
separate process with TRITON_INTERPRET=1, where the kernels run on the CPU. The tests of the code
compiled for a GPU run in any case. With a GPU, the tests also run on the GPU.

Triton's interpreter truncates a float32 that is stored as bfloat16, whereas a GPU rounds it to
nearest. So in the interpreter the tests allow twice the error, and cannot detect a mistake in a
GPU's rounding.
"""
import importlib.util
import math
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from torch.testing import assert_close

import grpo
from kernels import logprob as fused

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

# numpy warns of log(0) in rows of padding
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
device = pytest.mark.skipif(
    not fused.can_run(DEVICE), reason="needs Triton and a GPU of CUDA 8.0")
compiled = pytest.mark.skipif(INTERPRETED or not fused.triton, reason="compiles nothing")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Allowed error for logits of any dtype, as a fraction of the largest number in a sum.
EXACT = 1e-6
# Error from rounding a stored gradient; the module docstring explains bfloat16.
ROUNDING = {torch.float32: 0, torch.float16: 2**-11, torch.bfloat16: 2**-8}
if INTERPRETED:
    ROUNDING[torch.bfloat16] = 2**-7


def problem(dtype, N, V, temperature=1.0, off_policy=True, padding=()):
    """Make random inputs. Row 0 has its maximum in the last column, row 1 rises, and row 2 falls.
    -> (logits, tokens, old_logps, temperature); g (3, N), the derivatives of a loss with respect to
    logps, ratio and entropy"""
    generator = torch.Generator().manual_seed(1000 * N + V)
    logits = torch.randn(N, V, generator=generator) * 3
    logits[0, -1] = logits[0].max() + 2
    logits[1:2] = logits[1:2].sort().values
    logits[2:3] = logits[2:3].sort(descending=True).values
    tokens = torch.randint(V, (N,), generator=generator)
    tokens[0] = V - 1
    logits = logits.to(dtype)
    log_p = torch.log_softmax(logits.double() / temperature, -1)
    noise = torch.randn(N, generator=generator) / 2
    old_logps = (log_p.gather(1, tokens[:, None])[:, 0] + noise).float().to(DEVICE)
    tokens[list(padding)] = -1
    g = torch.randn(3, N, generator=generator).to(DEVICE)
    if not off_policy:
        old_logps = None
    return (logits.to(DEVICE), tokens.to(DEVICE), old_logps, temperature), g


def run(function, logits, *args, g=None):
    """Evaluate `function`; g holds the derivatives of a loss with respect to its three outputs.
    -> logps, ratio, entropy, the gradient with respect to the logits (None without g)"""
    x = logits.detach().requires_grad_()
    outputs = function(x, *args)
    if g is not None:
        gradients = [g_i.to(output).view_as(output) for g_i, output in zip(g, outputs)]
        torch.autograd.backward(outputs, gradients)
    return [output.detach() for output in outputs] + [x.grad]


def definition(logits, *args, g=None):
    return run(fused.logprob_torch, logits.double(), *args, g=g)


def compare(ours, exact, dtype, g=None, temperature=1.0):
    """Check the values and, given the g that it was computed from, the gradient. Its bound grows
    with the terms that cancel out in it."""
    logps, ratio, entropy, grad = exact
    size = 1 + logps.abs()
    bounds = {"logps": EXACT * size,
              "ratio": EXACT * size * ratio + 1e-30,
              "entropy": EXACT * (1 + entropy)}
    if g is not None:
        g_logps, g_ratio, g_entropy = (g_i.view_as(size) for g_i in g)
        terms = g_logps.abs() + (ratio * g_ratio).abs() + ((1 + entropy) * g_entropy).abs()
        bound = EXACT * (terms * size / temperature)[..., None] + ROUNDING[dtype] * grad.abs()
        bounds["gradient"] = bound
        if dtype == torch.float16:
            bounds["gradient"] += 6e-8
    for (name, bound), a, b in zip(bounds.items(), ours, exact):
        expected = dtype if name == "gradient" else torch.float32
        assert a.dtype == expected and a.shape == b.shape, name
        error = (a.double() - b).abs().masked_fill(a == b, 0)                 # nan if both are -inf
        worst = (error / bound).max() if error.numel() else 0
        assert (error <= bound).all(), f"{name} off by {worst:.1e} bounds"


def check(logits, tokens, old_logps, temperature=1.0, *, g):
    """Check the kernels' values and gradient against those of the definition."""
    args = (logits, tokens, old_logps, temperature)
    ours = run(fused.logprob, *args, g=g)
    compare(ours, definition(*args, g=g), logits.dtype, g, temperature)


# ---- 1. the definition -----------------------------------------------------------------------

def test_the_definition_is_what_the_docstring_says():
    y = torch.tensor([[1.0, 2.0, 4.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    p = y.exp() / y.exp().sum(1, keepdim=True)
    tokens = torch.tensor([2, 0])
    old_logps = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    logps, ratio, entropy = fused.logprob_torch(y * 0.5, tokens, old_logps, temperature=0.5)
    assert_close(logps, torch.log(torch.stack([p[0, 2], p[1, 0]])))
    assert_close(ratio, torch.stack([p[0, 2] / math.exp(-1), p[1, 0] / math.exp(-2)]))
    assert_close(entropy[0], -(p[0] * p[0].log()).sum())
    assert_close(entropy[1], torch.tensor(math.log(3)).double())
    _, ratio, _ = fused.logprob_torch(y, tokens)
    assert torch.equal(ratio, torch.ones(2).double())
    logps, _, _ = fused.logprob((y * 0.3).to(DEVICE), tokens.to(DEVICE), temperature=0.3)
    assert_close(logps.cpu(), torch.log(torch.stack([p[0, 2], p[1, 0]])), rtol=1e-13, atol=0)
    for temperature in (0.0, math.nan):
        with pytest.raises(ValueError, match="must be > 0"):
            fused.logprob(y, tokens, temperature=temperature)
    for rows in ((tokens[:1],), (tokens, old_logps[:1])):       # which torch would broadcast
        with pytest.raises(ValueError, match="need one number per row"):
            fused.logprob(y, *rows)


def test_without_triton_it_is_the_definition(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    spec = importlib.util.spec_from_file_location("without_triton", fused.__file__)
    alone = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(alone)
    assert alone.triton is None and not alone.can_run("cpu") and not alone.can_run("cuda")
    x, tokens = torch.randn(4, 9, requires_grad=True), torch.tensor([1, 0, -1, 8])
    assert all(map(torch.equal, alone.logprob(x, tokens), fused.logprob_torch(x, tokens)))


# ---- 2. the kernels --------------------------------------------------------------------------

FP32, BF16, FP16 = DTYPES
SHAPES = {(5, 2): FP16, (1, 3): FP16, (33, 8): FP32, (5, 266): BF16, (1, 4096): FP32,
          (5, 3001): FP16, (5, 3008): FP32, (140, 3): FP16}
# The interpreter is slow, so it gets each shape with one dtype.
CASES = [(*shape, dtype) for shape, one in SHAPES.items()
         for dtype in (DTYPES if DEVICE == "cuda" else [one])]


@device
@pytest.mark.parametrize("N, V, dtype", CASES, ids=str)
def test_kernels_agree_with_float64_autograd(N, V, dtype):
    """With about 3,000 tokens, a row has several tiles, and the maximum may be in any of them."""
    variant = N + V + DTYPES.index(dtype)
    args, g = problem(
        dtype, N, V, temperature=(1.0, 0.7, 1.9)[variant % 3], off_policy=variant % 2 == 0,
        padding=[3] if N > 3 and variant % 4 < 2 else [])
    check(*args, g=g)


B, T, V = 3, 4, 40
VIEWS = {               # of logits, and of what has a number for each token
    "reversed": (lambda x: x[:T, :B, :V].transpose(0, 1), lambda x: x[..., 1]),
    "columns": (lambda x: x[:B, 1:, :V].transpose(1, 2).contiguous().transpose(1, 2),
                lambda x: x[:1, :1, 0].expand(B, T)),
    "repeated": (lambda x: x[0, 0, :V].expand(B, T, V), lambda x: x[..., 0].T.contiguous().T)}


@device
@pytest.mark.parametrize("view", VIEWS)
def test_all_inputs_and_gradients_may_be_views(view):
    of_logits, of_numbers = VIEWS[view]
    generator = torch.Generator().manual_seed(0)
    logits = of_logits(torch.randn(2 * B, T + 1, V + 7, generator=generator).to(DEVICE))
    tokens = of_numbers(torch.randint(V, (B, T, 2), generator=generator).to(DEVICE))
    old_logps = of_numbers(torch.randn(B, T, 2, generator=generator).to(DEVICE) - 3)
    g = [of_numbers(torch.randn(B, T, 2, generator=generator).to(DEVICE)) for _ in range(3)]
    assert not any(x.is_contiguous() for x in (logits, tokens, old_logps, *g))
    check(logits, tokens, old_logps, 0.8, g=g)


@device
def test_nan_stays_nan_in_its_row_alone_and_a_token_outside_the_vocabulary_is_nan():
    (logits, tokens, old_logps, _), g = problem(torch.float32, 7, 300)
    logits[1, 200] = math.nan
    logits[3] = -math.inf
    logits[4, 7] = math.inf
    tokens[6] = 301
    found = run(fused.logprob, logits, tokens.int(), old_logps, g=g)
    for x in found:
        is_nan = x.isnan().view(7, -1)
        assert is_nan[[1, 3, 4]].all() and not is_nan[[0, 2, 5]].any()
    assert found[0][6].isnan()
    assert fused.logprob(logits[:0], tokens[:0])[0].shape == (0,)


def test_the_loss_on_the_page_is_that_of_grpo(B=3, T=5, V=40):
    """Also its gradient, where a positive advantage clips a ratio that overflows."""
    page = Path(ROOT, "docs/speed.md").read_text("utf-8")
    [code] = re.findall("```python\n(.*?)```", page, re.S)
    page = {}
    exec(code.replace("from logprob", "from kernels.logprob"), page)
    (logits, tokens, old_logps, _), _ = problem(torch.float32, B * T, V)
    old_logps[6] -= 1000
    logits, tokens, old_logps = (x.unflatten(0, (B, T)) for x in (logits, tokens, old_logps))
    tokens[0, -2:] = -1
    advantages = torch.tensor([-1.5, 0.5, 1.0], device=DEVICE)
    x, y = logits.requires_grad_(), logits.detach().double().requires_grad_()
    loss = page["grpo_loss"](x, tokens, old_logps, advantages[:, None], 0.7)
    mask = (tokens >= 0).double()
    logps, *_ = fused.logprob_torch(y, tokens, temperature=0.7)
    token_loss = grpo.policy_loss(logps, old_logps.double(), advantages.double(), mask,
                                  "grpo", 0.2, 0.28)
    exact = grpo.aggregate(token_loss, mask, "sequence_mean")
    assert_close(loss.double(), exact, rtol=1e-5, atol=0)
    [ours], [theirs] = torch.autograd.grad(loss, x), torch.autograd.grad(exact, y)
    assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-7)
    assert theirs[1, 1].abs().max() == 0 < theirs[1, 0].abs().max()


def empty(n):
    """Make n bf16 numbers, which on the CPU take no memory until they are touched. -> (n,)"""
    if DEVICE == "cuda":
        return torch.empty(n, dtype=torch.bfloat16, device="cuda")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000     # mmap.MAP_NORESERVE in Python 3.13
    return torch.frombuffer(mmap.mmap(-1, 2 * n, flags=flags), dtype=torch.bfloat16)


@device
def test_rows_may_begin_beyond_two_to_the_31(V=64, apart=2**30):
    """Row 2 begins at 2^31, which overflows a product of int32 to -2^31."""
    (logits, tokens, old_logps, _), g = problem(torch.bfloat16, 3, V)
    far = empty(2 * apart + V).as_strided((1, 3, V), (3 * apart, apart, 1))
    grad = empty(2 * apart + V).as_strided((1, 3, V), (3 * apart, apart, 1))
    far[0].copy_(logits)
    exact = definition(logits, tokens, old_logps, g=g)
    with torch.no_grad():
        logps, ratio, entropy = fused.logprob(far[0], tokens, old_logps)
    compare((logps, ratio, entropy), exact, torch.bfloat16)
    m = logits.max(1).values.float()
    S = (logits - m[:, None]).exp().sum(1)
    fused.launch(fused.backward_kernel, far, (tokens, ratio, entropy, m, S, *g, grad), 1.0,
                 ALIKE=True)
    compare((logps, ratio, entropy, grad[0]), exact, torch.bfloat16, g)


# ---- 3. without a GPU ------------------------------------------------------------------------

@compiled
@pytest.mark.parametrize("name", ["forward_kernel", "backward_kernel"])
@pytest.mark.parametrize("target, dtype, V, scale", [
    (90, "bf16", 151936, "fp32"), (80, "fp32", 50257, "fp64")])
def test_a_kernel_compiles_with_loads_and_stores_of_128_bits(name, target, dtype, V, scale):
    """Compile the kernel as `launch` would for contiguous logits."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    kernel = getattr(fused, name)
    width = 4 if dtype == "fp32" else 8
    constants = fused.tile(V, width, math.gcd(V, 8 * width)) | (
        {"ON_POLICY": False} if name == "forward_kernel" else {"ALIKE": V == 50257})
    types = dict.fromkeys(fused.SIZES, "i32") | dict.fromkeys(constants, "constexpr") | {
        "logits": f"*{dtype}", "grad": f"*{dtype}", "tokens": "*i64", "scale": scale}
    signature = {argument: types.get(argument, "*fp32") for argument in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, argument in enumerate(signature)
               if signature[argument].startswith("*")}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    gpu = GPUTarget("cuda", target, 32)
    compiled = fused.triton.compile(source, target=gpu, options=fused.OPTIONS)
    assert compiled.asm["cubin"] and compiled.asm["ptx"].count("ex2.approx") >= 2
    assert compiled.asm["ptx"].count("ld.global.v4") == 1
    assert name == "forward_kernel" or compiled.asm["ptx"].count("st.global.v4") == 1


@compiled
@pytest.mark.skipif(DEVICE == "cuda", reason="all of this ran on the GPU")
def test_all_of_this_holds_in_tritons_interpreter():
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", Path(__file__),
               "-k", "not compiles and not interpreter"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"},
                          capture_output=True, text=True, timeout=3600)
    error = done.stdout[-5000:] + done.stderr[-1000:]
    assert done.returncode == 0 and "skipped" not in done.stdout, error
