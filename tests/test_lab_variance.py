"""lab/variance.py: baselines in a world so small that all outcomes are enumerated."""
import copy

import pytest
import torch
from conftest import f64, scripts

import reinforce
from lab import variance
from lab.entry import CONTRADICTED, NOT_SHOWN, SHOWN

RATES = {str(rate): variance.small_policy(rate) for rate in (0.1, 0.5)}


# ---- baselines, exactly ----------------------------------------------------------------------

def test_without_a_baseline_the_variance_is_that_of_one_output_divided_by_their_number():
    """Of one output: the mean of |g|^2 R^2 less the squared length of the mean."""
    p = f64([0.5, 0.25, 0.25])
    gradient = f64([1, 0, 0]) - p                           # of the right one
    expected = (0.5 * gradient @ gradient - (0.5 * gradient) @ (0.5 * gradient)) / 6
    assert RATES["0.5"]["none"] == [1, pytest.approx(expected.item(), abs=1e-5)]


def test_means_that_hold_the_own_reward_shrink_the_gradient_and_no_other_baseline_does():
    for found in RATES.values():
        parts = {name: part for name, (part, _) in found.items()}
        assert parts.pop("mean") == pytest.approx(2 / 3, abs=1e-5)
        assert parts.pop("batch") == pytest.approx(5 / 6, abs=1e-5)
        assert parts == dict.fromkeys(["none", "rloo", "optimal", "known mean", "known b*"], 1)


def test_rloo_is_the_mean_of_the_group_scaled_back():
    for found in RATES.values():
        assert found["mean"][1] == pytest.approx(found["rloo"][1], abs=2e-5)


def test_no_number_has_less_variance_than_b_star_and_an_estimate_has_more():
    for found in RATES.values():
        least = found["known b*"][1]
        assert least < min(found["known mean"][1], found["none"][1], found["optimal"][1])


def test_where_few_are_right_rloo_has_more_variance_than_no_baseline():
    assert RATES["0.1"]["rloo"][1] > 1.05 * RATES["0.1"]["none"][1]


# ---- baselines on the base -------------------------------------------------------------------

@pytest.fixture
def samples(script, config, load_task, talker):
    """cfg, task, policy in float64, and a batch of 2 groups of 16, a third of which is right."""
    cfg = config(num_prompts=2, num_generations=16)
    policy = talker(cfg).double()
    task = load_task(cfg)
    batch = script.sample_batch(policy, task, cfg, 0)
    batch.rewards = (torch.arange(32) % 3 == 0).double().view(2, 16)
    return cfg, task, policy, batch


@scripts("reinforce")
def test_inner_products_are_those_of_the_gradients_of_whole_outputs(samples):
    cfg, _, policy, batch = samples
    products = variance.inner_products(policy, batch, range(4), cfg)
    norms = reinforce.squared_gradient_norms(policy, batch, cfg)[:4]
    torch.testing.assert_close(products.diag(), norms)
    logps, _ = reinforce.score(policy, batch.prompts[:2], batch.tokens[:2])
    loss = (logps * batch.mask[:2]).sum()
    gradients = torch.autograd.grad(loss, list(policy.parameters()))
    of_sum = sum(gradient.square().sum() for gradient in gradients)
    torch.testing.assert_close(products[:2, :2].sum(), of_sum)


def test_the_variance_of_a_group_does_not_count_the_mean():
    """Gradients that have a length of 3 in common and each a part of length 1 of its own."""
    products = torch.eye(32).double() + 9
    found = variance.group_variance(products, torch.ones(32).double(), "none", 4, group=4)
    assert found == pytest.approx(1 / 4)


@pytest.mark.parametrize("baseline, size", [("rloo", 4), ("rloo", 32), ("optimal", 4)])
def test_the_variance_of_a_group_is_that_of_drawn_groups_with_gradients_in_plain_sight(
        baseline, size, monkeypatch):
    """The baseline is from the group itself, or from all. Groups of 4 of 32 outputs vary by a
    factor 28/32 less than those of any number of outputs."""
    monkeypatch.setattr(variance, "DEALS", 100)
    generator = torch.Generator().manual_seed(1)
    gradients = torch.randn(32, 2, generator=generator).double() + f64([1, 0])
    gradients *= torch.arange(32)[:, None] / 16             # of all lengths
    norms = gradients.square().sum(dim=1)
    rewards = (torch.arange(32) % 3 == 0).double()
    rows = torch.rand(5000, 32, generator=generator).argsort(dim=1)
    some = rows[:, :size]
    A = reinforce.advantages(rewards[some], baseline, norms[some])[:, :4, None]
    estimates = (A * gradients[rows[:, :4]]).mean(dim=1)
    expected = estimates.var(dim=0).sum().item() * 32 / 28
    found = variance.group_variance(gradients @ gradients.T, rewards, baseline, size, group=4)
    assert found == pytest.approx(expected, rel=0.08)


@scripts("reinforce")
def test_what_is_measured_on_a_base_is_a_share_of_none_and_tells_right_from_wrong(
        samples, monkeypatch):
    cfg, task, policy, batch = samples
    monkeypatch.setattr(variance, "load_base", lambda script: (cfg, task, policy))
    monkeypatch.setattr(variance, "PROBLEMS", 2)
    monkeypatch.setattr(variance, "SAMPLES", 16)
    monkeypatch.setattr(variance, "ESTIMATORS", {"none": ("none", 8), "known mean": ("rloo", 16)})
    asked = []

    def sample_batch(policy, task, cfg, step):
        asked.append((cfg.seed, cfg.num_prompts, cfg.num_generations))
        return batch
    monkeypatch.setattr(reinforce, "sample_batch", sample_batch)
    found = variance.measure_base(5)
    assert asked == [(5, 2, 16)] and found["none"] == 1 and found["known mean"] > 0
    norms = reinforce.squared_gradient_norms(policy, batch, cfg).view(2, 16)
    for name, reward in (("right", 1), ("wrong", 0)):
        expected = norms[batch.rewards == reward].mean().item()
        length = found[f"squared length, gradients of {name} outputs"]
        assert length == pytest.approx(expected)
    assert found["pass rate"] == pytest.approx(11 / 32)


# ---- what is shown ---------------------------------------------------------------------------

FOUND = {
    "seeds": [0, 1],
    "exact": RATES,
    "base": {"none": [1, 1], "RLOO": [1.3, 1.4], "estimated b*": [0.9, 1.1],
             "known mean": [0.9, 0.9], "known b*": [0.8, 0.8]}}


def verdicts(found):
    return [claim.verdict for claim in variance.claims(found)]


def test_each_verdict_may_come_out_either_way():
    assert verdicts(FOUND) == [CONTRADICTED, SHOWN, NOT_SHOWN, SHOWN, SHOWN, SHOWN]
    other = copy.deepcopy(FOUND)
    other["base"] |= {"RLOO": [0.8, 0.7], "known b*": [1, 0.7]}
    other["exact"]["0.5"]["known b*"] = [1.0, 0.5]
    assert verdicts(other) == [SHOWN, CONTRADICTED, NOT_SHOWN, NOT_SHOWN, CONTRADICTED, SHOWN]
    other["exact"]["0.5"]["mean"] = [1.0, 0.1]
    assert verdicts(other)[5] == CONTRADICTED
