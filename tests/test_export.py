"""python -m engines.export writes the policy of a run as a Hugging Face folder, which computes
the same logits."""
import json
import random

import pytest
import torch
from small_models import NEEDS

import common
import grpo
import plumbing
from engines import export
from report import ask

transformers = pytest.importorskip("transformers", reason=NEEDS)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An untrained policy, its run folder, and the Hugging Face folder of that run. All weights are
    random, including those of the norms, which are otherwise 1 before training. Its answers end
    early or never, and contain bytes that no trained policy writes."""
    folder = tmp_path_factory.mktemp("export")
    cfg = grpo.Config(device="cpu", hidden_size=64, intermediate_size=16, task="arithmetic:2-4",
                      temperature=0.7)
    torch.manual_seed(1)
    policy = grpo.GPT(cfg)
    with torch.no_grad():
        for weight in policy.parameters():
            weight *= 6 * torch.rand_like(weight)
        policy.embed.weight[grpo.EOS] *= 2
    (folder / "run").mkdir()
    record = {"script": "grpo.py", "config": vars(cfg)}
    plumbing.write(folder / "run/config.json", json.dumps(record))
    plumbing.write(folder / "run/checkpoint.pt", {"policy": policy.state_dict()})
    export.main([str(folder / "run"), str(folder / "exported")])
    return policy, folder / "run", folder / "exported"


# ---- the same logits and answers -------------------------------------------------------------

def test_greedy_answers_to_held_out_problems_are_the_same(made):
    policy, run, folder = made
    _, cfg = ask.read_run(run)
    task = common.load_task(cfg, grpo.verify)
    problems = common.held_out_problems(task, 100)
    batch = grpo.complete(policy, task, cfg, problems)
    found = [ids[:n] for ids, n in zip(batch.tokens.tolist(), batch.lengths.tolist())]
    assert len({len(ids) for ids in found}) > 5 and len(set(sum(found, []))) > 50

    llama = transformers.AutoModelForCausalLM.from_pretrained(folder)
    asked = llama.generation_config
    assert (asked.do_sample, asked.temperature, asked.top_k, asked.top_p) == (True, 0.7, 0, 1.0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = [tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be short."}, {"role": "user", "content": problem.prompt}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True) for problem in problems]
    ids = llama.generate(
        input_ids=torch.cat([x["input_ids"] for x in inputs]), do_sample=False,
        attention_mask=torch.cat([x["attention_mask"] for x in inputs]))
    rows = ids[:, task.prompt_width:].tolist()
    assert found == [row[:row.index(grpo.EOS) + 1] if grpo.EOS in row else row for row in rows]


def test_whoever_can_read_a_file_can_read_the_model(made):
    assert len({file.stat().st_mode for file in made[2].iterdir()}) == 1


# ---- the tokenizer ---------------------------------------------------------------------------

def test_the_chat_template_pads_a_prompt_as_its_task_does_whatever_its_characters(made):
    task = common.load_task(ask.read_run(made[1])[1], grpo.verify)
    tokenizer = transformers.AutoTokenizer.from_pretrained(made[2])
    for prompt in ("3+4=", "1\u00d72=", "\u221a4\u2212\u0663=", "\U0001f600="):
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, return_dict=False)
        assert [ids] == common.encode_prompts([common.Problem(prompt, "")], task, "cpu").tolist()


def random_text(rng):
    """Mix characters from all planes of Unicode with special tokens, complete or cut off. -> str"""
    near = ["  ", "\r\n", "e\u0301", "\u00e9", "\u212b", "\ufeff", " , ", " 'm not"]
    for name in common.SPECIAL_TOKENS:
        near += [name, name[:-1], name[1:], f" {name}\n"]
    ends = [32, 127, 256, 0x370, 0x2070, 0xd800, *range(0x10000, 0x110001, 0x10000)]
    letters = [chr(end - rng.randint(1, 32)) for end in ends]
    return "".join(rng.choice(rng.choice([near, letters])) for _ in range(rng.randint(0, 20)))


def test_texts_become_the_tokens_of_the_scripts_and_texts_again(made):
    tokenizer = transformers.AutoTokenizer.from_pretrained(made[2])
    rng = random.Random(0)
    for _ in range(300):
        text = random_text(rng)
        ids = tokenizer(text).input_ids
        assert ids == common.TOKENIZER.encode(text, allowed_special="all"), ascii(text)
        assert tokenizer.decode(ids) == text == grpo.decode(ids)
        ids = [rng.randrange(rng.choice([0, 0x80, 0xc0, 256]), 266) for _ in range(20)]
        assert tokenizer.decode(ids) == grpo.decode(ids), ids
