"""linear_logprob against its definition, with the logits in memory, in float64; and its own memory.

Without a GPU, the last test runs this file once more in Triton's interpreter, where the row kernels
run, too.
"""
import itertools
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from kernels import linear_logprob as linear
from kernels import logprob as row_kernels
from kernels.linear_logprob import linear_logprob
from kernels.logprob import logprob_torch, triton

HERE = Path(__file__).resolve()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

# The error allowed, as a share of the largest number. bf16 rounds the logits, their gradient and
# the parts of sums.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5,
              torch.float16: 5e-3, torch.bfloat16: 3e-2}
EVERY = list(TOLERANCES)
WHOLE = 256 * 2**20         # a budget for all of it

# numpy's, of numbers that are no rows
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def outside(test):
    """A test that is not for the interpreter: there it does not exist, so nothing is skipped."""
    return None if INTERPRETED else test


def problem(dtype, N=37, V=133, D=24, padding=(2, 9), off_policy=True, seed=0):
    """-> (hidden, weight), (tokens, old_logps), and g, the derivatives of a loss by logps, ratio
    and entropy"""
    generator = torch.Generator().manual_seed(seed + 1000 * N + V)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64) * 2 * D**-0.5
    tokens = torch.randint(V, (N,), generator=generator)
    log_p = torch.log_softmax(hidden @ weight.T, 1)
    old_logps = log_p.gather(1, tokens[:, None])[:, 0]
    old_logps = old_logps + torch.randn(N, generator=generator) / 2
    old_logps = old_logps.to(DEVICE, torch.promote_types(dtype, torch.float32))
    tokens[[i for i in padding if i < N]] = -1
    g = torch.randn(3, N, generator=generator, dtype=torch.float64).to(DEVICE)
    if not off_policy:
        old_logps = None
    inputs = [hidden.to(DEVICE, dtype), weight.to(DEVICE, dtype)]
    return inputs, [tokens.to(DEVICE), old_logps], g


def doubled(inputs):
    return [x.double() for x in inputs]


def run(function, inputs, args, g, **options):
    """-> logps, ratio, entropy and the gradients by the inputs of a loss with the derivatives g"""
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*inputs, *args, **options)
    gradients = [part.to(values).view_as(values) for part, values in zip(g, outputs)]
    torch.autograd.backward(outputs, gradients)
    return [x.detach() for x in outputs] + [x.grad for x in inputs]


def definition(hidden, weight, tokens, old_logps=None, temperature=1.0):
    return logprob_torch(hidden @ weight.T, tokens, old_logps, temperature)


def compare(ours, exact, dtype):
    names = ("logps", "ratio", "entropy", "gradient by hidden", "gradient by weight")
    for name, a, b in zip(names, ours, exact):
        expected = torch.promote_types(dtype, torch.float32)
        if name.startswith("gradient"):
            expected = dtype
        assert a.dtype == expected and a.shape == b.shape, name
        if a.numel() > 0:
            error = (a.double() - b).abs().max()
            assert error <= TOLERANCES[dtype] * (1 + b.abs().max()), f"{name} off by {error:.1e}"


def agree(dtype, temperature=1.0, budget=WHOLE, **options):
    inputs, args, g = problem(dtype, **options)
    ours = run(linear_logprob, inputs, args, g, temperature=temperature, budget=budget)
    compare(ours, run(definition, doubled(inputs), args, g, temperature=temperature), dtype)


# ---- 1. the same numbers ---------------------------------------------------------------------

@pytest.mark.parametrize("dtype", EVERY, ids=str)
@pytest.mark.parametrize("off_policy", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.9])
def test_it_is_logprob_of_the_logits_in_memory_forward_and_backward(
        dtype, off_policy, temperature):
    agree(dtype, temperature, budget=20_000, off_policy=off_policy)


