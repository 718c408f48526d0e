"""How the losses of this project are related, as a family tree: each test is one branch of it.

All of them use the scripts' own functions, in float64. `slope` is the gradient in log pi.
"""
import inspect

import pytest
import torch
from conftest import ROOT, close, gradient, ones, randn

import dpo
import grpo
import gspo
import nano
import ppo
import reinforce
from learn.path import rungs

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]).double()        # three outputs
OLD = -1 - randn(3, 4).abs()                            # log pi_old
LOGPS = (OLD + 0.3 * randn(3, 4, seed=1)).requires_grad_()      # log pi; some ratios are clipped
A = randn(3, 1, seed=2)


def slope(token_loss, logps=LOGPS):
    return gradient(token_loss, logps)


@pytest.mark.parametrize("loss_type", grpo.LOSS_TYPES)
@pytest.mark.parametrize("script", [grpo, gspo])
def test_at_ratio_1_every_surrogate_has_the_gradient_of_reinforce(script, loss_type):
    logps = OLD.clone().requires_grad_()
    surrogate = slope(script.policy_loss(logps, OLD, A, MASK, loss_type), logps)
    close(surrogate, slope(reinforce.policy_loss(logps, A.expand(3, 4), MASK), logps))


def test_ppo_has_the_loss_of_grpo_and_gspo_too_if_an_output_has_one_token():
    given = LOGPS, OLD, A, MASK
    close(ppo.policy_loss(*given), grpo.policy_loss(*given))
    one = LOGPS[:, :1], OLD[:, :1], A, ones(3, 1)
    close(gspo.policy_loss(*one), grpo.policy_loss(*one))


def test_gspo_token_has_the_value_of_gspo():
    whole, tokens = (gspo.policy_loss(LOGPS, OLD, A, MASK, level=level)
                     for level in ("sequence", "sequence_token"))
    close(whole, tokens)


def test_averages_agree_if_all_outputs_are_equally_long_and_dr_grpos_if_none_is_shorter_than_T():
    x = grpo.policy_loss(LOGPS, OLD, A, ones(3, 4))
    outputs, tokens, constant = (grpo.aggregate(x, ones(3, 4), grpo.LOSS_TYPES[name][1])
                                 for name in ("grpo", "dapo", "dr_grpo"))
    close(torch.stack([tokens, constant]), outputs.expand(2))
    by_output, by_token = (grpo.aggregate(x, MASK, how) for how in ("sequence_mean", "token_mean"))
    assert not torch.isclose(by_output, by_token)


def test_rloo_is_the_group_mean_times_G_over_G_minus_1():
    rewards = randn(5, 4)
    close(reinforce.advantages(rewards, "rloo"), 4 / 3 * grpo.advantages(rewards, "none"))


def test_inside_its_bounds_cispo_has_the_gradient_of_grpo_but_another_value():
    near = (OLD + 0.1 * randn(3, 4, seed=1).clamp(-1, 1)).requires_grad_()
    clip, cispo = (grpo.policy_loss(near, OLD, A, MASK, name) for name in ("grpo", "cispo"))
    close(slope(clip, near), slope(cispo, near))
    assert not torch.allclose(clip, cispo)


def test_dpos_gradient_is_a_weighted_reinforce_of_its_pair():
    logps = dpo.sequence_logps(LOGPS, MASK)
    chosen, rejected, ref_chosen, ref_rejected = logps[0], logps[1], *OLD[:2].sum(dim=1)
    loss = dpo.dpo_loss(*(x[None] for x in (chosen, rejected, ref_chosen, ref_rejected)), 0.1)
    margin = 0.1 * (chosen - rejected - ref_chosen + ref_rejected)
    weight = 0.1 * torch.sigmoid(-margin).detach()      # larger if the pair is in the wrong order
    A_pair = weight * torch.tensor([[1], [-1], [0]]).expand(3, 4)
    close(slope(loss), slope(reinforce.policy_loss(LOGPS, A_pair, MASK)))


def test_nano_and_real_have_the_loss_of_grpo():
    token_loss = grpo.policy_loss(LOGPS, OLD, A, MASK, "grpo", 0.2, 0.28)
    theirs = grpo.aggregate(token_loss, MASK, "sequence_mean")
    close(slope(nano.surrogate_loss(LOGPS, OLD, A, MASK)), slope(theirs))
    # real.py needs transformers, so its text is compared
    assert inspect.getsource(nano.surrogate_loss) in (ROOT / "real.py").read_text("utf-8")


@pytest.mark.parametrize("name, script, how, bounds", [
    ("drgrpo", grpo, "constant", (0.2, 0.28)), ("gspo", gspo, "sequence_mean", (0.03, 0.04))])
def test_the_rungs_of_the_path_have_the_losses_of_the_scripts(
        name, script, how, bounds, import_text):
    rung = import_text(rungs.script(name))
    rung.T = 4
    token_loss = script.policy_loss(LOGPS, OLD, A, MASK, "grpo", *bounds)
    theirs = script.aggregate(token_loss, MASK, how)
    close(slope(rung.surrogate_loss(LOGPS, OLD, A, MASK)), slope(theirs))
