"""The four stages of R1 (2501.12948) in miniature: python -m tools.r1 (make r1).

Each stage is one command, printed as it starts; --init_from hands the policy on. The examples of
the cold start all think, and are drawn for it, not taken from the base's textbook. Prints a table,
stage by task, and writes it between its marks in docs/pipelines.md; also docs/r1.json.

Departure from the paper: its third stage selects answers of the policy once, and fine-tunes the
base model on them. Ours goes on from the policy, which at every step learns from those of its new
answers that are right.
"""
import collections
import tempfile
from pathlib import Path
from typing import NamedTuple

import common
import grpo
from tools.runs import note, put, record, run, table

TASKS = ("arithmetic", "countdown", "lookup")
HEAD = ["stage", *TASKS, "tokens", "steps", "time"]


class Stage(NamedTuple):
    name: str
    script: str
    flags: list


STAGES = (                                  # each but the first starts from the one before
    Stage("base: textbook and forum", "grpo.py", ["--max_steps", 0]),
    Stage("1. cold start: supervised, 160 worked examples", "grpo.py",
          ["--max_steps", 0, "--cold_start", 40, "--base_batch_size", 4,
           "--base_learning_rate", 1e-3]),
    Stage("2. reasoning RL", "grpo.py", ["--max_steps", 60, "--stop_at", 2]),
    Stage("3. rejection sampling on its own right answers", "reinforce.py",
          ["--method", "rejection", "--max_steps", 20, "--learning_rate", 2e-4, "--stop_at", 2]),
    Stage("4. RL over all tasks", "grpo.py", ["--max_steps", 60, "--stop_at", 2]))


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


def main():
    results = {}
    rows = []
    start_from = []
    with tempfile.TemporaryDirectory() as work:
        for number, stage in enumerate(STAGES):
            folder = Path(work, f"stage-{number}")
            flags = ["--task", ",".join(TASKS), *stage.flags, *start_from]
            results[stage.name] = run(stage.script, folder, *flags, cwd=work)
            start_from = ["--init_from", folder]
            rows.append(row(stage.name, results[stage.name]))
            print("\n" + table(HEAD, rows), flush=True)
    record("r1", results=results)
    said = note(results.values(), [0], "from one base", problems_by_task())
    put("r1", f"{table(HEAD, rows)}\nThe columns of tasks are pass@1. {said}", "r1")


if __name__ == "__main__":
    common.start(main)
