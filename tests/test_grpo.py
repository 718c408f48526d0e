"""The algorithm of grpo.py against numbers worked out by hand, and against other definitions."""
import functools
import itertools
import math

import pytest
import torch
from conftest import f64, ragged

import grpo

pytestmark = pytest.mark.quick

SCALES = ("group", "batch", "mean", "none")
CLIPPING = ("grpo", "bnpo", "dr_grpo", "dapo")          # the loss types with eq. (3)
LOSS_TYPES = (*CLIPPING, "cispo", "sapo")
AVERAGES = ("sequence_mean", "token_mean", "sequence_sum", "constant")
WILD = f64([[-1e30, 1e30, -1e4, 1e4]])                  # log-probs that masked slots may hold
OLD_WILD = f64([[1e30, 1e30, 1e4, -1e4]])
close = functools.partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)
golden = functools.partial(torch.testing.assert_close, atol=6e-8, rtol=0)   # written with 7 digits


def loss_and_gradient(logps, old_logps, A, mask, **options):
    """policy_loss, and its gradient in the log-probs."""
    logps = logps.clone().requires_grad_()
    loss = grpo.policy_loss(logps, old_logps, A, mask, **options)
    return loss.detach(), torch.autograd.grad(loss.sum(), logps)[0]


def one_token(ratio, A, log_pi=-1.0, **options):
    """Loss and gradient of one token whose probability is exp(log_pi). -> two floats"""
    logps = f64([[log_pi]])
    old_logps = f64([[log_pi - math.log(ratio)]])
    loss, gradient = loss_and_gradient(
        logps, old_logps, f64([A]), torch.ones_like(logps), **options)
    return loss.item(), gradient.item()


# ---- advantages ------------------------------------------------------------------------------

def test_advantages_of_one_right_answer_in_four():
    rewards = f64([[0, 0, 1, 0]])
    close(grpo.advantages(rewards), f64([[-0.25, -0.25, 0.75, -0.25]]) / (0.5 + 1e-4))
    close(grpo.advantages(rewards, eps=0.0), f64([[-0.5, -0.5, 1.5, -0.5]]))
    close(grpo.advantages(rewards, "none"), f64([[-0.25, -0.25, 0.75, -0.25]]))
    close(grpo.advantages(rewards, "mean"), f64([[-1, -1, 3, -1]]))


def test_the_standard_deviation_has_one_degree_of_freedom_less_than_the_group_has_members():
    right = 0.7301634
    wrong = -1.0952452
    golden(grpo.advantages(f64([[1, 1, 0, 1, 0]])), f64([[right, right, wrong, right, wrong]]))
    golden(grpo.advantages(f64([[1, 0, 1, 0]])), 0.8658754 * f64([[1, -1, 1, -1]]))


def test_small_differences_between_rewards_count_as_much_as_large_ones():
    A = grpo.advantages(f64([[0.50, 0.51, 0.50, 0.51]]))
    torch.testing.assert_close(A, 0.85 * f64([[-1, 1, -1, 1]]), atol=0.01, rtol=0)


def test_scale_rewards_batch_divides_by_the_std_of_all_rewards_but_centres_each_group():
    rewards = f64([[0, 0, 1, 0], [1, 1, 0, 1], [0, 0, 0, 0]])
    std = math.sqrt((4 * (1 - 1 / 3) ** 2 + 8 * (1 / 3) ** 2) / 11)
    centred = f64([[-0.25, -0.25, 0.75, -0.25], [0.25, 0.25, -0.75, 0.25], [0, 0, 0, 0]])
    close(grpo.advantages(rewards, "batch"), centred / (std + 1e-4))


def test_every_group_is_divided_by_its_own_std():
    rewards = f64([[0, 1, 2, 3], [0, 10, 20, 30], [7, 7, 7, 7]])
    together = grpo.advantages(rewards)
    for p in range(3):
        close(grpo.advantages(rewards[p:p + 1]), together[p:p + 1])


