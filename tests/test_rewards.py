"""Test the rewards that --reward names, and the reward model, which is one of them."""
import dataclasses
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from conftest import load_named as load
from small_runs import difference, outcome, resume, steps
from update_scenes import made_batch

import common
import ppo
from common import Problem
from tasks import preferences
from tasks.rewards import REWARDS, tool_reward

WORK = ("<search>ka</search><information>mi</information>"
        "<search>mi</search><information>to</information>")
TABLE = (("ka", "mi"), ("mi", "to"), ("to", "ka"))
TWO_HOPS = Problem("boss of boss of ka?", "to", WORK, 2, TABLE, "lookup")
SEVEN = Problem("(3+4)=", "7", "3+4=7", task="arithmetic")
THOUGHT = "<think>3+4=7</think><answer>7</answer>"


def reward(name, text, problem=SEVEN, purpose=0):
    """Compute the reward that one row of REWARDS gives a completion."""
    return REWARDS[name](load(problem.task), problem, text, 0.0, purpose)


# ---- ToolRL ----------------------------------------------------------------------------------

def call(name, **parameters):
    return name, parameters


@pytest.mark.parametrize("true, predicted, expected", [
    ([call("get", a=1, b=2)], [call("get", a=1, c=3)], (1 + 1 / 3 + 1) / 4),
    ([call("get", a=1, b=2)], [call("get", b=1, a=2)], (1 + 1 + 0) / 4),        # values swapped
    ([call("get", a=1, b=2)], [call("set", a=1, b=2)], 0),                      # another tool
    ([call("get", a=1), call("get", a=2)], [call("get", a=2), call("get", a=1)], 1),
    ([call("get", a=1), call("get", a=1)], [call("get", a=1)], (1 / 2 + 2) / 5),    # once
    ([call("get", a=1)], [call("get", a=3), call("get", a=1)], (1 / 2 + 2) / 3),    # the best
    ([call("now")], [call("now", tz=1)], (1 + 0 + 0) / 2), ([], [], 1), ([], [call("get")], 0)])
def test_tool_reward_is_the_sum_over_names_parameters_and_values(true, predicted, expected):
    assert tool_reward(true, predicted) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("text, fine, coarse", [
    ("<think>" + WORK + "</think><answer>xx</answer>", 2, 1),           # ignores the answer
    (WORK, 1, 1), ("", 0, 0), ("<think></think><answer>to</answer>", 1, 0),
    ("<search>mi</search><search> ka </search>", 1, 1), ("<search>ka</search>", 0.5, 0),
    ("<search>zz</search>", (1 / 2 + 1) / 5, 0), (WORK + "</search>", (2 / 3 + 4) / 5, 0),
    ("<search>ka<search>mi</search>", (1 / 2 + 1) / 5, 0), ("</search></search>", 0, 0)], ids=ascii)
def test_fine_rates_each_part_of_a_call_and_coarse_only_all_of_them(text, fine, coarse):
    assert reward("fine", text, TWO_HOPS) == pytest.approx(fine, abs=1e-12)
    assert reward("coarse", text, TWO_HOPS) == coarse


# ---- the rows --------------------------------------------------------------------------------

@pytest.mark.parametrize("is_format, texts", [
    (1.0, [THOUGHT, "<think>\n</think><answer></answer>",
           "<think>" + WORK + "</think><answer>to</answer>"]),
    (0.0, ["", "<answer>7</answer>", "<think>7</think>", "<answer>7</answer><think>3+4=7</think>",
           " " + THOUGHT, THOUGHT + "\n", THOUGHT + "<answer>7</answer>",
           "<think>3+4=7</think> <answer>7</answer>", "<think>3<answer>7</think></answer>"])])
def test_format_is_one_think_block_then_one_answer_block(is_format, texts):
    for text in texts:
        assert reward("format", text) == is_format, ascii(text)


