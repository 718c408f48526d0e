"""Batches and evaluations. Prompts, completions, verdicts and rewards of a batch match, and they
depend only on policy, seed and step. Dynamic sampling selects groups, but the accuracy counts all
groups that were sampled. The overlong penalty is added after that. Micro-batches divide a batch. An
evaluation is the same in every run."""
import dataclasses
import functools
import zlib

import pytest
import torch
from conftest import every_script, scripts

import common
import grpo
import tasks

of_groups = scripts("grpo", "gspo")


@pytest.fixture
def setting(script, config, talker, load_task, monkeypatch):
    """setting(verify, **changes) -> cfg, a float64 policy, a task with this verifier, and a list to
    which each call of the verifier appends (problem, text, verdict)."""
    def make(verify=script.verify, **changes):
        asked = []

        def recorded(problem, text):
            asked.append((problem, text, verify(problem, text)))
            return asked[-1][2]
        monkeypatch.setattr(script, "verify", recorded)
        cfg = config(**({"task": "arithmetic:5"} | changes))
        return cfg, talker(cfg).double(), load_task(cfg), asked
    return make


@every_script
def test_each_seed_and_each_step_has_its_own_problems_and_its_own_random_numbers(
        script, setting, watch):
    cfg, policy, task, _ = setting()
    drawn = watch(script, "complete", lambda *args: (args[4].initial_seed(), tuple(args[3])))
    for seed in (0, 1):
        for step in (0, 1):
            script.sample_batch(policy, task, dataclasses.replace(cfg, seed=seed), step)
    streams, problems = zip(*drawn)
    assert len({*streams}) == len({*problems}) == 4


# ---- dynamic sampling ------------------------------------------------------------------------

def odd_lengths_of_some_prompts(problem, text):
    """Return 1.0 for texts of odd length, but only for about a third of the prompts, else 0.0."""
    is_lucky = zlib.crc32(problem.prompt.encode()) % 3 == 0
    return float(is_lucky and len(text) % 2 == 1)


@of_groups
def test_dynamic_sampling_fills_the_batch_with_groups_that_have_signal(script, setting):
    cfg, policy, task, asked = setting(odd_lengths_of_some_prompts, dynamic_sampling=8)
    plain = script.sample_batch(policy, task, cfg, 0)
    asked.clear()
    batch = script.sample_with_signal(policy, task, cfg, 0)
    had_signal = common.has_signal(plain.rewards)[:, 0]
    assert had_signal.any() and not had_signal.all()
    assert common.has_signal(batch.rewards).all()
    for row, problem in enumerate(batch.problems):      # each row still matches its problem
        assert problem == batch.problems[row - row % 4]
        assert torch.equal(batch.prompts[row], script.encode_prompts([problem], task, "cpu")[0])
        ids = batch.tokens[row, :batch.lengths[row]].tolist()
        assert batch.texts[row] == script.decode([i for i in ids if i != script.EOS])
        assert batch.is_truncated[row] == (script.EOS not in ids)
    logps, _ = script.score(policy, batch.prompts, batch.tokens)
    torch.testing.assert_close(logps * batch.mask, batch.logps, atol=1e-9, rtol=0)
    assert torch.equal(batch.lengths, (batch.logps != 0).sum(dim=1))
    verdicts = [odd_lengths_of_some_prompts(*pair) for pair in zip(batch.problems, batch.texts)]
    assert batch.verified == batch.rewards.flatten().tolist() == verdicts

    # groups that had signal at the start stay, the groups are in the order in which they were
    # sampled, and each attempt samples only as many problems as are missing
    prompts = [problem.prompt for problem, _, _ in asked[::4]]
    chosen = [prompts.index(problem.prompt) for problem in batch.problems[::4]]
    assert chosen == sorted(chosen)
    assert {p for p in range(4) if had_signal[p]} <= set(chosen)
    mixed = [0 < sum(verdict for _, _, verdict in asked[i:i + 4]) < 4
             for i in range(0, len(asked), 4)]
    assert sum(mixed) == 4
    assert len(tasks.pass_rates(batch)) == len(mixed) > 4       # of everything that was sampled


@of_groups
@pytest.mark.parametrize("extra", [0, 3])
def test_dynamic_sampling_tries_so_many_times_at_most_and_then_takes_what_there_is(
        script, setting, extra):
    cfg, policy, task, asked = setting(
        lambda *_: 1.0, dynamic_sampling=extra, num_generations=3)
    batch = script.sample_with_signal(policy, task, cfg, 0)
    problems = [problem for problem, _, _ in asked]
    assert len(problems) == 12 * (1 + extra) == 3 * len(set(problems))
    assert batch.problems == problems[-12:]             # without signal, the last groups remain


# ---- penalties, micro-batches and evaluations ------------------------------------------------

@of_groups
def test_long_completions_are_rewarded_less_and_dynamic_sampling_looks_before_that(
        script, train, monkeypatch):
    """As in DAPO, a group needs both right and wrong answers, whatever the length penalty is."""
    monkeypatch.setattr(script, "verify", functools.wraps(script.verify)(lambda *_: 1.0))
    record = train("--overlong_buffer 4 --learning_rate 0 --dynamic_sampling 1")
    share = {3: 0.75, 4: 0.5, 5: 0.25, 6: 0.0}          # length -> share of the reward that remains
    for batch, metrics in zip(record.batches, record.metrics, strict=True):
        lengths = batch.lengths.tolist()
        assert batch.rewards.flatten().tolist() == [share.get(n, 1.0) for n in lengths]
        assert {1, 6} <= set(lengths)
        assert len(tasks.pass_rates(batch)) == 8        # all groups were replaced
        assert metrics["accuracy"] == 1.0
        assert batch.verified == [1.0] * 16


def test_micro_batches_have_each_row_once_and_rows_of_similar_length():
    lengths = torch.tensor([4, 32, 8, 5, 9, 16, 3, 31, 7])
    rows = torch.tensor([8, 1, 3, 4, 5, 6, 2])              # 7, 32, 5, 9, 16, 3 and 8 tokens
    parts = common.micro_batches(rows, lengths, 3)
    assert [part.tolist() for part in parts] == [[3, 6, 8], [2, 4, 5], [1]]
    assert len(common.micro_batches(rows[:0], lengths, 10)) == 0
    # rows of a length keep their order, because those of a group share a prompt
    parts = common.micro_batches(torch.arange(40), torch.tensor([7, 5] * 20), 10)
    assert torch.cat(parts).tolist() == [*range(1, 40, 2), *range(0, 40, 2)]
    assert [len(part) for part in parts] == [10] * 4


def test_where_there_are_fewer_problems_than_asked_for_each_counts_once(config, talker, load_task):
    cfg = config(task="arithmetic:2", num_eval_problems=512, num_eval_samples=3)
    task = load_task(cfg)
    problems = common.held_out_problems(task, 512)
    scores = grpo.evaluate(talker(cfg), task, cfg)
    assert scores["problems"] == len({problem.prompt for problem in problems}) == len(problems)
    assert 5 < scores["problems"] < 100
    torch.manual_seed(3)
    other = dataclasses.replace(cfg, seed=5)
    assert grpo.evaluate(talker(cfg), task, other) == scores
