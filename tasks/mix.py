"""What takes several tasks, or several difficulties, at once: --task A,B and --curriculum."""
import torch

import common
from tasks import Wrapper


class Mix:
    """Several tasks as one, each with the same share of the problems. It has all methods of
    common.Task; those that are given a problem ask the task that it is of, by problem.task."""
    defaults = {}           # common.task_defaults takes those of the parts together
    reward_model = None

    def __init__(self, cfg, parts):
        self.cfg = cfg
        self.names = [part.name for part in parts]
        self.name = ",".join(self.names)
        self.is_judged = any(part.is_judged for part in parts)
        self.parts = {part.name: part for part in parts}
        self.options = tuple(name for part in parts for name in part.options)
        self.prompt_width = max(part.prompt_width for part in parts)
        self.call_tokens = tuple(sorted({text for part in parts for text in part.call_tokens}))

    @property
    def state(self):
        """The states of the parts that have one, by name."""
        return {name: part.state for name, part in self.parts.items() if part.state}

    @state.setter
    def state(self, state):
        for name, part in self.parts.items():
            part.state = state.get(name, {})

    # -- problems

    def choose_part(self, rng):
        """One of the tasks, each as often."""
        return self.parts[rng.choice(self.names)]

    def sample(self, rng):
        part = self.choose_part(rng)
        return part.sample(rng)._replace(task=part.name)

    def sample_to_demonstrate(self, rng):
        part = self.choose_part(rng)
        return part.sample_to_demonstrate(rng)._replace(task=part.name)

    # -- what is asked of one problem

    def part_of(self, problem):
        """The task that a problem is of."""
        return self.parts[problem.task]

    def is_held_out(self, problem):
        return self.part_of(problem).is_held_out(problem)

    def demonstration(self, problem, rng, phase):
        return self.part_of(problem).demonstration(problem, rng, phase)

    def wants(self, problem, rng):
        return self.part_of(problem).wants(problem, rng)

    def verify(self, problem, text):
        return self.part_of(problem).verify(problem, text)

    def reward(self, problem, text, verdict, step):
        return self.part_of(problem).reward(problem, text, verdict, step)

    def is_correct(self, problem, verdict):
        return self.part_of(problem).is_correct(problem, verdict)

    def canonical(self, problem, answer):
        return self.part_of(problem).canonical(problem, answer)

    def best_return(self, problem):
        return self.part_of(problem).best_return(problem)

    def respond(self, problem, text):
        """The response of the problem's own task, if the text ends in one of its call tokens, not
        in that of another task."""
        part = self.part_of(problem)
        return part.respond(problem, text) if text.endswith(part.call_tokens) else ""

    # -- batches

    def learn(self, batch):
        for part in self.parts.values():
            part.learn(batch)

    def describe(self, batch, step):
        """The metrics of the tasks that the batch has problems of. Each sees the groups of its own
        problems only."""
        G = batch.rewards.shape[1]
        tasks = [problem.task for problem in batch.problems[::G]]               # P
        metrics = {}
        for name, part in self.parts.items():
            groups = [group for group, task in enumerate(tasks) if task == name]
            if groups:
                its_own = common.select_groups(batch, torch.tensor(groups))
                metrics |= part.describe(its_own, step)
        return metrics


def preference(rate):
    """How often a curriculum takes problems that are solved at this rate p: 4 p (1 - p), but never
    below 5%, so that nothing is forgotten. -> probability"""
    return max(0.05, 4 * rate * (1 - rate))


class Curriculum(Wrapper):
    """A task that takes, of the training problems, most from the difficulties that are solved half
    of the time. `rates` are the shares of right completions of each difficulty, in all groups that
    were sampled, running means over about five steps; what there is no rate of is always taken."""

    def __init__(self, task):
        super().__init__(task)
        self.rates = {}

    @property
    def state(self):
        return self.task.state | {"rates": self.rates}

    @state.setter
    def state(self, state):
        self.rates = state["rates"]
        self.task.state = {name: value for name, value in state.items() if name != "rates"}

    def wants(self, problem, rng):
        level = common.level(problem)
        if level in self.rates and rng.random() >= preference(self.rates[level]):
            return False
        return self.task.wants(problem, rng)

    def learn(self, batch):
        for level, groups in batch.pass_rates.items():
            rate = common.mean(groups)
            before = self.rates.get(level, rate)
            self.rates[level] = 0.8 * before + 0.2 * rate
        self.task.learn(batch)
