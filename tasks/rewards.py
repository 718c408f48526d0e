"""The rewards that --reward names and adds up, for example --reward accuracy+format.

Each of these names is a row of the table REWARDS: a function of (task, problem, completion text,
verified, purpose) that returns a float. `verified` is what the task's verify returned, a float or a
list of floats. One more row, "model", is not a function: a reward model rates whole batches.
"""
import re

import torch

import common
from tasks import Wrapper, block


def accuracy(task, problem, text, verified, purpose):
    """The task's own reward: what verify returned, or its sum if each move has a reward."""
    return task.reward(problem, text, verified, purpose)


def well_formed(task, problem, text, verified, purpose):
    """1.0 if the text is one think block, then one answer block, and nothing else, as R1-Zero
    requires; else 0.0."""
    thought = block(text, "think")
    answer = block(text, "answer")
    if thought is None or answer is None:
        return 0.0
    return float(text == f"<think>{thought}</think><answer>{answer}</answer>")


def length(task, problem, text, verified, purpose):
    """0.1 * min(1, n / 40) for n characters of thought, whether the answer is right or wrong."""
    return 0.1 * min(1.0, thought_length(text) / 40)


REWARDS = {"accuracy": accuracy, "format": well_formed, "length": length}


class Rewards(Wrapper):
    """A task that rewards a completion with the sum of the rows that --reward names."""
    model = None                    # the reward model, once preferences.py has trained it

    def __init__(self, cfg, task):
        super().__init__(task)
        self.names = cfg.reward.split("+")
        known = [*REWARDS, "model"]
        for name in self.names:
            if name not in known or self.names.count(name) > 1:
                common.fail(f"--reward {cfg.reward}: each name must be one of {', '.join(known)}, "
                            "and may occur only once")
        if "model" in self.names and not common.report:
            common.fail("--reward model: needs report/, which trains the model when a run begins")
        if "model" in self.names and not task.is_judged:
            common.fail(f"--reward model: nothing is right or wrong in {task.name}, so there is "
                        "nothing to learn from")

    def rows(self, batch, purpose):
        """Compute the reward of each row for all completions of a batch. -> {name: (P, G)}"""
        by_name = {}
        for name in self.names:
            if name == "accuracy":
                by_name[name] = self.task.rewards(batch, purpose)
            elif name == "model":
                zeros = torch.zeros(batch.is_correct.shape)
                by_name[name] = self.model.rewards(batch) if self.model else zeros
            else:
                judged = zip(batch.problems, batch.texts, batch.verified)
                rewards = [self.row(name, *completion, purpose) for completion in judged]
                by_name[name] = 1.0 * torch.tensor(rewards).view_as(batch.is_correct)
        return by_name

    def row(self, name, problem, text, verified, purpose):
        """Compute the reward of one row for one completion. -> float"""
        return REWARDS[name](self.task, problem, text, verified, purpose)

    def reward(self, problem, text, verified, purpose):
        names = [name for name in self.names if name != "model"]
        return float(sum(self.row(name, problem, text, verified, purpose) for name in names))

    def rewards(self, batch, purpose):
        return sum(self.rows(batch, purpose).values())

    def observe(self, batch, step):
        """Add the mean of each row to the task's metrics, if there are several rows. -> metrics"""
        metrics = self.task.observe(batch, step)
        if len(self.names) > 1:
            for name, rewards in self.rows(batch, step).items():
                metrics[f"rewards/{name}/mean"] = rewards.mean().item()
        return metrics


# ---- measures that the rows use --------------------------------------------------------------

def thought_length(text):
    """Count the characters of the only think block. Information blocks don't count, because the
    environment writes them. -> int"""
    thought = block(text, "think") or ""
    return len(re.sub("<information>[^<]*</information>", "", thought))
