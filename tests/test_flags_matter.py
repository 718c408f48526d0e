"""Every flag of the algorithm, of sampling and of the optimizer changes what is learned."""
import dataclasses
import importlib
import re
from typing import NamedTuple

import pytest
import torch
from conftest import SCRIPTS, every_script

import common

pytestmark = pytest.mark.usefixtures("talkative")           # an environment inserts tokens


class Change(NamedTuple):
    """Values of a flag that have to change the weights after two steps."""
    values: str
    needs: str = ""             # the other flags with which they do


SHARED = {
    "seed": Change("1"),
    "base_seed": Change("1"),
    "operands": Change("4"),
    "num_prompts": Change("3"),
    "num_generations": Change("3"),
    "max_completion_length": Change("5"),
    "temperature": Change("0.7"),
    "dynamic_sampling": Change("1 8", "--num_generations 2"),
    "curriculum": Change("true", "--operands 3-5"),
    "mask_tool_tokens": Change("false"),
    "num_mini_batches": Change("2"),
    "max_grad_norm": Change("0.01"),
    "learning_rate": Change("0.01"),
    "warmup_steps": Change("4"),
    "weight_decay": Change("0.5")}
PASSES = {
    "num_iterations": Change("1"),
    "entropy_coef": Change("0.1"),
    "entropy_decay_steps": Change("2", "--entropy_coef 0.1"),
    "beta": Change("0.5")}
GROUP = PASSES | {
    "loss_type": Change("bnpo dr_grpo dapo cispo sapo", "--micro_batch_size 3"),
    "scale_rewards": Change("batch none mean"),
    "epsilon": Change("0.01"),
    "epsilon_high": Change("0.01"),
    "delta": Change("1.3"),
    "kl_estimator": Change("k1 k2 k3_ratio", "--beta 0.5"),
    "overlong_buffer": Change("3"),
    "mask_truncated_completions": Change("true"),
    "sampler_lag": Change("1"),
    "importance_sampling_correction": Change(
        "truncate mask sequence_truncate sequence_mask", "--sampler_lag 1"),
    "importance_sampling_cap": Change(
        "0.99 1.01", "--sampler_lag 1 --importance_sampling_correction truncate")}
OWN = {
    "reinforce": PASSES | {
        "method": Change("rejection"),
        "baseline": Change("mean rloo batch optimal"),
        "view": Change("token", "--gamma 0.9"),
        "gamma": Change("0.9 0"),
        "teacher": Change("run")},
    "grpo": GROUP,
    "gspo": GROUP | {
        "epsilon": Change("0.95"),
        "epsilon_high": Change("0.5"),
        "delta": Change("1.002", "--num_mini_batches 2 --num_prompts 8 --learning_rate 0.1"),
        "importance_sampling_level": Change("sequence_token", "--loss_type cispo")},
    "ppo": PASSES | {
        "gamma": Change("0.9"),
        "lam": Change("0.5"),
        "critic_lam": Change("1 0"),
        "length_adaptive": Change("true"),
        "alpha": Change("3", "--length_adaptive"),
        "trust_region": Change("penalty trpo"),
        "epsilon": Change("0.01"),
        "epsilon_high": Change("0.01"),
        "cliprange_value": Change("0.01", "--critic_learning_rate 0.1"),
        "penalty_coef": Change("3", "--trust_region penalty"),
        "target_kl": Change("0.01", "--trust_region penalty"),
        "max_kl": Change("0.05", "--trust_region trpo"),
        "damping": Change("1", "--trust_region trpo"),
        "critic_learning_rate": Change("0.1"),
        "critic_pretrain_steps": Change("1"),
        "kl_target": Change("0.001", "--beta 0.5"),
        "nll_coef": Change("0.5")},
    "dpo": {
        "beta": Change("0.5"),
        "loss_type": Change("ipo hinge simpo"),
        "label_smoothing": Change("0.1 0.2", "--loss_type robust"),
        "simpo_gamma": Change("0.1", "--loss_type simpo"),
        "average_logps": Change("true"),
        "nll_coef": Change("0.1"),
        "online": Change("true"),
        "num_iterations": Change("1")}}
FILES = {"dpo": {"pairs", "save_pairs"}}        # what they do is in test_pair_files.py
CHANGES = {name: SHARED | OWN[name] for name in SCRIPTS}
TWO_PASSES = "--num_iterations 2"


@pytest.fixture(scope="module")
def known():
    """What many tests compare with: (name of a script, flags) -> weights."""
    return {}


@pytest.fixture
def end_of(script, train, known):
    """end_of(flags): the weights that a run ends with, which is made once. That a second run ends
    with the same ones, has a test below."""
    def find(flags):
        key = (script.__name__, " ".join(flags.split()))
        if key not in known:
            known[key] = train(flags).weights()
        return known[key]
    return find


