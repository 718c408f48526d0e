"""Read the log of any trainer: a folder of ours, TRL's trainer_state.json, verl's file logger, JSON
lines, CSV as W&B exports it, and TensorBoard's event files."""
import contextlib
import csv
from pathlib import Path
from types import SimpleNamespace

import common
from plumbing import read_config
from report.logs import finite, loads, read_log, records

# What verl calls the metrics for which the scripts have TRL's names. The first name that a record
# has is taken, and validation scores are recognized by how they begin.
OF_VERL = {
    "reward": ("critic/score/mean", "critic/rewards/mean"), "grad_norm": ("actor/grad_norm",),
    "entropy": ("actor/entropy", "actor/entropy_loss"), "kl": ("actor/kl_loss", "actor/ppo_kl"),
    "completions/mean_length": ("response_length/mean",),
    "completions/clipped_ratio": ("response_length/clip_ratio",), "loss": ("actor/pg_loss",),
    "step": ("training/global_step", "trainer/global_step", "global_step", "Step", "_step")}
VALIDATION = ("val-core/", "val/test_score/")


def read(path):
    """Read a run. -> flags of ours (empty for others), records of steps and evaluations, samples.
    Exits with one line if there is no log, or none that can be read"""
    path = Path(path)
    if (path / "metrics.jsonl").is_file():
        flags = SimpleNamespace(**read_config(path)[1])
        return flags, read_log(path, "metrics", "step"), read_log(path, "samples", "completions")
    if path.is_dir():
        path = log_in(path)
    if not path.exists():
        common.fail(f"{path}: does not exist")
    try:
        found = [renamed(one) for one in content_of(path) if isinstance(one, dict)]
    except (OSError, TypeError, ValueError, csv.Error) as error:
        common.fail(f"{path}: is not a log that can be read: {str(error)[:100]!r}")
    if not any(isinstance(one.get("reward"), (int, float)) for one in found):
        common.fail(f"{path}: no line has a reward, under its name in TRL or verl")
    return SimpleNamespace(), merged(found), []


def log_in(folder):
    """Find the log in a folder of TRL's trainer, of its newest checkpoint, or of TensorBoard.
    -> Path"""
    states = sorted(folder.glob("**/trainer_state.json"), key=lambda path: path.stat().st_mtime)
    events = sorted(folder.glob("**/events.out.tfevents*"))
    if not states and not events:
        common.fail(f"{folder}: has no metrics.jsonl, trainer_state.json or event file")
    return states[-1] if states else events[-1].parent


def content_of(path):
    """List what a log contains. Its name shows the format. The lines of verl are {"step": 1,
    "data": {...}}. -> list of dicts"""
    if path.is_dir() or path.name.startswith("events.out.tfevents"):
        return of_tensorboard(path)
    if path.suffix == ".csv":
        with open(path, encoding="utf-8-sig", newline="", errors="replace") as rows:
            return [of_strings(row) for row in csv.DictReader(rows)]
    if path.suffix == ".json":
        content = loads(path.read_text("utf-8-sig"))
        return content.get("log_history", []) if isinstance(content, dict) else content
    return [one | one["data"] if isinstance(one.get("data"), dict) else one
            for one in records(path)]


def of_strings(row):
    """Turn the cells of a CSV row into numbers; empty cells and texts are left out. -> dict"""
    numbers = {}
    for name, cell in row.items():
        with contextlib.suppress(TypeError, ValueError):
            numbers[name] = finite(cell)
    return numbers


def of_tensorboard(path):
    """Read event files with TensorBoard, which has to be installed. -> list of dicts"""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        common.fail(f"{path}: event files need a package: pip install tensorboard")
    events = EventAccumulator(str(path), size_guidance={"scalars": 0})
    events.Reload()
    return [{"step": event.step, name: event.value}
            for name in events.Tags()["scalars"] for event in events.Scalars(name)]


def renamed(record):
    """Give the metrics of a record their names in TRL. W&B writes "RUN - train/reward" in CSV, and
    adds columns with the smallest and the largest value of an interval. -> dict"""
    plain = {}
    for name, value in record.items():
        short = str(name).rpartition(" - ")[2]
        if not short.endswith(("__MIN", "__MAX")):
            plain[short.removeprefix("train/")] = value
    for name, others in OF_VERL.items():
        if plain.get(name) is None:
            plain[name] = next((x for x in map(plain.get, others) if x is not None), None)
    scores = [value for name, value in plain.items() if name.startswith(VALIDATION)
              and isinstance(value, (int, float))]
    if scores:
        plain.setdefault("eval_reward", scores[0])
    return plain


def merged(found):
    """Join records of the same step, which TensorBoard and some programs write one by one. Records
    without a step stay as they are. -> list of dicts, in the order of the steps"""
    by_step = {}
    for place, record in enumerate(found):
        step = record["step"] if isinstance(record.get("step"), (int, float)) else (place,)
        by_step.setdefault(step, {}).update(
            {name: value for name, value in record.items() if value is not None})
    return [*by_step.values()]
