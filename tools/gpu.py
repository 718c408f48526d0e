"""The first thing to do on a machine with a GPU: python -m tools.gpu [PART ...] (make gpu).

Does all of this run here, is it right, and how fast is it? Each part is a process of its own. One
that fails, crashes or hangs is named in the report, and the others run all the same. Ctrl-C skips
a part; a second one within a second skips all that are left. The parts take --minutes in all: each
has a share, and what those before it have left.

Writes docs/gpu-DEVICE.md, the report, and docs/bench-DEVICE.json; logs are in runs/gpu, which is
emptied first. If only some PARTs run, or with --dry_run, both files are written to runs/gpu
instead. A dry run goes the same way on a CPU, with everything tiny: it shows that this program
works, and no more. Exits with 1 if a part failed.
"""
import argparse
import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

import torch

import common
from kernels import bench
from tools.runs import DOCS, ROOT, table


class Part(NamedTuple):
    name: str           # of its log, too
    title: str
    share: float        # seconds, when all parts together take ten minutes
    command: list       # `--until TIME` is added


class Result(NamedTuple):
    part: Part
    outcome: str        # "ok", or what happened
    said: str           # what the part has found, or its last line
    seconds: float
    lines: list         # those of its log that explain why it failed


PARTS = {                           # name: title, share
    "sees": ("torch sees the GPU", 30),
    "kernel": ("Triton compiles here, and computes what torch does", 25),
    "tests": ("the tests that do more with a GPU", 100),
    "decode": ("the captured decode samples what the plain one does", 25),
    "scripts": ("three steps of each script, by Triton and by torch", 60),
    "arithmetic": ("grpo.py learns arithmetic", 60),
    "countdown": ("grpo.py learns countdown", 60),
    "pretrained": ("examples/pretrained.py: 0.3 billion parameters, bfloat16, FSDP", 60),
    "logits": ("bench: log-probs from logits", 80),
    "linear": ("bench: log-probs from hidden states", 30),
    "rollout": ("bench: rollouts", 30),
    "step": ("bench: steps of GRPO", 40)}
FOLDER = ROOT / "runs" / "gpu"
NUM_LINES = 20                      # of a log, in the report


# ---- 1. run the parts ------------------------------------------------------------------------

def environment():
    """The variables that a part has. -> dict"""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    return os.environ | {
        "CUDA_VISIBLE_DEVICES": gpus.partition(",")[0],     # TRL's trainer refuses several
        "PYTHONFAULTHANDLER": "1",      # Python's traceback is in the log, whatever the signal
        "PYTHONUNBUFFERED": "1"}        # and what was printed before a crash, too


def run_part(part, log, limit):
    """Run a part for at most `limit` seconds; its output goes to the file `log`. -> Result"""
    start = time.perf_counter()
    command = [*part.command, "--until", str(time.time() + limit)]
    with open(log, "w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(max(0, limit))
            outcome = ending(code)
        except subprocess.TimeoutExpired:
            outcome = f"stopped after {limit:.0f} s"
            process.send_signal(signal.SIGABRT)         # the traceback shows where it hangs
            time.sleep(1)
        except KeyboardInterrupt:
            outcome = "interrupted"
        finally:
            kill(process)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    seconds = time.perf_counter() - start
    return Result(part, outcome, finding(lines, outcome), seconds, explanation(lines))


def ending(code):
    """What the exit code of a process means. -> str"""
    if code == 0:
        return "ok"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"failed with exit code {code}"


def kill(process):
    """Kill a process and all that it has started. One that waits inside the driver cannot be
    killed, and is left behind."""
    with contextlib.suppress(ProcessLookupError):       # which says that all of them are gone
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)


def explanation(lines):
    """Of the lines of a log, the last ones; of a crash, those where its traceback begins, which is
    with the innermost call. -> list"""
    for number, line in enumerate(lines):
        if line.startswith("Fatal Python error"):
            return lines[max(0, number - 5):][:NUM_LINES]
    return lines[-NUM_LINES:]


def finding(lines, outcome):
    """What to say of a part in one line: what it has found, else where it crashed, else its last
    line. -> str"""
    crash = [line.strip() for line in explanation(lines) if line.startswith("  File ")]
    results = [line for line in lines if line.startswith("result: ")]
    if outcome == "ok" and results:
        return results[-1].removeprefix("result: ")
    if "Fatal Python error" in "\n".join(lines) and crash:
        return crash[0]
    return lines[-1][:200] if lines else ""