@pytest.mark.parametrize("text, length", [
    ("<answer>7</answer>", 0), ("<think>0123456789", 0), ("<think>xx</think><think>yy</think>", 0),
    ("<think>" + 30 * "x" + "</think><answer>7</answer>", 30),
    ("<think>" + 99 * "x" + "</think>", 99),
    ("<think><information>" + 99 * "x" + "</information>0123</think>", 4),
    ("<think>01<information>x</information>23<information>y</information>4</think>", 5)], ids=ascii)
def test_the_length_bonus_grows_with_the_policys_own_thought_up_to_a_cap(text, length):
    assert reward("length", text) == pytest.approx(0.1 * min(1, length / 40))
    for purpose, target in ((0, 20), ("pairs", 20), (25, 30), ((50, 1), 40), (1000, 40)):
        found = reward("growing_length", text, purpose=purpose)
        assert found == pytest.approx(0.1 * min(1, length / target))


STEP = "3 plus 4 is 7"


@pytest.mark.parametrize("text, share", [
    (f"<think>{STEP};7 minus 5 is 2</think><answer>2</answer>", 1), (f"<think>{STEP};7-5=2", 0),
    (f"<think>{STEP};7-5=2</think>", 1 / 2), ("<think>3 plus 4 is 9;wait," + STEP + "</think>", 1),
    (f"<think>3+4=7;7-5=2;2*4=8</think>{STEP};{STEP}", 0), (STEP, 0), ("<think></think>", 0),
    (f"<think>{STEP}{STEP}</think>", 0), (f"<think>{STEP}</think><think>{STEP}</think>", 0),
    ("<think>\u0663 plus 4 is 7</think>", 0), ("<think>99999 plus 4 is 7</think>", 0),
    ("<think>3 plus 4=7</think>", 0)], ids=ascii)
def test_language_is_the_share_of_the_steps_in_words_and_other_texts_get_nothing(text, share):
    problem = Problem("((3+4)-5)=", "2", task="notation")
    assert reward("language", text, problem) == pytest.approx(share, abs=1e-12)


# ---- --reward --------------------------------------------------------------------------------

def batch_of(is_correct, **fields):
    """Make a batch of is_correct (P, G), in which only fields differ from zeros: the prompt of each
    group, and those that are given."""
    is_correct = torch.tensor(is_correct)
    P, G = is_correct.shape
    prompts = torch.randint(0, 256, (P, 5), generator=torch.Generator().manual_seed(1))
    nothing = torch.zeros(P * G, 2)
    batch = made_batch(ppo, prompts.repeat_interleave(G, dim=0).tolist(), nothing.long().tolist(),
                       nothing, nothing, G, is_correct.double())
    return dataclasses.replace(batch, **fields)


def test_rows_are_added_up_by_name_and_of_several_the_mean_of_each_is_logged():
    long = f"<think>{'1' * 20}</think><answer>7</answer>"
    batch = batch_of([[1, 1], [0, 0]], problems=[SEVEN] * 4,
                     texts=[long, "<answer>7</answer>", "7", "<think>8</think>"])
    task = load("arithmetic", reward="accuracy+format+length")
    expected = torch.tensor([[2.05, 1.0], [0.0, 0.1 / 40]])
    torch.testing.assert_close(task.judge(batch, 2, 5).rewards, expected)
    assert task.reward(SEVEN, long, 1.0, 5) == pytest.approx(2.05)
    assert task.observe(batch, 5) == pytest.approx({
        "rewards/accuracy/mean": 0.5, "rewards/format/mean": 0.25,
        "rewards/length/mean": 0.1 * (0.5 + 1 / 40) / 4})


