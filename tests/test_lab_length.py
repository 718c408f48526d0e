"""The lab's experiment about lengths."""
import types

import pytest
import torch

import common
import grpo
from lab import length
from lab.entry import CONTRADICTED, NOT_SHOWN, SHOWN

# ---- the weight of a token -------------------------------------------------------------------

def test_only_with_the_mean_of_each_output_does_a_token_of_a_guess_weigh_more():
    assert length.guess_beside_thought("grpo") == pytest.approx(33 / 5)
    for name in ("dr_grpo", "dapo", "bnpo"):
        assert length.guess_beside_thought(name) == pytest.approx(1)


def test_an_output_has_the_same_weight_as_a_whole_or_each_of_its_tokens_has():
    lengths = torch.tensor([2, 10, 40])
    whole = length.token_weights("grpo", lengths) * lengths
    assert whole.tolist() == pytest.approx([1 / 3] * 3)
    assert length.token_weights("dapo", lengths).tolist() == pytest.approx([1 / 52] * 3)


# ---- the first gradient ----------------------------------------------------------------------

@pytest.fixture
def scene(config, load_task):
    """A policy, and a batch in which every second output begins to think."""
    cfg = config(loss_type="dr_grpo")
    policy = grpo.GPT(cfg)
    for weight in policy.parameters():
        weight.grad = torch.zeros_like(weight)
    batch = grpo.sample_batch(policy, load_task(cfg), cfg, 0)
    think = grpo.TOKENIZER.encode_single_token("<think>")
    batch.tokens[:, 0] = torch.tensor([think, 65]).repeat(len(batch.tokens) // 2)
    with torch.no_grad():
        batch.logps, _ = grpo.score(policy, batch.prompts, batch.tokens)
    batch.rewards = torch.tensor([1.0, 0.0]).repeat(len(batch.tokens) // 2).view(4, 4)
    return policy, batch, cfg


def test_where_thinking_pays_the_descent_points_to_it(scene):
    policy, batch, cfg = scene
    pull = length.pull_to_think(policy, batch, cfg)
    assert 0.05 < pull < 1
    assert length.pull_to_think(policy, batch, cfg) == pull         # it leaves no gradient behind
    batch.rewards = 1 - batch.rewards
    assert length.pull_to_think(policy, batch, cfg) == pytest.approx(-pull, rel=1e-4)


# ---- training --------------------------------------------------------------------------------

def test_lengths_are_counted_apart_for_right_and_wrong_outputs():
    batch = types.SimpleNamespace(
        mask=torch.tensor([[1.0, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]]),
        is_correct=torch.tensor([[True, False], [False, True]]),
        texts=["<think>", "5", "<think>", "6"])
    assert length.lengths_of(batch) == {
        "right outputs": [2, 6], "wrong outputs": [2, 3], "wrong thoughts": [1, 2]}


def test_a_run_is_described_step_by_step_from_the_base_on(config, monkeypatch):
    cfg = config()
    monkeypatch.setattr(common, "parse_flags", lambda *_: cfg)
    found = length.learn([], grpo.GPT(cfg), num_steps=2)
    assert found["accuracy"] == [0, 0]                              # the policy is untrained
    assert [number for number, _ in found["wrong outputs"]] == [16, 16]
    assert found["right outputs"] == [[0, 0], [0, 0]]
    assert found["pull"] == 0                                       # there is no signal


# ---- what was found --------------------------------------------------------------------------

def test_lengths_are_means_over_outputs_not_over_steps():
    assert length.mean_length([[1, 5], [3, 99]]) == 26
    assert length.mean_length([[0, 0]]) == 0
    run = {"wrong thoughts": [[1, 5]] * length.WINDOW + [[2, 20]] * length.WINDOW}
    assert length.late(run, "wrong thoughts") == 10
    assert length.growth(run, "wrong thoughts") == 5


def run_of(tokens=20, early=10, steps=4, pull=0.2):
    """A made-up run: the length of its late outputs and of the early ones, steps to the level."""
    late = [[2, 2 * tokens]] * length.WINDOW
    return {"pull": pull, "accuracy": [0.0] * (steps - 1) + [1.0] * 9} | {
        kind: [[2, 2 * early]] * length.WINDOW + late for kind in length.KINDS}


def verdicts(of_grpo, of_others):
    runs = {name: [of_others] * 3 for name in length.AVERAGES} | {"grpo": [of_grpo] * 3}
    return [claim.verdict for claim in length.claims({"runs": runs})]


def test_verdicts_follow_what_was_found():
    assert verdicts(run_of(21, steps=5, pull=0.1), run_of()) == [SHOWN] * 8
    opposite = verdicts(run_of(5, steps=3, pull=0.3), run_of())
    assert opposite == [SHOWN] + [CONTRADICTED] * 7
    assert verdicts(run_of(10), run_of(10)) == [SHOWN] + [NOT_SHOWN] * 7


def test_the_verdict_on_weights_is_computed(monkeypatch):
    monkeypatch.setitem(grpo.LOSS_TYPES, "dapo", ("clip", "sequence_mean"))
    assert verdicts(run_of(), run_of())[0] == CONTRADICTED


def test_runs_are_sorted_by_average_and_seed(monkeypatch):
    monkeypatch.setattr(length, "load_base", lambda *_: (None, None, "policy"))
    monkeypatch.setattr(length, "side_by_side", lambda function, jobs: [flags for flags, _ in jobs])
    runs = length.measure([3, 5])["runs"]
    assert runs["dapo"] == [["--loss_type", "dapo", "--seed", 3],
                            ["--loss_type", "dapo", "--seed", 5]]
    assert list(runs) == list(length.AVERAGES)
