"""The scripts with the kernels: whichever path computes log-probs, a run learns the same."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import SCRIPTS, every_script

ROOT = Path(__file__).resolve().parent.parent
TINY = {"device": "cpu", "num_threads": 1, "operands": 3, "hidden_size": 16, "intermediate_size": 16,
        "num_attention_heads": 2, "num_prompts": 3, "num_generations": 4, "max_completion_length": 6,
        "max_steps": 2, "base_steps": 0, "num_eval_problems": 4, "num_eval_samples": 2, "temperature": 0.8,
        "eval_steps": 5, "micro_batch_size": 5, "learning_rate": 0.01, "stop_at": 2}


def words(flags):
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def weights(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)["policy"]


def close(one, other):
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, atol=1e-5, rtol=1e-5)


@every_script
def test_log_probs_without_logits_in_memory_teach_the_same(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "tools.report", None)      # no picture
    for how in ("off", "on"):
        script.main(words(TINY | {"fused_linear": how, "output_dir": how}))
    close(weights(tmp_path / "off"), weights(tmp_path / "on"))


INTERPRETED = """
import importlib, sys
sys.modules["tools.report"] = None
for name in sys.argv[1].split(","):
    importlib.import_module(name).main([*sys.argv[2:], "--output_dir", name])
"""


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """The folder in which each script was run with the Triton kernel, in Triton's interpreter."""
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("interpreted")
    command = [sys.executable, "-c", INTERPRETED, ",".join(SCRIPTS), *words(TINY | {"kernel": "triton"})]
    out = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300,
                         env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)})
    assert out.returncode == 0 and out.stdout.count("log-probs by triton") == len(SCRIPTS), out.stderr
    return folder


@every_script
def test_log_probs_of_the_triton_kernel_in_its_interpreter_teach_the_same(
        script, interpreted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "tools.report", None)
    script.main(words(TINY | {"kernel": "torch", "output_dir": "torch"}))
    close(weights(tmp_path / "torch"), weights(interpreted / script.__name__))


def test_logits_of_a_gigabyte_are_not_kept_in_memory_and_small_ones_are():
    from kernels import choose_linear
    assert choose_linear("auto", 2**28) is choose_linear("on", 1) is not None
    assert choose_linear("auto", 2**28 - 1) is choose_linear("off", 2**40) is None
    with pytest.raises(ValueError, match="sometimes"):
        choose_linear("sometimes", 1)


def test_on_a_cpu_torch_computes_log_probs_unless_triton_is_asked_for_which_is_refused():
    from kernels import choose
    cpu = torch.device("cpu")
    assert choose("auto", cpu) is choose("torch", cpu) is None
    for kernel in ("triton", "cuda"):
        with pytest.raises(ValueError, match=kernel):
            choose(kernel, cpu)


@every_script
def test_triton_where_it_cannot_run_is_one_line_and_nothing_is_touched(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        script.main(["--device", "cpu", "--kernel", "triton"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("error: --kernel triton") and error.count("\n") == 1
    assert not list(tmp_path.iterdir())
