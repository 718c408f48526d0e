"""Measure what docs/ shows, outside the experiments of the lab:

  python -m lab.measure seeds 0 1 2     runs grpo.py with each seed (make seeds)
  python -m lab.measure nano 0 1 2      runs nano.py with each seed (make nano-seeds)
  python -m lab.measure engine          trains with vLLM, LoRA and bfloat16 (make engine)
  python -m lab.measure kernels         times kernels/logprob.py on a GPU (make bench)
  python -m lab.measure step 64         times a step of 64 outputs on a real model: speed.md

The numbers go to docs/NAME.json, and from there between their marks into README.md or a page.
"""
import contextlib
import functools
import io
import json
import os
import re
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import common
from kernels.logprob import logprob, logprob_torch
from lab.docs import DOCS, MACHINE, ROOT, put, record, run, run_once, table
from pretrained import export
from report import parser, start
from report.logs import read_log, read_summary

NAME = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
SLUG = re.sub("[^a-z0-9]+", "-", NAME.lower())
PACKAGES = [f"{name} {version(name)}" for name in ("torch", "triton", "transformers", "trl")
            if find_spec(name)]
ON_DEVICE = ", ".join([f"{NAME}: {MACHINE}", *PACKAGES])


# ---- 1. the main job -------------------------------------------------------------------------

def printed_by(folder, *words):
    """Run python in a folder. -> what it prints"""
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, encoding="utf-8")
    return done.stdout


def example(printed):
    """Select the lines of a run that README.md shows: the base, the first step and its samples, the
    last step, the last evaluation, and the end, with the interpreter of make run. -> str"""
    base = re.search("^base: .*\n", printed, re.MULTILINE)[0]
    first = re.search("^ step .*\n(.*\n){3}", printed, re.MULTILINE)[0]
    last = re.findall("^ *[0-9]+ +[0-9.]+ .*\n", printed, re.MULTILINE)[-1]
    end = printed[printed.rindex("held out: "):]
    end = re.sub("^  .* -m report.ask", "  .venv/bin/python -m report.ask", end, flags=re.MULTILINE)
    return f"```\n{base}{first}  ...\n{last}{end}```\n"


def main_job(seeds):
    """Run grpo.py with each seed in an empty folder, so that each run makes its own base. README.md
    shows parts of the first run, and docs/play.html has its policy."""
    results = {}
    for seed in seeds:
        with tempfile.TemporaryDirectory() as empty:
            printed = printed_by(empty, ROOT / "grpo.py", "--seed", seed, "--base_seed", seed)
            folder = Path(empty, f"runs/grpo-arithmetic-s{seed}")
            results[seed] = read_summary(folder)
            if seed == seeds[0]:
                put("example", example(printed), "seeds")
                printed_by(ROOT, "-m", "learn.play", folder)
    record("seeds", seeds=results)
    put("table", seeds_table(results), "seeds")


def seeds_table(results):
    """Write the table of docs/lab.md. results: seed -> summary of its run. -> str"""
    rows = []
    for seed, summary in results.items():
        base, trained = summary["base"], summary["trained"]
        rows.append([
            seed, f"{base['greedy']:.3f}", f"{trained['greedy']:.3f}",
            f"{base['pass@1']:.3f} -> {trained['pass@1']:.3f}",
            f"{base['think_share']:.2f} -> {trained['think_share']:.2f}",
            f"{base['mean_length']:.0f} -> {trained['mean_length']:.0f}", summary["steps"],
            f"{summary['seconds_warm_start']:.0f} s", f"{summary['seconds_total']:.0f} s"])
    heads = ["seed", "greedy accuracy, base", "greedy accuracy, after RL", "pass@1",
             "fraction that thinks", "mean tokens", "steps", "time for the base", "total time"]
    seconds = statistics.median(summary["seconds_total"] for summary in results.values())
    return (f"{table(heads, rows)}\nThe median of the total times is {seconds:.0f} s. The policies "
            f"are scored on {trained['problems']} held-out problems, all different. Machine: "
            f"{MACHINE}.\n")


