"""The algorithm of gspo.py: one ratio for a whole answer, against numbers worked out by hand."""
import functools
import math

import pytest
import torch
from conftest import f64, ragged

import grpo
import gspo

LEVELS = ("sequence", "sequence_token")
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")
close = functools.partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)
golden = functools.partial(torch.testing.assert_close, atol=6e-8, rtol=0)      # numbers written with 7 digits


def loss_and_gradient(logps, old_logps, A, mask, **options):
    """The averaged loss of eq. (5), and its gradient in the log-probs."""
    logps = logps.clone().requires_grad_()
    loss = gspo.aggregate(gspo.policy_loss(logps, old_logps, A, mask, **options), mask, "sequence_mean")
    return loss.item(), torch.autograd.grad(loss, logps)[0]


def one_row(log_rhos, A, **options):
    """Loss and gradient of one answer whose tokens' log ratios are as given."""
    logps = f64([[-0.5] * len(log_rhos)])
    return loss_and_gradient(logps, logps - f64([log_rhos]), f64([A]), torch.ones_like(logps), **options)


# ---- the ratio of a sequence -------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_the_ratio_of_an_answer_is_the_geometric_mean_of_its_tokens_ratios(level):
    log_s = gspo.log_ratio(f64([[0.1, -0.1, 0.3]]), torch.zeros(1, 3).double(), torch.ones(1, 3), level)
    golden(log_s.exp(), f64([[1.1051709] * 3]))
    logps, old_logps, _, mask = ragged()
    for row in range(3):
        on = mask[row] == 1
        exact = (logps[row, on].sum().exp() / old_logps[row, on].sum().exp()) ** (1 / int(on.sum()))
        close(gspo.log_ratio(logps, old_logps, mask, level)[row, on].exp(), exact.expand(int(on.sum())))


@pytest.mark.parametrize("level", LEVELS)
def test_saying_everything_twice_leaves_the_ratio_as_it_is(level):
    once = f64([[0.1, -0.1, 0.3]])
    twice = torch.cat([once, once], 1)
    ratios = [gspo.log_ratio(x, 0 * x, torch.ones_like(x), level)[0, 0] for x in (once, twice)]
    close(ratios[1], ratios[0])


@pytest.mark.parametrize("level", LEVELS)
def test_on_fresh_samples_the_ratio_is_exactly_one_yet_the_gradient_is_that_of_reinforce(level):
    logps, _, A, mask = ragged()
    for loss_type in LOSS_TYPES:
        fresh = logps.clone().requires_grad_()
        ratio = gspo.log_ratio(fresh, fresh, mask, level).exp()
        assert (ratio == 1).all() and ratio.requires_grad
        loss = gspo.policy_loss(fresh, fresh, A, mask, loss_type, level=level)
        close(torch.autograd.grad(loss.sum(), fresh)[0], -A[:, None] * mask)
        if loss_type not in ("cispo", "sapo"):              # whose value at s = 1 is another
            close(loss.detach(), -A[:, None] * mask)


def test_each_token_pushes_the_sequence_ratio_by_its_share_of_the_length():
    loss, gradient = one_row((0.1, -0.1, 0.3), 1.0)
    golden(loss, -1.1051709)
    golden(gradient, f64([[-0.3683903] * 3]))


@pytest.mark.parametrize("level", LEVELS)
def test_the_old_policy_gets_no_gradient(level):
    logps, old_logps, A, mask = ragged()
    for loss_type in LOSS_TYPES:
        old, new = old_logps.clone().requires_grad_(), logps.clone().requires_grad_()
        gspo.policy_loss(new, old, A, mask, loss_type, level=level).sum().backward()
        assert old.grad is None and new.grad.abs().sum() > 0


# ---- one clip for a whole answer ---------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("A, s, value, live", [
    (2, 0.85, -1.7, True), (2, 1.25, -2.5, True), (2, 1.35, -2.6, False),
    (-2, 0.85, 1.8, False), (-2, 1.25, 2.5, True), (-2, 1.35, 2.7, True)])
def test_an_answer_is_clipped_as_a_whole_and_only_on_the_side_that_pays(level, A, s, value, live):
    log_rhos = [math.log(s) + spread for spread in (1.0, -1.0, 0.25, -0.25)]    # each token far from s
    loss, gradient = one_row(log_rhos, float(A), epsilon=0.1, epsilon_high=0.3, level=level)
    close(loss, value)
    close(gradient, f64([[-A * s * live / 4] * 4]))


