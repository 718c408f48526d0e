"""Run a rung from a base that is made once for each seed, and measure it from outside.

The script itself stays unchanged. We wrap three names that it looks up in its own module
(make_base, sample, print), and the wrappers draw nothing from its random generators. A watched run
therefore gives the same numbers as the file, to the last digit.
"""
import ast
import builtins
import copy
import hashlib
import random
import re
import secrets
import time
import types
from pathlib import Path
from statistics import fmean

import torch

import common
import plumbing

CACHE = Path("path") / "bases"
MAKE_A_BASE = ("sample_problem", "encode", "Block", "GPT", "logprobs", "descend", "make_base",
               "tool", "wrote", "hint")


class Watch:
    """Execute a script as a module; self.steps gets a dict of numbers for each step it prints."""

    def __init__(self, source, seed, base_steps=1000, label=None, file="rung.py"):
        self.module = types.ModuleType("rung")
        exec(compile(source, file, "exec"), self.module.__dict__)
        self.real = dict(self.module.__dict__)
        parts = [ast.dump(node) for node in ast.parse(source).body
                 if getattr(node, "name", "") in MAKE_A_BASE]
        sizes = [self.real.get(name) for name in ("VOCABULARY", "W", "K", "T", "D", "H")]
        key = f"{parts}{sizes}{seed}{base_steps}{common.ARITHMETIC}"
        self.file = CACHE / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.pt"
        self.steps, self.batches, self.printed = [], [], []
        self.label = label              # begins each printed line; if None, nothing is printed
        for name in ("make_base", "sample", "print"):
            setattr(self.module, name, getattr(self, name))

    def make_base(self, policy, rng, steps):
        if not self.file.exists():
            self.real["make_base"](policy, rng, steps)
            states = [policy.state_dict(), rng.getstate(), torch.get_rng_state()]
            plumbing.write(self.file, states, f".{secrets.token_hex(4)}.tmp")
        weights, python_state, torch_state = torch.load(self.file, weights_only=True)
        policy.load_state_dict(weights)
        rng.setstate(python_state)
        torch.set_rng_state(torch_state)
        self.base = copy.deepcopy(policy)
        self.begun = time.process_time()

    def sample(self, policy, questions, greedy=False):
        tokens = self.real["sample"](policy, questions, greedy)
        if not greedy:
            with torch.no_grad():
                logps, mask = self.real["logprobs"](policy, tokens)
                change = (logps - self.real["logprobs"](self.base, tokens)[0]) * mask
            kl = (change.sum() / mask.sum()).item()
            self.batches.append((policy, tokens, logps, mask, kl))
        return tokens

    def print(self, *values, **options):
        text = " ".join(map(str, values))
        self.printed.append(text)
        kind = "greedy answers: " if text.startswith("held-out") else ""
        if text.startswith("step "):
            kind = "samples: "
            printed = {name: float(x) for name, x in re.findall(r"(\w+) (-?\d+[.]\d+)", text)}
            self.steps.append(self.summary() | printed)
            self.batches = []
            text += f", right {self.steps[-1]['right']:.3f}"
        if self.label is not None:
            builtins.print(f"{self.label}{kind}{text}", **options)

    def summary(self):
        """Measure the outputs of a step. -> dict: one text, and shares or means of all outputs"""
        W, G = self.module.W, getattr(self.module, "G", 1)
        (policy, *_), *_ = self.batches
        tokens, logps, mask = (torch.cat(parts) for parts in [*zip(*self.batches)][1:4])
        with torch.no_grad():
            change = (logps - self.real["logprobs"](policy, tokens)[0]) * mask
        texts = self.real["decode"](tokens)
        questions = ["".join(self.module.VOCABULARY[token] for token in row[:W])
                     for row in tokens.tolist()]
        right = torch.tensor([self.real["verify"](eval(question[:-1]), text)
                              for question, text in zip(questions, texts)])
        wrong = [question + text for question, text, x in zip(questions, texts, right) if not x]
        lengths = ((tokens[:, W:] == self.module.END).cumsum(1) == 0).sum(1) + 1
        silent = torch.isin(right.view(-1, G).mean(1), torch.tensor([0.0, 1.0]))
        return dict(
            text=wrong[0] if wrong else texts[0], samples=len(texts), right=right.mean().item(),
            think=fmean("<think>" in text for text in texts),
            wrong_tokens=((lengths * (1 - right)).sum() / (1 - right).sum().clamp(1)).item(),
            silent=silent.float().mean().item(),        # groups that are all right or all wrong
            cut=(lengths > self.module.T).float().mean().item(),        # outputs without END
            kl=fmean(kl for *_, kl in self.batches),        # KL to the base, in nats per token
            step_kl=(change.sum() / mask.sum()).item())    # KL of the batch's policy to the new one

    def run(self, seed, **sizes):
        """Run main. -> dict: steps, CPU seconds after the base, greedy accuracy before and after"""
        self.module.main(seed=seed, **sizes)
        seconds = time.process_time() - self.begun
        accuracy = [float(text.split()[3]) for text in self.printed if text.startswith("held-out")]
        return dict(steps=self.steps, seconds=seconds, accuracy=accuracy)


def run(source, seed, steps=None, label=None, file="rung.py"):
    """Run and watch a script, by default for as many steps as its main. -> dict of Watch.run"""
    torch.manual_seed(0)                # a script may draw numbers before its main sets the seed
    random.seed(0)
    sizes = {} if steps is None else dict(steps=steps)
    return Watch(source, seed, label=label, file=file).run(seed, **sizes)
