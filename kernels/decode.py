"""Rollouts on CUDA: one decode step is recorded as a graph, and replayed for every token.

A step of a small model is about a hundred kernels, which take some 2 us each. Python needs 5 us or
more to launch one, so the GPU mostly waits for Python. A CUDA graph is a recording of launches that
is sent as a whole: kernels, sizes and addresses. Therefore everything that a step reads or changes
is a tensor that keeps its address, and Python knows no number that changes from step to step:

- The keys and values have room for all positions from the start. Attention is over all of them,
  with a mask: a token at position p attends to positions 0 .. p. The query heads that share a
  key/value head are passed as several queries of that head, so its keys and values are stored once.
- `slot` counts the steps in a tensor. It says which position and which slot of the outputs are
  written, and which uniforms are used.
- Sampling is part of the step. The uniforms are drawn before, one for each row and slot.
- A row that has ended goes on, and writes PAD and zeros. Whether all rows have ended is looked up
  every 8 steps. Nothing else waits for the GPU.

The weights keep their addresses, too: an optimizer changes them in place. So one graph serves a
whole run, and is kept as long as its model exists. The prompts are read by the model itself, not by
the graph; that gives the first token. Without CUDA the same step runs as plain torch, which is how
it is tested.
"""
from __future__ import annotations

import dataclasses
import functools
import weakref

import torch
import torch.nn.functional as F

import kernels
from kernels.logprob import logprob_torch

# Shapes: B rows, W prompt tokens, T slots for completion tokens, L positions (at least W + T),
# V vocabulary, D width, H heads, KV key/value heads, hd head size.

GRAPHS = weakref.WeakKeyDictionary()    # model -> {what a graph depends on: (state, replay)}
CHECK_EVERY = 8                         # steps between looking up whether all rows have ended


# ---- 1. what a step reads and writes ---------------------------------------------------------

@dataclasses.dataclass
class State:
    """What a step reads and writes, but for the weights. The tensors change in place only."""
    # constants
    prompt_width: int
    temperature: float
    eos: int
    pad: int
    kernel: str
    cos: torch.Tensor               # (L, hd)     of rotary positions, see `rotate`
    sin: torch.Tensor               # (L, hd)
    attention_mask: torch.Tensor    # (L, L)      added to attention scores: 0 or -inf
    # given for each batch
    uniforms: torch.Tensor | None   # (B, T)      None: the likeliest token is taken
    # where the step is
    slot: torch.Tensor              # (1,)        of the last token
    token: torch.Tensor             # (B,)        the last token
    has_ended: torch.Tensor         # (B,)        whether that, or one before it, was EOS
    keys: torch.Tensor              # (blocks, B, KV, L, hd)
    values: torch.Tensor            # (blocks, B, KV, L, hd)
    # outputs; behind the end of a row, tokens are PAD and the rest is 0
    tokens: torch.Tensor            # (B, T)
    mask: torch.Tensor              # (B, T)
    logps: torch.Tensor             # (B, T)
    entropy: torch.Tensor           # (B, T)


def allocate(model, B, W, T, temperature, uniforms_dtype, eos, pad, kernel):
    """Room for B prompts of W tokens and completions of up to T tokens. -> State"""
    weight = model.embed.weight
    attention = model.blocks[0].attention
    full = functools.partial(torch.full, device=weight.device)
    output_dtype = torch.promote_types(weight.dtype, torch.float32)

    L = (W + T + 15) // 16 * 16             # attention wants rows of the mask to be aligned
    num_kv_heads = attention.key.out_features // attention.head_size
    cache_shape = (len(model.blocks), B, num_kv_heads, L, attention.head_size)
    positions = torch.arange(L, device=weight.device)
    angles = positions[:, None] * model.frequencies                             # (L, hd / 2)
    uniforms = None
    if uniforms_dtype is not None:
        uniforms = full((B, T), 0.0, dtype=uniforms_dtype)
    return State(
        prompt_width=W, temperature=temperature, eos=eos, pad=pad, kernel=kernel,
        cos=torch.cat([angles.cos(), angles.cos()], dim=1),
        sin=torch.cat([-angles.sin(), angles.sin()], dim=1),
        attention_mask=full((L, L), float("-inf"), dtype=weight.dtype).triu(1),
        uniforms=uniforms,
        slot=full((1,), 0),
        token=full((B,), pad),
        has_ended=full((B,), False),
        keys=full(cache_shape, 0.0, dtype=weight.dtype),
        values=full(cache_shape, 0.0, dtype=weight.dtype),
        tokens=full((B, T), pad),
        mask=full((B, T), 0.0, dtype=output_dtype),
        logps=full((B, T), 0.0, dtype=output_dtype),
        entropy=full((B, T), 0.0, dtype=output_dtype))


def start(model, state, prompts, uniforms):
    """Begin a batch: forget the one before, read the prompts (B, W), and sample the first token."""
    state.slot.zero_()
    state.has_ended.zero_()
    state.keys.zero_()
    state.values.zero_()
    state.tokens.fill_(state.pad)
    state.mask.zero_()
    state.logps.zero_()
    state.entropy.zero_()
    if uniforms is not None:
        state.uniforms.copy_(uniforms)

    # rows with equal prompts are read once
    distinct, prompt_index = prompts.unique(dim=0, return_inverse=True)
    cache = PromptCache()
    hidden = model.hidden(distinct, cache)[:, -1]                               # (distinct, D)
    for block, keys, values in zip(model.blocks, state.keys, state.values):
        k, v = cache.layers[block.attention]                            # (distinct, KV, W, hd)
        keys[:, :, :state.prompt_width] = k[prompt_index]
        values[:, :, :state.prompt_width] = v[prompt_index]
    logits = F.linear(hidden, model.embed.weight)                               # (distinct, V)
    sample(state, logits[prompt_index])


