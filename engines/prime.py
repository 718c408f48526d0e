"""prime-rl: type = "custom", import_path = "engines.prime.policy_loss" in the loss's settings.

Written from PrimeIntellect-ai/prime-rl 559b44772, 2026-08-21, and not run there. It calls the loss
for each sample, with the log-probabilities of the sampler as log pi_old, and divides the sum by the
number of tokens in all processes, so the average is token_mean.
"""
import engines.behind  # isort: split

from prime_rl.trainer.rl.loss import LossOutputs

LOSS, HOW = engines.required("token_mean")


def policy_loss(inputs, **_):
    logps, old_logps, A = (x[None] for x in (                                   # (1, T) each
        inputs.trainer_logprobs, inputs.inference_logprobs, inputs.advantages))
    mask = inputs.loss_mask[None].to(logps)
    losses = LOSS(logps, old_logps, A, mask)
    if inputs.loss_weights is not None:
        losses = losses * inputs.loss_weights
    return LossOutputs(loss=(losses * mask).sum(), metrics={})
