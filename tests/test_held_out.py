"""The problems that an evaluation asks: held out, different, and as many as there are."""
import itertools
from collections import Counter

import pytest

import common
import grpo
from tasks.mix import Curriculum

TASKS = [("arithmetic", {"operands": "5"}), ("arithmetic", {"operands": "2"}),
         ("arithmetic", {"operands": "3-7"}), ("countdown", {}), ("gridworld", {}),
         ("gridworld", {"slip": 0.3}), ("lookup", {}), ("arithmetic,lookup", {})]


def load(task="arithmetic", **flags):
    return common.load_task(grpo.Config(task=task, **flags), grpo.verify)


def prompts(problems):
    return [problem.prompt for problem in problems]


class Few(common.Task):
    """All words of `letters`, some of them often, others seldom."""
    letters = "abc"
    num_draws = 0

    def sample(self, rng):
        self.num_draws += 1
        word = "".join(sorted(rng.choices(self.letters, k=4)))
        if rng.random() < 0.5:
            word = word[::-1]
        return common.Problem(word, answer=str(self.num_draws))

    def all_prompts(self):
        words = {"".join(letters) for letters in itertools.product(self.letters, repeat=4)}
        rising = {"".join(sorted(word)) for word in words}
        return rising | {word[::-1] for word in rising}

    def held_out(self):
        return {prompt for prompt in self.all_prompts()
                if self.is_held_out(common.Problem(prompt, ""))}


class Vowels(Few):
    """Holds out what begins with a vowel, whatever the hash."""
    letters = "abcde"

    def is_held_out(self, problem):
        return problem.prompt[0] in "ae"


# ---- which -----------------------------------------------------------------------------------

@pytest.mark.parametrize("name, flags", TASKS, ids=lambda value: str(value))
def test_held_out_problems_are_different_and_none_occurs_in_training(name, flags):
    task = load(name, **flags)
    problems = common.held_out_problems(task, 512)
    found = set(prompts(problems))
    if task.is_judged:
        assert len(found) == len(problems)
    assert 10 < len(set(problems)) == len(problems) <= 512
    assert all(task.is_held_out(problem) for problem in problems)
    assert {problem.task for problem in problems} == set(name.split(","))
    trained = prompts(common.sample_problems(task, 2000, 0))
    shown = [problem.prompt for phase in ("textbook", "forum", "cold_start")
             for problem, _ in common.sample_demonstrations(task, 300, 0, phase)]
    assert not found & {*trained, *shown}


@pytest.mark.parametrize("n", [1, 7, 499, 500, 501, 1100])
def test_there_are_as_many_as_are_asked_for(n):
    assert len(set(prompts(common.held_out_problems(load(), n)))) == n


@pytest.mark.parametrize("task_class", [Few, Vowels])
def test_where_there_are_fewer_it_is_all_of_them_and_soon_found_out(task_class):
    task = task_class(grpo.Config())
    assert 2 <= len(task.held_out()) < 80
    found = prompts(common.held_out_problems(task, 512))
    assert set(found) == task.held_out()
    assert len(found) == len(set(found))
    assert task.num_draws < 30_000
    for n in range(1, len(found) + 1):
        assert prompts(common.held_out_problems(task_class(grpo.Config()), n)) == found[:n]


def test_held_out_problems_are_a_function_of_the_task_and_their_number():
    problems = common.held_out_problems(load(operands="3"), 60)
    assert common.held_out_problems(load(operands="3"), 60) == problems     # another object
    assert common.held_out_problems(load(operands="3"), 70)[:60] == problems
    assert common.held_out_problems(load(operands="3"), 60) == problems
    assert set(prompts(problems)) != set(prompts(common.held_out_problems(load(), 60)))


def test_a_task_that_was_asked_before_does_not_answer_for_another():
    tasks = [load(operands="2"), load(operands="4"), load("lookup")]
    once = [common.held_out_problems(task, 20) for task in tasks]
    assert [common.held_out_problems(task, 20) for task in tasks] == once
    assert len({problem for problems in once for problem in problems}) == 60


# ---- the share that is held out --------------------------------------------------------------

@pytest.mark.parametrize("tenths", [1, 2, 5])
def test_a_task_says_of_ten_prompts_how_many_are_held_out(tenths):
    task = load()
    task.held_out_tenths = tenths
    problems = common.sample_problems(task, 1000, 0)
    assert not any(task.is_held_out(problem) for problem in problems)
    assert all(map(task.is_held_out, common.sample_problems(task, 1000, 0, "test")))
    held_out = [task.is_held_out(common.Problem(f"{number}=", "")) for number in range(4000)]
    assert sum(held_out) / 4000 == pytest.approx(tenths / 10, abs=0.02)


def test_what_is_held_out_with_one_tenth_is_held_out_with_two():
    tenth = load()
    fifth = load()
    fifth.held_out_tenths = 2
    assert all(fifth.is_held_out(problem) for problem in common.held_out_problems(tenth, 100))


@pytest.mark.parametrize("split, is_vowel", [("train", False), ("test", True)])
def test_a_task_may_hold_out_what_it_likes(split, is_vowel):
    for problem in common.sample_problems(Vowels(grpo.Config()), 300, 0, split):
        assert (problem.prompt[0] in "ae") == is_vowel


# ---- several tasks, and luck -----------------------------------------------------------------

def test_each_task_of_a_mix_has_the_same_share_where_it_has_so_many():
    mix = load("arithmetic,gridworld,countdown")
    problems = common.held_out_problems(mix, 300)
    assert Counter(problem.task for problem in problems) == {
        "arithmetic": 100, "gridworld": 100, "countdown": 100}
    assert [problem.task for problem in problems[:4]] == [
        "arithmetic", "gridworld", "countdown", "arithmetic"]
    few = Counter(problem.task for problem in common.held_out_problems(mix, 600))
    num_walks = len(common.held_out_problems(load("gridworld"), 512))
    assert few == {"arithmetic": 200, "gridworld": num_walks, "countdown": 200}
    assert num_walks < 200
    assert len(common.held_out_problems(mix, 1)) == 3           # one of each


@pytest.mark.parametrize("slip, expected", [(0.0, 114), (0.2, 512)])
def test_where_luck_decides_a_prompt_with_other_luck_is_another_problem(slip, expected):
    problems = common.held_out_problems(load("gridworld", slip=slip), 512)
    assert len(problems) == len(set(problems)) == expected
    assert len(set(prompts(problems))) <= 114


def test_a_wrapped_task_has_the_held_out_problems_of_the_task():
    for name in ("gridworld", "arithmetic,lookup"):
        plain = common.held_out_problems(load(name), 50)
        assert common.held_out_problems(load(name, reward="accuracy+format"), 50) == plain
    levels = load(operands="3-5")
    assert common.held_out_problems(Curriculum(levels), 50) == common.held_out_problems(levels, 50)
