"""examples/pretrained.py computes what the scripts compute, on a model of transformers."""
import copy
from pathlib import Path

import pytest
import torch
from small_models import (
    LIKE_SMALL,
    NEEDS,
    config_of,
    export_policy,
    load_example,
    policy_of,
)
from small_runs import SMALL, arguments, at_work, read_summary, steps

import common
import grpo
import gspo
import reinforce
from tools import export

pytest.importorskip("transformers", reason=NEEDS)
pretrained = load_example()
SCRIPT = {"grpo": grpo, "gspo": gspo, "reinforce": reinforce}


@pytest.fixture
def run(tmp_path, monkeypatch, restored_ctrl_c):
    """run(**flags): a run of examples/pretrained.py in a new folder. -> folder"""
    monkeypatch.chdir(tmp_path)

    def make(name="run", **flags):
        pretrained.main(arguments(LIKE_SMALL | {"output_dir": name} | flags))
        return tmp_path / name
    return make


# ---- the same equations ----------------------------------------------------------------------

def moved(policy, seed, size):
    """A copy of a policy, some way off."""
    other = copy.deepcopy(policy)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(size * weight.std().nan_to_num() * torch.randn(
                weight.shape, generator=generator))
    return other


@pytest.fixture(scope="module")
def off_policy(small_base, tmp_path_factory):
    """A batch of the base, its policy some steps later, a reference: ours and as Llamas."""
    folder = tmp_path_factory.mktemp("scene")
    sampler = policy_of(small_base)
    _, cfg = export.read_policy(small_base, "checkpoint.pt")
    task = common.load_task(cfg, grpo.verify)
    batch = grpo.sample_batch(sampler, task, cfg, step=0)
    batch.is_truncated[::5] = True                      # so that leaving rows out shows
    policy = moved(sampler, seed=1, size=0.05)
    reference = moved(sampler, seed=2, size=0.05)
    with torch.no_grad():
        ref_logps, _ = grpo.score(reference, batch.prompts, batch.tokens)
    llama = export_policy(policy, cfg, folder / "policy")
    return batch, policy, ref_logps, llama


def gradients_of(script, off_policy, flags):
    """Loss and gradient of the script and of the example over the same rows. -> two pairs of a
    float and a dict"""
    batch, policy, ref_logps, llama = off_policy
    rows = torch.arange(3, len(batch.texts))            # part of a batch
    A = script.advantages(batch.rewards).view(-1, 1)
    flags = {"micro_batch_size": 5, "max_completion_length": 16, "num_mini_batches": 1} | flags
    policy.zero_grad()
    if script is reinforce:
        found = reinforce.backward(policy, batch, A, rows, reinforce.Config(**flags), 0.0)
    else:
        found = script.backward(policy, batch, ref_logps, A, rows, script.Config(**flags), 0.0)
    ours = {export.llama_name(name): weight.grad for name, weight in policy.named_parameters()}

    cfg = config_of(method=script.__name__, **flags)
    model = pretrained.Policy(llama, cfg)
    weights = list(model.model.parameters())
    again = pretrained.backward(model, weights, batch, ref_logps, A, rows, cfg)
    theirs = {name: weight.grad for name, weight in model.model.named_parameters()}
    assert again["max_log_ratio"] > 0.05                # off-policy
    if "clip_ratio/region_mean" in found:
        name = "clip_ratio/region_mean"
        assert again[name] == pytest.approx(found[name], abs=1e-9)
    return (found["loss"], ours), (again["loss"], theirs)


@pytest.mark.parametrize("flags", [
    *({"loss_type": loss_type} for loss_type in grpo.LOSS_TYPES),
    *({"beta": 0.3, "kl_estimator": name} for name in ("k1", "k2", "k3", "k3_ratio")),
    {"loss_type": "dapo", "beta": 0.1, "mask_truncated_completions": True},
    {"delta": 1.4, "epsilon": 0.1, "epsilon_high": 0.1}], ids=repr)
