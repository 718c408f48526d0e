"""dpo.py: losses of pairs, compared with numbers worked out on paper, the choice of pairs, the
logged metrics, and pairs in files."""
import functools
import json
import math
import types

import pytest
import torch
from conftest import close, f64, golden, gradient, randn, scripts
from small_runs import INSTANT, arguments, difference, lines, outcome, resume, steps
from update_scenes import made_batch

import common
import dpo
from tasks import pairs

pytestmark = pytest.mark.quick



def pair_with_margin(M, beta=0.1, **options):
    """Compute the loss of a pair with this margin, and its gradients in the log-probs of the chosen
    and of the rejected completion. -> three floats"""
    chosen = f64([M - 7.0]).requires_grad_()
    rejected = f64([-5.0]).requires_grad_()
    loss = dpo.dpo_loss(chosen, rejected, f64([-6.0]), f64([-4.0]), beta, **options)
    return loss.item(), gradient(loss, chosen).item(), gradient(loss, rejected).item()


# ---- the loss of a pair ----------------------------------------------------------------------

def test_the_losses_of_a_margin_of_two():
    golden(pair_with_margin(2.0), (0.5981389, -0.0450166, 0.0450166))
    golden(pair_with_margin(2.0, label_smoothing=0.1)[0], 0.6181389)
    close(pair_with_margin(2.0, loss_type="ipo"), (9.0, -6.0, 6.0))
    close(pair_with_margin(2.0, loss_type="hinge"), (0.8, -0.1, 0.1))


def test_the_loss_of_simpo_asks_for_a_margin_of_averages_and_has_no_reference():
    simpo = functools.partial(dpo.dpo_loss, f64([-0.4]), f64([-0.9]), beta=2.0, loss_type="simpo")
    zero = f64([0.0])
    golden(simpo(zero, zero, gamma=0.5).item(), 0.474076984)
    close(simpo(f64([-3.0]), f64([7.0]), gamma=0.5), simpo(zero, zero, gamma=0.5))
    close(simpo(zero, zero).item(), math.log(1 + math.exp(-1)))    # by default, gamma is 0


@pytest.mark.parametrize("e", [0.1, 0.3])
@pytest.mark.parametrize("M", [-3.0, 0.0, 2.0])
def test_of_labels_that_are_wrong_with_probability_e_smoothing_is_the_mean_and_robust_the_truth(
        M, e):
    loss, slope, _ = pair_with_margin(M)
    mixed_up, mixed_up_slope, _ = pair_with_margin(-M)
    found = pair_with_margin(M, label_smoothing=e)[:2]
    close(found, ((1 - e) * loss + e * mixed_up, (1 - e) * slope - e * mixed_up_slope))
    robust, robust_slope, _ = pair_with_margin(M, loss_type="robust", label_smoothing=e)
    other, other_slope, _ = pair_with_margin(-M, loss_type="robust", label_smoothing=e)
    close(((1 - e) * robust + e * other, (1 - e) * robust_slope - e * other_slope), (loss, slope))
    best = math.log((1 - e) / e) / 0.1                      # the log-odds of the labels
    close(pair_with_margin(best, label_smoothing=e)[1], 0.0)


@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_the_margin_is_how_much_further_the_chosen_one_rose_above_the_reference(beta):
    numbers = randn(4, 9)
    chosen, rejected, ref_chosen, ref_rejected = numbers
    M = (chosen - ref_chosen) - (rejected - ref_rejected)
    pair_loss = functools.partial(dpo.dpo_loss, *numbers, beta)
    close(pair_loss(), -(beta * M).sigmoid().log())             # by default, "sigmoid"
    close(pair_loss(loss_type="ipo"), (M - 1 / (2 * beta)) ** 2)
    close(pair_loss(loss_type="hinge"), (1 - beta * M).clamp(min=0))
    with pytest.raises(AssertionError, match="ippo"):
        pair_loss(loss_type="ippo")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("M, weight", [(1e5, 0.0), (-1e5, 1.0)])
def test_even_absurd_margins_have_finite_losses_and_gradients(M, weight, dtype):
    chosen = torch.tensor([M], dtype=dtype).requires_grad_()
    zero = torch.zeros(1, dtype=dtype)
    loss = dpo.dpo_loss(chosen, zero, zero, zero, 0.1)
    torch.testing.assert_close(loss.item(), 0.1 * abs(M) * weight)
    torch.testing.assert_close(gradient(loss, chosen).item(), -0.1 * weight)