class PromptCache:
    """What the scripts' Cache is to a model that reads prompts, and no more."""

    def __init__(self):
        self.layers = {}

    def __len__(self):
        return 0

    def append(self, layer, k, v):
        self.layers[layer] = (k, v)
        return k, v


# ---- 2. the step -----------------------------------------------------------------------------

def sample(state, logits):
    """Fill this slot: a token from logits (B, V) in every row that has not ended."""
    logits = logits.to(state.logps.dtype)
    if state.uniforms is None:
        token = logits.argmax(dim=-1)                                           # (B,)
    else:
        cdf = F.softmax(logits / state.temperature, dim=-1).cumsum(dim=-1)      # (B, V)
        uniforms = state.uniforms.index_select(1, state.slot)                   # (B, 1)
        threshold = uniforms * cdf[:, -1:]                  # the cdf does not end at quite 1
        token = torch.searchsorted(cdf, threshold, right=True).squeeze(1)
        token = token.clamp(max=logits.shape[1] - 1)                            # (B,)

    if kernels.applies(state.kernel, logits):
        logps, entropy = kernels.logprobs(logits, token, state.temperature)     # (B,), (B,)
    else:
        logps, _, entropy = logprob_torch(logits, token, temperature=state.temperature)

    state.token.copy_(token.masked_fill(state.has_ended, state.pad))
    write(state.tokens, state.slot, state.token)
    write(state.mask, state.slot, (~state.has_ended).to(logps))
    write(state.logps, state.slot, logps.masked_fill(state.has_ended, 0))
    write(state.entropy, state.slot, entropy.masked_fill(state.has_ended, 0))
    state.has_ended.logical_or_(token == state.eos)


def write(output, slot, column):
    """Write a column (B,) to an output (B, T), at slot (1,)."""
    output.index_copy_(1, slot, column[:, None])


def step(model, state):
    """Read the last token of every row, and sample the next one."""
    position = state.slot + state.prompt_width                                  # (1,)
    state.slot.add_(1)
    cos = state.cos.index_select(0, position)                                   # (1, hd)
    sin = state.sin.index_select(0, position)                                   # (1, hd)
    attention_mask = state.attention_mask.index_select(0, position)[None, None]     # (1, 1, 1, L)

    x = model.embed(state.token)                                                # (B, D)
    for block, keys, values in zip(model.blocks, state.keys, state.values):     # (B, KV, L, hd)
        attention = block.attention
        heads = (-1, attention.head_size)
        y = block.attention_norm(x)
        q = attention.query(y).unflatten(1, heads)                              # (B, H, hd)
        k = attention.key(y).unflatten(1, heads)                                # (B, KV, hd)
        v = attention.value(y).unflatten(1, heads)                              # (B, KV, hd)
        q = rotate(q, cos, sin)
        k = rotate(k, cos, sin)
        keys.index_copy_(2, position, k.unsqueeze(2))
        values.index_copy_(2, position, v.unsqueeze(2))
        q = q.unflatten(1, (k.shape[1], -1))                            # (B, KV, H / KV, hd)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=attention_mask)
        x = x + attention.out(y.reshape(x.shape))                               # (B, D)
        x = x + block.mlp(block.mlp_norm(x))                                    # (B, D)
    sample(state, F.linear(model.norm(x), model.embed.weight))


def rotate(x, cos, sin):
    """The rotary positions of the scripts, in fewer kernels. cos (1, hd) holds the cosines twice,
    sin the sines with a minus and without. (B, heads, hd) -> the same"""
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return x * cos + swapped * sin


def capture(function):
    """Call function() once, then record a call of it without carrying it out.
    -> a function that carries out the recorded call"""
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()          # makes what cannot be made while recording: library handles, kernels
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        function()
    return graph.replay


# ---- 3. what is called -----------------------------------------------------------------------

@torch.no_grad()
def decode(model, prompts, max_new_tokens, temperature, uniforms, eos, pad, kernel="auto",
           captured=None):
    """The scripts' rollout of prompts (B, W). -> tokens, mask, logps, entropy, (B, T) each

    The model is a script's GPT. uniforms[i, t] (B, T) draws slot t of row i; if it is None, the
    likeliest token is taken. The kernel is that of --kernel. `captured` says whether a graph is
    replayed; None means on CUDA.
    """
    B, W = prompts.shape
    T = max_new_tokens
    uniforms_dtype = None
    if uniforms is not None:
        uniforms_dtype = uniforms.dtype
        if uniforms.shape != (B, T):
            raise ValueError(f"uniforms {tuple(uniforms.shape)}: need one per row and slot, "
                             f"{(B, T)}")

    # a graph depends on all of these
    settings = (B, W, T, temperature, uniforms_dtype, eos, pad, kernel)
    weights = tuple((weight.data_ptr(), weight.dtype) for weight in model.parameters())
    if captured is None:
        captured = prompts.is_cuda
    captured = captured and T > 1           # one token takes no step
    graphs = GRAPHS.setdefault(model, {}) if captured else {}

    with torch.cuda.device_of(prompts):
        if (settings, weights) not in graphs:
            new_state = allocate(model, *settings)
            one_step = functools.partial(step, model, new_state)
            graphs[settings, weights] = (new_state, capture(one_step) if captured else one_step)
        state, replay = graphs[settings, weights]
        start(model, state, prompts, uniforms)
        for t in range(1, T):
            if t % CHECK_EVERY == 0 and state.has_ended.all():
                break
            replay()
        outputs = (state.tokens, state.mask, state.logps, state.entropy)
        return tuple(output.clone() for output in outputs)
