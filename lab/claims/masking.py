"""Masking: tokens that the policy did not write, and rewards for calls

All runs train on the task lookup, where the answer has to be looked up with a tool. grpo.py runs
with the tool's tokens masked or learned, without the tool, and with several rewards for calls;
ppo.py runs once. docs/lab/masking.md explains the claims and the outcome.
"""
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
PPO = f"ppo.py {FLAGS} --max_steps {STEPS} {UNSCORED}"
OUTCOME = "accuracy"
LEARNED = "tool tokens learned"
NO_TOOL = "no tool"
RUNS = {OUTCOME: "", LEARNED: "", NO_TOOL: "",         # flags for grpo.py
        "fine": "--reward fine", "coarse + format": "--reward coarse+format",
        "fine + length": "--reward fine+length",
        "fine + growing length": "--reward fine+growing_length"}
# names of the runs in the table
LABELS = {OUTCOME: "outcome reward, tool tokens masked", LEARNED: "outcome reward, " + LEARNED,
          NO_TOOL: "outcome reward, no tool", "PPO": "PPO, outcome reward, tool tokens masked"}
EXPERIMENT = Experiment(__file__, seeds=range(8), one_base=True)
EXPERIMENT.runs("critic", {"PPO": PPO}, ["accuracy"])


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
    runs = {name: learning[name] for name in RUNS} | critic
    accuracy = {name: columns["accuracy"] for name, columns in runs.items()}
    steps = {name: steps_to_level(rows, LEVEL, WINDOW) for name, rows in accuracy.items()}
    late = {name: rows[:, -LATE:].mean(axis=1) for name, rows in accuracy.items()}
    title = (f"With the tool's tokens in the loss, {LEVEL:.0%} accuracy takes "
             f"{steps[LEARNED].mean():.0f} steps instead of {steps[OUTCOME].mean():.0f}")
    yield Claim(f"an accuracy of {LEVEL} takes more steps if the tool's tokens are learned, not "
                "masked", "Search-R1",
                **ratio(steps[LEARNED], steps[OUTCOME], STEPS, smallest=WINDOW - 1),
                at_least=1.1, said=title)
    yield Claim(f"the accuracy of the last {LATE} steps is higher if the tool's tokens are masked",
                "Search-R1", (late[OUTCOME], late[LEARNED]), at_least=GAIN)
    yield Claim(f"the accuracy of the last {LATE} steps is lower without a tool", "ReTool",
                (late[NO_TOOL], late[OUTCOME]), at_most=-GAIN)
    for name, reward in {"coarse + format": '"coarse + format" reward',
                         OUTCOME: "outcome reward"}.items():
        yield Claim(f'GRPO takes more steps to {LEVEL} with the {reward} than with the "fine" '
                    "reward", "ToolRL",
                    **ratio(steps[name], steps["fine"], STEPS, smallest=WINDOW - 1), at_least=1.1)

    lines = {"GRPO, tokens masked": OUTCOME, "GRPO, tokens learned": LEARNED,
             "PPO, tokens masked": "PPO", "GRPO, no tool": NO_TOOL}
    yield dots({label: steps[name] for label, name in lines.items()}, title, form=".0f",
               given={"GRPO, tokens learned": ORANGE, "GRPO, no tool": GREY}, xlim=(0, STEPS + 1),
               level=(STEPS, "end of the run"),
               xlabel=f"steps until a run reaches {LEVEL:.0%} accuracy; a dot for each seed")
    rows = {LABELS.get(name, f"{name} reward"):
            {f"steps to {LEVEL}": steps[name], f"accuracy, last {LATE} steps": late[name],
             "largest fall of accuracy": fall(accuracy[name])} for name in runs}
    yield numbers(rows, form=".3g", by="run (GRPO, except the last)")
