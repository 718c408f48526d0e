"""GAE: the lambda between trusting the critic and trusting the rewards

Claim. With a critic that errs, some lambda between 0 and 1 is best: lambda 0 has the bias of the
critic, lambda 1 the variance of the returns (Schulman and others, GAE, 1506.02438).

Prediction. An exact critic is best with lambda 0; the more it errs, the larger is the best lambda.

Method. Exactly: grid world with moves that go astray one time in five; all walks of four moves from
three starts by the uniform policy, and of each move the advantage by ppo.gae, compared with the
exact Q - V. A critic off by 1 is the exact value plus noise of this deviation for each moment and
cell; seeds are those of the noise. An error that all moves from a cell share counts as no bias.

Outcome. Right, all of it.
"""
import numpy
import torch

import ppo
from lab.draw import BLUE, GREEN, ORANGE, RED, curves
from lab.experiment import Experiment, numbers
from lab.verdict import OURS, Claim
from tasks import gridworld

GAE = "[GAE](https://arxiv.org/abs/1506.02438)"
PROMPTS = ("A b3 4", "C c2 4", "F c2 4")        # map, start, moves
SLIP = 0.2
CRITICS = {"an exact critic": 0.0, "a critic off by 0.5": 0.5, "a critic off by 1": 1.0,
           "a critic off by 2": 2.0}
JUDGED = "a critic off by 1"                    # by which the claim is judged
LAMBDAS = tuple(i / 10 for i in range(11))
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(8))


def uniform(t, cell):
    return dict.fromkeys(gridworld.MOVES, 0.25)


def walks(name, cell, left):
    """All that may come of `left` more moves. -> list of (chance, [(cell, move, reward), ...])"""
    if left == 0 or gridworld.MAPS[name][cell] in gridworld.PRIZES:
        return [(1.0, [])]
    found = []
    for move, p in uniform(0, cell).items():
        for end, reward, q in gridworld.outcomes(name, cell, move, SLIP):
            for chance, steps in walks(name, end, left - 1):
                found.append((p * q * chance, [(cell, move, reward), *steps]))
    return found


def all_walks(prompt):
    """For each move of all walks: chance of the walk, reward, mask, exact value, exact advantage,
    and numbers that stand for t and cell, and for t, cell and move. -> (7, n, T)"""
    name, start, limit = prompt.split()
    V, Q = gridworld.values(prompt, SLIP, uniform)
    numbers = {}
    rows = []
    for chance, steps in walks(name, start, int(limit)):
        row = []
        for t, (cell, move, reward) in enumerate(steps):
            moment = numbers.setdefault((t, cell), len(numbers))
            choice = numbers.setdefault((t, cell, move), len(numbers))
            value = V[t][cell]
            row.append((chance, reward, 1, value, Q[t][cell][move] - value, moment, choice))
        rows.append(row + [(0,) * 7] * (int(limit) - len(row)))
    return torch.tensor(rows, dtype=torch.float64).permute(2, 0, 1)


def means(x, chance, group):
    """The mean of x in the group of each, as likely as they are. (n,) each -> (n,)"""
    group = group.long()
    sums = torch.bincount(group, chance * x)
    return (sums / torch.bincount(group, chance))[group]


def gae_errors(steps, noise, lam):
    """The squared error of the advantages (1) of ppo.py, and what of it is squared bias, if the
    critic is off by noise[moment]. (7, n, T), (m,), float -> (2,)"""
    _, rewards, mask, V, _, moments, _ = steps
    A, _ = ppo.gae(rewards, V + noise[moments.long()], mask, 1.0, lam)
    chance, *_, exact, moments, choices = steps[:, mask > 0]
    errors = A[mask > 0] - exact
    bias = means(errors, chance, choices) - means(errors, chance, moments)
    squares = torch.stack([errors, bias]).square()
    return squares @ chance / chance.sum()


@EXPERIMENT.measure(CRITICS)
def errors(seed, critic):
    """For each lambda: squared error and squared bias, means of the starts."""
    generator = torch.Generator().manual_seed(seed)
    draws = CRITICS[critic] * torch.randn(len(PROMPTS), 2000, generator=generator).double()
    worlds = [all_walks(prompt) for prompt in PROMPTS]
    sums = [sum(gae_errors(*world, lam) for world in zip(worlds, draws)) for lam in LAMBDAS]
    error, bias = (torch.stack(sums) / len(worlds)).T.tolist()
    return {"error": error, "bias": bias}


def page(errors):
    error = {critic: found["error"] for critic, found in errors.items()}
    best = {critic: numpy.array(LAMBDAS)[rows.argmin(axis=1)] for critic, rows in error.items()}
    judged = error[JUDGED]
    ends = judged[:, [0, -1]].min(axis=1)
    between = Claim(
        f"with {JUDGED}, some lambda between 0 and 1 has less error than both", GAE,
        judged.min(axis=1) / ends, at_most=0.9, times=True,
        shown=f"With {JUDGED}, GAE errs least with a lambda of {best[JUDGED].mean():.1f}: squared "
        f"error {judged.min(axis=1).mean():.1f}; {judged[:, 0].mean():.1f} with 0, "
        f"{judged[:, -1].mean():.1f} with 1")
    yield between
    yield Claim("an exact critic is best with lambda 0", OURS, best["an exact critic"], at_most=0,
                exact=True, unit="is the best lambda")
    yield Claim("the best lambda is larger for a critic off by 2 than for one off by 0.5", OURS,
                best["a critic off by 2"] - best["a critic off by 0.5"], at_least=0.05)
    yield curves(error, between.finding, x=LAMBDAS, xlabel="lambda", yscale="log",
                 ylabel="squared error of the advantages",
                 given=dict(zip(CRITICS, (GREEN, BLUE, RED, ORANGE))))
    rows = {critic: {"best": best[critic], "least": found["error"].min(axis=1),
                     "bias": found["bias"][:, 0], "0": found["error"][:, 0],
                     "1": found["error"][:, -1]} for critic, found in errors.items()}
    yield numbers(rows, {"best": "best lambda", "least": "squared error with it", "0": "with 0",
                         "bias": "of which squared bias", "1": "with 1"}, ".2f", by="")
