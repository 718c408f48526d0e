"""Small models of transformers that a test can train: our policies, converted by engines.export,
and random weights in the shapes of other families. Fixtures and helpers; no tests."""
import inspect
import json
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"          # must be set before transformers is loaded

import pytest
import torch
from small_runs import SMALL, arguments, at_work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import grpo

NEEDS = "needs engines/requirements.txt"
# The shapes of all families that we try: what a tiny model of a family changes
SHAPES = json.loads(Path(__file__).with_name("families.json").read_text("utf-8"))
TINY = {"vocab_size": grpo.VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 128}
TOKENS = {"eos_token_id": grpo.EOS, "pad_token_id": grpo.PAD, "bos_token_id": None}


@pytest.fixture(scope="session")
def small_base(tmp_path_factory):
    """The run folder of a small base, which sometimes answers correctly."""
    folder = tmp_path_factory.mktemp("base")
    with at_work(folder):
        grpo.main(arguments(SMALL | {"max_steps": 0, "output_dir": "run"}))
    return folder / "run"


@pytest.fixture(scope="session")
def small_llama(small_base, tmp_path_factory):
    """The base of small_base as a Hugging Face folder."""
    pytest.importorskip("transformers", reason=NEEDS)
    from engines import export
    folder = tmp_path_factory.mktemp("llama") / "model"
    export.export(small_base, folder)
    return folder


def save_random(folder, family="llama", scale=1.0, **changes):
    """Write a model of a family and the tokenizer of engines.export, without a chat template.
    The random weights are so large that tokens differ in probability. -> folder"""
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    from engines import export
    shape = TINY | SHAPES.get(family, {}) | changes
    if "text_config" in shape:                          # next to a part that reads pictures
        shape = {name: shape[name] for name in ("text_config", "vision_config") if name in shape}
        shape["text_config"] = TINY | TOKENS | shape["text_config"]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **TOKENS | shape))
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data.mul_(4 * scale)
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=export.make_tokenizer(), eos_token="<|eos|>",
        pad_token="<|pad|>").save_pretrained(folder)
    return folder


def random_model(family="llama", **changes):
    """Write a model of a family into the current folder. -> folder"""
    return save_random(Path(family).absolute(), family, **changes)


def gradient(policy, loss):
    """Compute the gradient of a loss in each weight. -> dict"""
    policy.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in policy.named_parameters()}


class Recording(TorchDispatchMode):
    """Simulates a CUDA graph: operations have no effect while they are recorded, may not wait for
    the GPU, and are repeated on the same tensors."""

    def __init__(self):
        super().__init__()
        self.operations, self.overwritten = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "_local_scalar_dense" in str(function):
            raise RuntimeError("this waits")
        for value, argument in zip(args, function._schema.arguments):
            if argument.alias_info and argument.alias_info.is_write:
                self.overwritten += [(x, x.clone()) for x in tree_leaves(value)]
        result = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, result))
        return result

    def __exit__(self, *error):
        super().__exit__(*error)
        for value, before in reversed(self.overwritten):
            value.detach().copy_(before)

    def replay(self):
        for function, args, kwargs, result in self.operations:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again)):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)                      # a view needs no copy


@pytest.fixture
def recorded_graphs(monkeypatch):
    """recorded_graphs(): from then on, a CUDA graph is a Recording."""
    def record():
        monkeypatch.setattr("transformers.masking_utils.is_tracing", lambda *_: True)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
        monkeypatch.setattr(torch.cuda, "graph", lambda recording: recording)
    return record


@pytest.fixture
def record_real(monkeypatch, recorded_graphs):
    """record_real(): from then on, real.py records the kernels of a token on a CPU."""
    def record():
        import real
        recorded_graphs()
        source = inspect.getsource(real.sample_few)
        assert (condition := ' and DEVICE == "cuda"') in source
        monkeypatch.setattr(real, "sample_few", None)           # so that it is restored
        exec(source.replace(condition, ""), vars(real))
    return record
