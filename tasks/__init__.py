"""What changes a task: other tasks than arithmetic, mixes, a curriculum, the rows of --reward, a
rollout that inserts text, files of pairs and problems.

common.py calls `defaults` and `load`. Also here: what the files share.
"""
import dataclasses
import functools
import importlib
import inspect
import random
import re
import sys
import zlib
from pathlib import Path

import torch

import common


class Task:
    """A task. A subclass in tasks/NAME.py is the task NAME. It has to define prompt_width and

      sample(rng)                 draws a problem by a random.Random. -> Problem
      demonstration(rng, phase)   draws one with a completion, for the warm start. -> Problem
      verify(problem, text)       how right a completion is: 1.0 or 0.0, or a list with a reward for
                                  each character. Never raises, whatever the text holds.
    """
    prompt_width = None     # characters of the longest prompt
    call_tokens = ()        # behind these tokens respond() may insert text into a completion
    rollout = None          # what takes the place of a script's rollout
    defaults = {}           # defaults of flags for this task
    held_out_tenths = 1     # of ten prompts so many are for the evaluation alone
    is_judged = True        # false: luck decides how it ends, so nothing counts as right or wrong

    def __init__(self, cfg, level=""):                  # of --task NAME:LEVEL, if it has levels
        self.name = type(self).__module__.rpartition(".")[2]
        self.state = {}                                 # plain values that checkpoints hold

    def is_held_out(self, problem):
        """Whether a problem is for the evaluation alone, which the hash of its prompt decides."""
        return zlib.crc32(problem.prompt.encode()) % 10 < self.held_out_tenths

    def respond(self, problem, text):
        """What the environment inserts after a call token; text: the completion so far. -> str"""
        return ""

    def judge(self, batch, G, purpose):
        """Verify and reward completions, G of each problem. -> the batch"""
        batch.verdicts = [self.verify(*pair) for pair in zip(batch.problems, batch.texts)]
        judged = [self.is_correct(*pair) for pair in zip(batch.problems, batch.verdicts)]
        batch.is_correct = torch.tensor(judged).view(-1, G)
        batch.rewards = self.rewards(batch, purpose)
        return batch

    def is_correct(self, problem, verdict):
        """Whether what verify returned is the best there is. -> bool"""
        return verdict == 1

    def reward(self, problem, text, verdict, purpose):
        """What a completion is worth in training; verdict is what verify returned, purpose the step
        or the name by which the batch was sampled. -> float"""
        return float(sum(verdict) if isinstance(verdict, list) else verdict)

    def rewards(self, batch, purpose):
        """What all completions of a batch are worth. -> (P, G)"""
        judged = zip(batch.problems, batch.texts, batch.verdicts)
        found = [self.reward(*completion, purpose) for completion in judged]
        return torch.tensor(found).view_as(batch.is_correct)

    token_rewards = common.Arithmetic.token_rewards

    def scores(self, batch, greedy=False):
        """The scores of samples, or of greedy completions. -> dict"""
        return importlib.import_module("tasks.scores").scores(batch, self, greedy)

    def observe(self, batch, step):
        """Take note of a batch, as a curriculum does. -> metrics that only this task has"""
        return {}


class Arithmetic(Task, common.Arithmetic):
    """The task of common.py, with all of the above."""

    def __init__(self, cfg, level, verify):
        common.Arithmetic.__init__(self, verify, *span(level or "5"))


def find(name):
    """The class of a task. Exits with one line where there is none. -> subclass of Task"""
    if name == "arithmetic":
        return Arithmetic
    path = Path(__file__).parent / f"{name}.py"
    if not (name.isidentifier() and path.is_file()):
        common.fail(f"--task {name}: there is no {path}; there are {', '.join(names())}")
    module = importlib.import_module(f"tasks.{name}")
    found = [value for value in vars(module).values() if inspect.isclass(value)
             and issubclass(value, Task) and value.__module__ == module.__name__]
    if len(found) != 1:
        common.fail(f"--task {name}: {path} does not define one subclass of tasks.Task")
    for method in ("sample", "demonstration", "verify"):
        if not hasattr(found[0], method):
            common.fail(f"--task {name}: {path} does not define {method}")
    return found[0]


def names():
    """The tasks that there are, by the text of their files. -> list"""
    defining = re.compile(r"(?ms)^class \w+\((tasks\.)?Task\):.*^    def demonstration\(")
    files = sorted(Path(__file__).parent.glob("*.py"))
    return ["arithmetic", *(path.stem for path in files if defining.search(path.read_text()))]


