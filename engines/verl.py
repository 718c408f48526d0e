"""Train with verl on a loss of ours, or on your own: verl imports this module.

  export VERL_USE_EXTERNAL_MODULES=engines.verl LOSS="grpo:policy_loss epsilon_high=0.28"
  python -m verl.trainer.main_ppo "actor_rollout_ref.actor.policy_loss.loss_mode='$LOSS'" \\
      actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean algorithm.adv_estimator=ours ...

It registers the loss and its average, which `engines.load` reads, under the text in LOSS, so that
verl's config names the loss, and verl refuses a config with another one. The advantage estimator
`ours` is grpo.advantages, scaled by the group's std unless algorithm.norm_adv_by_std_in_grpo=False.
verl adds the KL and the entropy, with loss_agg_mode, so that has to be the average of the loss.
verl's processes do not start in this checkout: write its path into a file checkout.pth in their
site-packages. Read in verl 0.9.1, whose `ppo_loss` calls it.
"""
import engines.import_path  # isort: split

import os

import torch
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss

import grpo
from engines import record
from engines.names import AVERAGES

TEXT = " ".join(os.environ.get("LOSS", "").split())
LOSS, HOW = engines.load(TEXT)
print(record.line(record.of_run(TEXT, LOSS, HOW)[0]), flush=True)


@register_policy_loss(TEXT)
def policy_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean",
                config=None, rollout_is_weights=None):
    """Compute the part of a micro-batch in the loss of an optimizer step. (b, T) each
    -> scalar, metrics. ValueError if verl would average its other terms differently."""
    if loss_agg_mode != AVERAGES[HOW]:
        raise ValueError(f"actor.loss_agg_mode={loss_agg_mode}: the loss has the average {HOW}, "
                         f"so write {AVERAGES[HOW]}")
    mask = response_mask.to(log_prob)
    token_loss = LOSS(log_prob, old_log_prob, advantages, mask)                 # (b, T)
    if rollout_is_weights is not None:
        token_loss = token_loss * rollout_is_weights
    log_rho = grpo.log_ratio(log_prob.detach(), old_log_prob, mask)
    num_tokens = mask.sum().clamp(min=1)
    return agg_loss(token_loss, mask, loss_agg_mode, **config.global_batch_info), {
        "actor/ppo_kl": (-log_rho.sum() / num_tokens).item(),
        "actor/max_log_ratio": log_rho.abs().max().item()}


@register_adv_est("ours")
def estimate(token_level_rewards, response_mask, index, config=None, **_):
    """Compute the advantages of outputs, whose groups have equal values in index (B,). (B, T) each
    -> advantages and returns (B, T)"""
    rewards = token_level_rewards.sum(dim=1)                                    # (B,)
    by_std = config is None or config.get("norm_adv_by_std_in_grpo", True)
    A = torch.zeros_like(rewards)
    for name in dict.fromkeys(index.tolist()):
        rows = torch.tensor(index == name, device=rewards.device)
        A[rows] = grpo.advantages(rewards[rows][None], "group" if by_std else "none")[0]
    A = A[:, None] * response_mask
    return A, A
