"""Run a rung from a base that is made once for each seed, and measure it from outside.

The script itself stays unchanged. We wrap four names that it looks up in its own module
(sample_problem, make_base, sample, print), and the wrappers draw nothing from its random
generators. A watched run therefore gives the same numbers as the file, to the last digit.
"""
import ast
import builtins
import copy
import hashlib
import random
import re
import secrets
import time
from pathlib import Path
from statistics import fmean

import torch

import common
import plumbing
from vectors.edits import load

CACHE = Path("path") / "bases"
MAKE_A_BASE = ("sample_problem", "encode", "Block", "GPT", "logprobs", "descend", "make_base",
               "tool", "wrote", "hint", "run")


class Watch:
    """Execute a script as a module; self.steps gets a dict of numbers for each step it prints."""

    def __init__(self, source, seed, label=None, file="rung.py", has_kl=True, evaluates=True):
        self.source = source
        self.seed = seed
        self.label = label              # begins each printed line; if None, nothing is printed
        self.has_kl = has_kl            # whether a step has KLs, which need further forward passes
        self.steps, self.batches, self.accuracy = [], [], []
        self.answers = {}               # question -> what its verifier needs
        self.module = load(source, "rung", file)
        self.real = dict(self.module.__dict__)
        for name in ("sample_problem", "make_base", "print", "sample"):
            setattr(self.module, name, getattr(self, name))
        if not evaluates:
            self.module.evaluate = lambda policy: "not evaluated"

    def sample_problem(self, *args, **kwargs):
        problem = self.real["sample_problem"](*args, **kwargs)
        self.answers[problem[0]] = problem[1]
        return problem

    def base(self, steps):
        """Name the file of a base by all that shapes it. -> Path"""
        parts = [ast.dump(node) for node in ast.parse(self.source).body
                 if getattr(node, "name", "") in MAKE_A_BASE]
        sizes = [self.real.get(name) for name in ("VOCABULARY", "COMPUTE", "W", "K", "T", "D", "H")]
        key = f"{parts}{sizes}{self.seed}{steps}{common.ARITHMETIC}"
        return CACHE / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.pt"

    def make_base(self, policy, rng, steps):
        file = self.base(steps)
        if not file.exists():
            self.real["make_base"](policy, rng, steps)
            states = [policy.state_dict(), rng.getstate(), torch.get_rng_state()]
            plumbing.write(file, states, f".{secrets.token_hex(4)}.tmp")
        weights, python_state, torch_state = torch.load(file, weights_only=True)
        policy.load_state_dict(weights)
        rng.setstate(python_state)
        torch.set_rng_state(torch_state)
        self.start = copy.deepcopy(policy)
        self.begun = time.process_time()

    @torch.no_grad()
    def sample(self, policy, questions, greedy=False):
        tokens = self.real["sample"](policy, questions, greedy)
        if not greedy:
            scored = self.real["logprobs"](policy, tokens) if self.has_kl else ()
            self.batches.append((policy, tokens, *scored))
        return tokens

    def print(self, *values, **options):
        text = " ".join(map(str, values))
        kind = ""
        if text.startswith("held-out") and "not evaluated" not in text:
            kind = "greedy answers: "
            self.accuracy.append(float(text.split()[3]))
        elif text.startswith("step "):
            kind = "samples: "
            printed = {name: float(x) for name, x in re.findall(r"(\w+) (-?\d+[.]\d+)", text)}
            printed = self.summary() | printed
            self.batches = []
            text += f", right {printed['right']:.3f}"
            self.steps.append(printed)
        if self.label is not None:
            builtins.print(f"{self.label}{kind}{text}", **options)

    @torch.no_grad()
    def summary(self):
        """Measure the outputs of a step. -> dict: one text, and shares or means of all outputs"""
        W, G = self.module.W, getattr(self.module, "G", 1)
        tokens = torch.cat([batch[1] for batch in self.batches])
        texts = self.real["decode"](tokens)
        questions = ["".join(self.module.VOCABULARY[token] for token in row[:W])
                     for row in tokens.tolist()]
        right = torch.tensor([self.real["verify"](self.answers[question], text)
                              for question, text in zip(questions, texts)])
        hides = torch.tensor(["x" in question for question in questions])      # a number
        admits = torch.tensor([text.endswith("<answer>?</answer>") for text in texts])
        made_up = (hides & ~admits & (right == 0)).sum() / hides.sum().clamp(1)
        right = right.where(~hides, admits.to(right))       # what nobody can know is right by luck
        wrong = [question + text for question, text, x in zip(questions, texts, right) if not x]
        lengths = ((tokens[:, W:] == self.module.END).cumsum(1) == 0).sum(1) + 1
        silent = torch.isin(right.view(-1, G).mean(1), torch.tensor([0.0, 1.0]))
        return dict(
            text=wrong[0] if wrong else texts[0], samples=len(texts), right=right.mean().item(),
            think=fmean("<think>" in text for text in texts),
            wrong_tokens=((lengths * (1 - right)).sum() / (1 - right).sum().clamp(1)).item(),
            silent=silent.float().mean().item(),        # groups that are all right or all wrong
            cut=(lengths > self.module.T).float().mean().item(),        # outputs without END
            **{"made_up": made_up.item()} if hides.any() else {},
            **self.kls() if self.has_kl else {})

    def kls(self):
        """Measure how far the policy is from the base, and how far a step moved it. -> dict"""
        policy = self.batches[0][0]             # with the weights that it has after the step
        tokens, logps, mask = (torch.cat(parts) for parts in [*zip(*self.batches)][1:])

        def kl(other, tokens, logps, mask):
            change = (logps - self.real["logprobs"](other, tokens)[0]) * mask
            return (change.sum() / mask.sum()).item()           # in nats per token
        return dict(kl=fmean(kl(self.start, *batch[1:]) for batch in self.batches),
                    step_kl=kl(policy, tokens, logps, mask))


def run(source, seed, label=None, file="rung.py", has_kl=True, evaluates=True, **sizes):
    """Run and watch a script, whose main gets the sizes, such as its number of steps.
    has_kl: whether to measure KLs; evaluates: whether to evaluate greedy answers. Without them, a
    run takes less time. -> dict: steps, CPU seconds after the base, greedy accuracy before and
    after"""
    torch.manual_seed(0)                # a script may draw numbers before its main sets the seed
    random.seed(0)
    watch = Watch(source, seed, label, file, has_kl, evaluates)
    watch.module.main(seed=seed, **sizes)
    seconds = time.process_time() - watch.begun
    return dict(steps=watch.steps, seconds=seconds, accuracy=watch.accuracy)
