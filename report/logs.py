"""Read the logs that a run writes."""
import contextlib
import json
import math
from pathlib import Path


def read_summary(folder):
    """The scores of base and trained policy, and the times. -> dict; None before the run's end"""
    path = Path(folder, "summary.json")
    return loads(path.read_text(encoding="utf-8")) if path.exists() else None


def read_log(folder, name, *keys):
    """The records of NAME.jsonl that have these keys; [] without such a log. Lines that are no
    record, such as the half of one that a kill left, are skipped. -> list of dicts"""
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
    """json.loads, in which NaN and infinities become None, as a browser's JSON lacks them."""
    return json.loads(text, parse_constant=finite, parse_float=finite)


def finite(number):
    """The number, or the digits of one, as a float; None if it is not finite, as 1e999."""
    number = float(number)
    return number if math.isfinite(number) else None
