"""A task with an environment, and a policy that asks it now and then. Fixtures; no tests."""
import dataclasses

import pytest
import torch

import common
import grpo
from tasks import calls

# Tokens that the policy never samples: digits, capitals, bytes that are no ASCII, tags, PAD, and
# ids without a token. The environment says nothing else.
NEVER_SAMPLED = torch.tensor([*range(48, 58), *range(65, 91), *range(128, 264), grpo.PAD,
                              *range(266, grpo.VOCAB_SIZE)])
ASK = ord("?")


def is_inserted(tokens):
    """Which tokens the environment said. -> like tokens, bool"""
    return torch.isin(tokens, NEVER_SAMPLED) & (tokens != grpo.PAD)


class Echo(common.Task):
    """After each ? the environment says whose problem it is, and how often it was asked:
    ?<information>B2</information>. Every ? is worth one."""
    prompt_width = 4
    call_tokens = ("?",)

    def sample(self, rng):
        return common.Problem(f"{rng.randint(0, 999)}=", chr(rng.randint(65, 90)))

    def respond(self, problem, text):
        return f"<information>{problem.answer}{text.count('?')}</information>"

    def verify(self, problem, text):
        return [float(character == "?") for character in text]

    def is_correct(self, problem, verdict):
        return sum(verdict) >= 2


@pytest.fixture
def asker(script, config, talker):
    """asker(dtype, **changes) -> cfg, and a policy that asks now and then and never says what the
    environment of Echo says."""
    def make(dtype=torch.float64, **changes):
        flags = {"max_completion_length": 24, "num_prompts": 6, "temperature": 0.8}
        cfg = config(**(flags | changes))
        policy = talker(cfg).to(dtype)
        bias = policy.embed.weight.data[:, 0]
        bias[NEVER_SAMPLED] = -40.0
        bias[ASK] = 4.0
        bias[script.EOS] = 3.0
        return cfg, policy
    return make


@dataclasses.dataclass
class Played:
    """A rollout of Echo: four rows for each of six problems, or one if it is greedy."""
    cfg: common.Config
    task: common.Task
    policy: torch.nn.Module
    problems: list                      # B
    prompts: torch.Tensor               # (B, W)
    uniforms: torch.Tensor | None       # (B, T)
    out: tuple                          # tokens, mask, logps, entropy, lengths


@pytest.fixture
def played(script, asker):
    """played(greedy, task_class, **changes): a Played"""
    def make(greedy=False, task_class=Echo, **changes):
        cfg, policy = asker(**changes)
        task = task_class(cfg)
        copies = 1 if greedy else 4
        problems = common.sample_problems(task, cfg.num_prompts, 0)
        problems = [problem for problem in problems for _ in range(copies)]
        prompts = script.encode_prompts(problems, task, "cpu")
        generator = torch.Generator().manual_seed(0)
        shape = (len(problems), cfg.max_completion_length)
        uniforms = None if greedy else torch.rand(shape, generator=generator).double()
        out = calls.rollout(task, policy, prompts, problems, cfg, uniforms)
        return Played(cfg, task, policy, problems, prompts, uniforms, out)
    return make
