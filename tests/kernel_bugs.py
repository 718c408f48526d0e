"""Plausible bugs of kernels/logprob.py, each of which the tests have to see: python
tests/kernel_bugs.py, a part of make mutants.

Each is (what is wrong, the old text, the new text), and is made in a copy of the file. Those in
WRONG change a number: some tests of test_kernels.py run on the copy in Triton's interpreter, and
one has to fail. Those in SLOW change no number: one has to be seen in the compiled code.
"""
import importlib.util
import os
import re
import signal
import sys
import tempfile
import warnings
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"            # before Triton is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest
import test_kernels as tests
import torch

# How the forward kernel reads a tile.
LOAD = ('x = tl.load(pointer, is_inside, float("-inf")).to(tl.float32)'
        "       # (K, ROWS, LANES, VEC)\n")

WRONG = [
    ("S is not rescaled when the maximum rises",
     "        S = tl.exp2(d) * S  ",
     "        S = S  "),
    ("E is rescaled, but not shifted",
     "        E = tl.exp2(d) * (E + d * S)",
     "        E = tl.exp2(d) * E"),
    ("threads' S meet without a common maximum",
     "    row_S = tl.sum(tl.exp2(d) * S, 1)",
     "    row_S = tl.sum(S, 1)"),
    ("threads' E are rescaled, but not shifted",
     "    row_E = tl.sum(tl.exp2(d) * (E + d * S), 1)",
     "    row_E = tl.sum(tl.exp2(d) * E, 1)"),
    ("0 * -inf in the entropy",
     "power * tl.maximum(z, -1e4)",
     "power * z"),
    ("0 * -inf in the gradient",
     "c1 * tl.maximum(z, -1e4)",
     "c1 * z"),
    ("the maximum begins at -inf",
     "tl.full((ROWS, LANES), -3.4028234663852886e38, tl.float32)",
     'tl.full((ROWS, LANES), float("-inf"), tl.float32)'),
    ("the maximum begins at 0",
     "tl.full((ROWS, LANES), -3.4028234663852886e38, tl.float32)",
     "tl.zeros((ROWS, LANES), tl.float32)"),
    ("0 * -inf when the maximum rises from as low as can be",
     "        d = tl.maximum((m - new_m) * scale, -1e4)",
     "        d = (m - new_m) * scale"),
    ("the last tile of a row is left out",
     "range(0, tl.max(row_length, 0), K * LANES * VEC)",
     "range(0, tl.max(row_length, 0) // (K * LANES * VEC) * (K * LANES * VEC), K * LANES * VEC)"),
    ("what lies behind the row counts",
     "    row_length = tl.where(is_token, V, 0) * VEC  ",
     "    row_length = tl.where(is_token, V + 1, 0) * VEC  "),
    ("logits that are not there are 0",
     LOAD + "        new_m",
     LOAD.replace('float("-inf")', "0.0") + "        new_m"),
    ("int32 offsets of rows, forward",
     "large for one\n    b = (n // T).to(tl.int64)\n    t = (n % T).to(tl.int64)\n",
     "large for one\n    b = n // T\n    t = n % T\n"),
    ("int32 offsets of rows, backward",
     "token >= 0\n    b = (n // T).to(tl.int64)\n    t = (n % T).to(tl.int64)\n",
     "token >= 0\n    b = n // T\n    t = n % T\n"),
    ("rows are all one stride apart",
     "        strides = logits.stride()[:2]\n",
     "        strides = (logits.stride(1) * logits.shape[1], logits.stride(1))\n"),
    ("the gradient has the strides of the logits",
     "grad_row = grad + (b * grad_b + t * grad_t) * VEC",
     "grad_row = grad + (b * stride_b + t * stride_t) * VEC"),
    ("token 0 is taken for padding",
     "    is_token = token >= 0\n    # in 64 bits",
     "    is_token = token > 0\n    # in 64 bits"),
    ("a token outside the vocabulary reads what lies there",
     "is_token & (token < V * VEC)",
     "is_token"),
    ("the temperature is forgotten",
     "    scale = math.log2(math.e) / temperature\n",
     "    scale = math.log2(math.e)\n"),
    ("the gradient at the token forgets the temperature",
     "    at_token = (G * scale * LN2)",
     "    at_token = (G)"),
    ("a ratio in log2",
     "tl.exp(logp - old_logp)",
     "tl.exp2(logp - old_logp)"),
    ("padding has the entropy of its logits",
     "tl.where(is_token, entropy, 0.0)",
     "entropy"),
    ("the ratio has no gradient",
     "    G = tl.load(g_logps + n, is_token, 0.0) + g_r   ",
     "    G = tl.load(g_logps + n, is_token, 0.0)   "),
    ("a ratio of inf that no loss uses makes the gradient nan",
     "g_r = tl.where(g_r == 0, 0.0, g_r * tl.load(ratio + n, is_token, 0.0))",
     "g_r = g_r * tl.load(ratio + n, is_token, 0.0)"),
    ("the entropy's gradient forgets the entropy",
     "G + g_H * tl.load(entropy + n, is_token, 0.0)",
     "G + g_H"),
    ("the entropy's gradient is in bits",
     "    c1 = g_H * LN2\n",
     "    c1 = g_H\n"),
    ("the token of the first tile gets its gradient in each",
     "offset == token[None, :, None, None] - first",
     "offset == token[None, :, None, None] - lane * VEC"),
    ("the gradient of padding is not written",
     "grad_length = tl.where(n < N, V, 0) * VEC",
     "grad_length = tl.where(is_token, V, 0) * VEC"),
    ("the last rows have no program",
     "    num_programs = triton.cdiv(B * T, shape[\"ROWS\"])\n",
     "    num_programs = max(1, B * T // shape[\"ROWS\"])\n"),
    ("programs along the grid's second axis",
     "kernel[(num_programs,)]",
     "kernel[(1, num_programs)]"),
    ("rows that begin anywhere are taken for aligned",
     "vec = math.gcd(16 // itemsize, V, *steps)",
     "vec = math.gcd(16 // itemsize, V)"),
    ("the gradient is always written over the logits",
     "        if ctx.inplace:\n            grad = logits\n",
     "        if logits.is_contiguous():\n            grad = logits\n"),
    ("autograd does not learn that the logits are gone",
     "            torch.autograd.graph.increment_version(logits)",
     "            pass"),
    ("columns of a matrix are taken for its rows",
     "    x = logits if logits.stride(-1) == 1 else logits.contiguous()\n",
     "    x = logits\n"),
]

