"""Log-probability, ratio and entropy of sampled tokens, computed in one pass over the logits.

For V logits x, a temperature tau and a sampled token a, let y = x / tau and p = softmax(y). Then

  logp    = ln p_a                                                                      (1)
  ratio   = exp(logp - old_logp)                                                        (2)
  entropy = -sum_j p_j ln p_j                                                           (3)

The entropy is in nats. Without an old_logp, logp replaces it, and the ratio is 1.

The scripts use logp and entropy from this file, but compute (2) themselves, for three reasons: in a
loss, the ratio is only one exp of B x T numbers, not of B x T x V; GSPO's ratio is a mean over a
sequence; and pi_old would have to be passed through the scoring. `logprob` returns the ratio with
its gradient so that you can use it in your own loss: docs/speed.md has an example.

`logprob_torch` computes these equations as they are written. It makes several tensors as large as
the logits, and each of them is written and read again. The kernels avoid this: they keep a few sums
for each row, and read the logits once. The gradient reads them once more.

Forward. A GPU has an instruction for powers of 2. Let m be the largest logit and
z_j = (x_j - m) log2(e) / tau. Subtracting m does not change p, but it makes all z_j at most 0, so
no power of 2 overflows. The kernel sums

  S       = sum_j 2^z_j                                                                 (4)
  E       = sum_j 2^z_j z_j                                                             (5)

Then p_j = 2^z_j / S and ln p_j = ln(2) (z_j - log2 S), so that (1) and (3) become

  logp    = ln(2) (z_a - log2 S)                                                        (6)
  entropy = ln(2) (log2 S - E / S)                                                      (7)

The largest logit is known only at the end of the row, so m is the largest logit so far. When it
rises to m', all z_j change by d = (m - m') log2(e) / tau, which is at most 0, and the sums become

  S'      = 2^d S                                                                       (8)
  E'      = 2^d (E + d S)                                                               (9)

The same two equations merge the sums over different parts of a row. So each thread has its own m, S
and E until the last logit, and the loop over the logits needs no barrier.

Backward. The derivative of ln p_k with respect to y_j is 1[k = j] - p_j. The derivative of the
ratio is the ratio times the derivative of logp, and the derivative of the entropy is
-p_j (entropy + ln p_j). If g_logp, g_ratio and g_entropy are the derivatives of the loss with
respect to (1), (2) and (3), then

  G       = g_logp + g_ratio ratio                                                     (10)
  dL/dx_j = (1[j = a] G - p_j (G + g_entropy (entropy + ln p_j))) / tau                (11)

Backward computes p_j again from m and S, the two numbers for each row that forward keeps.

Cost. Memory sets the limit: forward reads V logits for each row, backward reads V and writes V. For
151,936 bf16 logits on an H200, forward takes 1.04 times as long as a copy of as many bytes, and
backward 1.12 times. They are fast for three reasons: unlike exp, 2^z takes no special care of
denormal numbers; there is one maximum, so one power, per logit; and a load has 128 bits.
"""
from __future__ import annotations

import functools
import math
import os
import shutil
import sysconfig
from pathlib import Path

import torch

try:
    import triton
    import triton.language as tl
except ImportError:         # without Triton, logprob calls logprob_torch
    triton = None

# Shapes: logits (B, T, V), N = B * T rows. A program of the GPU works on ROWS rows, one tile of
# ROWS x LANES x VEC logits at a time. LANES threads work next to each other on a row, and each of
# them reads VEC adjacent logits with one load. Sums over VEC stay in a thread.
#
# A load of 128 bits begins at a multiple of 16 bytes, but if V is odd, most rows don't. So a row is
# read from where its line of memory begins (128 bytes, LINE loads), and what belongs to its
# neighbors is dropped. All rows begin at multiples of STEP logits; if STEP is at least VEC, no load
# reads logits of two rows.

