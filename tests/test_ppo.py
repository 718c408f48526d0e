"""Test ppo.py against numbers worked out on paper and against alternative definitions, and test its
critic."""
import functools

import pytest
import torch
from conftest import close, f64, ones, ragged, randn, scripts
from update_scenes import gradient_of, weights

import ppo

pytestmark = pytest.mark.quick
with_scene = scripts("ppo")

clipped_values = functools.partial(ppo.value_loss, cliprange_value=0.2)


def loss_and_gradient(loss_function, x, *arguments):
    """Compute a loss of x and other arguments, and its gradient with respect to x."""
    x = x.clone().requires_grad_()
    loss = loss_function(x, *arguments)
    return loss.detach(), torch.autograd.grad(loss.sum(), x)[0]


def episode():
    """Make rewards, values and masks: a row that ends early, a row with a hole, and a full row.
    -> (3, 6) each"""
    rewards, values = randn(2, 3, 6)
    mask = f64([[1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1]])
    return rewards, values, mask


# ---- advantages from a critic ----------------------------------------------------------------

@pytest.mark.parametrize("gamma, lam, A, returns", [
    (1.0, 0.5, (0.5, 0.4, 0.2), (0.7, 0.9, 1.0)),
    (1.0, 0.95, (0.7655, 0.49, 0.2), (0.9655, 0.99, 1.0)),
    (0.9, 0.5, (0.3895, 0.31, 0.2), (0.5895, 0.81, 1.0))])
def test_advantages_and_returns_of_an_answer_that_turns_out_right(gamma, lam, A, returns):
    found = ppo.gae(f64([[0, 0, 1]]), f64([[0.2, 0.5, 0.8]]), ones(1, 3), gamma, lam)
    close(found, (f64([A]), f64([returns])))


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_the_advantage_is_the_weighted_average_of_all_n_step_advantages(gamma, lam):
    """An n-step advantage is n discounted rewards plus the value after them, minus the value before
    them. All advantages that reach past the end are equal, so the last weight is the sum of
    theirs."""
    rewards, values, _ = episode()
    A, _ = ppo.gae(rewards, values, ones(3, 6), gamma, lam)
    padded = torch.cat([values, ones(3, 1) * 0], dim=1)
    for t in range(6):
        expected = 0.0
        for n in range(1, 7 - t):
            weight = lam ** (n - 1) * (1 if t + n == 6 else 1 - lam)
            discounts = gamma ** torch.arange(n).double()
            reached = rewards[:, t:t + n] @ discounts + gamma ** n * padded[:, t + n]
            expected += weight * (reached - values[:, t])
        close(A[:, t], expected)


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("wild", [0.0, 1e30])
def test_masked_slots_inside_a_row_and_behind_it_are_no_steps(lam, wild):
    rewards, values, mask = episode()
    wild_rewards = torch.where(mask == 1, rewards, wild)
    wild_values = torch.where(mask == 1, values, wild)
    A, returns = ppo.gae(wild_rewards, wild_values, mask, 0.9, lam)
    for row in range(3):
        valid = mask[row] == 1
        squeezed = rewards[row, valid][None]
        expected = ppo.gae(
            squeezed, values[row, valid][None], torch.ones_like(squeezed), 0.9, lam)
        close((A[row, valid][None], returns[row, valid][None]), expected)
        assert (A[row, ~valid] == 0).all() and (returns[row, ~valid] == 0).all()


@pytest.mark.parametrize("n, lam", [(1, 0), (19, 0), (20, 0), (40, 0.5), (100, 0.8), (1000, 0.98)])
def test_the_longer_an_output_the_nearer_its_lambda_to_one(n, lam):
    close(ppo.length_adaptive_lambda(f64([n, n]), 0.05), f64([[lam], [lam]]))
    [[found]] = ppo.length_adaptive_lambda(torch.tensor([n]), 1.0).tolist()
    assert found == pytest.approx(1 - 1 / n)


