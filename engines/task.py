"""Write problems of a task as a file for other trainers, and judge the completions there.

  python -m engines.task countdown 2000 > train.jsonl                       # for TRL
  python -m engines.trl grpo --dataset_name train.jsonl --reward_funcs engines/task.py:right ...
  python -m engines.task countdown 2000 --parquet train.parquet             # for verl
  python -m verl.trainer.main_ppo reward.custom_reward_function.path=pkg://engines.task \\
      reward.custom_reward_function.name=score data.train_files=train.parquet ...

Prompts are conversations, because the chat template of an exported policy pads them to the width of
its task. `right` rewards by the columns of a line, `score` by those that verl reads. A model that
others have pretrained needs an --instruction, which comes before each prompt.
"""
import functools
import json

import engines  # isort: split

import common
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


def row_of_verl(prompt, answer, problem, task, part):
    """Name the columns of a row as verl does. -> dict"""
    return {"data_source": task, "prompt": prompt, "extra_info": {"problem": problem, "part": part},
            "reward_model": {"style": "rule", "ground_truth": answer}}


def right(completions, problem, answer, task, part, **columns):
    """Reward completions, texts or lists of messages, in TRL's form, as the task does: most tasks
    give 1.0 if one is right, else 0.0. Other arguments are columns of the file. -> list of floats
    """
    rewards = []
    for one, asked, solution, name, part_name in zip(completions, problem, answer, task, part):
        text = engines.text_of(one)
        question = common.Problem(asked, solution, task=part_name)
        verified = load(name).verify(question, text)
        rewards.append(load(name).reward(question, text, verified, "engines"))
    return rewards


def score(data_source, solution_str, ground_truth, extra_info, **columns):
    """Reward a completion in verl's form, as `right` does; verl's text has what tools wrote, too,
    so it has to be run without tools. -> float"""
    return right([solution_str], [extra_info["problem"]], [ground_truth], [data_source],
                 [extra_info["part"]])[0]


def main(argv=None):
    arguments = parser(__doc__)
    arguments.add_argument("task", metavar="TASK", help="a task, with its level: arithmetic:3-5")
    arguments.add_argument("n", metavar="N", type=int, help="number of problems")
    arguments.add_argument("--split", default="train", choices=["train", "test"],
                           help="test: problems that the scripts hold out for evaluation")
    arguments.add_argument("--seed", type=int, default=0, help="seed of the problems")
    arguments.add_argument("--parquet", metavar="FILE", help="file to write for verl")
    arguments.add_argument("--instruction", default="", help="text before each prompt")
    args = arguments.parse_args(argv)
    rows = [{"prompt": [{"role": "user", "content": args.instruction + one.prompt}],
             "answer": one.answer, "problem": one.prompt, "task": args.task, "part": one.task}
            for one in common.sample_problems(
                load(args.task), args.n, ("engines", args.seed), args.split)]
    if args.parquet:
        from datasets import Dataset  # here, because only verl needs the package
        Dataset.from_list([row_of_verl(**row) for row in rows]).to_parquet(args.parquet)
    else:
        print(*map(json.dumps, rows), sep="\n")


if __name__ == "__main__":
    start(main)
