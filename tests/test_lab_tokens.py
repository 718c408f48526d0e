"""lab/tokens.py: values of prefixes, marks of steps, and what the verdicts follow from."""
import dataclasses
import zlib

import pytest
import torch

import common
import ppo
from lab import tokens
from lab.entry import CONTRADICTED, NOT_SHOWN, SHOWN

TINY = ["--num_prompts", "2", "--num_generations", "2", "--hidden_size", "16",
        "--max_completion_length", "4"]


@pytest.fixture
def script():
    return ppo


@pytest.fixture
def sampled(talker, monkeypatch):
    """A policy, a task whose verifier likes completions with a character under 64, Config, and a
    batch of the policy."""
    monkeypatch.setattr(tokens, "ROLLOUTS", (1, 8))
    monkeypatch.setattr(tokens, "NUM_REFERENCE", 200)
    cfg = common.parse_flags(ppo.Config, TINY)
    task = common.load_task(cfg, lambda problem, text: float(any(ord(c) < 64 for c in text)))
    policy = talker(cfg)
    return policy, task, cfg, ppo.sample_batch(policy, task, cfg, 0)


def exact_value(policy, task, cfg, batch, row):
    """The chance of a reward with all tokens of a row but the last, by enumeration of that one."""
    t = cfg.max_completion_length - 1
    read = torch.cat([batch.prompts[row], batch.tokens[row, :t]])[None]
    chances = policy(read)[0, -1].softmax(-1)
    value = 0.0
    for token, chance in enumerate(chances.tolist()):
        ids = [*batch.tokens[row, :t].tolist(), token]
        text = ppo.decode([i for i in ids if i != ppo.EOS])
        value += chance * task.verify(batch.problems[row], text)
    return value


def test_values_are_those_of_the_rest_of_a_completion(sampled):
    """Before the last slot, the value is the sum over what can stand there."""
    policy, task, cfg, batch = sampled
    reference, estimates = tokens.rollout_values(policy, task, cfg, batch)
    last = cfg.max_completion_length - 1
    rows = [row for row in range(4) if batch.lengths[row] > last]
    assert rows, "no completion is so long"
    for row in rows:
        expected = exact_value(policy, task, cfg, batch, row)
        assert reference[row, last].item() == pytest.approx(expected, abs=0.12)
    for values in (reference, *estimates.values()):
        assert (values[batch.mask == 0] == 0).all()
    assert set(estimates[1].unique().tolist()) <= {0.0, 1.0}
    assert not torch.equal(estimates[8], reference)


def test_a_policy_without_chance_goes_on_as_it_did(sampled):
    """So that each prefix of a completion has the reward of the completion, but for near ties."""
    _, task, cfg, _ = sampled
    policy = ppo.GPT(cfg)
    policy.embed.weight.data *= 20
    cfg = dataclasses.replace(cfg, temperature=0.01, num_prompts=8)
    task.verify = lambda problem, text: float(zlib.crc32(text.encode()) % 2)
    batch = ppo.sample_batch(policy, task, cfg, 0)
    reference, _ = tokens.rollout_values(policy, task, cfg, batch)
    rewards = batch.rewards.view(-1, 1) * batch.mask
    assert 0 < rewards.mean() < 1
    torch.testing.assert_close(reference * batch.mask, rewards, atol=0.2, rtol=0)


def test_what_is_decided_keeps_its_value(sampled):
    """A prefix that has what the verifier likes has it with any rest."""
    policy, task, cfg, batch = sampled
    reference, _ = tokens.rollout_values(policy, task, cfg, batch)
    for row in range(4):
        for t in range(int(batch.lengths[row])):
            ids = [i for i in batch.tokens[row, :t].tolist() if i != ppo.EOS]
            if task.verify(None, ppo.decode(ids)):
                assert reference[row, t] == 1


PROBLEM = common.Problem("(((3+4)*2)-5)=", "9", "3+4=7;7*2=14;14-5=9")


@pytest.mark.parametrize("text, marks", [
    ("<think>3+4=7;7*2=13;13-5=8</think><answer>8</answer>", {"3+4=7": 1, "7*2=13": -1,
                                                             "13-5=8": -1, "<answer>8": 0}),
    ("<think>3+4=7;7*2=14;14-5=9;9+1=10</think>", {"14-5=9": 1, "9+1=10": -1, "<think>": 0}),
    ("<think>7*2=14;14-5=9</think>", {"7*2=14": -1, "14-5=9": -1}),
    ("<answer>9</answer>", {"<answer>9</answer>": 0}), ("<think>3+4=7;7", {"3+4=7": 1, ";7": -1})])