SIZES = [(1, 1, 1), (1, 2, 3), (5, 64, 8), (3, 999, 2), (70, 65, 7), (129, 3, 9)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("N, V, D", SIZES)
def test_odd_sizes_agree(dtype, N, V, D):
    budgets = [3000, 2**20]
    if not INTERPRETED:                             # there a launch takes 10 ms
        budgets.append(1)
    for budget in budgets:
        agree(dtype, N=N, V=V, D=D, budget=budget)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_any_budget_gives_the_same_result(dtype):
    inputs, args, g = problem(dtype, N=80, V=150)
    whole = run(linear_logprob, inputs, args, g)
    budgets = [5e3, 30_000, 77_777, 10**5, 2**62]
    if not INTERPRETED:
        budgets += [0, 1, 1000]
    sizes = set()
    for budget in budgets:
        rows = linear.chunk_size(budget, inputs[0], 150)
        columns = linear.chunk_size(budget, inputs[0], 78)
        sizes.add((rows, columns))
        for a, b in zip(run(linear_logprob, inputs, args, g, budget=budget), whole):
            assert_close(a, b, rtol=0, atol=TOLERANCES[dtype] * (1 + b.abs().max().item()))
    assert len(sizes) > 3
    assert INTERPRETED or 1 in set(itertools.chain(*sizes))


@outside                                # of the matmul, not of the row kernels
def test_many_slices_of_the_vocabulary_round_the_gradient_by_hidden_states_as_little_as_one():
    inputs, args, g = problem(torch.bfloat16, N=40, V=4000, D=16)
    *_, exact, _ = run(definition, doubled(inputs), args, g)

    def error(budget):
        *_, d_hidden, _ = run(linear_logprob, inputs, args, g, budget=budget)
        return (d_hidden.double() - exact).square().mean().sqrt()
    assert error(40 * 64 * 8) < 1.5 * error(WHOLE)


@pytest.mark.parametrize("budget", [1, 10**6])
@pytest.mark.parametrize("off_policy", [True, False])
def test_it_has_the_gradient_of_finite_differences(off_policy, budget):
    inputs, (tokens, old_logps), _ = problem(
        torch.float64, N=5, V=7, D=3, padding=[1], off_policy=off_policy)

    def values(hidden, weight):
        logps, ratio, entropy = linear_logprob(hidden, weight, tokens, old_logps, 0.7, budget)
        if off_policy:
            return logps, ratio, entropy
        return logps, entropy                       # on policy the ratio is 1 for any hidden states
    assert torch.autograd.gradcheck(values, [x.requires_grad_() for x in inputs])


def test_on_policy_the_ratio_is_one_and_has_the_gradient_of_the_log_probability():
    (hidden, weight), (tokens, _), _ = problem(torch.float32)
    weight.requires_grad_()
    logps, ratio, _ = linear_logprob(hidden, weight, tokens, budget=9999)
    assert torch.equal(ratio, torch.ones_like(ratio))
    by_ratio, = torch.autograd.grad(ratio.sum(), weight, retain_graph=True)
    by_logps, = torch.autograd.grad(logps.sum(), weight)
    assert torch.equal(by_ratio, by_logps) and by_ratio.abs().max() > 0.1


def test_old_log_probabilities_are_constants():
    inputs, (tokens, old_logps), _ = problem(torch.float32)
    outputs = linear_logprob(*inputs, tokens, old_logps.requires_grad_())
    assert not any(x.requires_grad for x in outputs)


def test_large_logits_do_not_overflow():
    (hidden, weight), (tokens, _), g = problem(torch.float32)
    inputs = [1000 * hidden, weight]
    ours = run(linear_logprob, inputs, [tokens], g)
    for a, b in zip(ours, run(definition, doubled(inputs), [tokens], g)):
        assert_close(a.double(), b, rtol=0, atol=3e-4 * b.abs().max().item() + 1e-6)


def test_backward_may_run_twice_and_changes_no_argument():
    inputs, args, _ = problem(torch.float32)
    before = [x.clone() for x in (*inputs, *args)]
    outputs = linear_logprob(*(x.requires_grad_() for x in inputs), *args, budget=9999)
    loss = sum(x.sum() for x in outputs)
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    second = torch.autograd.grad(loss, inputs, retain_graph=True)
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, (*inputs, *args), before))


def test_a_head_that_is_also_the_embedding_gets_both_gradients():
    (_, weight), (tokens, old_logps), g = problem(torch.float64)
    gradients = []
    for function in (linear_logprob, definition):
        embed = weight.clone().requires_grad_()
        hidden = embed[tokens.clamp(min=0)].tanh()
        outputs = function(hidden, embed, tokens, old_logps)
        loss = sum((x * y).sum() for x, y in zip(outputs, g))
        gradients += torch.autograd.grad(loss, embed)
    assert_close(*gradients, rtol=0, atol=1e-10)


