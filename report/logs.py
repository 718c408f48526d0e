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
    path = Path(folder, f"{name}.jsonl")
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    records = []
    for line in text.split("\n"):
        with contextlib.suppress(ValueError):
            record = loads(line)
            if isinstance(record, dict) and record.keys() >= set(keys):
                records.append(record)
    return records


def loads(text):
    """Read JSON, with None for NaN and infinities, because a browser cannot read those."""
    return json.loads(text, parse_constant=finite, parse_float=finite)


def finite(number):
    """Convert a number or its digits to a float. None if it isn't finite, such as 1e999."""
    number = float(number)
    return number if math.isfinite(number) else None
