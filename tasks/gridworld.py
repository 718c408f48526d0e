"""gridworld: walk to a prize on a small map. +5 is far, +4 is near, but most ways to it lead over the -3.

The prompt names map, start and limit of moves, `A b3 7`; the completion is moves, one character each: URDL. A
move earns what the cell is worth in which it ends: 5 or 4, a prize, which ends the episode, -3 at x, else -1.
If a wall or the edge is in the way, that is the cell it began in, and so it is for any other character. After
the end each costs 1; to stop early costs nothing. RURR on `A b3 7` earns -1, -1, -1, +5.

With --slip a move may go astray, to its left or right. After each one the environment then says where it led,
Rc3Uc4 .., which earns 0. problem.hidden, (slip, seed), and the number of the move decide how it goes.
"""
import functools
import random

from common import Problem

ROWS = ("#...5  oo...  ...5#  .....  .o#.5  ...5.",     # of the maps A to F; # is a wall, o a start
        "oo...  oo..5  ....o  ....5  oo..#  ..#..",
        "#oo..  oxo..  ooox4  ooox4  #oo..  oooxo",
        "4xoo#  #4###  .ooo#  #o#oo  4xooo  .o#4#")
MAPS = {name: {column + rank: mark for rank, row in zip("4321", rows) for column, mark in zip("abcde", row)
               if mark != "#"} for name, rows in zip("ABCDEF", zip(*map(str.split, ROWS)))}
STARTS = [f"{name} {cell}" for name, world in MAPS.items() for cell, mark in world.items() if mark == "o"]
LIMITS = range(5, 10)
MOVES = {"U": (0, 1, "LR"), "R": (1, 0, "UD"), "D": (0, -1, "RL"), "L": (-1, 0, "DU"), "": (0, 0, ("", ""))}
CALLS = tuple("URDL")
FLAGS = {"max_completion_length": 3 * LIMITS[-1] + 1, "base_steps": 400}


def width(slip=0.0):
    """Characters of a prompt."""
    return len("A b3 7")


@functools.cache
def outcomes(name, cell, move, slip=0.0):
    """How a move may end, straight on, to its left, to its right. -> [(cell, reward)], probabilities"""
    ends = []
    for x, y, _ in (MOVES[way] for way in (move, *MOVES[move][2])):
        to = chr(ord(cell[0]) + x) + chr(ord(cell[1]) + y)
        to = to if to in MAPS[name] else cell
        ends.append((to, {"5": 5.0, "4": 4.0, "x": -3.0}.get(MAPS[name][to], -1.0)))
    return ends, (1 - slip, slip / 2, slip / 2)


def play(problem, text):
    """-> rewards, one per character; start and cell after each move; is it over; what the environment says"""
    (name, start, limit), (slip, seed) = problem.prompt.split(), problem.hidden or (0.0, 0)
    rewards, cells, over, said = [], [start], False, ""
    for char in text:
        reward = -1.0
        if char == said[:1]:                                    # no move of the policy's
            reward, said = 0.0, said[1:]
        elif not over:
            move, luck = char if char in CALLS else "", f"{seed} {len(cells)}"
            ends, chances = outcomes(name, cells[-1], move, slip)
            cell, reward = random.Random(luck).choices(ends, chances)[0] if slip else ends[0]
            cells.append(cell)
            over = MAPS[name][cell] in "45" or len(cells) > int(limit)
            said = cell if slip and move and not over else ""
        rewards.append(reward)
    return rewards, cells, over, said


def verify(problem, text):
    """What each character earns. -> list of float"""
    return play(problem, text)[0]


def respond(problem, text):
    """Where the move led that the text ends in, if moves may slip and the episode goes on."""
    return play(problem, text)[3] if problem.hidden and text[-1:] in CALLS else ""


@functools.lru_cache(4096)
def values(prompt, slip=0.0, policy=None, prize=""):
    """Exact expected returns of what follows t moves, V[t][cell] and Q[t][cell][move], from the last back.
    policy(t, cell) -> {move: probability}, stopping with what lacks to 1. None: the best policy, or the best
    that goes for this prize alone and does not stop."""
    name, _, limit = prompt.split()
    ends = {cell: -99.0 * (mark in "45" and mark != (prize or mark)) for cell, mark in MAPS[name].items()}
    V, Q = [ends], []
    for t in reversed(range(int(limit))):
        q = {cell: {move: sum(p * (reward + V[0][to]) for (to, reward), p in zip(
            *outcomes(name, cell, move, slip))) for move in CALLS} for cell in ends}
        v = {cell: max(-99.0 if prize else 0.0, *q[cell].values()) if policy is None else
             sum(p * q[cell][move] for move, p in policy(t, cell).items()) for cell in ends}
        V.insert(0, {cell: ends[cell] if mark in "45" else v[cell] for cell, mark in MAPS[name].items()})
        Q.insert(0, q)
    return V, Q


def best(problem):
    """The highest expected return."""
    return values(problem.prompt, problem.hidden[0] if problem.hidden else 0.0)[0][0][problem.prompt[2:4]]


def sample(rng, slip=0.0):
    """A start and a limit; `slip` is the probability that a move goes astray."""
    hidden = (slip, rng.getrandbits(32)) if slip else None
    return Problem("gridworld", f"{rng.choice(STARTS)} {rng.choice(LIMITS)}", "", hidden=hidden)


def corpus(problem, rng, phase):
    """The best walk to a prize: either one in the textbook, four times of five the near one in the forum."""
    prize = "4" if rng.random() < {"textbook": 0.5, "forum": 0.8}[phase] else "5"
    Q = values(problem.prompt, problem.hidden[0] if problem.hidden else 0.0, prize=prize)[1]
    text, cells, over = "", [problem.prompt[2:4]], False
    while not over:
        worth = Q[len(cells) - 1][cells[-1]]
        text += max(worth, key=worth.get)
        text += respond(problem, text)
        _, cells, over, _ = play(problem, text)
    return text


def draw(problem, text):
    """The map with the path: * where it led, @ where it ends."""
    cells = play(problem, text)[1]
    marks = MAPS[problem.prompt[0]] | dict.fromkeys(cells, "*") | {cells[-1]: "@"}
    return "\n".join("".join(marks.get(column + rank, "#") for column in "abcde") for rank in "4321")
