"""R1-Zero in miniature, in one picture: python -m tools.zero (make zero).

GRPO from the base, with a point for the right answer and a point for the format, and nothing else:
what becomes of format, accuracy and length. Writes docs/zero.json, docs/zero.png and, between its
marks in docs/pipelines.md, a table.
"""
import tempfile
from pathlib import Path

import common
from tools.runs import curve, note, picture, put, record, run, table

SEEDS = (0, 1, 2)
LINES = {"accuracy": "accuracy", "format": "rewards/format/mean",
         "tokens": "completions/mean_length"}
COLORS = {"accuracy": "tab:blue", "format": "tab:orange", "tokens": "tab:green"}
HEAD = ["seed", "steps", "accuracy", "format", "tokens", "greedy, held out"]


def row(seed, lines, summary):
    """The cells of a seed: the first step and the last. -> list"""
    cells = [seed, len(lines["accuracy"])]
    for name, form in (("accuracy", ".2f"), ("format", ".2f"), ("tokens", ".0f")):
        line = lines[name]
        cells.append(f"{line[0]:{form}} -> {line[-1]:{form}}")
    cells.append(f"{summary['trained']['greedy']:.3f}")
    return cells


def panel(lines, names, title, top):
    """A function that draws some of the lines into an axis, which ends at `top`, if not None."""
    def fill(axis):
        for name in names:
            line = lines[name]
            axis.plot(range(1, len(line) + 1), line, color=COLORS[name], label=name)
        axis.set(title=title, xlabel="step", ylim=(0, top))
        if len(names) > 1:
            axis.legend(frameon=False)
    return fill


def main():
    rows = []
    results = {}
    with tempfile.TemporaryDirectory() as work:
        for seed in SEEDS:
            folder = Path(work, f"zero-{seed}")
            flags = ["--reward", "accuracy+format", "--seed", seed]
            summary = run("grpo.py", folder, *flags, cwd=work)
            lines = {name: curve(folder, metric) for name, metric in LINES.items()}
            results[seed] = {"summary": summary, "curve": lines}
            rows.append(row(seed, lines, summary))
    record("zero", results=results)
    first = results[SEEDS[0]]["curve"]
    picture("zero", [
        panel(first, ["accuracy", "format"], "share of completions", top=1.02),
        panel(first, ["tokens"], "tokens per completion", top=None)])
    said = note([result["summary"] for result in results.values()], SEEDS, "from one base")
    put("zero", f"{table(HEAD, rows)}\n{said}", "zero")


if __name__ == "__main__":
    common.start(main)
