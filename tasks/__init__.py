"""More tasks than arithmetic, and everything that changes a task: mixes, a curriculum, the rows of
--reward, a rollout that inserts text, and files of problems.

plumbing.py calls `defaults`, and common.py `load`. The file also contains what the others share.
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

      sample(rng)                 draws a problem with a random.Random. -> Problem
      demonstration(rng, phase)   draws a problem with a completion, for the warm start. -> Problem
      verify(problem, text)       scores a completion: 1.0 if it is right, 0.0 if not, or a list
                                  with a reward for each character. Never raises, for any text.
    """
    prompt_width = None     # characters of the longest prompt
    call_tokens = ()        # after these tokens respond() may insert text into a completion
    rollout = None          # replaces the script's rollout
    defaults = {}           # defaults of flags for this task
    held_out_tenths = 1     # how many prompts in ten are kept for evaluation
    is_judged = True        # False if luck decides the outcome: then nothing is right or wrong

    def __init__(self, cfg, level=""):                  # of --task NAME:LEVEL, if it has levels
        self.name = type(self).__module__.rpartition(".")[2]
        self.state = {}                                 # plain values that checkpoints store

    def is_held_out(self, problem):
        """Whether a problem is kept for evaluation; the hash of its prompt decides."""
        return zlib.crc32(problem.prompt.encode()) % 10 < self.held_out_tenths

    def respond(self, problem, text):
        """Return what the environment inserts after a call token. text: the completion so far."""
        return ""

    def verdict(self, problem, text, is_truncated=False):
        """Verify a completion; most tasks judge a truncated one by its text alone. -> as verify"""
        return self.verify(problem, text)

    def judge(self, batch, G, purpose):
        """Verify and reward completions, G of each problem. -> the batch"""
        completions = zip(batch.problems, batch.texts, batch.is_truncated.tolist())
        verdicts = [self.verdict(*completion) for completion in completions]
        batch.verdicts = common.checked(self, verdicts)
        judged = [self.is_correct(*pair) for pair in zip(batch.problems, batch.verdicts)]
        batch.is_correct = torch.tensor(judged).view(-1, G)
        batch.rewards = self.rewards(batch, purpose)
        return batch

    def is_correct(self, problem, verdict):
        """Whether `verdict`, which verify returned, is the best one possible. -> bool"""
        return verdict == 1

    def reward(self, problem, text, verdict, purpose):
        """Compute the reward of a completion in training, from the `verdict` that verify returned.
        `purpose` is the step, or the name, for which the batch was sampled. -> float"""
        return float(sum(verdict) if isinstance(verdict, list) else verdict)

    def rewards(self, batch, purpose):
        """Compute the rewards of all completions of a batch. -> (P, G)"""
        judged = zip(batch.problems, batch.texts, batch.verdicts)
        rewards = [self.reward(*completion, purpose) for completion in judged]
        return 1.0 * torch.tensor(rewards).view_as(batch.is_correct)        # ints and bools, too

    token_rewards = common.Arithmetic.token_rewards

    def scores(self, batch, greedy=False):
        """The scores of samples, or of greedy completions. -> dict"""
        return importlib.import_module("tasks.scores").scores(batch, self, greedy)

    def observe(self, batch, step):
        """Learn from the batch of each step (a curriculum does). -> metrics of this task alone"""
        return {}


class Arithmetic(Task, common.Arithmetic):
    """The task of common.py, with all methods of Task."""

    def __init__(self, cfg, level, verify):
        common.Arithmetic.__init__(self, verify, *span("arithmetic", level or "5"))


