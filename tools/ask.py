"""Ask the trained policy of a run: python -m tools.ask RUN "((3+4)*2)=" prints its greedy answer.

A prompt may be any text that is short enough, but only those of the task make sense. Where the task
has an environment, what this responds is part of the answer; of a table that no prompt shows, it
knows only the one that belongs to the example which the run proposed at its end.
"""
import argparse
import importlib
import json
from pathlib import Path

import torch

import common
from tools.console import escape


def example(task):
    """The held-out problem that a run proposes to ask. -> Problem"""
    return common.sample_problems(task, 1, "example", "test")[0]


# ---- 1. the run ------------------------------------------------------------------------------

def import_script(name):
    """The module of a script of this repository. ValueError if there is none of this name."""
    path = common.HERE / name
    is_script = path.parent == common.HERE and path.suffix == ".py" and path.is_file()
    if not is_script or common.MACHINERY not in path.read_text(encoding="utf-8"):
        raise ValueError(f"{name!a} is no script of this repository")
    return importlib.import_module(path.stem)


def read_run(folder):
    """The script of a run, and its flags as they are needed to answer. ValueError if the folder is
    no run's. -> module, Config"""
    try:
        record = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        script = import_script(record["script"])
        flags = record["config"]
        if not common.are_flags_of(script.Config, flags):
            raise ValueError("its flags are not those that the script has now")
    except (OSError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{folder}: has no readable config.json; "
                         "name the folder of a run") from None
    except ValueError as error:
        raise ValueError(f"{folder}: its config.json is no run's: {error}") from None
    # one prompt needs no accelerator, and a reward is not asked for
    flags |= {"device": "cpu", "kernel": "auto", "reward": "accuracy", "curriculum": False}
    return script, script.Config(**flags)


def load_policy(folder, script, cfg):
    """The policy of the last checkpoint. ValueError if it cannot be loaded. -> GPT"""
    path = folder / "checkpoint.pt"
    try:
        policy = script.GPT(cfg)
        policy.load_state_dict(common.load(path, cfg.device)["policy"])
    except Exception as error:              # a damaged file raises nearly anything
        raise ValueError(f"{path}: holds no policy of this run "
                         f"({type(error).__name__})") from None
    return policy


# ---- 2. the answer ---------------------------------------------------------------------------

def check_prompt(prompt, width):
    """ValueError for a prompt that no task has, or that is longer than the width of this one."""
    if not prompt:
        raise ValueError("the prompt is empty; say what to answer")
    if width is None:
        return                              # a pretrained model reads any text
    if not prompt.isascii():
        raise ValueError(f"the prompt {prompt!a} is not in ASCII, as those of all tasks are")
    if len(prompt) > width:
        raise ValueError(f"the prompt {prompt!a} has {len(prompt)} characters; those of this task "
                         f"have at most {width}")


def responding_task(cfg):
    """The name of the task; of several, the first that has an environment, if one has. -> str"""
    names = cfg.task.split(",")
    for name in names:
        if common.find_task(name, cfg.task).call_tokens:
            return name
    return names[0]


def answer(script, cfg, task, policy, prompt):
    """What the policy completes a prompt with, greedily. -> str"""
    problem = example(task)
    if prompt != problem.prompt:
        problem = common.Problem(prompt, answer="", task=responding_task(cfg))
    prompts = script.encode_prompts([prompt], task, cfg.device)                     # (1, W)
    completions = script.rollout(policy, prompts, [problem], task, cfg)
    return script.completion_texts(completions)[0]


def answer_of_pretrained(folder, flags, prompt):
    """What a model that examples/pretrained.py trained completes a prompt with, greedily. -> str"""
    pretrained = importlib.import_module("examples.pretrained")
    if not common.are_flags_of(pretrained.Config, flags):
        raise ValueError(f"{folder}: its flags are not those that pretrained.py has now")
    flags |= {"device": "cpu", "kernel": "auto", "parallel": "replicate"}
    cfg = pretrained.Config(**flags)
    last = pretrained.processes.last_checkpoint(folder)
    policy = pretrained.Policy(last if last else cfg.model, cfg)
    _, _, texts, _ = pretrained.rollout(policy, [common.Problem(prompt, answer="")], cfg)
    return texts[0]


def flags_of_pretrained(folder):
    """The flags of a run of examples/pretrained.py; None if the folder is none of those. -> dict"""
    try:
        record = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return record["config"] if record["script"] == "pretrained.py" else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def main(argv=None):
    """Print the answer. Exits with one line, code 2, if there is no run to ask, or no prompt."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = common.fail
    parser.add_argument("run", metavar="RUN", help="run folder")
    parser.add_argument("prompt", metavar="PROMPT", help="such as the prompts that the task has")
    args = parser.parse_args(argv)
    folder = Path(args.run)
    flags = flags_of_pretrained(folder)
    try:
        if flags is not None:
            check_prompt(args.prompt, width=None)
            return print(escape(answer_of_pretrained(folder, flags, args.prompt)))
        script, cfg = read_run(folder)
        common.check_flags(cfg)
        task = common.load_task(cfg, script.verify)
        check_prompt(args.prompt, task.prompt_width)
        policy = load_policy(folder, script, cfg)
    except ValueError as error:
        common.fail(error)
    torch.set_num_threads(cfg.num_threads)
    print(escape(answer(script, cfg, task, policy, args.prompt)))


if __name__ == "__main__":
    common.start(main)
