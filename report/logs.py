"""Read the logs that a run writes."""
import contextlib
import gzip
import json
import math
from pathlib import Path

SUMMARY = {"base", "trained", "steps", "seconds_total"}         # summary.json has at least these


def read_summary(folder):
    """Read the scores and times of a run. ValueError if the file is damaged. -> dict, or None if
    the run has not ended"""
    path = Path(folder, "summary.json")
    if not path.exists():
        return None
    with contextlib.suppress(ValueError):
        summary = loads(path.read_text(encoding="utf-8"))
        if isinstance(summary, dict) and summary.keys() >= SUMMARY:
            for name, counts in read_counts(folder).items():
                if isinstance(summary.get(name), dict):
                    summary[name]["steps"] = counts
            return summary
    raise ValueError(f"{path}: is damaged; if you remove it, the rest of the run can be shown")


def read_counts(folder):
    """Read how often each step of the thoughts was right. -> {"base": {step: [times written, times
    right]}, "trained": ...}, empty if there is no steps.json, or a damaged one"""
    with contextlib.suppress(OSError, ValueError):
        counts = loads(Path(folder, "steps.json").read_text(encoding="utf-8"))
        if isinstance(counts, dict):
            return counts
    return {}


def read_log(folder, name, *keys):
    """Read the records of NAME.jsonl that have these keys. -> list of dicts, empty if there is no
    such log"""
    return [*records(Path(folder, f"{name}.jsonl"), *keys)]


def opened(path, **how):
    """Open a text, which may be compressed with gzip. -> file"""
    return (gzip.open if path.suffix == ".gz" else open)(path, "rt", **how)


def records(path, *keys, parse=None):
    """Yield the records of a log that have these keys, without reading the whole log at once. Lines
    that aren't JSON objects are skipped: a killed run may end in half a line. If a step is among
    the keys, it has to be a number. parse: json.loads keeps nan and inf, loads does not."""
    if not path.exists():
        return
    with opened(path, encoding="utf-8-sig", errors="replace", newline="\n") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):
                record = (parse or loads)(line)
                if (isinstance(record, dict) and record.keys() >= set(keys)
                        and ("step" not in keys or isinstance(record["step"], (int, float)))):
                    yield record


def thinned(folder, name, most, *keys):
    """Read at most `most` steps of NAME.jsonl, evenly spaced, at most `most` of those with an
    evaluation, and the last step. -> list of dicts, distance of the steps that are read"""
    path = Path(folder, f"{name}.jsonl")
    has_scores = {}                             # for each step
    for record in records(path, "step", *keys):
        has_scores[record["step"]] = any(key.startswith("eval/") for key in record)
    steps = [*has_scores]
    evaluated = [step for step in steps if has_scores[step]]
    stride, distance = (max(1, math.ceil(len(found) / most)) for found in (steps, evaluated))
    kept = {*steps[::stride], *evaluated[::distance], *steps[-1:]}
    found = [record for record in records(path, "step", *keys) if record["step"] in kept]
    return found, stride


def loads(text):
    """Read JSON, with None for NaN and infinities, because a browser cannot read those."""
    return json.loads(text, parse_constant=finite, parse_float=finite)


def finite(number):
    """Convert a number or its digits to a float. None if it isn't finite, such as 1e999."""
    number = float(number)
    return number if math.isfinite(number) else None
