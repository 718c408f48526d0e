"""The algorithm of gspo.py, one ratio for a whole answer, against numbers worked out by hand."""
import functools
import math

import pytest
import torch
from conftest import f64, ragged

import grpo
import gspo

pytestmark = pytest.mark.quick

LEVELS = ("sequence", "sequence_token")
CLIPPING = ("grpo", "bnpo", "dr_grpo", "dapo")          # the loss types with eq. (3)
LOSS_TYPES = (*CLIPPING, "cispo", "sapo")
close = functools.partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)
golden = functools.partial(torch.testing.assert_close, atol=6e-8, rtol=0)   # written with 7 digits
every_level = pytest.mark.parametrize("level", LEVELS)
every_loss_type = pytest.mark.parametrize("loss_type", LOSS_TYPES)


def loss_and_gradient(logps, old_logps, A, mask, **options):
    """The loss of eq. (5) without KL and entropy, and its gradient in the log-probs."""
    logps = logps.clone().requires_grad_()
    token_loss = gspo.policy_loss(logps, old_logps, A, mask, **options)
    loss = gspo.aggregate(token_loss, mask, "sequence_mean")
    return loss.item(), torch.autograd.grad(loss, logps)[0]


def one_row(log_rhos, A, **options):
    """Loss and gradient of one answer with these log ratios of its tokens, each of log-prob -0.5.
    """
    logps = f64([[-0.5] * len(log_rhos)])
    old_logps = logps - f64([log_rhos])
    return loss_and_gradient(logps, old_logps, f64([A]), torch.ones_like(logps), **options)


# ---- the ratio of a sequence -----------------------------------------------------------------

@every_level
def test_the_ratio_of_an_answer_is_the_geometric_mean_of_the_ratios_of_its_tokens(level):
    log_rho = f64([[0.1, -0.1, 0.3]])
    log_s = gspo.log_ratio(log_rho, 0 * log_rho, torch.ones_like(log_rho), level)
    golden(log_s.exp(), f64([[1.1051709] * 3]))

    logps, old_logps, _, mask = ragged()
    log_s = gspo.log_ratio(logps, old_logps, mask, level)
    for row in range(3):
        is_token = mask[row] == 1
        length = int(is_token.sum())
        probability = logps[row, is_token].sum().exp()
        old_probability = old_logps[row, is_token].sum().exp()
        s = (probability / old_probability) ** (1 / length)
        close(log_s[row, is_token].exp(), s.expand(length))


@every_level
def test_a_sequence_twice_in_a_row_has_the_ratio_that_it_has_once(level):
    once = f64([[0.1, -0.1, 0.3]])
    twice = torch.cat([once, once], dim=1)
    log_s_of_once = gspo.log_ratio(once, 0 * once, torch.ones_like(once), level)
    log_s_of_twice = gspo.log_ratio(twice, 0 * twice, torch.ones_like(twice), level)
    close(log_s_of_twice[0, 0], log_s_of_once[0, 0])


@every_level
@every_loss_type
def test_on_fresh_samples_the_ratio_is_exactly_one_and_the_gradient_is_that_of_reinforce(
        loss_type, level):
    logps, _, A, mask = ragged()
    logps.requires_grad_()
    ratio = gspo.log_ratio(logps, logps, mask, level).exp()
    assert (ratio == 1).all()
    assert ratio.requires_grad
    loss = gspo.policy_loss(logps, logps, A, mask, loss_type, level=level)
    gradient = torch.autograd.grad(loss.sum(), logps)[0]
    close(gradient, -A[:, None] * mask)
    if loss_type in CLIPPING:                           # the others have another value at s = 1
        close(loss.detach(), -A[:, None] * mask)


def test_each_token_changes_the_ratio_of_the_sequence_by_its_share_of_the_length():
    loss, gradient = one_row((0.1, -0.1, 0.3), 1.0)
    golden(loss, -1.1051709)
    golden(gradient, f64([[-0.3683903] * 3]))


@every_level
@every_loss_type
def test_the_old_policy_gets_no_gradient(loss_type, level):
    logps, old_logps, A, mask = ragged()
    logps.requires_grad_()
    old_logps.requires_grad_()
    gspo.policy_loss(logps, old_logps, A, mask, loss_type, level=level).sum().backward()
    assert old_logps.grad is None
    assert logps.grad.abs().sum() > 0


# ---- one clip for a whole answer -------------------------------------------------------------

@every_level
@pytest.mark.parametrize("A, s, value, has_gradient", [
    (2, 0.85, -1.7, True),
    (2, 1.25, -2.5, True),
    (2, 1.35, -2.6, False),
    (-2, 0.85, 1.8, False),
    (-2, 1.25, 2.5, True),
    (-2, 1.35, 2.7, True)])