def nano(seeds):
    """Run nano.py with each seed. docs/nano.md shows parts of the first run."""
    results = {}
    outputs = []
    for seed in seeds:
        began = time.perf_counter()
        outputs.append(printed_by(ROOT, "-c", f"import nano; nano.main(seed={seed})"))
        before, after = re.findall("(?:before|after): +([0-9.]+) right", outputs[-1])
        results[seed] = {"before": float(before), "after": float(after),
                         "seconds": time.perf_counter() - began}
    record("nano-seeds", seeds=results)
    lines = outputs[0].splitlines()
    steps = [line for line in lines if line.startswith("step")]
    before = next(line for line in lines if "before:" in line)
    shown = "\n".join([*lines[:2], "...", before, *steps[:11:5], "...", *lines[-2:]])
    rows = []
    for word, end in (("lowest", min), ("highest", max)):
        before, after, seconds = (end(one[name] for one in results.values())
                                  for name in ("before", "after", "seconds"))
        rows.append([f"{word} of {len(seeds)} seeds", f"{before:.3f}", f"{after:.3f}",
                     f"{seconds:.0f} s"])
    numbers = table(["", "right before", "right after", "seconds"], rows)
    put("nano", f"```\n{shown}\n```\n\n{numbers}\n{MACHINE}.\n", "nano-seeds")


# ---- 2. pretrained/train.py ------------------------------------------------------------------

STEPS = (10, 20, 30)                    # after which a run is evaluated
HALF = "--dtype bfloat16"
VLLM = "--engine vllm --engine_memory 0.1"
LORA = "--lora_rank 8 --learning_rate"
LEARNING = {                            # name: flags
    "transformers, float32": "",
    "transformers, bfloat16": HALF,
    "vLLM, float32": VLLM,
    "vLLM, bfloat16": f"{VLLM} {HALF}",
    "vLLM, bfloat16, no correction": f"{VLLM} {HALF} --importance_sampling_correction none",
    "LoRA of rank 8, learning rate 5e-4": f"{LORA} 5e-4",
    "LoRA of rank 8, learning rate 2e-3": f"{LORA} 2e-3",
    "LoRA, learning rate 2e-3, vLLM, bfloat16": f"{LORA} 2e-3 {VLLM} {HALF}"}
DIFFERENCE = "sampling/sampling_logp_difference/mean"


def make_base(work, *flags):
    """Train a base with grpo.py, and export it. -> its run folder, the exported folder"""
    base, model = Path(work, "base"), Path(work, "model")
    run("grpo.py", base, "--max_steps", 0, "--device", "cpu", "--num_eval_problems", 8,
        "--num_eval_samples", 1, *flags)
    export.export(base, model)
    return base, model


def engine():
    """Do the main job with pretrained/train.py from one base, with each engine and dtype, and with
    LoRA, and measure how far sampler and trainer differ."""
    results = {}
    rows = []
    with tempfile.TemporaryDirectory() as work:
        _, model = make_base(work, "--num_attention_heads", 2)
        job = (f"pretrained/train.py --model {model} --task arithmetic --max_completion_length 48 "
               f"--learning_rate 5e-4 --micro_batch_size 32 --save_steps 1 --max_steps {STEPS[-1]} "
               f"--eval_steps {STEPS[0]} --num_eval_samples 1")
        for name, flags in LEARNING.items():
            runs = [run_once(f"{job} {flags}", seed, ["eval/greedy", DIFFERENCE])
                    for seed in range(3)]
            greedy = [[x for x in one["eval/greedy"] if x is not None] for one in runs]
            difference = statistics.mean(statistics.mean(one[DIFFERENCE]) for one in runs)
            results[name] = {"greedy": greedy, "difference": difference}
            cells = [f"{statistics.mean(scores):.3f} ({min(scores):.3f})"
                     for scores in zip(*greedy)]
            rows.append([name, *cells, f"{difference:.0e}"])
    record("engine", learning=results)
    heads = ["", *(f"greedy after {n} steps" for n in STEPS),
             "sampler and trainer differ by (nats per token)"]
    put("learning", f"{table(heads, rows)}\nEach row does the main job from the same base, with 3 "
        "seeds. *greedy* is the share of held-out problems that the\nmost likely answers get "
        "right: the mean over the seeds, with the lowest seed in parentheses. One thread;\n"
        f"{MACHINE}.\n", "engine")


# ---- 3. kernels on a GPU ---------------------------------------------------------------------

