"""What grpo.py and gspo.py do where samples are not those of the policy that learns: a bound on the
ratio, the KL by the ratio, and samples of older weights; and what they leave out. By numbers worked
out by hand, and by enumeration of all that a small policy can say."""
import copy
import functools
import itertools
import math

import pytest
import torch
from conftest import f64, scripts
from small_runs import at_work, steps
from update_scenes import gradients, weights

import common

pytestmark = [pytest.mark.quick, scripts("grpo", "gspo")]
close = functools.partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)
RANGE = {"epsilon": 0.2, "epsilon_high": 0.28}


def one_token(script, ratio, A, **options):
    """Loss and gradient of a completion of one token, whose probability has changed by `ratio`."""
    logps = f64([[-1.0]]).requires_grad_()
    old_logps = f64([[-1.0 - math.log(ratio)]])
    loss = script.policy_loss(logps, old_logps, f64([A]), torch.ones(1, 1), **(RANGE | options))
    return loss.item(), torch.autograd.grad(loss.sum(), logps)[0].item()


# ---- delta -----------------------------------------------------------------------------------

@pytest.mark.parametrize("A, ratio, loss, gradient", [
    (-1, 4, 3, 0),
    (-2, 4, 6, 0),
    (-1, 2.5, 2.5, 2.5),
    (-1, 0.5, 0.8, 0),
    (1, 4, -1.28, 0),
    (1, 0.5, -0.5, -0.5)])
def test_delta_bounds_the_loss_of_a_token_whose_advantage_is_negative(
        script, A, ratio, loss, gradient):
    close(one_token(script, ratio, A, delta=3.0), (float(loss), float(gradient)))


def test_without_delta_the_loss_has_no_bound_above(script):
    close(one_token(script, 4, -1), (4.0, 4.0))
    close(one_token(script, 4, -1, delta=0.0), (4.0, 4.0))


def test_delta_bounds_the_loss_of_an_update(script, scene):
    """The ratios of the scene go far above 1.3."""
    made = scene(epsilon_high=0.2)
    rows = torch.arange(len(made.batch.texts))
    without, gradient = made.backward(rows)
    bounded, bounded_gradient = made.backward(rows, delta=1.3)
    assert bounded["loss"] < without["loss"]
    assert not torch.allclose(gradient, bounded_gradient)


# ---- the KL by the ratio ---------------------------------------------------------------------

def test_the_kl_by_the_ratio_in_an_update_has_the_gradient_of_the_ratio_of_each_token(
        script, scene):
    """Without advantages the loss is beta KL_t alone."""
    made = scene(beta=0.3, kl_estimator="k3_ratio", loss_type="dapo")
    batch, cfg, mask = made.batch, made.cfg, made.batch.mask
    rows = torch.arange(len(batch.texts))
    metrics, found = made.backward(rows, A=0 * made.A)

    logps, _ = script.score(made.policy, batch.prompts, batch.tokens, cfg.temperature)
    rho = ((logps - batch.logps) * mask).exp()
    k3 = script.kl(logps * mask, made.ref_logps() * mask, "k3")
    loss = cfg.beta * (rho * k3 * mask).sum() / mask.sum()
    close(metrics["loss"], loss.item())
    made.policy.zero_grad()
    loss.backward()
    close(found, gradients(made.policy))


# ---- outputs without an end ------------------------------------------------------------------

def loss_of_rows(made, rows, entropy_coef):
    """Equation (5) of these rows, which counts no others."""
    script, cfg, batch = made.script, made.cfg, made.batch
    mask = batch.mask[rows]
    logps, entropy = script.score(
        made.policy, batch.prompts[rows], batch.tokens[rows], cfg.temperature)
    loss = script.policy_loss(logps, batch.logps[rows], made.A[rows], mask, cfg.loss_type,
                              cfg.epsilon, cfg.epsilon_high)
    loss = loss + cfg.beta * script.kl(logps * mask, made.ref_logps()[rows] * mask)
    _, average = script.LOSS_TYPES[cfg.loss_type]
    return script.aggregate(loss - entropy_coef * entropy, mask, average,
                            max_length=cfg.max_completion_length)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "bnpo"])
