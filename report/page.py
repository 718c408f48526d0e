"""Show runs on a page: python -m report.page RUN writes RUN/report.html, and with several runs
comparison.html in the first one.

The page sums up each run in a sentence, and shows its scores, curves, samples, and answers to
held-out problems. For several runs, it also shows which flags differ. It needs no network. Every
run makes its own report.html at its end, from config.json, metrics.jsonl, samples.jsonl,
evaluation.jsonl and summary.json. All of these but config.json may be missing, for example because
the run was killed.
"""
import dataclasses
import html
import importlib
import json
import os
import re
import shlex
from pathlib import Path

import common
import plumbing
from report import parser, start
from report.logs import read_log, read_summary, records, thinned

TEMPLATE = Path(__file__).with_suffix(".html")
# The score that sums up a run is the last of these that it has: {name in summary.json: label}.
FEW = 20                # scores of fewer problems sum up no run
MOST_STEPS = 500        # about half of the steps that a curve shows at most
MOST_SAMPLES = 10       # about half of the steps whose samples are shown at most
SUBJECTS = {"greedy_return": "greedy return", "greedy": "greedy accuracy"}


# ---- 1. reading a run ------------------------------------------------------------------------

def import_script(name):
    """Import a script or an example; its text has to show before that it is one, because a run
    that somebody sends you may name any file. ValueError if there is none. -> module"""
    for package in ("", "examples", "engines"):
        path = common.HERE / package / str(name)
        is_file = path.name == name and path.suffix == ".py" and path.is_file()
        if is_file and "plumbing.parse_flags(Config, argv)" in path.read_text(errors="replace"):
            return importlib.import_module(f"{package}.{path.stem}".lstrip("."))
    raise ValueError(f"{name!a} is not a script of this repository")


def command(name, flags):
    """Write the command that starts a run with these flags; it omits defaults. -> str, "" if the
    script is unknown, because then its defaults are, too"""
    try:
        script = import_script(name)
    except (ImportError, ValueError):
        return ""
    arguments = ["python", script.__name__.replace(".", "/") + ".py"]
    for field in dataclasses.fields(script.Config):
        value = flags.get(field.name, field.default)
        if isinstance(value, bool) and value != field.default:
            arguments.append(f"--{field.name}" if value else f"--no-{field.name}")
        elif value != field.default:
            arguments += [f"--{field.name}", str(value)]
    return shlex.join(arguments)


def read_run(folder):
    """Collect what the report shows of a run. Exits with one line if there is none. -> dict"""
    folder = Path(folder)
    script, flags = plumbing.read_config(folder)
    summary = read_summary(folder)
    steps, stride = thinned(records(folder, "metrics", "step", "reward"), MOST_STEPS)
    scores = (line for line in records(folder, "metrics", "step")
              if any(name.startswith("eval/") for name in line))
    by_step = {line["step"]: line for line in (*thinned(scores, MOST_STEPS)[0], *steps)}
    metrics = [by_step[step] for step in sorted(by_step)]
    samples, shown = thinned(records(folder, "samples", "step", "prompt", "completions"),
                             MOST_SAMPLES)
    notes = [f" {what} are those of every {count}th {step}."
             for what, step, count in (("The curves", "step", stride),
                                       ("The samples", "logged step", shown)) if count > 1]
    return {
        "name": folder.resolve().name,
        "command": command(script, flags),
        "config": {"script": script} | flags,
        "sentence": sentence(summary, metrics) + "".join(notes),
        "summary": summary,
        "metrics": metrics,
        "samples": samples,
        "evaluation": read_log(folder, "evaluation", "prompt", "base", "trained")}


def sentence(summary, metrics):
    """Sum up what happened in a run in a sentence or two. -> str"""
    last = max((line["step"] for line in metrics), default=0)
    if summary is None:
        return f"The run was stopped after step {last}, or it is still running."
    if summary["steps"] == 0:
        return "The run trained for 0 steps."
    ends = [summary["base"], summary["trained"]]
    rewards = [line["reward"] for line in metrics if line.get("reward") is not None]
    subject = "reward"
    values = [*rewards[:1], *rewards[-1:]]
    for name, label in SUBJECTS.items():
        is_many = ends[1].get("problems", FEW) >= FEW
        if ends[0].get(name) is not None and is_many:
            subject = label
            values = [end[name] for end in ends]
    change = " to ".join(f"{value:.3f}" for value in values)
    seconds = f"{summary['seconds_total']:.0f} s"       # as in the last line of the run
    if summary["seconds_warm_start"] >= 0.5:
        seconds += f", the base: {summary['seconds_warm_start']:.0f} s"
    text = f"{subject.capitalize()} went from {change} in {summary['steps']} steps ({seconds})."
    before, after = (f"{100 * end.get('think_share', 0):.3g}%" for end in ends)
    if {before, after} != {"0%"}:
        text += (f" The policy now thinks before it answers in {after} of its samples; the base "
                 f"did so in {before}.")
    return text


# ---- 2. report.html --------------------------------------------------------------------------

def render(runs, metrics_page=None):
    """Fill in the page about some runs, each a dict from read_run. `metrics_page` is the address of
    the page that explains the metrics. -> HTML, str"""
    configs = [run["config"] for run in runs]
    flags = []                              # of each flag: name, whether the runs differ, values
    for flag in dict.fromkeys(flag for config in configs for flag in config):   # keeps their order
        values = [config.get(flag) for config in configs]
        flags.append([flag, any(value != values[0] for value in values), values])
    title = html.escape(", ".join(run["name"] for run in runs))
    data = json.dumps({"config": flags, "runs": runs, "metricsPage": metrics_page}, allow_nan=False)
    # in ASCII, and without any character that could end the script element or begin a tag
    parts = {"TITLE": title.encode("ascii", "xmlcharrefreplace").decode(),
             "DATA": data.translate({ord(c): f"\\u{ord(c):04x}" for c in "<>&"})}
    # in one pass, because the title and the data may contain {{DATA}} themselves
    template = TEMPLATE.read_text(encoding="utf-8")
    return re.sub(r"\{\{(TITLE|DATA)\}\}", lambda mark: parts[mark[1]], template)


def write_report(folder, *others):
    """Write the report on some runs to report.html in the folder of the first one. -> its path"""
    folders = [Path(path) for path in (folder, *others)]
    runs = [read_run(path) for path in folders]
    if len({run["name"] for run in runs}) < len(runs):  # two runs have the same name
        for path, run in zip(folders, runs):
            run["name"] = str(path)
    path = folders[0] / ("comparison.html" if others else "report.html")
    page = common.HERE / "docs/metrics.md"
    # from a run outside the checkout, the address would contain folders of this machine
    is_near = page.exists() and path.resolve().is_relative_to(common.HERE)
    address = os.path.relpath(page, path.parent.resolve()) if is_near else None
    plumbing.write(path, render(runs, address))         # or a full disk would cut the old one off
    return path


# ---- 3. the command --------------------------------------------------------------------------

def main(argv=None):
    arguments = parser(__doc__)
    arguments.add_argument("runs", nargs="+", metavar="RUN",
                           help="run folder; the page is written in the first")
    args = arguments.parse_args(argv)
    try:
        print(write_report(*args.runs))
    except (OSError, ValueError) as error:
        common.fail(error)


if __name__ == "__main__":
    start(main)
