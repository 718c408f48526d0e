"""The four stages of R1 (2501.12948) in miniature: python -m tools.r1 (make r1).

Each stage is one command, printed as it starts; --init_from hands the policy on. Prints a table,
stage by task, and writes it between its marks in README.md; also docs/r1.json.
"""
import tempfile
from pathlib import Path
from typing import NamedTuple

from tools.runs import MACHINE, put, record, run, table

TASKS = ("arithmetic", "countdown", "lookup")
HEAD = ["stage", *TASKS, "tokens", "time"]


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
    return [name, *accuracies, length, f"{summary['seconds_total']:.0f} s"]


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
    put("r1", f"{table(HEAD, rows)}\npass@1, held out; {MACHINE}.\n", "r1")


if __name__ == "__main__":
    main()
