"""Masking: tokens that the policy did not write, and rewards for calls

Claim. What a tool says must not be learned: with these tokens masked Search-R1 gets 0.431, without
0.343; GRPO learns faster than PPO there, and PPO is more stable (2503.09516). Without a tool RL
ends lower (ReTool, 2504.11536). Calls that are rated part by part teach more than those that have
to be right as a whole, and rewards for length hurt: 53.0 without, 48.9 with a fixed target, 48.2
with one that grows (ToolRL, 2504.13958).

Prediction. (We knew the table of lookup in docs/tasks.md, and one run.) Names come by chance, so no
policy foresees them. Learned, they delay the rest, but all ends alike. Without a tool one guess in
675 is right. PPO's critic has everything to learn, so PPO is slower; neither collapses. Fine is
faster than coarse and than the outcome, as it tells wrong outputs apart. A length reward of 0.1
does nothing beside it, as a needless call costs more than its length earns. (Pilots of one seed,
run after this was written: in five steps, tool tokens learned was the slower one.)

Method. lookup asks for a boss (one hop) or a boss's boss (two), whom only a call can tell. grpo.py
with batches of 16 problems, 36 steps from one base; ppo.py with the same. No tool: the tool is
silent in training. A fall is from the best mean of five steps to a later one.

Outcome. As predicted, learning the tool's tokens costs half as many steps again. (How much more the
policy then makes up where the tool is silent was here until commit 94e1f79, and was open.)
Predicted wrongly: PPO is as fast as GRPO, fine as fast as coarse and the outcome in seven of eight
seeds (in one it gets half of the problems right, and no more), and runs do collapse: after 90% are
right, two of eight seeds of either script fall to about half. Late accuracies are therefore far
apart, and claims about them undecided.
"""
import itertools

import numpy
import torch

import grpo
from lab.draw import GREY, curves, dots
from lab.experiment import Experiment, numbers, ratio, steps_to_level
from lab.training import load_base, training
from lab.verdict import Claim

SEARCH = "[Search-R1](https://arxiv.org/abs/2503.09516)"
RETOOL = "[ReTool](https://arxiv.org/abs/2504.11536)"
TOOLRL = "[ToolRL](https://arxiv.org/abs/2504.13958)"
STEPS = 36
LEVEL = 0.9                                     # of accuracy, to which steps are counted
GAIN = 0.02                                     # of a share, what counts as one
FLAGS = "--task lookup --num_prompts 16"
PPO = (f"ppo.py {FLAGS} --max_steps {STEPS} --stop_at 2 --eval_steps 1000 --num_eval_problems 1 "
       "--num_eval_samples 1")
OUTCOME = "accuracy"
LEARNED = "tool tokens learned"
NO_TOOL = "no tool"
RUNS = {OUTCOME: "", LEARNED: "", NO_TOOL: "",                                 # of grpo.py
        "fine": "--reward fine", "coarse + format": "--reward coarse+format",
        "fine + length": "--reward fine+length",
        "fine + growing length": "--reward fine+growing_length"}
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(8), one_base=True)
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
    means = numpy.lib.stride_tricks.sliding_window_view(accuracy, 5, axis=1).mean(axis=-1)
    return (numpy.maximum.accumulate(means, axis=1) - means).max(axis=1)


def page(critic, learning):
    runs = {name: learning[name] for name in RUNS} | critic
    rows = {}
    for name, found in runs.items():
        steps = [steps_to_level(row, LEVEL) for row in found["accuracy"]]
        rows[name] = {"steps": numpy.array(steps), "late": found["accuracy"][:, -10:].mean(axis=1),
                      "fall": fall(found["accuracy"])}
    steps, late, falls = ({name: row[column] for name, row in rows.items()}
                          for column in ("steps", "late", "fall"))
    middle = {name: numpy.median(values) for name, values in steps.items()}
    said = (f"{LEVEL:.0%} accuracy takes {middle[LEARNED]:.0f} steps if tool tokens are learned, "
            f"{middle[OUTCOME]:.0f} if they are masked in the loss (medians)")
    yield Claim(f"with tool tokens learned, an accuracy of {LEVEL} takes more steps", SEARCH,
                **ratio(steps[LEARNED], steps[OUTCOME], STEPS), at_least=1.1, shown=said,
                contradicted=said, undecided=said)
    yield Claim("with tool tokens masked, late accuracy is higher", SEARCH,
                (late[OUTCOME], late[LEARNED]), at_least=GAIN)
    yield Claim("without a tool, late accuracy is lower", RETOOL, (late[NO_TOOL], late[OUTCOME]),
                at_most=-GAIN)
    for name in ("coarse + format", OUTCOME):
        yield Claim(f'rewarded by "{name}", GRPO takes more steps than by "fine"', TOOLRL,
                    **ratio(steps[name], steps["fine"], STEPS), at_least=1.1)

    shown = {"GRPO, masked": OUTCOME, "GRPO, learned": LEARNED, "PPO, masked": "PPO",
             "GRPO, no tool": NO_TOOL}
    yield curves({words: runs[name]["accuracy"] for words, name in shown.items()}, said,
                 ylabel="accuracy", ylim=(0, 1.02))
    shown = {name: values for name, values in steps.items() if name != NO_TOOL}
    yield dots(shown, f"Median of the steps to {LEVEL:.0%} accuracy: {middle['fine']:.0f} if calls "
               f"are rated part by part (fine), {middle['coarse + format']:.0f} as a whole, "
               f"{middle[OUTCOME]:.0f} by the outcome alone (accuracy)", form=".0f", xlim=(0, None),
               level=(STEPS, "runs end; an arrow: never"),
               xlabel="steps; a dot for each seed; at the right means", given={OUTCOME: GREY})
    yield numbers(rows, {"steps": f"steps to {LEVEL}", "late": "accuracy, last 10 steps",
                         "fall": "largest fall of accuracy"}, ".3g", by="run")
