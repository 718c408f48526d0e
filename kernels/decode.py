"""Rollouts on CUDA: one decode step is recorded as a graph, and replayed for every token.

A step of a small model is about a hundred kernels, which take about 2 us each. Python needs 5 us or
more to launch one, so the GPU mostly waits for Python. A CUDA graph removes this wait: it is a
recording of launches (kernels, sizes and addresses) that is sent to the GPU as a whole. This works
only if everything that a step reads or changes is a tensor that keeps its address, and if Python
uses no number that changes from step to step:

- The keys and values have room for all positions from the start. Attention is over all of them,
  with a mask: a token at position p attends to positions 0 .. p. The query heads that share a
  key/value head are passed as several queries of that head, so its keys and values are stored once.
- `slot` counts the steps in a tensor. It determines which position and which slot of the outputs
  are written, and which uniforms are used.
- Sampling is part of the step. The uniforms are drawn before, one for each row and slot.
- A row that has ended continues, but writes PAD and zeros. Every 8 steps, Python looks up whether
  all rows have ended. Nothing else waits for the GPU.

The weights keep their addresses, too, because an optimizer changes them in place. So one graph
serves a whole run. The last two graphs are kept as long as their model exists, but no more: the
evaluation with samples, at the start and the end of a run, has many rows, and its keys and values
would fill memory in between.

The script's own functions read the prompts, before the graph starts, and draw and score each token.
But `hidden_states` writes the GPT again. So before a step is recorded, its states are compared with
those of the policy's own `hidden`. They differ if you changed the GPT; then `hidden` is called for
every token, without a graph. Without CUDA the same step runs as plain torch.
"""
import functools
import sys
import types
import weakref
from collections import namedtuple

import torch
import torch.nn.functional as F

from common import EOS, PAD
from kernels import logprob

# Shapes: B rows, W prompt tokens, T slots for completion tokens, L positions (at least W + T),
# V vocabulary, D width, H heads, KV key/value heads, hd head size.

GRAPHS = weakref.WeakKeyDictionary()    # model -> {what a graph depends on: (state, replay)}
NUM_GRAPHS = 2                          # per model: for training batches and greedy evaluations
CHECK_EVERY = 8                         # steps between checks whether all rows have ended
TOLERANCE = 0.01                        # share of the states' size by which rounding may move them


# ---- 1. the state of a rollout ---------------------------------------------------------------

Own = namedtuple("Own", "read_prompts sample_token logprobs rotate")        # of the script


def allocate(model, prompts, cfg, uniforms, own):
    """Allocate everything that a step reads and writes, except for the weights, for as many rows as
    there are prompts. Its tensors change only in place. -> namespace"""
    B, W = prompts.shape
    T = cfg.max_completion_length
    L = (W + T + 15) // 16 * 16             # attention needs aligned rows of the mask
    weight = model.embed.weight
    block = model.blocks[0]
    num_kv_heads = block.key.out_features // block.head_size
    cache_shape = (len(model.blocks), B, num_kv_heads, L, block.head_size)
    positions = torch.arange(L, device=weight.device)
    angles = positions[:, None] * model.frequencies                             # (L, hd / 2)
    return types.SimpleNamespace(
        # constants
        own=Own(*own),
        temperature=cfg.temperature,
        prompt_width=W,
        cos=angles.cos(),                               # for rotary position embeddings
        sin=angles.sin(),
        attention_mask=weight.new_full((L, L), float("-inf")).triu(1),  # is added to the scores
        # inputs of each batch; without uniforms, a step takes the most likely token
        uniforms=None if uniforms is None else torch.zeros_like(uniforms),      # (B, T)
        # progress
        slot=prompts.new_zeros(1),                      # slot of the last token
        token=prompts.new_zeros(B),                     # the last token
        has_ended=prompts.new_zeros(B, dtype=torch.bool),       # whether EOS was sampled
        keys=weight.new_zeros(cache_shape),
        values=weight.new_zeros(cache_shape),
        # outputs; after the end of a row, tokens are PAD and the rest is 0
        tokens=prompts.new_zeros(B, T),
        mask=weight.new_zeros(B, T),
        logps=weight.new_zeros(B, T),
        entropy=weight.new_zeros(B, T))


def start(model, state, prompts, uniforms):
    """Begin a batch: clear the state, read the prompts (B, W), and sample the first token.
    -> cache of the prompts"""
    state.tokens.fill_(PAD)
    for x in (state.slot, state.has_ended, state.mask, state.logps, state.entropy):
        x.zero_()
    for x in (state.keys, state.values):
        x.zero_()                               # masked values count 0 times, but 0 * nan is nan
    if uniforms is not None:
        state.uniforms.copy_(uniforms)

    cache = {}
    hidden = state.own.read_prompts(model, prompts, cache)                   # (B, 1, D)
    for block, keys, values in zip(model.blocks, state.keys, state.values):
        k, v = cache[block]                                                     # (B, KV, W, hd)
        keys[:, :, :state.prompt_width] = k
        values[:, :, :state.prompt_width] = v
    sample(state, F.linear(hidden[:, 0], model.embed.weight))
    return cache


# ---- 2. the step -----------------------------------------------------------------------------

def sample(state, logits):
    """Fill the current slot: sample a token from logits (B, V) in each row that has not ended."""
    uniforms = None
    if state.uniforms is not None:
        uniforms = state.uniforms.index_select(1, state.slot)[:, 0]             # (B,)
    token = state.own.sample_token(logits, uniforms, state.temperature)      # (B,)
    logps, entropy = state.own.logprobs(logits, token, state.temperature)    # (B,) each

    state.token.copy_(token.masked_fill(state.has_ended, PAD))
    write(state.tokens, state.slot, state.token)
    write(state.mask, state.slot, ~state.has_ended)
    write(state.logps, state.slot, logps.masked_fill(state.has_ended, 0))
    write(state.entropy, state.slot, entropy.masked_fill(state.has_ended, 0))
    state.has_ended.logical_or_(token == EOS)


