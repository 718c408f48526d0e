"""Pairs of completions, for dpo.py: which they are, what is logged of them, and who wrote them."""
import math

import pytest
import torch
from conftest import f64, scripts
from made_runs import MadeRun
from update_scenes import made_batch

pytestmark = [pytest.mark.quick, scripts("dpo")]


def as_pairs(chosen, rejected):
    return list(zip(chosen.tolist(), rejected.tolist()))


# ---- which they are --------------------------------------------------------------------------

REWARDS = torch.tensor([[0.0, 3, 1, 2], [5, 5, 5, 5], [0, 1, 0, 0], [1, 0, 1, 1]])


def test_the_best_of_a_group_is_paired_with_its_worst_and_so_on_inwards_while_they_differ(script):
    assert as_pairs(*script.preferences(REWARDS)) == [(1, 0), (3, 2), (9, 11), (12, 13)]


def test_of_an_odd_group_the_middle_one_has_no_partner(script):
    assert as_pairs(*script.preferences(REWARDS[:, :3])) == [(1, 0), (7, 8), (9, 10)]


def test_equals_are_not_paired(script):
    assert as_pairs(*script.preferences(torch.ones(2, 4))) == []


# ---- what is logged --------------------------------------------------------------------------

def test_the_metrics_match_a_hand_computed_batch(script, config, bigram):
    """To the policy every token has probability 1 / V; to the reference, too, but token 4 has one
    half at first."""
    V, EOS, PAD = script.VOCAB_SIZE, script.EOS, script.PAD
    policy = bigram(torch.zeros(V, V, dtype=torch.float64))
    reference = bigram(torch.zeros(V, V, dtype=torch.float64))
    reference.table.data[1, 4] = math.log(V - 1)
    tokens = [[4, EOS, PAD], [5, 6, EOS], [4, 7, 8], [4, 9, EOS]]
    mask = f64([[1, 1, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1]])
    batch = made_batch(script, [[1]] * 4, tokens, mask, mask, 4)
    cfg = config(beta=0.1, num_prompts=1, max_grad_norm=1e9)
    optimizer = torch.optim.SGD(policy.parameters())
    chosen = torch.tensor([0, 1])
    rejected = torch.tensor([1, 2])
    metrics = script.update(policy, reference, optimizer, batch, chosen, rejected, cfg, 0)

    down = math.log(2 / V)                      # log pi / pi_ref of token 4
    up = math.log((2 * V - 2) / V)              # of another one at first
    margins = [0.1 * (down - up), 0.1 * (up - down)]
    expected = {
        "loss": sum(math.log(1 + math.exp(-margin)) for margin in margins) / 2,
        "rewards/chosen": 0.1 * (down + up) / 2,
        "rewards/rejected": 0.1 * (up + down) / 2,
        "rewards/margins": 0.0,
        "rewards/accuracies": 0.5,
        "logps/chosen": -math.log(V) * 5 / 2,
        "logps/rejected": -math.log(V) * 3,
        "pairs": 2,
        "learning_rate": cfg.learning_rate,
        "grad_norm": metrics["grad_norm"]}
    assert metrics == pytest.approx(expected, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("chosen, rejected, is_ordered", [
    (1, 0, 1), (2, 0, 1), (0, 1, 0), (1, 2, 0)])
def test_a_pair_is_ordered_if_the_chosen_gained_more_than_the_rejected_even_if_both_lost(
        script, config, bigram, chosen, rejected, is_ordered):
    """Log-probs against the base: of token 4 -2, of 5 -1, of 6 +1."""
    V = script.VOCAB_SIZE
    table = torch.zeros(V, V, dtype=torch.float64)
    gains = f64([-2, -1, 1])
    table[1, 4:7] = gains
    policy = bigram(table)
    reference = bigram(0 * table)
    mask = torch.ones(3, 1, dtype=torch.float64)
    batch = made_batch(script, [[1]] * 3, [[4], [5], [6]], mask, mask, 3)
    _, metrics = script.pair_loss(policy, reference, batch, torch.tensor([chosen]),
                                  torch.tensor([rejected]), config(beta=0.1))
    assert metrics["rewards/accuracies"].item() == is_ordered
    margin = 0.1 * (gains[chosen] - gains[rejected])
    torch.testing.assert_close(metrics["rewards/margins"], margin[None], atol=1e-9, rtol=0)


def test_where_the_policy_is_the_reference_no_pair_has_a_margin(fresh_scene):
    metrics = fresh_scene().update()
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-12)
    assert metrics["pairs"] == 8
    assert metrics["rewards/margins"] == 0
    assert metrics["logps/chosen"] < 0
    assert metrics["grad_norm"] > 0


def test_pairs_that_are_not_learned_from_are_measured_likewise(script, scene):
    scene = scene()
    chosen, rejected = script.preferences(scene.A.view(7, 2))
    args = [scene.policy, scene.reference, scene.batch, chosen, rejected, scene.cfg]
    measured = script.evaluate_pairs(*args)
    assert all(weight.grad is None for weight in scene.policy.parameters())
    assert measured == pytest.approx(script.backward(*args))


def test_without_pairs_there_is_nothing_to_measure(script, scene):
    scene = scene()
    none = torch.zeros(0, dtype=torch.long)
    measured = script.evaluate_pairs(
        scene.policy, scene.reference, scene.batch, none, none, scene.cfg)
    assert set(measured.values()) == {0.0}


# ---- what is added to the loss, and divided by lengths -----------------------------------------

def logps_of(scene, model, rows, average):
    """Sums or means of the log-probs of completions, read one by one. (b,)"""
    found = []
    for row in rows.tolist():
        n = scene.batch.lengths[row]
        logps, _ = scene.script.score(
            model, scene.batch.prompts[row:row + 1], scene.batch.tokens[row:row + 1, :n],
            scene.cfg.temperature)
        mask = scene.batch.mask[row, :n]
        total = (logps[0] * mask).sum()
        found.append(total / mask.sum() if average else total)
    return torch.stack(found)


