"""python -m tools.export writes the policy of a run as a Hugging Face folder, which computes the
same, and makes a run of it again."""
import dataclasses
import importlib.util
import json
import logging
import os
import random
import re
import shlex
import shutil
import sys

os.environ["HF_HUB_OFFLINE"] = "1"          # before transformers is imported: no test asks a server

import pytest
import torch
from conftest import ROOT, every_script
from small_runs import arguments, begun_from, changed_weights, contents, load, policy_of

import common
import grpo
from tools import ask, export

transformers = pytest.importorskip("transformers", reason="needs examples/requirements.txt")
tokenizers = pytest.importorskip("tokenizers", reason="needs examples/requirements.txt")
safetensors = pytest.importorskip("safetensors.torch", reason="needs examples/requirements.txt")

# A run that learns what an answer looks like; without signal, the bonus changes the policy.
SMALL = {"device": "cpu", "operands": "2-5", "hidden_size": 32, "num_attention_heads": 2,
         "num_hidden_layers": 1, "intermediate_size": 32, "base_steps": 300, "base_batch_size": 16,
         "textbook_share": 1, "num_prompts": 2, "num_generations": 2, "num_eval_problems": 4,
         "num_eval_samples": 2, "max_steps": 1, "learning_rate": 0.001, "entropy_coef": 0.1,
         "temperature": 0.7}
TOKENS = range(grpo.PAD + 1)                # behind them, the vocabulary is only filled up


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("export")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "make_console", common.Console)
        patch.chdir(folder)
        grpo.main(arguments(SMALL | {"output_dir": "run"}))
    return folder / "run"


@pytest.fixture(scope="module")
def exported(trained):
    """The Hugging Face folder of that run."""
    export.main([str(trained), str(trained.parent / "exported")])
    return trained.parent / "exported"


@pytest.fixture(scope="module")
def tokenizer(exported):
    return transformers.AutoTokenizer.from_pretrained(exported)


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run, which a test may damage."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def folder(exported, tmp_path):
    """A copy of the Hugging Face folder, which a test may damage."""
    return shutil.copytree(exported, tmp_path / "folder")


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch, capsys):
    """transformers talks: bars of progress, tables of weights, advice."""
    transformers.logging.set_verbosity_warning()
    transformers.logging.enable_progress_bar()
    handlers = [logging.StreamHandler(sys.stderr)]                  # that of this test
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", handlers)


@pytest.fixture
def refused(capsys, tmp_path):
    """refused(words, *said): exit code 2, one line on stderr that says this, nothing written."""
    def call(words, *said):
        before = contents(tmp_path)
        with pytest.raises(SystemExit) as exit:
            export.main([str(word) for word in words])
        printed = capsys.readouterr()
        assert exit.value.code == 2 and printed.out == ""
        assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
        for words in said:
            assert words in printed.err
        assert contents(tmp_path) == before
    return call


def make_run(folder, script=grpo, **flags):
    """A run folder with a policy that was not trained, and whose every weight is another, those of
    the norms included. -> GPT"""
    cfg = script.Config(device="cpu", **flags)
    policy = script.GPT(cfg)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in policy.parameters():
            if weight.dim() == 1:
                weight += 0.5 * torch.rand(len(weight), generator=generator)
    config = {field.name: getattr(cfg, field.name) for field in common.flags_of(type(cfg))}
    folder.mkdir()
    record = {"script": f"{script.__name__}.py", "config": config}
    common.write(folder / "config.json", json.dumps(record))
    common.write(folder / "base.pt", policy.state_dict())
    common.write(folder / "checkpoint.pt", {"policy": policy.state_dict()})
    return policy


def load_gpt(run, name="checkpoint.pt"):
    """The policy of a run as the scripts have it. -> GPT, Config"""
    weights, cfg = export.read_policy(run, name)
    policy = grpo.GPT(cfg)
    policy.load_state_dict(weights)
    return policy, cfg


