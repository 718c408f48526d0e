"""What an update logs: against numbers worked out by hand, and means over its optimizer steps."""
import copy
import math

import pytest
import torch
from conftest import every_script, f64, scripts
from update_scenes import Scene, as_advantages, made_batch, shift, weights

import common

pytestmark = pytest.mark.quick

with_a_kl = scripts("reinforce", "grpo", "gspo")


PASS_RATES = {"arithmetic-5": [0.5, 0.0, 0.0], "arithmetic-6": [0.5]}     # of a group more


# ---- numbers worked out by hand --------------------------------------------------------------

@pytest.fixture
def known_scene(script, config, bigram):
    """Six rows of a policy to which every token has probability 1 / V. To the reference, too, but
    for token 4 after token 3, which has one half."""
    V, EOS, PAD = script.VOCAB_SIZE, script.EOS, script.PAD
    policy = bigram(torch.zeros(V, V, dtype=torch.float64))
    reference = bigram(torch.zeros(V, V, dtype=torch.float64))
    reference.table.data[3, 4] = math.log(V - 1)
    tokens = [[EOS, PAD, PAD, PAD], [3, 4, EOS, PAD], [5, 6, 7, 8], [5, EOS, PAD, PAD],
              [9, EOS, PAD, PAD], [9, EOS, PAD, PAD]]
    mask = f64([[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]])
    ratios = f64([[0.5, 1, 1, 1], [1, 1.5, 1.2, 1], [1, 1, 1, 0.7], [1.4, 1, 1, 1],
                  [0.5, 1.5, 1, 1], [1, 1, 1, 1]])
    rewards = torch.tensor([[0.0, 1.0], [0.5, 0.5], [0.2, 0.2]])
    old_logps = -math.log(V) - ratios.log()
    batch = made_batch(script, [[1]] * 6, tokens, mask, old_logps, 2, rewards, PASS_RATES)
    cfg = config(num_prompts=3, num_generations=2, max_completion_length=4, beta=0.1,
                 max_grad_norm=1e9, epsilon=0.2,
                 epsilon_high=0.28 if script.__name__ == "grpo" else 0.2)
    A = as_advantages(script, f64([-1, 2, 1, -1, 0, 0]), mask)
    return Scene(script, cfg, policy, reference, batch, A)


# The loss of each row of known_scene, and how many of its 14 tokens are clipped.
GRPO_LOSSES = [0.8, -(2 + 2.56 + 2.4) / 3, -3.7 / 4, (1.4 + 1) / 2, 0, 0]
GRPO_CLIPPED = {"clip_ratio/region_mean": 1 + 1}            # of the first row, and the ratio 1.5
GSPO_LOSSES = [0.8, -2.4, -0.7 ** (1 / 4), 1.4 ** (1 / 2), 0, 0]
GSPO_CLIPPED = {"clip_ratio/region_mean": 1 + 3,            # the first two rows
                "clip_ratio/token_region_mean": 1 + 1}      # what GRPO would clip


@pytest.mark.parametrize("script, losses, clipped", [
    ("grpo", GRPO_LOSSES, GRPO_CLIPPED), ("gspo", GSPO_LOSSES, GSPO_CLIPPED)],
    indirect=["script"], ids=["grpo", "gspo"])
def test_metrics_match_a_hand_computed_batch(known_scene, losses, clipped):
    V = 320
    _, gradient = known_scene.backward(torch.arange(6))
    metrics = known_scene.update()
    x = math.log(2 / V)                     # log pi / pi_ref of token 4 after token 3
    k3 = math.exp(-x) + x - 1
    sum_of_log_ratios = math.log(0.5 * 1.5 * 1.2 * 0.7 * 1.4 * 0.5 * 1.5)
    expected = {
        "loss": sum(losses) / 6 + 0.1 * k3 / 3 / 6,
        "kl": (x - sum_of_log_ratios) / 14,
        "max_log_ratio": math.log(2),
        "sampling/sampling_logp_difference/max": math.log(2),
        "grad_norm": gradient.norm().item(),
        "learning_rate": known_scene.cfg.learning_rate}
    for name, count in clipped.items():
        expected[name] = count / 14
    assert metrics == pytest.approx(expected, rel=1e-6)


# With an upper bound of 0.1: how many of the 14 tokens have a weight above it, in rows with an
# advantage of either sign.
@pytest.mark.parametrize("script, num_capped", [
    ("grpo", 3),                            # ratios 1.5 and 1.2, 1.4, not 1.5 in the fifth row
    ("gspo", 3 + 2)],                       # the second row and the fourth
    indirect=["script"], ids=["grpo", "gspo"])
