"""Learn from samples of an older policy, and correct for their age with importance weights.

If sampling and training run at the same time, the samples come from an older policy mu. Here
--sampler_lag K samples from the policy of K batches ago. pi_old in (2) of grpo.py or gspo.py is
still the policy before the update, so the clip judges the step and not the lag (decoupled PPO,
2110.00641; AReaL, 2505.24298). A weight of L_t corrects for the fact that mu sampled, not pi_old:

  w_t   = pi_old(o_t | q, o_<t) / mu(o_t | q, o_<t)                                  (1)

This weight corrects the probability of its own token, but not of the tokens before it. In gspo.py
all tokens of an output share s_i, so the mean of their weights scales the gradient of the output.
To correct everything, give all tokens of an output the product of their weights, which varies more:

  w     = prod_t w_t                                                                 (2)

A few large weights would drown all others, so --importance_sampling_correction bounds the weights
by C and C_min. It either truncates them (TIS, as in IMPALA, 1802.01561) or masks them (IcePop,
2510.18855). By default C_min is 0; IcePop masks small weights, too. truncate and mask take (1);
sequence_truncate and sequence_mask take (2). For a long output, (2) is almost always out of bounds.
So geometric_mask, called seq-mask-tis in OpenRLHF and NeMo-RL, bounds the geometric mean of the
weights, for example by 0.999 and 1.002. It masks whole outputs, and keeps (1) in all others:

  truncate:        min(max(w_t, C_min), C)                                           (3)
  mask:            w_t if C_min <= w_t <= C, else 0                                  (4)
  geometric_mask:  w_t if C_min <= w^(1 / |o|) <= C, else 0                          (5)

L_t is a multiple of |A|, so it is enough to replace A by w_t A. KL_t has no weight, as in TRL, verl
and the code of 2110.00641. So with --beta, the penalty is an average over the samples of mu, and
--kl_estimator k3_ratio corrects it only from pi_old to pi.

Even without a lag, a sampler is such a mu if it rounds differently, or if it uses top-k, top-p or
a different temperature. If you then compute pi_old without these settings and do not correct, you
take samples of mu for samples of pi_old. No weight brings back a token that mu never samples.

Usage: python examples/lag.py --sampler_lag 4 --importance_sampling_correction truncate
"""
import copy
import dataclasses
import sys
from pathlib import Path
from typing import Literal

if not __package__:     # started as a file: the scripts are in the folder above
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # isort: split

import torch

import grpo
import gspo
import plumbing

METHODS = {"grpo": grpo, "gspo": gspo}


@dataclasses.dataclass(frozen=True)
class Config(grpo.Config):
    method: Literal["grpo", "gspo"] = common.flag("grpo", "script whose ratio and losses are used")
    epsilon: float = common.flag(None, "lower clip range (eps_low); None: the script's")
    epsilon_high: float = common.flag(None, "upper clip range (eps_high); None: the script's")
    importance_sampling_level: Literal["sequence", "sequence_token"] = common.flag(
        "sequence", "see gspo.py")
    sampler_lag: int = common.flag(4, "age of the policy that samples, in batches (K)")
    importance_sampling_correction: Literal[
        "none", "truncate", "mask", "sequence_truncate", "sequence_mask",
        "geometric_mask"] = common.flag("none", "weights of the tokens; none: all weights are 1")
    importance_sampling_cap: float = common.flag(2.0, "highest weight (C)")
    importance_sampling_clip_min: float = common.flag(0.0, "lowest weight (C_min)")
    MAY_BE_ZERO = grpo.Config.MAY_BE_ZERO | {"sampler_lag"}

    def __post_init__(self):
        for name in ("epsilon", "epsilon_high"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(METHODS[self.method].Config, name))

    def rules(self):
        own = METHODS[self.method].Config           # whose clip range is the default
        yield from own(**{field.name: getattr(self, field.name)
                          for field in dataclasses.fields(own)}).rules()
        is_default = self.importance_sampling_level == "sequence"
        is_gspo = self.method == "gspo"
        yield is_default or is_gspo, "--importance_sampling_level: needs --method gspo"
        has_use = self.sampler_lag > 0 or self.importance_sampling_correction == "none"
        yield has_use, "--importance_sampling_correction: needs --sampler_lag 1 or more"
        is_range = self.importance_sampling_cap > self.importance_sampling_clip_min
        yield is_range, "--importance_sampling_cap: must be above --importance_sampling_clip_min"
        for name in ("importance_sampling_cap", "importance_sampling_clip_min"):
            is_used = self.importance_sampling_correction != "none"
            is_used = is_used or getattr(self, name) == getattr(Config, name)
            yield is_used, f"--{name}: needs --importance_sampling_correction"


