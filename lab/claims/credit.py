"""Credit: which move deserves it

Claim. The advantage of a whole answer is a poor signal for its single steps. Values from K rollouts
of the policy from where a step begins are nearer to the exact ones than those of a critic, and so
are the advantages of steps (VinePPO, Kazemnejad and others, 2410.01679).

Prediction. With some four moves of about equal weight in a walk, the advantage of the whole walk
correlates with that of a move by less than 0.5. The error of K rollouts is the variance of a return
divided by K. A critic has it easier here than in language, since there are but 370 prompts: at
first it is worse than one rollout, after 60 steps worth about 8, so that VinePPO's claim may not
be shown.

Method. Grid world without slips, by a policy that makes the best move half of the time and any move
else, of which all values are known. The critic is that of ppo.py, from the base and with its flags,
on 60 batches of 64 problems and 8 walks each; nothing moves the policy meanwhile, which helps it.
Then, for each move of one more batch: the advantages of grpo.py, those of ppo.py with the critic,
and r + V' - V with the values of K rollouts from both cells, each compared with the exact Q - V.

Outcome. Right, but for one: before it has learned, the critic already errs less than one rollout
(squared errors of 1.24 and 1.78 times the variance of V).
"""
import functools
import random
import statistics
from types import SimpleNamespace

import torch

import common
import ppo
from lab.claims.tokens import BATCHES, EIGHT, ROLLOUTS, SMOOTH, VINE, correlations, train_critic
from lab.draw import BLUE, GREY, curves, dots
from lab.experiment import Experiment
from lab.training import load_base
from lab.verdict import OURS, Claim
from tasks import gridworld

SKILL = 0.5                             # how often the best move is made on purpose
WHOLE = "whole walk (GRPO)"
CRITIC = "critic"
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(5), one_base=True)


# ---- walks whose values are known ------------------------------------------------------------

@functools.cache
def half_skilled(prompt):
    """A policy for a prompt: policy(t, cell) -> {move: probability}"""
    _, Q = gridworld.values(prompt)

    def policy(t, cell):
        returns = Q[t][cell]
        chances = dict.fromkeys(returns, (1 - SKILL) / len(returns))
        chances[max(returns, key=returns.get)] += SKILL
        return chances
    return policy


def walk(prompt, t, cell, rng):
    """What the policy does from a cell on, with t moves made. -> list of (cell, move, reward)"""
    name, _, limit = prompt.split()
    policy = half_skilled(prompt)
    steps = []
    while t < int(limit) and gridworld.MAPS[name][cell] not in gridworld.PRIZES:
        chances = policy(t, cell)
        [move] = rng.choices([*chances], chances.values())
        [straight, *_] = gridworld.outcomes(name, cell, move)
        steps.append((cell, move, straight.reward))
        cell = straight.cell
        t += 1
    return steps


def rollout_values(prompt, t, cell, rng):
    """The mean return of the first K of many rollouts, for each K. -> list"""
    returns = []
    for _ in range(max(ROLLOUTS)):
        returns.append(sum(reward for _, _, reward in walk(prompt, t, cell, rng)))
    return [statistics.mean(returns[:k]) for k in ROLLOUTS]


def make_batch(task, cfg, step):
    """Walks, G of each of P problems, as the critic reads them, and their exact values. The rows of
    `steps` are lists of (cell, move, reward). -> namespace"""
    problems = common.sample_problems(task, cfg.num_prompts, (cfg.seed, step))
    problems = [problem for problem in problems for _ in range(cfg.num_generations)]
    texts = [problem.prompt for problem in problems]
    rng = random.Random(f"{cfg.seed} {step}")
    walks = [walk(text, 0, text.split()[1], rng) for text in texts]
    T = max(gridworld.LIMITS)
    tokens = torch.full((len(walks), T), ppo.PAD)
    numbers = torch.zeros(4, len(walks), T)
    for row, (text, steps) in enumerate(zip(texts, walks)):
        V, Q = gridworld.values(text, 0.0, half_skilled(text))
        for t, (cell, move, reward) in enumerate(steps):
            tokens[row, t] = ord(move)
            value = V[t][cell]
            numbers[:, row, t] = torch.tensor([1, reward, value, Q[t][cell][move] - value])
    mask, rewards, values, exact = numbers
    return SimpleNamespace(
        texts=texts, steps=walks, prompts=ppo.encode_prompts(problems, task, "cpu"), tokens=tokens,
        mask=mask, lengths=mask.sum(dim=1).long(), token_rewards=rewards, V=values, A=exact,
        rewards=rewards.sum(dim=1).view(-1, cfg.num_generations))