def test_an_answer_is_clipped_as_a_whole_and_only_beyond_the_bound_that_the_advantage_pushes_to(
        level, A, s, value, has_gradient):
    log_rhos = [math.log(s) + offset for offset in (1.0, -1.0, 0.25, -0.25)]    # all far from s
    loss, gradient = one_row(log_rhos, float(A), epsilon=0.1, epsilon_high=0.3, level=level)
    close(loss, value)
    close(gradient, f64([[-A * s * has_gradient / 4] * 4]))
    log_s = gspo.log_ratio(f64([log_rhos]), torch.zeros(1, 4), torch.ones(1, 4), level)
    clipped = gspo.is_clipped(log_s, f64([[A]]), epsilon=0.1, epsilon_high=0.3)
    assert clipped.tolist() == [[not has_gradient] * 4]


@pytest.mark.parametrize("A, s, has_gradient", [
    (1.0, 1.19, True),
    (1.0, 1.21, False),
    (-1.0, 0.81, True),
    (-1.0, 0.79, False)])
def test_the_clip_range_is_that_of_grpo_unless_one_is_given(A, s, has_gradient):
    _, gradient = one_row([math.log(s)], A)
    assert (gradient != 0).all() == has_gradient


@every_level
def test_the_clip_of_one_row_does_not_depend_on_another(level):
    logps = f64([[-1.0, -1.0], [-1.0, -1.0]])
    old_logps = logps - f64([[0.0, 0.0], [0.5, 0.5]])
    _, gradient = loss_and_gradient(
        logps, old_logps, f64([1.0, 1.0]), torch.ones(2, 2), level=level)
    close(gradient, f64([[-0.25, -0.25], [0, 0]]))


@pytest.mark.parametrize("s, A, weight", [
    (1.5, 2.0, 1.2),
    (1.5, -2.0, 1.2),
    (0.5, 2.0, 0.5)])
def test_cispo_bounds_the_weight_of_an_answer_above_and_keeps_its_gradient(s, A, weight):
    log_rhos = [math.log(s) + 0.3, math.log(s) - 0.3]
    loss, gradient = one_row(log_rhos, A, loss_type="cispo")
    close(loss, weight * A * 0.5)                       # log pi is -0.5
    close(gradient, f64([[-weight * A / 2] * 2]))


@every_level
@pytest.mark.parametrize("A, s, gate, weight", [
    (1, 0.5, 1.5101627, 0.4700074),
    (1, 1.0, 2.0, 1.0),
    (1, 1.5, 2.4898373, 1.4100223),
    (-1, 2.0, 2.8219996, 1.5362196)])
def test_sapo_is_a_soft_gate_of_a_whole_answer(level, A, s, gate, weight):
    log_rhos = [math.log(s) + 0.3, math.log(s) - 0.3]
    loss, gradient = one_row(log_rhos, float(A), loss_type="sapo", level=level)
    golden(loss, -gate * A)
    golden(gradient, f64([[-weight * A / 2] * 2]))


# ---- GSPO-token ------------------------------------------------------------------------------

@every_loss_type
@pytest.mark.parametrize("epsilon", [0.2, 0.01])        # the second clips the first row
def test_both_levels_are_the_same_while_the_advantage_is_constant_over_an_answer(
        epsilon, loss_type):
    logps, old_logps, A, mask = ragged()
    results = []
    for level in LEVELS:
        results.append(loss_and_gradient(
            logps, old_logps, A, mask, loss_type=loss_type,
            epsilon=epsilon, epsilon_high=epsilon, level=level))
    close(results[0], results[1])


def test_gspo_token_gives_each_token_its_own_advantage_and_gspo_gives_it_their_mean():
    logps = f64([[-0.5, -0.5, -0.5]])
    old_logps = logps - f64([[0.1, -0.1, 0.3]])
    A = f64([[3.0, -1.5, 0.9]])                         # their mean is 0.8
    mask = torch.ones(1, 3)
    s = math.exp(0.1)
    loss, gradient = loss_and_gradient(logps, old_logps, A, mask, level="sequence")
    close(loss, -s * 0.8)
    close(gradient, f64([[-s * 0.8 / 3] * 3]))
    loss, gradient = loss_and_gradient(logps, old_logps, A, mask, level="sequence_token")
    close(loss, -s * 0.8)
    close(gradient, -s * A / 3)


def test_gspo_token_clips_by_the_ratio_of_the_answer_and_the_sign_of_the_tokens_advantage():
    logps = f64([[-0.5, -0.5]])
    old_logps = logps - f64([[0.8, -0.2]])              # s = exp(0.3) > 1.2
    A = f64([[1.0, -1.0]])
    _, gradient = loss_and_gradient(
        logps, old_logps, A, torch.ones(1, 2), level="sequence_token")
    close(gradient, f64([[0, math.exp(0.3) / 2]]))


# ---- masks, shapes, arguments ----------------------------------------------------------------