def load_llama(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def change_config(folder, **values):
    """Write other values into config.json of a Hugging Face folder."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_weights(folder, change):
    """Call change(weights) on the weights of a Hugging Face folder."""
    path = folder / "model.safetensors"
    weights = safetensors.load_file(path)
    change(weights)
    path.unlink()
    safetensors.save_file(weights, path, metadata={"format": "pt"})


@torch.no_grad()
def difference(policy, llama):
    """How far the logits are apart on random tokens, as a share of the largest."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(grpo.VOCAB_SIZE, (4, 40), generator=generator)
    ours = policy(ids)
    return ((ours - llama(ids).logits).abs().max() / ours.abs().max()).item()


# ---- it computes the same --------------------------------------------------------------------

@pytest.mark.parametrize("size, layers, heads, kv_heads, inner", [
    (32, 1, 4, 1, 48), (16, 2, 1, 1, 16), (48, 3, 4, 4, 40), (64, 2, 8, 2, 176), (24, 1, 2, 2, 8)])
def test_the_llama_computes_the_logits_of_the_policy(tmp_path, size, layers, heads, kv_heads,
                                                     inner):
    policy = make_run(tmp_path / "run", hidden_size=size, num_hidden_layers=layers,
                      num_attention_heads=heads, num_key_value_heads=kv_heads,
                      intermediate_size=inner)
    export.main([str(tmp_path / "run"), str(tmp_path / "folder")])
    llama = load_llama(tmp_path / "folder")
    assert type(llama) is transformers.LlamaForCausalLM
    assert difference(policy, llama) < 1e-5


def test_with_the_usual_eps_logits_move(tmp_path):
    """So that the comparison sees it, and the folder has to name torch's own."""
    policy = make_run(tmp_path / "run")
    export.main([str(tmp_path / "run"), str(tmp_path / "folder")])
    assert difference(policy, load_llama(tmp_path / "folder")) < 1e-5
    change_config(tmp_path / "folder", rms_norm_eps=1e-6)
    assert difference(policy, load_llama(tmp_path / "folder")) > 1e-4


def test_the_weights_are_those_of_the_run_bit_for_bit(trained, exported):
    theirs = safetensors.load_file(exported / "model.safetensors")
    ours = policy_of(trained)
    assert len(theirs) == len(ours)
    assert changed_weights({export.llama_name(name): ours[name] for name in ours}, theirs) == []


def test_base_is_what_the_run_started_from(trained, tmp_path, capsys):
    assert changed_weights(policy_of(trained), load(trained / "base.pt"))
    export.main([str(trained), str(tmp_path / "base"), "--base"])
    said = f"{tmp_path / 'base'}: README.md in it says how to use it\n"
    assert capsys.readouterr() == (said, "")
    base, _ = load_gpt(trained, "base.pt")
    assert difference(base, load_llama(tmp_path / "base")) < 1e-5


@every_script
def test_policies_of_every_script_are_exported(script, tmp_path):
    policy = make_run(tmp_path / "run", script, hidden_size=16, intermediate_size=16)
    export.main([str(tmp_path / "run"), str(tmp_path / "folder")])
    assert difference(policy, load_llama(tmp_path / "folder")) < 1e-5


def test_the_embedding_of_pad_learns_as_policies_read_it(exported):
    llama = load_llama(exported)
    ids = torch.tensor([[grpo.PAD, 49, 43, 49, 61]])
    llama(ids).logits[:, -1].logsumexp(dim=-1).sum().backward()
    gradients = llama.model.embed_tokens.weight.grad
    weights = torch.nn.Parameter(llama.model.embed_tokens.weight.detach().clone())
    assert llama.model.embed_tokens.padding_idx is None
    assert gradients.shape == weights.shape and gradients[grpo.PAD].any()


# ---- the tokenizer ---------------------------------------------------------------------------

def random_text(rng):
    """Characters of all planes and kinds, between them tokens, whole or in part."""
    blocks = [(0, 32), (32, 127), (127, 256), (0x300, 0x370), (0x2000, 0x2070), (0xd7f0, 0xd800),
              (0xe000, 0x10000)] + [(plane << 16, plane + 1 << 16) for plane in range(1, 17)]
    parts = []
    for _ in range(rng.randint(0, 20)):
        kind = rng.random()
        if kind < 0.2:
            parts.append(rng.choice(grpo.SPECIAL_TOKENS))
        elif kind < 0.4:
            name = rng.choice(grpo.SPECIAL_TOKENS)
            parts.append(rng.choice([name[:-1], name[1:], f" {name} ", f"\n{name}\t", name.upper(),
                                     "  ", "\r\n", "e\u0301", "\u00e9", "\u212b", "\ufeff"]))
        else:
            parts.append(chr(rng.randrange(*rng.choice(blocks))))
    return "".join(parts)


def test_texts_become_the_tokens_of_the_scripts_and_texts_again(tokenizer):
    rng = random.Random(0)
    texts = [random_text(rng) for _ in range(1_000)]
    assert {ord(letter) >> 16 for letter in "".join(texts)} == set(range(17))
    for text in texts:
        ids = tokenizer(text).input_ids
        assert ids == grpo.TOKENIZER.encode(text, allowed_special="all"), ascii(text)
        assert tokenizer.decode(ids) == text == grpo.decode(ids)


def test_random_tokens_become_the_texts_of_the_scripts(tokenizer):
    rng = random.Random(0)
    for _ in range(1_000):
        first = rng.choice([0, 0x80, 0xc0, 256])        # few bytes of other texts are no ASCII
        ids = [rng.randrange(first, len(TOKENS)) for _ in range(rng.randint(0, 20))]
        assert tokenizer.decode(ids) == grpo.decode(ids), ids


def test_every_token_is_the_same(tokenizer):
    assert len(tokenizer) == len(TOKENS)
    for i in TOKENS:
        assert tokenizer.decode([i]) == grpo.decode([i]), i
    assert tokenizer.convert_tokens_to_ids(grpo.SPECIAL_TOKENS) == list(range(256, grpo.PAD + 1))
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (grpo.EOS, grpo.PAD)
    assert tokenizer.padding_side == "left"


def test_what_a_verifier_reads_is_not_skipped_as_special(tokenizer, exported):
    alone = tokenizers.Tokenizer.from_file(str(exported / "tokenizer.json"))
    names = "".join(name for name in grpo.SPECIAL_TOKENS if not name.startswith("<|"))
    ids = grpo.TOKENIZER.encode(f"<|pad|>{names} 7<|eos|><|pad|>", allowed_special="all")
    assert "<think></think><answer></answer><search>" in names
    assert tokenizer.decode(ids, skip_special_tokens=True) == f"{names} 7"
    assert alone.decode(ids, skip_special_tokens=True) == f"{names} 7"


def test_decoding_leaves_the_spaces_before_punctuation(tokenizer):
    text = "is it 3 , or 4 ? I 'm not sure . do n't"
    ids = grpo.TOKENIZER.encode(text)
    assert tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True) == text