def test_what_a_reward_model_rates_is_added_once_to_the_other_rows():
    """Before it is trained, its ratings are 0."""
    batch = batch_of([[1, 1], [0, 0]], problems=[SEVEN] * 4, texts=[THOUGHT, "7", THOUGHT, "8"])
    for flag, others in (("model", [0, 0, 0, 0]), ("accuracy+model+format", [2, 0, 2, 0])):
        task = load("arithmetic", reward=flag)
        for ratings in (torch.zeros(4), torch.tensor([0.25, 0.5, -1.0, 4.0])):
            judged = task.judge(batch, 2, 0)
            expected = torch.tensor(others) + ratings
            assert torch.equal(judged.rewards.flatten(), expected)
            edited = task.judge(batch, 2, 0, reward=lambda problem, text, given: 2 * given + 1)
            assert torch.equal(edited.rewards.flatten(), 2 * expected + 1)
            assert judged.is_correct.tolist() == [[True, False], [True, False]]
            if "+" in flag:
                found = task.observe(common.gather([judged], torch.tensor([1, 0])), 0)
                assert found["rewards/model/mean"] == pytest.approx(ratings.mean().item())
            task.model = SimpleNamespace(rewards=lambda rated: (
                torch.tensor([0.25, 0.5, -1.0, 4.0]) if rated is batch else None))


@pytest.mark.parametrize("text, is_right, mean, std", [
    (THOUGHT, True, 7, 1.04), ("<answer>7</answer>", True, 7, 1.04),
    ("<answer>8</answer>", False, 5, 1.04), ("<answer> </answer>", False, 1.38, 0.63),
    ("<answer>7</answer><answer>7</answer>", False, 1.38, 0.63)])
def test_a_judge_gives_whole_points_with_a_normal_mistake_and_scores_stay_exact(
        text, is_right, mean, std):
    """What has no answer deserves 1 point, below which no mistake leads."""
    batch = batch_of([[0, 0]] * 5000, problems=[SEVEN] * 10_000, texts=[text] * 10_000)
    draws = [load("arithmetic", reward="points", seed=seed).judge(batch, 2, step).rewards.flatten()
             for seed in (0, 1) for step in (3, 4)]
    assert all((one != other).float().mean() > 0.2 for one, other in combinations(draws, 2))
    points, *_ = draws
    assert {*points.tolist()} <= {*range(1, 11)}
    found = points.mean().item(), points.std().item()
    assert found == pytest.approx((mean, std), abs=0.04)
    assert batch.is_correct.all() if is_right else not batch.is_correct.any()


@pytest.mark.parametrize("group, rewards", [        # the answers of a group; - has none
    ("7,7,8,9", [1, 1, 0, 0]), ("8,8,8,7", [1, 1, 1, 0]),       # whatever is right
    ("9,8,8,9", [1, 0, 0, 1]), ("07,8,8,7", [1, 0, 0, 1]),      # in a tie, the first one
    ("7,-,-,-", [1, 0, 0, 0]), ("-,-,-,-", [0] * 4), (" ,7, , ", [0, 1, 0, 0])])
def test_the_answer_of_most_outputs_of_a_group_is_right_and_other_groups_do_not_count(
        group, rewards):
    others = "8,8,8,-"                                          # the batch has most 8s
    texts = ["<think>8" if one == "-" else f"<answer>{one}</answer>"
             for one in f"{group},{others},{others}".split(",")]
    task = load("arithmetic", reward="majority")
    judged = task.judge(batch_of([[0] * 4] * 3, problems=[SEVEN] * 12, texts=texts), 4, 0)
    assert judged.rewards.tolist() == [rewards, [1, 1, 1, 0], [1, 1, 1, 0]]
    assert judged.is_correct[0].tolist() == [one in ("7", "07") for one in group.split(",")]


# ---- the reward model ------------------------------------------------------------------------

TOKENS = torch.tensor([[65, 66, 264, 265], [67, 264, 265, 265]])
LENGTHS = torch.tensor([3, 2])


@pytest.fixture
def policy():
    flags = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    return ppo.GPT(ppo.Config(device="cpu", **flags)).double()


