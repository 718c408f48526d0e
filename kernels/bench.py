"""How fast all this is, beside what others offer: python -m kernels.bench (make bench).

Those that are compared take turns in one process, so that a slow minute of the machine is slow for
all of them. Times are medians. A gain is the median of the ratios of times that are neighbours,
with quartiles. The first line says what the machine can do. That, too, is measured here: no time is
compared with a data sheet.

  logits   log-probs and entropies of N x V logits, and their gradient: kernels/logprob.py, torch
           eager and compiled, TRL, Liger. "% of copy" is the time that a copy takes, of b bytes a
           logit forward and 2 b backward, as a share of the time taken. Needs a GPU.
  linear   the same from hidden states, both passes together: kernels/linear_logprob.py. Needs a
           GPU.
  rollout  the `rollout` of grpo.py beside `generate` of transformers, with the same weights.
  step     sampling and update of grpo.py beside those of TRL's GRPOTrainer, with the same weights
           and rewards.
  scaling  time and memory of both as completions and policies grow: scaling.py.

Rows that need transformers, trl or liger_kernel are left out where these are not installed, and a
line says so.

The lengths of completions are given beforehand, to both sides alike. "fixed": each has all its
tokens. "ragged": nine of ten end after 4 to 8 tokens, as answers without thoughts do. The policy is
untrained and hardly prefers any token. So in ours a uniform of 1 draws the last id of the
vocabulary, which stands for EOS here, and a smaller one never does. In theirs a logits processor
makes that id win when it is time.

Writes docs/bench-DEVICE.json and, of all such files, the tables between the marks in docs/speed.md
and the pictures docs/scaling-DEVICE.png. --rows rollout,step measures only these; other rows stay
as this machine measured them before.
"""
import argparse
import contextlib
import copy
import functools
import importlib.util
import json
import os
import platform
import re
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch

import common
import grpo
from kernels import logprob as logprob_kernels
from kernels.linear_logprob import linear_logprob
from kernels.logprob import logprob, logprob_torch
from tools.runs import DOCS, put, table

# Shapes: N rows of logits, V vocabulary, D width; P prompts, G completions of each, B = P * G rows,
# W prompt tokens, T completion tokens.

# The flags in which each size of policy differs from the defaults.
SIZES = {"0.11M": {},
         "0.81M": {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 392}}
KINDS = ("fixed", "ragged", "ragged, 3 of 4 groups without signal")
PARTS = ("generate", "score", "reference", "forward", "backward", "optimiser")      # of a step
END = grpo.VOCAB_SIZE - 1               # stands for EOS here
LOGITS = [(8192, 32000), (8192, 50257), (8192, 128256), (8192, 151936), (65536, 512)]   # N, V
LINEAR = [(8192, 1024, 151936), (8192, 4096, 151936)]                                   # N, D, V
SWEEP = [(8192, 50257), (8192, 151936), (65536, 512)]                                   # N, V
KERNEL_ROWS = ("logits", "linear", "sweep")         # which need a GPU
ROWS = (*KERNEL_ROWS, "rollout", "step", "scaling")     # what --rows can name


# ---- 1. clocks -------------------------------------------------------------------------------

def is_cuda(device):
    return torch.device(device).type == "cuda"


def now(device):
    """Seconds on a clock, once the device has done all it was given."""
    if is_cuda(device):
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds(job, device, repeats=5):
    """The median time of `repeats` runs after one more; on a GPU, with a cold cache. -> seconds"""
    if is_cuda(device):
        from triton.testing import do_bench
        return do_bench(job, return_mode="median") / 1e3
    times = []
    for _ in range(1 + repeats):
        start = now(device)
        job()
        times.append(now(device) - start)
    return statistics.median(times[1:])


def peak(job, device):
    """-> what the job returns, and the bytes of GPU memory that it needs beyond those in use; None
    on a CPU"""
    if not is_cuda(device):
        return job(), None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = job()
    return result, torch.cuda.max_memory_allocated(device) - before


class Clock:
    """Adds up the seconds that functions take, under the names of parts of a step."""

    def __init__(self, device):
        self.device = device
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def timed(self, part, function):
        """The function; whenever it is called, its time is added to the part."""
        @functools.wraps(function)
        def run(*args, **kwargs):
            start = now(self.device)
            result = function(*args, **kwargs)
            self.seconds[part] += now(self.device) - start
            return result
        return run


