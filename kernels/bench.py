"""How fast all this is, beside what others offer: python -m kernels.bench (make bench).

Those compared take turns in one process, so that a slow minute of the machine is slow for all of them.
Figures are medians; a gain is the median of the ratios of neighbours in time, with quartiles. The first line
says what the machine can do, measured here as well: no figure is compared with a data sheet.

  logits   log-prob and entropy of N x V logits, and their gradient: kernels/logprob.py, torch eager and
           compiled, TRL, Liger. "% of copy": b bytes a logit forward, 2 b backward, at the speed of a copy.
           Needs a GPU.
  linear   the same from hidden states, both passes together: kernels/linear_logprob.py. Needs a GPU.
  rollout  grpo.py's `rollout` beside `generate` of transformers, with the same weights.
  step     grpo.py's sampling and update beside TRL's GRPOTrainer, with the same weights and rewards.

Rows that need transformers, trl or liger_kernel are left out, and said to be, where these are not installed.

How long completions are is given beforehand, to both sides alike: "fixed", each has all its tokens; "ragged",
nine of ten end after 4 to 8, as answers without thoughts do. The policy is untrained and hardly prefers any
token, so in ours a uniform of 1 draws the last id of the vocabulary, which stands for EOS here, and a smaller
one never does; in theirs a logits processor has that id win when it is time.

Writes docs/bench-DEVICE.json and, of all such files, the tables between the marks in README.md.
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
import kernels.logprob
from kernels.linear_logprob import linear_logprob
from kernels.logprob import logprob, logprob_torch
from tools.seeds import ROOT, put

SIZES = {"0.11M": {},                   # of the policy: what differs from the defaults
         "0.81M": {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 392}}
KINDS = ("fixed", "ragged", "ragged, 3 of 4 groups without signal")
PARTS = ("generate", "score", "reference", "forward", "backward", "optimiser")      # of a step
END = grpo.VOCAB - 1                    # what ends a completion here, see above
LOGITS = [(8192, 32000), (8192, 50257), (8192, 128256), (8192, 151936), (65536, 512)]               # N, V
LINEAR = [(8192, 1024, 151936), (8192, 4096, 151936)]                                               # N, D, V


# ---- 1. clocks ------------------------------------------------------------------------------------------

def now(device):
    """Seconds on a clock, once the device has done all it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds(job, device, repeats=5):
    """The median of `repeats` runs after one more; on a GPU as Triton takes it, with a cold cache."""
    if torch.device(device).type == "cuda":
        from triton.testing import do_bench
        return do_bench(job, return_mode="median") / 1e3
    taken = []
    for _ in range(1 + repeats):
        start = now(device)
        job()
        taken.append(now(device) - start)
    return statistics.median(taken[1:])


def peak(job, device):
    """-> what the job returns, and the bytes of GPU memory it needs beyond those in use; None on a CPU"""
    if torch.device(device).type != "cuda":
        return job(), None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    return job(), torch.cuda.max_memory_allocated(device) - before


def installed(package):
    return importlib.util.find_spec(package) is not None


def machine(device, gigabytes, size):
    """What there is and what it can do: a copy that moves so many GB, a size x size matmul. -> dict"""
    cuda = torch.device(device).type == "cuda"
    x, y = (torch.rand(int(gigabytes * 1e9 / 8), device=device) for _ in range(2))      # read one, write one
    copied = gigabytes / seconds(lambda: x.copy_(y), device)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16 if cuda else torch.float32)
            for _ in range(2))
    multiplied = 2 * size**3 / seconds(lambda: a @ b, device) / 1e12
    info = Path("/proc/cpuinfo")
    model = re.search("model name\\s*: (.*)", info.read_text()) if info.exists() else None
    packages = ("torch", "triton", "transformers", "trl", "liger_kernel")
    return {"device": torch.cuda.get_device_name(device) if cuda else "cpu",
            "cpu": f"{model[1].strip() if model else platform.machine()}, {os.cpu_count()} cores",
            "threads": torch.get_num_threads(),
            "versions": {"python": platform.python_version()} | {
                name: version(name) for name in packages if installed(name)},
            "copy_GB_per_s": copied, "matmul_TFLOP_per_s": multiplied, "matmul_dtype": str(a.dtype)[6:]}


