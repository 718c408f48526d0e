"""An update: which rows and tokens it learns from, its schedules, and what it leaves alone."""
import copy
import dataclasses
import math

import pytest
import torch
from conftest import every_script, f64, scripts
from update_scenes import NUM_ROWS, Scene, as_advantages, gradients, made_batch, weights

import common

with_ratios = scripts("grpo", "gspo")
with_advantages = scripts("reinforce", "grpo", "gspo")      # one update, but for the loss
learning_from_rows = scripts("reinforce", "ppo", "grpo", "gspo")       # dpo.py: from pairs


# ---- which tokens learn ----------------------------------------------------------------------

@with_advantages
def test_the_eos_that_ends_a_completion_has_a_gradient_and_the_padding_behind_it_none(
        script, config, bigram, load_task):
    a, b, c, d = 1, 2, 3, 4
    EOS, PAD, V = script.EOS, script.PAD, script.VOCAB_SIZE
    likely = torch.zeros(V, V, dtype=torch.float64)
    for token, next_token in ((a, b), (b, EOS), (c, d), (d, 5), (5, 6), (6, EOS)):
        likely[token, next_token] = 9.0
    cfg = config(beta=0.1)
    policy = bigram(likely)
    reference = bigram(likely + torch.linspace(0, 1, V).double())
    prompts = [[a], [c]]
    out = script.rollout(policy, torch.tensor(prompts), [None, None], load_task(cfg), cfg)
    assert out.tokens.tolist() == [[b, EOS] + [PAD] * 6, [d, 5, 6, EOS] + [PAD] * 4]

    batch = made_batch(script, prompts, out.tokens.tolist(), out.mask, out.logps)
    A = as_advantages(script, f64([1.0, -1.0]), out.mask)
    Scene(script, cfg, policy, reference, batch, A).backward(torch.arange(2), entropy_coef=0.1)
    has_gradient = policy.table.grad.abs().sum(dim=1) > 0
    assert has_gradient.nonzero().flatten().tolist() == [a, b, c, d, 5, 6]
    assert policy.table.grad[b, EOS] < 0            # which makes it more likely
    assert policy.table.grad[6, EOS] > 0


@with_ratios
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_how_likely_the_models_find_the_padding_changes_nothing(script, config, bigram, estimator):
    """However far apart they are: exp(2000) is infinite, and infinity times 0 is not a number."""
    EOS, PAD, V = script.EOS, script.PAD, script.VOCAB_SIZE
    seen = []
    for nats_apart in (0.0, 2000.0):
        table = torch.zeros(V, V, dtype=torch.float64)
        table[1, [2, EOS]] = f64([5.0, 4.0])
        reference = bigram(table)
        table[[2, EOS, PAD], PAD] = -nats_apart     # read in the slots behind the EOS only
        policy = bigram(table)
        mask = f64([[1.0, 0, 0], [1, 1, 1]])
        tokens = [[EOS, PAD, PAD], [7, 8, EOS]]
        batch = made_batch(script, [[1], [1]], tokens, mask, -6.0 * mask)
        cfg = config(beta=0.1, kl_estimator=estimator)
        scene = Scene(script, cfg, policy, reference, batch, f64([[1.0], [-1.0]]))
        metrics, gradient = scene.backward(torch.arange(2), entropy_coef=0.1)
        seen.append((gradient, *metrics.values()))
    torch.testing.assert_close(seen[1], seen[0], atol=1e-10, rtol=0)


@every_script
def test_an_optimizer_step_forgets_the_gradient_before_it(scene):
    ends = []
    for before in (0.0, 1.0):
        one = scene(max_grad_norm=1e9, num_mini_batches=1, num_iterations=1)
        for weight in one.policy.parameters():
            weight.grad = torch.full_like(weight, before)
        one.update()
        ends.append(weights(one.policy))
    assert torch.equal(*ends)


