"""The critic of ppo.py: what it says, what it learns from, and that it may learn alone at first."""
import pytest
import torch
from conftest import scripts
from update_scenes import made_estimates, weights

pytestmark = [pytest.mark.quick, scripts("ppo")]


@pytest.fixture
def critic_case(script, config, talker):
    """A critic in float64, prompts (3, 5) of two different ones, completions (3, 6)."""
    critic = script.Critic(talker(config())).double()
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(256, (2, 5), generator=generator)[[1, 0, 1]]
    completions = torch.randint(255, (3, 6), generator=generator)
    return critic, prompts, completions


def test_at_first_it_expects_nothing(critic_case):
    critic, prompts, completions = critic_case
    assert (critic(prompts, completions) == 0).all()


def test_the_value_of_a_slot_is_what_to_expect_before_its_token_is_read(critic_case):
    critic, prompts, completions = critic_case
    critic.head.data.copy_(torch.linspace(-1, 1, 16))
    values = critic(prompts, completions)
    assert values.shape == (3, 6)
    assert values[0, 0] == values[2, 0]         # of the same prompt
    assert values[0, 0] != values[1, 0]
    for t in range(6):
        changed = completions.clone()
        changed[:, t] += 1
        is_changed = (critic(prompts, changed) - values).abs().amax(dim=0) > 1e-9
        assert not is_changed[:t + 1].any()
        assert t == 5 or is_changed[t + 1]


def test_it_learns_from_the_gradient_of_this_step_alone(script, scene):
    scene = scene()
    zeros = torch.zeros_like(scene.batch.mask)
    estimates = made_estimates(script, zeros, returns=zeros + 1, values=zeros)
    ends = []
    for before in (0.0, 1.0):
        critic = script.Critic(scene.policy)
        for weight in critic.parameters():
            weight.grad = torch.full_like(weight, before)
        optimizer = torch.optim.SGD(critic.parameters())
        script.fit_critic(critic, optimizer, scene.batch, estimates, torch.arange(14), scene.cfg)
        ends.append(weights(critic))
    assert torch.equal(*ends)
    assert (ends[0] - weights(script.Critic(scene.policy))).norm() > 1e-4


def test_before_training_it_learns_whole_returns_while_the_policy_stays(
        script, train, monkeypatch):
    compute_advantages = script.compute_advantages
    calls = []

    def spied(critic, reference, batch, cfg, beta, critic_lam):
        calls.append((critic_lam, batch.tokens.tolist()))
        return compute_advantages(critic, reference, batch, cfg, beta, critic_lam)
    monkeypatch.setattr(script, "compute_advantages", spied)
    alone_first = train("--critic_pretrain_steps 3 --critic_lam 0.5", num_steps=4).metrics
    assert [critic_lam for critic_lam, _ in calls] == [1.0] * 3 + [0.5] * 4
    first_step = calls[3]
    assert len({str(tokens) for _, tokens in calls}) == 7       # each batch is another
    calls.clear()
    plain = train("", num_steps=4).metrics
    assert [critic_lam for critic_lam, _ in calls] == [None] * 4
    assert calls[0][1] == first_step[1]                         # the policy is still the base
    assert alone_first[0]["entropy"] == plain[0]["entropy"]
    assert alone_first[0]["explained_variance"] != plain[0]["explained_variance"]
