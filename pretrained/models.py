"""Models of transformers: loading them, and adapters (LoRA)."""
import contextlib
import hashlib
import json
import re
import warnings
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

import common

ADAPTER = "adapter_model.safetensors"
BASE = "base.json"                      # next to it: a hash of the weights that it adds to


# ---- 1. models -------------------------------------------------------------------------------

def load_model(path):
    """The model in float32, from a folder or by a name, and weights that it has no place for. A
    folder with an adapter is the model for which it was trained, with what it adds.
    ValueError if weights are missing, which would be random. -> model, set of names"""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if Path(path).is_absolute() and not Path(path).is_dir():
        raise ValueError("this folder is gone")
    base = base_of(path)
    if base is not None:
        check_base(path)
        model, unexpected = load_model(base)
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


class Head:
    """The last layer of a model. Where logits would be large, it returns log-probabilities and
    entropies instead, a few positions at a time: the logits of 8 x 512 tokens of a vocabulary of
    151,936 take 2.5 GB, and a backward pass keeps five tensors of this size."""
    AT_ONCE = 2**24                             # logits, 64 MB in float32

    def __init__(self, model):
        self.config = model.config
        self.layer = model.get_output_embeddings()
        self.logits = self.layer.forward
        self.layer.forward = self
        self.cap = getattr(model.config, "final_logit_softcapping", None)       # Gemma's
        self.score = self.is_known = None

    def is_large(self, model, tokens):
        """Whether the logits for tokens (b, T) would be large. False if the model changes what this
        layer returns in a way that we do not know, as Granite does."""
        if self.layer.weight.shape[0] * tokens.numel() <= self.AT_ONCE:
            return False
        if self.is_known is None:
            with torch.no_grad():
                ids = torch.zeros(1, 3, dtype=torch.long, device=tokens.device)
                logits = model(input_ids=ids).logits[:, :-1]
                with self.scoring(lambda x, _: (x[..., 0], x.logsumexp(dim=-1)), ids[:, 1:]):
                    found = model(input_ids=ids).logits
            expected = torch.stack([logits[..., 0], logits.logsumexp(dim=-1)], dim=-1)
            self.is_known = torch.allclose(found.float(), expected.float(), rtol=0.01, atol=0.01)
        return self.is_known

    @contextlib.contextmanager
    def scoring(self, score, tokens):
        """Let the model return score(logits (1, n, V), tokens (1, n)), a pair of (1, n), in place
        of logits: (b, T, 2), for tokens (b, T) whose states are the last but one."""
        self.score, self.tokens = score, tokens
        if self.cap:
            self.config.final_logit_softcapping = None          # because `few` does it
        try:
            yield
        finally:
            self.score = None
            if self.cap:
                self.config.final_logit_softcapping = self.cap

    def few(self, score, states, tokens):
        """(n, D), (n,) -> (n, 2)"""
        logits = self.logits(states)
        if self.cap:
            logits = self.cap * torch.tanh(logits / self.cap)
        return torch.stack(score(logits[None], tokens[None]), dim=-1)[0]

    def __call__(self, states):
        if self.score is None:
            return self.logits(states)
        states = states[:, :-1].flatten(0, 1)                                   # (b T, D)
        n = max(1, self.AT_ONCE // self.layer.weight.shape[0])
        parts = [checkpoint(self.few, self.score, *pair, use_reentrant=False)
                 for pair in zip(states.split(n), self.tokens.flatten().split(n))]
        return torch.cat(parts).view(*self.tokens.shape, 2)


# ---- 2. adapters (LoRA, 2106.09685) ----------------------------------------------------------

def add_adapter(model, rank, dtype, alpha=32, targets="all-linear"):
    """Freeze the weights, and add to each matrix but the embeddings, or to those whose names are in
    `targets`, the product of two thin ones, B A alpha / rank, which are trained and at first add
    nothing. The frozen matrices are kept in the dtype of products, which round them anyway. Exits
    with one line if the model has no such names."""
    try:
        from peft import LoraConfig
    except ImportError:
        common.fail("peft is missing: pip install -r pretrained/requirements.txt")
    warnings.filterwarnings("ignore", "Could not find a config file")       # of an adapter's base
    torch.manual_seed(0)                    # all processes, and a resumed run, draw the same
    names = targets if targets == "all-linear" else targets.split(",")
    try:
        model.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=names))
    except ValueError as error:
        common.fail(f"--lora_target_modules {targets}: {' '.join(str(error).split())}")
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


def frozen_weights(model):
    """Yield name and value of each weight, as if there were no adapter."""
    for name, weight in model.state_dict().items():
        if "lora_" not in name:
            yield name.replace(".base_layer.", "."), weight


def base_of(folder):
    """What the adapter in a folder adds to. -> a folder or a name; None if there is no adapter"""
    path = Path(folder, "adapter_config.json")
    return json.loads(path.read_text())["base_model_name_or_path"] if path.is_file() else None


def check_base(folder):
    """ValueError if what the adapter in a folder adds to is gone or has changed."""
    base, known = base_of(folder), Path(folder, BASE)
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise ValueError(f"its adapter adds to {base}, which is gone")
    if known.exists() and json.loads(known.read_text()) != fingerprint(base):
        raise ValueError(f"its adapter adds to {base}, whose weights have changed")


def fingerprint(folder):
    """A hash of the weights in a folder, by the names, sizes, beginnings and ends of their files;
    of no file for a name on the Hub. -> str"""
    found = hashlib.sha256()
    for path in sorted([*Path(folder).glob("*.safetensors"), *Path(folder).glob("*.bin")]):
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        with open(path, "rb") as file:
            for start in (0, max(0, size - 2**20)):
                file.seek(start)
                found.update(file.read(2**20))
    return found.hexdigest()


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
    return model.merge_and_unload().requires_grad_(True)


def whole(weight):
    """A weight, of which FSDP gives each process a part."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def resolved(name, resumed):
    """What a run begins with: the base that the resumed run has kept, the last checkpoint of a
    run, or the model itself; a folder by its absolute path. -> str"""
    kept = Path(resumed, "base")
    path = kept if resumed and kept.is_dir() else last_checkpoint(name) or Path(name)
    return str(path.resolve()) if path.is_dir() else name


def source(cfg):
    """What to load a policy from: --model, or the last checkpoint of a resumed run, if that has all
    weights. Exits with one line if it has an adapter whose base is gone or has changed. -> str"""
    resumed = cfg.resume_from_checkpoint
    last = last_checkpoint(resumed) if resumed else None
    if last is None or base_of(last) is None:
        return str(last or cfg.model)
    try:
        check_base(last)
    except ValueError as error:
        common.fail(f"--resume_from_checkpoint {resumed}: {error}")
    return cfg.model


def last_checkpoint(run):
    """The newest folder with weights of a run; None if it has none, as the folder of a model."""
    found = [path for path in Path(run).glob("checkpoint-*")
             if path.name.removeprefix("checkpoint-").isdigit()]
    if found and Path(run, "checkpoint.pt").is_file():          # else another trainer made them
        return max(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))
    return None
