"""lab/credit.py: walks whose values are known, and what its estimates of advantages are."""
import copy
import random
from types import SimpleNamespace

import pytest
import torch
from conftest import f64

import common
import ppo
from common import Problem
from lab import credit
from lab.entry import CONTRADICTED, NOT_SHOWN, SHOWN
from tasks import gridworld

CFG = ppo.Config(task="gridworld", device="cpu", num_threads=1, hidden_size=16, num_prompts=4,
                 num_attention_heads=2, num_hidden_layers=1, intermediate_size=16)
TASK = common.load_task(CFG, ppo.verify)
BATCH = credit.make_batch(TASK, CFG, 0)


# ---- walks whose values are known ------------------------------------------------------------

def test_the_policy_makes_the_best_move_on_purpose_half_of_the_time():
    chances = credit.half_skilled("A b3 7")(3, "d4")        # the prize is to the right
    assert chances == {"U": 0.125, "R": 0.625, "D": 0.125, "L": 0.125}


def test_a_walk_earns_what_the_task_says_and_ends_as_the_task_does():
    rng = random.Random(0)
    for _ in range(50):
        steps = credit.walk("A b3 5", 0, "b3", rng)
        episode = gridworld.play(Problem("A b3 5", ""), "".join(move for _, move, _ in steps))
        assert [reward for _, _, reward in steps] == episode.rewards
        assert [cell for cell, _, _ in steps] == episode.cells[:-1] and episode.is_over


def test_a_walk_that_begins_later_has_fewer_moves_left():
    assert len(credit.walk("A b3 5", 4, "b3", random.Random(0))) == 1
    assert credit.walk("A b3 5", 5, "b3", random.Random(0)) == []


def test_the_mean_return_of_walks_is_the_value_that_is_called_exact():
    rng = random.Random(0)
    returns = f64([sum(reward for _, _, reward in credit.walk("C c2 5", 0, "c2", rng))
                   for _ in range(2000)])
    V, _ = gridworld.values("C c2 5", 0.0, credit.half_skilled("C c2 5"))
    assert (returns.mean() - V[0]["c2"]).abs() < 4 * returns.std() / 2000 ** 0.5


def test_fewer_rollouts_are_the_first_of_the_many():
    values = credit.rollout_values("A b3 5", 0, "b3", random.Random(3))
    rng = random.Random(3)
    returns = [sum(reward for _, _, reward in credit.walk("A b3 5", 0, "b3", rng))
               for _ in range(16)]
    assert values == pytest.approx([sum(returns[:k]) / k for k in (1, 2, 4, 8, 16)])


def test_with_the_values_of_a_batch_the_td_error_is_its_exact_advantage():
    A, _ = ppo.gae(BATCH.token_rewards, BATCH.V, BATCH.mask, 1.0, 0.0)
    torch.testing.assert_close(A, BATCH.A)
    assert BATCH.A.abs().max() > 0.5


def test_a_batch_holds_groups_of_walks_as_a_critic_of_ppo_reads_them():
    assert BATCH.rewards.shape == (4, 8) and len(set(BATCH.texts)) == 4
    assert BATCH.texts[:8] == [BATCH.texts[0]] * 8
    for row, steps in enumerate(BATCH.steps):
        moves = "".join(move for _, move, _ in steps)
        assert ppo.decode(BATCH.tokens[row, :len(moves)].tolist()) == moves
        assert BATCH.mask[row].tolist() == [1.0] * len(moves) + [0.0] * (9 - len(moves))
        assert BATCH.lengths[row] == len(moves)
        assert BATCH.rewards.flatten()[row] == sum(reward for _, _, reward in steps)


def test_each_step_has_a_batch_of_its_own():
    assert credit.make_batch(TASK, CFG, 0).steps == BATCH.steps
    assert credit.make_batch(TASK, CFG, 1).steps != BATCH.steps


# ---- estimates -------------------------------------------------------------------------------

MADE = SimpleNamespace(mask=f64([[1, 1, 0], [1, 1, 1]]), V=f64([[1, 2, 50], [3, 4, 5]]),
                       A=f64([[1, -1, 50], [0, 2, -2]]))


def test_the_error_of_values_is_a_share_of_their_variance_at_the_steps():
    assert credit.value_error(MADE.V * MADE.mask, MADE) == 0
    assert credit.value_error(MADE.V + 1, MADE) == pytest.approx(1 / 2.5)


def test_agreement_counts_steps_and_no_sign_where_no_move_is_better():
    noise = f64([[0, 0, -100], [0, 0, 0]])
    assert credit.agreement(MADE.A + noise, MADE) == [1, 1]
    assert credit.agreement(-MADE.A + noise, MADE) == [-1, 0]
    half = f64([[1, 1, 0], [1, 1, 1]]) * MADE.A.abs()
    assert credit.agreement(half, MADE)[1] == 0.5


def test_a_critic_begins_without_knowledge_and_learns(monkeypatch):
    monkeypatch.setattr(credit, "STEPS", 8)
    changes = {"num_prompts": 32, "critic_learning_rate": 0.01, "cliprange_value": 10.0}
    cfg = ppo.Config(**vars(CFG) | changes)
    _, errors = credit.train_critic(cfg, TASK, ppo.GPT(cfg))
    first = credit.make_batch(TASK, cfg, 0)
    assert errors[0] == credit.value_error(torch.zeros_like(first.V), first)
    assert len(errors) == 8 and max(errors[-2:]) < 0.85 * errors[0], errors


def test_more_rollouts_are_better_and_the_advantage_of_a_whole_walk_is_poor(monkeypatch):
    asked = []

    def load_base(script, *flags):
        asked.append((script, flags))
        return CFG, TASK, ppo.GPT(CFG)
    monkeypatch.setattr(credit, "load_base", load_base)
    monkeypatch.setattr(credit, "STEPS", 1)
    found = credit.measure_seed(4)
    assert asked == [(ppo, ("--task", "gridworld", "--seed", 4))]
    errors = [found["values"][f"rollouts, K = {k}"] for k in (1, 4, 16)]
    assert errors[0] > 2 * errors[1] > 4 * errors[2]
    correlations = {name: correlation for name, (correlation, _) in found["advantages"].items()}
    assert correlations[credit.WHOLE] < 0.6 < 0.7 < correlations["rollouts, K = 16"]
    assert correlations["critic"] < correlations["rollouts, K = 16"]


# ---- what is shown ---------------------------------------------------------------------------

def made_seed(whole, rollouts, critic, error_of_rollouts, error_of_critic):
    """What a seed might have found."""
    return {"advantages": {credit.WHOLE: [whole, 0.6], credit.JUDGED: [rollouts, 0.8],
                           credit.CRITIC: [critic, 0.7]},
            "values": {credit.JUDGED: error_of_rollouts, credit.CRITIC: error_of_critic}}


def verdicts(*seeds):
    return [claim.verdict for claim in credit.claims({"of seeds": list(seeds)})]


def test_each_verdict_may_come_out_either_way():
    as_claimed = made_seed(0.3, 0.8, 0.5, 0.1, 0.3)
    otherwise = made_seed(0.6, 0.5, 0.8, 0.3, 0.1)
    assert verdicts(as_claimed, copy.deepcopy(as_claimed)) == [SHOWN] * 3
    assert verdicts(otherwise, otherwise) == [CONTRADICTED] * 3
    assert verdicts(as_claimed, otherwise) == [NOT_SHOWN] * 3
