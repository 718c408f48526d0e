"""Log-probability, ratio and entropy of sampled tokens from hidden states, without all logits.

N hidden states h_n of width D and the V rows w_j of the head make N x V logits.
kernels/logprob.py makes three numbers of each row of them. 8192 x 151,936 logits in bf16 take 2.5
GB; their gradient takes as much, and a softmax in fp32 twice that. Here at most `budget` bytes of
all this exist at a time.

To use it in a script's `score`, let hidden = completion_states(model, prompts, completions), call
linear_logprob(hidden, model.embed.weight, completions, temperature=temperature), and return its
logps and entropy.

Forward, by rows. What a row gives depends on no other row, so a chunk of rows at a time is done:

  x_nj    = h_n . w_j                                                                   (1)

From x_nj the row kernel makes logp_n and entropy_n, and it keeps m_n and S_n, which give
p_nj = exp((x_nj - m_n) / tau) / S_n.

Backward, by columns. With m_n and S_n, any part of the logits is enough to know p_nj there, so
the gradient is made for a slice of the vocabulary at a time, from logits that are computed again.
Let a_n be the token of row n, G_n the derivative of the loss by logp_n, the ratio included, and
g_n that by entropy_n. Then

  e_nj    = (1[j = a_n] G_n - p_nj (G_n + g_n (entropy_n + ln p_nj))) / tau             (2)
  dL/dw_j = sum_n e_nj h_n                                                              (3)
  dL/dh_n = sum_j e_nj w_j                                                              (4)

A slice of the vocabulary finishes its rows of (3) in one matmul, which is rounded once. Chunks of
rows would each add to all V x D of them, which takes a second copy in fp32, or piles up rounding
errors. Only (4) is summed over slices. Its sum has N x D numbers in fp32, which is little.

Why is there no kernel that keeps the logits in registers? Their matmul takes 2 D flops a logit. By
its data sheet, an H200 makes 989 TFLOP/s in bf16 and moves 4.8 TB/s. To write and read a logit, 4
bytes, then takes as long as 2 * 412 flops, which is 10% of the matmul at D = 4096 and 40% at D =
1024. A matmul of our own would save that, and gains only if it is slower than the library's by
less, which at D = 4096 we do not expect. So the library multiplies, in parts that fit the budget,
and the row kernels do the rest. That takes 8 N V D flops, where 6 N V D would do without computing
logits again. On a GPU it saves memory, not time: where the logits fit into memory, take
logprob(hidden @ weight.T, ...).
"""
from __future__ import annotations

import torch

from kernels.logprob import DTYPES, available, check_arguments, run_backward, run_forward


def uses_kernels(x):
    """Whether the kernels of kernels/logprob.py compute the rows; if not, plain torch does."""
    return x.numel() > 0 and available(x.device) and x.dtype in DTYPES


