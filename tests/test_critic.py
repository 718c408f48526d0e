"""The critic of ppo.py: what it says, what it learns from, and that it may learn alone at first.
How it reads prompts is in test_scoring.py, its loss in test_ppo.py."""
import pytest
import torch
from conftest import scripts
from update_scenes import gradient_of, weights

import ppo

pytestmark = [pytest.mark.quick, scripts("ppo")]


@pytest.mark.parametrize("size", [14, 4, 1])
def test_its_step_is_that_of_equation_7_over_all_tokens_and_forgets_the_gradient_before_it(
        scene, size):
    scene = scene(cliprange_value=0.3, micro_batch_size=size, max_grad_norm=1e9)
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
    torch.testing.assert_close(start - weights(critic), expected, atol=1e-10, rtol=0)
    assert expected.norm() > 0.01
    assert metrics == pytest.approx(
        {"value_loss": loss.item(), "critic_grad_norm": expected.norm().item()})
    assert torch.equal(weights(scene.policy), before)           # it is another model


def test_before_training_it_learns_whole_returns_while_the_policy_stays(train, monkeypatch):
    compute_advantages = ppo.compute_advantages
    calls = []

    def spied(critic, reference, task, batch, cfg, beta):
        calls.append((cfg.critic_lam, batch.tokens.tolist()))
        return compute_advantages(critic, reference, task, batch, cfg, beta)
    monkeypatch.setattr(ppo, "compute_advantages", spied)
    alone_first = train("--critic_pretrain_steps 3 --critic_lam 0.5", num_steps=3).metrics
    assert [critic_lam for critic_lam, _ in calls] == [1.0] * 3 + [0.5] * 3
    assert len({str(tokens) for _, tokens in calls}) == 6       # each batch is another
    first_step = calls[3][1]
    calls.clear()
    plain = train("", num_steps=3).metrics
    assert calls[0][1] == first_step                            # the policy is still the base
    assert alone_first[0]["explained_variance"] != plain[0]["explained_variance"]
