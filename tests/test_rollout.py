"""Test that a rollout samples each row from the policy's probabilities, token by token and
independently of all other rows; and scoring, which reads each prompt once. The model's code is
identical in all scripts, so these tests use grpo.py. test_export.py compares it with a Llama."""
import dataclasses

import pytest
import torch
from conftest import close

import common
import grpo
import nano

# ---- sampling --------------------------------------------------------------------------------

@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_first_tokens_are_as_frequent_as_the_softmax_says(config, talker, load_task, temperature):
    cfg = config(temperature=temperature, max_completion_length=1)
    policy = talker(cfg).double()
    N = 4000
    problems = [common.Problem("((1+2)-1)=", "")] * N
    prompts = grpo.encode_prompts(problems, load_task(cfg), "cpu")
    evenly_spread = (torch.arange(N) + 0.5) / N         # removes the randomness
    shuffled = torch.randperm(N, generator=torch.Generator().manual_seed(0))
    tokens, *_ = grpo.rollout(policy, prompts, problems, cfg, evenly_spread[shuffled, None])
    frequencies = torch.bincount(tokens[:, 0], minlength=grpo.VOCAB_SIZE) / N
    p = torch.softmax(policy(prompts[:1])[0, -1] / temperature, dim=-1)
    assert (frequencies - p).abs().max() <= 1.01 / N


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_the_extreme_uniforms_give_tokens_that_can_be_sampled(config, bigram, dtype, scale):
    V = grpo.VOCAB_SIZE
    table = scale * torch.randn(V, V, generator=torch.Generator().manual_seed(0)).to(dtype)
    table[:, :5] = -1e5                                 # both ends get probability 0
    table[:, -50:] = -1e5
    cfg = config(max_completion_length=4)
    prompts = torch.arange(V)[:, None]                  # each token has its own distribution
    for u in (0.0, 2.0 ** -24, 1 - 2.0 ** -24):         # torch.rand's smallest two and largest
        tokens, mask, logps, entropy, _ = grpo.rollout(
            bigram(table), prompts, [None] * V, cfg, torch.full((V, 4), u))
        sampled_tokens = tokens[mask == 1]
        assert sampled_tokens.min() >= 5
        assert sampled_tokens.max() < V - 50
        assert logps.isfinite().all() and entropy.isfinite().all()


# ---- which rollout runs ----------------------------------------------------------------------

@pytest.mark.parametrize("device, kernel, is_graph", [
    ("cpu", "auto", False), ("cuda", "auto", True), ("cuda", "triton", True),
    ("cuda", "torch", False)])
def test_on_cuda_the_rollout_is_that_of_kernels_unless_torch_is_asked_for(
        config, load_task, monkeypatch, device, kernel, is_graph):
    """A task that inserts text has its own rollout."""
    cfg = config(device=device, kernel=kernel)
    policy = grpo.GPT(cfg)
    T = torch.tensor([cfg.max_completion_length])
    monkeypatch.setattr(
        grpo, "encode_prompts", lambda *given: common.encode_prompts(*given[:2], "cpu"))
    monkeypatch.setattr(grpo.kernels, "applies", lambda *_: False)
    monkeypatch.setattr(grpo.kernels, "rollout", lambda *given: (*grpo.rollout(*given[:5])[:4], T))
    for name in ("arithmetic", "lookup"):
        task = load_task(dataclasses.replace(cfg, task=name))
        batch = grpo.complete(policy, task, cfg, common.sample_problems(task, 1, 0))
        assert (batch.lengths is T) == (is_graph and name == "arithmetic")


def test_nano_samples_from_the_probabilities_that_it_trains():
    policy = nano.GPT()
    policy.embed.data *= 4
    questions = torch.randint(len(nano.VOCABULARY), (500, nano.W))
    torch.manual_seed(1)
    tokens = nano.sample(policy, questions)[:, nano.W]
    torch.manual_seed(1)
    p = policy(questions, {})[:, -1].softmax(-1)                        # (500, V)
    assert torch.equal(tokens, p.multinomial(1)[:, 0])


# ---- scoring, which reads each prompt once ---------------------------------------------------

@pytest.mark.parametrize("groups", [[0], [0, 0, 0], [2, 0, 1], [1, 1, 2, 2, 2]], ids=str)
def test_scores_and_their_gradients_are_those_of_reading_prompt_and_completion_in_full(groups):
    """groups: the prompt of each row."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(grpo.VOCAB_SIZE, (4, 10), generator=generator)[groups]
    tokens = torch.randint(grpo.VOCAB_SIZE, (len(groups), 8), generator=generator)
    factors = torch.randn(2, len(groups), 8, generator=generator).double()
    for num_key_value_heads in (1, 4):
        policy = grpo.GPT(grpo.Config(device="cpu", hidden_size=16, intermediate_size=16,
                                      num_key_value_heads=num_key_value_heads)).double()
        policy.embed.weight.data *= 20                  # so that logits differ
        logits = policy(torch.cat([prompts, tokens], dim=1)[:, :-1])[:, 9:]
        found = grpo.score(policy, prompts, tokens, 0.7)
        expected = grpo.logprobs(logits, tokens, 0.7)
        close(found, expected)
        found, expected = (torch.autograd.grad(
            (factors * torch.stack(scores)).sum(), list(policy.parameters()))
            for scores in (found, expected))
        close(found, expected)
        assert max(gradient.abs().max() for gradient in found) > 0.1
