"""What the tests share: the scripts on the path, and policies so small that a test takes milliseconds."""
import importlib
import os
import signal
import sys
from pathlib import Path

# Before torch and numpy are loaded: tests fork, and a child of a process with a pool of threads may wait for
# them for ever.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

torch.set_num_threads(1)        # sums differ between thread counts in the last bit

SCRIPTS = [name for name in ("reinforce", "ppo", "grpo", "gspo", "dpo") if (ROOT / f"{name}.py").is_file()]


def scripts(*names):
    """A mark: the test is run for each of these scripts, instead of grpo.py alone."""
    return pytest.mark.parametrize("script", [name for name in SCRIPTS if name in names], indirect=True)


every_script = scripts(*SCRIPTS)


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def ragged():
    """Made-up log-probs, new and old, advantages and a mask, of which one slot is off inside its row."""
    draw = torch.Generator().manual_seed(0)
    logps = -torch.rand(3, 4, generator=draw).double() - 0.5
    noise = torch.randn(3, 4, generator=draw).double()
    mask = f64([[1, 0, 0, 0], [1, 0, 1, 1], [1, 1, 1, 1]])
    return logps, logps + 0.3 * noise, f64([1.5, -2.0, 0.7]), mask


@pytest.fixture
def script(request):
    """The module of the script under test."""
    return importlib.import_module(getattr(request, "param", "grpo"))


@pytest.fixture
def config(script):
    """config(**changes): the Config of a tiny policy."""
    tiny = {"device": "cpu", "num_threads": 1, "operands": "3", "hidden_size": 16, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 16, "num_prompts": 4, "num_generations": 4,
            "max_completion_length": 8, "learning_rate": 0.01, "num_mini_batches": 1}
    return lambda **changes: script.Config(**(tiny | changes))


@pytest.fixture
def no_picture(monkeypatch):
    """A run draws no picture, which would take longer than it, and leaves Ctrl-C as it was."""
    monkeypatch.setitem(sys.modules, "tools.report", None)
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, on_ctrl_c)
