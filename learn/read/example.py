"""The worked example: one question and four outputs of 3, 2, 3 and 2 tokens, of which the third is
right. The main function of each script runs on it, for one batch and two passes.

No network, sampler or optimizer runs. This file defines what they would produce: log-probabilities,
outputs, and the policy after a step. The numbers on a page come from the second pass, for which the
policy has moved.
"""
import copy
import functools
import importlib
import shlex
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch import nn

import common
import plumbing
from learn.read.watch import Watch
from report import replaced

QUESTIONS = dict.fromkeys(("reinforce", "ppo", "grpo", "gspo"), "6+7=") | {"dpo": "3*4="}
ANSWERS = [["1", "2", "⏎"], ["9", "⏎"], ["1", "3", "⏎"], ["7", "⏎"]]      # tokens of each output
END = 0.0                                   # the value in slots after the end of an output
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, END], [1.0, 1.0, 1.0], [1.0, 1.0, END]])
RIGHT = torch.tensor([[0.0, 0.0, 1.0, 0.0]])
GRADED = torch.tensor([[1.0, 0.6, 0.0, 0.3]])           # dpo.py: these make two pairs
REWARDS = dict.fromkeys(QUESTIONS, RIGHT) | {"dpo": GRADED}
OLD_LOGPS = torch.tensor([[-1.6, -0.4, -0.7], [-0.9, -0.6, END],
                          [-1.4, -0.5, -0.3], [-1.1, -0.2, END]])
MOVED = torch.tensor([[0.5, -0.1, 0.1], [-0.4, 0.16, END], [0.4, -0.3, 0.1], [0.03, -0.03, END]])
REF_LOGPS = OLD_LOGPS + torch.tensor([[-0.2, 0.1, 0.1], [0.1, -0.1, END],
                                      [-0.3, 0.0, 0.1], [0.2, -0.1, END]])
ENTROPY = torch.tensor([[0.9, 0.6, 0.8], [0.7, 0.5, END], [1.0, 0.8, 0.6], [0.9, 0.4, END]])
VALUES = torch.tensor([[0.2, 0.1, 0.1], [0.3, 0.2, END], [0.4, 0.6, 0.8], [0.2, 0.1, END]])
NEW_VALUES = VALUES + torch.tensor([[-0.1, 0.1, 0.0], [-0.3, 0.1, END],
                                    [0.3, 0.1, 0.1], [0.1, 0.0, END]])
PREFERRED = REF_LOGPS + torch.tensor([[-0.4, -0.2, -0.2], [-3.5, -2.5, END],    # for dpo.py
                                      [-4.0, -3.0, -2.0], [-0.9, -0.6, END]])
SQUARED_GRADIENTS = torch.tensor([[2.0, 1.0, 4.0, 1.0]])

# The flags with which a page runs its script, if they differ from the defaults.
PAPER = {"reinforce": "--baseline mean", "grpo": "--beta 0.04"}


# ---- replacements for a run ------------------------------------------------------------------

class Network(nn.Module):
    """Replaces a policy or a critic. It holds one number for each token of the example, and other
    numbers after an optimizer step. A copy of it is the base."""

    def __init__(self, symbol, numbers, then):
        super().__init__()
        self.symbol = symbol                            # name of the numbers, such as log π
        self.numbers = nn.Parameter(numbers.clone())
        self.numbers.then = then

    def forward(self, prompts, tokens):
        return self.numbers[prompts[:, 0], :tokens.shape[1]]    # a prompt holds its row number

    def __deepcopy__(self, memo):
        return Network(self.symbol, REF_LOGPS, REF_LOGPS)


class Step(torch.optim.SGD):
    """Replaces an optimizer: a step sets the network's numbers to those given in `then`."""

    def __init__(self, parameters, **_):
        super().__init__(parameters)

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.then.clone()


def score(network, prompts, tokens, _temperature):
    """Replaces score of the scripts: log-probabilities and entropies. -> (B, T), (B, T)"""
    logps = network(prompts, tokens)
    entropy = ENTROPY[prompts[:, 0], :tokens.shape[1]]
    return logps, entropy - (logps - logps.detach())    # entropy falls as logps rise


def make_batch(rewards):
    """The four outputs as a batch. -> common.Batch"""
    return common.Batch(
        tokens=torch.tensor([[5, 6, 7], [5, 7, 0], [8, 6, 7], [6, 7, 0]]), mask=MASK.clone(),
        logps=OLD_LOGPS.clone(), entropy=ENTROPY, lengths=MASK.sum(dim=1).long(),
        is_truncated=torch.tensor([False, False, False, True]), prompts=torch.arange(4)[:, None],
        problems=[common.Problem("", "")] * 4, texts=[""] * 4, verified=[0.0, 0.0, 1.0, 0.0],
        is_correct=RIGHT > 0, rewards=rewards.clone())


@functools.cache
def config(name, flags=""):
    """The configuration of a run of the example. -> Config of the script"""
    small = ("--device cpu --num_prompts 1 --num_generations 4 --max_completion_length 4 "
             "--num_iterations 2 --num_mini_batches 1 --max_grad_norm 0.001 --task arithmetic "
             "--max_steps 1")
    args = shlex.split(f"{small} {PAPER.get(name, '')} {flags}")
    return plumbing.parse_flags(importlib.import_module(name).Config, args)


def run(lesson, flags):
    """Call main of a script on the example, with extra flags. -> list of watch.Call"""
    name = lesson.name
    script = lesson.script
    start, then = OLD_LOGPS, OLD_LOGPS + MOVED
    if name == "dpo":                                   # where the policy starts as the base
        start, then = REF_LOGPS, PREFERRED
    cfg = config(name, flags)
    task = common.Arithmetic(script.verify)
    networks = []
    nothing = lambda *_, **__: None
    run = SimpleNamespace(cfg=cfg, task=task, resumed={}, state={}, parts={}, step=0,
                          begin=lambda _: copy.deepcopy(networks[0]),     # the base
                          start=nothing, log=nothing, finish=nothing)

    def make(*network):
        networks.append(Network(*network))
        return networks[-1]

    def gradient(loss):
        """The gradient of a loss, and the name of the numbers that it depends on. -> str, (4, 3)"""
        numbers = [network.numbers for network in networks]
        parts = torch.autograd.grad(loss.sum(), numbers, retain_graph=True, allow_unused=True)
        return next((network.symbol, part) for network, part in zip(networks, parts)
                    if part is not None)

    stand_ins = {"score": score, "sample_batch": lambda *_, **__: make_batch(REWARDS[name]),
                 "GPT": lambda cfg: make("log π", start, then),
                 "Critic": lambda policy: make("V", VALUES, NEW_VALUES),
                 "squared_gradient_norms": lambda *_: SQUARED_GRADIENTS}
    used = {name: value for name, value in stand_ins.items() if hasattr(script, name)}
    with (replaced(script, **used), replaced(common, load_task=lambda *_: task),
          replaced(plumbing, AdamW=Step, Run=lambda *_: nullcontext(run),
                   parse_flags=lambda *_: cfg),
          Watch(lesson, gradient) as watch):
        script.main([])
    return watch.calls
