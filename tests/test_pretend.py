"""Test the code for CUDA on a simulated device (see pretend.py): nothing raises, and all numbers
equal those of the CPU. The rest takes a real GPU, on which `make gpu` runs."""
import contextlib
import importlib
import json
from pathlib import Path

import pretend
import pytest
import torch
from small_runs import steps

import common
import grpo
import kernels
import plumbing
from kernels import logprob
from tasks import flags as task_flags

TINY = ("--hidden_size 16 --num_hidden_layers 1 --intermediate_size 16 --num_prompts 4 "
        "--num_generations 4 --max_completion_length 9 --base_steps 2 --max_steps 2 "
        "--eval_steps 2 --num_eval_problems 4 --num_eval_samples 1 --learning_rate 0.01 "
        "--task arithmetic:2")
# Runs of each script and each task, with flags that take other branches of the code.
RUNS = """
grpo --kernel torch --dynamic_sampling 1 --num_mini_batches 3 --beta 0.1 --entropy_coef 0.1
gspo --task lookup --beta 0.1 --dynamic_sampling 1
ppo --task gridworld --trust_region penalty --target_kl 0.001 --critic_pretrain_steps 1
dpo --online --nll_coef 0.1
""".strip().splitlines()

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture(autouse=True)
def work_folder(own_folder, monkeypatch):
    monkeypatch.setattr(task_flags, "load_part", load_part)


def load_part(*args, load_part=task_flags.load_part):
    """Load a task in which texts of even length are right, so that a tiny policy learns."""
    task = load_part(*args)
    if task.name != "gridworld":                        # gridworld rewards each move
        task.verify = lambda problem, text: float(len(text) % 2 == 0)
    return task


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Flags for one base on both devices, because two bases would differ in their last bits."""
    folder = tmp_path_factory.mktemp("base")
    words = f"{TINY} --base_steps 40 --max_steps 0 --device cpu"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        grpo.main([*words.split(), "--output_dir", "base"])
    return ["--init_from", f"{folder}/base"]


# ---- 1. runs ---------------------------------------------------------------------------------

@pytest.mark.parametrize("words", RUNS)
def test_a_run_has_the_numbers_of_the_cpu(words, base):
    script, *flags = words.split()
    for device in ("cpu", "cuda"):
        with pretend.cuda() if device == "cuda" else contextlib.nullcontext():
            importlib.import_module(script).main([
                *TINY.split(), *flags, *base, "--output_dir", device, "--device", device])
    for ours, expected in zip(steps("cuda"), steps("cpu"), strict=True):
        del ours["step_time"], expected["step_time"]
        assert ours == pytest.approx(expected, rel=1e-3, abs=1e-4) and ours["grad_norm"] > 1e-3
    assert Path("cuda/greedy.jsonl").read_text() == Path("cpu/greedy.jsonl").read_text()


# ---- 2. missing tools, and changed defaults ---------------------------------------------------

def test_triton_needs_a_c_compiler_and_pythons_headers(tmp_path, monkeypatch):
    can_compile = logprob.can_compile.__wrapped__
    monkeypatch.setattr(logprob.sysconfig, "get_path", lambda *_: tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", "cc")
    assert not can_compile()
    Path("Python.h").touch()
    assert can_compile()
    monkeypatch.delenv("CC")
    assert not can_compile()
    for answer in (False, True):
        monkeypatch.setattr(logprob, "can_compile", lambda answer=answer: answer)
        with pretend.cuda():
            assert logprob.triton is None or logprob.can_run("cuda") == answer


@pytest.mark.parametrize("file", ["version", "nvidia-smi"])
def test_a_gpu_that_torch_cannot_use_gets_a_line_unless_the_cpu_was_chosen(
        file, tmp_path, monkeypatch, capsys):
    def note(*argv):
        plumbing.parse_flags(grpo.Config, argv)
        return capsys.readouterr().err
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(kernels, "DRIVER", "version")
    assert note() == ""
    Path(file).touch(mode=0o755)
    assert note().startswith("note: NVIDIA's driver is installed")
    Path("config.json").write_text(json.dumps({"script": "grpo.py", "config": {"device": "cpu"}}))
    assert note("--device", "cpu") == note("--resume_from_checkpoint", ".") == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert note() == ""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(common, "HAS_CUDA", True)
    assert note() == ""