SLOW = [
    ("the compiler is not told that a row ends at a multiple of VEC",
     "    row_length = tl.where(is_token, V, 0) * VEC  ",
     "    row_length = tl.where(is_token, V * VEC, 0)  "),
    ("exp, which cares for denormal numbers",
     "        power = tl.exp2(z)\n        d =",
     "        power = tl.exp(z * LN2)\n        d ="),
    ("one maximum for all threads, so a barrier in the loop",
     "new_m = tl.maximum(m, tl.max(tl.max(x, 3), 0))",
     "new_m = tl.maximum(m, tl.max(tl.max(tl.max(x, 3), 0), 1)[:, None])"),
    ("more logits a thread than it has registers for",
     "PER_THREAD = 32 ",
     "PER_THREAD = 256 "),
]


def made(bug, folder):
    """A copy of the kernels with the bug. -> its path"""
    name, old, new = bug
    source = Path(tests.fused.__file__).read_text()
    count = source.count(old)
    assert count == 1 and old != new, f"{name}: the old text occurs {count} times"
    path = folder / f"{re.sub('[^a-z]+', '_', name.lower())}.py"
    path.write_text(source.replace(old, new))
    return path


def load(path):
    """-> module"""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_tests(L):
    """Some of the tests, on a module."""
    tests.agree(L, torch.float32, 5, 266, temperature=0.7, padding=[2])
    tests.test_padding_gives_constants_and_no_gradient_whatever_is_there(L, True)
    tests.test_any_number_of_dimensions_will_do(L, (2, 3))
    for view in ("columns", "reversed", "shifted"):
        tests.test_logits_and_tokens_may_be_views(L, view)
    tests.test_rows_are_on_the_grids_first_axis(L)
    tests.test_a_ratio_that_no_loss_uses_may_be_infinite(L)
    tests.test_a_token_outside_the_vocabulary_is_nan(L)
    tests.test_nan_stays_nan_in_its_row_alone(L)
    tests.test_without_inplace_the_logits_stay_and_backward_may_run_twice(L)
    tests.test_logits_overwritten_inplace_are_not_used_again(L)
    tests.test_logits_far_from_zero_lose_nothing(L, -1024)
    tests.test_impossible_tokens_count_for_nothing(L, 9001)
    tests.test_rows_may_begin_beyond_two_to_the_31(L)
    tests.agree(L, torch.float32, 140, 3)


def fails(module):
    """Whether a test fails, in a process of its own, since a bug may read where no memory is, or
    never end. Errors that come before a number is wrong do not count: anyone would see them."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        code = 2
        try:
            run_tests(module)
            code = 0
        except (AssertionError, pytest.fail.Exception):
            code = 1
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code < 0 or code == 1        # it is negative if a signal ended the process


def main():
    """-> exit code, 1 if a bug survives"""
    warnings.simplefilter("ignore")     # numpy's, of log(0) in rows of padding
    assert not fails(tests.fused), "the tests have to pass before a bug tells anything"
    with tempfile.TemporaryDirectory() as folder:
        paths = [made(bug, Path(folder)) for bug in WRONG + SLOW]
        seen = [fails(load(path)) for path in paths[:len(WRONG)]]
        compiled = tests.compiled(Path(folder, "cache"), *paths[len(WRONG):])
        for forward, backward in zip(compiled[::2], compiled[1::2]):
            seen.append(bool(tests.slow(forward) or tests.slow(backward)))
    for (name, _, _), is_seen in zip(WRONG + SLOW, seen, strict=True):
        if not is_seen:
            print(f"SURVIVED  kernels/logprob.py: {name}")
    print(f"{sum(seen)}/{len(seen)} bugs of kernels/logprob.py killed")
    return int(not all(seen))


if __name__ == "__main__":
    raise SystemExit(main())
