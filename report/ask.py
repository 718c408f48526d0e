"""Ask the trained policy of a run: python -m report.ask RUN "((3+4)*2)=" prints its greedy answer.

A prompt may be any text that is short enough, but only those of the task make sense. Where the task
has an environment, what this responds is part of the answer; of a table that no prompt shows, it
knows only the one that belongs to the example which the run proposed at its end.
"""
import json
import sys
from pathlib import Path

import torch

import common
from report import escape, parser, start
from report.page import import_script

# One prompt needs no accelerator, and a reward is not asked for.
ASKED = {"device": "cpu", "kernel": "auto", "reward": "accuracy", "curriculum": False}


def read_run(folder):
    """The script of a run, or the one that its example changes, and its flags as they are needed to
    answer; those that the script does not have are left out. Exits with one line if the folder is
    no run's. -> module, Config"""
    name, flags = common.read_config(folder)
    try:
        config_class = import_script(name).Config
    except (ImportError, ValueError) as error:
        common.fail(f"{folder}: {error}")
    flags = {name: flags[name] for name in flags if name in config_class.__dataclass_fields__}
    modules = [sys.modules[part.__module__] for part in config_class.__mro__]
    script = next(module for module in modules if hasattr(module, "complete"))
    return script, config_class(**flags | ASKED)


def load_policy(folder, script, cfg, name="checkpoint.pt"):
    """The policy of the last checkpoint, or of base.pt. Exits with one line if it has none."""
    policy = script.GPT(cfg)
    common.load_policy(policy, Path(folder, name))
    return policy


def write_run(folder, script, flags, policy):
    """Write a run folder, for --init_from: a policy, then the flags that say which shape it has."""
    record = {"script": script, "torch": torch.__version__, "config": flags}
    common.write(folder / "checkpoint.pt", {"policy": policy.state_dict()})
    common.write(folder / "config.json", json.dumps(record, indent=2))


def example(task):
    """The held-out problem that a run proposes to ask. -> Problem"""
    return common.sample_problems(task, 1, "example", "test")[0]


def check_prompt(prompt, width):
    """Exits with one line for a prompt that is longer than the width, or that no task has."""
    if not prompt.isascii():
        common.fail(f"the prompt {prompt!a} is not in ASCII, as those of all tasks are")
    if len(prompt) > width:
        common.fail(f"the prompt {prompt!a} has {len(prompt)} characters; those of this task have "
                    f"at most {width}")


def problem_of(task, prompt):
    """The problem that a prompt poses; of several tasks, one with an environment gets it, if there
    is one. -> Problem"""
    if prompt == example(task).prompt:
        return example(task)
    parts = getattr(task, "parts", {task.name: task})
    with_calls = [name for name, part in parts.items() if part.call_tokens]
    return common.Problem(prompt, answer="", task=[*with_calls, *parts][0])


def answer(folder, prompt):
    """What the policy of a run completes a prompt with, greedily. -> str"""
    script, cfg = read_run(folder)
    torch.set_num_threads(1)
    if hasattr(script, "Policy"):                       # pretrained/train.py reads any text
        task = None if cfg.data else script.load_task(cfg)      # which may respond
        problem = problem_of(task, prompt) if task else common.Problem(prompt, answer="")
        policy = script.Policy(script.models.last_checkpoint(folder) or cfg.model, cfg)
    else:
        task = common.load_task(cfg, script.verify)
        check_prompt(prompt, task.prompt_width)
        problem = problem_of(task, prompt)
        policy = load_policy(folder, script, cfg)
    return script.complete(policy, task, cfg, [problem]).texts[0]


def main(argv=None):
    words = parser(__doc__)
    words.add_argument("run", metavar="RUN", help="run folder")
    words.add_argument("prompt", metavar="PROMPT", help="such as the prompts that the task has")
    args = words.parse_args(argv)
    if not args.prompt:
        common.fail("the prompt is empty; say what to answer")
    print(escape(answer(args.run, args.prompt)))


if __name__ == "__main__":
    start(main)
