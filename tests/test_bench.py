"""The bench measures what it says it does, at a tiny size, and make gpu says what went wrong."""
import json
from importlib.util import find_spec

import pytest
import torch

import grpo
from kernels import bench
from tools import gpu

ROW = {"size": "0.11M", "kind": "fixed", "tokens": 64, "seconds": {"ours": [1.0], "HF": [2.0]},
       "median": {"ours": 1.0, "HF": 2.0}, "gain": {"low": 1.5, "median": 2.0, "high": 2.5}}


@pytest.fixture
def tiny(monkeypatch):
    """A tiny policy alone, without the packages of others."""
    flags = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
    for name, value in {"SIZES": {"tiny": flags}, "GROWING": {"tiny": 1}, "LENGTHS": (2, 4, 8),
                        "COMPARED": ["tiny"], "SHAPE": (4, 4, 12), "REPEATS": 2,
                        "GIGABYTES": 0.01}.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench, "find_spec", lambda package: package == "torch")
    monkeypatch.setattr(bench, "measure_alone", bench.measure_point)        # in this process


# ---- 1. the bench ----------------------------------------------------------------------------

def test_a_record_has_a_row_for_every_kind_and_only_those_that_are_asked_for(tiny):
    record = json.loads(json.dumps(bench.measure(["rollout", "step", "scaling"])))
    assert [row["kind"] for row in record["rollout"]] == list(bench.KINDS[:2])
    assert [row["kind"] for row in record["step"]] == list(bench.KINDS)
    for row in record["rollout"] + record["step"]:
        assert len(row["seconds"]["ours"]) == 2 and row["median"]["ours"] > 0
    points = [(row["job"], row["T"]) for row in record["scaling"]]
    assert points == [(job, T) for job in ("rollout", "update") for T in (2, 4, 8)]
    assert record["machine"]["copy_GB_per_s"] > 0
    assert {*bench.measure(["step"])} & {*bench.ROWS} == {"step"}


def test_a_step_samples_and_learns_from_the_lengths_and_rewards_that_were_ordered(tiny):
    ours = bench.Ours("tiny", 8, 8, 12, bench.KINDS[2])
    weights = [weight.clone() for weight in ours.policy.parameters()]
    batch = ours.sample()
    assert torch.equal(batch.lengths, ours.lengths)
    assert (ours.lengths == 12).sum() == 6 and {*ours.lengths.tolist()} == {4, 5, 6, 7, 8, 12}
    has_signal = batch.rewards.amax(dim=1) > batch.rewards.amin(dim=1)
    assert has_signal.tolist() == [True, False, False, False] * 2
    ours.update(batch)
    assert not all(map(torch.equal, weights, ours.policy.parameters()))
    assert grpo.EOS != bench.END                                # as it was before
    with pytest.raises(RuntimeError, match="tokens were sampled instead of"):
        bench.check_lengths(ours.lengths + 1, ours.lengths)


# ---- 2. make gpu -----------------------------------------------------------------------------

@pytest.mark.parametrize("code, outcome", [
    ("print('here')", "ok"), ("raise SystemExit(3)", "ended with 3"),
    ("import time; print('here', flush=True); time.sleep(60)", "no end after 2 s")])
def test_a_command_that_fails_or_hangs_is_ended_and_its_output_is_kept(tmp_path, code, outcome):
    (tmp_path / "job.py").write_text(code)
    log = tmp_path / "log"
    env = {"PYTHONPATH": str(tmp_path), "PYTHONFAULTHANDLER": "1"}
    assert gpu.run("job", 2, log, env) == outcome
    assert ("here" in log.read_text()) == ("here" in code)
    assert ("Fatal Python error: Aborted" in log.read_text()) == ("sleep" in code)


@pytest.mark.parametrize("dry_run", [False, True])
def test_each_command_is_a_module_that_is_there_and_a_dry_run_needs_no_gpu(dry_run):
    commands = [command for _, _, command in gpu.commands(dry_run)]
    for command in commands:
        assert find_spec(command.split()[0]), command
    assert ("cuda" in " ".join(commands)) == (not dry_run)
