"""Several tasks and several difficulties at once: the share of each, what is logged, and how a
curriculum chooses."""
import collections
import inspect
import random
import re
import zlib

import pytest
import torch
from conftest import every_script

import common
import grpo
from common import Problem
from tasks.mix import Curriculum, Mix, preference


def load(name="arithmetic", **flags):
    """The task that these flags name."""
    return common.load_task(grpo.Config(task=name, **flags), grpo.verify)


def levels(problems):
    """How many problems there are of each task and difficulty."""
    return collections.Counter(common.level(problem) for problem in problems)


# ---- problems --------------------------------------------------------------------------------


@pytest.mark.parametrize("name, flags, checksum", [
    ("arithmetic", {"operands": "3-5"}, 1875984358), ("countdown", {}, 874251245),
    ("gridworld", {}, 305710151), ("gridworld", {"slip": 0.3}, 1673125815),
    ("lookup", {}, 3696101308), ("arithmetic,lookup", {}, 2533541809)])
def test_the_problems_and_demonstrations_of_a_seed_stay_the_same(name, flags, checksum):
    """Reported results depend on them."""
    task = load(name, **flags)
    problems = [tuple(problem)[:5] for problem in common.sample_problems(task, 50, 1)]
    shown = []
    for phase in ("textbook", "forum"):
        for problem, text in common.sample_demonstrations(task, 50, 1, phase):
            shown.append((problem.prompt, text))
    assert zlib.crc32(repr((problems, shown)).encode()) == checksum


@pytest.mark.parametrize("operands, span", [
    ("3-7", (3, 7)), ("5", (5, 5)), (5, (5, 5)), ("2-3", (2, 3)), ("4-4", (4, 4))])
def test_a_range_of_operands_gives_problems_of_every_length_in_it_equally_often(operands, span):
    low, high = span
    assert common.span(operands, "operands") == span
    task = load(operands=operands)
    problems = common.sample_problems(task, 2000, 0)
    found = levels(problems)
    assert set(found) == {f"arithmetic-{n}" for n in range(low, high + 1)}
    expected = 2000 / (high - low + 1)
    assert all(abs(count - expected) < 5 * expected ** 0.5 for count in found.values())
    for problem in problems:
        assert len(re.findall("[0-9]+", problem.prompt)) == problem.difficulty
    longest = max(len(problem.prompt) for problem in problems)
    assert longest == task.prompt_width == 4 * high - 2


@pytest.mark.parametrize("operands", [
    "", "1", "7-3", "3-", "-3", "3-x", "0-4", "1.5", "3-4-5", "x"])
def test_what_is_no_range_is_refused(operands):
    with pytest.raises(ValueError, match=f"--numbers {operands}: .*range"):
        common.span(operands, "numbers")


def test_only_the_warm_start_has_shorter_problems_than_the_range_says():
    task = load(operands="4-5")
    pairs = common.sample_demonstrations(task, 3000, 0, "textbook")
    shown = levels(problem for problem, _ in pairs)
    assert set(shown) == {f"arithmetic-{n}" for n in (2, 3, 4, 5)} and shown["arithmetic-2"] < 600
    sampled = levels(common.sample_problems(task, 3000, 0))
    assert set(sampled) == {"arithmetic-4", "arithmetic-5"}


# ---- the curriculum --------------------------------------------------------------------------


@pytest.mark.parametrize("rate, expected", [
    (0.5, 1.0), (0.9, 0.36), (0.1, 0.36), (0.0, 0.05), (1.0, 0.05), (0.25, 0.75)])
def test_a_curriculum_prefers_what_is_solved_half_of_the_time_and_forgets_nothing(rate, expected):
    assert preference(rate) == pytest.approx(expected)


RATES = {"arithmetic-3": 0.5, "arithmetic-4": (1 - 0.5 ** 0.5) / 2, "arithmetic-5": 1.0}


