"""Wrong rewards: policies that do what is rewarded, not what was meant"""
import functools
import itertools
import statistics

import numpy

import common
import grpo
import plumbing
from lab.bench import Claim, at_best, numbers
from lab.training import load_base, training
from report import chart
from tasks import gridworld

STEPS = 30
LAST = 5                                        # number of batches in the mean at the end
RIGHT, NO_PENALTY, ALIVE, NEARER, POTENTIAL = REWARDS = (
    "true reward", "no penalty", "+1 for being alive", "bonus for coming nearer",
    "difference of a potential")
FLAGS = {"usual": "--task gridworld", "short": "--task gridworld --base_steps 60"}
SEEDS, TUNING, ONE_BASE = range(5), range(5, 7), True
CHECK = "grpo.py --task gridworld"
SIDES = {f"{base} base: {kind}": (None, 5e-4) for base, kinds in (
    ("usual", (RIGHT, NO_PENALTY, ALIVE, NEARER)), ("short", (RIGHT, ALIVE, NEARER)))
    for kind in kinds}
COLUMNS = PROXY, TRUE, MOVES = "return by this reward", "true return", "moves"
COMPARED = [(side, PROXY) for side in SIDES]


def potential(name, cell):
    """Compute the potential of a cell: -3 for each move to the prize of 5, as if there were no
    walls. -> float"""
    [goal] = [end for end, mark in gridworld.MAPS[name].items() if mark == "5"]
    return -3.0 * sum(abs(ord(one) - ord(other)) for one, other in zip(goal, cell))


def extra(kind, name, cell, end):
    """Compute how much more a move gets by a reward than by the true one. -> float"""
    true = gridworld.WORTH.get(gridworld.MAPS[name][end], -1.0)
    rise = potential(name, end) - potential(name, cell)
    if kind == RIGHT:
        return 0.0
    if kind == NO_PENALTY:
        return max(0.0, -1 - true)
    if kind == ALIVE:
        return 2.0 if true == -1 else 0.0
    if kind == NEARER:
        return max(0.0, rise)
    assert kind == POTENTIAL, kind
    return rise


@functools.cache
def best_from(kind, name, cell, left):
    """Follow the best moves by a reward from a cell, with at most `left` moves. Where several are
    equally good, take their mean. A potential has to be 0 after the end. -> [return by this reward,
    true return, number of moves]"""
    options = [[-potential(name, cell) if kind == POTENTIAL else 0.0, 0.0, 0.0]]    # to stop
    if left > 0 and gridworld.MAPS[name][cell] not in gridworld.PRIZES:
        for move in gridworld.MOVES:
            end, true = gridworld.outcome(name, cell, move)
            now = (true + extra(kind, name, cell, end), true, 1.0)
            later = best_from(kind, name, end, left - 1)
            options.append([sum(column) for column in zip(now, later)])
    highest = max(option[0] for option in options)
    best = [option for option in options if option[0] == highest]
    return [sum(column) / len(best) for column in zip(*best)]


def best_walks(kind):
    """Average the results of the best moves by a reward over all prompts for training."""
    task = gridworld.Gridworld(plumbing.parse_flags(grpo.Config, FLAGS["usual"].split()))
    rows = [best_from(kind, *start.split(), limit)
            for start, limit in itertools.product(gridworld.STARTS, gridworld.LIMITS)
            if not task.is_held_out(common.Problem(f"{start} {limit}", ""))]
    return dict(zip(COLUMNS, numpy.mean(rows, axis=0)))


def measure(case, seed):
    """Train with a reward, and record the return of each step's walks by it and by the true one."""
    side, _, rate = case.rpartition(", ")
    base, kind = side.split(" base: ")
    cfg, task, policy = load_base(grpo, f"{FLAGS[base]} --learning_rate {rate} --seed {seed}")

    def reward(problem, text, verified, step):
        moves = itertools.pairwise(gridworld.play(problem, text).cells)
        return sum(verified) + sum(extra(kind, problem.prompt[0], *move) for move in moves)
    task.reward = reward
    columns = {column: [] for column in COLUMNS}
    for batch in itertools.islice(training(cfg, task, policy), STEPS):
        cells = [gridworld.play(*pair).cells for pair in zip(batch.problems, batch.texts)]
        columns[PROXY].append(batch.rewards.mean().item())
        columns[TRUE].append(statistics.mean(map(sum, batch.verified)))
        columns[MOVES].append(statistics.mean(map(len, cells)) - 1)
    return columns


def score(columns, what):
    return columns[what][:, -LAST:].mean(axis=1)


def page(x):
    runs = {side: columns for (side, _), columns in at_best("wrongrewards", x).items()}
    true = {side: score(columns, TRUE) for side, columns in runs.items()}
    yield ("If the reward omits the penalty, walks in the grid world get a true return of "
           f"{true[f'usual base: {NO_PENALTY}'].mean():.2f} instead of "
           f"{true[f'usual base: {RIGHT}'].mean():.2f}. If it pays for being alive, a policy "
           "from a base of few demonstrations wanders about, and gets "
           f"{true[f'short base: {ALIVE}'].mean():.2f}.")
    for base, kind, cause in (
            ("usual", NO_PENALTY, "from the usual base, a reward without the penalty"),
            ("usual", ALIVE, "from the usual base, a reward of +1 for being alive"),
            ("short", ALIVE, "from the short base, a reward of +1 for being alive")):
        sides = [f"{base} base: {one}" for one in (kind, RIGHT)]
        wrong, right = map(true.get, sides)
        yield Claim(f"{cause} leads to a lower true return than the true reward",
                    "after Amodei and others", wrong - right, at_most=-0.1, sides=(wrong, right),
                    rates=tuple(runs[side]["rate"] for side in sides))
    best = {kind: best_walks(kind) for kind in REWARDS}
    exact = {kind: columns[TRUE] - best[RIGHT][TRUE] for kind, columns in best.items()}
    yield Claim("the best walks by a wrong reward have a lower true return than the best walks by "
                "the true reward (exact; three wrong rewards)",
                "after Skalse and others", [exact[kind] for kind in (NO_PENALTY, ALIVE, NEARER)],
                at_most=-0.1, exact=True, computed=True)
    yield Claim("the best walks by the true reward and the difference of a potential have the best "
                "true return (exact)", "Ng and others, 1999",
                exact[POTENTIAL], at_least=-1e-9, at_most=1e-9, exact=True, computed=True)
    yield lambda axis: chart.dots(axis, true, xlabel=f"true return, mean of the last {LAST} steps")
    rows = {side: {PROXY: score(columns, PROXY), TRUE: true[side]}
            for side, columns in runs.items()}
    yield numbers(rows | {f"best walks: {kind}": {name: columns[name] for name in (PROXY, TRUE)}
                          for kind, columns in best.items()}, "reward", ".2f")
