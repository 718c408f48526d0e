"""The reward model of --reward model."""
import json
import math
from pathlib import Path

import pytest
import torch
from conftest import every_script
from small_runs import difference, outcome, resume, steps

import common
import ppo
from tasks import preferences

SMALL = ["--base_steps", "3", "--num_prompts", "4", "--num_eval_problems", "4",
         "--num_eval_samples", "2", "--hidden_size", "16", "--max_completion_length", "6",
         "--stop_at", "2"]
TOKENS = torch.tensor([[65, 66, 264, 265], [67, 264, 265, 265]])
LENGTHS = torch.tensor([3, 2])
ONE_PAIR = torch.tensor([[True, False]])


def batch_of(tokens, lengths, is_correct):
    """A batch with a prompt for each group of is_correct (P, G), and these tokens (B, T)."""
    P, G = is_correct.shape
    prompts = torch.randint(0, 256, (P, 5), generator=torch.Generator().manual_seed(1))
    zeros = torch.zeros(tokens.shape)
    return common.Batch(
        tokens=tokens, mask=zeros, logps=zeros, entropy=zeros, lengths=lengths,
        problems=[common.Problem("1=", "1")] * (P * G), prompts=prompts.repeat_interleave(G, dim=0),
        texts=[""] * (P * G), verdicts=[0.0] * (P * G), rewards=torch.zeros(P, G),
        is_correct=is_correct, is_truncated=torch.zeros(P * G).bool(), pass_rates={})


def pairs_of(is_correct, mistakes):
    """The pairs of a batch of which only is_correct (P, G) matters. -> lists of rows"""
    B = is_correct.numel()
    batch = batch_of(torch.zeros(B, 2).long(), torch.ones(B).long(), is_correct)
    chosen, rejected = preferences.pairs(batch, mistakes, common.generator(0))
    return chosen.tolist(), rejected.tolist()


@pytest.fixture
def in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def policy():
    return ppo.GPT(ppo.Config(hidden_size=16, intermediate_size=16, num_attention_heads=2))


@pytest.fixture
def model(in_float64, policy):
    """A reward model with an opinion."""
    model = preferences.RewardModel(policy)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    return model


# ---- the model -------------------------------------------------------------------------------


def test_the_ratings_of_a_reward_model_that_has_learned_nothing_are_0(policy):
    model = preferences.RewardModel(policy)
    assert model.rewards(batch_of(TOKENS, LENGTHS, ONE_PAIR)).tolist() == [[0.0, 0.0]]


def test_a_reward_model_reads_the_state_at_the_eos_and_nothing_that_follows(model):
    before = model.rewards(batch_of(TOKENS, LENGTHS, ONE_PAIR))
    padded = TOKENS.clone()
    padded[1, 2:] = 70                                      # behind the second completion
    torch.testing.assert_close(model.rewards(batch_of(padded, LENGTHS, ONE_PAIR)), before)
    other = TOKENS.clone()
    other[1, 1] = 71                                        # its last token, the EOS
    after = model.rewards(batch_of(other, LENGTHS, ONE_PAIR))
    assert after[0, 0] == before[0, 0] and abs(after[0, 1] - before[0, 1]) > 1e-3


def test_a_completion_that_fills_all_slots_is_rated_at_its_last_token(model):
    full = torch.tensor([[65, 66, 67, 68], [69, 70, 71, 72]])
    batch = batch_of(full, torch.tensor([4, 4]), ONE_PAIR)
    hidden = model.gpt.hidden(torch.cat([batch.prompts, full], dim=1))[:, -1]               # (2, D)
    expected = model.head(hidden).view(1, 2).detach()
    torch.testing.assert_close(model.rewards(batch), expected)


def test_a_completion_is_rated_together_with_its_prompt(model):
    batch = batch_of(TOKENS[[0, 0]], LENGTHS[[0, 0]], torch.tensor([[True], [False]]))
    assert not torch.equal(batch.prompts[0], batch.prompts[1])
    ratings = model.rewards(batch)                                                          # (2, 1)
    assert abs(ratings[0, 0] - ratings[1, 0]) > 1e-3
    some = model.rate(batch, torch.tensor([1]))
    torch.testing.assert_close(some.detach(), ratings[1])


