"""The algorithm of grpo.py against numbers worked out by hand and against independent definitions."""
import functools
import itertools
import math

import pytest
import torch
from conftest import f64, ragged

import grpo
from tools import scores

SCALES = ("group", "batch", "none")
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")
HOWS = ("sequence_mean", "token_mean", "sequence_sum", "constant")
close = functools.partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)
golden = functools.partial(torch.testing.assert_close, atol=6e-8, rtol=0)      # numbers written with 7 digits


def loss_and_gradient(logps, old_logps, A, mask, **options):
    """policy_loss, and its gradient in the log-probs."""
    logps = logps.clone().requires_grad_()
    loss = grpo.policy_loss(logps, old_logps, A, mask, **options)
    return loss.detach(), torch.autograd.grad(loss.sum(), logps)[0]


def one_token(ratio, A, log_pi=-1.0, **options):
    """Loss and gradient of one token of probability exp(log_pi) whose ratio is as given. -> two floats"""
    new, old = f64([[log_pi]]), f64([[log_pi - math.log(ratio)]])
    loss, gradient = loss_and_gradient(new, old, f64([A]), torch.ones_like(new), **options)
    return loss.item(), gradient.item()


# ---- advantages --------------------------------------------------------------------------------------------


def test_advantages_of_one_right_answer_in_four():
    rewards = f64([[0, 0, 1, 0]])
    close(grpo.advantages(rewards), f64([[-0.25, -0.25, 0.75, -0.25]]) / (0.5 + 1e-4))
    close(grpo.advantages(rewards, eps=0.0), f64([[-0.5, -0.5, 1.5, -0.5]]))
    close(grpo.advantages(rewards, "none"), f64([[-0.25, -0.25, 0.75, -0.25]]))


def test_the_standard_deviation_has_one_degree_of_freedom_less_than_the_group_has_members():
    right, wrong = 0.7301634, -1.0952452
    golden(grpo.advantages(f64([[1, 1, 0, 1, 0]])), f64([[right, right, wrong, right, wrong]]))
    golden(grpo.advantages(f64([[1, 0, 1, 0]])), 0.8658754 * f64([[1, -1, 1, -1]]))


def test_it_is_the_spread_of_a_group_that_counts_not_its_size():
    A = grpo.advantages(f64([[0.50, 0.51, 0.50, 0.51]]))
    torch.testing.assert_close(A, 0.85 * f64([[-1, 1, -1, 1]]), atol=0.01, rtol=0)


def test_scaling_by_the_batch_divides_by_the_spread_of_all_rewards_but_subtracts_the_mean_of_the_group():
    rewards = f64([[0, 0, 1, 0], [1, 1, 0, 1], [0, 0, 0, 0]])
    spread = math.sqrt((4 * (1 - 1 / 3) ** 2 + 8 * (1 / 3) ** 2) / 11)
    expected = f64([[-0.25, -0.25, 0.75, -0.25], [0.25, 0.25, -0.75, 0.25], [0, 0, 0, 0]]) / (spread + 1e-4)
    close(grpo.advantages(rewards, "batch"), expected)


def test_every_group_is_scaled_by_its_own_spread():
    rewards = f64([[0, 1, 2, 3], [0, 10, 20, 30], [7, 7, 7, 7]])
    together = grpo.advantages(rewards)
    for group, alone in zip(rewards, together):
        close(grpo.advantages(group[None]), alone[None])


@pytest.mark.parametrize("scale_rewards", SCALES)
def test_a_group_of_equal_rewards_gets_exactly_no_advantage(scale_rewards):
    values = torch.tensor([0.07, 1 / 3, *(k / 100 for k in range(-200, 1001))])     # in float32
    for G in (2, 3, 7, 8):
        rewards = values[:, None].expand(-1, G)
        assert (grpo.advantages(rewards, scale_rewards) == 0).all()
        assert (grpo.advantages(rewards, scale_rewards, eps=0.0) == 0).all()
        alone = rewards[:1]                                 # the whole batch without spread
        assert (grpo.advantages(alone, scale_rewards, eps=0.0) == 0).all()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_group_of_equal_rewards_gets_exactly_no_gradient(loss_type):
    draw = torch.Generator().manual_seed(0)
    for value in (0.07, 1 / 3, 0.0, 1.0):
        A = grpo.advantages(torch.full((2, 7), value)).view(-1)
        old_logps = -torch.rand(14, 5, generator=draw)
        logps = old_logps + torch.randn(14, 5, generator=draw)
        loss, gradient = loss_and_gradient(logps, old_logps, A, torch.ones(14, 5), loss_type=loss_type)
        assert (loss == 0).all() and (gradient == 0).all()


