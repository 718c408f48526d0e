"""The first thing to do on a machine with a GPU: python -m lab.gpu (make gpu).

Does all of this run here, is it right, and how fast is it? First comes `python grpo.py --task
arithmetic`, just as anybody would start it: after a minute at most a line says whether it runs.
Then all else, until ten minutes are over. Each command is a process with a time limit, so that one
that fails, crashes or hangs stops no other. Ctrl-C skips one, twice at once all. What is printed is
what to paste into an issue. Writes the report, docs/gpu-DEVICE.md, after each command, and by the
bench docs/bench-DEVICE.json; logs are in runs/gpu, emptied first. Exits with 1 if something fails.

With --dry_run all is tiny, and on a make-believe GPU (tests/pretend.py). That shows that the
commands are right; the base is too bad to learn from, so most updates are empty.
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
MODEL = ("--model runs/gpu/model --task arithmetic:2 --dtype bfloat16 --max_steps 2 "
         "--num_prompts 4 --max_completion_length 16 --num_eval_problems 8 --num_eval_samples 1")


def commands(dry_run):
    """What is run: a name, the seconds it may take, and words behind `python -m`. Yields tuples"""
    python = "tests.pretend " if dry_run else ""
    size = f" {TINY}" if dry_run else ""
    yield "main-job", 100, f"{python}grpo --task arithmetic --output_dir runs/gpu/main{size}"
    for script in SCRIPTS:
        module = script.removesuffix(".py")
        for kernel in ("triton", "torch"):
            run = f"--kernel {kernel} --output_dir runs/gpu/{module}-{kernel}"
            yield f"{module}-{kernel}", 30, f"{python}{module} {SHORT} {run}{size}"
    if not dry_run:                                     # whose tensors torch.func does not know
        optimal = "--baseline optimal --output_dir runs/gpu/optimal"
        yield "reinforce-optimal", 30, f"reinforce {SHORT} {optimal}"
        yield "nano", 60, "nano"                        # which has no flags to be small by
    resumed = f"--kernel triton --output_dir runs/gpu/resumed{size} --max_steps 1"
    yield "one-step", 30, f"{python}grpo {SHORT} {resumed}"
    yield "resumed", 30, f"{python}grpo --resume_from_checkpoint runs/gpu/resumed --max_steps 2"
    collect = " --collect-only" if dry_run else ""
    yield "tests", 90, f"pytest -rs tests/test_kernels.py tests/test_decode.py -n 4{collect}"
    yield "countdown", 120, f"{python}grpo --task countdown --output_dir runs/gpu/countdown{size}"
    if find_spec("transformers"):
        yield "export", 20, "pretrained.export runs/gpu/grpo-triton runs/gpu/model"
        yield "pretrained", 40, f"{python}pretrained.train {MODEL} --output_dir runs/gpu/real"
        fsdp = f"{MODEL} --output_dir runs/gpu/fsdp --parallel fsdp"
        device = " --device cpu" if dry_run else ""     # several processes share no make-believe
        yield "fsdp", 40, f"torch.distributed.run pretrained/train.py {fsdp}{device}"
    if find_spec("vllm") and not dry_run:
        wide = "--num_attention_heads 2 --output_dir runs/gpu/wide"     # as vLLM has kernels for
        yield "wide", 30, f"grpo {SHORT} {wide}"
        yield "wide-export", 20, "pretrained.export runs/gpu/wide runs/gpu/wide-model"
        job = MODEL.replace("gpu/model", "gpu/wide-model") + " --lora_rank 8 --engine vllm"
        yield "vllm", 120, f"pretrained.train {job} --output_dir runs/gpu/vllm"
    for rows, limit in (("logits", 120), ("rollout", 40), ("step", 60)) if not dry_run else ():
        yield f"bench-{rows}", limit, f"lab.speed --rows {rows}"


def run(command, limit, log, env):
    """Run a command for `limit` seconds at most, its output into `log`. -> "ok", or why not"""
    log.write_text("")
    if limit < 1:
        return "not run: the time is over"
    end = time.perf_counter() + limit
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command.split()], cwd=ROOT, env=env, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while (left := end - time.perf_counter()) > 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(min(left, 50))
                    return "ok" if code == 0 else f"ended with {code}"
                print(f"...\n  {summary('', read(log)):.70}\n{'':17}", end="", flush=True)
            os.killpg(process.pid, signal.SIGABRT)      # the tracebacks show where it hangs
            time.sleep(1)
            return f"no end after {limit:.0f} s"
        except KeyboardInterrupt:
            return "interrupted"
        finally:
            with contextlib.suppress(ProcessLookupError):       # all that it started is gone
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):        # the driver may not let go
                process.wait(10)


def differences(module):
    """In which metrics the first steps by Triton and by torch differ by more than a token or two
    make; none if there are not both. Yields str"""
    logs = [read_log(FOLDER / f"{module}-{kernel}", "metrics") for kernel in ("triton", "torch")]
    for one, other in [*zip(*logs)][:1]:
        for name in ("loss", "reward", "entropy", "completions/mean_length", "grad_norm"):
            if name in one and abs(one[name] - other[name]) > 0.01 + 0.03 * abs(other[name]):
                yield f"{module}: {name} {one[name]:.4f} by Triton, {other[name]:.4f} by torch"


def resumed_otherwise():
    """How far the weights of the run that was resumed are from those of the run that was not, if
    they are not equal to the bit. Yields str"""
    paths = [FOLDER / name / "checkpoint.pt" for name in ("grpo-triton", "resumed")]
    one, other = (torch.load(path, "cpu", weights_only=True)["policy"] for path in paths)
    differences = [(one[name] - other[name]).abs().max().item() for name in one]
    if max(differences) > 0:
        number = sum(difference > 0 for difference in differences)
        yield f"resumed: {number} of {len(one)} weights differ, by up to {max(differences):.1e}"


def read(log):
    """The lines of a log that are not empty. -> list"""
    return [line for line in log.read_text(errors="replace").splitlines() if line.strip()]


def abort(lines):
    """The number of the line at which SIGABRT began to show where a command hung. -> int"""
    found = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error")]
    return found[0] if found else len(lines)


def summary(outcome, lines):
    """What a log says last: scores if all is well, else the error; or else the last line. -> str"""
    lines = lines[:abort(lines)]
    pattern = "^held out" if outcome == "ok" else r"^error: |Error\b"
    found = [line for line in lines if re.search(pattern, line)]
    return (found or lines or [""])[-1].strip()[:160]


def report(results, wrong):
    """The report in Markdown. results: name -> (outcome, seconds, lines of the log). -> str"""
    text = f"# What make gpu found\n\n{MACHINE}, CUDA {torch.version.cuda}.\n\n"
    rows = [[name, outcome, f"{seconds:.0f}", summary(outcome, lines).replace("|", "\\|")]
            for name, (outcome, seconds, lines) in results.items()]
    text += table(["command", "result", "seconds", "what it says last"], rows)
    text += "".join(f"\n{line}\n" for line in wrong)
    for name, (outcome, _, lines) in results.items():
        if outcome != "ok":
            last = abort(lines)
            log = "\n".join(line[:200] for line in lines[max(0, last - 30):last + 40])
            text += f"\n## {name}: {outcome}\n\n```\n{log}\n```\n"
    return text + "\nWhat we want to see in the tables of the bench: [speed.md](speed.md).\n"


def main(argv=None):
    words = parser(__doc__)
    words.add_argument("--dry_run", action="store_true", help="tiny, on a make-believe GPU")
    dry_run = words.parse_args(argv).dry_run
    if not dry_run and NAME == "cpu":
        common.fail(f"torch {torch.__version__} sees no GPU. Does nvidia-smi? Is this torch for "
                    f"CUDA (it says {torch.version.cuda})? Without a GPU: make gpu DRY=1")
    env = os.environ | {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    gpus = env.get("CUDA_VISIBLE_DEVICES", "0")
    env["CUDA_VISIBLE_DEVICES"] = gpus.partition(",")[0]        # TRL's trainer refuses several
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = (FOLDER if dry_run else DOCS) / f"gpu-{SLUG}.md"
    print(f"{MACHINE}, CUDA {torch.version.cuda}")
    if not find_spec("transformers"):
        print("pretrained/train.py is left out: it needs transformers")
    results = {}
    end = time.perf_counter() + SECONDS
    for name, limit, command in commands(dry_run):
        print(f"{name:17}", end="", flush=True)
        log = FOLDER / f"{name}.log"
        clock = time.perf_counter()
        outcome = run(command, min(limit, end - clock), log, env)
        seconds = time.perf_counter() - clock
        lines = read(log)
        results[name] = (outcome, seconds, lines)
        print(f"{outcome}, {seconds:.0f} s: {summary(outcome, lines)}"[:84], flush=True)
        wrong = [line for script in SCRIPTS for line in differences(script.removesuffix(".py"))]
        pair = [results.get(name, [""])[0] for name in ("grpo-triton", "one-step", "resumed")]
        wrong += resumed_otherwise() if pair == ["ok"] * 3 else []
        path.write_text(report(results, wrong))
        if outcome == "interrupted" and seconds < 1:
            break
    print("\n".join([*wrong, f"The report: {path}. The logs: {FOLDER}"]))
    if wrong or any(outcome != "ok" for outcome, *_ in results.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    start(main)
