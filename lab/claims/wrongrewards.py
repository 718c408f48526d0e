"""Wrong rewards: walks that earn what pays, not what was meant

Claim. A reward that is wrong is gamed: what is not in it is ignored, and what pays is repeated
(Amodei and others, 1606.06565). A bonus for coming nearer to the goal pays for going back and
forth, unless it is the difference of a potential, which changes no best policy (Ng and others,
1999). So what is best by a proxy may be bad in truth (Skalse and others, 2209.13085).

Prediction. In the grid world, the exact best walks tell where a policy goes: without the penalty
through it, by the shortest way; alive, or with a bonus, about until the last move, and only then to
the prize. Training gets near that, but for the last move, for which a policy has to count.
This was written before any run. Pilots with seed 0 then showed that the usual base of the grid
world, which never wastes a move, gets to neither way of wasting them in 25 steps, but a base of 60
batches of demonstrations to that of being alive. Hence a second base.

Method. In the grid world a move costs 1, one onto a cell of the penalty costs 3, and a prize of 4
or 5 ends the walk. Without slip, exactly: the best walks by each reward, from the last move back;
equally good moves are equally likely. Then 30 steps of grpo.py with each reward, from the usual
base and from the short one, and what the walks of the last five steps earn by it and in truth.

Outcome. Right: the exact walks, and without the penalty the trained ones. Wrong: from the usual
base, training wastes moves in neither way, and from the short one in both. With the true reward,
the short one learns to stay where it is.
"""
import functools
import itertools
import statistics

import common
import grpo
from lab.draw import GREY, dots
from lab.experiment import Experiment, numbers
from lab.training import load_base, training
from lab.verdict import Claim
from tasks import gridworld

AMODEI = "[Amodei and others](https://arxiv.org/abs/1606.06565)"
SKALSE = "[Skalse and others](https://arxiv.org/abs/2209.13085)"
NG = "Ng and others, 1999"
STEPS = 30
RIGHT, NO_PENALTY, ALIVE, NEARER, POTENTIAL = REWARDS = (
    "true reward", "no penalty", "+1 for being alive", "bonus for nearer", "a potential's rise")
WRONG = [NO_PENALTY, ALIVE, NEARER]
BONUS = 3.0                                     # for a cell nearer to the prize of 5
LOSS = 0.1                                      # of the return of a walk, what counts as one
BASES = {"usual": "--task gridworld", "short": "--task gridworld --base_steps 60"}
WALKERS = {f"{base} base: {kind}": (base, kind)
           for base, kinds in (("usual", [RIGHT, *WRONG]), ("short", [RIGHT, ALIVE, NEARER]))
           for kind in kinds}
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(5), one_base=True)


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


def best_from(kind, name, cell, later):
    """What the best moves by a reward lead to from a cell: proxy, true return, moves. later: {cell:
    the same with one move less}, empty if none is left. -> list"""
    options = [[pay_at_end(kind, name, cell), 0.0, 0.0]]                        # to stop
    goes_on = later and gridworld.MAPS[name][cell] not in gridworld.PRIZES
    moves = gridworld.MOVES if goes_on else []
    for move in moves:
        [(end, true, _), *_] = gridworld.outcomes(name, cell, move)
        earned = (pay(kind, name, cell, end), true, 1.0)
        options.append([sum(column) for column in zip(earned, later[end])])
    highest = max(option[0] for option in options)
    best = [option for option in options if option[0] == highest]
    return [statistics.mean(column) for column in zip(*best)]


@functools.cache
def solve(kind, name):
    """The same from each cell with 0, 1 .. moves left. -> list of {cell: list}"""
    stages = [{}]
    for _ in range(1 + gridworld.LIMITS[-1]):
        later = stages[-1]
        stages.append({cell: best_from(kind, name, cell, later) for cell in gridworld.MAPS[name]})
    return stages[1:]


@EXPERIMENT.measure(REWARDS, seeds=[0])
def best(seed, reward):
    """The means over prompts of what the best moves by a reward lead to."""
    task = gridworld.Gridworld(common.parse_flags(grpo.Config, BASES["usual"].split()))
    rows = []
    for start, limit in itertools.product(gridworld.STARTS, gridworld.LIMITS):
        if not task.is_held_out(common.Problem(f"{start} {limit}", "")):
            name, cell = start.split()
            rows.append(solve(reward, name)[limit][cell])
    return dict(zip(("proxy", "true", "moves"), map(statistics.mean, zip(*rows))))


@EXPERIMENT.measure(WALKERS)
def walks(seed, walker):
    """Train with a reward: what the walks of each step earn by it and in truth."""
    base, kind = WALKERS[walker]
    cfg, task, policy = load_base(grpo, f"{BASES[base]} --seed {seed}")
    task.reward = lambda problem, text, verdict, step: proxy(kind, problem, text)
    found = {"proxy": [], "true": [], "moves": []}
    for batch, _ in itertools.islice(training(grpo, cfg, task, policy), STEPS):
        cells = [gridworld.play(*pair).cells for pair in zip(batch.problems, batch.texts)]
        found["proxy"].append(batch.rewards.mean().item())
        found["true"].append(statistics.mean(map(sum, batch.verdicts)))
        found["moves"].append(statistics.mean(map(len, cells)) - 1)
    return found


def page(best, walks):
    ends = {walker: {name: rows[:, -5:].mean(axis=1) for name, rows in found.items()}
            for walker, found in walks.items()}
    true = {walker: found["true"] for walker, found in ends.items()}
    exact = {reward: found["true"] for reward, found in best.items()}
    right, obeyed, *_, short, alive, _ = (earned.mean() for earned in true.values())
    said = (f"A wrong reward is obeyed: grid-world walks earn a true return of {obeyed:.2f}, not "
            f"{right:.2f}, if it omits the penalty; {alive:.2f}, not {short:.2f}, if it pays for "
            "being alive (from a base of few demonstrations)")
    earn_less = [
        Claim(f"{walker}: lower true return than with the true reward", AMODEI,
              true[walker] - true[f"{base} base: {RIGHT}"], at_most=-LOSS, unit="return",
              shown=said * (kind == NO_PENALTY))
        for walker, (base, kind) in WALKERS.items()
        if walker in (f"usual base: {NO_PENALTY}", f"usual base: {ALIVE}", f"short base: {ALIVE}")]
    yield from earn_less
    yield Claim("exactly: the best walks by each wrong reward have a lower true return", SKALSE,
                [exact[kind] - exact[RIGHT] for kind in WRONG], at_most=-LOSS, exact=True,
                unit="return")
    yield Claim("exactly: the best by a potential's difference have the best true return", NG,
                exact[POTENTIAL] - exact[RIGHT], at_least=-1e-9, at_most=1e-9, exact=True,
                unit="return")
    yield dots(true, earn_less[0].finding,
               given={name: GREY for name in WALKERS if name.endswith(RIGHT)},
               xlabel="true return, mean of the last five steps; a dot for each seed")
    heads = {"proxy": "return by this reward", "true": "true return", "moves": "moves"}
    yield numbers(ends, heads, ".2f", by="base: reward of the training")
    yield numbers(best, heads, ".2f", by="exactly: the best walks by a reward")
