"""Check a machine with a GPU for the first time: python -m lab.gpu (make gpu).

It runs the main job, each script with Triton and with torch, a resumed run, the tests of the
kernels, pretrained/train.py if its packages are installed, and the bench. Each command is a process
with a time limit, so one that fails, crashes or hangs stops no other, and all of them end within
ten minutes. The report, docs/gpu-DEVICE.md, is written again after each command; logs are in
runs/gpu, which is emptied first. The exit code is 1 if something fails.

--dry_run runs tiny commands on a simulated GPU (tests/pretend.py), which shows that the commands
are correct. Its base is too bad to learn from, so most of its updates are empty.
"""
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import torch

import common
from lab.docs import DOCS, ROOT, table
from lab.speed import MACHINE, NAME, SLUG
from learn.sync import SCRIPTS
from report import parser, start
from report.logs import read_log

FOLDER = ROOT / "runs" / "gpu"
SECONDS = 540                   # of all commands
# A base that is right now and then, made in seconds, and two steps from it.
SHORT = ("--task arithmetic:2 --textbook_share 0 --base_steps 300 --base_batch_size 16 "
         "--max_steps 2 --stop_at 2 --num_eval_problems 64 --num_eval_samples 2")
TINY = ("--hidden_size 16 --num_hidden_layers 1 --intermediate_size 16 --num_prompts 4 "
        "--max_completion_length 8 --base_steps 4 --max_steps 2 --num_eval_problems 4")
MODEL = ("--task arithmetic:2 --dtype bfloat16 --max_steps 2 --num_prompts 4 "
         "--max_completion_length 16 --num_eval_problems 8 --num_eval_samples 1")


def commands(dry_run):
    """What is run. -> {name: (the seconds it may take, the words after `python -m`)}"""
    python, size, collect = "", "", ""
    if dry_run:
        python, size, collect = "tests.pretend ", f" {TINY}", " --collect-only"
    found = {"main": (100, f"{python}grpo --task arithmetic --output_dir runs/gpu/main{size}")}
    for module in [script.removesuffix(".py") for script in SCRIPTS]:
        for kernel in ("triton", "torch"):
            name = f"{module}-{kernel}"
            flags = f"{SHORT} --kernel {kernel} --output_dir runs/gpu/{name}{size}"
            found[name] = 30, f"{python}{module} {flags}"
    resumed = f"--kernel triton --output_dir runs/gpu/resumed{size} --max_steps 1"
    found |= {
        "one-step": (30, f"{python}grpo {SHORT} {resumed}"),
        "resumed": (30, f"{python}grpo --resume_from_checkpoint runs/gpu/resumed --max_steps 2"),
        "tests": (90, f"pytest -rs tests/test_kernels.py tests/test_decode.py -n 4{collect}"),
        "countdown": (120, f"{python}grpo --task countdown --output_dir runs/gpu/countdown{size}")}
    if find_spec("transformers"):
        real = f"--model runs/gpu/model {MODEL} --output_dir runs/gpu"
        device = " --device cpu" if dry_run else ""     # processes cannot share a simulated GPU
        found |= {
            "export": (20, "pretrained.export runs/gpu/grpo-triton runs/gpu/model"),
            "real": (40, f"{python}pretrained.train {real}/real"),
            "fsdp": (40, "torch.distributed.run pretrained/train.py "
                         f"{real}/fsdp --parallel fsdp{device}")}
    if dry_run:
        return found
    if find_spec("vllm"):                               # which has kernels for wide heads alone
        wide = f"--model runs/gpu/wide-model {MODEL} --lora_rank 8 --engine vllm"
        found |= {
            "wide": (30, f"grpo {SHORT} --num_attention_heads 2 --output_dir runs/gpu/wide"),
            "wide-export": (20, "pretrained.export runs/gpu/wide runs/gpu/wide-model"),
            "vllm": (120, f"pretrained.train {wide} --output_dir runs/gpu/vllm")}
    # torch.func does not know the tensors of the simulated GPU, and nano.py has no flags for a size
    optimal = f"reinforce {SHORT} --baseline optimal --output_dir runs/gpu/optimal"
    return found | {"optimal": (30, optimal), "nano": (60, "nano"), "bench": (220, "lab.speed")}


