"""Log-probability, ratio and entropy of sampled tokens. Logits are read once, and once more for the gradient.

V logits x, a temperature tau and the token a that was sampled make, with y = x / tau and p = softmax(y),

  logp    = ln p_a                                                                     (1)
  ratio   = exp(logp - old_logp)              1 where the policy is the old one        (2)
  entropy = -sum_j p_j ln p_j                 in nats                                  (3)

`logprob_torch` is that, word for word. It writes and reads intermediates as large as the logits, and a row of
a 150,000-word vocabulary is large; the kernels below it keep no more than a row's sums.

Forward, in one pass. A GPU has an instruction for 2^z. So take the largest logit, m, off all of them, which p
does not feel and which keeps powers from overflowing; let z_j = (x_j - m) log2(e) / tau <= 0; and sum

  S = sum_j 2^z_j                E = sum_j 2^z_j z_j                                   (4)

Then p_j = 2^z_j / S and ln p_j = ln(2) (z_j - log2 S), which put into (1) and (3) leaves

  logp = ln(2) (z_a - log2 S)                 entropy = ln(2) (log2 S - E / S)         (5)

The largest logit is known only at the end, so m is the largest so far. When it rises to m', d is added to all
z_j, d = (m - m') log2(e) / tau <= 0:

  S' = 2^d S                     E' = 2^d (E + d S)                                    (6)

The same step merges sums over different parts of a row: each thread has an m, S and E of its own, and they
meet after the last logit. So there is no barrier in the loop.

Backward. Moving y_j moves ln p_k by 1[k = j] - p_j. With k = a that is the gradient of logp; the ratio's is
ratio times it; the entropy's is -p_j (entropy + ln p_j). If g are the loss's gradients by (1), (2), (3),

  G = g_logp + g_ratio ratio                                                           (7)
  dL/dx_j = (1[j = a] G - p_j (G + g_entropy (entropy + ln p_j))) / tau                (8)

To know p_j again, forward has to keep m and S: two numbers per row, not V of them.

Cost. Memory is the limit: V logits are read forward, V read and V written backward. At its speed an H200 has
time for some 14 instructions per bf16 logit. Compiled for it the loops take 10.2 forward and 11.5 backward:
2^z without exp's care for denormal numbers, one maximum (so one power) per logit, loads of 128 bits.
"""
from __future__ import annotations

import math

import torch

try:
    import triton
    import triton.language as tl
except ImportError:                     # not made for this system: logprob is logprob_torch
    triton = None

THREADS = 128           # that share a tile of the logits
PER_THREAD = 32         # logits of a tile that each has in registers: with more of those, fewer threads fit


# ---- 1. the definition ----------------------------------------------------------------------------------

def logprob_torch(logits, tokens, old_logps=None, temperature=1.0):
    """(..., V), (...), (...) or None -> logps, ratio, entropy (...), fp32 or fp64, differentiable in logits.
    Padding (token < 0) has logp 0, ratio 1, entropy 0 and no gradient, whatever its logits are."""
    real = tokens >= 0                                                                  # (...)
    x = torch.where(real[..., None], logits, 0).to(torch.promote_types(logits.dtype, torch.float32))
    log_p = torch.log_softmax(x / temperature, -1)                                      # (..., V)
    logps = log_p.gather(-1, tokens.long().clamp(min=0)[..., None]).squeeze(-1)         # (...)  eq. (1)
    ratio = torch.exp(logps - (logps if old_logps is None else old_logps).detach())     # (...)  eq. (2)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e4)).sum(-1)    # 0 ln 0 is 0, not nan:   (...)  eq. (3)
    return torch.where(real, logps, 0), torch.where(real, ratio, 1), torch.where(real, entropy, 0)


# ---- 2. the kernels -------------------------------------------------------------------------------------
#
# A program works on ROWS rows, in steps of one tile of K x ROWS x LANES x VEC logits: VEC neighbours are one
# load, LANES threads stand side by side on a row, and each of them does K loads. Sums over K and VEC stay
# within a thread. V and the strides come divided by VEC: after `* VEC` the compiler knows what is aligned.