def test_the_range_is_that_of_grpo_unless_one_is_given():
    for A, s, live in ((1, 1.19, True), (1, 1.21, False), (-1, 0.81, True), (-1, 0.79, False)):
        _, gradient = one_row([math.log(s)], float(A))
        assert (gradient != 0).all() == live


@pytest.mark.parametrize("level", LEVELS)
def test_rows_are_clipped_each_for_itself(level):
    logps, A, mask = f64([[-1.0, -1.0], [-1.0, -1.0]]), f64([1.0, 1.0]), torch.ones(2, 2)
    old_logps = logps - f64([[0.0, 0.0], [0.5, 0.5]])
    _, gradient = loss_and_gradient(logps, old_logps, A, mask, level=level)
    close(gradient, f64([[-0.25, -0.25], [0, 0]]))


def test_cispo_caps_the_weight_of_an_answer_and_keeps_its_gradient():
    for s, A, weight in ((1.5, 2.0, 1.2), (1.5, -2.0, 1.2), (0.5, 2.0, 0.5)):
        loss, gradient = one_row([math.log(s) + 0.3, math.log(s) - 0.3], A, loss_type="cispo")
        close(loss, weight * A * 0.5)                       # log pi is -.5
        close(gradient, f64([[-weight * A / 2] * 2]))


@pytest.mark.parametrize("A, s, f, weight", [
    (1, 0.5, 1.5101627, 0.4700074), (1, 1.0, 2.0, 1.0), (1, 1.5, 2.4898373, 1.4100223),
    (-1, 2.0, 2.8219996, 1.5362196)])
@pytest.mark.parametrize("level", LEVELS)
def test_sapo_gates_an_answer_softly(level, A, s, f, weight):
    loss, gradient = one_row([math.log(s) + 0.3, math.log(s) - 0.3], float(A), loss_type="sapo", level=level)
    golden(loss, -f * A)
    golden(gradient, f64([[-weight * A / 2] * 2]))


# ---- GSPO-token --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_by_token_or_by_sequence_is_the_same_while_the_advantage_is_constant_over_an_answer(loss_type):
    logps, old_logps, A, mask = ragged()
    for high in (0.2, 0.01):                                # the second clips the first row
        options = {"loss_type": loss_type, "epsilon": high, "epsilon_high": high}
        results = [loss_and_gradient(logps, old_logps, A, mask, level=level, **options) for level in LEVELS]
        close(results[0], results[1])


def test_with_an_advantage_per_token_each_token_answers_for_itself_or_for_their_mean():
    logps, mask = f64([[-0.5, -0.5, -0.5]]), torch.ones(1, 3)
    old_logps, A, s = logps - f64([[0.1, -0.1, 0.3]]), f64([[3.0, -1.5, 0.9]]), math.exp(0.1)
    loss, by_sequence = loss_and_gradient(logps, old_logps, A, mask, level="sequence")
    same_loss, by_token = loss_and_gradient(logps, old_logps, A, mask, level="sequence_token")
    close((loss, same_loss), (-s * 0.8, -s * 0.8))
    close(by_sequence, f64([[-s * 0.8 / 3] * 3]))
    close(by_token, -s * A / 3)


def test_gspo_token_clips_a_token_by_the_ratio_of_the_answer_and_the_sign_of_its_own_advantage():
    logps, mask = f64([[-0.5, -0.5]]), torch.ones(1, 2)
    A, old_logps = f64([[1.0, -1.0]]), logps - f64([[0.8, -0.2]])           # s = exp(.3) > 1.2
    _, gradient = loss_and_gradient(logps, old_logps, A, mask, level="sequence_token")
    close(gradient, f64([[0, math.exp(0.3) / 2]]))


