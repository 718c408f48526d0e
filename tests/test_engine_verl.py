"""engines/verl.py: inside verl's ppo_loss, our losses have the right values and gradients."""
import functools
import json
import os
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from small_models import NEEDS
from small_vectors import losses_of
from torch.testing import assert_close as same

import grpo
import vectors
from engines import names, settings, task

pytest.importorskip("verl", reason="needs lab/conform/requirements.txt")
pytest.importorskip("trl", reason=NEEDS)
os.environ["LOSS"] = "grpo:policy_loss"
from engines import verl as ours
from lab.conform import compare, theirs

CONTENT = vectors.read("policy_loss")


@pytest.mark.parametrize("case", [*filter(losses_of, CONTENT["cases"])], ids=lambda one: one["id"])
def test_the_vectors_are_right_inside_verl(case, monkeypatch):
    """Also in parts of one output each, unless a loss compares the outputs of a part."""
    def inside(mask, advantages, logps, old_logps, how, max_length=None, **_):
        monkeypatch.setattr(ours, "HOW", how)
        x, _ = theirs.parted(mask, logps=logps, old_logps=old_logps)
        scale = {"loss_scale_factor": max_length} if max_length else {}
        parts = 1 if case["parameters"]["method"] in ("clip_cov", "kl_cov") else len(mask)
        return theirs.policy_update(x, advantages, parts, loss_mode=ours.TEXT,
                                    loss_agg_mode=names.AVERAGES[how], **scale)

    for loss in losses_of(case):
        monkeypatch.setattr(ours, "LOSS", loss)
        outcome = vectors.check_case(inside, CONTENT, case, tolerance=theirs.TOLERANCE,
                                     fixed=case["parameters"])
        assert not outcome.skipped and not outcome.errors, outcome.errors


def test_the_page_on_conformance_has_what_the_trainers_compute():
    def right(content):
        return {(file, case, trainer): answer == "right"
                for file, cases in content["vectors"].items() for case, answers in cases.items()
                for trainer, answer in answers.items()}
    stored = json.loads((ROOT / "docs/conformance.json").read_text())
    assert right(compare.compared()) == right(stored)


def test_verl_has_the_names_of_the_dictionary():
    flags = {flag for table in (names.OF_ALL, *names.SETTINGS.values())
             for *_, there in table.values() if isinstance(there, str) for flag in there.split()}
    assert flags <= theirs.FSDPActorConfig.__dataclass_fields__.keys() | theirs.OF_LOSS
    assert {loss.verl for loss in names.LOSSES.values()} - {""} <= (
        theirs.core_algos.POLICY_LOSS_REGISTRY.keys())


def test_the_weights_for_the_sampler_multiply_the_loss():
    config = SimpleNamespace(global_batch_info={})
    logps, old_logps = -torch.rand(2, 3, 4)
    call = functools.partial(ours.policy_loss, old_logps, logps, torch.randn(3, 4),
                             torch.ones(3, 4), "seq-mean-token-mean", config)
    same(call(0.5 * torch.ones(3, 4))[0], 0.5 * call()[0])
    assert call()[1]["actor/max_log_ratio"] == pytest.approx((logps - old_logps).abs().max().item())


def test_advantages_are_those_of_the_script_whatever_the_order_of_the_groups():
    torch.manual_seed(0)
    rewards = torch.rand(3, 4)
    order = torch.randperm(12)
    index = torch.arange(3).repeat_interleave(4)[order].numpy()
    tokens = torch.zeros(12, 5)
    tokens[:, 2] = rewards.flatten()[order]
    mask = (torch.arange(5) < 3).float().expand(12, 5)
    for config, scale in ((None, "group"), ({"norm_adv_by_std_in_grpo": False}, "none")):
        A, returns = ours.estimate(tokens, mask, index, config=config)
        expected = grpo.advantages(rewards, scale).flatten()[order]
        same(A, expected[:, None] * mask)
        same(returns, A)


def test_verls_own_code_takes_the_printed_command(small_llama, tmp_path, monkeypatch):
    """Its check of the config; all else needs a GPU or packages of a GPU."""
    hydra = pytest.importorskip("hydra")
    import verl.trainer
    from verl.trainer.main_ppo import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    c = vars(grpo.Config(beta=0.1, loss_type="dr_grpo", task="arithmetic,countdown"))
    *_, train, test, line = settings.report("grpo", grpo, c, "run")
    for command in (train, test):
        task.main(shlex.split(command)[3:])
    words = shlex.split(line.replace("MODEL", str(small_llama)))
    keys = [word for word in words if re.match(r"[a-z_]+\.", word) and "=" in word]
    with hydra.initialize_config_dir(f"{verl.trainer.__path__[0]}/config", version_base=None):
        config = hydra.compose("ppo_trainer", overrides=keys)   # raises if a key does not exist
    validate_config(config, need_reference_policy(config), need_critic(config))
    actor = config.actor_rollout_ref.actor
    assert actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor == 48
    assert f"LOSS={actor.policy_loss.loss_mode}" in words       # the config names the loss, too
    assert actor.kl_loss_coef == 0.1 and actor.use_kl_loss and actor.ppo_mini_batch_size == 16


def test_verl_itself_imports_it():
    text = "gspo:policy_loss epsilon=3e-4"
    code = ("import verl\nfrom verl.trainer.ppo import core_algos\n"
            f"print(core_algos.get_policy_loss_fn('{text}').__module__,"
            " core_algos.get_adv_estimator_fn('ours').__module__)")
    variables = {"VERL_USE_EXTERNAL_MODULES": "engines.verl", "LOSS": text}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True,
                          check=True, env=os.environ | variables)
    assert done.stdout.endswith("engines.verl engines.verl\n")
    assert f"loss {text} how=sequence_mean; files gspo.py (" in done.stdout