@pytest.mark.parametrize("scale_rewards", SCALES)
@pytest.mark.parametrize("G", [2, 3, 7, 8])
def test_a_group_of_equal_rewards_gets_exactly_no_advantage(G, scale_rewards):
    hundredths = [k / 100 for k in range(-200, 1001)]
    values = torch.tensor([0.07, 1 / 3, *hundredths])       # float32: means are rounded
    rewards = values[:, None].expand(-1, G)
    assert (grpo.advantages(rewards, scale_rewards) == 0).all()
    assert (grpo.advantages(rewards, scale_rewards, eps=0.0) == 0).all()
    one_group = rewards[:1]                                     # so the whole batch has no spread
    assert (grpo.advantages(one_group, scale_rewards, eps=0.0) == 0).all()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_group_of_equal_rewards_gets_exactly_no_gradient(loss_type):
    generator = torch.Generator().manual_seed(0)
    for reward in (0.07, 1 / 3, 0.0, 1.0):
        A = grpo.advantages(torch.full((2, 7), reward)).view(-1)
        old_logps = -torch.rand(14, 5, generator=generator)
        logps = old_logps + torch.randn(14, 5, generator=generator)
        loss, gradient = loss_and_gradient(
            logps, old_logps, A, torch.ones(14, 5), loss_type=loss_type)
        assert (loss == 0).all()
        assert (gradient == 0).all()


def test_a_group_has_no_advantage_exactly_if_all_of_it_is_right_or_all_of_it_is_wrong():
    groups = f64(list(itertools.product((0.0, 1.0), repeat=8)))         # every outcome of 8 answers
    chances = (0.9 - 0.8 * groups).prod(dim=1)                  # each is right with probability 0.1
    has_no_advantage = (grpo.advantages(groups) == 0).all(dim=1)
    golden(chances[has_no_advantage].sum().item(), 0.4304672)   # 0.9 ** 8 + 0.1 ** 8


def test_scale_rewards_mean_divides_every_group_by_its_own_mean():
    rewards = f64([[0, 0, 1, 0], [1, 1, 0, 1], [0, 0, 0, 0], [0.5, 0, 0, 0.5]])
    third = 1 / 3
    close(grpo.advantages(rewards, "mean"), f64([
        [-1, -1, 3, -1], [third, third, -1, third], [0, 0, 0, 0], [1, -1, -1, 1]]))


def test_a_group_whose_mean_is_not_positive_teaches_nothing_by_scale_rewards_mean():
    """Penalties can make it negative, and a negative divisor would turn good into bad."""
    rewards = f64([[-1, 0, 0, 0], [-0.5, 0.5, 0, 0]])
    assert (grpo.advantages(rewards, "mean") == 0).all()


@pytest.mark.parametrize("is_right", [(0, 0, 1), (0, 1, 1)])
@pytest.mark.parametrize("G", [2, 3, 5])
def test_scale_rewards_mean_has_the_gradient_of_a_truncated_log_likelihood_of_being_right(
        G, is_right):
    """log p = -sum_k (1 - p)^k / k; a group of G takes the terms k < G. By enumeration of all
    groups of G outputs, of three."""
    theta = f64([0.3, -0.2, -1.1]).requires_grad_()
    logps = theta.log_softmax(dim=0)
    groups = torch.tensor(list(itertools.product(range(3), repeat=G)))          # (3^G, G)
    rewards = f64(is_right)[groups]
    A = grpo.advantages(rewards, "mean")
    chances = logps.detach()[groups].sum(dim=1).exp()
    gains = (A * logps[groups]).mean(dim=1)
    found = torch.autograd.grad((chances * gains).sum(), theta, retain_graph=True)[0]

    wrong = 1 - (logps.exp() * f64(is_right)).sum()
    log_likelihood = -sum(wrong ** k / k for k in range(1, G))
    close(found, torch.autograd.grad(log_likelihood, theta)[0])


