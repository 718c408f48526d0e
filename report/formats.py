"""Read a log into one shape, a Run: a folder of ours, TRL's trainer_state.json, TensorBoard's event
files, a table of W&B, and JSON lines such as those of verl's file logger. The names of TRL,
ms-swift and verl are known. --map gives all others, because a name does not show what it means.
"""
import csv
import json
import math
import os
import re
import shlex
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import common
from plumbing import read_config
from report import command
from report.logs import opened, read_log, records


class Run(NamedTuple):
    trainer: str            # "ours", "TRL", "verl", or "--map", which gives the names
    flags: SimpleNamespace  # of a run of ours, otherwise empty
    records: list           # a dict for each step, in order: quantity or evaluation -> number
    names: dict             # quantity -> its names in the log, which are added
    sets: list              # the names of the evaluations
    samples: list           # of a run of ours
    source: str             # the file or folder, and the run in it that was chosen
    unread: list = []       # all other names of the log
    absent: list = []       # names that --map gives and the log lacks


# Of each quantity: what it is, its names in TRL, ms-swift and ours, and in verl, of which the first
# one in a log counts
NAMES = {row.split("|")[0].strip(): [*map(str.strip, row.split("|")[1:])] for row in """\
reward | mean reward | reward objective/scores | critic/score/mean critic/rewards/mean
after_penalties | mean reward less penalties | objective/rlhf_reward | critic/rewards/mean
accuracy | share of right answers | accuracy rewards/accuracy_reward/mean rewards/accuracy/mean \
rewards/MathAccuracy/mean |
equal | share of groups whose rewards are equal | frac_reward_zero_std |
signal | 0 if the rewards of all groups are equal | reward_std | critic/advantages/max
lowest | lowest advantage of a batch | | critic/advantages/min
grad_norm | length of the gradient | grad_norm | actor/grad_norm
lr | learning rate | learning_rate lr | actor/lr
loss | loss, which may be 0 | loss | actor/pg_loss
entropy | entropy of a token | entropy entropy/mean policy/entropy_avg | \
actor/entropy actor/entropy_loss
kl | KL to the reference for each token | kl | actor/kl_loss actor/reward_kl_penalty
old_kl | KL to the policy before the update | policy/approxkl_avg | actor/ppo_kl
clipped | share of clipped tokens | clip_ratio/region_mean policy/clipfrac_avg | actor/pg_clipfrac
length | tokens of a completion | completions/mean_length completion_length | response_length/mean
truncated | share of cut completions | completions/clipped_ratio | response_length/clip_ratio
prompts_cut | share of cut prompts | | prompt_length/clip_ratio
sampler_logp | difference of log-probs to the sampler | sampling/sampling_logp_difference/mean |
largest_logp | largest difference of log-probs | sampling/sampling_logp_difference/max |
sampler_prob | difference of probabilities to the sampler | | training/rollout_probs_diff_mean
sampler_kl | KL to the sampler | rollout_correction/k3_kl rollout_correction/kl | \
rollout_corr/k3_kl rollout_corr/kl
value_loss | loss of the critic | value_loss loss/value_avg | critic/vf_loss
explained | explained variance of the critic | explained_variance | critic/vf_explained_var
calls | tool calls of a completion | tools/call_frequency | tool_call_counts/mean
failures | share of tool calls that fail | tools/failure_frequency |
filtered | a metric that is logged if equal groups are replaced | | num_gen_batches \
training/filter_groups/evicted_samples
order | share of DPO's pairs in the right order | rewards/accuracies |
margins | margin between DPO's chosen and rejected answers | rewards/margins |
surprise | mean of -log pi of the sampled tokens | sampling/surprise |
log_ratio | largest log-ratio after the updates | max_log_ratio |""".splitlines()}
TRAINERS = {"TRL": 1, "verl": 2}        # the column of NAMES
SETS = {"ours": r"eval/greedy(_return|_all_tests)?(/.*)?",      # evaluations
        "TRL": r"eval[_/]([^/]+_)?reward|eval[_/]rewards/accuracies",
        "verl": r"val-core/.+/mean@\d+|val/test_score/.+"}
OTHERS = {"held-out": "score on held-out problems", "step": "training step"}    # of --map
OWN = {"reward_std", "frac_reward_zero_std", "num_tokens", "rewards/margins", "objective/scores"}
STEP = ("step", "global_step", "global_step/max_steps", "training/global_step", "Step", "_step")


def plain(name):
    """Remove spaces and train/, which trackers add, from a name."""
    return str(name).strip().removeprefix("train/")


