"""Try many families of models with pretrained/train.py: python -m lab.families (make families).

Each family of lab/families.json, which contains the changes of its shape, gets a tiny model with
random weights. With this model, we make the check that each run makes before its first step: the
sampler computes what the trainer computes, and a prompt scores the same alone and next to a longer
one. The families and the errors of those that fail go to docs/real-models.md.
"""
import contextlib
import io
import json
import tempfile
import textwrap
from pathlib import Path

import common
import grpo
from lab.docs import put

SHAPES = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
SMALL = {"vocab_size": grpo.VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 32,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 128}
TOKENS = {"eos_token_id": grpo.EOS, "pad_token_id": grpo.PAD, "bos_token_id": None}
PROMPTS = ("(3+4)=", "3>", "((((3+4)-5)*4)-2)=", "Say yes:")


def save_random(folder, family="llama", seed=0, scale=1.0, **changes):
    """Write a model of a family and the tokenizer of pretrained.export, without a chat template.
    The random weights are so large that tokens differ in probability. -> folder"""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    from pretrained import export
    shape = SMALL | SHAPES.get(family, {}) | changes
    if "text_config" in shape:                          # next to a part that reads pictures
        shape = {name: shape[name] for name in ("text_config", "vision_config") if name in shape}
        shape["text_config"] = SMALL | TOKENS | shape["text_config"]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **TOKENS | shape))
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data.mul_(4 * scale)
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=export.make_tokenizer(), eos_token="<|eos|>",
        pad_token="<|pad|>").save_pretrained(folder)
    return folder


def attempt(family):
    """Check a tiny model of a family as a run does. -> why it fails, or "" """
    from pretrained import train
    errors = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        try:
            with contextlib.redirect_stderr(errors):
                save_random(folder, family)
                cfg = train.Config(model=family, device="cpu", max_completion_length=16)
                problems = [common.Problem(prompt, "") for prompt in PROMPTS]
                train.check_sampler(train.Policy(folder, cfg), problems)
        except SystemExit:
            return errors.getvalue().splitlines()[-1].removeprefix("error: ")
        except Exception as error:                      # not even a tiny model can be made
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


def main():
    import transformers
    results = {}
    for family in SHAPES:
        results[family] = attempt(family)
        print(f"{family:20} {results[family] or 'works'}", flush=True)
    works = [family for family in results if not results[family]]
    text = (f"With transformers {transformers.__version__}, these {len(works)} families work: "
            f"{', '.join(works)}.")
    refused = "".join(f"- {reason.removeprefix('--model ').partition(';')[0]}\n"
                      for reason in results.values() if reason)
    text = f"{textwrap.fill(text, 120)}\n\nThese are refused in one line:\n\n{refused}"
    put("families", text, "families")


if __name__ == "__main__":
    main()
