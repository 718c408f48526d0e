"""engines/verl.py: inside verl's ppo_loss, our losses have the right values and gradients."""
import functools
import json
import os
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
from engines import names

pytest.importorskip("verl", reason="needs lab/conform/requirements.txt")
pytest.importorskip("trl", reason=NEEDS)
os.environ["LOSS"] = "grpo:policy_loss"
from engines import verl as ours
from lab.conform import compare, theirs

CONTENT = vectors.read("policy_loss")


@pytest.mark.parametrize("case", filter(losses_of, CONTENT["cases"]), ids=lambda case: case["id"])
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


def test_an_average_that_contradicts_the_loss_is_refused():
    with pytest.raises(ValueError, match="loss_agg_mode=token-mean: the loss has the average "
                                         "sequence_mean, so write seq-mean-token-mean"):
        ours.policy_loss(*torch.zeros(4, 1, 1))


def test_a_loss_that_is_not_finite_ends_a_step():
    """verl itself would leave out the step, with a warning."""
    logps = torch.full((1, 2), float("nan"))
    with pytest.raises(ValueError, match="grpo:policy_loss: the loss of a token is not finite"):
        ours.policy_loss(-torch.ones(1, 2), logps, *torch.ones(2, 1, 2), "seq-mean-token-mean")


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


def test_the_advantages_of_a_loss_are_its_neighbours(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def my_loss():\n    pass\n\ndef advantages(rewards):\n    return rewards\n")
    assert ours.find_advantages(f"{file}:my_loss")(3) == 3
    assert ours.find_advantages("zoo loss_type=gmpo") is grpo.advantages


def test_verl_itself_imports_it():
    text = "gspo:policy_loss epsilon=3e-4"
    code = ("import verl\nfrom verl.trainer.ppo import core_algos\n"
            f"print(core_algos.get_policy_loss_fn('{text}').__module__,"
            " core_algos.get_adv_estimator_fn('ours').__module__)")
    variables = {"VERL_USE_EXTERNAL_MODULES": "engines.verl", "LOSS": text}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True,
                          check=True, env=os.environ | variables)
    assert done.stdout.endswith("engines.verl engines.verl\n")
    assert f"loss {text} how=sequence_mean (" in done.stdout
