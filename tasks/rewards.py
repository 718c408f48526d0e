"""The rewards that --reward names and adds up, for example --reward accuracy+format.

Each of these names is a row of the table REWARDS: a function of (task, problem, completion text,
verified, purpose) that returns a float. `verified` is what the task's verify returned, a float or a
list of floats. Three rows rate whole batches: "points", whose judge makes mistakes, "model", a
reward model, and "majority", the answer of most outputs of a group, which are not functions.
"""
import re
from collections import Counter

import torch

import common
from tasks import Task, Wrapper, block, extract, preferences
from tasks.scores import majority, part_of, votes


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


def growing_length(task, problem, text, verified, purpose):
    """ToolRL's dynamic length reward: like `length`, but the target grows from 20 characters to 40
    in 50 steps. A purpose is a step, (step, attempt) in dynamic sampling, or a name, which counts
    as step 0."""
    step = purpose[0] if isinstance(purpose, tuple) else purpose
    progress = min(1.0, step / 50) if isinstance(step, int) else 0.0
    return 0.1 * min(1.0, thought_length(text) / (20 * (1 + progress)))


def fine(task, problem, text, verified, purpose):
    """ToolRL's decomposition: 0 to 1 for how right the calls are, plus 1.0 for the format. In the
    paper, their weights are 6 and 1."""
    score = tool_reward(task.true_calls(problem), task.predicted_calls(text))
    return score + well_formed(task, problem, text, verified, purpose)


def coarse(task, problem, text, verified, purpose):
    """1.0 if all calls are exactly right and none is missing or superfluous; else 0.0."""
    return float(tool_reward(task.true_calls(problem), task.predicted_calls(text)) == 1.0)


def language(task, problem, text, verified, purpose):
    """R1's reward for one language: the share of a thought's steps that are in words, 0 to 1."""
    return task.share_in_words(text)


def points(task, problem, text, verified, purpose):
    """The points of a judge who makes no mistake: 7.0 for a right answer, 6.0 for an abstention, if
    the task allows it, 5.0 for a wrong answer, 1.0 without an answer block, or with two."""
    if verified == 1:
        return 7.0
    if part_of(task, problem).abstains(text):
        return 6.0
    return 5.0 if (block(text, "answer") or "").strip() else 1.0


REWARDS = {"accuracy": accuracy, "format": well_formed, "length": length,
           "growing_length": growing_length, "fine": fine, "coarse": coarse, "language": language,
           "points": points}
RATED = "model", "points", "majority"
# The task that a row needs, and a method that only this task has
NEEDS = {"fine": ("lookup", "predicted_calls"), "coarse": ("lookup", "predicted_calls"),
         "language": ("notation", "share_in_words")}