def first_line(m):
    where = m["device"] if m["device"] != "cpu" else f"CPU ({m['cpu']}), {m['threads']} thread(s)"
    versions = ", ".join(f"{name} {number}" for name, number in m["versions"].items())
    return (f"{where}: copy {m['copy_GB_per_s']:.0f} GB/s, matmul {m['matmul_TFLOP_per_s']:.2g} TFLOP/s in "
            f"{m['matmul_dtype']}; {versions}")


@contextlib.contextmanager
def patched(owner, **values):
    """Attributes of a module, class or object that have other values for a while."""
    missing = object()
    before = {name: vars(owner).get(name, missing) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            delattr(owner, name) if value is missing else setattr(owner, name, value)


def timed(times, part, job, device):
    """The job, adding the seconds it takes to times[part]; `part` may depend on when it is called."""
    @functools.wraps(job)
    def run(*args, **kwargs):
        name, start = part() if callable(part) else part, now(device)
        result = job(*args, **kwargs)
        times[name] = times.get(name, 0.0) + now(device) - start
        return result
    return run


# ---- 2. kernels -----------------------------------------------------------------------------------------

def from_logits(device):
    """Who makes logps and entropy of logits: name -> f(logits (N, V), tokens (N,)) -> logps, entropy (N,).
    Liger's goes on to the loss in one go, (1, N - 1), and skips the last row."""
    found = {"ours": lambda x, a: logprob(x, a)[::2], "torch": lambda x, a: logprob_torch(x, a)[::2]}
    if torch.device(device).type != "cuda":         # the others have nothing to compile to
        return found
    torch.compiler.reset()                  # else, after eight shapes, it quietly runs what is not compiled
    compiled = torch.compile(logprob_torch, dynamic=False)
    found["torch.compile"] = lambda x, a: compiled(x, a)[::2]
    with contextlib.suppress(ImportError):
        from trl.kernels.logprob_entropy import selective_log_softmax_and_entropy
        found["TRL"] = selective_log_softmax_and_entropy
    with contextlib.suppress(ImportError):
        from liger_kernel.transformers.grpo_loss import triton_grpo_loss
        found["Liger's GRPO loss"] = lambda x, a: triton_grpo_loss(
            x[None], None, None, a[None, :-1].contiguous(), x.new_ones(1), temperature=1.0,
            beta=0.0, inplace=False, loss_type="grpo", reduce=False)[:1]
    return found


def exact(logits, tokens, rows=256):
    """logps and entropy (N,) in fp64, some rows at a time."""
    chunks = zip(logits.detach().split(rows), tokens.split(rows))
    parts = [logprob_torch(x.double(), a)[::2] for x, a in chunks]
    return [torch.cat(part) for part in zip(*parts)]


def logits_rows(N, V, dtype, device, copy_rate, providers=None):
    """Rows of the table for N x V logits: seconds and extra bytes of both passes, largest error of logps and
    entropy, relative to 1 + |value|. Whoever cannot do it has a row that says why."""
    logits = (3 * torch.randn(N, V, device=device)).to(dtype).requires_grad_()                      # (N, V)
    tokens = torch.randint(V, (N,), device=device)                                                  # (N,)
    truth, rows = exact(logits, tokens), {}
    providers = providers or from_logits(device)
    for _ in range(2):                              # in turn, twice
        for name, make in providers.items():
            row = rows.setdefault(name, {"who": name, "N": N, "V": V, "dtype": str(dtype)[6:], "seconds": []})
            if "failed" in row:
                continue
            try:
                run = functools.partial(make, logits, tokens)
                run()                               # compiles
                out, row["forward_bytes"] = peak(run, device)
                g = [torch.randn_like(x) for x in out]
                back = functools.partial(torch.autograd.grad, out, logits, g, retain_graph=True)
                row["backward_bytes"] = peak(back, device)[1]
                row["seconds"].append([seconds(run, device), seconds(back, device)])
                if len(out) == 2:
                    row["error"] = max(
                        ((x - y).abs() / (1 + y.abs())).max().item() for x, y in zip(out, truth))
            except Exception as error:              # theirs may not suit this GPU; the others still count
                row["failed"] = f"{type(error).__name__}: {error}"[:200]
    if device != "cpu" and "failed" not in rows.get("ours", {"failed": ""}):    # the gradient over the logits
        out = logprob(logits.detach().clone().requires_grad_() * 1, tokens, inplace=True)[0]
        rows["ours"]["backward_bytes_in_place"] = peak(out.sum().backward, device)[1] - logits.nbytes
    for row in rows.values():
        if "failed" not in row:
            for part, taken, times in zip(("forward", "backward"), zip(*row["seconds"]), (1, 2)):
                row[part] = statistics.mean(taken)
                row[f"{part}_share_of_copy"] = times * logits.nbytes / (copy_rate * 1e9) / row[part]
    return list(rows.values())


def sweep_rows(N, V, device, copy_rate):
    """kernels/logprob.py's fixed rule beside other tiles, in bf16: is it still the right one?"""
    rows = []
    for threads in (64, 128, 256):
        for each in (16, 32, 64):
            with patched(kernels.logprob, THREADS=threads, PER_THREAD=each):
                ours = {f"{threads} threads x {each}": lambda x, a: logprob(x, a)[::2]}
                rows += logits_rows(N, V, torch.bfloat16, device, copy_rate, ours)
    return rows


def from_hidden(device):
    """Who makes logps of hidden states, and entropy, but for Liger: name -> f(hidden, head (V, D), tokens)"""
    found = {"ours": lambda h, w, a: linear_logprob(h, w, a)[::2],
             "ours, logits in memory": lambda h, w, a: logprob(h @ w.T, a)[::2]}
    if torch.device(device).type != "cuda":
        return found
    with contextlib.suppress(ImportError):
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction
        found["TRL, chunked"] = lambda h, w, a: ChunkedLogProbFunction.apply(
            h, w, None, a, 1.0, 8192, None, 1.0, ("entropy",))[:2]
    with contextlib.suppress(ImportError):
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
        found["Liger, cross entropy only"] = lambda h, w, a: (liger_fused_linear_cross_entropy(h, w, a),)
    return found


def linear_rows(N, D, V, device, matmul_rate, providers=None):
    """Rows of the table for N hidden states of width D: seconds of both passes together, their share of what
    the three matmuls take at the measured rate, extra bytes, gradients included."""
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    hidden = torch.randn(N, D, device=device, dtype=dtype).requires_grad_()                         # (N, D)
    head = (3 * D**-0.5 * torch.randn(V, D, device=device)).to(dtype).requires_grad_()              # (V, D)
    tokens, rows = torch.randint(V, (N,), device=device), {}
    providers = providers or from_hidden(device)

    def both(make):
        out = [x for x in make(hidden, head, tokens) if x is not None]
        return torch.autograd.grad(out, (hidden, head), [torch.ones_like(x) for x in out])

    for _ in range(2):
        for name, make in providers.items():
            row = rows.setdefault(name, {"who": name, "N": N, "D": D, "V": V, "seconds": []})
            if "failed" in row:
                continue
            try:
                both(make)
                row["bytes"] = peak(functools.partial(both, make), device)[1]
                row["seconds"].append(seconds(functools.partial(both, make), device))
                row["both"] = statistics.mean(row["seconds"])
                row["share_of_limit"] = 6 * N * V * D / (matmul_rate * 1e12) / row["both"]
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}"[:200]
    return list(rows.values())