SIZES = ["N", "T", "V", "stride_b", "stride_t", "grad_b", "grad_t"]     # not compiled anew for some of them
jit = (lambda kernel: triton.jit(kernel, do_not_specialize=SIZES)) if triton else (lambda kernel: kernel)


@jit
def forward_kernel(
        logits, tokens, old_logps, out_logps, out_ratio, out_entropy, out_m, out_S,
        N, T, V, stride_b, stride_t, scale, ON_POLICY: tl.constexpr,
        K: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr):
    """Read logits (B, T, V) once, for (4) and (6), then (5). The other tensors are (N,), N = B * T."""
    LN2: tl.constexpr = 0.6931471805599453
    scale = tl.cast(scale, tl.float32)              # log2(e) / tau; a Python float may arrive as fp64
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)                                    # (ROWS,)
    token = tl.load(tokens + n, n < N, -1).to(tl.int32)                                 # (ROWS,)
    real = token >= 0
    b, t = (n // T).to(tl.int64), (n % T).to(tl.int64)      # a product of two int32 can be too large for one
    row = logits + (b * stride_b + t * stride_t) * VEC                                  # (ROWS,) pointers
    end = tl.where(real, V, 0) * VEC                # padding: nothing to load

    lane = tl.arange(0, LANES)[None, None, :, None]                                     # (1, 1, LANES, 1)
    mine = tl.arange(0, K)[:, None, None, None] * (LANES * VEC) + tl.arange(0, VEC)[None, None, None, :]
    m = tl.full((ROWS, LANES), -3.4028234663852886e38, tl.float32)      # not -inf: inf - inf is nan
    S = tl.zeros((ROWS, LANES), tl.float32)
    E = tl.zeros((ROWS, LANES), tl.float32)
    for start in range(0, tl.max(end, 0), K * LANES * VEC):
        first = start + lane * VEC                  # this thread's logits are `mine` columns after its first
        x = tl.load(row[None, :, None, None] + first + mine, mine < end[None, :, None, None] - first,
                    float("-inf")).to(tl.float32)                                      # (K, ROWS, LANES, VEC)
        top = tl.maximum(m, tl.max(tl.max(x, 3), 0))                                    # (ROWS, LANES)
        z = (x - top[None, :, :, None]) * scale                                        # (K, ROWS, LANES, VEC)
        power = tl.exp2(z)
        d = tl.maximum((m - top) * scale, -1e4)                     # 0 * -inf is nan
        E = tl.exp2(d) * (E + d * S)                                                    # eq. (6)
        S = tl.exp2(d) * S
        E += tl.sum(tl.sum(power * tl.maximum(z, -1e4), 3), 0)                          # eq. (4)
        S += tl.sum(tl.sum(power, 3), 0)
        m = top

    top = tl.max(m, 1)                                                                  # (ROWS,)
    d = tl.maximum((m - top[:, None]) * scale, -1e4)                                    # (ROWS, LANES)
    E = tl.sum(tl.exp2(d) * (E + d * S), 1)                                             # (ROWS,)  eq. (6)
    S = tl.sum(tl.exp2(d) * S, 1)
    # a token outside the vocabulary gets nan, not what happens to lie behind the row
    x = tl.load(row + token, real & (token < V * VEC), float("nan")).to(tl.float32)
    log2_S = tl.log2(S)
    logp = LN2 * ((x - top) * scale - log2_S)                                           # (ROWS,)  eq. (5)
    logp = tl.where(logp > 0, 0.0, logp)            # rounding may make it 1e-7; nan > 0 is false: nan stays
    entropy = LN2 * (log2_S - E / S)                                                    # (ROWS,)  eq. (5)
    entropy = tl.where(entropy < 0, 0.0, entropy)
    old = logp if ON_POLICY else tl.load(old_logps + n, real, 0.0)
    tl.store(out_logps + n, tl.where(real, logp, 0.0), n < N)
    tl.store(out_ratio + n, tl.where(real, tl.exp(logp - old), 1.0), n < N)             # eq. (2)
    tl.store(out_entropy + n, tl.where(real, entropy, 0.0), n < N)
    tl.store(out_m + n, top, n < N)
    tl.store(out_S + n, S, n < N)


@jit
def backward_kernel(
        logits, tokens, ratio, entropy, m, S, g_logps, g_ratio, g_entropy, grad,
        N, T, V, stride_b, stride_t, grad_b, grad_t, scale,
        K: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr):
    """Read logits (B, T, V) once, write their gradient (B, T, V), which may take their place: (7), (8)."""
    LN2: tl.constexpr = 0.6931471805599453
    scale = tl.cast(scale, tl.float32)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)                                    # (ROWS,)
    token = tl.load(tokens + n, n < N, -1).to(tl.int32)                                 # (ROWS,)
    real = token >= 0
    b, t = (n // T).to(tl.int64), (n % T).to(tl.int64)
    row = logits + (b * stride_b + t * stride_t) * VEC                                  # (ROWS,) pointers
    row_out = grad + (b * grad_b + t * grad_t) * VEC                                    # (ROWS,) pointers
    end, end_out = tl.where(real, V, 0) * VEC, tl.where(n < N, V, 0) * VEC      # padding: zeros are written

    g = tl.load(g_ratio + n, real, 0.0)
    g = tl.where(g == 0, 0.0, g * tl.load(ratio + n, real, 0.0))    # 0 * inf, a ratio that no loss uses, is 0
    G = tl.load(g_logps + n, real, 0.0) + g                                             # (ROWS,)  eq. (7)
    gH, S = tl.load(g_entropy + n, real, 0.0), tl.load(S + n, real, 1.0)
    # (8) is 1[j = a] hit - 2^z_j (c0 + c1 z_j): here are hit, c0 and c1, with scale * LN2 for 1 / tau
    c1 = gH * LN2
    c0 = G + gH * tl.load(entropy + n, real, 0.0) - c1 * tl.log2(S)
    hit = (G * scale * LN2)[None, :, None, None]                                        # (1, ROWS, 1, 1)
    c0 = (c0 / S * scale * LN2)[None, :, None, None]
    c1 = (c1 / S * scale * LN2)[None, :, None, None]
    m = tl.load(m + n, real, 0.0)[None, :, None, None]

    lane = tl.arange(0, LANES)[None, None, :, None]                                     # (1, 1, LANES, 1)
    mine = tl.arange(0, K)[:, None, None, None] * (LANES * VEC) + tl.arange(0, VEC)[None, None, None, :]
    for start in range(0, V * VEC, K * LANES * VEC):
        first = start + lane * VEC
        x = tl.load(row[None, :, None, None] + first + mine, mine < end[None, :, None, None] - first,
                    float("-inf")).to(tl.float32)                                      # (K, ROWS, LANES, VEC)
        z = (x - m) * scale
        slope = tl.exp2(z) * (c0 + c1 * tl.maximum(z, -1e4))                            # 0 * -inf is nan
        dx = tl.where(mine == token[None, :, None, None] - first, hit, 0.0) - slope     # eq. (8)
        tl.store(row_out[None, :, None, None] + first + mine, dx, mine < end_out[None, :, None, None] - first)


# ---- 3. what autograd knows -----------------------------------------------------------------------------

def tile(V, itemsize, *steps):
    """The shape of a tile for rows of V logits that begin at multiples of `steps`, by a fixed rule."""
    vec = math.gcd(16 // itemsize, V, *steps)                       # 128 bits, where every row is aligned
    lanes = min(THREADS, triton.next_power_of_2(triton.cdiv(V, PER_THREAD)))        # short rows share a tile
    k = min(PER_THREAD // vec, triton.next_power_of_2(triton.cdiv(V, lanes * vec)))
    return {"K": k, "ROWS": THREADS // lanes, "LANES": lanes, "VEC": vec}


def launch(kernel, logits, others, strides, scale, **constants):
    """Run a kernel on all rows of logits (B, T, V), on the grid's first axis: the others end at 65,535."""
    B, T, V = logits.shape
    shape = tile(V, logits.element_size(), logits.storage_offset(), *strides)
    sizes = [B * T, T, *(size // shape["VEC"] for size in (V, *strides))]
    with torch.cuda.device_of(logits):              # a kernel runs on the current device, not on its tensors'
        kernel[(triton.cdiv(B * T, shape["ROWS"]),)](logits, *others, *sizes, scale, **constants, **shape,
                                                     num_warps=THREADS // 32, enable_fp_fusion=True)


class LogProb(torch.autograd.Function):
    """logits (B, T, V), neighbours side by side, tokens (N,), old_logps (N,) or None -> 3 x (N,)"""

    @staticmethod
    def forward(ctx, logits, tokens, old_logps, temperature, inplace):
        logps, ratio, entropy, m, S = (logits.new_empty(len(tokens), dtype=torch.float32) for _ in range(5))
        ctx.scale, ctx.inplace = math.log2(math.e) / temperature, inplace
        if len(tokens):
            old = logps if old_logps is None else old_logps         # on policy it is not read
            launch(forward_kernel, logits, (tokens, old, logps, ratio, entropy, m, S), logits.stride()[:2],
                   ctx.scale, ON_POLICY=old_logps is None)
        ctx.save_for_backward(logits, tokens, ratio, entropy, m, S)
        return logps, ratio, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *g):
        logits, *others = ctx.saved_tensors
        grad = logits if ctx.inplace else torch.empty_like(logits, memory_format=torch.contiguous_format)
        if grad.numel():
            launch(backward_kernel, logits, (*others, *(x.contiguous() for x in g), grad),
                   (*logits.stride()[:2], *grad.stride()[:2]), ctx.scale)
        if ctx.inplace:                             # who else still needs the logits gets autograd's error
            torch.autograd.graph.increment_version(logits)
        return grad, None, None, None, None


# ---- 4. what a script calls -----------------------------------------------------------------------------

def available(device):
    """Whether logprob runs the kernels on this device. Print it: a slow path is silent."""
    if triton is None:
        return False
    if not isinstance(forward_kernel, triton.JITFunction):          # TRITON_INTERPRET=1: anywhere, for tests
        return True
    return torch.device(device).type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def logprob(logits, tokens, old_logps=None, temperature=1.0, inplace=False):
    """(..., V), (...), (...) or None -> logps, ratio, entropy (...) fp32 of softmax(logits / temperature).

    All three are differentiable in logits. old_logps are constants; None stands for logps as they are now:
    the ratio is 1, and has a gradient. Padding (token < 0) is not read: 0, 1, 0 and a gradient of 0.
    inplace=True writes the gradient over the logits, which nobody else may need then. Where the kernels do
    not run, see available(), and for other dtypes than fp32, bf16 and fp16, this is logprob_torch."""
    for name, x in (("tokens", tokens), ("old_logps", old_logps)):
        if x is not None and x.shape != logits.shape[:-1]:
            raise ValueError(f"{name} {tuple(x.shape)} for logits {tuple(logits.shape)}: need one per row")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: must be > 0; the limit 0 is argmax")
    if inplace and not logits.is_contiguous():
        raise ValueError(f"inplace=True, but strides {logits.stride()} may share memory: use inplace=False")
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16) or not available(logits.device):
        return logprob_torch(logits, tokens, old_logps, temperature)
    x = torch.atleast_2d(logits if logits.stride(-1) == 1 else logits.contiguous())
    x = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])                               # (B, T, V)
    old = None if old_logps is None else old_logps.detach().float().reshape(-1)         # (N,)
    out = LogProb.apply(x, tokens.reshape(-1), old, temperature, inplace)               # 3 x (N,)
    return tuple(values.view(tokens.shape) for values in out)
