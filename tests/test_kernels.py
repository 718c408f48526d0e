"""The fused log-probability, ratio and entropy against their definition in float64.

Without a GPU, test_all_of_this_holds_in_tritons_interpreter runs this file once more, in a process of its own
with TRITON_INTERPRET=1, where the kernels run on the CPU. What the compiler makes of them for a GPU is looked
at in any case. With a GPU, every test runs on it as well.
"""
import functools
import importlib.util
import json
import math
import mmap
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import kernel_bugs
import pytest
import torch
from torch.testing import assert_close

from kernels import logprob as fused

HERE = Path(__file__).resolve()
ROOT = HERE.parent.parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

device = pytest.mark.skipif(not fused.available(DEVICE), reason="needs Triton and a GPU of CUDA 8.0")
interpreter = (lambda test: test) if INTERPRETED else (lambda test: None)       # no test elsewhere, no skip
compiler = (lambda test: None) if INTERPRETED else pytest.mark.skipif(not fused.triton, reason="no Triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")      # numpy's, of log(0) in rows of padding

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EXACT = 1e-6        # error allowed, as a share of the largest number in a sum, from logits of any dtype
# of a gradient when it is stored; the interpreter cuts bf16 off where a GPU rounds
ROUNDING = {torch.float32: 0, torch.float16: 2**-11, torch.bfloat16: 2**-7 if INTERPRETED else 2**-8}


@pytest.fixture
def L():
    """The module under test."""
    return fused


def problem(dtype, N, V, temperature=1.0, off_policy=True, padding=(), scale=3.0):
    """-> (logits, tokens, old_logps, temperature) and g, a loss's gradients by logps, ratio and entropy.
    The maximum of row 0 is in the last column; row 1 rises all the way."""
    random = torch.Generator().manual_seed(1000 * N + V)
    logits = torch.randn(N, V, generator=random) * scale
    logits[0, -1] = logits[0].max() + 2
    logits[1:2] = logits[1:2].sort().values
    tokens = torch.randint(V, (N,), generator=random)
    tokens[0] = V - 1
    logits = logits.to(dtype)
    old = torch.log_softmax(logits.double() / temperature, -1).gather(1, tokens[:, None])[:, 0]
    old = (old + torch.randn(N, generator=random) / 2).float()
    tokens[list(padding)] = -1
    g = torch.randn(3, N, generator=random).to(DEVICE)
    return (logits.to(DEVICE), tokens.to(DEVICE), old.to(DEVICE) if off_policy else None, temperature), g


def run(function, logits, *args, g=None, **options):
    """-> logps, ratio, entropy and, with the gradients g of a loss by them, its gradient by the logits"""
    x = logits.detach().requires_grad_()
    out = function(x, *args, **options)
    if g is not None:
        torch.autograd.backward(out, [g_i.to(o).view_as(o) for g_i, o in zip(g, out)])
    return [o.detach() for o in out] + [x.grad]


def definition(logits, *args, g=None):
    return run(fused.logprob_torch, logits.double(), *args, g=g)


def compare(ours, exact, dtype, g=None, temperature=1.0):
    """Values and, with the g it is made from, the gradient, in which terms of that size cancel out."""
    logps, ratio, entropy, grad = exact
    size = 1 + logps.abs()
    bounds = {"logps": EXACT * size, "ratio": EXACT * size * ratio + 1e-30, "entropy": EXACT * (1 + entropy)}
    if g is not None:
        terms = sum((a * b).abs() for a, b in zip((1, ratio, 1 + entropy), g.view(3, *size.shape)))
        bounds["gradient"] = (EXACT * (terms * size / temperature)[..., None] + ROUNDING[dtype] * grad.abs()
                              + 6e-8 * (dtype == torch.float16))
    for (name, bound), a, b in zip(bounds.items(), ours, exact):
        assert a.dtype == (dtype if name == "gradient" else torch.float32) and a.shape == b.shape, name
        error = (a.double() - b).abs().masked_fill(a == b, 0)                   # -inf is -inf
        assert (error <= bound).all(), f"{name} off by {error.max():.1e}, {(error / bound).max():.1e} bounds"