@every_level
@every_loss_type
def test_masked_slots_contribute_nothing_even_if_they_hold_wild_values(loss_type, level):
    options = {"loss_type": loss_type, "level": level}
    logps, old_logps, A, mask = ragged()
    is_masked = mask == 0
    loss, gradient = loss_and_gradient(logps, old_logps, A, mask, **options)
    assert gradient.isfinite().all()
    assert (gradient[is_masked] == 0).all()
    assert gradient.any()

    wild_logps = torch.where(is_masked, f64([[-1e30, 1e30, -1e4, 1e4]]), logps)
    wild_old_logps = torch.where(is_masked, f64([[1e30, 1e30, 1e4, -1e4]]), old_logps)
    wild_A = torch.where(is_masked, 1e6, A[:, None].expand(3, 4))
    for advantages in (A, wild_A):
        same_loss, same_gradient = loss_and_gradient(
            wild_logps, wild_old_logps, advantages, mask, **options)
        assert same_loss == loss
        assert torch.equal(same_gradient, gradient)
    token_loss = gspo.policy_loss(wild_logps, wild_old_logps, wild_A, mask, **options)
    assert (token_loss[is_masked] == 0).all()
    log_s = gspo.log_ratio(wild_logps, wild_old_logps, mask, level)
    assert (log_s[is_masked] == 0).all()


@every_level
@every_loss_type
def test_a_row_without_tokens_has_no_loss_and_no_gradient_but_counts_as_a_row(loss_type, level):
    options = {"loss_type": loss_type, "level": level}
    logps, old_logps, A, mask = ragged()
    mask[0] = 0
    loss, gradient = loss_and_gradient(logps, old_logps, A, mask, **options)
    loss_of_rest, gradient_of_rest = loss_and_gradient(
        logps[1:], old_logps[1:], A[1:], mask[1:], **options)
    close(loss, loss_of_rest * 2 / 3)
    close(gradient[0], f64([0, 0, 0, 0]))
    close(gradient[1:], gradient_of_rest * 2 / 3)


@every_level
@every_loss_type
def test_an_advantage_of_a_row_is_that_of_each_of_its_tokens(loss_type, level):
    logps, old_logps, A, mask = ragged()
    loss = gspo.policy_loss(logps, old_logps, A, mask, loss_type, level=level)
    token_A = A[:, None].expand(3, 4)
    close(gspo.policy_loss(logps, old_logps, token_A, mask, loss_type, level=level), loss)


@every_level
@every_loss_type
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_shapes_and_types_are_those_of_the_log_probs_and_no_argument_is_changed(
        dtype, loss_type, level):
    arguments = [x.to(dtype) for x in ragged()]
    before = [x.clone() for x in arguments]
    logps, old_logps, A, mask = arguments
    log_s = gspo.log_ratio(logps, old_logps, mask, level)
    loss = gspo.policy_loss(logps, old_logps, A, mask, loss_type, level=level)
    clipped = gspo.is_clipped(log_s, A[:, None], 3e-4, 4e-4)
    for result in (log_s, loss):
        assert result.shape == (3, 4)
        assert result.dtype == dtype
    assert clipped.shape == (3, 4)
    for argument, copy in zip(arguments, before):
        assert torch.equal(argument, copy)


def test_the_level_of_the_loss_is_the_sequence_unless_one_is_given():
    logps, old_logps, _, mask = ragged()
    A = f64([[1, -1, 0.5, 2]]) * mask
    _, gradient = loss_and_gradient(logps, old_logps, A, mask)
    _, by_sequence = loss_and_gradient(logps, old_logps, A, mask, level="sequence")
    _, by_token = loss_and_gradient(logps, old_logps, A, mask, level="sequence_token")
    close(gradient, by_sequence)
    assert not torch.allclose(gradient, by_token)


def test_the_level_of_the_ratio_is_the_sequence_unless_one_is_given():
    logps, old_logps, _, mask = ragged()
    logps.requires_grad_()
    log_s = gspo.log_ratio(logps, old_logps, mask)[1, 0]
    log_s_of_sequence = gspo.log_ratio(logps, old_logps, mask, "sequence")[1, 0]
    close(torch.autograd.grad(log_s, logps)[0], torch.autograd.grad(log_s_of_sequence, logps)[0])
    log_s_of_token = gspo.log_ratio(logps, old_logps, mask, "sequence_token")[1, 0]
    gradient_of_token = torch.autograd.grad(log_s_of_token, logps)[0]
    close(gradient_of_token[1], f64([1, 0, 0, 0]))


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "mean", "none"])
def test_group_advantages_are_those_of_grpo(scale_rewards):
    rewards = f64([[0, 0, 1, 0], [1, 1, 0, 1], [0.1, 0.1, 0.1, 0.1]])
    close(gspo.advantages(rewards, scale_rewards), grpo.advantages(rewards, scale_rewards))


def test_the_overlong_penalty_is_that_of_grpo():
    lengths = torch.arange(41)
    close(gspo.overlong_penalty(lengths, 40, 10), grpo.overlong_penalty(lengths, 40, 10))


@pytest.mark.parametrize("script", [grpo, gspo], ids=["grpo", "gspo"])
@pytest.mark.parametrize("buffer, last", [(0, [0.0]), (1, [-1.0]), (2, [-0.5, -1.0])])
def test_the_overlong_penalty_of_a_short_buffer(script, buffer, last):
    penalties = script.overlong_penalty(torch.arange(41), 40, buffer).tolist()
    assert penalties == [0.0] * (41 - len(last)) + last