def test_problems_are_drawn_in_proportion_to_the_weights_of_their_difficulty():
    """The weights are 1, 1/2 and 1/20; of 6 operands nothing is known, so that the weight is 1."""
    task = load(operands="3-6", curriculum=True)
    task.rates = RATES
    found = levels(common.sample_problems(task, 5100, 0))
    for n, expected in ((3, 2000), (4, 1000), (5, 100), (6, 2000)):
        assert abs(found[f"arithmetic-{n}"] - expected) < 4 * expected ** 0.5, n


def test_a_curriculum_of_a_mix_goes_by_task_and_difficulty():
    task = load("arithmetic,lookup", operands="3", curriculum=True)
    task.rates = {"arithmetic-3": 0.5, "lookup-1": 0.0, "lookup-2": 0.5}
    found = levels(common.sample_problems(task, 3000, 0))
    expected = 2000 * 0.05 / 2
    assert abs(found["lookup-1"] - expected) < 4 * expected ** 0.5
    assert abs(found["arithmetic-3"] - 2 * found["lookup-2"]) < 5 * 2000 ** 0.5


def test_a_curriculum_that_knows_nothing_samples_what_the_task_would():
    plain = load(operands="3-5")
    task = load(operands="3-5", curriculum=True)
    problems = common.sample_problems(plain, 300, 0)
    assert common.sample_problems(task, 300, 0) == problems
    shown = common.sample_demonstrations(plain, 50, 0, "forum")
    assert common.sample_demonstrations(task, 50, 0, "forum") == shown


def test_a_curriculum_changes_no_held_out_problem_and_takes_none_for_training():
    plain = load(operands="3-4")
    task = load(operands="3-4", curriculum=True)
    task.rates = {"arithmetic-3": 0.1, "arithmetic-4": 1.0}
    held_out = common.sample_problems(plain, 2000, 1, "test")
    assert common.sample_problems(task, 2000, 1, "test") == held_out
    trained = {problem.prompt for problem in common.sample_problems(task, 2000, 0)}
    assert not trained & {problem.prompt for problem in held_out}


def batch_of(problems, is_correct, texts):
    """A batch of P problems, with is_correct (P, G) and P * G texts."""
    is_correct = torch.tensor(is_correct).bool()
    P, G = is_correct.shape
    none = torch.zeros(P * G, 1)
    pass_rates = {}
    for problem, rate in zip(problems, is_correct.double().mean(dim=1).tolist()):
        pass_rates.setdefault(common.level(problem), []).append(rate)
    return common.Batch(
        tokens=none.long(), mask=none, logps=none, entropy=none, lengths=none[:, 0].long(),
        problems=[problem for problem in problems for _ in range(G)], prompts=none.long(),
        texts=texts, verdicts=is_correct.flatten().float().tolist(), rewards=is_correct.float(),
        is_correct=is_correct, is_truncated=none[:, 0].bool(), pass_rates=pass_rates)


def problems_of(task, *difficulties):
    return [Problem("", "", difficulty=n, task=task) for n in difficulties]


