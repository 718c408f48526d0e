"""Test the model against a plain reference, reading with a cache, log-probs of logits, and scoring.
The model's code is identical in all scripts, so these tests use grpo.py."""
import functools
import itertools
import math

import pytest
import torch
from conftest import TINY, close, randn

import common
import grpo
import ppo


@pytest.fixture
def policy(talker, config):
    """policy(**changes): make a policy in float64, with these changes to the flags."""
    return lambda **changes: talker(config(**changes)).double()


@pytest.fixture
def tokens():
    """Random tokens of the vocabulary. -> (3, 9)"""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(grpo.VOCAB_SIZE, (3, 9), generator=generator)


# ---- the reference ---------------------------------------------------------------------------

def rms_norm(x, weight):
    return x / (x.square().mean(dim=-1, keepdim=True) + 2.2e-16).sqrt() * weight


def turned(x):
    """Rotate the queries or keys of a head (L, hd). Features i and i + hd / 2 are a point in a
    plane, which is rotated by the angle position * 10000^(-2 i / hd). -> (L, hd)"""
    L, hd = x.shape
    points = torch.complex(x[:, :hd // 2], x[:, hd // 2:])
    angles = torch.tensor([[t * 10_000 ** (-2 * i / hd) for i in range(hd // 2)]
                           for t in range(L)], dtype=torch.float64)
    points = points * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([points.real, points.imag], dim=1)


def attend(block, x, H, KV):
    """Compute the heads one by one; neighboring heads share keys and values. -> (L, D)"""
    hd = x.shape[1] // H
    heads = []
    for h in range(H):
        group = h // (H // KV)
        own = slice(h * hd, (h + 1) * hd)
        shared = slice(group * hd, (group + 1) * hd)
        q = turned(x @ block.query.weight[own].T)
        k = turned(x @ block.key.weight[shared].T)
        v = x @ block.value.weight[shared].T
        scores = q @ k.T / hd ** 0.5
        is_later = torch.ones_like(scores).triu(1).bool()
        heads.append(scores.masked_fill(is_later, -math.inf).softmax(dim=-1) @ v)
    return torch.cat(heads, dim=1) @ block.out.weight.T


def reference_logits(model, ids, H, KV):
    """Compute the logits of one row of tokens (L,). -> (L, V)"""
    x = model.embed.weight[ids]
    for block in model.blocks:
        x = x + attend(block, rms_norm(x, block.attention_norm.weight), H, KV)
        y = rms_norm(x, block.mlp_norm.weight)
        gate = y @ block.gate.weight.T
        x = x + (gate * torch.sigmoid(gate) * (y @ block.up.weight.T)) @ block.down.weight.T
    return rms_norm(x, model.norm.weight) @ model.embed.weight.T


@pytest.mark.parametrize("H, KV", [(4, 1), (4, 2), (4, 4), (2, 1)])
def test_the_logits_are_those_of_a_llama(config, tokens, H, KV):
    cfg = config(num_attention_heads=H, num_key_value_heads=KV, num_hidden_layers=3)
    model = grpo.GPT(cfg).double()
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():                   # also the norms' weights
        weight.data += 0.3 * torch.randn(weight.shape, generator=generator)
    logits = model(tokens)
    assert logits.shape == (3, 9, grpo.VOCAB_SIZE)
    for row in range(3):
        expected = reference_logits(model, tokens[row], H, KV)
        torch.testing.assert_close(logits[row], expected, atol=1e-6, rtol=0)    # float32 angles


def test_the_weights_are_a_function_of_the_seed_of_the_base(config):
    policies = [grpo.GPT(config(base_seed=seed)) for seed in (0, 0, 1)]
    for first, again, other in zip(*(policy.parameters() for policy in policies)):
        assert torch.equal(first, again)
        assert not torch.equal(first, other) or first.dim() == 1        # norms start at 1


# ---- a cache ---------------------------------------------------------------------------------

@pytest.mark.parametrize("num_key_value_heads", [1, 4])
def test_reading_with_a_cache_token_by_token_or_in_pieces_is_reading_at_once(
        policy, tokens, num_key_value_heads):
    model = policy(num_key_value_heads=num_key_value_heads)
    at_once = model(tokens)
    for ends in ([4, 5, 6, 7, 8, 9], [4, 9], [1, 2, 9]):
        cache = {}
        pieces = [model(tokens[:, start:end], cache) for start, end in zip([0, *ends], ends)]
        close(torch.cat(pieces, dim=1), at_once)


def test_a_cache_goes_on_with_the_rows_that_it_is_told_to_take(policy, tokens):
    model = policy()
    rows = torch.tensor([2, 0, 2, 2])
    cache = {}
    model(tokens[:, :4], cache)
    grpo.take(cache, rows)
    close(model(tokens[rows, 4:], cache), model(tokens)[rows, 4:])


# ---- log-probs -------------------------------------------------------------------------------

@pytest.mark.quick
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_logprobs_are_the_logarithms_of_the_softmax_at_the_temperature(temperature):
    logits = 3 * randn(2, 3, 5)
    tokens = torch.tensor([[0, 4, 2], [1, 1, 3]])
    logps, entropy = grpo.logprobs(logits, tokens, temperature)
    for b, t in itertools.product(range(2), range(3)):
        weights = [math.exp(z / temperature) for z in logits[b, t].tolist()]
        p = [weight / sum(weights) for weight in weights]
        close(logps[b, t].item(), math.log(p[tokens[b, t]]))
        close(entropy[b, t].item(), -sum(q * math.log(q) for q in p))
    logprobs = functools.partial(grpo.logprobs, tokens=tokens, temperature=temperature)
    assert torch.autograd.gradcheck(logprobs, logits.requires_grad_())
    for kernel in ("torch", "auto"):
        close(logprobs(logits, kernel=kernel), (logps, entropy))


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
