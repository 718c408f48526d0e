"""The reward model of --reward model: RLHF as it was before verifiers (2203.02155).

Many tasks have no verifier, but a person can tell which of two completions of a prompt is better.
A model s learns from such pairs, and then replaces the person. It is a GPT that outputs one number
after the last token. Its loss is

  L = -log sigmoid(s(chosen) - s(rejected))                 (Bradley-Terry)

The model has seen only completions of the base, and RL searches for whatever it rates highly. So
sooner or later, what it rates highly (the proxy) is no longer what is right. This is called
over-optimization, and a penalty on the KL to the base delays it. In this file the verifier plays
the person, and says the opposite of what it found in one of ten cases.
"""
import copy
import math

import torch
from torch import nn
from tqdm import tqdm

import common
import plumbing

MISTAKES = 0.1                  # share of pairs that are swapped, as a person makes mistakes
BATCHES = 20                    # batches sampled from the base; each mixed group gives one pair


class RewardModel(nn.Module):
    """s: a copy of the base, and a linear head on its state at the last token. It starts as 0."""

    def __init__(self, policy):
        super().__init__()
        self.gpt = copy.deepcopy(policy)
        self.head = nn.Linear(policy.embed.embedding_dim, 1, device=policy.embed.weight.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch, rows):
        """Rate some rows of a batch. (b,) -> (b,)"""
        tokens = torch.cat([batch.prompts[rows], batch.tokens[rows]], dim=1)    # (b, W + T)
        last = batch.prompts.shape[1] + batch.lengths[rows] - 1                 # (b,)
        hidden = self.gpt.hidden(tokens)                                        # (b, W + T, D)
        states = hidden[torch.arange(len(rows)), last]                          # (b, D)
        return self.head(states)[:, 0]

    @torch.no_grad()
    def rewards(self, batch):
        """Rate all completions of a batch. -> (B,)"""
        return self(batch, torch.arange(len(batch.tokens))).cpu()


def pairs(batch, mistakes, generator):
    """Pair the first right and the first wrong completion of each of the N groups that have both.
    `mistakes` is the probability that a pair is swapped. -> rows of the chosen completions (N,), of
    the rejected ones (N,)"""
    is_correct = batch.is_correct                                               # (P, G)
    is_mixed = is_correct.any(dim=1) & ~is_correct.all(dim=1)                   # (P,)
    groups = is_mixed.nonzero()[:, 0]                                           # (N,)
    first_row = groups * is_correct.shape[1]                                    # (N,)
    right = first_row + is_correct[groups].int().argmax(dim=1)                  # (N,)
    wrong = first_row + (~is_correct[groups]).int().argmax(dim=1)               # (N,)
    is_swapped = torch.rand(len(groups), generator=generator) < mistakes
    chosen = torch.where(is_swapped, wrong, right)
    rejected = torch.where(is_swapped, right, wrong)
    return chosen, rejected


def fit(model, sample, seed):
    """Train a reward model on pairs from batches of the base, which sample(name) returns. Then
    scale it: its ratings of these batches get mean 1/2 and standard deviation 1/2, as rewards of 0
    and 1 may have. -> accuracy: the share of new pairs, without mistakes, in the right order"""
    numbers = tqdm(range(BATCHES), "preferences", leave=False, disable=None)
    batches = [sample(f"preferences {i}") for i in numbers]
    generator = common.generator(seed, "mistakes")
    train = [pairs(batch, MISTAKES, generator) for batch in batches]
    if not any(len(chosen) > 0 for chosen, _ in train):
        common.fail("--reward model: no group of the base has both a right and a wrong completion; "
                    "use a base that is right sometimes (--base_steps)", code=1)
    optimizer = plumbing.AdamW(model.parameters(), lr=1e-3)
    for batch, (chosen, rejected) in zip(batches, train):
        if len(chosen) > 0:
            margin = model(batch, chosen) - model(batch, rejected)  # (N,)
            loss = -nn.functional.logsigmoid(margin).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        ratings = torch.cat([model.rewards(batch) for batch in batches])
        scale = 2 * ratings.std().clamp(min=1e-6)
        model.head.weight /= scale
        model.head.bias.copy_((model.head.bias - ratings.mean()) / scale + 0.5)

    test = sample("preferences to test")
    right, wrong = pairs(test, 0.0, common.generator(seed))
    ratings = model.rewards(test)                                               # (B,)
    is_in_order = ratings[right] > ratings[wrong]                               # (N,)
    return is_in_order.float().mean().item()


def model_of(run, sample):
    """Make the reward model of a run: fit it on batches of the base, or load that of a resumed run.
    Checkpoints store it. -> RewardModel"""
    model = run.parts["reward_model"] = RewardModel(run.policy)
    if run.resumed:
        model.load_state_dict(run.resumed["reward_model"])
        return model
    accuracy = fit(model, sample, run.cfg.seed)
    print("reward model: there are no new pairs to test it on" if math.isnan(accuracy) else
          f"reward model: puts {accuracy:.3f} of new pairs in the right order", flush=True)
    return model
