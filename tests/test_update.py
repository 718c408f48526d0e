"""Test an update: the rows and tokens that it learns from, what it must not change, and what it
logs. That its gradient is the equation's is tested by the recipes among the test vectors."""
import math

import pytest
import torch
from conftest import close, every_script, f64, scripts
from update_scenes import NUM_ROWS, Scene, gradients, made_batch, weights

import common

from_rows = scripts("reinforce", "ppo", "grpo", "gspo")     # dpo.py learns from pairs


# ---- optimizer steps -------------------------------------------------------------------------

@scripts("grpo", "gspo")
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_ratio"])
def test_how_likely_the_models_find_the_padding_changes_nothing(script, config, bigram, estimator):
    """This holds however far apart they are: exp(2000) is infinite, and infinity times 0 is nan."""
    EOS, PAD, V = script.EOS, script.PAD, script.VOCAB_SIZE
    seen = []
    for nats_apart in (0.0, 2000.0):
        table = torch.zeros(V, V, dtype=torch.float64)
        table[1, [2, EOS]] = f64([5.0, 4.0])
        reference = bigram(table)
        table[[2, EOS, PAD], PAD] = -nats_apart     # used only in the slots after the EOS
        policy = bigram(table)
        mask = f64([[1.0, 0, 0], [1, 1, 1]])
        tokens = [[EOS, PAD, PAD], [7, 8, EOS]]
        batch = made_batch(script, [[1], [1]], tokens, mask, -6.0 * mask)
        cfg = config(beta=0.1, kl_estimator=estimator, entropy_coef=0.1)
        scene = Scene(script, cfg, policy, reference, batch, f64([[1.0], [-1.0]]) * mask)
        metrics, gradient = scene.backward(torch.arange(2))
        seen.append((gradient, *metrics.values()))
    close(seen[1], seen[0])


@every_script
def test_a_step_without_any_signal_leaves_zeros_not_nothing_so_that_adam_moves_on(scene):
    scene = scene()
    optimizer = torch.optim.AdamW(scene.policy.parameters(), weight_decay=0.0)
    scene.update(optimizer)
    before = weights(scene.policy)
    metrics = scene.update(optimizer, step=1, A=0 * scene.A)
    assert (gradients(scene.policy) == 0).all()
    assert metrics["loss"] == metrics["grad_norm"] == 0
    assert (weights(scene.policy) - before).norm() > 1e-3       # moved by Adam's momentum


@every_script
@pytest.mark.parametrize("limit", [0.01, 100.0, 0.0])
def test_a_long_gradient_is_scaled_down_to_the_maximum_unless_it_is_0(scene, limit):
    scene = scene(max_grad_norm=limit, learning_rate=0.5)
    start = weights(scene.policy)
    metrics = scene.update()
    assert metrics["grad_norm"] > 0.02                          # the norm before scaling
    length = (weights(scene.policy) - start).norm().item()
    assert length == pytest.approx(0.5 * min(limit or 1e9, metrics["grad_norm"]), rel=1e-4)


def rows_of(*args):
    """Return the rows that an optimizer step learns from."""
    [rows] = [value for value in args
              if isinstance(value, torch.Tensor) and value.dtype == torch.long]
    return rows.tolist()


@from_rows
def test_every_pass_takes_every_row_once_by_whole_groups_in_a_new_order(script, scene, watch):
    scene = scene(num_iterations=3, num_mini_batches=6)
    steps = watch(script, "backward", rows_of)
    orders = []
    for step, seed in ((0, 0), (1, 0), (0, 1)):
        scene.update(step=step, seed=seed)
        assert sorted(len(rows) for rows in steps) == [2] * 15 + [4] * 3    # seven groups of two
        for first in (0, 6, 12):
            order = sum(steps[first:first + 6], [])
            assert sorted(order) == list(range(NUM_ROWS))
            orders.append(order)
        assert all(row ^ 1 in rows for rows in steps for row in rows)   # the group's other row
        steps.clear()
    assert len({str(order) for order in orders}) == 9
    scene.update(num_mini_batches=9)
    assert [len(rows) for rows in steps] == [2] * 21            # none is empty


# ---- logged metrics --------------------------------------------------------------------------

V = common.VOCAB_SIZE


