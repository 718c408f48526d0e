"""Several tasks in one run (--task A,B), and a choice of difficulties (--curriculum)."""
import random
from statistics import fmean

import torch

import common
from tasks import Task, Wrapper, pass_rates


def of_problem(name):
    """Make a method that calls the same method of the task of a problem. -> function"""
    return lambda mix, problem, *rest: getattr(mix.parts[problem.task], name)(problem, *rest)


class Mix:
    """Several tasks as one task, each with the same share of the problems. It has all methods of
    tasks.Task; a method about one problem calls the task of that problem, problem.task."""
    judge = Task.judge
    rate = Task.rate
    scores = Task.scores
    responder = Task.responder
    masks = Task.masks
    textbook_loss = Task.textbook_loss

    def __init__(self, cfg, parts):
        self.name = ",".join(part.name for part in parts)
        self.parts = {part.name: part for part in parts}
        if len(self.parts) < len(parts):
            common.fail(f"--task {cfg.task}: names a task twice; a range of levels is one task")
        self.is_judged = all(part.is_judged for part in parts)
        self.prompt_width = max(part.prompt_width for part in parts)
        self.call_tokens = tuple(sorted({text for part in parts for text in part.call_tokens}))
        self.state = {}                                 # of all parts
        for part in parts:
            self.state |= part.state
            part.state = self.state

    def sample(self, rng):
        part = self.choose(rng)
        return part.sample(rng)._replace(task=part.name)

    def demonstration(self, rng, phase):
        part = self.choose(rng)
        return part.demonstration(rng, phase)._replace(task=part.name)

    def choose(self, rng):
        """Choose one of the tasks, each with the same probability."""
        return self.parts[rng.choice(list(self.parts))]

    is_held_out = of_problem("is_held_out")
    verify = of_problem("verify")
    reward = of_problem("reward")
    is_right = of_problem("is_right")
    best_return = of_problem("best_return")

    def respond(self, problem, text):
        """Return the response of the problem's own task, if the text ends in one of its calls."""
        part = self.parts[problem.task]
        return part.respond(problem, text) if text.endswith(part.call_tokens) else ""

    def of_parts(self, batch):
        """Split a batch by task. Yields, for each task in it, the task, the numbers of its groups,
        and the batch of these groups"""
        G = batch.is_correct.shape[1]
        tasks = [problem.task for problem in batch.problems[::G]]               # P
        for name, part in self.parts.items():
            groups = torch.tensor([group for group, task in enumerate(tasks) if task == name])
            if len(groups) > 0:
                yield part, groups, common.gather([batch], groups)

    def token_rewards(self, batch):
        rewards = torch.zeros_like(batch.mask).unflatten(0, batch.is_correct.shape)     # (P, G, T)
        for part, groups, own in self.of_parts(batch):
            rewards[groups] = part.token_rewards(own).unflatten(0, own.is_correct.shape)
        return rewards.flatten(0, 1)

    def observe(self, batch, step):
        metrics = {}
        for part, _, own in self.of_parts(batch):
            metrics |= part.observe(own, step)
        return metrics


class Curriculum(Wrapper):
    """A task that takes most of its training problems from the difficulties that the policy solves
    half of the time. state["rates"] holds the pass rate p of each difficulty in all sampled groups,
    as a running mean over about five steps. A problem is taken with probability 4 p (1 - p), but at
    least 5%, so that nothing is forgotten; without a rate, it is always taken."""

    def __init__(self, task):
        super().__init__(task)
        if not task.is_judged:
            common.fail(f"--curriculum: luck decides in {task.name}, so nothing counts as right")
        rng = random.Random(0)
        if len({self.level(task.sample(rng)) for _ in range(200)}) < 2:
            common.fail(f"--curriculum: all problems of {task.name} have one difficulty; use "
                        "several, such as --task arithmetic:3-7")
        self.state["rates"] = {}

    def level(self, problem):
        """Name the difficulty of a problem, with its task. -> str"""
        return f"{problem.task or self.name}-{problem.difficulty}"

    def sample(self, rng):
        while True:
            problem = self.task.sample(rng)
            rate = self.state["rates"].get(self.level(problem))
            if rate is None or self.is_held_out(problem):
                return problem
            # a separate generator, or the held-out problems would depend on the rates
            chooser = random.Random(hash(rng.getstate()[1]))
            if chooser.random() < max(0.05, 4 * rate * (1 - rate)):
                return problem

    def observe(self, batch, step):
        rates = self.state["rates"]
        by_level = {}
        for problem, rate in pass_rates(batch):
            by_level.setdefault(self.level(problem), []).append(rate)
        for name, new_rates in by_level.items():
            rate = fmean(new_rates)
            rates[name] = 0.8 * rates.get(name, rate) + 0.2 * rate
        return self.task.observe(batch, step)
