"""Measure what docs/ shows, outside the experiments of the lab:

  python -m lab.measure seeds 0 1 2     runs grpo.py with each seed (make seeds)
  python -m lab.measure nano 0 1 2      runs nano.py with each seed (make nano-seeds)
  python -m lab.measure kernels         times kernels/logprob.py on a GPU (make bench)
  python -m lab.measure step 64 64      times a step of 64 outputs on a real model, in two turns

The numbers go to docs/NAME.json, and from there between their marks into README.md or a page.
"""
import contextlib
import functools
import html
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
from lab.docs import DOCS, MACHINE, ROOT, describe, load, measured, put, record, table
from report import chart, parser, start
from report.logs import read_summary

NAME = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
SLUG = re.sub("[^a-z0-9]+", "-", NAME.lower())
PACKAGES = [f"{name} {version(name)}" for name in ("torch", "triton", "transformers", "trl")
            if find_spec(name)]
ON_DEVICE = ", ".join([f"{NAME}: {MACHINE}", *PACKAGES])
SCORES = {                              # heading: name
    "greedy accuracy": "greedy", "after a forced `<think>`": "greedy_forced_think",
    "pass@1": "pass@1"}
# What simpler things than RL reach: the command, and whether its policy is the base. The last base
# reads the textbook three times as long, and the forum as long as before.
CONTROLS = {
    "no RL": ("grpo.py --max_steps 0", "base"),
    "three steps of rejection sampling": (
        "reinforce.py --method rejection --max_steps 3", "trained"),
    "no RL, three times the textbook": (
        "grpo.py --max_steps 0 --base_steps 1980 --textbook_share 0.8182", "base"),
    "45 steps of rejection sampling": (
        "reinforce.py --method rejection --max_steps 45", "trained"),
    "GRPO, 60 steps": ("grpo.py", "trained")}


# ---- 1. the main job -------------------------------------------------------------------------

def printed_by(folder, *words):
    """Run python in a folder. -> what it prints"""
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, encoding="utf-8")
    return done.stdout


def excerpt(printed, words, first, last):
    """Select the `first` lines of a run from its line that begins with these words, and the `last`
    lines. -> block of Markdown"""
    lines = printed.splitlines()
    begin = [line.startswith(words) for line in lines].index(True)
    return "\n".join(["```", *lines[begin:begin + first], "  ...", *lines[-last:], "```\n"])


def control(folder, seed, command, which):
    """Run the command of a control in a folder. -> the scores of its base, or trained policy"""
    script, *flags = command.split()
    with tempfile.TemporaryDirectory(dir=folder) as own:
        printed_by(folder, ROOT / script, *flags, "--seed", f"{seed}", "--base_seed", f"{seed}",
                   "--output_dir", f"{own}/run")
        scores = read_summary(Path(own, "run"))[which]
    return {name: scores[name] for name in SCORES.values()}


def measure_main(case, seed):
    """Run grpo.py in an empty folder, so that it makes its own base, and the controls from the same
    base. -> its summary, with the scores of the controls and parts of what it printed"""
    with tempfile.TemporaryDirectory() as empty:
        printed = printed_by(empty, ROOT / case, "--seed", f"{seed}", "--base_seed", f"{seed}")
        one = read_summary(Path(empty, f"runs/grpo-arithmetic-s{seed}"))
        one["controls"] = {name: control(empty, seed, *job) for name, job in CONTROLS.items()}
    shown = excerpt(printed, "base: ", 5, 9)
    return one | {"printed": re.sub("\n  .* -m report.ask", "\n  .venv/bin/python -m report.ask",
                                    shown)}