REPEATS = 5                             # measured runs, after one to warm up
LOGITS = [(8192, 32000), (8192, 50257), (8192, 128256), (8192, 151936), (65536, 512)]   # N, V


def take_turns(jobs, timer):
    """Measure each job several times. All take turns, so a slow minute of the machine slows down
    all of them. {who: job} -> {who: list of seconds}"""
    times = {who: [] for who in jobs}
    for _ in range(1 + REPEATS):
        for who, job in jobs.items():
            times[who].append(timer(job))
    return {who: taken[1:] for who, taken in times.items()}     # the first run warms up


def logits(what, part):
    """Compute log-probs and entropies of logits "N x V dtype", or their gradient, with our kernels,
    with torch, eager and compiled, and with TRL; and copy as many bytes.
    -> {who: list of seconds}"""
    from triton.testing import do_bench
    N, _, V, dtype = what.split()
    N, V = int(N), int(V)
    logits = 3 * torch.randn(N, V, device="cuda")
    logits = logits.to(getattr(torch, dtype)).requires_grad_()
    tokens = torch.randint(V, (N,), device="cuda")
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
    return take_turns(jobs, with_a_cold_cache)


def measured():
    """Measure and print each row. After each, yields all rows so far."""
    rows = []
    for (N, V), dtype, part in product(LOGITS, ("bfloat16", "float32"), ("forward", "backward")):
        of = {"logits": f"{N} x {V} {dtype}", "pass": part}
        rows.append({"of": of, "seconds": logits(*of.values())})
        print(kernel_table(rows[-1:]), flush=True)
        yield rows


def kernel_table(rows):
    """Write the table of a machine. -> str"""
    head = [*rows[0]["of"]]
    for who in rows[0]["seconds"]:
        head += [who, "gain"] if "ours" in head else [who]
    lines = []
    for row in rows:
        cells = [*row["of"].values()]
        for who, taken in row["seconds"].items():
            ms = 1e3 * statistics.median(taken)
            cells.append(f"{ms:.{0 if ms > 99 else 2}f} ms")
            if who != "ours":
                ratios = [their / our for our, their in zip(row["seconds"]["ours"], taken)]
                low, gain, high = statistics.quantiles(ratios, n=4)
                digits = 1 if gain > 1.3 else 2         # near 1, hundredths matter
                cells.append(f"{gain:.{digits}f}x ({low:.{digits}f} - {high:.{digits}f})")
        lines.append(cells)
    return table(head, lines)


def kernel_tables():
    """Write the tables of docs/speed.md from all docs/bench-DEVICE.json. -> str"""
    stored = [json.loads(path.read_text("utf-8")) for path in sorted(DOCS.glob("bench-*.json"))]
    return "".join(f"{one['machine']}:\n\n{kernel_table(one['logits'])}\n" for one in stored)


def kernels():
    """Measure the kernels, and store the numbers after each row, in case later ones time out."""
    if NAME == "cpu":
        common.fail("make bench: needs a GPU")
    torch.set_float32_matmul_precision("highest")
    for rows in measured():
        record(f"bench-{SLUG}", machine=ON_DEVICE, logits=rows)
    put("logits", kernel_tables(), "bench")


# ---- 4. a step on a real model ---------------------------------------------------------------

TRAINERS = ["real.py", "pretrained/train.py"] + ["TRL"] * bool(find_spec("trl"))
# Sizes of a Qwen3: on a GPU those of Qwen3-0.6B, on a CPU ten million parameters
NAMES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "head_dim", "intermediate_size", "vocab_size")
SIZES = (256, 8, 8, 4, 32, 1024, 4096) if NAME == "cpu" else (1024, 28, 16, 8, 128, 3072, 151936)
PROMPT, OUTPUT = (32, 16) if NAME == "cpu" else (128, 256)      # tokens
OUTPUTS = ["16"] if NAME == "cpu" else ["64", "256"]            # in a step, 8 to a prompt


