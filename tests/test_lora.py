"""--lora_rank trains an adapter, which alone is in a checkpoint; without it the policy is the
reference."""
import json
import shutil
from pathlib import Path

import pytest
import torch
from small_models import LIKE_SMALL, NEEDS, config_of, load_example, save_random
from small_runs import arguments, at_work, difference, lines, read_summary, steps

transformers = pytest.importorskip("transformers", reason=NEEDS)
pytest.importorskip("peft", reason=NEEDS)
from test_pretrained import outcome, problems_of, resume  # noqa: E402
from test_processes import job  # noqa: E402

from tools import ask, export, processes  # noqa: E402

pretrained = load_example()
FLAGS = LIKE_SMALL | {"lora_rank": 4, "learning_rate": 5e-3, "beta": 0.05, "max_steps": 4,
                      "stop_at": 2, "output_dir": "run"}


@pytest.fixture(scope="module")
def whole(small_llama, tmp_path_factory):
    """The folder of a run of four steps."""
    folder = tmp_path_factory.mktemp("lora")
    with at_work(folder):
        pretrained.main(arguments(FLAGS | {"model": small_llama}))
    return folder / "run"


@pytest.fixture
def trained(small_llama):
    """A policy whose adapter adds something, and what it and the base score of a batch."""
    def score(policy):
        return pretrained.score_all(policy, batch.prompts, batch.tokens)[0]
    policy = pretrained.Policy(small_llama, config_of(lora_rank=4))
    for name, weight in policy.model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.1)
    batch = pretrained.complete(policy, None, policy.cfg, problems_of(["(3+4)=", "(3-4)="]))
    return policy, score


def test_without_its_adapter_the_policy_is_the_reference_and_with_it_again_itself(
        trained, small_llama):
    policy, score = trained
    base = score(pretrained.Policy(small_llama, config_of()))
    before = score(policy)
    with processes.without_adapter(policy.model):
        assert torch.equal(score(policy), base)
    assert torch.equal(score(policy), before) and not torch.allclose(before, base, atol=1e-3)


def test_merged_weights_are_those_of_a_model_that_computes_the_same(trained, small_llama):
    policy, score = trained
    merged = pretrained.Policy(small_llama, config_of())
    merged.model.load_state_dict(dict(processes.merged_weights(policy.model)))
    torch.testing.assert_close(score(merged), score(policy), rtol=0, atol=1e-5)


def test_frozen_weights_in_bfloat16_are_half_as_large_and_change_no_bit(trained, small_llama):
    """Since products round them to it anyway."""
    policy, score = trained
    half = pretrained.Policy(small_llama, config_of(lora_rank=4, dtype="bfloat16"))
    half.model.load_state_dict(policy.model.state_dict())
    policy.autocast = half.autocast
    layers = [layer for layer in half.model.modules() if hasattr(layer, "base_layer")]
    assert layers and {layer.base_layer.weight.dtype for layer in layers} == {torch.bfloat16}
    assert torch.equal(score(half), score(policy))


def test_a_checkpoint_is_the_adapter_from_which_runs_go_on(small_llama, whole, tmp_path):
    names = {path.name for path in whole.glob("checkpoint-4/*")}
    assert "adapter_model.safetensors" in names and "model.safetensors" not in names
    assert steps(whole)[-1]["kl"] != 0
    with at_work(tmp_path):
        pretrained.main(arguments(FLAGS | {"model": small_llama, "max_steps": 2}))
    resume(tmp_path / "run", max_steps=4)
    assert not difference(outcome(tmp_path / "run"), outcome(whole))
    for line in lines(whole / "evaluation.jsonl")[:4]:
        assert ask.answer(whole, line["prompt"]) == line["trained"]["text"]
    made = {"first": (whole, 4, 1), "second": ("first", 4, 1), "third": ("second", 0, 1)}
    with at_work(tmp_path):                             # adapters upon adapters, and what they add
        for name, (model, rank, num_steps) in made.items():
            pretrained.main(arguments(FLAGS | {
                "model": model, "lora_rank": rank, "max_steps": num_steps, "output_dir": name}))
        export.export_back(Path("second"), Path("second-back"))
        scores = [read_summary(folder) for folder in (whole, *made)]
        policy, _ = export.read_policy("second-back", "checkpoint.pt")
        model, _ = processes.load_model(processes.last_checkpoint("second"))
    assert [found["base"] for found in scores[1:]] == [found["trained"] for found in scores[:3]]
    for name, weight in policy.named_parameters():
        assert torch.equal(weight, model.state_dict()[export.llama_name(name)])


def test_two_processes_that_share_out_the_weights_make_the_steps_of_one(
        small_llama, whole, tmp_path):
    assert job(tmp_path, FLAGS | {"model": small_llama, "parallel": "fsdp"}) == [0, 0], (
        tmp_path / "stderr-0").read_text()
    for one, other in zip(steps(whole), steps(tmp_path / "run"), strict=True):
        for name in one.keys() - {"step_time"}:
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 1}, {"num_hidden_layers": 3},
                                     {"hidden_size": 64}], ids=str)
def test_an_adapter_of_another_model_is_refused_in_one_line(changes, whole, tmp_path, capsys):
    folder = shutil.copytree(next(whole.glob("checkpoint-*")), tmp_path / "adapter")
    path = folder / "adapter_config.json"
    other = save_random(tmp_path / "other", **{"head_dim": 16, "num_attention_heads": 2} | changes)
    config = json.loads(path.read_text()) | {"base_model_name_or_path": str(other)}
    path.write_text(json.dumps(config))
    capsys.readouterr()
    with pytest.raises(SystemExit):
        pretrained.Policy(folder, config_of())
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --model {folder}: cannot be loaded: ")
