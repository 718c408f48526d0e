"""Test the critic of ppo.py, and its way from a batch to an update."""
import pytest
import torch
from conftest import close, randn, scripts
from update_scenes import gradient_of, weights

import common
import ppo

pytestmark = [pytest.mark.quick, scripts("ppo")]

# ---- from a batch to an update ---------------------------------------------------------------

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


@pytest.mark.parametrize("trust_region, target_kl, num_steps, is_moved", [
    ("clip", 0.0, 4, True), ("clip", 1e9, 4, True), ("clip", 1e-9, 1, False),
    ("penalty", 1e-9, 4, True)])
def test_with_the_clip_passes_end_before_the_step_of_a_policy_that_has_gone_too_far(
        scene, watch, trust_region, target_kl, num_steps, is_moved):
    scene = scene(num_iterations=4, trust_region=trust_region, target_kl=target_kl)
    before = weights(scene.policy)                      # it is already far from the batch
    histories = watch(common, "mean_metrics", lambda history: history)
    scene.update()
    [steps] = histories
    assert len(steps) == num_steps and steps[0]["approx_kl"] > 1e-6
    assert torch.equal(weights(scene.policy), before) != is_moved


def test_how_far_an_update_went_is_what_the_policy_says_after_it_to_one_row_of_each_group(scene):
    scene = scene()
    metrics = scene.update()
    batch = scene.batch
    logps, _ = ppo.score(scene.policy, batch.prompts, batch.tokens, 0.7)
    token_kl = ppo.kl(batch.logps, logps.detach()) * batch.mask
    expected = token_kl[::2].sum() / batch.mask[::2].sum()
    assert metrics["policy_kl"] == pytest.approx(expected.item())
    metrics, _ = scene.backward(torch.arange(len(logps)))
    assert metrics["approx_kl"] == pytest.approx((token_kl.sum() / batch.mask.sum()).item())


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
    assert ppo.adapt_coefficient(3.0, 9.0, 0.0) == 3.0          # without a target


# ---- the critic ------------------------------------------------------------------------------

@pytest.mark.parametrize("size, limit", [(14, 1e9), (4, 0.005), (1, 0.0)])
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
    step = expected * min(1, (limit or 1e9) / (expected.norm() + 1e-6))
    torch.testing.assert_close(start - weights(critic), step, atol=1e-10, rtol=0)
    assert expected.norm() > 0.01
    assert metrics == pytest.approx(
        {"value_loss": loss.item(), "critic_grad_norm": expected.norm().item()})
    assert torch.equal(weights(scene.policy), before)           # the critic is a copy


def test_each_step_of_the_critic_averages_over_its_own_tokens(scene):
    scene = scene(num_mini_batches=2)
    batch = scene.batch
    batch.values, returns = 0 * batch.mask, randn(14, 8) * batch.mask
    critic = ppo.Critic(scene.policy)                           # it predicts 0
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.0)
    metrics = ppo.fit_critic(critic, optimizer, batch, returns, scene.cfg, "shuffle", 0)
    means = [returns[rows].square().sum() / 2 / batch.mask[rows].sum()
             for rows in common.mini_batches(batch, scene.cfg, "shuffle", 0)]
    assert metrics["value_loss"] == pytest.approx(sum(means).item() / 2) and len(means) == 2


def test_before_training_the_critic_learns_whole_returns_while_the_policy_stays(train, watch):
    calls = watch(ppo, "compute_advantages", lambda critic, reference, task, batch, cfg, beta: (
        cfg.critic_lam, batch.tokens.tolist()))
    alone_first = train("--critic_pretrain_steps 3 --critic_lam 0.5", num_steps=3).metrics
    assert [critic_lam for critic_lam, _ in calls] == [1.0] * 3 + [0.5] * 3
    assert len({str(tokens) for _, tokens in calls}) == 6       # all batches differ
    first_step = calls[3][1]
    calls.clear()
    plain = train("", num_steps=3).metrics
    assert calls[0][1] == first_step                            # the policy is still the base
    assert alone_first[0]["explained_variance"] != plain[0]["explained_variance"]
