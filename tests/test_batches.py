"""A batch: its prompts, completions, verdicts and rewards belong together, and are a function of
seed and step. Dynamic sampling chooses groups, and what is said of accuracy is of all that were
sampled. The overlong penalty comes after that."""
import dataclasses
import random
import zlib
from typing import NamedTuple

import pytest
import torch
from conftest import every_script, scripts

import common
import grpo


def fields_of(batch):
    """What two batches that are the same have in common."""
    return [batch.tokens.tolist(), batch.rewards.tolist(), batch.texts, batch.problems]


# ---- a function of seed and step -------------------------------------------------------------

def test_a_batch_is_a_function_of_the_seed_and_the_step(config, talker, load_task):
    cfg = config()
    policy = talker(cfg)
    task = load_task(cfg)
    torch.manual_seed(1)
    random.seed(1)
    batch = grpo.sample_batch(policy, task, cfg, 3)
    torch.manual_seed(2)
    random.seed(2)
    state = torch.get_rng_state()
    again = grpo.sample_batch(policy, task, cfg, 3)
    assert fields_of(again) == fields_of(batch)
    assert torch.equal(torch.get_rng_state(), state)
    next_step = grpo.sample_batch(policy, task, cfg, 4)
    next_seed = grpo.sample_batch(policy, task, dataclasses.replace(cfg, seed=1), 3)
    for other in (next_step, next_seed):
        assert other.problems != batch.problems
        assert not torch.equal(other.tokens, batch.tokens)


@every_script
@pytest.mark.parametrize("step, seed", [(1, 0), (0, 1)])
def test_the_same_prompts_get_other_completions_in_another_step_and_with_another_seed(
        script, config, talker, load_task, monkeypatch, step, seed):
    cfg = config()
    policy = talker(cfg)
    task = load_task(cfg)
    problems = common.sample_problems(task, 4, 0)
    monkeypatch.setattr(common, "sample_problems", lambda *_, **__: problems)
    one = script.sample_batch(policy, task, cfg, 0)
    other = script.sample_batch(policy, task, dataclasses.replace(cfg, seed=seed), step)
    assert one.problems == other.problems
    assert not torch.equal(one.tokens, other.tokens)


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_batch_holds_problems_of_the_split_that_is_asked_for(config, talker, load_task, split):
    cfg = config(num_prompts=20, operands="5")
    policy = talker(cfg)
    task = load_task(cfg)
    problems = grpo.sample_batch(policy, task, cfg, 0, split).problems
    assert problems[::4] == common.sample_problems(task, 20, (0, 0, 0), split)
    is_default = problems == grpo.sample_batch(policy, task, cfg, 0).problems
    assert is_default == (split == "train")


# ---- what belongs together -------------------------------------------------------------------

def check_rows(script, policy, task, batch):
    """Each row of a batch has the prompt and the text of its problem and its tokens, and the
    log-probs are those that its completion has behind its prompt."""
    for row, problem in enumerate(batch.problems):
        assert problem == batch.problems[row - row % batch.rewards.shape[1]]
        prompt = script.encode_prompts([problem.prompt], task, "cpu")[0]
        assert torch.equal(batch.prompts[row], prompt)
    assert batch.texts == script.completion_texts(batch)
    logps, _ = script.score(policy, batch.prompts, batch.tokens)
    torch.testing.assert_close(logps * batch.mask, batch.logps, atol=1e-5, rtol=0)
    assert torch.equal(batch.lengths, (batch.logps != 0).sum(dim=1))