@contextlib.contextmanager
def patched(owner, **values):
    """Attributes of a module, class or object have other values for a while."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


def installed(package):
    return importlib.util.find_spec(package) is not None


def machine(device, gigabytes, size):
    """What there is, and what it can do: a copy that moves so many GB, a matmul of size x size.
    -> dict"""
    n = int(gigabytes * 1e9 / 8)                    # floats that are read; as many are written
    source = torch.rand(n, device=device)
    target = torch.rand(n, device=device)
    copy_seconds = seconds(functools.partial(target.copy_, source), device)

    dtype = torch.bfloat16 if is_cuda(device) else torch.float32
    a = torch.randn(size, size, device=device, dtype=dtype)
    b = torch.randn(size, size, device=device, dtype=dtype)
    matmul_seconds = seconds(functools.partial(torch.mm, a, b), device)

    versions = {"python": platform.python_version()}
    for package in ("torch", "triton", "transformers", "trl", "liger_kernel"):
        if installed(package):
            versions[package] = version(package)
    return {"device": torch.cuda.get_device_name(device) if is_cuda(device) else "cpu",
            "cpu": f"{cpu_name()}, {os.cpu_count()} cores",
            "threads": torch.get_num_threads(),
            "versions": versions,
            "copy_GB_per_s": gigabytes / copy_seconds,
            "matmul_TFLOP_per_s": 2 * size**3 / matmul_seconds / 1e12,
            "matmul_dtype": dtype_name(dtype)}


def cpu_name():
    info = Path("/proc/cpuinfo")
    if info.exists():
        model = re.search("model name\\s*: (.*)", info.read_text())
        if model:
            return model[1].strip()
    return platform.machine()


def dtype_name(dtype):
    return str(dtype).removeprefix("torch.")


def first_line(machine):
    where = machine["device"]
    if where == "cpu":
        where = f"CPU ({machine['cpu']}), {machine['threads']} thread(s)"
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return (f"{where}: copy {machine['copy_GB_per_s']:.0f} GB/s, "
            f"matmul {machine['matmul_TFLOP_per_s']:.2g} TFLOP/s in {machine['matmul_dtype']}; "
            f"{versions}")


# ---- 2. kernels ------------------------------------------------------------------------------

def ours_from_logits(logits, tokens):
    """(N, V), (N,) -> logps, entropy (N,)"""
    logps, _, entropy = logprob(logits, tokens)
    return logps, entropy


def torch_from_logits(logits, tokens):
    """(N, V), (N,) -> logps, entropy (N,)"""
    logps, _, entropy = logprob_torch(logits, tokens)
    return logps, entropy


def trl_from_logits(logits, tokens):
    """(N, V), (N,) -> logps, entropy (N,)"""
    from trl.kernels.logprob_entropy import selective_log_softmax_and_entropy
    return selective_log_softmax_and_entropy(logits, tokens)


def liger_from_logits(logits, tokens):
    """The loss (1, N - 1) of GRPO at once, for Liger has no log-probs. The last row is not read."""
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss
    outputs = triton_grpo_loss(
        logits[None], None, None, tokens[None, :-1].contiguous(), logits.new_ones(1),
        temperature=1.0, beta=0.0, inplace=False, loss_type="grpo", reduce=False)
    return outputs[:1]


def from_logits(device):
    """Who makes log-probs and entropies of logits. -> {name: function(logits, tokens)}"""
    providers = {"ours": ours_from_logits, "torch": torch_from_logits}
    if not is_cuda(device):                         # the others have nothing to compile to
        return providers
    torch.compiler.reset()                          # else the ninth shape runs uncompiled
    providers["torch.compile"] = torch.compile(torch_from_logits, dynamic=False)
    if installed("trl"):
        providers["TRL"] = trl_from_logits
    if installed("liger_kernel"):
        providers["Liger's GRPO loss"] = liger_from_logits
    return providers


def exact(logits, tokens, size=256):
    """logps and entropy (N,) in fp64, `size` rows at a time."""
    parts = []
    for some_logits, some_tokens in zip(logits.detach().split(size), tokens.split(size)):
        parts.append(torch_from_logits(some_logits.double(), some_tokens))
    return [torch.cat(values) for values in zip(*parts)]


def reason(error):
    """An exception in one line. -> str"""
    return " ".join(f"{type(error).__name__}: {error}".split())


def measure_if_possible(measure, row, device, *args):
    """Call measure(row, device, *args), which fills in the row. What others wrote may not suit this
    machine; then the row says why, and stays as it is. RuntimeError if that broke the GPU, for
    whoever comes next would fail, too, and be blamed for it."""
    if "failed" in row:
        return
    try:
        measure(row, device, *args)
    except Exception as error:
        row["failed"] = reason(error)[:200]
        try:
            now(device)
        except Exception as broken:
            raise RuntimeError(f"{row['who']} broke the GPU: {row['failed']}") from broken


def measure_logits(row, device, provider, logits, tokens, truth):
    """Time both passes once, and compare the outputs with the truth."""
    forward = functools.partial(provider, logits, tokens)
    forward()                                       # compiles
    outputs, row["forward_bytes"] = peak(forward, device)
    gradients = [torch.randn_like(x) for x in outputs]
    backward = functools.partial(
        torch.autograd.grad, outputs, logits, gradients, retain_graph=True)
    _, row["backward_bytes"] = peak(backward, device)
    row["seconds"].append([seconds(forward, device), seconds(backward, device)])
    if len(outputs) == 2:
        errors = [(x - y).abs() / (1 + y.abs()) for x, y in zip(outputs, truth)]
        row["error"] = max(error.max().item() for error in errors)


def logits_rows(N, V, dtype, device, copy_rate, providers=None):
    """Rows of the table for N x V logits: seconds and extra bytes of both passes, and the largest
    error of logps and entropy, relative to 1 + |value|. -> list of dicts"""
    logits = (3 * torch.randn(N, V, device=device)).to(dtype).requires_grad_()
    tokens = torch.randint(V, (N,), device=device)
    truth = exact(logits, tokens)
    providers = providers or from_logits(device)
    rows = {}
    for name in providers:
        rows[name] = {"who": name, "N": N, "V": V, "dtype": dtype_name(dtype), "seconds": []}
    for _ in range(2):                              # in turn, twice
        for name, provider in providers.items():
            measure_if_possible(
                measure_logits, rows[name], device, provider, logits, tokens, truth)

    for row in rows.values():
        if "failed" not in row:
            copy_seconds = logits.nbytes / (copy_rate * 1e9)
            row["forward"] = statistics.mean(forward for forward, _ in row["seconds"])
            row["backward"] = statistics.mean(backward for _, backward in row["seconds"])
            row["forward_share_of_copy"] = copy_seconds / row["forward"]
            row["backward_share_of_copy"] = 2 * copy_seconds / row["backward"]
    if is_cuda(device) and "ours" in rows and "failed" not in rows["ours"]:
        rows["ours"]["backward_bytes_in_place"] = bytes_in_place(logits, tokens, device)
    return list(rows.values())


def bytes_in_place(logits, tokens, device):
    """The extra bytes of a backward pass that writes the gradient over the logits."""
    head_output = logits.detach().clone().requires_grad_() * 1
    logps, _, _ = logprob(head_output, tokens, inplace=True)
    _, extra_bytes = peak(logps.sum().backward, device)
    return extra_bytes - logits.nbytes              # autograd's gradient of `* 1`


def sweep_rows(N, V, device, copy_rate):
    """The tile that kernels/logprob.py always takes, beside others, in bf16. -> list of dicts"""
    rows = []
    for threads in (64, 128, 256):
        for per_thread in (16, 32, 64):
            with patched(logprob_kernels, THREADS=threads, PER_THREAD=per_thread):
                providers = {f"{threads} threads x {per_thread}": ours_from_logits}
                rows += logits_rows(N, V, torch.bfloat16, device, copy_rate, providers)
    return rows


def ours_from_hidden(hidden, head, tokens):
    """(N, D), (V, D), (N,) -> logps, entropy (N,)"""
    logps, _, entropy = linear_logprob(hidden, head, tokens)
    return logps, entropy


def in_memory_from_hidden(hidden, head, tokens):
    """(N, D), (V, D), (N,) -> logps, entropy (N,)"""
    return ours_from_logits(hidden @ head.T, tokens)


def trl_from_hidden(hidden, head, tokens):
    """(N, D), (V, D), (N,) -> logps, entropy (N,)"""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction
    outputs = ChunkedLogProbFunction.apply(
        hidden, head, None, tokens, 1.0, 8192, None, 1.0, ("entropy",))
    return outputs[:2]


def liger_from_hidden(hidden, head, tokens):
    """(N, D), (V, D), (N,) -> the mean of -logps alone"""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    return [liger_fused_linear_cross_entropy(hidden, head, tokens)]


def from_hidden(device):
    """Who makes log-probs of hidden states. -> {name: function(hidden, head, tokens)}"""
    providers = {"ours": ours_from_hidden, "ours, logits in memory": in_memory_from_hidden}
    if is_cuda(device):
        if installed("trl"):
            providers["TRL, chunked"] = trl_from_hidden
        if installed("liger_kernel"):
            providers["Liger, cross entropy only"] = liger_from_hidden
    return providers


def measure_linear(row, device, provider, hidden, head, tokens):
    """Time both passes together once."""
    def both_passes():
        outputs = [x for x in provider(hidden, head, tokens) if x is not None]
        ones = [torch.ones_like(x) for x in outputs]
        return torch.autograd.grad(outputs, (hidden, head), ones)
    both_passes()                                   # compiles
    _, row["bytes"] = peak(both_passes, device)
    row["seconds"].append(seconds(both_passes, device))


def linear_rows(N, D, V, device, matmul_rate, providers=None):
    """Rows of the table for N hidden states of width D: seconds of both passes together, what the
    three matmuls take at the measured rate as a share of that, and extra bytes, gradients included.
    -> list of dicts"""
    dtype = torch.bfloat16 if is_cuda(device) else torch.float32
    hidden = torch.randn(N, D, device=device, dtype=dtype).requires_grad_()
    head = (3 * D**-0.5 * torch.randn(V, D, device=device)).to(dtype).requires_grad_()
    tokens = torch.randint(V, (N,), device=device)
    providers = providers or from_hidden(device)
    rows = {name: {"who": name, "N": N, "D": D, "V": V, "seconds": []} for name in providers}
    for _ in range(2):                              # in turn, twice
        for name, provider in providers.items():
            measure_if_possible(
                measure_linear, rows[name], device, provider, hidden, head, tokens)

    limit = 6 * N * V * D / (matmul_rate * 1e12)
    for row in rows.values():
        if "failed" not in row:
            row["both"] = statistics.mean(row["seconds"])
            row["share_of_limit"] = limit / row["both"]
    return list(rows.values())


# ---- 3. the same weights, lengths and rewards for both ---------------------------------------

def lengths_of(kind, B, T, seed=0):
    """Tokens of each completion, END included. -> (B,)"""
    if kind == "fixed":
        return torch.full((B,), T)
    generator = common.generator(seed, "lengths")
    short = torch.randint(min(4, T), min(8, T) + 1, (B,), generator=generator)
    is_short = torch.randperm(B, generator=generator) < B - B // 10
    return torch.where(is_short, short, T)


def rewards_of(kind, P, G):
    """Half of each group is right; in the last kind, only in every fourth group. -> list of B"""
    rewards = []
    for p in range(P):
        group_has_signal = p % 4 == 0 or kind != KINDS[2]
        rewards += [float(group_has_signal and g % 2 == 0) for g in range(G)]
    return rewards


def uniforms_of(lengths, T, seed=0):
    """Uniforms that make an untrained policy of ours end its rows after `lengths` (B,).
    -> (B, T)"""
    B = len(lengths)
    uniforms = 0.98 * torch.rand(B, T, generator=common.generator(seed, "uniforms"))
    uniforms[torch.arange(B), lengths - 1] = 1.0    # draws the last id; up to .98 none does
    return uniforms


def up_to_end(tokens):
    """The mask of what comes before END, END included. (B, T) -> (B, T)"""
    is_end = (tokens == END).int()
    num_ends_before = is_end.cumsum(dim=1) - is_end
    return num_ends_before == 0


def check_lengths(who, mask, lengths):
    """RuntimeError if the completions have other lengths than ordered: nothing would be
    comparable."""
    sampled = mask.sum(dim=1).long().cpu()
    if not torch.equal(sampled, lengths):
        raise RuntimeError(
            f"{who} sampled {int(sampled.sum())} tokens instead of {int(lengths.sum())}")


# The names of a block's weights, ours and those of transformers.
LLAMA_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj"}


def llama_weights(policy):
    """The weights of a policy under the names that transformers gives them. -> dict"""
    ours = policy.state_dict()
    theirs = {"model.embed_tokens.weight": ours["embed.weight"],
              "lm_head.weight": ours["embed.weight"],
              "model.norm.weight": ours["norm.weight"]}
    for i in range(len(policy.blocks)):
        for our_name, their_name in LLAMA_NAMES.items():
            weight = ours[f"blocks.{i}.{our_name}.weight"]
            theirs[f"model.layers.{i}.{their_name}.weight"] = weight
    return theirs


def llama(policy, cfg, lengths, prompt_width):
    """The policy as transformers' LlamaForCausalLM, whose generate() ends rows after `lengths`
    (B,)."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessor
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=grpo.VOCAB_SIZE, hidden_size=cfg.hidden_size,
        intermediate_size=cfg.intermediate_size, num_hidden_layers=cfg.num_hidden_layers,
        num_attention_heads=cfg.num_attention_heads, num_key_value_heads=cfg.num_key_value_heads,
        rms_norm_eps=torch.finfo(torch.float32).eps, max_position_embeddings=1024,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=END, pad_token_id=grpo.PAD))
    model.load_state_dict(llama_weights(policy))
    model.to(cfg.device)

    class EndOnTime(LogitsProcessor):
        def __call__(self, ids, scores):
            is_last = lengths.to(ids.device) == ids.shape[1] - prompt_width + 1     # (B,)
            scores[:, END] = torch.where(is_last, 1e9, float("-inf")).to(scores)
            return scores

    model.generation_config = GenerationConfig(
        max_new_tokens=cfg.max_completion_length, do_sample=True, top_k=0, top_p=1.0,
        temperature=1.0, eos_token_id=END, pad_token_id=grpo.PAD)
    model.generate = functools.partial(model.generate, logits_processor=[EndOnTime()])
    return model