def test_the_overlong_penalty_is_a_ramp_over_the_buffer():
    lengths = torch.tensor([0, 29, 30, 31, 35, 39, 40, 41])
    expected = torch.tensor([0, 0, 0, -0.1, -0.5, -0.9, -1, -1])
    torch.testing.assert_close(grpo.overlong_penalty(lengths, 40, 10), expected)
    torch.testing.assert_close(grpo.overlong_penalty(lengths.double(), 40, 10), expected.double())


def test_without_a_buffer_there_is_no_overlong_penalty():
    assert grpo.overlong_penalty(torch.tensor([0, 39, 40]), 40, 0).tolist() == [0, 0, 0]


# ---- ratio and surrogates --------------------------------------------------------------------

def test_the_ratio_is_the_new_probability_over_the_old_one():
    probabilities = f64([[0.7, 0.1]])
    old_probabilities = f64([[0.5, 0.3]])
    log_rho = grpo.log_ratio(probabilities.log(), old_probabilities.log(), torch.ones(1, 2))
    golden(log_rho.exp(), f64([[1.4, 0.3333333]]))


@pytest.mark.parametrize("loss_type", CLIPPING)
@pytest.mark.parametrize("ratio, A, objective, gradient", [
    (0.5, -10, -8.0, 0.0),
    (1.5, 1, 1.2, 0.0),
    (0.5, -1, -0.8, 0.0),
    (1.5, -1, -1.5, -1.5),
    (0.5, 1, 0.5, 0.5)])
def test_the_clipped_objective_and_its_gradient(ratio, A, objective, gradient, loss_type):
    close(one_token(ratio, A, loss_type=loss_type), (-objective, -gradient))


@pytest.mark.parametrize("A, ratio, has_gradient", [
    (2, 0.85, True),
    (2, 1.25, True),
    (2, 1.35, False),
    (-2, 0.85, False),
    (-2, 1.25, True),
    (-2, 1.35, True)])
def test_the_clip_stops_the_gradient_only_beyond_the_bound_that_the_advantage_pushes_to(
        A, ratio, has_gradient):
    _, gradient = one_token(ratio, A, epsilon=0.1, epsilon_high=0.3)
    close(gradient, -A * ratio * has_gradient)
    clipped = grpo.is_clipped(f64([[math.log(ratio)]]), f64([[A]]), epsilon=0.1, epsilon_high=0.3)
    assert clipped.item() == (not has_gradient)


def test_the_loss_of_a_token_with_negative_advantage_is_not_bounded_above():
    close(one_token(100.0, -1.0), (100.0, 100.0))