def test_a_completion_is_rated_at_its_last_token_together_with_its_prompt(policy):
    model = preferences.RewardModel(policy).double()
    batch = batch_of([[1], [0]], tokens=TOKENS, lengths=LENGTHS)
    assert model.rewards(batch).tolist() == [0.0, 0.0]
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(batch.prompts[0], batch.prompts[1])
    hidden = model.gpt.hidden(torch.cat([batch.prompts, TOKENS], dim=1))    # (2, 5 + 4, D)
    expected = model.head(hidden[torch.arange(2), 5 + LENGTHS - 1])[:, 0].detach()
    torch.testing.assert_close(model.rewards(batch), expected)
    assert abs(expected[0] - expected[1]) > 1e-3
    before = policy.embed.weight.clone()
    model.gpt.embed.weight.data += 1                        # the policy was copied
    assert torch.equal(policy.embed.weight, before)


def pairs_of(is_correct, mistakes):
    """Make the pairs of a batch with this is_correct (P, G). -> chosen rows, rejected rows"""
    chosen, rejected = preferences.pairs(batch_of(is_correct), mistakes, common.generator(0))
    return chosen.tolist(), rejected.tolist()


def test_a_pair_is_a_right_and_a_wrong_completion_of_one_group_and_one_in_ten_is_swapped():
    is_correct = [[0, 1, 1], [1, 1, 1], [1, 0, 0], [0, 0, 0]]
    assert pairs_of(is_correct, mistakes=0.0) == ([1, 6], [0, 7])
    assert pairs_of(is_correct, mistakes=1.0) == ([0, 7], [1, 6])
    assert pairs_of(is_correct[1::2], mistakes=0.0) == ([], [])
    chosen, rejected = pairs_of([[1, 0]] * 2000, preferences.MISTAKES)
    assert 150 < sum(row % 2 for row in chosen) < 250
    assert all(one // 2 == other // 2 and one != other for one, other in zip(chosen, rejected))


def test_the_loss_teaches_what_the_person_prefers_and_the_scale_is_that_of_a_verdict(
        policy, monkeypatch, watch):
    monkeypatch.setattr(preferences, "BATCHES", 60)
    labelled = watch(preferences, "pairs", lambda batch, _, generator: generator.initial_seed())
    drawn = []

    def sample(name):                                       # right completions begin with A
        drawn.append(name)
        generator = common.generator(name)
        is_correct = torch.rand(16, 4, generator=generator) < 0.5
        tokens = torch.randint(66, 90, (64, 3), generator=generator)
        tokens[is_correct.flatten(), 0] = 65
        return batch_of(is_correct.tolist(), tokens=tokens, lengths=torch.full((64,), 3))

    model = preferences.RewardModel(policy).double()
    assert preferences.fit(model, sample, 0) > 0.95
    assert len(drawn) == len({*drawn}) == 61                # it is tested on new pairs
    ratings = torch.cat([model.rewards(sample(f"preferences {i}")) for i in range(60)])
    assert abs(ratings.mean() - 0.5) < 1e-3 and abs(ratings.std() - 0.5) < 1e-3
    batch = sample("more")
    ratings = model.rewards(batch)
    is_correct = batch.is_correct.flatten()
    assert ratings[is_correct].mean() - ratings[~is_correct].mean() > 0.7
    monkeypatch.setattr(preferences, "BATCHES", 1)
    preferences.fit(model, sample, 1)
    assert len({*labelled}) == 4            # each seed has its own mistakes, and its own tests


def test_a_run_learns_from_the_ratings_of_a_reward_model(
        new_run, at_work_folder, monkeypatch, capsys):
    """The reward model is trained once, on samples of the base, and a resumed run still has it."""
    monkeypatch.setattr(preferences, "BATCHES", 4)
    flags = {"reward": "model", "dynamic_sampling": 2, "task": "arithmetic:2-3", "curriculum": True}
    four = new_run(max_steps=4, **flags)
    assert capsys.readouterr().out.count("reward model: ") == 1
    for line in steps(four):
        assert line["reward"] not in (0, line["accuracy"]) and line["signal"] > 0.5
    two = new_run(max_steps=2, **flags)
    resume(two, max_steps=4)
    assert capsys.readouterr().out.count("reward model: ") == 1
    assert not difference(outcome(two), outcome(four))
