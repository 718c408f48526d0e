"""Small policies, as fixtures: a test module says talker, bigram = policies.talker, policies.bigram."""
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def talker(script):
    """talker(cfg): an untrained policy whose next token depends on all before it, and which soon comes to
    an end, so that rows are of all lengths. embed.weight[:, 0] is the bias of its logits."""
    class Talker(script.GPT):
        def __init__(self, cfg):
            super().__init__(cfg)
            self.embed.weight.data *= 20
            self.embed.weight.data[:, 0] = 5.0 * (torch.arange(script.VOCAB) == script.EOS)

        def hidden(self, *args, **kwargs):
            rest = super().hidden(*args, **kwargs)[..., 1:]
            return torch.cat([torch.ones_like(rest[..., :1]), rest], -1)
    return Talker


@pytest.fixture
def bigram():
    """bigram(table): a policy whose logits are table[last token]: its gradients are in plain sight."""
    class Bigram(torch.nn.Module):
        def __init__(self, table):
            super().__init__()
            self.table = torch.nn.Parameter(table.clone())
            self.embed = SimpleNamespace(weight=torch.eye(len(table)).to(table))

        def forward(self, tokens, cache=None, logits_to_keep=0):
            return self.table[tokens][:, -logits_to_keep:]

        def states(self, prompts, of, tokens):
            return self.table[torch.cat([prompts[of, -1:], tokens[:, :-1]], 1)]
    return Bigram
