"""Tinker: training_client.forward_backward_custom(data, engines.tinker.policy_loss).

Written from the package tinker 0.38.0 (November 2026), and not run there. A Datum of data holds the
tensors logprobs (log pi_old), advantages and mask in its loss_fn_inputs; only target_tokens and
weights are sent to the server. One call has to contain the whole batch of an optimizer step.
"""
import engines.behind  # isort: split

from torch.nn.utils.rnn import pad_sequence

import grpo

LOSS, HOW = engines.required("sequence_mean", "token_mean", "sequence_sum")


def policy_loss(data, logprobs):
    logps = pad_sequence(logprobs, batch_first=True)                            # (B, T)
    old_logps, A, mask = (pad_sequence(                                         # (B, T) each
        [one.loss_fn_inputs[name].to_torch().to(logps) for one in data], batch_first=True)
        for name in ("logprobs", "advantages", "mask"))
    return grpo.aggregate(LOSS(logps, old_logps, A, mask), mask, HOW), {}
