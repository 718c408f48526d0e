"""Gridworld: walk to a prize on a small map. +5 is far, +4 is near, but most ways to it cross -3.

A prompt such as `A b3 7` names the map, the start, and the limit of moves. A completion consists of
moves, one character each: URDL. The reward of a move depends on the cell in which it ends: 5 or 4
at a prize, which ends the episode, -3 at an x, and -1 elsewhere. If a wall or the edge is in the
way, the move ends where it began; so does any other character. After the end of the episode, each
character gets -1; it costs nothing to stop early. RURR on `A b3 7` gets -1, -1, -1, +5, and so does
LULL on `G d3 7`, its mirror image.
"""
import dataclasses
import functools
from typing import NamedTuple

import torch

import common
from common import Problem, decode
from tasks import Task

ROWS = ("#...5  oo...  ...5#  .....  .o#.5  ...5.",     # rows of the maps A to F; #: wall, o: start
        "oo...  .o..5  ....o  ....5  oo..#  ..#..",
        "#oo..  oxo..  ooox4  ooox4  #oo..  oooxo",
        "4xoo#  #4###  .ooo#  #o#oo  4xooo  .o#4#")
PRIZES = ("4", "5")
WORTH = {"5": 5.0, "4": 4.0, "x": -3.0}                 # rewards of cells; -1 elsewhere
LIMITS = range(5, 10)
MOVES = {"U": (0, 1), "R": (1, 0), "D": (0, -1), "L": (-1, 0)}
UNREACHABLE = -99.0


def read_maps():
    """Read the cells of each map that are not walls; a1 is at the lower left. Maps G to L are the
    mirror images of A to F. -> {map: {cell: mark}}"""
    maps = {name: {} for name in "ABCDEFGHIJKL"}
    for rank, row in zip("4321", ROWS):
        drawn = row.split()
        mirrored = [marks[::-1] for marks in drawn]
        for name, marks in zip(maps, drawn + mirrored):
            for column, mark in zip("abcde", marks):
                if mark != "#":
                    maps[name][column + rank] = mark
    return maps


MAPS = read_maps()
STARTS = [f"{name} {cell}" for name in MAPS for cell in MAPS[name] if MAPS[name][cell] == "o"]


class Gridworld(Task):
    """An episode of moves, each with its own reward."""
    prompt_width = len("A b3 7")
    defaults = {"max_completion_length": 28, "base_steps": 600, "num_prompts": 64}
    held_out_tenths = 3     # 114 of 370 prompts

    def __init__(self, cfg, level=""):
        super().__init__(cfg)
        if level:
            common.fail(f"--task gridworld:{level}: gridworld has no levels")
        if getattr(cfg, "scale_rewards", "") == "mean":
            common.fail("--scale_rewards mean: the mean of gridworld's rewards may be negative")

    def sample(self, rng):
        return Problem(f"{rng.choice(STARTS)} {rng.choice(LIMITS)}", answer="")

    def demonstration(self, rng, phase):
        """Draw a problem and the best walk to a prize: to either prize in the textbook and a cold
        start, but four times out of five to the near one in the forum."""
        problem = self.sample(rng)
        share_of_near = {"textbook": 0.5, "forum": 0.8, "cold_start": 0.5}[phase]
        prize = "4" if rng.random() < share_of_near else "5"
        _, Q = values(problem.prompt, prize=prize)
        name, cell, _ = problem.prompt.split()
        text = ""
        for returns in Q:
            if MAPS[name][cell] not in PRIZES:
                move = max(returns[cell], key=returns[cell].get)
                cell, _ = outcome(name, cell, move)
                text += move
        return problem._replace(completion=text)

    def verify(self, problem, text):
        """Compute the reward of each character. -> list of float"""
        return play(problem, text).rewards

    def token_rewards(self, batch):
        """Put the reward of each character on the token that writes it, and the rest of a row's
        reward on its last sampled token. -> (B, T)"""
        rewards = torch.zeros(batch.mask.shape, dtype=batch.mask.dtype)         # (B, T)
        rows = zip(batch.tokens.tolist(), batch.lengths.tolist(), batch.verified)
        for row, (ids, length, verified) in enumerate(rows):
            ids = ids[:length]
            ends = [len(decode(ids[:t])) for t in range(1 + len(ids))]
            sums = [sum(verified[start:end]) for start, end in zip(ends, ends[1:])]
            rewards[row, :len(ids)] = rewards.new_tensor(sums)
        rewards = rewards.to(batch.mask) * batch.mask   # 0 for inserted tokens
        rest = batch.rewards - rewards.sum(dim=1).view_as(batch.rewards).to(batch.rewards)
        return rewards + super().token_rewards(dataclasses.replace(batch, rewards=rest))

    def best_return(self, problem):
        """Compute the highest sum of rewards. -> float"""
        V, _ = values(problem.prompt)
        _, start, _ = problem.prompt.split()
        return V[0][start]


# ---- the world -------------------------------------------------------------------------------

@functools.cache
def outcome(name, cell, move):
    """Find how a move ends; any other character is wasted and ends where it began.
    -> cell, reward"""
    x, y = MOVES.get(move, (0, 0))
    end = chr(ord(cell[0]) + x) + chr(ord(cell[1]) + y)
    if end not in MAPS[name]:
        end = cell
    return end, WORTH.get(MAPS[name][end], -1.0)


class Episode(NamedTuple):
    """The result of playing a text."""
    rewards: list           # one for each character
    cells: list             # the start, and the cell after each move


def play(problem, text):
    """Make the moves of a text. -> Episode"""
    name, cell, limit = problem.prompt.split()
    episode = Episode(rewards=[], cells=[cell])
    for character in text:
        reward = -1.0                                   # after the end
        if len(episode.cells) <= int(limit) and MAPS[name][cell] not in PRIZES:
            cell, reward = outcome(name, cell, character)
            episode.cells.append(cell)
        episode.rewards.append(reward)
    return episode


@functools.lru_cache(4096)
def values(prompt, policy=None, prize=""):
    """Compute exact expected returns after t moves, backwards from the last move: V[t][cell], and
    Q[t][cell][move] if that move comes first. policy(t, cell) is {move: probability}, and the rest
    up to 1 is the probability of stopping. None stands for the best policy, or, if a prize is
    given, for the best one that goes only for this prize and never stops. -> V, Q (lists over t)"""
    name, _, limit = prompt.split()
    at_end = dict.fromkeys(MAPS[name], 0.0)
    for cell, mark in MAPS[name].items():
        if prize and mark in PRIZES and mark != prize:
            at_end[cell] = UNREACHABLE
    V = [at_end]
    Q = []
    for t in reversed(range(int(limit))):
        V_after = V[0]
        V_now = dict(at_end)
        Q_now = {}
        for cell, mark in MAPS[name].items():
            returns = {}
            for move in MOVES:
                end, reward = outcome(name, cell, move)
                returns[move] = reward + V_after[end]
            Q_now[cell] = returns
            if mark in PRIZES:
                continue                                    # the episode is over
            if policy is None:
                to_stop = UNREACHABLE if prize else 0.0
                V_now[cell] = max(to_stop, *returns.values())
            else:
                probabilities = policy(t, cell)
                V_now[cell] = sum(p * returns[move] for move, p in probabilities.items())
        V.insert(0, V_now)
        Q.insert(0, Q_now)
    return V, Q