def test_the_chance_of_a_group_without_signal_is_that_of_all_right_or_all_wrong():
    groups = f64(list(itertools.product((0.0, 1.0), repeat=8)))             # every outcome of 8 completions
    chances = (0.9 - 0.8 * groups).prod(1)                                  # each right with probability .1
    silent = (grpo.advantages(groups) == 0).all(1)
    golden(chances[silent].sum().item(), 0.4304672)


def test_the_overlong_penalty_is_a_ramp_over_the_buffer():
    lengths = torch.tensor([0, 29, 30, 31, 35, 39, 40, 41])
    expected = torch.tensor([0, 0, 0, -0.1, -0.5, -0.9, -1, -1])
    torch.testing.assert_close(grpo.overlong_penalty(lengths, 40, 10), expected)
    torch.testing.assert_close(grpo.overlong_penalty(lengths.double(), 40, 10), expected.double())


def test_without_a_buffer_there_is_no_overlong_penalty():
    assert grpo.overlong_penalty(torch.tensor([0, 39, 40]), 40, 0).tolist() == [0, 0, 0]


# ---- ratio and surrogates ----------------------------------------------------------------------------------


def test_the_ratio_is_new_over_old():
    ratio = grpo.log_ratio(f64([[0.7, 0.1]]).log(), f64([[0.5, 0.3]]).log(), torch.ones(1, 2)).exp()
    golden(ratio, f64([[1.4, 0.3333333]]))


@pytest.mark.parametrize("ratio, A, objective, gradient", [
    (0.5, -10, -8, 0), (1.5, 1, 1.2, 0), (0.5, -1, -0.8, 0), (1.5, -1, -1.5, -1.5), (0.5, 1, 0.5, 0.5)])
def test_the_clipped_objective_and_its_gradient(ratio, A, objective, gradient):
    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo"):
        close(one_token(ratio, A, loss_type=loss_type), (-float(objective), -float(gradient)))


@pytest.mark.parametrize("A, ratio, live", [
    (2, 0.85, True), (2, 1.25, True), (2, 1.35, False),
    (-2, 0.85, False), (-2, 1.25, True), (-2, 1.35, True)])
def test_clipping_stops_the_gradient_only_where_the_ratio_has_moved_out_on_the_side_that_pays(A, ratio, live):
    _, gradient = one_token(ratio, A, epsilon=0.1, epsilon_high=0.3)
    close(gradient, -A * ratio * live)


def test_the_loss_of_a_bad_token_made_likelier_is_not_bounded():
    close(one_token(100.0, -1.0), (100.0, 100.0))


def test_cispo_keeps_the_gradient_of_a_clipped_token():
    golden(one_token(1.5, 2.0, math.log(0.6), loss_type="cispo"), (1.2259815, -2.4))
    close(one_token(1.5, -2.0, loss_type="cispo", epsilon_high=0.3), (-2.6, 2.6))
    close(one_token(0.01, 2.0, loss_type="cispo"), (0.02, -0.02))           # no lower bound


@pytest.mark.parametrize("A, ratio, f, weight", [
    (1, 0.5, 1.5101627, 0.4700074), (1, 1.0, 2.0, 1.0), (1, 1.5, 2.4898373, 1.4100223),
    (-1, 2.0, 2.8219996, 1.5362196)])
