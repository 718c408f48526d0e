"""The first entries of the race (docs/race.md): our five algorithms, with the flags of their
scripts, dpo.py with --online. Only the learning rates are tuned, on bases that are not in the race.
"""
import copy
import itertools

import torch

import common
import dpo
import grpo
import gspo
import ppo
import reinforce


def adamw(policy, step_done, learning_rate):
    """Make the optimizer of the scripts; after each of its steps, the race evaluates the policy."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, weight_decay=0.0)
    optimizer.register_step_post_hook(lambda *_: step_done())
    return optimizer


def train_reinforce(policy, sample, step_done, learning_rate=1e-3):
    cfg = reinforce.Config()
    optimizer = adamw(policy, step_done, learning_rate)
    for step in itertools.count():
        batch = sample()
        A = reinforce.advantages(batch.rewards).view(-1, 1) * batch.mask        # (B, T)
        reinforce.update(policy, optimizer, batch, A, cfg, step)


def train_grpo(policy, sample, step_done, learning_rate=1e-3, script=grpo):
    cfg = script.Config()
    optimizer = adamw(policy, step_done, learning_rate)
    for step in itertools.count():
        batch = sample()
        A = script.advantages(batch.rewards).view(-1, 1)                        # (B, 1)
        script.update(policy, None, optimizer, batch, A, cfg, step)


def train_gspo(policy, sample, step_done, learning_rate=2e-3):
    train_grpo(policy, sample, step_done, learning_rate, script=gspo)


def train_ppo(policy, sample, step_done, learning_rate=1e-3):
    cfg = ppo.Config()
    optimizer = adamw(policy, step_done, learning_rate)
    task = common.Arithmetic(verify=None)               # puts rewards on last tokens
    reference = copy.deepcopy(policy)
    critic = ppo.Critic(policy)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=cfg.critic_learning_rate)
    for step in itertools.count():
        batch = sample()
        A, returns, batch.values, _ = ppo.compute_advantages(
            critic, reference, task, batch, cfg, cfg.beta)
        ppo.fit_critic(critic, critic_optimizer, batch, returns, cfg, "shuffle", step)
        ppo.update(policy, optimizer, batch, A, cfg, step, cfg.penalty_coef)


def train_dpo(policy, sample, step_done, learning_rate=1e-3):
    cfg = dpo.Config()
    optimizer = adamw(policy, step_done, learning_rate)
    reference = copy.deepcopy(policy)
    for step in itertools.count():
        batch = sample()                                # of the policy, as with --online
        chosen, rejected = dpo.preferences(batch.rewards)
        dpo.update(policy, reference, optimizer, batch, chosen, rejected, cfg, step)
