"""The four stages of R1 (2501.12948) in miniature: python -m tools.r1 (make r1).

Each stage is one command, printed as it starts; --init_from hands the policy on. Prints, and writes between
its marks in README.md, a table stage x task; also docs/r1.json.
"""
import tempfile
from pathlib import Path

from tools.runs import MACHINE, record, run, table
from tools.seeds import put

TASKS = ("arithmetic", "countdown", "lookup")
ALL = ["--task", ",".join(TASKS)]
STAGES = (                      # what it is, script, flags; each but the first starts from the one before
    ("base: textbook and forum", "grpo.py", ["--max_steps", 0]),
    ("1. cold start: supervised, 160 worked examples", "grpo.py",
     ["--max_steps", 0, "--cold_start", 40, "--base_batch_size", 4, "--base_learning_rate", 1e-3]),
    ("2. reasoning RL", "grpo.py", ["--max_steps", 60, "--stop_at", 2]),
    ("3. rejection sampling on its own right answers", "reinforce.py",
     ["--method", "rejection", "--max_steps", 20, "--learning_rate", 2e-4, "--stop_at", 2]),
    ("4. RL over all tasks", "grpo.py", ["--max_steps", 60, "--stop_at", 2]))


def main():
    rows, results, before = [], {}, []
    with tempfile.TemporaryDirectory() as work:
        for number, (name, script, flags) in enumerate(STAGES):
            folder = Path(work, f"stage-{number}")
            summary = run(script, folder, *ALL, *flags, *before, cwd=work)
            before = ["--init_from", folder]
            results[name] = summary
            rows.append([name, *(f"{summary['trained'][f'pass@1/{task}']:.3f}" for task in TASKS),
                         f"{summary['trained']['mean_length']:.0f}", f"{summary['seconds_total']:.0f} s"])
            print("\n" + table(["stage", *TASKS, "tokens", "time"], rows), flush=True)
    record("r1", results=results)
    put("r1", table(["stage", *TASKS, "tokens", "time"], rows) + f"\npass@1, held out; {MACHINE}.\n", "r1")


if __name__ == "__main__":
    main()