def test_sapo_is_a_soft_gate_with_its_own_temperature_for_bad_tokens(A, ratio, f, weight):
    golden(one_token(ratio, A, loss_type="sapo"), (-f * A, -weight * A))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_on_fresh_samples_the_ratio_is_one_and_the_gradient_is_that_of_reinforce(loss_type):
    logps, _, A, mask = ragged()
    fresh = logps.clone().requires_grad_()
    ratio = grpo.log_ratio(fresh, fresh, mask).exp()
    assert (ratio == 1).all() and ratio.requires_grad
    loss = grpo.policy_loss(fresh, fresh, A, mask, loss_type)
    close(torch.autograd.grad(loss.sum(), fresh)[0], -A[:, None] * mask)
    if loss_type not in ("cispo", "sapo"):                  # whose value at rho = 1 is another
        close(loss.detach(), -A[:, None] * mask)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_advantages_may_differ_from_token_to_token(loss_type):
    logps, old_logps, A, mask = ragged()
    per_token = A[:, None] * f64([[1, -1, 0.5, 2]])
    whole = grpo.policy_loss(logps, old_logps, per_token, mask, loss_type)
    columns = [grpo.policy_loss(logps, old_logps, per_token[:, t], mask, loss_type)[:, t] for t in range(4)]
    close(whole, torch.stack(columns, 1))
    close(grpo.policy_loss(logps, old_logps, A[:, None].expand(3, 4), mask, loss_type),
          grpo.policy_loss(logps, old_logps, A, mask, loss_type))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_masked_slots_contribute_nothing_even_if_they_hold_wild_values(loss_type):
    logps, old_logps, A, mask = ragged()
    wild = torch.where(mask == 0, f64([[-1e30, 1e30, -1e4, 1e4]]), logps)
    old_wild = torch.where(mask == 0, f64([[1e30, 1e30, 1e4, -1e4]]), old_logps)
    A_wild = torch.where(mask == 0, 1e6, A[:, None].expand(3, 4))
    loss, gradient = loss_and_gradient(logps, old_logps, A, mask, loss_type=loss_type)
    same_loss, same_gradient = loss_and_gradient(wild, old_wild, A_wild, mask, loss_type=loss_type)
    assert (same_loss[mask == 0] == 0).all() and (same_gradient[mask == 0] == 0).all()
    assert loss[mask == 1].all() and gradient[1:][mask[1:] == 1].any()
    assert torch.equal(loss, same_loss) and torch.equal(gradient, same_gradient)
    for how in HOWS:
        x = torch.where(mask == 0, wild, loss)
        assert torch.equal(grpo.aggregate(x, mask, how), grpo.aggregate(loss, mask, how))


# ---- averaging ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how, value", [("sequence_mean", 1.5), ("token_mean", 1.75), ("sequence_sum", 3.5),
                                        ("constant", 0.875)])
def test_the_four_averages_of_a_short_and_a_long_row(how, value):
    x, mask = f64([[1, 99, 99], [2, 2, 2]]), f64([[1, 0, 0], [1, 1, 1]])
    close(grpo.aggregate(x, mask, how, max_length=4).item(), value)


def test_the_constant_average_divides_by_the_slots_if_no_maximum_is_given():
    x = f64([[1, 1, 1], [2, 2, 2]])
    close(grpo.aggregate(x, torch.ones_like(x), "constant").item(), 1.5)


@pytest.mark.parametrize("how", HOWS)
def test_the_parts_of_a_step_add_up_to_its_average(how):
    x, _, _, mask = ragged()
    counts = {"num_sequences": 3, "num_tokens": mask.sum().item(), "max_length": 9}
    parts = [grpo.aggregate(x[i:i + 1], mask[i:i + 1], how, **counts) for i in range(3)]
    close(sum(parts), grpo.aggregate(x, mask, how, max_length=9))


def test_a_fully_masked_row_counts_as_a_row_but_not_as_tokens():
    x, mask = f64([[3, 3], [5, 5]]), f64([[1, 1], [0, 0]])
    values = [grpo.aggregate(x, mask, how, max_length=4).item() for how in HOWS]
    close(values, [1.5, 3.0, 3.0, 0.75])
    for how in HOWS:
        assert grpo.aggregate(x, torch.zeros_like(x), how).item() == 0


# ---- KL ----------------------------------------------------------------------------------------------------


def expected_kl(p, ref, estimator):
    """The mean of an estimator over samples of p, by enumeration."""
    return (p * grpo.kl(p.log()[None], ref.log()[None], estimator)[0]).sum()


