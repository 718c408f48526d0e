"""The algorithm of dpo.py: numbers worked out by hand, and what each loss makes of preferences whose
probabilities are known, by enumeration of all pairs."""
import functools
import itertools
import math

import pytest
import torch

import dpo

LOSS_TYPES = ("sigmoid", "ipo", "hinge")
close = functools.partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)
golden = functools.partial(torch.testing.assert_close, atol=6e-8, rtol=0)      # numbers written with 7 digits


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def gradient(loss, x):
    return torch.autograd.grad(loss.sum(), x, retain_graph=True)[0]


def of_margin(M, beta=0.1, **options):
    """Loss of one pair of margin M, and its gradients in the log-probs of chosen and rejected. -> 3 floats"""
    chosen, rejected = f64([M - 7.0]).requires_grad_(), f64([-5.0]).requires_grad_()
    loss = dpo.dpo_loss(chosen, rejected, f64([-6.0]), f64([-4.0]), beta, **options)
    return loss.item(), gradient(loss, chosen).item(), gradient(loss, rejected).item()


# ---- the loss of a pair ------------------------------------------------------------------------------------


def test_the_losses_of_a_margin_of_two():
    golden(of_margin(2.0), (0.5981389, -0.0450166, 0.0450166))
    golden(of_margin(2.0, label_smoothing=0.1)[0], 0.6181389)
    close(of_margin(2.0, loss_type="ipo"), (9.0, -6.0, 6.0))
    close(of_margin(2.0, loss_type="hinge"), (0.8, -0.1, 0.1))


def test_the_margin_is_how_much_further_the_chosen_rose_above_the_reference_than_the_rejected():
    draw = torch.Generator().manual_seed(0)
    chosen, rejected, ref_chosen, ref_rejected = torch.randn(4, 9, generator=draw).double()
    M = (chosen - ref_chosen) - (rejected - ref_rejected)
    for beta in (0.1, 2.0):
        pair = functools.partial(dpo.dpo_loss, chosen, rejected, ref_chosen, ref_rejected, beta)
        close(pair(), -(beta * M).sigmoid().log())          # "sigmoid" if none is named
        close(pair(loss_type="sigmoid"), pair())
        close(pair(loss_type="ipo"), (M - 1 / (2 * beta)) ** 2)
        close(pair(loss_type="hinge"), (1 - beta * M).clamp(min=0))


def test_a_policy_that_is_the_reference_pays_log_two_and_feels_half_of_beta_whatever_the_reference_prefers():
    for ref_chosen, ref_rejected in ((-1.0, -50.0), (-50.0, -1.0), (-3.0, -3.0)):
        chosen, rejected = f64([ref_chosen]).requires_grad_(), f64([ref_rejected]).requires_grad_()
        loss = dpo.dpo_loss(chosen, rejected, f64([ref_chosen]), f64([ref_rejected]), 0.1)
        golden(loss.item(), 0.6931472)
        close((gradient(loss, chosen).item(), gradient(loss, rejected).item()), (-0.05, 0.05))


def test_the_more_a_pair_is_ranked_wrongly_the_more_it_counts():
    weights = [-of_margin(M)[1] for M in (-30.0, -3.0, 0.0, 3.0, 30.0)]
    close(weights, [0.1 / (1 + math.exp(0.1 * M)) for M in (-30.0, -3.0, 0.0, 3.0, 30.0)])
    assert weights == sorted(weights, reverse=True)


@pytest.mark.parametrize("e", [0.0, 0.1, 0.5])
def test_label_smoothing_is_the_loss_with_labels_that_are_wrong_with_that_probability(e):
    for M in (-3.0, 0.0, 2.0):
        right, wrong = of_margin(M), of_margin(-M)
        close(of_margin(M, label_smoothing=e)[0], (1 - e) * right[0] + e * wrong[0])
        close(of_margin(M, label_smoothing=e)[1], (1 - e) * right[1] - e * wrong[1])


@pytest.mark.parametrize("e", [0.1, 0.3])
def test_with_wrong_labels_in_mind_the_margin_is_to_be_their_log_odds_and_no_larger(e):
    best = math.log((1 - e) / e) / 0.1
    slopes = [of_margin(M, label_smoothing=e)[1] for M in (best - 1, best, best + 1)]
    close(slopes[1], 0.0)
    assert slopes[0] < -1e-4 and slopes[2] > 1e-4
    assert of_margin(best + 1)[1] < 0                       # without smoothing there is no end to it


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_ipo_wants_a_margin_of_one_over_two_beta_and_no_larger(beta):
    best = 1 / (2 * beta)
    for off, loss, slope in ((-1, 1.0, -2.0), (0, 0.0, 0.0), (1, 1.0, 2.0)):
        close(of_margin(best + off, beta, loss_type="ipo")[:2], (loss, slope))


def test_the_hinge_is_straight_up_to_a_margin_of_one_over_beta_and_flat_from_there():
    for M, loss, slope in ((-5, 1.5, -0.1), (9.9, 0.01, -0.1), (10.1, 0.0, 0.0), (50, 0.0, 0.0)):
        close(of_margin(float(M), loss_type="hinge")[:2], (loss, slope))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_even_absurd_margins_have_finite_losses_and_gradients(dtype):
    for M, weight in ((1e5, 0.0), (-1e5, 1.0)):
        chosen = torch.tensor([M], dtype=dtype).requires_grad_()
        zero = torch.zeros(1, dtype=dtype)
        loss = dpo.dpo_loss(chosen, zero, zero, zero, 0.1)
        torch.testing.assert_close(loss.item(), 0.1 * abs(M) * weight)
        torch.testing.assert_close(gradient(loss, chosen).item(), -0.1 * weight)


