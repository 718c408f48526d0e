"""Several tasks and several difficulties at once: who gets which share, what is logged, what comes next."""
import collections
import random
import re
from types import SimpleNamespace

import policies
import pytest
import torch
from conftest import every_script

import common
import grpo
from common import Problem, sample_corpus, sample_problems
from tasks import mix

talker = policies.talker


def levels(problems):
    return collections.Counter(mix.level(problem) for problem in problems)


# ---- difficulties ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("operands, span", [
    ("3-7", (3, 7)), ("5", (5, 5)), (5, (5, 5)), ("2-3", (2, 3)), ("4-4", (4, 4))])
def test_a_range_of_operands_gives_problems_of_every_length_in_it_equally_often(operands, span):
    low, high = span
    assert common.span(operands) == span
    problems = sample_problems("arithmetic", 2000, 0, operands=operands)
    found = levels(problems)
    assert set(found) == {f"arithmetic-{n}" for n in range(low, high + 1)}
    expected = 2000 / (high - low + 1)
    assert all(abs(count - expected) < 5 * expected ** 0.5 for count in found.values())
    for problem in problems:
        assert len(re.findall("[0-9]+", problem.prompt)) == problem.difficulty
    longest = max(len(problem.prompt) for problem in problems)
    assert longest == common.arithmetic.width(operands) == 4 * high - 2


@pytest.mark.parametrize("operands", ["", "1", "7-3", "3-", "-3", "3-x", "0-4", "1.5", "3-4-5", "x"])
def test_what_is_no_range_is_refused(operands):
    with pytest.raises(ValueError, match="range"):
        common.span(operands)


def test_only_the_warm_start_has_shorter_problems_than_the_range_says():
    shown = levels(problem for problem, _ in sample_corpus("arithmetic", 3000, 0, "textbook", operands="4-5"))
    assert set(shown) == {f"arithmetic-{n}" for n in (2, 3, 4, 5)} and shown["arithmetic-2"] < 600
    asked = levels(sample_problems("arithmetic", 3000, 0, operands="4-5"))
    assert set(asked) == {"arithmetic-4", "arithmetic-5"}


# ---- the curriculum -------------------------------------------------------------------------------------


def test_a_curriculum_prefers_what_is_solved_half_of_the_time_and_forgets_nothing():
    rates = {"a": 0.5, "b": 0.9, "c": 0.1, "d": 0.0, "e": 1.0, "f": 0.25}
    expected = {"a": 1.0, "b": 0.36, "c": 0.36, "d": 0.05, "e": 0.05, "f": 0.75}
    assert mix.weights(rates) == pytest.approx(expected)
    assert mix.weights({}) == {}


def test_problems_are_drawn_in_proportion_to_the_weights_of_their_difficulty():
    weights = {"arithmetic-3": 1.0, "arithmetic-4": 0.5, "arithmetic-5": 0.1}       # of 6 nothing is known
    found = levels(sample_problems("arithmetic", 5200, 0, "train", weights, operands="3-6"))
    for name, expected in (("3", 2000), ("4", 1000), ("5", 200), ("6", 2000)):
        assert abs(found[f"arithmetic-{name}"] - expected) < 4 * expected ** 0.5, name


def test_without_weights_problems_are_those_that_they_always_were_and_no_weight_opens_the_other_split():
    plain = sample_problems("arithmetic", 300, 0, operands="3-5")
    assert sample_problems("arithmetic", 300, 0, "train", {}, operands="3-5") == plain
    test = {problem.prompt for problem in sample_problems("arithmetic", 2000, 1, "test", operands=3)}
    some = sample_problems("arithmetic", 2000, 0, "train", {"arithmetic-3": 0.3}, operands=3)
    assert not test & {problem.prompt for problem in some}


def test_the_share_of_right_answers_is_a_running_mean_for_each_difficulty():
    problems = [Problem("arithmetic", "", "", difficulty=n) for n in (3, 3, 4)]
    problems.append(Problem("lookup", "", "", difficulty=4))
    right = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]).bool()
    batch = SimpleNamespace(problems=problems, right=right)
    first = mix.rates({}, batch)
    assert first == pytest.approx({"arithmetic-3": 0.75, "arithmetic-4": 0.25, "lookup-4": 0.0})
    then = mix.rates({"arithmetic-3": 0.25, "arithmetic-9": 0.5}, batch)
    assert then == pytest.approx({"arithmetic-3": 0.8 * 0.25 + 0.2 * 0.75, "arithmetic-4": 0.25,
                                  "lookup-4": 0.0, "arithmetic-9": 0.5})    # of which there was none, stays


