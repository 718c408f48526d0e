"""Pictures of a run folder: python tools/report.py RUN draws RUN/curve.png, as every run does at its end.

Reads config.json, metrics.jsonl and summary.json; needs matplotlib, which it imports only to draw.
"""
import json
import sys
from pathlib import Path

PANELS = (              # title, what is drawn: key in metrics.jsonl -> label
    ("accuracy", {"accuracy": "of the samples trained on", "eval/greedy": "greedy, held out"}),
    ("tokens per completion", {"completions/mean_length": "samples", "eval/mean_length": "greedy, held out"}),
    ("exploration", {"entropy": "entropy (nats)", "signal": "share of groups with signal"}),
    ("update", {"kl": "KL to the base (nats)", "grad_norm": "gradient norm"}),
)


def draw_curve(folder):
    """Draw RUN/curve.png. ImportError, with the remedy, if matplotlib is not installed."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install matplotlib") from error
    folder = Path(folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    base = json.loads((folder / "summary.json").read_text())["base"]
    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6), sharex=True, layout="constrained")
    for axis, (title, series) in zip(axes.flat, PANELS):
        for key, label in series.items():
            points = [(line["step"], line[key]) for line in lines if key in line]
            marker = "o" if key.startswith("eval/") else ""
            axis.plot([x for x, _ in points], [y for _, y in points], marker=marker, label=label)
        axis.set_title(title)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0, 0].axhline(base["greedy"], color="gray", linestyle="--", label="base, greedy")
    for axis in axes.flat:
        axis.legend(fontsize="small")
    for axis in axes[1]:
        axis.set_xlabel("step")
    figure.suptitle(folder.name)
    figure.savefig(folder / "curve.png", dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    for run in sys.argv[1:]:
        draw_curve(run)
        print(f"{run}/curve.png")
