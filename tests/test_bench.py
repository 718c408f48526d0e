"""The bench measures what it says it does, at a tiny size, and make gpu reports what went wrong."""
import contextlib
import importlib
import json
from importlib.util import find_spec

import pretend
import pytest
import torch

import common
import grpo
from lab import docs, gpu
from lab import speed as bench
from learn import sync


@pytest.fixture(params=["cpu", "cuda"])
def device(request, monkeypatch):
    """The CPU, and a simulated GPU, unless there is one."""
    monkeypatch.setattr(bench, "DEVICE", request.param)
    is_pretended = request.param == "cuda" and not torch.cuda.is_available()
    with pretend.cuda() if is_pretended else contextlib.nullcontext():
        yield request.param


@pytest.fixture
def tiny(monkeypatch):
    """A tiny policy alone, without the packages of others."""
    flags = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
    for name, value in {"SIZES": {"tiny": flags}, "SHAPE": (8, 8, 12), "LOGITS": [],
                        "REPEATS": 2}.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench, "find_spec", lambda package: package == "torch")


# ---- 1. the bench ----------------------------------------------------------------------------

def test_a_record_has_a_row_for_every_kind_as_soon_as_it_is_measured(tiny, device):
    so_far = [json.loads(json.dumps(measured)) for measured in bench.measure()]
    counts = [(len(found["rollout"]), len(found["step"])) for found in so_far]
    assert counts == [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)]
    rows = so_far[-1]["rollout"] + so_far[-1]["step"]
    assert [row["of"]["lengths"] for row in rows] == [*bench.KINDS[:2], *bench.KINDS]
    assert all(len(row["seconds"]["ours"]) == bench.REPEATS for row in rows)
    assert ("no graph" in rows[0]["seconds"]) == (device == "cuda")


def test_the_page_has_the_tables_of_the_records():
    for name, text in bench.tables().items():
        assert f"make bench: {name} -->\n{text}<!-- end" in (docs.DOCS / "speed.md").read_text()


def test_all_who_are_timed_compute_the_same_gradient(tiny, monkeypatch):
    testing = pytest.importorskip("triton.testing")
    outputs = []
    monkeypatch.setattr(testing, "do_bench", lambda job, **_: outputs.append(job()) or 1.0)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    bench.logits_row((6, 9), torch.float32, "backward")
    torch.testing.assert_close(*outputs[:2])


def test_a_step_samples_and_learns_from_the_lengths_and_rewards_that_were_ordered(tiny):
    ours = bench.Ours("tiny", bench.KINDS[2])
    weights = [weight.clone() for weight in ours.policy.parameters()]
    batch = ours.sample()
    assert (batch.lengths == 12).sum() == 6 and {*batch.lengths.tolist()} == {4, 5, 6, 7, 8, 12}
    has_signal = batch.rewards.amax(dim=1) > batch.rewards.amin(dim=1)
    assert has_signal.tolist() == [True, False, False, False] * 2
    ours.update(batch)
    assert not all(map(torch.equal, weights, ours.policy.parameters()))
    assert grpo.EOS != bench.END                                # as it was before
    with pytest.raises(RuntimeError, match="tokens were sampled instead of"):
        bench.check_lengths(ours.lengths + 1, ours.lengths)


# ---- 2. make gpu -----------------------------------------------------------------------------

def test_commands_that_fail_hang_or_come_too_late_are_reported(tmp_path, monkeypatch, capfd):
    for name, code in {"good": "print('held out: 1'); print('folder')",
                       "bad": "print('held out: 1'); raise ValueError('bad')",
                       "hang": "import time; print('step 7', flush=True); time.sleep(60)"}.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setattr(gpu, "FOLDER", tmp_path / "gpu")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def found(**limits):
        """The exit code of main, and its report, if these are the commands."""
        monkeypatch.setattr(gpu, "commands", lambda _: {
            name: (limit, name) for name, limit in limits.items()})
        try:
            gpu.main(["--dry_run"])
        except SystemExit as end:
            return end.code, (tmp_path / f"gpu/gpu-{gpu.SLUG}.md").read_text()
        return 0, (tmp_path / f"gpu/gpu-{gpu.SLUG}.md").read_text()
    code, text = found(good=20)
    assert code == 0 and "| good | ok | 0 | held out: 1 |" in text
    code, text = found(bad=20, hang=0.5)
    assert code == 1 and "ended with 1" in text and "| ValueError: bad |" in text
    assert "| hang | no end after 0 s | 2 | step 7 |" in text and "Fatal Python error" in text
    monkeypatch.setattr(gpu, "SECONDS", 0)
    assert found(good=20)[0] == 1


def test_a_resumed_run_has_the_weights_of_a_whole_one(tmp_path):
    for name, number in (("whole", 1.0), ("same", 1.0), ("other", 1.25)):
        (tmp_path / name).mkdir()
        torch.save({"policy": {"w": torch.tensor(number)}}, tmp_path / name / "checkpoint.pt")
    assert gpu.compare(tmp_path / "whole", tmp_path / "same") == "ok"
    assert "by up to 2.5e-01" in gpu.compare(tmp_path / "whole", tmp_path / "other")


@pytest.mark.parametrize("change, outcome", [
    ({}, "ok"), ({"reward": 0.52}, "ok"), ({"reward": 0.6}, "differs from one in reward"),
    ({"entropy": 1.1, "grad_norm": 0.2}, "differs from one in entropy, grad_norm")])
def test_a_first_step_by_torch_that_is_another_than_by_triton_is_named(tmp_path, change, outcome):
    metrics = {"reward": 0.5, "entropy": 1.0, "grad_norm": 0.5}
    for name, line in (("one", metrics), ("other", metrics | change)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert gpu.compare_kernels(tmp_path / "one", tmp_path / "other") == outcome


def test_each_command_is_a_module_with_flags_that_it_has():
    found = gpu.commands(dry_run=False)
    assert next(iter(found.values()))[1].startswith("grpo --task arithmetic --output_dir")
    for _, command in found.values():
        module, *words = command.split()
        assert find_spec(module), command
        if f"{module}.py" in sync.SCRIPTS and "--resume_from_checkpoint" not in words:
            with pretend.cuda():
                config = importlib.import_module(module).Config
                common.parse_flags(config, [*words, "--device", "cuda"])
