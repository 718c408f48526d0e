"""Check for the first time that the project works on a machine with a GPU: python -m lab.gpu
(make gpu).

Runs a list of commands, each as a process with a time limit. So a command that fails, crashes or
hangs doesn't stop the others, and all of them end within ten minutes. The report,
docs/gpu-DEVICE.md, is written again after each command; the logs go to runs/gpu, which is emptied
first. The exit code is 1 if a command fails. --dry_run checks the commands themselves, without a
GPU: it runs them in a tiny size on a simulated one (tests/pretend.py).
"""
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

FOLDER = ROOT / "runs" / "gpu"
SECONDS = 540                   # time limit of all commands together
LIMIT = 120                     # seconds for one command; the bench, which is last, gets the rest
# Flags that make a base in seconds, which is right now and then, and train it for two steps
SHORT = ("--task arithmetic:2 --textbook_share 0 --base_steps 300 --base_batch_size 16 "
         "--max_steps 2 --num_eval_problems 64 --num_eval_samples 2")
TINY = ("--hidden_size 16 --num_hidden_layers 1 --intermediate_size 16 --num_prompts 4 "
        "--max_completion_length 8 --base_steps 4 --max_steps 2 --num_eval_problems 4")
REAL = ("--model runs/gpu/model --task arithmetic:2 --dtype bfloat16 --max_steps 2 --num_prompts 4 "
        "--max_completion_length 16 --num_eval_problems 8 --num_eval_samples 1")


def commands(dry_run):
    """List the commands. -> {name: the arguments of `python -m`}"""
    python, size, collect, cpu = "", "", "", ""
    if dry_run:                 # several processes cannot share the simulated GPU: pytest, torchrun
        python, size, collect, cpu = "tests.pretend", TINY, "--collect-only", "--device cpu"
    args = {"main": f"{python} grpo --task arithmetic {size}"}
    for module in [script.removesuffix(".py") for script in SCRIPTS]:
        for kernel in ("triton", "torch"):
            args[f"{module}-{kernel}"] = f"{python} {module} {SHORT} --kernel {kernel} {size}"
    args |= {
        "one-step": f"{python} grpo {SHORT} --kernel triton {size} --max_steps 1",
        "resumed": f"{python} grpo --resume_from_checkpoint runs/gpu/one-step --max_steps 2",
        "tests": f"pytest -rs tests/test_kernels.py tests/test_decode.py -n 4 {collect}",
        "countdown": f"{python} grpo --task countdown {size}"}
    if find_spec("transformers"):
        args |= {
            "export": "pretrained.export runs/gpu/grpo-triton runs/gpu/model",
            "real": f"pretrained.train {REAL}",
            "torchrun": f"torch.distributed.run pretrained/train.py {REAL} {cpu}"}
    if find_spec("vllm") and not dry_run:       # vLLM's kernels need wide heads
        args |= {
            "wide": f"grpo {SHORT} --num_attention_heads 2",
            "wide-export": "pretrained.export runs/gpu/wide runs/gpu/wide-model",
            "vllm": f"pretrained.train {REAL} --model runs/gpu/wide-model --lora_rank 8 "
                    "--engine vllm"}
    if not dry_run:             # torch.func cannot handle the tensors of the simulated GPU
        args |= {"optimal": f"reinforce {SHORT} --baseline optimal", "nano": "nano",
                 "bench": "lab.speed"}
    return {name: f"{line} --output_dir runs/gpu/{name}" if "--task" in line else line
            for name, line in args.items()}


def run(command, limit, log):
    """Run a command for at most `limit` seconds, and write its output to `log`.
    -> "ok", or how it failed"""
    env = {"CUDA_VISIBLE_DEVICES": "0"} | os.environ | {"PYTHONFAULTHANDLER": "1"}
    with open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command.split()], cwd=ROOT, env=env, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        code = process.wait(limit)
        return "ok" if code == 0 else f"ended with {code}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)          # the tracebacks show where it hangs
        process.wait()
        return f"stopped after {limit:.0f} s"


def compare(whole, resumed):
    """Compare the weights of a run with those of a resumed run. -> "ok", or the difference"""
    one, other = (torch.load(run / "checkpoint.pt", "cpu", weights_only=True)["policy"]
                  for run in (whole, resumed))
    is_same = all(torch.equal(one[name], other[name]) for name in one)
    return "ok" if is_same else f"its weights differ from those of {whole.name}"


def main(argv=None):
    flags = parser(__doc__)
    flags.add_argument("--dry_run", action="store_true",
                       help="run tiny commands on a simulated GPU")
    dry_run = flags.parse_args(argv).dry_run
    if not dry_run and NAME == "cpu":
        common.fail(f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, finds no GPU."
                    " Check whether nvidia-smi lists one. Without a GPU, run: make gpu DRY=1")
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    path = (FOLDER if dry_run else DOCS) / f"gpu-{SLUG}.md"
    rows = []
    ends = ""                   # the ends of the logs of commands that fail
    end = time.perf_counter() + SECONDS
    for name, command in commands(dry_run).items():
        began = time.perf_counter()
        log = FOLDER / f"{name}.log"
        limit = end - began if name == "bench" else min(LIMIT, end - began)
        outcome = run(command, max(0, limit), log)
        if (name, outcome) == ("resumed", "ok"):
            outcome = compare(FOLDER / "grpo-triton", FOLDER / "one-step")
        text = log.read_text("utf-8", "replace").strip()
        *_, last = re.findall("^held out.*", text, re.MULTILINE) or text.split("\n")
        if outcome != "ok":
            last = text.split("\n")[-1]
            ends += f"\n## {name}: {outcome}\n\n```\n{text[-6000:]}\n```\n"
        seconds = f"{time.perf_counter() - began:.0f}"
        rows.append([name, outcome, seconds, last[:160].replace("|", "\\|")])
        print(f"{name:17}{outcome}: {last}"[:84], flush=True)
        results = table(["command", "result", "seconds", "last line of output"], rows)
        path.write_text(f"# Report of make gpu\n\n{MACHINE}, CUDA {torch.version.cuda}.\n\n"
                        f"{results}{ends}\n[speed.md](speed.md) lists the goals for the bench.\n",
                        "utf-8")
    print(f"The report is in {path}, the logs are in {FOLDER}")
    if ends:
        raise SystemExit(1)


if __name__ == "__main__":
    start(main)
