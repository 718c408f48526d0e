"""What RL sharpens and what it does not add: python -m tools.passk (make passk).

pass@k and maj@k for k = 1 .. 64 of base and trained policy, on arithmetic and on countdown, by evaluating a
run again: --resume_from_checkpoint RUN --max_steps 0 --num_eval_samples 64. Writes docs/passk.json,
docs/passk.png and, between its marks in README.md, a table.
"""
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.runs import MACHINE, ROOT, picture, record, run, table
from tools.seeds import put

K = 64
TASKS = ("arithmetic", "countdown")


def panel(task, summary):
    """A function that draws the curves of a summary into an axis."""
    def fill(axis):
        for who, style in (("base", "--"), ("trained", "-")):
            for name, colour in (("pass@k", "tab:blue"), ("maj@k", "tab:orange")):
                values = summary[who][name]
                axis.plot(range(1, len(values) + 1), values, style, color=colour, label=f"{name}, {who}")
        axis.set(title=task, xlabel="k", xscale="log", ylim=(0, 1.02))
        axis.set_xticks([1, 2, 4, 8, 16, 32, 64], [1, 2, 4, 8, 16, 32, 64])
        axis.legend(frameon=False, fontsize=8, loc="lower right")
    return fill


def main():
    rows, results = [], {}
    with tempfile.TemporaryDirectory() as work:
        for task in TASKS:
            folder = Path(work, task)
            run("grpo.py", folder, "--task", task, cwd=work)
            again = ["--resume_from_checkpoint", folder, "--max_steps", "0", "--num_eval_samples", str(K),
                     "--num_eval_problems", "256"]
            subprocess.run([sys.executable, ROOT / "grpo.py", *again], cwd=work, check=True)
            results[task] = summary = json.loads((folder / "summary.json").read_text())
            for who in ("base", "trained"):
                scores = summary[who]
                rows.append([task, who, *(f"{scores[name][k - 1]:.3f}" for name in ("pass@k", "maj@k")
                                          for k in (1, 8, K))])
    record("passk", results=results)
    picture("passk", [panel(task, summary) for task, summary in results.items()])
    head = ["task", "policy", *(f"{name}@{k}" for name in ("pass", "maj") for k in (1, 8, K))]
    put("passk", table(head, rows) + f"\n256 held-out problems; {MACHINE}.\n", "passk")


if __name__ == "__main__":
    main()
