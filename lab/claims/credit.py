"""Credit: which move of a walk, and which token of an answer, deserves it

Advantages of single steps are estimated by K rollouts from where the step begins, by a critic, and
by GRPO, which gives all steps the advantage of the whole. They are compared with exact ones in the
grid world, and with those of many rollouts at the tokens of arithmetic. docs/lab/credit.md says
more.
"""
import dataclasses
import functools
import random
from types import SimpleNamespace

import torch

import common
import grpo
import ppo
from lab.draw import GREY, dots
from lab.experiment import Experiment, numbers
from lab.training import load_base, rewards_after, train_critic
from lab.verdict import OURS, Claim
from tasks import gridworld

ROLLOUTS = (1, 2, 4, 8, 16)
ONE, EIGHT = "rollouts, K = 1", "rollouts, K = 8"
OF_MOVES = "whole walk (GRPO)", "critic"        # the two others that are compared
OF_TOKENS = "whole answer (GRPO)", "critic, lambda 0"
UNTRAINED = "critic, before it has learned"
SKILL = 0.5                             # how often the best move is made on purpose
PROBLEMS, GROUP = 5, 8
NUM_REFERENCE = 256
BATCHES = 60                            # that the critic learns from
FORKS = 0.1                             # the share of tokens that is asked about
GAIN = 0.05                             # of a correlation, what counts as one
EXPERIMENT = Experiment(__file__, seeds=range(5), one_base=True)


def step_advantages(rewards, values, mask):
    """r + V' - V at each step. (B, T) each -> (B, T)"""
    return ppo.gae(rewards, values, mask, 1.0, 0.0)[0]


def estimated(batch, returns, critic, name):
    """V of each step: the means of the first K of many returns, (B, T, number), and what the critic
    says, by this name. -> {name: (B, T)}"""
    values = {f"rollouts, K = {K}": returns[..., :K].mean(dim=-1) for K in ROLLOUTS}
    return values | {name: critic(batch.prompts, batch.tokens).detach() * batch.mask}


def correlations(batch, rewards, values, exact, whole):
    """Of the advantages by {name: values (B, T)}, and of those by grpo.py, named `whole`, the
    correlation with the exact ones. -> dict"""
    A = {name: step_advantages(rewards, V, batch.mask) for name, V in values.items()}
    A[whole] = grpo.advantages(batch.rewards).view(-1, 1).expand_as(batch.mask)
    return {name: torch.corrcoef(torch.stack([one, exact])[:, batch.mask > 0])[0, 1].item()
            for name, one in A.items()}


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


def make_batch(task, cfg, step):
    """Walks, G of each of P problems, as the critic reads them, and their exact values V. The rows
    of `steps` are lists of (cell, move, reward). -> namespace"""
    problems = common.sample_problems(task, cfg.num_prompts, (cfg.seed, step))
    problems = [problem for problem in problems for _ in range(cfg.num_generations)]
    texts = [problem.prompt for problem in problems]
    rng = random.Random(f"{cfg.seed} {step}")
    walks = [walk(text, 0, text.split()[1], rng) for text in texts]
    shape = len(walks), max(gridworld.LIMITS)
    tokens = torch.full(shape, ppo.PAD)
    mask, rewards, V = torch.zeros(3, *shape)
    for row, (text, steps) in enumerate(zip(texts, walks)):
        exact, _ = gridworld.values(text, 0.0, half_skilled(text))
        for t, (cell, move, reward) in enumerate(steps):
            tokens[row, t] = ord(move)
            mask[row, t], rewards[row, t], V[row, t] = 1, reward, exact[t][cell]
    return SimpleNamespace(
        texts=texts, steps=walks, prompts=ppo.encode_prompts(problems, task, "cpu"), tokens=tokens,
        mask=mask, lengths=mask.sum(dim=1).long(), token_rewards=rewards, V=V,
        rewards=rewards.sum(dim=1).view(-1, cfg.num_generations))


def value_error(values, batch):
    """The mean squared error of values, as a share of the variance of the exact ones. -> float"""
    exact = batch.V[batch.mask > 0]
    return ((values[batch.mask > 0] - exact).square().mean() / exact.var()).item()