def test_the_kl_estimates_average_to_the_exact_kl_of_the_policy_from_the_reference():
    p, ref = f64([0.5, 0.5]), f64([0.9, 0.1])
    golden(expected_kl(p, ref, "k1").item(), 0.5108256)
    golden(expected_kl(p, ref, "k3").item(), 0.5108256)
    golden(expected_kl(p, ref, "k2").item(), 0.7339459)


def test_k3_is_never_negative_and_stays_exact_for_tiny_differences():
    x = torch.linspace(-0.01, 0.01, 2001)[None]         # in float32, where exp(-x) + x - 1 is mostly rounding
    k3 = grpo.kl(x, torch.zeros_like(x), "k3")
    series = x.double() ** 2 / 2 - x.double() ** 3 / 6 + x.double() ** 4 / 24
    assert (k3 >= 0).all()
    torch.testing.assert_close(k3.double(), series, atol=2e-9, rtol=0)
    far = f64([[-3.0, 3.0]])
    close(grpo.kl(far, 0 * far), f64([[math.exp(3) - 4, math.exp(-3) + 2]]))            # k3 is the default
    close(grpo.kl(far, 0 * far, "k3"), grpo.kl(far, 0 * far))


def test_in_a_loss_k1_does_nothing_k2_pulls_to_the_reference_and_k3_pulls_by_the_reverse_kl():
    theta, ref = f64([0.3, -0.8, 1.1]).requires_grad_(), f64([0.2, 0.7, 0.1])
    p = theta.softmax(0)
    reverse = (ref * (ref.log() - p.log())).sum()                           # KL(ref || pi)
    forward = (p * (p.log() - ref.log())).sum()                             # KL(pi || ref)
    for estimator, exact in (("k1", 0 * forward), ("k2", forward), ("k3", reverse)):
        estimates = grpo.kl(p.log()[None], ref.log()[None], estimator)[0]   # one per possible sample
        mean = (p.detach() * estimates).sum()                               # the sampler is held fixed
        close(torch.autograd.grad(mean, theta, retain_graph=True)[0],
              torch.autograd.grad(exact, theta, retain_graph=True)[0])
    gradient = torch.autograd.grad(forward, theta)[0]
    assert gradient.abs().max() > 0.1


@pytest.mark.parametrize("estimator, pi, tolerance", [("k2", (0.8807971, 0.0715218, 0.0476812), 1e-6),
                                                      ("k3", (0.8090, 0.1146, 0.0764), 1e-4)])
def test_where_learning_with_a_kl_term_comes_to_rest(estimator, pi, tolerance):
    ref, rewards, beta = f64([0.5, 0.3, 0.2]), f64([1.0, 0, 0]), 0.5
    for other, at_rest in ((pi, True), ((0.5, 0.3, 0.2), False)):
        theta = f64(other).log().requires_grad_()
        logps = theta.log_softmax(0)[:, None]                               # a row of one token per action
        terms = grpo.policy_loss(logps, logps, rewards, torch.ones_like(logps))
        terms = terms + beta * grpo.kl(logps, ref.log()[:, None], estimator)
        (logps.detach().exp() * terms).sum().backward()
        assert (theta.grad.abs().max() < tolerance) == at_rest


# ---- log-probs and entropy ---------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_logprobs_are_the_logarithms_of_the_softmax_at_the_temperature(temperature):
    draw = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2, 3, 5, generator=draw).double()
    tokens = torch.randint(5, (2, 3), generator=draw)
    logps, entropy = grpo.logprobs(logits, tokens, temperature)
    for b, t in itertools.product(range(2), range(3)):
        weights = [math.exp(z / temperature) for z in logits[b, t].tolist()]
        p = [w / sum(weights) for w in weights]
        close(logps[b, t].item(), math.log(p[tokens[b, t]]))
        close(entropy[b, t].item(), -sum(q * math.log(q) for q in p))
    assert all(torch.equal(a, b) for a, b in zip(grpo.logprobs(logits, tokens, temperature, kernel="torch"),
                                                 (logps, entropy)))


def test_logprobs_and_entropy_have_the_right_gradient():
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 2, 4, generator=draw).double().requires_grad_()
    tokens = torch.tensor([[0, 3], [2, 2]])
    assert torch.autograd.gradcheck(lambda z: grpo.logprobs(z, tokens, 0.7), logits)


