"""The algorithm of gspo.py, one ratio for a whole answer, against numbers worked out by hand. What
it has in common with the other scripts is in test_family.py."""
import functools
import math

import pytest
import torch
from conftest import f64, ragged

import gspo

pytestmark = pytest.mark.quick

LEVELS = ("sequence", "sequence_token")
close = functools.partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)
golden = functools.partial(torch.testing.assert_close, atol=6e-8, rtol=0)   # written with 7 digits
every_level = pytest.mark.parametrize("level", LEVELS)


def one_row(log_rhos, A, **options):
    """Loss and gradient of one answer with these log ratios of its tokens, each of log-prob -0.5,
    averaged over its tokens."""
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
    log_rhos = [math.log(s) + offset for offset in (1.0, -1.0, 0.25, -0.25)]    # all far from s
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


def test_the_clip_range_of_a_run_is_a_hundred_times_that_of_the_paper():
    cfg = gspo.Config(device="cpu")
    assert (cfg.epsilon, cfg.epsilon_high) == (0.03, 0.04)
    assert cfg.importance_sampling_level == "sequence"