def defaults(config_class, task_flag):
    """The defaults of flags that the tasks ask for; of several tasks, the largest of each, if the
    script has the flag and small policies, for which they are. -> dict"""
    classes = [find(part.partition(":")[0]) for part in task_flag.split(",")]
    wanted = {}
    if not getattr(config_class, "has_task_defaults", True):
        return wanted
    for field in dataclasses.fields(config_class):
        if any(field.name in task.defaults for task in classes):
            values = [task.defaults.get(field.name, field.default) for task in classes]
            wanted[field.name] = field.type(max(values))
    return wanted


def load(cfg, verify):
    """The task that the flags name: one task, or with A,B a mix, and what --reward and --curriculum
    make of it. `verify` is the script's verifier of arithmetic. Exits with one line if flags do not
    fit the task."""
    parts = [load_part(cfg, part, verify) for part in cfg.task.split(",")]
    task = parts[0]
    if len(parts) > 1:
        task = importlib.import_module("tasks.mix").Mix(cfg, parts)
    if cfg.reward != "accuracy":
        task = importlib.import_module("tasks.rewards").Rewards(cfg, task)
    if cfg.curriculum:
        task = importlib.import_module("tasks.mix").Curriculum(task)
    if task.call_tokens:
        calls = importlib.import_module("tasks.calls")
        task.rollout = functools.partial(calls.rollout, task)
        task.sampled_masks = functools.partial(calls.sampled_masks, task)
    return task


def load_part(cfg, task_flag, verify):
    """The task that NAME, or NAME:LEVEL, stands for. It knows the script, whose tokens it may have
    to count, as `machinery`. -> Task"""
    name, _, level = task_flag.partition(":")
    task_class = find(name)
    if level and task_class.__init__ is Task.__init__:
        common.fail(f"--task {task_flag}: {name} has no levels")
    task = task_class(cfg, level, verify) if name == "arithmetic" else task_class(cfg, level)
    if task.prompt_width is None:
        common.fail(f"--task {name}: {inspect.getfile(task_class)} does not define prompt_width")
    task.machinery = sys.modules[verify.__module__]
    check_splits(task)
    return task


def check_splits(task):
    """Exits with one line if a task has hardly any problems for training, or for the evaluation."""
    rng = random.Random(0)
    for split in ("train", "test"):
        drawn = (task.sample(rng)._replace(task=task.name) for _ in range(10_000))
        if not any(task.is_held_out(problem) == (split == "test") for problem in drawn):
            common.fail(f"--task {task.name}: has hardly any {split} problems; it needs variety")


def pass_rates(batch):
    """The share of right completions of each group, also of those that dynamic sampling left out.
    -> list of (problem, rate)"""
    found = []
    for one in batch.sampled or [batch]:
        if one.verdicts:                                # which pairs from a file have not
            G = one.is_correct.shape[1]
            rates = one.is_correct.double().mean(dim=1).tolist()
            found += zip(one.problems[::G], rates)
    return found


def extract(text):
    """The answer in the one <answer> block of a text, printable ASCII. -> str, or None without"""
    if text.count("<answer>") != 1 or text.count("</answer>") != 1:
        return None
    found = re.search("<answer>([ -~]{1,200})</answer>", text)
    return found[1].strip() if found else None


def block(text, name):
    """What stands in the one <name>..</name> block of a text; None without one, or if there is a
    second tag of that name. -> str or None"""
    opening = f"<{name}>"
    closing = f"</{name}>"
    if text.count(opening) != 1 or text.count(closing) != 1:
        return None
    _, _, rest = text.partition(opening)
    inside, closed, _ = rest.partition(closing)
    return inside if closed else None


def span(level):
    """What "3-7" or "5" stands for: (3, 7), (5, 5). Exits with one line for anything else."""
    low, _, high = level.partition("-")
    is_span = re.fullmatch("[0-9]{1,2}(-[0-9]{1,2})?", level)
    if not is_span or not 2 <= int(low) <= int(high or low):
        common.fail(f"--task NAME:{level}: must be a number from 2 to 99, or a range like 3-7")
    return int(low), int(high or low)


class Wrapper:
    """A task that changes something of another task, and is that task in all that it does not
    define."""
    scores = Task.scores                # by what the wrapper itself verifies

    def __init__(self, task):
        self.task = task

    def __getattr__(self, name):
        return getattr(self.task, name)