def test_without_gradients_it_is_the_same():
    inputs, args, g = problem(torch.float32)
    with torch.no_grad():
        outputs = linear_logprob(*inputs, *args, budget=9999)
    assert all(map(torch.equal, outputs, run(linear_logprob, inputs, args, g, budget=9999)))
    assert not any(x.requires_grad for x in outputs)


@pytest.mark.parametrize("dtype", EVERY, ids=str)
def test_the_row_kernels_run_where_they_can_once_a_chunk_and_once_a_slice(dtype, monkeypatch):
    inputs, args, g = problem(dtype, N=200, V=300, padding=())
    real_launch = row_kernels.launch
    launched = []

    def launch(kernel, x, *rest, **options):
        launched.append((kernel, x.shape[1:]))
        real_launch(kernel, x, *rest, **options)
    monkeypatch.setattr(row_kernels, "launch", launch)
    run(linear_logprob, inputs, args, g, budget=300 * 140 * dtype.itemsize)
    if dtype != torch.float64 and (INTERPRETED or DEVICE == "cuda" and triton):
        assert launched == [(row_kernels.forward_kernel, (128, 300)),
                            (row_kernels.forward_kernel, (72, 300)),
                            (row_kernels.backward_kernel, (200, 192)),
                            (row_kernels.backward_kernel, (200, 108))]
    else:
        assert launched == []


def test_a_chunk_has_as_many_rows_as_fit_and_from_64_on_a_multiple_of_that():
    hidden = torch.zeros(200, 24, dtype=torch.float64)
    bytes_per_row = 2 * 300 * 8
    for fits, size in ((0, 1), (1, 1), (63, 63), (64, 64), (127, 64), (128, 128)):
        assert linear.chunk_size(fits * bytes_per_row + 7, hidden, 300) == size


# ---- 2. padding, shapes ----------------------------------------------------------------------

def test_padding_gives_constants_and_no_gradient_whatever_is_there():
    (hidden, weight), (tokens, old_logps), g = problem(
        torch.bfloat16, N=40, padding=range(0, 40, 3))
    is_padding = tokens < 0
    clean = run(linear_logprob, (hidden, weight), (tokens, old_logps), g, budget=5000)
    hidden[is_padding] = math.nan
    old_logps[is_padding] = math.inf
    g[:, is_padding] = math.nan
    dirty = run(linear_logprob, (hidden, weight), (tokens, old_logps), g, budget=5000)
    assert all(map(torch.equal, clean, dirty))
    for x, value in zip(clean, (0, 1, 0, 0)):
        assert (x[is_padding] == value).all()


def test_padding_is_not_multiplied():
    """Ten rows among a thousand take the flops of ten, as many as the docstring says."""
    (hidden, weight), (tokens, old_logps), _ = problem(
        torch.float32, N=1000, padding=range(10, 1000))
    with FlopCounterMode(display=False) as counter:
        outputs = linear_logprob(
            hidden.requires_grad_(), weight.requires_grad_(), tokens, old_logps)
        assert counter.get_total_flops() == 2 * 10 * 133 * 24
        sum(x.sum() for x in outputs).backward()
        assert counter.get_total_flops() == 8 * 10 * 133 * 24


@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (2, 3, 4), (0,), (3, 0)])
def test_any_number_of_dimensions_will_do(shape):
    n = math.prod(shape)
    (hidden, weight), (tokens, old_logps), g = problem(torch.float32, N=max(n, 1), padding=[4])
    inputs = [hidden[:n].view(*shape, 24), weight]
    args = [tokens[:n].view(shape).int(), old_logps[:n].view(shape)]
    g = g[:, :n]
    ours = run(linear_logprob, inputs, args, g, budget=9999)
    assert all(values.shape == shape for values in ours[:3])
    if n > 0:
        compare(ours, run(definition, doubled(inputs), args, g), torch.float32)
    else:
        assert not ours[4].any()