THREADS = 128           # threads of a program, which share a tile: measured on an H200
LINE = 8                # loads of a line of memory
OPTIONS = {"num_warps": THREADS // 32, "enable_fp_fusion": True}        # of Triton's compiler
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Triton does not recompile a kernel for new values of these arguments. V and the strides are
# divided by STEP when passed, and multiplied by STEP in the kernel. This tells the compiler what is
# aligned.
SIZES = ["N", "T", "V", "stride_b", "stride_t", "grad_b", "grad_t"]


# ---- 1. the definition -----------------------------------------------------------------------

class Exp(torch.autograd.Function):
    """exp with gradient 0 wherever the loss does not use the result. If such a result overflows,
    the gradient of torch.exp is 0 * inf, which is nan."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        y, = ctx.saved_tensors
        return torch.where(g == 0, 0, g * y)


def logprob_torch(logits, tokens, old_logps=None, temperature=1.0):
    """Compute logps, ratio and entropy, (...) each, in fp32 or fp64, differentiable in the logits.

    The logits are (..., V), the tokens (...), and old_logps (...) or None. Padding (token < 0) has
    logp 0, ratio 1, entropy 0 and no gradient, whatever its logits are.
    """
    is_token = tokens >= 0                                                  # (...)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    x = torch.where(is_token[..., None], logits, 0).to(dtype)               # (..., V)
    log_p = torch.log_softmax(x / temperature, dim=-1)                      # (..., V)

    index = tokens.long().clamp(min=0)[..., None]                           # (..., 1)
    logps = log_p.gather(-1, index).squeeze(-1)                             # (...)  eq. (1)
    if old_logps is None:
        old_logps = logps
    ratio = Exp.apply(logps - old_logps.detach())                           # (...)  eq. (2)
    p_log_p = log_p.exp() * log_p.clamp(min=-1e4)       # 0 where p is 0: 0 * -inf would be nan
    entropy = -p_log_p.sum(dim=-1)                                          # (...)  eq. (3)

    logps = torch.where(is_token, logps, 0)
    ratio = torch.where(is_token, ratio, 1)
    entropy = torch.where(is_token, entropy, 0)
    return logps, ratio, entropy


# ---- 2. the kernels --------------------------------------------------------------------------

def jit(kernel):
    """Let Triton compile a kernel. Without Triton, return the function unchanged."""
    if triton is None:
        return kernel
    return triton.jit(kernel, do_not_specialize=SIZES)


@jit
def forward_kernel(
        logits, tokens, old_logps, out_logps, out_ratio, out_entropy, out_m, out_S,
        N, T, V, stride_b, stride_t, scale, ON_POLICY: tl.constexpr,
        ROWS: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, LINE: tl.constexpr,
        STEP: tl.constexpr):
    """Read logits (B, T, V) once and write the five outputs, (N,) each."""
    LN2: tl.constexpr = 0.6931471805599453
    scale = tl.cast(scale, tl.float32)          # log2(e) / tau; a Python float may arrive as fp64

    # the rows of this program
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)                        # (ROWS,)
    token = tl.load(tokens + n, n < N, -1).to(tl.int32)                     # (ROWS,)
    is_token = token >= 0
    # in 64 bits, because the product of two int32 can be too large for an int32
    b = (n // T).to(tl.int64)
    t = (n % T).to(tl.int64)
    steps = b * stride_b + t * stride_t                 # to a row's first logit, in STEPs
    per_line: tl.constexpr = LINE * VEC // STEP
    row = logits + steps // per_line * (LINE * VEC)     # pointers to its line, (ROWS,)
    begin = (steps % per_line).to(tl.int32) * STEP      # its place in the line, (ROWS,)
    end = tl.where(is_token, begin + V * STEP, 0)       # 0: padding is not read
    # a token outside the vocabulary gets nan, not the number in memory after the row
    at_token = tl.load(row + begin + token, is_token & (token < V * STEP), float("nan"))
    at_token = at_token.to(tl.float32)                                      # (ROWS,)

    # the sums over the logits that each thread reads
    lane = tl.arange(0, LANES)[None, :, None]                               # (1, LANES, 1)
    offset = tl.arange(0, VEC)[None, None, :]                               # (1, 1, VEC)
    m = tl.full((ROWS, LANES), -3.4028234663852886e38, tl.float32)      # not -inf: inf - inf is nan
    S = tl.zeros((ROWS, LANES), tl.float32)
    E = tl.zeros((ROWS, LANES), tl.float32)
    begin = begin[:, None, None]                                            # (ROWS, 1, 1)
    row_end = end[:, None, None]
    last_end = tl.max(end, 0)
    for start in range(0, last_end, LANES * VEC):
        first = start + lane * VEC              # the first place that a thread reads in this tile
        pointer = row[:, None, None] + first + offset                       # (ROWS, LANES, VEC)
        is_row = (first + VEC > begin) & (first < row_end)                  # (ROWS, LANES, 1)
        x = tl.load(pointer, is_row, float("-inf")).to(tl.float32)          # (ROWS, LANES, VEC)
        if STEP < VEC:
            has_end = (start == 0) | (start + LANES * VEC > last_end)       # of a row
            if has_end:
                is_inside = (offset >= begin - first) & (offset < row_end - first)
                x = tl.where(is_inside, x, float("-inf"))
        new_m = tl.maximum(m, tl.max(x, 2))                                 # (ROWS, LANES)
        z = (x - new_m[:, :, None]) * scale                                 # (ROWS, LANES, VEC)
        power = tl.exp2(z)
        d = tl.maximum((m - new_m) * scale, -1e4)       # 0 * -inf is nan
        E = tl.exp2(d) * (E + d * S)                                        # eq. (9)
        S = tl.exp2(d) * S                                                  # eq. (8)
        terms = power * tl.maximum(z, -1e4)             # 0 * -inf is nan
        E += tl.sum(terms, 2)                                               # eq. (5)
        S += tl.sum(power, 2)                                               # eq. (4)
        m = new_m

    # the sums over the threads of each row
    row_m = tl.max(m, 1)                                                    # (ROWS,)
    d = tl.maximum((m - row_m[:, None]) * scale, -1e4)                      # (ROWS, LANES)
    row_E = tl.sum(tl.exp2(d) * (E + d * S), 1)                             # (ROWS,)  eq. (9)
    row_S = tl.sum(tl.exp2(d) * S, 1)                                       # (ROWS,)  eq. (8)

    # the outputs
    log2_S = tl.log2(row_S)
    logp = LN2 * ((at_token - row_m) * scale - log2_S)                      # (ROWS,)  eq. (6)
    logp = tl.where(logp > 0, 0.0, logp)        # rounding may give 1e-7; nan stays nan
    entropy = LN2 * (log2_S - row_E / row_S)                                # (ROWS,)  eq. (7)
    entropy = tl.where(entropy < 0, 0.0, entropy)
    old_logp = logp if ON_POLICY else tl.load(old_logps + n, is_token, 0.0)
    tl.store(out_logps + n, tl.where(is_token, logp, 0.0), n < N)
    ratio = tl.exp(logp - old_logp)                                         # (ROWS,)  eq. (2)
    tl.store(out_ratio + n, tl.where(is_token, ratio, 1.0), n < N)
    tl.store(out_entropy + n, tl.where(is_token, entropy, 0.0), n < N)
    tl.store(out_m + n, row_m, n < N)
    tl.store(out_S + n, row_S, n < N)


@jit
def backward_kernel(
        logits, tokens, ratio, entropy, m, S, g_logps, g_ratio, g_entropy, grad,
        N, T, V, stride_b, stride_t, grad_b, grad_t, scale, ALIKE: tl.constexpr,
        ROWS: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, LINE: tl.constexpr,
        STEP: tl.constexpr):
    """Read logits (B, T, V) once and write their gradient (B, T, V)."""
    LN2: tl.constexpr = 0.6931471805599453
    scale = tl.cast(scale, tl.float32)          # log2(e) / tau; scale * LN2 is 1 / tau

    # the rows of this program
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)                        # (ROWS,)
    token = tl.load(tokens + n, n < N, -1).to(tl.int32)                     # (ROWS,)
    is_token = token >= 0
    b = (n // T).to(tl.int64)
    t = (n % T).to(tl.int64)
    steps = b * stride_b + t * stride_t                 # to a row's first logit, in STEPs
    per_line: tl.constexpr = LINE * VEC // STEP
    row = logits + steps // per_line * (LINE * VEC)     # pointers to its line, (ROWS,)
    begin = (steps % per_line).to(tl.int32) * STEP      # its place in the line, (ROWS,)
    grad_row = grad + steps // per_line * (LINE * VEC) if ALIKE else (
        grad + (b * grad_b + t * grad_t - steps % per_line) * STEP)
    end = tl.where(is_token, begin + V * STEP, 0)
    grad_end = tl.where(n < N, begin + V * STEP, 0)     # padding gets gradients of 0

    # the derivatives of the loss with respect to the outputs of each row, (ROWS,) each
    g_r = tl.load(g_ratio + n, is_token, 0.0)
    g_r = tl.where(g_r == 0, 0.0, g_r * tl.load(ratio + n, is_token, 0.0))      # 0 * inf is nan
    G = tl.load(g_logps + n, is_token, 0.0) + g_r                           # (ROWS,)  eq. (10)
    g_H = tl.load(g_entropy + n, is_token, 0.0)
    row_S = tl.load(S + n, is_token, 1.0)

    # (11) is 1[j = a] at_token - 2^z_j (c0 + c1 z_j), with three numbers for each row
    c1 = g_H * LN2
    c0 = G + g_H * tl.load(entropy + n, is_token, 0.0) - c1 * tl.log2(row_S)
    at_token = (G * scale * LN2)[:, None, None]                             # (ROWS, 1, 1)
    c0 = (c0 / row_S * scale * LN2)[:, None, None]
    c1 = (c1 / row_S * scale * LN2)[:, None, None]
    row_m = tl.load(m + n, is_token, 0.0)[:, None, None]

    # the gradient with respect to each logit
    lane = tl.arange(0, LANES)[None, :, None]                               # (1, LANES, 1)
    offset = tl.arange(0, VEC)[None, None, :]                               # (1, 1, VEC)
    token = (begin + token)[:, None, None]                                  # (ROWS, 1, 1)
    begin = begin[:, None, None]
    row_end = end[:, None, None]
    last_end = tl.max(grad_end, 0)
    grad_end = grad_end[:, None, None]
    for start in range(0, last_end, LANES * VEC):
        first = start + lane * VEC              # the first place of a thread in this tile
        pointer = row[:, None, None] + first + offset                       # (ROWS, LANES, VEC)
        x = tl.load(pointer, first < row_end, float("-inf")).to(tl.float32)     # (ROWS, LANES, VEC)
        z = (x - row_m) * scale
        power = tl.exp2(z)
        slope = power * (c0 + c1 * tl.maximum(z, -1e4))     # 0 * -inf is nan
        is_sampled = offset == token - first
        dx = tl.where(is_sampled, at_token, 0.0) - slope                    # eq. (11)
        grad_pointer = grad_row[:, None, None] + first + offset
        # whole vectors first; then the ends of a row, which share a vector with its neighbors
        is_whole = (first >= begin) & (first + VEC <= grad_end)             # (ROWS, LANES, 1)
        tl.store(grad_pointer, dx, is_whole)
        if STEP < VEC:
            has_end = (start == 0) | (start + LANES * VEC > last_end)       # of a row
            if has_end:
                is_inside = (offset >= begin - first) & (offset < grad_end - first)
                tl.store(grad_pointer, dx, is_inside & (is_whole == 0))


# ---- 3. launching the kernels ----------------------------------------------------------------

@functools.cache
def tile(V, width, step):
    """Choose the shape of a tile, by a fixed rule, for rows of V logits that begin at multiples of
    `step`, and loads of `width` logits. -> dict"""
    size = V + LINE * width - step                      # what is read for a row, at most
    threads = triton.next_power_of_2(triton.cdiv(size, width))
    lanes = min(THREADS, threads)                       # short rows share a tile, and fit in it
    return {"ROWS": THREADS // lanes, "LANES": lanes, "VEC": width, "LINE": LINE, "STEP": step}


def launch(kernel, logits, others, temperature, **constants):
    """Run a kernel on all rows of logits (B, T, V). `others` are the kernel's other tensors, in the
    order of its arguments: (N,) each, except for the gradient (B, T, V), which is the last one."""
    B, T, V = logits.shape
    if B * T == 0:
        return
    strides = [stride for x in (logits, *others) if x.dim() == 3 for stride in x.stride()[:2]]
    size = logits.element_size()
    # number of logits in the largest load, at most 128 bits, to which both pointers are aligned
    width = math.gcd(16, logits.data_ptr(), others[-1].data_ptr()) // size
    step = math.gcd(LINE * width, V, *strides)
    shape = tile(V, width, step)
    sizes = [number // step for number in (V, *strides)]
    scale = math.log2(math.e) / temperature
    num_programs = triton.cdiv(B * T, shape["ROWS"])
    with torch.cuda.device_of(logits):          # a kernel runs on the current device
        kernel[(num_programs,)](                # on the grid's first axis; others end at 65,535
            logits, *others, B * T, T, *sizes, scale, **constants, **shape, **OPTIONS)


class LogProb(torch.autograd.Function):
    """The kernels as a function that autograd can differentiate. Its outputs are logps, ratio and
    entropy, (N,) each. Its inputs are logits (B, T, V) with last stride 1, and tokens (N,) and
    old_logps (N,) or None, both contiguous."""

    @staticmethod
    def forward(ctx, logits, tokens, old_logps, temperature):
        outputs = [logits.new_empty(len(tokens), dtype=torch.float32) for _ in range(5)]
        logps, ratio, entropy, m, S = outputs
        on_policy = old_logps is None
        if on_policy:
            old_logps = logps                   # the kernel does not read it
        launch(forward_kernel, logits, (tokens, old_logps, *outputs), temperature,
               ON_POLICY=on_policy)
        ctx.temperature = temperature
        ctx.save_for_backward(logits, tokens, ratio, entropy, m, S)
        return logps, ratio, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        logits, *saved = ctx.saved_tensors
        gradients = [g.contiguous() for g in gradients]
        grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
        launch(backward_kernel, logits, (*saved, *gradients, grad), ctx.temperature,
               ALIKE=logits.stride() == grad.stride())
        return grad, None, None, None


# ---- 4. the functions that others call -------------------------------------------------------

MIN_VOCAB = 1024    # below, Triton saves less time than its compiling takes; see docs/speed.md
NEEDS = "triton, a GPU of compute capability 8.0, a C compiler and Python.h"


@functools.cache
def can_compile():
    """Whether this machine has what Triton needs to compile its launchers. -> bool"""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    return bool(compiler) and header.is_file()


def can_run(device):
    """Whether the kernels can run on a device. -> bool"""
    if triton is None:
        return False
    if not isinstance(forward_kernel, triton.JITFunction):      # TRITON_INTERPRET=1: any device
        return True
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and can_compile()


def logprob(logits, tokens, old_logps=None, temperature=1.0):
    """Compute logps, ratio and entropy, (...) each, in fp32, of softmax(logits / temperature). All
    three are differentiable in the logits (..., V); the tokens are (...).

    old_logps (...) are constants. None stands for the current logps: the ratio is 1, but it has a
    gradient. Padding (token < 0) is not read; it has logp 0, ratio 1, entropy 0 and gradient 0.
    If the kernels cannot run (see `can_run`), or the dtype is not in DTYPES, logprob_torch computes
    all of it.
    """
    for name, rows in (("tokens", tokens), ("old_logps", old_logps)):
        if rows is not None and rows.shape != logits.shape[:-1]:
            raise ValueError(f"{name} {tuple(rows.shape)} for logits {tuple(logits.shape)}: need "
                             "one number per row")
    if not temperature > 0:                     # nan fails here, too
        raise ValueError(f"temperature={temperature}: must be > 0; the limit 0 is argmax")
    if logits.dtype not in DTYPES or not can_run(logits.device):
        return logprob_torch(logits, tokens, old_logps, temperature)

    x = logits if logits.stride(-1) == 1 else logits.contiguous()
    x = x[None, None].flatten(0, -3)            # (B, T, V), also of one row or one sequence
    # reshape(-1) of a view may be a view with a stride, which the kernels would ignore
    rows = tokens.reshape(-1).contiguous()                                  # (N,)
    if old_logps is not None:
        old_logps = old_logps.detach().float().reshape(-1).contiguous()     # (N,)
    outputs = LogProb.apply(x, rows, old_logps, temperature)
    return tuple(values.view(tokens.shape) for values in outputs)


choice = "auto"         # what --kernel named last; kernels.choose sets it


def applies(kernel, logits):
    """Whether Triton computes the log-probabilities of these logits: always with triton, and with
    auto on CUDA, if V is at least MIN_VOCAB, unless --kernel named another one. Raises ValueError
    if Triton cannot run here, or for a kernel that isn't auto, torch or triton. -> bool"""
    if kernel == "auto":
        kernel = choice
    if kernel == "triton" and not can_run(logits.device):
        raise ValueError(f"--kernel triton: on {logits.device}: needs {NEEDS}; use torch")
    if kernel not in ("auto", "torch", "triton"):
        raise ValueError(f"--kernel {kernel}: must be auto, torch or triton")
    if kernel == "auto":
        return logits.is_cuda and logits.shape[-1] >= MIN_VOCAB and can_run(logits.device)
    return kernel == "triton"


def logprobs(logits, tokens, temperature):
    """Compute the log-probability of each token, and the entropy, under softmax(logits /
    temperature). Both are differentiable. (..., V), (...) -> (...), (...)"""
    logps, _, entropy = logprob(logits, tokens, temperature=temperature)
    return logps, entropy
