"""The algorithms of grpo.py and gspo.py, compared with golden numbers and other definitions.
test_family.py tests what all scripts have in common, and test_kl.py tests the KL."""
import math

import pytest
import torch
from conftest import close, f64, golden, ragged

import grpo
import gspo

pytestmark = pytest.mark.quick



def one_token(ratio, A, log_pi=-1.0, **options):
    """Compute loss and gradient of one token with probability exp(log_pi). -> two floats"""
    logps = f64([[log_pi]]).requires_grad_()
    old_logps = f64([[log_pi - math.log(ratio)]])
    loss = grpo.policy_loss(logps, old_logps, f64([A]), torch.ones_like(logps), **options)
    return loss.item(), torch.autograd.grad(loss.sum(), logps)[0].item()


# ---- advantages ------------------------------------------------------------------------------

@pytest.mark.parametrize("rewards, options, expected", [
    ([0, 0, 1, 0], {}, [-0.4999, -0.4999, 1.4997, -0.4999]),
    ([0, 0, 1, 0], {"eps": 0.0}, [-0.5, -0.5, 1.5, -0.5]),
    ([0, 0, 1, 0], {"scale_rewards": "none"}, [-0.25, -0.25, 0.75, -0.25]),
    ([0, 0, 1, 0], {"scale_rewards": "mean"}, [-1, -1, 3, -1]),
    ([0.5, 0, 0, 0.5], {"scale_rewards": "mean"}, [1, -1, -1, 1]),
    ([1, 1, 0, 1, 0], {}, [0.7301634, 0.7301634, -1.0952452, 0.7301634, -1.0952452]),   # ddof is 1
    ([0.50, 0.51, 0.50, 0.51], {}, [-0.851, 0.851, -0.851, 0.851]),     # a small spread
    ([-1, 0, 0, 0], {"scale_rewards": "mean"}, [0, 0, 0, 0]),   # a mean below 0 would flip signs
    ([-0.5, 0.5, 0, 0], {"scale_rewards": "mean"}, [0, 0, 0, 0])], ids=str)
def test_advantages_of_a_group(rewards, options, expected):
    decimals = max(len(str(x).partition(".")[2]) for x in expected)
    atol = 0.6 * 10.0 ** -decimals if decimals > 2 else 1e-12       # up to 2 decimals: exact
    found = grpo.advantages(f64([rewards]), **options)
    torch.testing.assert_close(found, f64([expected]), atol=atol, rtol=0)


@pytest.mark.parametrize("buffer, expected", [
    (10, [0, 0, 0, -0.1, -0.5, -0.9, -1, -1]), (2, [0, 0, 0, 0, 0, -0.5, -1, -1]),
    (1, [0, 0, 0, 0, 0, 0, -1, -1]), (0, [0, 0, 0, 0, 0, 0, 0, 0])])
def test_the_overlong_penalty_is_a_ramp_over_the_buffer(buffer, expected):
    lengths = torch.tensor([0, 29, 30, 31, 35, 39, 40, 41]).view(2, 4)
    if buffer == 0:
        lengths = lengths.clamp(max=40)                 # no completion is longer
    found = grpo.overlong_penalty(lengths.double(), 40, buffer)
    close(found, f64(expected).view(2, 4))
    assert grpo.overlong_penalty(lengths, 40, buffer).shape == (2, 4)


# ---- ratio and surrogates --------------------------------------------------------------------

WIDE = {"epsilon": 0.2, "epsilon_high": 0.28, "delta": 3.0}


@pytest.mark.parametrize("ratio, A, options, objective, gradient", [
    (0.5, -10, {}, -8.0, 0.0),
    (1.5, 1, {}, 1.2, 0.0),
    (0.5, -1, {}, -0.8, 0.0),
    (1.5, -1, {}, -1.5, -1.5),
    (0.5, 1, {}, 0.5, 0.5),
    (100, -1, {}, -100, -100),              # no upper bound for A < 0
    (4, -1, WIDE, -3, 0),
    (4, -2, WIDE, -6, 0),
    (2.5, -1, WIDE, -2.5, -2.5),
    (0.5, -1, WIDE, -0.8, 0),
    (4, 1, WIDE, 1.28, 0)], ids=str)
def test_the_clipped_objective_and_its_gradient(ratio, A, options, objective, gradient):
    close(one_token(ratio, A, **options), (-float(objective), -float(gradient)))


def test_tokens_count_as_clipped_exactly_where_the_range_stops_the_gradient():
    log_rho = torch.linspace(-0.5, 0.5, 41).double().expand(3, -1)              # (3, 41)
    A = f64([1.5, -2.0, 0.0])
    logps = torch.full_like(log_rho, -1.0).requires_grad_()
    loss = grpo.policy_loss(
        logps, logps.detach() - log_rho, A, torch.ones_like(logps), epsilon=0.2, epsilon_high=0.28)
    gradient = torch.autograd.grad(loss.sum(), logps)[0]
    clipped = grpo.is_clipped(log_rho, A[:, None], 0.2, 0.28)
    assert torch.equal(clipped[:2], gradient[:2] == 0)
    assert clipped.any(dim=1).tolist() == [True, True, False]


