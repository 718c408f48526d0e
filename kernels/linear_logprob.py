"""Log-probability, ratio and entropy of sampled tokens from hidden states and the head, without the logits.

N hidden states h_n of width D and the V rows w_j of the head make N x V logits x_nj = h_n . w_j, of which
kernels/logprob.py makes three numbers a row. 8192 x 151,936 logits are 2.5 GB in bf16, as is their gradient,
and a softmax in fp32 is twice that. Here at most `budget` bytes of all this exist at any time.

Forward, by rows: what a row gives depends on no other. Of a chunk of rows H, and then of the next,

  X = H W^T -> logp, entropy, and m, S with p_nj = exp((x_nj - m_n) / tau) / S_n       (1)

Backward, by columns. m and S make p_nj of x_nj alone, so the gradient by logits can be had of any part of
them, made once more. With G and g for the loss's gradients by logp (ratio included) and entropy, it is

  e_nj = (1[j = a_n] G_n - p_nj (G_n + g_n (entropy_n + ln p_nj))) / tau               (2)
  dL/dw_j = sum_n e_nj h_n                                                             (3)
  dL/dh_n = sum_j e_nj w_j                                                             (4)

A slice of the vocabulary finishes its rows of (3) in one matmul, rounded once. Chunks of rows would each add
to all V x D of them: a second copy in fp32, or rounding errors that pile up. It is (4) that is summed over
slices, in fp32: N x D, which is small.

Why no kernel that keeps the logits in registers? Their matmul takes 2 D flops a logit. To write and read one
in bf16 takes an H200 as long as 2 * 367 flops: 9% of it at D = 4096, 36% at 1024. A matmul of one's own loses
more than 9% to the library's. So the library multiplies, in parts that fit the budget, and the row kernels do
the rest: 8 N V D flops in all, 6 of them without the second X. On a GPU it saves memory, not time: where they
fit, there is logprob(hidden @ weight.T, ...).
"""
from __future__ import annotations

import math

import torch

from kernels.logprob import available, backward_kernel, forward_kernel, launch


def fused(x):
    """Whether kernels/logprob.py's kernels do the rows, or plain torch."""
    return x.numel() > 0 and available(x.device) and x.dtype in (torch.float32, torch.bfloat16, torch.float16)


