"""The reward model of ppo.py --reward model."""
import json
import math
from types import SimpleNamespace

import pytest
import torch

import common
import ppo
from tasks import mix, preferences


def batch_of(cfg, tokens, lengths, right):
    """A batch of one prompt for each group of `right` (P, G), with these tokens (B, T)."""
    P, G = right.shape
    prompts = torch.randint(0, 256, (P, 5), generator=torch.Generator().manual_seed(1))
    out = SimpleNamespace(tokens=tokens, lengths=lengths)
    return SimpleNamespace(prompts=prompts, of=torch.arange(P * G) // G, out=out, right=right,
                           texts=[""] * (P * G), rewards=torch.zeros(P, G))


@pytest.fixture
def f64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def model(f64):
    policy = ppo.GPT(ppo.Config(hidden_size=16, intermediate_size=16, num_attention_heads=2))
    model = preferences.RewardModel(policy)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    return model


TOKENS = torch.tensor([[65, 66, 264, 265], [67, 264, 265, 265]])


def test_a_reward_model_that_has_learned_nothing_says_nothing(f64):
    model = preferences.RewardModel(ppo.GPT(ppo.Config(hidden_size=16, intermediate_size=16)))
    batch = batch_of(None, TOKENS, torch.tensor([3, 2]), torch.tensor([[True, False]]))
    assert model.rewards(batch).tolist() == [[0.0, 0.0]]


def test_a_reward_model_reads_behind_the_eos_and_nothing_that_follows(model):
    right, lengths = torch.tensor([[True, False]]), torch.tensor([3, 2])
    before = model.rewards(batch_of(None, TOKENS, lengths, right))
    padded = TOKENS.clone()
    padded[1, 2:] = 70                                      # behind the second completion
    torch.testing.assert_close(model.rewards(batch_of(None, padded, lengths, right)), before)
    other = TOKENS.clone()
    other[1, 1] = 71                                        # its last token, the EOS
    after = model.rewards(batch_of(None, other, lengths, right))
    assert after[0, 0] == before[0, 0] and abs(after[0, 1] - before[0, 1]) > 1e-3


def test_a_completion_that_fills_all_slots_is_read_behind_its_last_token(model):
    right = torch.tensor([[True, False]])
    full = torch.tensor([[65, 66, 67, 68], [69, 70, 71, 72]])
    batch = batch_of(None, full, torch.tensor([4, 4]), right)
    ids = torch.cat([batch.prompts[[0, 0]], full], 1)
    states = model.gpt.hidden(ids, keep=1)[:, 0]                                            # (2, D)
    torch.testing.assert_close(model.rewards(batch), model.head(states).view(1, 2).detach())


def test_a_pair_is_a_right_and_a_wrong_completion_of_one_group_and_equals_make_none():
    right = torch.tensor([[False, True, True], [True] * 3, [True, False, False], [False] * 3])
    batch = batch_of(None, torch.zeros(12, 2).long(), torch.ones(12).long(), right)
    chosen, rejected = preferences.pairs(batch, 0.0, common.generator(0))
    assert chosen.tolist() == [1, 6] and rejected.tolist() == [0, 7]
    swapped = preferences.pairs(batch, 1.0, common.generator(0))
    assert [rows.tolist() for rows in swapped] == [[0, 7], [1, 6]]


def test_one_pair_in_ten_is_swapped():
    right = torch.tensor([[True, False]]).repeat(2000, 1)
    batch = batch_of(None, torch.zeros(4000, 2).long(), torch.ones(4000).long(), right)
    chosen, _ = preferences.pairs(batch, preferences.MISTAKES, common.generator(0))
    assert 150 < (chosen % 2).sum() < 250


def test_the_loss_teaches_what_the_person_prefers_and_the_scale_is_that_of_a_verdict(monkeypatch):
    monkeypatch.setattr(preferences, "BATCHES", 60)
    policy = ppo.GPT(ppo.Config(hidden_size=16, intermediate_size=16, num_attention_heads=2))

    def sample(name):                                       # right completions begin with A
        random = common.generator(name)
        right = torch.rand(16, 4, generator=random) < 0.5
        tokens = torch.randint(66, 90, (64, 3), generator=random)
        tokens[right.view(-1), 0] = 65
        return batch_of(None, tokens, torch.full((64,), 3), right)

    model = preferences.RewardModel(policy)
    assert preferences.fit(model, sample, lambda label, steps: steps, 0) > 0.95
    seen = torch.cat([model.rewards(sample(f"preferences {i}")) for i in range(60)])
    assert abs(seen.mean() - 0.5) < 1e-3 and abs(seen.std() - 0.5) < 1e-3
    batch = sample("more")
    rewards = model.rewards(batch)
    assert rewards[batch.right].mean() - rewards[~batch.right].mean() > 0.7


