"""Read the logs that a run writes."""
import contextlib
import json
import math
from pathlib import Path


def read_summary(folder):
    """Read the scores and times of a run. -> dict, or None if the run has not ended"""
    path = Path(folder, "summary.json")
    return loads(path.read_text(encoding="utf-8")) if path.exists() else None


def read_log(folder, name, *keys):
    """Read the records of NAME.jsonl that have these keys. Lines that aren't JSON objects are
    skipped: a killed run may end in half a line. -> list of dicts, empty if there is no such log"""
    return list(records(folder, name, *keys))


def records(folder, name, *keys):
    """Yield what read_log lists, without reading the whole log at once. A step has to be a number.
    """
    path = Path(folder, f"{name}.jsonl")
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace", newline="\n") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):
                record = loads(line)
                if (isinstance(record, dict) and record.keys() >= set(keys)
                        and isinstance(record.get("step", 0), (int, float))):
                    yield record


def thinned(found, most):
    """Keep the records of at most 2 * most steps, evenly spaced, and those of the last step.
    -> list of dicts, distance of the steps that are kept"""
    kept, stride, number, step, last = [], 1, -1, None, []
    for record in found:
        if record["step"] != step:
            step, last = record["step"], []
            number += 1
        last.append((number, record))
        if number % stride == 0:
            kept.append((number, record))
            if number // stride >= 2 * most:
                stride *= 2
                kept = [(place, one) for place, one in kept if place % stride == 0]
    if last and number % stride > 0:
        kept += last
    return [record for _, record in kept], stride


def loads(text):
    """Read JSON, with None for NaN and infinities, because a browser cannot read those."""
    return json.loads(text, parse_constant=finite, parse_float=finite)


def finite(number):
    """Convert a number or its digits to a float. None if it isn't finite, such as 1e999."""
    number = float(number)
    return number if math.isfinite(number) else None