# ---- prompts and answers ---------------------------------------------------------------------

def encode_chat(tokenizer, prompt):
    """A prompt by the chat template. -> what generate() wants"""
    return tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be short."}, {"role": "user", "content": prompt}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True)


@pytest.mark.parametrize("prompt", [
    "", "1", "(1+1)=", "((3*4)-5)=", "((((1+2)+3)+4)+5)=", "((((1+2)+3)+4)+5)=  ", "{{ 1 }} {% x"])
def test_the_chat_template_pads_a_prompt_as_the_scripts_do(trained, tokenizer, prompt):
    task = common.load_task(load_gpt(trained)[1], grpo.verify)
    found = encode_chat(tokenizer, prompt)
    assert found["input_ids"].tolist() == grpo.encode_prompts([prompt], task, "cpu").tolist()
    assert found["input_ids"].shape[1] == max(task.prompt_width, len(prompt))
    assert found["attention_mask"].all()


@pytest.mark.parametrize("flags, width", [
    ({"operands": "2"}, 6), ({"task": "lookup"}, None), ({"task": "arithmetic,countdown"}, None)])
def test_the_width_is_that_of_the_runs_task(tmp_path, flags, width):
    make_run(tmp_path / "run", hidden_size=16, **flags)
    export.main([str(tmp_path / "run"), str(tmp_path / "folder")])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    task = common.load_task(grpo.Config(**flags), grpo.verify)
    ids = encode_chat(tokenizer, "1+1=")["input_ids"]
    assert ids.shape == (1, task.prompt_width) and width in (None, task.prompt_width)
    assert ids.tolist() == grpo.encode_prompts(["1+1="], task, "cpu").tolist()