def agree(L, dtype, N, V, **options):
    (logits, *args), g = problem(dtype, N, V, **options)
    compare(run(L.logprob, logits, *args, g=g), definition(logits, *args, g=g), dtype, g, args[-1])


# ---- 1. the definition ----------------------------------------------------------------------------------

def test_the_definition_is_what_the_docstring_says():
    y = torch.tensor([[1.0, 2.0, 4.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    p = y.exp() / y.exp().sum(1, keepdim=True)
    tokens, old = torch.tensor([2, 0]), torch.tensor([-1.0, -2.0], dtype=torch.float64)
    logps, ratio, entropy = fused.logprob_torch(y * 0.5, tokens, old, temperature=0.5)
    assert_close(logps, torch.log(torch.stack([p[0, 2], p[1, 0]])))
    assert_close(ratio, torch.stack([p[0, 2] / math.exp(-1), p[1, 0] / math.exp(-2)]))
    assert_close(entropy, torch.stack([-(p[0] * p[0].log()).sum(), torch.tensor(math.log(3)).double()]))
    assert torch.equal(fused.logprob_torch(y, tokens)[1], torch.ones(2).double())


@pytest.mark.parametrize("off_policy", [True, False])
def test_the_definition_has_the_gradient_of_finite_differences(off_policy):
    (logits, tokens, old, _), _ = problem(torch.float64, 4, 7, off_policy=off_policy, padding=[2])
    values = lambda x: fused.logprob_torch(x, tokens, None if old is None else old.double(), 0.7)
    x = logits.requires_grad_()
    if off_policy:
        assert torch.autograd.gradcheck(values, x)
    else:               # here the ratio is 1 wherever x is: its gradient is that of the log-probability
        assert torch.autograd.gradcheck(lambda x: values(x)[::2], x)
        for_ratio, for_logps = (torch.autograd.grad(values(x)[i].sum(), x)[0] for i in (1, 0))
        assert_close(for_ratio, for_logps)


def test_every_equation_in_the_docstring_is_tagged_in_the_code_and_vice_versa():
    source = (ROOT / "kernels" / "logprob.py").read_text()
    stated = set(re.findall(r" \((\d+)\)$", fused.__doc__, re.M))
    tagged = set(re.findall(r"eq\. \((\d+)\)", source))
    assert stated == tagged == {str(i) for i in range(1, 9)}


def test_where_no_kernel_runs_it_is_the_definition():
    (logits, *args), g = problem(torch.float64, 5, 33, padding=[3])
    logits, args, g = logits.cpu(), [a.cpu() if isinstance(a, torch.Tensor) else a for a in args], g.cpu()
    for a, b in zip(run(fused.logprob, logits, *args, g=g), run(fused.logprob_torch, logits, *args, g=g)):
        assert a.dtype == torch.float64 and torch.equal(a, b)


@compiler
def test_a_cpu_runs_no_kernel():
    assert not fused.available("cpu") and not fused.available(torch.device("cpu"))


def test_without_triton_it_is_the_definition():
    code = ("import sys; sys.modules['triton'] = None; import torch; from kernels import logprob as L; "
            "assert L.triton is None and not L.available('cpu') and not L.available('cuda'); "
            "x, t = torch.randn(4, 9, requires_grad=True), torch.tensor([1, 0, -1, 8]); "
            "assert all(map(torch.equal, L.logprob(x, t), L.logprob_torch(x, t)))")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# ---- 2. the kernels -------------------------------------------------------------------------------------

SMALL = [(N, V) for V in (2, 3, 8, 64, 127, 266, 512) for N in (1, 5, 33)]
LARGE = [(N, V) for V in (1000, 4096, 9001) for N in (1, 5)]


@device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N, V", SMALL + LARGE)
def test_kernels_agree_with_float64_autograd(L, dtype, N, V):
    variant = N + V + DTYPES.index(dtype)
    agree(L, dtype, N, V, temperature=(1.0, 0.7, 1.9)[variant % 3], off_policy=variant % 2 == 0,
          padding=[2] if N > 2 and variant % 4 < 2 else [])


@device
def test_the_maximum_may_come_in_any_tile(L, N=5, V=9008):
    """Row 0 has it in the last, row 1 rises all the way; here, row 2 falls all the way."""
    (logits, *args), g = problem(torch.bfloat16, N, V, scale=9.0)
    logits[2] = logits[2].sort(descending=True).values
    compare(run(L.logprob, logits, *args, g=g), definition(logits, *args, g=g), torch.bfloat16, g)


@device
@pytest.mark.parametrize("shift", [-1024, 1024])
def test_logits_far_from_zero_lose_nothing(L, shift):
    (logits, *args), g = problem(torch.bfloat16, 8, 512)
    logits = logits + shift
    compare(run(L.logprob, logits, *args, g=g), definition(logits, *args, g=g), torch.bfloat16, g)


@device
@pytest.mark.parametrize("temperature", [0.05, 1, 20.0])
def test_any_temperature_will_do(L, temperature):
    agree(L, torch.float32, 5, 100, temperature=temperature)


@device
def test_on_policy_the_ratio_is_one_and_has_the_gradient_of_the_log_probability(L):
    (logits, tokens, _, _), _ = problem(torch.float32, 6, 50)
    x = logits.requires_grad_()
    logps, ratio, _ = L.logprob(x, tokens)
    assert torch.equal(ratio, torch.ones_like(ratio))
    for_ratio, for_logps = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in (ratio, logps))
    assert torch.equal(for_ratio, for_logps) and for_ratio.abs().max() > 0.1


@device
@pytest.mark.parametrize("inplace", [False, True])
def test_padding_gives_constants_and_no_gradient_whatever_is_there(L, inplace):
    (logits, tokens, old, _), g = problem(torch.bfloat16, 40, 100, padding=range(0, 40, 3))
    pad = tokens < 0
    clean = run(L.logprob, logits, tokens, old, g=g)
    logits[pad], old[pad], g[:, pad] = math.nan, math.nan, math.nan
    logits[0] = math.inf
    dirty = run(L.logprob, logits.clone(), tokens, old, 1.0, inplace, g=g)
    for value, a, b in zip((0, 1, 0, 0), clean, dirty):
        assert (b[pad] == value).all() and torch.equal(a, b)


@device
@pytest.mark.parametrize("view", ["shifted", "every other", "columns", "repeated", "padded head", "reversed"])
def test_logits_and_tokens_may_be_views(L, view):
    B, T, V = 3, 4, 40
    random = torch.Generator().manual_seed(0)
    width = V + 8 if view == "padded head" else V + 7              # what a row of 128 bits divides, or not
    big = torch.randn(2 * B, T + 1, width, generator=random).to(DEVICE)
    tokens = torch.randint(V, (B, T + 1), generator=random).to(DEVICE)[:, 1:]               # not contiguous
    logits = {"shifted": big[:B, :-1, 3:V + 3], "padded head": big[:B, 1:, :V],
              "every other": big[::2, 1:, :V], "reversed": big[:T, :B, :V].transpose(0, 1),
              "columns": big[:B, 1:, :V].transpose(1, 2).contiguous().transpose(1, 2),
              "repeated": big[0, 0, :V].expand(B, T, V)}[view]
    old = torch.randn(B, T, generator=random).to(DEVICE) - 3
    g = torch.randn(3, B, T, generator=random).to(DEVICE)
    assert logits.shape == (B, T, V) and not logits.is_contiguous()
    ours, exact = (f(logits, tokens, old, 0.8, g=g) for f in (functools.partial(run, L.logprob), definition))
    compare(ours, exact, torch.float32, g, 0.8)


@device
@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (2, 3, 4), (2, 2, 3, 2), (0,), (3, 0)])
def test_any_number_of_dimensions_will_do(L, shape):
    n = math.prod(shape)
    (logits, tokens, old, _), g = problem(torch.float32, max(n, 1), 16)
    logits, g = logits[:n].view(*shape, 16), g[:, :n]
    tokens, old = tokens[:n].view(shape), old[:n].view(shape)
    ours = run(L.logprob, logits, tokens.int(), old, g=g)
    assert all(value.shape == shape for value in ours[:3])
    if n:
        compare(ours, definition(logits, tokens, old, g=g), torch.float32, g)