def run_all(parts, folder, minutes):
    """Run one part after the other, and print how each ends. Together they may take so many
    minutes. -> list of Result"""
    results = []
    deadline = time.perf_counter()
    stretch = 60 * minutes / sum(part.share for part in parts)
    try:
        for number, part in enumerate(parts, 1):
            print(f"{number}/{len(parts)} {part.title} ... ", end="", flush=True)
            deadline += part.share * stretch
            limit = deadline - time.perf_counter()
            result = run_part(part, folder / f"{part.name}.log", limit)
            results.append(result)
            print(f"{result.outcome} ({result.seconds:.0f} s)\n    {result.said}", flush=True)
            if result.outcome == "interrupted":
                time.sleep(1)                           # for the second Ctrl-C
    except KeyboardInterrupt:
        print("the others are skipped", flush=True)
    for part in parts[len(results):]:
        results.append(Result(part, "skipped", "", 0.0, []))
    return results


# ---- 2. what was to be reached ---------------------------------------------------------------

class Goal(NamedTuple):
    what: str
    bound: float
    form: str           # of numbers
    numbers: Any        # record -> list of numbers; empty where it was not measured
    at_most: bool = False


def rows_of(record, who, sizes):
    """The rows of `who` for bf16 logits of vocabularies V in `sizes`: {(N, V): row}"""
    found = {}
    for row in record["logits"]:
        is_asked_for = row["who"] == who and row["dtype"] == "bfloat16" and row["V"] in sizes
        if is_asked_for and "failed" not in row:
            found[row["N"], row["V"]] = row
    return found


def of_copy(part, *sizes):
    """What shares of a copy's speed ours have. -> function(record), which gives a list"""
    def numbers(record):
        rows = rows_of(record, "ours", sizes)
        return [row[f"{part}_share_of_copy"] for row in rows.values()]
    return numbers


LARGE = (32000, 50257, 128256, 151936)


def gains(part, who):
    """Their times over ours. -> function(record), which gives a list"""
    def numbers(record):
        ours = rows_of(record, "ours", LARGE)
        theirs = rows_of(record, who, LARGE)
        return [theirs[shape][part] / ours[shape][part] for shape in theirs if shape in ours]
    return numbers


def per_row(name, divide_by_N):
    """What our rows of logits say under a name, by N or as it is. -> function(record), which gives
    a list"""
    def numbers(record):
        rows = [row for row in rows_of(record, "ours", LARGE).values()
                if row.get(name) is not None]
        return [row[name] / (row["N"] if divide_by_N else 1) for row in rows]
    return numbers


def of_linear(name):
    """What our rows of hidden states, D = 4096, say under a name. -> function(record), which gives
    a list"""
    def numbers(record):
        return [row[name] for row in record["linear"]
                if row["who"] == "ours" and row["D"] == 4096 and row.get(name) is not None]
    return numbers


def of_rollouts(number):
    """number(row) of our rollouts of the larger policy, with completions of one length.
    -> function(record), which gives a list"""
    def numbers(record):
        rows = [row for row in record["rollout"]
                if row["size"] == "0.81M" and row["kind"] == "fixed"]
        return [number(row) for row in rows if number(row) is not None]
    return numbers


def tokens_per_second(row):
    return row["tokens"] / row["median"]["ours"]


def rollout_gain(row):
    return row["gain"]["median"] if "gain" in row else None


GOALS = (
    Goal("logps and entropy forward, of a copy", 0.92, ".0%",
         of_copy("forward", 32000, 128256, 151936)),
    Goal("their gradient, of a copy", 0.92, ".0%", of_copy("backward", 32000, 128256, 151936)),
    Goal("forward, V = 50257, which no vector divides", 0.80, ".0%", of_copy("forward", 50257)),
    Goal("backward, V = 50257", 0.80, ".0%", of_copy("backward", 50257)),
    Goal("forward, V = 512", 0.75, ".0%", of_copy("forward", 512)),
    Goal("backward, V = 512", 0.75, ".0%", of_copy("backward", 512)),
    Goal("forward against TRL", 1.4, ".2f", gains("forward", "TRL")),
    Goal("backward against TRL", 1.05, ".2f", gains("backward", "TRL")),
    Goal("forward against torch", 12, ".1f", gains("forward", "torch")),
    Goal("forward against torch.compile", 1.3, ".2f", gains("forward", "torch.compile")),
    Goal("error of logps and entropy", 3e-6, ".0e", per_row("error", False), at_most=True),
    # logp, ratio and entropy, and what backward needs: m and S, each in fp32
    Goal("forward, extra bytes a token", 20, ".0f", per_row("forward_bytes", True), at_most=True),
    Goal("backward in place, extra bytes a token", 0, ".0f",
         per_row("backward_bytes_in_place", True), at_most=True),
    Goal("linear, D = 4096: of what three matmuls take", 0.667, ".0%",
         of_linear("share_of_limit")),
    Goal("linear, D = 4096: bytes", 2.0e9, ".2e", of_linear("bytes"), at_most=True),
    Goal("rollout, 0.81M: tokens a second", 1e6, ".2e", of_rollouts(tokens_per_second)),
    Goal("rollout, 0.81M: against HF generate", 10, ".1f", of_rollouts(rollout_gain)))


