"""Convert the policy of a run into a Hugging Face folder.

  python -m engines.export RUN DIR           # the trained policy; with --base the one before RL

Transformers, TRL and vLLM cannot read our checkpoints, but our policy computes what a Llama
computes. So only the names of the weights change, and not a single bit of the weights themselves.
The tokenizer has a token for each byte, and merges none. <think>, <answer> and similar tokens are
ordinary added tokens, so trainers keep them when they decode with skip_special_tokens. Only <|eos|>
and <|pad|> are special tokens. Needs engines/requirements.txt.
"""
import engines.import_path  # noqa: F401, I001  (before all others)
import importlib.util
import string
from pathlib import Path

import torch

import common
import grpo
import plumbing
from report import ask, parser, start

NAMES = {"embed": "model.embed_tokens", "norm": "model.norm"}
LAYER_NAMES = {
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj",
    "out": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
    "down": "mlp.down_proj"}
SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "intermediate_size")
# The chat template pads prompts with PAD on the left, as the policy has learned to read them. The
# width is a number of bytes.
TEMPLATE = ("{% set prompt = messages[-1]['content'] %}"
            "{{ '<|pad|>' * (WIDTH - prompt.encode()|length) + prompt }}")


def llama_name(name):
    """Translate the name of a weight of our GPT into that of transformers. -> str"""
    module, _, kind = name.rpartition(".")
    if module in NAMES:
        return f"{NAMES[module]}.{kind}"
    _, number, part = module.split(".", 2)                      # blocks.0.query
    return f"model.layers.{number}.{LAYER_NAMES[part]}.{kind}"


def make_llama(policy, cfg):
    """Copy a policy into a Llama of transformers, which samples as the run did."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    llama = LlamaForCausalLM(LlamaConfig(
        **{name: getattr(cfg, name) for name in SHAPE}, vocab_size=grpo.VOCAB_SIZE,
        rms_norm_eps=torch.finfo(torch.float32).eps,            # torch's own; 1e-6 changes logits
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=grpo.EOS,
        pad_token_id=None))             # an id here would keep the embedding of PAD from learning
    weights = {llama_name(name): weight for name, weight in policy.named_parameters()}
    llama.load_state_dict(weights | {"lm_head.weight": policy.embed.weight})
    llama.generation_config = GenerationConfig(
        do_sample=True, temperature=cfg.temperature, top_k=0, top_p=1.0,
        max_new_tokens=cfg.max_completion_length, eos_token_id=grpo.EOS, pad_token_id=grpo.PAD)
    return llama


def make_tokenizer():
    """Make common.TOKENIZER as a tokenizer of the package tokenizers."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode
    # byte-level tokenizers write each byte as one character, the byte itself if it is printable
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    for name in common.SPECIAL_TOKENS:
        is_special = name.startswith("<|")
        tokenizer.add_tokens([AddedToken(name, special=is_special, normalized=False)])
    return tokenizer


def export(run, folder, name="checkpoint.pt"):
    """Write the policy in a file of a run to a new folder, as a model of transformers. The weights
    come last, so that after a kill nothing loads a folder that lacks a file."""
    from transformers import PreTrainedTokenizerFast
    script, cfg = ask.read_run(run)
    policy = ask.load_policy(run, script, cfg, name)
    width = common.load_task(cfg, grpo.verify).prompt_width
    PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(), eos_token="<|eos|>", pad_token="<|pad|>",
        padding_side="left", clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE.replace("WIDTH", str(width))).save_pretrained(folder)
    readme = string.Template(Path(__file__).with_suffix(".md").read_text("utf-8"))
    plumbing.write(folder / "README.md", readme.substitute(
        task=cfg.task, name=Path(run).name, width=width,
        size=f"{cfg.hidden_size} x {cfg.num_hidden_layers}"))
    make_llama(policy, cfg).save_pretrained(folder)
    mode = (folder / "README.md").stat().st_mode
    (folder / "model.safetensors").chmod(mode)      # transformers lets only its owner read it


def main(argv=None):
    arguments = parser(__doc__)
    arguments.add_argument("source", metavar="RUN", type=Path, help="run folder")
    arguments.add_argument("target", metavar="DIR", type=Path, help="new folder")
    arguments.add_argument("--base", action="store_true", help="export the policy before RL")
    args = arguments.parse_args(argv)
    if args.target.is_file() or args.target.is_dir() and any(args.target.iterdir()):
        common.fail(f"{args.target}: is not empty; name a new folder")
    if importlib.util.find_spec("transformers") is None:        # it brings the other packages
        common.fail("transformers is missing: pip install -r engines/requirements.txt")
    export(args.source, args.target, "base.pt" if args.base else "checkpoint.pt")
    print(f"{args.target}: its README.md shows how to use it")


if __name__ == "__main__":
    start(main)
