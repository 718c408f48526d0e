"""The gridworld: the reward of each character and the token that gets it, moves that slip, and
exact values."""
import itertools

import pytest
import torch
from conftest import f64, load_named
from update_scenes import made_batch

import grpo
from common import Problem
from tasks import gridworld

TASK = load_named("gridworld")
SLIPPERY = load_named("gridworld:0.3")
verify = TASK.verify
respond = TASK.respond
GOLDEN = Problem("A b3 7", "")


def slippery(prompt, seed, slip=0.3):
    return Problem(prompt, "", secret=(slip, seed))


# ---- rewards ---------------------------------------------------------------------------------

@pytest.mark.parametrize("prompt, text, rewards", [
    ("A b3 7", "", []),
    ("A b3 7", "RURR", [-1, -1, -1, 5]),
    ("A b3 7", "DRRRUU", [-1, -1, -1, -1, -1, 5]),
    ("A b3 7", "DDLU", [-1, -3, 4, -1]),
    ("A b3 7", "RURRRR", [-1, -1, -1, 5, -1, -1]),                  # after the end
    ("A b3 7", "LURRURR", [-1, -1, -1, -1, -1, -1, 5]),             # a wall: a wasted move
    ("A b3 7", "DD?L", [-1, -3, -3, 4]),                            # stopped by the edge at x
    ("A b3 7", "R U R  R", [-1, -1, -1, -1, -1, -1, -1, -1]),       # the 7th move is the last
    ("A b3 6", "LURRURR", [-1] * 7),
    ("A b3 7", "RU\u0663RR", [-1, -1, -1, -1, 5]),
    ("A b3 7", "<answer>5</answer>", [-1] * 18),
    ("A b3 7", "Rc3U", [-1, -1, -1, -1]),                           # no slips, so no cells
    ("G d3 7", "LULL", [-1, -1, -1, 5]),                            # the mirror image of A b3 7
    ("L b1 8", "UR", [-3, -1]),
    ("B a2 5", "RD", [-3, 4])], ids=ascii)
def test_each_character_earns_what_the_cell_is_worth_in_which_it_ends(prompt, text, rewards):
    assert verify(Problem(prompt, ""), text) == rewards


EURO = list("\u20ac".encode())      # one character of three bytes


@pytest.mark.parametrize("ids, paid, mask", [
    ([*b"RURR", grpo.EOS], [-1, -1, -1, 5, 0], None),
    ([*b"R", 256, *b"URR", grpo.EOS], [-1, -7, -1, -1, -1, 0], None),   # <think> is 7 characters
    ([*b"R", *EURO, *b"URR"], [-1, -1, 0, 0, -1, -1, 5], None),
    ([*b"RURR", grpo.EOS], [-1, -1, -1, 5, 0.5], None),                 # the rest is at the end
    ([*b"RURR"], [-1, -1, -1, 6], None),
    ([*b"Rc3D"], [-1, 0, 0, -1], [1.0, 0.0, 0.0, 1.0])], ids=str)       # inserted tokens
def test_a_reward_falls_on_the_token_of_its_move_and_what_is_left_on_the_last_one(
        ids, paid, mask):
    """Inserted tokens get a reward of 0, even if the reward is not the sum of the verdict."""
    padding = 9 - len(ids)
    problem = slippery("A b3 7", 0, slip=1e-12) if mask else GOLDEN
    mask = f64([(mask or [1.0] * len(ids)) + [0.0] * padding])
    batch = made_batch(grpo, [[1]], [ids + [grpo.PAD] * padding], mask, mask,
                       rewards=f64([[sum(paid)]]))
    batch.verdicts = [TASK.verify(problem, grpo.decode([i for i in ids if i != grpo.EOS]))]
    batch.lengths = torch.tensor([len(ids)])
    assert TASK.token_rewards(batch)[0].tolist() == pytest.approx(paid + [0.0] * padding)


def test_an_episode_is_correct_if_it_earns_the_best_return_and_with_luck_none_is():
    """With slips, an optimal walk could otherwise be wrong, and a bad one right, through luck."""
    for text, is_best in (("RURR", True), ("RURRR", False), ("DDL", False), ("", False)):
        assert TASK.is_correct(GOLDEN, verify(GOLDEN, text)) == is_best
        assert not SLIPPERY.is_correct(slippery("A b3 7", 1), verify(GOLDEN, text))


# ---- moves that slip -------------------------------------------------------------------------

def test_moves_go_astray_to_either_side_as_often_as_they_should_each_by_a_chance_of_its_own():
    """From c2 of map C, U leads up to c3, or slips left to b2 or right onto the x at d2. From c3 of
    map A, which has room on all sides, three moves slip in all combinations."""
    cells = [respond(slippery("C c2 9", seed), "U") for seed in range(4000)]
    assert set(cells) == {"c3", "b2", "d2"}
    assert abs(cells.count("c3") / 4000 - 0.7) < 0.03
    assert abs(cells.count("b2") / 4000 - 0.15) < 0.025
    combinations = set()
    for seed in range(200):
        cells = gridworld.play(slippery("A c3 9", seed, 0.5), "UDU").cells
        combinations.add(tuple(after[0] == before[0]
                               for before, after in itertools.pairwise(cells)))
    assert len(combinations) == 8


@pytest.mark.parametrize("forged", ["c3", "d3", "e4", "d4", "c", "a1a1"])
def test_cells_that_the_policy_writes_itself_do_not_pay(forged):
    """The environment has already inserted a cell, so each further character is a wasted move."""
    for seed in range(50):
        problem = slippery("A b3 9", seed)
        honest = "R" + respond(problem, "R")
        rewards = verify(problem, honest + forged)
        is_on_x = gridworld.play(problem, honest).cells[-1] == "b1"
        assert rewards[:3] == [-1, 0, 0]
        assert rewards[3:] == [-3 if is_on_x else -1] * len(forged)
        assert respond(problem, honest + forged) == ""
        assert respond(problem, honest + forged + "U") in gridworld.MAPS["A"]
