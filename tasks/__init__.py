"""More tasks than arithmetic, and everything that changes a task: mixes, a curriculum, the rows of
--reward, a rollout that inserts text, and files of problems. This file contains what they share,
and flags.py makes the task that the flags name.
"""
import math
import re

import common


class Task(common.Task):
    """A task whose verify may also return a list, with a reward for each character."""

    def best_return(self, problem):
        """Compute the highest sum of the rewards of moves; inf if it is unknown. -> float"""
        return math.inf

    def is_right(self, problem, verified):
        if not isinstance(verified, list):
            return super().is_right(problem, verified)
        return sum(verified) >= self.best_return(problem) - 1e-6    # sums of floats are not exact

    def reward(self, problem, text, verified, purpose):
        return float(sum(verified) if isinstance(verified, list) else verified)


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


def pass_rates(batch):
    """Compute the share of right completions of each group, including the groups that dynamic
    sampling left out. -> list of (problem, rate)"""
    pairs = []
    for one in batch.sampled or [batch]:
        G = one.is_correct.shape[1]
        rates = one.is_correct.double().mean(dim=1).tolist()
        pairs += zip(one.problems[::G], rates)
    return pairs


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
    scores = Task.scores                # with the methods of the wrapper

    def __init__(self, task):
        self.task = task

    def __getattr__(self, name):
        return getattr(self.task, name)
