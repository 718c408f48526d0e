"""How fast all this is, beside what others offer: python -m kernels.bench (make bench).

Those that are compared take turns in one process, so that a slow minute of the machine is slow for
all of them. Times are medians. A gain is the median of the ratios of times that are neighbours,
with quartiles. What the machine can do is measured here, too, not read in a data sheet.

  logits   log-probs and entropies of N x V logits, and their gradient: kernels/logprob.py, torch
           eager and compiled, TRL. "% of copy" is the time that a copy takes, of b bytes a logit
           forward and 2 b backward, as a share of the time taken. Needs a GPU.
  rollout  the rollout of grpo.py beside `generate` of transformers, with the same weights.
  step     a step of grpo.py beside one of TRL's GRPOTrainer, with the same weights and rewards.
  scaling  time and memory of a rollout and an update as completions and policies grow. On a CPU
           each point has a process of its own, whose memory is looked at, and its time is that of
           the processor: points cannot take turns, and other work would lengthen some.

The lengths of completions are given beforehand, to both sides alike. "fixed": each has all its
tokens. "ragged": nine of ten end after 4 to 8, as answers without thoughts do. The policy is
untrained and hardly prefers any token: in ours a uniform of 1 draws the last id of the vocabulary,
which stands for EOS here, and a smaller one never does; in theirs a logits processor makes EOS win.

Writes docs/bench-DEVICE.json and, of all such files, the tables between the marks in docs/speed.md.
Rows that are not asked for stay as this machine measured them. Others' need transformers and trl.
"""
import argparse
import contextlib
import copy
import functools
import itertools
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import linear_regression, median, quantiles
from unittest.mock import patch

import torch

import common
import grpo
from kernels.logprob import logprob, logprob_torch
from tools import export, start
from tools.runs import DOCS, ROOT, put, table

# Shapes are those of grpo.py; logits without a batch are (N, V).

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GIGABYTES = 8.6 if DEVICE == "cuda" else 0.5            # that a copy moves
ROWS = ("logits", "rollout", "step", "scaling")
REPEATS = 5                             # of what is compared, after one that warms up
LOGITS = [(8192, 32000), (8192, 50257), (8192, 128256), (8192, 151936), (65536, 512)]   # N, V
SIZES = {                               # the flags in which a policy differs from the defaults
    "0.11M": {},
    "0.81M": {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 392},
    "2.9M": {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 704},
    "10M": {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1112}}
COMPARED = ("0.11M", "0.81M")           # with others, at this P, G, T
SHAPE = (32, 8, 32)
GROWING = {"0.11M": 32, "0.81M": 8, "2.9M": 4, "10M": 4}        # P; G is 8
LENGTHS = (32, 64, 128, 256, 512)       # T
KINDS = ("fixed", "ragged", "ragged, 3 of 4 groups without signal")
END = grpo.VOCAB_SIZE - 1               # stands for EOS in ours


# ---- 1. clocks, and the machine --------------------------------------------------------------

