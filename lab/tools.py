"""Tools: tokens that the policy did not write, and rewards for calls

Claim. What a tool says must not be learned: with these tokens masked Search-R1 gets 0.431, without
0.343; GRPO learns faster than PPO there, and PPO is more stable (2503.09516). Without a tool RL
ends lower (ReTool, 2504.11536). Calls that are rated part by part teach more than those that have
to be right as a whole, and rewards for length hurt: 53.0 without, 48.9 with a fixed target, 48.2
with one that grows (ToolRL, 2504.13958).

Prediction. (We knew the table of lookup in docs/tasks.md, and one run.) Names come by chance, so no
policy foresees them, and their part of the first gradient is the longer one. Learned, they delay
the rest, but all ends alike, except that the policy then also makes up what the tool would say,
where it is silent. Without a tool one guess in 675 is right. PPO's critic has everything to learn,
so PPO is slower; neither collapses. Fine is faster than coarse and than the outcome, as it tells
wrong outputs apart. A length reward of 0.1 does nothing beside it, as a needless call costs more
than its length earns. Beside accuracy the call costs nothing, and where all of a group are right,
the division by the std makes much of little, so that such calls spread. (Pilots of one seed, run
after this was written: one needless call in 4608 outputs; the tool's part of the gradient 3.3 times
as long; in five steps, tool tokens learned was the slower one.)

Method. lookup asks for a boss (one hop) or a boss's boss (two), whom only a call can tell. grpo.py
with batches of 16 problems, 36 steps from one base; ppo.py with the same. No tool: the tool is
silent in training. Made up: the trained policy meets a silent tool, calls it, and writes the block
of information itself. Needless are calls beyond the hops. What one pays is computed from rewards of
two right outputs. The first gradient, on 64 problems with tool tokens learned, is the sum of two
parts, one of the tokens of each kind. A fall is from the best mean of five steps to a later one.
"""
import dataclasses
import itertools
import statistics

import numpy
import torch

import common
import grpo
from lab.draw import GREY, curves, dots
from lab.experiment import Experiment, numbers, steps_to_level
from lab.training import clear_gradient, flat_gradient, load_base, training
from lab.verdict import OURS, Claim

SEARCH = "[Search-R1](https://arxiv.org/abs/2503.09516)"
RETOOL = "[ReTool](https://arxiv.org/abs/2504.11536)"
TOOLRL = "[ToolRL](https://arxiv.org/abs/2504.13958)"
STEPS = 36
LEVEL = 0.9                                     # of accuracy, to which steps are counted
LUCK = 1 / 675                                  # to guess one of the other names
ASKED = 64                                      # problems of the gradient and of the silent tool
GAIN = 0.02                                     # of a share, what counts as one
FLAGS = "--task lookup --num_prompts 16"
PPO = (f"ppo.py {FLAGS} --max_steps {STEPS} --stop_at 2 --eval_steps 1000 --num_eval_problems 1 "
       "--num_eval_samples 1")
OUTCOME = "accuracy"
LEARNED = "tool tokens learned"
NO_TOOL = "no tool"
RUNS = {OUTCOME: "", LEARNED: "--no-mask_tool_tokens", NO_TOOL: ""}        # of grpo.py
RUNS |= {reward.replace("_", " ").replace("+", " + "): f"--reward {reward}" for reward in (
    "fine", "coarse+format", "fine+length", "fine+growing_length", "accuracy+length")}
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(8))
EXPERIMENT.runs("critic", {"PPO": PPO}, ["accuracy"])


# ---- 1. what is rewarded, and what is learned ------------------------------------------------

def needless_call_pays(name, step=STEPS):
    """How much more a right output earns if it goes on to ask for the boss of the boss. -> float"""
    cfg = common.parse_flags(grpo.Config, f"{FLAGS} {RUNS[name]}".split())
    task = common.load_task(cfg, grpo.verify)
    needed = "<search>ka</search><information>mi</information>"
    needless = "<search>mi</search><information>to</information>"
    problem = common.Problem("boss of ka?", "mi", needed, 1, task="lookup")
    rewards = []
    for thought in (needed + needless, needed):
        text = f"<think>{thought}</think><answer>mi</answer>"
        rewards.append(task.reward(problem, text, task.verify(problem, text), step))
    return rewards[0] - rewards[1]


def gradient_parts(policy, batch, cfg):
    """The two parts of the gradient where the tool's tokens are learned: that of the tokens of the
    policy, and that of the tool's. -> {word: norm}"""
    A = grpo.advantages(batch.rewards, cfg.scale_rewards).view(-1, 1)           # (B, 1)
    slots = torch.arange(batch.tokens.shape[1])
    is_token = (slots < batch.lengths[:, None]).to(batch.mask)                  # (B, T)
    learned = dataclasses.replace(batch, mask=is_token)
    norms = {}
    for word, weights in {"own": batch.mask, "tool": 1 - batch.mask}.items():
        clear_gradient(policy)
        grpo.backward(policy, learned, None, weights * A, torch.arange(len(A)), cfg)
        norms[word] = flat_gradient(policy).norm().item()
    return norms


@EXPERIMENT.measure(["base"])
def gradients(seed, case):
    cfg, task, policy = load_base(grpo, f"{FLAGS} --num_prompts {ASKED} --seed {seed}")
    return gradient_parts(policy, grpo.sample_batch(policy, task, cfg, 0), cfg)


# ---- 2. training -----------------------------------------------------------------------------

def silence(task):
    """The tool says nothing from now on."""
    task.respond = lambda problem, text: ""


def needless_calls(batch):
    """Calls beyond the hops of the question, per output. -> float"""
    counts = [max(0, text.count("</search>") - problem.difficulty)
              for text, problem in zip(batch.texts, batch.problems)]
    return statistics.mean(counts)