@every_script
def test_a_step_without_any_signal_leaves_zeros_not_nothing_so_that_adam_moves_on(scene):
    scene = scene()
    optimizer = torch.optim.AdamW(scene.policy.parameters(), weight_decay=0.0)
    scene.update(optimizer)
    before = weights(scene.policy)
    metrics = scene.update(optimizer, step=1, A=0 * scene.A)
    assert (gradients(scene.policy) == 0).all()
    assert metrics["loss"] == 0
    assert metrics["grad_norm"] == 0
    assert (weights(scene.policy) - before).norm() > 1e-3       # by its momentum


@every_script
def test_the_reference_the_batch_and_the_advantages_are_left_as_they_are(scene):
    scene = scene(beta=0.2, num_iterations=2)
    tensors = {name: value for name, value in vars(scene.batch).items()
               if isinstance(value, torch.Tensor)}
    kept = (scene.reference.state_dict(), tensors, scene.A)
    before = copy.deepcopy(kept)
    scene.update()
    torch.testing.assert_close(kept, before, atol=0, rtol=0)
    assert all(weight.grad is None for weight in scene.reference.parameters())


# ---- passes and mini-batches -----------------------------------------------------------------

def rows_of(args, metrics):
    """The rows that an optimizer step learns from."""
    indices = [value for value in args if is_indices(value)]
    return indices[0].tolist()


def pairs_of(args, metrics):
    """The pairs of rows, chosen and rejected, that an optimizer step of dpo.py learns from."""
    chosen, rejected = [value for value in args if is_indices(value)]
    return list(zip(chosen.tolist(), rejected.tolist()))


def is_indices(value):
    return isinstance(value, torch.Tensor) and value.dtype == torch.long


def orders(steps, num_passes):
    """The rows of each pass, in the order in which they are learned from."""
    steps_a_pass = len(steps) // num_passes
    passes = []
    for first in range(0, len(steps), steps_a_pass):
        passes.append(sum(steps[first:first + steps_a_pass], []))
    return passes


def check_orders(scene, steps, everything):
    """Three passes take everything once, each in an order of its own; so does another update."""
    passes = orders(steps, 3)
    for found in passes:
        assert sorted(found) == sorted(everything)
    assert passes[0] != passes[1]
    assert passes[1] != passes[2]
    assert passes[0] != passes[2]
    for step, seed in ((1, 0), (0, 1)):
        steps.clear()
        scene.update(step=step, seed=seed)
        assert orders(steps, 3)[0] not in passes


@learning_from_rows
def test_every_pass_takes_every_row_once_by_whole_groups_in_a_new_order(scene, spy):
    scene = scene(num_iterations=3, num_mini_batches=6)
    steps = spy(rows_of)
    scene.update()
    assert len(steps) == 18
    assert {len(rows) for rows in steps} == {2, 4}      # seven groups of two in six mini-batches
    for rows in steps:
        assert rows == sorted(rows)
        assert all(row ^ 1 in rows for row in rows)     # the other one of the group
    check_orders(scene, steps, range(NUM_ROWS))


@scripts("dpo")
def test_every_pass_takes_every_pair_once_in_a_new_order(script, scene, spy):
    scene = scene(num_iterations=3, num_mini_batches=6)
    scene.A = scene.A + torch.arange(NUM_ROWS) % 2 / 100        # now no two of a group are equal
    chosen, rejected = script.preferences(scene.A.view(7, 2))
    pairs = list(zip(chosen.tolist(), rejected.tolist()))
    assert len(pairs) == 7
    steps = spy(pairs_of)
    scene.update()
    assert len(steps) == 18
    assert {len(step) for step in steps} == {1, 2}
    check_orders(scene, steps, pairs)


# ---- learning rate, clipping, entropy bonus --------------------------------------------------

@every_script
@pytest.mark.parametrize("limit", [0.01, 100.0])
def test_a_long_gradient_is_scaled_down_to_the_maximum_and_a_short_one_is_left(scene, limit):
    scene = scene(max_grad_norm=limit, learning_rate=0.5, num_iterations=1)
    start = weights(scene.policy)
    metrics = scene.update()
    assert metrics["grad_norm"] > 0.02                          # as it was before
    length = (weights(scene.policy) - start).norm().item()
    assert length == pytest.approx(0.5 * min(limit, metrics["grad_norm"]), rel=1e-4)


