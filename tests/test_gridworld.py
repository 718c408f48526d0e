"""The gridworld: the reward of each character, and the token that gets it."""
import pytest
import torch
from conftest import f64, load_named
from update_scenes import made_batch

import common
import grpo
from common import Problem
from tasks import Task

TASK = load_named("gridworld")
verify = TASK.verify
GOLDEN = Problem("A b3 7", "")


@pytest.mark.parametrize("prompt, text, rewards", [
    ("A b3 7", "", []),
    ("A b3 7", "RURR", [-1, -1, -1, 5]),
    ("A b3 7", "DDLU", [-1, -3, 4, -1]),
    ("A b3 7", "RURRRR", [-1, -1, -1, 5, -1, -1]),                  # after the end
    ("A b3 7", "LURRURR", [-1, -1, -1, -1, -1, -1, 5]),             # a wall: a wasted move
    ("A b3 7", "DD?L", [-1, -3, -3, 4]),                            # stopped by the edge at x
    ("A b3 7", "R U R  R", [-1, -1, -1, -1, -1, -1, -1, -1]),       # the 7th move is the last
    ("A b3 7", "RU\u0663RR", [-1, -1, -1, -1, 5]),
    ("G d3 7", "LULL", [-1, -1, -1, 5]),                            # the mirror image of A b3 7
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
    ([*b"RxxU"], [-1, 0, 0, -1], [1.0, 0.0, 0.0, 1.0])], ids=str)       # inserted tokens
def test_a_reward_falls_on_the_token_of_its_move_and_what_is_left_on_the_last_one(
        ids, paid, mask):
    """Inserted tokens get a reward of 0, even if the reward is not the sum of the verdict."""
    padding = 9 - len(ids)
    mask = f64([(mask or [1.0] * len(ids)) + [0.0] * padding])
    batch = made_batch(grpo, [[1]], [ids + [grpo.PAD] * padding], mask, mask,
                       rewards=f64([[sum(paid)]]))
    batch.verified = [TASK.verify(GOLDEN, grpo.decode([i for i in ids if i != grpo.EOS]))]
    batch.lengths = torch.tensor([len(ids)])
    assert TASK.token_rewards(batch)[0].tolist() == pytest.approx(paid + [0.0] * padding)


class Tenths(Task):
    def verify(self, problem, text):
        return [0.1] * len(text)                        # ten of them add up to 1 - 1e-16

    def best_return(self, problem):
        return 1.0


@pytest.mark.parametrize("task, texts", [
    (TASK, ["RURR", "RURRR", "DDL", ""]), (Tenths(), ["x" * 10, "x" * 9])], ids=["task", "tenths"])
def test_an_episode_is_correct_if_it_earns_the_best_return(task, texts):
    batch = common.Batch(*[None] * 6, problems=[GOLDEN] * len(texts), texts=texts)
    is_correct = task.judge(batch, len(texts), 0).is_correct[0].tolist()
    assert is_correct == [True] + [False] * (len(texts) - 1)
