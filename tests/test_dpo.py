"""The algorithm of dpo.py: numbers worked out by hand, and what each loss makes of preferences with
known probabilities, by enumeration of all pairs."""
import functools
import itertools
import math

import pytest
import torch
from conftest import f64

import dpo

pytestmark = pytest.mark.quick

LOSS_TYPES = ("sigmoid", "ipo", "hinge", "robust")          # those with a reference
close = functools.partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)
golden = functools.partial(torch.testing.assert_close, atol=6e-8, rtol=0)   # written with 7 digits


def gradient(loss, x):
    """The gradient of the sum of a loss, whose graph is kept."""
    return torch.autograd.grad(loss.sum(), x, retain_graph=True)[0]


def pair_with_margin(M, beta=0.1, **options):
    """The loss of a pair with this margin, and its gradients in the log-probs of the chosen and of
    the rejected completion. -> three floats"""
    chosen = f64([M - 7.0]).requires_grad_()
    rejected = f64([-5.0]).requires_grad_()
    loss = dpo.dpo_loss(chosen, rejected, f64([-6.0]), f64([-4.0]), beta, **options)
    return loss.item(), gradient(loss, chosen).item(), gradient(loss, rejected).item()


def loss_and_slope(M, beta=0.1, **options):
    """The loss of a pair with this margin, and its gradient in the margin. -> two floats"""
    loss, slope, _ = pair_with_margin(M, beta, **options)
    return loss, slope


# ---- the loss of a pair ----------------------------------------------------------------------

def test_the_losses_of_a_margin_of_two():
    golden(pair_with_margin(2.0), (0.5981389, -0.0450166, 0.0450166))
    golden(loss_and_slope(2.0, label_smoothing=0.1)[0], 0.6181389)
    close(pair_with_margin(2.0, loss_type="ipo"), (9.0, -6.0, 6.0))
    close(pair_with_margin(2.0, loss_type="hinge"), (0.8, -0.1, 0.1))


def test_the_losses_of_a_margin_of_seven_tenths():
    pair = (f64([-4.0]), f64([-5.0]), f64([-4.5]), f64([-4.8]), 0.1)
    golden(dpo.dpo_loss(*pair).item(), 0.658759555)
    golden(dpo.dpo_loss(*pair, label_smoothing=0.1).item(), 0.665759555)
    golden(dpo.dpo_loss(*pair, loss_type="robust", label_smoothing=0.1).item(), 0.650009555)
    golden(dpo.dpo_loss(*pair, loss_type="robust").item(), 0.658759555)


def test_the_loss_of_simpo_asks_for_a_margin_of_averages_and_has_no_reference():
    simpo = functools.partial(dpo.dpo_loss, f64([-0.4]), f64([-0.9]), beta=2.0, loss_type="simpo")
    zero = f64([0.0])
    golden(simpo(zero, zero, gamma=0.5).item(), 0.474076984)
    close(simpo(f64([-3.0]), f64([7.0]), gamma=0.5), simpo(zero, zero, gamma=0.5))
    close(simpo(zero, zero).item(), math.log(1 + math.exp(-1)))    # gamma is 0, if none is given


@pytest.mark.parametrize("e", [0.1, 0.3])
@pytest.mark.parametrize("M", [-3.0, 0.0, 2.0])
def test_the_robust_loss_of_pairs_of_which_some_are_mixed_up_is_on_average_that_of_true_pairs(M, e):
    true = loss_and_slope(M)
    loss, slope = loss_and_slope(M, loss_type="robust", label_smoothing=e)
    mixed_up_loss, mixed_up_slope = loss_and_slope(-M, loss_type="robust", label_smoothing=e)
    close(((1 - e) * loss + e * mixed_up_loss, (1 - e) * slope - e * mixed_up_slope), true)


def test_an_unknown_loss_is_refused():
    with pytest.raises(AssertionError, match="ippo"):
        loss_and_slope(1.0, loss_type="ippo")


@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_the_margin_is_how_much_further_the_chosen_one_rose_above_the_reference(beta):
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(4, 9, generator=generator).double()
    chosen, rejected, ref_chosen, ref_rejected = numbers
    M = (chosen - ref_chosen) - (rejected - ref_rejected)
    pair_loss = functools.partial(dpo.dpo_loss, *numbers, beta)
    close(pair_loss(), -(beta * M).sigmoid().log())             # "sigmoid", if none is named
    close(pair_loss(loss_type="sigmoid"), pair_loss())
    close(pair_loss(loss_type="ipo"), (M - 1 / (2 * beta)) ** 2)
    close(pair_loss(loss_type="hinge"), (1 - beta * M).clamp(min=0))


@pytest.mark.parametrize("ref_chosen, ref_rejected", [(-1.0, -50.0), (-50.0, -1.0), (-3.0, -3.0)])
def test_a_policy_that_is_the_reference_has_loss_log_two_and_gradient_half_beta_whatever_it_prefers(
        ref_chosen, ref_rejected):
    chosen = f64([ref_chosen]).requires_grad_()
    rejected = f64([ref_rejected]).requires_grad_()
    loss = dpo.dpo_loss(chosen, rejected, f64([ref_chosen]), f64([ref_rejected]), 0.1)
    golden(loss.item(), 0.6931472)
    close(gradient(loss, chosen).item(), -0.05)
    close(gradient(loss, rejected).item(), 0.05)


