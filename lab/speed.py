"""Measure how fast grpo.py is, compared with TRL and torch: python -m lab.speed (make bench).

  step    a step of grpo.py, and one of TRL's GRPOTrainer with the same weights and rewards; on a
          GPU also a step of grpo.py whose rollout does without the CUDA graph
  logits  log-probs and entropies of N x V logits, and their gradient: kernels/logprob.py, torch
          eager and compiled, TRL, and a copy that moves as many bytes (needs a GPU)

All programs in a row of a table take turns, so a slow minute of the machine slows down all of them.
Both sides get the same lengths of completions in advance. docs/speed.md describes the tables. They
are made from all docs/bench-DEVICE.json, and the one of this machine is written after each row.
"""
import copy
import functools
import json
import re
import tempfile
import time
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from statistics import median, quantiles
from unittest.mock import patch

import torch

import common
import grpo
from kernels.logprob import logprob, logprob_torch
from lab import docs
from pretrained import export
from report import parser, start

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAME = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
SLUG = re.sub("[^a-z0-9]+", "-", NAME.lower())
PACKAGES = [name for name in ("torch", "triton", "transformers", "trl") if find_spec(name)]
MACHINE = ", ".join([f"{NAME}: {docs.MACHINE}", *(f"{name} {version(name)}" for name in PACKAGES)])
REPEATS = 5                             # measured runs, after one to warm up
LOGITS = [(8192, 32000), (8192, 50257), (8192, 128256), (8192, 151936), (65536, 512)]   # N, V
SIZES = {                               # flags of a policy that differ from the defaults
    "0.11M": {},
    "0.81M": {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 392}}
SHAPE = (32, 8, 32)                     # P, G, T
TABLES = ("step", "logits")
KINDS = ("fixed", "ragged", "ragged, 3 of 4 groups without signal")
END = grpo.VOCAB_SIZE - 1               # a token that takes the role of EOS on our side


# ---- 1. clocks -------------------------------------------------------------------------------

def now():
    """Read a clock, once the device has finished its work. -> seconds"""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(job):
    """Measure how long a job takes."""
    start = now()
    job()
    return now() - start


def take_turns(jobs, timer=seconds):
    """Measure each job several times, in turns. {who: job} -> {who: list of seconds}"""
    times = {who: [] for who in jobs}
    for _ in range(1 + REPEATS):
        for who, job in jobs.items():
            times[who].append(timer(job))
    return {who: taken[1:] for who, taken in times.items()}     # the first run warms up


# ---- 2. the same weights, lengths and rewards for both ---------------------------------------

def check_lengths(sampled, lengths):
    """Raise RuntimeError if completions don't have the given lengths, because their times could
    not be compared."""
    if sampled.tolist() != lengths.tolist():
        raise RuntimeError(f"{sum(sampled)} tokens were sampled instead of {sum(lengths)}")


class Ours:
    """Run grpo.py with given lengths and rewards, and one small optimizer step per batch."""

    def __init__(self, size, kind):
        P, G, T = SHAPE
        self.cfg = cfg = grpo.Config(
            device=DEVICE, num_prompts=P, num_generations=G, max_completion_length=T,
            num_mini_batches=1, learning_rate=1e-7, **SIZES[size])      # the policy hardly changes
        self.policy = grpo.GPT(cfg).to(DEVICE)
        self.reference = copy.deepcopy(self.policy)
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=cfg.learning_rate, weight_decay=0.0)
        self.task = common.load_task(cfg, grpo.verify)
        self.real_rollout = self.task.rollout or grpo.rollout
        self.task.rollout = self.complete
        problems = common.sample_problems(self.task, P, "bench")
        self.width = grpo.encode_prompts(problems, self.task, DEVICE).shape[1]
        self.lengths = torch.full((P * G,), T)          # tokens of a completion, END included
        if kind != "fixed":
            generator = common.generator("lengths")
            short = torch.randint(4, 9, (P * G,), generator=generator)
            is_short = torch.randperm(P * G, generator=generator) < P * G - P * G // 10
            self.lengths = torch.where(is_short, short, T)
        # half of each group is right; in the last kind, this holds only for every fourth group
        self.rewards = (torch.arange(G) % 2 == 0).float().repeat(P, 1)          # (P, G)
        if kind == KINDS[2]:
            self.rewards[torch.arange(P) % 4 > 0] = 0
        uniforms = 0.98 * torch.rand(P * G, T, generator=common.generator("uniforms"))
        uniforms[range(P * G), self.lengths - 1] = 1.0      # samples END; no number up to 0.98 does
        self.uniforms = uniforms.to(DEVICE)                                     # (B, T)

    def complete(self, policy, prompts, problems, cfg, _):
        """Sample like a script's rollout, but to the given lengths."""
        with patch.object(grpo, "EOS", END):
            outputs = self.real_rollout(policy, prompts, problems, cfg, self.uniforms)
        check_lengths(outputs[-1], self.lengths)
        return outputs

    def step(self):
        """Sample a batch and learn from it. -> Batch"""
        batch = grpo.sample_batch(self.policy, self.task, self.cfg, 0)
        batch.rewards = self.rewards            # the verifier ran, but noise is never right
        A = grpo.advantages(batch.rewards).view(-1, 1).to(DEVICE)               # (B, 1)
        ref_logps, _ = grpo.score_reference(self.reference, batch, self.cfg)
        grpo.update(self.policy, ref_logps, self.optimizer, batch, A, self.cfg, 0)
        common.describe(batch)
        return batch