def test_cispo_bounds_the_weight_of_a_token_above_only_and_never_stops_its_gradient():
    golden(one_token(1.5, 2.0, math.log(0.6), loss_type="cispo"), (1.2259815, -2.4))
    close(one_token(1.5, -2.0, loss_type="cispo", epsilon_high=0.3), (-2.6, 2.6))
    close(one_token(0.01, 2.0, loss_type="cispo"), (0.02, -0.02))


@pytest.mark.parametrize("A, ratio, gate, weight", [
    (1, 0.5, 1.5101627, 0.4700074),
    (1, 1.0, 2.0, 1.0),
    (1, 1.5, 2.4898373, 1.4100223),
    (-1, 2.0, 2.8219996, 1.5362196)])
def test_sapo_is_a_soft_gate_with_a_higher_temperature_where_the_advantage_is_negative(
        A, ratio, gate, weight):
    golden(one_token(ratio, A, loss_type="sapo"), (-gate * A, -weight * A))


# ---- gspo.py: one ratio for a whole answer ---------------------------------------------------

LEVELS = ("sequence", "sequence_token")
every_level = pytest.mark.parametrize("level", LEVELS)


def one_row(log_rhos, A, **options):
    """Average the loss of one answer over its tokens, which have these log ratios and a log-prob of
    -0.5. -> loss, gradient (1, T)"""
    logps = f64([[-0.5] * len(log_rhos)]).requires_grad_()
    A = f64([A])
    token_loss = gspo.policy_loss(
        logps, logps.detach() - f64([log_rhos]), A, torch.ones_like(logps), **options)
    return token_loss.mean().item(), torch.autograd.grad(token_loss.mean(), logps)[0]


@every_level
def test_the_ratio_of_an_answer_is_the_geometric_mean_of_the_ratios_of_its_tokens(level):
    log_rho = f64([[0.1, -0.1, 0.3]])
    log_s = gspo.log_ratio(log_rho, 0 * log_rho, torch.ones_like(log_rho), level)
    golden(log_s.exp(), f64([[1.1051709] * 3]))
    twice = torch.cat([log_rho, log_rho], dim=1)        # the length does not matter
    close(gspo.log_ratio(twice, 0 * twice, torch.ones_like(twice), level)[0, 0], log_s[0, 0])

    logps, old_logps, _, mask = ragged()
    log_s = gspo.log_ratio(logps, old_logps, mask, level)
    assert (log_s[mask == 0] == 0).all()
    for row in range(3):
        is_token = mask[row] == 1
        s = (logps[row, is_token].sum().exp() / old_logps[row, is_token].sum().exp()) ** (
            1 / mask[row].sum())
        close(log_s[row, is_token].exp(), s.expand(int(mask[row].sum())))


def test_each_token_changes_the_ratio_of_the_sequence_by_its_share_of_the_length():
    loss, gradient = one_row((0.1, -0.1, 0.3), 1.0)
    golden(loss, -1.1051709)
    golden(gradient, f64([[-0.3683903] * 3]))


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
    log_rhos = [math.log(s) + offset for offset in (1.0, -1.0, 0.25, -0.25)]    # none is near s
    loss, gradient = one_row(log_rhos, float(A), epsilon=0.1, epsilon_high=0.3, level=level)
    close(loss, value)
    close(gradient, f64([[-A * s * has_gradient / 4] * 4]))
    log_s = gspo.log_ratio(f64([log_rhos]), torch.zeros(1, 4), torch.ones(1, 4), level)
    clipped = gspo.is_clipped(log_s, f64([[A]]), epsilon=0.1, epsilon_high=0.3)
    assert clipped.tolist() == [[not has_gradient] * 4]


def test_gspo_token_gives_each_token_its_own_advantage_and_gspo_gives_it_their_mean():
    A = [3.0, -1.5, 0.9]                                # their mean is 0.8
    s = math.exp(0.1)
    for level, shares in (("sequence", [0.8] * 3), ("sequence_token", A)):
        loss, gradient = one_row((0.1, -0.1, 0.3), A, level=level)
        close(loss, -s * 0.8)
        close(gradient, -s * f64([shares]) / 3)


def test_gspo_token_clips_by_the_ratio_of_the_answer_and_the_sign_of_the_tokens_advantage():
    _, gradient = one_row((0.8, -0.2), [1.0, -1.0], level="sequence_token")     # s is exp(0.3)
    close(gradient, f64([[0, math.exp(0.3) / 2]]))
