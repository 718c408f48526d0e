"""GAE: the lambda between trusting the critic and trusting the rewards.

Claim. With a critic that errs, some lambda between 0 and 1 is best: lambda 0 has the bias of the
critic, lambda 1 the variance of the returns (Schulman and others, GAE, 1506.02438).

Prediction. An exact critic is best with lambda 0; the more it errs, the larger is the best lambda.

Method. Exactly: grid world with moves that go astray one time in five; all walks of four moves from
three starts by the uniform policy, and of each move the advantage by ppo.gae, compared with the
exact Q - V. The critic is the exact value plus noise for each moment and cell; the seeds are those
of the noise. An error that all moves from a cell share is no bias, for it changes no choice.
"""
import statistics

import torch

import ppo
from lab.entry import CONTRADICTED, SHOWN, Claim, compared, minus
from tasks import gridworld
from tools.runs import joined

SEEDS = [0, 1, 2]
PROMPTS = ("A b3 4", "C c2 4", "F c2 4")        # map, start, moves
SLIP = 0.2
NOISES = (0.0, 0.5, 1.0, 2.0)
JUDGED = "1.0"                                  # the noise by which the claim is judged
LAMBDAS = tuple(i / 10 for i in range(11))


def measure(seeds):
    worlds = [all_walks(prompt) for prompt in PROMPTS]
    curves = {}
    for noise in NOISES:
        curves[noise] = [curve(worlds, noise, seed) for seed in seeds]
    return {"curves": curves}


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
            value = V[t][cell]
            moment = numbers.setdefault((t, cell), len(numbers))
            choice = numbers.setdefault((t, cell, move), len(numbers))
            advantage = Q[t][cell][move] - value
            row.append((chance, reward, 1, value, advantage, moment, choice))
        rows.append(row + [(0,) * 7] * (int(limit) - len(row)))
    return torch.tensor(rows, dtype=torch.float64).permute(2, 0, 1)


def means(x, chance, group):
    """The mean of x in the group of each, as likely as they are. (n,) each -> (n,)"""
    group = group.long()
    means = torch.bincount(group, chance * x) / torch.bincount(group, chance)
    return means[group]


def gae_errors(steps, noise, lam):
    """The squared error of the advantages (1) of ppo.py, and what of it is squared bias, if the
    critic is off by noise[moment]. (7, n, T), (m,), float -> two floats"""
    _, rewards, mask, V, exact, moments, _ = steps
    A, _ = ppo.gae(rewards, V + noise[moments.long()], mask, 1.0, lam)
    chance, _, _, _, exact, moments, choices = steps[:, mask > 0]
    errors = A[mask > 0] - exact
    bias = means(errors, chance, choices) - means(errors, chance, moments)
    squares = torch.stack([errors, bias]).square()
    return (squares @ chance / chance.sum()).tolist()


def curve(worlds, noise, seed):
    """For each lambda: squared error and squared bias, means of the starts. -> list of pairs"""
    generator = torch.Generator().manual_seed(seed)
    draws = noise * torch.randn(len(PROMPTS), 2000, generator=generator).double()
    found = []
    for lam in LAMBDAS:
        errors = [gae_errors(steps, draw, lam) for steps, draw in zip(worlds, draws)]
        found.append([round(statistics.mean(column), 5) for column in zip(*errors)])
    return found


def best_lambda(curve):
    """The lambda with the least squared error. -> float"""
    errors = [error for error, _ in curve]
    return LAMBDAS[errors.index(min(errors))]


def tables(found):
    rows = []
    for noise, curves in found["curves"].items():
        best = [best_lambda(curve) for curve in curves]
        least = [min(curve)[0] for curve in curves]
        at_0, at_1 = [[curve[i][0] for curve in curves] for i in (0, -1)]
        errors = [joined(values, ".2f") for values in (least, at_0, at_1)]
        rows.append([noise, joined(best, "g"), *errors])
    heads = ["noise of the critic", "best lambda, each seed", "its squared error", "with 0",
             "with 1"]
    return [(heads, rows)]


def claims(found):
    curves = found["curves"]
    gains = []
    for curve in curves[JUDGED]:
        of_ends = min(curve[0][0], curve[-1][0])
        gains.append(of_ends - min(curve)[0])
    best = {noise: [best_lambda(curve) for curve in curves[noise]] for noise in curves}
    return [
        compared(f"with a critic off by {JUDGED}, some lambda between 0 and 1 has less error than "
                 "both", gains, ".2f"),
        Claim("an exact critic is best with lambda 0", joined(best["0.0"], "g"),
              SHOWN if set(best["0.0"]) == {0} else CONTRADICTED),
        compared("a critic off by 2 has a larger best lambda than one off by 0.5",
                 minus(best["2.0"], best["0.5"]), ".1f")]


def note(found):
    return f"All walks of four moves from {len(PROMPTS)} starts"


def panels(found):
    def trade(axis):
        curve = found["curves"][JUDGED][0]
        errors, biases = zip(*curve)
        variances = [error - bias for error, bias in curve]
        axis.plot(LAMBDAS, errors, "k", label="squared error")
        axis.plot(LAMBDAS, variances, label="variance")
        axis.plot(LAMBDAS, biases, label="squared bias")
        axis.plot(best_lambda(curve), min(errors), "ko")
        axis.set(title=f"a critic off by {JUDGED}", xlabel="lambda", ylim=(0, None))
        axis.legend(frameon=False, fontsize=8)

    def noises(axis):
        for number, (noise, curves) in enumerate(found["curves"].items()):
            for curve in curves:
                errors = [error for error, _ in curve]
                axis.plot(LAMBDAS, errors, color=f"C{number}", linewidth=1)
                axis.plot(best_lambda(curve), min(errors), "o", color=f"C{number}")
            axis.plot([], [], color=f"C{number}", label=f"off by {noise}")
        axis.set(title="a point at the least error", xlabel="lambda", ylabel="squared error",
                 yscale="log")
        axis.legend(frameon=False, fontsize=8)
    return [trade, noises]