def test_outputs_without_an_end_are_left_out_as_if_they_had_not_been_sampled(
        script, scene, loss_type):
    made = scene(loss_type=loss_type, beta=0.1)
    rows = torch.arange(len(made.batch.texts))
    made.batch.is_truncated[:] = False
    made.batch.is_truncated[[0, 3, 8]] = True
    ended = rows[~made.batch.is_truncated]
    masked, masked_gradient = made.backward(
        rows, entropy_coef=0.01, mask_truncated_completions=True)
    alone, gradient = made.backward(ended, entropy_coef=0.01)
    everything, other_gradient = made.backward(rows, entropy_coef=0.01)
    assert masked == alone
    assert torch.equal(masked_gradient, gradient)
    close(masked["loss"], loss_of_rows(made, ended, 0.01).item())
    assert masked["loss"] != everything["loss"]
    assert not torch.allclose(gradient, other_gradient)


def test_a_step_of_outputs_without_an_end_alone_learns_nothing(script, scene):
    made = scene()
    made.batch.is_truncated[:] = True
    rows = torch.arange(len(made.batch.texts))
    metrics, gradient = made.backward(rows, mask_truncated_completions=True)
    assert metrics["loss"] == 0 and metrics["clip_ratio/region_mean"] == 0
    assert (gradient == 0).all()


# ---- the weight of samples of older weights --------------------------------------------------

MU = f64([[0.5, 0.2, 0.1], [0.4, 0.5, 0.9]])
OLD = f64([[0.25, 0.8, 0.3], [0.4, 0.5, 0.3]])          # w is 0.5, 4, 3 and 1, 1, 1/3
MASK = f64([[1, 1, 0], [1, 1, 1]])


@pytest.mark.parametrize("correction, expected", [
    ("none", [[1, 1, 0], [1, 1, 1]]),
    ("truncate", [[0.5, 1.5, 0], [1, 1, 1 / 3]]),
    ("mask", [[0.5, 0, 0], [1, 1, 1 / 3]]),
    ("sequence_truncate", [[1.5, 1.5, 0], [1 / 3, 1 / 3, 1 / 3]]),
    ("sequence_mask", [[0, 0, 0], [1 / 3, 1 / 3, 1 / 3]])])
def test_the_weight_is_how_much_likelier_the_old_policy_finds_a_sample_and_is_capped(
        script, correction, expected):
    found = script.importance_weights(OLD.log(), MU.log(), MASK, correction, 1.5)
    close(found, f64(expected))


CORRECTIONS = ["truncate", "mask", "sequence_truncate", "sequence_mask"]


@pytest.mark.parametrize("correction", ["none", *CORRECTIONS])
def test_where_the_old_policy_sampled_every_weight_is_exactly_one(script, correction):
    found = script.importance_weights(MU.log(), MU.log(), MASK, correction, 1.0)
    assert torch.equal(found, MASK)


def test_a_weight_at_the_cap_is_not_masked(script):
    mask = torch.ones(1, 1)
    found = script.importance_weights(torch.zeros(1, 1), torch.zeros(1, 1), mask, "mask", 1.0)
    assert found.item() == 1


def test_an_infinite_weight_of_a_sequence_is_cut_and_masked_slots_stay_zero(script):
    old_logps = f64([[-1.0, -1.0]])
    mask = f64([[1, 0]])
    for correction, expected in (("sequence_truncate", 2.0), ("sequence_mask", 0.0)):
        found = script.importance_weights(old_logps, old_logps - 1e4, mask, correction, 2.0)
        assert found.tolist() == [[expected, 0.0]]


