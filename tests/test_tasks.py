"""Test what all tasks share: levels, refused flags, held-out problems, hostile texts, your own
task, mixes, and a curriculum."""
import random
import sys
import zlib
from collections import Counter

import pytest
from conftest import count_work, scripts
from conftest import load_named as load
from small_runs import INSTANT, arguments, resume, steps
from test_rewards import batch_of

import common
import grpo
import plumbing
import tasks
from common import Problem
from tasks.rewards import NEEDS, REWARDS

NAMES = ["abstain", "arithmetic", "countdown", "gridworld", "key", "lookup", "notation",
         "number", "program"]


# ---- levels, and refused flags ---------------------------------------------------------------

@pytest.mark.parametrize("name, checksum", [
    ("arithmetic:3-5", 3883610429), ("countdown", 414979693), ("gridworld", 656171213),
    ("lookup", 2775962093), ("number", 244864060), ("arithmetic,lookup", 4285053654),
    ("key", 4021235287), ("key:half", 490764696), ("notation", 3006372533),
    ("program:3", 4291344283), ("abstain", 1545782369)])
def test_the_problems_and_demonstrations_of_a_seed_stay_the_same(name, checksum):
    """Results that we report depend on them."""
    found = common.sample_problems(load(name), 50, 1)
    for phase in ("textbook", "forum", "cold_start"):
        found = found + common.sample_problems(load(name), 50, 1, phase=phase)
    assert zlib.crc32(repr([tuple(problem) for problem in found]).encode()) == checksum


@pytest.mark.parametrize("flags, words", [
    *(({"task": f"arithmetic:{level}"}, f"--task arithmetic:{level}: the level must be a number")
      for level in ("1", "7-3", "3-", "x", "\u0663", "100")),
    ({"task": "countdown:3-10"}, "only 9 different digits"),
    ({"task": "key:3"}, "--task key:3: the levels are work, half, answer"),
    *(({"task": f"abstain:{level}"}, f"--task abstain:{level}: the level must be the largest x")
      for level in ("1", "10", "cost", "cost=-1", "+cost=1", "cost=1+9", "9+", "\u0663")),
    ({"scale_rewards": "mean", "task": "abstain"}, "the mean of abstain's marks may be negative"),
    *(({"task": f"{name}:3"}, f"{name} has no levels") for name in ("lookup", "gridworld")),
    *(({"task": name}, "the tasks are arithmetic, ")
      for name in ("chess", "", "arithmetic,", "../common")),
    ({"task": "lookup,arithmetic:3,arithmetic:7"}, "names a task twice"),
    ({"curriculum": True}, "have one difficulty"),
    ({"scale_rewards": "mean", "task": "lookup,gridworld"}, "may be negative"),
    *(({"reward": names}, "coarse, language, points, model")
      for names in ("acuracy", "accuracy+", "format+format"))], ids=str)
def test_what_a_task_cannot_do_is_refused_in_one_line(flags, words, refused):
    refused(words, load, **flags)


# ---- problems and splits ---------------------------------------------------------------------

@pytest.mark.parametrize("name", [
    "abstain", "arithmetic:3-7", "countdown", "key", "lookup", "notation", "number", "program",
    "arithmetic,lookup"])
def test_held_out_problems_are_different_and_occur_neither_in_training_nor_in_the_warm_start(name):
    task = load(name)
    problems = common.held_out_problems(task, 200)
    assert len(set(problems)) == len(problems) == 200       # some differ in their secret alone
    assert {problem.task for problem in problems} == set(name.partition(":")[0].split(","))
    learned = common.sample_problems(task, 1000, 0)
    for phase in ("textbook", "forum", "cold_start"):
        learned = learned + common.sample_problems(task, 100, 0, phase=phase)
    tenths = {"countdown": 2, "number": 2}          # by the hash of the question without its key
    kept = [[zlib.crc32(one.prompt.rpartition("|")[2].encode()) % 10 < tenths.get(one.task, 1)
             for one in some] for some in (problems, learned)]
    assert all(kept[0]) and not any(kept[1])
    assert common.held_out_problems(load(name), 200) == problems


@pytest.mark.parametrize("name", ["arithmetic", "countdown", "key", "lookup", "notation:4",
                                  "program:3"])