class Sampler:
    """The policy of `lag` steps ago, or the initial one at first. A part of checkpoints."""

    def __init__(self, policy, lag):
        self.lag = lag
        self.policy = copy.deepcopy(policy)
        self.past = [copy.deepcopy(policy.state_dict())]    # weights, oldest first

    def follow(self, policy):
        """Store the weights of the policy after a step, and load those of `lag` steps ago."""
        self.past = [*self.past, copy.deepcopy(policy.state_dict())][-1 - self.lag:]
        self.policy.load_state_dict(self.past[0])

    def state_dict(self):
        return {"past": self.past}

    def load_state_dict(self, state):
        self.past = state["past"]
        self.policy.load_state_dict(self.past[0])


def importance_weights(
        old_logps, sampler_logps, mask, correction="truncate", cap=2.0, clip_min=0.0):
    """Compute the weights pi_old / mu of samples of mu; 0 in masked slots. (B, T) each -> (B, T)"""
    if correction == "none":
        return mask
    log_w = torch.where(mask > 0, old_logps - sampler_logps, 0.0)               # (B, T)  eq. (1)
    if correction.startswith("sequence"):
        log_w = log_w.sum(dim=1, keepdim=True)                                  # (B, 1)  eq. (2)
    w = log_w.exp()
    if correction.endswith("truncate"):
        return w.clamp(clip_min, cap) * mask                                    # (B, T)  eq. (3)
    bounded = w                                                                 # for (4)
    if correction == "geometric_mask":
        length = mask.sum(dim=1, keepdim=True).clamp(min=1)
        bounded = (log_w.sum(dim=1, keepdim=True) / length).exp()               # (B, 1)  eq. (5)
    is_kept = (bounded >= clip_min) & (bounded <= cap)
    return torch.where(is_kept, w, 0.0) * mask                                  # (B, T)  eq. (4)


@torch.no_grad()
def correct_for_lag(policy, batch, cfg):
    """Replace log mu in a batch by log pi_old if there is a lag; `policy` is pi_old. -> weights
    (B, T), metrics"""
    if cfg.sampler_lag == 0:
        return batch.mask, {}
    old_logps, _ = METHODS[cfg.method].score(
        policy, batch.prompts, batch.tokens, cfg.temperature)                   # (B, T)
    weights = importance_weights(
        old_logps, batch.logps, batch.mask, cfg.importance_sampling_correction,
        cfg.importance_sampling_cap, cfg.importance_sampling_clip_min)
    num_tokens = batch.mask.sum()
    difference = ((old_logps - batch.logps) * batch.mask).abs()
    batch.logps = old_logps
    return weights, {
        "sampling/sampling_logp_difference/mean": (difference.sum() / num_tokens).item(),
        "sampling/sampling_logp_difference/max": difference.max().item(),
        "sampling/importance_sampling_ratio/mean": (weights.sum() / num_tokens).item()}


def main(argv=None):
    cfg = plumbing.parse_flags(Config, argv)
    script = METHODS[cfg.method]
    task = common.load_task(cfg, script.verify)
    policy = script.GPT(cfg).to(cfg.device)
    with plumbing.Run(cfg, task, policy, script.COLUMNS, script.observers(cfg)) as run:
        reference = run.begin(script.sample_batch)
        sampler = Sampler(policy, cfg.sampler_lag)
        optimizer = plumbing.AdamW(policy.parameters(), lr=cfg.learning_rate)

        run.start(script.evaluate, policy=policy, optimizer=optimizer, sampler=sampler)
        for step in range(run.step, cfg.max_steps):
            batch = script.sample_with_signal(sampler.policy, task, cfg, step)
            A = script.advantages(batch.rewards, cfg.scale_rewards).to(cfg.device)  # (P, G)
            A = A.view(-1, 1).expand_as(batch.mask)                                 # (B, T)
            weights, differences = correct_for_lag(policy, batch, cfg)          # (B, T)
            ref_logps, mean_kl = script.score_reference(reference, batch, cfg)
            metrics = script.update(policy, ref_logps, optimizer, batch, weights * A, cfg, step)
            sampler.follow(policy)
            run.log(batch, A, metrics | differences | {"kl": mean_kl})
        return run.finish()


if __name__ == "__main__":
    main()
