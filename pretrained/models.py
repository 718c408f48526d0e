"""Load models of transformers, and add adapters (LoRA) to them."""
import contextlib
import json
import re
import warnings
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from transformers.utils import cached_file

import common
from report import command

warnings.filterwarnings("ignore", module="peft")        # about configs and embeddings
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")     # peft reads it

ADAPTER = "adapter_model.safetensors"


# ---- 1. errors -------------------------------------------------------------------------------

def one_line(error):
    """The message of an error, which may have several lines or none. -> str"""
    message = " ".join(str(error).split()) or type(error).__name__
    if "trust_remote_code" in message:          # advice to set a flag that we do not have
        return "it needs code of its own, which is not run here; choose another model"
    return message


# ---- 2. models -------------------------------------------------------------------------------

def load_model(path):
    """Load a model in float32 from a folder or by its name. If the folder has an adapter, load the
    adapter's base and merge the adapter into it. ValueError if weights are missing, because they
    would be random. -> model"""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if Path(path).is_absolute() and not Path(path).is_dir():
        raise ValueError(f"the folder {path} is gone")
    base = base_of(path)
    if base is not None:
        model = load_model(base)
        if is_quantized(model):                 # a sum of 4-bit weights would be rounded
            model = model.dequantize()
        return with_adapter(model, path)
    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True, trust_remote_code=False)
    if info["missing_keys"]:
        raise ValueError(f"it lacks {min(info['missing_keys'])}")
    return model


def load(path):
    """Load a model and its tokenizer. Exits with one line if that fails."""
    if Path(path, "checkpoint.pt").exists():
        common.fail(f"--model {path}: is a run of a script; convert it into a model with "
                    f"{command('pretrained.export', path, 'NEW_FOLDER')}")
    gguf = min(Path(path).glob("*.gguf"), default=Path(path))
    if gguf.suffix == ".gguf" and not list(Path(path).glob("*.safetensors")):
        common.fail(f"--model {path}: is a GGUF file, which cannot be trained. Load its model and "
                    f"tokenizer with from_pretrained('{gguf.parent}', gguf_file='{gguf.name}') of "
                    "transformers, save both, and name that folder; docs/real-models.md shows how")
    try:
        return load_model(path), AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:              # transformers raises nearly anything
        what = "" if Path(path).is_dir() else "is not a folder here, and as a name on the Hub it "
        common.fail(f"--model {path}: {what}cannot be loaded: {one_line(error)}")


def end_tokens(model, tokenizer):
    """Collect the ids that end a text, from generation_config.json and the tokenizer, except those
    that the model cannot sample. -> list"""
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    num_tokens = len(model.get_input_embeddings().weight)
    return sorted(i for i in {*ends, tokenizer.eos_token_id} - {None} if i < num_tokens)


def generation_config(path):
    """Read the file generation_config.json of a model. -> bytes, or None if it has none"""
    try:
        return Path(cached_file(path, "generation_config.json")).read_bytes()
    except OSError:
        return None


def is_quantized(model):
    """Whether weights are stored in fewer bits, as by bitsandbytes, GPTQ, FP8 or MXFP4."""
    return getattr(model.config, "quantization_config", None) is not None


def remove_dropout(model):
    """Turn off all dropout and jitter, because the sampler has none, so the first ratio would not
    be 1. Some modules read their config instead of an attribute."""
    found = list(model.modules())
    for one in found:
        for name, value in list(vars(one).items()):
            if isinstance(value, PretrainedConfig) and not any(value is other for other in found):
                found.append(value)
            is_share = isinstance(value, float)
            if is_share and (name == "p" or "drop" in name or "jitter" in name):
                setattr(one, name, 0.0)


