"""The rows that --reward adds up by name, as in --reward accuracy+format.

A row is a function of (task, problem, completion text, verdict, purpose) and returns a float. The
verdict is what the task's verify returned, a float or a list of floats. One row rates whole
batches: model, a reward model.
"""
import re
from collections import Counter

import torch

import common
from tasks import Wrapper, block


def accuracy(task, problem, text, verdict, purpose):
    """What the task itself rewards: the verdict, or the sum of it where each move is rewarded."""
    return task.reward(problem, text, verdict, purpose)


def well_formed(task, problem, text, verdict, purpose):
    """1.0 if the text is one think block, then one answer block, and nothing else, as for R1-Zero;
    else 0.0."""
    thought = block(text, "think")
    answer = block(text, "answer")
    if thought is None or answer is None:
        return 0.0
    return float(text == f"<think>{thought}</think><answer>{answer}</answer>")


def length(task, problem, text, verdict, purpose):
    """0.1 * min(1, n / 40) for n characters of thought, right or wrong."""
    return 0.1 * min(1.0, thought_length(text) / 40)


def growing_length(task, problem, text, verdict, purpose):
    """The same with a target that grows from 20 characters to 40, in 50 steps: ToolRL's dynamic
    length reward. A purpose is a step, (step, attempt) in dynamic sampling, or a name: then 0."""
    step = purpose[0] if isinstance(purpose, tuple) else purpose
    progress = min(1.0, step / 50) if isinstance(step, int) else 0.0
    target = 20 * (1 + progress)
    return 0.1 * min(1.0, thought_length(text) / target)


def fine(task, problem, text, verdict, purpose):
    """ToolRL's decomposition: how right the calls are, in 0..1, plus 1.0 for the format."""
    calls = tool_reward(task.true_calls(problem), task.predicted_calls(text))
    return calls + well_formed(task, problem, text, verdict, purpose)


def coarse(task, problem, text, verdict, purpose):
    """1.0 if every call is exactly right, and there is none besides; else 0.0."""
    return float(tool_reward(task.true_calls(problem), task.predicted_calls(text)) == 1.0)


REWARDS = {"accuracy": accuracy, "format": well_formed, "length": length,
           "growing_length": growing_length, "fine": fine, "coarse": coarse}
TOOL_ROWS = ("fine", "coarse")      # rows for tasks with true_calls and predicted_calls, as lookup


class Rewards(Wrapper):
    """A task whose completions earn the sum of the rows that --reward names."""
    model = None                    # of the row "model", once preferences.py has trained it

    def __init__(self, cfg, task):
        super().__init__(task)
        self.names = cfg.reward.split("+")
        self.parts = getattr(task, "parts", {task.name: task})
        known = [*REWARDS, "model"]
        for name in self.names:
            if name not in known or self.names.count(name) > 1:
                common.fail(f"--reward {cfg.reward}: must be some of {', '.join(known)}, each once")
            for part in self.parts.values():
                if name in TOOL_ROWS and not hasattr(part, "predicted_calls"):
                    common.fail(f"--reward {name}: rates the calls of lookup, not {part.name}")
        if "model" in self.names and not common.optional("report.observers"):
            common.fail("--reward model: needs report/, whose observers train it when a run begins")
        if "model" in self.names and not task.is_judged:
            common.fail(f"--reward model: {task.name} has no right and wrong to learn from")

    def rows(self, batch, purpose):
        """What each row gives the completions of a batch. -> name -> (P, G)"""
        found = {}
        for name in self.names:
            if name == "accuracy":
                found[name] = self.task.rewards(batch, purpose)
            elif name == "model":
                none = torch.zeros(batch.is_correct.shape)
                found[name] = self.model.rewards(batch) if self.model else none
            else:
                judged = zip(batch.problems, batch.texts, batch.verdicts)
                rewards = [self.row(name, *completion, purpose) for completion in judged]
                found[name] = torch.tensor(rewards).view_as(batch.is_correct)
        return found

    def row(self, name, problem, text, verdict, purpose):
        """What a row gives one completion. -> float"""
        part = self.parts.get(problem.task, self.task)
        return REWARDS[name](part, problem, text, verdict, purpose)

    def reward(self, problem, text, verdict, purpose):
        names = [name for name in self.names if name != "model"]
        return float(sum(self.row(name, problem, text, verdict, purpose) for name in names))

    def rewards(self, batch, purpose):
        return sum(self.rows(batch, purpose).values())

    def judge(self, batch, G, purpose):
        self.task.judge(batch, G, purpose)
        batch.rewards = self.rewards(batch, purpose)
        return batch

    def observe(self, batch, step):
        """The metrics of the task, and the mean of each row, if there are several."""
        metrics = self.task.observe(batch, step)
        if len(self.names) > 1:
            for name, rewards in self.rows(batch, step).items():
                metrics[f"rewards/{name}/mean"] = rewards.mean().item()
        return metrics


# ---- what the rows measure -------------------------------------------------------------------

def thought_length(text):
    """Characters of the one think block, without blocks of information, which cost the policy
    nothing. -> int"""
    thought = block(text, "think") or ""
    return len(re.sub("<information>[^<]*</information>", "", thought))


def agreement(a, b):
    """Intersection over union of two multisets; 1 if both are empty. -> float"""
    a = Counter(a)
    b = Counter(b)
    return (a & b).total() / (a | b).total() if a or b else 1.0


def tool_reward(true_calls, predicted_calls):
    """How right calls (name, {parameter: value}) are: S / S_max of ToolRL (arXiv:2504.13958), in
    0..1.

    S adds up how far the names of the calls agree, once, and for each true call how far the best
    predicted call of its name fits that no other true call was matched with: how far the names of
    their parameters agree, and how many of its values are equal.
    """
    true_names = [name for name, _ in true_calls]
    predicted_names = [name for name, _ in predicted_calls]
    S = agreement(true_names, predicted_names)
    S_max = 1
    left = list(predicted_calls)
    for call in true_calls:
        S_max += 1 + len(call[1])
        fits = [call_fit(call, other) for other in left]
        best = max(fits, default=-1.0)
        if best >= 0:
            S += best
            del left[fits.index(best)]
    return S / S_max


def call_fit(true_call, predicted_call):
    """How far the parameters of two calls agree, plus the number of equal values; -1 for calls of
    another name. -> float"""
    true_name, true_parameters = true_call
    name, parameters = predicted_call
    if name != true_name:
        return -1.0
    num_equal = sum(key in parameters and parameters[key] == value
                    for key, value in true_parameters.items())
    return agreement(list(true_parameters), list(parameters)) + num_equal
