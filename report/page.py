"""Show runs on a page: python -m report.page RUN writes RUN/report.html, and with several runs
comparison.html in the first one.

The page sums up each run in a sentence, and shows its scores, curves, samples, and answers to
held-out problems. For several runs, it also shows which flags differ. Runs that differ only in
their seed form a group, which has one color: the page shows their mean and range. It needs no
network. Every run makes its own report.html at its end, from config.json, metrics.jsonl,
samples.jsonl, evaluation.jsonl and summary.json. All of these but config.json may be missing, for
example because the run was killed.
"""
import dataclasses
import html
import importlib
import json
import os
import re
import shlex
import zlib
from pathlib import Path
from statistics import fmean

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
SEEDS = ("seed", "base_seed")       # runs of a group differ only in these
PLACES = ("output_dir", "resume_from_checkpoint")       # these do not change what a run computes
TEXT = "checksum of the script"     # so that runs of an edited script are not seeds of one group


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
    text = folder / Path(str(script)).name
    checksum = f"{zlib.crc32(text.read_bytes()):08x}" if text.is_file() else None
    notes = [f" {what} show one {step} in {count}."
             for what, step, count in (("The curves", "step", stride),
                                       ("The samples", "logged step", shown)) if count > 1]
    return {
        "name": folder.resolve().name,
        "command": command(script, flags),
        "config": {"script": script, TEXT: checksum} | flags,
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
    subject, values = change_of(summary, metrics)
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


def change_of(summary, metrics):
    """Choose the score that sums up a run. -> its name, its first and its last value"""
    ends = [summary["base"], summary["trained"]]
    rewards = [line["reward"] for line in metrics if line.get("reward") is not None]
    subject = "reward"
    values = [*rewards[:1], *rewards[-1:]]
    for name, label in SUBJECTS.items():
        is_many = ends[1].get("problems", FEW) >= FEW
        if ends[0].get(name) is not None and is_many:
            subject = label
            values = [end[name] for end in ends]
    return subject, values


# ---- 2. groups of runs -----------------------------------------------------------------------

def grouped(runs):
    """Put runs together that differ only in their seed. Runs with the same seed stay apart, because
    something else must differ. -> list of lists of runs"""
    groups = {}
    for run in runs:
        same = [(flag, x) for flag, x in run["config"].items() if flag not in (*SEEDS, *PLACES)]
        groups.setdefault(repr(sorted(same)), []).append(run)
    found = []
    for group in groups.values():
        seeds = {tuple(run["config"].get(flag) for flag in SEEDS) for run in group}
        found += [group] if len(seeds) == len(group) else [[run] for run in group]
    return found


def compared(groups):
    """Compare the flags of groups. -> list of [flag, whether the groups differ in it, its value in
    each group: several values, with commas between them, if the runs of the group differ]"""
    rows = []
    for flag in dict.fromkeys(flag for group in groups for run in group for flag in run["config"]):
        values = []
        for group in groups:
            found = [run["config"].get(flag) for run in group]
            texts = dict.fromkeys(map(str, found))
            values.append(found[0] if len(texts) == 1 else ", ".join(texts))
        differs = flag not in PLACES and any(value != values[0] for value in values)
        rows.append([flag, differs, values])
    return rows


def legend(groups, rows):
    """Name each group by up to three flags in which the groups differ, or by its runs if these
    flags do not tell the groups apart. -> list of str"""
    flags = [(flag, values) for flag, differs, values in rows
             if differs and flag not in (*SEEDS, TEXT)]
    texts = []
    for i in range(len(groups)):
        words = [f"{flag} {values[i]}" if values[i] != "" else f"no {flag}"
                 for flag, values in flags if values[i] is not None]
        texts.append(", ".join(words) if len(words) <= 3 else "")
    is_told = len(set(texts)) == len(texts) > 1
    names = []
    for group, text in zip(groups, texts):
        name = ", ".join(run["name"] for run in group)
        if len(group) > 1:
            names.append(f"{text if is_told and text else name} ({len(group)} seeds)")
        else:
            names.append(f"{name} ({text})" if is_told and text else name)
    return names


def sum_up(group):
    """Sum up what happened in the runs of a group. -> str"""
    if len(group) == 1:
        return group[0]["sentence"]
    ended = [run for run in group if run["summary"] is not None]
    changes = [change_of(run["summary"], run["metrics"]) for run in ended]
    texts = [f"{len(ended)} of {len(group)} runs have ended."] * (len(ended) < len(group))
    subjects = {subject for subject, values in changes if len(values) == 2}
    if len(subjects) == 1 and all(len(values) == 2 for _, values in changes):
        before, after = zip(*(values for _, values in changes))
        steps = " or ".join(map(str, sorted({run["summary"]["steps"] for run in ended})))
        texts.append(f"{subjects.pop().capitalize()} went from {fmean(before):.3f} to "
                     f"{fmean(after):.3f} in {steps} steps, on average over {len(ended)} seeds, "
                     f"which ended between {min(after):.3f} and {max(after):.3f}.")
    return " ".join(texts)


# ---- 3. report.html --------------------------------------------------------------------------

def render(runs, metrics_page=None):
    """Fill in the page about some runs, each a dict from read_run. `metrics_page` is the address of
    the page that explains the metrics. -> HTML, str"""
    groups = grouped(runs)
    rows = compared(groups)
    labels = legend(groups, rows)
    title = html.escape(", ".join(labels))
    shown = []
    for i, (group, label) in enumerate(zip(groups, labels)):
        flags = {flag: x for flag, x in group[0]["config"].items() if flag not in SEEDS + PLACES}
        seeds = [f"--{flag} {values[i]}" for flag, _, values in rows
                 if flag in SEEDS and values[i] != group[0]["config"].get(flag)]
        shown.append({
            "label": label, "sentence": sum_up(group), "seeds": " and ".join(seeds),
            "command": command(flags["script"], flags) if seeds else group[0]["command"],
            "runs": [runs.index(run) for run in group]})
    data = json.dumps({"config": rows, "runs": runs, "groups": shown, "metricsPage": metrics_page},
                      allow_nan=False)
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
    built = common.HERE / "site/docs/metrics.html"      # by make site
    page = built if built.exists() else common.HERE / "docs/metrics.md"
    # from a run outside the checkout, the address would contain folders of this machine
    is_near = page.exists() and path.resolve().is_relative_to(common.HERE)
    address = os.path.relpath(page, path.parent.resolve()) if is_near else None
    plumbing.write(path, render(runs, address))         # or a full disk would cut the old one off
    return path


# ---- 4. the command --------------------------------------------------------------------------

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
