"""lab/gae.py: advantages against exact ones, in a world so small that all walks are enumerated."""
import copy

import pytest
import torch
from conftest import f64

from lab import gae
from lab.entry import CONTRADICTED, NOT_SHOWN, SHOWN
from tasks import gridworld

STEPS = gae.all_walks("A b3 3")
NOISE = torch.randn(500, generator=torch.Generator().manual_seed(0)).double()


def test_the_walks_are_all_that_may_happen():
    chance, rewards, mask, V, A, moments, _ = STEPS
    assert chance[:, 0].sum() == pytest.approx(1)
    V_exact, _ = gridworld.values("A b3 3", gae.SLIP, gae.uniform)
    assert chance[:, 0] @ rewards.sum(dim=1) == pytest.approx(V_exact[0]["b3"])
    assert (V[:, 0] == V_exact[0]["b3"]).all()
    for moment in moments[mask > 0].unique():
        here = (moments == moment) & (mask > 0)
        assert (chance[here] @ A[here]).abs() < 1e-9        # better and worse moves balance


def test_an_exact_critic_has_no_bias_and_least_error_at_lambda_zero():
    errors = [gae.gae_errors(STEPS, 0 * NOISE, lam) for lam in (0.0, 0.5, 1.0)]
    assert all(bias < 1e-20 for _, bias in errors)
    assert errors[0] < errors[1] < errors[2]


def test_a_critic_that_errs_has_bias_but_not_at_lambda_one():
    biases = [gae.gae_errors(STEPS, NOISE, lam)[1] for lam in (0.0, 0.5, 1.0)]
    assert biases[0] > biases[1] > 0.01 and biases[2] < 1e-20


def test_at_lambda_one_an_error_that_is_the_same_everywhere_adds_its_square():
    without, _ = gae.gae_errors(STEPS, 0 * NOISE, 1.0)
    error, _ = gae.gae_errors(STEPS, 0 * NOISE + 3, 1.0)
    assert error == pytest.approx(without + 9)


def test_squared_error_and_bias_of_two_moves_are_as_by_hand():
    """At moment 0, move 1 leads to moment 3, where the critic errs by 2, and move 2 to an end. The
    first has an error of 2, of which half is bias, the second of 0; the error at moment 3 is -2,
    the same for all moves there."""
    columns = [[[0.5, 0.5], [0.5, 0]], [[1, 1], [1, 0]], [[1, 1], [1, 0]],
               [[1.5, 1], [1.5, 0]], [[0.5, 0], [-0.5, 0]], [[0, 3], [0, 0]], [[1, 4], [2, 0]]]
    noise = f64([0, 0, 0, 2, 0])
    error, bias = gae.gae_errors(f64(columns), noise, 0.0)
    assert error == pytest.approx((0.5 * 4 + 0 + 0.5 * 4) / 1.5)
    assert bias == pytest.approx((0.5 + 0.5 + 0) / 1.5)


# ---- what is shown ---------------------------------------------------------------------------

def curve(*errors):
    """Squared errors at lambda 0, at those between, and at 1."""
    first, between, last = errors
    return [[first, 1], *[[between, 0.5]] * 9, [last, 0]]


FOUND = {"seeds": [0, 1], "curves": {
    "0.0": [curve(0, 1, 2)] * 2, "0.5": [curve(1, 2, 3)] * 2,
    "1.0": [curve(2, 1, 3), curve(2, 1.5, 3)], "2.0": [curve(3, 2, 4)] * 2}}


def verdicts(found):
    return [claim.verdict for claim in gae.claims(found)]


def test_each_verdict_may_come_out_either_way():
    assert verdicts(FOUND) == [SHOWN, SHOWN, SHOWN]
    other = copy.deepcopy(FOUND)
    other["curves"]["1.0"][1] = curve(0.5, 1, 3)            # lambda 0 is best with this noise
    other["curves"]["0.0"][1] = curve(2, 1, 3)
    other["curves"]["2.0"] = [curve(1, 2, 3)] * 2
    assert verdicts(other) == [NOT_SHOWN, CONTRADICTED, NOT_SHOWN]


def test_the_best_lambda_has_the_least_error():
    assert gae.best_lambda([[3, 0]] * 3 + [[1, 0]] + [[2, 0]] * 7) == 0.3