@pytest.mark.parametrize("flags", [
    {"nll_coef": 0.3},
    {"average_logps": True, "nll_coef": 0.3},
    {"average_logps": True, "loss_type": "ipo"},
    {"loss_type": "robust", "label_smoothing": 0.2},
    {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.7, "nll_coef": 0.1}], ids=str)
def test_the_loss_of_a_pair_is_that_of_its_log_probs_and_of_the_chosen_ones_likelihood(
        script, scene, flags):
    made = scene(**flags)
    cfg = made.cfg
    chosen, rejected = script.preferences(made.A.view(7, 2))
    losses, metrics = script.pair_loss(
        made.policy, made.reference, made.batch, chosen, rejected, cfg)
    is_simpo = cfg.loss_type == "simpo"
    average = cfg.average_logps or is_simpo
    w = logps_of(made, made.policy, chosen, average)
    other = logps_of(made, made.policy, rejected, average)
    nll = -logps_of(made, made.policy, chosen, True)
    with torch.no_grad():
        ref_w = logps_of(made, made.reference, chosen, average)
        ref_other = logps_of(made, made.reference, rejected, average)
    if is_simpo:
        expected = -torch.nn.functional.logsigmoid(2.0 * (w - other) - 0.7)
    else:
        expected = script.dpo_loss(
            w, other, ref_w, ref_other, cfg.beta, cfg.loss_type, cfg.label_smoothing)
    expected = expected + cfg.nll_coef * nll
    torch.testing.assert_close(losses, expected)
    weight = made.policy.embed.weight
    (found,) = torch.autograd.grad(losses.sum(), weight)
    torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), weight)[0])
    torch.testing.assert_close(metrics["rewards/chosen"], cfg.beta * (w - ref_w).detach())
    torch.testing.assert_close(metrics["logps/rejected"].detach(), other.detach())


# ---- who wrote them --------------------------------------------------------------------------

@pytest.mark.parametrize("flags, is_base", [("", True), ("--online", False)])
def test_the_base_answers_held_out_problems_and_it_or_the_policy_those_to_learn_from(
        script, train, monkeypatch, flags, is_base):
    sample_batch = script.sample_batch
    models = []
    calls = []

    def spied(model, task, cfg, step, split="train"):
        models.append(model)
        calls.append((step, split, model is models[0]))
        return sample_batch(model, task, cfg, step, split)
    monkeypatch.setattr(script, "sample_batch", spied)
    run = train(flags, num_steps=4)
    steps = [(step, "train", is_base) for step in range(4)]
    assert calls == [("pairs", "test", True), *steps]
    assert run.policy is not models[0]


# ---- how far the policy has gone from the base -----------------------------------------------

def test_the_kl_is_that_of_the_policy_from_the_base_per_sampled_token(script, config, bigram):
    """By all completions of two tokens, of which the policy finds each of sixteen equally likely.
    The base knows no other tokens, either."""
    V = script.VOCAB_SIZE
    four = [4, 5, 6, 7]
    table = torch.full((V, V), -900.0, dtype=torch.float64)
    table[:, four] = 0.0
    policy = bigram(table)
    base_chances = f64([0.97, 0.01, 0.01, 0.01])
    table[:, four] = base_chances.log()
    table[4, four] = 0.0                                        # behind a 4 it is the policy
    reference = bigram(table)
    tokens = [[first, second, 9] for first in four for second in four]
    mask = f64([[1, 1, 0]] * 16)                                # the 9 was inserted
    prompts = torch.ones(16, 1, dtype=torch.long)
    logps, _ = script.score(policy, prompts, torch.tensor(tokens))
    batch = made_batch(script, [[1]] * 16, tokens, mask, logps.detach())
    batch.logps[:, 2] = -3.0
    of_one_token = (0.25 * (0.25 / base_chances).log()).sum().item()
    expected = (of_one_token + 0.75 * of_one_token) / 2
    assert script.kl_to_base(reference, batch, config()) == pytest.approx(expected)
    the_other_way = (base_chances * (base_chances / 0.25).log()).sum().item()
    assert abs(the_other_way - of_one_token) > 0.5


@pytest.mark.parametrize("flags", ["", "--online"])
def test_an_evaluation_has_the_kl_of_samples_of_the_policy_on_held_out_problems(
        script, train, monkeypatch, flags):
    sample_groups = script.sample_groups
    sampled = []
    found = []

    def spied(model, task, cfg, step, attempt, split):
        batch = sample_groups(model, task, cfg, step, attempt, split)
        if step == "kl":
            sampled.append((model, split, batch))
        return batch

    def steps(run, evaluate, **parts):
        found.append(evaluate(run.policy, run.task, run.cfg))
        yield from range(3)
        found.append(evaluate(run.policy, run.task, run.cfg, 2))
    monkeypatch.setattr(script, "sample_groups", spied)
    monkeypatch.setattr(MadeRun, "steps", steps)
    run = train(f"{flags} --num_eval_problems 4")
    assert all(model is run.policy for model, _, _ in sampled)
    assert [split for _, split, _ in sampled] == ["test", "test"]
    assert found[0]["kl"] == pytest.approx(0, abs=1e-6)         # it is the base
    assert found[1]["kl"] > 1e-3
    batch = sampled[1][2]
    logps, _ = script.score(run.policy, batch.prompts, batch.tokens)
    torch.testing.assert_close(logps * batch.mask, batch.logps * batch.mask, atol=1e-5, rtol=0)
    assert all(run.task.is_held_out(problem) for problem in batch.problems)
