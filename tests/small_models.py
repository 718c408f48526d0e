"""Models of transformers that a test can train: what tools.export makes of a policy of ours, and
random weights in the shapes of other families. Fixtures and helpers; no tests."""
import importlib
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"          # before transformers is loaded

import pytest
import torch
from small_runs import SMALL, arguments, at_work

import common
import grpo
from tools import export

NEEDS = "needs examples/requirements.txt"
# As small runs have it. The flags of the policy are not among those of examples/pretrained.py.
LIKE_SMALL = {"max_completion_length": 16, "learning_rate": 5e-4, "num_prompts": 4,
              "num_generations": 8, "num_mini_batches": 1, "num_eval_problems": 16,
              "num_eval_samples": 2, "eval_steps": 2, "save_steps": 3, "max_steps": 10,
              "operands": "2", "device": "cpu", "num_threads": 1, "micro_batch_size": 32}
# The shapes of other families, and what makes them different from a Llama.
FAMILIES = {
    "llama": {"rope_theta": 10_000.0},
    "qwen2": {},                            # biases
    "qwen3": {"head_dim": 8},               # norms of queries and keys
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8},     # soft caps
    "gpt2": {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}}     # positions by a table


def load_example():
    """The module examples/pretrained.py."""
    return importlib.import_module("examples.pretrained")


def config_of(**flags):
    """Its Config, with small numbers."""
    return load_example().Config(**(LIKE_SMALL | {"model": "none"} | flags))


def save_tokenizer(folder, **changes):
    """Write the tokenizer of tools.export there, without a chat template."""
    from transformers import PreTrainedTokenizerFast
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=export.make_tokenizer(), eos_token="<|eos|>", pad_token="<|pad|>",
        **changes)
    tokenizer.save_pretrained(folder)


def save_random(folder, family="llama", seed=0, scale=1.0, **changes):
    """Write a model of a family with random weights, so large that tokens differ in probability."""
    from transformers import AutoConfig, AutoModelForCausalLM
    config = AutoConfig.for_model(family, **({
        "vocab_size": grpo.VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 128, "eos_token_id": grpo.EOS, "pad_token_id": grpo.PAD,
        "bos_token_id": None} | FAMILIES[family] | changes))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(4 * scale)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def small_base(tmp_path_factory):
    """The run folder of a small base, which is right now and then."""
    folder = tmp_path_factory.mktemp("base")
    with at_work(folder):
        grpo.main(arguments(SMALL | {"max_steps": 0, "output_dir": "run"}))
    return folder / "run"


@pytest.fixture(scope="session")
def small_llama(small_base, tmp_path_factory):
    """The same base as a Hugging Face folder."""
    pytest.importorskip("transformers", reason=NEEDS)
    folder = tmp_path_factory.mktemp("llama") / "model"
    export.export(small_base, folder)
    return folder


def policy_of(run):
    """The policy of a run folder of ours. -> GPT"""
    weights, cfg = export.read_policy(Path(run), "checkpoint.pt")
    policy = grpo.GPT(cfg)
    policy.load_state_dict(weights)
    return policy


def export_policy(policy, cfg, folder):
    """Write a policy to a Hugging Face folder. -> folder"""
    run = Path(f"{folder}-run")
    run.mkdir()
    record = {"script": "grpo.py", "config": vars(cfg)}
    common.write(run / "config.json", __import__("json").dumps(record))
    common.write(run / "checkpoint.pt", {"policy": policy.state_dict()})
    export.export(run, Path(folder))
    return Path(folder)