def made_up(texts):
    """Of the outputs that call a silent tool, the share that writes what it says. -> float"""
    calling = [text for text in texts if "</search>" in text]
    return sum("<information>" in text for text in calling) / max(1, len(calling))


@EXPERIMENT.measure(RUNS)
def learning(seed, name, num_steps=STEPS):
    """Train from the base: step by step, and what is made up in the end."""
    cfg, task, policy = load_base(grpo, f"{FLAGS} {RUNS[name]} --seed {seed}")
    if name == NO_TOOL:
        silence(task)
    found = {"accuracy": [], "needless": []}
    for batch, _ in itertools.islice(training(grpo, cfg, task, policy), num_steps):
        found["accuracy"].append(batch.is_correct.double().mean().item())
        found["needless"].append(needless_calls(batch))
    silence(task)
    asking = dataclasses.replace(cfg, num_prompts=ASKED)
    batch = grpo.sample_batch(policy, task, asking, num_steps)
    return found | {"made up": made_up(batch.texts)}


# ---- 3. what was found -----------------------------------------------------------------------

def fall(accuracy):
    """From the best mean of five steps to the lowest one after it. (S, T) -> (S,)"""
    means = numpy.lib.stride_tricks.sliding_window_view(accuracy, 5, axis=1).mean(axis=-1)
    return (numpy.maximum.accumulate(means, axis=1) - means).max(axis=1)


def page(critic, gradients, learning):
    runs = learning | critic
    steps = {name: numpy.array([steps_to_level(row, LEVEL) for row in found["accuracy"]])
             for name, found in runs.items()}
    late = {name: found["accuracy"][:, -10:].mean(axis=1) for name, found in runs.items()}
    needless = {name: found["needless"][:, -10:].mean(axis=1) for name, found in learning.items()}
    [of_base] = gradients.values()
    said = (f"{steps[LEARNED].mean():.0f} steps to {LEVEL:.0%} right, masked "
            f"{steps[OUTCOME].mean():.0f}")
    delayed = Claim(f"tool tokens learned: more steps to an accuracy of {LEVEL}", SEARCH,
                    steps[LEARNED] / steps[OUTCOME], at_least=1.1, times=True,
                    shown=f"Learning what a tool says delays the rest: {said}",
                    contradicted=f"Learning what a tool says delays nothing: {said}",
                    undecided=f"Whether learning what a tool says delays the rest: {said}")
    yield delayed
    yield Claim("tool tokens masked: a higher late accuracy", SEARCH, late[OUTCOME] - late[LEARNED],
                at_least=GAIN)
    yield Claim("learned, the tool's tokens have the longer part of the first gradient", OURS,
                of_base["tool"] / of_base["own"], at_least=1.1, times=True)
    yield Claim("tool tokens learned: more is made up where the tool is silent", OURS,
                learning[LEARNED]["made up"] - learning[OUTCOME]["made up"], at_least=0.05)
    yield Claim("without a tool, less is right in the end", RETOOL, late[NO_TOOL] - late[OUTCOME],
                at_most=-GAIN)
    yield Claim("without a tool, no more is right than twice what a guess has", OURS, late[NO_TOOL],
                at_most=2 * LUCK)
    yield Claim(f"PPO needs more steps to {LEVEL} than GRPO", SEARCH, steps["PPO"] / steps[OUTCOME],
                at_least=1.1, times=True)
    yield Claim("GRPO falls further than PPO", SEARCH,
                fall(runs[OUTCOME]["accuracy"]) - fall(runs["PPO"]["accuracy"]), at_least=GAIN)
    for name in ("coarse + format", OUTCOME):
        yield Claim(f"{name}: more steps to {LEVEL} than fine", TOOLRL, steps[name] / steps["fine"],
                    at_least=1.1, times=True)
    for name in ("fine + length", "fine + growing length"):
        yield Claim(f"{name}: a lower late accuracy than fine", TOOLRL, late[name] - late["fine"],
                    at_most=-GAIN)
        yield Claim(f"{name}: a needless call costs", OURS, needless_call_pays(name), at_most=0,
                    exact=True, unit="of a reward")
    beside = "accuracy + length"
    yield Claim(f"{beside}: a needless call pays", OURS, needless_call_pays(beside), at_least=0.01,
                exact=True, unit="of a reward")
    yield Claim(f"{beside}: needless calls become more frequent", OURS,
                needless[beside] - needless[OUTCOME], at_least=GAIN, unit="calls an output")

    shown = {name: runs[name]["accuracy"] for name in (OUTCOME, LEARNED, "PPO", NO_TOOL)}
    yield curves(shown, delayed.finding, ylabel="accuracy", ylim=(0, 1.02))
    rows = {name: values for name, values in steps.items() if name != NO_TOOL}
    yield dots(rows, f"Steps to {LEVEL:.0%} right: {steps['fine'].mean():.0f} if calls are rated "
               f"part by part, {steps['coarse + format'].mean():.0f} as a whole, "
               f"{steps[OUTCOME].mean():.0f} by the outcome alone", form=".0f",
               given={OUTCOME: GREY}, xlim=(0, None), xlabel="steps; a dot for each seed")
    rows = {name: {"steps": steps[name], "late": late[name], "fall": fall(found["accuracy"])}
            for name, found in runs.items()}
    yield numbers(rows, {"steps": f"steps to {LEVEL}", "late": "late accuracy", "fall": "fall"},
                  by="run")
    rows = {name: {"needless": needless[name], "made up": learning[name]["made up"],
                   "pays": needless_call_pays(name)} for name in RUNS}
    yield numbers(rows, {"needless": "late needless calls", "made up": "made up",
                         "pays": "a needless call pays"}, by="run of grpo.py")