def now():
    """Seconds on a clock, once the device has done all it was given."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(job, clock=now):
    """How long a job takes."""
    start = clock()
    job()
    return clock() - start


def typical(job):
    """The median of several times; on a GPU, with a cold cache. -> seconds"""
    if DEVICE == "cuda":
        from triton.testing import do_bench
        return do_bench(job, return_mode="median") / 1e3
    return median([seconds(job) for _ in range(1 + REPEATS)][1:])


def memory_peak():
    """The most bytes in use since the last call: on a CPU, by this process, where Linux says so."""
    if DEVICE == "cuda":
        most = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return most
    with contextlib.suppress(OSError):
        found = re.search("VmHWM:\\s*([0-9]+) kB", Path("/proc/self/status").read_text())
        Path("/proc/self/clear_refs").write_text("5")           # forget the peak
        return 1024 * int(found[1])
    return 0


def machine():
    """What there is, and what a copy reaches. -> dict"""
    source, target = torch.rand(2, int(GIGABYTES * 1e9 / 8), device=DEVICE)
    info = Path("/proc/cpuinfo")
    name = re.search("model name\\s*: (.*)", info.read_text()) if info.exists() else None
    packages = [name for name in ("torch", "triton", "transformers", "trl") if find_spec(name)]
    return {"device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
            "cpu": f"{name[1] if name else platform.machine()}, {os.cpu_count()} cores",
            "threads": torch.get_num_threads(),
            "versions": {"python": platform.python_version()}
            | {name: version(name) for name in packages},
            "copy_GB_per_s": GIGABYTES / typical(lambda: target.copy_(source))}


# ---- 2. log-probs of logits ------------------------------------------------------------------

def logits_row(who, provider, logits, tokens, copy_rate):
    """Seconds of both passes, the bytes that they need beyond the logits and their gradient, and
    the largest error of logps and entropy, relative to 1 + |value|. -> dict"""
    N, V = logits.shape
    row = {"who": who, "N": N, "V": V, "dtype": str(logits.dtype).removeprefix("torch.")}
    forward = functools.partial(provider, logits, tokens)
    logps, *_, entropy = forward()              # compiles
    outputs = (logps, entropy)
    ones = [torch.ones_like(x) for x in outputs]
    backward = functools.partial(torch.autograd.grad, outputs, logits, ones, retain_graph=True)
    copy_seconds = logits.nbytes / (copy_rate * 1e9)
    for name, job, num_copies in (("forward", forward, 1), ("backward", backward, 2)):
        memory_peak()
        before = memory_peak()
        job()
        row[f"{name}_bytes"] = memory_peak() - before - (num_copies - 1) * logits.nbytes
        row[name] = typical(job)
        row[f"{name}_share_of_copy"] = num_copies * copy_seconds / row[name]
    some = slice(0, 256)                        # all of them would take 10 GB in fp64
    exact = logprob_torch(logits.detach()[some].double(), tokens[some])[::2]
    errors = [(x[some] - y).abs() / (1 + y.abs()) for x, y in zip(outputs, exact)]
    return row | {"error": max(error.max().item() for error in errors)}


def logits_rows(N, V, dtype, copy_rate):
    """A row for each who makes log-probs and entropies of N x V logits. -> list of dicts"""
    logits = (3 * torch.randn(N, V, device=DEVICE)).to(dtype).requires_grad_()
    tokens = torch.randint(V, (N,), device=DEVICE)
    torch.compiler.reset()                      # else the ninth shape runs uncompiled
    providers = {"ours": logprob, "torch": logprob_torch,
                 "torch.compile": torch.compile(logprob_torch, dynamic=False)}
    if find_spec("trl"):
        from trl.kernels.logprob_entropy import selective_log_softmax_and_entropy
        providers["TRL"] = selective_log_softmax_and_entropy
    return [logits_row(*provider, logits, tokens, copy_rate) for provider in providers.items()]


# ---- 3. the same weights, lengths and rewards for both ---------------------------------------

def lengths_of(kind, B, T):
    """Tokens of each completion, END included. -> (B,)"""
    if kind == "fixed":
        return torch.full((B,), T)
    generator = common.generator("lengths")
    short = torch.randint(min(4, T), min(8, T) + 1, (B,), generator=generator)
    is_short = torch.randperm(B, generator=generator) < B - B // 10
    return torch.where(is_short, short, T)


def check_lengths(sampled, lengths):
    """RuntimeError if completions have other lengths than ordered: nothing would be comparable."""
    if sampled.tolist() != lengths.tolist():
        raise RuntimeError(f"{sum(sampled)} tokens were sampled instead of {sum(lengths)}")


class Ours:
    """grpo.py with completions of given lengths, and one small optimizer step a batch."""

    def __init__(self, size, P, G, T, kind="fixed"):
        self.cfg = cfg = grpo.Config(
            device=DEVICE, num_prompts=P, num_generations=G, max_completion_length=T,
            num_mini_batches=1, learning_rate=1e-7, **SIZES[size])      # the policy hardly changes
        self.policy = grpo.GPT(cfg).to(DEVICE)
        self.reference = copy.deepcopy(self.policy)
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=cfg.learning_rate, weight_decay=cfg.weight_decay)
        self.task = common.load_task(cfg, self.verify)
        self.problems = self.sample_problems(1)
        self.prompts = grpo.encode_prompts(self.problems, self.task, DEVICE)    # (B, W)
        self.lengths = lengths_of(kind, P * G, T)                               # (B,)
        # half of each group is right; in the last kind, only in every fourth group
        self.rewards = [float(g % 2 == 0 and (p % 4 == 0 or kind != KINDS[2]))
                        for p, g in itertools.product(range(P), range(G))]
        uniforms = 0.98 * torch.rand(P * G, T, generator=common.generator("uniforms"))
        uniforms[range(P * G), self.lengths - 1] = 1.0      # draws END; up to .98 none does
        self.uniforms = uniforms.to(DEVICE)                                     # (B, T)
        self.real_rollout = self.task.rollout or grpo.rollout

    def sample_problems(self, steps):
        """Problems for some steps, G copies of each. -> list"""
        problems = common.sample_problems(self.task, steps * self.cfg.num_prompts, "bench")
        return [problem for problem in problems for _ in range(self.cfg.num_generations)]

    def verify(self, problem, text):
        grpo.verify(problem, text)              # takes its time; of noise its verdict is no use
        return self.verdicts.pop(0)

    def complete(self, policy, prompts, problems, cfg, _):
        """What takes the place of a script's rollout."""
        with patch.object(grpo, "EOS", END):
            outputs = self.real_rollout(policy, prompts, problems, cfg, self.uniforms)
        check_lengths(outputs[-1], self.lengths)
        return outputs

    def rollout(self):
        self.complete(self.policy, self.prompts, self.problems, self.cfg, None)

    def sample(self):
        """-> Batch"""
        self.verdicts = list(self.rewards)
        with patch.object(self.task, "rollout", self.complete):
            return grpo.sample_batch(self.policy, self.task, self.cfg, 0)

    def update(self, batch):
        A = grpo.advantages(batch.rewards).view(-1, 1).to(DEVICE)               # (B, 1)
        grpo.update(self.policy, self.reference, self.optimizer, batch, A, self.cfg, 0)
        common.describe(batch)

    def step(self):
        self.update(self.sample())