def goal_row(goal, record):
    """The cells of a goal. What counts is the worst of its numbers, and how many there are says
    what that is worth. -> list"""
    bound = f"{'at most' if goal.at_most else 'at least'} {goal.bound:{goal.form}}"
    numbers = goal.numbers(record)
    if not numbers:
        return [goal.what, bound, "-", "0", "not measured"]
    worst = max(numbers) if goal.at_most else min(numbers)
    is_reached = worst <= goal.bound if goal.at_most else worst >= goal.bound
    verdict = "reached" if is_reached else "missed"
    return [goal.what, bound, f"{worst:{goal.form}}", str(len(numbers)), verdict]


# ---- 3. the report ---------------------------------------------------------------------------

def results_table(results):
    rows = []
    for result in results:
        said = result.said.replace("|", "\\|")
        rows.append([result.part.name, result.outcome, f"{result.seconds:.0f}", said])
    return table(["part", "result", "seconds", "what was found"], rows)


def failures(record):
    """The rows of a record that failed, and why, each in a paragraph. -> str"""
    text = ""
    for name in bench.ROWS:
        for row in record[name]:
            if "failed" in row:
                keys = [key for key in ("who", "V", "dtype", "size", "kind") if key in row]
                which = ", ".join(f"{key} {row[key]}" for key in keys)
                text += f"\n{name}, {which}: {row['failed']}\n"
    return text


def report(results, record, dry_run):
    """The report in Markdown. `record` is that of the bench, None if there is none. -> str"""
    text = "# What make gpu found\n\n"
    if dry_run:
        text += "A dry run on a CPU: it says nothing of a GPU, nor of speed.\n\n"
    if record:
        text += f"{bench.first_line(record['machine'])}\n\n"
    text += results_table(results)
    for result in results:
        if result.outcome not in ("ok", "skipped"):
            lines = "\n".join(result.lines)
            text += f"\n## {result.part.title}: {result.outcome}\n\n```\n{lines}\n```\n"
    if record:
        head = ["what", "goal", "worst", "of how many", "result"]
        text += "\n## Goals\n\nOf logits in bf16; where no V is named, V is 32000 or more.\n\n"
        text += table(head, [goal_row(goal, record) for goal in GOALS])
        text += failures(record)
        text += f"\n## The bench\n\n{bench.tables(record)}"
    return text


def publish(results, record, place, dry_run):
    """Write the report into the folder `place`, and the record, if there is one, with what a record
    there has and this has not. -> path of the report"""
    device = bench.slug(record) if record else "unknown"
    place.mkdir(exist_ok=True)
    path = place / f"gpu-{device}.md"
    path.write_text(report(results, record, dry_run))
    measured = [name for name in bench.ROWS if record and record[name]]
    if measured:
        record_path = place / f"bench-{device}.json"
        old = json.loads(record_path.read_text()) if record_path.is_file() else None
        new = bench.merged(old, record, measured)
        common.write(record_path, json.dumps(new, indent=1) + "\n")
    return path


def end_at_once(*_):
    """A signal says that the terminal is gone: end, and take the part under way along."""
    raise SystemExit(1)


def main(argv=None):
    titles = "".join(f"  {name:11} {title}\n" for name, (title, _) in PARTS.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"parts:\n{titles}",
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="these alone")
    parser.add_argument("--minutes", type=float, default=10, help="that all may take [10]")
    parser.add_argument("--dry_run", action="store_true", help="on the CPU, tiny")
    args = parser.parse_args(argv)
    for name in args.parts:
        if name not in PARTS:
            common.fail(f"there is no part {name}, but {', '.join(PARTS)}")
    if not args.dry_run and not torch.cuda.is_available():
        common.fail(
            f"torch {torch.__version__} sees no GPU. Does nvidia-smi? Is this torch for CUDA (it "
            f"says {torch.version.cuda}), and the driver new enough for that? On a CPU there is "
            "--dry_run")
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))     # what crashes leaves no core file
    signal.signal(signal.SIGTERM, end_at_once)
    signal.signal(signal.SIGHUP, end_at_once)

    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    parts = []
    for name in args.parts or PARTS:
        command = [sys.executable, "-m", "tools.gpu_parts", name, str(FOLDER)]
        if args.dry_run:
            command = ["env", "TRITON_INTERPRET=1", *command, "--dry_run"]
        title, share = PARTS[name]
        parts.append(Part(name, title, share, command))
    results = run_all(parts, FOLDER, args.minutes)

    record_path = FOLDER / "record.json"
    record = json.loads(record_path.read_text()) if record_path.is_file() else None
    place = FOLDER if args.dry_run or args.parts else DOCS
    path = publish(results, record, place, args.dry_run)
    print(f"\n{results_table(results)}\nThe report: {path}. The logs: {FOLDER}")
    if any(result.outcome != "ok" for result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    common.start(main)