def llama(ours):
    """Export the policy as transformers' LlamaForCausalLM. Its generate() ends rows at the given
    lengths. -> model"""
    import transformers
    weights = {export.llama_name(name): x for name, x in ours.policy.named_parameters()}
    config = transformers.LlamaConfig(**export.llama_config(ours.cfg))
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(weights | {"lm_head.weight": ours.policy.embed.weight})

    class EndOnTime(transformers.LogitsProcessor):
        def __call__(self, ids, scores):
            num_sampled = ids.shape[1] - ours.width
            is_last = ours.lengths.to(ids.device) == num_sampled + 1            # (B,)
            scores[:, grpo.EOS] = torch.where(is_last, 1e9, float("-inf")).to(scores)
            return scores
    model.generation_config = transformers.GenerationConfig(**export.generation_config(ours.cfg))
    model.generate = functools.partial(model.generate, logits_processor=[EndOnTime()])
    return model.to(DEVICE)


# ---- 3. rows of the tables -------------------------------------------------------------------

def steps(size, kind):
    """Sample a batch and learn from it, with our code and with TRL's GRPOTrainer. After each of its
    steps, our jobs take their turns. It has no KL, saves and logs nothing, so it is as fast as it
    can be. -> the number of tokens, {who: list of seconds}"""
    ours = Ours(size, kind)
    num_tokens = int(ours.lengths.sum())
    jobs = {"ours": ours.step}
    if DEVICE == "cuda":
        plain = Ours(size, kind)
        plain.real_rollout = grpo.rollout
        jobs["no graph"] = plain.step
    if not find_spec("trl"):
        return num_tokens, take_turns(jobs)
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    transformers.logging.set_verbosity_error()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=export.make_tokenizer(), eos_token="<|eos|>", pad_token="<|pad|>")
    problems = common.sample_problems(ours.task, (1 + REPEATS) * ours.cfg.num_prompts, "bench")
    problem_of = {problem.prompt: problem for problem in problems}
    times = {who: [] for who in (*jobs, "TRL")}

    def reward(prompts, completions, completion_ids, **_):
        for prompt, text in zip(prompts, completions):
            grpo.verify(problem_of[prompt], text)
        check_lengths(torch.tensor([len(ids) for ids in completion_ids]), ours.lengths)
        return ours.rewards.flatten().tolist()

    class Timer(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.start = now()

        def on_step_end(self, *_, **__):
            times["TRL"].append(now() - self.start)
            for who, job in jobs.items():
                times[who].append(seconds(job))

    rows = ours.cfg.micro_batch_size
    same = ("num_generations", "temperature", "max_completion_length", "epsilon", "epsilon_high",
            "max_grad_norm", "learning_rate")
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            llama(ours), reward, processing_class=tokenizer, callbacks=[Timer()],
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in problem_of]),
            args=GRPOConfig(
                folder, max_steps=1 + REPEATS, use_cpu=DEVICE == "cpu", loss_type="grpo", beta=0.0,
                per_device_train_batch_size=rows,
                gradient_accumulation_steps=len(ours.lengths) // rows,
                lr_scheduler_type="constant", bf16=False, gradient_checkpointing=False,
                dataloader_pin_memory=False, disable_tqdm=True, report_to="none",
                save_strategy="no", logging_strategy="no",
                **{name: getattr(ours.cfg, name) for name in same}))
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return num_tokens, {who: taken[1:] for who, taken in times.items()}


