"""The reward model of ppo.py --reward model: RLHF as it was before verifiers (2203.02155).

Somebody says which of two completions of a prompt is better. A model s, a GPT that reads out a number behind
the last token, learns from such pairs

  L = -log sigmoid(s(chosen) - s(rejected))                 (Bradley-Terry)

and takes that person's place. It has seen what the base writes, nothing else; PPO looks for what it likes.
What it likes (the proxy) and what is right part ways sooner or later: over-optimisation, which a penalty on
the KL to the base puts off. Here the person is the verifier, who in one of ten cases says the opposite.
"""
import copy

import torch
from torch import nn

import common

MISTAKES = 0.1                  # of the person
BATCHES = 20                    # of completions of the base that are compared, two of each group


class RewardModel(nn.Module):
    """s: a GPT, at first the base, and what its last state says of a completion. At first that is 0."""

    def __init__(self, gpt):
        super().__init__()
        self.gpt, self.head = copy.deepcopy(gpt), nn.Linear(gpt.embed.embedding_dim, 1)
        nn.init.zeros_(self.head.weight), nn.init.zeros_(self.head.bias)

    def forward(self, batch, rows):
        """s of rows (b,) of a batch. -> (b,)"""
        tokens, last = batch.out.tokens[rows], batch.out.lengths[rows]                      # (b, T), (b,)
        behind = torch.cat([tokens, tokens[:, -1:]], 1)         # a slot more, to stand behind the last token
        states = self.gpt.states(batch.prompts, batch.of[rows], behind)                     # (b, T + 1, D)
        return self.head(states[torch.arange(len(last)), last])[:, 0]

    @torch.no_grad()
    def rewards(self, batch):
        """s of all completions of a batch. -> (P, G)"""
        return self(batch, torch.arange(len(batch.texts))).view_as(batch.rewards).cpu()


def pairs(batch, mistakes, random):
    """Rows (N,), (N,): a right and a wrong completion of each group that has both, some pairs swapped."""
    right, G = batch.right, batch.right.shape[1]                                            # (P, G)
    mixed = (right.any(1) & ~right.all(1)).nonzero()[:, 0]                                  # (N,)
    best, worst = (x[mixed].int().argmax(1) + mixed * G for x in (right, ~right))       # the first of each
    swapped = torch.rand(len(mixed), generator=random) < mistakes
    return torch.where(swapped, worst, best), torch.where(swapped, best, worst)


def fit(model, sample, progress, seed):
    """Teach `model` pairs out of the batches sample(name), and scale it: mean 1/2 and standard deviation 1/2
    on what it has seen, as a verdict. -> share of right orders among new pairs, without mistakes"""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = [sample(f"preferences {i}") for i in progress("preferences", range(BATCHES))]
    random = common.generator(seed, "mistakes")
    found = [pairs(batch, MISTAKES, random) for batch in batches]
    if not any(len(chosen) for chosen, _ in found):
        common.fail("--reward model: no group of the base has a right and a wrong completion; it needs a "
                    "base that is sometimes right (--base_steps)", code=1)
    for batch, (chosen, rejected) in zip(batches, found):
        if len(chosen):
            margin = model(batch, chosen) - model(batch, rejected)                          # (N,)
            optimizer.zero_grad()
            (-nn.functional.logsigmoid(margin)).mean().backward()
            optimizer.step()
    with torch.no_grad():
        seen = torch.cat([model.rewards(batch) for batch in batches])
        scale = 2 * seen.std().clamp(min=1e-6)
        model.head.weight /= scale
        model.head.bias.copy_((model.head.bias - seen.mean()) / scale + 0.5)
        test = sample("preferences to test")
        best, worst = pairs(test, 0.0, common.generator(seed))
        ordered = model.rewards(test).view(-1)
        return (ordered[best] > ordered[worst]).float().mean().item()


def judge(policy, cfg, run, sample):
    """{"judge": RewardModel} for --reward model, else {}. A run that is resumed brings the fitted one."""
    if "model" not in cfg.reward.split("+"):
        return {}
    model = RewardModel(policy)
    if not run.resumed:
        accuracy = fit(model, sample, common.tools.progress, cfg.seed)
        size = sum(weight.numel() * weight.element_size() for weight in policy.parameters()) / 1e6
        print(f"reward model: {accuracy:.3f} of new pairs in the right order")
        print(f"in memory: policy and critic {4 * size:.1f} MB each, with gradients and Adam's two moments; "
              f"reference and reward model {size:.1f} MB each", flush=True)
    return {"judge": model}