def answers(policy, cfg, problems):
    """The tokens of greedy answers, up to EOS, as the scripts have them. -> list of lists"""
    task = common.load_task(cfg, grpo.verify)
    prompts = grpo.encode_prompts([problem.prompt for problem in problems], task, "cpu")
    out = grpo.rollout(policy, prompts, problems, task, cfg)
    return [ids[:n] for ids, n in zip(out.tokens.tolist(), out.lengths.tolist())]


def llama_answers(folder, cfg, problems):
    """The same by what the folder holds."""
    llama = load_llama(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = [encode_chat(tokenizer, problem.prompt) for problem in problems]
    ids = llama.generate(
        input_ids=torch.cat([x["input_ids"] for x in inputs]), do_sample=False,
        attention_mask=torch.cat([x["attention_mask"] for x in inputs]))
    rows = ids[:, inputs[0]["input_ids"].shape[1]:].tolist()
    return [row[:row.index(grpo.EOS) + 1] if grpo.EOS in row else row for row in rows]


def test_greedy_answers_to_held_out_problems_are_the_same(trained, exported):
    policy, cfg = load_gpt(trained)
    problems = common.held_out_problems(common.load_task(cfg, grpo.verify), 100)
    assert len({len(problem.prompt) for problem in problems}) == 4
    found = answers(policy, cfg, problems)
    assert len({tuple(ids) for ids in found}) > 2 and grpo.EOS in found[0]
    assert llama_answers(exported, cfg, problems) == found


def test_greedy_answers_of_a_policy_that_talks_in_all_tokens_are_the_same(tmp_path):
    """Its answers end early or never, and hold bytes that no trained policy writes."""
    policy = make_run(tmp_path / "run", operands="2-4", max_completion_length=24)
    with torch.no_grad():
        policy.embed.weight *= 20
        policy.embed.weight[grpo.EOS] *= 2.5
        for block in policy.blocks:
            block.attention.out.weight *= 4
            block.mlp.down.weight *= 4
    common.write(tmp_path / "run" / "checkpoint.pt", {"policy": policy.state_dict()})
    export.main([str(tmp_path / "run"), str(tmp_path / "folder")])
    _, cfg = load_gpt(tmp_path / "run")
    problems = common.held_out_problems(common.load_task(cfg, grpo.verify), 100)
    found = answers(policy, cfg, problems)
    assert len({len(ids) for ids in found}) > 5 and len(set(sum(found, []))) > 50
    assert llama_answers(tmp_path / "folder", cfg, problems) == found


def test_the_folder_samples_as_the_run_did(exported):
    found = load_llama(exported).generation_config
    assert found.do_sample is True
    assert (found.temperature, found.top_k, found.top_p) == (0.7, 0, 1.0)
    assert found.max_new_tokens == grpo.Config.max_completion_length
    assert (found.eos_token_id, found.pad_token_id) == (grpo.EOS, grpo.PAD)


# ---- README.md -------------------------------------------------------------------------------

def test_the_readme_says_how_a_prompt_has_to_look(exported):
    text = " ".join((exported / "README.md").read_text().split())
    assert text.startswith("# arithmetic: the policy of run A Llama of 32 x 1 ")
    assert "Prompts have 18 characters." in text
    assert "`<|pad|>`" in text and "its attention mask is 1" in text
    assert "`rms_norm_eps` is that of torch, 1.1920929e-07." in text


def test_the_readme_names_the_flags_of_the_task(exported, tmp_path):
    command = "\npython examples/pretrained.py --model DIR --task"
    assert f"{command} arithmetic --operands 2-5\n" in (exported / "README.md").read_text()
    make_run(tmp_path / "run", hidden_size=16, task="countdown", temperature=0.5)
    export.main([str(tmp_path / "run"), str(tmp_path / "folder")])
    assert f"{command} countdown\n" in (tmp_path / "folder" / "README.md").read_text()


def test_the_readme_does_not_promise_to_train_on_with_tools(exported, tmp_path):
    make_run(tmp_path / "run", task="lookup", operands="5")
    export.export(tmp_path / "run", tmp_path / "folder")
    command = "python examples/pretrained.py"
    assert command not in (tmp_path / "folder/README.md").read_text()
    assert command in (exported / "README.md").read_text()


def test_what_the_readme_shows_works(exported, tmp_path, capsys):
    text = (exported / "README.md").read_text()
    code = re.search("```python\n(.*?)```", text, re.DOTALL)[1]
    exec(code.replace("DIR", str(exported)).replace('"..."', '"(1+1)="'), {})
    assert re.match(r"\(1\+1\)=.*\S", capsys.readouterr().out)
    words = re.search("python -m tools.export (.*)\n", text)[1]
    words = words.replace("DIR", str(exported)).replace("RUN", str(tmp_path / "run"))
    export.main(shlex.split(words))
    assert (tmp_path / "run" / "checkpoint.pt").is_file()


# ---- and back --------------------------------------------------------------------------------

@pytest.fixture
def back(tmp_path, capsys):
    """back(folder): the run that is made of a Hugging Face folder."""
    def make(folder):
        run = tmp_path / "a run"
        capsys.readouterr()
        export.main([str(folder), str(run), "--back"])
        said = f"{run}: train it on with --init_from '{run}'\n"
        assert capsys.readouterr() == (said, "")
        return run
    return make


def test_there_and_back_nothing_changes(trained, exported, back):
    run = back(exported)
    assert sorted(path.name for path in run.iterdir()) == [
        "base.pt", "checkpoint.pt", "config.json"]
    assert changed_weights(policy_of(run), policy_of(trained)) == []
    assert changed_weights(load(run / "base.pt"), policy_of(trained)) == []
    export.main([str(run), str(run.parent / "again")])
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (run.parent / "again" / name).read_bytes() == (exported / name).read_bytes()


@pytest.mark.parametrize("size, layers, heads, kv_heads", [(16, 2, 1, 1), (48, 1, 6, 2)])
def test_the_shape_comes_back(tmp_path, back, size, layers, heads, kv_heads):
    policy = make_run(tmp_path / "run", hidden_size=size, num_hidden_layers=layers,
                      num_attention_heads=heads, num_key_value_heads=kv_heads)
    export.main([str(tmp_path / "run"), str(tmp_path / "folder")])
    found, cfg = load_gpt(back(tmp_path / "folder"))
    assert changed_weights(found.state_dict(), policy.state_dict()) == []
    assert (cfg.num_attention_heads, cfg.num_key_value_heads) == (heads, kv_heads)
    ids = torch.arange(20)[None]
    assert torch.equal(found(ids), policy(ids))


def test_init_from_takes_it(trained, exported, back, tmp_path, monkeypatch):
    run = back(exported)
    flags = begun_from(run, SMALL)
    del flags["textbook_share"]                 # of the base, too
    monkeypatch.setattr(common, "make_console", common.Console)
    monkeypatch.chdir(tmp_path)
    for max_steps in (0, 1):
        own = {"max_steps": max_steps, "output_dir": f"next{max_steps}"}
        grpo.main(arguments(flags | own))
        next_run = tmp_path / f"next{max_steps}"
        assert changed_weights(load(next_run / "base.pt"), policy_of(trained)) == []
        assert len(changed_weights(policy_of(next_run), policy_of(trained))) == 11 * max_steps


def test_resume_from_checkpoint_says_what_takes_it(exported, back, capsys):
    run = back(exported)
    with pytest.raises(SystemExit):
        grpo.main(["--resume_from_checkpoint", str(run)])
    assert f"take --init_from {run}" in capsys.readouterr().err


def test_it_can_be_asked(trained, exported, back, capsys):
    run = back(exported)
    for prompt in ("(3+4)=", "((((1+2)+3)+4)+5)=", "x"):
        said = []
        for folder in (trained, run):
            ask.main([str(folder), prompt])
            said.append(capsys.readouterr().out)
        assert said[0] == said[1]


def test_what_a_trainer_saves_comes_back(trained, exported, tmp_path, back):
    llama = load_llama(exported)
    with torch.no_grad():
        for weight in llama.parameters():
            weight += 0.25
    llama.save_pretrained(tmp_path / "saved")
    wanted = {name: weight + 0.25 for name, weight in policy_of(trained).items()}
    assert changed_weights(policy_of(back(tmp_path / "saved")), wanted) == []


def test_weights_in_bfloat16_come_back_in_float32(trained, exported, tmp_path, back):
    load_llama(exported).to(torch.bfloat16).save_pretrained(tmp_path / "saved")
    wanted = {name: weight.bfloat16().float() for name, weight in policy_of(trained).items()}
    found = policy_of(back(tmp_path / "saved"))
    assert {weight.dtype for weight in found.values()} == {torch.float32}
    assert changed_weights(found, wanted) == []


def test_a_copy_of_the_embedding_as_the_head_is_no_other_weight(trained, folder, back):
    """Some trainers save both."""
    def change(weights):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    change_weights(folder, change)
    assert changed_weights(policy_of(back(folder)), policy_of(trained)) == []


def test_the_config_is_that_of_a_run_on_any_machine(exported, back):
    record = json.loads((back(exported) / "config.json").read_text())
    cfg = grpo.Config(**record["config"])
    assert record["script"] == "grpo.py" and record["argv"] == ["--init_from", str(exported)]
    assert record["torch"] == torch.__version__ and record["python"] == sys.version
    assert cfg == dataclasses.replace(grpo.Config(), device="cpu", **{
        name: getattr(cfg, name) for name in export.SHAPE})


# ---- what is refused -------------------------------------------------------------------------

@pytest.mark.parametrize("words, said", [
    ([], "RUN"), (["run"], "DIR"), (["run", "new", "more"], "more"),
    (["run", "new", "--basis"], "--basis"), (["run", "new", "--base", "--back"], "--base")])
def test_words_that_make_no_sense_are_refused(refused, words, said):
    refused(words, said)


@pytest.mark.parametrize("options", [[], ["--base"], ["--back"]])
@pytest.mark.parametrize("kind", ["file", "folder", "leftover"])
def test_a_target_that_holds_something_is_refused(refused, run, folder, tmp_path, options, kind):
    target = tmp_path / "target"
    if kind == "file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / ("mine" if kind == "folder" else "config.json.1.tmp")).write_text("mine")
    source = folder if options == ["--back"] else run
    said = "cannot be made" if kind == "leftover" else "is not empty; name a new folder"
    refused([source, target, *options], f"{target}: {said}")


def test_a_target_that_is_an_empty_folder_is_filled(run, tmp_path):
    (tmp_path / "target").mkdir()
    export.main([str(run), str(tmp_path / "target")])
    assert (tmp_path / "target" / "config.json").is_file()


def test_a_target_in_folders_that_are_not_there_yet_is_made(run, tmp_path):
    export.main([str(run), str(tmp_path / "new" / "newer" / "target")])
    assert [path.name for path in (tmp_path / "new" / "newer").iterdir()] == ["target"]


def test_a_target_that_cannot_be_made_is_refused(refused, run, tmp_path, monkeypatch):
    refused([run, run / "config.json" / "target"], "config.json/target: cannot be made (Not a dir")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    refused([run, "."], ".: has no name")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_folder_that_does_not_get_full_is_not_there(refused, run, tmp_path, monkeypatch, error):
    def fail(*_):
        raise error
    before = contents(tmp_path)
    monkeypatch.setattr(export, "make_tokenizer", fail)
    if isinstance(error, OSError):
        refused([run, tmp_path / "target"], "target: cannot be made (No space left on device)")
    else:
        with pytest.raises(KeyboardInterrupt):
            export.main([str(run), str(tmp_path / "target")])
    assert contents(tmp_path) == before


@pytest.mark.parametrize("options", [[], ["--base"]])
@pytest.mark.parametrize("config", [None, "{", "{}", '{"script": "chess.py", "config": {}}'])
def test_a_folder_that_is_no_run_is_refused(refused, tmp_path, options, config):
    (tmp_path / "run").mkdir()
    if config is not None:
        (tmp_path / "run" / "config.json").write_text(config)
    refused([tmp_path / "run", tmp_path / "target", *options], f"{tmp_path / 'run'}: ")


@pytest.mark.parametrize("options, name", [([], "checkpoint.pt"), (["--base"], "base.pt")])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "flipped", "other", "shape"])
def test_weights_that_cannot_be_read_are_refused(refused, run, tmp_path, options, name, damage):
    path = run / name
    content = path.read_bytes()
    middle = len(content) // 2
    if damage == "missing":
        path.unlink()
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "cut":
        path.write_bytes(content[:middle])
    elif damage == "flipped":
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1:])
    elif damage == "other":
        common.write(path, {"state": {}})
    else:
        record = json.loads((run / "config.json").read_text())
        record["config"]["hidden_size"] = 64
        (run / "config.json").write_text(json.dumps(record))
    refused([run, tmp_path / "target", *options], f"error: {path}: ")


