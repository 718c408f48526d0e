"""A run that is stopped and goes on ends as one that was not; and what a run may begin with."""
import itertools
import math

import pytest
import torch
from conftest import SCRIPTS, every_script
from small_runs import (
    EVERYTHING,
    changed_weights,
    difference,
    difference_but_for_flags,
    leaves,
    lines,
    load,
    outcome,
    policy_of,
    read_summary,
    resume,
    shuffle_the_global_generators,
    steps,
)

import common

pytestmark = pytest.mark.usefixtures("at_work_folder")

WAYS_TO_LEARN = []
for name in SCRIPTS:
    for i, flags in enumerate([{}, *EVERYTHING[name]]):
        words = f"{name}-everything{i}" if i > 0 else f"{name}-defaults"
        WAYS_TO_LEARN.append(pytest.param(name, flags, id=words))


# ---- going on --------------------------------------------------------------------------------

@pytest.mark.parametrize("script, flags", WAYS_TO_LEARN, indirect=["script"])
def test_six_steps_equal_three_and_three_after_a_resume_bit_for_bit(new_run, flags):
    shuffle_the_global_generators(1)
    six = new_run(**flags, max_steps=6)
    shuffle_the_global_generators(2)
    three = new_run(**flags, max_steps=3)
    assert len(steps(three)) == 3
    assert difference(outcome(three), outcome(six))
    saved = leaves(load(three / "checkpoint.pt"))
    assert all(math.isfinite(value) for value in saved.values() if isinstance(value, float))
    shuffle_the_global_generators(3)
    resume(three, max_steps=6)
    assert not difference(outcome(three), outcome(six))


@pytest.mark.parametrize("flags", [
    {"curriculum": True, "operands": "2-3", "reward": "accuracy+growing_length"},
    {"curriculum": True, "task": "arithmetic,lookup", "operands": "5"}], ids=["one task", "a mix"])
def test_the_rates_of_a_curriculum_go_on_as_well(new_run, flags):
    few = {"base_steps": 20} | flags
    four = new_run(**few, max_steps=4)
    two = new_run(**few, max_steps=2)
    assert load(two / "checkpoint.pt")["task"]["rates"]
    resume(two, max_steps=4)
    assert not difference(outcome(two), outcome(four))


@every_script
def test_a_finished_run_that_is_resumed_stays_as_it_is(new_run, whole):
    folder = new_run()
    resume(folder)
    assert not difference(outcome(folder), outcome(whole))


def test_a_log_that_was_deleted_begins_anew_on_resume(new_run):
    folder = new_run(max_steps=2)
    (folder / "metrics.jsonl").unlink()
    resume(folder, max_steps=4)
    assert [line["step"] for line in steps(folder)] == [3, 4]


def test_log_lines_behind_the_checkpoint_are_cut_off_on_resume(new_run, whole):
    folder = new_run(max_steps=5)
    for name in ("metrics.jsonl", "samples.jsonl", "greedy.jsonl"):
        with open(folder / name, "a") as log:
            log.write('{"step": 6, "reward": 1.0}\n{"step": 7, "rew')
    resume(folder, max_steps=10)
    assert not difference(outcome(folder), outcome(whole))


def test_a_run_from_before_a_log_was_invented_goes_on_and_begins_it(new_run):
    folder = new_run(max_steps=2)
    checkpoint = load(folder / "checkpoint.pt")
    del checkpoint["logs"]["greedy.jsonl"]
    torch.save(checkpoint, folder / "checkpoint.pt")
    (folder / "greedy.jsonl").unlink()
    resume(folder, max_steps=6)
    assert [line["step"] for line in steps(folder)] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines(folder / "greedy.jsonl")] == [4, 6]


def test_a_run_killed_before_its_first_checkpoint_starts_over(new_run, whole):
    folder = new_run()
    for name in ("checkpoint.pt", "base.pt", "summary.json"):
        (folder / name).unlink()
    resume(folder)
    assert not difference(outcome(folder), outcome(whole))


def test_a_resumed_run_needs_no_cached_base(new_run, tmp_path, monkeypatch):
    folder = new_run(max_steps=1)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    resume(folder, max_steps=2)
    assert len(steps(folder)) == 2
    assert not list(elsewhere.iterdir())


# ---- what may change -------------------------------------------------------------------------

def test_a_resumed_run_may_evaluate_otherwise(new_run):
    folder = new_run(max_steps=2)
    summary = resume(folder, max_steps=4, num_eval_samples=3, num_eval_problems=9, eval_steps=1,
                     save_steps=1)
    assert summary["steps"] == 4
    assert summary["trained"]["problems"] == 9
    assert [line["step"] for line in steps(folder) if "eval/greedy" in line] == [2, 3, 4]


@pytest.fixture
def evaluations(script, monkeypatch):
    """The number of samples of each evaluation since the test began, and how it came out."""
    seen = []
    evaluate = script.evaluate

    def recorded(policy, task, cfg, num_samples=0, progress=common.silent):
        scores = evaluate(policy, task, cfg, num_samples, progress)
        seen.append((num_samples, scores))
        return scores
    monkeypatch.setattr(script, "evaluate", recorded)
    return seen


