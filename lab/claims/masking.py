"""Masking: tokens that the policy did not write"""
import itertools

import torch

import grpo
from lab.bench import Claim, at_best, numbers, steps_to
from lab.training import load_base, training
from report import chart, replaced

SEEDS, TUNING = (*range(5), *range(8, 15)), range(5, 8)
STEPS = 36
LEVEL, WINDOW = 0.9, 2          # a table has the steps until WINDOW batches reach this accuracy
LATE = 10                       # number of last batches averaged for the late accuracy
GAIN = 0.02                     # smallest difference of accuracy that matters
TASK = "--task lookup --num_prompts 16"
MASKED, LEARNED, NO_TOOL = "tool tokens masked", "tool tokens learned", "no tool, 5e-4"
SIDES = {MASKED: (None, 5e-4), LEARNED: (None, 5e-4)}
CASES = [NO_TOOL]                       # whose outputs are never right, so that no rate helps
rollout = grpo.rollout
AT_END = f"accuracy of the last {LATE} steps"
COMPARED = [(side, AT_END) for side in SIDES]
CHECK = f"grpo.py {TASK}"


def unmasked(*arguments):
    """Sample with a tool, but include the tool's tokens in the mask, so that they are learned."""
    tokens, mask, *others, lengths = rollout(*arguments)
    is_used = torch.arange(mask.shape[1]) < lengths[:, None]                    # (B, T)
    return tokens, is_used.to(mask), *others, lengths


def measure(case, seed):
    """Train grpo.py as it is, without a tool, or without the mask of the tool's tokens."""
    tool, _, rate = case.rpartition(", ")
    cfg, task, policy = load_base(grpo, f"{TASK} --learning_rate {rate} --seed {seed} "
                                  f"--base_seed {seed}")
    if case == NO_TOOL:
        task.respond = lambda problem, text: ""
    with replaced(grpo, rollout=unmasked if tool == LEARNED else rollout):
        batches = itertools.islice(training(cfg, task, policy), STEPS)
        return {"accuracy": [batch.is_correct.double().mean().item() for batch in batches]}


def score(columns, what):
    return columns["accuracy"][:, -LATE:].mean(axis=1)


def page(x):
    runs = {side: columns for (side, _), columns in at_best("masking", x).items()}
    runs[NO_TOOL] = x[NO_TOOL]
    late = {name: score(columns, AT_END) for name, columns in runs.items()}
    steps = {name: steps_to(columns["accuracy"], LEVEL, WINDOW) for name, columns in runs.items()}
    yield (f"At the best learning rate of each, accuracy ends at {late[MASKED].mean():.2f} if "
           f"the tool's tokens are masked, and at {late[LEARNED].mean():.2f} if they are "
           "learned. How much they cost depends on the base.")
    yield Claim(f"the {AT_END} is higher if the tool's tokens are masked, not learned (at the best "
                "rate of each)", "Search-R1", (late[MASKED], late[LEARNED]), at_least=GAIN,
                rates=(runs[MASKED]["rate"], runs[LEARNED]["rate"]))
    yield Claim(f"the {AT_END} is lower without a tool", "ReTool", (late[NO_TOOL], late[MASKED]),
                at_most=-GAIN)
    yield lambda axis: chart.dots(axis, late, xlim=(0, 1.03), xlabel=AT_END)
    yield numbers({name: {"best rate": columns.get("rate", "not tuned"), AT_END: late[name],
                          f"steps to {LEVEL}": steps[name]} for name, columns in runs.items()},
                  "run")
