"""The reward model of --reward model: RLHF as it was before verifiers (2203.02155).

A person says which of two completions of a prompt is better. A model s, a GPT with a number as its
output after the last token, learns from such pairs

  L = -log sigmoid(s(chosen) - s(rejected))                 (Bradley-Terry)

and takes that person's place. It has seen what the base writes, nothing else, and RL searches for
what it rates highly. Its rating (the proxy) and what is right part ways sooner or later. That is
over-optimization, which a penalty on the KL to the base delays. Here the person is the verifier,
who in one of ten cases says the opposite.
"""
import copy
import functools

import torch
from torch import nn
from tqdm import tqdm

import common
from tasks.rewards import Rewards

MISTAKES = 0.1                  # share of pairs in which the person says the opposite
BATCHES = 20                    # of completions of the base to compare, two of each group


class RewardModel(nn.Module):
    """s: a copy of the base, and a head that reads its state at the last token; 0 at first."""

    def __init__(self, policy):
        super().__init__()
        self.gpt = copy.deepcopy(policy)
        self.head = nn.Linear(policy.embed.embedding_dim, 1, device=policy.embed.weight.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch, rows):
        """s of some rows of a batch. (b,) -> (b,)"""
        tokens = torch.cat([batch.prompts[rows], batch.tokens[rows]], dim=1)    # (b, W + T)
        last = batch.prompts.shape[1] + batch.lengths[rows] - 1                 # (b,)
        hidden = self.gpt.hidden(tokens)                                        # (b, W + T, D)
        states = hidden[torch.arange(len(rows)), last]                          # (b, D)
        return self.head(states)[:, 0]

    @torch.no_grad()
    def rewards(self, batch):
        """s of all completions of a batch. -> (P, G)"""
        found = self(batch, torch.arange(len(batch.tokens)))                    # (B,)
        return found.view_as(batch.is_correct).cpu()


def pairs(batch, mistakes, generator):
    """The first right and the first wrong completion of each of the N groups that have both; a
    share of the pairs, the mistakes, are swapped. -> chosen, rejected: rows (N,), (N,)"""
    is_correct = batch.is_correct                                               # (P, G)
    is_mixed = is_correct.any(dim=1) & ~is_correct.all(dim=1)                   # (P,)
    groups = is_mixed.nonzero()[:, 0]                                           # (N,)
    first_row = groups * is_correct.shape[1]                                    # (N,) of each group
    right = first_row + is_correct[groups].int().argmax(dim=1)                  # (N,)
    wrong = first_row + (~is_correct[groups]).int().argmax(dim=1)               # (N,)
    is_swapped = torch.rand(len(groups), generator=generator) < mistakes
    chosen = torch.where(is_swapped, wrong, right)
    rejected = torch.where(is_swapped, right, wrong)
    return chosen, rejected


def fit(model, sample, seed):
    """Train a reward model on pairs out of batches of the base, sample(name), and scale it: on
    these batches it has mean 1/2 and standard deviation 1/2, as a verdict may have. -> accuracy:
    the share of new pairs, without mistakes, that it puts in the right order"""
    numbers = tqdm(range(BATCHES), "preferences", leave=False, disable=None)
    batches = [sample(f"preferences {i}") for i in numbers]
    generator = common.generator(seed, "mistakes")
    found = [pairs(batch, MISTAKES, generator) for batch in batches]
    if not any(len(chosen) > 0 for chosen, _ in found):
        common.fail("--reward model: no group of the base has a right and a wrong completion; it "
                    "needs a base that is sometimes right (--base_steps)", code=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for batch, (chosen, rejected) in zip(batches, found):
        if len(chosen) > 0:
            margin = model(batch, chosen) - model(batch, rejected)  # (N,)
            loss = -nn.functional.logsigmoid(margin).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    scale_to_verdicts(model, batches)

    test = sample("preferences to test")
    right, wrong = pairs(test, 0.0, common.generator(seed))
    ratings = model.rewards(test).flatten()                                     # (B,)
    is_in_order = ratings[right] > ratings[wrong]                               # (N,)
    return is_in_order.float().mean().item()


@torch.no_grad()
def scale_to_verdicts(model, batches):
    """Give the ratings of these batches mean 1/2 and standard deviation 1/2."""
    ratings = torch.cat([model.rewards(batch) for batch in batches])
    scale = 2 * ratings.std().clamp(min=1e-6)
    model.head.weight /= scale
    model.head.bias.copy_((model.head.bias - ratings.mean()) / scale + 0.5)


class Trainer:
    """Makes the reward model of a run before its first step, and gives it to the task's rewards.
    Checkpoints hold it, and a run that is resumed has its own."""

    def start(self, run):
        model = RewardModel(run.policy)
        if run.resumed:
            model.load_state_dict(run.resumed["reward_model"])
        else:
            script = run.task.machinery
            sample = functools.partial(script.sample_batch, run.policy, run.task, run.cfg)
            accuracy = fit(model, sample, run.cfg.seed)
            print(f"reward model: {accuracy:.3f} of new pairs in the right order", flush=True)
        run.parts["reward_model"] = model
        task = run.task
        while not isinstance(task, Rewards):            # which a curriculum may wrap
            task = task.task
        task.model = model
