"""lab/zero.py: where length comes from, whom a cold start learns from, and the verdicts."""
import types

import pytest
import torch

import common
import grpo
from lab import entry, zero
from lab.entry import CONTRADICTED, NOT_SHOWN, SHOWN

BEFORE = {"3 thinks": [10, 200], "3 guesses": [30, 150], "5 thinks": [5, 175],
          "5 guesses": [15, 75]}


# ---- where length comes from -----------------------------------------------------------------

def test_the_parts_add_up_to_the_growth_of_the_mean_length():
    after = {"3 thinks": [12, 260], "5 thinks": [20, 720], "5 guesses": [4, 21],
             "7 thinks": [8, 400]}
    found = zero.parts(BEFORE, after)
    assert sum(found.values()) == pytest.approx(
        zero.mean_length(after) - zero.mean_length(BEFORE))
    assert min(found.values()) > 0.1


@pytest.mark.parametrize("after, only", [
    ({"3 thinks": [5, 100], "3 guesses": [15, 75], "5 thinks": [10, 350], "5 guesses": [30, 150]},
     "harder problems"),
    ({"3 thinks": [30, 600], "3 guesses": [10, 50], "5 thinks": [10, 350], "5 guesses": [10, 50]},
     "more thinking"),
    ({"3 thinks": [10, 230], "3 guesses": [30, 180], "5 thinks": [5, 190], "5 guesses": [15, 90]},
     "longer outputs")])
def test_what_changes_alone_has_all_of_the_growth(after, only):
    found = zero.parts(BEFORE, after)
    growth = zero.mean_length(after) - zero.mean_length(BEFORE)
    assert growth > 0.5
    assert found == pytest.approx(dict.fromkeys(zero.PARTS, 0.0) | {only: growth}, abs=1e-9)


def test_outputs_of_which_there_were_none_before_did_not_get_longer():
    found = zero.parts({"5 guesses": [10, 50]}, {"5 thinks": [10, 350]})
    assert found["longer outputs"] == 0
    assert found["more thinking"] == pytest.approx(30)


def test_a_few_odd_outputs_weigh_as_much_as_there_are():
    before = {"5 guesses": [720, 3312], "5 thinks": [304, 10032]}
    found = zero.parts(before, {"5 guesses": [3, 99], "5 thinks": [2557, 84381]})
    assert found["longer outputs"] == pytest.approx(3 * (33 - 4.6) / 2560)
    assert zero.guess_length(before) == pytest.approx(4.6)
    assert zero.guess_length({"5 thinks": [1, 2]}) == 0


def test_the_means_are_of_outputs_not_of_cells():
    assert zero.mean_length(BEFORE) == pytest.approx(10)
    assert zero.share_that_thinks(BEFORE) == pytest.approx(15 / 60)


# ---- what is seen of a batch -----------------------------------------------------------------

def made_batch():
    """Two outputs to each of two problems."""
    problems = [common.Problem("(3+4)=", "7", "", 2)] * 2 + [common.Problem("((1+1)+1)=", "3")] * 2
    return types.SimpleNamespace(
        problems=problems,
        texts=["<think>3+4=7</think><answer>7</answer>", "<answer>7</answer>",
               "<think>1+1=3;wait,1+1=2", "so <think>"],
        mask=torch.tensor([[1.0, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 0]]),
        is_correct=torch.tensor([[True, True], [False, True]]))


def test_outputs_are_counted_by_operands_and_by_whether_they_begin_to_think(monkeypatch):
    monkeypatch.setattr(grpo, "evaluate", lambda *args, num_samples: {"pass@1": 0.123456})
    batch = made_batch()
    assert zero.look([batch, batch], None, None, None) == {
        "cells": {"2 thinks": [2, 6], "2 guesses": [2, 2], "0 thinks": [2, 4],
                  "0 guesses": [2, 4]},
        "checks": 2, "pass@1": 0.12346}


# ---- the cold start --------------------------------------------------------------------------

def test_the_examples_are_right_answers_that_think_one_to_a_problem(monkeypatch):
    batches = []

    def sample_batch(policy, task, cfg, step):
        batches.append(step)
        batch = made_batch()
        if len(batches) == 2:
            batch.problems = [problem._replace(prompt="(1+6)=") for problem in batch.problems]
        return batch

    monkeypatch.setattr(grpo, "sample_batch", sample_batch)
    found = zero.right_thoughts(None, None, None, 2)
    assert [problem.prompt for problem in found] == ["(3+4)=", "(1+6)="]
    assert set(found.values()) == {"<think>3+4=7</think><answer>7</answer>"}
    assert len(set(batches)) == 2


def test_the_examples_are_all_that_is_shown(config, load_task):
    task = load_task(config())
    texts = {problem: f"<think>{problem.work}</think><answer>{problem.answer}</answer>"
             for problem in common.sample_problems(task, 3, 0)}
    shown = common.sample_demonstrations(zero.OwnAnswers(task, texts), 40, 0, "cold_start")
    assert set(shown) == set(texts.items())


def test_the_examples_are_written_by_a_copy_of_the_base_that_has_trained(monkeypatch):
    base = torch.nn.Linear(1, 1)
    first = base.weight.item()
    seen = {}

    def training(script, cfg, task, policy):
        while True:
            policy.weight.data += 1
            yield None, {}

    def right_thoughts(writer, task, cfg, number):
        seen["trained for"] = writer.weight.item() - first
        return dict.fromkeys(range(number), "<think>")

    def warm_start(policy, task, cfg, progress):
        seen["taught"] = policy
        seen["batches"] = (cfg.cold_start, cfg.base_batch_size, len(task.texts))

    monkeypatch.setattr(zero, "training", training)
    monkeypatch.setattr(zero, "right_thoughts", right_thoughts)
    monkeypatch.setattr(grpo, "warm_start", warm_start)
    zero.start_cold(base, 0, 26)
    assert seen == {"trained for": pytest.approx(20), "taught": base, "batches": (40, 4, 160)}
    assert base.weight.item() == first