def checkpoint_activations(model):
    """Store few activations, and compute the others twice."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable()
    else:                                                       # transformers before 5.23
        model.gradient_checkpointing_enable({"use_reentrant": False})


class Head:
    """The last layer of a model. For 8 x 512 tokens and a vocabulary of 151,936, the logits take
    2.5 GB, and a backward pass keeps five tensors of this size. If the embedding has the same
    weight, autograd also keeps two gradients of it. So if the logits or the weight are large, the
    layer returns scores such as log-probabilities instead, a few positions at a time."""
    AT_ONCE = 2**24                             # numbers; 64 MB in float32

    def __init__(self, model):
        self.config = model.config
        self.layer = model.get_output_embeddings()
        self.logits = self.layer.forward
        self.layer.forward = self
        self.cap = getattr(model.config, "final_logit_softcapping", None)       # Gemma's
        self.score = self.is_known = None

    def is_large(self, model, tokens):
        """Whether the weight or the logits for tokens (b, T) are large. Also False if the layer has
        a bias, or if the model changes its result in a way that we do not know; Granite, for
        example, scales it."""
        weight = self.layer.weight
        if max(weight.numel(), len(weight) * tokens.numel()) <= self.AT_ONCE:
            return False
        if self.is_known is None:
            with torch.no_grad():
                ids = torch.zeros(1, 3, dtype=torch.long, device=tokens.device)
                logits = model(input_ids=ids).logits[:, :-1]
                with self.scoring(lambda x, _: (x[..., 0], x.logsumexp(dim=-1)), ids[:, 1:]):
                    computed = model(input_ids=ids).logits
            expected = torch.stack([logits[..., 0], logits.logsumexp(dim=-1)], dim=-1)
            is_matrix = type(self.layer) is nn.Linear and self.layer.bias is None
            self.is_known = is_matrix and torch.allclose(
                computed.float(), expected.float(), rtol=0.01, atol=0.01)
        return self.is_known

    @contextlib.contextmanager
    def scoring(self, score, tokens):
        """In this context the model returns (b, T, k) instead of logits, for tokens (b, T): the k
        tensors that score(logits (1, n, V), tokens (1, n)) computes, a few positions at a time, and
        0.0 where a token is negative. The layer gets T + 1 states per row, and leaves out the last,
        which predicts no token."""
        self.score, self.tokens = score, tokens
        if self.cap:
            self.config.final_logit_softcapping = None          # because `Few` applies it
        try:
            yield
        finally:
            self.score = None
            if self.cap:
                self.config.final_logit_softcapping = self.cap

    def __call__(self, states):
        if self.score is None:
            return self.logits(states)
        is_token = self.tokens >= 0                                             # (b, T)
        states, tokens = states[:, :-1][is_token], self.tokens[is_token]        # (n, D), (n,)
        found = Few.apply(states, tokens, self.layer.weight, self)              # (n, k)
        scores = found.new_zeros(*is_token.shape, found.shape[1])
        return scores.masked_scatter(is_token[..., None], found)


class Few(torch.autograd.Function):
    """Scores positions of a Head, a few at a time, and computes their logits again for gradients.
    Each part of the weight's gradient is as large as the weight, so `backward` adds the parts to
    weight.grad itself."""

    @staticmethod
    def forward(ctx, states, tokens, weight, head):
        kind = states.device.type
        is_cast = torch.is_autocast_enabled(kind)
        ctx.dtype = torch.get_autocast_dtype(kind) if is_cast else states.dtype
        ctx.size = max(1, head.AT_ONCE // len(weight))
        ctx.score, ctx.cap = head.score, head.cap
        ctx.save_for_backward(states, tokens, weight)
        cast = weight.to(ctx.dtype)
        with torch.autocast(kind, enabled=False):
            parts = [Few.scored(ctx, nn.functional.linear(x.to(ctx.dtype), cast), ids)
                     for x, ids in zip(states.split(ctx.size), tokens.split(ctx.size))]
        return torch.cat(parts)

    @staticmethod
    def scored(ctx, logits, tokens):
        """(n, V), (n,) -> (n, k)"""
        if ctx.cap:
            logits = ctx.cap * torch.tanh(logits / ctx.cap)
        return torch.stack(ctx.score(logits[None], tokens[None]), dim=-1)[0]

    @staticmethod
    def backward(ctx, gradient):
        states, tokens, weight = ctx.saved_tensors
        cast = weight.to(ctx.dtype)
        is_trained = ctx.needs_input_grad[2]
        if is_trained and weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        of_states = []
        for x, ids, g in zip(*(each.split(ctx.size) for each in (states, tokens, gradient))):
            x = x.to(ctx.dtype)
            logits = nn.functional.linear(x, cast).requires_grad_()
            with torch.enable_grad():
                found = Few.scored(ctx, logits, ids)
            [part] = torch.autograd.grad(found, logits, g)                      # (n, V)
            of_states.append(part @ cast)
            if is_trained and part.dtype == weight.dtype:
                weight.grad.addmm_(part.T, x)   # without another tensor of this size
            elif is_trained:
                weight.grad += part.T @ x
        return torch.cat(of_states).to(states.dtype), None, None, None


# ---- 3. adapters (LoRA, 2106.09685) ----------------------------------------------------------

def add_adapter(model, rank, alpha, dtype):
    """Freeze the weights and add B A alpha / rank, a product of two thin trained matrices, to each
    matrix except the embeddings and the head. At first it is 0. The frozen matrices are stored in
    the dtype of products, which round them anyway."""
    from peft import LoraConfig
    torch.manual_seed(0)                    # the same A in all processes and in a resumed run
    model.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear"))
    for module in model.modules():
        if hasattr(module, "base_layer"):
            module.base_layer.to(getattr(torch, dtype))


@contextlib.contextmanager
def without_adapter(model):
    """In this context the model's adapter is switched off, if it has one."""
    has_adapter = any("lora_" in name for name, _ in model.named_parameters())
    if has_adapter:
        model.disable_adapters()
    yield
    if has_adapter:
        model.enable_adapters()