def test_cispo_says_which_share_of_the_weights_is_capped(known_scene, num_capped):
    metrics, _ = known_scene.backward(
        torch.arange(6), loss_type="cispo", epsilon=0.6, epsilon_high=0.1)
    assert clip_metrics(metrics) == {"clip_ratio/capped_mean": pytest.approx(num_capped / 14)}


@pytest.mark.parametrize("script", ["grpo", "gspo"], indirect=True)
@pytest.mark.parametrize("loss_type", ["grpo", "cispo"])
def test_the_share_that_is_clipped_is_of_all_tokens_with_and_without_a_kl(known_scene, loss_type):
    with_kl, _ = known_scene.backward(torch.arange(6), loss_type=loss_type, beta=0.1)
    without, _ = known_scene.backward(torch.arange(6), loss_type=loss_type, beta=0.0)
    assert clip_metrics(with_kl) == pytest.approx(clip_metrics(without))
    assert min(clip_metrics(with_kl).values()) > 0


def clip_metrics(metrics):
    return {name: value for name, value in metrics.items() if "clip" in name}


# Tuples, since the order in a set, and so the name of a test, differs from process to process.
REGION = ("clip_ratio/region_mean",)
BOTH_REGIONS = (*REGION, "clip_ratio/token_region_mean")
CAPPED = ("clip_ratio/capped_mean",)


@pytest.mark.parametrize("script, changes, expected", [
    *(("grpo", {"loss_type": name}, REGION) for name in ("grpo", "dr_grpo", "dapo", "bnpo")),
    ("grpo", {"loss_type": "cispo"}, CAPPED),
    ("grpo", {"loss_type": "sapo"}, ()),
    ("gspo", {}, BOTH_REGIONS),
    ("gspo", {"loss_type": "cispo"}, CAPPED),
    ("gspo", {"loss_type": "sapo"}, ()),
    ("ppo", {}, REGION),
    ("ppo", {"trust_region": "penalty"}, ()),
    ("ppo", {"trust_region": "trpo"}, ()),
    ("reinforce", {}, ()),
    ("dpo", {}, ())], indirect=["script"], ids=str)
def test_what_is_clipped_is_said_only_where_something_clips(scene, changes, expected):
    assert clip_metrics(scene(**changes).update()).keys() == set(expected)


def test_the_description_of_a_batch_matches_one_computed_by_hand(known_scene):
    expected = {
        "reward": 0.4, "reward_std": math.sqrt(0.5) / 3, "signal": 1 / 3,
        "frac_reward_zero_std": 2 / 3, "accuracy": 0.25, "entropy": 0.5,
        "completions/mean_length": 14 / 6, "completions/clipped_ratio": 1 / 6,
        "frontier/arithmetic-5/wrong": 2 / 3, "frontier/arithmetic-5/mixed": 1 / 3,
        "frontier/arithmetic-5/right": 0, "frontier/arithmetic-6/wrong": 0,
        "frontier/arithmetic-6/mixed": 1, "frontier/arithmetic-6/right": 0}
    assert common.describe(known_scene.batch) == pytest.approx(expected, rel=1e-6)


def test_where_nothing_is_judged_there_is_no_accuracy(known_scene):
    described = common.describe(known_scene.batch)
    known_scene.batch.pass_rates = {}
    of_what_is_right = {name for name in described if name.startswith(("accuracy", "frontier"))}
    assert len(of_what_is_right) == 7
    assert common.describe(known_scene.batch).keys() == described.keys() - of_what_is_right


# ---- means over optimizer steps --------------------------------------------------------------

def metrics_of(args, metrics):
    """All that one optimizer step logs."""
    return metrics


def test_the_largest_ratio_of_a_batch_may_be_that_of_any_optimizer_step():
    history = [{"loss": loss, "max_log_ratio": ratio} for loss, ratio in ((1, 0), (2, 5), (6, 3))]
    assert common.mean_metrics(history) == {"loss": 3, "max_log_ratio": 5}


@every_script
def test_metrics_are_means_over_the_optimizer_steps_but_for_the_largest_and_the_first_ratio(
        script, scene, spy):
    scene = scene(num_iterations=2, num_mini_batches=3)
    steps = spy(metrics_of)
    metrics = scene.update()
    assert len(steps) == 6
    for name in steps[0].keys() - {"policy_kl", "max_log_ratio"}:
        mean = sum(step[name] for step in steps) / 6
        assert metrics[name] == pytest.approx(mean), name
    if script.__name__ != "dpo":                        # which has no ratio
        ratios = [step["max_log_ratio"] for step in steps]
        assert metrics["sampling/sampling_logp_difference/max"] == ratios[0]
        assert metrics["max_log_ratio"] == max(ratios)
        assert len(set(ratios)) > 3