# ---- 4. rollouts and steps -------------------------------------------------------------------

def config(device, flags, P=32, G=8, T=32):
    """grpo.py's Config with one optimizer step a batch, so small that the policy stays as it is."""
    return grpo.Config(device=device, num_prompts=P, num_generations=G, max_completion_length=T,
                       num_mini_batches=1, learning_rate=1e-7, **flags)


def gain(their_times, our_times):
    """How many times faster ours were: median and quartiles of the ratios of neighbours. -> dict"""
    ratios = [theirs / ours for theirs, ours in zip(their_times, our_times)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"low": low, "median": middle, "high": high}


def rollout_row(size, kind, cfg, repeats):
    """A batch sampled by ours and, if installed, by transformers' generate, in turn. If theirs
    fails, the row is of ours alone, and says why. -> dict"""
    G = cfg.num_generations
    T = cfg.max_completion_length
    policy = grpo.GPT(cfg).to(cfg.device)
    task = common.load_task(cfg, grpo.verify)
    problems = common.sample_problems(task, cfg.num_prompts, "bench")
    problems = [problem for problem in problems for _ in range(G)]              # B
    texts = [problem.prompt for problem in problems]
    prompts = grpo.encode_prompts(texts, task, cfg.device)                      # (B, W)
    W = prompts.shape[1]
    lengths = lengths_of(kind, len(prompts), T)                                 # (B,)
    uniforms = uniforms_of(lengths, T).to(cfg.device)                           # (B, T)
    attention_mask = torch.ones_like(prompts)

    def our_mask():
        return grpo.rollout(policy, prompts, problems, task, cfg, uniforms).mask

    @functools.cache                                # made as it warms up
    def model():
        return llama(policy, cfg, lengths, W)

    def their_mask():
        tokens = model().generate(prompts, attention_mask=attention_mask)
        return up_to_end(tokens[:, W:])

    def measure(row, device, sampled_mask):
        start = now(device)
        mask = sampled_mask()
        row["seconds"].append(now(device) - start)
        check_lengths(row["who"], mask, lengths)

    ours = {"who": "ours", "seconds": []}
    theirs = {"who": "HF generate", "seconds": []}
    with patched(grpo, EOS=END):
        for _ in range(1 + repeats):
            measure(ours, cfg.device, our_mask)
            if installed("transformers"):
                measure_if_possible(measure, theirs, cfg.device, their_mask)
    times = {"ours": ours["seconds"][1:]}           # the first one warms up
    row = {"size": size, "kind": kind, "tokens": int(lengths.sum()), "seconds": times}
    if "failed" in theirs:
        row["failed"] = f"{theirs['who']}: {theirs['failed']}"
    elif theirs["seconds"]:
        times["HF generate"] = theirs["seconds"][1:]
        row["gain"] = gain(times["HF generate"], times["ours"])
    row["median"] = {name: statistics.median(taken) for name, taken in times.items()}
    return row


