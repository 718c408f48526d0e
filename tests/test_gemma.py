"""Test how lab/gemma.py saves the model that transformers reads, and that it keeps each run."""
import contextlib
import io
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from small_models import NEEDS, load_example, save_random
from small_runs import at_work

transformers = pytest.importorskip("transformers", reason=NEEDS)
pytest.importorskip("peft", reason=NEEDS)
import real  # noqa: E402
from lab import gemma, gemma_reward  # noqa: E402
from pretrained import export, models  # noqa: E402, F401  (before tests, which block some modules)

TINY = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 512}


# ---- 1. the weights --------------------------------------------------------------------------

def test_a_model_in_gguf_is_saved_so_that_texts_also_end_with_their_line(tmp_path, monkeypatch):
    base = save_random(tmp_path / "base", "gemma3_text", **TINY)
    model, tokenizer = models.load(base)
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