def find(name):
    """Find the class of a task. Exits with one line if there is none. -> subclass of Task"""
    if name == "arithmetic":
        return Arithmetic
    path = Path(__file__).parent / f"{name}.py"
    if not (name.isidentifier() and path.is_file()):
        common.fail(f"--task {name}: there is no {path}; the tasks are {', '.join(names())}")
    module = importlib.import_module(f"tasks.{name}")
    classes = [value for value in vars(module).values() if inspect.isclass(value)
               and issubclass(value, Task) and value.__module__ == module.__name__]
    if len(classes) != 1:
        common.fail(f"--task {name}: {path} does not define one subclass of tasks.Task")
    for method in ("sample", "demonstration", "verify"):
        if not hasattr(classes[0], method):
            common.fail(f"--task {name}: {path} does not define {method}")
    return classes[0]


def names():
    """List the tasks, which are recognized by the text of their files. -> list of str"""
    defining = re.compile(r"(?ms)^class \w+\((tasks\.)?(Task|Turns)\):.*^    def demonstration\(")
    files = sorted(Path(__file__).parent.glob("*.py"))
    found = [path.stem for path in files if defining.search(path.read_text("utf-8"))]
    return ["arithmetic", *found]


def defaults(config_class, task_flag):
    """Collect the defaults of flags that the tasks define; if several define one, the largest. Only
    scripts that have the flag, and small policies, use them. -> dict"""
    classes = [find(part.partition(":")[0]) for part in task_flag.split(",")]
    chosen = {}
    if not getattr(config_class, "has_task_defaults", True):
        return chosen
    for field in dataclasses.fields(config_class):
        if any(field.name in task.defaults for task in classes):
            values = [task.defaults.get(field.name, field.default) for task in classes]
            chosen[field.name] = field.type(max(values))
    return chosen


def load(cfg, verify):
    """Make the task that the flags name: one task, or a mix if they name several (A,B), changed by
    --reward and --curriculum. `verify` is the script's verifier of arithmetic. Exits with one line
    if flags do not fit the task. -> Task"""
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
    """Make the task for NAME or NAME:LEVEL. Its attribute `machinery` is the script, whose tokens
    the task may have to count. -> Task"""
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
    """Exit with one line if a task has hardly any problems for training or for evaluation."""
    rng = random.Random(0)
    for split in ("train", "test"):
        drawn = (task.sample(rng)._replace(task=task.name) for _ in range(10_000))
        if not any(task.is_held_out(problem) == (split == "test") for problem in drawn):
            common.fail(f"--task {task.name}: has hardly any {split} problems; it needs variety")


def pass_rates(batch):
    """Compute the share of right completions of each group, including the groups that dynamic
    sampling left out. -> list of (problem, rate)"""
    pairs = []
    for one in batch.sampled or [batch]:
        G = one.is_correct.shape[1]
        rates = one.is_correct.double().mean(dim=1).tolist()
        pairs += zip(one.problems[::G], rates)
    return pairs


def extract(text):
    """Extract the answer, printable ASCII, from the only <answer> block. -> str, or None"""
    answer = block(text, "answer") or ""
    return answer.strip() if re.fullmatch("[ -~]{1,200}", answer) else None


def block(text, name):
    """Extract the content of the only <name>..</name> block of a text. -> str, or None if there is
    no such block, or a second tag of that name"""
    opening = f"<{name}>"
    closing = f"</{name}>"
    if text.count(opening) != 1 or text.count(closing) != 1:
        return None
    _, _, rest = text.partition(opening)
    inside, closed, _ = rest.partition(closing)
    return inside if closed else None


def span(name, level):
    """Read the level "3-7" of a task as (3, 7), and "5" as (5, 5). Exits with one line if bad."""
    low, _, high = level.partition("-")
    is_span = re.fullmatch("[0-9]{1,2}(-[0-9]{1,2})?", level)
    if not is_span or not 2 <= int(low) <= int(high or low):
        common.fail(f"--task {name}:{level}: the level must be a number from 2 to 99, or a range "
                    "like 3-7")
    return int(low), int(high or low)


class Wrapper:
    """A task that changes part of another task, from which it takes everything else."""
    scores = Task.scores                # uses the wrapper's own verdicts

    def __init__(self, task):
        self.task = task

    def __getattr__(self, name):
        return getattr(self.task, name)
