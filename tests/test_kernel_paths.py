"""The scripts with the kernels: whatever computes log-probs and rollouts, a run learns the same."""
import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import every_script, scripts

import common
import kernels
from kernels.linear_logprob import linear_logprob

ROOT = Path(__file__).resolve().parent.parent
TINY = {"device": "cpu", "num_threads": 1, "operands": 3, "hidden_size": 16,
        "intermediate_size": 16, "num_attention_heads": 2, "num_prompts": 3, "num_generations": 4,
        "max_completion_length": 6, "max_steps": 2, "base_steps": 0, "num_eval_problems": 4,
        "num_eval_samples": 2, "temperature": 0.8, "eval_steps": 5, "micro_batch_size": 5,
        "learning_rate": 0.01, "stop_at": 2}


def words(flags):
    """The command line of some flags."""
    argv = []
    for name, value in flags.items():
        argv += [f"--{name}", str(value)]
    return argv


def trained_weights(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)["policy"]


def assert_close(weights, others):
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, atol=1e-5, rtol=1e-5)


# ---- 1. log-probs ----------------------------------------------------------------------------

@every_script
def test_log_probs_without_logits_in_memory_teach_the_same(
        script, tmp_path, monkeypatch, restored_ctrl_c):
    """With the `score` that the docstring of linear_logprob.py describes."""
    calls = []

    def score(model, prompts, completions, temperature=1.0, kernel="auto"):
        calls.append(len(completions))
        hidden = script.completion_states(model, prompts, completions)
        logps, _, entropy = linear_logprob(
            hidden, model.embed.weight, completions, temperature=temperature)
        return logps, entropy
    monkeypatch.chdir(tmp_path)
    script.main(words(TINY | {"output_dir": "in_memory"}))
    monkeypatch.setattr(script, "score", score)
    script.main(words(TINY | {"output_dir": "without"}))
    assert calls
    assert_close(trained_weights(tmp_path / "in_memory"), trained_weights(tmp_path / "without"))


@scripts("ppo")
def test_log_probs_of_the_triton_kernel_in_its_interpreter_teach_the_same(
        script, tmp_path, monkeypatch):
    """One script for all, since each calls kernels.logprobs in the machinery, which is one text;
    this one has most to score."""
    pytest.importorskip("triton")
    monkeypatch.chdir(tmp_path)
    flags = words(TINY | {"kernel": "triton", "output_dir": "by_triton"})
    done = subprocess.run([sys.executable, script.__file__, *flags], capture_output=True, text=True,
                          timeout=300, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr
    assert "log-probs by triton" in done.stdout, done.stdout
    script.main(words(TINY | {"kernel": "torch", "output_dir": "torch"}))
    assert_close(trained_weights(tmp_path / "torch"), trained_weights(tmp_path / "by_triton"))


def test_logprobs_are_those_of_the_definition_without_the_ratio():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 7, generator=generator)
    tokens = torch.randint(7, (2, 3), generator=generator)
    logps, entropy = kernels.logprobs(logits, tokens, 0.7)
    p = (logits / 0.7).softmax(-1)
    chosen = p.gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(logps, chosen.log())
    torch.testing.assert_close(entropy, -(p * p.log()).sum(-1))


@pytest.fixture
def no_memory_of_choices():
    """kernels forgets which kernel it found to run where, before and after the test."""
    kernels.uses_triton.cache_clear()
    yield
    kernels.uses_triton.cache_clear()


def test_on_a_cpu_torch_computes_log_probs_unless_triton_is_asked_for_which_is_refused():
    logits = torch.zeros(1, 2)
    for kernel in ("auto", "torch"):
        assert not kernels.applies(kernel, logits)
        kernels.check(kernel, "cpu")
    for kernel in ("triton", "cuda"):
        with pytest.raises(ValueError, match=f"--kernel {kernel}: "):
            kernels.applies(kernel, logits)
        with pytest.raises(ValueError, match=f"--kernel {kernel}: "):
            kernels.check(kernel, "cpu")


def test_where_triton_runs_it_is_what_auto_means_on_cuda_alone(monkeypatch, no_memory_of_choices):
    def available(device):
        return True
    monkeypatch.setattr(kernels.logprob, "available", available)
    on_cuda = SimpleNamespace(device=torch.device("cuda"))      # stands for logits
    on_cpu = SimpleNamespace(device=torch.device("cpu"))
    assert kernels.applies("auto", on_cuda) and kernels.applies("triton", on_cuda)
    assert kernels.applies("triton", on_cpu) and not kernels.applies("auto", on_cpu)
    assert not kernels.applies("torch", on_cuda)


def test_on_cuda_without_triton_auto_means_torch(monkeypatch, no_memory_of_choices):
    monkeypatch.setattr(kernels.logprob, "triton", None)
    on_cuda = SimpleNamespace(device=torch.device("cuda"))
    assert not kernels.applies("auto", on_cuda)
    with pytest.raises(ValueError, match="--kernel triton: on cuda needs the package triton"):
        kernels.applies("triton", on_cuda)


@every_script
def test_triton_where_it_cannot_run_is_one_line_and_nothing_is_touched(
        script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        script.main(["--device", "cpu", "--kernel", "triton"])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith("error: --kernel triton") and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


# ---- 2. rollouts -----------------------------------------------------------------------------

def test_rollouts_are_captured_on_cuda_unless_an_environment_responds_or_torch_is_asked_for():
    on_cuda = SimpleNamespace(is_cuda=True)                     # stands for prompts
    silent = SimpleNamespace(call_tokens=())
    responding = SimpleNamespace(call_tokens=("</search>",))
    auto = SimpleNamespace(kernel="auto")
    assert kernels.captures(on_cuda, silent, auto) is True
    assert kernels.captures(on_cuda, silent, SimpleNamespace(kernel="triton")) is True
    assert kernels.captures(on_cuda, silent, SimpleNamespace(kernel="torch")) is False
    assert kernels.captures(on_cuda, responding, auto) is False
    assert kernels.captures(torch.zeros(1, 1), silent, auto) is False


@every_script
@pytest.mark.parametrize("greedy", [False, True])
def test_a_captured_rollout_is_the_scripts_own(script, config, monkeypatch, greedy):
    cfg = config(temperature=0.7, max_completion_length=12)
    task = common.load_task(cfg, script.verify)
    policy = script.GPT(cfg).double()
    policy.embed.weight.data *= 20
    policy.embed.weight.data[script.EOS] *= 3                   # some rows end early
    problems = common.sample_problems(task, 3, "captured")
    problems = [problem for problem in problems for _ in range(4)]
    prompts = script.encode_prompts([problem.prompt for problem in problems], task, "cpu")
    uniforms = None
    if not greedy:
        uniforms = torch.rand(12, 12, generator=torch.Generator().manual_seed(0))
    expected = script.rollout(policy, prompts, problems, task, cfg, uniforms)

    def captures(prompts, task, cfg):
        return cfg.kernel != "torch"
    monkeypatch.setattr(kernels, "captures", captures)
    captured = script.rollout(policy, prompts, problems, task, cfg, uniforms)
    in_torch = dataclasses.replace(cfg, kernel="torch")
    eager = script.rollout(policy, prompts, problems, task, in_torch, uniforms)
    for field in dataclasses.fields(captured):
        ours = getattr(captured, field.name)
        torch.testing.assert_close(ours, getattr(expected, field.name), atol=1e-10, rtol=0)
        assert torch.equal(getattr(eager, field.name), getattr(expected, field.name))