def placed(names, mapped):
    """Decide what the names of a log are. They are TRL's if one of OWN is among them, or if they
    are all TRL's; names of --map come before these. -> trainer, {quantity: names}, sets"""
    used, trainer, pattern = {}, "--map", "(?!)"
    for one, place in TRAINERS.items():
        found = {ours: [theirs] for ours, row in NAMES.items()
                 for theirs in reversed(row[place].split()) if theirs in names}
        known = {*STEP, "epoch", *sum(found.values(), [])}
        if {"reward", "margins"} & found.keys() and (one == "verl" or names & OWN or all(
                name in known or re.fullmatch(SETS["TRL"], name) for name in names)):
            used, trainer, pattern = found, one, SETS[one]
    given = {}
    for theirs, ours in mapped.items():
        if theirs in names and ours in NAMES:
            given.setdefault(ours, []).append(theirs)
    sets = {name for name in names if re.fullmatch(pattern, name)} - mapped.keys()
    used = {ours: some for ours, some in used.items() if not {*some} & mapped.keys()}
    return trainer, used | given, sorted(
        sets | {name for name in names if mapped.get(name) == "held-out"})


def question(names, path, run):
    """Write which names were not placed, with a command that places them. -> str"""
    which = ["--run", run] if run else []
    pairs = [shlex.quote(f"{name}=?") for name in sorted(names - {*STEP})]
    words = {name: row[0] for name, row in NAMES.items()} | OTHERS
    return "\n".join([
        f"{path}: these are not the names of TRL, ms-swift or verl. Below, replace the ? of a name "
        "by a word of this list, if one fits; one name has to be the reward.",
        *(f"  {word:15} {what}" for word, what in words.items()),
        " \\\n    ".join([command("report.check", str(path), *which, "--map"), *pairs])])


# ---- one reader for each format --------------------------------------------------------------

def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def number(value):
    """Convert a cell or a value; the step of ms-swift is "12/60". -> float, or the value itself"""
    try:
        return float(re.sub(r"^(\d+)/\d+$", r"\1", value)) if isinstance(value, str) else value
    except ValueError:
        return value


def of_table(path):
    """Read a table. W&B calls its columns "RUN - METRIC", and adds the smallest and the largest
    value of an interval; spreadsheets may write 0,5 between semicolons or tabs. -> {run: dicts}"""
    with opened(path, encoding="utf-8-sig", newline="", errors="replace") as file:
        separator = max(",;\t", key=file.readline().count)
        file.seek(0)
        head, *rows = csv.reader(file, delimiter=separator)
    runs = {}
    for row in rows:
        found = {"": {}}
        for heading, cell in zip(head, row):
            run, _, metric = heading.strip().rpartition(" - ")
            if cell and not metric.endswith(("__MIN", "__MAX")):
                found.setdefault(run, {})[metric] = cell if separator == "," else (
                    cell.replace(",", "."))
        for run in [name for name in found if name] or [""]:
            runs.setdefault(run, []).append(found[""] | found.get(run, {}))
    return runs


def of_events(files):
    """Read event files with TensorBoard, which has to be installed. -> dicts"""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        common.fail(f"{files[0]}: event files need a package: pip install tensorboard")
    found = []
    for file in files:
        events = EventAccumulator(str(file), {"scalars": 0}, purge_orphaned_data=False)
        events.Reload()
        found += sorted(({"step": event.step, name: event.value}
                         for name in events.Tags()["scalars"] for event in events.Scalars(name)),
                        key=lambda one: one["step"])        # a clock may be set back
    return found


def content_of(files):
    """Read a file, or the event files of a run. The name shows the format. -> {run: dicts}"""
    path = files[0]
    if path.name.startswith("events.out.tfevents"):
        return {"": of_events(files)}
    ending = Path(path.name.removesuffix(".gz")).suffix
    if ending in (".csv", ".tsv"):
        return of_table(path)
    if ending == ".json":                       # trainer_state.json
        with opened(path, encoding="utf-8-sig") as file:
            return {"": json.load(file)["log_history"]}
    return {"": [one | one["data"] if isinstance(one.get("data"), dict) else one    # verl's
                 for one in records(path, parse=json.loads)]}


def checkpoint(path):
    """The step of a trainer_state.json's checkpoint; the one at the end of the run comes last."""
    found = re.fullmatch(r"checkpoint-(\d+)", path.parent.name)
    return int(found[1]) if found else math.inf


def logs_in(folder):
    """Find the logs in a folder. Of a run with several, the one with all steps counts: TRL also
    writes events, ms-swift also trainer_state.json. -> {folder of a run, relative: files}"""
    logs = {}
    for path in sorted(folder.rglob("events.out.tfevents*")):
        home = path.parent
        if home.parent.name == "runs" and folder in home.parents[1:]:   # output/runs/DATE_HOST
            home = home.parents[1]
        logs.setdefault(home, []).append(path)
    for path in sorted(folder.rglob("trainer_state.json"), key=checkpoint):
        is_inside = checkpoint(path) < math.inf and path.parent != folder
        logs[path.parents[1 if is_inside else 0]] = [path]
    for name in ("logging.jsonl", "metrics.jsonl"):
        logs |= {path.parent: [path] for path in folder.rglob(name)}
    return {home.relative_to(folder).as_posix(): files for home, files in sorted(logs.items())}


# ---- from the content to a run ---------------------------------------------------------------

