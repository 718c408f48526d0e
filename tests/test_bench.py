"""The bench reports what it measures, and make gpu reports commands that fail."""
import contextlib
import json

import pytest
import torch

from lab import docs, gpu
from lab import speed as bench

# ---- 1. the bench ----------------------------------------------------------------------------

def test_every_row_is_there_as_soon_as_it_is_measured(monkeypatch):
    clock = iter(range(1000))

    def measured(what, part):
        return bench.take_turns({"ours": None, "torch": None}, lambda job: next(clock))
    monkeypatch.setattr(bench, "logits", measured)
    monkeypatch.setattr(bench, "LOGITS", [(8, 5)])
    so_far = [json.loads(json.dumps(rows)) for rows in bench.measure()]
    assert [len(rows) for rows in so_far] == [1, 2, 3, 4]
    assert so_far[0] == [{"of": {"logits": "8 x 5 bfloat16", "pass": "forward"},
                          "seconds": {"ours": [2, 4, 6, 8, 10], "torch": [3, 5, 7, 9, 11]}}]


def test_the_page_has_the_table_of_the_records():
    page = (docs.DOCS / "speed.md").read_text()
    assert f"make bench: logits -->\n{bench.tables()}<!-- end" in page


# ---- 2. make gpu -----------------------------------------------------------------------------

@pytest.mark.parametrize("code, seconds, outcome, last", [
    ("print('held out: 1'); print('folder')", 300, "ok", "held out: 1 |"),
    ("print('held out: 1'); raise ValueError('bad')", 300, "ended with 1", "ValueError: bad |"),
    ("import time; time.sleep(999)", 0.1, "stopped after 0 s", "")])
def test_commands_that_fail_or_hang_are_reported(
        tmp_path, monkeypatch, code, seconds, outcome, last):
    (tmp_path / "job.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, value in {"FOLDER": tmp_path / "gpu", "SECONDS": seconds,
                        "commands": lambda _: {"job": "job"}}.items():
        monkeypatch.setattr(gpu, name, value)
    is_ok = outcome == "ok"
    with contextlib.nullcontext() if is_ok else pytest.raises(SystemExit, match="1"):
        gpu.main(["--dry_run"])
    text = (tmp_path / f"gpu/gpu-{gpu.SLUG}.md").read_text()
    assert f"| job | {outcome} |" in text and f"| {last}" in text
    assert (f"## job: {outcome}" in text) != is_ok


def test_a_resumed_run_has_the_weights_of_a_whole_one(tmp_path):
    for name, number in (("whole", 1.0), ("same", 1.0), ("other", 1.25)):
        (tmp_path / name).mkdir()
        torch.save({"policy": {"w": torch.tensor(number)}}, tmp_path / name / "checkpoint.pt")
    assert gpu.compare(tmp_path / "whole", tmp_path / "same") == "ok"
    assert "differ from those of whole" in gpu.compare(tmp_path / "whole", tmp_path / "other")