def test_what_a_base_learns_from_at_a_cold_start_is_right(name):
    task = load(name)
    drawn = common.sample_problems(task, 500, 0, phase="cold_start")
    assert all(task.verify(problem, problem.completion) == 1 for problem in drawn)
    if "notation" in name:
        assert all(task.share_in_words(problem.completion) == 1 for problem in drawn)


# ---- hostile texts ---------------------------------------------------------------------------

PIECES = [*"0123456789+-*()URDL" * 2, *["<answer>", "</answer>", "7", "to"] * 2, "<search>",
          "</search>", "<think>", "</think>", "<information>", "</information>", "ka", "(4+8)*2",
          " ", "\n", "\x00", "\u0663", "\ud800", "<", ">", "9" * 60, "x2*1+", "1:3", ",", "x"]
LONG = ["<answer>" * 2_000 + "7" + "</answer>" * 2_000, "<answer>7" + "</answer" * 2_000,
        *(f"<answer>{text}</answer>" for text in ("(" * 10_000, "9" * 10_000, "4*" * 5_000)),
        "<think>" + "<information>" * 2_000 + "</think>", "<search>" * 2_000, "<" * 20_000,
        "</search>" * 2_000, "<search>ka</search>" * 2_000, "U" * 10_000, "\x00" * 10_000]


@pytest.mark.parametrize("name", NAMES)
def test_whatever_a_text_holds_it_is_judged_within_bounds_and_read_only_a_few_times(name):
    """The verifier and all rows of REWARDS stay within bounds, and the environment is brief."""
    rng = random.Random(0)
    task = load(name)
    problems = common.sample_problems(task, 100, 0)
    texts = ["".join(rng.choices(PIECES, k=rng.randrange(14))) for _ in range(1_000)]
    for i, text in enumerate(texts + LONG):
        problem = problems[i % 100]
        verdict = task.verify(problem, text)
        if "gridworld" in name:
            assert len(verdict) == len(text) and max(verdict, default=0) <= 5
        else:
            assert verdict in (0.0, 1.0)
        assert len(task.respond(problem, text)) <= 40
        known = [row for row in REWARDS if NEEDS.get(row, (name,))[0] == name]
        for row in known if "gridworld" not in name else ():
            value = REWARDS[row](task, problem, text, verdict, i % 60)
            assert isinstance(value, float) and -1 <= value <= 7, (row, text)
    for text in LONG:
        for judge in (task.verify, task.respond):
            most = 1_000 + (12 if name == "program" else 5) * len(text)     # it has ten tests
            assert count_work(judge, problems[0], text) < most, judge


# ---- your own task ---------------------------------------------------------------------------

TASK = '''
from tasks.countdown import Countdown


class Parrot(Countdown):
    defaults = {"save_steps": 7, "learning_rate": 1, "max_steps": 99, "a_flag_of_no_script": 3}
'''


@pytest.fixture
def put(own_folder, monkeypatch):
    """put(source): write tasks/parrot.py, as if next to the other tasks."""
    monkeypatch.setattr(tasks, "__file__", str(own_folder / "__init__.py"))
    monkeypatch.setattr(tasks, "__path__", [str(own_folder), *tasks.__path__])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield (own_folder / "parrot.py").write_text
    sys.modules.pop("tasks.parrot", None)


@scripts("grpo", "dpo")
def test_a_task_is_one_file_with_defaults_of_flags_which_what_is_given_overrides(script, put):
    put(TASK)
    flags = {"task": "parrot", "base_steps": 3, "num_prompts": 8, "max_steps": 2}
    given = {name: value for name, value in INSTANT.items() if name != "save_steps"}
    script.main(arguments(given | flags | {"output_dir": "run"}))
    assert [line["step"] for line in steps("run")] == [1, 2]
    _, config = plumbing.read_config("run")
    assert (config["save_steps"], config["max_steps"]) == (7, 2)
    assert config["learning_rate"] == 1 and isinstance(config["learning_rate"], float)
    assert "a_flag_of_no_script" not in config      # a different script may have it
    resume("run", max_steps=3)
    assert len(steps("run")) == 3