def run(command, limit, log, env):
    """Run a command for `limit` seconds at most, and keep its output. -> "ok", or what failed"""
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command.split()], cwd=ROOT, env=env, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        code = process.wait(limit)
        return "ok" if code == 0 else f"ended with {code}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)          # the tracebacks show where it hangs
        time.sleep(1)
        return f"no end after {limit:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):   # the processes that it started end, too
            os.killpg(process.pid, signal.SIGKILL)


def compare(whole, resumed):
    """The largest difference between the weights of two runs. -> str"""
    one, other = (torch.load(run / "checkpoint.pt", "cpu", weights_only=True)["policy"]
                  for run in (whole, resumed))
    largest = max((one[name] - other[name]).abs().max().item() for name in one)
    return f"weights differ by up to {largest:.1e} from those of {whole.name}" if largest else "ok"


def compare_kernels(triton, torch):
    """Name the metrics of the first step that differ by more than a token or two make. -> str"""
    one, other = (read_log(run, "metrics")[0] for run in (triton, torch))
    names = [name for name in ("loss", "reward", "entropy", "completions/mean_length", "grad_norm")
             if name in one and abs(one[name] - other[name]) > 0.01 + 0.03 * abs(other[name])]
    return f"differs from {triton.name} in {', '.join(names)}" if names else "ok"


def summary(log):
    """The line of a log that says most: the error, the scores, or the last line. -> str"""
    text = log.read_text(errors="replace").partition("Fatal Python error")[0].strip()
    for pattern in (r"^error: |Error\b", "^held out", ""):
        found = [line for line in text.splitlines() if re.search(pattern, line)]
        if found:
            return found[-1].strip()[:160]
    return ""


def report(results):
    """The report in Markdown. results: name -> (outcome, seconds, log). -> str"""
    rows = [[name, outcome, f"{seconds:.0f}", summary(log).replace("|", "\\|")]
            for name, (outcome, seconds, log) in results.items()]
    text = f"# What make gpu found\n\n{MACHINE}, CUDA {torch.version.cuda}.\n\n"
    text += table(["command", "result", "seconds", "last words"], rows)
    for name, (outcome, _, log) in results.items():
        if outcome != "ok":
            end = log.read_text(errors="replace")[-6000:]
            text += f"\n## {name}: {outcome}\n\n```\n{end}\n```\n"
    return text + "\nThe goals for the tables of the bench: [speed.md](speed.md).\n"


def main(argv=None):
    words = parser(__doc__)
    words.add_argument("--dry_run", action="store_true", help="tiny runs on a simulated GPU")
    dry_run = words.parse_args(argv).dry_run
    if not dry_run and NAME == "cpu":
        common.fail(f"torch {torch.__version__}, for CUDA {torch.version.cuda}, finds no GPU. Does "
                    "nvidia-smi show one? Without a GPU, run: make gpu DRY=1")
    env = {"CUDA_VISIBLE_DEVICES": "0"} | os.environ | {"PYTHONFAULTHANDLER": "1"}
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    path = (FOLDER if dry_run else DOCS) / f"gpu-{SLUG}.md"
    results = {}
    end = time.perf_counter() + SECONDS
    for name, (limit, command) in commands(dry_run).items():
        began = time.perf_counter()
        log = FOLDER / f"{name}.log"
        outcome = run(command, max(0, min(limit, end - began)), log, env)
        if (name, outcome) == ("resumed", "ok"):
            outcome = compare(FOLDER / "grpo-triton", FOLDER / "resumed")
        script, _, kernel = name.rpartition("-")
        if (kernel, outcome) == ("torch", "ok") and results[f"{script}-triton"][0] == "ok":
            outcome = compare_kernels(FOLDER / f"{script}-triton", FOLDER / name)
        results[name] = outcome, time.perf_counter() - began, log
        print(f"{name:17}{outcome}: {summary(log)}"[:84], flush=True)
        path.write_text(report(results))
    print(f"The report: {path}. The logs: {FOLDER}")
    if any(outcome != "ok" for outcome, *_ in results.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    start(main)