def test_runs_differ_in_what_they_are_named_after_and_have_prompts_of_one_width():
    made = {name: zero.setting(name, 1, 26) for name in zero.VARIANTS}
    assert {name: (cfg.operands, cfg.curriculum, cfg.loss_type)
            for name, (cfg, _) in made.items()} == {
        zero.FIXED: ("5", False, "grpo"), zero.MOVING: ("3-7", True, "grpo"),
        zero.CONSTANT: ("3-7", True, "dr_grpo"), zero.COLD: ("3-7", True, "grpo")}
    assert {(cfg.seed, cfg.reward, task.prompt_width) for cfg, task in made.values()} == {
        (1, "accuracy", 26)}


# ---- the verdicts ----------------------------------------------------------------------------

CLAIMS = ["fixed grows", "fixed still grows", "fixed outputs", "moving grows",
          "moving still grows", "moving outputs", "more with the curriculum", "1/|o|", "guesses",
          "checks", "cold", "cold, all counted"]
FLAT = {"lengths": [20] * 7, "checks": [0] * 7, "scores": [0.5] * 7}


def found_with(changes):
    """What would be found if the runs of three seeds were alike, but for changes, {name: {what:
    number of each window}}; those of the later seeds are a little higher."""
    runs = {}
    for name in zero.VARIANTS:
        told = FLAT | changes.get(name, {})
        runs[name] = [[{"cells": {"5 thinks": [100, 100 * length + seed]}, "checks": checks + seed,
                        "pass@1": score + seed / 100}
                       for length, checks, score in zip(*told.values())] for seed in range(3)]
    return {"runs": runs}


def verdicts(**changes):
    """The claims that are decided, with their verdicts, where the runs named so differ."""
    named = {getattr(zero, name): change for name, change in changes.items()}
    listed = zero.claims(found_with(named))
    return {short: claim.verdict for short, claim in zip(CLAIMS, listed, strict=True)
            if claim.verdict != NOT_SHOWN}


LATE = [20] * 6 + [25]
EARLY = [15] + [20] * 6


def test_equal_runs_show_nothing():
    assert verdicts() == {}


@pytest.mark.parametrize("sign, verdict", [(1, SHOWN), (-1, CONTRADICTED)])
def test_each_claim_about_length_looks_at_the_runs_that_it_names(sign, verdict):
    other = {SHOWN: CONTRADICTED, CONTRADICTED: SHOWN}[verdict]
    late, early = ({"lengths": [sign * length for length in lengths]} for lengths in (LATE, EARLY))
    assert verdicts(FIXED=late) == dict.fromkeys(CLAIMS[:3], verdict) | {CLAIMS[6]: other}
    assert verdicts(FIXED=early) == {CLAIMS[0]: verdict, CLAIMS[2]: verdict}
    assert verdicts(MOVING=late) == dict.fromkeys([*CLAIMS[3:6], *CLAIMS[6:8]], verdict)
    assert verdicts(CONSTANT=late) == {CLAIMS[7]: other}
    assert verdicts(COLD=late) == {}


def test_outputs_that_do_not_think_are_compared_at_the_end():
    found = found_with({})
    for run in found["runs"][zero.MOVING]:
        run[-1]["cells"]["5 guesses"] = [2, 60]
    for run in found["runs"][zero.CONSTANT]:
        run[-1]["cells"]["5 guesses"] = [2, 10]
    assert zero.claims(found)[CLAIMS.index("guesses")].verdict == SHOWN


def test_self_checks_in_the_base_are_not_counted_as_those_of_rl():
    assert verdicts(MOVING={"checks": [0, 1, 1, 1, 1, 1, 2]}) == {"checks": SHOWN}
    assert verdicts(MOVING={"checks": [9, 3, 1, 1, 1, 1, 2]}) == {"checks": CONTRADICTED}
    assert verdicts(MOVING={"checks": [9, 1, 1, 1, 1, 1, 1]}) == {}


def test_the_cold_start_is_compared_after_as_many_steps_and_after_all_that_it_took():
    cold = {"scores": [0.6] * 5, "checks": [0] * 5, "lengths": [20] * 5}
    cold = {key: cold[key] for key in FLAT}
    rising = [0.5] * 5 + [0.55, 0.7]
    assert verdicts(COLD=cold) == {"cold": SHOWN, "cold, all counted": SHOWN}
    assert verdicts(COLD=cold, MOVING={"scores": rising}) == {
        "cold": SHOWN, "cold, all counted": CONTRADICTED}
    assert verdicts(COLD=cold, MOVING={"scores": [0.9] * 5 + [0.5, 0.5]}) == {
        "cold": CONTRADICTED, "cold, all counted": SHOWN}


def test_the_page_and_the_picture_can_be_made_of_what_is_found():
    short = {key: values[:5] for key, values in FLAT.items()}
    found = found_with({zero.COLD: short, zero.MOVING: {"checks": [1] * 7}})
    assert all(len(row) == len(heads) for heads, rows in zero.tables(found) for row in rows)
    assert entry.mean_and_spread([0.5, 0.51, 0.52]) in zero.tables(found)[1][1][1]
    assert zero.note(found).endswith(": 42")
