"""What report/observers.py logs, prints and warns of in a small run, what --report_to sends, and
what happens to both when the run is resumed."""
import json
import math
import sys
import types

import pytest
import torch
from small_runs import INSTANT, arguments, lines, mortal

import common
import grpo
import plumbing
from report import observers

# ---- one observer ----------------------------------------------------------------------------

class Policy:
    """A policy of this file, which is its script."""


def score(policy, prompts, tokens, temperature):
    """Score the tokens as what the policy sampled."""
    return tokens * 0 + 2.0, None


class FakeRun:
    """What observers ask of a run, whose policy is still as likely to write what it sampled."""
    cfg = grpo.Config(device="cpu")
    columns = grpo.COLUMNS
    step = 1

    def __init__(self):
        self.policy = Policy()
        self.task = common.load_task(self.cfg, grpo.verify)
        self.logged = []

    def append(self, name, record):
        self.logged.append(json.loads(json.dumps(record, allow_nan=False)))


def make_batch(*texts):
    """Two groups of two completions of two tokens, the first of which the environment inserted."""
    zeros = torch.zeros(4, 2)
    batch = common.Batch(
        torch.tensor([[ord("a"), ord("b")]] * 4), zeros + torch.tensor([0.0, 1.0]), zeros + 2.0,
        zeros, torch.full((4,), 2), torch.zeros(4, dtype=torch.bool),
        [common.Problem("3+4=", "7", task="arithmetic")] * 4, zeros.long(), list(texts))
    return FakeRun().task.judge(batch, 2, 0)


RIGHT = "<answer>7</answer>"


def test_samples_have_the_texts_tokens_advantages_and_ratios_of_their_rows():
    run = FakeRun()
    batch = make_batch(RIGHT, "x", "y", RIGHT)
    batch.logps[0] = torch.tensor([2.0, -math.inf])             # a ratio that JSON cannot hold
    A = torch.tensor([[9.0, 1.0], [9.0, -1.0], [9.0, -0.5], [9.0, 0.5]])
    observers.Samples(score).step(run, batch, A, {})
    first, second = run.logged
    assert (first["step"], first["prompt"], first["answer"], first["shade"]) == (
        1, "3+4=", "7", "ratio")
    assert first["completions"][0] == {
        "text": RIGHT, "reward": 1.0, "advantage": 1.0, "length": 1, "tokens": ["a", "b"],
        "mask": [0, 1], "shade": [1.0, None]}
    assert [one["text"] for one in second["completions"]] == ["y", RIGHT]
    assert [one["advantage"] for one in second["completions"]] == [-0.5, 0.5]


def test_the_ends_of_the_best_and_the_worst_are_printed_without_control_characters(capsys):
    hostile = "\x1b[2J\r\n\t\x00\x9b\u202e\ud800" + RIGHT
    batch = make_batch("same", "same", "z" * 99 + hostile, "worst\x1b[1m")
    observers.Samples(score).step(FakeRun(), batch, torch.tensor([0.0, 0.0, 1.5, -1.5]), {})
    best, worst = capsys.readouterr().out.splitlines()
    assert best.startswith("       1.00 +1.50 3+4=...")
    assert best.endswith(r"\x00\x9b\u202e\ud800<answer>7</answer>")
    assert worst == r"       0.00 -1.50 3+4=worst\x1b[1m"
    assert len(best) == 80 and best.isascii() and best.isprintable()


GOOD = {"frac_reward_zero_std": 0.5, "accuracy": 0.3, "completions/clipped_ratio": 0.1,
        "entropy": 0.2, "clip_ratio/region_mean": 0.0}


@pytest.mark.parametrize("metrics, said", [
    ({}, ""), ({"frac_reward_zero_std": 1.0}, "--num_generations"),
    ({"frac_reward_zero_std": 1.0, "accuracy": 1.0}, ""),
    ({"completions/clipped_ratio": 0.6}, "--max_completion_length"),
    ({"sampling/sampling_logp_difference/max": 0.5}, "#rounding")])
