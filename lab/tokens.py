"""Credit in language: which token of an answer deserves it.

Claim. Few tokens decide: a fifth of them, those of high entropy, are forks, and learning from these
alone does as well (Wang and others, 2506.01939). GRPO gives its advantage to all tokens alike.
Values from K rollouts of the policy from each prefix find the forks, a critic finds them less well
(VinePPO, Kazemnejad and others, 2410.01679). Rewards for right steps tell where a thought goes
wrong (Lightman and others, 2305.20050).

Prediction. More than half of all |A| falls on a tenth of the tokens: the first, which decides about
thinking, and those of a wrong step. One advantage for all tokens correlates with theirs by less
than 0.2; that of eight rollouts by more than 0.7, as the chance to be right moves by more than its
noise at few tokens only. The critic knows whether an answer is a guess from its second token on,
and does better than one rollout, worse than eight. Whether a step is right correlates less than the
eight rollouts do, for it says nothing of the fork between thought and guess.

Method. A base of arithmetic after 450 of 900 batches, whose thoughts are right four times in five.
From each prefix of each of 8 answers to 5 problems, 272 rollouts: 256 stand for the value itself,
and of the other 16 the first K estimate it. The critic is that of ppo.py, after 60 batches of 256
answers of the same policy. A step has 1 if it is as the problem asks, else -1, for all its tokens.
Advantages by rollouts and by "critic, lambda 0" are the differences of successive values.
"""
import dataclasses
import itertools
import re

import torch

import common
import grpo
import ppo
from lab.entry import (
    Claim,
    compared,
    draw_points,
    load_base,
    mean_and_spread,
    minus,
    sign_test,
)
from lab.training import continued, side_by_side

SEEDS = [0, 1, 2]
FLAGS = ["--base_steps", 450]
PROBLEMS, GROUP = 5, 8
ROLLOUTS = (1, 2, 4, 8, 16)
NUM_REFERENCE = 256
BATCHES = 60                            # that the critic learns from
ROWS = 1024                             # completed at a time
WHOLE = "whole answer (GRPO)"
STEPS_RIGHT = "steps right or wrong"
EIGHT = "rollouts, K = 8"
CRITIC = "critic, lambda 0"
FORKS = 0.1                             # the share of tokens that is asked about


# ---- the value of a prefix -------------------------------------------------------------------

def rollout_rewards(policy, task, cfg, problems, prompts, prefixes, name):
    """Complete a prefix (n, t) of a completion of each prompt (n, W). -> rewards (n,)"""
    T = cfg.max_completion_length - prefixes.shape[1]
    rest = dataclasses.replace(cfg, max_completion_length=T)
    uniforms = torch.rand(len(prompts), T, generator=common.generator(cfg.seed, name))
    *_, texts = continued(ppo, policy, rest, problems, prompts, prefixes, uniforms)
    return torch.tensor([task.verify(problem, text) for problem, text in zip(problems, texts)])


def rewards_after(policy, task, cfg, batch, t):
    """The rewards of rollouts from the first t tokens of those completions that have more.
    -> rows (n,), rewards (n, 16 + 256)"""
    rows = (batch.lengths > t).nonzero()[:, 0]
    number = max(ROLLOUTS) + NUM_REFERENCE
    repeated = rows.repeat_interleave(number)
    found = []
    for part in repeated.split(ROWS):
        problems = [batch.problems[row] for row in part.tolist()]
        name = ("prefix", t, len(found))
        found.append(rollout_rewards(policy, task, cfg, problems, batch.prompts[part],
                                     batch.tokens[part, :t], name))
    return rows, torch.cat(found).view(-1, number)


def rollout_values(policy, task, cfg, batch):
    """V of each token, before it is written: by the reference rollouts, and by the first K of the
    others. -> (B, T), {K: (B, T)}"""
    reference = torch.zeros(batch.mask.shape)
    estimates = {K: torch.zeros(batch.mask.shape) for K in ROLLOUTS}
    for t in range(int(batch.lengths.max())):
        rows, rewards = rewards_after(policy, task, cfg, batch, t)
        reference[rows, t] = rewards[:, max(ROLLOUTS):].mean(dim=1)
        for K, values in estimates.items():
            values[rows, t] = rewards[:, :K].mean(dim=1)
    return reference, estimates


# ---- other estimates -------------------------------------------------------------------------

def train_critic(policy, task, cfg):
    """ppo.py's critic, after BATCHES batches of this policy, which does not learn. -> ppo.Critic"""
    critic = ppo.Critic(policy)
    optimizer = torch.optim.Adam(critic.parameters(), lr=cfg.critic_learning_rate)
    for step in range(BATCHES):
        batch = ppo.sample_batch(policy, task, cfg, step)
        with torch.no_grad():
            batch.values = critic(batch.prompts, batch.tokens) * batch.mask
        rewards = task.token_rewards(batch)
        _, returns = ppo.gae(rewards, batch.values, batch.mask, cfg.gamma, cfg.lam)
        ppo.fit_critic(critic, optimizer, batch, returns, cfg, "shuffle", step)
    return critic