def write_model(folder):
    """Write a random model with a tokenizer of bytes, and prompts of nearly PROMPT tokens."""
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    config = Qwen3Config(**dict(zip(NAMES, SIZES)), eos_token_id=256, pad_token_id=257,
                         bos_token_id=None, tie_word_embeddings=True)
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=export.make_tokenizer(), eos_token="<|eos|>",
                            pad_token="<|pad|>", padding_side="left").save_pretrained(folder)
    rows = [{"prompt": f"{i} " * (PROMPT // 3), "answer": "1"} for i in range(10, 99)]
    Path(folder, "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path(folder, "odd.py").write_text(          # rewards that differ, so that there is a gradient
        "def odd(completions, **_):\n    return [len(text) % 2.0 for text in completions]\n")


def step(trainer, folder, outputs):
    """Let a trainer do three steps, and print the seconds, tokens and gap of the last one, and the
    peak memory in GiB, as the last line."""
    outputs, data, updates = int(outputs), f"{folder}/data.jsonl", []
    register_optimizer_step_post_hook(lambda *_: updates.append(time.perf_counter()))
    os.chdir(folder)
    gap = None
    if trainer == "real.py":
        import real
        vars(real).update(P=outputs // 8, G=8, W=PROMPT, T=OUTPUT, HELD_OUT=8)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            real.main(folder, data, steps=3)
        gap, length = re.findall("gap ([^,]+), step .* tokens (.+)", printed.getvalue())[-1]
    elif trainer == "pretrained/train.py":
        from pretrained import train
        train.main(f"--model {folder} --data {data} --reward_file {folder}/odd.py --output_dir run "
                   f"--num_prompts {outputs // 8} --num_generations 8 --max_steps 3 --beta 0 "
                   f"--max_completion_length {OUTPUT} --num_eval_problems 1 --num_eval_samples 1 "
                   f"--num_threads {torch.get_num_threads()}".split())
        last = read_log("run", "metrics")[-1]
        gap, length = last[DIFFERENCE], last["completions/mean_length"]
    else:
        import datasets
        import trl
        flags = trl.GRPOConfig(
            "run", per_device_train_batch_size=min(outputs, 16), num_generations=8, beta=0.0,
            gradient_accumulation_steps=max(1, outputs // 16), max_completion_length=OUTPUT,
            max_steps=3, logging_steps=1, report_to=[], bf16=NAME != "cpu")
        job = trl.GRPOTrainer(
            folder, args=flags, reward_funcs=runpy.run_path("odd.py")["odd"],
            train_dataset=datasets.load_dataset("json", data_files=data, split="train"))
        job.train()
        length = [line["completions/mean_length"] for line in job.state.log_history[:-1]][-1]
    peak = torch.cuda.max_memory_allocated() / 2**30 if NAME != "cpu" else 0
    seconds = updates[-1] - updates[-1 - len(updates) // 3]
    print(json.dumps([seconds, outputs * float(length), gap and float(gap), peak]))


def steps(all_outputs):
    """Time a step of each trainer, in turns, each time in a process of its own."""
    rows = []
    for outputs, _, trainer in product(all_outputs, range(2), TRAINERS):
        with tempfile.TemporaryDirectory() as folder:
            write_model(folder)
            printed = printed_by(ROOT, "-m", "lab.measure", "step", trainer, folder, outputs)
        seconds, tokens, gap, peak = json.loads(printed.splitlines()[-1])
        rows.append([trainer, outputs, f"{seconds:.2f}", f"{tokens / seconds:,.0f}",
                     f"{peak:.1f}" if peak else "", "" if gap is None else f"{gap:.0e}"])
        print(*rows[-1], flush=True)
    record(f"step-{SLUG}", machine=ON_DEVICE, rows=rows)
    heads = ["trainer", "outputs", "seconds a step", "tokens/s", "peak memory, GiB", "gap, nats"]
    put("step", f"{table(heads, rows)}\n{ON_DEVICE}.\n", "gpu")


def main(argv=None):
    flags = parser(__doc__)
    flags.add_argument("what", choices=("seeds", "nano", "engine", "kernels", "step"))
    flags.add_argument("seeds", nargs="*", metavar="SEED")
    args = flags.parse_args(argv)
    if args.what == "seeds":
        main_job(args.seeds or [*"01234"])
    elif args.what == "nano":
        nano(args.seeds or [*"01234"])
    elif args.what == "engine":
        engine()
    elif args.what == "kernels":
        kernels()
    elif len(args.seeds) == 3:              # a trainer, a folder, and a number of outputs
        step(*args.seeds)
    else:
        steps(args.seeds or OUTPUTS)


if __name__ == "__main__":
    start(main)