# ---- sequences -------------------------------------------------------------------------------

@pytest.mark.parametrize("wild", [0.0, 1e30, -1e30])
def test_the_log_prob_of_a_completion_is_the_sum_or_mean_over_its_own_tokens(wild):
    """Masked log-probs have no effect, however large they are."""
    mask = f64([[1, 1, 1], [1, 0, 1], [0, 0, 0]])
    logps = f64([[-1, -2, -4], [-8, -16, -32], [-64, 1, 1]])
    given = torch.where(mask == 1, logps, wild).requires_grad_()
    sums = dpo.sequence_logps(given, mask)
    close(sums.detach(), f64([-7, -40, 0]), atol=0, rtol=0)
    close(gradient(sums, given), mask, atol=0, rtol=0)
    means = dpo.sequence_logps(given, mask, average=True)
    close(means.detach(), f64([-7 / 3, -20, 0]))
    close(gradient(means, given), mask / f64([[3], [2], [1]]))


# ---- the choice of pairs ---------------------------------------------------------------------

@pytest.mark.parametrize("rewards, expected", [
    ([[0, 3, 1, 2], [5, 5, 5, 5], [0, 1, 0, 0], [1, 0, 1, 1]],
     [(1, 0), (3, 2), (9, 11), (12, 13)]),
    ([[0, 3, 1], [5, 5, 5], [0, 1, 0], [1, 0, 1]], [(1, 0), (7, 8), (9, 10)]),   # one is unpaired
    ([[1, 1], [0, 0]], [])])
def test_the_best_of_a_group_is_paired_with_its_worst_and_so_on_inwards_while_they_differ(
        rewards, expected):
    rewards = f64(rewards)
    before = rewards.clone()
    chosen, rejected = dpo.preferences(rewards)
    assert list(zip(chosen.tolist(), rejected.tolist())) == expected
    assert torch.equal(rewards, before)


# ---- the update ------------------------------------------------------------------------------

def logps_of(scene, model, rows, average):
    """Sum or average the log-probs of completions, which are scored one by one. (b,)"""
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


@scripts("dpo")
@pytest.mark.parametrize("flags", [
    {}, {"nll_coef": 0.3}, {"average_logps": True, "nll_coef": 0.3},
    {"average_logps": True, "loss_type": "ipo"}, {"loss_type": "robust", "label_smoothing": 0.2},
    {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.7, "nll_coef": 0.1}], ids=str)
def test_an_update_descends_the_loss_of_log_probs_and_of_the_chosen_ones_likelihood(
        script, scene, flags):
    """For every micro-batch size. With gradients disabled, backward returns the same metrics."""
    made = scene(**flags)
    cfg = made.cfg
    chosen, rejected = script.preferences(made.A[:, 0].view(7, 2))
    average = cfg.average_logps or cfg.loss_type == "simpo"
    w = logps_of(made, made.policy, chosen, average)
    other = logps_of(made, made.policy, rejected, average)
    with torch.no_grad():
        ref_w = logps_of(made, made.reference, chosen, average)
        ref_other = logps_of(made, made.reference, rejected, average)
    expected = script.dpo_loss(w, other, ref_w, ref_other, cfg.beta, cfg.loss_type,
                               cfg.label_smoothing, cfg.simpo_gamma)
    expected = expected - cfg.nll_coef * logps_of(made, made.policy, chosen, True)
    wanted = torch.autograd.grad(expected.mean(), list(made.policy.parameters()))
    wanted = torch.cat([g.flatten() for g in wanted])
    for size in (1, 6, 64):
        metrics, found = made.backward(None, micro_batch_size=size)
        close(found, wanted, atol=1e-9, rtol=1e-7)
        assert metrics["loss"] == pytest.approx(expected.mean().item(), rel=1e-5)
        assert metrics["rewards/chosen"] == pytest.approx(
            cfg.beta * (w - ref_w).mean().item(), rel=1e-4, abs=1e-6)
        assert metrics["logps/rejected"] == pytest.approx(other.mean().item(), rel=1e-5)
        margins = cfg.beta * ((w - ref_w) - (other - ref_other))
        assert metrics["rewards/margins"] == pytest.approx(
            margins.mean().item(), rel=1e-4, abs=1e-6)
        assert metrics["rewards/accuracies"] == pytest.approx((margins > 0).double().mean().item())
    args = (made.policy, made.reference, made.batch, chosen, rejected, cfg)
    made.policy.zero_grad()
    with torch.no_grad():
        assert script.backward(*args) == pytest.approx(metrics, rel=1e-5, abs=1e-6)
    none = torch.zeros(0, dtype=torch.long)
    assert set(script.backward(*args[:3], none, none, cfg).values()) == {0.0}
    assert all(weight.grad is None for weight in made.policy.parameters())


