"""Show runs on a page: python -m report.page RUN writes RUN/report.html, and with several runs
comparison.html in the first one.

The page sums up each run in a sentence, and shows its scores, curves, samples, and answers to
held-out problems. For arithmetic, it also shows how often each step of a thought was right before
training and after it. For several runs, it also shows which flags differ. Runs that differ only in
their seed form a group, which has one color: the page shows their mean and range. It needs no
network. Every run makes its own report.html at its end, from config.json, metrics.jsonl,
samples.jsonl, evaluation.jsonl and summary.json. All of these but config.json may be missing, for
example because the run was killed.

RUN may also be the output folder of a run of TRL with --log_completions True, or the folder that
verl calls trainer.rollout_data_dir.
"""
import dataclasses
import importlib
import json
import os
import shlex
import zlib
from pathlib import Path
from statistics import fmean
from urllib.parse import quote

import common
import plumbing
from report import parser, start, trainers
from report.check import column
from report.logs import read_log, read_summary, thinned

TEMPLATE = Path(__file__).with_suffix(".html")
FEW = 20                # scores of fewer problems sum up no run
MOST_STEPS = 500        # a curve shows at most so many steps, and so many evaluations
MOST_SAMPLES = 20       # number of logged steps whose samples are shown, at most
# The scores that sum up a run, as far as it has them, or else its reward: {name in summary.json:
# label}
SCORES = {"greedy": "greedy accuracy", "greedy_return": "greedy return",
          "think_share": "the share of samples that think",
          "accuracy_given_think": "the accuracy of these samples",
          "greedy_right": "greedy accuracy on questions that can be answered",
          "greedy_hallucinated": "the share of made-up answers to the other questions"}
LUCKY = {"greedy", "accuracy_given_think"}      # they count luck in a run that has greedy_right
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
    if trainers.files_of(folder):
        return trainers.read_completions(folder, MOST_SAMPLES)
    if trainers.history_of(folder):
        common.fail(f"{folder}: has no completions of TRL; train with --log_completions True, or "
                    f"read its metrics: python -m report.check {folder}")
    script, flags = plumbing.read_config(folder)
    text = folder / Path(str(script)).name
    checksum = f"{zlib.crc32(text.read_bytes()):08x}" if text.is_file() else None
    metrics, one_step_in = thinned(folder, "metrics", MOST_STEPS)
    samples, one_sample_in = thinned(folder, "samples", MOST_SAMPLES, "prompt", "completions")
    note = ""
    if one_step_in > 1:
        note += f" The curves show one step in {one_step_in}."
    if one_sample_in > 1:
        note += f" The samples show one logged step in {one_sample_in}."
    return {
        "name": folder.resolve().name,
        "command": command(script, flags),
        "config": {"script": script, TEXT: checksum} | flags,
        "note": note,
        "summary": read_summary(folder),
        "metrics": metrics,
        "samples": samples,
        "evaluation": read_log(folder, "evaluation", "prompt", "base", "trained")}


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
        if len(seeds) == len(group):
            found.append(group)
        else:
            found += [[run] for run in group]
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


def labels(groups, rows):
    """Name each group by up to three flags in which the groups differ, or by its runs if these
    flags do not tell all groups apart. A run without other seeds keeps its name. -> list of str"""
    flags = []
    for i in range(len(groups)):
        words = [f"{flag} {values[i]}" if values[i] != "" else f"no {flag}"
                 for flag, differs, values in rows
                 if differs and flag not in (*SEEDS, TEXT) and values[i] is not None]
        flags.append(", ".join(words) if len(words) <= 3 else "")
    if len(set(flags)) < len(flags):
        flags = [""] * len(flags)
    found = []
    for group, text in zip(groups, flags):
        names = ", ".join(run["name"] for run in group)
        if len(group) > 1:
            found.append(f"{text or names} ({len(group)} seeds)")
        else:
            found.append(f"{names} ({text})" if text else names)
    return found


def ends_of(run):
    """Choose the scores that sum up a run. Without them, or with few problems, it is the reward.
    -> {label: (value before training, value after it)}"""
    base, trained = run["summary"]["base"], run["summary"]["trained"]
    ends = {label: (base[name], trained[name]) for name, label in SCORES.items()
            if base.get(name) is not None and trained.get(name) is not None
            and not (name in LUCKY and "greedy_right" in base)}
    if ends.get(SCORES["think_share"]) == (0, 0):       # of a task without thoughts
        del ends[SCORES["think_share"]]
    if not ends or trained.get("problems", FEW) < FEW:
        rewards = column(run["metrics"], "reward")
        return {"the mean reward of a step": (rewards[0], rewards[-1])} if rewards else {}
    return ends


def sum_up(group):
    """Sum up what happened in the runs of a group in a sentence or two. -> str"""
    ended = [run for run in group if run["summary"] is not None]
    note = group[0]["note"]
    if not ended:
        last = max((line["step"] for run in group for line in run["metrics"]), default=0)
        return f"The training was stopped after step {last}, or it continues.{note}"
    changes = []
    found = [ends_of(run) for run in ended]
    for label in found[0]:
        if all(label in ends for ends in found):
            before, after = (fmean(ends[label][i] for ends in found) for i in (0, 1))
            changes.append(f"{label} went from {before:.3f} to {after:.3f}")
    first, last = ", ".join(changes[:-1]), "".join(changes[-1:])
    change = " and ".join(filter(None, (first, last))) or "there is no score to compare"
    steps = " or ".join(map(str, sorted({run["summary"]["steps"] for run in ended})))
    if len(ended) == 1:                                 # as in the last line of the run
        what = f"{ended[0]['summary']['seconds_total']:.0f} s in all"
    else:
        what = f"mean of {len(ended)} seeds"
    text = f"In {steps} steps ({what}), {change}.{note}"
    if len(ended) < len(group):
        text = f"{len(ended)} of {len(group)} runs have ended. {text}"
    return text


# ---- 3. report.html --------------------------------------------------------------------------

def write_report(folder, *others):
    """Write the report on some runs to report.html in the folder of the first one. -> its path"""
    folders = [Path(path) for path in (folder, *others)]
    runs = [read_run(path) for path in folders]
    if len({run["name"] for run in runs}) < len(runs):  # two runs have the same name
        for path, run in zip(folders, runs):
            run["name"] = str(path)
    path = folders[0] / ("comparison.html" if others else "report.html")
    groups = grouped(runs)
    rows = compared(groups)
    shown = [{"label": label, "sentence": sum_up(group), "runs": [runs.index(run) for run in group]}
             for group, label in zip(groups, labels(groups, rows))]
    explained = os.path.relpath(common.HERE / "docs/metrics.md", path.parent)
    data = json.dumps({"config": rows, "runs": runs, "groups": shown,
                       "explained": quote(explained)}, allow_nan=False)
    # without any character that could end the script element or begin a tag
    data = data.translate({ord(c): f"\\u{ord(c):04x}" for c in "<>&"})
    template = TEMPLATE.read_text(encoding="utf-8")
    plumbing.write(path, template.replace("{{DATA}}", data))    # all of it, also on a full disk
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