@pytest.mark.parametrize("options, name", [([], "base.pt"), (["--base"], "checkpoint.pt")])
def test_only_the_weights_that_are_asked_for_have_to_be_there(run, tmp_path, options, name):
    (run / name).unlink()
    export.main([str(run), str(tmp_path / "target"), *options])
    assert (tmp_path / "target" / "model.safetensors").is_file()


@pytest.mark.parametrize("values, said", [
    ({"rms_norm_eps": 1e-6}, "its rms_norm_eps is 1e-06"),
    ({"hidden_act": "gelu"}, "its hidden_act is 'gelu', ours 'silu'"),
    ({"model_type": "mistral"}, "its model_type is 'mistral', ours 'llama'"),
    ({"model_type": "chess"}, "chess"), ({"model_type": None}, "model"),
    ({"tie_word_embeddings": False}, "its tie_word_embeddings is False"),
    ({"vocab_size": 256}, "its vocab_size is 256, ours 320"),
    ({"head_dim": 8}, "its head_dim is 8, ours 16"),
    ({"attention_bias": True}, "its attention_bias is True"),
    ({"mlp_bias": True}, "its mlp_bias is True"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "its rope_parameters is"),
    ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "linear"),
    ({"num_hidden_layers": 2}, "it lacks model.layers.1.input_layernorm.weight"),
    ({"num_hidden_layers": 0}, "it has model.layers.0.input_layernorm.weight"),
    ({"num_key_value_heads": 2}, ""), ({"num_attention_heads": 0}, ""), ({"hidden_size": "x"}, "")])
