"""Samples of an older policy, as where sampling and training run side by side, and their weights.

With --sampler_lag K, outputs are sampled by mu, the policy of K batches ago. pi_old in (2) of
grpo.py or gspo.py stays the policy before the update, so that the clip judges the step, not the lag
(decoupled PPO, 2110.00641; AReaL, 2505.24298). A weight of L_t corrects that mu sampled:

  w_t   = pi_old(o_t | q, o_<t) / mu(o_t | q, o_<t)                                  (1)

The weight of a token corrects the chance of this token, not of those before it. With gspo.py, whose
s_i all tokens share, it acts by its mean over the output, as a factor of the output's gradient.
Instead, all tokens may have the product of theirs, which corrects all and varies more:

  w     = prod_t w_t                                                                 (2)

A few large weights would drown all others. --importance_sampling_correction says what becomes of
those above C: truncate (TIS, as in IMPALA's 1802.01561) or mask (IcePop, 2510.18855, which has a
lower bound, too). It takes (1), or (2) as sequence_truncate and sequence_mask.

  truncate:  min(w_t, C)                                                             (3)
  mask:      w_t if w_t <= C, else 0                                                 (4)

L_t is a multiple of |A|, so that w_t A in the place of A is all that it takes. KL_t has no weight,
as in TRL, verl, and the code of 2110.00641: with --beta the penalty is an average over what mu
sampled, and --kl_estimator k3_ratio corrects it from pi_old on alone.

A sampler that rounds otherwise, or has top-k, top-p or a temperature of its own, is such a mu even
without a lag. Whoever scores its samples without these and does not correct takes samples of mu for
those of pi_old. No weight brings back a token that mu never samples.

Usage: python examples/lag.py --sampler_lag 4 --importance_sampling_correction truncate
"""
import copy
import dataclasses
import sys
from pathlib import Path
from typing import Literal

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
import grpo
import gspo

METHODS = {"grpo": grpo, "gspo": gspo}
CORRECTIONS = ("none", "truncate", "mask", "sequence_truncate", "sequence_mask")


@dataclasses.dataclass(frozen=True)
class Config(grpo.Config):
    method: Literal[tuple(METHODS)] = "grpo"    # the script whose ratio and losses are taken
    epsilon: float = None               # lower clip range (eps_low); None: that of the script
    epsilon_high: float = None          # upper clip range (eps_high); None: that of the script
    importance_sampling_level: Literal["sequence", "sequence_token"] = "sequence"   # see gspo.py
    sampler_lag: int = 4                # sample from the policy of so many batches ago (K)
    importance_sampling_correction: Literal[CORRECTIONS] = "none"   # none: every weight is 1
    importance_sampling_cap: float = 2.0    # the highest weight (C)
    MAY_BE_ZERO = grpo.Config.MAY_BE_ZERO | {"sampler_lag"}

    def __post_init__(self):
        for name in ("epsilon", "epsilon_high"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(METHODS[self.method].Config, name))

    def rules(self):
        yield from super().rules()
        is_default = self.importance_sampling_level == "sequence"
        yield is_default or self.method == "gspo", "--importance_sampling_level: is for gspo"
        has_use = self.sampler_lag > 0 or self.importance_sampling_correction == "none"
        yield has_use, "--importance_sampling_correction: does nothing without a lag"
        yield self.importance_sampling_cap > 0, "--importance_sampling_cap 0: no sample has weight"


class Sampler:
    """The policy as it was `lag` steps ago, or at first. A part of checkpoints."""

    def __init__(self, policy, lag):
        self.lag = lag
        self.policy = copy.deepcopy(policy)
        self.past = [copy.deepcopy(policy.state_dict())]    # of the last `lag` steps, and now

    def follow(self, policy):
        """The policy has made a step."""
        self.past = [*self.past, copy.deepcopy(policy.state_dict())][-1 - self.lag:]
        self.policy.load_state_dict(self.past[0])

    def state_dict(self):
        return {"past": self.past}

    def load_state_dict(self, state):
        self.past = state["past"]
        self.policy.load_state_dict(self.past[0])


def importance_weights(old_logps, sampler_logps, mask, correction="truncate", cap=2.0):
    """How much likelier than mu pi_old is to sample what mu sampled, 0 in masked slots.
    (B, T) each -> (B, T)"""
    if correction == "none":
        return mask
    log_w = torch.where(mask > 0, old_logps - sampler_logps, 0.0)               # (B, T)  eq. (1)
    if correction.startswith("sequence"):
        log_w = log_w.sum(dim=1, keepdim=True)                                  # (B, 1)  eq. (2)
    w = torch.where(mask > 0, log_w.exp(), 0.0)                                 # (B, T)
    if correction.endswith("truncate"):
        return w.clamp(max=cap)                                                 # eq. (3)
    return torch.where(w <= cap, w, 0.0)                                        # eq. (4)


def correct(batch, old_logps, cfg):
    """Put log pi_old (B, T) in the place of log mu in a batch. -> weights (B, T), metrics"""
    weights = importance_weights(
        old_logps, batch.logps, batch.mask, cfg.importance_sampling_correction,
        cfg.importance_sampling_cap)
    num_tokens = batch.mask.sum()
    difference = ((old_logps - batch.logps) * batch.mask).abs()
    batch.logps = old_logps
    return weights, {
        "sampling/sampling_logp_difference/mean": (difference.sum() / num_tokens).item(),
        "sampling/sampling_logp_difference/max": difference.max().item(),
        "sampling/importance_sampling_ratio/mean": (weights.sum() / num_tokens).item()}


@torch.no_grad()
def correct_for_lag(policy, batch, cfg):
    """The same by the policy before the update; without a lag it is mu. -> weights, metrics"""
    if cfg.sampler_lag == 0:
        return batch.mask, {}
    old_logps, _ = METHODS[cfg.method].score(
        policy, batch.prompts, batch.tokens, cfg.temperature, cfg.kernel)       # (B, T)
    return correct(batch, old_logps, cfg)


def main(argv=None):
    cfg = common.parse_flags(Config, argv)
    script = METHODS[cfg.method]
    task = common.load_task(cfg, script.verify)
    policy = script.GPT(cfg).to(cfg.device)
    run = common.Run(cfg, task, policy, script.COLUMNS)
    run.begin(script.warm_start)
    reference = copy.deepcopy(policy)
    sampler = Sampler(policy, cfg.sampler_lag)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.learning_rate, weight_decay=0.0)

    run.start(script.evaluate, policy=policy, optimizer=optimizer, sampler=sampler)
    while run.step < cfg.max_steps and run.accuracy() < cfg.stop_at:
        batch = script.sample_with_signal(sampler.policy, task, cfg, run.step)
        A = script.advantages(batch.rewards, cfg.scale_rewards).view(-1, 1).to(cfg.device)  # (B, 1)
        weights, differences = correct_for_lag(policy, batch, cfg)              # (B, T)
        ref_logps, mean_kl = script.score_reference(reference, batch, cfg)
        metrics = script.update(policy, ref_logps, optimizer, batch, weights * A, cfg, run.step)
        sampler.follow(policy)
        run.log(batch, A, metrics | differences | {"kl": mean_kl})
        run.save(every=cfg.save_steps)
    return run.finish()


if __name__ == "__main__":
    main()