# The loss of each row, and how many of the 14 tokens are clipped. GRPO clips the only token of the
# first row, 1.4 and 1.5 in the second, and 0.75 in the fourth. GSPO clips the first two rows.
@pytest.mark.parametrize("script, losses, num_clipped", [
    ("grpo", [0.8, -(2.56 + 2.56 + 2.5) / 3, -3.7 / 4, (1.4 + 0.8) / 2], 1 + 2 + 1),
    ("gspo", [0.8, -2.4, -0.7 ** (1 / 4), 1.05 ** (1 / 2)], 1 + 3)], indirect=["script"])
def test_metrics_match_a_hand_computed_batch(script, config, bigram, losses, num_clipped):
    """The policy gives every token probability 1 / V. So does the reference, except that token 4
    has probability 1/2 after token 3."""
    EOS, PAD = script.EOS, script.PAD
    uniform = torch.zeros(V, V, dtype=torch.float64)
    policy = bigram(uniform)
    reference = bigram(uniform)
    reference.table.data[3, 4] = math.log(V - 1)
    tokens = [[EOS, PAD, PAD, PAD], [3, 4, EOS, PAD], [5, 6, 7, 8], [5, EOS, PAD, PAD],
              [9, EOS, PAD, PAD], [9, EOS, PAD, PAD]]
    mask = f64([[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]])
    ratios = f64([[0.5, 1, 1, 1], [1.4, 1.5, 1.25, 1], [1, 1, 1, 0.7], [1.4, 0.75, 1, 1],
                  [0.5, 1.5, 1, 1], [1, 1, 1, 1]])
    rewards = torch.tensor([[0.0, 1.0], [0.5, 0.5], [0.2, 0.2]])
    batch = made_batch(
        script, [[1]] * 6, tokens, mask, -math.log(V) - ratios.log(), 2, rewards)
    cfg = config(num_prompts=3, num_generations=2, max_completion_length=4, beta=0.1,
                 max_grad_norm=1e9, micro_batch_size=2, epsilon=0.2,
                 epsilon_high=0.28 if script.__name__ == "grpo" else 0.2)
    scene = Scene(script, cfg, policy, reference, batch, f64([-1, 2, 1, -1, 0, 0])[:, None] * mask)
    _, gradient = scene.backward(torch.arange(6))
    metrics = scene.update()
    x = math.log(2 / V)                     # log(pi / pi_ref) of token 4 after token 3
    k3 = math.exp(-x) + x - 1
    expected = {
        "loss": sum(losses) / 6 + 0.1 * k3 / 3 / 6,
        "max_log_ratio": math.log(2),
        "sampling/sampling_logp_difference/max": math.log(2),
        "clip_ratio/region_mean": num_clipped / 14,
        "grad_norm": gradient.norm().item()}
    assert metrics == pytest.approx(expected, rel=1e-6)
    _, mean_kl = script.score_reference(reference, batch, cfg)
    assert mean_kl == pytest.approx((x - ratios.log().sum().item()) / 14, rel=1e-6)
    without, _ = scene.backward(torch.arange(6), beta=0.0)              # skips rows with A = 0
    assert without["clip_ratio/region_mean"] == pytest.approx(num_clipped / 14)
    assert common.describe(batch) == pytest.approx({
        "reward": 0.4, "reward_std": math.sqrt(0.5) / 3, "signal": 1 / 3,
        "frac_reward_zero_std": 2 / 3, "entropy": 0.5, "completions/mean_length": 14 / 6,
        "completions/clipped_ratio": 1 / 6}, rel=1e-6)


def test_the_accuracy_counts_the_groups_that_dynamic_sampling_left_out(train):
    record = train("--dynamic_sampling 2", num_steps=1)
    [batch], [metrics] = record.batches, record.metrics
    judged = torch.cat([one.is_correct for one in batch.sampled]).double().mean().item()
    assert metrics["accuracy"] == judged != batch.is_correct.double().mean().item()


@from_rows
def test_the_reference_of_a_run_stays_where_the_policy_began(train):
    kl = [metrics["kl"] for metrics in train("", num_steps=4).metrics]
    assert abs(kl[0]) < 1e-4
    assert kl[3] > 0.01
