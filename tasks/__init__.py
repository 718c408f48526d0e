"""What changes a task: other tasks than arithmetic, mixes, a curriculum, the rows of --reward, a
rollout that inserts text, files of pairs and problems.

common.py calls `defaults` and `load`. Also here: what the files share.
"""
import dataclasses
import importlib
import inspect
import re
import sys
from pathlib import Path

import common
from common import extract as extract  # for the verifiers of tasks


def find(name):
    """The class of a task. Exits with one line where there is none. -> subclass of common.Task"""
    if name == "arithmetic":
        return common.Arithmetic
    path = Path(__file__).parent / f"{name}.py"
    if not (name.isidentifier() and path.is_file()):
        common.fail(f"--task {name}: there is no {path}; there are {', '.join(names())}")
    module = importlib.import_module(f"tasks.{name}")
    found = [value for value in vars(module).values() if inspect.isclass(value)
             and issubclass(value, common.Task) and value.__module__ == module.__name__]
    if len(found) != 1:
        common.fail(f"--task {name}: {path} does not define one subclass of common.Task")
    for method in ("sample", "demonstration", "verify"):
        if not hasattr(found[0], method):
            common.fail(f"--task {name}: {path} does not define {method}")
    return found[0]


def names():
    """The tasks that there are, by the text of their files. -> list"""
    defining = re.compile(r"(?ms)^class \w+\((common\.)?Task\):.*^    def demonstration\(")
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
    if not cfg.mask_tool_tokens and not task.call_tokens:
        common.fail(f"--no-mask_tool_tokens: {task.name} has no tools")
    if cfg.reward != "accuracy":
        task = importlib.import_module("tasks.rewards").Rewards(cfg, task)
    if cfg.curriculum:
        task = importlib.import_module("tasks.mix").Curriculum(task)
    return task


def load_part(cfg, task_flag, verify):
    """The task that NAME, or NAME:LEVEL, stands for. It knows the script, whose tokens it may have
    to count, as `machinery`. -> Task"""
    name, _, level = task_flag.partition(":")
    task_class = find(name)
    if level and task_class.__init__ is common.Task.__init__:
        common.fail(f"--task {task_flag}: {name} has no levels")
    task = task_class(cfg, level, verify) if name == "arithmetic" else task_class(cfg, level)
    if task.prompt_width is None:
        common.fail(f"--task {name}: {inspect.getfile(task_class)} does not define prompt_width")
    task.machinery = sys.modules[verify.__module__]
    return task


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


class Wrapper:
    """A task that changes something of another task, and is that task in all that it does not
    define."""

    def __init__(self, task):
        self.task = task

    def __getattr__(self, name):
        return getattr(self.task, name)
