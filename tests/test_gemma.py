"""Test how lab/gemma.py saves the model that transformers reads, and that it keeps each run."""
import json
import sys
from types import SimpleNamespace

import numpy
import pytest
from small_models import NEEDS, save_random

transformers = pytest.importorskip("transformers", reason=NEEDS)
import measuring  # noqa: E402
import real  # noqa: E402
from engines import export  # noqa: E402, F401  (before tests, which block some modules)
from lab import docs, gemma  # noqa: E402

TINY = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 512}


# ---- 1. the weights --------------------------------------------------------------------------

def test_a_model_in_gguf_is_saved_so_that_texts_also_end_with_their_line(tmp_path, monkeypatch):
    base = save_random(tmp_path / "base", "gemma3_text", **TINY)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["\n\n", "\n\n\n", "a\n"])
    model.hf_quantizer = SimpleNamespace(       # while it is there, the model cannot be saved
        remove_quantization_config=lambda model: delattr(model, "hf_quantizer"),
        quantization_config=SimpleNamespace(quant_method="gguf"))
    monkeypatch.setitem(sys.modules, "gguf", SimpleNamespace(GGUFReader=object))
    for name, loaded in (("AutoTokenizer", tokenizer), ("AutoModelForCausalLM", model)):
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained",
                            lambda folder, gguf_file, loaded=loaded, **_: loaded)
    gemma.convert(tmp_path / "m.gguf", tmp_path / "new")
    monkeypatch.undo()
    policy = real.load(tmp_path / "new")
    ends = policy.generation_config.eos_token_id
    assert ends[0] == real.TOKENIZER.eos_token_id
    texts = [real.TOKENIZER.convert_ids_to_tokens(i) for i in ends[1:]]
    assert texts[-2:] == ["\n\n", "\n\n\n"] and {*"".join(texts)} == {"\n"}


# ---- 2. the runs -----------------------------------------------------------------------------

@pytest.fixture
def small(tmp_path, monkeypatch):
    """A tiny random Gemma 3 as the base, whose runs are short."""
    base = save_random(tmp_path / "base", "gemma3_text", **TINY)
    job = gemma.JOB._replace(
        examples="", largest=9, held_out=2, K=2, P=2, G=2, T=3, M=4, steps=2)
    for name, value in {"FOLDER": tmp_path, "make_base": lambda: base, "JOB": job}.items():
        monkeypatch.setattr(gemma, name, value)
    for name in ("P", "G", "W", "T", "N", "M", "RATE", "TEMPERATURE", "HELD_OUT", "verify"):
        monkeypatch.setattr(real, name, getattr(real, name))
    (tmp_path / "case").mkdir()
    monkeypatch.chdir(tmp_path / "case")
    return base


def test_a_sweep_keeps_each_run_and_continues(small, tmp_path, monkeypatch, watch, stops):
    words = ["1e-3,0", "1e-2,0", "1e-3,1"]
    evaluated = watch(gemma, "evaluate", lambda folder, problems: folder)
    settings = watch(real, "main", lambda *_: (real.W, real.TEMPERATURE))
    first = gemma.collect(tmp_path / "store.json", words[:1])
    results = gemma.collect(tmp_path / "store.json", words)
    assert evaluated == ["../base", "trained", "trained", "trained"]
    assert settings == [(512, 1.0)] * 3
    assert [*results.items()][:2] == [*first.items()]
    assert [f"{rate},{seed}" for rate, seed in results] == [",0", *words]
    assert all(len(run["counts"]) == 6 for run in results.values())
    assert (tmp_path / "case/trained/model.safetensors").exists()
    assert measuring.Store(tmp_path / "store.json", {"settings": [*gemma.JOB]}).results == results
    assert gemma.describe(results).count(" | 0.000 | 0.000 | ") == 3
    monkeypatch.setattr(gemma, "JOB", gemma.JOB._replace(steps=3))
    stops("with other settings", gemma.collect, tmp_path / "store.json", words)


def test_a_text_counts_only_if_it_has_ended(small, monkeypatch):
    def load(folder, load=real.load):
        policy = load(folder)
        policy.generation_config.eos_token_id = [*range(0, 500, 2)]
        return policy
    monkeypatch.setattr(real, "load", load)
    prompts = [f"{i} and {i * i} make {chr(97 + i)}"[i % 5:] for i in range(24)]
    texts = gemma.complete(small, prompts, 1, greedy=True)
    monkeypatch.setattr(real, "T", 3)
    tokens = real.sample(load(small), real.encode(prompts, real.W), greedy=True)[:, real.W:]
    has_ended = [bool((row[row != real.PAD] % 2 == 0).any()) for row in tokens]
    assert not any(text for text, ended in zip(texts, has_ended) if not ended)
    assert 0 < sum(has_ended) < 24 and len({*texts}) > 2
    assert gemma.complete(small, prompts, 2, greedy=True)[::2] == texts
    assert len({*gemma.complete(small, prompts[:1], 40)}) > 2


def test_the_scores_tell_what_is_right_from_what_has_the_form(monkeypatch):
    texts = {True: ["5 * 8", "9 - 4"],
             False: ["5 * 8", "8 * 5", "5 + 8", "40", "9 - 4", "", "", ""]}
    monkeypatch.setattr(gemma, "complete", lambda folder, prompts, n, greedy=False: texts[greedy])
    scores = gemma.evaluate("", [{"prompt": "a\nb", "answer": [5, 8, 40]},
                                 {"prompt": "c\nd", "answer": [9, 4, 13]}])
    assert scores["counts"] == [2, 0] and scores["pass@1"] == 2 / 8 and scores["greedy"] == 1 / 2
    assert scores["formed"] == 4 / 8
    assert scores["samples"] == [["b", *texts[False][:4]]]
    for text in ("14 - 3", " 14 - 3\n"):
        assert gemma.verify([3, 14, 11], text) == 1
    for text in ("3 - 14", "14 - 3 = 11", "14 + 3", "12 - 1", "14 - \u0663", "", "014 - 3"):
        assert gemma.verify([3, 14, 11], text) == 0


def test_held_out_problems_have_other_numbers_than_those_to_train_on(tmp_path, monkeypatch):
    monkeypatch.setattr(gemma, "FOLDER", tmp_path)
    held_out = gemma.make_problems()
    train = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    pairs = [{tuple(row["answer"][:2]) for row in rows} for rows in (held_out, train)]
    assert not pairs[0] & pairs[1] and [len(held_out), len(train)] == [258, 246]
    assert len(held_out) == 3 * len(pairs[0])
    for row in held_out + train:
        a, b, value = row["answer"]
        assert row["prompt"].endswith(f"\n{a} and {b} make {value}:")
        assert row["prompt"].count(f"\n{a} and {b} ") == 1 and a > b
        assert any(gemma.verify(row["answer"], f"{a} {sign} {b}") for sign in "+-*")


def test_the_page_has_the_table_and_the_curves_of_the_stored_runs():
    results, _ = docs.load("gemma", "")
    page = (gemma.DOCS / "real-models.md").read_text()
    assert page.count(
        f"gemma -->\n{gemma.CHART}{gemma.describe(results)}<!-- end of gemma -->") == 1
    seeds = {name: numpy.shape(rows) for name, rows in gemma.rewards(results).items()}
    assert seeds["learning rate 3e-6"] == (3, gemma.JOB.steps) and len(seeds) == 4