def test_the_policy_is_copied(policy):
    model = preferences.RewardModel(policy)
    before = policy.embed.weight.clone()
    model.gpt.embed.weight.data += 1
    assert torch.equal(policy.embed.weight, before)


# ---- what it learns --------------------------------------------------------------------------


def test_a_pair_is_a_right_and_a_wrong_completion_of_one_group_and_equals_make_none():
    is_correct = torch.tensor(
        [[False, True, True], [True] * 3, [True, False, False], [False] * 3])
    assert pairs_of(is_correct, mistakes=0.0) == ([1, 6], [0, 7])
    assert pairs_of(is_correct, mistakes=1.0) == ([0, 7], [1, 6])
    assert pairs_of(is_correct[1::2], mistakes=0.0) == ([], [])


def test_one_pair_in_ten_is_swapped():
    chosen, rejected = pairs_of(ONE_PAIR.repeat(2000, 1), preferences.MISTAKES)
    is_swapped = [row % 2 for row in chosen]
    assert 150 < sum(is_swapped) < 250
    assert all(one // 2 == other // 2 and one != other for one, other in zip(chosen, rejected))


def test_the_loss_teaches_what_the_person_prefers_and_the_scale_is_that_of_a_verdict(
        policy, monkeypatch):
    monkeypatch.setattr(preferences, "BATCHES", 60)

    def sample(name):                                       # right completions begin with A
        generator = common.generator(name)
        is_correct = torch.rand(16, 4, generator=generator) < 0.5
        tokens = torch.randint(66, 90, (64, 3), generator=generator)
        tokens[is_correct.flatten(), 0] = 65
        return batch_of(tokens, torch.full((64,), 3), is_correct)

    model = preferences.RewardModel(policy)
    assert preferences.fit(model, sample, common.silent, 0) > 0.95
    ratings = torch.cat([model.rewards(sample(f"preferences {i}")) for i in range(60)])
    assert abs(ratings.mean() - 0.5) < 1e-3 and abs(ratings.std() - 0.5) < 1e-3
    batch = sample("more")
    ratings = model.rewards(batch)
    assert ratings[batch.is_correct].mean() - ratings[~batch.is_correct].mean() > 0.7


def test_the_loss_at_no_difference_is_log_two_with_slope_one_half():
    margin = torch.zeros(1, requires_grad=True, dtype=torch.float64)
    loss = -torch.nn.functional.logsigmoid(margin).mean()
    loss.backward()
    assert math.isclose(loss.item(), math.log(2)) and math.isclose(margin.grad.item(), -0.5)


def test_ratings_are_added_to_the_rewards_of_what_is_sampled(model):
    class Half(common.Arithmetic):
        reward_model = model
    task = Half(ppo.Config(), lambda problem, text: 0.5)
    batch = batch_of(TOKENS, LENGTHS, ONE_PAIR)
    rollout = common.Rollout(
        batch.tokens, batch.mask, batch.logps, batch.entropy, batch.lengths)
    rated = common.make_batch(rollout, task, batch.problems, batch.prompts, batch.texts,
                              batch.is_truncated, 2, 0)
    ratings = model.rewards(batch)
    assert ratings.std() > 0
    torch.testing.assert_close(rated.rewards, 0.5 + ratings)


# ---- runs with --reward model ----------------------------------------------------------------


@pytest.fixture
def lucky(tmp_path, monkeypatch):
    """Of the completions that ppo.py samples, all that are longer than the mean count as correct;
    the verifier still gives them 0."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preferences, "BATCHES", 2)
    sample_batch = ppo.sample_batch

    def sample(*arguments, **options):
        batch = sample_batch(*arguments, **options)
        is_long = batch.lengths > batch.lengths.float().mean()
        batch.is_correct = is_long.view_as(batch.is_correct)
        return batch
    monkeypatch.setattr(ppo, "sample_batch", sample)


def stored_reward_model(folder):
    """The weights of the reward model in the checkpoint of a run."""
    return common.load(Path(folder, "checkpoint.pt"), "cpu")["reward_model"]


@pytest.mark.usefixtures("lucky")
def test_ppo_learns_from_the_ratings_of_the_reward_model_and_logs_what_is_true(capsys):
    ppo.main([*SMALL, "--reward", "accuracy+model", "--max_steps", "2", "--output_dir", "run"])
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    printed = capsys.readouterr().out
    assert "reward model:" in printed and "in memory: " in printed
    assert all(line["accuracy"] == 0 for line in lines)                 # by the verifier
    assert any(line["reward"] != 0 for line in lines)
    for line in lines:
        others = line["reward"] - line["rewards/accuracy/mean"]
        assert line["rewards/model/mean"] == pytest.approx(others)

    before = stored_reward_model("run")
    ppo.main(["--resume_from_checkpoint", "run", "--max_steps", "3"])   # with the same reward model
    after = stored_reward_model("run")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "reward model:" not in capsys.readouterr().out


@pytest.mark.usefixtures("lucky")
@pytest.mark.parametrize("names, accuracy", [("model", 0.0), ("accuracy+model", 1.0)])
def test_the_ratings_of_the_reward_model_are_added_to_the_other_rewards(
        names, accuracy, monkeypatch):
    monkeypatch.setattr(ppo, "verify", lambda problem, text: 1.0)
    heard = []
    ratings = preferences.RewardModel.rewards
    compute_advantages = ppo.compute_advantages

    def listen(critic, reference, batch, *more, **options):
        heard.append(batch)
        return compute_advantages(critic, reference, batch, *more, **options)

    monkeypatch.setattr(ppo, "compute_advantages", listen)
    rated = []

    def note(self, batch):
        rated.append(ratings(self, batch))
        return rated[-1]

    monkeypatch.setattr(preferences.RewardModel, "rewards", note)
    ppo.main([*SMALL, "--reward", names, "--max_steps", "1"])
    [batch] = heard
    assert rated[-1].std() > 0
    torch.testing.assert_close(batch.rewards, accuracy + rated[-1])


@pytest.mark.usefixtures("lucky")
def test_the_critic_that_learns_alone_hears_the_reward_model_too(monkeypatch):
    heard = []
    compute_advantages = ppo.compute_advantages

    def listen(critic, reference, batch, *more, **options):
        heard.append(batch.rewards.std().item())
        return compute_advantages(critic, reference, batch, *more, **options)

    monkeypatch.setattr(ppo, "compute_advantages", listen)
    ppo.main([*SMALL, "--reward", "model", "--critic_pretrain_steps", "2", "--max_steps", "1"])
    assert len(heard) == 3 and min(heard) > 0               # the verifier gives nothing but 0


@every_script
def test_every_script_learns_from_the_ratings_of_a_reward_model(
        script, new_run, at_work_folder, monkeypatch):
    monkeypatch.setattr(preferences, "BATCHES", 4)
    flags = {"reward": "model", "dynamic_sampling": 2}
    waiting = []
    sample_batch = script.sample_batch

    def spied(policy, task, cfg, step, **options):
        if str(step).startswith("preferences"):
            waiting.append(cfg.dynamic_sampling)
        return sample_batch(policy, task, cfg, step, **options)
    monkeypatch.setattr(script, "sample_batch", spied)
    four = new_run(max_steps=4, **flags)
    assert waiting == [0] * 5                   # before there is a model, all rewards are equal
    for line in steps(four):
        assert line["reward"] not in (0, line["accuracy"]) and line["signal"] > 0.5
    two = new_run(max_steps=2, **flags)
    resume(two, max_steps=4)
    assert not difference(outcome(two), outcome(four))


def test_a_base_that_is_never_right_gets_one_line_that_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preferences, "BATCHES", 1)
    with pytest.raises(SystemExit) as stopped:
        ppo.main(["--reward", "model", "--base_steps", "0", "--num_prompts", "2", "--hidden_size",
                  "16", "--max_completion_length", "4"])
    assert stopped.value.code == 1 and "no group of the base" in capsys.readouterr().err
