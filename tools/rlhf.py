"""RLHF as it was before verifiers, in one picture: python -m tools.rlhf (make rlhf).

Supervised learning makes the base; a Bradley-Terry reward model learns from comparisons of its
completions; PPO runs against that model, without and with a penalty on the KL to the base. The
picture shows on one axis the reward that PPO maximizes (the proxy), the true accuracy, and the KL
to the base. Writes docs/rlhf.json, docs/rlhf.png and, between its marks in docs/pipelines.md, a
table.
"""
import argparse

import common
from tools.runs import note, publish, run_all

SEEDS = (0, 1, 2)
PPO = ["ppo.py", "--reward", "model", "--stop_at", 2, "--max_steps", 60]
RUNS = {"no penalty": [*PPO, "--beta", 0], "--beta 0.1": [*PPO, "--beta", 0.1]}
LINES = {"proxy reward": "reward", "true accuracy": "accuracy", "KL to the base": "kl"}
HEAD = ["PPO", "seed", "best step", "true accuracy: at first", "at best", "at the end",
        "proxy: at first", "at best", "at the end", "KL to the base, a token",
        "greedy, held out"]


def row(name, seed, result):
    """The cells of a run: how it began, where the true accuracy was best, how it ended. -> list"""
    accuracy = result["accuracy"]
    best = accuracy.index(max(accuracy))
    cells = [name, seed, best + 1]
    for line in (accuracy, result["reward"]):
        cells += [f"{line[0]:.2f}", f"{line[best]:.2f}", f"{line[-1]:.2f}"]
    cells.append(f"{result['kl'][-1]:.2f}")
    cells.append(f"{result['summary']['trained']['greedy']:.3f}")
    return cells


def panel(name, result):
    """A function that draws the curves of a run into an axis."""
    def fill(axis):
        for label, metric in LINES.items():
            line = result[metric]
            axis.plot(range(1, len(line) + 1), line, label=label)
        axis.set(title=f"PPO against a reward model, {name}", xlabel="step", ylim=(-0.05, 1.4))
        if name == list(RUNS)[-1]:                      # where there is room
            axis.legend(frameon=False, fontsize=8)
    return fill


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    results = run_all(RUNS, SEEDS, LINES.values(), at_once=1)
    rows = [row(name, seed, results[name][number])
            for number, seed in enumerate(SEEDS) for name in RUNS]
    panels = [panel(name, runs[0]) for name, runs in results.items()]
    summaries = [result["summary"] for runs in results.values() for result in runs]
    said = note(summaries, SEEDS, "from one base")
    remark = "All but the last column: of the samples trained on."
    publish("rlhf", HEAD, rows, f"{remark} {said}", panels, width=5, results=results)


if __name__ == "__main__":
    common.start(main)