def widened(x):
    """Returns x in the dtype of sums, fp32 or fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def chunk_size(budget, hidden, length):
    """Returns how many rows, or columns, of `length` logits fit into the budget; at least one."""
    bytes_per_logit = hidden.element_size()
    if not uses_kernels(hidden):                # plain torch makes x and p, in fp32 or fp64
        bytes_per_logit = 2 * max(bytes_per_logit, 4)
    size = int(budget) // (bytes_per_logit * max(length, 1))
    if size >= 64:                              # whole tiles of a matmul, and aligned loads
        size = size // 64 * 64
    return max(size, 1)


# ---- 1. a chunk of rows, a slice of columns --------------------------------------------------

def rows_forward(hidden, weight, tokens, temperature):
    """Returns logps, entropy, m and S, (c,) each, of hidden (c, D), weight (V, D), tokens (c,)."""
    x = hidden @ weight.T                                                       # (c, V)  eq. (1)
    if uses_kernels(hidden):
        logps, _, entropy, m, S = run_forward(x[None], tokens, None, temperature)
        return logps, entropy, m, S

    # in place, so that there are two (c, V) at most
    m = widened(x.amax(dim=1))                                                  # (c,)
    x = widened(x).sub_(m[:, None]).div_(temperature)                           # (c, V)
    p = x.exp()                                 # times S
    S = p.sum(dim=1)                                                            # (c,)
    logps = x.gather(1, tokens[:, None]).squeeze(1) - S.log()                   # (c,)
    entropy = S.log() - p.mul_(x).sum(dim=1) / S                                # (c,)
    return logps, entropy, m, S


def columns_backward(hidden, weight, tokens, entropy, m, S, G, g, temperature):
    """Returns e (N, s) of hidden (N, D) and a slice of the weight (s, D). The tokens (N,) are
    counted from the first row of the slice; s stands for those outside it. entropy, m, S, G and g
    are (N,) each, see (2)."""
    s = len(weight)
    x = hidden @ weight.T                                                       # (N, s)
    if uses_kernels(hidden):
        zero = torch.zeros_like(G)              # G holds the gradient by the ratio, too
        run_backward(x[None], (tokens, zero, entropy, m, S, G, zero, g), x[None], temperature)
        return x                                # e has taken the place of x

    # in place, so that there are two (N, s) at most
    x = widened(x).sub_(m[:, None]).div_(temperature)                           # (N, s)
    p = x.exp().div_(S[:, None])                                                # (N, s)
    x.sub_((S.log() - entropy)[:, None])        # ln p + entropy
    e = x.mul_(g[:, None]).add_(G[:, None]).mul_(p).neg_()                      # (N, s)
    del p                                       # makes room for e in another dtype
    column = tokens.clamp(max=s - 1)[:, None]                                   # (N, 1)
    at_token = torch.where(tokens < s, G, 0)[:, None]                           # (N, 1)
    e.scatter_add_(1, column, at_token)
    return e.div_(temperature).to(hidden.dtype)                                 # (N, s)  eq. (2)


# ---- 2. what autograd knows ------------------------------------------------------------------

class LinearLogProb(torch.autograd.Function):
    """Returns logps and entropy, (N,) each, of hidden (N, D), weight (V, D) and tokens (N,). No
    token is padding."""

    @staticmethod
    def forward(ctx, hidden, weight, tokens, temperature, budget):
        size = chunk_size(budget, hidden, len(weight))
        chunks = []
        for some_hidden, some_tokens in zip(hidden.split(size), tokens.split(size)):
            chunks.append(rows_forward(some_hidden, weight, some_tokens, temperature))
        logps, entropy, m, S = (torch.cat(parts) for parts in zip(*chunks))
        ctx.temperature = temperature
        ctx.slice_size = chunk_size(budget, hidden, len(hidden))
        ctx.save_for_backward(hidden, weight, tokens, entropy, m, S)
        return logps, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, G, g):
        hidden, weight, tokens, entropy, m, S = ctx.saved_tensors
        d_hidden = widened(torch.zeros_like(hidden))                            # (N, D)
        d_weight = torch.empty_like(weight)                                     # (V, D)
        for start in range(0, len(weight), ctx.slice_size):
            end = start + ctx.slice_size
            W = weight[start:end]                                               # (s, D)
            is_here = (tokens >= start) & (tokens < end)                        # (N,)
            column = torch.where(is_here, tokens - start, len(W))               # (N,)
            e = columns_backward(hidden, W, column, entropy, m, S, G, g, ctx.temperature)
            torch.mm(e.T, hidden, out=d_weight[start:end])                      # (s, D)  eq. (3)
            d_hidden += e @ W                                                   # (N, D)  eq. (4)
            del e                               # else it still exists while the next one is made
        return d_hidden, d_weight, None, None, None


# ---- 3. what is called -----------------------------------------------------------------------

def linear_logprob(hidden, weight, tokens, old_logps=None, temperature=1.0, budget=256 * 2**20):
    """Returns logps, ratio and entropy, (...) each, in fp32, or in fp64 where the arguments are.

    They are those of logprob(hidden @ weight.T, tokens, old_logps, temperature), for hidden
    (..., D), weight (V, D), tokens (...) and old_logps (...) or None, and are differentiable in
    hidden and weight. The logits, and all that is made of them, take at most `budget` bytes, or
    what one row takes if that is more. Padding (token < 0) costs nothing: it has logp 0, ratio 1,
    entropy 0 and no gradient, whatever its hidden states are.
    """
    check_arguments("hidden", hidden, tokens, old_logps, temperature)
    all_hidden = hidden.reshape(-1, hidden.shape[-1])                           # (all, D)
    all_tokens = tokens.reshape(-1).long()                                      # (all,)
    rows = (all_tokens >= 0).nonzero().squeeze(1)                               # (N,) no padding
    outputs = LinearLogProb.apply(all_hidden.index_select(0, rows), weight, all_tokens[rows],
                                  temperature, budget)

    def with_padding(values):
        zeros = values.new_zeros(len(all_tokens))
        return zeros.index_copy(0, rows, values).view(tokens.shape)

    logps, entropy = (with_padding(values) for values in outputs)               # (...)
    if old_logps is None:
        old_logps = logps
    log_ratio = logps - old_logps.to(logps).detach()
    ratio = torch.where(tokens < 0, 0, log_ratio).exp()                         # (...)
    return logps, ratio, entropy
