"""engines/skyrl.py, prime.py and tinker.py compute our loss when they are called as the sources of
SkyRL, prime-rl and Tinker call them, which are replaced by stand-ins of the same form."""
import importlib
import sys
from types import SimpleNamespace as Some

import pytest
import torch
from torch.testing import assert_close as same

import grpo

LENGTHS = (4, 2, 3)
LOSSES_OF_SKYRL = {}


def register_policy_loss(name):
    return lambda function: LOSSES_OF_SKYRL.update({name: function})


def apply_off_policy_correction(loss, old_log_probs, rollout_logprobs, loss_mask, config):
    return loss * config, loss_mask, {"corrected": 1.0}


STAND_INS = {
    "skyrl.backends.skyrl_train.utils": Some(ppo_utils=Some(
        register_policy_loss=register_policy_loss,
        apply_off_policy_correction=apply_off_policy_correction)),
    "prime_rl.trainer.rl.loss": Some(LossOutputs=Some)}


@pytest.fixture
def engine(monkeypatch):
    """engine(name, loss): import an engine while STAND_INS replace the packages."""
    def load(name, loss):
        monkeypatch.setenv("LOSS", loss)
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.delitem(sys.modules, f"engines.{name}", raising=False)
        for path, module in STAND_INS.items():
            monkeypatch.setitem(sys.modules, path, module)
        return importlib.import_module(f"engines.{name}")
    return load


def batch():
    torch.manual_seed(0)
    mask = (torch.arange(4) < torch.tensor(LENGTHS)[:, None]).double()
    old_logps = -torch.rand(3, 4).double() - 0.1
    logps = (old_logps + 0.3 * torch.randn(3, 4)).requires_grad_()
    return logps, old_logps, torch.tensor([1.0, -1.0, 2.0]).double()[:, None], mask


def check(loss, logps, how, **settings):
    """Check a loss of `batch` and its gradient in logps."""
    ours, old_logps, A, mask = batch()
    token_loss = grpo.policy_loss(ours, old_logps, A, mask, **settings)
    expected = grpo.aggregate(token_loss, mask, how, max_length=6)
    same(loss, expected)
    same(torch.autograd.grad(loss, logps), torch.autograd.grad(expected, ours))


@pytest.mark.parametrize("how, reduction", [
    ("token_mean", "token_mean"), ("sequence_mean", "sequence_mean"),
    ("constant", "seq_mean_token_sum_norm")])
def test_skyrl_sums_our_loss_of_the_advantages_that_it_has_scaled(how, reduction, engine):
    engine("skyrl", f"grpo how={how}")
    logps, old_logps, A, mask = batch()
    scale = {"token_mean": 1 / mask.sum(), "sequence_mean": 1 / (3 * mask.sum(1, keepdim=True)),
             "constant": 1 / 18}[how]
    config = Some(loss_reduction=reduction, off_policy_correction=1.0)
    policy_loss = LOSSES_OF_SKYRL["ours"]
    loss, metrics = policy_loss(logps, old_logps, A * scale, config, mask, None)
    check(loss, logps, how)
    assert metrics == {"corrected": 1.0}
    config.loss_reduction = "prompt_mean"
    with pytest.raises(ValueError, match=f"loss_reduction=prompt_mean: must be {reduction}"):
        policy_loss(logps, old_logps, A, config, mask)


@pytest.mark.parametrize("weight", [None, 0.5])
def test_prime_rl_divides_the_sum_of_our_losses_by_the_number_of_tokens(weight, engine):
    prime = engine("prime", "grpo loss_type=dapo epsilon_high=0.28")
    logps, old_logps, A, mask = batch()
    total = sum(prime.policy_loss(Some(
        trainer_logprobs=logps[i, :n], inference_logprobs=old_logps[i, :n],
        advantages=A[i].expand(n), loss_mask=mask[i, :n] > 0,
        loss_weights=weight and torch.full((n,), weight))).loss for i, n in enumerate(LENGTHS))
    loss = total / sum(LENGTHS) / (weight or 1)
    check(loss, logps, "token_mean", loss_type="dapo", epsilon_high=0.28)


@pytest.mark.parametrize("how", ["sequence_mean", "token_mean", "sequence_sum"])
def test_tinker_gets_the_gradient_of_our_loss_for_a_list_of_outputs(how, engine):
    tinker = engine("tinker", f"grpo how={how}")
    logps, old_logps, A, mask = batch()
    columns = {"logprobs": old_logps, "advantages": A.expand(3, 4), "mask": mask}
    data = [Some(loss_fn_inputs={
        name: Some(to_torch=lambda x=x[i, :n]: x) for name, x in columns.items()})
        for i, n in enumerate(LENGTHS)]
    loss, _ = tinker.policy_loss(data, [logps[i, :n] for i, n in enumerate(LENGTHS)])
    check(loss, logps, how)


@pytest.mark.parametrize("name, loss, message", [
    ("prime", "grpo", "LOSS: this trainer cannot take the average sequence_mean; it takes "
                      "token_mean: add how=token_mean"),
    ("skyrl", "grpo how=sequence_sum", "cannot take the average sequence_sum"),
    ("tinker", "grpo loss_type=dr_grpo", "cannot take the average constant"),
    ("tinker", "grop", "grop: must be grpo, gspo, ppo, zoo")])
def test_an_average_that_a_trainer_cannot_take_is_refused(name, loss, message, engine, refused):
    refused(message, engine, name, loss)
