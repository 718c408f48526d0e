"""Test that real.py, and the rungs of the path on it, compute what nano.py computes, on models of
several families; and the mistakes that people make here: padding, ends, temperature, templates."""
import ast
import inspect
import json
import random
import re
import types

import pytest
import torch
from small_models import NEEDS, config_of, load_example, save_random
from torch.testing import assert_close as same

import nano
from learn.path import rungs

transformers = pytest.importorskip("transformers", reason=NEEDS)
import real  # noqa: E402

from pretrained import export  # noqa: E402, F401  (before the tests, which block some modules)

QUESTIONS = ["(3+4)=", "3>", "((((3+4)-5)*4)-2)=", "12", "Say yes:"]
FAMILIES = {"llama": {}, "qwen2": {}, "qwen3": {}, "gemma2": {}, "granite": {}, "gpt2": {},
            "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8,
                            "layer_types": ["sliding_attention", "full_attention"]}}
SMALL = {"P": 4, "G": 4, "W": 90, "T": 24, "N": 7, "M": 3, "HELD_OUT": 3}
GRAPH = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm",
         "self_attn.o_proj": "out", "mlp.down_proj": "down"}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in SMALL.items():
        monkeypatch.setattr(real, name, value)


def module_of(source, **values):
    """Execute a script as a module, and set names in it."""
    module = types.ModuleType("script")
    exec(compile(source, "script.py", "exec"), module.__dict__)
    module.__dict__.update(values)
    return module


def random_model(tmp_path, family="llama", **changes):
    return save_random(tmp_path / family, family, **(FAMILIES[family] | changes))


def batch_of(folder, G=4):
    """A policy, its outputs to questions of different lengths, and log pi of the sampler."""
    policy = real.load(folder)
    torch.manual_seed(0)
    prompts = real.encode([question for question in QUESTIONS for _ in range(G)], real.W)
    with torch.no_grad():
        parts = [real.sample_few(policy, few, False) for few in prompts.split(real.N)]
    return policy, *map(torch.cat, zip(*parts))


def gradient(policy, loss):
    policy.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in policy.named_parameters()}


# ---- nano.py ---------------------------------------------------------------------------------

def training(script):
    """The advantages, loss and descend of a script, and its loop from the problems on."""
    loop = inspect.getsource(script.main).split("    optimizer = ")[1].split("    print(\"held-out")[0]
    return [inspect.getsource(one) for one in (script.advantages, script.surrogate_loss,
                                               script.descend)] + [loop]


def test_the_training_step_is_that_of_nano_word_for_word():
    assert training(real) == training(nano) and "descend(policy, optimizer" in training(real)[-1]
    equations = [re.findall(r"^.*\(\d\)$", script.__doc__, re.M) for script in (real, nano)]
    assert equations[0] == equations[1] != []
    names = {name.split(".")[0] for node in ast.walk(ast.parse(inspect.getsource(real)))
             for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else
                          [node.module] if isinstance(node, ast.ImportFrom) else [])}
    assert names == {"json", "random", "re", "sys", "time", "torch", "transformers"}


def as_llama(gpt, folder):
    """Write nano.py's GPT and its vocabulary as a Llama of transformers."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    size = nano.D // nano.H
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(nano.VOCABULARY), hidden_size=nano.D, intermediate_size=176, head_dim=size,
        num_hidden_layers=2, num_attention_heads=nano.H, num_key_value_heads=1,
        rms_norm_eps=torch.finfo(torch.float32).eps, tie_word_embeddings=True, rope_theta=10_000.0,
        bos_token_id=None, eos_token_id=nano.END, max_position_embeddings=256))
    with torch.no_grad():
        for name, weight in llama.named_parameters():
            weight.copy_(of_llama(name, dict(gpt.named_parameters())))
    llama.save_pretrained(folder)
    words = Tokenizer(models.WordLevel(dict(zip(nano.VOCABULARY, range(99))), unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("<.*?>|."), "isolated")
    words.decoder = decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words,
                                         eos_token="<end>").save_pretrained(folder)
    return folder


def of_llama(name, ours):
    """The part of nano.py's weights that a weight of the Llama corresponds to."""
    name = name.removeprefix("model.").removesuffix(".weight")
    if not name.startswith("layers."):
        return ours["norm.weight" if name == "norm" else "embed"]
    layer, part = name.removeprefix("layers.").split(".", 1)
    block = f"blocks.{layer}."
    if part in GRAPH:
        return ours[f"{block}{GRAPH[part]}.weight"]
    rows = ["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]
    key = part.split(".")[1]
    if key in rows[1]:
        return ours[f"{block}gate_up.weight"].chunk(2)[rows[1].index(key)]
    size = nano.D // nano.H
    return ours[f"{block}qkv.weight"].split([nano.D, size, size])[rows[0].index(key)]


@pytest.fixture(scope="module")
def gpt_and_llama(tmp_path_factory):
    torch.manual_seed(0)
    gpt = nano.GPT()
    for weight in gpt.parameters():
        if weight.dim() == 2:
            weight.data.normal_(std=0.2)
    return gpt, as_llama(gpt, tmp_path_factory.mktemp("llama"))


def run_two_steps(source, load, *words, **values):
    """Run main of a script for two steps. -> what it printed, and the gradient of each update"""
    values |= {"P": 4 if "\nG = " in source else 16, "HELD_OUT": 2}
    values |= {"print": lambda *words, **_: printed.append(" ".join(map(str, words)))}
    module = module_of(source.replace("n=2048", "n=40"), **values)
    printed, seen, descend = [], [], module.descend
    load(module)

    def evaluate(*_):
        torch.manual_seed(1)
        return "not evaluated"

    def watched(policy, *others):
        descend(policy, *others)
        seen.append({name: weight.grad.clone() for name, weight in policy.named_parameters()})
    module.evaluate, module.descend = evaluate, watched
    module.main(*words, seed=0, steps=2)
    return printed, seen


@pytest.mark.parametrize("name", rungs.REAL_RUNGS)
def test_a_rung_has_the_gradients_of_nano_s_rung_on_the_same_policy(name, gpt_and_llama, tmp_path,
                                                                    monkeypatch):
    monkeypatch.chdir(tmp_path)
    gpt, folder = gpt_and_llama
    both = {"sample_problem": nano.sample_problem, "RATE": 1e-3,
            "verify": lambda answer, text: (len(text) % 3) / 2}

    def use(module):
        module.make_base = lambda policy, *_: policy.load_state_dict(gpt.state_dict())
    out, ours = run_two_steps(rungs.script(name), use, **both)
    source = rungs.real_script(name)
    problems = [nano.sample_problem(random.Random(seed)) for seed in range(20)]
    tmp_path.joinpath("data").write_text("\n".join(
        json.dumps({"prompt": problem[0], "answer": problem[1]}) for problem in problems))
    again, theirs = run_two_steps(source, lambda module: None, folder, "data", **both, M=100,
                                  N=100, T=nano.T, W=nano.W + 5)
    lines = [[line for line in one if line.startswith("step")] for one in (out, again)]
    assert lines[0] == lines[1] and len(lines[0]) == 2
    assert len(ours) == len(theirs) >= 2 and len(source.splitlines()) <= 215
    for one, other in zip(ours, theirs):
        for weight, grad in other.items():
            expected = of_llama(weight, one)
            same(grad, expected, rtol=0, atol=2e-4 * expected.abs().max().item() + 1e-8)