def our_step(policy, reference, optimizer, cfg, step, lengths, rewards):
    """A step of grpo.py's main(). "score" is problems, verdicts, advantages and metrics;
    "reference" is log-probs without a gradient. -> {part: seconds}, and of all"""
    clock = Clock(cfg.device)
    uniforms = uniforms_of(lengths, cfg.max_completion_length).to(cfg.device)
    verdicts = iter(rewards)
    real_rollout = grpo.rollout
    real_score = grpo.score
    score_reference = clock.timed("reference", real_score)

    def verify(problem, text):
        grpo.verify(problem, text)                  # takes its time; of noise its verdict is no use
        return next(verdicts)

    def rollout(model, prompts, problems, task, cfg, _):
        return real_rollout(model, prompts, problems, task, cfg, uniforms)

    def score(*args, **kwargs):
        if torch.is_grad_enabled():
            return real_score(*args, **kwargs)
        return score_reference(*args, **kwargs)

    task = common.load_task(cfg, verify)
    clip = clock.timed("optimiser", torch.nn.utils.clip_grad_norm_)
    with (patched(grpo, EOS=END, rollout=clock.timed("generate", rollout), score=score),
          patched(torch.Tensor, backward=clock.timed("backward", torch.Tensor.backward)),
          patched(torch.nn.utils, clip_grad_norm_=clip),
          patched(optimizer, step=clock.timed("optimiser", optimizer.step))):
        start = now(cfg.device)
        batch = grpo.sample_batch(policy, task, cfg, step)
        A = grpo.advantages(batch.rewards, cfg.scale_rewards).view(-1, 1).to(cfg.device)
        update_start = now(cfg.device)
        grpo.update(policy, reference, optimizer, batch, A, cfg, step)
        update_end = now(cfg.device)
        common.describe(batch)
        task.describe(batch, step)
        end = now(cfg.device)
    check_lengths("ours", batch.mask, lengths)

    # what is not timed by itself is what is left of the update, and of the step
    parts = clock.seconds
    update_parts = ("reference", "backward", "optimiser")
    update_seconds = update_end - update_start
    parts["forward"] = update_seconds - sum(parts[name] for name in update_parts)
    parts["score"] = end - start - update_seconds - parts["generate"]
    return parts | {"all": end - start}


