"""pretrained/engine.py completes prompts with the current weights, and reports the same log-probs
as the trainer. The tests need no GPU."""
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from small_models import LIKE_SMALL, NEEDS, config_of, load_example, save_random
from small_runs import arguments, difference, steps

import common

pytest.importorskip("transformers", reason=NEEDS)
pytest.importorskip("vllm", reason="needs pretrained/requirements-vllm.txt: make engine")
from test_own import Task
from test_pretrained import outcome

from pretrained import models

pretrained = load_example()
VLLM = {"engine": "vllm", "engine_memory": 0.05}
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
         "max_position_embeddings": 512}                # vLLM has no kernel for heads of 8 or 16
LONG = "The weights of the moment, and no others. " * 5         # longer than a block of the cache
PROBLEMS = [common.Problem(text, "") for text in ("(3+4)=", "3>", LONG, "Say yes:")
            for _ in range(4)]


@pytest.fixture(scope="module", params=[
    ("llama", {"tie_word_embeddings": True}, 4), ("llama", {"tie_word_embeddings": False}, 0),
    ("gemma2", {"query_pre_attn_scalar": 32}, 4)], ids=str)
def policy(request, tmp_path_factory):
    """A policy, with an adapter if vLLM supports one. vLLM starts once for each policy."""
    family, changes, rank = request.param
    folder = save_random(tmp_path_factory.mktemp("model") / "model", family, **SHAPE | changes)
    cfg = config_of(**VLLM, max_completion_length=25, temperature=0.8, lora_rank=rank)
    policy = pretrained.Policy(folder, cfg)
    policy.engine = pretrained.load_engine(policy, 300)
    yield policy
    policy.engine.llm.llm_engine.engine_core.shutdown()


def sample(policy, task=None, problems=PROBLEMS):
    """Complete problems with vLLM. -> Batch, the trainer's log-probabilities (B, T)"""
    generator = torch.Generator().manual_seed(0)
    batch = pretrained.complete(policy, task, policy.cfg, problems, generator)
    logps, _ = pretrained.score_all(policy, batch.prompts, batch.tokens, policy.cfg.temperature)
    return batch, logps * batch.mask


def test_the_trainer_says_what_vllm_said_before_and_after_an_update(policy):
    before, logps = sample(policy)
    assert before.lengths.max() > 5 and logps[logps != 0].std() > 0.5
    for trained in ("none", "weights", "adapter")[:3 if policy.cfg.lora_rank else 2]:
        generator = torch.Generator().manual_seed(1)
        for name, weight in policy.model.named_parameters():
            if trained != "none" and ("lora_" in name) == (trained == "adapter"):
                weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
        batch, logps = sample(policy)
        is_gemma = policy.model.config.model_type == "gemma2"       # its rounding error is larger
        assert (logps - batch.logps).abs().mean() < (0.02 if is_gemma else 1e-5)
        assert torch.equal(batch.tokens, before.tokens) == (trained == "none")
        before = batch
    assert torch.equal(batch.entropy, -batch.logps)         # an estimate, because vLLM reports none


def test_weights_that_vllm_does_not_get_end_the_run_in_one_line(policy, monkeypatch, stops):
    weights = models.frozen_weights
    monkeypatch.setattr(models, "frozen_weights", lambda model: (
        pair for pair in weights(model) if pair[0] != "model.norm.weight"))
    stops("weights were not loaded", policy.engine.update, policy.model, code=1)
    monkeypatch.undo()
    policy.engine.update(policy.model)


def test_what_a_task_inserts_is_read_and_has_mask_0(policy):
    batch, logps = sample(policy, Task(tuple("abcdefgh!"), "<i>7<|eos|>,</i>"))
    assert (batch.mask.sum(dim=1) < batch.lengths).sum() > 3
    assert "".join(batch.texts).count("<i>7,</i>") > 3
    assert (logps - batch.logps).abs().mean() < 0.02


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """run(folder, launcher, **flags): a run in which text is inserted and length is rewarded."""
    model = save_random(tmp_path_factory.mktemp("model") / "model", **SHAPE)

    def start(folder, launcher=(), **flags):
        (folder / "mine.py").write_text(
            "call_tokens = list('abcde')\n"
            "def respond(completions, **_): return ['<i>7' for _ in completions]\n"
            "def reward(completions, **_): return [len(text) for text in completions]")
        flags = LIKE_SMALL | VLLM | {
            "model": model, "reward_file": "mine.py", "max_steps": 4, "output_dir": "run"} | flags
        if "resume_from_checkpoint" in flags:
            flags = {name: flags[name] for name in ("resume_from_checkpoint", "max_steps")}
        return subprocess.run(
            [sys.executable, *launcher, str(ROOT / "pretrained/train.py"), *arguments(flags)],
            cwd=folder, capture_output=True, text=True)
    return start


def test_a_resumed_run_is_the_whole_one_bit_for_bit_and_two_processes_make_its_steps(run, tmp_path):
    folders = {name: tmp_path / name for name in ("whole", "halves", "two")}
    for folder in folders.values():
        folder.mkdir()
    correction = {"importance_sampling_correction": "truncate"}
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv_backend", "c10d",
                "--rdzv_endpoint", "localhost:0"]
    done = [run(folders["whole"]), run(folders["halves"], max_steps=2),
            run(folders["halves"], resume_from_checkpoint="run"),
            run(folders["two"], torchrun, **correction)]
    (tmp_path / "none").mkdir()
    done.append(run(tmp_path / "none", max_steps=1, importance_sampling_correction="none",
                    dtype="bfloat16"))      # in a process that has not used AMX registers yet
    assert [one.returncode for one in done] == [0] * 5, [one.stderr[-900:] for one in done]
    assert steps(tmp_path / "none/run")[0]["entropy"] > 0
    whole, halves, two = (folder / "run" for folder in folders.values())
    assert not difference(outcome(whole), outcome(halves))
    for one, other in zip(steps(whole), steps(two), strict=True):
        assert one["grad_norm"] > 0
        for name in ("reward", "grad_norm", "loss", "entropy"):
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name
