"""lab/compute.py: ways to choose among outputs, what they cost, and the verdicts."""
import dataclasses
import itertools
import statistics
from types import SimpleNamespace

import pytest
import torch

import common
import grpo
from lab import compute
from lab.compute import ANY, BEST, MAJORITY, THOUGHT_VOTE, WEIGHTED, Outputs
from lab.entry import CONTRADICTED, NOT_SHOWN, SHOWN

CLAIMS = ["majority", "one thought", "four thoughts", "best of few", "vote of few",
          "best of many", "vote of many", "falls"]


# ---- ways to choose --------------------------------------------------------------------------

def test_best_of_n_is_the_mean_over_all_choices():
    ratings = [0.3, -0.5, 0.9, 0.1, 0.4]
    right = [True, True, False, False, True]
    for N in range(1, 6):
        chosen = [max(choice, key=lambda i: ratings[i])
                  for choice in itertools.combinations(range(5), N)]
        expected = statistics.mean(right[i] for i in chosen)
        assert compute.best_of(N, ratings, right) == pytest.approx(expected)


def test_the_winner_has_the_most_weight_and_no_answer_is_no_vote():
    assert compute.winner(["7", "8", "8", None, None, None], [1] * 6) == "8"
    assert compute.winner(["7", "8", "8"], [0.9, 0.4, 0.4]) == "7"
    assert compute.winner(["9", "8"], [1, 1]) == "9"            # the first of those that tie
    assert compute.winner([None, None], [1, 1]) is None


def test_the_majority_is_that_of_the_evaluation(load_task):
    task = load_task(grpo.Config())
    answers = ["8", "7", "7", None, "8", "8", "7", "8", "8", None, None, "7"]
    problems = [common.Problem("(3+5)=", "8", task="arithmetic")] * len(answers)
    for N in (1, 2, 3, 5, 12):
        expected = common.maj_at_k(task, problems, answers, len(answers), N)
        assert compute.vote(N, answers, [1] * len(answers), {"8"}) == pytest.approx(expected)


def test_a_rating_weighs_a_vote_and_is_cut():
    answers = ["7", "7", "8", None]
    right = [False, False, True, False]
    found = compute.ways(4, Outputs(answers, [0.1, 0.1, 0.9, -9.0], right, None))
    assert found == {MAJORITY: 0, WEIGHTED: 1, BEST: 1, ANY: 1}
    hated = Outputs(answers, [0.6, -5.0, 0.5, 0.0], right, None)        # the second counts as 0
    assert compute.ways(4, hated) == {MAJORITY: 0, WEIGHTED: 0, BEST: 0, ANY: 1}
    loud = Outputs(answers, [0.6, 0.6, 50.0, 0.0], right, None)         # counts as 1
    assert compute.ways(4, loud) == {MAJORITY: 0, WEIGHTED: 0, BEST: 1, ANY: 1}
    assert compute.ways(1, loud) == {MAJORITY: 0.25, WEIGHTED: 0.25, BEST: 0.25, ANY: 0.25}


def test_voting_pays_where_right_is_the_likeliest_answer_and_harms_where_it_is_not():
    often = Outputs(["8", "8", "7"] * 7, [0.0] * 21, [True, True, False] * 7, None)
    seldom = often._replace(right=[False, False, True] * 7)
    assert compute.curves([often], [1, 3, 21])[MAJORITY] == [pytest.approx(2 / 3, abs=1e-5), 1, 1]
    assert compute.curves([seldom], [1, 3, 21])[MAJORITY] == [pytest.approx(1 / 3, abs=1e-5), 0, 0]
    assert compute.curves([seldom, often], [1, 21])[ANY] == [0.5, 1]


# ---- samples ---------------------------------------------------------------------------------

def test_columns_are_split_by_problem():
    [one, other] = compute.split(2, ["7", None, "8", "9"], [1, 2, 3, 4], [True] * 4, [5, 6, 7, 8])
    assert one == (["7", None], [1, 2], [True, True], [5, 6])
    assert other.lengths == [7, 8]


def test_a_thought_that_is_stopped_before_its_end_is_wrong():
    problems = [Outputs(None, None, [True, False], [10, 20]), Outputs(None, None, [True], [30])]
    assert compute.limited(problems, 30) == [20, 0.66667]
    assert compute.limited(problems, 29.5) == [pytest.approx(59.5 / 3, abs=1e-5), 0.33333]
    assert compute.limited(problems, 9) == [9, 0]


