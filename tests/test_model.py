"""The model: what a token may depend on, positions, and reading with a cache."""
import functools

import pytest
import torch
from conftest import every_script

import grpo

close = functools.partial(torch.testing.assert_close, atol=1e-10, rtol=0)


@pytest.fixture
def tokens():
    """(3, 9), any of the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(grpo.VOCAB_SIZE, (3, 9), generator=generator)


@pytest.mark.parametrize("num_key_value_heads", [1, 2, 4])
def test_reading_with_a_cache_gives_the_logits_of_reading_at_once(
        config, talker, tokens, num_key_value_heads):
    policy = talker(config(num_key_value_heads=num_key_value_heads)).double()
    at_once = policy(tokens)
    assert at_once.shape == (3, 9, grpo.VOCAB_SIZE)
    cache = grpo.Cache()
    pieces = [policy(tokens[:, :4], cache)]
    for t in range(4, 9):
        assert len(cache) == t
        pieces.append(policy(tokens[:, t:t + 1], cache))
    close(torch.cat(pieces, dim=1), at_once)


def test_several_tokens_can_be_read_behind_a_cache(config, talker, tokens):
    policy = talker(config()).double()
    cache = grpo.Cache()
    pieces = [policy(tokens[:, :4], cache), policy(tokens[:, 4:], cache)]
    close(torch.cat(pieces, dim=1), policy(tokens))


def test_a_cache_goes_on_with_the_rows_that_it_is_told_to_take(config, talker, tokens):
    policy = talker(config()).double()
    cache = grpo.Cache()
    policy(tokens[:, :4], cache)
    rows = torch.tensor([2, 0, 2, 2])
    cache.take(rows)
    close(policy(tokens[rows, 4:], cache), policy(tokens)[rows, 4:])


def test_the_logits_are_read_from_the_hidden_states_by_the_transposed_embedding(config, tokens):
    policy = grpo.GPT(config()).double()
    hidden = policy.hidden(tokens)
    torch.testing.assert_close(hidden @ policy.embed.weight.T, policy(tokens))
    cache = grpo.Cache()
    pieces = [policy.hidden(tokens[:, :5], cache)]
    for t in range(5, 9):
        pieces.append(policy.hidden(tokens[:, t:t + 1], cache))
    close(torch.cat(pieces, dim=1), hidden)


@pytest.fixture
def one_layer(config, talker):
    """A policy of one layer, in which only the rotation of keys tells the order of tokens."""
    return talker(config(num_hidden_layers=1)).double()


def test_no_logit_depends_on_a_later_token_and_the_last_one_on_every_token(one_layer, tokens):
    tokens = tokens[:1] % 256
    before = one_layer(tokens)
    for t in range(9):
        changed = tokens.clone()
        changed[0, t] += 1
        is_moved = (one_layer(changed) - before).abs().amax(dim=-1)[0] > 1e-9       # (9,)
        assert not is_moved[:t].any()
        assert is_moved[t]
        assert is_moved[-1]


def test_the_logits_depend_on_the_order_of_earlier_tokens(one_layer, tokens):
    tokens = tokens[:1]
    swapped = tokens[:, [1, 0, *range(2, 9)]]
    assert (one_layer(swapped) - one_layer(tokens))[0, -1].abs().max() > 1e-6


def test_heads_that_share_keys_and_values_are_neighbours(config):
    """Heads 0 and 1 of four read key/value head 0, heads 2 and 3 the other: as in Llama."""
    attention = grpo.GPT(config(num_key_value_heads=2)).blocks[0].attention.double()
    x = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0)).double()
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    cos = torch.ones(5, 2, dtype=torch.float64)
    attention.out.weight.data.copy_(torch.eye(16))              # the heads, side by side

    def heads():
        return attention(x, cos, 0 * cos, mask, None).unflatten(-1, (4, 4))
    before = heads()
    attention.value.weight.data[:4] += 1.0                      # of key/value head 0
    is_changed = (heads() - before).abs().amax(dim=(0, 1, 3)) > 1e-3
    assert is_changed.tolist() == [True, True, False, False]


@every_script
def test_moving_every_position_by_the_same_amount_changes_nothing_a_block_computes(
        script, config):
    """Only the distance of two tokens counts, as it does if a rotation, not a mirror, tells the
    position."""
    block = script.GPT(config()).blocks[0].double()
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0)).double()
    mask = torch.ones(5, 5, dtype=torch.bool).tril()

    def read(positions):
        angles = positions[:, None].double() * torch.tensor([1.0, 0.3]).double()   # (L, hd / 2)
        return block(x, angles.cos(), angles.sin(), mask, None)
    positions = torch.arange(5)
    for start in (1, 7, 1000):
        torch.testing.assert_close(read(positions + start), read(positions), atol=1e-9, rtol=0)
    assert (read(2 * positions) - read(positions)).abs().max() > 1e-3
