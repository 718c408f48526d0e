"""Masking: tokens that the policy did not write, and rewards for calls

Runs on lookup: with the tool's tokens masked or learned, without the tool, by PPO, and with other
rewards for calls. docs/lab/masking.md says more.
"""
import itertools

import numpy
import torch

import grpo
from lab.draw import curves
from lab.experiment import UNSCORED, Experiment, means, numbers, ratio, steps_to_level
from lab.training import load_base, training
from lab.verdict import Claim

STEPS = 36
LEVEL = 0.9                                     # the accuracy up to which steps are counted
WINDOW = 2                                      # batches over which accuracy is averaged for this
LATE = 10                                       # last batches, for the accuracy at the end
GAIN = 0.02                                     # of a share, what counts as one
FLAGS = "--task lookup --num_prompts 16"
PPO = f"ppo.py {FLAGS} --max_steps {STEPS} {UNSCORED}"
OUTCOME = "accuracy"
LEARNED = "tool tokens learned"
NO_TOOL = "no tool"
RUNS = {OUTCOME: "", LEARNED: "", NO_TOOL: "",                                 # of grpo.py
        "fine": "--reward fine", "coarse + format": "--reward coarse+format",
        "fine + length": "--reward fine+length",
        "fine + growing length": "--reward fine+growing_length"}
EXPERIMENT = Experiment(__file__, seeds=range(8), one_base=True)
EXPERIMENT.runs("critic", {"PPO": PPO}, ["accuracy"])


def unmask(task):
    """What the tool says counts as written by the policy from now on."""
    rollout = task.rollout

    def unmasked(*arguments):
        tokens, mask, logps, entropy, lengths = rollout(*arguments)
        is_used = torch.arange(mask.shape[1]) < lengths[:, None]                # (B, T)
        return tokens, is_used.to(mask), logps, entropy, lengths
    task.rollout = unmasked


@EXPERIMENT.measure(RUNS)
def learning(seed, name):
    """Train from the base, step by step."""
    cfg, task, policy = load_base(grpo, f"{FLAGS} {RUNS[name]} --seed {seed}")
    if name == NO_TOOL:
        task.respond = lambda problem, text: ""
    if name == LEARNED:
        unmask(task)
    batches = itertools.islice(training(grpo, cfg, task, policy), STEPS)
    return {"accuracy": [batch.is_correct.double().mean().item() for batch, _ in batches]}


def fall(accuracy):
    """From the best mean of five steps to the lowest one after it. (S, T) -> (S,)"""
    of_five = means(accuracy, 5)
    return (numpy.maximum.accumulate(of_five, axis=1) - of_five).max(axis=1)


def page(critic, learning):
    runs = {name: learning[name] for name in RUNS} | critic
    steps = {name: steps_to_level(found["accuracy"], LEVEL, WINDOW) for name, found in runs.items()}
    late = {name: found["accuracy"][:, -LATE:].mean(axis=1) for name, found in runs.items()}
    middle = {name: numpy.median(values) for name, values in steps.items()}
    said = (f"{LEVEL:.0%} accuracy takes {middle[LEARNED]:.0f} steps if tool tokens are learned, "
            f"{middle[OUTCOME]:.0f} if they are masked in the loss (medians)")
    yield Claim(f"with tool tokens learned, an accuracy of {LEVEL} takes more steps", "Search-R1",
                **ratio(steps[LEARNED], steps[OUTCOME], STEPS, smallest=WINDOW - 1),
                at_least=1.1, said=said)
    yield Claim("with tool tokens masked, late accuracy is higher", "Search-R1",
                (late[OUTCOME], late[LEARNED]), at_least=GAIN)
    yield Claim("without a tool, late accuracy is lower", "ReTool", (late[NO_TOOL], late[OUTCOME]),
                at_most=-GAIN)
    for name in ("coarse + format", OUTCOME):
        yield Claim(f'rewarded by "{name}", GRPO takes more steps than by "fine"', "ToolRL",
                    **ratio(steps[name], steps["fine"], STEPS, smallest=WINDOW - 1), at_least=1.1)

    shown = {"GRPO, masked": OUTCOME, "GRPO, learned": LEARNED, "PPO, masked": "PPO",
             "GRPO, no tool": NO_TOOL}
    yield curves({words: runs[name]["accuracy"] for words, name in shown.items()}, said,
                 ylabel="accuracy", ylim=(0, 1.02))
    rows = {name: {f"steps to {LEVEL}": steps[name], f"accuracy, last {LATE} steps": late[name],
                   "largest fall of accuracy": fall(found["accuracy"])}
            for name, found in runs.items()}
    yield numbers(rows, form=".3g", by="run")