def frozen_weights(model):
    """Yield the name and value of each weight, as if the model had no adapter."""
    for name, weight in model.state_dict().items():
        if "lora_" not in name:
            yield name.replace(".base_layer.", "."), weight


def base_of(folder):
    """Read to which model the adapter in a folder adds. -> folder or name; None without adapter"""
    path = Path(folder, "adapter_config.json")
    if not path.is_file():
        return None
    return json.loads(path.read_text("utf-8"))["base_model_name_or_path"]


def adapter_weights(folder):
    """Read the weights of a checkpoint's adapter. -> dict, by their names in the model"""
    return {re.sub("(lora_[AB])", r"\1.default", name.removeprefix("base_model.model.")): weight
            for name, weight in load_file(Path(folder, ADAPTER)).items()}


def with_adapter(model, folder):
    """Merge the adapter in a folder into the model. ValueError if it belongs to another model."""
    from peft import PeftModel, get_peft_model_state_dict
    model = PeftModel.from_pretrained(model, folder)
    unmatched = get_peft_model_state_dict(model).keys() ^ load_file(Path(folder, ADAPTER)).keys()
    if unmatched:
        raise ValueError(f"the adapter belongs to another model: {min(unmatched)} has no match")
    return model.merge_and_unload().requires_grad_(True)


def resolved(name):
    """Find the model from which a run starts: the last checkpoint if `name` is a run, else the
    model `name`. -> absolute path, or name"""
    path = last_checkpoint(name) or Path(name)
    return str(path.resolve()) if path.is_dir() else name


def source(cfg):
    """Find what to load the policy from: the last checkpoint of a resumed run if that has all
    weights, else --model. -> str"""
    last = last_checkpoint(cfg.resume_from_checkpoint) if cfg.resume_from_checkpoint else None
    has_all = last is not None and base_of(last) is None
    return str(last) if has_all else cfg.model


def last_checkpoint(run):
    """Find the newest checkpoint folder of a run; None if `run` has none, or is a model."""
    folders = [path for path in Path(run).glob("checkpoint-*")
               if path.name.removeprefix("checkpoint-").isdigit() and path.is_dir()]
    if folders and Path(run, "checkpoint.pt").is_file():        # else another trainer wrote them
        return max(folders, key=lambda path: int(path.name.removeprefix("checkpoint-")))
    return None