def wide(x):
    """x as what sums are made in, fp32 or fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def at_once(budget, hidden, length):
    """How many rows of `length` logits, or columns, there is room for: one at least."""
    size = hidden.element_size()                # of a logit; in torch x and p, in fp32 or fp64
    n = int(budget) // ((size if fused(hidden) else 2 * max(size, 4)) * max(length, 1))
    return max(n // 64 * 64 or n, 1)            # by 64: whole tiles of a matmul, aligned loads of a slice


# ---- 1. a chunk of rows, a slice of columns -------------------------------------------------------------

def rows_forward(hidden, weight, tokens, temperature):
    """hidden (c, D), weight (V, D), tokens (c,) -> logps, entropy, m, S, (c,) each"""
    x = hidden @ weight.T                                                               # (c, V)  eq. (1)
    if fused(hidden):
        logps, ratio, entropy, m, S = (x.new_empty(len(x), dtype=torch.float32) for _ in range(5))
        launch(forward_kernel, x[None], (tokens, logps, logps, ratio, entropy, m, S), x[None].stride()[:2],
               math.log2(math.e) / temperature, ON_POLICY=True)
        return logps, entropy, m, S
    m = wide(x.amax(1))                                                                 # (c,)
    x = wide(x).sub_(m[:, None]).div_(temperature)                                      # (c, V)
    p = x.exp()                                 # times S; the second (c, V), and there is no third
    S, chosen = p.sum(1), x.gather(1, tokens[:, None])[:, 0]                            # (c,), (c,)
    return chosen - S.log(), S.log() - p.mul_(x).sum(1) / S, m, S


def columns_backward(hidden, weight, tokens, entropy, m, S, G, g, temperature):
    """hidden (N, D), a slice of weight (s, D), tokens (N,) counted from it, s: elsewhere, ... -> e (N, s)"""
    x, s = hidden @ weight.T, len(weight)                                               # (N, s)
    if fused(hidden):
        none, strides = torch.zeros_like(G), x[None].stride()[:2]       # G has the ratio's gradient already
        launch(backward_kernel, x[None], (tokens, none, entropy, m, S, G, none, g, x), strides * 2,
               math.log2(math.e) / temperature)
        return x                                # it holds e now
    x = wide(x).sub_(m[:, None]).div_(temperature)                                      # (N, s)
    p = x.exp().div_(S[:, None])                                                        # (N, s)
    e = x.sub_((S.log() - entropy)[:, None]).mul_(g[:, None]).add_(G[:, None]).mul_(p).neg_()
    del p                                       # room for e in another dtype
    e.scatter_add_(1, tokens.clamp(max=s - 1)[:, None], torch.where(tokens < s, G, 0)[:, None])
    return e.div_(temperature).to(hidden.dtype)                                         # (N, s)  eq. (2)


# ---- 2. what autograd knows -----------------------------------------------------------------------------

class LinearLogProb(torch.autograd.Function):
    """hidden (N, D), weight (V, D), tokens (N,) and no padding -> logps, entropy (N,)"""

    @staticmethod
    def forward(ctx, hidden, weight, tokens, temperature, budget):
        size = at_once(budget, hidden, len(weight))
        chunks = zip(hidden.split(size), tokens.split(size))
        parts = [rows_forward(rows, weight, some, temperature) for rows, some in chunks]
        logps, entropy, m, S = (torch.cat(part) for part in zip(*parts))
        ctx.temperature, ctx.size = temperature, at_once(budget, hidden, len(hidden))
        ctx.save_for_backward(hidden, weight, tokens, entropy, m, S)
        return logps, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *g):
        hidden, weight, tokens, *rows = ctx.saved_tensors
        d_hidden, d_weight = wide(torch.zeros_like(hidden)), torch.empty_like(weight)
        for start in range(0, len(weight), ctx.size):
            W, dW = (x[start:start + ctx.size] for x in (weight, d_weight))             # (s, D) each
            here = torch.where((tokens >= start) & (tokens < start + len(W)), tokens - start, len(W))   # (N,)
            e = columns_backward(hidden, W, here, *rows, *g, ctx.temperature)           # (N, s)
            torch.mm(e.T, hidden, out=dW)                                               # (s, D)  eq. (3)
            d_hidden += e @ W                                                           # (N, D)  eq. (4)
            del e                               # else it is still there while the next is made
        return d_hidden, d_weight, None, None, None


# ---- 3. what a script calls -----------------------------------------------------------------------------

def linear_logprob(hidden, weight, tokens, old_logps=None, temperature=1.0, budget=256 * 2**20):
    """(..., D), (V, D), (...), (...) or None -> logps, ratio, entropy (...), fp32, or fp64 from fp64.

    What logprob(hidden @ weight.T, tokens, old_logps, temperature) gives, all three differentiable in hidden
    and weight, with at most `budget` bytes of logits and all that is made of them (or of one row, if that is
    more). Padding (token < 0) costs nothing: 0, 1, 0, no gradient, whatever its hidden states are."""
    for name, x in (("tokens", tokens), ("old_logps", old_logps)):
        if x is not None and x.shape != hidden.shape[:-1]:
            raise ValueError(f"{name} {tuple(x.shape)} for hidden {tuple(hidden.shape)}: need one per row")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: must be > 0; the limit 0 is argmax")
    h, a = hidden.reshape(-1, hidden.shape[-1]), tokens.reshape(-1).long()              # (all, D), (all,)
    real = (a >= 0).nonzero()[:, 0]                                                     # (N,)
    out = LinearLogProb.apply(h.index_select(0, real), weight, a[real], temperature, budget)
    logps, entropy = (x.new_zeros(len(a)).index_copy(0, real, x).view(tokens.shape) for x in out)
    old = (logps if old_logps is None else old_logps.to(logps)).detach()                # (...)
    return logps, torch.where(tokens < 0, 0, logps - old).exp(), entropy
