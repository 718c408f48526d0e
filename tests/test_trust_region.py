"""How far an update of ppo.py may go: the end of its passes, TRPO, and coefficients that adapt."""
import pytest
import torch
from conftest import scripts
from update_scenes import weights

pytestmark = [pytest.mark.quick, scripts("ppo")]


# ---- passes that end early -------------------------------------------------------------------

def policy_weights(args, metrics):
    """The weights of the policy when backward was called."""
    return weights(args[0])


@pytest.mark.parametrize("target_kl, num_steps, is_moved", [
    (0.0, 4, True), (1e9, 4, True), (1e-9, 1, False)])
def test_passes_end_when_the_policy_has_gone_too_far_and_that_step_is_not_taken(
        scene, spy, target_kl, num_steps, is_moved):
    scene = scene(num_iterations=4, target_kl=target_kl)        # it is far from the batch at once
    before = weights(scene.policy)
    steps = spy(policy_weights)
    metrics = scene.update()
    assert len(steps) == num_steps
    assert metrics["policy_kl"] > 1e-6
    assert torch.equal(weights(scene.policy), before) != is_moved


def test_the_step_behind_the_one_that_went_too_far_is_not_taken(fresh_scene, spy):
    scene = fresh_scene(num_iterations=9, target_kl=0.002, num_prompts=7, num_generations=2,
                        temperature=1.0)
    steps = spy(lambda args, metrics: (weights(args[0]), metrics["policy_kl"]))
    scene.update()
    assert 2 < len(steps) < 9
    *earlier, (last_weights, last_kl) = steps
    assert all(policy_kl <= 0.003 for _, policy_kl in earlier)
    assert last_kl > 0.003
    assert torch.equal(weights(scene.policy), last_weights)     # it is left where that was seen


@pytest.mark.parametrize("trust_region, num_steps", [("clip", 1), ("penalty", 4)])
def test_only_with_the_clip_do_passes_end_early(scene, spy, trust_region, num_steps):
    scene = scene(trust_region=trust_region, target_kl=1e-9, num_iterations=4)
    steps = spy(policy_weights)
    scene.update()
    assert len(steps) == num_steps


# ---- TRPO ------------------------------------------------------------------------------------

def test_trpo_goes_uphill_but_not_out_of_the_trust_region(script, fresh_scene):
    scene = fresh_scene(trust_region="trpo", max_kl=0.02)
    batch = scene.batch
    mask = batch.mask
    A = script.whiten(scene.A, mask)
    metrics = scene.update(A=A)

    def mean(x):
        return ((x * mask).sum() / mask.sum()).item()

    def log_p(policy):
        """Of all tokens of the vocabulary, (B, T, V)."""
        hidden = script.completion_states(policy, batch.prompts, batch.tokens)
        logits = hidden @ policy.embed.weight.T / scene.cfg.temperature
        return logits.log_softmax(dim=-1).detach()
    old = log_p(scene.reference)
    new = log_p(scene.policy)
    policy_kl = mean((old.exp() * (old - new)).sum(dim=-1))
    assert 0.3 * 0.02 < policy_kl <= 0.02
    assert metrics["policy_kl"] == pytest.approx(policy_kl)
    logps = new.gather(-1, batch.tokens[..., None])[..., 0]
    gain = mean((logps - batch.logps).exp() * A)
    assert gain > 0.01
    assert metrics["max_log_ratio"] < 1e-12                     # before the step


def test_trpo_weighs_entropy_and_likelihood_as_equation_5_does(script, fresh_scene):
    """By the gradient that it logs, which is that of (5) where the policy is the one that sampled.
    """
    scene = fresh_scene(trust_region="trpo", nll_coef=0.3, entropy_coef=0.05)
    scene.batch.is_correct = (torch.arange(16) % 3 == 0).view(4, 4)
    metrics, gradient = scene.backward(torch.arange(16), 0.05, trust_region="clip")
    assert scene.update()["grad_norm"] == pytest.approx(gradient.norm().item())
    assert metrics["loss"] == pytest.approx(scene_loss(scene), rel=1e-9)


def scene_loss(scene):
    """Equation (5) before the update: all ratios are 1."""
    batch = scene.batch
    mask = batch.mask
    right = mask * batch.is_correct.view(-1, 1)
    surrogate = (scene.A * mask).sum() / mask.sum()
    entropy = (batch.entropy * mask).sum() / mask.sum()
    likelihood = (batch.logps * right).sum() / right.sum()
    return (-surrogate - 0.05 * entropy - 0.3 * likelihood).item()


# ---- coefficients ----------------------------------------------------------------------------

def test_the_coefficients_adapt_each_to_its_own_kl(script, train):
    """beta to the KL from the base, which grows; that of the penalty to the KL from the policy that
    sampled."""
    logged = train("--trust_region penalty --num_iterations 2 --beta 0.1 --kl_target 0.5 "
                   "--target_kl 1e-6", num_steps=4).metrics
    for now, then in zip(logged, logged[1:]):
        assert then["beta"] == script.adapt_coefficient(now["beta"], now["kl"], 0.5)
        assert then["penalty_coef"] == script.adapt_coefficient(
            now["penalty_coef"], now["policy_kl"], 1e-6)
    assert logged[0]["kl"] < 1e-6
    assert logged[0]["policy_kl"] > 1e-6
    assert (logged[0]["beta"], logged[1]["beta"]) == (0.1, 0.05)
    assert logged[1]["penalty_coef"] == 2.0


def test_the_coefficient_of_a_penalty_that_there_is_not_stays(train):
    logged = train("--target_kl 1e-6", num_steps=4).metrics     # the clip has none
    assert {metrics["penalty_coef"] for metrics in logged} == {1.0}