def test_tokens_are_clipped_exactly_where_the_loss_has_no_gradient():
    log_rho = torch.linspace(-0.5, 0.5, 41).double().expand(2, -1)              # (2, 41)
    A = f64([1.5, -2.0])
    logps = torch.full_like(log_rho, -1.0)
    _, gradient = loss_and_gradient(
        logps, logps - log_rho, A, torch.ones_like(logps), epsilon=0.2, epsilon_high=0.28)
    clipped = grpo.is_clipped(log_rho, A[:, None], 0.2, 0.28)
    assert torch.equal(clipped, gradient == 0)
    assert clipped.any(dim=1).all()
    assert not grpo.is_clipped(log_rho, 0 * A[:, None], 0.2, 0.28).any()


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


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_on_fresh_samples_the_ratio_is_one_and_the_gradient_is_that_of_reinforce(loss_type):
    logps, _, A, mask = ragged()
    logps.requires_grad_()
    ratio = grpo.log_ratio(logps, logps, mask).exp()
    assert (ratio == 1).all()
    assert ratio.requires_grad
    loss = grpo.policy_loss(logps, logps, A, mask, loss_type)
    gradient = torch.autograd.grad(loss.sum(), logps)[0]
    close(gradient, -A[:, None] * mask)
    if loss_type in CLIPPING:                           # the others have another value at rho = 1
        close(loss.detach(), -A[:, None] * mask)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_advantages_may_differ_from_token_to_token(loss_type):
    logps, old_logps, A, mask = ragged()
    token_A = A[:, None] * f64([[1, -1, 0.5, 2]])
    loss = grpo.policy_loss(logps, old_logps, token_A, mask, loss_type)
    for t in range(4):
        loss_with_one_A = grpo.policy_loss(logps, old_logps, token_A[:, t], mask, loss_type)
        close(loss[:, t], loss_with_one_A[:, t])
    same_A = A[:, None].expand(3, 4)
    close(grpo.policy_loss(logps, old_logps, same_A, mask, loss_type),
          grpo.policy_loss(logps, old_logps, A, mask, loss_type))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_masked_slots_contribute_nothing_even_if_they_hold_wild_values(loss_type):
    logps, old_logps, A, mask = ragged()
    is_masked = mask == 0
    loss, gradient = loss_and_gradient(logps, old_logps, A, mask, loss_type=loss_type)
    assert loss[~is_masked].all()
    assert gradient[1:][~is_masked[1:]].any()
    wild_logps = torch.where(is_masked, WILD, logps)
    wild_old_logps = torch.where(is_masked, OLD_WILD, old_logps)
    wild_A = torch.where(is_masked, 1e6, A[:, None].expand(3, 4))
    same_loss, same_gradient = loss_and_gradient(
        wild_logps, wild_old_logps, wild_A, mask, loss_type=loss_type)
    assert torch.equal(same_loss, loss)
    assert torch.equal(same_gradient, gradient)
    assert (loss[is_masked] == 0).all()
    assert (gradient[is_masked] == 0).all()


@pytest.mark.parametrize("how", AVERAGES)
def test_masked_slots_are_not_averaged_even_if_they_hold_wild_values(how):
    x, _, _, mask = ragged()
    wild = torch.where(mask == 0, WILD, x)
    assert torch.equal(grpo.aggregate(wild, mask, how), grpo.aggregate(x, mask, how))


# ---- averages --------------------------------------------------------------------------------

@pytest.mark.parametrize("how, value", [
    ("sequence_mean", 1.5),
    ("token_mean", 1.75),
    ("sequence_sum", 3.5),
    ("constant", 0.875)])
def test_the_four_averages_of_a_short_and_a_long_row(how, value):
    x = f64([[1, 99, 99], [2, 2, 2]])
    mask = f64([[1, 0, 0], [1, 1, 1]])
    close(grpo.aggregate(x, mask, how, max_length=4).item(), value)


def test_the_constant_average_divides_by_the_slots_if_no_maximum_is_given():
    x = f64([[1, 1, 1], [2, 2, 2]])
    close(grpo.aggregate(x, torch.ones_like(x), "constant").item(), 1.5)


@pytest.mark.parametrize("how", AVERAGES)
def test_the_parts_of_a_step_add_up_to_its_average(how):
    x, _, _, mask = ragged()
    total = 0.0
    for row in range(3):
        total += grpo.aggregate(
            x[row:row + 1], mask[row:row + 1], how,
            num_sequences=3, num_tokens=mask.sum().item(), max_length=9)
    close(total, grpo.aggregate(x, mask, how, max_length=9))


@pytest.mark.parametrize("how, value", [
    ("sequence_mean", 1.5),
    ("token_mean", 3.0),
    ("sequence_sum", 3.0),
    ("constant", 0.75)])
def test_a_row_without_tokens_counts_as_a_row(how, value):
    x = f64([[3, 3], [5, 5]])
    mask = f64([[1, 1], [0, 0]])
    close(grpo.aggregate(x, mask, how, max_length=4).item(), value)
    assert grpo.aggregate(x, 0 * mask, how).item() == 0


# ---- KL --------------------------------------------------------------------------------------

def expected_kl(p, ref, estimator):
    """The mean of an estimator over samples of p, by enumeration. (V,), (V,) -> scalar"""
    estimates = grpo.kl(p.log()[None], ref.log()[None], estimator)[0]
    return (p * estimates).sum()


