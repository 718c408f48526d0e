"""The bench, in a tiny size, measures what it reports, and make gpu reports commands that fail."""
import contextlib
import json

import pretend
import pytest
import torch

import grpo
from lab import docs, gpu
from lab import speed as bench


@pytest.fixture
def tiny(monkeypatch):
    """Make the bench use a tiny policy, and no packages except for torch."""
    flags = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
    for name, value in {"SIZES": {"tiny": flags}, "SHAPE": (8, 8, 12), "LOGITS": [],
                        "REPEATS": 2}.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench, "find_spec", lambda package: package == "torch")


# ---- 1. the bench ----------------------------------------------------------------------------

@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_record_has_a_row_for_every_kind_as_soon_as_it_is_measured(tiny, monkeypatch, device):
    monkeypatch.setattr(bench, "DEVICE", device)
    is_pretended = device == "cuda" and not torch.cuda.is_available()
    with pretend.cuda() if is_pretended else contextlib.nullcontext():
        so_far = [json.loads(json.dumps(measured)) for measured in bench.measure()]
    assert [len(found["step"]) for found in so_far] == [1, 2, 3]
    for row, kind in zip(so_far[-1]["step"], bench.KINDS, strict=True):
        assert row["of"]["lengths"] == kind and len(row["seconds"]["ours"]) == bench.REPEATS
        assert ("no graph" in row["seconds"]) == (device == "cuda")


def test_the_page_has_the_tables_of_the_records():
    for name, text in bench.tables().items():
        assert f"make bench: {name} -->\n{text}<!-- end" in (docs.DOCS / "speed.md").read_text()


def test_a_step_samples_and_learns_from_the_lengths_and_rewards_that_were_ordered(tiny):
    ours = bench.Ours("tiny", bench.KINDS[2])
    weights = [weight.clone() for weight in ours.policy.parameters()]
    batch = ours.step()
    assert (batch.lengths == 12).sum() == 6 and {*batch.lengths.tolist()} == {4, 5, 6, 7, 8, 12}
    has_signal = batch.rewards.amax(dim=1) > batch.rewards.amin(dim=1)
    assert has_signal.tolist() == [True, False, False, False] * 2
    assert not all(map(torch.equal, weights, ours.policy.parameters()))
    assert grpo.EOS != bench.END                                # EOS was restored
    with pytest.raises(RuntimeError, match="tokens were sampled instead of"):
        bench.check_lengths(ours.lengths + 1, ours.lengths)


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
