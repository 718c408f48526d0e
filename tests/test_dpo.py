"""dpo.py: where the pairs of a run come from, ORPO, and pairs in files."""
import json
import math
import types

import pytest
import torch
from conftest import close, f64, gradient, scripts
from small_runs import INSTANT, arguments, difference, lines, outcome, resume, steps
from small_vectors import backward
from update_scenes import made_batch

import common
import dpo
from tasks import pairs

pytestmark = pytest.mark.quick


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


def test_orpo_compares_the_odds_of_mean_tokens_and_adds_the_likelihood_of_the_chosen_output():
    """p(w) is 0.6, so its odds are 1.5; p(l) is 0.25, so its odds are 1/3."""
    rows = f64([[0.9, 0.4, 0.2], [0.25, 0.25, 0.25]]).log().requires_grad_()
    mask = f64([[1, 1, 0], [1, 1, 1]])
    metrics, surrogate = backward(
        dpo, rows, 0 * mask, mask, None, torch.arange(2).chunk(2), 5 * rows.detach(),
        loss_type="orpo", beta=0.2, nll_coef=1.0)
    loss = -0.2 * math.log(4.5 / 5.5) - math.log(0.6)
    assert metrics["loss"] == pytest.approx(loss)
    slope = 0.2 / 5.5 / 2                       # of the loss in the log odds, for two tokens of w
    close(gradient(surrogate, rows), f64([
        [-slope / 0.4 - 0.5] * 2 + [0], [0.2 / 5.5 / 3 / 0.75] * 3]))
    certain = torch.zeros(1, requires_grad=True)
    dpo.dpo_loss(certain, -torch.ones(1), 0, 0, 0.1, "orpo").sum().backward()
    assert certain.grad.item() == 0


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
    ("{", "line 3: Expecting"), ("", "Expecting value"), ("[" * 100_000, ""),
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
