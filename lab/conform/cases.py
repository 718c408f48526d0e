"""Make random completions, on which our equations are compared with those of other trainers."""
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
RANGE = {"epsilon": 0.2, "epsilon_high": 0.28}          # the clip range, unless flags change it


@dataclass(frozen=True)
class Case:
    """Completions and their numbers, as in a batch. Slots that are not the policy's hold arbitrary
    values."""
    mask: torch.Tensor          # (B, T)  1 for the policy's tokens
    slots: torch.Tensor         # (B, T)  1 for all tokens, including those of an environment
    lengths: torch.Tensor       # (B,)    number of tokens
    is_truncated: torch.Tensor  # (B,)
    rewards: torch.Tensor       # (P, G)
    logps: torch.Tensor         # (B, T)  log pi
    old_logps: torch.Tensor     # (B, T)  log pi_old
    ref_logps: torch.Tensor     # (B, T)  log pi_ref
    mu_logps: torch.Tensor      # (B, T)  log mu, where mu is the policy that sampled
    entropy: torch.Tensor       # (B, T)
    values: torch.Tensor        # (B, T)
    old_values: torch.Tensor    # (B, T)
    losses: torch.Tensor        # (B, T)
    logits: torch.Tensor        # (B, T, V)
    tokens: torch.Tensor        # (B, T)

    def batch(self, sampler="old_logps"):
        """Make a batch that this policy has sampled. A prompt is the number of its row. -> Batch"""
        ends = torch.where(self.is_truncated, 1, grpo.EOS)      # only the last token matters
        tokens = torch.ones(self.mask.shape).long()
        tokens = tokens.scatter(1, self.lengths[:, None] - 1, ends[:, None])
        return common.Batch(
            tokens, self.mask, getattr(self, sampler), self.entropy, self.lengths,
            self.is_truncated, prompts=torch.arange(len(tokens))[:, None], rewards=self.rewards,
            is_correct=self.rewards > 0.5)

    def A(self, scale_rewards="group", script=grpo):
        """Compute the advantages of whole outputs with a script. -> (B, T)"""
        return script.advantages(self.rewards, scale_rewards).view(-1, 1) * self.mask

    def average(self, x, how="token_mean", **counts):
        return grpo.aggregate(x, self.mask, how, max_length=T, **counts)        # (B, T) -> ()

    def outputs(self, logps, average=False):
        """Compute log-probabilities of whole completions, chosen and rejected. -> (B / 2,) each"""
        return dpo.sequence_logps(logps, self.mask, average).chunk(2)

    def num_tokens(self):
        return self.mask.sum(dim=1).view(P, G)

    def token_rewards(self):
        """Put the rewards on the last tokens of the completions. -> (B, T)"""
        return common.Arithmetic.token_rewards(None, self)

    def gae(self, lam=0.95):
        """Compute advantages and returns. -> (2, B, T)"""
        return torch.stack(ppo.gae(self.token_rewards(), self.values, self.mask, 0.99, lam))

    def rewards_to_go(self, gamma=0.9):
        return reinforce.rewards_to_go(self.token_rewards(), self.mask, gamma)         # (B, T)

    def less_kl(self):
        kl = ppo.kl(self.old_logps, self.ref_logps, "k1")
        return self.mask * (self.token_rewards() - 0.1 * kl)

    def rloo_loss(self):
        token_loss = reinforce.policy_loss(self.logps, self.A("rloo", reinforce), self.mask)
        return self.average(token_loss, "sequence_sum")

    def log_rho(self, script=grpo):
        return script.log_ratio(self.logps, self.old_logps, self.mask)          # (B, T)

    def clipped(self, script=grpo):
        """Compute L_t with (3). -> (B, T)"""
        return script.policy_loss(self.logps, self.old_logps, self.A(), self.mask, **RANGE)

    def without_a_token(self):
        """Forbid the first token, as a sampler's mask does: its logit is -inf. -> (B, T, V)"""
        return self.logits.masked_fill(torch.arange(V) == 0, -torch.inf)

    def teacher(self):
        """Make the logits of a teacher: those of the row before. -> (B, T, V)"""
        return self.logits.detach().roll(1, dims=0)

    def near_reference(self):
        """Move log pi_ref by about 1e-6. -> (B, T)"""
        return self.ref_logps + 1e-6 * self.logps

    def plain(self):
        """Treat an environment's tokens as the policy's, with log-probabilities of 0. -> Case"""
        names = ("logps", "old_logps", "ref_logps")
        filled = {name: getattr(self, name) * self.mask for name in names}
        return replace(self, mask=self.slots, **filled)

    def only(self, rows):
        """Mask the tokens of all other rows. -> Case"""
        return replace(self, mask=self.mask * rows[:, None])

    def untied(self):
        """Change rewards and log-probabilities slightly, so that no two tokens have the same
        covariance, and all groups have signal. -> Case"""
        outputs = torch.arange(B).view(P, G)
        tokens = torch.arange(B * T).view(B, T)
        return replace(self, rewards=self.rewards + 0.01 * outputs,
                       logps=self.logps - 1e-7 * tokens)

    def far_out(self):
        """Move every third ratio beyond e^20. -> Case"""
        far = 25 * (torch.arange(T) % 3 == 0) * self.mask
        return replace(self, old_logps=self.old_logps - far)


def draw(seed):
    """Draw a case: lengths from one token to T, a group without signal, and some ratios far from 1.
    Rewards are binary in two draws of three, and in every second draw an environment has inserted
    tokens. -> Case"""
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
             if value.is_floating_point()}      # rounded, so all machines get the same numbers
    return replace(drawn, **short)


def two_rewards(x):
    """Return the rewards of x, and second rewards that depend on the lengths. -> list of (P, G)"""
    return [x.rewards, (x.lengths.view(P, G) % 2).double()]
