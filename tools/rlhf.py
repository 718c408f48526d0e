"""RLHF as it was before verifiers, in one picture: python -m tools.rlhf (make rlhf).

Supervised learning makes the base; a Bradley-Terry reward model learns from comparisons of its
completions; PPO runs against that model, without and with a penalty on the KL to the base. The
picture shows on one axis the reward that PPO maximizes (the proxy), the true accuracy, and the KL
to the base. Writes docs/rlhf.json, docs/rlhf.png and, between its marks in docs/pipelines.md, a
table.
"""
import tempfile
from pathlib import Path

import common
from tools.runs import curve, note, picture, put, record, run, table

STEPS = 60
SEEDS = (0, 1, 2)
RUNS = {"no penalty": ["--beta", 0], "--beta 0.1": ["--beta", 0.1]}
LINES = {"proxy reward": "reward", "true accuracy": "accuracy", "KL to the base": "kl"}
HEAD = ["PPO", "seed", "best step", "true accuracy: at first", "at best", "at the end",
        "proxy: at first", "at best", "at the end", "KL to the base, a token",
        "greedy, held out"]


def train(folder, seed, flags, work):
    """Run PPO against the reward model. -> its summary, and the LINES of its curves by label"""
    summary = run("ppo.py", folder, "--reward", "model", "--stop_at", 2, "--max_steps", STEPS,
                  "--seed", seed, *flags, cwd=work)
    return summary, {label: curve(folder, metric) for label, metric in LINES.items()}


def row(name, seed, lines, summary):
    """The cells of a run: how it began, where the true accuracy was best, how it ended. -> list"""
    accuracy = lines["true accuracy"]
    best = accuracy.index(max(accuracy))
    cells = [name, seed, best + 1]
    for line in (accuracy, lines["proxy reward"]):
        cells += [f"{line[0]:.2f}", f"{line[best]:.2f}", f"{line[-1]:.2f}"]
    cells.append(f"{lines['KL to the base'][-1]:.2f}")
    cells.append(f"{summary['trained']['greedy']:.3f}")
    return cells


def panel(name, lines):
    """A function that draws the curves of a run into an axis."""
    def fill(axis):
        for label, line in lines.items():
            axis.plot(range(1, len(line) + 1), line, label=label)
        axis.set(title=f"PPO against a reward model, {name}", xlabel="step", ylim=(-0.05, 1.4))
        if name == list(RUNS)[-1]:                      # where there is room
            axis.legend(frameon=False, fontsize=8)
    return fill


def main():
    rows = []
    panels = []
    results = {}
    with tempfile.TemporaryDirectory() as work:
        for seed in SEEDS:
            for name, flags in RUNS.items():
                folder = Path(work, f"rlhf-{len(rows)}")
                summary, lines = train(folder, seed, flags, work)
                rows.append(row(name, seed, lines, summary))
                results[f"{name}, seed {seed}"] = {"summary": summary, "curve": lines}
                if seed == SEEDS[0]:
                    panels.append(panel(name, lines))
    record("rlhf", results=results)
    picture("rlhf", panels, width=5)
    said = note([result["summary"] for result in results.values()], SEEDS, "from one base")
    remark = "All but the last column: of the samples trained on."
    put("rlhf", f"{table(HEAD, rows)}\n{remark} {said}", "rlhf")


if __name__ == "__main__":
    common.start(main)
