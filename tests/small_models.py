"""Small models of transformers that a test can train: our policies, converted by pretrained.export,
and random weights in the shapes of other families. Fixtures and helpers; no tests."""
import importlib
import os

os.environ["HF_HUB_OFFLINE"] = "1"          # must be set before transformers is loaded

import pytest
from small_runs import SMALL, arguments, at_work

import grpo
from lab.families import save_random

__all__ = ["save_random"]

NEEDS = "needs pretrained/requirements.txt"
# Values of SMALL. Its flags for the policy's shape do not exist in pretrained/train.py.
LIKE_SMALL = {name: SMALL[name] for name in (
    "max_completion_length", "num_prompts", "num_generations", "num_mini_batches", "task", "device",
    "num_eval_problems", "num_eval_samples", "eval_steps", "save_steps", "max_steps")}
LIKE_SMALL |= {"learning_rate": 5e-4, "micro_batch_size": 32}
# What is special about them, compared with a Llama: biases; norms of queries and keys; soft caps;
# scaled logits; a table of positions; dropout that is read from the config.
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "granite", "gpt2", "falcon")


def load_example():
    """Import pretrained/train.py. -> module"""
    return importlib.import_module("pretrained.train")


def config_of(**flags):
    """Make a Config of pretrained/train.py with small numbers."""
    return load_example().Config(**(LIKE_SMALL | {"model": "none"} | flags))


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
