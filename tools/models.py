"""Causal language models of transformers, loaded so that they can be trained by what they sample.
For examples/pretrained.py."""
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import common


def load(path):
    """The model in float32 and its tokenizer, from a folder or by a name. Exits with one line if
    there is none, or if weights are missing, which would be random."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if Path(path, "checkpoint.pt").exists():
        common.fail(f"--model {path}: is a run of a script; python -m tools.export makes a model "
                    "of it")
    if Path(path).is_dir() and not Path(path, "config.json").exists():
        common.fail(f"--model {path}: cannot be loaded: there is no config.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model, info = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, output_loading_info=True)
    except Exception as error:              # what is no model raises nearly anything
        common.fail(f"--model {path}: cannot be loaded: {' '.join(str(error).split())}")
    if info["missing_keys"]:
        common.fail(f"--model {path}: has no {min(info['missing_keys'])}")
    return model, tokenizer


def end_tokens(model, tokenizer):
    """The ids that end a text, of generation_config.json and of the tokenizer; [] without any."""
    found = model.generation_config.eos_token_id
    found = found if isinstance(found, list) else [found]
    return sorted({*found, tokenizer.eos_token_id} - {None})


def remove_dropout(model):
    """What is left out at random when it is trained would have been there when it sampled."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_share = isinstance(value, float)
            if is_share and (name == "p" or "drop" in name or "jitter" in name):
                setattr(module, name, 0.0)