# ---- 3. the same weights, lengths and rewards for both --------------------------------------------------

def lengths_of(kind, B, T, seed=0):
    """Tokens of each completion, END included. -> (B,)"""
    if kind == "fixed":
        return torch.full((B,), T)
    random = common.generator(seed, "lengths")
    short = torch.randint(min(4, T), min(8, T) + 1, (B,), generator=random)
    return torch.where(torch.randperm(B, generator=random) < B - B // 10, short, T)


def rewards_of(kind, P, G):
    """Half of each group is right; of the last kind, only in every fourth group. -> P * G floats"""
    live = [p % 4 == 0 or kind != KINDS[2] for p in range(P)]
    return [float(live[p] and g % 2 == 0) for p in range(P) for g in range(G)]


def uniforms_of(lengths, T, seed=0):
    """Uniforms that make an untrained policy of ours end its rows so. -> (B, T)"""
    uniforms = 0.98 * torch.rand(len(lengths), T, generator=common.generator(seed, "uniforms"))
    uniforms[torch.arange(len(lengths)), lengths - 1] = 1.0         # the last id; below .98 it is not drawn
    return uniforms


def up_to_end(tokens):
    """The mask of what comes before END, END included. (B, T) -> (B, T)"""
    ended = (tokens == END).int()
    return ended.cumsum(1) - ended == 0


def check_lengths(who, mask, lengths):
    """Exit if the tokens that were made are not those that were ordered: nothing would be comparable."""
    made = mask.sum(1).long().cpu()
    if not torch.equal(made, lengths):
        common.fail(f"{who}: made {int(made.sum())} tokens instead of {int(lengths.sum())}", code=1)


def llama_weights(policy, cfg):
    """The weights of a policy under the names that transformers gives them."""
    H, KV, hd = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.hidden_size // cfg.num_attention_heads
    ours = policy.state_dict()
    theirs = {"model.embed_tokens.weight": ours["embed.weight"], "lm_head.weight": ours["embed.weight"],
              "model.norm.weight": ours["norm.weight"]}
    for i in range(cfg.num_hidden_layers):
        mine = {name: ours[f"blocks.{i}.{name}.weight"] for name in (
            "attention_norm", "mlp_norm", "qkv", "out", "gate_up", "down")}
        parts = {"input_layernorm": mine["attention_norm"], "post_attention_layernorm": mine["mlp_norm"],
                 "self_attn.o_proj": mine["out"], "mlp.down_proj": mine["down"]}
        parts |= zip(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                     mine["qkv"].split([H * hd, KV * hd, KV * hd]))
        parts |= zip(("mlp.gate_proj", "mlp.up_proj"), mine["gate_up"].chunk(2))
        theirs |= {f"model.layers.{i}.{name}.weight": weight for name, weight in parts.items()}
    return theirs


def llama(policy, cfg, lengths, width):
    """The policy as transformers' LlamaForCausalLM; its generate() has rows end as `lengths` says."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessor
    shape = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads")
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=grpo.VOCAB, rms_norm_eps=torch.finfo(torch.float32).eps, max_position_embeddings=1024,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=END, pad_token_id=grpo.PAD,
        **{name: getattr(cfg, name) for name in shape}))
    model.load_state_dict(llama_weights(policy, cfg))
    model.to(cfg.device)

    class Ends(LogitsProcessor):
        def __call__(self, ids, scores):
            due = lengths.to(ids.device) == ids.shape[1] - width + 1                    # (B,)
            scores[:, END] = torch.where(due, 1e9, float("-inf")).to(scores)
            return scores

    model.generation_config = GenerationConfig(
        max_new_tokens=cfg.max_completion_length, do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
        eos_token_id=END, pad_token_id=grpo.PAD)
    model.generate = functools.partial(model.generate, logits_processor=[Ends()])
    return model


# ---- 4. rollouts and steps ------------------------------------------------------------------------------

def config(device, size, P=32, G=8, T=32):
    """grpo.py's with one optimizer step a batch, so small that the policy stays as it is."""
    return grpo.Config(device=device, num_prompts=P, num_generations=G, max_completion_length=T,
                       num_mini_batches=1, learning_rate=1e-7, **size)


def gain(theirs, ours):
    """How many times faster ours were: median and quartiles of the ratios of neighbours in time."""
    low, middle, high = statistics.quantiles([x / y for x, y in zip(theirs, ours)], n=4)
    return {"low": low, "median": middle, "high": high}


def rollout_row(size, kind, cfg, repeats):
    """A batch sampled by ours and by transformers' generate, if there is one, in turn. -> dict"""
    policy = grpo.GPT(cfg).to(cfg.device)
    P, G, T = cfg.num_prompts, cfg.num_generations, cfg.max_completion_length
    problems = common.sample_problems(cfg.task, P, "bench", **cfg.options)
    prompts = grpo.encode_prompts([problem.prompt for problem in problems], cfg)                    # (P, W)
    lengths = lengths_of(kind, P * G, T)                                                            # (B,)
    uniforms = uniforms_of(lengths, T).to(cfg.device)
    jobs = {"ours": lambda: grpo.rollout(policy, prompts, cfg, G, uniforms).mask}
    if installed("transformers"):
        model, W = llama(policy, cfg, lengths, prompts.shape[1]), prompts.shape[1]
        repeated = prompts.repeat_interleave(G, 0)
        attention = torch.ones_like(repeated)
        jobs["HF generate"] = lambda: up_to_end(model.generate(repeated, attention_mask=attention)[:, W:])
    times = {name: [] for name in jobs}
    with patched(grpo, EOS=END):
        for _ in range(1 + repeats):
            for name, job in jobs.items():
                start = now(cfg.device)
                mask = job()
                times[name].append(now(cfg.device) - start)
                check_lengths(name, mask, lengths)
    times = {name: taken[1:] for name, taken in times.items()}                  # the first one warmed up
    row = {"size": size, "kind": kind, "tokens": int(lengths.sum()), "seconds": times,
           "median": {name: statistics.median(taken) for name, taken in times.items()}}
    return row | ({"gain": gain(times["HF generate"], times["ours"])} if len(times) == 2 else {})


def our_step(policy, ref, optimizer, cfg, step, lengths, rewards):
    """A step of grpo.py's main(). -> seconds of each part; "score": problems, verdicts, advantages, metrics;
    "reference": log-probs without a gradient"""
    device, times = cfg.device, {}
    real = {name: getattr(grpo, name) for name in ("rollout", "verify", "score")}
    uniforms, verdicts = uniforms_of(lengths, cfg.max_completion_length).to(device), iter(rewards)

    def rollout(model, prompts, cfg, copies, _, problems):
        return real["rollout"](model, prompts, cfg, copies, uniforms, problems)

    def verify(problem, text):
        real["verify"](problem, text)               # what it says of noise is no use
        return next(verdicts)

    def part():
        return "forward of the policy" if torch.is_grad_enabled() else "reference"

    time_it = functools.partial(timed, times, device=device)
    start = now(device)
    with (patched(grpo, EOS=END, verify=verify, rollout=time_it("generate", rollout),
                  score=time_it(part, real["score"])),
          patched(torch.Tensor, backward=time_it("backward", torch.Tensor.backward)),
          patched(optimizer, step=time_it("optimiser", optimizer.step)),
          patched(torch.nn.utils, clip_grad_norm_=time_it("optimiser", torch.nn.utils.clip_grad_norm_))):
        batch = grpo.sample_batch(policy, cfg, step)
        A = grpo.advantages(batch.rewards, cfg.scale_rewards).view(-1).to(device)
        updating = now(device)
        grpo.update(policy, ref, optimizer, batch, A, cfg, step)
        updated = now(device)
        common.describe(batch) | common.tasks.describe(batch, cfg.reward, step)
    times["all"] = now(device) - start
    check_lengths("ours", batch.out.mask, lengths)
    known = {name: times.get(name, 0.0) for name in PARTS}
    known["forward"] = updated - updating - sum(known[name] for name in PARTS[2:] if name != "forward")
    return known | {"score": times["all"] - (updated - updating) - known["generate"], "all": times["all"]}


def trl_steps(policy, cfg, lengths, rewards, steps, between):
    """So many steps of TRL's GRPOTrainer, between() called after each. -> a list of what our_step returns;
    "optimiser" is what no other part is. No KL, no checkpointing, no logs: what costs least."""
    import transformers
    from datasets import Dataset
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    transformers.logging.set_verbosity_error()
    words = Tokenizer(models.WordLevel({chr(i): i for i in range(grpo.VOCAB)}, unk_token=chr(0)))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=chr(END), pad_token=chr(grpo.PAD))
    P, G, B, device = cfg.num_prompts, cfg.num_generations, len(lengths), cfg.device
    problems = common.sample_problems(cfg.task, P * steps, "bench", **cfg.options)
    model = llama(policy, cfg, lengths, len(problems[0].prompt))
    known = {problem.prompt: problem for problem in problems}
    times, seen = {}, []

    def reward(prompts, completions, completion_ids, **_):
        for prompt, text in zip(prompts, completions):
            grpo.verify(known[prompt], text)
        made = torch.tensor([len(ids) for ids in completion_ids])                       # (B,)
        check_lengths("TRL", torch.arange(cfg.max_completion_length) < made[:, None], lengths)
        return rewards

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            times.clear()
            times["start"] = now(device)

        def on_step_end(self, *_, **__):
            total = now(device) - times["start"]
            parts = {name: times.get(name, 0.0) for name in PARTS} | {"all": total}
            parts["score"] -= parts["generate"]
            parts["optimiser"] = total - sum(parts[name] for name in PARTS if name != "optimiser")
            seen.append(parts)
            between()

    with tempfile.TemporaryDirectory() as folder:
        size = min(cfg.micro_batch_size, B)
        trainer = GRPOTrainer(
            model, reward, processing_class=tokenizer, callbacks=[Clock()],
            train_dataset=Dataset.from_list([{"prompt": problem.prompt} for problem in problems]),
            args=GRPOConfig(
                folder, max_steps=steps, per_device_train_batch_size=size, seed=0,
                gradient_accumulation_steps=B // size, num_generations=G, temperature=cfg.temperature,
                max_completion_length=cfg.max_completion_length, loss_type="grpo", beta=0.0,
                epsilon=cfg.epsilon, epsilon_high=cfg.epsilon_high, max_grad_norm=cfg.max_grad_norm,
                learning_rate=cfg.learning_rate, lr_scheduler_type="constant", weight_decay=cfg.weight_decay,
                use_cpu=device == "cpu", bf16=False, gradient_checkpointing=False, disable_tqdm=True,
                dataloader_pin_memory=False, report_to="none", save_strategy="no", logging_strategy="no"))
        trainer.remove_callback(transformers.PrinterCallback)
        for owner, name, part in (
                (model, "generate", "generate"), (trainer, "_prepare_inputs", "score"),
                (trainer, "compute_loss", "forward"), (trainer.accelerator, "backward", "backward")):
            setattr(owner, name, timed(times, part, getattr(owner, name), device))
        trainer.train()
    return seen