def test_tokens_ruled_out_by_an_infinite_logit_are_as_if_they_were_not_there():
    draw = torch.Generator().manual_seed(0)
    few = torch.randn(1, 2, 3, generator=draw).double().requires_grad_()
    many = torch.full((1, 2, 6), -math.inf, dtype=torch.float64)
    many[..., 1:4] = few.detach()
    many.requires_grad_()
    tokens = torch.tensor([[0, 2]])
    for weights in ((1, 0), (0, 1), (1, -2)):               # the log-prob alone, the entropy alone, both
        gradients, values = [], []
        for logits, shift in ((few, 0), (many, 1)):
            logps, entropy = grpo.logprobs(logits, tokens + shift, 0.7)
            values += [logps.detach(), entropy.detach()]
            gradients += torch.autograd.grad((weights[0] * logps + weights[1] * entropy).sum(), logits)
        close(values[2:], values[:2])
        close(gradients[1][..., 1:4], gradients[0])
        assert (gradients[1][..., [0, 4, 5]] == 0).all()
    assert grpo.logprobs(many, torch.tensor([[0, 5]]))[0].tolist() == [[-math.inf, -math.inf]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_certain_token_has_log_probability_and_entropy_zero(dtype):
    logits = torch.tensor([[[0.0, 1e4, -1e4]]], dtype=dtype, requires_grad=True)
    logps, entropy = grpo.logprobs(logits, torch.tensor([[1]]))
    assert logps.item() == 0 and entropy.item() == 0
    (logps + entropy).sum().backward()
    assert (logits.grad == 0).all()


def test_a_kernel_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="warp"):
        grpo.logprobs(torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.long), kernel="warp")


# ---- evaluation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, c, k, value", [(4, 1, 2, 0.5), (8, 3, 4, 0.9285714), (8, 0, 8, 0), (8, 1, 8, 1),
                                            (8, 2, 1, 0.25), (5, 5, 2, 1)])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_answer(n, c, k, value):
    golden(float(scores.pass_at_k(n, c, k)), float(value))
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    close(float(scores.pass_at_k(n, c, k)), sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize("answers, winner", [
    ("3 5 5", "5"), ("3 5 5 3", "3"), ("5 3 3 5", "5"), ("- - - 4", "4"), ("- 2 1 - -", "2"),
    ("- -", None), ("", None)])
def test_the_majority_is_the_answer_given_most_often_and_of_those_tied_the_first(answers, winner):
    assert scores.majority([None if answer == "-" else answer for answer in answers.split()]) == winner


def test_where_there_is_no_answer_there_is_no_vote():
    class Problem:
        answer = "7"

    class Walk:
        answer = ""

    def verify(problem, text):
        return [1.0] if problem is Walk else float(text == "<answer>7</answer>")
    answers = ["7", "7", None, "7"]
    assert scores.maj_at_k([Problem, Problem, Walk, Walk], answers, 2, 2, verify) == 1.0
    assert scores.maj_at_k([Walk, Walk], answers[2:], 2, 2, verify) is None


# ---- the file ----------------------------------------------------------------------------------------------


def test_no_function_of_the_algorithm_changes_its_arguments():
    logps, old_logps, A, mask = ragged()
    rewards, lengths, logits = f64([[0, 1], [2, 2]]), f64([3, 9, 10]), torch.randn(3, 4, 5).double()
    tokens = torch.zeros(3, 4, dtype=torch.long)
    arguments = (logps, old_logps, A, mask, rewards, lengths, logits, tokens)
    before = [argument.clone() for argument in arguments]
    grpo.logprobs(logits, tokens, 0.7)
    grpo.overlong_penalty(lengths, 10, 4)
    grpo.log_ratio(logps, old_logps, mask)
    for scale in SCALES:
        grpo.advantages(rewards, scale)
    for estimator in ("k1", "k2", "k3"):
        grpo.kl(logps, old_logps, estimator)
    for loss_type in LOSS_TYPES:
        grpo.policy_loss(logps, old_logps, A, mask, loss_type)
    for how in HOWS:
        grpo.aggregate(logps, mask, how)
    assert all(torch.equal(a, b) for a, b in zip(arguments, before))
