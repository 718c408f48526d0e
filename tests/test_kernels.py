"""The fused log-probability, ratio and entropy against their definition in float64.

Without a GPU, test_all_of_this_holds_in_tritons_interpreter runs this file once more, in a process
of its own with TRITON_INTERPRET=1, where the kernels run on the CPU. What the compiler makes of
them for a GPU is looked at in any case. With a GPU, every test runs on it as well.
"""
import json
import math
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from kernels import logprob as fused

HERE = Path(__file__).resolve()
ROOT = HERE.parent.parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

# numpy's, of log(0) in rows of padding
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
device = pytest.mark.skipif(
    not fused.can_run(DEVICE), reason="needs Triton and a GPU of CUDA 8.0")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The error allowed, as a share of the largest number in a sum, from logits of any dtype.
EXACT = 1e-6
# The error of a gradient when it is stored. The interpreter cuts bf16 off where a GPU rounds.
ROUNDING = {torch.float32: 0, torch.float16: 2**-11, torch.bfloat16: 2**-8}
if INTERPRETED:
    ROUNDING[torch.bfloat16] = 2**-7


def compiler(test):
    """A test of what is compiled, so not for the interpreter."""
    if INTERPRETED:
        return None
    return pytest.mark.skipif(not fused.triton, reason="no Triton")(test)


@pytest.fixture
def L():
    """The module under test."""
    return fused


def problem(dtype, N, V, temperature=1.0, off_policy=True, padding=(), scale=3.0):
    """-> (logits, tokens, old_logps, temperature) and g, the derivatives of a loss by logps, ratio
    and entropy. The maximum of row 0 is in the last column; row 1 rises all the way."""
    generator = torch.Generator().manual_seed(1000 * N + V)
    logits = torch.randn(N, V, generator=generator) * scale
    logits[0, -1] = logits[0].max() + 2
    logits[1:2] = logits[1:2].sort().values
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


def run(function, logits, *args, g=None, **options):
    """-> logps, ratio, entropy and, if g holds the derivatives of a loss by them, its gradient by
    the logits; else None"""
    x = logits.detach().requires_grad_()
    outputs = function(x, *args, **options)
    if g is not None:
        gradients = [g_i.to(output).view_as(output) for g_i, output in zip(g, outputs)]
        torch.autograd.backward(outputs, gradients)
    return [output.detach() for output in outputs] + [x.grad]


def definition(logits, *args, g=None):
    return run(fused.logprob_torch, logits.double(), *args, g=g)


def compare(ours, exact, dtype, g=None, temperature=1.0):
    """The values agree and, with the g it is made from, the gradient, in which terms of that size
    cancel out."""
    logps, ratio, entropy, grad = exact
    size = 1 + logps.abs()
    bounds = {"logps": EXACT * size,
              "ratio": EXACT * size * ratio + 1e-30,
              "entropy": EXACT * (1 + entropy)}
    if g is not None:
        g_logps, g_ratio, g_entropy = g.view(3, *size.shape)
        terms = g_logps.abs() + (ratio * g_ratio).abs() + ((1 + entropy) * g_entropy).abs()
        bound = EXACT * (terms * size / temperature)[..., None] + ROUNDING[dtype] * grad.abs()
        bounds["gradient"] = bound + 6e-8 * (dtype == torch.float16)
    for (name, bound), a, b in zip(bounds.items(), ours, exact):
        expected = dtype if name == "gradient" else torch.float32
        assert a.dtype == expected and a.shape == b.shape, name
        error = (a.double() - b).abs().masked_fill(a == b, 0)                   # -inf is -inf
        worst = (error / bound).max() if error.numel() else 0
        assert (error <= bound).all(), f"{name} off by {worst:.1e} bounds"


def agree(L, dtype, N, V, **options):
    (logits, *args), g = problem(dtype, N, V, **options)
    ours = run(L.logprob, logits, *args, g=g)
    compare(ours, definition(logits, *args, g=g), dtype, g, args[-1])


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


