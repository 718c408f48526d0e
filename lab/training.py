"""Run parts of the scripts in this process, for experiments that need their batches, policies or
prefixes."""
import copy
import dataclasses
import itertools
import shlex

import torch

import common
import grpo
import plumbing
import ppo


def load_base(script, flags=""):
    """Prepare everything that a script needs before its first step. -> Config, task, policy"""
    torch.set_num_threads(1)            # as in a run, because the last bits depend on it
    cfg = plumbing.parse_flags(script.Config, ["--device", "cpu", *shlex.split(flags)])
    task = common.load_task(cfg, script.verify)
    policy = script.GPT(cfg)
    plumbing.load_base(policy, task, cfg)
    return cfg, task, policy


def training(cfg, task, policy):
    """Train `policy` like the main of grpo.py, but without an end. Yields the
    batch of each step after its update."""
    reference = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.learning_rate, weight_decay=0.0)
    for weight in policy.parameters():
        weight.grad = torch.zeros_like(weight)
    for step in itertools.count():
        batch = grpo.sample_with_signal(policy, task, cfg, step)
        A = grpo.advantages(batch.rewards, cfg.scale_rewards).view(-1, 1)       # (B, 1)
        ref_logps, _ = grpo.score_reference(reference, batch, cfg)
        grpo.update(policy, ref_logps, optimizer, batch, A, cfg, step)
        task.observe(batch, step)
        yield batch


def train_critic(policy, task, cfg, batches):
    """Train ppo.py's critic on batches of a policy that does not learn. -> ppo.Critic"""
    critic = ppo.Critic(policy)
    optimizer = torch.optim.Adam(critic.parameters(), lr=cfg.critic_learning_rate)
    for step, batch in enumerate(batches):
        batch.values = critic(batch.prompts, batch.tokens).detach() * batch.mask
        _, returns = ppo.gae(task.token_rewards(batch), batch.values, batch.mask, cfg.gamma,
                             cfg.lam)
        ppo.fit_critic(critic, optimizer, batch, returns, cfg, "shuffle", step)
    return critic


def continued(script, policy, cfg, problems, prompts, prefixes, uniforms=None):
    """Complete prompts (n, W) whose completions begin with the tokens `prefixes` (n, t); decode
    greedily if there are no uniforms. -> prompts with their prefixes (n, W + t), the tokens after
    them and their mask (n, T), the texts of whole completions"""
    longer = torch.cat([prompts, prefixes], dim=1)                              # (n, W + t)
    tokens, mask, *_ = script.rollout(policy, longer, problems, cfg, uniforms)
    whole = torch.cat([prefixes, tokens], dim=1)                                # (n, t + T)
    lengths = prefixes.shape[1] + mask.sum(dim=1).long()
    texts = [script.decode([i for i in ids[:length] if i != script.EOS])
             for ids, length in zip(whole.tolist(), lengths.tolist())]
    return longer, tokens, mask, texts


def rewards_after(script, policy, task, cfg, batch, t, number, at_once=1024):
    """Take each completion with more than t tokens, and continue its first t tokens `number` times,
    with `at_once` rows in a batch. -> rows (n,), rewards (n, number)"""
    rows = (batch.lengths > t).nonzero()[:, 0]
    rest = dataclasses.replace(cfg, max_completion_length=cfg.max_completion_length - t)
    rewards = []
    for place, part in enumerate(rows.repeat_interleave(number).split(at_once)):
        problems = [batch.problems[row] for row in part.tolist()]
        generator = common.generator(cfg.seed, ("prefix", t, place))
        uniforms = torch.rand(len(part), rest.max_completion_length, generator=generator)
        *_, texts = continued(script, policy, rest, problems, batch.prompts[part],
                              batch.tokens[part, :t], uniforms)
        rewards += [task.verify(problem, text) for problem, text in zip(problems, texts)]
    return rows, torch.tensor(rewards).view(-1, number)
