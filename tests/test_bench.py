"""The bench measures what it says it does, at a tiny size, and make gpu says what went wrong."""
import json
import re
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


def test_their_model_has_our_logits_and_ends_on_time(tiny):
    pytest.importorskip("transformers", reason="needs examples/requirements.txt")
    ours = bench.Ours("tiny", 2, 4, 12, "ragged")
    for weight in ours.policy.parameters():             # norms of 1 would hide which is which
        weight.data += 0.1 * torch.randn_like(weight)
    theirs = bench.llama(ours)
    with torch.no_grad():
        logits = theirs(ours.prompts).logits
        torch.testing.assert_close(logits, ours.policy(ours.prompts), atol=2e-5, rtol=1e-4)
    tokens = theirs.generate(ours.prompts)[:, ours.prompts.shape[1]:]
    bench.check_lengths((tokens == grpo.EOS).int().argmax(dim=1) + 1, ours.lengths)


def test_a_row_of_kernels_counts_a_copy_forward_and_two_backward_and_the_largest_error(tiny):
    def wrong(logits, tokens):
        logps, ratio, entropy = bench.logprob_torch(logits, tokens)
        return logps, ratio, entropy + 0.1 * (torch.arange(len(tokens)) == 3)
    logits = torch.randn(64, 32, requires_grad=True)
    row = bench.logits_row("wrong", wrong, logits, torch.zeros(64, dtype=torch.long), 10.0)
    copy_seconds = 64 * 32 * 4 / 10e9
    assert row["forward_share_of_copy"] == pytest.approx(copy_seconds / row["forward"])
    assert row["backward_share_of_copy"] == pytest.approx(2 * copy_seconds / row["backward"])
    assert 0.1 / (1 + torch.tensor(32.0).log()) <= row["error"] <= 0.1


def test_tables_have_a_cell_for_each_heading_and_the_growth_of_the_last_lengths(tiny):
    alone = ROW | {"median": {"ours": 0.5}}
    alone.pop("gain")
    logits = {"who": "ours", "N": 8, "V": 32, "dtype": "bfloat16", "error": 1e-6}
    for part in ("forward", "backward"):
        logits |= {part: 2e-6, f"{part}_share_of_copy": 0.9, f"{part}_bytes": 2**20}
    points = [{"size": "0.11M", "rows": 10, "job": "update", "T": T, "median": 1e-6 * T**2,
               "bytes": 2**20, "standing_bytes": 2**20} for T in (32, 64, 128, 256, 512)]
    machine = {"device": "cpu", "cpu": "x", "threads": 1, "versions": {"torch": "2"},
               "copy_GB_per_s": 1.0}
    record = {"machine": machine, "repeats": 2, "shape": (1, 2, 4), "logits": [logits],
              "rollout": [ROW, alone], "step": [ROW], "scaling": points}
    text = bench.tables(record) + bench.growth_table(record)
    tables = re.findall(r"(?:^\|.*\n)+", text, re.M)
    assert len(tables) == 4
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1, table
    assert "| 0.11M | fixed | 1000 ms, 0k/s | 2000 ms, 0k/s | 2.0x (1.5 - 2.5) |" in text
    assert "| 0.11M | 10 | update | 3 | 13 | 51 | 2.0 | 2 | 2 |" in text


def test_rows_that_were_not_asked_for_stay_unless_another_machine_measured_them():
    machine = {"device": "cpu", "versions": {"torch": "2"}, "copy_GB_per_s": 1.0}
    old = {"machine": machine, "step": ["old"], "rollout": ["old"]}
    new = {"machine": machine | {"copy_GB_per_s": 2.0}, "step": ["new"]}
    assert bench.merged(old, new) == new | {"rollout": ["old"]}
    assert bench.merged({}, new) == new
    for name, value in (("device", "H100"), ("versions", {"torch": "3"})):
        assert bench.merged(old | {"machine": machine | {name: value}}, new) == new


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


def test_the_report_has_the_end_of_the_log_of_what_failed_and_what_differs():
    results = {"good": ("ok", 1.0, ["fine | so far"]), "bad": ("ended with 1", 2.0, ["a", "why"])}
    text = gpu.report(results, ["grpo: loss 1.0000 by Triton, 2.0000 by torch"])
    assert "| good | ok | 1 | fine \\| so far |" in text and "## bad: ended with 1" in text
    assert "a\nwhy\n```" in text and "loss 1.0000 by Triton" in text and "## good" not in text


@pytest.mark.parametrize("loss, number", [(1.02, 0), (1.05, 1)])
def test_first_steps_that_differ_by_more_than_a_token_are_told(tmp_path, monkeypatch, loss, number):
    monkeypatch.setattr(gpu, "FOLDER", tmp_path)
    for kernel, value in (("triton", loss), ("torch", 1.0)):
        (tmp_path / f"grpo-{kernel}").mkdir()
        line = json.dumps({"loss": value, "reward": 0.5})
        (tmp_path / f"grpo-{kernel}" / "metrics.jsonl").write_text(line + "\n")
    assert len(gpu.differences("grpo")) == number


@pytest.mark.parametrize("dry_run", [False, True])
def test_each_command_is_a_module_that_is_there_and_a_dry_run_needs_no_gpu(dry_run):
    commands = [command for _, _, command in gpu.commands(dry_run)]
    for command in commands:
        assert find_spec(command.split()[0]), command
    assert ("cuda" in " ".join(commands)) == (not dry_run)
