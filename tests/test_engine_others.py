"""engines/skyrl.py, prime.py and tinker.py compute our loss when they are called as the sources of
SkyRL, prime-rl and Tinker call them, which are replaced by stand-ins of the same form."""
import importlib
import sys
from types import ModuleType
from types import SimpleNamespace as Some

import pytest
import torch
from torch.testing import assert_close as same

import grpo

LENGTHS = (4, 2, 3)


@pytest.fixture
def engine(monkeypatch):
    """engine(name, loss, **stand-in modules): import an engine while other modules stand in."""
    def load(name, loss, **modules):
        monkeypatch.setenv("LOSS", loss)
        for path, content in modules.items():
            parts = path.split("__")
            for n in range(1, len(parts)):
                monkeypatch.setitem(sys.modules, ".".join(parts[:n]),
                                    ModuleType(".".join(parts[:n])))
            module = ModuleType(".".join(parts))
            vars(module).update(content)
            setattr(sys.modules[".".join(parts[:-1])], parts[-1], module)
            monkeypatch.setitem(sys.modules, ".".join(parts), module)
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.delitem(sys.modules, f"engines.{name}", raising=False)
        return importlib.import_module(f"engines.{name}")
    return load


def batch():
    torch.manual_seed(0)
    mask = (torch.arange(4) < torch.tensor(LENGTHS)[:, None]).double()
    old_logps = -torch.rand(3, 4).double() - 0.1
    logps = (old_logps + 0.3 * torch.randn(3, 4)).requires_grad_()
    return logps, old_logps, torch.tensor([1.0, -1.0, 2.0]).double(), mask


def expected(how, **settings):
    logps, old_logps, A, mask = batch()
    losses = grpo.policy_loss(logps, old_logps, A, mask, **settings)
    loss = grpo.aggregate(losses, mask, how, max_length=6)
    return loss, torch.autograd.grad(loss, logps)[0]


def registry():
    losses = {}

    def register_policy_loss(name):
        return lambda function: losses.setdefault(name, function)

    def apply_off_policy_correction(loss, old_log_probs, rollout_logprobs, loss_mask, config):
        return loss * config, loss_mask, {"corrected": 1.0}
    return losses, {"register_policy_loss": register_policy_loss,
                    "apply_off_policy_correction": apply_off_policy_correction}


@pytest.mark.parametrize("how, reduction", [
    ("token_mean", "token_mean"), ("sequence_mean", "sequence_mean"),
    ("constant", "seq_mean_token_sum_norm")])
def test_skyrl_sums_our_loss_of_the_advantages_that_it_has_scaled(how, reduction, engine):
    losses, content = registry()
    engine("skyrl", f"grpo how={how}", skyrl__backends__skyrl_train__utils__ppo_utils=content)
    logps, old_logps, A, mask = batch()
    scale = {"token_mean": 1 / mask.sum(), "sequence_mean": 1 / (3 * mask.sum(1, keepdim=True)),
             "constant": torch.tensor(1 / 18).double()}[how]
    config = Some(loss_reduction=reduction, off_policy_correction=1.0)
    loss, metrics = losses["ours"](logps, old_logps, A[:, None] * scale, config, mask, None)
    same((loss, torch.autograd.grad(loss, logps)[0]), expected(how))
    assert metrics == {"corrected": 1.0}
    config.loss_reduction = "prompt_mean"
    with pytest.raises(ValueError, match=f"loss_reduction=prompt_mean: must be {reduction}"):
        losses["ours"](logps, old_logps, A, config, mask)


def test_prime_rl_divides_the_sum_of_our_losses_by_the_number_of_tokens(engine):
    outputs = Some(LossOutputs=lambda loss, metrics: Some(loss=loss, metrics=metrics))
    prime = engine("prime", "grpo loss_type=dapo epsilon_high=0.28",
                   prime_rl__trainer__rl__loss=vars(outputs))
    logps, old_logps, A, mask = batch()
    weights = [None, torch.ones(2).double(), None]
    total = sum(prime.policy_loss(Some(
        trainer_logprobs=logps[i, :n], inference_logprobs=old_logps[i, :n],
        advantages=A[i].expand(n), loss_mask=mask[i, :n] > 0, loss_weights=weights[i])).loss
        for i, n in enumerate(LENGTHS))
    loss = total / sum(LENGTHS)
    same((loss, torch.autograd.grad(loss, logps)[0]),
         expected("token_mean", loss_type="dapo", epsilon_high=0.28))
    half = Some(trainer_logprobs=logps[0], inference_logprobs=old_logps[0], loss_mask=mask[0] > 0,
                advantages=A[0].expand(4), loss_weights=None)
    whole = prime.policy_loss(half).loss
    half.loss_weights = torch.full((4,), 0.5).double()
    same(prime.policy_loss(half).loss, whole / 2)


@pytest.mark.parametrize("how", ["sequence_mean", "token_mean", "sequence_sum"])
def test_tinker_gets_the_gradient_of_our_loss_for_a_list_of_outputs(how, engine):
    tinker = engine("tinker", f"grpo how={how}")
    logps, old_logps, A, mask = batch()
    columns = {"logprobs": old_logps, "advantages": A[:, None].expand(3, 4), "mask": mask}
    data = [Some(loss_fn_inputs={
        name: Some(to_torch=lambda x=x[i, :n]: x) for name, x in columns.items()})
        for i, n in enumerate(LENGTHS)]
    logprobs = [logps[i, :n] for i, n in enumerate(LENGTHS)]
    loss, _ = tinker.policy_loss(data, logprobs)
    same((loss, torch.autograd.grad(loss, logps)[0]), expected(how))


@pytest.mark.parametrize("name, loss, message", [
    ("prime", "grpo", "LOSS: this trainer cannot take the average sequence_mean; it takes "
                      "token_mean: add how=token_mean"),
    ("skyrl", "grpo how=sequence_sum", "cannot take the average sequence_sum"),
    ("tinker", "grpo loss_type=dr_grpo", "cannot take the average constant"),
    ("tinker", "grop", "grop: must be grpo, gspo, ppo, zoo")])
def test_an_average_that_a_trainer_cannot_take_is_refused(name, loss, message, engine, refused):
    refused(message, engine, name, loss,
            skyrl__backends__skyrl_train__utils__ppo_utils=registry()[1],
            prime_rl__trainer__rl__loss={"LossOutputs": None})