@every_script
def test_the_learning_rate_warms_up_linearly_and_stays(scene):
    scene = scene(warmup_steps=4, learning_rate=0.5, num_iterations=1)
    optimizer = torch.optim.SGD(scene.policy.parameters())
    rates = []
    for step in range(6):
        start = weights(scene.policy)
        metrics = scene.update(optimizer, step)
        length = (weights(scene.policy) - start).norm().item()
        rates.append(length / min(1.0, metrics["grad_norm"]))
        assert metrics["learning_rate"] == pytest.approx(rates[-1], rel=1e-4)
    assert rates == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5, 0.5], rel=1e-4)


@learning_from_rows
@pytest.mark.parametrize("decay_steps, expected", [(0, [0.1] * 4), (2, [0.1, 0.05, 0, 0])])
def test_the_entropy_bonus_falls_linearly_to_zero_or_stays(
        script, scene, spy, decay_steps, expected):
    scene = scene(entropy_coef=0.1, entropy_decay_steps=decay_steps, num_iterations=1)
    place = -2 if script.__name__ == "ppo" else -1              # among the arguments of backward
    coefficients = spy(lambda args, metrics: args[place])
    for step in range(4):
        scene.update(step=step)
    assert coefficients == pytest.approx(expected)


def total(scene, quantity):
    """The sum over the tokens of the batch of "entropy", or of the "kl" to the reference."""
    batch = scene.batch
    logps, entropy = scene.script.score(
        scene.policy, batch.prompts, batch.tokens, scene.cfg.temperature)
    token_kl = scene.script.kl(logps, scene.ref_logps(), "k3")
    values = entropy if quantity == "entropy" else token_kl
    return (values * batch.mask).sum().item()


@learning_from_rows
def test_the_entropy_bonus_raises_the_entropy(scene):
    scene = scene(entropy_coef=1.0, max_grad_norm=0.5, num_iterations=1)
    found = []
    for _ in range(4):
        found.append(total(scene, "entropy"))
        scene.update(A=0 * scene.A)
    assert found == sorted(found)
    assert found[-1] > found[0] + 1e-3


@with_ratios
def test_a_kl_in_the_loss_pulls_the_policy_to_the_reference(scene):
    scene = scene(beta=1.0, max_grad_norm=0.5, num_iterations=1)
    found = []
    for _ in range(4):
        found.append(total(scene, "kl"))
        scene.update(A=0 * scene.A)
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0] - 1e-3


# ---- steps that are not finite ---------------------------------------------------------------

@every_script
def test_a_step_that_is_not_finite_stops_the_run_before_the_weights_are_touched(
        script, scene, capsys, monkeypatch):
    scene = scene()
    start = weights(scene.policy)
    A = scene.A * math.inf
    if script.__name__ == "dpo":
        A = scene.A
        loss = script.dpo_loss
        monkeypatch.setattr(script, "dpo_loss", lambda *args: loss(*args) * math.inf)
    with pytest.raises(SystemExit) as stop:
        scene.update(step=6, A=A)
    assert stop.value.code == 1
    assert "step 7" in capsys.readouterr().err
    assert torch.equal(weights(scene.policy), start)


@scripts("ppo")
def test_a_step_of_trpo_that_is_not_finite_stops_the_run_too(scene, capsys):
    scene = scene(trust_region="trpo")
    start = weights(scene.policy)
    with pytest.raises(SystemExit) as stop:
        scene.update(step=6, A=scene.A * math.inf)
    assert stop.value.code == 1
    assert "step 7" in capsys.readouterr().err
    assert torch.equal(weights(scene.policy), start)


