"""Policies so small that a test takes milliseconds: the fixtures talker and bigram. No tests."""
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def talker(script):
    """talker(cfg): an untrained policy whose next token depends on all before it, and which soon
    comes to an end, so that rows are of all lengths. embed.weight[:, 0] is the bias of its
    logits."""
    class Talker(script.GPT):
        def __init__(self, cfg):
            super().__init__(cfg)
            is_end = torch.arange(script.VOCAB_SIZE) == script.EOS
            self.embed.weight.data *= 20
            self.embed.weight.data[:, 0] = 5.0 * is_end

        def hidden(self, tokens, cache=None):
            others = super().hidden(tokens, cache)[..., 1:]
            return torch.cat([torch.ones_like(others[..., :1]), others], dim=-1)
    return Talker


@pytest.fixture
def bigram():
    """bigram(table): a policy whose logits are table[last token], so that its gradient is in plain
    sight. The numbers of the table have to be finite."""
    class Bigram(torch.nn.Module):
        def __init__(self, table):
            super().__init__()
            self.table = torch.nn.Parameter(table.clone())
            self.embed = SimpleNamespace(weight=torch.eye(len(table)).to(table))

        def hidden(self, tokens, cache=None):
            return self.table[tokens]

        def forward(self, tokens, cache=None):
            return self.hidden(tokens, cache)
    return Bigram