def main_page():
    """Write the controls into docs/lab/bases.md, and parts of the first run into README.md."""
    results, about = load("seeds", "run: make seeds")
    first, *_ = results.values()
    shown = re.sub("(?m)^ {7}.*\n|^\\d+ steps, (?s:.*)(?=```)", "", first["printed"])  # no samples
    put("example", shown, "seeds")
    rows = []
    for name in CONTROLS:
        cells = []
        for score in SCORES.values():
            found = [one["controls"][name][score] for one in results.values()]
            cells.append(f"{statistics.mean(found):.2f} ({min(found):.2f} to {max(found):.2f})")
        rows.append([name, *cells])
    put("controls", f"{table(['', *SCORES], rows)}\nMeans and ranges of {len(results)} seeds "
        f"on {first['trained']['problems']} held-out problems. {about['machine']}.\n", "seeds")


def measure_nano(case, seed):
    """Run nano.py. -> its scores, and parts of what it printed"""
    name = case.removesuffix(".py")
    printed = printed_by(ROOT, "-c", f"import {name}; {name}.main(seed={seed})")
    (before, forced), (after, _) = re.findall(
        "(?:before|after): +([0-9.]+) right, ([0-9.]+) after a forced", printed)
    return {"before": float(before), "forced": float(forced), "after": float(after),
            "printed": excerpt(printed, "held-out questions, before", 2, 2)}


PICTURE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 420 204" width="420" height="204">
<style>text {{font: 14px sans-serif; fill: {ink}}} .code {{font: 13px monospace}}
rect {{fill: {blue}}} .all {{opacity: 0.25}}
@media (prefers-color-scheme: dark) {{text {{fill: {dark}}}}}</style>
<text x="6" y="20">Question: <tspan class="code">{question}</tspan></text>
<text x="6" y="54">Before RL, {before:.0%} of the answers are right</text>
<rect class="all" x="6" y="62" width="408" height="10"/>
<rect x="6" y="62" width="{b:.0f}" height="10"/>
<text x="6" y="92" class="code">{guess} \u2717</text>
<text x="6" y="130">After RL, {after:.0%} of the answers are right</text>
<rect class="all" x="6" y="138" width="408" height="10"/>
<rect x="6" y="138" width="{a:.0f}" height="10"/>
<text x="6" y="168" class="code">{thought}</text>
<text x="6" y="190" class="code">{answer} \u2713</text>
</svg>
"""


def picture(results):
    """Draw the outputs of nano.py's first seed, and the means of all, for README.md. -> SVG"""
    first, *_ = results.values()
    (question, guess), (_, output) = re.findall(r">, (.*?=)(<.*)", first["printed"])
    thought, _, answer = output.partition("</think>")
    before, after = (statistics.mean(one[name] for one in results.values())
                     for name in ("before", "after"))
    return PICTURE.format(
        question=question, guess=html.escape(guess), thought=html.escape(f"{thought}</think>"),
        answer=html.escape(answer), before=before, after=after, b=408 * before, a=408 * after,
        ink=chart.INK, dark=chart.ON_DARK, blue=chart.BLUE)


def nano_page():
    """Write nano.py's part of docs/lab/bases.md, and docs/nano.svg."""
    results, about = load("nano-seeds", "run: make nano-seeds")
    (DOCS / "nano.svg").write_text(picture(results), "utf-8")
    seeds = results.values()
    ranges = [f"{min(x):.3f} to {max(x):.3f}" for x in (
        [one[name] for one in seeds] for name in ("before", "forced", "after"))]
    put("nano", f"With {len(seeds)} seeds, greedy accuracy is {ranges[0]} before RL, {ranges[1]} "
        f"after a forced `<think>`, and {ranges[2]} after RL. {about['machine']}.\n", "nano-seeds")


def with_seeds(name, case, measure, page, *words):
    """Run an experiment of one case with several seeds, one after the other, and write its page."""
    seeds = [int(word) for word in words or "01234"]
    about = describe(1) | {"seeds": seeds}
    store = measured(name, lambda _: [(case, seed) for seed in seeds], measure, about)
    store.move(DOCS / f"{name}.json")
    page()


# ---- 2. kernels on a GPU ---------------------------------------------------------------------

REPEATS = 5                             # measured runs, after one to warm up
LOGITS = [(8192, 32000), (8192, 50257), (8192, 128256), (8192, 151936), (65536, 512)]   # N, V