def trl_steps(policy, cfg, lengths, rewards, steps, between):
    """So many steps of TRL's GRPOTrainer, with between() called after each. There is no KL, no
    checkpointing and no log, which costs least. "optimiser" is what is in no other part. -> list of
    dicts like that of our_step"""
    import transformers
    from datasets import Dataset
    from trl import GRPOTrainer
    transformers.logging.set_verbosity_error()
    task = common.load_task(cfg, grpo.verify)
    problems = common.sample_problems(task, cfg.num_prompts * steps, "bench")
    problem_of = {problem.prompt: problem for problem in problems}
    model = llama(policy, cfg, lengths, len(problems[0].prompt))
    clock = Clock(cfg.device)
    history = []

    def reward(prompts, completions, completion_ids, **_):
        for prompt, text in zip(prompts, completions):
            grpo.verify(problem_of[prompt], text)
        sampled = torch.tensor([len(ids) for ids in completion_ids])            # (B,)
        mask = torch.arange(cfg.max_completion_length) < sampled[:, None]       # (B, T)
        check_lengths("TRL", mask, lengths)
        return rewards

    class StepTimer(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            clock.seconds = dict.fromkeys(PARTS, 0.0)
            self.start = now(cfg.device)

        def on_step_end(self, *_, **__):
            total = now(cfg.device) - self.start
            parts = clock.seconds
            parts["score"] -= parts["generate"]     # which it contains
            parts["optimiser"] = total - sum(parts.values())
            history.append(parts | {"all": total})
            between()

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model, reward, processing_class=trl_tokenizer(), callbacks=[StepTimer()],
            train_dataset=Dataset.from_list([{"prompt": problem.prompt} for problem in problems]),
            args=trl_config(folder, cfg, len(lengths), steps))
        trainer.remove_callback(transformers.PrinterCallback)
        model.generate = clock.timed("generate", model.generate)
        trainer._prepare_inputs = clock.timed("score", trainer._prepare_inputs)
        trainer.compute_loss = clock.timed("forward", trainer.compute_loss)
        accelerator = trainer.accelerator
        accelerator.backward = clock.timed("backward", accelerator.backward)
        trainer.train()
    return history