def write(output, slot, column):
    """Write a column (B,) to an output (B, T), at slot (1,)."""
    output.index_copy_(1, slot, column[:, None].to(output.dtype))


def step(model, state, cache=None):
    """Read the last token of every row, with the policy's own `hidden` if there is a cache, which
    grows and so cannot be recorded. Sample the next one."""
    if cache is None:
        hidden = hidden_states(model, state)                                    # (B, D)
    else:
        hidden = model.hidden(state.token[:, None], cache)[:, 0]                # (B, D)
    state.slot.add_(1)
    sample(state, F.linear(hidden, model.embed.weight))


def hidden_states(model, state):
    """Read the last token of every row. -> the states that predict the next one (B, D)"""
    position = state.slot + state.prompt_width                                  # (1,)
    cos = state.cos.index_select(0, position)                                   # (1, hd / 2)
    sin = state.sin.index_select(0, position)                                   # (1, hd / 2)
    attention_mask = state.attention_mask.index_select(0, position)[None, None]     # (1, 1, 1, L)

    x = model.embed(state.token)                                                # (B, D)
    for block, keys, values in zip(model.blocks, state.keys, state.values):     # (B, KV, L, hd)
        heads = (-1, block.head_size)
        y = block.attention_norm(x)
        q = block.query(y).unflatten(1, heads)                                  # (B, H, hd)
        k = block.key(y).unflatten(1, heads)                                    # (B, KV, hd)
        v = block.value(y).unflatten(1, heads)                                  # (B, KV, hd)
        num_heads = [q.shape[1], k.shape[1]]
        turned = state.own.rotate(torch.cat([q, k], dim=1), cos, sin)        # (B, H + KV, hd)
        q, k = turned.split(num_heads, dim=1)
        keys.index_copy_(2, position, k.unsqueeze(2))
        values.index_copy_(2, position, v.unsqueeze(2))
        q = q.unflatten(1, (k.shape[1], -1))                            # (B, KV, H / KV, hd)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=attention_mask)
        x = x + block.out(y.reshape(x.shape))                                   # (B, D)
        y = block.mlp_norm(x)
        x = x + block.down(F.silu(block.gate(y)) * block.up(y))                 # (B, D)
    return model.norm(x)


def is_written_here(model, state, cache):
    """Check whether a step computes what the policy does, after `start`, which gave the cache."""
    found = hidden_states(model, state)
    expected = model.hidden(state.token[:, None], cache)[:, 0]
    return (found - expected).abs().mean().item() <= TOLERANCE * expected.abs().mean().item()


@functools.cache                        # one line, however many graphs a run would have
def note_other_gpt():
    print("note: your GPT is not the one that kernels/decode.py records; sampling without it",
          file=sys.stderr)


def capture(function, device):
    """Call function() once, then record a call without running it.
    -> a function that runs the recorded call; without CUDA, function itself"""
    if device.type != "cuda":
        function()
        return function
    # Each graph gets its own stream. cuBLAS has a workspace for each stream (32 MiB on Hopper), and
    # torch 2.13 frees it with any graph recorded there, even if another graph still uses it.
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()          # creates library handles and kernels, which a recording cannot create
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        function()
    return graph.replay


# ---- 3. the rollout --------------------------------------------------------------------------

@torch.no_grad()
def rollout(model, prompts, problems, cfg, uniforms, own):
    """Sample completions of prompts (B, W), as the rollout of a script does, with its `own`
    functions, as Own names them.
    No environment uses the problems. uniforms[i, t] (B, T) draws slot t of row i; if it is None,
    the most likely token is taken. -> tokens, mask, logps, entropy (B, T), lengths (B,)"""
    T = cfg.max_completion_length
    graphs = GRAPHS.setdefault(model, {})

    # a graph depends on all of these
    uniforms_dtype = None if uniforms is None else uniforms.dtype
    weights = tuple(weight.data_ptr() for weight in model.parameters())
    B, W = prompts.shape
    # Dynamic sampling adds groups to a batch. They have fewer rows, and use the graph of the batch.
    is_batch = cfg.num_prompts * cfg.num_generations == B
    key = ("a batch" if is_batch else B,
           W, T, cfg.temperature, logprob.choice, uniforms_dtype, weights)
    with torch.cuda.device_of(prompts):
        if key not in graphs or len(graphs[key][0].token) < B:
            graphs.pop(key, None)
            while len(graphs) >= NUM_GRAPHS:
                del graphs[next(iter(graphs))]          # the oldest
            new_state = allocate(model, prompts, cfg, uniforms, own)
            replay = None
            if T > 1:                                   # start() samples slot 0
                cache = start(model, new_state, prompts, uniforms)
                if is_written_here(model, new_state, cache):
                    replay = capture(functools.partial(step, model, new_state), prompts.device)
                else:
                    note_other_gpt()
            graphs[key] = (new_state, replay)
        state, replay = graphs[key]
        rows = torch.arange(len(state.token), device=prompts.device).clamp(max=B - 1)
        cache = start(model, state, prompts[rows], None if uniforms is None else uniforms[rows])
        next_step = replay or functools.partial(step, model, state, cache)
        for t in range(1, T):
            if t % CHECK_EVERY == 0 and state.has_ended.all():
                break
            next_step()
        outputs = (state.tokens, state.mask, state.logps, state.entropy)
        tokens, mask, logps, entropy = (output[:B].clone() for output in outputs)
    return tokens, mask, logps, entropy, mask.sum(dim=1).long()
