"""Write problems of a task as a file for other trainers, and judge the completions there.

  python -m engines.task countdown 2000 > train.jsonl
  python -m engines.trl grpo --dataset_name train.jsonl --reward_funcs engines/task.py:right ...

A line is {"prompt": [{"role": "user", "content": "2 3 8>18:"}], "answer": ..., "problem": ...,
"task": ...}: prompts are conversations, because the chat template of an exported policy pads them
to the width of its task. `right` judges by the columns `problem`, `answer` and `task`. A model that
others have pretrained needs an --instruction, which comes before each prompt.
"""
import functools
import json

import common  # isort: split

import grpo
from report import parser, start


@functools.cache
def load(name):
    """Load a task, or a mix A,B. Exits with one line if a completion alone does not decide whether
    it is right. -> Task"""
    task = common.load_task(grpo.Config(task=name, device="cpu"), grpo.verify)
    problems = common.sample_problems(task, 20, "engines")
    is_for_moves = any(isinstance(task.verify(one, ""), list) for one in problems)
    if task.call_tokens or not task.is_judged or is_for_moves:
        common.fail(f"{name}: an environment answers or rewards while the policy writes, but other "
                    "trainers take one reward for an output")
    return task


def line(problem, name, instruction=""):
    """Write a problem of the task `name` as a line of JSON. -> str"""
    chat = [{"role": "user", "content": instruction + problem.prompt}]
    return json.dumps({"prompt": chat, "answer": problem.answer, "problem": problem.prompt,
                       "task": name, "part": problem.task})


def right(completions, problem, answer, task, part, **columns):
    """Reward completions in TRL's form: 1.0 if a completion, a text or a list of messages, is
    right, else 0.0. Each other argument is a column of the file. -> list of floats"""
    rewards = []
    for completion, prompt, solution, name, part_name in zip(
            completions, problem, answer, task, part):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        asked = common.Problem(prompt, solution, task=part_name)
        rewards.append(float(load(name).verify(asked, text)))
    return rewards


def main(argv=None):
    arguments = parser(__doc__)
    arguments.add_argument("task", metavar="TASK", help="a task, with its level: arithmetic:3-5")
    arguments.add_argument("n", metavar="N", type=int, help="number of problems")
    arguments.add_argument("--split", default="train", choices=["train", "test"],
                           help="test: problems that the scripts hold out for evaluation")
    arguments.add_argument("--seed", type=int, default=0, help="seed of the problems")
    arguments.add_argument("--instruction", default="", help="text before each prompt")
    args = arguments.parse_args(argv)
    if args.n < 1:
        common.fail(f"N {args.n}: must be at least 1")
    problems = common.sample_problems(load(args.task), args.n, ("engines", args.seed), args.split)
    for problem in problems:
        print(line(problem, args.task, args.instruction))


if __name__ == "__main__":
    start(main)
