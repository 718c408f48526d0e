"""Test that lab/gemma.py converts a Gemma 3 in GGUF without loss, and that it keeps each run."""
import contextlib
import io
import json
import subprocess

import numpy
import pytest
import torch
from small_models import NEEDS, load_example, save_random
from small_runs import at_work
from torch.testing import assert_close as same

transformers = pytest.importorskip("transformers", reason=NEEDS)
pytest.importorskip("peft", reason=NEEDS)
import real  # noqa: E402
from lab import gemma, gemma_reward  # noqa: E402
from pretrained import export, models  # noqa: E402, F401  (before tests, which block some modules)

SIZE, HEAD, INNER, LAYERS = 32, 8, 48, 2
TINY = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 512}
PLAIN = [*"\u2581ahelo012", "he", "ll", "hell", "hello", "\u25811"]


# ---- 1. the weights --------------------------------------------------------------------------

@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A model in GGUF that was converted, and its tensors in GGUF."""
    gguf = pytest.importorskip("gguf", reason="needs gguf: make gemma")
    rng = numpy.random.default_rng(0)
    folder = tmp_path_factory.mktemp("gemma")
    writer = gguf.GGUFWriter(folder / "tiny.gguf", "gemma3")
    for name, value in {"embedding_length": SIZE, "block_count": LAYERS,
                        "attention.key_length": HEAD, "attention.value_length": HEAD,
                        "feed_forward_length": INNER, "attention.head_count": 2,
                        "attention.head_count_kv": 1, "context_length": 64,
                        "attention.sliding_window": 8}.items():
        writer.add_uint32(f"gemma3.{name}", value)
    writer.add_float32("gemma3.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("gemma3.rope.freq_base", 1e6)
    pieces = [("<pad>", 3), ("<eos>", 3), ("<bos>", 3), ("<unk>", 3), ("<turn>", 3), ("\n", 4),
              ("\n\n", 4), *((f"<0x{i:02X}>", 6) for i in range(256)),
              *((piece, 1) for piece in PLAIN)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece for piece, _ in pieces])
    writer.add_token_scores([float(-i) for i in range(len(pieces))])
    writer.add_token_types([kind for _, kind in pieces])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    tensors = {}

    def add(name, *shape):
        tensors[name] = rng.uniform(0.5, 1.5, shape).astype("float32")
        writer.add_tensor(name, tensors[name])
    add("token_embd.weight", len(pieces), SIZE)
    add("output_norm.weight", SIZE)
    for i in range(LAYERS):
        for part, shape in {
                "attn_q": (2 * HEAD, SIZE), "attn_k": (HEAD, SIZE), "attn_v": (HEAD, SIZE),
                "attn_output": (SIZE, 2 * HEAD), "attn_q_norm": (HEAD,), "attn_k_norm": (HEAD,),
                "ffn_gate": (INNER, SIZE), "ffn_up": (INNER, SIZE), "ffn_down": (SIZE, INNER),
                "attn_norm": (SIZE,), "post_attention_norm": (SIZE,), "ffn_norm": (SIZE,),
                "post_ffw_norm": (SIZE,)}.items():
            add(f"blk.{i}.{part}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    gemma.convert(folder / "tiny.gguf", folder / "model")
    return folder / "model", tensors


def test_a_model_in_gguf_becomes_one_that_can_be_trained(converted):
    folder, tensors = converted
    model = models.load_model(folder)                           # fails if a weight is missing
    assert type(model).__name__ == "Gemma3ForCausalLM" and not models.is_quantized(model)
    weights = dict(model.named_parameters())
    assert len(weights) == len(tensors)
    layer = weights["model.layers.1.mlp.down_proj.weight"].data
    same(layer, torch.tensor(tensors["blk.1.ffn_down.weight"]))
    norm = weights["model.norm.weight"].data                    # GGUF has the scale, 1 + weight
    same(norm, torch.tensor(tensors["output_norm.weight"]) - 1, atol=1e-6, rtol=0)
    assert model.config.head_dim == HEAD and model.config.sliding_window == 8


def test_texts_begin_with_bos_are_spelled_in_bytes_if_necessary_and_end_with_their_line(converted):
    policy = real.load(converted[0])
    tokenizer = real.TOKENIZER
    text = "hello \u00e9 1<turn>\n\n\n2"
    tokens = tokenizer(text).input_ids
    pieces = tokenizer.convert_ids_to_tokens(tokens)
    assert pieces == ["<bos>", "hello", "\u2581", "<0xC3>", "<0xA9>", "\u25811", "<turn>", "\n\n",
                      "\n", "2"]
    assert tokenizer.decode(tokens) == "<bos>" + text
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text.replace("<turn>", "")
    assert policy.generation_config.eos_token_id == [1, 5, 6]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id) == (0, 2)


# ---- 2. the runs -----------------------------------------------------------------------------

@pytest.fixture
def small(tmp_path, monkeypatch):
    """A tiny random Gemma 3 as the base, whose runs are short and in this process."""
    base = save_random(tmp_path / "base", "gemma3_text", **TINY)
    settings = {"FOLDER": tmp_path, "make_base": lambda: base, "NUM_TEST": 6, "LARGEST": 9,
                "P": 2, "G": 2, "T": 3, "STEPS": 2, "EXAMPLES": ""}
    for name, value in settings.items():
        monkeypatch.setattr(gemma, name, value)
    for name in ("P", "G", "T", "RATE", "HELD_OUT", "verify"):
        monkeypatch.setattr(real, name, getattr(real, name))

    def execute(command, cwd, **_):
        printed = io.StringIO()
        with at_work(cwd), contextlib.redirect_stdout(printed):
            exec(command[2], {})
        return subprocess.CompletedProcess(command, 0, printed.getvalue())
    monkeypatch.setattr(gemma.subprocess, "run", execute)
    monkeypatch.setattr(gemma, "run", lambda script, folder, *flags: load_example().main(
        [*map(str, flags), "--output_dir", str(folder)]))
    return base


def test_a_sweep_keeps_each_run_and_continues(small, tmp_path, monkeypatch, watch, stops):
    cases = gemma.cases_of({gemma.ALL: (1e-3,), gemma.LORA: (1e-2,)}, (0,))
    evaluated = watch(gemma, "evaluate", lambda folder, problems: folder.name)
    first = gemma.measure(tmp_path / "store.json", dict([*cases.items()][:1]))
    kept = json.dumps(first)
    calls = []
    train = gemma.TRAIN[gemma.LORA]
    monkeypatch.setattr(gemma, "TRAIN", {gemma.LORA: lambda *case: calls.append(1) or train(*case)})
    results = gemma.measure(tmp_path / "store.json", cases)
    assert calls == [1] and json.dumps({name: results[name] for name in first}) == kept
    assert [*results] == ["machine", "settings", "base", *cases]
    assert evaluated == ["base", "trained", "checkpoint-2"]
    for name in cases:
        assert results[name]["rewards"] == [0.0, 0.0] and len(results[name]["counts"]) == 6
    assert json.loads((tmp_path / "store.json").read_text()) == results
    monkeypatch.setattr(gemma, "STEPS", 3)
    stops("with other settings", gemma.measure, tmp_path / "store.json", cases)


def test_texts_are_those_of_the_sampler_of_real_py_up_to_their_end(small, monkeypatch):
    load = real.load

    def load_with_ends(folder):
        policy = load(folder)
        policy.generation_config.eos_token_id = [*range(0, 500, 2)]
        return policy
    monkeypatch.setattr(real, "load", load_with_ends)
    monkeypatch.setattr(real, "T", 3)
    monkeypatch.setattr(gemma, "T", 3)
    prompts = [f"{i} and {i * i} make {chr(97 + i)}"[i % 5:] for i in range(24)]
    policy = real.load(small)
    expected = []
    for row in real.sample(policy, real.encode(prompts, real.W), greedy=True)[:, real.W:].tolist():
        row = [token for token in row if token != real.PAD]
        expected.append(real.TOKENIZER.decode(row[:-1]).strip() if row[-1] % 2 == 0 else "")
    assert "" in expected and len({*expected}) > 2
    assert gemma.complete(small, prompts, 1, greedy=True) == expected
    assert gemma.complete(small, prompts, 2, greedy=True)[::2] == expected
    assert len({*gemma.complete(small, prompts[:1], 40)}) > 2


def test_the_scores_tell_what_is_right_from_what_has_the_form(monkeypatch):
    texts = {True: ["5 * 8", "9 - 4"],
             False: ["5 * 8", "8 * 5", "5 + 8", "40", "9 - 4", "", "", ""]}
    monkeypatch.setattr(gemma, "complete", lambda folder, prompts, n, greedy=False: texts[greedy])
    scores = gemma.evaluate("", [{"prompt": "a\nb", "answer": [5, 8, 40]},
                                 {"prompt": "c\nd", "answer": [9, 4, 13]}])
    assert scores["counts"] == [2, 0] and scores["pass@1"] == 2 / 8 and scores["greedy"] == 1 / 2
    assert scores["formed"] == 4 / 8 and scores["right of formed"] == 2 / 4
    assert scores["samples"] == [["b", *texts[False][:4]]]


@pytest.mark.parametrize("text, is_right", [
    ("14 - 3", True), (" 14 - 3\n", True), ("3 - 14", False), ("14 - 3 = 11", False),
    ("14 + 3", False), ("12 - 1", False), ("14 - \u0663", False), ("", False)])
def test_an_answer_is_one_expression_of_both_numbers_with_the_value(text, is_right):
    found = gemma_reward.correct(completions=[text], answer=[[3, 14, 11]], prompts=[""])
    assert found == gemma_reward.reward(correct=found, completions=[text]) == [float(is_right)]


def test_held_out_problems_have_other_numbers_than_those_to_train_on(tmp_path, monkeypatch):
    monkeypatch.setattr(gemma, "FOLDER", tmp_path)
    held_out = gemma.make_problems()
    train = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    pairs = [{tuple(row["answer"][:2]) for row in rows} for rows in (held_out, train)]
    assert not pairs[0] & pairs[1] and [len(held_out), len(train)] == [258, 246]
    for row in held_out + train:
        a, b, value = row["answer"]
        assert row["prompt"].endswith(f"\n{a} and {b} make {value}:") and a > b
        assert value in (a + b, a - b, a * b) and row["prompt"].count(f"{a} and {b} ") == 1


def test_the_page_has_the_table_of_the_stored_runs():
    results = json.loads((gemma.DOCS / "gemma.json").read_text())
    page = (gemma.DOCS / "real-models.md").read_text()
    assert page.count(f"gemma -->\n{gemma.describe(results)}<!-- end of gemma -->") == 1
