"""SkyRL: import this module before its entry point, with trainer.algorithm.policy_loss_type=ours.

Written from NovaSky-AI/SkyRL a9564572e, 2026-08-21, and not run there. SkyRL adds up what this
returns, because it has scaled the advantages so that the sum is the average loss_reduction. So the
loss has to be proportional to A: a term without A, such as DRO's penalty, would not be averaged.
"""
import engines.behind  # isort: split

from skyrl.backends.skyrl_train.utils import ppo_utils

AVERAGES = {"token_mean": "token_mean", "sequence_mean": "sequence_mean",
            "constant": "seq_mean_token_sum_norm"}
LOSS, HOW = engines.required(*AVERAGES)


@ppo_utils.register_policy_loss("ours")
def policy_loss(log_probs, old_log_probs, advantages, config, loss_mask, rollout_logprobs=None):
    if config.loss_reduction != AVERAGES[HOW]:
        raise ValueError(f"loss_reduction={config.loss_reduction}: must be {AVERAGES[HOW]}")
    losses = LOSS(log_probs, old_log_probs, advantages, loss_mask.to(log_probs))
    losses, loss_mask, metrics = ppo_utils.apply_off_policy_correction(
        losses, old_log_probs, rollout_logprobs, loss_mask, config.off_policy_correction)
    return (losses * loss_mask).sum(), metrics
