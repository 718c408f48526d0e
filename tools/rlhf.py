"""RLHF as it was before verifiers, in one picture: python -m tools.rlhf (make rlhf).

Supervised learning makes the base; a Bradley-Terry reward model learns from comparisons of its completions;
PPO runs against that model, without and with a penalty on the KL to the base. The picture shows on one axis
what PPO is told (the proxy), what is true, and how far the policy has gone. Writes docs/rlhf.json,
docs/rlhf.png and, between its marks in README.md, a table.
"""
import tempfile
from pathlib import Path

from tools.runs import MACHINE, curve, picture, record, run, table
from tools.seeds import put

STEPS = 60
RUNS = {"no penalty": ["--beta", 0], "--beta 0.1": ["--beta", 0.1]}
LINES = {"proxy reward": "reward", "true accuracy": "accuracy", "KL to the base": "kl"}


def panel(name, found):
    """A function that draws a run into an axis."""
    def fill(axis):
        steps, *values = found
        for (label, _), line in zip(LINES.items(), values):
            axis.plot(steps, line, label=label)
        axis.set(title=f"PPO against a reward model, {name}", xlabel="step", ylim=(-0.05, 1.4))
        axis.legend(frameon=False, fontsize=8)
    return fill


def main():
    rows, panels, results = [], [], {}
    with tempfile.TemporaryDirectory() as work:
        for seed in (0, 1, 2):
            for name, flags in RUNS.items():
                folder = Path(work, f"rlhf-{len(rows)}")
                summary = run("ppo.py", folder, "--reward", "model", "--stop_at", 2, "--max_steps", STEPS,
                              "--seed", seed, *flags, cwd=work)
                found = curve(folder, *LINES.values())
                _, proxy, true, distance = found
                best = max(range(len(true)), key=true.__getitem__)
                values = [line[i] for line in (true, proxy) for i in (0, best, -1)] + [distance[-1]]
                rows.append([name, seed, best + 1, *(f"{value:.2f}" for value in values)])
                results[f"{name}, seed {seed}"] = {"summary": summary, "curve": found}
                if seed == 0:
                    panels.append(panel(name, found))
    head = ["PPO", "seed", "best step", "true accuracy: at first", "at best", "at the end",
            "proxy: at first", "at best", "at the end", "KL to the base, a token"]
    record("rlhf", results=results)
    picture("rlhf", panels, width=5)
    put("rlhf", table(head, rows) + f"\n{MACHINE}.\n", "rlhf")


if __name__ == "__main__":
    main()