@pytest.mark.parametrize("wild", [0.0, 1e9])
def test_whitened_advantages_have_mean_zero_and_variance_one_over_the_valid_tokens(wild):
    A, _, mask = episode()
    A = 3 * A + 7
    white = ppo.whiten(torch.where(mask == 1, A, wild), mask)
    given = A[mask == 1]
    close(white[mask == 1], (given - given.mean()) / (given.var(correction=1) + 1e-8).sqrt())
    assert (white[mask == 0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_one_valid_token_comes_out_zero_and_so_do_none_and_equals(dtype):
    A = torch.tensor([[5.0, -3.0], [2.0, 9.0]], dtype=dtype)
    for mask in ([[0, 0], [1, 0]], [[0, 0], [0, 0]]):
        assert (ppo.whiten(A, torch.tensor(mask, dtype=dtype)) == 0).all()
    assert (ppo.whiten(torch.full_like(A, 3.0), torch.ones_like(A)) == 0).all()


VALUES = f64([[1, 2, 50], [3, 99, -7]])
RETURNS = f64([[2, 4, 0], [6, 0, 0]])
VALID = f64([[1, 1, 0], [1, 0, 0]])


@pytest.mark.parametrize("values, returns, explained", [
    (VALUES, RETURNS, 1 - 1 / 4), (RETURNS, RETURNS, 1.0), (RETURNS + 4, RETURNS, 1.0),
    (0 * VALUES + 4, RETURNS, 0.0), (-RETURNS, RETURNS, -3.0),
    (VALUES, 0 * RETURNS + 2, 0.0), (VALUES, 1e-5 * RETURNS, 0.0)])     # no or little variance
def test_a_perfect_critic_explains_all_the_variance_and_one_that_knows_the_mean_none(
        values, returns, explained):
    close(ppo.explained_variance(values, returns, VALID), explained)


# ---- losses ----------------------------------------------------------------------------------

@pytest.mark.parametrize("value, target, loss, gradient", [
    (0.1, 1.0, 0.405, -0.9), (-0.1, 1.0, 0.605, -1.1),  # near the old value: squared error / 2
    (0.5, 1.0, 0.32, 0.0), (-0.5, -1.0, 0.32, 0.0),     # better, out of range: no gradient
    (-0.5, 1.0, 1.125, -1.5), (0.5, -1.0, 1.125, 1.5),  # worse, out of range: gradient
    (0.5, 0.1, 0.08, 0.4), (-0.5, -0.1, 0.08, -0.4)])   # past the target: gradient, too
def test_the_critic_is_clipped_around_its_old_value_and_the_larger_of_two_errors_counts(
        value, target, loss, gradient):
    for old in (0.0, 3.0):
        found = loss_and_gradient(clipped_values, f64([[value + old]]), f64([[old]]),
                                  f64([[target + old]]), ones(1, 1))
        close([x.item() for x in found], [loss, gradient])


def test_the_critic_learns_nothing_from_masked_slots_even_if_they_hold_wild_values():
    values, old_values, _, mask = ragged()
    returns = 0.9 * values
    found = loss_and_gradient(clipped_values, values, old_values, returns, mask)
    wild = loss_and_gradient(
        clipped_values, torch.where(mask == 0, 1e30, values),
        torch.where(mask == 0, -1e30, old_values), torch.where(mask == 0, 1e6, returns), mask)
    close(wild, found, atol=0, rtol=0)
    for x in found:
        assert (x[mask == 0] == 0).all() and x.isfinite().all() and x.any()


@pytest.mark.parametrize("kl, factor", [
    (0.16, 2.0), (0.14, 1.0), (0.07, 1.0), (0.06, 0.5), (0.0, 0.5), (-0.1, 0.5)])
def test_a_coefficient_doubles_above_1_5_times_the_target_and_halves_below_the_target_by_1_5(
        kl, factor):
    close(ppo.adapt_coefficient(3.0, kl, 0.1), 3.0 * factor)
    assert ppo.adapt_coefficient(3.0, kl, 0.0) == 3.0           # no target: it stays


# ---- from a batch to an update ---------------------------------------------------------------

@with_scene
@pytest.mark.parametrize("flags", [
    {}, {"lam": 0.5, "critic_lam": 1.0, "gamma": 0.9}, {"length_adaptive": True}], ids=str)
def test_a_critic_and_the_rewards_less_the_kl_to_the_base_give_advantages_and_returns(
        scene, load_task, flags):
    scene = scene(**flags)
    batch, mask, cfg = scene.batch, scene.batch.mask, scene.cfg
    batch.rewards = randn(7, 2)
    said = randn(14, 8, seed=1)
    A, returns, values, metrics = ppo.compute_advantages(
        lambda *_: said, scene.reference, load_task(cfg), batch, cfg, beta=0.1)

    token_kl = (batch.logps - scene.ref_logps()) * mask
    rewards = -0.1 * token_kl
    rewards[range(14), batch.lengths - 1] += batch.rewards.flatten()
    lam = 1 - 1 / batch.lengths[:, None] if cfg.length_adaptive else cfg.lam
    close(A, ppo.whiten(ppo.gae(rewards, said, mask, cfg.gamma, lam)[0], mask), atol=1e-7)
    close(returns, ppo.gae(rewards, said, mask, cfg.gamma, cfg.critic_lam)[1])
    close(values, said * mask)
    assert metrics["kl"] == pytest.approx((token_kl.sum() / mask.sum()).item())
    _, true_returns = ppo.gae(rewards, said, mask, cfg.gamma, 1.0)      # lambda 1 in any case
    explained = ppo.explained_variance(said, true_returns, mask)
    assert metrics["explained_variance"] == pytest.approx(explained)


@with_scene
@pytest.mark.parametrize("flags", [
    {}, {"nll_coef": 0.3, "entropy_coef": 0.2}, {"trust_region": "penalty", "nll_coef": 0.3}],
    ids=str)
def test_the_gradient_of_an_update_is_that_of_the_equations_whatever_the_micro_batches(
        scene, flags):
    scene = scene(**flags)
    batch, cfg = scene.batch, scene.cfg
    rows = torch.tensor([0, 1, 4, 5, 6, 7, 12, 13])
    batch.is_correct = torch.arange(14).view(7, 2) % 3 == 0
    logps, entropy = ppo.score(scene.policy, batch.prompts, batch.tokens, cfg.temperature)
    if cfg.trust_region == "clip":
        loss = ppo.policy_loss(logps, batch.logps, scene.A, batch.mask, 0.2, 0.28)
    else:
        loss = ppo.penalty_loss(logps, batch.logps, scene.A, batch.mask, 0.5)
    is_valid = torch.zeros(14, 8, dtype=torch.bool)
    is_valid[rows] = batch.mask[rows] > 0
    is_right = is_valid & batch.is_correct.view(14, 1)
    loss = (loss - cfg.entropy_coef * entropy)[is_valid].mean()
    loss = loss - cfg.nll_coef * logps[is_right].mean()
    expected = gradient_of(loss, scene.policy)
    for size in (1, 3, 32):
        metrics, gradient = scene.backward(rows, micro_batch_size=size)
        close(gradient, expected, atol=1e-11)
        assert metrics["loss"] == pytest.approx(loss.item())


@with_scene
@pytest.mark.parametrize("trust_region, target_kl, num_steps, is_moved", [
    ("clip", 0.0, 4, True), ("clip", 1e9, 4, True), ("clip", 1e-9, 1, False),
    ("penalty", 1e-9, 4, True)])
def test_with_the_clip_passes_end_before_the_step_of_a_policy_that_has_gone_too_far(
        scene, spy, trust_region, target_kl, num_steps, is_moved):
    scene = scene(num_iterations=4, trust_region=trust_region, target_kl=target_kl)
    before = weights(scene.policy)                      # it is already far from the batch
    steps = spy(lambda args, metrics: metrics["approx_kl"])
    scene.update()
    assert len(steps) == num_steps and steps[0] > 1e-6
    assert torch.equal(weights(scene.policy), before) != is_moved


@with_scene
def test_how_far_an_update_went_is_what_the_policy_says_after_it_to_one_row_of_each_group(scene):
    scene = scene()
    metrics = scene.update()
    batch = scene.batch
    logps, _ = ppo.score(scene.policy, batch.prompts[::2], batch.tokens[::2], 0.7)
    token_kl = ppo.kl(batch.logps[::2], logps.detach()) * batch.mask[::2]
    expected = token_kl.sum() / batch.mask[::2].sum()
    assert metrics["policy_kl"] == pytest.approx(expected.item())
    logps, _ = ppo.score(scene.policy, batch.prompts, batch.tokens, 0.7)
    token_kl = ppo.kl(batch.logps, logps.detach()) * batch.mask
    metrics, _ = scene.backward(torch.arange(len(logps)))
    assert metrics["approx_kl"] == pytest.approx((token_kl.sum() / batch.mask.sum()).item())


@with_scene
def test_the_coefficients_adapt_each_to_its_own_kl(train):
    """beta adapts to the KL from the base, which grows, and penalty_coef adapts to the KL from the
    policy that sampled."""
    logged = train("--trust_region penalty --num_iterations 2 --beta 0.1 --kl_target 0.5 "
                   "--target_kl 1e-6", num_steps=4).metrics
    for now, then in zip(logged, logged[1:]):
        assert then["beta"] == ppo.adapt_coefficient(now["beta"], now["kl"], 0.5)
        assert then["penalty_coef"] == ppo.adapt_coefficient(
            now["penalty_coef"], now["policy_kl"], 1e-6)
    assert [step["beta"] for step in logged[:2]] == [0.1, 0.05]
    assert logged[1]["penalty_coef"] == 2.0


# ---- the critic ------------------------------------------------------------------------------

@with_scene
@pytest.mark.parametrize("size, limit", [(14, 1e9), (4, 0.005), (1, 1e9)])
def test_the_critics_step_is_that_of_equation_7_over_all_tokens_and_forgets_the_gradient_before_it(
        scene, size, limit):
    scene = scene(cliprange_value=0.3, micro_batch_size=size, max_grad_norm=limit)
    batch = scene.batch
    before = weights(scene.policy)
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(2, *batch.mask.shape, generator=generator).double()
    batch.values, returns = noise * batch.mask
    critic = ppo.Critic(scene.policy)
    critic.head.data.copy_(torch.linspace(-1, 1, 16))
    V = critic(batch.prompts, batch.tokens)
    near = batch.values + (V - batch.values).clamp(-0.3, 0.3)
    errors = torch.maximum((V - returns) ** 2, (near - returns) ** 2) / 2 * batch.mask
    loss = errors.sum() / batch.mask.sum()
    expected = gradient_of(loss, critic)
    for weight in critic.parameters():
        weight.grad = torch.ones_like(weight)
    start = weights(critic)
    optimizer = torch.optim.SGD(critic.parameters(), lr=1.0)
    metrics = ppo.fit_critic(critic, optimizer, batch, returns, scene.cfg, "shuffle", 0)
    step = expected * min(1, limit / (expected.norm() + 1e-6))
    torch.testing.assert_close(start - weights(critic), step, atol=1e-10, rtol=0)
    assert expected.norm() > 0.01
    assert metrics == pytest.approx(
        {"value_loss": loss.item(), "critic_grad_norm": expected.norm().item()})
    assert torch.equal(weights(scene.policy), before)           # the critic is a copy


@with_scene
def test_before_training_the_critic_learns_whole_returns_while_the_policy_stays(train, monkeypatch):
    compute_advantages = ppo.compute_advantages
    calls = []

    def spied(critic, reference, task, batch, cfg, beta):
        calls.append((cfg.critic_lam, batch.tokens.tolist()))
        return compute_advantages(critic, reference, task, batch, cfg, beta)
    monkeypatch.setattr(ppo, "compute_advantages", spied)
    alone_first = train("--critic_pretrain_steps 3 --critic_lam 0.5", num_steps=3).metrics
    assert [critic_lam for critic_lam, _ in calls] == [1.0] * 3 + [0.5] * 3
    assert len({str(tokens) for _, tokens in calls}) == 6       # all batches differ
    first_step = calls[3][1]
    calls.clear()
    plain = train("", num_steps=3).metrics
    assert calls[0][1] == first_step                            # the policy is still the base
    assert alone_first[0]["explained_variance"] != plain[0]["explained_variance"]
