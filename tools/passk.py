"""What RL sharpens and what it does not add: python -m tools.passk (make passk).

pass@k and maj@k for k = 1 .. 64 of base and trained policy, on arithmetic and on countdown, by
evaluating a run again: --resume_from_checkpoint RUN --max_steps 0 --num_eval_samples 64. Writes
docs/passk.json, docs/passk.png and, between its marks in docs/pipelines.md, a table.
"""
import subprocess
import sys
import tempfile
from pathlib import Path

import common
from tools.runs import ROOT, note, picture, put, read_summary, record, run, table

K = 64
SHOWN = (1, 8, K)                           # the k of the table
PROBLEMS = 256                              # at most
TASKS = ("arithmetic", "countdown")
HEAD = ["task", "policy", *(f"pass@{k}" for k in SHOWN), *(f"maj@{k}" for k in SHOWN)]


def train_and_evaluate(task, work):
    """Train on a task, then evaluate again with K samples of each problem. -> summary"""
    folder = Path(work, task)
    run("grpo.py", folder, "--task", task, cwd=work)
    again = ["--resume_from_checkpoint", folder, "--max_steps", "0",
             "--num_eval_samples", str(K), "--num_eval_problems", str(PROBLEMS)]
    subprocess.run([sys.executable, ROOT / "grpo.py", *again], cwd=work, check=True)
    return read_summary(folder)


def row(task, policy, scores):
    """The cells of a policy, "base" or "trained". -> list"""
    cells = [task, policy]
    for name in ("pass@k", "maj@k"):
        cells += [f"{scores[name][k - 1]:.3f}" for k in SHOWN]
    return cells


def panel(task, summary):
    """A function that draws the curves of a summary into an axis."""
    def fill(axis):
        for policy, style in (("base", "--"), ("trained", "-")):
            for name, color in (("pass@k", "tab:blue"), ("maj@k", "tab:orange")):
                values = summary[policy][name]
                k = range(1, len(values) + 1)
                axis.plot(k, values, style, color=color, label=f"{name}, {policy}")
        axis.set(title=task, xlabel="k", xscale="log", ylim=(0, 1.02))
        ticks = [1, 2, 4, 8, 16, 32, 64]
        axis.set_xticks(ticks, ticks)
        if task == TASKS[0]:                            # where there is room
            axis.legend(frameon=False, fontsize=8, loc="lower right")
    return fill


def main():
    results = {}
    rows = []
    with tempfile.TemporaryDirectory() as work:
        for task in TASKS:
            summary = train_and_evaluate(task, work)
            results[task] = summary
            rows.append(row(task, "base", summary["base"]))
            rows.append(row(task, "trained", summary["trained"]))
    record("passk", results=results)
    picture("passk", [panel(task, summary) for task, summary in results.items()])
    problems = [f"{results[task]['trained']['problems']} of {task}" for task in TASKS]
    said = note(results.values(), [0], "a base for each task", ", ".join(problems))
    put("passk", f"{table(HEAD, rows)}\n{said}", "passk")


if __name__ == "__main__":
    common.start(main)
