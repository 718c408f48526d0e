"""What grpo.py and gspo.py do where the policy is no longer that which sampled: a bound on the
ratio, the KL by the ratio; and what they leave out of an update."""
import functools
import math

import pytest
import torch
from conftest import f64, scripts
from update_scenes import gradient_of

pytestmark = [pytest.mark.quick, scripts("grpo", "gspo")]
close = functools.partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("A, ratio, delta, loss, gradient", [
    (-1, 4, 3, 3, 0), (-2, 4, 3, 6, 0), (-1, 2.5, 3, 2.5, 2.5), (-1, 0.5, 3, 0.8, 0),
    (1, 4, 3, -1.28, 0), (1, 0.5, 3, -0.5, -0.5), (-1, 4, 0, 4, 4)])
def test_delta_bounds_the_loss_of_a_token_whose_advantage_is_negative(
        script, A, ratio, delta, loss, gradient):
    logps = f64([[-1.0]]).requires_grad_()
    token_loss = script.policy_loss(
        logps, logps.detach() - math.log(ratio), f64([A]), torch.ones(1, 1), epsilon=0.2,
        epsilon_high=0.28, delta=delta)
    token_loss.sum().backward()
    close((token_loss.item(), logps.grad.item()), (float(loss), float(gradient)))


@pytest.mark.parametrize("flags", [
    {"delta": 1.3},
    {"beta": 0.3, "kl_estimator": "k3_ratio"},
    {"mask_truncated_completions": True, "loss_type": "dapo"},
    {"mask_truncated_completions": True, "loss_type": "dr_grpo", "entropy_coef": 0.05},
    {"mask_truncated_completions": True, "beta": 0.1, "entropy_coef": 0.05}], ids=repr)
def test_an_update_is_equation_5_of_the_outputs_that_count(script, scene, flags):
    """Those without an end are left out as if they had not been sampled, of B and of all counts.
    The ratios of the scene go far above 1.3."""
    made = scene(micro_batch_size=3, **flags)
    cfg, batch = made.cfg, made.batch
    rows = torch.arange(len(batch.texts))
    batch.is_truncated[:] = False
    batch.is_truncated[[0, 3, 8]] = True
    metrics, gradient = made.backward(rows)

    if cfg.mask_truncated_completions:
        rows = rows[~batch.is_truncated]
    mask = batch.mask[rows]
    old_logps = batch.logps[rows]
    logps, entropy = script.score(
        made.policy, batch.prompts[rows], batch.tokens[rows], cfg.temperature)
    token_loss = script.policy_loss(
        logps, old_logps, made.A[rows], mask, cfg.loss_type, 0.2, 0.28, cfg.delta)
    x = (logps - made.ref_logps()[rows]) * mask
    token_kl = (-x).exp() + x - 1
    if cfg.kl_estimator == "k3_ratio":
        token_kl = ((logps - old_logps) * mask).exp() * token_kl
    token_loss = (token_loss + cfg.beta * token_kl - cfg.entropy_coef * entropy) * mask
    if cfg.loss_type == "dapo":
        loss = token_loss.sum() / mask.sum()
    elif cfg.loss_type == "dr_grpo":
        loss = token_loss.sum() / (len(rows) * cfg.max_completion_length)
    else:
        loss = (token_loss.sum(dim=1) / mask.sum(dim=1)).mean()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-12)
    close(gradient, gradient_of(loss, made.policy))


def test_an_update_of_outputs_without_an_end_alone_learns_nothing(script, scene):
    made = scene(mask_truncated_completions=True)
    made.batch.is_truncated[:] = True
    metrics, gradient = made.backward(torch.arange(len(made.batch.texts)))
    assert metrics["loss"] == 0 and metrics["clip_ratio/region_mean"] == 0
    assert (gradient == 0).all()