@pytest.mark.parametrize("script", [grpo, gspo], ids=["grpo", "gspo"])
def test_loss_and_gradient_are_those_of_the_script_off_policy(script, off_policy, flags):
    (loss, ours), (again, theirs) = gradients_of(script, off_policy, flags)
    assert again == pytest.approx(loss, rel=1e-6, abs=1e-6)
    assert ours.keys() == theirs.keys()
    scale = max(gradient.abs().max() for gradient in ours.values())
    assert scale > 1e-3
    for name, gradient in ours.items():
        torch.testing.assert_close(theirs[name], gradient, rtol=0, atol=1e-6 * max(1, scale.item()))


@pytest.mark.parametrize("baseline", ["none", "batch", "mean", "rloo"])
def test_loss_and_gradient_of_reinforce_are_those_of_the_script(off_policy, baseline, monkeypatch):
    advantages = reinforce.advantages
    monkeypatch.setattr(reinforce, "advantages", lambda rewards: advantages(rewards, baseline))
    (loss, ours), (again, theirs) = gradients_of(reinforce, off_policy, {"num_iterations": 1})
    assert again == pytest.approx(loss, rel=1e-6)
    for name, gradient in ours.items():
        torch.testing.assert_close(theirs[name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("flags", [
    {}, {"num_mini_batches": 2, "num_iterations": 2, "beta": 0.05, "warmup_steps": 8},
    {"loss_type": "dapo", "scale_rewards": "none"}, {"temperature": 0.7, "beta": 0.05},
    {"temperature": 0.7, "weight_decay": 20.0, "max_grad_norm": 0.1}], ids=repr)
@pytest.mark.parametrize("method", ["grpo", "gspo"])
def test_a_run_is_that_of_the_script_from_the_same_base(
        method, flags, run, small_base, small_llama, tmp_path):
    """The rewards of the first ten steps are equal, and what else is logged nearly so."""
    words = {name: value for name, value in (SMALL | {
        "init_from": small_base, "output_dir": tmp_path / "ours", "stop_at": 2} | flags).items()
        if name not in ("base_steps", "base_batch_size")}
    with at_work(tmp_path):
        SCRIPT[method].main(arguments(words))
    theirs = run(model=small_llama, method=method, stop_at=2, **flags)
    names = ["loss", "grad_norm", "entropy", "accuracy", "clip_ratio/region_mean"]
    for one, other in zip(steps(tmp_path / "ours"), steps(theirs), strict=True):
        assert one["reward"] == other["reward"]
        assert one["completions/mean_length"] == other["completions/mean_length"]
        for name in names + (["kl"] if "beta" in flags else []):
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=2e-4), name
    ours = read_summary(tmp_path / "ours")
    again = read_summary(theirs)
    assert {ours[name]["greedy"] for name in ("base", "trained")} == {
        again[name]["greedy"] for name in ("base", "trained")}


def test_reinforce_runs_as_the_script_does(run, small_base, small_llama, tmp_path):
    words = {name: value for name, value in (SMALL | {
        "init_from": small_base, "output_dir": tmp_path / "ours", "stop_at": 2,
        "baseline": "rloo"}).items() if name not in ("base_steps", "base_batch_size")}
    with at_work(tmp_path):
        reinforce.main(arguments(words))
    theirs = run(model=small_llama, method="reinforce", baseline="rloo", stop_at=2)
    for one, other in zip(steps(tmp_path / "ours"), steps(theirs), strict=True):
        assert one["reward"] == other["reward"]
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-3, abs=2e-4)


def test_fifteen_steps_from_the_exported_base_of_arithmetic_are_enough(tmp_path, monkeypatch):
    """Measured with seeds 0 to 4, on 256 problems: greedy 0.08 -> 0.98 to 1.00, pass@1 0.35 -> 0.93
    to 0.97. The base takes 20 to 40 s, the steps 5 s."""
    with at_work(tmp_path):
        grpo.main(arguments({"device": "cpu", "max_steps": 0, "output_dir": "base",
                             "num_eval_problems": 8, "num_eval_samples": 1}))
        export.export(Path("base"), Path("model"))
        summary = pretrained.main(arguments({
            "model": "model", "device": "cpu", "max_steps": 15, "stop_at": 2,
            "max_completion_length": 48, "learning_rate": 5e-4, "micro_batch_size": 32,
            "num_eval_problems": 128, "num_eval_samples": 1}))
    assert summary["base"]["greedy"] < 0.3
    assert summary["trained"]["greedy"] >= 0.95
    assert summary["trained"]["think_share"] > summary["base"]["think_share"] + 0.3