@device
@pytest.mark.parametrize("V", [70, 9001])
def test_impossible_tokens_count_for_nothing(L, V):
    """Logits of -inf: a few, all but two, and (of the large one) whole tiles."""
    (logits, tokens, old, _), g = problem(torch.float32, 4, V)
    logits[0, :-1:3] = -math.inf
    logits[1, 1:-1] = -math.inf
    logits[2, :V // 2] = -math.inf
    tokens[1:3] = V - 1
    exact = definition(logits, tokens, old, g=g)
    assert all(value.isfinite().all() for value in exact)
    compare(run(L.logprob, logits, tokens, old, g=g), exact, torch.float32, g)
    tokens[2] = 0                                       # to have sampled one is impossible, too
    logps, ratio, entropy, grad = run(L.logprob, logits, tokens, old, g=g)
    assert logps[2] == -math.inf and ratio[2] == 0 and entropy[2].isfinite() and grad.isfinite().all()


@device
def test_nan_stays_nan_in_its_row_alone(L):
    (logits, tokens, old, _), g = problem(torch.float32, 6, 300)
    logits[1, 200], logits[3] = math.nan, -math.inf
    logits[4, 7] = math.inf
    for x in run(L.logprob, logits, tokens, old, g=g):
        bad = x.isnan().view(6, -1)
        assert bad[[1, 3, 4]].all() and not bad[[0, 2, 5]].any()


@device
def test_a_token_outside_the_vocabulary_is_nan(L):
    (logits, tokens, _, _), _ = problem(torch.float32, 6, 32)
    tokens[2] = 33
    assert L.logprob(logits, tokens)[0].isnan().tolist() == [False, False, True, False, False, False]


@device
@pytest.mark.parametrize("scale", [0.0, 1.0, 60.0])
@pytest.mark.parametrize("dtype, V", [(torch.float32, 77), (torch.bfloat16, 128)])
def test_probabilities_are_probabilities(L, dtype, V, scale):
    """logp <= 0, 0 <= entropy <= ln V, all tokens' probabilities sum to 1, and a row of the gradient to 0."""
    (logits, *_), g = problem(dtype, 4, V, scale=scale)
    for row in logits:
        logps, _, entropy = L.logprob(row.expand(V, V), torch.arange(V, device=DEVICE))
        assert (logps <= 0).all() and (entropy >= 0).all() and (entropy <= math.log(V) * (1 + 1e-6)).all()
        assert logps.double().exp().sum().item() == pytest.approx(1, abs=1e-6)
    grad = run(L.logprob, logits.float(), torch.arange(4, device=DEVICE), g=g)[3].double()
    assert (grad.sum(1).abs() <= 1e-5 * (1 + grad.abs().sum(1))).all()


@device
def test_a_certain_token_has_log_probability_and_entropy_zero(L):
    for top in (30.0, 1e4, 3e38):
        logits = torch.zeros(1, 50, device=DEVICE)
        logits[0, 20] = top
        tokens = torch.tensor([20], device=DEVICE)
        logps, ratio, entropy, grad = run(L.logprob, logits, tokens, g=torch.ones(3, 1))
        assert -1e-7 < logps.item() <= 0 <= entropy.item() < 1e-6 and ratio.item() == 1
        assert grad.abs().max() < 1e-6


@device
def test_a_ratio_that_no_loss_uses_may_be_infinite(L):
    (logits, tokens, old, _), _ = problem(torch.float32, 4, 32)
    x = logits.requires_grad_()
    logps, ratio, _ = L.logprob(x, tokens, old - 1000)
    logps.sum().backward()
    assert ratio.isinf().all() and x.grad.isfinite().all() and x.grad.abs().max() > 0.1


@device
def test_each_output_alone_has_its_gradient(L):
    (logits, *args), _ = problem(torch.float32, 5, 20)
    x, y = logits.requires_grad_(), logits.detach().double().requires_grad_()
    for ours, exact in zip(L.logprob(x, *args), fused.logprob_torch(y, *args)):
        a, b = (torch.autograd.grad(f.sum(), at, retain_graph=True)[0] for f, at in ((ours, x), (exact, y)))
        assert_close(a.double(), b, rtol=1e-5, atol=1e-6)


@device
def test_inplace_writes_the_same_gradient_over_the_logits(L):
    (logits, *args), g = problem(torch.bfloat16, 5, 266, padding=[2])
    expected = run(L.logprob, logits, *args, g=g)[3]
    hidden = logits.clone().requires_grad_()
    x = hidden * 1                                      # as a head's output: nobody else needs it
    x.retain_grad()
    torch.autograd.backward(L.logprob(x, *args, inplace=True), list(g))
    assert torch.equal(x.grad, expected) and torch.equal(x.detach(), expected)
    assert torch.equal(hidden.grad, expected) and torch.equal(hidden.detach(), logits)


@device
def test_logits_overwritten_inplace_are_not_used_again(L):
    (logits, *args), _ = problem(torch.float32, 5, 20)
    x = logits.requires_grad_() * 1
    out = L.logprob(x, *args, inplace=True)[0].sum()
    other = x.exp().mul(x).sum()                        # needs x as it was
    out.backward(retain_graph=True)
    for late in (out, other):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            late.backward()


@device
def test_without_inplace_the_logits_stay_and_backward_may_run_twice(L):
    (logits, *args), _ = problem(torch.float32, 5, 20)
    x = logits.clone().requires_grad_()
    out = L.logprob(x, *args)[0].sum()
    first, second = (torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second) and torch.equal(x.detach(), logits)


@device
def test_there_may_be_more_than_65536_rows(L, monkeypatch, N=66_000, V=2):
    if INTERPRETED:
        monkeypatch.setattr(L, "THREADS", 2**14)        # fewer, larger programs: each takes 20 ms
    agree(L, torch.float32, N, V, padding=[2, N - 3])


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
    (logits, tokens, old, _), g = problem(torch.bfloat16, 3, V)
    far, grad = (empty(2 * apart + V).as_strided((1, 3, V), (3 * apart, apart, 1)) for _ in range(2))
    far[0].copy_(logits)
    exact = definition(logits, tokens, old, g=g)
    with torch.no_grad():
        out = L.logprob(far[0], tokens, old)
    compare(out, exact, torch.bfloat16)
    m = logits.max(1).values.float()
    L.launch(L.backward_kernel, far, (tokens, *out[1:], m, (logits - m[:, None]).exp().sum(1), *g, grad),
             (*far.stride()[:2], *grad.stride()[:2]), math.log2(math.e))
    compare([*out, grad[0]], exact, torch.bfloat16, g)


def test_bad_input_gets_one_clear_line(L):
    x, tokens = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.long)
    shared = x[..., :1].expand(2, 3, 5)
    for args, options, line in (((x, tokens[:, 1:]), {}, r"tokens \(2, 2\) for logits \(2, 3, 5\)"),
                                ((x, tokens, torch.zeros(3)), {}, r"old_logps \(3,\) for logits"),
                                ((x, tokens), {"temperature": 0}, "temperature=0: must be > 0"),
                                ((x, tokens), {"temperature": math.nan}, "temperature=nan: must be > 0"),
                                ((shared, tokens), {"inplace": True}, "inplace=True, but strides")):
        with pytest.raises(ValueError, match=line):
            L.logprob(*args, **options)


