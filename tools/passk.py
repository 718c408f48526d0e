"""What RL sharpens and what it does not add: python -m tools.passk (make passk).

pass@k and maj@k for k = 1 .. 64 of base and trained policy, on arithmetic and on countdown, by
--num_eval_samples 64. Writes docs/passk.json, docs/passk.png and, between its marks in
docs/pipelines.md, a table.
"""
import argparse

import common
from tools.runs import note, publish, run_all

K = 64
SHOWN = (1, 8, K)                           # the k of the table
TASKS = ("arithmetic", "countdown")
FLAGS = ["--num_eval_samples", K, "--num_eval_problems", 256]
HEAD = ["task", "policy", *(f"pass@{k}" for k in SHOWN), *(f"maj@{k}" for k in SHOWN)]


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
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    runs = run_all({task: ["grpo.py", "--task", task, *FLAGS] for task in TASKS}, [0], at_once=1)
    results = {task: result["summary"] for task, [result] in runs.items()}
    rows = [row(task, policy, summary[policy])
            for task, summary in results.items() for policy in ("base", "trained")]
    panels = [panel(task, summary) for task, summary in results.items()]
    problems = [f"{results[task]['trained']['problems']} of {task}" for task in TASKS]
    said = note(results.values(), [0], "a base for each task", ", ".join(problems))
    publish("passk", HEAD, rows, said, panels, results=results)


if __name__ == "__main__":
    common.start(main)