def llama(ours):
    """The policy as transformers' LlamaForCausalLM, whose generate() ends rows at the same time."""
    import transformers
    weights = {export.llama_name(name): x for name, x in ours.policy.named_parameters()}
    config = transformers.LlamaConfig(**export.llama_config(ours.cfg))
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(weights | {"lm_head.weight": ours.policy.embed.weight})

    class EndOnTime(transformers.LogitsProcessor):
        def __call__(self, ids, scores):
            num_sampled = ids.shape[1] - ours.prompts.shape[1]
            is_last = ours.lengths.to(ids.device) == num_sampled + 1            # (B,)
            scores[:, grpo.EOS] = torch.where(is_last, 1e9, float("-inf")).to(scores)
            return scores
    model.generation_config = transformers.GenerationConfig(**export.generation_config(ours.cfg))
    model.generate = functools.partial(model.generate, logits_processor=[EndOnTime()])
    return model.to(DEVICE)


# ---- 4. rollouts and steps -------------------------------------------------------------------

def row_of(size, kind, ours, times):
    """Who took how many seconds; the first time is left out, which warms up. -> dict"""
    times = {who: taken[1:] for who, taken in times.items()}
    row = {"size": size, "kind": kind, "tokens": int(ours.lengths.sum()), "seconds": times,
           "median": {who: median(taken) for who, taken in times.items()}}
    if len(times) > 1:
        fast, slow = times.values()
        ratios = [theirs / our for our, theirs in zip(fast, slow)]
        row["gain"] = dict(zip(("low", "median", "high"), quantiles(ratios, n=4)))
    return row


def rollout_row(size, kind, shape=SHAPE):
    """A batch sampled by ours and, if installed, by transformers' generate, in turn. -> dict"""
    ours = Ours(size, *shape, kind)
    jobs = {"ours": ours.rollout}
    if find_spec("transformers"):
        model = llama(ours)

        def generate():
            mask = torch.ones_like(ours.prompts)
            tokens = model.generate(ours.prompts, attention_mask=mask)[:, mask.shape[1]:]
            check_lengths((tokens == grpo.EOS).int().argmax(dim=1) + 1, ours.lengths)
        jobs["HF generate"] = generate
    times = {who: [] for who in jobs}
    for _ in range(1 + REPEATS):
        for who, job in jobs.items():
            times[who].append(seconds(job))
    return row_of(size, kind, ours, times)


def step_row(size, kind, shape=SHAPE):
    """A step of ours and, if it is installed, one of TRL's trainer, in turn. -> dict"""
    ours = Ours(size, *shape, kind)
    times = {"ours": []}

    def our_turn():
        times["ours"].append(seconds(ours.step))
    if find_spec("trl"):
        times["TRL"] = trl_steps(ours, our_turn)
    else:
        for _ in range(1 + REPEATS):
            our_turn()
    return row_of(size, kind, ours, times)