@pytest.mark.parametrize("name, sizes", [      # T, steps and batch of the base
    ("arithmetic", (48, 900, 32)), ("arithmetic,countdown", (128, 1300, 32)),
    ("countdown", (128, 1300, 16)), ("lookup,number:3", (56, 600, 32)),
    ("arithmetic:3,lookup", (48, 900, 32))])
def test_a_mix_has_the_largest_default_of_each_flag(name, sizes):
    cfg = plumbing.parse_flags(grpo.Config, ["--task", name, "--device", "cpu"])
    assert (cfg.max_completion_length, cfg.base_steps, cfg.base_batch_size) == sizes


@pytest.mark.parametrize("source, words", [
    ("from tasks import Task\n\n\nclass Parrot(Task):\n    prompt_width = 6\n", "sample"),
    (TASK + "    verify = None\n", "verify"),
    (TASK + "\n\nclass Crow(Parrot):\n    pass\n", "one subclass"),
    ("", "one subclass")], ids=["no sample", "no verify", "two", "none"])
def test_a_file_without_one_complete_task_is_refused_with_what_it_lacks(
        put, refused, source, words):
    put(source)
    refused(f"parrot.py does not define {words}", load, "parrot")


def test_a_task_without_variety_is_refused(put, refused):
    put(TASK + "    held_out_tenths = 0\n")
    refused("has hardly any test problems", common.sample_problems, load("parrot"), 1, 0, "test")


# ---- several tasks ---------------------------------------------------------------------------

def test_each_task_of_a_mix_rewards_and_observes_its_own_groups():
    """The groups of the batch alternate between tasks. A task without groups is not called."""
    task = load("arithmetic,gridworld,lookup")
    problems = [Problem("A b3 7", "", task=name) for name in (
        "arithmetic", "gridworld", "arithmetic", "lookup") for _ in range(2)]
    batch = batch_of([[0, 0]] * 4, problems=problems)
    verified = [1.0, 0.0, [-1.0, 5.0], [-1.0], 0.0, 1.0, 1.0, 0.0]
    batch.texts = [f"{row}" for row in range(6)] + ["6<search><search>", "7<search><search>"]
    for part in task.parts.values():
        part.verify = lambda problem, text: verified[int(text[0])]
    task.judge(batch, 2, 0)
    assert batch.rewards.tolist() == [[1, 0], [4, -1], [0, 1], [1, 0]]
    batch.mask[:] = 1.0
    assert task.token_rewards(batch).tolist() == [[0, x] for x in (1, 0, 4, -1, 0, 1, 1, 0)]
    assert task.observe(batch, 0) == {"tools/call_frequency": 2.0}
    assert task.observe(batch_of([[0, 0]], problems=problems[:2], texts=["", ""]), 0) == {}
    assert all(part.state is task.state for part in task.parts.values())


# ---- the curriculum --------------------------------------------------------------------------

def test_training_problems_are_drawn_in_proportion_to_the_weights_of_their_difficulty():
    """With 3, 4 and 5 operands, the weights are 1, 1/2 and 1/20. Problems with 6 operands have no
    rate yet, so their weight is 1. If no rates exist, and in an evaluation, problems are drawn as
    the task draws them."""
    plain = load("arithmetic:3-6")
    task = load("arithmetic:3-6", curriculum=True)
    assert common.sample_problems(task, 300, 0) == common.sample_problems(plain, 300, 0)
    task.state["rates"] |= {
        "arithmetic-3": 0.5, "arithmetic-4": (1 - 0.5 ** 0.5) / 2, "arithmetic-5": 1.0}
    found = Counter(problem.difficulty for problem in common.sample_problems(task, 5100, 0))
    for n, expected in ((3, 2000), (4, 1000), (5, 100), (6, 2000)):
        assert abs(found[n] - expected) < 4 * expected ** 0.5, n
    held_out = common.sample_problems(plain, 200, 1, "test")
    assert common.sample_problems(task, 200, 1, "test") == held_out
    assert common.held_out_problems(task, 50) == common.held_out_problems(plain, 50)
    shown = common.sample_problems(plain, 50, 0, phase="forum")
    assert common.sample_problems(task, 50, 0, phase="forum") == shown
