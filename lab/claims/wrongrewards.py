"""Wrong rewards: walks that earn what pays, not what was meant

In the grid world: what the best walks by a wrong reward earn in truth, exactly, and what the walks
earn that grpo.py learns with that reward. docs/lab/wrongrewards.md says more.
"""
import functools
import itertools
import statistics

import common
import grpo
from lab.draw import GREY, dots
from lab.experiment import Experiment, numbers, transposed
from lab.training import load_base, training
from lab.verdict import Claim
from tasks import gridworld

STEPS = 30
RIGHT, NO_PENALTY, ALIVE, NEARER, POTENTIAL = REWARDS = (
    "true reward", "no penalty", "+1 for being alive", "bonus for nearer", "a potential's rise")
WRONG = [NO_PENALTY, ALIVE, NEARER]
BONUS = 3.0                                     # for a cell nearer to the prize of 5
LAST = 5                                        # batches, for the return at the end
LOSS = 0.1                                      # of the return of a walk, what counts as one
BASES = {"usual": "--task gridworld", "short": "--task gridworld --base_steps 60"}
WALKERS = {f"{base} base: {kind}": (base, kind) for base in BASES for kind in (RIGHT, *WRONG)
           if (base, kind) != ("short", NO_PENALTY)}
EXPERIMENT = Experiment(__file__, seeds=range(5), one_base=True)


def potential(name, cell):
    """Higher, the nearer a cell is to the prize of 5, as if there were no walls. -> float"""
    [goal] = [end for end, mark in gridworld.MAPS[name].items() if mark == "5"]
    steps = [abs(ord(one) - ord(other)) for one, other in zip(goal, cell)]
    return -BONUS * sum(steps)


def pay(kind, name, cell, end):
    """What a move from a cell to its end earns by a reward. -> float"""
    true = gridworld.WORTH.get(gridworld.MAPS[name][end], -1.0)
    rise = potential(name, end) - potential(name, cell)
    return {RIGHT: true, NO_PENALTY: max(true, -1.0), ALIVE: 1.0 if true == -1 else true,
            NEARER: true + max(0.0, rise), POTENTIAL: true + rise}[kind]


def pay_at_end(kind, name, cell):
    """What it earns to end in a cell. A potential has to be 0 after the end. -> float"""
    return -potential(name, cell) if kind == POTENTIAL else 0.0


def proxy(kind, problem, text):
    """What a text earns by a reward; after the end, each character earns -1. -> float"""
    name = problem.prompt[0]
    cells = gridworld.play(problem, text).cells
    earned = sum(pay(kind, name, *move) for move in itertools.pairwise(cells))
    too_many = len(text) - (len(cells) - 1)
    return earned + pay_at_end(kind, name, cells[-1]) - too_many


@functools.cache
def best_from(kind, name, cell, left):
    """What the best moves by a reward lead to from a cell with so many moves left: proxy, true
    return, moves, and of equally good ones the mean. -> list"""
    options = [[pay_at_end(kind, name, cell), 0.0, 0.0]]                        # to stop
    if left > 0 and gridworld.MAPS[name][cell] not in gridworld.PRIZES:
        for move in gridworld.MOVES:
            [(end, true, _), *_] = gridworld.outcomes(name, cell, move)
            earned = (pay(kind, name, cell, end), true, 1.0)
            later = best_from(kind, name, end, left - 1)
            options.append([sum(column) for column in zip(earned, later)])
    highest = max(option[0] for option in options)
    best = [option for option in options if option[0] == highest]
    return [statistics.mean(column) for column in zip(*best)]


@EXPERIMENT.measure(REWARDS, seeds=[0])
def best(seed, reward):
    """The means over prompts of what the best moves by a reward lead to."""
    task = gridworld.Gridworld(common.parse_flags(grpo.Config, BASES["usual"].split()))
    rows = []
    for start, limit in itertools.product(gridworld.STARTS, gridworld.LIMITS):
        if not task.is_held_out(common.Problem(f"{start} {limit}", "")):
            rows.append(best_from(reward, *start.split(), limit))
    return dict(zip(("proxy", "true", "moves"), map(statistics.mean, zip(*rows))))


@EXPERIMENT.measure(WALKERS)
def walks(seed, walker):
    """Train with a reward: what the walks of each step earn by it and in truth."""
    base, kind = WALKERS[walker]
    cfg, task, policy = load_base(grpo, f"{BASES[base]} --seed {seed}")
    task.reward = lambda problem, text, verdict, step: proxy(kind, problem, text)
    found = []
    for batch, _ in itertools.islice(training(grpo, cfg, task, policy), STEPS):
        cells = [gridworld.play(*pair).cells for pair in zip(batch.problems, batch.texts)]
        found.append({"proxy": batch.rewards.mean().item(),
                      "true": statistics.mean(map(sum, batch.verdicts)),
                      "moves": statistics.mean(map(len, cells)) - 1})
    return transposed(found)


def page(best, walks):
    ends = {walker: {name: rows[:, -LAST:].mean(axis=1) for name, rows in found.items()}
            for walker, found in walks.items()}
    true = {walker: found["true"] for walker, found in ends.items()}
    right, obeyed, *_, short, alive, _ = (earned.mean() for earned in true.values())
    said = (f"A wrong reward is obeyed: grid-world walks earn a true return of {obeyed:.2f}, not "
            f"{right:.2f}, if it omits the penalty; {alive:.2f}, not {short:.2f}, if it pays for "
            "being alive (from a base of few demonstrations)")
    for base, kind in (("usual", NO_PENALTY), ("usual", ALIVE), ("short", ALIVE)):
        walker = f"{base} base: {kind}"
        yield Claim(f"{walker}: lower true return than with the true reward", "Amodei and others",
                    true[walker] - true[f"{base} base: {RIGHT}"], at_most=-LOSS, unit="return",
                    shown=said * (kind == NO_PENALTY))
    exact = {reward: found["true"] - best[RIGHT]["true"] for reward, found in best.items()}
    yield Claim("exactly: the best walks by each wrong reward have a lower true return",
                "Skalse and others", [exact[kind] for kind in WRONG], at_most=-LOSS, exact=True,
                unit="return")
    yield Claim("exactly: the best by a potential's difference have the best true return",
                "Ng and others, 1999", exact[POTENTIAL], at_least=-1e-9, at_most=1e-9, exact=True,
                unit="return")
    yield dots(true, said,
               given={name: GREY for name in WALKERS if name.endswith(RIGHT)},
               xlabel="true return, mean of the last five steps; a dot for each seed")
    heads = {"proxy": "return by this reward", "true": "true return", "moves": "moves"}
    yield numbers(ends, heads, ".2f", by="base: reward of the training")
    yield numbers(best, heads, ".2f", by="exactly: the best walks by a reward")