def test_ppo_is_told_what_the_reward_model_says_and_logs_what_is_true(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preferences, "BATCHES", 2)
    sampled = ppo.sample_batch

    def lucky(*args, **options):                            # whatever is long is right
        batch = sampled(*args, **options)
        batch.right = (batch.out.lengths > batch.out.lengths.float().mean()).view_as(batch.right)
        return batch

    monkeypatch.setattr(ppo, "sample_batch", lucky)
    flags = ["--reward", "accuracy+model", "--max_steps", "2", "--base_steps", "3", "--num_prompts", "4",
             "--num_eval_problems", "4", "--num_eval_samples", "2", "--hidden_size", "16",
             "--max_completion_length", "6", "--output_dir", "run", "--stop_at", "2"]
    ppo.main(flags)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    printed = capsys.readouterr().out
    assert "reward model:" in printed and "in memory: policy and critic" in printed
    assert all(line["accuracy"] == 0 for line in lines if "accuracy" in line)       # the verifier's word
    assert any(line["reward"] != 0 for line in lines if "reward" in line)
    assert all(line["rewards/model/mean"] == pytest.approx(line["reward"] - line["rewards/accuracy/mean"])
               for line in lines)
    judge = common.load("run/checkpoint.pt", "cpu")["judge"]
    ppo.main(["--resume_from_checkpoint", "run", "--max_steps", "3"])               # with the same judge
    again = common.load("run/checkpoint.pt", "cpu")["judge"]
    assert all(torch.equal(judge[name], again[name]) for name in judge)
    assert "reward model:" not in capsys.readouterr().out


def test_what_the_reward_model_says_is_added_to_the_other_rewards():
    batch, said = SimpleNamespace(rewards=torch.tensor([[0.0, 1.0]])), torch.tensor([[0.5, 0.25]])
    judge = SimpleNamespace(rewards=lambda batch: said)
    after = mix.judged(batch, {"judge": judge})
    assert after.rewards.tolist() == [[0.5, 1.25]] and after.judged is said
    assert batch.rewards.tolist() == [[0.0, 1.0]] and mix.judged(batch, {}) is batch


def test_the_critic_that_learns_alone_hears_the_reward_model_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preferences, "BATCHES", 2)
    sampled, heard, credit = ppo.sample_batch, [], ppo.assign_credit

    def lucky(*args, **options):
        batch = sampled(*args, **options)
        batch.right = (batch.out.lengths > batch.out.lengths.float().mean()).view_as(batch.right)
        return batch

    def spy(critic, ref, batch, *more, **options):
        heard.append(batch.rewards.std().item())
        return credit(critic, ref, batch, *more, **options)

    monkeypatch.setattr(ppo, "sample_batch", lucky)
    monkeypatch.setattr(ppo, "assign_credit", spy)
    ppo.main(["--reward", "model", "--critic_pretrain_steps", "2", "--max_steps", "1", "--base_steps", "3",
              "--num_prompts", "4", "--num_eval_problems", "4", "--num_eval_samples", "2", "--hidden_size",
              "16", "--max_completion_length", "6", "--stop_at", "2"])
    assert len(heard) == 3 and min(heard) > 0               # the verifier has nothing but 0 for them


@pytest.mark.parametrize("script", ["grpo", "reinforce", "gspo", "dpo"])
def test_only_ppo_has_a_reward_model(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        __import__(script).main(["--reward", "model"])
    assert "model" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_loss_at_no_difference_is_log_two_with_slope_one_half():
    margin = torch.zeros(1, requires_grad=True, dtype=torch.float64)
    loss = -torch.nn.functional.logsigmoid(margin).mean()
    loss.backward()
    assert math.isclose(loss.item(), math.log(2)) and math.isclose(margin.grad.item(), -0.5)


def test_a_base_that_is_never_right_gets_one_line_that_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preferences, "BATCHES", 1)
    with pytest.raises(SystemExit) as stopped:
        ppo.main(["--reward", "model", "--base_steps", "0", "--num_prompts", "2", "--hidden_size", "16",
                  "--max_completion_length", "4"])
    assert stopped.value.code == 1 and "no group of the base" in capsys.readouterr().err