def test_the_more_a_pair_is_ranked_wrongly_the_larger_its_gradient():
    margins = (-30.0, -3.0, 0.0, 3.0, 30.0)
    weights = [-loss_and_slope(M)[1] for M in margins]
    close(weights, [0.1 / (1 + math.exp(0.1 * M)) for M in margins])
    assert weights == sorted(weights, reverse=True)


@pytest.mark.parametrize("e", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("M", [-3.0, 0.0, 2.0])
def test_label_smoothing_is_the_mean_over_labels_that_are_wrong_with_that_probability(M, e):
    loss, slope = loss_and_slope(M)
    mixed_up_loss, mixed_up_slope = loss_and_slope(-M)
    expected = ((1 - e) * loss + e * mixed_up_loss, (1 - e) * slope - e * mixed_up_slope)
    close(loss_and_slope(M, label_smoothing=e), expected)


@pytest.mark.parametrize("e", [0.1, 0.3])
def test_with_label_smoothing_the_best_margin_is_the_log_odds_of_the_labels_and_no_larger(e):
    best = math.log((1 - e) / e) / 0.1

    def slope(M, **options):
        return loss_and_slope(M, **options)[1]
    close(slope(best, label_smoothing=e), 0.0)
    assert slope(best - 1, label_smoothing=e) < -1e-4
    assert slope(best + 1, label_smoothing=e) > 1e-4
    assert slope(best + 1) < 0                                  # without it, there is no best one


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_the_best_margin_of_ipo_is_one_over_two_beta_and_no_larger(beta):
    best = 1 / (2 * beta)
    close(loss_and_slope(best - 1, beta, loss_type="ipo"), (1.0, -2.0))
    close(loss_and_slope(best, beta, loss_type="ipo"), (0.0, 0.0))
    close(loss_and_slope(best + 1, beta, loss_type="ipo"), (1.0, 2.0))


@pytest.mark.parametrize("M, loss, slope", [
    (-5.0, 1.5, -0.1),
    (9.9, 0.01, -0.1),
    (10.1, 0.0, 0.0),
    (50.0, 0.0, 0.0)])
def test_the_hinge_is_straight_up_to_a_margin_of_one_over_beta_and_flat_from_there(M, loss, slope):
    close(loss_and_slope(M, loss_type="hinge"), (loss, slope))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("M, weight", [(1e5, 0.0), (-1e5, 1.0)])
def test_even_absurd_margins_have_finite_losses_and_gradients(M, weight, dtype):
    chosen = torch.tensor([M], dtype=dtype).requires_grad_()
    zero = torch.zeros(1, dtype=dtype)
    loss = dpo.dpo_loss(chosen, zero, zero, zero, 0.1)
    torch.testing.assert_close(loss.item(), 0.1 * abs(M) * weight)
    torch.testing.assert_close(gradient(loss, chosen).item(), -0.1 * weight)


# ---- what it makes of preferences ------------------------------------------------------------

REF = f64([0.5, 0.3, 0.2])
REWARDS = f64([1.0, 0.0, 0.0])
BETA = 0.5
ALL_PAIRS = torch.tensor(list(itertools.permutations(range(3), 2)))     # (6, 2) chosen, rejected
MARGINS = REWARDS[ALL_PAIRS[:, 0]] - REWARDS[ALL_PAIRS[:, 1]]
PREFERENCES = MARGINS.sigmoid() / 3         # of Bradley and Terry, each pair shown equally often


def mean_loss(theta, pairs, weights, **options):
    """The weighted loss of pairs of answers of one token, by a policy with these logits."""
    mask = torch.ones(len(pairs), 1).double()

    def logps_of(log_pi, side):
        return dpo.sequence_logps(log_pi[pairs[:, side], None], mask)
    log_pi = theta.log_softmax(dim=0)
    losses = dpo.dpo_loss(
        logps_of(log_pi, 0), logps_of(log_pi, 1),
        logps_of(REF.log(), 0), logps_of(REF.log(), 1), BETA, **options)
    return weights @ losses


def optimum():
    """The policy with the highest expected reward less BETA times the KL to REF."""
    weights = REF * (REWARDS / BETA).exp()
    return weights / weights.sum()


def test_at_the_optimum_of_the_reward_less_the_kl_the_loss_has_no_gradient():
    close(PREFERENCES.sum().item(), 1.0)
    golden(optimum(), f64([0.8807971, 0.0715218, 0.0476812]))
    theta = optimum().log().requires_grad_()
    close(gradient(mean_loss(theta, ALL_PAIRS, PREFERENCES), theta), f64([0, 0, 0]))


def test_on_preferences_of_bradley_and_terry_the_optimum_is_learned_and_implies_the_reward():
    theta = REF.log().requires_grad_()
    assert gradient(mean_loss(theta, ALL_PAIRS, PREFERENCES), theta).abs().max() > 0.02
    for _ in range(400):
        theta.data -= 20 * gradient(mean_loss(theta, ALL_PAIRS, PREFERENCES), theta)
    log_pi = theta.detach().log_softmax(dim=0)
    golden(log_pi.exp(), optimum())
    implied = BETA * (log_pi - REF.log())                       # up to a constant
    close(implied - implied[1], REWARDS, atol=1e-6, rtol=0)


def test_how_often_a_pair_is_shown_does_not_move_the_optimum():
    theta = optimum().log().requires_grad_()
    often = f64([1, 5, 1, 2, 5, 2]) / 16            # of each of ALL_PAIRS as of its mirror image
    close(gradient(mean_loss(theta, ALL_PAIRS, PREFERENCES * often), theta), f64([0, 0, 0]))


def test_from_certain_preferences_ipo_learns_a_bounded_margin():
    theta = REF.log().requires_grad_()
    pair = torch.tensor([[0, 1]])
    for _ in range(200):
        theta.data -= 0.2 * gradient(mean_loss(theta, pair, f64([1.0]), loss_type="ipo"), theta)
    h = theta.detach().log_softmax(dim=0) - REF.log()
    close((h[0] - h[1]).item(), 1 / (2 * BETA), atol=1e-9, rtol=0)


# ---- sequences -------------------------------------------------------------------------------

@pytest.mark.parametrize("wild", [0.0, 1e30, -1e30])
def test_the_log_prob_of_a_completion_is_the_sum_over_its_own_tokens_however_wild_the_others(wild):
    logps = f64([[-1, -2, -4], [-8, -16, -32], [-64, 1, 1]])
    mask = f64([[1, 1, 1], [1, 0, 1], [0, 0, 0]])
    given = torch.where(mask == 1, logps, wild).requires_grad_()
    sums = dpo.sequence_logps(given, mask)
    close(sums.detach(), f64([-7, -40, 0]), atol=0, rtol=0)
    close(gradient(sums, given), mask, atol=0, rtol=0)


def test_an_average_log_prob_is_the_sum_over_its_own_tokens_divided_by_their_number():
    logps = f64([[-1, -2, -4], [-8, 1e30, -32], [-64, 1, 1]]).requires_grad_()
    mask = f64([[1, 1, 1], [1, 0, 1], [0, 0, 0]])
    means = dpo.sequence_logps(logps, mask, average=True)
    close(means.detach(), f64([-7 / 3, -20, 0]))
    close(gradient(means, logps), f64([[1 / 3] * 3, [1 / 2, 0, 1 / 2], [0, 0, 0]]))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_takes_sums_not_means_so_that_each_token_counts_the_same(loss_type):
    logps = (-0.1 * torch.ones(2, 4).double()).requires_grad_()
    mask = f64([[1, 0, 0, 0], [1, 1, 1, 1]])
    chosen, rejected = dpo.sequence_logps(logps, mask)[:, None]
    loss = dpo.dpo_loss(chosen, rejected, f64([-0.2]), f64([-0.3]), 0.1, loss_type)
    slopes = gradient(loss, logps)
    close(slopes, slopes[0, 0] * f64([[1, 0, 0, 0], [-1, -1, -1, -1]]))
    M = (-0.1 + 0.2) - (-0.4 + 0.3)
    close(loss.item(), loss_and_slope(M, loss_type=loss_type)[0])


# ---- shapes, arguments -----------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_shapes_and_types_are_kept_and_no_argument_is_changed(dtype):
    generator = torch.Generator().manual_seed(0)
    logps = -torch.rand(4, 3, generator=generator).to(dtype)
    mask = torch.ones(4, 3).to(dtype)
    pairs = list(-torch.rand(4, 5, generator=generator).to(dtype))
    arguments = [logps, mask, *pairs]
    before = [x.clone() for x in arguments]
    sums = dpo.sequence_logps(logps, mask)
    assert sums.shape == (4,)
    assert sums.dtype == dtype
    losses = [dpo.dpo_loss(*pairs, 0.1, loss_type) for loss_type in LOSS_TYPES]
    losses.append(dpo.dpo_loss(*pairs, 0.1, "simpo", gamma=0.5))
    losses.append(dpo.dpo_loss(*pairs, beta=0.1, loss_type="sigmoid", label_smoothing=0.1))
    for loss in losses:
        assert loss.shape == (5,)
        assert loss.dtype == dtype
    assert all(torch.equal(x, y) for x, y in zip(arguments, before))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_pairs_are_rows_of_the_batch_in_order_of_their_groups_and_rewards_stay(dtype):
    rewards = torch.tensor([[0, 2, 1, 3], [1, 0, 0, 0]], dtype=dtype)
    before = rewards.clone()
    chosen, rejected = dpo.preferences(rewards)
    assert chosen.tolist() == [3, 1, 4]
    assert rejected.tolist() == [0, 2, 7]
    assert torch.equal(rewards, before)
