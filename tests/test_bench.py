"""The bench measures what it says it does, at a tiny size, and make gpu says what went wrong."""
import contextlib
import importlib
import json
import os
from importlib.util import find_spec

import pretend
import pytest
import torch

import common
import grpo
from lab import gpu
from lab import speed as bench
from learn import sync


@pytest.fixture(params=["cpu", "cuda"])
def device(request, monkeypatch):
    """The CPU, and a make-believe GPU, unless there is one."""
    monkeypatch.setattr(bench, "DEVICE", request.param)
    is_pretended = request.param == "cuda" and not torch.cuda.is_available()
    with pretend.cuda() if is_pretended else contextlib.nullcontext():
        yield request.param


@pytest.fixture
def tiny(monkeypatch):
    """A tiny policy alone, without the packages of others."""
    flags = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
    for name, value in {"SIZES": {"tiny": flags}, "GROWING": {"tiny": 1}, "LENGTHS": (3, 4, 8),
                        "COMPARED": ["tiny"], "SHAPE": (4, 4, 12), "REPEATS": 2}.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench, "find_spec", lambda package: package == "torch")


# ---- 1. the bench ----------------------------------------------------------------------------

def test_a_record_has_a_row_for_every_kind_and_only_those_that_are_asked_for(tiny, device):
    measured = json.loads(json.dumps([*bench.measure(["rollout", "step", "scaling"])][-1]))
    rollouts, steps, parts = [found["rows"] for found in measured.values()]
    assert [row["of"]["lengths"] for row in rollouts + steps] == [*bench.KINDS[:2], *bench.KINDS]
    assert {"no graph"} <= rollouts[0]["seconds"].keys() or device == "cpu"
    points = [(row["tokens"], len(row["seconds"]["update"])) for row in parts]
    assert points == [(8 * T, bench.REPEATS) for T in bench.LENGTHS]
    so_far = [[*found, len(found["step"]["rows"])] for found in bench.measure(["step"])]
    assert so_far == [["step", 1], ["step", 2], ["step", 3]]


def test_all_who_are_timed_compute_the_same_gradient(tiny, monkeypatch):
    testing = pytest.importorskip("triton.testing")
    outputs = []
    monkeypatch.setattr(testing, "do_bench", lambda job, **_: outputs.append(job()) or 1.0)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    bench.logits_row((6, 9), torch.float32, "backward")
    torch.testing.assert_close(*outputs[:2])


def test_a_step_samples_and_learns_from_the_lengths_and_rewards_that_were_ordered(tiny):
    ours = bench.Ours("tiny", (8, 8, 12), bench.KINDS[2])
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

@pytest.mark.parametrize("code, outcome, said", [
    ("print('held out: 1'); print('folder')", "ok", "held out: 1"),
    ("print('held out: 1'); raise ValueError('bad')", "ended with 1", "ValueError: bad"),
    ("import time; print('step 7', flush=True); time.sleep(60)", "no end after 2 s", "step 7")])
def test_a_command_that_fails_or_hangs_is_ended_and_says_why(tmp_path, code, outcome, said):
    (tmp_path / "job.py").write_text(code)
    log = tmp_path / "log"
    env = {"PYTHONPATH": str(tmp_path), "PYTHONFAULTHANDLER": "1"}
    assert gpu.run("job", 2, log, env) == outcome
    assert gpu.summary(outcome, gpu.read(log)) == said
    report = gpu.report({"job": (outcome, 2.0, gpu.read(log))}, [])
    assert said in report and ("Fatal Python error: Aborted" in report) == ("sleep" in code)


def test_the_first_command_is_the_one_of_the_first_page_and_runs_on_a_make_believe_gpu(tmp_path):
    _, limit, command = next(gpu.commands(dry_run=False))
    assert command.startswith("grpo --task arithmetic --output_dir")
    _, limit, tiny = next(gpu.commands(dry_run=True))
    assert tiny.startswith(f"tests.pretend {command} ")
    log = tmp_path / "log"
    outcome = gpu.run(tiny.replace("runs/gpu", str(tmp_path)), limit, log, os.environ)
    assert (outcome, "arithmetic on cuda" in log.read_text()) == ("ok", True), log.read_text()


def test_each_command_is_a_module_that_is_there_with_flags_that_it_has():
    for _, _, command in gpu.commands(dry_run=False):
        module, *words = command.split()
        assert find_spec(module), command
        if f"{module}.py" in sync.SCRIPTS and "--resume_from_checkpoint" not in words:
            config = importlib.import_module(module).Config
            with pretend.cuda():
                common.parse_flags(config, [*words, "--device", "cuda"])


def test_a_report_says_what_fails_what_is_not_run_and_what_differs(tmp_path, monkeypatch, capsys):
    """A run by Triton, one by torch, and one that was resumed, which end otherwise than it."""
    (tmp_path / "job.py").write_text(
        "import json, pathlib, sys, torch\n"
        "number = float(sys.argv[2])\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "folder.mkdir()\n"
        "(folder / 'metrics.jsonl').write_text(json.dumps({'reward': number}))\n"
        "torch.save({'policy': {'w': torch.tensor(number)}}, folder / 'checkpoint.pt')\n"
        "sys.exit(number < 0)\n")
    folder = tmp_path / "gpu"
    monkeypatch.setattr(gpu, "FOLDER", folder)
    monkeypatch.setattr(gpu, "SECONDS", 60)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def found(**numbers):
        """What main says of jobs that end with these numbers."""
        jobs = [(name, 20, f"job {folder}/{name} {x}") for name, x in numbers.items()]
        monkeypatch.setattr(gpu, "commands", lambda dry_run: jobs)
        try:
            gpu.main(["--dry_run"])
        except SystemExit as end:
            return end.code, capsys.readouterr().out
        return 0, capsys.readouterr().out
    good = {"grpo-triton": 0.5, "grpo-torch": 0.51, "one-step": 0.5, "resumed": 0.5}
    assert found(**good)[0] == 0
    code, said = found(**good | {"grpo-torch": 0.6, "resumed": 0.75})
    assert code == 1 and "grpo: reward 0.5000 by Triton, 0.6000 by torch" in said
    assert "resumed: 1 of 1 weights differ, by up to 2.5e-01" in said
    assert found(failing=-1.0)[0] == 1
    monkeypatch.setattr(gpu, "SECONDS", 0)
    assert "not run: the time is over" in found(late=1.0)[1]