def logits(what, part):
    """Pass over logits "N x V dtype", forward or backward. -> N, {who: list of seconds}"""
    from triton.testing import do_bench
    N, _, V, dtype = what.split()
    N, V = int(N), int(V)
    logits = 3 * torch.randn(N, V, device=DEVICE)
    logits = logits.to(getattr(torch, dtype)).requires_grad_()
    tokens = torch.randint(V, (N,), device=DEVICE)
    torch.compiler.reset()                      # else torch stops compiling at the ninth shape
    providers = {"ours": logprob, "torch": logprob_torch,
                 "torch.compile": torch.compile(logprob_torch, dynamic=False)}
    if find_spec("trl"):
        from trl.kernels.logprob_entropy import selective_log_softmax_and_entropy
        providers["TRL"] = selective_log_softmax_and_entropy
    jobs = {}
    for who, provider in providers.items():
        jobs[who] = functools.partial(provider, logits, tokens)
        if part == "backward":
            logps, *_, entropy = jobs[who]()
            ones = [torch.ones_like(x) for x in (logps, entropy)]
            jobs[who] = functools.partial(
                torch.autograd.grad, (logps, entropy), logits, ones, retain_graph=True)
    # a backward pass reads the logits and writes as many numbers; a forward pass only reads them
    copied = logits.detach()[:N if part == "backward" else N // 2]
    jobs["copy"] = functools.partial(torch.empty_like(copied).copy_, copied)

    def with_a_cold_cache(job):
        return do_bench(job, warmup=5, rep=25, return_mode="median") / 1e3
    return N, take_turns(jobs, with_a_cold_cache)


# ---- 4. all rows -----------------------------------------------------------------------------

def measure():
    """Measure and print each row. After each, yields all rows so far: {table: rows}"""
    jobs = [("step", steps, {"parameters": size, "lengths": kind})
            for size, kind in product(SIZES, KINDS)]
    if DEVICE == "cuda":
        jobs += [("logits", logits, {"logits": f"{N} x {V} {dtype}", "pass": part})
                 for (N, V), dtype, part in product(
                     LOGITS, ("bfloat16", "float32"), ("forward", "backward"))]
    measured = {name: [] for name in TABLES}
    for name, function, of in jobs:
        num_tokens, times = function(*of.values())
        measured[name].append({"of": of, "tokens": num_tokens, "seconds": times})
        print(table(measured[name][-1:]), flush=True)
        yield measured


def table(rows):
    """Write a table in Markdown. -> str"""
    head = [*rows[0]["of"]]
    for who in rows[0]["seconds"]:
        head += [who, "gain"] if "ours" in head else [who]
    lines = []
    for row in rows:
        cells = [*row["of"].values()]
        for who, taken in row["seconds"].items():
            ms = 1e3 * median(taken)
            rate = row["tokens"] / ms
            cells.append(f"{ms:.{0 if ms > 99 else 2}f} ms")
            if "lengths" in row["of"]:
                cells[-1] += f", {rate:.{0 if rate > 9.9 else 1}f}k/s"
            if who != "ours":
                ratios = [their / our for our, their in zip(row["seconds"]["ours"], taken)]
                low, gain, high = quantiles(ratios, n=4)
                digits = 1 if gain > 1.3 else 2         # near 1, hundredths matter
                cells.append(f"{gain:.{digits}f}x ({low:.{digits}f} - {high:.{digits}f})")
        lines.append(cells)
    return docs.table(head, lines)


def tables():
    """Write the tables of docs/speed.md from all docs/bench-*.json. -> {name of a table: text}"""
    paths = sorted(docs.DOCS.glob("bench-*.json"))
    records = [json.loads(path.read_text("utf-8")) for path in paths]
    return {name: "".join(f"{record['machine']}:\n\n{table(record[name])}\n"
                          for record in records if record[name])
            for name in TABLES}


def main(argv=None):
    parser(__doc__).parse_args(argv)
    torch.set_num_threads(1)                    # all programs get one thread
    torch.set_float32_matmul_precision("highest")
    for measured in measure():                  # store after each row, in case later ones time out
        docs.record(f"bench-{SLUG}", machine=MACHINE, **measured)
    for name, text in tables().items():
        docs.put(name, text, "bench")


if __name__ == "__main__":
    start(main)
