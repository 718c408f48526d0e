"""Starting points for tests of an update: a scene with a ragged batch, batches of chosen contents,
one way to call backward and update of every script, and short runs of main. No tests."""
import copy
import dataclasses
import functools
import inspect
import zlib
from types import ModuleType

import pytest
import torch
from conftest import TINY, f64
from small_runs import arguments

import common
from report import observers

NUM_ROWS = 14           # rows of the scene's batch: seven groups of two
ADVANTAGES = [1.5, 0, -1, 0.3, 0, 0, 2, -0.7, 0.1, -2, 0, 1, -0.4, 0.8]


def weights(model):
    """Join all weights of a model. (n,)"""
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def gradients(model):
    """Join the gradients that backward has stored in a model. (n,)"""
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def gradient_of(loss, model):
    """Compute the gradient of a loss, without storing it in the model. (n,)"""
    found = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in found])


def made_batch(script, prompts, tokens, mask, logps, G=1, rewards=None):
    """Make a batch with known contents: a row for each prompt, in groups of G. -> Batch"""
    tokens = torch.tensor(tokens)
    lengths = mask.sum(dim=1).long()
    rewards = torch.zeros(len(tokens) // G, G) if rewards is None else rewards
    texts = [script.decode([i for i in ids[:n] if i != script.EOS])
             for ids, n in zip(tokens.tolist(), lengths.tolist())]
    return common.Batch(
        tokens, mask, logps * mask, 0.5 * mask, lengths,
        is_truncated=(tokens != script.EOS).all(dim=1), prompts=torch.tensor(prompts),
        problems=[common.Problem("1=", "1")] * len(tokens), texts=texts,
        verified=rewards.flatten().tolist(), rewards=rewards, is_correct=rewards == 1,
        values=0 * mask)


def call(function, **known):
    """Call a script's function with its required arguments, from `known`."""
    needed = [name for name, one in inspect.signature(function).parameters.items()
              if one.default is one.empty]
    return function(**{name: known[name] for name in needed})


@dataclasses.dataclass
class Scene:
    """A policy and a batch to learn from, in float64. For dpo.py, the advantages of the first
    tokens serve as rewards, and it learns from all pairs that they give."""
    script: ModuleType
    cfg: common.Config
    policy: torch.nn.Module
    reference: torch.nn.Module      # weights differ from the policy's
    batch: common.Batch             # ragged rows, sampled by an older policy
    A: torch.Tensor                 # (B, T), some rows are zero

    def ref_logps(self):
        batch = self.batch
        with torch.no_grad():
            return self.script.score(
                self.reference, batch.prompts, batch.tokens, self.cfg.temperature)[0]

    def known(self, A, changes):
        """Collect all arguments that functions of a script may need. -> dict"""
        cfg = dataclasses.replace(self.cfg, **changes)
        A = self.A if A is None else A
        found = {"policy": self.policy, "reference": self.reference, "batch": self.batch, "A": A,
                 "cfg": cfg, "ref_logps": self.ref_logps(), "penalty_coef": 0.5}
        if self.script.__name__ == "dpo":
            groups = A[:, 0].view(-1, cfg.num_generations)
            found["chosen"], found["rejected"] = self.script.preferences(groups)
        return found

    def backward(self, rows, A=None, **changes):
        """Compute what one optimizer step computes. -> metrics, gradient"""
        for weight in self.policy.parameters():
            weight.grad = torch.zeros_like(weight)
        metrics = call(self.script.backward, rows=rows, **self.known(A, changes))
        return metrics, gradients(self.policy)

    def update(self, optimizer=None, step=0, A=None, **changes):
        """Update the policy, by plain gradient descent if no optimizer is given. -> metrics"""
        known = self.known(A, changes)
        optimizer = optimizer or torch.optim.SGD(
            self.policy.parameters(), known["cfg"].learning_rate)
        return call(self.script.update, optimizer=optimizer, step=step, **known)


@pytest.fixture
def scene(script, config, talker, load_task):
    """scene(**changes): a Scene with NUM_ROWS rows."""
    def make(**changes):
        flags = {"num_prompts": 7, "num_generations": 2, "temperature": 0.7}
        if script.__name__ in ("ppo", "grpo", "gspo"):
            flags |= {"epsilon": 0.2, "epsilon_high": 0.28}
        cfg = config(**(flags | changes))
        policy = talker(cfg).double()
        reference = copy.deepcopy(policy)
        generator = torch.Generator().manual_seed(0)
        for weight in reference.parameters():
            weight.data += 0.1 * torch.randn(weight.shape, generator=generator).to(weight)
        batch = script.sample_batch(policy, load_task(cfg), cfg, 0)
        assert len(set(batch.lengths.tolist())) > 3             # similar lengths would test little
        noise = torch.randn(NUM_ROWS, 8, generator=generator).double()
        batch.logps.add_(0.4 * noise * batch.mask)
        scale = 1 + torch.rand(NUM_ROWS, 8, generator=generator).double()
        A = f64(ADVANTAGES)[:, None] * batch.mask * scale
        return Scene(script, cfg, policy, reference, batch, A)
    return make


# ---- short runs of main ----------------------------------------------------------------------

class Record:
    """An observer that records the run, and the batches and metrics of its steps."""

    def start(self, run):
        self.run = run
        self.batches = []
        self.metrics = []

    def step(self, run, batch, advantages, metrics):
        self.batches.append(batch)
        self.metrics.append(dict(metrics))


def half_can_earn(problem, text):
    """Return 1.0 for half of the completions to half of the prompts, and 0.0 for the rest."""
    is_lucky = zlib.crc32(problem.prompt.encode()) % 2 == 1
    return float(is_lucky and zlib.crc32(text.encode()) % 2 == 1)


@pytest.fixture
def train(script, monkeypatch, talker, own_folder):
    """train(flags="", num_steps=2): runs main with an untrained policy, and with half_can_earn as
    its verifier. -> Record"""
    monkeypatch.setattr(script, "verify", functools.wraps(script.verify)(
        lambda problem, text: half_can_earn(problem, text)))
    monkeypatch.setattr(script, "GPT", talker)
    others = observers.observers

    def run_main(flags="", num_steps=2):
        record = Record()
        monkeypatch.setattr(observers, "observers", lambda *args: [*others(*args), record])
        instant = {"base_steps": 0, "max_steps": num_steps, "learning_rate": 0.03,
                   "max_completion_length": 6, "num_eval_problems": 2, "num_eval_samples": 2}
        script.main([*arguments(TINY | instant), *flags.split()])
        return record
    return run_main