@scripts("ppo")
def test_the_explained_variance_is_that_of_the_estimates(scene):
    assert scene().update()["explained_variance"] == 0.25       # made up


@scripts("ppo")
def test_the_kl_of_the_policy_is_that_after_the_last_step_by_every_eighth_row(script, scene, spy):
    scene = scene(num_iterations=2, num_mini_batches=3)
    steps = spy(metrics_of)
    metrics = scene.update()
    batch = scene.batch
    logps, _ = script.score(
        scene.policy, batch.prompts[::8], batch.tokens[::8], scene.cfg.temperature)
    mask = batch.mask[::8]
    expected = (script.kl(batch.logps[::8], logps, "k3") * mask).sum() / mask.sum()
    assert metrics["policy_kl"] == pytest.approx(expected.item())
    assert metrics["policy_kl"] != steps[-1]["policy_kl"]


@scripts("reinforce", "ppo", "grpo", "gspo")
def test_on_fresh_samples_the_first_ratio_is_one(script, fresh_scene):
    metrics = fresh_scene().update()
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-12
    assert metrics.get("clip_ratio/region_mean", 0) == 0
    if script.__name__ == "ppo":                        # it measures after the step
        assert metrics["policy_kl"] > 1e-6
    else:
        assert metrics["kl"] == pytest.approx(0, abs=1e-12)


# ---- the KL to the base ----------------------------------------------------------------------

@pytest.fixture
def kl_scene(script, config, talker, load_task):
    """kl_scene(**changes): 32 rows that the policy has just sampled, one inserted token among them,
    and a reference some way off."""
    def make(**changes):
        cfg = config(num_prompts=8, num_generations=4, temperature=0.7, **changes)
        policy = talker(cfg).double()
        reference = copy.deepcopy(policy)
        reference.embed.weight.data *= 1.1
        shift(reference, 0.01, torch.Generator().manual_seed(0))
        batch = script.sample_batch(policy, load_task(cfg), cfg, 0)
        assert batch.lengths[8] == 2
        batch.mask[8, 1] = 0.0
        A = torch.linspace(-1, 1, 32, dtype=torch.float64)
        return Scene(script, cfg, policy, reference, batch, as_advantages(script, A, batch.mask))
    return make


@with_a_kl
def test_the_kl_is_that_of_the_policy_that_sampled_by_every_eighth_row(
        script, kl_scene, monkeypatch):
    scene = kl_scene(beta=0.0)
    batch = scene.batch
    is_sampled = batch.mask[::8] == 1
    expected = (batch.logps - scene.ref_logps())[::8][is_sampled].mean().item()
    score = script.score
    num_rows = []

    def counting_score(model, prompts, tokens, *options):
        if model is scene.reference:
            num_rows.append(len(tokens))
        return score(model, prompts, tokens, *options)
    monkeypatch.setattr(script, "score", counting_score)
    metrics = scene.update()
    assert num_rows == [4]
    assert metrics["kl"] == pytest.approx(expected, rel=1e-9)
    assert abs(expected) > 1e-3


@with_a_kl
def test_with_a_kl_in_the_loss_or_the_reward_it_is_that_of_all_rows(kl_scene):
    scene = kl_scene(beta=0.5)
    is_sampled = scene.batch.mask == 1
    expected = (scene.batch.logps - scene.ref_logps())[is_sampled].mean().item()
    metrics = scene.update()
    assert metrics["kl"] == pytest.approx(expected, rel=1e-9)


@with_a_kl
def test_in_a_loss_each_row_has_the_reference_of_its_own_prompt_and_completion(script, kl_scene):
    scene = kl_scene(beta=0.5, num_mini_batches=2, max_grad_norm=1e9)
    twin = Scene(script, scene.cfg, copy.deepcopy(scene.policy), scene.reference, scene.batch,
                 scene.A)
    start = weights(scene.policy)
    optimizer = torch.optim.SGD(twin.policy.parameters(), scene.cfg.learning_rate)
    for rows in common.mini_batches(scene.batch, scene.cfg, "shuffle", 0):
        twin.backward(rows)
        optimizer.step()
    scene.update()
    torch.testing.assert_close(weights(scene.policy), weights(twin.policy), atol=1e-12, rtol=0)
    assert not torch.equal(weights(scene.policy), start)