def step_rows(size, kind, cfg, repeats):
    """A step of ours and one of TRL, if there is one, in turn. -> [dict], ours first"""
    policy = grpo.GPT(cfg).to(cfg.device)
    P, G = cfg.num_prompts, cfg.num_generations
    lengths, rewards = lengths_of(kind, P * G, cfg.max_completion_length), rewards_of(kind, P, G)
    theirs, ours, ref = copy.deepcopy(policy), [], copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.learning_rate, weight_decay=cfg.weight_decay)

    def step():
        ours.append(our_step(policy, ref, optimizer, cfg, len(ours), lengths, rewards))

    taken = {"ours": ours}
    if installed("trl"):
        taken["TRL"] = trl_steps(theirs, cfg, lengths, rewards, 1 + repeats, step)
    else:
        for _ in range(1 + repeats):
            step()
    rows = []
    for who, steps in taken.items():
        by_part = {part: [parts[part] for parts in steps[1:]] for part in (*PARTS, "all")}
        rows.append({"size": size, "kind": kind, "who": who, "tokens": int(lengths.sum()),
                     "seconds": by_part["all"],
                     "median": {part: statistics.median(taken) for part, taken in by_part.items()}})
    if len(rows) == 2:
        rows[0]["gain"] = gain(rows[1]["seconds"], rows[0]["seconds"])
    return rows


