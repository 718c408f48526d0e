"""R1-Zero in miniature, in one picture: python -m tools.zero (make zero).

GRPO from the base, with a point for the right answer and a point for the format, and nothing else:
what becomes of format, accuracy and length. Writes docs/zero.json, docs/zero.png and, between its
marks in docs/pipelines.md, a table.
"""
import argparse

import common
from tools.runs import note, publish, run_all

SEEDS = (0, 1, 2)
FLAGS = ["--reward", "accuracy+format"]
LINES = {"accuracy": "accuracy", "format": "rewards/format/mean",
         "tokens": "completions/mean_length"}
COLORS = {"accuracy": "tab:blue", "format": "tab:orange", "tokens": "tab:green"}
HEAD = ["seed", "steps", "accuracy", "format", "tokens", "greedy, held out"]


def row(seed, result):
    """The cells of a seed: the first step and the last. -> list"""
    cells = [seed, result["summary"]["steps"]]
    for name, form in (("accuracy", ".2f"), ("format", ".2f"), ("tokens", ".0f")):
        line = result[LINES[name]]
        cells.append(f"{line[0]:{form}} -> {line[-1]:{form}}")
    cells.append(f"{result['summary']['trained']['greedy']:.3f}")
    return cells


def panel(result, names, title, top):
    """A function that draws some of the lines into an axis, which ends at `top`, if not None."""
    def fill(axis):
        for name in names:
            line = result[LINES[name]]
            axis.plot(range(1, len(line) + 1), line, color=COLORS[name], label=name)
        axis.set(title=title, xlabel="step", ylim=(0, top))
        if len(names) > 1:
            axis.legend(frameon=False)
    return fill


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    [results] = run_all({"zero": ["grpo.py", *FLAGS]}, SEEDS, LINES.values(), at_once=1).values()
    first = results[0]
    panels = [panel(first, ["accuracy", "format"], "share of completions", top=1.02),
              panel(first, ["tokens"], "tokens per completion", top=None)]
    rows = [row(seed, result) for seed, result in zip(SEEDS, results)]
    said = note([result["summary"] for result in results], SEEDS, "from one base")
    publish("zero", HEAD, rows, said, panels, results=results)


if __name__ == "__main__":
    common.start(main)