# ---- what it makes of preferences --------------------------------------------------------------------------


REF, REWARDS, BETA = f64([0.5, 0.3, 0.2]), f64([1.0, 0.0, 0.0]), 0.5
PAIRS = torch.tensor(list(itertools.permutations(range(3), 2)))             # (6, 2): chosen, rejected
PREFERS = (REWARDS[PAIRS[:, 0]] - REWARDS[PAIRS[:, 1]]).sigmoid() / 3       # each pair shown equally often


def mean_loss(theta, pairs, weights, **options):
    """The loss averaged over pairs of answers of one token, of a policy with these logits."""
    one = torch.ones(len(pairs), 1).double()
    sums = [dpo.sequence_logps(logps[side][:, None], one) for logps in (theta.log_softmax(0), REF.log())
            for side in pairs.T]                            # chosen, rejected, and so by the reference
    return weights @ dpo.dpo_loss(*sums, BETA, **options)


def test_on_preferences_of_bradley_and_terry_the_optimum_is_that_of_the_reward_less_the_kl():
    close(PREFERS.sum().item(), 1.0)
    weights = REF * (REWARDS / BETA).exp()
    optimum = weights / weights.sum()
    golden(optimum, f64([0.8807971, 0.0715218, 0.0476812]))
    theta = optimum.log().requires_grad_()
    close(gradient(mean_loss(theta, PAIRS, PREFERS), theta), f64([0, 0, 0]))
    theta = REF.log().requires_grad_()
    assert gradient(mean_loss(theta, PAIRS, PREFERS), theta).abs().max() > 0.02
    for _ in range(400):
        theta.data -= 20 * gradient(mean_loss(theta, PAIRS, PREFERS), theta)
    golden(theta.detach().softmax(0), optimum)
    h = BETA * (theta.detach().log_softmax(0) - REF.log())  # the implicit reward, but for a constant
    close(h - h[1], REWARDS, atol=1e-6, rtol=0)


def test_how_often_a_pair_is_shown_does_not_move_the_optimum():
    theta = (REF * (REWARDS / BETA).exp()).log().requires_grad_()
    often = f64([1, 5, 1, 2, 5, 2]) / 16                    # (0, 1) (0, 2) (1, 0) (1, 2) (2, 0) (2, 1)
    close(gradient(mean_loss(theta, PAIRS, PREFERS * often), theta), f64([0, 0, 0]))


def test_from_certain_preferences_ipo_learns_a_bounded_margin():
    theta, pair = REF.log().requires_grad_(), torch.tensor([[0, 1]])
    for _ in range(200):
        theta.data -= 0.2 * gradient(mean_loss(theta, pair, f64([1.0]), loss_type="ipo"), theta)
    h = theta.detach().log_softmax(0) - REF.log()
    close((h[0] - h[1]).item(), 1 / (2 * BETA), atol=1e-9, rtol=0)


# ---- sequences ---------------------------------------------------------------------------------------------


def test_the_log_prob_of_an_answer_is_the_sum_over_its_own_tokens_however_wild_the_others():
    logps, mask = f64([[-1, -2, -4], [-8, -16, -32], [-64, 1, 1]]), f64([[1, 1, 1], [1, 0, 1], [0, 0, 0]])
    for wild in (0.0, 1e30, -1e30):
        given = torch.where(mask == 1, logps, wild).requires_grad_()
        sums = dpo.sequence_logps(given, mask)
        close(sums.detach(), f64([-7, -40, 0]), atol=0, rtol=0)
        close(gradient(sums, given), mask, atol=0, rtol=0)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_takes_sums_not_means_so_that_each_token_counts_the_same(loss_type):
    logps, mask = (-0.1 * torch.ones(2, 4).double()).requires_grad_(), f64([[1, 0, 0, 0], [1, 1, 1, 1]])
    chosen, rejected = dpo.sequence_logps(logps, mask)[:, None]
    loss = dpo.dpo_loss(chosen, rejected, f64([-0.2]), f64([-0.3]), 0.1, loss_type)
    slopes = gradient(loss, logps)
    close(slopes, slopes[0, 0] * f64([[1, 0, 0, 0], [-1, -1, -1, -1]]))
    M = (-0.1 + 0.2) - (-0.4 + 0.3)
    close(loss.item(), of_margin(M, loss_type=loss_type)[0])


# ---- shapes, arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_shapes_and_types_are_kept_and_no_argument_is_changed(dtype):
    draw = torch.Generator().manual_seed(0)
    logps, mask = -torch.rand(4, 3, generator=draw).to(dtype), torch.ones(4, 3).to(dtype)
    arguments = (logps, mask, *-torch.rand(4, 5, generator=draw).to(dtype))
    before = [x.clone() for x in arguments]
    sums = dpo.sequence_logps(logps, mask)
    assert sums.shape == (4,) and sums.dtype == dtype
    for loss_type in LOSS_TYPES:
        loss = dpo.dpo_loss(*arguments[2:], 0.1, loss_type)
        assert loss.shape == (5,) and loss.dtype == dtype
    loss = dpo.dpo_loss(*arguments[2:], beta=0.1, loss_type="sigmoid", label_smoothing=0.1)
    assert loss.shape == (5,) and loss.dtype == dtype
    assert all(torch.equal(x, y) for x, y in zip(arguments, before))