@every_script
def test_a_batch_follows_the_curriculum_that_it_is_given(script, config, talker):
    cfg = config(operands="3-4", num_prompts=60, num_generations=2)
    policy = talker(cfg)
    for weights, few in (({"arithmetic-3": 0.05}, 3), ({"arithmetic-4": 0.05}, 4)):
        found = levels(script.sample_batch(policy, cfg, 0, weights).problems)
        assert found[f"arithmetic-{few}"] < 12 < 48 < found[f"arithmetic-{7 - few}"]
    assert 15 < levels(script.sample_batch(policy, cfg, 0).problems)["arithmetic-3"] < 45


# ---- what is logged -------------------------------------------------------------------------------------

def batch_of(problems, right, texts):
    """What `describe` reads of a batch: P problems, right (P, G), P * G texts."""
    right = torch.tensor(right).bool()
    verdicts = right.view(-1).float().tolist()
    return SimpleNamespace(problems=problems, right=right, texts=texts, verdicts=verdicts)


def test_the_frontier_counts_groups_that_are_all_wrong_mixed_and_all_right():
    problems = [Problem("arithmetic", "", "", difficulty=n) for n in (3, 3, 3, 3, 4)]
    texts = ["<think>1+1=3;wait,1+1=2</think><answer>2</answer>"] * 2 + ["<answer>1</answer>"] * 6
    texts += ["<think>1+1=2;wait,1+1=3</think>", "<think>wait</think>"]
    batch = batch_of(problems, [[1, 1], [1, 1], [0, 0], [0, 1], [0, 0]], texts)
    found = mix.describe(batch, "accuracy", 0)
    assert found == pytest.approx({
        "frontier/arithmetic-3/wrong": 0.25, "frontier/arithmetic-3/mixed": 0.25,
        "frontier/arithmetic-3/right": 0.5, "frontier/arithmetic-4/wrong": 1.0,
        "frontier/arithmetic-4/mixed": 0.0, "frontier/arithmetic-4/right": 0.0,
        "checks/share": 0.3, "checks/repaired": 2 / 3})
    assert mix.rates({}, batch) == {"arithmetic-3": 0.625, "arithmetic-4": 0.0}


def test_one_difficulty_has_no_frontier_and_where_nobody_checks_nothing_was_repaired():
    problems = [Problem("arithmetic", "", "", difficulty=5)] * 2
    batch = batch_of(problems, [[1], [0]], ["a", "b"])
    assert mix.describe(batch, "accuracy", 0) == {"checks/share": 0.0, "checks/repaired": None}


def test_calls_of_a_tool_are_counted_where_there_is_one():
    problems = [Problem("lookup", "", "", difficulty=1)] * 2
    texts = ["<search>ka</search><search>", "<answer>x</answer>", "<search>a</search>", ""]
    found = mix.describe(batch_of(problems, [[0, 0], [0, 0]], texts), "accuracy", 0)
    assert found == {"tools/call_frequency": 0.75}


def test_of_a_reward_of_several_rows_each_has_its_mean():
    texts = [f"<think>{'1' * 20}</think><answer>7</answer>", "<answer>7</answer>", "7", "<think>8</think>"]
    batch = batch_of([Problem("lookup", "", "7")] * 2, [[1, 1], [0, 0]], texts)
    found = mix.describe(batch, "accuracy+format+length", 5)
    del found["tools/call_frequency"]
    assert found == pytest.approx({"rewards/accuracy/mean": 0.5, "rewards/format/mean": 0.25,
                                   "rewards/length/mean": 0.1 * (0.5 + 1 / 40) / 4})


# ---- several tasks --------------------------------------------------------------------------------------


def test_a_mix_gives_each_task_its_share_and_its_own_problems_and_demonstrations():
    task = common.load_task("arithmetic,lookup")
    problems = sample_problems("arithmetic,lookup", 1000, 0, operands="3")
    found = collections.Counter(problem.task for problem in problems)
    assert set(found) == {"arithmetic", "lookup"} and abs(found["lookup"] - 500) < 80
    assert {problem.difficulty for problem in problems if problem.task == "arithmetic"} == {3}
    for problem in problems:
        text = task.corpus(problem, random.Random(0), "textbook")
        assert grpo.verify(problem, text) == 1.0 and ("<search>" in text) == (problem.task == "lookup")
    lookup = [problem for problem in problems if problem.task == "lookup"]
    assert all(problem.hidden for problem in lookup)
    assert not any(problem.hidden for problem in problems if problem.task == "arithmetic")


