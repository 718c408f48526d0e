"""What a run looks like: python -m tools.report RUN [RUN ...] writes report.html into the first folder: its
curves, config and where that differs between runs, samples, problems before and after. It needs no network.

Every run draws its own report.html and curve.png at its end, from config.json, metrics.jsonl, samples.jsonl,
evaluation.jsonl and summary.json; all but the first may be missing, as after a kill. Only curve.png needs a
package, matplotlib, which is imported to draw.
"""
import argparse
import functools
import html
import json
import math
import re
import shlex
import sys
from pathlib import Path

PANELS = (              # of curve.png: title, what is drawn: key in metrics.jsonl -> label
    ("accuracy", {"accuracy": "of the samples trained on", "eval/greedy": "greedy, held out"}),
    ("tokens per completion", {"completions/mean_length": "samples", "eval/mean_length": "greedy, held out"}),
    ("exploration", {"entropy": "entropy (nats)", "signal": "share of groups with signal"}),
    ("update", {"kl": "KL to the base (nats)", "grad_norm": "gradient norm"}),
)
TEMPLATE = Path(__file__).with_suffix(".html")

# ---- report.html ----------------------------------------------------------------------------------------

def finite(digits):
    """The number, or None where it is none that a browser's JSON can hold."""
    return x if math.isfinite(x := float(digits)) else None


loads = functools.partial(json.loads, parse_constant=finite, parse_float=finite)


def read_log(path, *keys):
    """The records of a log that have these keys; [] without a log. What a kill left of a line is skipped."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else ():
        try:
            record = loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and all(key in record for key in keys):
            records.append(record)
    return records


def read_run(folder):
    """What the report tells of one run, as a dict. ValueError if the folder is not one."""
    folder = Path(folder)
    try:
        record = loads((folder / "config.json").read_text(encoding="utf-8"))
        command = shlex.join(["python", record["script"], *record["argv"]])
        config = {"script": record["script"], "python": record["python"].split()[0], "torch": record["torch"]}
        config |= record["config"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{folder}: has no readable config.json; name the folder of a run") from None
    summary = folder / "summary.json"
    return {"name": folder.resolve().name, "command": command, "config": config,
            "summary": loads(summary.read_text(encoding="utf-8")) if summary.exists() else None,
            "metrics": read_log(folder / "metrics.jsonl", "step"),
            "samples": read_log(folder / "samples.jsonl", "step", "prompt", "completions"),
            "evaluation": read_log(folder / "evaluation.jsonl", "prompt", "base", "trained")}


def compare_configs(configs):
    """One row per flag that any of the runs has: [flag, do the runs differ?, its value in each, or None]."""
    flags = dict.fromkeys(flag for config in configs for flag in config)
    values = {flag: [config.get(flag) for config in configs] for flag in flags}
    return [[flag, any(value != row[0] for value in row), row] for flag, row in values.items()]


def render(runs):
    """The page, of what read_run returns. Nothing in it can end the data's script element or begin a tag."""
    data = {"config": compare_configs([run["config"] for run in runs]), "runs": runs}
    text = json.dumps(data, allow_nan=False)                        # all in ASCII: U+2028 is escaped, too
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    title = html.escape(", ".join(run["name"] for run in runs)).encode("ascii", "xmlcharrefreplace").decode()
    parts = {"TITLE": title, "DATA": text}
    return re.sub(r"\{\{(TITLE|DATA)\}\}", lambda mark: parts[mark[1]], TEMPLATE.read_text(encoding="utf-8"))


def write_report(folder, *others, output=None):
    """Write the report on these runs to `output`, by default report.html in the first folder. -> its path"""
    folders = [Path(folder), *map(Path, others)]
    runs = [read_run(path) for path in folders]
    if len({run["name"] for run in runs}) < len(runs):
        runs = [run | {"name": str(path)} for path, run in zip(folders, runs)]
    path = Path(output or folders[0] / "report.html")
    path.write_text(render(runs), encoding="utf-8")
    return path


# ---- curve.png ------------------------------------------------------------------------------------------

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


# ---- the command ----------------------------------------------------------------------------------------

def main(argv=None):
    """Write one report on the runs that `argv` names; a folder that is no run gets one line, exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder; the first gets the report")
    parser.add_argument("--output", metavar="FILE", help="write there instead")
    args = parser.parse_args(argv)
    try:
        print(write_report(*args.runs, output=args.output))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
