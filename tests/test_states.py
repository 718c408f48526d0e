"""Scoring reads each prompt once, however many completions it has, and computes what reading all of them in
full would."""
import functools

import policies
import pytest
import torch
from conftest import every_script, scripts

talker = policies.talker
exactly = functools.partial(torch.testing.assert_close, atol=1e-12, rtol=0)
PROMPTS = [[0], [0, 0, 0], [2, 0, 1], [1, 1, 2, 2, 2], [3]]     # which prompts the rows continue


@pytest.fixture
def texts(script, config, talker):
    """texts(of, T, **changes) -> policy in float64, prompts (4, W), of (B,), tokens (B, T)"""
    def make(of, T, **changes):
        cfg, draw = config(**changes), torch.Generator().manual_seed(T)
        tokens = torch.randint(script.VOCAB, (len(of), T), generator=draw)
        prompts = torch.randint(script.VOCAB, (4, 10), generator=draw)
        return talker(cfg).double(), prompts, torch.tensor(of), tokens
    return make


def plainly(script, policy, prompts, of, tokens, temperature=1.0):
    """score, by reading every prompt with every completion."""
    logits = policy(torch.cat([prompts[of], tokens], 1)[:, :-1])[:, prompts.shape[1] - 1:]
    return script.logprobs(logits, tokens, temperature)


@every_script
@pytest.mark.parametrize("T", [1, 2, 3, 8])
@pytest.mark.parametrize("of", PROMPTS, ids=str)
def test_scores_are_those_of_reading_prompt_and_completion_in_full(script, texts, of, T):
    for heads in (1, 2, 4):
        policy, prompts, of, tokens = texts(list(of), T, num_key_value_heads=heads)
        found = script.score(policy, prompts, of, tokens, 0.7)
        exactly(found, plainly(script, policy, prompts, of, tokens, 0.7))
        assert found[0].shape == tokens.shape and (found[0] < 0).all()


@every_script
@pytest.mark.parametrize("T", [1, 2, 8])
@pytest.mark.parametrize("of", PROMPTS, ids=str)
def test_so_are_their_gradients(script, texts, of, T):
    policy, prompts, of, tokens = texts(list(of), T)
    weights = list(policy.parameters())
    pull = torch.randn(2, *tokens.shape, generator=torch.Generator().manual_seed(0)).double()
    values = (torch.stack(how(policy, prompts, of, tokens))
              for how in (script.score, functools.partial(plainly, script)))
    found, expected = (torch.autograd.grad((pull * value).sum(), weights) for value in values)
    exactly(found, expected)
    assert max(gradient.abs().max() for gradient in found) > 0.1


@every_script
def test_each_prompt_that_is_continued_is_read_once_and_no_last_token_is_read_at_all(script, texts):
    for of, T in (([0, 0, 0, 0], 5), ([2, 0, 2, 1], 5), ([3, 3], 1)):
        (policy, prompts, of, tokens), read = texts(of, T), []
        policy.embed.register_forward_hook(lambda module, args, out, read=read: read.append(args[0]))
        script.score(policy, prompts, of, tokens)
        assert sum(ids.numel() for ids in read) == len(set(of.tolist())) * 10 + len(of) * (T - 1)
        assert torch.equal(read[0], prompts[of.unique()])


@every_script
def test_a_prompt_that_no_row_continues_has_no_part_in_scores_nor_gradients(script, texts):
    policy, prompts, of, tokens = texts([2, 0, 2], 4)
    ends = []
    for other in (prompts, prompts.index_fill(0, torch.tensor([1, 3]), 5)):
        logps, entropy = script.score(policy, other, of, tokens)
        ends.append((logps, torch.autograd.grad(logps.sum() + entropy.sum(), list(policy.parameters()))))
    exactly(*ends)


@every_script
def test_a_row_depends_on_its_own_prompt_and_completion_alone(script, texts):
    policy, prompts, of, tokens = texts([1, 0, 1, 3], 6)
    logps, entropy = script.score(policy, prompts, of, tokens)
    for i in range(4):
        alone = script.score(policy, prompts[of[i:i + 1]], torch.tensor([0]), tokens[i:i + 1])
        exactly(alone, (logps[i:i + 1], entropy[i:i + 1]))
    other, _ = script.score(policy, prompts, torch.tensor([0, 1, 1, 3]), tokens)
    changed = (other - logps).abs().amax(1) > 1e-3
    assert changed.tolist() == [True, True, False, False]


@every_script
def test_the_order_of_rows_and_of_prompts_does_not_matter(script, texts):
    policy, prompts, of, tokens = texts([3, 1, 1, 0, 3], 5)
    logps, _ = script.score(policy, prompts, of, tokens)
    order = torch.tensor([4, 2, 0, 3, 1])
    exactly(script.score(policy, prompts, of[order], tokens[order])[0], logps[order])
    exactly(script.score(policy, prompts.flip(0), 3 - of, tokens)[0], logps)


@scripts("ppo")
def test_the_critic_reads_a_prompt_once_and_its_values_are_those_of_reading_all(script, texts):
    policy, prompts, of, tokens = texts([1, 0, 1, 1], 5)
    critic, read = script.Critic(policy), []
    critic.head.data.copy_(torch.linspace(-1, 1, 16))
    expected = critic.gpt.hidden(torch.cat([prompts[of], tokens], 1))[:, 9:-1] @ critic.head
    critic.gpt.embed.register_forward_hook(lambda module, args, out: read.append(args[0].numel()))
    exactly(critic(prompts, of, tokens), expected)
    assert sum(read) == 2 * 10 + 4 * 4


@every_script
def test_scores_of_a_mini_batch_of_one_token_completions_are_learned_from(script, texts):
    """An EOS at once is a completion, too: sorted by length, a micro-batch may hold nothing else."""
    policy, prompts, of, _ = texts([0, 1, 2, 3] * 2, 1)
    tokens = torch.full((8, 1), script.EOS)
    logps, entropy = script.score(policy, prompts, of, tokens)
    (logps.sum() + entropy.sum()).backward()
    assert logps.shape == (8, 1) and all(weight.grad.isfinite().all() for weight in policy.parameters())