def test_the_share_of_right_answers_is_a_running_mean_for_each_difficulty():
    problems = problems_of("arithmetic", 3, 3, 4) + problems_of("lookup", 4)
    is_correct = [[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]
    batch = batch_of(problems, is_correct, [""] * 16)
    task = load(operands="3-5", curriculum=True)
    task.learn(batch)
    assert task.rates == pytest.approx({
        "arithmetic-3": 0.75, "arithmetic-4": 0.25, "lookup-4": 0.0})
    task.rates = {"arithmetic-3": 0.25, "arithmetic-9": 0.5}
    task.learn(batch)
    assert task.rates == pytest.approx({
        "arithmetic-3": 0.8 * 0.25 + 0.2 * 0.75, "arithmetic-4": 0.25, "lookup-4": 0.0,
        "arithmetic-9": 0.5})                           # of which there was none, stays


def test_a_curriculum_sees_the_groups_that_dynamic_sampling_left_out():
    """A level with three groups that are all right and a mixed one, the only one that is kept, is
    no level that is solved half of the time."""
    problems = problems_of("arithmetic", 3, 3, 3, 3, 4, 5)
    is_correct = [[1, 1], [1, 1], [1, 1], [1, 0], [1, 1], [0, 1]]
    batch = common.keep_groups(batch_of(problems, is_correct, [""] * 12), 2)
    assert batch.rewards.tolist() == [[1, 0], [0, 1]]
    task = load(operands="3-5", curriculum=True)
    task.learn(batch)
    assert task.rates == pytest.approx({
        "arithmetic-3": 0.875, "arithmetic-4": 1.0, "arithmetic-5": 0.5})


def test_a_checkpoint_keeps_what_a_curriculum_has_learned():
    task = load(operands="3-5", curriculum=True)
    assert task.state == {"rates": {}}
    task.learn(batch_of(problems_of("arithmetic", 3), [[1, 0]], ["", ""]))
    assert task.state == {"rates": {"arithmetic-3": 0.5}}
    again = load(operands="3-5", curriculum=True)
    again.state = task.state
    assert again.rates == task.rates and again.task.state == {}


class Diary(common.Task):
    """A task that refuses some problems and takes note of how often it learns."""
    prompt_width = 2

    def sample(self, rng):
        return Problem(f"{rng.randrange(10)}=", "")

    def wants(self, problem, rng):
        return problem.prompt != "3="

    def learn(self, batch):
        self.state["learned"] = self.state.get("learned", 0) + 1


def test_a_curriculum_asks_and_tells_the_task_that_it_wraps():
    task = Curriculum(Diary(grpo.Config()))
    diary = task.task.name
    task.rates = {f"{diary}-0": 0.5}
    prompts = {problem.prompt for problem in common.sample_problems(task, 200, 0)}
    assert len(prompts) > 5 and "3=" not in prompts
    task.learn(batch_of(problems_of(diary, 0), [[1, 0]], ["", ""]))
    assert task.state == {"learned": 1, "rates": {f"{diary}-0": 0.5}}
    again = Curriculum(Diary(grpo.Config()))
    again.state = task.state
    assert again.state == task.state and again.task.state == {"learned": 1}


@every_script
def test_a_batch_follows_the_curriculum(script, config, load_task, talker):
    cfg = config(operands="3-4", num_prompts=60, num_generations=2, curriculum=True)
    policy = talker(cfg)
    task = load_task(cfg)
    for rates, few in (({"arithmetic-3": 0.0, "arithmetic-4": 0.5}, 3),
                       ({"arithmetic-3": 0.5, "arithmetic-4": 1.0}, 4)):
        task.rates = rates
        found = levels(script.sample_batch(policy, task, cfg, 0).problems[::2])
        assert found[f"arithmetic-{few}"] < 12 < 48 < found[f"arithmetic-{7 - few}"]
    task.rates = {}
    assert 15 < levels(script.sample_batch(policy, task, cfg, 0).problems[::2])["arithmetic-3"] < 45


# ---- what is logged --------------------------------------------------------------------------


def test_the_frontier_counts_groups_that_are_all_wrong_mixed_and_all_right():
    problems = problems_of("arithmetic", 3, 3, 3, 3, 4)
    is_correct = [[1, 1], [1, 1], [0, 0], [0, 1], [0, 0]]
    batch = batch_of(problems, is_correct, [""] * 10)
    assert common.frontier(batch.pass_rates) == pytest.approx({
        "frontier/arithmetic-3/wrong": 0.25, "frontier/arithmetic-3/mixed": 0.25,
        "frontier/arithmetic-3/right": 0.5, "frontier/arithmetic-4/wrong": 1.0,
        "frontier/arithmetic-4/mixed": 0.0, "frontier/arithmetic-4/right": 0.0})
    assert common.frontier(batch.pass_rates).items() <= common.describe(batch).items()


def test_one_difficulty_has_no_frontier():
    batch = batch_of(problems_of("arithmetic", 5, 5), [[1, 0], [0, 0]], [""] * 4)
    assert common.frontier(batch.pass_rates) == {}


def test_completions_that_check_themselves_are_counted_and_those_that_are_then_right():
    texts = ["<think>1+1=3;wait,1+1=2</think><answer>2</answer>"] * 2 + ["<answer>1</answer>"] * 6
    texts += ["<think>1+1=2;wait,1+1=3</think>", "<think>wait</think>"]
    is_correct = [[1, 1], [1, 1], [0, 0], [0, 1], [0, 0]]
    batch = batch_of(problems_of("arithmetic", 3, 3, 3, 3, 4), is_correct, texts)
    found = load().describe(batch, 0)
    assert found == pytest.approx({"checks/share": 0.3, "checks/repaired": 2 / 3})
    batch = batch_of(problems_of("arithmetic", 5, 5), [[1], [0]], ["a", "b"])
    assert load().describe(batch, 0) == {"checks/share": 0.0, "checks/repaired": None}


def test_calls_of_a_tool_are_counted_where_there_is_one():
    texts = ["<search>ka</search><search>", "<answer>x</answer>", "<search>a</search>", ""]
    batch = batch_of(problems_of("lookup", 1, 1), [[0, 0], [0, 0]], texts)
    assert load("lookup").describe(batch, 0) == {"tools/call_frequency": 0.75}
    for name in ("gridworld", "countdown"):
        assert load(name).describe(batch, 0) == {}


def test_in_a_mix_each_task_counts_in_its_own_completions():
    task = load("arithmetic,lookup,countdown")
    problems = problems_of("arithmetic", 5) + problems_of("lookup", 1, 1, 1)
    texts = ["<search>;wait,", ";wait,", "<search><search>", ";wait,", "<search>", "", "", ""]
    batch = batch_of(problems, [[1, 0], [1, 1], [0, 0], [0, 0]], texts)
    assert task.describe(batch, 0) == {
        "checks/share": 2 / 2, "checks/repaired": 1 / 2, "tools/call_frequency": 3 / 6}
    assert batch.texts == texts
    batch = batch_of(problems_of("lookup", 1, 1), [[0, 0], [0, 0]], texts[:4])
    assert task.describe(batch, 0) == {"tools/call_frequency": 3 / 4}


# ---- several tasks ---------------------------------------------------------------------------


def test_a_mix_gives_each_task_its_share_and_its_own_problems_and_demonstrations():
    task = load("arithmetic,lookup", operands="3")
    problems = common.sample_problems(task, 1000, 0)
    found = collections.Counter(problem.task for problem in problems)
    assert set(found) == {"arithmetic", "lookup"} and abs(found["lookup"] - 500) < 80
    assert levels(problems).keys() == {"arithmetic-3", "lookup-1", "lookup-2"}
    for problem in problems:
        text = task.demonstration(problem, random.Random(0), "textbook")
        assert task.verify(problem, text) == task.reward(problem, text, 1.0, 0) == 1.0
        assert ("<search>" in text) == (problem.secret is not None) == (problem.task == "lookup")


def test_a_task_that_is_named_twice_has_twice_the_share():
    problems = common.sample_problems(load("lookup,lookup,countdown"), 900, 0)
    found = collections.Counter(problem.task for problem in problems)
    assert abs(found["lookup"] - 600) < 80 and abs(found["countdown"] - 300) < 80


def test_a_mix_has_all_that_a_task_has():
    task = load("arithmetic,lookup")
    for name, _ in inspect.getmembers(load("lookup")):
        is_of_lookup = name in ("true_calls", "predicted_calls")
        if not name.startswith("_") and not is_of_lookup and name != "held_out_tenths":
            assert hasattr(task, name), name
    methods = dict(inspect.getmembers(common.Task, inspect.isfunction))
    for name in methods.keys() - {"__init__"}:
        assert inspect.signature(getattr(Mix, name)) == inspect.signature(methods[name]), name


def test_a_mix_asks_the_task_that_a_problem_is_of(monkeypatch):
    """Of every method that is given a problem, with the same arguments."""
    task = load("arithmetic,lookup")
    asked = []
    methods = {name: list(inspect.signature(method).parameters)
               for name, method in inspect.getmembers(common.Task, inspect.isfunction)}
    names = [name for name, parameters in methods.items() if parameters[1:2] == ["problem"]]
    assert len(names) == 9
    for name in names:
        for part in task.parts.values():
            def note(*arguments, name=name, part=part.name):
                asked.append((name, part, arguments))
                return part
            monkeypatch.setattr(part, name, note)
        for part in ("arithmetic", "lookup"):
            problem = Problem("1=", "1", task=part)
            others = ["</search>"] * (len(methods[name]) - 2)
            found = getattr(task, name)(problem, *others)
            if (name, part) == ("respond", "arithmetic"):       # which has no call tokens
                assert found == "" and not asked
            else:
                assert found == part and asked.pop() == (name, part, (problem, *others))


def test_a_mix_is_as_wide_and_as_long_as_the_task_that_needs_most():
    lookup = load("lookup")
    for operands in ("3", "7"):
        widths = [load(operands=operands).prompt_width, lookup.prompt_width]
        assert load("arithmetic,lookup", operands=operands).prompt_width == max(widths)
    defaults = common.task_defaults(grpo.Config, "arithmetic,lookup")
    for name in ("max_completion_length", "base_steps"):
        assert defaults[name] == max(lookup.defaults[name], getattr(grpo.Config, name))


def test_a_mix_understands_the_flags_of_its_tasks(capsys):
    shown = common.sample_demonstrations(load("arithmetic,lookup", operands="4"), 2000, 0, "forum")
    found = levels(problem for problem, _ in shown)
    assert set(found) == {"arithmetic-2", "arithmetic-3", "arithmetic-4", "lookup-1", "lookup-2"}
    for name, flags in (("lookup", {"operands": "4"}), ("arithmetic,lookup", {"slip": 0.1})):
        with pytest.raises(SystemExit):
            load(name, **flags)
        assert f"is not for {name}" in capsys.readouterr().err


def test_of_a_mix_each_task_holds_out_its_own_problems():
    task = load("arithmetic,countdown")
    for split in ("train", "test"):
        for problem in common.sample_problems(task, 300, 0, split):
            part = task.parts[problem.task]
            assert task.is_held_out(problem) == part.is_held_out(problem) == (split == "test")


def test_a_mix_is_judged_if_one_of_its_tasks_is():
    """Then only the problems of that task are right or wrong."""
    assert not load("gridworld", slip=0.5).is_judged
    task = load("gridworld,lookup", slip=0.5)
    assert task.is_judged and load("gridworld,lookup").is_judged
    walk = Problem("A b3 7", "", secret=(0.5, 0), task="gridworld")
    question = Problem("boss of ka?", "mi", task="lookup")
    assert task.is_correct(walk, [5.0]) is None and task.is_correct(question, 1.0) is True
    alone = load("gridworld,gridworld", slip=0.5)
    assert not alone.is_judged


def test_prompts_of_all_tasks_have_one_width():
    task = load("arithmetic,lookup", operands="3")
    problems = common.sample_problems(task, 50, 0)
    prompts = grpo.encode_prompts([problem.prompt for problem in problems], task, "cpu")
    assert prompts.shape == (50, max(len(problem.prompt) for problem in problems))


@pytest.mark.parametrize("name", [
    "arithmetic,nothing", "arithmetic,", "mix", "arithmetic,mix", "rewards", "preferences",
    "__init__"])
def test_an_unknown_part_of_a_mix_is_one_line(name, capsys):
    with pytest.raises(SystemExit):
        load(name)
    error = capsys.readouterr().err
    assert error.startswith(f"error: --task {name}: ") and error.count("\n") == 1
    assert common.task_names() == ["arithmetic", "countdown", "gridworld", "lookup"]


def test_the_environment_of_a_task_responds_to_its_own_call_tokens_only():
    assert load("arithmetic").call_tokens == load("arithmetic,countdown").call_tokens == ()
    assert load("arithmetic,lookup,lookup").call_tokens == ("</search>", "</think>")
    task = load("arithmetic,lookup,gridworld", slip=0.5)
    assert set(task.call_tokens) == {"</search>", "</think>", *"URDL"}
    plain = Problem("1=", "1", task="arithmetic")
    asking = Problem("boss of ka?", "mi", secret=(("ka", "mi"),), task="lookup")
    call = "<search>ka</search>"
    assert task.respond(asking, call) == "<information>mi</information>"
    assert task.respond(plain, call) == ""
    assert task.respond(asking, call + "x") == ""
    assert task.respond(asking, "<search>U") == ""      # the move of another task
    assert load("lookup").respond(asking, "<search>U") != ""


class OtherDiary(Diary):
    """Another one."""


def test_the_states_of_the_tasks_of_a_mix_are_kept_by_name():
    def make():
        parts = [Diary(grpo.Config()), load("lookup"), OtherDiary(grpo.Config())]
        parts[0].name, parts[2].name = "one", "other"
        return Mix(grpo.Config(), parts)
    task = make()
    assert task.state == {}
    task.learn(None)
    task.parts["one"].learn(None)
    assert task.state == {"one": {"learned": 2}, "other": {"learned": 1}}
    again = make()
    again.state = task.state
    assert again.parts["one"].state == {"learned": 2} and again.parts["lookup"].state == {}


@every_script
def test_every_script_samples_a_mix_in_which_only_a_task_with_a_tool_gets_responses(
        script, config, load_task, talker):
    cfg = config(task="arithmetic,lookup", num_prompts=8, max_completion_length=16)
    policy = talker(cfg)
    task = load_task(cfg)
    weight = policy.embed.weight.data
    weight[script.TOKENIZER.encode_single_token("</search>"), 0] = 6.0
    weight[script.TOKENIZER.encode_single_token("<information>"), 0] = -40.0
    batch = script.sample_batch(policy, task, cfg, 0)
    texts = {"arithmetic": "", "lookup": ""}
    for problem, text in zip(batch.problems, batch.texts):
        texts[problem.task] += text
    assert texts["lookup"].count("<information>") > 5
    assert "</search>" in texts["arithmetic"] and "<information>" not in texts["arithmetic"]
    assert {"tools/call_frequency", "checks/share"} <= task.describe(batch, 0).keys()


# ---- a self-check ----------------------------------------------------------------------------


def test_a_self_check_repairs_a_step_that_is_wrong_with_the_one_that_is_right():
    num_checks = 0
    shown = common.sample_demonstrations(load(operands="3-5"), 6000, 0, "textbook")
    for problem, text in shown:
        if "wait" in text:
            num_checks += 1
            work = re.fullmatch("<think>(.*)</think><answer>.*</answer>", text)[1]
            assert work.count(";wait,") == 1 and grpo.verify(problem, text) == 1
            parts = re.fullmatch("(|.*;)([^;]*);wait,([^;]*)(|;.*)", work)
            before, wrong, right, after = parts.groups()
            assert before + right + after == problem.work and wrong != right
            assert wrong.split("=")[0] == right.split("=")[0]
            assert 0 <= int(wrong.split("=")[1]) <= 20
    assert 60 < num_checks < 180
