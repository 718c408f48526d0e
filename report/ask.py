"""Ask the trained policy of a run: python -m report.ask RUN "((3+4)*2)=" prints its greedy answer.

A prompt may be any text that is short enough, but only prompts of the task make sense. If the task
has an environment, its responses are part of the answer. Some environments look things up in a
table that the prompt doesn't show. This command has such a table only for one prompt: the example
that the run printed at its end.
"""
import inspect
from pathlib import Path

import common
import plumbing
from report import escape, parser, replaced, start
from report.page import import_script

# These replace flags of the run: one prompt needs no GPU, and a question has no reward.
FLAGS = {"device": "cpu", "kernel": "auto", "reward": "accuracy", "curriculum": False}


def read_run(folder):
    """Read which script made a run, and with which flags. If an example made it that changes a
    script, returns this script. FLAGS replace some flags, and flags that the Config doesn't have
    are left out. Exits with one line if the folder contains no run. -> module, Config"""
    name, flags = plumbing.read_config(folder)
    try:
        config_class = import_script(name).Config
    except (ImportError, ValueError) as error:
        common.fail(f"{folder}: {error}")
    flags = {name: flags[name] for name in flags if name in config_class.__dataclass_fields__}
    own = next(part for part in config_class.__mro__ if common.Config in part.__bases__)
    return inspect.getmodule(own), config_class(**flags | FLAGS)


def load_policy(folder, script, cfg, name="checkpoint.pt"):
    """Load the policy from the last checkpoint, or the base from "base.pt". Exits with one line if
    the file is missing. -> GPT"""
    policy = script.GPT(cfg)
    plumbing.load_policy(policy, Path(folder, name))
    return policy


class Made(Exception):
    """Stops a script's main at the moment when its run would begin. args: the task"""


def load_task(folder, script, cfg):
    """Make the task of a run. If the script makes a task of its own, its main does. -> Task"""
    if "." not in cfg.task:
        return common.load_task(cfg, script.verify)

    def stop(cfg, task, *others):
        raise Made(task)
    words = ["--resume_from_checkpoint", str(folder), "--device", "cpu", "--kernel", "auto"]
    try:
        with replaced(plumbing, Run=stop):
            import_script(plumbing.read_config(folder)[0]).main(words)
    except Made as made:
        return made.args[0]
    common.fail(f"{folder}: main of the script made no task")


def problem_of(task, prompt):
    """Make a problem of a prompt. In a mix, it is a problem of the first task that has an
    environment, or else of the first task. -> Problem"""
    [example] = common.sample_problems(task, 1, "example", "test")     # as a run prints at its end
    if prompt == example.prompt:
        return example
    parts = task.parts or {task.name: task}
    name = next(iter(parts))
    for other, part in parts.items():
        if part.call_tokens:
            name = other
            break
    return common.Problem(prompt, answer="", task=name)


def answer(folder, prompt):
    """Complete a prompt with the policy of a run, greedily. -> the text of the completion"""
    script, cfg = read_run(folder)
    task = load_task(folder, script, cfg)
    if not 1 <= len(prompt.encode()) <= task.prompt_width:
        common.fail(f"the prompt {prompt!a} is not one of this task: these have 1 to "
                    f"{task.prompt_width} bytes")
    problem = problem_of(task, prompt)
    policy = load_policy(folder, script, cfg)
    plumbing.fix_arithmetic()
    return script.complete(policy, task, cfg, [problem]).texts[0]


def main(argv=None):
    arguments = parser(__doc__)
    arguments.add_argument("run", metavar="RUN", help="run folder")
    arguments.add_argument("prompt", metavar="PROMPT", help="a prompt of the run's task")
    args = arguments.parse_args(argv)
    print(escape(answer(args.run, args.prompt)))


if __name__ == "__main__":
    start(main)
