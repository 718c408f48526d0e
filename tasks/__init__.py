"""More tasks than arithmetic, and everything that changes a task: mixes, a curriculum, the rows of
--reward, a rollout that inserts text, and files of problems. This file contains what they share,
and flags.py makes the task that the flags name.
"""
import re
import zlib

import torch

import common
from tasks import scores


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
    extract = staticmethod(extract)     # reads the answer in a text, for majority votes

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
        return scores.scores(batch, self, greedy)

    def observe(self, batch, step):
        """Learn from the batch of each step (a curriculum does). -> metrics of this task alone"""
        return {}


class Arithmetic(Task, common.Arithmetic):
    """The task of common.py, with all methods of Task."""

    def __init__(self, cfg, level, verify):
        common.Arithmetic.__init__(self, verify, *span("arithmetic", level or "5"))


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
    scores = Task.scores                # uses the wrapper's own verdicts

    def __init__(self, task):
        self.task = task

    def __getattr__(self, name):
        return getattr(self.task, name)
