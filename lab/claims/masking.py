"""Masking: tokens that the policy did not write, and rewards for calls"""
import itertools

import numpy
import torch

import grpo
from lab.draw import GREY, ORANGE, dots
from lab.experiment import UNSCORED, Experiment, means, numbers, ratio, steps_to_level
from lab.training import load_base, training
from lab.verdict import Claim

STEPS = 36
LEVEL = 0.9                     # we count the steps until the accuracy reaches this level
WINDOW = 2                      # number of batches averaged before we compare with LEVEL
LATE = 10                       # number of last batches averaged for the late accuracy
GAIN = 0.02                     # smallest difference of accuracy that matters
FLAGS = "--task lookup --num_prompts 16"
MASKED, LEARNED, NO_TOOL = (f"outcome reward, {tool}" for tool in (
    "tool tokens masked", "tool tokens learned", "no tool"))
RUNS = {MASKED: "", LEARNED: "", NO_TOOL: "",           # flags for grpo.py
        "fine reward": "--reward fine", "coarse + format reward": "--reward coarse+format",
        "fine + length reward": "--reward fine+length",
        "fine + growing length reward": "--reward fine+growing_length"}
PPO = f"PPO, {MASKED}"
EXPERIMENT = Experiment(__file__, seeds=range(8), one_base=True)
EXPERIMENT.runs("critic", {PPO: f"ppo.py {FLAGS} --max_steps {STEPS} {UNSCORED}"}, ["accuracy"])


def unmask(task):
    """Make a task's rollouts include the tool's tokens in the mask, so that they are learned."""
    rollout = task.rollout

    def unmasked(*arguments):
        tokens, mask, logps, entropy, lengths = rollout(*arguments)
        is_used = torch.arange(mask.shape[1]) < lengths[:, None]                # (B, T)
        return tokens, is_used.to(mask), logps, entropy, lengths
    task.rollout = unmasked


@EXPERIMENT.measure(RUNS)
def learning(seed, name):
    """Train grpo.py from the base. -> accuracy of each batch"""
    cfg, task, policy = load_base(grpo, f"{FLAGS} {RUNS[name]} --seed {seed}")
    if name == NO_TOOL:
        task.respond = lambda problem, text: ""
    if name == LEARNED:
        unmask(task)
    batches = itertools.islice(training(grpo, cfg, task, policy), STEPS)
    return {"accuracy": [batch.is_correct.double().mean().item() for batch, _ in batches]}


def fall(accuracy):
    """Compute how far the mean of five steps falls from its best value to a later one, at most.
    (S, T) -> (S,)"""
    of_five = means(accuracy, 5)
    return (numpy.maximum.accumulate(of_five, axis=1) - of_five).max(axis=1)


def page(critic, learning):
    accuracy = {name: columns["accuracy"] for name, columns in (learning | critic).items()}
    steps = {name: steps_to_level(rows, LEVEL, WINDOW) for name, rows in accuracy.items()}
    late = {name: rows[:, -LATE:].mean(axis=1) for name, rows in accuracy.items()}

    def slower(one, other):
        return ratio(steps[one], steps[other], STEPS, smallest=WINDOW - 1) | {"at_least": 1.1}
    yield Claim(f"an accuracy of {LEVEL} takes more steps if the tool's tokens are learned, not "
                "masked", "Search-R1", **slower(LEARNED, MASKED),
                said=f"With the tool's tokens in the loss, {LEVEL:.0%} accuracy takes "
                f"{steps[LEARNED].mean():.0f} steps instead of {steps[MASKED].mean():.0f}")
    yield Claim(f"the accuracy of the last {LATE} steps is higher if the tool's tokens are masked",
                "Search-R1", (late[MASKED], late[LEARNED]), at_least=GAIN)
    yield Claim(f"the accuracy of the last {LATE} steps is lower without a tool", "ReTool",
                (late[NO_TOOL], late[MASKED]), at_most=-GAIN)
    for name, reward in (("coarse + format reward", '"coarse + format" reward'),
                         (MASKED, "outcome reward")):
        yield Claim(f'GRPO takes more steps to {LEVEL} with the {reward} than with the "fine" '
                    "reward", "ToolRL", **slower(name, "fine reward"))

    lines = {"GRPO, tokens masked": MASKED, "GRPO, tokens learned": LEARNED,
             "PPO, tokens masked": PPO, "GRPO, no tool": NO_TOOL}
    yield dots({label: steps[name] for label, name in lines.items()}, form=".0f",
               given={"GRPO, tokens learned": ORANGE, "GRPO, no tool": GREY}, xlim=(0, STEPS + 1),
               level=(STEPS, "end of the run"),
               xlabel=f"steps until a run reaches {LEVEL:.0%} accuracy; a dot for each seed")
    yield numbers({name: {f"steps to {LEVEL}": steps[name],
                          f"accuracy, last {LATE} steps": late[name],
                          "largest fall of accuracy": fall(rows)}
                   for name, rows in accuracy.items()}, ".3g", "run (GRPO, except the last)")