@scripts("dpo")
@pytest.mark.parametrize("flags, is_base", [("", True), ("--online", False)])
def test_the_base_answers_held_out_problems_and_it_or_the_policy_those_to_learn_from(
        script, train, monkeypatch, flags, is_base):
    """And eval/kl is the KL of the policy from the base, on samples of the policy."""
    sample_batch = script.sample_batch
    models = []
    calls = []
    drawn = []

    def spied(model, task, cfg, step, split="train"):
        models.append(model)
        calls.append((step, split, model is models[0]))
        batch = sample_batch(model, task, cfg, step, split)
        if step == "kl":
            batch.mask[:, 0] = 0.0                  # as if an environment had inserted it
            drawn.append(batch)
        return batch
    monkeypatch.setattr(script, "sample_batch", spied)
    run = train(f"{flags} --eval_steps 2", num_steps=2).run
    learned = [call for call in calls if call[0] != "kl"]
    assert learned == [("pairs", "test", True), (0, "train", is_base), (1, "train", is_base)]
    assert {call[1:] for call in calls if call[0] == "kl"} == {("test", False)}
    assert run.policy is not models[0]
    batch = drawn[-1]
    ref_logps, _ = script.score(models[0], batch.prompts, batch.tokens, 1.0, "torch")
    x = (batch.logps - ref_logps)[batch.mask > 0]
    [*_, line] = (run.folder / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["eval/kl"] == pytest.approx((torch.exp(-x) - 1 + x).mean().item(), 1e-4)


# ---- pairs in files --------------------------------------------------------------------------

GOOD = {"prompt": "(3+4)=", "chosen": "<answer>7</answer>", "rejected": "<answer>8</answer>"}
ROOM = INSTANT | {"task": "arithmetic", "max_completion_length": 48}


def write(path, records):
    """Write a file with these lines; a dict is written as JSON. -> its path"""
    texts = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(text + "\n" for text in texts))
    return path


@scripts("dpo")
def test_a_batch_has_a_group_of_two_for_each_pair_and_nothing_counts_as_right(
        script, config, load_task, tmp_path):
    path = write(tmp_path / "pairs.jsonl", [GOOD, GOOD | {"prompt": "9-1=", "chosen": "<think>"}])
    cfg = config(pairs=str(path), num_prompts=1)
    task = load_task(cfg)
    policy = script.GPT(cfg)
    batch = pairs.Given(cfg, task).sample_batch(policy, task, cfg, 0)
    assert sorted(zip(batch.texts[::2], batch.texts[1::2])) == sorted(
        [(GOOD["chosen"], GOOD["rejected"]), ("<think>", GOOD["rejected"])])
    chosen, rejected = script.preferences(batch.rewards)
    assert chosen.tolist() == [0, 2] and rejected.tolist() == [1, 3]
    assert batch.verdicts is None and not batch.is_correct.any()
    for row, text in enumerate(batch.texts):
        n = batch.lengths[row]
        assert batch.tokens[row, n - 1] == script.EOS
        assert script.decode(batch.tokens[row, :n - 1].tolist()) == text
        assert batch.mask[row].tolist() == [1.0] * n + [0.0] * (len(batch.mask[row]) - n)
    assert torch.equal(batch.prompts, script.encode_prompts(batch.problems, task, "cpu"))
    logps, _ = script.score(policy, batch.prompts, batch.tokens, cfg.temperature)
    torch.testing.assert_close(batch.logps, logps.detach() * batch.mask)
    cfg = config(pairs=str(path), num_prompts=1, num_generations=2)
    given = pairs.Given(cfg, task)
    assert len({given.sample_batch(policy, task, cfg, step).texts[0] for step in (0, 1)}) == 2


