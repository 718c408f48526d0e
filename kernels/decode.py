"""Rollouts on CUDA: one decode step is recorded as a graph, and replayed for every token.

A step of a small model is a hundred kernels of some 2 us each, and Python takes 5 us or more to launch one:
most of the time the GPU waits for Python. A graph is a recording of launches, sent as a whole: kernels, sizes
and addresses. So all that a step reads or changes are tensors that stay where they are, and Python knows no
number that changes from step to step:

- the cache of keys and values is as long as it will ever get. Attention is over all of it, with a mask: a
  token at position p sees those at 0 .. p. Few key/value heads stay few: the query heads that share one are
  its queries.
- `slot`, which counts the steps, is a tensor: it tells where the cache and the outputs are written, and which
  uniforms are used.
- sampling is part of the step: inverse CDF, one uniform a row, all drawn before.
- a row that has ended goes on and writes PAD and zeros. Whether all have ended is looked at every 8 steps;
  nothing else waits for the GPU.

Weights, too, are read where they are. An optimizer changes them in place, so that a graph is good for a whole
run: it is kept as long as its model lives. The prompts are read by the model itself, once each, and give the
first token. Without CUDA the same step runs as it is written: that is how it is tested.
"""
from __future__ import annotations

import functools
import weakref
from types import SimpleNamespace

import torch
from torch import nn

from kernels import choose
from kernels.logprob import logprob_torch

# P prompts, B = P * copies rows, W prompt tokens, T slots of completion tokens, L positions in the cache,
# V vocabulary, D width, H heads, KV key/value heads, hd width of a head.

GRAPHS = weakref.WeakKeyDictionary()    # model -> {all that a graph depends on: (state, replay)}
LOOK = 8                                # steps from one look at whether all rows have ended to the next


# ---- 1. what a step reads and writes --------------------------------------------------------------------

def allocate(model, B, W, T, temperature, uniforms, eos, pad, kernel):
    """Every tensor of a step that is no weight, and what does not change. -> namespace"""
    weight, block = model.embed.weight, model.blocks[0]
    full = functools.partial(torch.full, device=weight.device)
    L, hd = (W + T + 15) // 16 * 16, weight.shape[1] // block.H     # by 16: rows of the mask are aligned
    angles = torch.arange(L, device=weight.device)[:, None] * model.frequencies                 # (L, hd / 2)
    return SimpleNamespace(
        W=W, temperature=temperature, eos=eos, pad=pad,
        logprob=choose(kernel, weight.device) or logprob_torch,
        slot=full((1,), 0),                                                         # (1,) of the last token
        token=full((B,), pad), ended=full((B,), False),                             # (B,), (B,)
        uniforms=None if uniforms is None else torch.empty_like(uniforms, device=weight.device),    # (B, T)
        tokens=full((B, T), pad),                                                   # (B, T)
        values=full((3, B, T), 0.0, dtype=torch.promote_types(weight.dtype, torch.float32)),
        cache=full((len(model.blocks), 2, B, block.KV, L, hd), 0.0, dtype=weight.dtype),
        rotary=torch.stack([angles.cos(), angles.sin()]),                           # (2, L, hd / 2)
        mask=full((L, L), float("-inf"), dtype=weight.dtype).triu(1))               # (L, L) added to scores


def start(model, s, prompts, copies, uniforms):
    """Begin a batch: nothing of an earlier one stays; prompts (P, W) are read, the first token is sampled."""
    for buffer, value in ((s.slot, 0), (s.ended, False), (s.tokens, s.pad), (s.values, 0), (s.cache, 0)):
        buffer.fill_(value)
    if uniforms is not None:
        s.uniforms.copy_(uniforms)
    prefix = {}
    logits = model(prompts, prefix, logits_to_keep=1)[:, 0].repeat_interleave(copies, 0)        # (B, V)
    for block, cache in zip(model.blocks, s.cache):     # the rows of a prompt are neighbours
        cache.unflatten(1, (-1, copies))[..., :s.W, :] = prefix[block].unsqueeze(2)
    sample(s, logits)


# ---- 2. the step ----------------------------------------------------------------------------------------