def test_a_config_of_another_model_is_refused(refused, folder, tmp_path, values, said):
    change_config(folder, **values)
    refused([folder, tmp_path / "new", "--back"], f"{folder}: is no folder that tools.export made",
            said)


@pytest.mark.parametrize("change, said", [
    (lambda weights: weights.pop("model.norm.weight"), "it lacks model.norm.weight"),
    (lambda weights: weights.update({"model.norm.bias": torch.zeros(32)}), "it has model.norm.bi"),
    (lambda weights: weights.update({"lm_head.weight": torch.zeros(320, 32)}), "its lm_head"),
    (lambda weights: weights.update({"model.norm.weight": torch.zeros(31)}), "")])
def test_other_weights_are_refused(refused, folder, tmp_path, change, said):
    change_weights(folder, change)
    refused([folder, tmp_path / "new", "--back"], f"{folder}: is no folder that tools.export made",
            said)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_damaged_folder_is_refused(refused, folder, tmp_path, name, damage):
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if damage == "cut":
        (folder / name).write_bytes(content[:len(content) // 2])
    refused([folder, tmp_path / "new", "--back"], f"{folder}: is no folder that tools.export made")


def test_a_run_is_no_hugging_face_folder(refused, run, folder, tmp_path):
    refused([run, tmp_path / "new", "--back"], f"{run}: is no folder that tools.export made")
    refused([folder, tmp_path / "new"], f"{folder}: ")


def test_a_name_of_no_folder_is_not_looked_up(refused, tmp_path, monkeypatch):
    """gpt2 would be found on Hugging Face."""
    monkeypatch.chdir(tmp_path)
    refused(["gpt2", "new", "--back"], "gpt2: is no folder", "(it is no folder)")


@pytest.mark.parametrize("options", [[], ["--back"]])
@pytest.mark.parametrize("name", ["transformers", "tokenizers", "safetensors"])
def test_a_package_that_is_missing_is_named(refused, run, folder, tmp_path, monkeypatch, options,
                                            name):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec",
                        lambda asked, *rest: None if asked == name else found(asked, *rest))
    source = folder if options else run
    refused([source, tmp_path / "new", *options],
            f"{name} is missing: pip install -r examples/requirements.txt")
    assert name.encode() in (ROOT / "examples" / "requirements.txt").read_bytes() + b"tokenizers"


def test_as_a_command_it_does_the_same(warm_python, trained, exported, tmp_path):
    done = warm_python.run("-m", "tools.export", trained, tmp_path / "new", cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{tmp_path / 'new'}: README.md in it says how to use it\n"
    for path in exported.iterdir():
        assert (tmp_path / "new" / path.name).read_bytes() == path.read_bytes()
