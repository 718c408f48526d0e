"""What the tests share: scripts, tiny configurations of them, and numbers to check them with."""
import importlib
import os
import signal
import sys
import time
from pathlib import Path

# Before torch and numpy are loaded: some tests fork, and the child of a process with a pool of
# threads may wait for them for ever.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

torch.set_num_threads(1)        # sums differ between thread counts in the last bit

# fixtures for all tests
pytest_plugins = ["small_policies", "update_scenes", "made_runs", "echo_task",
                  "small_runs", "small_models", "warm_python"]

SCRIPTS = ["reinforce", "ppo", "grpo", "gspo", "dpo"]
TINY = {"device": "cpu", "num_threads": 1, "operands": "3", "hidden_size": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 16,
        "num_prompts": 4, "num_generations": 4, "max_completion_length": 8,
        "learning_rate": 0.01, "num_mini_batches": 1}


def scripts(*names):
    """A mark: the test is run for each of these scripts, instead of grpo.py alone."""
    in_order = [name for name in SCRIPTS if name in names]
    return pytest.mark.parametrize("script", in_order, indirect=True)


every_script = scripts(*SCRIPTS)


def pytest_ignore_collect(collection_path, config):
    """With -m quick, a file that has no such test is not even imported."""
    if config.option.markexpr == "quick" and collection_path.suffix == ".py":
        return "mark.quick" not in collection_path.read_text() or None
    return None


def f64(values):
    """A tensor in float64."""
    return torch.tensor(values, dtype=torch.float64)


def ragged():
    """Made-up numbers of three rows: log-probs (3, 4), older ones (3, 4), advantages (3,), and a
    mask (3, 4) of which one slot is 0 inside its row."""
    generator = torch.Generator().manual_seed(0)
    logps = -torch.rand(3, 4, generator=generator).double() - 0.5
    noise = torch.randn(3, 4, generator=generator).double()
    mask = f64([[1, 0, 0, 0], [1, 0, 1, 1], [1, 1, 1, 1]])
    return logps, logps + 0.3 * noise, f64([1.5, -2.0, 0.7]), mask


def takes_less_than(seconds, function, *args):
    """Whether one of three calls takes less of the processor's time. One alone may be held up by
    what is not its own: Python collects the garbage of a thousand tests, or the machine stands."""
    for _ in range(3):
        start = time.process_time()
        function(*args)
        if time.process_time() - start < seconds:
            return True
    return False


@pytest.fixture
def script(request):
    """The module of the script under test."""
    return importlib.import_module(getattr(request, "param", "grpo"))


@pytest.fixture
def config(script):
    """config(**changes): the Config of a tiny policy."""
    def make(**changes):
        return script.Config(**(TINY | changes))
    return make


@pytest.fixture
def load_task(script):
    """load_task(cfg): the task object that the script makes."""
    def load(cfg):
        return script.common.load_task(cfg, script.verify)
    return load


@pytest.fixture
def restored_ctrl_c():
    """Leaves Ctrl-C as it was, although a run handles it."""
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, on_ctrl_c)


@pytest.fixture(autouse=True)
def no_picture(restored_ctrl_c, monkeypatch):
    """Runs of the tests draw none, which takes longer than these runs. A test that wants one takes
    this patch back."""
    monkeypatch.setitem(sys.modules, "tools.report", None)