# ---- 3. bugs, each of which these tests see -------------------------------------------------------------

def made(bug, folder):
    """A copy of the kernels with the bug. -> its path"""
    name, old, new = bug
    source = (ROOT / "kernels" / "logprob.py").read_text()
    assert source.count(old) == 1 and old != new, f"{name}: the old text occurs {source.count(old)} times"
    path = folder / f"{re.sub('[^a-z]+', '_', name.lower())}.py"
    path.write_text(source.replace(old, new))
    return path


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fast_subset(L):
    """Some of the tests above, on another module."""
    agree(L, torch.float32, 5, 266, temperature=0.7, padding=[2])
    test_padding_gives_constants_and_no_gradient_whatever_is_there(L, True)
    test_any_number_of_dimensions_will_do(L, (2, 3))
    test_logits_and_tokens_may_be_views(L, "columns")
    test_logits_and_tokens_may_be_views(L, "reversed")
    test_logits_and_tokens_may_be_views(L, "shifted")
    test_rows_are_on_the_grids_first_axis(L)
    test_a_ratio_that_no_loss_uses_may_be_infinite(L)
    test_a_token_outside_the_vocabulary_is_nan(L)
    test_nan_stays_nan_in_its_row_alone(L)
    test_without_inplace_the_logits_stay_and_backward_may_run_twice(L)
    test_logits_overwritten_inplace_are_not_used_again(L)
    test_logits_far_from_zero_lose_nothing(L, -1024)
    test_impossible_tokens_count_for_nothing(L, 9001)
    test_rows_may_begin_beyond_two_to_the_31(L)
    agree(L, torch.float32, 140, 3)


