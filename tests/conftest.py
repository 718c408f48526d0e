"""What the tests share: the scripts on the path, and policies so small that a test takes milliseconds."""
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import grpo

torch.set_num_threads(1)        # sums differ between thread counts in the last bit


@pytest.fixture
def config():
    """config(**changes): the Config of a tiny policy."""
    tiny = {"device": "cpu", "num_threads": 1, "operands": 3, "hidden_size": 16, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 16, "num_prompts": 4, "num_generations": 4,
            "max_completion_length": 8, "learning_rate": 0.01, "num_mini_batches": 1}
    return lambda **changes: grpo.Config(**(tiny | changes))


@pytest.fixture
def talker():
    """talker(cfg): an untrained policy whose next token depends on all before it, and which soon comes to
    an end, so that rows are of all lengths."""
    class Talker(grpo.GPT):
        def __init__(self, cfg):
            super().__init__(cfg)
            self.embed.weight.data *= 20
            self.register_buffer("bias", 5.0 * (torch.arange(grpo.VOCAB) == grpo.EOS))

        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs) + self.bias
    return Talker


@pytest.fixture
def bigram():
    """bigram(table): a policy whose logits are table[last token]: its gradients are in plain sight."""
    class Bigram(torch.nn.Module):
        def __init__(self, table):
            super().__init__()
            self.table = torch.nn.Parameter(table.clone())

        def forward(self, tokens, cache=None, logits_to_keep=0):
            return self.table[tokens][:, -logits_to_keep:]
    return Bigram