# ---- masks, shapes, arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_masked_slots_contribute_nothing_even_if_they_hold_wild_values(loss_type, level):
    logps, old_logps, A, mask = ragged()
    wild = torch.where(mask == 0, f64([[-1e30, 1e30, -1e4, 1e4]]), logps)
    old_wild = torch.where(mask == 0, f64([[1e30, 1e30, 1e4, -1e4]]), old_logps)
    A_wild = torch.where(mask == 0, 1e6, A[:, None].expand(3, 4))
    options = {"loss_type": loss_type, "level": level}
    tame = loss_and_gradient(logps, old_logps, A, mask, **options)
    assert tame[1].isfinite().all() and (tame[1][mask == 0] == 0).all() and tame[1].any()
    close(loss_and_gradient(wild, old_wild, A, mask, **options), tame, atol=0, rtol=0)
    close(loss_and_gradient(wild, old_wild, A_wild, mask, **options), tame, atol=0, rtol=0)
    assert (gspo.policy_loss(wild, old_wild, A_wild, mask, **options)[mask == 0] == 0).all()
    assert (gspo.log_ratio(wild, old_wild, mask, level)[mask == 0] == 0).all()


@pytest.mark.parametrize("level", LEVELS)
def test_a_row_without_a_token_has_no_loss_and_no_gradient(level):
    logps, old_logps, A, mask = ragged()
    mask[0] = 0
    for loss_type in LOSS_TYPES:
        loss, gradient = loss_and_gradient(logps, old_logps, A, mask, loss_type=loss_type, level=level)
        rest, gradient_of_rest = loss_and_gradient(logps[1:], old_logps[1:], A[1:], mask[1:],
                                                   loss_type=loss_type, level=level)
        close(loss, rest * 2 / 3)                           # it counts as a row
        close(gradient, torch.cat([f64([[0, 0, 0, 0]]), gradient_of_rest * 2 / 3]))


@pytest.mark.parametrize("level", LEVELS)
def test_an_advantage_per_row_is_one_for_each_of_its_tokens(level):
    logps, old_logps, A, mask = ragged()
    for loss_type in LOSS_TYPES:
        losses = [gspo.policy_loss(logps, old_logps, advantages, mask, loss_type, level=level)
                  for advantages in (A, A[:, None].expand(3, 4))]
        close(losses[1], losses[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_shapes_and_types_are_those_of_the_log_probs_and_no_argument_is_changed(dtype):
    arguments = tuple(x.to(dtype) for x in ragged())
    before = tuple(x.clone() for x in arguments)
    logps, old_logps, A, mask = arguments
    for level in LEVELS:
        ratios = gspo.log_ratio(logps, old_logps, mask, level)
        losses = [gspo.policy_loss(*arguments, loss_type, level=level) for loss_type in LOSS_TYPES]
        assert all(x.shape == (3, 4) and x.dtype == dtype for x in (ratios, *losses))
    assert all(torch.equal(x, y) for x, y in zip(arguments, before))


def test_the_sequence_is_the_level_if_none_is_named():
    logps, old_logps, _, mask = ragged()
    A = f64([[1, -1, 0.5, 2]]) * mask
    x = logps.clone().requires_grad_()
    gradients = [torch.autograd.grad(gspo.policy_loss(x, old_logps, A, mask, **level).sum(), x)[0]
                 for level in ({}, {"level": "sequence"}, {"level": "sequence_token"})]
    close(gradients[0], gradients[1])
    assert not torch.allclose(gradients[0], gradients[2])
    x = logps.clone().requires_grad_()
    ratios = [gspo.log_ratio(x, old_logps, mask, *level)[1, 0] for level in ((), ("sequence",))]
    close(*(torch.autograd.grad(ratio, x)[0] for ratio in ratios))


def test_group_advantages_and_the_overlong_penalty_are_those_of_grpo():
    rewards = f64([[0, 0, 1, 0], [1, 1, 0, 1], [0.1, 0.1, 0.1, 0.1]])
    for scale_rewards in ("group", "batch", "none"):
        close(gspo.advantages(rewards, scale_rewards), grpo.advantages(rewards, scale_rewards))
    lengths = torch.arange(41)
    close(gspo.overlong_penalty(lengths, 40, 10), grpo.overlong_penalty(lengths, 40, 10))
    for script in (grpo, gspo):
        assert script.overlong_penalty(lengths, 40, 1).tolist() == [0.0] * 40 + [-1.0]
        assert script.overlong_penalty(lengths, 40, 2).tolist() == [0.0] * 39 + [-0.5, -1.0]
        assert script.overlong_penalty(lengths, 40, 0).tolist() == [0.0] * 41       # without a buffer