def tidy(record, mapped):
    """Convert what is a number, simplify its name, and find the step. -> dict"""
    one = {plain(name): number(x) for name, x in record.items()}
    steps = [one[name] for name in [name for name in mapped if mapped[name] == "step"] or STEP
             if is_number(one.get(name)) and math.isfinite(one[name])]
    return {name: x for name, x in one.items() if is_number(x)} | ({"step": steps[0]} if steps
                                                                   else {})


def separated(found, goals):
    """Separate the runs that follow one another in a log. If the steps of what is learned (goals:
    its names) go back to the first one, another run begins; if less, it was resumed. -> lists"""
    parts, seen = [[]], []
    for record in found:
        if "step" in record and not goals.isdisjoint(record):
            if len(seen) > 1 and record["step"] <= seen[0] < seen[1]:
                parts.append([])
                seen = []
            seen.append(record["step"])
        parts[-1].append(record)
    return parts


def merged(found):
    """Join the records of a step, which some programs write in parts; what was written later
    counts. Records without a step stay unchanged. -> list of dicts, in the order of the steps"""
    by_step, before = {}, -math.inf
    for place, record in enumerate(found, start=1):
        before = record.get("step", before)
        by_step.setdefault((before, 0 if "step" in record else place), {}).update(record)
    return [by_step[key] for key in sorted(by_step)]


def run_of(found, mapped, trainer="", flags=None, samples=(), source=""):
    """Make a Run of records. trainer: "ours", or "" if the names show it. -> Run"""
    names = {name for one in found for name in one}
    theirs, used, sets = placed(names | OWN if trainer else names, mapped)
    used = {ours: some for ours, some in used.items() if names.issuperset(some)}
    if trainer:
        sets = sorted(name for name in names if re.fullmatch(SETS[trainer], name))
    is_read = {*sum(used.values(), []), *sets, *STEP, "epoch", "teacher_kl"} | {
        name for name in mapped if mapped[name] == "step"}
    return Run(trainer or theirs, flags or SimpleNamespace(), [
        {name: one[name] for name in ("step", "teacher_kl", *sets) if name in one}
        | {ours: float(sum(one[name] for name in some)) for ours, some in used.items()
           if one.keys() >= {*some}} for one in found],
        used, sets, samples, source, sorted(names - is_read), sorted(mapped.keys() - names))


def of_ours(folder, source, mapped):
    """Read a run of one of our scripts. -> Run, or None"""
    config = folder / "config.json"
    if not (folder / "metrics.jsonl").is_file() or not config.is_file() or (
            '"script"' not in config.read_text("utf-8", "replace")):
        return None
    found = [tidy(one, {}) for one in records(folder / "metrics.jsonl", "step", parse=json.loads)]
    return run_of(found, mapped, "ours", SimpleNamespace(**read_config(folder)[1]),
                  read_log(folder, "samples", "completions"), source)


def read(path, run=None, mapped=None):
    """Read a run. run: which one, if there are several; mapped: {name in the log: a word of NAMES
    or OTHERS}. -> Run. Exits with a message if there is no log, none that can be read, names that
    are not known, or several runs of which none was chosen"""
    path, runs, names = Path(path), {}, set()
    mapped = {plain(theirs): ours for theirs, ours in (mapped or {}).items()}
    if not os.path.exists(path):
        common.fail(f"{path}: does not exist")
    is_log = path.is_dir() or path.name == "metrics.jsonl"
    if is_log and (ours := of_ours(path if path.is_dir() else path.parent, str(path), mapped)):
        return ours
    logs = logs_in(path) if path.is_dir() else {".": [path]}
    try:
        for home, files in logs.items():
            for name, found in content_of(files).items():
                found = [tidy(one, mapped) for one in found if isinstance(one, dict)]
                names |= (own := {name for one in found for name in one})
                used = placed(own, mapped)[1]
                goals = {*used.get("reward", used.get("margins", []))}
                parts = separated(found, goals) if goals else []
                for i, part in enumerate(parts, start=1):
                    words = (home.strip("."), name, str(i) if len(parts) > 1 else "")
                    runs[" ".join(filter(None, words))] = part, files[0].parent
    except (AttributeError, EOFError, OSError, TypeError, ValueError, LookupError, csv.Error,
            zlib.error) as error:
        common.fail(f"{path}: is not a log that can be read: {str(error)[:100]!r}")
    if not runs:
        common.fail(question(names, path, run) if names - {*STEP} else
                    f"{path}: has no log with numbers; docs/check.md lists what can be read")
    if run not in runs and (run is not None or len(runs) > 1):
        some = ", ".join([*runs][:9]) + (", ..." if len(runs) > 9 else "")
        common.fail(f"{path}: contains {len(runs)} runs; choose one with --run: {some}")
    chosen = next(iter(runs)) if run is None else run
    found, folder = runs[chosen]
    where = f"{path}, run {chosen}" if chosen else str(path)
    ours = of_ours(folder, where, mapped) if path.is_dir() else None
    return ours or run_of(merged(found), mapped, source=where)
