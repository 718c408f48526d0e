"""Small models of transformers that a test can train: our policies, converted by pretrained.export,
and random weights in the shapes of other families. Fixtures and helpers; no tests."""
import importlib
import os

os.environ["HF_HUB_OFFLINE"] = "1"          # must be set before transformers is loaded

import pytest
import torch
from small_runs import SMALL, arguments, at_work

import grpo

NEEDS = "needs pretrained/requirements.txt"
# Values of SMALL. Its flags for the policy's shape do not exist in pretrained/train.py.
LIKE_SMALL = {name: SMALL[name] for name in (
    "max_completion_length", "num_prompts", "num_generations", "num_mini_batches", "task", "device",
    "num_eval_problems", "num_eval_samples", "eval_steps", "save_steps", "max_steps")}
LIKE_SMALL |= {"learning_rate": 5e-4, "micro_batch_size": 32}
# Changes of the shape for each family; the comments name its differences from a Llama.
FAMILIES = {
    "llama": {"rope_theta": 10_000.0},
    "qwen2": {},                            # biases
    "qwen3": {"head_dim": 8},               # norms of queries and keys
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8},     # soft caps
    "granite": {},                          # scaled logits
    "gpt2": {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}}     # a table of positions


def load_example():
    """Import pretrained/train.py. -> module"""
    return importlib.import_module("pretrained.train")


def config_of(**flags):
    """Make a Config of pretrained/train.py with small numbers."""
    return load_example().Config(**(LIKE_SMALL | {"model": "none"} | flags))


def save_random(folder, family="llama", seed=0, scale=1.0, **changes):
    """Write a model of a family and the tokenizer of pretrained.export, without a chat template.
    The random weights are so large that tokens differ in probability. -> folder"""
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    from pretrained import export
    config = AutoConfig.for_model(family, **({
        "vocab_size": grpo.VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 128, "eos_token_id": grpo.EOS, "pad_token_id": grpo.PAD,
        "bos_token_id": None} | FAMILIES.get(family, {}) | changes))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data.mul_(4 * scale)
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=export.make_tokenizer(), eos_token="<|eos|>",
        pad_token="<|pad|>").save_pretrained(folder)
    return folder


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
    from pretrained import export
    folder = tmp_path_factory.mktemp("llama") / "model"
    export.export(small_base, folder)
    return folder
