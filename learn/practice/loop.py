"""Grade the training loop of nano.py: run it with made-up outputs, and compare what each function
gets with what it gets in the script. Output n of question q has n + 1 tokens. Their log-probability
is q + n / 100 plus the only weight of the policy, which each update raises by 1. So each number
shows to which output it belongs, and when it was computed.
"""
import collections

import torch

from report import replaced

STEPS = 2
SIZES = {"P": 3, "G": 4, "T": 5}
# What is compared, in this order, and what is said if it differs.
SAYS = {
    "questions": "each step needs P new questions, none of them held out",
    "groups": "row p of the rewards (P, G) that advantages gets needs the rewards of G outputs to "
              "question p, sampled at random, each compared with the answer to its own question",
    "updates": "each step makes two updates, each with half of its outputs",
    "outputs": "each output must be in one of the two updates of its step",
    "gradients": "logps need a gradient and old_logps none: compute these with torch.no_grad()",
    "old_logps": "old_logps must be (B, T), for the same outputs as logps, and computed before the "
                 "updates of the step",
    "A": "A must be (B, 1), for the same outputs as logps",
    "mask": "mask must be (B, T), for the same outputs as logps",
    "rates": "the learning rate must fall from RATE by an equal amount in each step"}


class Loop:
    """Stand-ins for the functions of nano.py. found: what they get, name in SAYS -> list"""

    def __init__(self):
        self.found = {name: [] for name in SAYS}
        self.sampled = collections.Counter()            # outputs of each question

    def GPT(self):
        self.policy = torch.nn.ParameterList([torch.zeros(1)])
        return self.policy

    def sample_problem(self, rng, held_out=False, wrong=0.0):
        self.found["questions"].append(held_out)
        number = len(self.found["questions"])
        return str(number), number, "", 0

    def encode(self, texts, L):
        return torch.tensor([[int(text)] for text in texts])

    def sample(self, policy, questions, greedy=False):
        numbers = []
        for question in questions[:, 0].tolist():
            numbers.append([self.sampled[question]])
            self.sampled[question] += not greedy        # greedy outputs are all equal
        return torch.cat([questions, torch.tensor(numbers)], 1)

    def decode(self, tokens):
        return [f"{question} {n}" for question, n in tokens.tolist()]

    def verify(self, answer, text):
        question, n = map(int, text.split())
        return question + n / 100 if question == answer else -1.0

    def advantages(self, rewards):
        self.found["groups"] += rounded(rewards)
        return 2 * rewards

    def logprobs(self, policy, tokens):
        outputs = (tokens[:, :1] + tokens[:, 1:] / 100).expand(-1, SIZES["T"])
        mask = torch.arange(SIZES["T"]) <= tokens[:, 1:]
        return outputs + policy[0], mask.float()

    def surrogate_loss(self, logps, old_logps, A, mask, eps_low=0.2, eps_high=0.28):
        outputs = rounded(logps[:, 0] - self.policy[0])
        self.found["updates"].append(len(outputs))
        self.found["outputs"] += outputs
        self.found["gradients"].append([logps.requires_grad, old_logps.requires_grad])
        for name, value in ("old_logps", old_logps), ("A", A), ("mask", mask):
            self.found[name] += zip(outputs, rounded(value))
        return logps.sum()

    def descend(self, policy, optimizer, loss, learning_rate):
        self.found["rates"].append(round(learning_rate, 9))
        policy[0].data += 1


def rounded(table):
    return table.detach().double().round(decimals=3).tolist()


def traced(module):
    """Run the main of a module, which may raise anything. -> what its functions get"""
    loop = Loop()
    names = [name for name in vars(Loop) if not name.startswith("_")]
    vars(module).update({name: getattr(loop, name) for name in names} | SIZES)
    vars(module).update(dict.fromkeys(("make_base", "evaluate", "print"), lambda *_, **__: ""))

    def unused(*_, **__):
        """Stand in for the first optimizer, which takes seconds to load, and for the device."""
    with replaced(torch.optim, AdamW=unused), replaced(torch, set_default_device=unused):
        module.main(steps=STEPS)
    return {name: values if name == "rates" else sorted(values)
            for name, values in loop.found.items()}


def fault(mine, right):
    """Compare the loops of two modules. -> a list with a sentence on what differs first, or []"""
    mine, right = map(traced, (mine, right))
    return [said for name, said in SAYS.items() if mine[name] != right[name]][:1]