# ---- estimates -------------------------------------------------------------------------------

def value_error(values, batch):
    """The mean squared error of values, as a share of the variance of the exact ones. -> float"""
    is_step = batch.mask > 0
    errors = (values - batch.V)[is_step]
    return (errors.square().mean() / batch.V[is_step].var()).item()


@EXPERIMENT.measure(["walks"])
def estimates(seed, case):
    """The error of the critic as it learns; for each way to estimate, the error of values, and the
    correlation of advantages."""
    cfg, task, policy = load_base(ppo, f"--task gridworld --seed {seed}")
    task.token_rewards = lambda batch: batch.token_rewards
    critic, batches = train_critic(policy, task, cfg, lambda step: make_batch(task, cfg, step))
    batch = make_batch(task, cfg, BATCHES)
    by_rollouts = torch.zeros(len(ROLLOUTS), *batch.mask.shape)
    rng = random.Random(seed)
    for row, (text, steps) in enumerate(zip(batch.texts, batch.steps)):
        for t, (cell, _, _) in enumerate(steps):
            by_rollouts[:, row, t] = torch.tensor(rollout_values(text, t, cell, rng))
    values = {f"rollouts, K = {k}": found for k, found in zip(ROLLOUTS, by_rollouts)}
    values[CRITIC] = critic(batch.prompts, batch.tokens).detach() * batch.mask
    found = {f"error: {name}": value_error(V, batch) for name, V in values.items()}
    found["learning"] = [value_error(one.values, one) for one in batches]
    return found | correlations(batch, batch.token_rewards, values, batch.A, WHOLE)


# ---- what was found --------------------------------------------------------------------------

def page(estimates):
    [found] = estimates.values()
    names = [WHOLE, *(f"rollouts, K = {k}" for k in ROLLOUTS), CRITIC, SMOOTH]
    said = ("Advantages of single moves: VinePPO's (8 rollouts) correlate with the exact ones by "
            f"{found[EIGHT].mean():.2f}, a critic's by {found[CRITIC].mean():.2f}, GRPO's by "
            f"{found[WHOLE].mean():.2f}")
    yield Claim("advantages by 8 rollouts correlate with the exact ones more than a critic's", VINE,
                found[EIGHT] - found[CRITIC], at_least=0.05, shown=said, contradicted=said,
                undecided=said)
    yield Claim("values by 8 rollouts have a smaller squared error than the critic's", VINE,
                found[f"error: {EIGHT}"] / found[f"error: {CRITIC}"], at_most=0.8, times=True)
    yield Claim("GRPO's advantage of the whole walk correlates with the exact ones by less than .5",
                OURS, found[WHOLE], at_most=0.5)
    yield dots({name: found[name] for name in names}, said, given={WHOLE: GREY},
               xlabel="correlation with the exact advantage of a move; a dot for each seed")
    lines = {CRITIC: found["learning"]}
    for k in ROLLOUTS:
        lines[f"rollouts: {k}"] = [[found[f"error: rollouts, K = {k}"].mean()] * BATCHES]
    given = dict.fromkeys(lines, GREY) | {CRITIC: BLUE}
    worth = (found["error: rollouts, K = 1"] / found[f"error: {CRITIC}"]).mean()
    yield curves(lines, f"After {BATCHES} batches a critic's values err as little as the mean of "
                 f"{worth:.0f} rollouts", given=given, yscale="log",
                 xlabel="batches that the critic learned from",
                 ylabel="squared error / variance of V")
