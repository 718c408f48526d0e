"""Runs of main in which all but the learning is made up: no folder, no base, an untrained policy,
and a verifier that goes by the text. Fixtures for tests of main; no tests."""
import copy
import zlib
from string import digits, punctuation

import pytest
import torch

import common

FLAGS = ("--device cpu --num_threads 1 --num_mini_batches 1 --operands 3 --hidden_size 16 "
         "--intermediate_size 16 --num_prompts 4 --num_generations 4 --max_completion_length 6")
LEARNING_RATE = "--learning_rate 0.03"          # which the policy of TRPO has not


class MadeRun:
    """Stands in for common.Run. After main: the policy, and the batches and metrics of its steps.
    The policy begins with gradients that are all `gradient`."""
    num_steps = 2
    gradient = 0.0
    latest = None

    def __init__(self, cfg, task, policy, *_):
        self.cfg = cfg
        self.task = task
        self.policy = policy
        self.resumed = {}
        self.state = {}
        self.console = common.Console()
        self.batches = []
        self.metrics = []
        MadeRun.latest = self

    def load_base(self, warm_start):
        for weight in self.policy.parameters():
            weight.grad = torch.full_like(weight, self.gradient)

    def load_reward_model(self, sample_batch):
        assert "model" not in self.cfg.reward

    def load_teacher(self, folder):
        """None, or some other policy."""
        if not folder:
            return None
        teacher = copy.deepcopy(self.policy)
        for weight in teacher.parameters():
            weight.data.mul_(1.5)
        return teacher

    def steps(self, evaluate, **parts):
        yield from range(self.num_steps)

    def log(self, batch, advantages, metrics, *_, **__):
        assert all(isinstance(value, (int, float)) for value in metrics.values())
        self.task.learn(batch)
        self.batches.append(batch)
        self.metrics.append(common.describe(batch) | metrics)

    def finish(self):
        return {}

    def weights(self):
        return torch.cat([weight.detach().flatten() for weight in self.policy.parameters()])


def half_can_earn(problem, text):
    """A verdict that completions of only half of the prompts can earn."""
    is_lucky = zlib.crc32(problem.prompt.encode()) % 2 == 1
    return float(is_lucky and zlib.crc32(text.encode()) % 2 == 1)


class Talkative(common.Arithmetic):
    """Arithmetic with an environment that repeats digits and the like."""
    call_tokens = tuple(digits + punctuation)

    def respond(self, problem, text):
        return text[-1] * 2


@pytest.fixture
def train(script, monkeypatch, talker):
    """train(flags, num_steps=2, gradient=0.0) -> the MadeRun of main with these flags."""
    monkeypatch.setattr(script, "verify", half_can_earn)
    monkeypatch.setattr(script, "GPT", talker)
    monkeypatch.setattr(common, "Run", MadeRun)

    def run_main(flags="", num_steps=2, gradient=0.0):
        monkeypatch.setattr(MadeRun, "num_steps", num_steps)
        monkeypatch.setattr(MadeRun, "gradient", gradient)
        rate = "" if "--trust_region trpo" in flags else LEARNING_RATE
        script.main(f"{FLAGS} {rate} {flags}".split())
        return MadeRun.latest
    return run_main


@pytest.fixture
def talkative(monkeypatch):
    """Makes the task arithmetic have an environment."""
    monkeypatch.setattr(common, "Arithmetic", Talkative)