@every_script
def test_a_run_can_be_evaluated_once_more_with_more_samples(new_run, evaluations):
    folder = new_run(max_steps=4, num_eval_problems=32, learning_rate=2e-3)
    before = read_summary(folder)
    weights = policy_of(folder)
    log = steps(folder)
    evaluations.clear()
    summary = resume(folder, max_steps=0, num_eval_samples=16)
    assert [num_samples for num_samples, _ in evaluations] == [0, 16, 0, 16]
    assert summary == read_summary(folder)
    assert summary["steps"] == 4
    for when, found in (("base", evaluations[:2]), ("trained", evaluations[2:])):
        (_, greedy), (_, sampled) = found
        assert summary[when]["samples"] == 16
        assert summary[when]["pass@16"] == sampled["pass@16"] == summary[when]["pass@k"][15]
        assert summary[when]["greedy"] == greedy["greedy"] == before[when]["greedy"]
    assert summary["trained"]["pass@k"] != summary["base"]["pass@k"]    # each of its own policy
    assert not changed_weights(policy_of(folder), weights)
    assert steps(folder) == log


def test_a_resumed_run_evaluates_the_base_anew_only_for_other_numbers(new_run, evaluations):
    folder = new_run(max_steps=1)
    for flags, counts, num_problems in (
            ({}, [0, 2], 16), ({"num_eval_problems": 9}, [0, 2, 0, 2], 9), ({}, [0, 2], 9)):
        evaluations.clear()
        summary = resume(folder, **flags)
        assert [num_samples for num_samples, _ in evaluations] == counts
        assert summary["base"]["problems"] == summary["trained"]["problems"] == num_problems


def test_a_resumed_run_that_asks_for_more_problems_than_there_are_keeps_the_scores_of_its_base(
        new_run, evaluations):
    folder = new_run(max_steps=1, num_eval_problems=400)
    num_problems = read_summary(folder)["base"]["problems"]
    assert 5 < num_problems < 100
    evaluations.clear()
    summary = resume(folder, max_steps=2)
    assert [num_samples for num_samples, _ in evaluations] == [0, 0, 2]     # a step, and the end
    evaluations.clear()
    summary = resume(folder, num_eval_problems=num_problems)                # the same, by name
    assert [num_samples for num_samples, _ in evaluations] == [0, 2, 0, 2]
    assert summary["base"]["problems"] == summary["trained"]["problems"] == num_problems


@every_script
def test_no_steps_make_and_evaluate_the_base_only(new_run, whole):
    folder = new_run(max_steps=0)
    summary = read_summary(folder)
    assert summary["trained"] == summary["base"] == read_summary(whole)["base"]
    assert summary["steps"] == 0
    assert steps(folder) == []
    assert not changed_weights(policy_of(folder), load(folder / "base.pt"))


def test_a_run_stops_when_five_batches_in_a_row_are_accurate_enough(script, new_run, monkeypatch):
    update = script.update
    monkeypatch.setattr(
        script, "update", lambda *args: update(*args) | {"accuracy": next(accuracy)})
    accuracy = iter([0.8, 0.95, 1, 1, 1, 1, 1, 1, 1, 1])
    assert len(steps(new_run(stop_at=0.98))) == 6   # .99 on average, from the second to the sixth
    accuracy = itertools.repeat(1)
    assert len(steps(new_run(stop_at=2))) == 10
    assert len(steps(new_run(stop_at=1))) == 5
    resumed = new_run(stop_at=1, max_steps=3)
    resume(resumed, max_steps=10)
    assert len(steps(resumed)) == 5


# ---- what a run begins with ------------------------------------------------------------------

def test_init_from_starts_from_the_trained_weights_of_the_other_run(new_run, whole, tmp_path,
                                                                    monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = new_run(init_from=whole, max_steps=0, seed=1)
    assert not changed_weights(load(folder / "base.pt"), policy_of(whole))
    assert read_summary(folder)["base"] == read_summary(whole)["trained"]
    assert not (tmp_path / "runs/base").exists()    # no base of the shared ones is made of it


def test_a_cold_start_goes_on_with_worked_examples_before_the_run_begins(
        new_run, whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = {"init_from": whole, "cold_start": 3}
    one = new_run(**flags, max_steps=2)
    assert changed_weights(load(one / "base.pt"), policy_of(whole))
    assert not (tmp_path / "runs/base").exists()
    resumed = new_run(**flags, max_steps=1)
    resume(resumed, max_steps=2)                                    # without a second cold start
    assert not difference_but_for_flags(outcome(one), outcome(resumed))


@pytest.mark.parametrize("lost", [(), ("checkpoint.pt", "base.pt", "summary.json")],
                         ids=["later", "before its first checkpoint"])
def test_a_run_that_was_started_with_init_from_can_be_resumed(new_run, whole, lost):
    flags = {"init_from": whole, "seed": 1}
    four = new_run(**flags, max_steps=4)
    two = new_run(**flags, max_steps=2)
    for name in lost:
        (two / name).unlink()
    resume(two, max_steps=4)
    assert not difference(outcome(two), outcome(four))


def test_a_run_that_was_started_with_init_from_goes_on_without_the_other_run(new_run):
    other = new_run(max_steps=0)
    folder = new_run(init_from=other, max_steps=1)
    (other / "checkpoint.pt").unlink()
    assert resume(folder, max_steps=2)["steps"] == 2
