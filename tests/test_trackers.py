"""Test what --report_to sends of a run, and of a resumed run."""
import math
import sys
import types

import pytest
from small_runs import INSTANT, arguments, steps

import grpo
from report import trackers

FLAGS = arguments(INSTANT | {"device": "cpu"})


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(name):
    """Train for two steps, then resume for a third step."""
    grpo.main([*FLAGS, "--max_steps", "2", "--output_dir", "run",
               "--report_to", name])
    grpo.main(["--resume_from_checkpoint", "run", "--max_steps", "3"])


def test_tensorboard_has_every_metric_of_every_step_once(empty_folder):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    train("tensorboard")
    events = EventAccumulator(str(empty_folder / "run/tensorboard")).Reload()
    records = steps(empty_folder / "run")
    assert [record["step"] for record in records] == [1, 2, 3]
    for name in records[0].keys() - {"step"}:
        seen = {event.step: event.value for event in events.Scalars(name)}
        logged = {record["step"]: record[name] for record in records}
        logged |= {0: seen[0]} if name == "eval/greedy" else {}         # not in metrics.jsonl
        assert seen == pytest.approx(logged, rel=1e-5)
    assert {"config/text_summary", "samples/text_summary"} <= set(events.Tags()["tensors"])


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_is_told_of_flags_metrics_and_samples_and_goes_on_with_a_resumed_run(
        name, monkeypatch):
    begun = []
    logged = {}
    fake = types.ModuleType(name)
    fake.init = lambda **options: begun.append(options)
    fake.log = lambda values, step: logged.setdefault(step, {}).update(values)
    fake.finish = lambda: None
    fake.Table = lambda columns, data: [dict(zip(columns, row)) for row in data]
    monkeypatch.setitem(sys.modules, name, fake)
    train(name)
    first, again = begun
    assert first["config"]["loss_type"] == "grpo" and first["resume"] == "allow"
    assert (first["name"], first.get("id")) == (again["name"], again.get("id"))
    assert ("id" in first) == (name == "wandb")
    assert sorted(logged) == [0, 1, 2, 3]
    assert math.isfinite(logged[0]["eval/greedy"]) and "reward" in logged[3]
    assert logged[1]["samples"][0].keys() == set(trackers.COLUMNS)


def test_a_missing_package_is_one_line_before_anything_is_made(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    refused("--report_to wandb: needs a package: pip install wandb", grpo.main,
            [*FLAGS, "--report_to", "wandb"])
