"""Wrong rewards: policies that do what is rewarded, not what was meant"""
import functools
import itertools
import statistics

import common
import grpo
import plumbing
from lab.draw import GREY, dots
from lab.experiment import Experiment, numbers, transposed
from lab.training import load_base, training
from lab.verdict import Claim
from tasks import gridworld

STEPS = 30
RIGHT, NO_PENALTY, ALIVE, NEARER, POTENTIAL = REWARDS = (
    "true reward", "no penalty", "+1 for being alive", "bonus for coming nearer",
    "difference of a potential")
WRONG = [NO_PENALTY, ALIVE, NEARER]
BONUS = 3.0                                     # for each cell that is nearer to the prize of 5
LAST = 5                                        # number of batches in the mean at the end
LOSS = 0.1                                      # smallest loss of return that matters
BASES = {"usual": "--task gridworld", "short": "--task gridworld --base_steps 60"}
WALKERS = {f"{base} base: {kind}": (base, kind) for base in BASES for kind in (RIGHT, *WRONG)
           if (base, kind) != ("short", NO_PENALTY)}
COLUMNS = PROXY, TRUE, MOVES = "return by this reward", "true return", "moves"
PHRASES = {NO_PENALTY: "a reward without the penalty", ALIVE: "a reward of +1 for being alive"}
START = {"usual": "the usual base", "short": "a base of few demonstrations (short base)"}
EXPERIMENT = Experiment(__file__, seeds=range(5), one_base=True)


def potential(name, cell):
    """Compute the potential of a cell: minus BONUS times its distance to the prize of 5, as if
    there were no walls. -> float"""
    [goal] = [end for end, mark in gridworld.MAPS[name].items() if mark == "5"]
    steps = [abs(ord(one) - ord(other)) for one, other in zip(goal, cell)]
    return -BONUS * sum(steps)


def pay(kind, name, cell, end):
    """Compute the reward of a move from `cell` to `end`. kind: one of REWARDS. -> float"""
    true = gridworld.WORTH.get(gridworld.MAPS[name][end], -1.0)
    rise = potential(name, end) - potential(name, cell)
    return {RIGHT: true, NO_PENALTY: max(true, -1.0), ALIVE: 1.0 if true == -1 else true,
            NEARER: true + max(0.0, rise), POTENTIAL: true + rise}[kind]


def pay_at_end(kind, name, cell):
    """Compute the reward for ending in a cell: not 0 for a potential, which has to be 0 after the
    end. -> float"""
    return -potential(name, cell) if kind == POTENTIAL else 0.0


def proxy(kind, problem, text):
    """Compute the return of a text by a reward. Each character after the end of the walk costs 1.
    -> float"""
    name = problem.prompt[0]
    cells = gridworld.play(problem, text).cells
    of_moves = sum(pay(kind, name, *move) for move in itertools.pairwise(cells))
    too_many = len(text) - (len(cells) - 1)
    return of_moves + pay_at_end(kind, name, cells[-1]) - too_many


@functools.cache
def best_from(kind, name, cell, left):
    """Follow the best moves by a reward from a cell, with at most `left` moves. Where several are
    equally good, take their mean. -> [return by this reward, true return, number of moves]"""
    options = [[pay_at_end(kind, name, cell), 0.0, 0.0]]                        # to stop
    if left > 0 and gridworld.MAPS[name][cell] not in gridworld.PRIZES:
        for move in gridworld.MOVES:
            [(end, true, _), *_] = gridworld.outcomes(name, cell, move)
            now = (pay(kind, name, cell, end), true, 1.0)
            later = best_from(kind, name, end, left - 1)
            options.append([sum(column) for column in zip(now, later)])
    highest = max(option[0] for option in options)
    best = [option for option in options if option[0] == highest]
    return [statistics.mean(column) for column in zip(*best)]


@EXPERIMENT.measure(REWARDS, seeds=[0])
def best(seed, reward):
    """Average the results of the best moves by a reward over all prompts for training."""
    task = gridworld.Gridworld(plumbing.parse_flags(grpo.Config, BASES["usual"].split()))
    rows = []
    for start, limit in itertools.product(gridworld.STARTS, gridworld.LIMITS):
        if not task.is_held_out(common.Problem(f"{start} {limit}", "")):
            rows.append(best_from(reward, *start.split(), limit))
    return dict(zip(COLUMNS, map(statistics.mean, zip(*rows))))


@EXPERIMENT.measure(WALKERS)
def walks(seed, walker):
    """Train with a reward, and record the return of each step's walks by it and by the true one."""
    base, kind = WALKERS[walker]
    cfg, task, policy = load_base(grpo, f"{BASES[base]} --seed {seed}")
    task.reward = lambda problem, text, verdict, step: proxy(kind, problem, text)
    lines = []
    for batch, _ in itertools.islice(training(grpo, cfg, task, policy), STEPS):
        cells = [gridworld.play(*pair).cells for pair in zip(batch.problems, batch.texts)]
        lines.append({PROXY: batch.rewards.mean().item(),
                      TRUE: statistics.mean(map(sum, batch.verdicts)),
                      MOVES: statistics.mean(map(len, cells)) - 1})
    return transposed(lines)


def page(best, walks):
    ends = {walker: {name: rows[:, -LAST:].mean(axis=1) for name, rows in columns.items()}
            for walker, columns in walks.items()}
    true = {walker: columns[TRUE] for walker, columns in ends.items()}
    right, no_penalty, *_, short, alive, _ = (returns.mean() for returns in true.values())
    findings = {
        ("usual", NO_PENALTY): "If the reward omits the penalty, walks in the grid world get a "
        f"true return of {no_penalty:.2f} instead of {right:.2f}",
        ("short", ALIVE): "If the reward pays for being alive, walks learned from a base of few "
        f"demonstrations get a true return of {alive:.2f} instead of {short:.2f}"}
    for base, kind in (("usual", NO_PENALTY), ("usual", ALIVE), ("short", ALIVE)):
        yield Claim(f"from {START[base]}, {PHRASES[kind]} leads to a lower true return than the "
                    "true reward does", "Amodei and others",
                    true[f"{base} base: {kind}"] - true[f"{base} base: {RIGHT}"], at_most=-LOSS,
                    unit="return", said=findings.get((base, kind), ""))
    exact = {reward: columns[TRUE] - best[RIGHT][TRUE] for reward, columns in best.items()}
    yield Claim("the walks that are best by a wrong reward have a lower true return than the walks "
                "that are best by the true reward (exact; three wrong rewards)",
                "Skalse and others", [exact[kind] for kind in WRONG],
                at_most=-LOSS, exact=True, unit="return")
    yield Claim("if the difference of a potential is added to the reward, the walks that are best "
                "by the sum still have the best true return (exact)", "Ng and others, 1999",
                exact[POTENTIAL], at_least=-1e-9, at_most=1e-9, exact=True, unit="return")
    yield dots(true, given={name: GREY for name in WALKERS if name.endswith(RIGHT)},
               xlabel="true return, mean of the last five steps; a dot for each seed")
    yield numbers(ends, ".2f", by="base: reward in training")
    yield numbers(best, ".2f", by="best walks by this reward (exact)")