# ---- 5. tables ------------------------------------------------------------------------------------------

def table(head, rows):
    """Markdown of cells."""
    return "".join("| " + " | ".join(row) + " |\n" for row in (head, ["---"] * len(head), *rows)) + "\n"


def times_faster(row):
    return "{median:.1f}x ({low:.1f} - {high:.1f})".format(**row["gain"]) if "gain" in row else "-"


def logits_cells(row):
    shape = [f"{row['N']} x {row['V']} {row['dtype']}", row["who"]]
    if "failed" in row:
        return [*shape, "failed", *["-"] * 5]
    passes = [cell for part in ("forward", "backward") for cell in (
        f"{row[part] * 1e6:.0f}", f"{100 * row[f'{part}_share_of_copy']:.0f}%")]
    memory = [row[f"{part}_bytes"] for part in ("forward", "backward")]
    return [*shape, *passes, "-" if None in memory else " + ".join(f"{x / 2**20:.0f}" for x in memory),
            f"{row['error']:.0e}" if "error" in row else "-"]


def linear_cells(row):
    shape = [f"{row['N']} x {row['D']} x {row['V']}", row["who"]]
    if "failed" in row:
        return [*shape, "failed", "-", "-"]
    return [*shape, f"{row['both'] * 1e3:.1f}", f"{100 * row['share_of_limit']:.0f}%",
            "-" if row["bytes"] is None else f"{row['bytes'] / 2**30:.2f}"]