def test_wild_values_in_masked_slots_have_weight_zero(script):
    wild = f64([[0.0, 1e30], [0.0, -1e30], [0.0, 1e4]])
    mask = f64([[1, 0]]).expand(3, 2)
    for correction in CORRECTIONS:
        found = script.importance_weights(wild, -wild, mask, correction, 2.0)
        assert torch.equal(found, mask)


class Sequences:
    """All nine sequences of two tokens, of three, and three policies of them: of the logits theta,
    an old one, and the one that sampled. A policy has four states: the start, and after each first
    token."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        theta, old, mu = 0.5 * torch.randn(3, 4, 3, generator=generator).double()
        self.theta = theta.requires_grad_()
        self.tokens = torch.tensor(list(itertools.product(range(3), range(3))))     # (9, 2)
        start = torch.zeros(9, dtype=torch.long)
        self.states = torch.stack([start, 1 + self.tokens[:, 0]], dim=1)            # (9, 2)
        self.old_logps = self.read(old)
        self.mu_logps = self.read(mu)
        self.A = torch.randn(9, generator=generator).double()

    def read(self, logits):
        return logits.log_softmax(dim=-1)[self.states, self.tokens]                 # (9, 2)

    def gradient(self, script, chances, w):
        """Of the mean loss of samples with these probabilities (9,), weighed by w (9, 2)."""
        logps = self.read(self.theta)
        A = w * self.A[:, None]
        loss = script.policy_loss(logps, self.old_logps, A, torch.ones(9, 2), **RANGE).sum(dim=1)
        return torch.autograd.grad((chances * loss).sum(), self.theta)[0]


def mean_gradients(script, cap, correction):
    """The expected gradient where the old policy samples, and where mu does and is corrected."""
    sequences = Sequences()
    w = script.importance_weights(
        sequences.old_logps, sequences.mu_logps, torch.ones(9, 2), correction, cap)
    exact = sequences.gradient(script, sequences.old_logps.sum(dim=1).exp(), torch.ones(9, 2))
    found = sequences.gradient(script, sequences.mu_logps.sum(dim=1).exp(), w)
    return exact, found


@pytest.mark.parametrize("correction", ["sequence_truncate", "sequence_mask"])
def test_weighed_by_the_sequence_and_not_cut_the_gradient_has_no_bias_and_cut_it_has(
        script, correction):
    exact, found = mean_gradients(script, 1e9, correction)
    close(found, exact)
    exact, found = mean_gradients(script, 1.2, correction)
    assert not torch.allclose(found, exact, atol=1e-3)
    exact, found = mean_gradients(script, 1e9, "none")
    assert not torch.allclose(found, exact, atol=1e-3)


def test_weighed_by_the_token_the_prefixes_are_still_those_of_the_sampler(script):
    exact, found = mean_gradients(script, 1e9, "truncate")
    assert not torch.allclose(found, exact, atol=1e-3)


def test_an_update_weighs_each_token_of_the_loss_but_for_the_entropy(script, scene):
    """Both the surrogate and the KL are means over what mu sampled."""
    made = scene(beta=0.3, kl_estimator="k3_ratio", loss_type="dapo")
    batch, cfg, mask = made.batch, made.cfg, made.batch.mask
    w = mask * torch.rand(mask.shape, generator=torch.Generator().manual_seed(1)).double()
    batch.weights = w
    rows = torch.arange(len(batch.texts))
    metrics, found = made.backward(rows, entropy_coef=0.05)

    logps, entropy = script.score(made.policy, batch.prompts, batch.tokens, cfg.temperature)
    loss = script.policy_loss(logps, batch.logps, made.A, mask, "dapo", cfg.epsilon,
                              cfg.epsilon_high)
    rho = ((logps - batch.logps) * mask).exp()
    loss = loss + cfg.beta * rho * script.kl(logps * mask, made.ref_logps() * mask, "k3")
    loss = ((w * loss - 0.05 * entropy) * mask).sum() / mask.sum()
    close(metrics["loss"], loss.item())
    made.policy.zero_grad()
    loss.backward()
    close(found, gradients(made.policy))


# ---- the sampler -----------------------------------------------------------------------------

def numbered(number):
    """A model with this one weight."""
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(number)
    return model


def sampled_by(sampler, policy, num_steps):
    """Which weight samples at each of the steps, of which each adds 1 to the policy's."""
    found = []
    for _ in range(num_steps):
        found.append(sampler.policy.weight.item())
        policy.weight.data += 1
        sampler.follow(policy)
    return found


