"""The lab's experiment about the weight of a prompt."""
import itertools
import math
import types

import pytest
import torch

import grpo
from lab import std
from lab.entry import CONTRADICTED, NOT_SHOWN, SHOWN

# ---- exactly ---------------------------------------------------------------------------------

def all_outcomes(G, p):
    """All ways in which G outputs may be right or wrong. Yields rewards (1, G), chance"""
    for outcome in itertools.product([0.0, 1.0], repeat=G):
        right = sum(outcome)
        yield torch.tensor([outcome], dtype=torch.float64), p ** right * (1 - p) ** (G - right)


@pytest.mark.parametrize("scale", std.SCALES)
@pytest.mark.parametrize("p", [0.05, 0.3, 0.9])
def test_the_mean_gradient_of_a_prompt_is_its_weight_times_that_of_p(scale, p):
    gradient = 0.0
    for rewards, chance in all_outcomes(4, p):
        A = grpo.advantages(rewards, scale)
        slope = torch.where(rewards == 1, 1 / p, -1 / (1 - p))      # of the log-probability in p
        gradient += chance * (A * slope).mean().item()
    assert std.weight(p, 4, scale) == pytest.approx(gradient)


@pytest.mark.parametrize("scale", std.SCALES)
def test_the_mean_size_is_that_of_all_outcomes(scale):
    size = sum(chance * grpo.advantages(rewards, scale).abs().mean().item()
               for rewards, chance in all_outcomes(5, 0.2))
    assert std.mean_size(0.2, 5, scale) == pytest.approx(size)


def test_dividing_by_the_std_weighs_the_edges_more_and_the_larger_the_group_the_more():
    edges = [std.relative("group", G, 0.05) for G in std.SIZES]
    assert edges[0] > 1 and edges == sorted(edges)
    assert std.relative("group", 8, 0.95) == pytest.approx(std.relative("group", 8, 0.05))


def test_no_group_weighs_a_prompt_more_than_one_right_output_in_it_can():
    assert std.weight(1e-9, 8, "group") == pytest.approx(7 / math.sqrt(8), rel=1e-3)


def test_without_a_divisor_all_prompts_weigh_the_same():
    assert [std.weight(p, 8, "none") for p in (0.01, 0.5, 0.9)] == pytest.approx([7 / 8] * 3)


def test_the_two_limits_are_derivatives():
    h = 1e-6
    series = (lambda p: -sum((1 - p) ** k / k for k in range(1, 8)))
    arcsin = (lambda p: 2 * math.asin(math.sqrt(p)))
    for p in (0.1, 0.7):
        assert std.climbs_log(p, 8) == pytest.approx((series(p + h) - series(p - h)) / (2 * h))
        assert std.climbs_arcsin(p) == pytest.approx((arcsin(p + h) - arcsin(p - h)) / (2 * h))
        assert std.weight(p, 8, "mean") == pytest.approx(std.climbs_log(p, 8))


# ---- on samples ------------------------------------------------------------------------------

def test_the_pass_rate_is_that_of_other_outputs_than_the_advantages():
    n = 2 * std.GROUP
    seen = torch.tensor([[True] * n, [False] * n])
    others = torch.tensor([[True, False] * std.GROUP, [True] * n])
    [first, second] = std.prompts(torch.cat([seen, others], dim=1))
    assert first["rate"] == 1 and second["rate"] == 0
    assert first["none"] == 0.5 and second["none"] == 0


def test_the_policy_is_asked_before_training_and_at_the_named_steps(monkeypatch):
    done = []

    def training(script, cfg, task, policy):
        while True:
            done.append("step")
            yield
    sample = (lambda *_: types.SimpleNamespace(is_correct=len(done)))
    monkeypatch.setattr(std, "load_base", lambda *_: (grpo.Config(), None, None))
    monkeypatch.setattr(std, "training", training)
    monkeypatch.setattr(grpo, "sample_batch", sample)
    assert tuple(std.moments(0)) == std.MOMENTS


# ---- what was found --------------------------------------------------------------------------

def point(rate, group=1.0, none=1.0, mean=1.0):
    return {"rate": rate, "group": group, "none": none, "mean": mean}


def test_every_pass_rate_is_in_one_bin():
    for rate in (0, 0.05, 0.1, 0.3, 0.5, 0.9, 0.95, 1):
        members = [std.inside([point(rate)], low, high) for low, high in std.BINS]
        assert sorted(map(len, members)) == [0, 0, 0, 0, 1], rate


def test_a_share_is_of_the_sum_over_all_prompts():
    points = [point(0.05, group=3), point(0.5, group=1), point(1, group=4)]
    assert std.share(points, "group", [std.BINS[0]]) == 3 / 8
    assert std.share(points, "group", [std.BINS[0], std.BINS[-1]]) == 7 / 8


def verdicts(*prompts):
    return [claim.verdict for claim in std.claims({"prompts": {"0": prompts}})]


def test_the_exact_claims_do_not_hang_on_samples():
    expected = [SHOWN, SHOWN, SHOWN, NOT_SHOWN, SHOWN]
    assert verdicts(point(0.05), point(0.5))[:5] == expected


def test_verdicts_follow_what_was_found():
    assert verdicts(point(0.05, group=2, mean=3), point(0.5))[5:] == [SHOWN, SHOWN]
    assert verdicts(point(0.95, group=2), point(0.5))[5] == SHOWN
    assert verdicts(point(0.05, none=2), point(0.5))[5] == CONTRADICTED
    assert verdicts(point(0.2, group=2), point(0.5))[5:] == [NOT_SHOWN, CONTRADICTED]
    assert verdicts(point(0.05), point(0.5))[5:] == [NOT_SHOWN, NOT_SHOWN]


def test_the_verdicts_on_weights_are_computed(monkeypatch):
    monkeypatch.setattr(std, "weight", lambda p, G, scale: p * (1 - p))
    wrong = [CONTRADICTED, CONTRADICTED, CONTRADICTED, NOT_SHOWN, NOT_SHOWN]
    assert verdicts(point(0.05), point(0.5))[:5] == wrong
