"""Test scoring, which reads each prompt once. The model's code is identical in all scripts, so
these tests use grpo.py. test_export.py compares the model with a Llama."""
import pytest
import torch
from conftest import TINY, close

import common
import grpo
import ppo


def test_gpt_is_what_the_contract_says():
    cfg = grpo.Config(**(TINY | {"hidden_size": 32}))
    assert grpo.GPT(cfg)(torch.zeros(2, 5, dtype=torch.long)).shape == (2, 5, 320)
    assert not any(name.endswith("bias") for name in grpo.GPT(cfg).state_dict())
    assert issubclass(grpo.Config, common.Config)


# ---- scoring, which reads each prompt once ---------------------------------------------------

# For each row, the index of the prompt (of four) that it continues.
every_grouping = pytest.mark.parametrize(
    "groups", [[0], [0, 0, 0], [2, 0, 1], [1, 1, 2, 2, 2], [3]], ids=str)


class Case:
    """A small policy in float64, and rows that continue its four prompts by T tokens."""

    def __init__(self, groups, T, num_key_value_heads=2):
        cfg = grpo.Config(device="cpu", hidden_size=16, intermediate_size=16,
                          num_key_value_heads=num_key_value_heads)
        self.policy = grpo.GPT(cfg).double()
        self.policy.embed.weight.data *= 20             # so that logits differ
        generator = torch.Generator().manual_seed(T)
        self.tokens = torch.randint(grpo.VOCAB_SIZE, (len(groups), T), generator=generator)
        prompts = torch.randint(grpo.VOCAB_SIZE, (4, 10), generator=generator)
        self.prompts = prompts[groups]

    def score(self, temperature=1.0):
        return grpo.score(self.policy, self.prompts, self.tokens, temperature)

    def score_in_full(self, temperature=1.0):
        """Compute what `score` does, but read every prompt again with every completion."""
        sequences = torch.cat([self.prompts, self.tokens], dim=1)
        logits = self.policy(sequences[:, :-1])[:, self.prompts.shape[1] - 1:]
        return grpo.logprobs(logits, self.tokens, temperature)


@pytest.mark.parametrize("T", [1, 2, 8])
@every_grouping
def test_scores_and_their_gradients_are_those_of_reading_prompt_and_completion_in_full(groups, T):
    for num_key_value_heads in (1, 2, 4):
        case = Case(groups, T, num_key_value_heads)
        logps, entropy = case.score(0.7)
        close((logps, entropy), case.score_in_full(0.7))
        assert logps.shape == case.tokens.shape and (logps < 0).all()

    factors = torch.randn(2, *case.tokens.shape, generator=torch.Generator().manual_seed(0))
    weights = list(case.policy.parameters())

    def gradients(scores):
        return torch.autograd.grad((factors.double() * torch.stack(scores)).sum(), weights)
    found = gradients(case.score())
    close(found, gradients(case.score_in_full()))
    assert max(gradient.abs().max() for gradient in found) > 0.1


def test_the_critic_reads_a_prompt_once_and_its_values_are_those_of_reading_all():
    case = Case([1, 0, 1, 1], 5)
    critic = ppo.Critic(case.policy)
    assert (critic(case.prompts, case.tokens) == 0).all()       # its head starts at 0
    critic.head.data.copy_(torch.linspace(-1, 1, 16))
    hidden = critic.gpt.hidden(torch.cat([case.prompts, case.tokens], dim=1))
    expected = hidden[:, 9:-1] @ critic.head
    reads = []                                                  # number of tokens per call
    critic.gpt.norm.register_forward_hook(
        lambda norm, hidden, output: reads.append(output[..., 0].numel()))
    close(critic(case.prompts, case.tokens), expected)
    assert sum(reads) == 2 * 10 + 4 * 4