def test_a_warning_is_given_once_where_learning_cannot_work(metrics, said, capsys):
    observer = observers.Warnings()
    for _ in range(2):
        observer.step(FakeRun(), None, None, GOOD | metrics)
    printed = capsys.readouterr().out
    assert printed.count("warning") == bool(said) and said in printed and "clip is" not in printed


@pytest.mark.parametrize("scores, said", [
    ({"greedy": 0.1, "greedy_forced_think": 0.141, "pass@1": 0.1}, "at best 14.1%"),
    ({"greedy": 0.1, "greedy_forced_think": 0.6, "pass@1": 0.1}, ""),
    ({"greedy": 0.0, "greedy_forced_think": None, "pass@1": 0.0}, "at best 0.0%"),
    ({"greedy": 0.0, "pass@1": 0.3}, ""), ({"return": -3.0}, "")])
def test_a_base_that_is_hardly_ever_right_is_not_used_in_silence(scores, said, capsys):
    run = FakeRun()
    for run.step in (0, 1):
        observers.Warnings().evaluate(run, scores | {"problems": run.cfg.num_eval_problems})
    printed = capsys.readouterr().out
    assert printed.count("warning") == bool(said) and said in printed


# ---- --report_to -----------------------------------------------------------------------------

def train(name, monkeypatch):
    """Train for two steps, end before the second one is saved, and resume until the third step."""
    flags = {"max_steps": 3, "save_steps": 1, "output_dir": "run", "report_to": name}

    def die(_):
        raise KeyboardInterrupt
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(plumbing.Run, "save", mortal(plumbing.Run.save, 3, die))
        grpo.main(arguments(INSTANT | flags))
    grpo.main(["--resume_from_checkpoint", "run"])


def test_tensorboard_has_every_metric_of_every_step_once(own_folder, monkeypatch):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    train("tensorboard", monkeypatch)
    events = EventAccumulator(str(own_folder / "run/tensorboard")).Reload()
    records = lines(own_folder / "run/metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    for name in set().union(*records) - {"step"}:
        seen = {event.step: event.value for event in events.Scalars(name)}
        logged = {record["step"]: record[name] for record in records if name in record}
        assert seen == pytest.approx(logged, rel=1e-5)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_is_told_of_flags_metrics_and_samples_and_goes_on_with_a_resumed_run(
        name, own_folder, monkeypatch):
    """And no service writes into the current folder."""
    begun = []
    logged = {}
    fake = types.ModuleType(name)

    def init(**options):
        begun.append(options)
        found = types.SimpleNamespace()
        if name == "trackio":
            found._next_step = max(logged, default=-1) + 1
        return found

    def log(values, step):
        before = logged.setdefault(step, {})
        assert name == "wandb" or not {"reward"} & before.keys() & values.keys()
        before.update(values)
    fake.init, fake.log = init, log
    fake.finish = lambda: None
    fake.Table = lambda columns, data: [dict(zip(columns, row)) for row in data]
    monkeypatch.setitem(sys.modules, name, fake)
    train(name, monkeypatch)
    first, again = begun
    assert first["config"]["loss_type"] == "grpo" and first["resume"] == "allow"
    assert (first["name"], first.get("id")) == (again["name"], again.get("id"))
    assert ("id" in first) == (name == "wandb")
    assert first.get("dir") == (str(own_folder / "run") if name == "wandb" else None)
    assert sorted(logged) == [0, 1, 2, 3]
    assert math.isfinite(logged[0]["eval/greedy"]) and "reward" in logged[3]
    assert logged[1]["samples"][0].keys() == set(observers.COLUMNS)


def test_a_missing_package_is_one_line_before_anything_is_made(refused, own_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    refused("--report_to wandb: needs a package: pip install wandb", grpo.main,
            arguments(INSTANT | {"report_to": "wandb"}))