def test_each_completion_is_verified_against_its_own_problem(
        config, talker, load_task, monkeypatch):
    asked = []

    def verify(problem, text):
        asked.append((problem, text))
        return len(asked) / 100                         # tells which call it was
    monkeypatch.setattr(grpo, "verify", verify)
    cfg = config(num_generations=3, operands="5")
    policy = talker(cfg).double()
    task = load_task(cfg)
    batch = grpo.sample_batch(policy, task, cfg, 0)
    assert batch.rewards.shape == (4, 3)
    assert len({problem.prompt for problem in batch.problems}) == 4
    for row, verdict in enumerate(batch.verdicts):
        problem, text = asked[round(100 * verdict) - 1]
        assert problem == batch.problems[row]
        assert text == batch.texts[row]
        assert batch.rewards[row // 3, row % 3] == pytest.approx(verdict)
    check_rows(grpo, policy, task, batch)
    shifted = batch.prompts.roll(3, dims=0)             # with the prompts of other groups
    logps, _ = grpo.score(policy, shifted, batch.tokens)
    assert ((batch.logps - logps) * batch.mask).abs().max() > 0.1


def test_a_row_without_eos_is_truncated(config, talker, load_task):
    cfg = config()
    batch = grpo.sample_batch(talker(cfg), load_task(cfg), cfg, 0)
    expected = [grpo.EOS not in tokens for tokens in batch.tokens.tolist()]
    assert batch.is_truncated.tolist() == expected
    assert 0 < sum(expected) < 16


def test_the_reward_of_a_task_that_rewards_each_move_is_the_sum_of_its_rewards(
        config, talker, load_task, monkeypatch):
    class Moves(common.Arithmetic):
        def is_correct(self, problem, verdict):
            return sum(verdict) >= 2.5
    monkeypatch.setattr(common, "Arithmetic", Moves)
    monkeypatch.setattr(grpo, "verify", lambda problem, text: [0.5] * len(text))
    cfg = config()
    batch = grpo.sample_batch(talker(cfg), load_task(cfg), cfg, 0)
    assert batch.rewards.flatten().tolist() == [0.5 * len(text) for text in batch.texts]
    is_correct = [len(text) >= 5 for text in batch.texts]
    assert batch.is_correct.flatten().tolist() == is_correct
    rates = [sum(is_correct[first:first + 4]) / 4 for first in range(0, 16, 4)]
    assert batch.pass_rates == {"arithmetic-3": rates}
    assert 0 < sum(rates) < 4


# ---- dynamic sampling ------------------------------------------------------------------------

def odd_lengths_of_some_prompts(problem, text):
    """A verdict that only a third of the prompts can earn."""
    is_lucky = zlib.crc32(problem.prompt.encode()) % 3 == 0
    return float(is_lucky and len(text) % 2 == 1)


def test_dynamic_sampling_fills_the_batch_with_groups_that_have_signal(
        config, talker, load_task, monkeypatch, capsys):
    verify = odd_lengths_of_some_prompts
    monkeypatch.setattr(grpo, "verify", verify)
    cfg = config(dynamic_sampling=8)
    policy = talker(cfg)
    task = load_task(cfg)
    plain = grpo.sample_batch(policy, task, dataclasses.replace(cfg, dynamic_sampling=0), 0)
    batch = grpo.sample_batch(policy, task, cfg, 0)
    had_signal = common.has_signal(plain.rewards)[:, 0]
    assert not had_signal.all()                         # else there is nothing to fill
    assert batch.rewards.shape == (4, 4)
    assert common.has_signal(batch.rewards).all()

    # what belongs together has stayed together
    check_rows(grpo, policy, task, batch)
    verdicts = [verify(problem, text) for problem, text in zip(batch.problems, batch.texts)]
    assert batch.verdicts == verdicts
    assert batch.rewards.flatten().tolist() == verdicts
    assert torch.equal(batch.is_correct, batch.rewards == 1)
    is_truncated = [grpo.EOS not in tokens for tokens in batch.tokens.tolist()]
    assert batch.is_truncated.tolist() == is_truncated

    # groups that had signal from the beginning stay, in their order
    kept = [plain.problems[4 * p] for p in range(4) if had_signal[p]]
    assert batch.problems[:4 * len(kept):4] == kept
    assert common.describe(batch)["accuracy"] < batch.rewards.mean()    # of all that was sampled
    assert capsys.readouterr().out == ""


def test_the_accuracy_is_that_of_all_that_was_sampled(config, talker, load_task, monkeypatch):
    verdicts = []

    def verify(problem, text):
        verdicts.append(odd_lengths_of_some_prompts(problem, text))
        return verdicts[-1]
    monkeypatch.setattr(grpo, "verify", verify)
    cfg = config(dynamic_sampling=8)
    batch = grpo.sample_batch(talker(cfg), load_task(cfg), cfg, 0)
    assert len(verdicts) > 16
    accuracy = common.describe(batch)["accuracy"]
    assert accuracy == pytest.approx(sum(verdicts) / len(verdicts))


class Sampled(NamedTuple):
    """A batch whose groups dynamic sampling chose, and the pass rates of all that were sampled."""
    batch: common.Batch
    task: common.Task
    rates: dict


def right_by_level(problem, text):
    """All right with two operands, all wrong with three, and with four now so, now so."""
    return float({2: True, 3: False, 4: len(text) % 2 == 1}[problem.difficulty])


@pytest.fixture
def sampled(config, talker, load_task, monkeypatch):
    """A Sampled of several attempts, in which only groups with four operands have signal."""
    asked = []

    def verify(problem, text):
        asked.append((problem, right_by_level(problem, text)))
        return asked[-1][1]
    monkeypatch.setattr(grpo, "verify", verify)
    cfg = config(operands="2-4", num_prompts=3, dynamic_sampling=8, curriculum=True, seed=3)
    task = load_task(cfg)
    batch = grpo.sample_batch(talker(cfg), task, cfg, 0)
    rates = {}
    for first in range(0, len(asked), 4):
        verdicts = [verdict for _, verdict in asked[first:first + 4]]
        rates.setdefault(common.level(asked[first][0]), []).append(sum(verdicts) / 4)
    levels = [common.level(problem) for problem, _ in asked[::4]]
    assert len(levels) > 6 and set(levels[:3]) < set(levels)    # others were added
    assert {problem.difficulty for problem in batch.problems} == {4}
    return Sampled(batch, task, rates)


def test_the_pass_rates_are_those_of_all_groups_that_were_sampled(sampled):
    """Also of those that dynamic sampling has thrown away."""
    assert sampled.rates.keys() == {"arithmetic-2", "arithmetic-3", "arithmetic-4"}
    assert sampled.batch.pass_rates == sampled.rates
    rates = sum(sampled.rates.values(), [])
    accuracy = common.describe(sampled.batch)["accuracy"]
    assert accuracy == pytest.approx(sum(rates) / len(rates))


def test_the_frontier_has_the_groups_that_are_all_wrong_or_all_right(sampled):
    metrics = common.describe(sampled.batch)
    for level, wrong, right in (("arithmetic-2", 0, 1), ("arithmetic-3", 1, 0)):
        assert metrics[f"frontier/{level}/wrong"] == wrong
        assert metrics[f"frontier/{level}/mixed"] == 0
        assert metrics[f"frontier/{level}/right"] == right
    rates = sampled.rates["arithmetic-4"]
    shares = {"wrong": rates.count(0.0) / len(rates), "right": rates.count(1.0) / len(rates)}
    for name, share in shares.items():
        assert metrics[f"frontier/arithmetic-4/{name}"] == pytest.approx(share)
    mixed = 1 - sum(shares.values())
    assert metrics["frontier/arithmetic-4/mixed"] == pytest.approx(mixed) and mixed > 0.3
    assert metrics["signal"] == 1                       # of the groups that it kept


def test_a_curriculum_learns_from_all_groups_that_were_sampled(sampled):
    sampled.task.learn(sampled.batch)
    for level, rates in sampled.rates.items():
        assert sampled.task.rates[level] == pytest.approx(sum(rates) / len(rates)), level


def test_groups_are_selected_in_the_order_asked_for_and_leave_the_pass_rates_as_they_are(
        config, talker, load_task, monkeypatch):
    monkeypatch.setattr(grpo, "verify", odd_lengths_of_some_prompts)
    cfg = config(num_prompts=5, operands="5")
    policy = talker(cfg)
    task = load_task(cfg)
    batch = grpo.sample_batch(policy, task, cfg, 0)
    chosen = common.select_groups(batch, torch.tensor([3, 0]))
    assert chosen.problems == batch.problems[12:16] + batch.problems[:4]
    assert chosen.verdicts == batch.verdicts[12:16] + batch.verdicts[:4]
    assert torch.equal(chosen.rewards, batch.rewards[[3, 0]])
    assert torch.equal(chosen.is_correct, batch.is_correct[[3, 0]])
    assert torch.equal(chosen.tokens, torch.cat([batch.tokens[12:16], batch.tokens[:4]]))
    check_rows(grpo, policy, task, chosen)
    assert chosen.pass_rates == batch.pass_rates


@pytest.mark.parametrize("extra", [0, 1, 3])
def test_dynamic_sampling_adds_so_many_batches_at_most_and_then_takes_what_there_is(
        config, talker, load_task, monkeypatch, extra):
    asked = []

    def verify(problem, text):
        asked.append(problem)
        return 1.0
    monkeypatch.setattr(grpo, "verify", verify)
    cfg = config(dynamic_sampling=extra, num_generations=3, operands="5")
    batch = grpo.sample_batch(talker(cfg), load_task(cfg), cfg, 0)
    assert len(asked) == 12 * (1 + extra)
    assert len(set(asked)) == 4 * (1 + extra)
    assert batch.problems == asked[:12]                 # of groups that are as good, the first
    assert batch.rewards.shape == (4, 3)
    assert len(batch.texts) == len(batch.verdicts) == 12
    assert common.describe(batch)["signal"] == 0        # which says that it was in vain


def test_each_batch_that_is_added_has_uniforms_of_its_own(config, talker, load_task, monkeypatch):
    monkeypatch.setattr(grpo, "verify", lambda problem, text: 1.0)
    cfg = config(dynamic_sampling=1)
    task = load_task(cfg)
    problems = common.sample_problems(task, 4, 0)
    monkeypatch.setattr(common, "sample_problems", lambda *_, **__: problems)
    policy = talker(cfg)
    first = grpo.sample_groups(policy, task, cfg, 0, 0, "train")
    second = grpo.sample_groups(policy, task, cfg, 0, 1, "train")
    assert first.problems == second.problems
    assert not torch.equal(first.tokens, second.tokens)


# ---- the overlong penalty --------------------------------------------------------------------

PENALTY = "--max_completion_length 6 --overlong_buffer 4 --learning_rate 0"
SHARE = {3: 0.75, 4: 0.5, 5: 0.25, 6: 0.0}              # of the reward that is left, by length


@scripts("grpo", "gspo")
def test_long_completions_are_rewarded_less_if_there_is_an_overlong_buffer(
        script, train, monkeypatch):
    monkeypatch.setattr(script, "verify", lambda problem, text: 1.0)
    without = train("--max_completion_length 6 --learning_rate 0").batches
    batches = train(PENALTY).batches
    seen = set()
    for batch, plain in zip(batches, without, strict=True):
        lengths = batch.lengths.tolist()
        assert batch.rewards.flatten().tolist() == [SHARE.get(length, 1.0) for length in lengths]
        assert common.describe(batch)["accuracy"] == 1.0
        assert batch.verdicts == [1.0] * 16
        assert torch.equal(plain.tokens, batch.tokens)
        assert (plain.rewards == 1).all()
        seen |= set(lengths)
    assert {1, 6} <= seen


@scripts("grpo", "gspo")
def test_the_overlong_penalty_counts_what_the_environment_inserts_as_the_limit_does(
        script, train, talkative, monkeypatch):
    monkeypatch.setattr(script, "verify", lambda problem, text: 1.0)
    rewards = []
    for flags in ("", "--mask_tool_tokens false"):
        rewards.append([])
        for batch in train(f"{PENALTY} {flags}").batches:
            assert batch.rewards.flatten().tolist() == [
                SHARE.get(length, 1.0) for length in batch.lengths.tolist()]
            assert (batch.rewards.flatten()[batch.is_truncated] == 0).all()
            rewards[-1] += batch.rewards.flatten().tolist()
    assert rewards[0] == rewards[1]                     # what is learned from changes no reward
    assert any(length > batch.mask[row].sum()           # else nothing was inserted
               for row, length in enumerate(train(PENALTY).batches[0].lengths))


@scripts("grpo", "gspo")
def test_dynamic_sampling_looks_at_rewards_before_the_overlong_penalty(script, train, monkeypatch):
    """As DAPO does, it looks for groups in which some answers are right and some are not."""
    num_asked = []

    def verify(problem, text):
        num_asked.append(text)
        return 1.0
    monkeypatch.setattr(script, "verify", verify)
    batches = train(f"{PENALTY} --dynamic_sampling 3").batches
    assert len(num_asked) == 2 * 4 * 16                 # two steps of four batches each
    assert common.has_signal(batches[0].rewards).any()  # now, by the penalty
