"""Grade the training loop of nano.py: run it with made-up outputs, and look at what each function
gets. Output n of question q has n + 1 tokens. Their log-probability is q + n / 100 plus the only
weight of the policy, which each update raises by 1. So each number shows to which output it
belongs, and when it was computed.
"""
import collections

import torch

STEPS = 2
SIZES = {"P": 3, "G": 4, "T": 5}


class Loop:
    """Stand-ins for the functions of nano.py, which keep what they get.

    drawn: for each question, whether it is held out; is_greedy: whether any sample was
    groups: the rewards of each call of `advantages`; updates: a dict of values for each update
    """

    def __init__(self):
        self.policy = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.policy.weight)
        self.drawn = []
        self.is_greedy = False
        self.groups = []
        self.updates = []

    def sample_problem(self, rng, held_out=False, wrong=0.0):
        self.drawn.append(held_out)
        return str(len(self.drawn)), len(self.drawn), "", 0

    def encode(self, texts, L):
        return torch.tensor([[int(text)] for text in texts])

    def sample(self, policy, questions, greedy=False):
        self.is_greedy |= greedy
        count = collections.Counter()
        numbers = []
        for question in questions[:, 0].tolist():
            numbers.append([count[question]])
            count[question] += 1
        return torch.cat([questions, torch.tensor(numbers)], 1)

    def decode(self, tokens):
        return [f"{question} {n}" for question, n in tokens.tolist()]

    def verify(self, answer, text):
        question, n = map(int, text.split())
        return question + n / 100 if question == answer else -1.0

    def advantages(self, rewards):
        self.groups.append(rewards)
        return 2 * rewards

    def logprobs(self, policy, tokens):
        outputs = (tokens[:, :1] + tokens[:, 1:] / 100).expand(-1, SIZES["T"])
        mask = torch.arange(SIZES["T"]) <= tokens[:, 1:]
        return outputs + policy.weight, mask.float()

    def surrogate_loss(self, logps, old_logps, A, mask, eps_low=0.2, eps_high=0.28):
        self.updates.append({"logps": logps, "old_logps": old_logps, "A": A, "mask": mask,
                             "weight": self.policy.weight.item()})
        return logps.sum()

    def descend(self, policy, optimizer, loss, learning_rate):
        self.updates[-1]["rate"] = learning_rate
        policy.weight.data += 1


def faults(module):
    """Run the main of a module, which may raise anything, and say what its loop does wrong.
    -> iterator of sentences"""
    loop = Loop()
    names = [name for name in dir(Loop) if not name.startswith("_")]
    vars(module).update({name: getattr(loop, name) for name in names} | SIZES)
    vars(module).update(GPT=lambda: loop.policy, make_base=lambda *_: None, evaluate=lambda _: "",
                        print=lambda *_, **__: None)
    module.main(steps=STEPS)
    num_outputs = SIZES["P"] * SIZES["G"]
    if loop.drawn != [False] * STEPS * SIZES["P"]:
        yield "each step needs P new questions, none of them held out"
    if loop.is_greedy:
        yield "greedy outputs of a question are all equal: sample them"
    for rewards in loop.groups:
        if rewards.shape != (SIZES["P"], SIZES["G"]):
            yield f"advantages gets rewards of shape {tuple(rewards.shape)} instead of (P, G)"
        elif rewards.min() < 0:
            yield "an output is compared with the answer to another question"
        elif (rewards.floor() != rewards[:, :1].floor()).any():
            yield "a group has outputs to several questions"
    if len(loop.updates) != 2 * STEPS or any("rate" not in update for update in loop.updates):
        yield f"{STEPS} steps make {len(loop.updates)} updates instead of {2 * STEPS}"
        return
    for i, update in enumerate(loop.updates):
        yield from faults_of(update, first=i - i % 2)
        if abs(update["rate"] - module.RATE * (1 - i // 2 / STEPS)) > 1e-9:
            yield "the learning rate must fall from RATE by an equal amount in each step"
    for pair in zip(loop.updates[::2], loop.updates[1::2]):
        outputs = torch.cat([update["logps"][:, 0] - update["weight"] for update in pair])
        if len(outputs.round(decimals=2).unique()) < num_outputs or len(outputs) > num_outputs:
            yield "each output must be in one of the two updates of its step"


def faults_of(update, first):
    """Say what is wrong with the arguments of the loss. first: the weight when the step began.
    -> iterator of sentences"""
    if update["old_logps"].requires_grad:
        yield "old_logps have a gradient: compute them with torch.no_grad()"
    if not update["logps"].requires_grad:
        yield "logps have no gradient, so the policy learns nothing"
    outputs = update["logps"][:, :1].detach() - update["weight"]
    n = ((outputs % 1) * 100).round()
    should = {"old_logps": (outputs + first).expand_as(update["logps"]), "A": 2 * outputs,
              "mask": (torch.arange(SIZES["T"]) <= n).float()}
    why = {"old_logps": ", or computed after an update", "A": "", "mask": ""}
    for name, value in should.items():
        if update[name].shape != value.shape:
            yield f"{name} has the shape {tuple(update[name].shape)}, not {tuple(value.shape)}"
        elif not torch.allclose(update[name].detach(), value, atol=1e-3):
            yield f"{name} is that of other outputs than logps{why[name]}"