def trl_steps(ours, between):
    """Steps of TRL's GRPOTrainer, with between() called after each. No KL, no checkpointing and no
    log, which costs least. -> list of seconds"""
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    transformers.logging.set_verbosity_error()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=export.make_tokenizer(), eos_token="<|eos|>", pad_token="<|pad|>")
    problem_of = {problem.prompt: problem for problem in ours.sample_problems(1 + REPEATS)}
    times = []

    def reward(prompts, completions, completion_ids, **_):
        for prompt, text in zip(prompts, completions):
            grpo.verify(problem_of[prompt], text)
        check_lengths(torch.tensor([len(ids) for ids in completion_ids]), ours.lengths)
        return ours.rewards

    class Timer(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.start = now()

        def on_step_end(self, *_, **__):
            times.append(now() - self.start)
            between()

    B = len(ours.lengths)
    size = min(ours.cfg.micro_batch_size, B)
    same = ("num_generations", "temperature", "max_completion_length", "epsilon", "epsilon_high",
            "max_grad_norm", "learning_rate")
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            llama(ours), reward, processing_class=tokenizer, callbacks=[Timer()],
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in problem_of]),
            args=GRPOConfig(
                folder, max_steps=1 + REPEATS, use_cpu=DEVICE == "cpu", loss_type="grpo", beta=0.0,
                per_device_train_batch_size=size, gradient_accumulation_steps=B // size,
                lr_scheduler_type="constant", bf16=False, gradient_checkpointing=False,
                dataloader_pin_memory=False, disable_tqdm=True, report_to="none",
                save_strategy="no", logging_strategy="no",
                **{name: getattr(ours.cfg, name) for name in same}))
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return times


# ---- 5. how cost grows -----------------------------------------------------------------------

def measure_point(size, job, T):
    """What a rollout or an update costs: seconds, and bytes beyond the weights and, of an update,
    those of the reference, gradients and AdamW's moments. -> dict"""
    Ours(size, 1, 8, 2).step()                  # allocates what is needed once
    ours = Ours(size, GROWING[size], 8, T)
    memory_peak()
    before = memory_peak()
    function = ours.rollout
    if job == "update":
        function = functools.partial(ours.update, ours.sample())
        memory_peak()
    clock = now if DEVICE == "cuda" else time.process_time
    times = [seconds(function, clock)]          # the first one warms up
    extra = memory_peak() - before
    while len(times) < 4 and sum(times[1:]) < 5:
        times.append(seconds(function, clock))
    weights = sum(weight.nbytes for weight in ours.policy.parameters())
    return {"job": job, "size": size, "rows": len(ours.lengths), "T": T, "seconds": times[1:],
            "median": median(times[1:]), "bytes": extra,
            "standing_bytes": weights * (1 if job == "rollout" else 5)}