@EXPERIMENT.measure(["walks"])
def estimates(seed, case):
    """Of moves: for each way to estimate, the error of values, the correlation of advantages."""
    cfg, task, policy = load_base(ppo, f"--task gridworld --seed {seed}")
    task.token_rewards = lambda batch: batch.token_rewards
    first, *others, batch = (make_batch(task, cfg, step) for step in range(1 + BATCHES))
    critic = train_critic(policy, task, cfg, [first, *others])
    returns = torch.zeros(*batch.mask.shape, max(ROLLOUTS))
    rng = random.Random(seed)
    for row, (text, steps) in enumerate(zip(batch.texts, batch.steps)):
        for t, (cell, _, _) in enumerate(steps):
            for number in range(max(ROLLOUTS)):
                returns[row, t, number] = sum(reward for *_, reward in walk(text, t, cell, rng))
    whole, by_critic = OF_MOVES
    values = estimated(batch, returns, critic, by_critic)
    found = {f"error: {name}": value_error(V, batch) for name, V in values.items()}
    found[f"error: {UNTRAINED}"] = value_error(first.values, first)
    exact = step_advantages(batch.token_rewards, batch.V, batch.mask)
    return found | correlations(batch, batch.token_rewards, values, exact, whole)


@EXPERIMENT.measure(["answers"])
def credit(seed, case):
    """Of tokens: the share of all |A| that a few have, and for each way to estimate the advantages
    the correlation with those of the reference, which is many other rollouts."""
    cfg, task, policy = load_base(ppo, f"--base_steps 450 --seed {seed}")
    critic = train_critic(policy, task, cfg, (
        ppo.sample_batch(policy, task, cfg, step) for step in range(BATCHES)))
    asking = dataclasses.replace(cfg, num_prompts=PROBLEMS, num_generations=GROUP)
    batch = ppo.sample_batch(policy, task, asking, "credit")
    rewards = torch.zeros(*batch.mask.shape, max(ROLLOUTS) + NUM_REFERENCE)
    for t in range(int(batch.lengths.max())):
        rows, found = rewards_after(ppo, policy, task, asking, batch, t, rewards.shape[-1])
        rewards[rows, t] = found
    whole, by_critic = OF_TOKENS
    values = estimated(batch, rewards, critic, by_critic)
    reference = rewards[..., max(ROLLOUTS):].mean(dim=-1)
    exact = step_advantages(task.token_rewards(batch), reference, batch.mask)
    sizes = exact[batch.mask > 0].abs().sort(descending=True).values
    few = 1 + round(FORKS * (len(sizes) - 1))
    return {"share": (sizes[:few].sum() / sizes.sum()).item()} | correlations(
        batch, task.token_rewards(batch), values, exact, whole)


def page(estimates, credit):
    [moves] = estimates.values()
    [tokens] = credit.values()
    whole, critic = OF_MOVES
    said = ("Advantages of single moves: VinePPO's (8 rollouts) correlate with the exact ones by "
            f"{moves[EIGHT].mean():.2f}, a critic's by {moves[critic].mean():.2f}, GRPO's by "
            f"{moves[whole].mean():.2f}")
    yield Claim("advantages by 8 rollouts correlate with the exact ones more than a critic's",
                "VinePPO", moves[EIGHT] - moves[critic], at_least=GAIN, said=said)
    yield Claim("values by 8 rollouts have a smaller squared error than the critic's", "VinePPO",
                moves[f"error: {EIGHT}"] / moves[f"error: {critic}"], at_most=0.8, times=True)
    yield Claim("GRPO's advantage of the whole walk correlates with the exact ones by less than .5",
                OURS, moves[whole], at_most=0.5)
    yield Claim(f"{FORKS:.0%} of the tokens have more than half of all absolute advantage", OURS,
                tokens["share"], at_least=0.5, shown=f"Few tokens decide: {FORKS:.0%} of them have "
                f"{tokens['share'].mean():.0%} of all absolute advantage; GRPO gives all the same")
    of_answer, of_critic = OF_TOKENS
    for one, other in ((EIGHT, of_answer), (EIGHT, of_critic), (of_critic, of_answer)):
        yield Claim(f"correlation with the advantages of tokens: {one} above {other}", "VinePPO",
                    tokens[one] - tokens[other], at_least=GAIN)

    rows = {f"{step}: {name}": found[name]
            for step, found, others in (("move", moves, OF_MOVES), ("token", tokens, OF_TOKENS))
            for name in (others[0], ONE, EIGHT, others[1])}
    yield dots(rows, said, given={name: GREY for name in rows if "GRPO" in name},
               xlabel="correlation with the exact advantage; for tokens, with that from "
               f"{NUM_REFERENCE} rollouts; a dot for each seed")
    yield numbers({name: {"squared error / variance of V": moves[f"error: {name}"]} for name in
                   (*(f"rollouts, K = {K}" for K in ROLLOUTS), critic, UNTRAINED)}, form=".2f",
                  by="values of moves")
