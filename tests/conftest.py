"""Fixtures and helpers that all tests share: scripts, tiny configurations and policies, and random
inputs."""
import contextlib
import functools
import importlib.util
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

# This must be set before torch and numpy are loaded. Some tests fork, and if the parent has a pool
# of threads, a child may wait for them forever.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
for name in [*sys.modules]:     # with -p hunt.grpo_level1_1, the tests get it instead of grpo.py
    if name.startswith("hunt."):
        script = name[5:].partition("_")[0]
        sys.modules["examples.distill" if script == "distill" else script] = sys.modules[name]
import plumbing  # noqa: E402
from learn import sync  # noqa: E402

signal.signal(signal.SIGINT, signal.default_int_handler)    # also if pytest is in the background
sys.modules["report.curve"] = None      # pictures take longer to draw than the runs of tests

torch.set_num_threads(1)        # the last bit of a sum depends on the number of threads
torch.set_float32_matmul_precision("highest")       # some images turn TF32 on

# modules whose fixtures all tests can use
pytest_plugins = ["small_runs", "update_scenes", "small_models"]

SCRIPTS = [name.removesuffix(".py") for name in sync.SCRIPTS]
TINY = {"device": "cpu", "task": "arithmetic:3", "hidden_size": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 16,
        "num_prompts": 4, "num_generations": 4, "max_completion_length": 8,
        "learning_rate": 0.01, "num_mini_batches": 1}


def scripts(*names):
    """Mark a test to run for each of these scripts, instead of grpo.py alone."""
    return pytest.mark.parametrize("script", names, indirect=True)


every_script = scripts(*SCRIPTS)


def pytest_ignore_collect(collection_path, config):
    """With -m quick, don't even import the files that contain no quick test."""
    if config.option.markexpr == "quick" and collection_path.suffix == ".py":
        return "mark.quick" not in collection_path.read_text("utf-8") or None
    return None


def pytest_collection_modifyitems(items):
    """Begin with the test that takes longest, so that no process waits for another at the end."""
    items.sort(key=lambda one: not one.name.startswith("test_from_nothing"))


close = functools.partial(torch.testing.assert_close, atol=1e-10, rtol=1e-10)


def f64(values):
    """Make a float64 tensor."""
    return torch.tensor(values, dtype=torch.float64)


def ones(*shape):
    """Make a float64 tensor of ones."""
    return torch.ones(shape, dtype=torch.float64)


def randn(*shape, seed=0):
    """Draw normal random numbers in float64; calls with the same seed return the same numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def gradient(loss, x):
    """Compute the gradient of loss.sum() in x, and keep the graph for further calls."""
    return torch.autograd.grad(loss.sum(), x, retain_graph=True)[0]


def load_named(task="arithmetic", **flags):
    """Load a task as grpo.py does with these flags."""
    import common
    import grpo
    return common.load_task(grpo.Config(task=task, device="cpu", **flags), grpo.verify)


def contents(folder="."):
    """Map every path below a folder to its bytes and the time of its last change, except what
    Python caches. -> dict"""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        if "__pycache__" in (path.name, path.parent.name):
            continue
        content = path.read_bytes() if path.is_file() else None
        found[str(path)] = (content, path.stat().st_mtime_ns)
    return found


def count_work(function, *args):
    """Count the lines of Python that a call runs, and the characters that regular expressions read.
    Unlike seconds, the count is the same on every machine. -> int"""
    function(*args)                                 # compiles the expressions
    counted = 0

    def trace(frame, event, _):
        nonlocal counted
        counted += event == "line"
        if event == "call" and frame.f_code.co_filename == re.__file__:
            counted += len(frame.f_locals.get("string", ""))
        return trace
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*args)
    finally:
        sys.settrace(before)
    return counted


@pytest.fixture
def script(request):
    """The module of the script under test."""
    return importlib.import_module(getattr(request, "param", "grpo"))


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """Run the test in an empty folder. -> the folder"""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def import_text(tmp_path, monkeypatch):
    """import_text(source): write a script, such as a rung of the path, and import it. -> module"""
    def imported(source):
        path = tmp_path / "written.py"
        path.write_text(source, "utf-8")
        spec = importlib.util.spec_from_file_location("written", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "written", module)
        spec.loader.exec_module(module)
        return module
    return imported


@pytest.fixture
def config(script):
    """config(**changes): the Config of a tiny policy."""
    return lambda **changes: script.Config(**(TINY | changes))


@pytest.fixture
def load_task(script):
    """load_task(cfg): loads a task with the script's verifier."""
    return lambda cfg: script.common.load_task(cfg, script.verify)