@with_ratios
def test_a_gradient_too_long_for_a_float_stops_the_run_before_a_weight_is_touched(
        script, fresh_scene, capsys):
    scene = fresh_scene(temperature=1.0)
    scene.policy.float()
    start = weights(scene.policy)
    batch = scene.batch
    batch.logps[0] -= 50 * batch.mask[0]        # the ratio is e^50, the square of it infinite
    for name in ("mask", "logps"):
        setattr(batch, name, getattr(batch, name).float())
    scene.reference.float()
    with pytest.raises(SystemExit):
        scene.update(A=torch.full((16, 1), -1.0))
    assert "'grad_norm': inf" in capsys.readouterr().err
    assert torch.equal(weights(scene.policy), start)


# ---- mini-batches ----------------------------------------------------------------------------

@dataclasses.dataclass
class Groups:
    """All that mini_batches reads of a batch."""
    rewards: torch.Tensor


def mini_batches(cfg, num_prompts, *purpose):
    """The rows of every optimizer step, for groups of four."""
    batch = Groups(torch.zeros(num_prompts, 4))
    return [rows.tolist() for rows in common.mini_batches(batch, cfg, *purpose)]


@pytest.mark.parametrize("num_prompts, num_mini_batches, sizes", [
    (6, 2, [12, 12]), (7, 3, [12, 8, 8]), (2, 5, [4, 4]), (6, 1, [24])])
def test_mini_batches_are_of_whole_groups_and_take_every_row_once_a_pass(
        config, num_prompts, num_mini_batches, sizes):
    cfg = config(num_mini_batches=num_mini_batches, num_iterations=3)
    steps = mini_batches(cfg, num_prompts, "shuffle", 4)
    assert [len(rows) for rows in steps] == sizes * 3
    for rows in steps:
        assert rows == sorted(rows)
        groups = {row // 4 for row in rows}
        assert all(4 * group + g in rows for group in groups for g in range(4))
    for rows in orders(steps, 3):
        assert sorted(rows) == list(range(4 * num_prompts))


def test_the_order_of_mini_batches_is_a_function_of_seed_purpose_step_and_pass(config):
    cfg = config(num_mini_batches=2, num_iterations=2)
    steps = mini_batches(cfg, 6, "shuffle", 4)
    assert mini_batches(cfg, 6, "shuffle", 4) == steps
    assert mini_batches(cfg, 6, "shuffle", 5) != steps
    assert mini_batches(cfg, 6, "critic", 4) != steps
    assert mini_batches(dataclasses.replace(cfg, seed=1), 6, "shuffle", 4) != steps
    assert steps[:2] != steps[2:]


def test_a_micro_batch_has_rows_of_similar_length_in_their_order():
    lengths = torch.tensor([4, 32, 8, 5, 9, 16, 3, 31, 7])
    rows = torch.tensor([8, 1, 3, 4, 5, 6, 2])              # 7, 32, 5, 9, 16, 3 and 8 tokens
    parts = common.micro_batches(rows, lengths, 10)
    assert [part.tolist() for part in parts] == [[8, 3, 4, 6, 2], [1, 5]]
    assert len(common.micro_batches(rows[:0], lengths, 10)) == 0


def test_a_micro_batch_has_at_most_the_tokens_of_so_many_of_the_longest_rows():
    lengths = torch.tensor([5] * 20 + [7] * 3 + [16] * 5)
    rows = torch.arange(20)                                 # without the longest
    assert [len(part) for part in common.micro_batches(rows, lengths, 2)] == [6, 6, 6, 2]
    rows = torch.arange(28)
    parts = common.micro_batches(rows, lengths, 2)
    assert torch.cat(parts).sort().values.tolist() == rows.tolist()
    assert [len(part) for part in parts] == [4, 4, 4, 4, 4, 3, 2, 2, 1]
    for part in parts:
        assert len(part) * lengths[part].max() <= 2 * 16


def test_micro_batches_as_they_come_have_so_many_rows():
    lengths = torch.tensor([5, 1, 4, 1, 3, 9])
    rows = torch.tensor([5, 0, 1, 2, 3])
    parts = common.micro_batches(rows, lengths, 2, by_length=False)
    assert [part.tolist() for part in parts] == [[5, 0], [1, 2], [3]]
    assert len(common.micro_batches(rows[:0], lengths, 2, by_length=False)) == 0