def test_k1_and_k3_average_to_the_kl_of_the_policy_from_the_reference_and_k2_does_not():
    p = f64([0.5, 0.5])
    ref = f64([0.9, 0.1])
    golden(expected_kl(p, ref, "k1").item(), 0.5108256)
    golden(expected_kl(p, ref, "k3").item(), 0.5108256)
    golden(expected_kl(p, ref, "k2").item(), 0.7339459)


def test_k3_is_never_negative_and_stays_exact_for_tiny_differences():
    x = torch.linspace(-0.01, 0.01, 2001)[None]     # in float32, where exp(-x) + x - 1 is rounded
    k3 = grpo.kl(x, torch.zeros_like(x), "k3")
    assert (k3 >= 0).all()
    x = x.double()
    series = x ** 2 / 2 - x ** 3 / 6 + x ** 4 / 24
    torch.testing.assert_close(k3.double(), series, atol=2e-9, rtol=0)


def test_k3_is_the_default():
    x = f64([[-3.0, 3.0]])
    close(grpo.kl(x, 0 * x), f64([[math.exp(3) - 4, math.exp(-3) + 2]]))
    close(grpo.kl(x, 0 * x, "k3"), grpo.kl(x, 0 * x))


def test_in_a_loss_k1_does_nothing_k2_pulls_by_the_kl_and_k3_by_the_reverse_kl():
    theta = f64([0.3, -0.8, 1.1]).requires_grad_()
    ref = f64([0.2, 0.7, 0.1])
    p = theta.softmax(dim=0)
    forward_kl = (p * (p.log() - ref.log())).sum()                          # KL(pi || ref)
    reverse_kl = (ref * (ref.log() - p.log())).sum()                        # KL(ref || pi)
    for estimator, exact in (("k1", 0 * forward_kl), ("k2", forward_kl), ("k3", reverse_kl)):
        estimates = grpo.kl(p.log()[None], ref.log()[None], estimator)[0]   # one for each sample
        loss = (p.detach() * estimates).sum()           # the samples do not depend on theta
        found = torch.autograd.grad(loss, theta, retain_graph=True)[0]
        expected = torch.autograd.grad(exact, theta, retain_graph=True)[0]
        close(found, expected)
    assert torch.autograd.grad(forward_kl, theta)[0].abs().max() > 0.1


@pytest.mark.parametrize("estimator, optimum, tolerance", [
    ("k2", (0.8807971, 0.0715218, 0.0476812), 1e-6),
    ("k3", (0.8090, 0.1146, 0.0764), 1e-4)])
def test_where_learning_with_a_kl_term_comes_to_rest(estimator, optimum, tolerance):
    rewards = f64([1.0, 0, 0])
    beta = 0.5
    ref = (0.5, 0.3, 0.2)
    ref_logps = f64(ref).log()[:, None]                                     # (3, 1)
    for pi, is_at_rest in ((optimum, True), (ref, False)):
        theta = f64(pi).log().requires_grad_()
        logps = theta.log_softmax(dim=0)[:, None]       # (3, 1): a row of one token for each action
        loss = grpo.policy_loss(logps, logps, rewards, torch.ones_like(logps))
        loss = loss + beta * grpo.kl(logps, ref_logps, estimator)
        (logps.detach().exp() * loss).sum().backward()
        assert (theta.grad.abs().max() < tolerance) == is_at_rest


# ---- log-probs and entropy -------------------------------------------------------------------