def test_a_mix_is_as_wide_and_as_long_as_what_asks_for_most():
    parts = [common.load_task(name) for name in ("arithmetic", "lookup")]
    task = common.load_task("arithmetic,lookup")
    for operands in ("3", "7"):
        assert task.width(operands=operands) == max(parts[0].width(operands), parts[1].width())
    assert task.FLAGS["max_completion_length"] == max(
        parts[1].FLAGS["max_completion_length"], common.Config.max_completion_length)
    assert task.FLAGS["base_steps"] == max(parts[1].FLAGS["base_steps"], common.Config.base_steps)
    assert task.CORPUS == common.arithmetic.CORPUS


def test_the_options_of_a_mix_are_those_of_its_tasks(config):
    assert config(task="arithmetic,lookup", operands="3-4").options == {"operands": "3-4"}
    assert config(task="lookup").options == {}
    shown = sample_corpus("arithmetic,lookup", 2000, 0, "forum", operands="4")
    found = levels(problem for problem, _ in shown)
    assert set(found) == {"arithmetic-2", "arithmetic-3", "arithmetic-4", "lookup-1", "lookup-2"}


def test_prompts_of_all_tasks_have_one_width(config):
    cfg = config(task="arithmetic,lookup", operands="3")
    problems = sample_problems(cfg.task, 50, 0, **cfg.options)
    prompts = grpo.encode_prompts([problem.prompt for problem in problems], cfg)
    assert prompts.shape == (50, max(len(problem.prompt) for problem in problems))


def test_an_unknown_part_of_a_mix_is_one_line(capsys):
    for name in ("arithmetic,nothing", "arithmetic,", "mix", "arithmetic,mix"):
        with pytest.raises(SystemExit):
            common.load_task(name)
        assert capsys.readouterr().err.count("\n") == 1


def test_who_may_speak_depends_on_the_tasks_of_the_problems_at_hand():
    plain = Problem("arithmetic", "1=", "1")
    asks = Problem("lookup", "boss of ka?", "mi", hidden=(("ka", "mi"),))
    assert mix.calls([]) == mix.calls([plain]) == []
    assert mix.calls([plain, asks]) == mix.calls([asks, asks]) == ["</search>", "</think>"]
    call = "<search>ka</search>"
    assert mix.respond(asks, call) == "<information>mi</information>" and mix.respond(plain, call) == ""
    assert mix.respond(asks, call + "x") == ""


@every_script
def test_every_script_samples_a_mix_and_only_who_has_a_tool_is_told_something(script, config, talker):
    cfg = config(task="arithmetic,lookup", num_prompts=8, max_completion_length=16)
    policy = talker(cfg)
    weight = policy.embed.weight.data
    weight[script.TOKENIZER.encode("</search>", allowed_special="all"), 0] = 6.0
    weight[script.TOKENIZER.encode("<information>", allowed_special="all"), 0] = -40.0
    batch = script.sample_batch(policy, cfg, 0)
    told = collections.Counter()
    for i, text in enumerate(batch.texts):
        told[batch.problems[batch.of[i]].task] += text.count("<information>")
    assert told["lookup"] > 5 and told["arithmetic"] == 0
    assert "</search>" in "".join(text for i, text in enumerate(batch.texts)
                                  if batch.problems[batch.of[i]].task == "arithmetic")
    described = common.describe(batch) | mix.describe(batch, cfg.reward, 0)
    assert {"tools/call_frequency", "checks/share"} <= described.keys()


# ---- a self-check ---------------------------------------------------------------------------------------


def test_a_self_check_repairs_a_step_that_is_wrong_with_the_one_that_is_right():
    checked = 0
    for problem, text in sample_corpus("arithmetic", 6000, 0, "textbook", operands="3-5"):
        if "wait" in text:
            checked += 1
            work = re.fullmatch("<think>(.*)</think><answer>.*</answer>", text)[1]
            assert work.count(";wait,") == 1 and grpo.verify(problem, text) == 1
            before, wrong, right, after = re.fullmatch("(|.*;)([^;]*);wait,([^;]*)(|;.*)", work).groups()
            assert before + right + after == problem.work and wrong != right
            assert wrong.split("=")[0] == right.split("=")[0] and 0 <= int(wrong.split("=")[1]) <= 20
    assert 60 < checked < 180