def fails(module):
    """Whether the fast subset does, in a process of its own: a bug may read where no memory is. Errors that
    come before a number is wrong, anyone would see: they do not count."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)                # which ends it, whatever it waits for
        code = 2
        try:
            fast_subset(module)
            code = 0
        except (AssertionError, pytest.fail.Exception):
            code = 1
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code != -signal.SIGALRM, "no end after 60 s"
    return code < 0 or code == 1        # a signal's number is negative here


@interpreter
def test_the_fast_subset_passes_without_a_bug():
    assert not fails(fused)


@interpreter
@pytest.mark.parametrize("bug", kernel_bugs.WRONG, ids=lambda bug: bug[0])
def test_a_wrong_kernel_is_seen(bug, tmp_path):
    assert fails(load(made(bug, tmp_path)))


# ---- 4. what the compiler makes of the kernels ----------------------------------------------------------

def compiled(cache, *files):
    """What tests/aot.py finds, without Triton's own cache: it may hold what another compiler made."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    out = subprocess.run([sys.executable, HERE.parent / "aot.py", *files], capture_output=True, text=True,
                         env=env | {"TRITON_CACHE_DIR": str(cache)})
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout)


@pytest.fixture(scope="module")
def machine_code(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("cache"))


def slow(kernel):
    """What keeps a compiled kernel from the speed of memory: a list of names, empty if it is well."""
    forward = kernel["kernel"] == "forward_kernel"
    tile, aligned = kernel["per_thread"], kernel["V"] % 8 == 0
    checks = {
        "instructions per logit": kernel["per_logit"] <= (13 if forward else 16),
        "one power per logit, one more to rescale": kernel["powers"] == tile + forward,
        "no stack": kernel["stack"] == kernel["spills"] == 0,
        "registers for 16 warps, to wait for memory in turns": kernel["registers"] <= 128,
        "loads of 128 bits": kernel["loads"] == kernel["loads_128"] or not aligned,
        "stores of 128 bits": kernel["stores"] == kernel["stores_128"] or not aligned,
        "no barrier": kernel["barriers"] == kernel["shared"] == 0,
        "no double precision": kernel["double"] == 0}
    return [name for name, good in checks.items() if not good]


