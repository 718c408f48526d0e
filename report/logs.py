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
    """Read the records of NAME.jsonl that have these keys. -> list of dicts, empty if there is no
    such log"""
    return [*records(Path(folder, f"{name}.jsonl"), *keys)]


def records(path, *keys):
    """Yield the records of a log that have these keys, without reading the whole log at once. Lines
    that aren't JSON objects are skipped: a killed run may end in half a line. A step has to be a
    number."""
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace", newline="\n") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):
                record = loads(line)
                if (isinstance(record, dict) and record.keys() >= set(keys)
                        and isinstance(record.get("step", 0), (int, float))):
                    yield record


def thinned(folder, name, most, *keys):
    """Read at most `most` steps of NAME.jsonl, evenly spaced, besides the last step and those with
    an evaluation. -> list of dicts, distance of the steps that are read"""
    path = Path(folder, f"{name}.jsonl")
    steps = [*dict.fromkeys(record["step"] for record in records(path, "step", *keys))]
    stride = max(1, math.ceil(len(steps) / most))
    kept = {*steps[::stride], *steps[-1:]}
    return [record for record in records(path, "step", *keys)
            if record["step"] in kept or any(key.startswith("eval/") for key in record)], stride


def loads(text):
    """Read JSON, with None for NaN and infinities, because a browser cannot read those."""
    return json.loads(text, parse_constant=finite, parse_float=finite)


def finite(number):
    """Convert a number or its digits to a float. None if it isn't finite, such as 1e999."""
    number = float(number)
    return number if math.isfinite(number) else None
