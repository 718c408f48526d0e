"""What an update learns from completions with inserted tokens: nothing of these, no number of them
counts in a loss, a gradient, a metric or a reward."""
import copy
import dataclasses

import pytest
import torch
from conftest import every_script, scripts
from echo_task import Echo, is_inserted
from update_scenes import Scene, as_advantages, made_estimates, shift, weights

import common

# Flags with which each script's losses are tried.
VARIANTS = {
    "reinforce": [{}],
    "ppo": [{}, {"trust_region": "penalty", "nll_coef": 0.2}],
    "grpo": [{"beta": 0.1, "loss_type": name} for name in ("grpo", "dapo", "cispo", "sapo")],
    "gspo": [{"beta": 0.1}, {"importance_sampling_level": "sequence_token", "loss_type": "cispo"}],
    "dpo": [{}, {"loss_type": "ipo"}]}


@pytest.fixture
def echo_scene(script, asker):
    """echo_scene(**changes): a Scene of 24 rows with inserted tokens, sampled by an older policy.
    No advantage is 0."""
    def make(**changes):
        cfg, policy = asker(**changes)
        generator = torch.Generator().manual_seed(0)
        batch = script.sample_batch(policy, Echo(cfg), cfg, 0)
        reference = copy.deepcopy(policy)
        shift(reference, 0.02, generator)
        shift(policy, 0.02, generator)
        A = torch.randn(24, generator=generator).double()
        A = as_advantages(script, A, batch.mask * torch.rand(24, 24, generator=generator))
        assert is_inserted(batch.tokens).any(dim=1).sum() > 5
        return Scene(script, cfg, policy, reference, batch, A)
    return make


def learn(scene):
    """What every kind of optimizer step that the script has computes. -> dict"""
    metrics, gradient = scene.backward(torch.arange(24), entropy_coef=0.03)
    found = {"metrics": metrics, "gradient": gradient}
    if scene.script.__name__ == "ppo":
        found |= learn_by_critic_and_trpo(scene)
    return found


def learn_by_critic_and_trpo(scene):
    """A step of the critic, and one of a copy of the policy by TRPO. -> dict"""
    script, batch, cfg, A = scene.script, scene.batch, scene.cfg, scene.A
    critic = script.Critic(scene.policy)
    optimizer = torch.optim.SGD(critic.parameters())
    estimates = made_estimates(script, A, returns=A + 1.0 * (batch.mask > 0), values=A)
    critic_metrics = script.fit_critic(
        critic, optimizer, batch, estimates, torch.arange(24), cfg)
    policy = copy.deepcopy(scene.policy)
    trpo_metrics = script.trpo_update(policy, batch, A, cfg, 0.03)
    return {"critic": critic_metrics, "trpo": trpo_metrics, "weights": weights(policy)}


# ---- losses and metrics ----------------------------------------------------------------------

@every_script
def test_a_loss_its_gradient_and_its_metrics_do_not_see_the_slots_of_inserted_tokens(
        script, echo_scene):
    for changes in VARIANTS[script.__name__]:
        scene = echo_scene(**changes)
        batch = scene.batch
        inserted = is_inserted(batch.tokens)
        assert (batch.mask[inserted] == 0).all()
        before = learn(scene)
        described = common.describe(batch)
        batch.logps[inserted] += 5.0
        batch.entropy[inserted] += 7.0
        if scene.A.dim() == 2:
            scene.A[inserted] += 3.0
        torch.testing.assert_close(learn(scene), before, atol=0, rtol=0)
        assert common.describe(batch) == described
        assert before["gradient"].norm() > 1e-3


@scripts("ppo", "grpo", "gspo")
def test_the_slots_of_sampled_tokens_count(script, echo_scene):
    for changes in VARIANTS[script.__name__]:
        scene = echo_scene(**changes)
        before = learn(scene)
        scene.batch.logps[scene.batch.mask == 1] += 0.5
        assert learn(scene)["metrics"]["loss"] != before["metrics"]["loss"]


@pytest.fixture
def scored(script, monkeypatch):
    """A list that will hold tokens, log-probs and entropies (b, T) of each call of score that is
    differentiated; after the backward pass the latter two have gradients."""
    score = script.score
    kept = []

    def keep(model, prompts, tokens, *options):
        logps, entropy = score(model, prompts, tokens, *options)
        if torch.is_grad_enabled():
            logps.retain_grad()
            entropy.retain_grad()
            kept.append((tokens, logps, entropy))
        return logps, entropy
    monkeypatch.setattr(script, "score", keep)
    return kept


@every_script
def test_no_gradient_goes_through_the_probability_of_an_inserted_token(script, echo_scene, scored):
    wide_clip = {"epsilon": 9.0, "epsilon_high": 9.0}       # else all of GSPO's rows are clipped
    changes = wide_clip if script.__name__ == "gspo" else {}
    scene = echo_scene(micro_batch_size=7, **changes)
    scene.backward(torch.arange(24), entropy_coef=0.03)
    assert len(scored) >= 3
    for tokens, *values in scored:
        inserted = is_inserted(tokens)
        is_sampled = (tokens != script.PAD) & ~inserted
        for value in values:
            if value.grad is not None:                      # not every loss has the entropy in it
                assert (value.grad[inserted] == 0).all()
                assert (value.grad[is_sampled] != 0).any()
    assert any(is_inserted(tokens).any() for tokens, _, _ in scored)