def steps_right(text, problem):
    """1 for the characters of a step of the thought that is the problem's own, -1 for those of
    another, 0 outside of the thought. -> list"""
    marks = [0.0] * len(text)
    thought = re.search("<think>(.*?)(</think>|$)", text, re.S)
    if thought:
        place = thought.start(1)
        wanted = problem.work.split(";")
        for number, step in enumerate(thought[1].split(";")):
            is_right = number < len(wanted) and step == wanted[number]
            for character in range(place, place + len(step)):
                marks[character] = 1.0 if is_right else -1.0
            place += len(step) + 1
    return marks


def by_tokens(marks, ids):
    """What holds for the characters of a text, for its tokens: of each, what its first character
    has. -> list"""
    found = []
    place = 0
    for i in ids:
        found.append(marks[place] if place < len(marks) else 0.0)
        place += len(ppo.decode([i]))
    return found


def process_rewards(batch):
    """steps_right, token by token. -> (B, T)"""
    A = torch.zeros(batch.mask.shape)
    for row, (problem, text) in enumerate(zip(batch.problems, batch.texts)):
        ids = batch.tokens[row, :batch.lengths[row]].tolist()
        A[row, :len(ids)] = torch.tensor(by_tokens(steps_right(text, problem), ids))
    return A


# ---- the comparison --------------------------------------------------------------------------

def share_at_forks(A):
    """The share of the sum of |A| that falls on the FORKS tokens that have most of it. -> float"""
    sizes = A.abs().sort(descending=True).values
    return (sizes[:round(FORKS * len(A))].sum() / sizes.sum()).item()


def measure_seed(seed):
    torch.set_num_threads(1)
    cfg, task, policy = load_base(ppo, *FLAGS, "--seed", seed)
    critic = train_critic(policy, task, cfg)
    asking = dataclasses.replace(cfg, num_prompts=PROBLEMS, num_generations=GROUP)
    batch = ppo.sample_batch(policy, task, asking, "credit")
    reference, estimates = rollout_values(policy, task, asking, batch)
    with torch.no_grad():
        learned = critic(batch.prompts, batch.tokens) * batch.mask

    rewards = task.token_rewards(batch)
    mask = batch.mask
    exact, _ = ppo.gae(rewards, reference, mask, 1.0, 0.0)
    A = {WHOLE: grpo.advantages(batch.rewards).view(-1, 1).expand_as(mask),
         STEPS_RIGHT: process_rewards(batch)}
    for K, values in estimates.items():
        A[f"rollouts, K = {K}"], _ = ppo.gae(rewards, values, mask, 1.0, 0.0)
    for lam in (0, cfg.lam):
        A[f"critic, lambda {lam}"], _ = ppo.gae(rewards, learned, mask, 1.0, lam)

    is_token = mask > 0
    exact = exact[is_token]
    correlations = {}
    for name, estimate in A.items():
        pair = torch.stack([estimate[is_token], exact])
        correlations[name] = round(torch.corrcoef(pair)[0, 1].item(), 5)
    sizes = sorted(exact.abs().tolist(), reverse=True)
    return {"correlations": correlations, "forks": round(share_at_forks(exact), 5),
            "sizes": [round(size, 4) for size in sizes],
            "problems": len({problem.prompt for problem in batch.problems})}


def measure(seeds):
    return {"of seeds": side_by_side(measure_seed, [(seed,) for seed in seeds])}


# ---- what is shown ---------------------------------------------------------------------------

def of(found, name):
    """The correlation of each seed. -> list"""
    return [one["correlations"][name] for one in found["of seeds"]]


def names(found):
    return list(found["of seeds"][0]["correlations"])


def tables(found):
    rows = [[name, mean_and_spread(of(found, name))] for name in names(found)]
    heads = ["advantages of tokens, by", f"correlation with those of {NUM_REFERENCE} rollouts"]
    return [(heads, rows)]


def claims(found):
    forks = [one["forks"] for one in found["of seeds"]]

    def better(one, other):
        return compared(f"{one}: correlates with the advantages of tokens more than {other}",
                        minus(of(found, one), of(found, other)))

    return [Claim(f"more than half of the sum of |A| falls on {FORKS:.0%} of the tokens",
                  mean_and_spread(forks), sign_test([share - 0.5 for share in forks])),
            better(EIGHT, WHOLE), better(EIGHT, CRITIC), better(CRITIC, WHOLE),
            better(STEPS_RIGHT, WHOLE)]


def note(found):
    problems = [one["problems"] for one in found["of seeds"]]
    tokens = [len(one["sizes"]) for one in found["of seeds"]]
    return (f"Different problems: {min(problems)} for each seed; tokens of their answers: "
            f"{', '.join(map(str, tokens))}")


def panels(found):
    def sizes(axis):
        for seed, one in enumerate(found["of seeds"]):
            total = sum(one["sizes"])
            shares = [share / total for share in itertools.accumulate(one["sizes"])]
            places = [(1 + number) / len(shares) for number in range(len(shares))]
            axis.plot(places, shares, color="C0", label="each seed" if seed == 0 else None)
        axis.plot([0, 1], [0, 1], ":", color="0.5", label="all alike, as in GRPO")
        axis.set(xlabel="share of the tokens, those with most |A| first",
                 ylabel="share of the sum of |A|")
        axis.legend(frameon=False, fontsize=8, loc="lower right")

    def correlations(axis):
        draw_points(axis, {name: of(found, name) for name in names(found)},
                    xlabel="correlation with A of tokens")
    return [sizes, correlations]
