"""Credit: which move deserves it.

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
"""
import functools
import random
import statistics
from types import SimpleNamespace

import torch

import common
import grpo
import ppo
from lab.entry import Claim, load_base, mean_and_spread, sign_test
from tasks import gridworld

SEEDS = [0, 1, 2]
STEPS = 60
SKILL = 0.5                             # how often the best move is made on purpose
ROLLOUTS = (1, 2, 4, 8, 16)
JUDGED = "rollouts, K = 8"
WHOLE = "whole walk (GRPO)"
CRITIC = "critic"


def measure(seeds):
    return {"of seeds": [measure_seed(seed) for seed in seeds]}


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

def train_critic(cfg, task, policy):
    """The critic after STEPS batches, and how far its values were from the exact ones on each batch
    before it learned from it. -> ppo.Critic, list"""
    critic = ppo.Critic(policy)
    optimizer = torch.optim.Adam(critic.parameters(), lr=cfg.critic_learning_rate)
    errors = []
    for step in range(STEPS):
        batch = make_batch(task, cfg, step)
        batch.values = critic(batch.prompts, batch.tokens).detach() * batch.mask
        errors.append(value_error(batch.values, batch))
        _, returns = ppo.gae(batch.token_rewards, batch.values, batch.mask, cfg.gamma, cfg.lam)
        ppo.fit_critic(critic, optimizer, batch, returns, cfg, "shuffle", step)
    return critic, errors


def value_error(values, batch):
    """The mean squared error of values, as a share of the variance of the exact ones. -> float"""
    is_step = batch.mask > 0
    errors = (values - batch.V)[is_step]
    return round((errors.square().mean() / batch.V[is_step].var()).item(), 5)


def agreement(A, batch):
    """Correlation of advantages with the exact ones, and the share of moves with the right sign, of
    those that are better or worse than others. -> two floats"""
    is_step = batch.mask > 0
    exact = batch.A[is_step]
    found = A[is_step]
    correlation = torch.corrcoef(torch.stack([found, exact]))[0, 1]
    differs = exact.abs() > 1e-4
    is_right = (found * exact)[differs] > 0
    return [round(correlation.item(), 5), round(is_right.float().mean().item(), 5)]


def measure_seed(seed):
    """Errors of values and agreement of advantages, by name. -> dict"""
    cfg, task, policy = load_base(ppo, "--task", "gridworld", "--seed", seed)
    critic, errors = train_critic(cfg, task, policy)
    batch = make_batch(task, cfg, STEPS)
    by_rollouts = torch.zeros(len(ROLLOUTS), *batch.mask.shape)
    rng = random.Random(seed)
    for row, (text, steps) in enumerate(zip(batch.texts, batch.steps)):
        for t, (cell, _, _) in enumerate(steps):
            by_rollouts[:, row, t] = torch.tensor(rollout_values(text, t, cell, rng))

    values = {f"rollouts, K = {k}": found for k, found in zip(ROLLOUTS, by_rollouts)}
    values[CRITIC] = critic(batch.prompts, batch.tokens).detach() * batch.mask
    A = {WHOLE: grpo.advantages(batch.rewards).view(-1, 1).expand_as(batch.mask)}
    for name, V in values.items():
        A[name], _ = ppo.gae(batch.token_rewards, V, batch.mask, cfg.gamma, 0.0)
    A[f"critic, lambda {cfg.lam}"], _ = ppo.gae(
        batch.token_rewards, values[CRITIC], batch.mask, cfg.gamma, cfg.lam)
    return {"learning": errors, "moves": int(batch.mask.sum()),
            "problems": len(set(batch.texts)),
            "values": {name: value_error(V, batch) for name, V in values.items()},
            "advantages": {name: agreement(estimate, batch) for name, estimate in A.items()}}


# ---- what is shown ---------------------------------------------------------------------------

def of(found, kind, name):
    """What was found of one way to estimate, for each seed. -> list"""
    return [one[kind][name] for one in found["of seeds"]]


def tables(found):
    first = found["of seeds"][0]
    rows = []
    for name in first["advantages"]:
        pairs = of(found, "advantages", name)
        has_values = name in first["values"]
        rows.append([name, mean_and_spread(of(found, "values", name)) if has_values else "",
                     mean_and_spread(correlation for correlation, _ in pairs),
                     mean_and_spread(share for _, share in pairs)])
    heads = ["by", "error of values / their variance", "correlation with Q - V", "right sign"]
    return [(heads, rows)]


def claims(found):
    whole = [correlation for correlation, _ in of(found, "advantages", WHOLE)]
    rollouts = [correlation for correlation, _ in of(found, "advantages", JUDGED)]
    critic = [correlation for correlation, _ in of(found, "advantages", CRITIC)]
    errors = list(zip(of(found, "values", CRITIC), of(found, "values", JUDGED)))
    return [
        Claim("the advantage of a whole walk correlates with that of a move by less than 0.5",
              mean_and_spread(whole), sign_test([0.5 - correlation for correlation in whole])),
        Claim(f"values by {JUDGED}, are nearer to the exact ones than the critic's",
              "; ".join(f"error {other:.3f} against {error:.3f}" for error, other in errors),
              sign_test([error - other for error, other in errors])),
        Claim(f"advantages by {JUDGED}, correlate with the exact ones more than by the critic",
              f"{mean_and_spread(rollouts)} against {mean_and_spread(critic)}",
              sign_test([one - other for one, other in zip(rollouts, critic)]))]


def note(found):
    problems = [one["problems"] for one in found["of seeds"]]
    moves = [one["moves"] for one in found["of seeds"]]
    return (f"Different problems judged: {min(problems)} or more for each seed, "
            f"moves: {min(moves)} or more; an advantage of 0 counts as a wrong sign; lambda is 0 "
            "where nothing else is said")


def panels(found):
    def errors(axis):
        for one in found["of seeds"]:
            axis.plot(range(STEPS), one["learning"], color="C0", alpha=0.5)
        for k in ROLLOUTS:
            level = statistics.mean(of(found, "values", f"rollouts, K = {k}"))
            axis.axhline(level, color="gray", linewidth=1)
            axis.text(1.2 * STEPS, level, f"K = {k}", fontsize=8, va="bottom", ha="right")
        axis.set(title="values: the critic, and K rollouts", xlabel="batches learned from",
                 xlim=(0, 1.2 * STEPS), ylabel="squared error / variance", yscale="log")

    def correlations(axis):
        names = list(found["of seeds"][0]["advantages"])
        for number, name in enumerate(names):
            values = [correlation for correlation, _ in of(found, "advantages", name)]
            axis.barh(number, statistics.mean(values), color="C0", alpha=0.4)
            axis.plot(values, [number] * len(values), "k.", markersize=4)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.set(title="advantages of single moves", xlabel="correlation with the exact Q - V")
    return [errors, correlations]