def test_descriptions_are_means_over_sampled_tokens(echo_scene):
    batch = echo_scene().batch
    mask = batch.mask
    described = common.describe(batch)
    assert described["completions/mean_length"] == pytest.approx(mask.sum().item() / 24)
    assert described["entropy"] == pytest.approx(batch.entropy[mask == 1].mean().item())
    assert mask.sum() < batch.lengths.sum()


@scripts("grpo", "gspo")
def test_the_largest_ratio_is_that_of_a_sampled_token(script, echo_scene):
    scene = echo_scene(beta=0.1)
    batch = scene.batch
    logps, _ = script.score(scene.policy, batch.prompts, batch.tokens, scene.cfg.temperature)
    largest = (logps - batch.logps)[batch.mask == 1].abs().max().item()
    batch.logps[batch.mask == 0] -= 9.0
    metrics = learn(scene)["metrics"]
    assert metrics["max_log_ratio"] == pytest.approx(largest)


@every_script
def test_without_the_mask_what_is_inserted_is_learned_and_counted_like_the_rest(echo_scene):
    masked = echo_scene()
    unmasked = echo_scene(mask_tool_tokens=False)
    batch = unmasked.batch
    assert torch.equal(batch.tokens, masked.batch.tokens)
    assert torch.equal(batch.lengths, masked.batch.lengths)
    assert torch.equal(batch.mask.sum(dim=1).long(), batch.lengths)
    difference = learn(unmasked)["gradient"] - learn(masked)["gradient"]
    assert difference.abs().max() > 1e-3
    name = "completions/mean_length"
    assert common.describe(batch)[name] > common.describe(masked.batch)[name]


# ---- rewards ---------------------------------------------------------------------------------

@scripts("grpo", "gspo")
@pytest.mark.parametrize("is_masked", ["true", "false"])
def test_the_overlong_penalty_counts_what_the_limit_counts_inserted_tokens_too(
        script, asker, monkeypatch, train, is_masked):
    """main adds it to rewards of one for each ?, with 24 tokens at most and a buffer of 12. A
    completion that is cut at the limit is so with or without the mask."""
    cfg, policy = asker(dtype=torch.float32)
    task = Echo(cfg)
    monkeypatch.setattr(script, "GPT", lambda cfg: policy)
    monkeypatch.setattr(common, "load_task", lambda cfg, verify: task)
    run = train("--max_completion_length 24 --overlong_buffer 12 --num_prompts 6 "
                f"--temperature 0.8 --learning_rate 0 --mask_tool_tokens {is_masked}", num_steps=1)
    batch = run.batches[0]
    num_calls = torch.tensor([text.count("?") for text in batch.texts])
    penalty = ((12 - batch.lengths) / 12).clamp(-1, 0)
    found = batch.rewards.flatten() - num_calls
    torch.testing.assert_close(found, penalty)
    assert (found[batch.is_truncated] == -1).all()
    num_sampled = (~is_inserted(batch.tokens) & (batch.tokens != script.PAD)).sum(dim=1)
    assert (batch.is_truncated & (num_sampled <= 12)).any()     # cut although it said little
    assert ((penalty > -1) & (penalty < 0)).any()


@scripts("reinforce", "ppo")
def test_a_reward_for_a_character_lands_on_its_token_also_behind_a_response(script, asker):
    class Rising(Echo):
        def verify(self, problem, text):
            rewards = []
            for i, character in enumerate(text):
                rewards.append(ord(character) % 7 * text[:i].count("?") ** 2 / 64)
            return rewards
    cfg, policy = asker()
    batch = script.sample_batch(policy, Rising(cfg), cfg, 0)
    found = common.token_rewards(batch, script.decode)
    num_calls = 0
    for row, verdict in enumerate(batch.verdicts):
        n = batch.lengths[row].item()
        ids = batch.tokens[row, :n].tolist()
        mask = batch.mask[row, :n].tolist()
        expected = []
        start = 0                                           # characters before the token
        for token, is_sampled in zip(ids, mask):
            end = start + (len(script.decode([token])) if token != script.EOS else 0)
            expected.append(sum(verdict[start:end]) * is_sampled)
            start = end
        assert start == len(verdict)
        last = max(t for t in range(n) if mask[t])
        expected[last] += sum(verdict) - sum(expected)      # nothing is lost
        assert found[row].tolist() == pytest.approx(expected + [0.0] * (24 - n), abs=1e-5)
        num_calls += ids.count(ord("?"))
    assert num_calls > 10


def advantages_of(scene):
    """What compute_advantages makes of a batch, as a list of tensors."""
    script, batch = scene.script, scene.batch
    if script.__name__ == "reinforce":
        cfg = dataclasses.replace(scene.cfg, beta=0.1, view="token", baseline="rloo", gamma=0.9)
        rewards = script.token_rewards(None, batch, cfg)
        return [script.compute_advantages(scene.policy, scene.reference, batch, rewards, cfg)]
    found = script.compute_advantages(
        script.Critic(scene.policy), scene.reference, batch, scene.cfg, 0.1, 1.0)
    numbers = torch.tensor([found.kl, found.explained_variance])
    return [found.advantages, found.returns, found.values, numbers]


@scripts("reinforce", "ppo")
def test_the_advantage_of_a_token_does_not_see_the_log_probs_of_inserted_ones(echo_scene):
    scene = echo_scene()
    is_masked = scene.batch.mask == 0
    before = advantages_of(scene)
    scene.batch.logps[is_masked] += 5.0
    torch.testing.assert_close(advantages_of(scene), before, atol=0, rtol=0)
    for values in before:
        if values.dim() == 2:
            assert (values[is_masked] == 0).all()
    assert before[0][~is_masked].std() > 0.01