@pytest.mark.parametrize("script, name", [
    (script, name) for script in SCRIPTS for name in CHANGES[script]], indirect=["script"])
def test_the_flag_changes_what_is_learned(script, train, end_of, name):
    change = CHANGES[script.__name__][name]
    common_flags = f"{TWO_PASSES} {change.needs}"
    ends = [end_of(common_flags)]
    for value in change.values.split():
        ends.append(train(f"{common_flags} --{name} {value}").weights())
    for i, end in enumerate(ends):
        assert end.isfinite().all()
        assert not any(torch.equal(end, other) for other in ends[:i])


# Values, not the default, of the flags that other flags idle, or that need others.
IDLE_VALUES = {
    "epsilon": "0.01", "epsilon_high": "0.01", "lam": "0.5", "learning_rate": "0.01",
    "warmup_steps": "4", "weight_decay": "0.5", "reward": "accuracy+format", "kl_estimator": "k1",
    "entropy_decay_steps": "2", "alpha": "3", "penalty_coef": "3", "target_kl": "0.01",
    "max_kl": "0.05", "damping": "1", "kl_target": "0.001", "label_smoothing": "0.1",
    "simpo_gamma": "0.1", "delta": "1.5", "importance_sampling_cap": "1.01",
    "importance_sampling_correction": "mask", "method": "rejection", "average_logps": "true"}
NAMES = {"teacher": "run"}                      # a value of the flag that names a folder


def idle_cases():
    """Each flag that a script refuses, with the flags with which it does. -> list of (script, name,
    flags)"""
    cases = []
    for name in SCRIPTS:
        config = importlib.import_module(name).Config
        for idle, others in config.does_nothing_with.items():
            for other in others.split(", "):
                flag, _, values = other.partition(" ")
                for value in (values or NAMES.get(flag, "")).split("|"):
                    is_default = value == getattr(config, flag)
                    if flag != "pairs":         # refused here, for the task inserts text
                        cases.append(
                            (name, idle, "" if is_default else f"--{flag} {value}".strip()))
        fields = {field.name: field for field in dataclasses.fields(config)}
        for field in fields.values():
            flag, _, wanted = field.metadata["needs"].partition(" ")
            if not wanted and flag not in ("", "init_from"):    # MadeRun has no base
                cases.append((name, field.name, ""))
            for value in fields[flag].metadata["choices"] if wanted else ():
                if value not in wanted.split("|"):
                    cases.append((name, field.name, f"--{flag} {value}"))
    return cases


def check_nothing(cfg, given):
    """Takes every flag."""


@pytest.mark.parametrize("script, name, flags", idle_cases(), indirect=["script"])
def test_a_flag_that_is_refused_would_have_changed_nothing(
        train, end_of, monkeypatch, name, flags):
    with pytest.raises(SystemExit):
        train(f"{TWO_PASSES} {flags} --{name} {IDLE_VALUES[name]}")
    without = end_of(f"{TWO_PASSES} {flags}")
    monkeypatch.setattr(common, "check_flags", check_nothing)
    end = train(f"{TWO_PASSES} {flags} --{name} {IDLE_VALUES[name]}").weights()
    assert torch.equal(end, without)


@every_script
def test_without_another_flag_exactly_the_same_is_learned(train):
    assert torch.equal(train(TWO_PASSES).weights(), train(TWO_PASSES).weights())


@pytest.fixture
def float64_by_default():
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


@every_script
def test_the_size_of_a_micro_batch_changes_nothing_that_is_learned(train, float64_by_default):
    ends = []
    for size in (64, 3, 1):
        run = train(f"{TWO_PASSES} --num_mini_batches 2 --micro_batch_size {size}")
        ends.append(run.weights())
        assert ends[-1].dtype == torch.float64
        torch.testing.assert_close(ends[-1], ends[0], atol=1e-10, rtol=0)


@every_script
def test_the_table_of_changes_is_complete(script):
    changes = CHANGES[script.__name__]
    fields = [field for field in dataclasses.fields(script.Config)
              if field.metadata["group"] in ("algorithm", "sampling", "optimizer")]
    missing = {field.name for field in fields} - changes.keys()
    assert missing - FILES.get(script.__name__, set()) == {"micro_batch_size"}
    for field in fields:
        if field.metadata["choices"]:
            tried = {*changes[field.name].values.split(), field.default}
            for change in changes.values():
                tried |= {*re.findall(rf"--{field.name} (\w+)", change.needs)}
            assert tried == {*field.metadata["choices"]}, field.name