@pytest.fixture
def talker(script):
    """talker(cfg): an untrained policy whose next token depends on all tokens before it. It ends
    its completions soon, so rows have many different lengths. embed.weight[:, 0] is the bias of
    its logits."""
    class Talker(script.GPT):
        def __init__(self, cfg):
            super().__init__(cfg)
            is_end = torch.arange(script.VOCAB_SIZE) == script.EOS
            self.embed.weight.data *= 20
            self.embed.weight.data[:, 0] = 4.0 * is_end

        def hidden(self, tokens, cache=None):
            others = super().hidden(tokens, cache)[..., 1:]
            return torch.cat([torch.ones_like(others[..., :1]), others], dim=-1)
    return Talker


@pytest.fixture
def bigram():
    """bigram(table): a policy whose logits are table[last token], so its gradient is easy to
    compute. All numbers in the table must be finite."""
    class Bigram(torch.nn.Module):
        def __init__(self, table):
            super().__init__()
            self.table = torch.nn.Parameter(table.clone())
            self.embed = SimpleNamespace(weight=torch.eye(len(table)).to(table))

        def hidden(self, tokens, cache=None):
            return self.table[tokens]
    return Bigram


@pytest.fixture
def double():
    """Make float64 the type of new tensors and weights."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def no_default_device():
    """Reset the default device after each test, because nano.main sets it if CUDA is present."""
    yield
    torch.set_default_device(None)


@pytest.fixture
def watch(monkeypatch):
    """watch(owner, name, look): the list of look(*args), which grows with each call of a function
    that otherwise does what it did."""
    def install(owner, name, look):
        function = getattr(owner, name)
        seen = []

        @functools.wraps(function)
        def watched(*args, **options):
            seen.append(look(*args, **options))
            return function(*args, **options)
        monkeypatch.setattr(owner, name, watched)
        return seen
    return install


@pytest.fixture
def stops(capsys):
    """stops(words, function, *args, code=2, **flags): checks that the call exits with this code
    after one line on stderr that contains the words. -> the line"""
    def check(words, function, *args, code=2, **flags):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            function(*args, **flags)
        error = capsys.readouterr().err
        assert stop.value.code == code
        assert error.startswith("error: ") and error.count("\n") == 1 and words in error, error
        return error
    return check


@pytest.fixture
def refused(stops, tmp_path):
    """refused(words, function, *args, **flags): checks that the call stops with code 2, and that it
    changes nothing in the test's folder."""
    def check(*args, **flags):
        before = contents(tmp_path)
        stops(*args, **flags)
        assert contents(tmp_path) == before
    return check


@pytest.fixture(scope="module")
def browser():
    """Chromium. A test that needs it is skipped if Chromium or playwright is not installed."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("google-chrome")        # else playwright's own
    with sync_api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=["--disable-gpu"])
        except sync_api.Error as error:
            if path is not None or "Executable doesn't exist" not in str(error):
                raise
            pytest.skip("Chromium is not installed")
        yield browser
        browser.close()


@pytest.fixture(autouse=True, scope="session")
def bases_made_once(tmp_path_factory):
    """Let all runs, also those of other processes, share one folder of bases, which begins with
    those of the user. A test that makes the folder runs/base has its own. No base is made a second
    time in other processes."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    (folder / "bases").mkdir(exist_ok=True)
    for base in ROOT.glob("runs/base/*.pt"):                    # which `make run` has made
        with contextlib.suppress(FileExistsError):
            (folder / "bases" / base.name).symlink_to(base)
    load_base = plumbing.load_base

    def load_shared(*args):
        base = Path("runs/base").absolute()
        if base.is_relative_to(folder) and not base.exists():
            base.parent.mkdir(exist_ok=True)
            with contextlib.suppress(FileExistsError):      # of a run that begins at this moment
                base.symlink_to(folder / "bases")
        load_base(*args)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("current"))     # of tests that choose no folder
        patch.setattr(plumbing, "load_base", load_shared)
        yield