@pytest.mark.parametrize("lag, expected", [
    (0, [0, 1, 2, 3, 4, 5]), (1, [0, 0, 1, 2, 3, 4]), (3, [0, 0, 0, 0, 1, 2])])
def test_the_sampler_has_the_weights_of_so_many_steps_ago(script, lag, expected):
    policy = numbered(0.0)
    assert sampled_by(common.Sampler(policy, lag), policy, 6) == expected


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_sampler_that_was_saved_goes_on_as_if_it_had_not_been(script, lag):
    policy = numbered(0.0)
    sampler = common.Sampler(policy, lag)
    sampled_by(sampler, policy, 2)
    saved = copy.deepcopy(sampler.state_dict())
    resumed_policy = numbered(policy.weight.item())
    resumed = common.Sampler(resumed_policy, lag)
    resumed.load_state_dict(saved)
    assert sampled_by(resumed, resumed_policy, 6) == sampled_by(sampler, policy, 6)


def test_without_a_lag_the_batch_stays_and_every_weight_is_one(script, scene):
    made = scene()
    logps = made.batch.logps.clone()
    assert script.correct_for_lag(made.policy, made.batch, made.cfg) == {}
    assert torch.equal(made.batch.weights, made.batch.mask)
    assert torch.equal(made.batch.logps, logps)


def test_with_a_lag_the_batch_gets_the_log_probs_of_the_policy_and_says_how_far_it_was(
        script, scene):
    made = scene(sampler_lag=1, importance_sampling_correction="mask", importance_sampling_cap=1.1)
    mask = made.batch.mask
    sampled = made.batch.logps.clone()
    with torch.no_grad():
        scored, _ = script.score(
            made.policy, made.batch.prompts, made.batch.tokens, made.cfg.temperature)
    metrics = script.correct_for_lag(made.policy, made.batch, made.cfg)
    w = made.batch.weights
    assert torch.equal(made.batch.logps, scored)
    expected = script.importance_weights(scored, sampled, mask, "mask", 1.1)
    assert torch.equal(w, expected)
    assert 0 < (w == 0).sum() - (mask == 0).sum() < mask.sum()
    difference = ((scored - sampled) * mask).abs()
    close(metrics["sampling/sampling_logp_difference/max"], difference.max().item())
    close(metrics["sampling/sampling_logp_difference/mean"],
          (difference.sum() / mask.sum()).item())
    close(metrics["sampling/importance_sampling_ratio/mean"], (w.sum() / mask.sum()).item())


def test_a_run_with_a_lag_samples_from_the_base_until_the_lag_is_over(
        script, tmp_path, monkeypatch, new_run):
    sampled = []
    sample_batch = script.sample_batch

    def note(policy, *args, **options):
        sampled.append(weights(policy))
        return sample_batch(policy, *args, **options)
    monkeypatch.setattr(script, "sample_batch", note)
    with at_work(tmp_path):
        folder = new_run(max_steps=4, sampler_lag=2, importance_sampling_correction="truncate")
    assert torch.equal(sampled[0], sampled[1]) and torch.equal(sampled[1], sampled[2])
    assert not torch.equal(sampled[2], sampled[3])
    base = torch.load(folder / "base.pt", weights_only=True)
    after_one = torch.cat([weight.flatten() for weight in base.values()])
    assert torch.equal(sampled[0], after_one)
    found = [line["sampling/importance_sampling_ratio/mean"] for line in steps(folder)]
    assert found[0] == 1 and found[2] != 1