def test_thoughts_are_about_the_problems_of_the_outputs(config, load_task, talker, monkeypatch):
    cfg = config(operands="2", seed=5)
    task = load_task(cfg)
    asking = dataclasses.replace(cfg, num_prompts=compute.PART, num_generations=2)
    batch = grpo.sample_batch(talker(cfg), task, asking, ("part", 3), "test")

    def continued(policy, task, cfg, problems, first, uniforms):
        assert problems[::compute.THOUGHTS] == batch.problems[::2]
        assert first.tolist() == [compute.THINK] * len(problems)
        assert len(uniforms.unique(dim=0)) == len(problems)
        texts = [f"<think></think><answer>{problem.answer}</answer>" for problem in problems]
        return None, SimpleNamespace(mask=torch.ones(len(problems), 4)), texts
    monkeypatch.setattr(compute, "continued", continued)
    found = compute.thoughts(talker(cfg), task, cfg, 3)
    assert [outputs.answers[0] for outputs in found] == [p.answer for p in batch.problems[::2]]
    assert all(outputs.right == [True] * compute.THOUGHTS for outputs in found)
    assert found[0].lengths == [5] * compute.THOUGHTS           # with <think>


def test_what_is_found_is_sorted_by_task_and_seed(monkeypatch):
    monkeypatch.setattr(compute, "make_base", lambda variant: variant[1:])
    monkeypatch.setattr(compute, "side_by_side",
                        lambda function, jobs: [[name, seed] for name, seed, _ in jobs])
    assert compute.measure([3, 4]) == {name: [[name, 3], [name, 4]] for name in compute.TASKS}


# ---- the verdicts ----------------------------------------------------------------------------

def found_with(thoughts=(0.5, 0.5), **ways):
    """What would be found if three runs of each task were alike: of each way how often it is right
    of one output, of up to 8, and of more; of thoughts, of one and of more. A thought takes the
    tokens of 2.5 outputs."""
    curves = {}
    for way in (MAJORITY, WEIGHTED, BEST, ANY):
        one, few, many = ways.get(way.split()[0], (0.5, 0.5, 0.5))
        curves[way] = [one] + [few] * 5 + [many] * 6
    curves[THOUGHT_VOTE] = [thoughts[0]] + [thoughts[1]] * 7
    result = {"in order": 0.9, "tokens": 10.0, "thought tokens": 25.0, "curves": curves,
              "one thought": [[9.0, 0.5]] * len(compute.SHARES_OF_T)}
    return {task: [result] * 3 for task in compute.TASKS}


def verdicts(**changes):
    listed = [claim.verdict for claim in compute.claims(found_with(**changes))]
    assert listed[:8] == listed[8:]
    return dict(zip(CLAIMS, listed[:8]))


def shown_and_contradicted(**changes):
    found = verdicts(**changes)
    return [[name for name in CLAIMS if found[name] == verdict]
            for verdict in (SHOWN, CONTRADICTED)]


def test_equal_ways_show_nothing():
    assert verdicts() == dict.fromkeys(CLAIMS, NOT_SHOWN)


def test_each_claim_compares_what_it_names():
    assert shown_and_contradicted(thoughts=(0.6, 0.5)) == [["one thought"], []]
    assert shown_and_contradicted(thoughts=(0.4, 0.6)) == [["four thoughts"], ["one thought"]]
    assert shown_and_contradicted(majority=(0.5, 0.5, 0.6)) == [["majority"], ["best of many"]]
    assert shown_and_contradicted(majority=(0.5, 0.4, 0.4)) == [
        ["one thought", "best of few", "best of many"], ["majority"]]
    assert shown_and_contradicted(best=(0.5, 0.6, 0.5)) == [["best of few", "falls"],
                                                            ["vote of few"]]
    assert shown_and_contradicted(best=(0.5, 0.5, 0.6)) == [["best of many"],
                                                            ["vote of many", "falls"]]
    assert shown_and_contradicted(weighted=(0.5, 0.6, 0.6)) == [["vote of few", "vote of many"],
                                                                ["four thoughts"]]


def test_a_budget_is_met_by_the_least_number_that_has_the_tokens():
    found = found_with()
    assert [compute.as_many_tokens(found, "countdown", thoughts) for thoughts in (1, 2, 4)] == [
        3, 6, 12]


def test_tables_have_a_cell_for_each_head():
    for heads, rows in compute.tables(found_with()):
        assert {len(row) for row in rows} == {len(heads)}
