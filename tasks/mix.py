"""What takes several tasks, or several difficulties, at once: --task A,B and --curriculum."""
import random
from statistics import fmean

import torch

import common
from tasks import Task, Wrapper, pass_rates


class Mix:
    """Several tasks as one, each with the same share of the problems. It has all of tasks.Task;
    what is asked of one problem is answered by the task that it is of, problem.task."""
    rollout = None
    judge = Task.judge
    scores = Task.scores

    def __init__(self, cfg, parts):
        self.name = ",".join(part.name for part in parts)
        self.parts = {part.name: part for part in parts}
        if len(self.parts) < len(parts):
            common.fail(f"--task {cfg.task}: names a task twice; a range of levels is one task")
        self.machinery = parts[0].machinery
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
        """One of the tasks, each as often."""
        return self.parts[rng.choice(list(self.parts))]

    def is_held_out(self, problem):
        return self.parts[problem.task].is_held_out(problem)

    def verify(self, problem, text):
        return self.parts[problem.task].verify(problem, text)

    def is_correct(self, problem, verdict):
        return self.parts[problem.task].is_correct(problem, verdict)

    def reward(self, problem, text, verdict, purpose):
        return self.parts[problem.task].reward(problem, text, verdict, purpose)

    def respond(self, problem, text):
        """The response of the problem's own task, if the text ends in one of its call tokens, not
        in that of another task."""
        part = self.parts[problem.task]
        return part.respond(problem, text) if text.endswith(part.call_tokens) else ""

    def of_parts(self, batch):
        """Each task that a batch has problems of, which groups these are, and the batch that they
        make. Yields triples"""
        G = batch.is_correct.shape[1]
        tasks = [problem.task for problem in batch.problems[::G]]               # P
        for name, part in self.parts.items():
            groups = torch.tensor([group for group, task in enumerate(tasks) if task == name])
            if len(groups) > 0:
                yield part, groups, common.gather([batch], groups)

    def rewards(self, batch, purpose):
        found = torch.zeros(batch.is_correct.shape)                             # (P, G)
        for part, groups, its_own in self.of_parts(batch):
            found[groups] = part.rewards(its_own, purpose)
        return found

    def token_rewards(self, batch):
        found = torch.zeros_like(batch.mask).unflatten(0, batch.is_correct.shape)       # (P, G, T)
        for part, groups, its_own in self.of_parts(batch):
            found[groups] = part.token_rewards(its_own).unflatten(0, its_own.is_correct.shape)
        return found.flatten(0, 1)

    def observe(self, batch, step):
        metrics = {}
        for part, _, its_own in self.of_parts(batch):
            metrics |= part.observe(its_own, step)
        return metrics


def preference(rate):
    """How often a curriculum takes problems that are solved at this rate p: 4 p (1 - p), but never
    below 5%, so that nothing is forgotten. -> probability"""
    return max(0.05, 4 * rate * (1 - rate))


class Curriculum(Wrapper):
    """A task that takes, of the training problems, most from the difficulties that are solved half
    of the time. state["rates"] are the shares of right completions of each difficulty, in all
    groups that were sampled, running means over about five steps; what there is no rate of is
    always taken."""

    def __init__(self, task):
        super().__init__(task)
        if not task.is_judged:
            common.fail(f"--curriculum: nothing in {task.name} counts as right, luck decides")
        rng = random.Random(0)
        if len({self.level(task.sample(rng)) for _ in range(200)}) < 2:
            common.fail(f"--curriculum: all problems of {task.name} are of one difficulty; take "
                        "several, as in --task arithmetic:3-7")
        self.state["rates"] = {}

    def level(self, problem):
        """The name that problems of one task and difficulty have in common. -> str"""
        return f"{problem.task or self.name}-{problem.difficulty}"

    def sample(self, rng):
        while True:
            problem = self.task.sample(rng)
            rate = self.state["rates"].get(self.level(problem))
            if rate is None or self.is_held_out(problem):
                return problem
            # not rng's next number, or held-out problems would depend on the rates
            coin = random.Random(hash(rng.getstate()[1]))
            if coin.random() < preference(rate):
                return problem

    def observe(self, batch, step):
        rates = self.state["rates"]
        by_level = {}
        for problem, rate in pass_rates(batch):
            by_level.setdefault(self.level(problem), []).append(rate)
        for name, found in by_level.items():
            rate = fmean(found)
            rates[name] = 0.8 * rates.get(name, rate) + 0.2 * rate
        return self.task.observe(batch, step)