def rollout_cells(row):
    cells = [f"{row['median'][who] * 1e3:.0f} ms, {row['tokens'] / row['median'][who] / 1e3:.0f}k/s"
             if who in row["median"] else "-" for who in ("ours", "HF generate")]
    return [row["size"], row["kind"], *cells, times_faster(row)]


def step_cells(row):
    milliseconds = [f"{row['median'][part] * 1e3:.0f}" for part in (*PARTS, "all")]
    return [row["size"], row["kind"], row["who"], *milliseconds,
            f"{row['tokens'] / row['median']['all'] / 1e3:.0f}k", times_faster(row)]


def tables(record):
    """A record as Markdown."""
    text = first_line(record["machine"]).replace("; ", ";\n") + ".\n\n"
    if record["logits"]:
        text += "Log-prob and entropy of logits, and their gradient:\n\n" + table(
            ["logits", "who", "forward us", "% of copy", "backward us", "% of copy", "extra MiB", "error"],
            map(logits_cells, record["logits"]))
    if record["linear"]:
        text += "The same from hidden states, in bf16, both passes:\n\n" + table(
            ["N x D x V", "who", "ms", "% of limit", "peak GiB"], map(linear_cells, record["linear"]))
    P, G, W, T = record["shape"]
    text += (f"Rollout of {P} x {G} completions, prompts of {W} tokens, at most {T} new ones (ours with "
             "log-probs and entropies,\ntheirs without):\n\n") + table(
        ["parameters", "lengths", "ours", "HF generate", "gain"], map(rollout_cells, record["rollout"]))
    text += "A step of GRPO, milliseconds:\n\n" + table(
        ["parameters", "batch", "who", *PARTS, "all", "tokens/s", "gain"], map(step_cells, record["step"]))
    return text + "".join(f"{line}\n" for line in record["remarks"]) + "\n"


