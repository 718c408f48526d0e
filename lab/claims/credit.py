"""Credit: which move of a walk, and which token of an answer, deserves the reward"""
import dataclasses
import functools
import random
from types import SimpleNamespace

import torch

import common
import grpo
import ppo
from lab.bench import OURS, Claim, numbers
from lab.training import load_base, rewards_after, train_critic
from report import chart
from tasks import gridworld

SEEDS, CASES, ONE_BASE = range(5), ["walks", "answers"], True
CHECK = "ppo.py --task gridworld"
EQUAL = "policy, outputs and rewards"
TUNED = "nothing; no policy learns"
ROLLOUTS = (1, 2, 4, 8, 16)
EIGHT = "rollouts, K = 8"
PROBLEMS = 5                            # whose tokens are judged, in 8 answers to each
NUM_REFERENCE = 256                     # rollouts whose mean takes the place of the exact value
BATCHES = 60                            # number of batches that the critic learns from
GAIN = 0.05                             # smallest difference of two correlations that matters


def step_advantages(rewards, values, mask):
    """Compute r + V' - V at each step, where V' is the next value. (B, T) each -> (B, T)"""
    return ppo.gae(rewards, values, mask, 1.0, 0.0)[0]


def compare(batch, returns, critic, rewards, exact):
    """Estimate V at each step: for each K, by the mean of the first K of the returns; and by the
    critic. Correlate the advantages that follow, and those of grpo.py, with the exact ones.
    returns: (B, T, number). -> {name: correlation}"""
    V = {f"rollouts, K = {K}": returns[..., :K].mean(dim=-1) for K in ROLLOUTS}
    V["critic"] = critic(batch.prompts, batch.tokens).detach() * batch.mask
    A = {name: step_advantages(rewards, values, batch.mask) for name, values in V.items()}
    A["GRPO"] = grpo.advantages(batch.rewards).view(-1, 1).expand_as(batch.mask)
    return {name: torch.corrcoef(torch.stack([one, exact])[:, batch.mask > 0])[0, 1].item()
            for name, one in A.items()}


@functools.cache
def half_skilled(prompt):
    """Make a policy for a prompt that chooses the best move half of the time, and else any one.
    -> a function policy(t, cell) -> {move: probability}"""
    _, Q = gridworld.values(prompt)

    def policy(t, cell):
        best = max(Q[t][cell], key=Q[t][cell].get)
        return {move: 0.5 / len(Q[t][cell]) + 0.5 * (move == best) for move in Q[t][cell]}
    return policy


def walk(prompt, t, cell, rng):
    """Let the policy walk on from a cell, after t moves. -> list of (cell, move, reward)"""
    name, _, limit = prompt.split()
    policy = half_skilled(prompt)
    steps = []
    while t < int(limit) and gridworld.MAPS[name][cell] not in gridworld.PRIZES:
        probs = policy(t, cell)
        [move] = rng.choices([*probs], probs.values())
        end, reward = gridworld.outcome(name, cell, move)
        steps.append((cell, move, reward))
        cell = end
        t += 1
    return steps


def make_batch(task, cfg, step):
    """Sample G walks for each of P problems, encode them for the critic, and compute their exact
    values V. A row of `steps` is a list of (cell, move, reward). -> namespace"""
    problems = common.sample_problems(task, cfg.num_prompts, (cfg.seed, step))
    problems = [problem for problem in problems for _ in range(cfg.num_generations)]
    rng = random.Random(f"{cfg.seed} {step}")
    walks = [walk(one.prompt, 0, one.prompt.split()[1], rng) for one in problems]
    tokens = torch.full((len(walks), max(gridworld.LIMITS)), ppo.PAD)
    mask, rewards, V = torch.zeros(3, *tokens.shape)
    for row, (problem, steps) in enumerate(zip(problems, walks)):
        exact, _ = gridworld.values(problem.prompt, half_skilled(problem.prompt))
        for t, (cell, move, reward) in enumerate(steps):
            tokens[row, t] = ord(move)
            mask[row, t], rewards[row, t], V[row, t] = 1, reward, exact[t][cell]
    return SimpleNamespace(
        problems=problems, steps=walks, prompts=ppo.encode_prompts(problems, task, "cpu"),
        tokens=tokens, mask=mask, lengths=mask.sum(dim=1).long(), token_rewards=rewards, V=V,
        rewards=rewards.sum(dim=1).view(-1, cfg.num_generations))