def time_logits(N, V, dtype, part):
    """Compute log-probs and entropies of logits (N, V), or their gradient, with our kernels, with
    torch, eager and compiled, and with TRL; and copy as many bytes. -> {who: list of seconds}"""
    from triton.testing import do_bench
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

    rounds = []         # in which all take turns, so a slow minute of the machine slows down all
    for _ in range(1 + REPEATS):
        # in milliseconds, with a cold cache
        rounds.append([do_bench(job, warmup=5, rep=25, return_mode="median") / 1e3
                       for job in jobs.values()])
    return dict(zip(jobs, zip(*rounds[1:])))            # the first round warms up


def kernel_table(rows):
    """Write the table of a machine: our time, and how many times as long the others take. -> str"""
    head = [*rows[0]["of"], *rows[0]["seconds"]]
    lines = []
    for row in rows:
        cells = [*row["of"].values()]
        for who, taken in row["seconds"].items():
            if who == "ours":
                cells.append(f"{1e3 * statistics.median(taken):.2f} ms")
            else:
                ratios = [their / our for our, their in zip(row["seconds"]["ours"], taken)]
                low, gain, high = statistics.quantiles(ratios, n=4)
                digits = 1 if gain > 1.3 else 2         # near 1, hundredths matter
                cells.append(f"{gain:.{digits}f}x")
                if high - low > gain / 10:
                    cells[-1] += f" ({low:.{digits}f} - {high:.{digits}f})"
        lines.append(cells)
    return table(head, lines)


def kernels():
    """Measure the kernels, and store the numbers after each row, in case later ones time out."""
    if NAME == "cpu":
        common.fail("make bench: needs a GPU")
    rows = []
    for (N, V), dtype, part in product(LOGITS, ("bfloat16", "float32"), ("forward", "backward")):
        rows.append({"of": {"logits": f"{N} x {V} {dtype}", "pass": part},
                     "seconds": time_logits(N, V, dtype, part)})
        print(kernel_table(rows[-1:]), flush=True)
        record(f"bench-{SLUG}", machine=ON_DEVICE, logits=rows)
    put("logits", tables("bench"), "bench")


# ---- 3. a step on a real model ---------------------------------------------------------------

OURS_IN_TRL = "TRL with grpo.policy_loss"
TRAINERS = ["real.py", "TRL", OURS_IN_TRL] if find_spec("trl") else ["real.py"]
# Sizes of a Qwen3: on a GPU those of Qwen3-0.6B, on a CPU ten million parameters
NAMES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "head_dim", "intermediate_size", "vocab_size")
SIZES = (256, 8, 8, 4, 32, 1024, 4096) if NAME == "cpu" else (1024, 28, 16, 8, 128, 3072, 151936)
PROMPT, OUTPUT = (32, 16) if NAME == "cpu" else (128, 256)      # tokens
OUTPUTS = ["16", "16"] if NAME == "cpu" else ["64", "64", "256", "256"]     # in a step, in turns


def write_model(folder):
    """Write a random model with a tokenizer of bytes, and prompts of nearly PROMPT tokens."""
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    from engines import export  # first, because it makes way for packages of the environment
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


