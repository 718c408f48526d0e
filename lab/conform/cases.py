"""The made-up completions on which our equations and those of other trainers are compared."""
from dataclasses import dataclass, replace
from functools import partial

import torch

import common
import dpo
import grpo
import ppo
import reinforce

P, G, T, V = 3, 4, 5, 7
B = P * G
RANGE = {"epsilon": 0.2, "epsilon_high": 0.28}          # of all, unless flags say otherwise


@dataclass(frozen=True)
class Case:
    """Completions as a batch has them. Slots that are not the policy's hold anything."""
    mask: torch.Tensor          # (B, T)
    slots: torch.Tensor         # (B, T)  the mask without the holes that an environment leaves
    lengths: torch.Tensor       # (B,)    slots used
    is_truncated: torch.Tensor  # (B,)
    rewards: torch.Tensor       # (P, G)
    logps: torch.Tensor         # (B, T)  of pi
    old_logps: torch.Tensor     # (B, T)  of pi_old
    ref_logps: torch.Tensor     # (B, T)  of pi_ref
    mu_logps: torch.Tensor      # (B, T)  of mu, which sampled
    entropy: torch.Tensor       # (B, T)
    values: torch.Tensor        # (B, T)
    old_values: torch.Tensor    # (B, T)
    losses: torch.Tensor        # (B, T)
    logits: torch.Tensor        # (B, T, V)
    tokens: torch.Tensor        # (B, T)

    def batch(self, sampler="old_logps"):
        """A Batch of this sampler. A prompt is the number of its row."""
        ends = torch.where(self.is_truncated, 1, grpo.EOS)      # other tokens do not matter
        tokens = torch.ones(B, T).long().scatter(1, self.lengths[:, None] - 1, ends[:, None])
        return common.Batch(
            tokens, self.mask, getattr(self, sampler), self.entropy, self.lengths,
            self.is_truncated, prompts=torch.arange(B)[:, None], rewards=self.rewards,
            is_correct=self.rewards > 0.5)

    def A(self, scale_rewards="group", script=grpo):
        """Advantages of whole outputs, by a script. -> (B, T)"""
        return script.advantages(self.rewards, scale_rewards).view(-1, 1) * self.mask

    def average(self, x, how="token_mean", **counts):
        return grpo.aggregate(x, self.mask, how, max_length=T, **counts)        # of (B, T)

    def outputs(self, logps, average=False):
        """Log-probabilities of whole completions, chosen and rejected. -> (B / 2,) each"""
        return dpo.sequence_logps(logps, self.mask, average).chunk(2)

    def num_tokens(self):
        return self.mask.sum(dim=1).view(P, G)

    def earned(self):
        """Rewards, where completions earn them. -> (B, T)"""
        return common.Arithmetic.token_rewards(None, self)

    def gae(self, lam=0.95):
        """Advantages and returns. -> (2, B, T)"""
        return torch.stack(ppo.gae(self.earned(), self.values, self.mask, 0.99, lam))

    def rewards_to_go(self, gamma=0.9):
        return reinforce.rewards_to_go(self.earned(), self.mask, gamma)         # (B, T)

    def less_kl(self):
        return self.mask * (self.earned() - 0.1 * ppo.kl(self.old_logps, self.ref_logps, "k1"))

    def rloo_loss(self):
        token_loss = reinforce.policy_loss(self.logps, self.A("rloo", reinforce), self.mask)
        return self.average(token_loss, "sequence_sum")

    def log_rho(self, script=grpo):
        return script.log_ratio(self.logps, self.old_logps, self.mask)          # (B, T)

    def clipped(self, script=grpo):
        """L_t by (3). -> (B, T)"""
        return script.policy_loss(self.logps, self.old_logps, self.A(), self.mask, **RANGE)

    def plain(self):
        """The same without holes."""
        names = ("logps", "old_logps", "ref_logps")
        known = {name: getattr(self, name) * self.mask for name in names}
        return replace(self, mask=self.slots, **known)

    def only(self, rows):
        """The same without the tokens of other rows."""
        return replace(self, mask=self.mask * rows[:, None])

    def untied(self):
        """The same where no two tokens have one covariance, and all groups have signal."""
        outputs = torch.arange(B).view(P, G)
        tokens = torch.arange(B * T).view(B, T)
        return replace(self, rewards=self.rewards + 0.01 * outputs,
                       logps=self.logps - 1e-7 * tokens)

    def far_out(self):
        """The same with every third ratio beyond e^20."""
        far = 25 * (torch.arange(T) % 3 == 0) * self.mask
        return replace(self, old_logps=self.old_logps - far)


def draw(seed):
    """Lengths from one token to all, a group without signal, ratios far from 1; binary rewards or
    others; holes in every second draw. -> Case"""
    generator = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, generator=generator)
    uniform = partial(torch.rand, generator=generator)
    lengths = torch.randint(1, T + 1, (B,), generator=generator)
    lengths[:2] = torch.tensor([1, T])
    place = torch.arange(T)
    slots = (place < lengths[:, None]).double()
    can_be_hole = (place > 0) & (place != lengths[:, None] - 1)
    is_hole = can_be_hole & (uniform(B, T) < 0.3 * (seed % 2))
    mask = slots * ~is_hole
    rewards = (uniform(P, G) < 0.5).double() if seed % 3 else uniform(P, G)
    rewards[0] = rewards[0, 0]

    def near(logps, spread):
        far = 3 * normal(B, T) * (uniform(B, T) < 0.1)
        rubbish = -40 * uniform(B, T)
        moved = logps + spread * normal(B, T) + far
        return torch.where(mask > 0, moved, rubbish).clamp(max=0)
    old = -3 * uniform(B, T)
    drawn = Case(
        mask, slots, lengths, uniform(B) < 0.4, rewards, near(old, 0.4), near(old, 0.0),
        near(old, 0.3), near(old, 0.3), uniform(B, T), normal(B, T), normal(B, T), normal(B, T),
        2 * normal(B, T, V), torch.randint(V, (B, T), generator=generator))
    short = {name: value.double().round(decimals=3) for name, value in vars(drawn).items()
             if value.is_floating_point()}              # the same numbers on every machine
    return replace(drawn, **short)


def two_rewards(x):
    """The reward of x, and one by the lengths. -> list of (P, G)"""
    return [x.rewards, (x.lengths.view(P, G) % 2).double()]