def test_rows_that_are_all_padding_give_no_gradient():
    inputs, args, g = problem(torch.float32, N=6, padding=range(6))
    logps, ratio, entropy, d_hidden, d_weight = run(linear_logprob, inputs, args, g)
    assert (ratio == 1).all()
    assert not any(x.any() for x in (logps, entropy, d_hidden, d_weight))


def test_arguments_may_be_views():
    (hidden, weight), args, g = problem(torch.float32, N=60)
    inputs = [hidden.view(5, 12, 24).transpose(0, 1), weight.T.contiguous().T]
    args = [x.view(5, 12).T for x in args]
    g = [x.view(5, 12).T for x in g]
    ours = run(linear_logprob, inputs, args, g, budget=9999)
    compare(ours, run(definition, doubled(inputs), args, g), torch.float32)


def test_bad_input_gets_one_clear_line():
    hidden = torch.zeros(2, 3, 5)
    weight = torch.zeros(7, 5)
    tokens = torch.zeros(2, 3, dtype=torch.long)
    for args, line in (
            ((tokens.view(3, 2),), r"tokens \(3, 2\) for hidden"),
            ((tokens[:, 1:],), r"tokens \(2, 2\) for hidden \(2, 3, 5\): need one per row"),
            ((tokens, torch.zeros(3)), r"old_logps \(3,\) for hidden \(2, 3, 5\)"),
            ((tokens, None, 0), "temperature=0: must be > 0"),
            ((tokens, None, math.nan), "temperature=nan: must be > 0")):
        with pytest.raises(ValueError, match=line):
            linear_logprob(hidden, weight, *args)


# ---- 3. memory, and what the docstring says --------------------------------------------------

def peak(function, *args, **options):
    """The most bytes that were allocated at one time during the call, beyond those before it."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function(*args, **options)
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function(*args, **options)
    events = profiled.profiler.kineto_results.events()
    events = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
    sizes = [e.nbytes() for e in events]            # negative when memory is freed
    return max(itertools.accumulate(sizes, initial=0))


@outside                                # in it the kernels' memory is numpy's, which nobody counts
@pytest.mark.parametrize("dtype", EVERY, ids=str)
def test_at_most_the_budget_is_allocated_for_logits_and_all_that_is_made_of_them(
        dtype, N=512, V=4096, D=4):
    """Beyond it there are the gradients, and a few numbers a row. With the logits in memory there
    are more than two tensors (N, V)."""
    inputs, args, g = problem(dtype, N, V, D)
    d_weight = V * D * dtype.itemsize
    rows = 200 * N + 4 * N * D * 8      # numbers of each row; hidden states and their gradient
    for budget in (2**18, 2**20):
        most = peak(run, linear_logprob, inputs, args, g, budget=budget)
        assert budget / 2 < most <= budget + d_weight + rows, most
    in_memory = peak(run, definition, inputs, args, g)
    assert in_memory > 2 * N * V * dtype.itemsize > 4 * most


def test_every_equation_in_the_docstring_is_tagged_in_the_code_and_vice_versa():
    source = Path(linear.__file__).read_text()
    stated = re.findall(r" \((\d+)\)$", linear.__doc__, re.M)
    assert stated == ["1", "2", "3", "4"]
    assert set(re.findall(r"eq\. \((\d+)\)", source)) == set(stated)


@outside
@pytest.mark.skipif(not triton, reason="no Triton")
def test_all_of_this_holds_with_the_row_kernels_in_tritons_interpreter():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", HERE]
    done = subprocess.run(command, cwd=HERE.parents[1], env=os.environ | {"TRITON_INTERPRET": "1"},
                          capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-3000:]


# ---- the docstring ---------------------------------------------------------------------------

def test_the_share_of_the_logits_in_the_docstring_follows_from_its_data_sheet():
    words = " ".join(linear.__doc__.split())
    rates = re.search(r"([\d.]+) TFLOP/s in bf16 and moves ([\d.]+) TB/s", words)
    [said] = re.findall(r"as long as 2 \* (\d+) flops", words)
    per_logit = 4 * float(rates[1]) / float(rates[2]) / 2           # written and read, two bytes
    assert round(per_logit) == int(said)
    shares = re.findall(r"(\d+)% (?:of the matmul )?at D = (\d+)", words)
    assert len(shares) == 2
    for share, D in shares:
        assert round(100 * per_logit / int(D)) == int(share)
