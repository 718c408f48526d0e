"""The task that --task, --reward and --curriculum name, and the defaults of flags that it has.

plumbing.py calls `defaults`, and common.py `load`.
"""
import dataclasses
import importlib
import inspect
from pathlib import Path

import common
import tasks
from common import Task
from tasks import Arithmetic, mix, rewards, span


def find(name):
    """Find the class of a task. Exits with one line if there is none. -> subclass of Task"""
    if name == "arithmetic":
        return Arithmetic
    folder = Path(tasks.__file__).parent
    path = folder / f"{name}.py"
    if not (name.isidentifier() and path.is_file()):
        stems = sorted(file.stem for file in folder.glob("[a-z]*.py"))
        names = [stem for stem in stems if any(hasattr(one, "demonstration")
                                               for one in classes_of(stem))]
        common.fail(f"--task {name}: there is no {path}; the tasks are arithmetic, "
                    f"{', '.join(names)}")
    classes = classes_of(name)
    if len(classes) != 1:
        common.fail(f"--task {name}: {path} does not define one subclass of tasks.Task")
    return classes[0]


def classes_of(name):
    """List the tasks that a file of tasks/ defines. -> list of subclasses of Task"""
    module = importlib.import_module(f"tasks.{name}")
    return [value for value in vars(module).values() if inspect.isclass(value)
            and issubclass(value, Task) and value.__module__ == module.__name__]


def defaults(config_class, task_flag):
    """Collect the defaults of flags that the tasks define; if several define one, the largest. Only
    scripts that have the flag use them. -> dict"""
    names = [part.partition(":")[0] for part in task_flag.split(",")]
    classes = [find(name) for name in names if "." not in name]     # a script makes mine.Sorting
    chosen = {}
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
        task = mix.Mix(cfg, parts)
    if cfg.reward != "accuracy":
        task = rewards.Rewards(cfg, task)
    if cfg.curriculum:
        task = mix.Curriculum(task)
    return task


def load_part(cfg, task_flag, verify):
    """Make the task for NAME or NAME:LEVEL. Tasks that derive from arithmetic have its verifier.
    -> Task"""
    name, _, level = task_flag.partition(":")
    task_class = find(name)
    if level and task_class.__init__ is Task.__init__:
        common.fail(f"--task {task_flag}: {name} has no levels")
    if name == "arithmetic":
        task = Arithmetic(verify, *span(name, level or "5"))
    else:
        task = task_class(cfg, level)
        if isinstance(task, Arithmetic):
            task.verify = verify
    for need in ("prompt_width", "sample", "demonstration", "verify"):
        if getattr(task, need, None) is None:
            common.fail(f"--task {name}: {inspect.getfile(task_class)} does not define {need}")
    return task