@compiler
def test_the_compiled_loops_are_as_short_as_promised(machine_code):
    assert {(k["target"], k["dtype"], k["kernel"]) for k in machine_code} >= {
        (target, "bf16", kernel) for target in (80, 90) for kernel in ("forward_kernel", "backward_kernel")}
    for kernel in machine_code:
        assert not slow(kernel), (slow(kernel), kernel)


@compiler
def test_the_docstring_tells_the_instructions_per_logit_as_they_are(machine_code):
    told = re.search(r"the loops take ([\d.]+) forward and ([\d.]+) backward", fused.__doc__)
    for kernel, number in zip(machine_code[:2], told.groups()):
        assert (kernel["target"], kernel["dtype"], kernel["V"]) == (90, "bf16", 151936)
        assert float(number) == pytest.approx(kernel["per_logit"], abs=1.0)


@compiler
def test_a_slow_kernel_is_seen(tmp_path):
    bugs = kernel_bugs.SLOW
    kernels = compiled(tmp_path, *(made(bug, tmp_path) for bug in bugs))
    for bug, pair in zip(bugs, zip(kernels[::2], kernels[1::2])):
        assert any(slow(kernel) for kernel in pair), bug[0]


# ---- 5. all of it, without a GPU ------------------------------------------------------------------------

@compiler
def test_all_of_this_holds_in_tritons_interpreter():
    out = subprocess.run([sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", HERE], cwd=ROOT,
                         env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True,
                         timeout=500)
    assert out.returncode == 0 and "skipped" not in out.stdout, out.stdout[-5000:] + out.stderr[-1000:]
