"""More tasks than arithmetic, and everything that changes a task: mixes, a curriculum, the rows of
--reward, and files of problems. This file contains what they share, and flags.py makes the task
that the flags name.
"""
import math
import re

import torch

import common
from common import TOKENIZER, decode
from tasks import scores
from tasks.texts import block, extract

__all__ = ["Arithmetic", "Task", "Wrapper", "block", "extract", "pass_rates", "span"]


class Task(common.Task):
    """A task whose verify may also return a list, with a reward for each character. Besides what
    common.Task names, a subclass may define the methods from `best_return` to `shares`."""

    def best_return(self, problem):
        """Compute the highest sum of the rewards of moves; inf if it is unknown. -> float"""
        return math.inf

    def abstains(self, text):
        """Whether a completion declines to answer, which is then not wrong. -> bool"""
        return False

    def canonical(self, problem, answer):
        """Write equivalent answers in one way, so that they get their votes together. -> str"""
        return str(int(answer)) if re.fullmatch("-?[0-9]+", answer) else answer

    def shares(self, problem, text):
        """Say what else an evaluation averages over completions. -> {name: a number or a bool}"""
        return {}

    def is_right(self, problem, verified):
        if not isinstance(verified, list):
            return super().is_right(problem, verified)
        return sum(verified) >= self.best_return(problem) - 1e-6    # sums of floats are not exact

    def reward(self, problem, text, verified, purpose):
        return float(sum(verified) if isinstance(verified, list) else verified)

    def scores(self, batch, greedy=False):
        return common.Task.scores(self, batch, greedy) | scores.scores(batch, self, greedy)

    def remark(self, problem, text):
        """Write a remark on a completion for the samples of a report. -> str"""
        return ""

    def respond(self, problem, text):
        """Return what the environment inserts after a call token. text: the completion so far."""
        return ""

    def responder(self, prompts, problems):
        """Make the function that rollout asks after each token. -> function(row, ids so far)"""
        openings = [*map(decode, prompts[:, self.prompt_width:].tolist())]      # such as <think>

        def respond(row, ids):
            if decode(ids[-1:]) not in self.call_tokens:
                return []
            return encode(self.respond(problems[row], openings[row] + decode(ids)))
        return respond

    def masks(self, examples, ids):
        """Mark the tokens that the policy writes; those that the environment inserts after a call
        have 0.0. list of (T,) -> list of (T,)"""
        masks = [torch.ones(len(row)) for row in ids]
        for example, mask, row in zip(examples, masks, ids):
            tokens, t = row.tolist(), 0
            while t < len(tokens):
                t += 1
                if decode(tokens[t - 1:t]) in self.call_tokens:
                    n = len(encode(self.respond(example, decode(tokens[:t]))))
                    mask[t:t + n] = 0.0
                    t += n
        return masks


class Arithmetic(Task, common.Arithmetic):
    """Arithmetic with the scores of a tasks.Task."""


def encode(response):
    """Encode text that an environment inserts; it may contain special tokens. -> list of ids"""
    return TOKENIZER.encode(response, allowed_special="all")


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
    responder = Task.responder

    def __init__(self, task):
        self.task = task

    def __getattr__(self, name):
        return getattr(self.task, name)
