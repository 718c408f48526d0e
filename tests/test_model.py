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

def make_case(groups, T, num_key_value_heads=2):
    """Make a small policy, and rows that continue its four prompts by T tokens. groups: the prompt
    of each row. -> float64 GPT, prompts (B, 10), tokens (B, T)"""
    cfg = grpo.Config(device="cpu", hidden_size=16, intermediate_size=16,
                      num_key_value_heads=num_key_value_heads)
    policy = grpo.GPT(cfg).double()
    policy.embed.weight.data *= 20                      # so that logits differ
    generator = torch.Generator().manual_seed(T)
    tokens = torch.randint(grpo.VOCAB_SIZE, (len(groups), T), generator=generator)
    prompts = torch.randint(grpo.VOCAB_SIZE, (4, 10), generator=generator)
    return policy, prompts[groups], tokens


def score_in_full(policy, prompts, tokens, temperature):
    """Compute what `score` does, but read every prompt again with every completion."""
    logits = policy(torch.cat([prompts, tokens], dim=1)[:, :-1])[:, prompts.shape[1] - 1:]
    return grpo.logprobs(logits, tokens, temperature)


@pytest.mark.parametrize("T", [1, 8])
@pytest.mark.parametrize(
    "groups", [[0], [0, 0, 0], [2, 0, 1], [1, 1, 2, 2, 2]], ids=str)
def test_scores_and_their_gradients_are_those_of_reading_prompt_and_completion_in_full(groups, T):
    factors = torch.randn(2, len(groups), T, generator=torch.Generator().manual_seed(0)).double()
    for num_key_value_heads in (1, 2, 4):
        case = make_case(groups, T, num_key_value_heads)
        found, expected = grpo.score(*case, 0.7), score_in_full(*case, 0.7)
        close(found, expected)
        assert found[0].shape == (len(groups), T) and (found[0] < 0).all()
        found, expected = (torch.autograd.grad(
            (factors * torch.stack(scores)).sum(), list(case[0].parameters()))
            for scores in (found, expected))
        close(found, expected)
        assert max(gradient.abs().max() for gradient in found) > 0.1


def test_the_critic_reads_a_prompt_once_and_its_values_are_those_of_reading_all():
    policy, prompts, tokens = make_case([1, 0, 1, 1], 5)
    critic = ppo.Critic(policy)
    assert (critic(prompts, tokens) == 0).all()                 # its head starts at 0
    critic.head.data.copy_(torch.linspace(-1, 1, 16))
    expected = critic.gpt.hidden(torch.cat([prompts, tokens], dim=1))[:, 9:-1] @ critic.head
    reads = []                                                  # number of tokens per call
    critic.gpt.norm.register_forward_hook(
        lambda norm, hidden, output: reads.append(output[..., 0].numel()))
    close(critic(prompts, tokens), expected)
    assert sum(reads) == 2 * 10 + 4 * 4