def trl_tokenizer():
    """A tokenizer of transformers with one token for each character, as many as we have."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    ids = {chr(i): i for i in range(grpo.VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=chr(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=chr(END), pad_token=chr(grpo.PAD))


def trl_config(folder, cfg, B, steps):
    """What GRPOTrainer needs to do the same as grpo.py with cfg."""
    from trl import GRPOConfig
    micro_batch_size = min(cfg.micro_batch_size, B)
    return GRPOConfig(
        folder, max_steps=steps, seed=0, use_cpu=cfg.device == "cpu",
        per_device_train_batch_size=micro_batch_size,
        gradient_accumulation_steps=B // micro_batch_size,
        num_generations=cfg.num_generations, temperature=cfg.temperature,
        max_completion_length=cfg.max_completion_length, loss_type="grpo", beta=0.0,
        epsilon=cfg.epsilon, epsilon_high=cfg.epsilon_high, max_grad_norm=cfg.max_grad_norm,
        learning_rate=cfg.learning_rate, lr_scheduler_type="constant",
        weight_decay=cfg.weight_decay, bf16=False, gradient_checkpointing=False,
        dataloader_pin_memory=False, disable_tqdm=True, report_to="none", save_strategy="no",
        logging_strategy="no")


def step_rows(size, kind, cfg, repeats):
    """A step of ours and, if it is installed, one of TRL, in turn. If TRL fails, its row says why.
    -> list of dicts, ours first"""
    P = cfg.num_prompts
    G = cfg.num_generations
    policy = grpo.GPT(cfg).to(cfg.device)
    reference = copy.deepcopy(policy)
    their_policy = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=cfg.learning_rate, weight_decay=cfg.weight_decay)
    lengths = lengths_of(kind, P * G, cfg.max_completion_length)                # (B,)
    rewards = rewards_of(kind, P, G)                                            # B
    our_steps = []

    def step():
        our_steps.append(
            our_step(policy, reference, optimizer, cfg, len(our_steps), lengths, rewards))

    def measure_trl(row, _):
        row["steps"] = trl_steps(their_policy, cfg, lengths, rewards, 1 + repeats, step)

    ours = {"size": size, "kind": kind, "who": "ours", "tokens": int(lengths.sum()), "seconds": []}
    theirs = ours | {"who": "TRL", "seconds": []}
    rows = [ours]
    if installed("trl"):
        measure_if_possible(measure_trl, theirs, cfg.device)
        rows.append(theirs)
    while len(our_steps) < 1 + repeats:             # those that TRL has not asked for
        step()
    ours["steps"] = our_steps

    for row in rows:
        if "failed" not in row:
            history = row.pop("steps")[1:]          # the first one warms up
            row["seconds"] = [parts["all"] for parts in history]
            row["median"] = {}
            for part in (*PARTS, "all"):
                row["median"][part] = statistics.median(parts[part] for parts in history)
    if theirs["seconds"]:
        ours["gain"] = gain(theirs["seconds"], ours["seconds"])
    return rows


# ---- 5. tables -------------------------------------------------------------------------------

def gain_cell(row):
    if "gain" not in row:
        return "-"
    return "{median:.1f}x ({low:.1f} - {high:.1f})".format(**row["gain"])


def rate_cell(num_tokens, seconds):
    return f"{num_tokens / seconds / 1e3:.0f}k"


def logits_cells(row):
    cells = [f"{row['N']} x {row['V']} {row['dtype']}", row["who"]]
    if "failed" in row:
        return [*cells, "failed", *["-"] * 5]
    for part in ("forward", "backward"):
        cells.append(f"{row[part] * 1e6:.0f}")
        cells.append(f"{100 * row[f'{part}_share_of_copy']:.0f}%")
    if row["forward_bytes"] is None:
        cells.append("-")
    else:
        cells.append(f"{row['forward_bytes'] / 2**20:.0f} + {row['backward_bytes'] / 2**20:.0f}")
    cells.append(f"{row['error']:.0e}" if "error" in row else "-")
    return cells


def linear_cells(row):
    cells = [f"{row['N']} x {row['D']} x {row['V']}", row["who"]]
    if "failed" in row:
        return [*cells, "failed", "-", "-"]
    gigabytes = "-" if row["bytes"] is None else f"{row['bytes'] / 2**30:.2f}"
    return [*cells, f"{row['both'] * 1e3:.1f}", f"{100 * row['share_of_limit']:.0f}%", gigabytes]


def rollout_cells(row):
    cells = [row["size"], row["kind"]]
    for who in ("ours", "HF generate"):
        if who in row["median"]:
            taken = row["median"][who]
            cells.append(f"{taken * 1e3:.0f} ms, {rate_cell(row['tokens'], taken)}/s")
        else:
            cells.append("-")
    return [*cells, gain_cell(row)]


def step_cells(row):
    cells = [row["size"], row["kind"], row["who"]]
    if "failed" in row:
        return [*cells, "failed", *["-"] * (len(PARTS) + 2)]
    milliseconds = [f"{row['median'][part] * 1e3:.0f}" for part in (*PARTS, "all")]
    rate = rate_cell(row["tokens"], row["median"]["all"])
    return [*cells, *milliseconds, rate, gain_cell(row)]


def tables(record):
    """A record as Markdown."""
    text = first_line(record["machine"]).replace("; ", ";\n") + ".\n\n"
    if record["logits"]:
        head = ["logits", "who", "forward us", "% of copy", "backward us", "% of copy", "extra MiB",
                "error"]
        text += "Log-prob and entropy of logits, and their gradient:\n\n"
        text += table(head, [logits_cells(row) for row in record["logits"]]) + "\n"
    if record["linear"]:
        head = ["N x D x V", "who", "ms", "% of limit", "peak GiB"]
        text += "The same from hidden states, in bf16, both passes:\n\n"
        text += table(head, [linear_cells(row) for row in record["linear"]]) + "\n"
    if record["rollout"]:
        P, G, W, T = record["shape"]
        head = ["parameters", "lengths", "ours", "HF generate", "gain"]
        text += (f"Rollout of {P} x {G} completions, prompts of {W} tokens, at most {T} new ones "
                 "(ours with log-probs and entropies,\ntheirs without):\n\n")
        text += table(head, [rollout_cells(row) for row in record["rollout"]]) + "\n"
    if record["step"]:
        head = ["parameters", "batch", "who", *PARTS, "all", "tokens/s", "gain"]
        text += "A step of GRPO, milliseconds:\n\n"
        text += table(head, [step_cells(row) for row in record["step"]]) + "\n"
    text += (f"Rollouts and steps: {record['repeats']} of each, after one that warms up; weights "
             "and lengths of seed 0. No policy is\nevaluated, so no held-out problem is needed.\n")
    return text + "".join(f"{line}\n" for line in record["remarks"]) + "\n"


def remarks(device):
    """What a record lacks here, and why. -> list of lines"""
    lines = []
    if device != "cuda":
        lines.append("Kernel rows need a GPU: here the kernels' speed is unmeasured.")
    needed = {"HF generate": "transformers", "TRL": "trl"}
    if device == "cuda":
        needed["Liger"] = "liger_kernel"
    for rows, package in needed.items():
        if not installed(package):
            lines.append(f"No rows of {rows}: the package {package} is not installed.")
    return lines


def measure(device, repeats, sizes=SIZES, P=32, G=8, T=32, roof=(0.5, 1024), rows=ROWS,
            points=None):
    """Those of the rows that this machine can show, printed as they come. `roof` is the GB of the
    copy and the size of the matmul that show what a CPU can do, `points` those of scaling.py, if
    not all. -> the record"""
    gigabytes, matmul_size = (8.6, 8192) if device == "cuda" else roof
    found = machine(device, gigabytes, matmul_size)
    record = {"machine": found, "repeats": repeats, "remarks": remarks(device)}
    record |= {name: [] for name in ROWS}
    print(first_line(found), *record["remarks"], sep="\n", flush=True)

    def add(name, rows, cells):
        record[name] += rows
        for row in rows:
            print("  ".join(cells(row)), row.get("failed", ""), flush=True)

    copy_rate = found["copy_GB_per_s"]
    matmul_rate = found["matmul_TFLOP_per_s"]
    if device != "cuda":
        rows = [name for name in rows if name not in KERNEL_ROWS]
    if "logits" in rows:
        for dtype in (torch.bfloat16, torch.float32):
            for N, V in LOGITS:
                add("logits", logits_rows(N, V, dtype, device, copy_rate), logits_cells)
    if "linear" in rows:
        for N, D, V in LINEAR:
            add("linear", linear_rows(N, D, V, device, matmul_rate), linear_cells)
    if "sweep" in rows:
        for N, V in SWEEP:
            add("sweep", sweep_rows(N, V, device, copy_rate), logits_cells)
    configs = {name: config(device, flags, P, G, T) for name, flags in sizes.items()}
    for cfg in configs.values():
        record["shape"] = [P, G, common.load_task(cfg, grpo.verify).prompt_width, T]
    if "rollout" in rows:
        for name, cfg in configs.items():
            for kind in KINDS[:2]:                  # rewards do not matter to a rollout
                add("rollout", [rollout_row(name, kind, cfg, repeats)], rollout_cells)
    if "step" in rows:
        for name, cfg in configs.items():
            for kind in KINDS:
                add("step", step_rows(name, kind, cfg, repeats), step_cells)
    if "scaling" in rows:
        # Not at the top, since scaling.py imports this file.
        from kernels import scaling
        for point in points or scaling.points(device):
            add("scaling", [scaling.measure(point)], scaling.cells)
    return record


def some_rows(text):
    """The names in a list with commas. ValueError for one that is none of ROWS."""
    names = text.split(",")
    if not set(names) <= set(ROWS):
        raise ValueError(text)
    return names


def slug(record):
    """The device of a record, as file names have it: nvidia-h200. -> str"""
    return re.sub("[^a-z0-9]+", "-", record["machine"]["device"].lower())


def merged(old, new, rows):
    """A new record of `rows` alone, with the other rows of an older one, which are left out where
    another machine has measured them, or another version of a package that both had. -> record"""
    if old is None:
        return new
    one, other = old["machine"], new["machine"]
    names = one["versions"].keys() & other["versions"].keys()
    is_same = (all(one[name] == other[name] for name in ("device", "cpu", "threads"))
               and all(one["versions"][name] == other["versions"][name] for name in names))
    if not is_same:
        return new
    others = {name: old[name] for name in ROWS if name in old and name not in rows}
    if not {"rollout", "step"} & set(rows):
        kept = ("machine", "repeats", "shape", "remarks")
        others |= {name: old[name] for name in kept if name in old}
    return new | others


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default_device)
    parser.add_argument("--threads", type=int, default=1,
                        help="of the CPU, for all that are compared [1]")
    parser.add_argument("--repeats", type=int, default=5, help="of a rollout or a step [5]")
    parser.add_argument("--rows", type=some_rows, default=ROWS, metavar="A,B",
                        help=f"measure only these, of {','.join(ROWS)}; others stay as they were")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    record = measure(args.device, args.repeats, rows=args.rows)

    path = DOCS / f"bench-{slug(record)}.json"
    old = json.loads(path.read_text()) if path.is_file() else None
    DOCS.mkdir(exist_ok=True)
    path.write_text(json.dumps(merged(old, record, args.rows), indent=1) + "\n")
    publish()


def publish():
    """Make the tables, sentences and pictures of all records in docs/."""
    # Not at the top, since scaling.py imports this file.
    from kernels import scaling
    speed = ""
    growth = ""
    for file in sorted(DOCS.glob("bench-*.json")):
        record = json.loads(file.read_text())
        speed += tables(record)
        if record.get("scaling"):
            growth += scaling.report(record["scaling"], record["machine"]["device"], slug(record))
    put("speed", speed, "bench")
    put("scaling", growth, "bench")


if __name__ == "__main__":
    common.start(main)