def sample(s, logits):
    """Fill this slot: a token from logits (B, V) for every row that has not ended."""
    logits = logits.to(s.values.dtype)
    if s.uniforms is None:
        token = logits.argmax(-1)                                                       # (B,)
    else:                                                       # inverse CDF, which does not end at quite 1
        cdf = torch.softmax(logits / s.temperature, -1).cumsum(-1)                      # (B, V)
        u = s.uniforms.index_select(1, s.slot) * cdf[:, -1:]                            # (B, 1)
        token = torch.searchsorted(cdf, u, right=True)[:, 0].clamp(max=cdf.shape[1] - 1)
    logps, _, entropy = s.logprob(logits, token, temperature=s.temperature)             # (B,), (B,)
    s.token.copy_(token.masked_fill(s.ended, s.pad))
    s.tokens.index_copy_(1, s.slot, s.token[:, None])
    values = torch.stack([torch.ones_like(logps), logps, entropy]).masked_fill(s.ended, 0)      # (3, B)
    s.values.index_copy_(2, s.slot, values[..., None])
    s.ended.logical_or_(token == s.eos)


def step(model, s):
    """Read the last token of every row, and sample the next. Only tensors of `s` change."""
    position = s.slot + s.W                                                             # (1,)
    s.slot.add_(1)
    cos, sin = s.rotary.index_select(1, position)                                       # (1, hd / 2) each
    mask = s.mask.index_select(0, position)[None, None]                                 # (1, 1, 1, L)
    x = model.embed(s.token)                                                            # (B, D)
    for block, cache in zip(model.blocks, s.cache):                                     # (2, B, KV, L, hd)
        H, KV, hd = block.H, block.KV, cache.shape[-1]
        qk, v = block.qkv(block.attention_norm(x)).view(len(x), -1, hd).split([H + KV, KV], 1)
        left, right = qk.chunk(2, -1)                                                   # (B, H + KV, hd / 2)
        qk = torch.cat([left * cos - right * sin, left * sin + right * cos], -1)        # (B, H + KV, hd)
        cache.index_copy_(3, position, torch.stack([qk[:, H:], v]).unsqueeze(3))
        q = qk[:, :H].unflatten(1, (KV, -1))                                            # (B, KV, H / KV, hd)
        y = nn.functional.scaled_dot_product_attention(q, *cache, attn_mask=mask)       # (B, KV, H / KV, hd)
        x = x + block.out(y.reshape(x.shape))
        gate, up = block.gate_up(block.mlp_norm(x)).chunk(2, -1)
        x = x + block.down(nn.functional.silu(gate) * up)
    sample(s, nn.functional.linear(model.norm(x), model.embed.weight))


def capture(function):
    """Call function() once, and record another call, which is not carried out. -> what carries it out"""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()          # makes what cannot be made during a recording: library handles, compiled kernels
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        function()
    return graph.replay


# ---- 3. what a script calls -----------------------------------------------------------------------------

@torch.no_grad()
def decode(model, prompts, copies, max_new_tokens, temperature, uniforms, eos, pad, kernel="auto",
           captured=None):
    """The rollout of the scripts, for their GPT: `copies` completions of each prompt (P, W), side by side.

    uniforms[i, t] (B, T) draws slot t of row i; if None, the likeliest token is taken. kernel: as --kernel.
    captured: whether a graph is replayed, None: on CUDA. -> tokens, mask, logps, entropy, (B, T) each; behind
    the first eos of a row tokens are pad and the rest is 0."""
    (P, W), T = prompts.shape, max_new_tokens
    if uniforms is not None and uniforms.shape != (P * copies, T):
        raise ValueError(f"uniforms {tuple(uniforms.shape)}: need one per row and slot, {(P * copies, T)}")
    captured = T > 1 and (prompts.is_cuda if captured is None else captured)
    shape = (P * copies, W, T, temperature, None if uniforms is None else uniforms.dtype, eos, pad, kernel)
    key = (*shape, *((weight.data_ptr(), weight.dtype) for weight in model.parameters()))
    kept = GRAPHS.setdefault(model, {}) if captured else {}
    with torch.cuda.device_of(prompts):
        if key not in kept:
            s = allocate(model, P * copies, W, T, temperature, uniforms, eos, pad, kernel)
            once = functools.partial(step, model, s)
            kept[key] = s, capture(once) if captured else once
        s, replay = kept[key]
        start(model, s, prompts, copies, uniforms)
        for t in range(1, T):
            if t % LOOK == 0 and s.ended.all():
                break
            replay()
        return s.tokens.clone(), *s.values.clone()
