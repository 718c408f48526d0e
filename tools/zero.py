"""R1-Zero in miniature, in one picture: python -m tools.zero (make zero).

GRPO from the base, with a point for the right answer and a point for the format, and nothing else: what
becomes of format, accuracy and length. Writes docs/zero.json, docs/zero.png and, between its marks in
README.md, a table.
"""
import tempfile
from pathlib import Path

from tools.runs import MACHINE, curve, picture, record, run, table
from tools.seeds import put

LINES = {"accuracy": "accuracy", "format": "rewards/format/mean"}


def shares(found):
    """A function that draws accuracy and format into an axis."""
    def fill(axis):
        for label, line in zip(LINES, found[1:]):
            axis.plot(found[0], line, label=label)
        axis.set(title="share of completions", xlabel="step", ylim=(0, 1.02))
        axis.legend(frameon=False)
    return fill


def lengths(found):
    """A function that draws the length into an axis."""
    def fill(axis):
        axis.plot(found[0], found[-1], color="tab:green")
        axis.set(title="tokens per completion", xlabel="step", ylim=(0, None))
    return fill


def main():
    rows, results = [], {}
    with tempfile.TemporaryDirectory() as work:
        for seed in (0, 1, 2):
            folder = Path(work, f"zero-{seed}")
            summary = run("grpo.py", folder, "--reward", "accuracy+format", "--seed", seed, cwd=work)
            found = curve(folder, *LINES.values(), "completions/mean_length")
            results[seed] = {"summary": summary, "curve": found}
            rows.append([seed, len(found[0]), *(f"{line[0]:.2f} -> {line[-1]:.2f}" for line in found[1:3]),
                         f"{found[3][0]:.0f} -> {found[3][-1]:.0f}", f"{summary['trained']['greedy']:.3f}"])
    record("zero", results=results)
    first = results[0]["curve"]
    picture("zero", [shares(first), lengths(first)])
    head = ["seed", "steps", "accuracy", "format", "tokens", "greedy, held out"]
    put("zero", table(head, rows) + f"\n{MACHINE}.\n", "zero")


if __name__ == "__main__":
    main()
