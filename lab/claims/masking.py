"""Masking: tokens that the policy did not write"""
import itertools

import torch

import grpo
from lab.bench import Claim, at_best, numbers, steps_to, tuned
from lab.training import load_base, training
from report import chart

SEEDS, TUNING, ONE_BASE = range(5), range(5, 8), True
STEPS = 36
LEVEL = 0.9                     # we count the steps until the accuracy reaches this level
WINDOW = 2                      # number of batches averaged before we compare with LEVEL
LATE = 10                       # number of last batches averaged for the late accuracy
GAIN = 0.02                     # smallest difference of accuracy that matters
TASK = "--task lookup --num_prompts 16"
MASKED, LEARNED, NO_TOOL = "tool tokens masked", "tool tokens learned", "no tool, 5e-4"
SIDES = {MASKED: (None, 5e-4), LEARNED: (None, 5e-4)}
CASES = [NO_TOOL]                       # whose outputs are never right, so that no rate helps
NEEDED = f"steps to an accuracy of {LEVEL}"
COMPARED = [(side, NEEDED) for side in SIDES]
TUNED = "the learning rate of both runs with a tool, on three other seeds"
CHECK = f"grpo.py {TASK}"


def unmask(task):
    """Make a task's rollouts include the tool's tokens in the mask, so that they are learned."""
    rollout = task.rollout

    def unmasked(*arguments):
        tokens, mask, *others, lengths = rollout(*arguments)
        is_used = torch.arange(mask.shape[1]) < lengths[:, None]                # (B, T)
        return tokens, is_used.to(mask), *others, lengths
    task.rollout = unmasked


def measure(case, seed):
    """Train grpo.py as it is, without a tool, or without the mask of the tool's tokens."""
    tool, _, rate = case.rpartition(", ")
    cfg, task, policy = load_base(grpo, f"{TASK} --learning_rate {rate} --seed {seed}")
    if tool == LEARNED:
        unmask(task)
    if case == NO_TOOL:
        task.respond = lambda problem, text: ""
    batches = itertools.islice(training(cfg, task, policy), STEPS)
    return {"accuracy": [batch.is_correct.double().mean().item() for batch in batches]}


def score(columns, what):
    """Count the steps that each run needed; higher is better. -> minus steps, (S,)"""
    return -steps_to(columns["accuracy"], LEVEL, WINDOW)


def page(x):
    runs = {side: columns for (side, _), columns in at_best("masking", x).items()}
    runs[NO_TOOL] = x[NO_TOOL]
    steps = {name: -score(columns, NEEDED) for name, columns in runs.items()}
    late = {name: columns["accuracy"][:, -LATE:].mean(axis=1) for name, columns in runs.items()}
    yield Claim(f"an accuracy of {LEVEL} takes more steps if the tool's tokens are learned, not "
                "masked (at the best rate of each)", "Search-R1", (steps[LEARNED], steps[MASKED]),
                at_least=1.1, ratio=True,
                finding=f"With the tool's tokens in the loss, {LEVEL:.0%} accuracy takes "
                f"{steps[LEARNED].mean():.0f} steps instead of {steps[MASKED].mean():.0f}")
    yield Claim(f"the accuracy of the last {LATE} steps is lower without a tool", "ReTool",
                (late[NO_TOOL], late[MASKED]), at_most=-GAIN)
    yield lambda axis: chart.dots(axis, steps, STEPS, xlim=(0, STEPS + 1),
                                  xlabel=f"steps until a run reaches {LEVEL:.0%} accuracy")
    yield numbers({name: {f"accuracy, last {LATE} steps": late[name]} for name in runs}, "run")
    yield tuned("masking", x)
