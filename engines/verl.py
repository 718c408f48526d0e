"""Train with verl on a loss of ours, or on your own: verl imports this module.

  export VERL_USE_EXTERNAL_MODULES=engines.verl LOSS="grpo:policy_loss epsilon_high=0.28"
  python -m verl.trainer.main_ppo "actor_rollout_ref.actor.policy_loss.loss_mode='$LOSS'" \\
      actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean algorithm.adv_estimator=ours ...

It registers the loss and its average, which `engines.load` reads, under the text in LOSS, so that
verl's config names the loss, and verl refuses a config with another one. The script's `advantages`
are the advantage estimator `ours`, scaled by the group's std unless
algorithm.norm_adv_by_std_in_grpo=False. verl adds the KL and the entropy, with loss_agg_mode, so
that has to be the average of the loss. verl's processes do not start in this checkout: write its
path into a file checkout.pth in their site-packages. Read in verl 0.9.1, whose `ppo_loss` calls it.
"""
import engines.behind  # isort: split

import os
import sys
from pathlib import Path

import torch
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss

import common
import grpo
from engines import record
from engines.names import AVERAGES

TEXT = " ".join(os.environ.get("LOSS", "").split())
try:
    LOSS, HOW = engines.load(TEXT)
except ValueError as error:
    common.fail(error)
print(record.line(record.of_run(TEXT, LOSS, HOW)[0]), flush=True)


def find_advantages(loss):
    """Find the function `advantages`, (P, G) -> (P, G), in the file of a loss; else grpo's."""
    module = sys.modules[loss.module]
    return grpo.advantages if engines.is_ours(Path(module.__file__)) else getattr(
        module, "advantages", grpo.advantages)


ADVANTAGES = find_advantages(LOSS)


@register_policy_loss(TEXT)
def policy_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean",
                config=None, rollout_is_weights=None):
    """Compute the part of a micro-batch in the loss of an optimizer step. (b, T) each
    -> scalar, metrics. ValueError if verl would average its other terms differently, or if the loss
    is not finite."""
    if loss_agg_mode != AVERAGES[HOW]:
        raise ValueError(f"actor.loss_agg_mode={loss_agg_mode}: the loss has the average {HOW}, "
                         f"so write {AVERAGES[HOW]}")
    mask = response_mask.to(log_prob)
    token_loss = LOSS(log_prob, old_log_prob, advantages, mask)                 # (b, T)
    if not token_loss.isfinite().all():         # verl would leave out this step, and go on
        raise ValueError(f"{TEXT}: the loss of a token is not finite")
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
    settings = {} if by_std else {"scale_rewards": "none"}
    A = torch.zeros_like(rewards)
    for name in dict.fromkeys(index.tolist()):
        rows = torch.tensor(index == name, device=rewards.device)
        A[rows] = ADVANTAGES(rewards[rows][None], **settings)[0]
    A = A[:, None] * response_mask
    return A, A