class Rewards(Wrapper):
    """A task that rewards a completion with the sum of the rows that --reward names."""
    judge = Task.judge              # with the methods of the wrapper
    model = None                    # the reward model, once a run has begun

    def __init__(self, cfg, task):
        super().__init__(task)
        self.seed = cfg.seed
        self.names = cfg.reward.split("+")
        known = dict.fromkeys([*REWARDS, *RATED])
        for name in self.names:
            if name not in known or self.names.count(name) > 1:
                common.fail(f"--reward {cfg.reward}: each name must be one of {', '.join(known)}, "
                            "and may occur only once")
            needed, method = NEEDS.get(name, ("", "verify"))
            if not hasattr(task, method):
                common.fail(f"--reward {cfg.reward}: {name} needs --task {needed}; {task.name} has "
                            "nothing that it could rate")
        if len({*RATED} & {*self.names}) > 1:
            common.fail(f"--reward {cfg.reward}: choose one of {', '.join(RATED)}, because each of "
                        "them rates the whole answer")
        if "majority" in self.names:
            for part in task.parts.values() or [task]:
                examples = common.sample_problems(part, 16, "votes", phase="textbook")
                if not any(extract(example.completion) for example in examples):
                    common.fail(f"--reward majority: completions of {part.name} have no <answer> "
                                "block, so there are no votes")
        if {"points", "model"} & {*self.names} and not task.is_judged:
            common.fail(f"--reward {cfg.reward}: nothing is right or wrong in {task.name}, so "
                        "there is nothing to rate")

    def fit(self, run, sample):
        """Fit the reward model to batches of the base, which sample(purpose) makes."""
        self.model = preferences.model_of(run, sample)

    def rate(self, batch, purpose):
        """Fill batch.ratings, and add them to the rewards of the rows. The mistakes of a judge are
        normal, of one point; they depend on the seed, the step and the row alone. Its points are
        integers from 1 to 10. A group's majority is right (TTRL, 2504.16084). -> B floats"""
        if "points" in self.names:
            if any(isinstance(verified, list) for verified in batch.verified):
                common.fail(f"--reward points: {self.task.name} rewards each move, and a judge "
                            "rates whole answers")
            judged = zip(batch.problems, batch.texts, batch.verified)
            fair = torch.tensor([points(self.task, *each, purpose) for each in judged])     # (B,)
            draws = common.generator("points", self.seed, purpose)
            mistakes = torch.randn(len(fair), generator=draws, dtype=torch.double)
            batch.ratings = (fair + mistakes).round().clamp(1, 10).tolist()
        elif "majority" in self.names:
            G = batch.is_correct.shape[1]
            answers = votes(self.task, batch.problems, batch.texts, G)
            groups = [answers[first:first + G] for first in range(0, len(answers), G)]
            batch.ratings = [float(bool(answer) and answer == majority(group))
                             for group in groups for answer in group]
        elif "model" in self.names:
            batch.ratings = ([0.0] * len(batch.texts) if self.model is None
                             else self.model.rewards(batch).tolist())
        rewards = Task.rate(self, batch, purpose)
        ratings = batch.ratings or [0.0] * len(rewards)
        return [reward + rating for reward, rating in zip(rewards, ratings)]

    def rows(self, batch, purpose):
        """Compute the reward of each row for all completions of a batch. -> {name: (P, G)}"""
        by_name = {}
        for name in self.names:
            rewards = batch.ratings
            if name not in RATED:
                judged = zip(batch.problems, batch.texts, batch.verified)
                rewards = [REWARDS[name](self.task, *each, purpose) for each in judged]
            rewards = torch.tensor(rewards, dtype=torch.get_default_dtype())    # (B,)
            by_name[name] = rewards.view_as(batch.is_correct)
        return by_name

    def reward(self, problem, text, verified, purpose):
        judged = self.task, problem, text, verified, purpose
        return float(sum(REWARDS[name](*judged) for name in self.names if name not in RATED))

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


def agreement(a, b):
    """Compute the intersection over union of two multisets; 1 if both are empty. -> float"""
    a = Counter(a)
    b = Counter(b)
    return (a & b).total() / (a | b).total() if a or b else 1.0


def tool_reward(true_calls, predicted_calls):
    """Rate calls (name, {parameter: value}) from 0 to 1: S / S_max of ToolRL (2504.13958).

    S begins with the agreement of the names of all calls. Then each true call is matched with the
    predicted call of the same name that fits best, among those not matched before. Each match
    adds the agreement of the parameter names and the number of the true call's values that are
    equal. S_max is S if all calls are right. -> float
    """
    S = agreement([name for name, _ in true_calls], [name for name, _ in predicted_calls])
    S_max = 1
    unmatched = list(predicted_calls)
    for call in true_calls:
        S_max += 1 + len(call[1])
        fits = [call_fit(call, other) for other in unmatched]
        best = max(fits, default=-1.0)
        if best >= 0:
            S += best
            del unmatched[fits.index(best)]
    return S / S_max


def call_fit(true_call, predicted_call):
    """Compute the agreement of the parameter names of two calls, plus the number of equal values;
    -1 if the calls have different names. -> float"""
    true_name, true_parameters = true_call
    name, parameters = predicted_call
    if name != true_name:
        return -1.0
    num_equal = sum(key in parameters and parameters[key] == value
                    for key, value in true_parameters.items())
    return agreement([*true_parameters], [*parameters]) + num_equal