@pytest.mark.parametrize("output", ["logps", "ratio", "entropy"])
def test_the_definition_has_the_gradient_of_finite_differences(output):
    (logits, tokens, old_logps, _), _ = problem(torch.float64, 4, 7, padding=[2])

    def values(x):
        outputs = fused.logprob_torch(x, tokens, old_logps.double(), 0.7)
        return dict(zip(("logps", "ratio", "entropy"), outputs))[output]
    assert torch.autograd.gradcheck(values, logits.requires_grad_())


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from kernels import logprob as L
assert L.triton is None and not L.can_run("cpu") and not L.can_run("cuda")
x, tokens = torch.randn(4, 9, requires_grad=True), torch.tensor([1, 0, -1, 8])
assert all(map(torch.equal, L.logprob(x, tokens), L.logprob_torch(x, tokens)))
"""


def test_without_triton_it_is_the_definition():
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON], cwd=ROOT, check=True)


# ---- 2. the kernels --------------------------------------------------------------------------

SHAPES = [(5, 2), (1, 3), (33, 8), (5, 64), (5, 127), (1, 266), (33, 266), (5, 512), (5, 1000),
          (1, 4096), (5, 9001), (140, 3)]


@device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N, V", SHAPES)
def test_kernels_agree_with_float64_autograd(L, dtype, N, V):
    variant = N + V + DTYPES.index(dtype)
    temperature = (1.0, 0.7, 1.9)[variant % 3]
    padding = [2] if N > 2 and variant % 4 < 2 else []
    off_policy = variant % 2 == 0
    agree(L, dtype, N, V, temperature=temperature, off_policy=off_policy, padding=padding)


@device
def test_the_maximum_may_come_in_any_tile(L, N=5, V=9008):
    """Row 0 has it in the last tile; row 1 rises all the way; row 2 is made to fall all the way."""
    (logits, *args), g = problem(torch.bfloat16, N, V, scale=9.0)
    logits[2] = logits[2].sort(descending=True).values
    ours = run(L.logprob, logits, *args, g=g)
    compare(ours, definition(logits, *args, g=g), torch.bfloat16, g)


@device
@pytest.mark.parametrize("shift", [-1024, 1024])
def test_logits_far_from_zero_lose_nothing(L, shift):
    (logits, *args), g = problem(torch.bfloat16, 8, 512)
    logits = logits + shift
    ours = run(L.logprob, logits, *args, g=g)
    compare(ours, definition(logits, *args, g=g), torch.bfloat16, g)


@device
def test_on_policy_the_ratio_is_one_and_has_the_gradient_of_the_log_probability(L):
    (logits, tokens, _, _), _ = problem(torch.float32, 6, 50)
    x = logits.requires_grad_()
    logps, ratio, _ = L.logprob(x, tokens)
    assert torch.equal(ratio, torch.ones_like(ratio))
    by_ratio, = torch.autograd.grad(ratio.sum(), x, retain_graph=True)
    by_logps, = torch.autograd.grad(logps.sum(), x)
    assert torch.equal(by_ratio, by_logps) and by_ratio.abs().max() > 0.1


@device
@pytest.mark.parametrize("inplace", [False, True])
def test_padding_gives_constants_and_no_gradient_whatever_is_there(L, inplace):
    (logits, tokens, old_logps, _), g = problem(torch.bfloat16, 40, 100, padding=range(0, 40, 3))
    is_padding = tokens < 0
    clean = run(L.logprob, logits, tokens, old_logps, g=g)
    logits[is_padding] = math.nan
    old_logps[is_padding] = math.nan
    g[:, is_padding] = math.nan
    logits[0] = math.inf
    dirty = run(L.logprob, logits.clone(), tokens, old_logps, 1.0, inplace, g=g)
    for value, a, b in zip((0, 1, 0, 0), clean, dirty):
        assert (b[is_padding] == value).all() and torch.equal(a, b)


def logits_view(name, x, B, T, V):
    """Logits that are a view of x (2 B, T + 1, more than V). -> (B, T, V)"""
    if name == "shifted":
        return x[:B, :-1, 3:V + 3]
    if name == "padded head":
        return x[:B, 1:, :V]
    if name == "every other":
        return x[::2, 1:, :V]
    if name == "reversed":
        return x[:T, :B, :V].transpose(0, 1)
    if name == "columns":
        return x[:B, 1:, :V].transpose(1, 2).contiguous().transpose(1, 2)
    return x[0, 0, :V].expand(B, T, V)


@device
@pytest.mark.parametrize(
    "view", ["shifted", "padded head", "every other", "reversed", "columns", "repeated"])
def test_logits_and_tokens_may_be_views(L, view):
    B, T, V = 3, 4, 40
    generator = torch.Generator().manual_seed(0)
    width = V + 8 if view == "padded head" else V + 7       # 128 bits divide a row, or not
    big = torch.randn(2 * B, T + 1, width, generator=generator).to(DEVICE)
    tokens = torch.randint(V, (B, T + 1), generator=generator).to(DEVICE)[:, 1:]
    logits = logits_view(view, big, B, T, V)
    old_logps = torch.randn(B, T, generator=generator).to(DEVICE) - 3
    g = torch.randn(3, B, T, generator=generator).to(DEVICE)
    assert logits.shape == (B, T, V)
    assert not logits.is_contiguous() and not tokens.is_contiguous()
    ours = run(L.logprob, logits, tokens, old_logps, 0.8, g=g)
    exact = definition(logits, tokens, old_logps, 0.8, g=g)
    compare(ours, exact, torch.float32, g, 0.8)


@device
@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (2, 3, 4), (2, 2, 3, 2), (0,), (3, 0)])
def test_any_number_of_dimensions_will_do(L, shape):
    n = math.prod(shape)
    (logits, tokens, old_logps, _), g = problem(torch.float32, max(n, 1), 16)
    logits = logits[:n].view(*shape, 16)
    tokens = tokens[:n].view(shape)
    old_logps = old_logps[:n].view(shape)
    g = g[:, :n]
    ours = run(L.logprob, logits, tokens.int(), old_logps, g=g)
    assert all(value.shape == shape for value in ours[:3])
    if n > 0:
        compare(ours, definition(logits, tokens, old_logps, g=g), torch.float32, g)


@device
@pytest.mark.parametrize("V", [70, 9001])
def test_impossible_tokens_count_for_nothing(L, V):
    """Logits of -inf: a few, all but two, and, of the large vocabulary, whole tiles."""
    (logits, tokens, old_logps, _), g = problem(torch.float32, 4, V)
    logits[0, :-1:3] = -math.inf
    logits[1, 1:-1] = -math.inf
    logits[2, :V // 2] = -math.inf
    tokens[1:3] = V - 1
    exact = definition(logits, tokens, old_logps, g=g)
    assert all(value.isfinite().all() for value in exact)
    compare(run(L.logprob, logits, tokens, old_logps, g=g), exact, torch.float32, g)

    tokens[2] = 0                                       # to have sampled one is impossible, too
    logps, ratio, entropy, grad = run(L.logprob, logits, tokens, old_logps, g=g)
    assert logps[2] == -math.inf and ratio[2] == 0
    assert entropy[2].isfinite() and grad.isfinite().all()


@device
def test_nan_stays_nan_in_its_row_alone(L):
    (logits, tokens, old_logps, _), g = problem(torch.float32, 6, 300)
    logits[1, 200] = math.nan
    logits[3] = -math.inf
    logits[4, 7] = math.inf
    for x in run(L.logprob, logits, tokens, old_logps, g=g):
        is_nan = x.isnan().view(6, -1)
        assert is_nan[[1, 3, 4]].all() and not is_nan[[0, 2, 5]].any()


@device
def test_a_token_outside_the_vocabulary_is_nan(L):
    (logits, tokens, _, _), _ = problem(torch.float32, 6, 32)
    tokens[2] = 33
    logps, _, _ = L.logprob(logits, tokens)
    assert logps.isnan().tolist() == [False, False, True, False, False, False]


@device
@pytest.mark.parametrize("top", [30.0, 1e4, 3e38])
def test_a_certain_token_has_log_probability_and_entropy_zero(L, top):
    logits = torch.zeros(1, 50, device=DEVICE)
    logits[0, 20] = top
    tokens = torch.tensor([20], device=DEVICE)
    logps, ratio, entropy, grad = run(L.logprob, logits, tokens, g=torch.ones(3, 1))
    assert -1e-7 < logps.item() <= 0 <= entropy.item() < 1e-6
    assert ratio.item() == 1 and grad.abs().max() < 1e-6


@device
def test_a_ratio_that_no_loss_uses_may_be_infinite(L):
    (logits, tokens, old_logps, _), _ = problem(torch.float32, 4, 32)
    x = logits.requires_grad_()
    logps, ratio, _ = L.logprob(x, tokens, old_logps - 1000)
    logps.sum().backward()
    assert ratio.isinf().all() and x.grad.isfinite().all() and x.grad.abs().max() > 0.1


@device
def test_inplace_writes_the_same_gradient_over_the_logits(L):
    (logits, *args), g = problem(torch.bfloat16, 5, 266, padding=[2])
    *_, expected = run(L.logprob, logits, *args, g=g)
    hidden = logits.clone().requires_grad_()
    x = hidden * 1                                      # as a head's output: nothing else needs it
    x.retain_grad()
    torch.autograd.backward(L.logprob(x, *args, inplace=True), list(g))
    assert torch.equal(x.grad, expected) and torch.equal(x.detach(), expected)
    assert torch.equal(hidden.grad, expected) and torch.equal(hidden.detach(), logits)


@device
def test_logits_overwritten_inplace_are_not_used_again(L):
    (logits, *args), _ = problem(torch.float32, 5, 20)
    x = logits.requires_grad_() * 1
    logps, _, _ = L.logprob(x, *args, inplace=True)
    loss = logps.sum()
    other_loss = x.exp().mul(x).sum()                   # needs x as it was
    loss.backward(retain_graph=True)
    for late in (loss, other_loss):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            late.backward()


@device
def test_without_inplace_the_logits_stay_and_backward_may_run_twice(L):
    (logits, *args), _ = problem(torch.float32, 5, 20)
    x = logits.clone().requires_grad_()
    logps, _, _ = L.logprob(x, *args)
    first, = torch.autograd.grad(logps.sum(), x, retain_graph=True)
    second, = torch.autograd.grad(logps.sum(), x, retain_graph=True)
    assert torch.equal(first, second) and torch.equal(x.detach(), logits)


@device
def test_rows_are_on_the_grids_first_axis(L):
    class Kernel:
        def __getitem__(self, grid):
            assert len(grid) == 1 and grid[0] == 70_000         # the other two end at 65,535
            return lambda *args, **options: None
    logits = torch.zeros(1, 1, 5000, device=DEVICE).expand(1, 70_000, 5000)
    L.launch(Kernel(), logits, (), logits.stride()[:2], 1.0)


def empty(n):
    """n bf16 numbers that take no memory until they are touched."""
    if DEVICE == "cuda":
        return torch.empty(n, dtype=torch.bfloat16, device="cuda")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000     # MAP_NORESERVE, from Python 3.13 on
    return torch.frombuffer(mmap.mmap(-1, 2 * n, flags=flags), dtype=torch.bfloat16)


@device
def test_rows_may_begin_beyond_two_to_the_31(L, V=64, apart=2**30):
    """Row 2 does, and a product of int32 would have it begin 2^31 before the first."""
    (logits, tokens, old_logps, _), g = problem(torch.bfloat16, 3, V)
    far = empty(2 * apart + V).as_strided((1, 3, V), (3 * apart, apart, 1))
    grad = empty(2 * apart + V).as_strided((1, 3, V), (3 * apart, apart, 1))
    far[0].copy_(logits)
    exact = definition(logits, tokens, old_logps, g=g)
    with torch.no_grad():
        logps, ratio, entropy = L.logprob(far[0], tokens, old_logps)
    compare((logps, ratio, entropy), exact, torch.bfloat16)
    m = logits.max(1).values.float()
    S = (logits - m[:, None]).exp().sum(1)
    L.run_backward(far, (tokens, ratio, entropy, m, S, *g), grad, 1.0)
    compare((logps, ratio, entropy, grad[0]), exact, torch.bfloat16, g)


# ---- 3. for a GPU that need not be here ------------------------------------------------------

@compiler
@pytest.mark.parametrize("name", ["forward_kernel", "backward_kernel"])
@pytest.mark.parametrize("target, dtype, V, scale", [
    (90, "bf16", 151936, "fp32"), (90, "fp16", 512, "fp64"), (80, "fp32", 50257, "fp32")])
def test_a_kernel_compiles(name, target, dtype, V, scale):
    """As `launch` would compile it, for contiguous logits."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    kernel = getattr(fused, name)
    constants = fused.tile(V, 4 if dtype == "fp32" else 2, V)
    if "ON_POLICY" in kernel.arg_names:
        constants = constants | {"ON_POLICY": False}
    types = dict.fromkeys(fused.SIZES, "i32") | dict.fromkeys(constants, "constexpr") | {
        "logits": f"*{dtype}", "grad": f"*{dtype}", "tokens": "*i64", "scale": scale}
    signature = {argument: types.get(argument, "*fp32") for argument in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=constants)
    options = {"num_warps": fused.THREADS // 32}
    compiled = fused.triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    assert compiled.asm["cubin"] and compiled.asm["ptx"].count("ex2.approx") >= 2


# ---- 4. in the scripts -----------------------------------------------------------------------

FLAGS = ("--device cpu --task arithmetic:3 --hidden_size 16 --intermediate_size 16 "
         "--num_attention_heads 2 --num_prompts 3 --num_generations 4 --max_completion_length 6 "
         "--max_steps 2 --stop_at 2 --base_steps 0 --num_eval_problems 4 --num_eval_samples 2 "
         "--temperature 0.8 --learning_rate 0.01 --beta 0.1 --entropy_coef 0.1")


@compiler
def test_a_run_learns_the_same_by_triton_and_by_torch(tmp_path):
    """grpo.py alone, since what calls the kernel is the same text in each script."""
    runs = []
    for kernel in ("triton", "torch"):
        command = [sys.executable, ROOT / "grpo.py", *FLAGS.split(), "--kernel", kernel,
                   "--output_dir", kernel]
        runs.append(subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL,
                                     env=os.environ | {"TRITON_INTERPRET": "1"}))
    assert [run.wait(300) for run in runs] == [0, 0]
    by_triton, by_torch = ((tmp_path / kernel / "metrics.jsonl").read_text().splitlines()
                           for kernel in ("triton", "torch"))
    for one, other in zip(map(json.loads, by_triton), map(json.loads, by_torch), strict=True):
        for name in ("loss", "reward", "entropy", "kl", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), name


# ---- 5. all of it, without a GPU -------------------------------------------------------------

@compiler
def test_all_of_this_holds_in_tritons_interpreter():
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", HERE]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"},
                          capture_output=True, text=True, timeout=500)
    error = done.stdout[-5000:] + done.stderr[-1000:]
    assert done.returncode == 0 and "skipped" not in done.stdout, error
