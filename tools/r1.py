"""The four stages of R1 (2501.12948) in miniature: python -m tools.r1 (make r1).

Each stage is one command, printed as it starts; --init_from hands the policy on. The cold start is
tools/coldstart.py, whose examples all think, and a run without steps evaluates it. Prints a table,
stage by task, and writes it between its marks in docs/pipelines.md; also docs/r1.json.

Departure from the paper: its third stage selects answers of the policy once, and fine-tunes the
base model on them. Ours goes on from the policy, which at every step learns from those of its new
answers that are right.
"""
import argparse
import collections
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common
import grpo
from tools.runs import ROOT, note, publish, run, table

TASKS = ("arithmetic", "countdown", "lookup")
HEAD = ["stage", *TASKS, "tokens", "steps", "time"]
COLD_START = "1. cold start: supervised, 160 worked examples"
STAGES = {                                  # each but the first starts from the one before
    "base: textbook and forum": ["grpo.py", "--max_steps", 0],
    COLD_START: ["grpo.py", "--max_steps", 0],
    "2. reasoning RL": ["grpo.py", "--max_steps", 60, "--stop_at", 2],
    "3. rejection sampling on its own right answers": [
        "reinforce.py", "--method", "rejection", "--max_steps", 20, "--learning_rate", 2e-4,
        "--stop_at", 2],
    "4. RL over all tasks": ["grpo.py", "--max_steps", 60, "--stop_at", 2]}


def row(name, summary):
    """The cells of a stage. -> list"""
    trained = summary["trained"]
    accuracies = [f"{trained[f'pass@1/{task}']:.3f}" for task in TASKS]
    length = f"{trained['mean_length']:.0f}"
    return [name, *accuracies, length, summary["steps"], f"{summary['seconds_total']:.0f} s"]


def problems_by_task():
    """How many of the held-out problems are of each task. -> str"""
    cfg = common.parse_flags(grpo.Config, ["--task", ",".join(TASKS)])
    task = common.load_task(cfg, grpo.verify)
    problems = common.held_out_problems(task, cfg.num_eval_problems)
    counts = collections.Counter(problem.task for problem in problems)
    return ", ".join(f"{counts[name]} of {name}" for name in TASKS)


def cold_start(folder, new):
    """Let the policy of a run learn from worked examples. -> seconds"""
    clock = time.perf_counter()
    words = ["-m", "tools.coldstart", str(folder), str(new)]
    print(f"$ python {' '.join(words)}", flush=True)
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
    return time.perf_counter() - clock


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    results = {}
    start_from = []
    with tempfile.TemporaryDirectory() as work:
        for number, (name, (script, *flags)) in enumerate(STAGES.items()):
            folder = Path(work, f"stage-{number}")
            seconds = 0
            if name == COLD_START:
                seconds = cold_start(start_from[1], f"{folder}-start")
                start_from[1] = f"{folder}-start"
            flags = ["--task", ",".join(TASKS), *flags, *start_from]
            results[name] = run(script, folder, *flags, cwd=work)
            results[name]["seconds_total"] += seconds
            start_from = ["--init_from", folder]
            print("\n" + table(HEAD, [row(*stage) for stage in results.items()]), flush=True)
    rows = [row(name, summary) for name, summary in results.items()]
    said = note(results.values(), [0], "from one base", problems_by_task())
    publish("r1", HEAD, rows, f"The columns of tasks are pass@1. {said}", results=results)


if __name__ == "__main__":
    common.start(main)