def one_step(trainer, folder, outputs):
    """Let a trainer do three steps, and print as the last line the seconds, tokens and gap of the
    last one, and the peak memory in GiB."""
    import engines.import_path  # noqa: F401  (before transformers)
    outputs, data, updates = int(outputs), f"{folder}/data.jsonl", []

    def count(*_):
        if NAME != "cpu":
            torch.cuda.synchronize()
        updates.append(time.perf_counter())
    register_optimizer_step_post_hook(count)
    os.chdir(folder)
    gap = None
    if trainer == "real.py":
        import real
        vars(real).update(P=outputs // 8, G=8, W=PROMPT, T=OUTPUT, HELD_OUT=8)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            real.main(folder, data, steps=3)
        gap, length = re.findall("gap (.+)\nstep .* tokens (.+)", printed.getvalue())[-1]
    else:
        import datasets
        import trl
        flags = trl.GRPOConfig(
            "run", per_device_train_batch_size=min(outputs, 16), num_generations=8, beta=0.0,
            gradient_accumulation_steps=max(1, outputs // 16), max_completion_length=OUTPUT,
            max_steps=3, logging_steps=1, report_to=[], bf16=NAME != "cpu",
            **({"loss_type": "grpo"} if trainer == "TRL" else {}))
        kind = trl.GRPOTrainer
        if trainer == OURS_IN_TRL:
            from engines.trl import Trainer
            kind = functools.partial(Trainer, loss="grpo:policy_loss")
        job = kind(folder, runpy.run_path("odd.py")["odd"], flags,
                   datasets.load_dataset("json", data_files=data, split="train"))
        job.train()
        length = [line["completions/mean_length"] for line in job.state.log_history[:-1]][-1]
    seconds = updates[-1] - updates[-1 - len(updates) // 3]
    peak = torch.cuda.max_memory_allocated() / 2**30 if NAME != "cpu" else 0.0
    print(json.dumps([seconds, outputs * float(length), gap and float(gap), peak]))


def steps(*all_outputs):
    """Time a step of each trainer, in turns, each time in a process of its own. all_outputs: the
    outputs of a step, 8 to a prompt, for each turn"""
    rows = []
    for outputs, trainer in product(all_outputs or OUTPUTS, TRAINERS):
        with tempfile.TemporaryDirectory() as folder:
            write_model(folder)
            printed = printed_by(ROOT, "-m", "lab.measure", "one-step", trainer, folder, outputs)
        seconds, tokens, gap, peak = json.loads(printed.splitlines()[-1])
        rows.append([trainer, outputs, f"{seconds:.2f}", f"{tokens / seconds:,.0f}",
                     f"{peak:.1f}" if peak else "", "" if gap is None else f"{gap:.0e}"])
        print(*rows[-1], flush=True)
        record(f"step-{SLUG}", machine=ON_DEVICE, rows=rows)                # if later ones fail
    put("step", tables("step"), "gpu")


def step_table(rows):
    """Write the table of a device. -> str"""
    return table(["trainer", "outputs", "seconds a step", "tokens/s", "peak memory, GiB",
                  "gap, nats"], rows)


# ---- 4. the tables of docs/speed.md ----------------------------------------------------------

SCORE = re.compile(r"(?:greedy|pass@1|pairs/loss) [\d.]+|\d+ passed.*|[\d.]+ right")


def report_table(rows):
    """Write the report of make gpu. rows: command, result, seconds and last line of each -> str"""
    lines = [[*cells, ", ".join(SCORE.findall(last))] for *cells, last in rows]
    return table(["command", "result", "seconds", "scores"], lines)


def is_shown(row):
    """Whether the page shows a row of the kernels: the smallest, the largest and our vocabulary."""
    return re.search(" x (512|32000|151936) ", row["of"]["logits"])


def tables(name):
    """Write the tables of all devices, from docs/NAME-DEVICE.json. -> str"""
    write = {"bench": kernel_table, "step": step_table, "gpu": report_table}[name]
    stored = [json.loads(path.read_text("utf-8")) for path in sorted(DOCS.glob(f"{name}-*.json"))]
    return "\n".join(f"{one['machine']}, commit {one['commit'] or 'unknown'}:\n\n"
                     f"{write(one.get('rows') or [*filter(is_shown, one['logits'])])}"
                     for one in stored)


JOBS = {"seeds": functools.partial(with_seeds, "seeds", "grpo.py", measure_main, main_page),
        "nano": functools.partial(with_seeds, "nano-seeds", "nano.py", measure_nano, nano_page),
        "kernels": kernels, "step": steps, "one-step": one_step}


def main(argv=None):
    flags = parser(__doc__)
    flags.add_argument("what", choices=JOBS)
    flags.add_argument("words", nargs="*", help="seeds, or numbers of outputs")
    args = flags.parse_args(argv)
    JOBS[args.what](*args.words)


if __name__ == "__main__":
    start(main)