def test_a_step_is_right_if_it_is_the_one_that_the_problem_asks_for(text, marks):
    found = tokens.steps_right(text, PROBLEM)
    assert len(found) == len(text)
    for part, mark in marks.items():
        place = text.index(part)
        assert set(found[place + part.startswith(";"):place + len(part)]) == {mark}, part


def test_a_token_has_the_mark_of_its_first_character():
    ids = ppo.TOKENIZER.encode("<think>3+4=8</think>", allowed_special="all")
    marks = tokens.steps_right("<think>3+4=8</think>", PROBLEM)
    assert tokens.by_tokens(marks, [*ids, ppo.EOS]) == [0, -1, -1, -1, -1, -1, 0, 0]


def test_the_share_at_forks_is_that_of_a_tenth_of_the_tokens():
    assert tokens.share_at_forks(torch.tensor([1.0, -9.0] + [1.0] * 8)) == pytest.approx(0.5)
    assert tokens.share_at_forks(torch.ones(20)) == pytest.approx(0.1)


def test_estimates_are_held_against_the_advantages_of_the_reference(sampled, monkeypatch):
    """A critic that knows nothing gives the reward to the last token; the reference is random."""
    policy, task, cfg, _ = sampled
    task.verify = lambda problem, text: float(zlib.crc32(text.encode()) % 2)
    monkeypatch.setattr(tokens, "PROBLEMS", 2)
    monkeypatch.setattr(tokens, "GROUP", 2)
    monkeypatch.setattr(tokens, "load_base", lambda *_: (cfg, task, policy))
    monkeypatch.setattr(tokens, "train_critic", lambda *_: lambda prompts, ids: 0.0 * ids)
    kept = {}

    def values(policy, task, cfg, batch):
        generator = torch.Generator().manual_seed(0)
        kept["batch"] = batch
        kept["V"] = torch.rand(batch.mask.shape, generator=generator) * batch.mask
        return kept["V"], {8: kept["V"] / 2}
    monkeypatch.setattr(tokens, "rollout_values", values)
    found = tokens.measure_seed(0)["correlations"]

    batch = kept["batch"]
    is_token = batch.mask > 0
    last = batch.lengths - 1
    rows = torch.arange(4)
    at_end = torch.zeros(batch.mask.shape)
    at_end[rows, last] = batch.rewards.flatten()

    def advantages(V):
        behind = torch.cat([V[:, 1:], torch.zeros(4, 1)], dim=1)
        return (at_end + behind - V)[is_token]
    exact = advantages(kept["V"])
    estimates = {tokens.EIGHT: advantages(kept["V"] / 2), tokens.CRITIC: at_end[is_token]}
    for name, A in estimates.items():
        expected = torch.corrcoef(torch.stack([A, exact]))[0, 1].item()
        assert found[name] == pytest.approx(expected, abs=1e-4), name


def made_up(forks=0.5, **changes):
    names = [tokens.WHOLE, tokens.STEPS_RIGHT, tokens.EIGHT, tokens.CRITIC]
    one = {"correlations": dict.fromkeys(names, 0.5) | changes, "forks": forks,
           "sizes": [0.5, 0.1], "problems": 5}
    return {"of seeds": [one] * 3}


def verdicts(found):
    return [claim.verdict for claim in tokens.claims(found)]


def test_no_claim_is_shown_where_all_are_alike():
    assert verdicts(made_up()) == [NOT_SHOWN] * 5


@pytest.mark.parametrize("name, expected", [
    (tokens.EIGHT, [SHOWN, SHOWN, NOT_SHOWN, NOT_SHOWN]),
    (tokens.WHOLE, [CONTRADICTED, NOT_SHOWN, CONTRADICTED, CONTRADICTED]),
    (tokens.CRITIC, [NOT_SHOWN, CONTRADICTED, SHOWN, NOT_SHOWN]),
    (tokens.STEPS_RIGHT, [NOT_SHOWN, NOT_SHOWN, NOT_SHOWN, SHOWN])])
def test_a_claim_goes_by_the_two_estimates_that_it_names(name, expected):
    assert verdicts(made_up(**{name: 0.6}))[1:] == expected
    opposite = {SHOWN: CONTRADICTED, CONTRADICTED: SHOWN, NOT_SHOWN: NOT_SHOWN}
    assert verdicts(made_up(**{name: 0.4}))[1:] == [opposite[verdict] for verdict in expected]


def test_forks_have_more_than_half_of_the_sizes_if_all_seeds_say_so():
    assert verdicts(made_up(0.51))[0] == SHOWN
    assert verdicts(made_up(0.49))[0] == CONTRADICTED
    assert "2, 2, 2" in tokens.note(made_up())
