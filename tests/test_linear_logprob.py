"""linear_logprob against its definition, the materialised logits, in float64; and what memory it takes.

Without a GPU, the last test runs this file once more in Triton's interpreter, where the row kernels run, too.
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
from kernels.linear_logprob import linear_logprob
from kernels.logprob import logprob_torch, triton

HERE = Path(__file__).resolve()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

# error allowed, as a share of the largest number; bf16 rounds logits, their gradient and the parts of sums
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
EVERY = list(TOLERANCES)


pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")      # numpy's, of numbers that are no rows
outside = (lambda test: None) if INTERPRETED else (lambda test: test)     # of the interpreter; no skip in it


def problem(dtype, N=37, V=133, D=24, padding=(2, 9), off_policy=True, seed=0):
    """-> (hidden, weight), (tokens, old_logps), g: gradients of a loss by logps, ratio and entropy"""
    random = torch.Generator().manual_seed(seed + 1000 * N + V)
    hidden = torch.randn(N, D, generator=random, dtype=torch.float64)
    weight = torch.randn(V, D, generator=random, dtype=torch.float64) * 2 * D**-0.5
    tokens = torch.randint(V, (N,), generator=random)
    old = torch.log_softmax(hidden @ weight.T, 1).gather(1, tokens[:, None])[:, 0]
    old = old + torch.randn(N, generator=random) / 2
    tokens[[i for i in padding if i < N]] = -1
    old = old.to(DEVICE, torch.promote_types(dtype, torch.float32)) if off_policy else None
    g = torch.randn(3, N, generator=random, dtype=torch.float64).to(DEVICE)
    return [x.to(DEVICE, dtype) for x in (hidden, weight)], [tokens.to(DEVICE), old], g


def run(function, inputs, args, g, **options):
    """-> logps, ratio, entropy and, of a loss with the gradients g by them, the gradients by the inputs"""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs, *args, **options)
    torch.autograd.backward(out, [part.to(values).view_as(values) for part, values in zip(g, out)])
    return [x.detach() for x in (*out, *(x.grad for x in inputs))]


def definition(hidden, weight, tokens, old_logps=None, temperature=1.0):
    return logprob_torch(hidden @ weight.T, tokens, old_logps, temperature)


def compare(ours, exact, dtype):
    for name, a, b in zip(("logps", "ratio", "entropy", "by hidden", "by weight"), ours, exact):
        kind = dtype if name.startswith("by") else torch.promote_types(dtype, torch.float32)
        assert a.dtype == kind and a.shape == b.shape, name
        error = (a.double() - b).abs().max() if a.numel() else torch.zeros(())
        assert error <= TOLERANCES[dtype] * (1 + b.abs().max()), f"{name} off by {error:.1e}"


def agree(dtype, temperature=1.0, budget=256 * 2**20, **options):
    inputs, args, g = problem(dtype, **options)
    ours = run(linear_logprob, inputs, args, g, temperature=temperature, budget=budget)
    compare(ours, run(definition, [x.double() for x in inputs], args, g, temperature=temperature), dtype)


# ---- 1. the same numbers --------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", EVERY, ids=str)
@pytest.mark.parametrize("off_policy", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.9])
def test_it_is_logprob_of_the_materialised_logits_forward_and_backward(dtype, off_policy, temperature):
    agree(dtype, temperature, budget=20_000, off_policy=off_policy)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("N, V, D", [(1, 1, 1), (1, 2, 3), (5, 64, 8), (3, 999, 2), (70, 65, 7), (129, 3, 9)])
def test_odd_sizes_agree(dtype, N, V, D):
    for budget in (1, 3000, 2**20)[INTERPRETED:]:       # there a launch takes 10 ms
        agree(dtype, N=N, V=V, D=D, budget=budget)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_any_budget_gives_the_same_result(dtype):
    inputs, args, g = problem(dtype, N=80, V=150)
    whole, cuts = run(linear_logprob, inputs, args, g), set()
    for budget in (0, 1, 1000, 5e3, 30_000, 77_777, 10**5, 2**62)[2 * INTERPRETED:]:
        cuts.add((linear.at_once(budget, inputs[0], 150), linear.at_once(budget, inputs[0], 78)))
        for a, b in zip(run(linear_logprob, inputs, args, g, budget=budget), whole):
            assert_close(a, b, rtol=0, atol=TOLERANCES[dtype] * (1 + b.abs().max().item()))
    assert len(cuts) > 4 and {1} < set(itertools.chain(*cuts))


@pytest.mark.parametrize("off_policy", [True, False])
def test_it_has_the_gradient_of_finite_differences(off_policy):
    inputs, (tokens, old), _ = problem(torch.float64, N=5, V=7, D=3, padding=[1], off_policy=off_policy)
    inputs = [x.requires_grad_() for x in inputs]
    parts = slice(None) if off_policy else slice(None, None, 2)     # on policy the ratio is 1 wherever it is
    for budget in (1, 10**6):
        values = lambda h, w: linear_logprob(h, w, tokens, old, 0.7, budget)[parts]                 # noqa: B023
        assert torch.autograd.gradcheck(values, inputs)


def test_on_policy_the_ratio_is_one_and_has_the_gradient_of_the_log_probability():
    (hidden, weight), (tokens, _), _ = problem(torch.float32)
    logps, ratio, _ = linear_logprob(hidden, weight.requires_grad_(), tokens, budget=9999)
    assert torch.equal(ratio, torch.ones_like(ratio))
    gradient = lambda x: torch.autograd.grad(x.sum(), weight, retain_graph=True)[0]
    for_ratio, for_logps = gradient(ratio), gradient(logps)
    assert torch.equal(for_ratio, for_logps) and for_ratio.abs().max() > 0.1


def test_old_log_probabilities_are_constants():
    inputs, (tokens, old), _ = problem(torch.float32)
    out = linear_logprob(*inputs, tokens, old.requires_grad_())
    assert not any(x.requires_grad for x in out)


def test_large_logits_do_not_overflow():
    inputs, args, g = problem(torch.float32)
    inputs[0] *= 1000
    exact = run(definition, [x.double() for x in inputs], args[:1], g)
    for a, b in zip(run(linear_logprob, inputs, args[:1], g), exact):
        assert_close(a.double(), b, rtol=0, atol=3e-4 * b.abs().max().item() + 1e-6)


def test_backward_may_run_twice_and_changes_no_argument():
    inputs, args, _ = problem(torch.float32)
    copies = [x.clone() for x in (*inputs, *args)]
    out = linear_logprob(*(x.requires_grad_() for x in inputs), *args, budget=9999)
    first, second = (torch.autograd.grad([x.sum() for x in out], inputs, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second)) and all(map(torch.equal, (*inputs, *args), copies))


def test_a_head_that_is_also_the_embedding_gets_both_gradients():
    (_, weight), (tokens, old), g = problem(torch.float64)
    both = []
    for function in (linear_logprob, definition):
        embed = weight.clone().requires_grad_()
        out = function(embed[tokens.clamp(min=0)].tanh(), embed, tokens, old)
        both.append(torch.autograd.grad([(x * y).sum() for x, y in zip(out, g)], embed)[0])
    assert_close(*both, rtol=0, atol=1e-10)


def test_without_gradients_it_is_the_same():
    inputs, args, g = problem(torch.float32)
    with torch.no_grad():
        out = linear_logprob(*inputs, *args, budget=9999)
    assert all(map(torch.equal, out, run(linear_logprob, inputs, args, g, budget=9999)))
    assert not any(x.requires_grad for x in out)


@pytest.mark.parametrize("dtype", EVERY, ids=str)
def test_the_row_kernels_run_where_they_can_once_a_chunk_and_once_a_slice(dtype, monkeypatch):
    inputs, args, g = problem(dtype, N=200, V=300, padding=())
    launched, launch = [], linear.launch
    monkeypatch.setattr(linear, "launch", lambda kernel, x, *rest, **options: (
        launched.append((kernel, x.shape[1:])), launch(kernel, x, *rest, **options)))
    run(linear_logprob, inputs, args, g, budget=300 * 140 * dtype.itemsize)
    assert linear.at_once(63 * 600 * 8 + 7, inputs[0].double(), 300) == 63      # up to there, what fits
    able = dtype != torch.float64 and (INTERPRETED or DEVICE == "cuda" and triton)
    assert launched == able * [(linear.forward_kernel, (128, 300)), (linear.forward_kernel, (72, 300)),
                               (linear.backward_kernel, (200, 192)), (linear.backward_kernel, (200, 108))]


# ---- 2. padding, shapes ---------------------------------------------------------------------------------

def test_padding_gives_constants_and_no_gradient_whatever_is_there():
    inputs, (tokens, old), g = problem(torch.bfloat16, N=40, padding=range(0, 40, 3))
    pad = tokens < 0
    clean = run(linear_logprob, inputs, (tokens, old), g, budget=5000)
    inputs[0][pad], old[pad], g[:, pad] = math.nan, math.inf, math.nan
    dirty = run(linear_logprob, inputs, (tokens, old), g, budget=5000)
    assert all(map(torch.equal, clean, dirty))
    assert all((x[pad] == value).all() for x, value in zip(clean, (0, 1, 0, 0)))


def test_padding_is_not_multiplied():
    """Ten real rows among a thousand are the budget of ten."""
    (hidden, weight), (tokens, old), _ = problem(torch.float32, N=1000, padding=range(10, 1000))
    seen = []
    with FlopCounterMode(display=False) as counter:
        out = linear_logprob(hidden.requires_grad_(), weight.requires_grad_(), tokens, old)
        seen.append(counter.get_total_flops())
        sum(x.sum() for x in out).backward()
        seen.append(counter.get_total_flops())
    assert seen == [2 * 10 * 133 * 24, 8 * 10 * 133 * 24]           # as the docstring has it


@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (2, 3, 4), (0,), (3, 0)])
def test_any_number_of_dimensions_will_do(shape):
    n = math.prod(shape)
    (hidden, weight), (tokens, old), g = problem(torch.float32, N=max(n, 1), padding=[4])
    tokens, old, g = tokens[:n].view(shape).int(), old[:n].view(shape), g[:, :n]
    inputs = [hidden[:n].view(*shape, 24), weight]
    ours = run(linear_logprob, inputs, (tokens, old), g, budget=9999)
    assert all(values.shape == shape for values in ours[:3])
    if n:
        compare(ours, run(definition, [x.double() for x in inputs], (tokens, old), g), torch.float32)
    else:
        assert not ours[4].any()


def test_rows_that_are_all_padding_give_no_gradient():
    inputs, args, g = problem(torch.float32, N=6, padding=range(6))
    logps, ratio, entropy, by_hidden, by_weight = run(linear_logprob, inputs, args, g)
    assert (ratio == 1).all() and not any(x.any() for x in (logps, entropy, by_hidden, by_weight))


def test_arguments_may_be_views():
    (hidden, weight), (tokens, old), g = problem(torch.float32, N=60)
    views = [hidden.view(5, 12, 24).transpose(0, 1), weight.T.contiguous().T]
    args = [x.view(5, 12).T for x in (tokens, old)]
    g = [x.view(5, 12).T for x in g]
    compare(run(lambda h, w: linear_logprob(h, w, *args, budget=9999), views, (), g),
            run(lambda h, w: definition(h, w, *args), [x.double() for x in views], (), g), torch.float32)


def test_bad_input_gets_one_clear_line():
    hidden, weight, tokens = torch.zeros(2, 3, 5), torch.zeros(7, 5), torch.zeros(2, 3, dtype=torch.long)
    for args, line in (((tokens.view(3, 2),), r"tokens \(3, 2\) for hidden"),
                       ((tokens[:, 1:],), r"tokens \(2, 2\) for hidden \(2, 3, 5\): need one per row"),
                       ((tokens, torch.zeros(3)), r"old_logps \(3,\) for hidden \(2, 3, 5\)"),
                       ((tokens, None, 0), "temperature=0: must be > 0"),
                       ((tokens, None, math.nan), "temperature=nan: must be > 0")):
        with pytest.raises(ValueError, match=line):
            linear_logprob(hidden, weight, *args)


# ---- 3. memory, and what the docstring says -------------------------------------------------------------

def peak(function):
    """The most bytes that were allocated at one time during the call, beyond those before it."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        function()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]    # negative when it is freed
    return max(itertools.accumulate(sizes, initial=0))