@scripts("dpo")
def test_saved_pairs_teach_another_run_which_goes_on_bit_for_bit(
        new_run, at_work_folder, tmp_path, capsys):
    six = new_run(save_pairs=True, num_prompts=16, max_steps=6)
    saved = lines(six / "pairs.jsonl")
    assert 0 < len(saved) <= sum(line["pairs"] for line in steps(six))
    assert all(set(pair) == {"prompt", "chosen", "rejected"} for pair in saved)
    held_out = {"prompt": "(9*2)=", "chosen": "<answer>18</answer>", "rejected": "7"}
    path = write(tmp_path / "pairs.jsonl", [*saved, held_out])
    whole = new_run(pairs=path, max_steps=4, learning_rate=1e-3)
    is_held_out = common.Arithmetic.is_held_out(None, common.Problem(held_out["prompt"], ""))
    assert is_held_out == ("1 of " in capsys.readouterr().out)
    half = new_run(pairs=path, max_steps=2, learning_rate=1e-3)
    path.unlink()                               # the run has a copy
    resume(half, max_steps=4)
    assert not difference(outcome(whole), outcome(half))
    metrics = steps(whole)
    assert metrics[-1]["rewards/margins"] > 0.05 > abs(metrics[0]["rewards/margins"])
    assert all("accuracy" not in line and line["reward"] == 0.5 for line in metrics)


def test_a_pair_that_a_file_would_change_is_not_saved():
    """Reading a file adds an end to an output that has none, replaces a byte that is not UTF-8 by
    U+FFFD, and turns letters that spell a special token into that token."""
    rows = [pairs.encode("<think>7</think>"), pairs.encode("8"),
            list(b"7" * 9), pairs.encode("8"),
            pairs.encode("7"), [0xff, dpo.EOS],
            [*b"<think>", dpo.EOS], pairs.encode("8"),
            pairs.encode("7"), pairs.encode("")]
    tokens = [row + [dpo.PAD] * (9 - len(row)) for row in rows]
    mask = f64([[1.0] * len(row) + [0.0] * (9 - len(row)) for row in rows])
    batch = made_batch(dpo, [[1]] * 10, tokens, mask, mask, 2, rewards=f64([[1, 0]] * 5))
    assert batch.texts[6] == "<think>" and batch.texts[5] == "\ufffd"
    saved = []

    class Run:
        task = types.SimpleNamespace(machinery=dpo)

        def append(self, name, record):
            saved.append((name, record["chosen"], record["rejected"]))
    pairs.Saver().step(Run(), batch, None, {})
    assert saved == [("pairs.jsonl", "<think>7</think>", "8"), ("pairs.jsonl", "7", "")]


@pytest.mark.parametrize("line, words", [
    ("{", "line 3: Expecting"), ("", "Expecting value"), ("1" * 5000, ""), ("[" * 100_000, ""),
    ("[]", "must be an object with the strings prompt, chosen, rejected"),
    ({"prompt": "1+1=", "chosen": "2"}, "must be an object with the strings"),
    (GOOD | {"chosen": 7}, "must be an object with the strings"),
    (GOOD | {"rejected": GOOD["chosen"]}, "chosen and rejected are the same"),
    (GOOD | {"prompt": "1" * 99}, "the prompt has 99 bytes; arithmetic allows 18"),
    (GOOD | {"chosen": "7<|eos|>8"}, "chosen contains <|eos|>"),
    (GOOD | {"rejected": "x" * 48}, "rejected has 49 tokens, with its end token"),
    *((GOOD | {name: "\ud800"}, "utf-8") for name in GOOD),
    (None, "cannot be read"), (b"\xff\xfe\n", "cannot be read"), (b"", "line 1: ")],
    ids=lambda value: repr(value)[:30])
def test_a_file_that_is_bad_gets_one_line_and_nothing_is_written(
        tmp_path, monkeypatch, refused, line, words):
    path = tmp_path / "pairs.jsonl"
    if isinstance(line, bytes):
        path.write_bytes(line)
    elif line is not None:
        write(path, [GOOD, GOOD, line, GOOD])
    monkeypatch.chdir(tmp_path)
    refused(words, dpo.main, arguments(ROOM | {"pairs": path}))