@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_logprobs_are_the_logarithms_of_the_softmax_at_the_temperature(temperature):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2, 3, 5, generator=generator).double()
    tokens = torch.randint(5, (2, 3), generator=generator)
    logps, entropy = grpo.logprobs(logits, tokens, temperature)
    for b, t in itertools.product(range(2), range(3)):
        weights = [math.exp(z / temperature) for z in logits[b, t].tolist()]
        p = [weight / sum(weights) for weight in weights]
        close(logps[b, t].item(), math.log(p[tokens[b, t]]))
        close(entropy[b, t].item(), -sum(q * math.log(q) for q in p))
    same_logps, same_entropy = grpo.logprobs(logits, tokens, temperature, kernel="torch")
    assert torch.equal(same_logps, logps)
    assert torch.equal(same_entropy, entropy)


def test_logprobs_and_entropy_have_the_right_gradient():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 2, 4, generator=generator).double().requires_grad_()
    tokens = torch.tensor([[0, 3], [2, 2]])
    logprobs = functools.partial(grpo.logprobs, tokens=tokens, temperature=0.7)
    assert torch.autograd.gradcheck(logprobs, logits)


@pytest.mark.parametrize("logps_weight, entropy_weight", [(1, 0), (0, 1), (1, -2)])
def test_tokens_with_an_infinitely_negative_logit_are_as_if_they_were_not_there(
        logps_weight, entropy_weight):
    generator = torch.Generator().manual_seed(0)
    few = torch.randn(1, 2, 3, generator=generator).double()
    many = torch.full((1, 2, 6), -math.inf, dtype=torch.float64)
    many[..., 1:4] = few
    values = []
    gradients = []
    for logits, tokens in ((few, [[0, 2]]), (many, [[1, 3]])):
        logits.requires_grad_()
        logps, entropy = grpo.logprobs(logits, torch.tensor(tokens), 0.7)
        loss = logps_weight * logps + entropy_weight * entropy
        values.append((logps.detach(), entropy.detach()))
        gradients.append(torch.autograd.grad(loss.sum(), logits)[0])
    close(values[1], values[0])
    close(gradients[1][..., 1:4], gradients[0])
    assert (gradients[1][..., [0, 4, 5]] == 0).all()


def test_tokens_with_an_infinitely_negative_logit_have_probability_zero():
    logits = f64([[[-math.inf, 0.3, -math.inf], [1.0, 2.0, -math.inf]]])
    logps, _ = grpo.logprobs(logits, torch.tensor([[0, 2]]))
    assert logps.tolist() == [[-math.inf, -math.inf]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_certain_token_has_log_probability_and_entropy_zero(dtype):
    logits = torch.tensor([[[0.0, 1e4, -1e4]]], dtype=dtype, requires_grad=True)
    logps, entropy = grpo.logprobs(logits, torch.tensor([[1]]))
    assert logps.item() == 0
    assert entropy.item() == 0
    (logps + entropy).sum().backward()
    assert (logits.grad == 0).all()


def test_a_kernel_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="warp"):
        grpo.logprobs(torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.long), kernel="warp")


# ---- arguments -------------------------------------------------------------------------------

def test_no_function_of_the_algorithm_changes_its_arguments():
    logps, old_logps, A, mask = ragged()
    rewards = f64([[0, 1], [2, 2]])
    lengths = f64([3, 9, 10])
    logits = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)).double()
    tokens = torch.zeros(3, 4, dtype=torch.long)
    arguments = (logps, old_logps, A, mask, rewards, lengths, logits, tokens)
    before = [argument.clone() for argument in arguments]
    grpo.logprobs(logits, tokens, 0.7)
    grpo.overlong_penalty(lengths, 10, 4)
    grpo.log_ratio(logps, old_logps, mask)
    grpo.is_clipped(logps - old_logps, A[:, None], 0.2, 0.2)
    for scale_rewards in SCALES:
        grpo.advantages(rewards, scale_rewards)
    for estimator in ("k1", "k2", "k3"):
        grpo.kl(logps, old_logps, estimator)
    for loss_type in LOSS_TYPES:
        grpo.policy_loss(logps, old_logps, A, mask, loss_type)
    for how in AVERAGES:
        grpo.aggregate(logps, mask, how)
    for argument, copy in zip(arguments, before):
        assert torch.equal(argument, copy)