@outside                                        # in it the kernels' memory is numpy's, which nobody counts
@pytest.mark.parametrize("dtype", EVERY, ids=str)
def test_at_most_the_budget_is_allocated_for_logits_and_all_that_is_made_of_them(dtype, N=512, V=4096, D=4):
    """Beyond it there are the gradients, and a few numbers a row. On the way over (N, V), there is (N, V)."""
    inputs, args, g = problem(dtype, N, V, D)
    rows = 200 * N + 4 * N * D * 8              # numbers a row, int64 tokens for one; hidden and its gradient
    for budget in (2**18, 2**20):
        most = peak(lambda: run(linear_logprob, inputs, args, g, budget=budget))        # noqa: B023
        assert budget / 2 < most <= budget + V * D * dtype.itemsize + rows, most
    materialised = peak(lambda: run(definition, inputs, args, g))
    assert materialised > 2 * N * V * dtype.itemsize > 4 * most


def test_every_equation_in_the_docstring_is_tagged_in_the_code_and_vice_versa():
    source = Path(linear.__file__).read_text()
    stated = set(re.findall(r" \((\d+)\)$", linear.__doc__, re.M))
    assert stated == set(re.findall(r"eq\. \((\d+)\)", source)) == {"1", "2", "3", "4"}


@outside
@pytest.mark.skipif(not triton, reason="no Triton")
def test_all_of_this_holds_with_the_row_kernels_in_tritons_interpreter():
    env = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", HERE]
    out = subprocess.run(command, cwd=HERE.parents[1], env=env, capture_output=True, text=True, timeout=500)
    assert out.returncode == 0 and "skipped" not in out.stdout, out.stdout[-3000:]
