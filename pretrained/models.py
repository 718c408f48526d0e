"""Models of transformers: loading them, and adapters (LoRA)."""
import contextlib
import json
import re
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import common

ADAPTER = "adapter_model.safetensors"


# ---- 1. models -------------------------------------------------------------------------------

def load_model(path):
    """The model in float32, from a folder or by a name, and weights that it has no place for. A
    folder with an adapter is the model for which it was trained, with what it adds.
    ValueError if weights are missing, which would be random. -> model, set of names"""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if base_of(path) is not None:
        model, unexpected = load_model(base_of(path))
        return with_adapter(model, path), unexpected
    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True)
    if info["missing_keys"]:
        raise ValueError(f"it lacks {min(info['missing_keys'])}")
    return model, info["unexpected_keys"]


def load(path):
    """The model and its tokenizer. Exits with one line if there is none."""
    if Path(path, "checkpoint.pt").exists():
        common.fail(f"--model {path}: is a run of a script; python -m pretrained.export makes a "
                    "model of it")
    try:
        return load_model(path)[0], AutoTokenizer.from_pretrained(path)
    except Exception as error:              # what is no model raises nearly anything
        common.fail(f"--model {path}: cannot be loaded: {' '.join(str(error).split())}")


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


def checkpoint_activations(model):
    """Compute activations twice, and store few."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable()
    else:                                                       # transformers before 5.23
        model.gradient_checkpointing_enable({"use_reentrant": False})


# ---- 2. adapters (LoRA, 2106.09685) ----------------------------------------------------------

def add_adapter(model, rank, dtype):
    """Freeze the weights, and add to each matrix but the embeddings the product of two thin ones,
    B A 32 / rank, which are trained and at first add nothing. The frozen matrices are kept in the
    dtype of products, to which these round them anyway."""
    try:
        from peft import LoraConfig
    except ImportError:
        common.fail("peft is missing: pip install -r pretrained/requirements.txt")
    torch.manual_seed(0)                    # all processes, and a resumed run, draw the same
    model.add_adapter(LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear"))
    for module in model.modules():
        if hasattr(module, "base_layer"):
            module.base_layer.to(getattr(torch, dtype))


@contextlib.contextmanager
def without_adapter(model):
    """What the model was before it learned, if it has an adapter."""
    has_one = any("lora_" in name for name, _ in model.named_parameters())
    if has_one:
        model.disable_adapters()
    yield
    if has_one:
        model.enable_adapters()


@torch.no_grad()
def merged_weights(model):
    """Yield name and value of each weight, with what an adapter adds to it, computed anew each
    time: a weight to which it were added, and taken off again, would drift."""
    modules = dict(model.named_modules())
    for name, weight in model.state_dict().items():
        if name.endswith(".base_layer.weight"):
            layer = modules[name.removesuffix(".base_layer.weight")]
            weight = weight + layer.get_delta_weight("default")
        if "lora_" not in name:
            yield name.replace(".base_layer.", "."), weight


def base_of(folder):
    """What the adapter in a folder adds to. -> a folder or a name; None if there is no adapter"""
    path = Path(folder, "adapter_config.json")
    return json.loads(path.read_text())["base_model_name_or_path"] if path.is_file() else None


def adapter_weights(folder):
    """The weights of a checkpoint's adapter, by their names in the model. -> dict"""
    found = load_file(Path(folder, ADAPTER))
    return {re.sub("(lora_.)", r"\1.default", name.removeprefix("base_model.model.")): weight
            for name, weight in found.items()}


def with_adapter(model, folder):
    """The model with what the adapter in a folder adds. ValueError if it is of another model."""
    from peft import PeftModel, get_peft_model_state_dict
    model = PeftModel.from_pretrained(model, folder)
    of_one = get_peft_model_state_dict(model).keys() ^ load_file(Path(folder, ADAPTER)).keys()
    if of_one:
        raise ValueError(f"the adapter is of another model, by {min(of_one)}")
    model = model.merge_and_unload().requires_grad_(True)
    model.name_or_path = str(folder)        # to which a further adapter adds
    return model


def whole(weight):
    """A weight, of which FSDP gives each process a part."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def last_checkpoint(run):
    """The newest folder with weights of a run; None if it has none, as the folder of a model."""
    found = [path for path in Path(run).glob("checkpoint-*")
             if path.name.removeprefix("checkpoint-").isdigit()]
    if found and Path(run, "checkpoint.pt").is_file():          # else another trainer made them
        return max(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))
    return None