def measure_alone(*point):
    """The same, on a CPU in a process of its own. -> dict"""
    if DEVICE == "cuda":
        return measure_point(*point)
    command = [sys.executable, "-m", "kernels.bench", "--point", json.dumps(point)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


# ---- 6. tables -------------------------------------------------------------------------------

def logits_cells(row):
    cells = [f"{row['N']} x {row['V']} {row['dtype']}", row["who"]]
    for part in ("forward", "backward"):
        cells += [f"{row[part] * 1e6:.0f}", f"{row[f'{part}_share_of_copy']:.0%}"]
    extra = [f"{row[f'{part}_bytes'] / 2**20:.0f}" for part in ("forward", "backward")]
    return [*cells, " + ".join(extra), f"{row['error']:.0e}"]


def compared_cells(row):
    cells = [row["size"], row["kind"]]
    for taken in row["median"].values():
        cells.append(f"{1e3 * taken:.0f} ms, {row['tokens'] / taken / 1e3:.0f}k/s")
    if "gain" in row:
        return [*cells, "{median:.1f}x ({low:.1f} - {high:.1f})".format(**row["gain"])]
    return [*cells, "-", "-"]


TABLES = {                              # rows: what is said of them, heading, cells of a row
    "logits": ("Log-prob and entropy of logits, and their gradient",
               ["logits", "who", "forward us", "% of copy", "backward us", "% of copy",
                "extra MiB", "error"], logits_cells),
    "rollout": ("A rollout, ours with log-probs and entropies, theirs without",
                ["parameters", "lengths", "ours", "HF generate", "gain"], compared_cells),
    "step": ("A step of GRPO", ["parameters", "batch", "ours", "TRL", "gain"], compared_cells)}


def tables(record):
    """What was compared, as Markdown."""
    found = record["machine"]
    where = f"CPU ({found['cpu']})" if found["device"] == "cpu" else found["device"]
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    text = f"{where}, which copies {found['copy_GB_per_s']:.0f} GB/s; {versions}.\n"
    for name, (said, head, cells) in TABLES.items():
        if name in record:
            text += f"\n{said}:\n\n{table(head, map(cells, record[name]))}"
    P, G, T = record["shape"]
    text += (f"\n{P} x {G} completions of at most {T} tokens; medians of {record['repeats']} after "
             "one that warms up; weights and lengths of seed 0.\nNo policy is evaluated, so no "
             "held-out problem is needed.\n")
    if found["device"] == "cpu":
        text += "Kernel rows need a GPU: here the kernels' speed is unmeasured.\n"
    return text + "\n"


def growth_table(record):
    """What grows, as Markdown."""
    lines = {}
    for row in record.get("scaling", []):
        lines.setdefault((row["size"], row["rows"], row["job"]), []).append(row)
    rows = []
    for key, line in lines.items():
        some = {row["T"]: f"{1e6 * row['median'] / (row['rows'] * row['T']):.0f}" for row in line}
        lengths = [math.log(row["T"]) for row in line[-3:]]
        k = linear_regression(lengths, [math.log(row["median"]) for row in line[-3:]]).slope
        ends = [(row["bytes"] + row["standing_bytes"]) / 2**20 for row in (line[0], line[-1])]
        rows.append([*key, some[32], some[128], some[512], f"{k:.1f}", *(f"{x:.0f}" for x in ends)])
    head = ["parameters", "rows", "job", "us a token, T = 32", "T = 128", "T = 512", "k of T^k",
            "MiB, T = 32", "T = 512"]
    return f"On {record['machine']['device']}:\n\n{table(head, rows)}\n" if rows else ""


# ---- 7. all of it ----------------------------------------------------------------------------

def measure(names):
    """Those of the ROWS that are named, printed as they come. -> the record"""
    record = {"machine": machine(), "repeats": REPEATS, "shape": SHAPE}
    copy_rate = record["machine"]["copy_GB_per_s"]

    def add(name, *rows):
        record[name] = record.get(name, []) + [*rows]
        for row in rows:
            print(name, {key: x for key, x in row.items() if key != "seconds"}, flush=True)
    for dtype in (torch.bfloat16, torch.float32) if DEVICE == "cuda" and "logits" in names else ():
        for N, V in LOGITS:
            add("logits", *logits_rows(N, V, dtype, copy_rate))
    for size in COMPARED:
        for kind in KINDS[:2] if "rollout" in names else ():    # rewards do not matter to it
            add("rollout", rollout_row(size, kind))
        for kind in KINDS if "step" in names else ():
            add("step", step_row(size, kind))
    for point in itertools.product(GROWING, ("rollout", "update"), LENGTHS):
        if "scaling" in names:
            add("scaling", measure_alone(*point))
    return record


def merged(old, new):
    """A new record, with the rows of an older one that it lacks, unless another machine or other
    software has measured them. -> record"""
    rate = {"copy_GB_per_s": 0}
    is_same = old.get("machine", {}) | rate == new["machine"] | rate
    return old | new if is_same else new


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=",".join(ROWS), help="measure only these [%(default)s]")
    parser.add_argument("--point", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)                    # for all that are compared
    if args.point:
        return print(json.dumps(measure_point(*args.point)))
    if not set(args.rows.split(",")) <= set(ROWS):
        common.fail(f"--rows {args.rows}: must be some of {','.join(ROWS)}")
    record = measure(args.rows.split(","))
    slug = re.sub("[^a-z0-9]+", "-", record["machine"]["device"].lower())
    path = DOCS / f"bench-{slug}.json"
    old = json.loads(path.read_text()) if path.is_file() else {}
    common.write(path, json.dumps(merged(old, record), indent=1) + "\n")
    records = [json.loads(path.read_text()) for path in sorted(DOCS.glob("bench-*.json"))]
    put("speed", "".join(map(tables, records)), "bench")
    put("scaling", "".join(map(growth_table, records)), "bench")


if __name__ == "__main__":
    start(main)