def remarks(device):
    """What a record lacks here, and why."""
    lines = [] if device == "cuda" else [
        "Kernel rows need a GPU: here the kernels' speed is unmeasured."]
    for package, rows in (("transformers", "HF generate"), ("trl", "TRL"), ("liger_kernel", "Liger")):
        if not installed(package) and (device == "cuda" or package != "liger_kernel"):
            lines.append(f"No rows of {rows}: the package {package} is not installed.")
    return lines


def measure(device, repeats, sizes=SIZES, P=32, G=8, T=32, roof=(0.5, 1024)):
    """All that this machine can show, printed as it comes. -> the record"""
    cuda = device == "cuda"
    record = {"machine": machine(device, *((8.6, 8192) if cuda else roof)), "repeats": repeats,
              "remarks": remarks(device),
              **{name: [] for name in ("logits", "linear", "sweep", "rollout", "step")}}
    print(first_line(record["machine"]), *record["remarks"], sep="\n", flush=True)

    def add(name, rows, cells):
        record[name] += rows
        for row in rows:
            print("  ".join(cells(row)), row.get("failed", ""), flush=True)

    if cuda:
        copies, multiplies = (record["machine"][name] for name in ("copy_GB_per_s", "matmul_TFLOP_per_s"))
        for dtype in (torch.bfloat16, torch.float32):
            for N, V in LOGITS:
                add("logits", logits_rows(N, V, dtype, device, copies), logits_cells)
        for N, D, V in LINEAR:
            add("linear", linear_rows(N, D, V, device, multiplies), linear_cells)
        for N, V in LOGITS[1], LOGITS[3], LOGITS[4]:
            add("sweep", sweep_rows(N, V, device, copies), logits_cells)
    for name, size in sizes.items():
        cfg = config(device, size, P, G, T)
        record["shape"] = [P, G, common.load_task(cfg.task).width(**cfg.options), T]
        for kind in KINDS[:2]:                                  # rewards do not matter to a rollout
            add("rollout", [rollout_row(name, kind, cfg, repeats)], rollout_cells)
    for name, size in sizes.items():
        for kind in KINDS:
            add("step", step_rows(name, kind, config(device, size, P, G, T), repeats), step_cells)
    return record


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU, for all that are compared [1]")
    parser.add_argument("--repeats", type=int, default=5, help="of a rollout or a step [5]")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    record = measure(args.device, args.repeats)
    name = re.sub("[^a-z0-9]+", "-", record["machine"]["device"].lower())
    (ROOT / "docs").mkdir(exist_ok=True)
    (ROOT / "docs" / f"bench-{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    files = sorted((ROOT / "docs").glob("bench-*.json"))
    put("speed", "".join(tables(json.loads(file.read_text())) for file in files), "bench")


if __name__ == "__main__":
    main()