def of_moves(seed):
    """Correlate the advantages of each estimate with the exact ones."""
    cfg, task, policy = load_base(ppo, f"--task gridworld --seed {seed}")
    task.token_rewards = lambda batch: batch.token_rewards
    *batches, batch = (make_batch(task, cfg, step) for step in range(1 + BATCHES))
    critic = train_critic(policy, task, cfg, batches)
    returns = torch.zeros(*batch.mask.shape, max(ROLLOUTS))
    rng = random.Random(seed)
    for row, (problem, steps) in enumerate(zip(batch.problems, batch.steps)):
        for t, (cell, _, _) in enumerate(steps):
            for number in range(max(ROLLOUTS)):
                onward = walk(problem.prompt, t, cell, rng)
                returns[row, t, number] = sum(reward for *_, reward in onward)
    exact = step_advantages(batch.token_rewards, batch.V, batch.mask)
    return compare(batch, returns, critic, batch.token_rewards, exact)


def of_tokens(seed):
    """Measure the fraction of the total |A| that a tenth of the tokens has, and correlate the
    advantages of each estimate with those from many other rollouts, the reference."""
    cfg, task, policy = load_base(ppo, f"--base_steps 450 --seed {seed}")
    critic = train_critic(policy, task, cfg, (
        ppo.sample_batch(policy, task, cfg, step) for step in range(BATCHES)))
    cfg = dataclasses.replace(cfg, num_prompts=PROBLEMS, num_generations=8)
    batch = ppo.sample_batch(policy, task, cfg, "credit")
    returns = torch.zeros(*batch.mask.shape, max(ROLLOUTS) + NUM_REFERENCE)
    for t in range(int(batch.lengths.max())):
        rows, results = rewards_after(ppo, policy, task, cfg, batch, t, returns.shape[-1])
        returns[rows, t] = results
    rewards = task.token_rewards(batch)
    reference = returns[..., max(ROLLOUTS):].mean(dim=-1)
    exact = step_advantages(rewards, reference, batch.mask)
    sizes = exact[batch.mask > 0].abs().sort(descending=True).values
    few = 1 + round((len(sizes) - 1) / 10)
    share = (sizes[:few].sum() / sizes.sum()).item()
    return {"share": share} | compare(batch, returns, critic, rewards, exact)


def measure(case, seed):
    return of_moves(seed) if case == "walks" else of_tokens(seed)


def page(x):
    moves, tokens = x["walks"], x["answers"]
    yield Claim("for moves, advantages from 8 rollouts correlate more with the exact ones than a "
                "critic's do", "after VinePPO", moves[EIGHT] - moves["critic"], at_least=GAIN,
                finding="For moves, the exact advantages have a correlation of "
                f"{moves[EIGHT].mean():.2f} with those from 8 rollouts, and of "
                f"{moves['critic'].mean():.2f} with a critic's")
    yield Claim("the advantage of a whole walk (GRPO) has a correlation of less than 0.5 with the "
                "exact advantages of its moves", OURS, moves["GRPO"], at_most=0.5)
    yield Claim("10% of the tokens have more than half of the total absolute advantage",
                OURS, tokens["share"], at_least=0.5,
                finding=f"Few tokens decide: 10% of them have {tokens['share'].mean():.0%} "
                "of the total absolute advantage, but GRPO gives all tokens of an answer the same "
                "one")
    for first, second, better, worse in (
            (EIGHT, "GRPO", "advantages from 8 rollouts", "GRPO's"),
            (EIGHT, "critic", "advantages from 8 rollouts", "a critic's"),
            ("critic", "GRPO", "a critic's advantages", "GRPO's")):
        yield Claim(f"for tokens, {better} correlate more with those from {NUM_REFERENCE} rollouts "
                    f"than {worse} do", "after VinePPO", tokens[first] - tokens[second],
                    at_least=GAIN)

    rows = {f"{step}: {name}": results[name]
            for step, results in (("move", moves), ("token", tokens))
            for name in ("GRPO", "rollouts, K = 1", EIGHT, "critic")}
    yield lambda axis: chart.dots(axis, rows, xlabel="correlation with the exact advantages")
    yield numbers({name: {"moves": moves[name], "tokens": tokens[name]}
                   for name in ("GRPO", "rollouts, K = 1", EIGHT, "critic")},
                  "correlation of an estimate's advantages with the exact ones", ".2f")
