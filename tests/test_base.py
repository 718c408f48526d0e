"""The base policy: which runs share a base, and which changes require a new one. Its warm start:
the gradient, the learning rates, and the step of Muon."""
import contextlib
import dataclasses
import functools
import importlib
import importlib.machinery
import os
import subprocess
import sys
import types
from pathlib import Path

import pretend
import pytest
import torch
from conftest import ROOT, SCRIPTS, TINY, close, every_script
from small_models import Recording
from small_runs import INSTANT, changed_weights, load, policy_of, read_summary
from update_scenes import gradients

import common
import grpo
import plumbing
from kernels import decode
from vectors.edits import replace_once


def times(folder):
    """Map each cached base to the time it was written. -> dict"""
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


# ---- which runs share a base -----------------------------------------------------------------

def test_all_scripts_share_a_base(own_bases):
    for name in SCRIPTS:
        script = importlib.import_module(name)
        cfg = script.Config(**TINY, base_steps=0)
        plumbing.load_base(script.GPT(cfg), common.load_task(cfg, script.verify), cfg)
    assert len(times(own_bases)) == 1


@every_script
def test_a_run_begins_with_the_policy_of_another_if_told(new_run, finished):
    folder = new_run(**INSTANT | {"base_steps": 3}, init_from=finished)
    assert not changed_weights(load(folder / "base.pt")["policy"], policy_of(finished))
    base = read_summary(folder)["base"]
    assert base | read_summary(finished)["trained"] == base


def edited(file, old, new):
    """Make a module of a file of the repository in which one text is replaced. -> module"""
    text = replace_once((ROOT / file).read_text("utf-8"), old, new)
    module = types.ModuleType(Path(file).stem)      # sys.modules keeps the real one
    module.__file__ = str(ROOT / file)
    exec(compile(text, module.__file__, "exec"), vars(module))
    return module


COUNTDOWN = "number,countdown"
@pytest.mark.parametrize("task, file, old, new, is_same", [
    ("arithmetic", "grpo.py", "-?[0-9]{1,20}", "-?[0-9]{1,9}", True),           # verify
    ("arithmetic", "grpo.py", "continues = token != EOS", "continues = token < 9", True),
    ("arithmetic", "grpo.py", "A decoder layer: ", "A layer: ", True),          # docstring of Block
    ("arithmetic", "grpo.py", "x = x + self.out(", "x = x - self.out(", False),         # Block
    ("arithmetic", "grpo.py", "cat([left * cos", "cat([left + cos", False),     # rotate
    ("arithmetic", "common.py", "rng.randint(1, 9)\n        expression",
     "rng.randint(1, 8)\n        expression", False),
    ("arithmetic", "common.py", "% 10 < self.held_out_tenths", "% 9 < self.held_out_tenths", False),
    ("arithmetic", "common.py", "num_prompts: int = flag(32", "num_prompts: int = flag(16", True),
    ("arithmetic", "plumbing.py", "gram = x @ x.mT", "gram = x.mT @ x", False),
    ("arithmetic", "plumbing.py", "held out:", "not seen:", True),
    ("arithmetic", "plumbing.py", "# an orthogonal step", "# such a step", True),       # comment
    (COUNTDOWN, "tasks/countdown.py", "LIMIT = 30 ", "LIMIT = 29 ", False),
    (COUNTDOWN, "tasks/lookup.py", "CALL_LIMIT = 4 ", "CALL_LIMIT = 5 ", True)])
def test_a_base_is_made_again_if_code_that_shapes_it_changes_and_only_then(
        config, load_task, task, file, old, new, is_same):
    cfg = config(task=task)
    own, made = load_task(cfg), edited(file, old, new)
    policy, path = grpo.GPT(cfg), plumbing.base_path
    before = path(policy, own, cfg)
    if file == "grpo.py":
        policy = made.GPT(cfg)
    elif file == "common.py":
        own = made.Arithmetic(grpo.verify)
    elif file == "plumbing.py":
        path = made.base_path
    elif task == COUNTDOWN and file == "tasks/countdown.py":
        own.parts["countdown"] = made.Countdown(cfg)
    assert (path(policy, own, cfg) == before) == is_same


def test_the_vocabulary_belongs_to_a_base(config, load_task, monkeypatch):
    cfg = config()
    before = plumbing.base_path(grpo.GPT(cfg), load_task(cfg), cfg)
    monkeypatch.setattr(grpo, "VOCAB_SIZE", 384)
    assert plumbing.base_path(grpo.GPT(cfg), load_task(cfg), cfg) != before


OWN_TASK = """
import common
import facts
import letters
from deep import table

NUMBERS = [1, 2, 3]


class Sorting(common.Task):
    prompt_width = 7
    base = 10

    def __init__(self, size):
        super().__init__()
        self.size = size

    def sample(self, rng):
        digits = "".join(rng.choices("0123456789", k=self.size))
        return common.Problem(digits + "=", answer="".join(sorted(digits)))

    def demonstration(self, rng, phase):
        'Show the wrong order.'
        import late
        problem = self.sample(rng)
        extra = facts.WORD + table.WORD + table.near() + late.WORD + self.end + spelled()
        return problem._replace(completion=extra + str(NUMBERS))    # a comment

    @property
    def end(self):
        return ";"

    def verify(self, problem, text):
        return 1.0


def spelled(name="WORD"):
    def spell():
        return getattr(letters, name).strip("_")
    return spell()


def unused():
    return 0
"""
MODULES = {"facts.py": "WORD = 'a'\nOTHER = 'e'\n", "letters.py": "WORD = 'b'\n",
           "deep/__init__.py": "", "deep/table.py": "from deep.words import WORD\n\n\n"
           "def near():\n    from .near import WORD\n    return WORD\n",
           "deep/near.py": "WORD = 'f'\n",
           "deep/words.py": "WORD = 'c'\n", "late.py": "WORD = 'd'\n"}


@pytest.mark.parametrize("file, old, new, is_same", [
    ("own.py", "", "", True), ("copy.py", "", "", True), ("own.py", "a comment", "x", True),
    ("own.py", "Show the wrong order.", "Show it.", True), ("own.py", "return 0", "return 1", True),
    ("own.py", "k=self.size", "k=6", False), ("own.py", "base = 10", "base = 9", False),
    ("own.py", "[1, 2, 3]", "[1, 3, 2]", False), ("own.py", "+ str(NUMBERS)", "", False),
    ("own.py", 'return ";"', 'return ","', False), ("own.py", '="WORD"', '="WORD_"', False),
    ("own.py", 'strip("_")', 'strip("-")', False), ("letters.py", "'b'", "'x'", False),
    ("facts.py", "'e'", "'x'", True), ("facts.py", "'a'", "'x'", False),
    ("late.py", "'d'", "'x'", False), ("deep/words.py", "'c'", "'x'", False),
    ("deep/near.py", "'f'", "'x'", False)])
def test_a_task_that_a_script_makes_has_a_base_of_its_own(
        config, tmp_path, monkeypatch, file, old, new, is_same):
    """It is made again if something changes that shapes the demonstrations, wherever it lives."""
    cfg = config()

    def path_of(folder, name, size=6, change=None):
        for module, text in {**MODULES, name: OWN_TASK}.items():
            path = tmp_path / folder / module
            path.parent.mkdir(parents=True, exist_ok=True)
            if module == file and change is not None:
                assert old in text
                text = text.replace(*change)
            path.write_text(text)
        for module in ("facts", "letters", "deep", "deep.table", "deep.words", "deep.near",
                       "late"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.setattr(sys, "path", [str(tmp_path / folder), *sys.path])
        made = importlib.machinery.SourceFileLoader("own", str(tmp_path / folder / name))
        own = types.ModuleType("own")
        own.__file__ = str(tmp_path / folder / name)
        exec(made.get_code("own"), vars(own))
        return plumbing.base_path(grpo.GPT(cfg), own.Sorting(size), cfg)
    before = path_of("before", "own.py")
    assert before.name.startswith("sorting-")
    after = path_of("after", "copy.py" if file == "copy.py" else "own.py", change=(old, new))
    assert (after == before) == is_same
    assert path_of("small", "own.py", size=5) != before


def test_the_number_of_operands_belongs_to_a_base_and_the_verifier_does_not(config, load_task):
    cfg = config(task="arithmetic")
    policy = grpo.GPT(cfg)
    paths = {plumbing.base_path(policy, task, cfg) for task in (
        common.Arithmetic(grpo.verify), common.Arithmetic(lambda problem, text: 1.0, 5, 5),
        load_task(cfg), load_task(config(task="arithmetic:5")))}
    assert len(paths) == 1
    assert plumbing.base_path(policy, common.Arithmetic(grpo.verify, 2, 3), cfg) not in paths


class Word:
    def __init__(self, text):
        self.text = text

    def write(self):
        return self.text


def writes(text):
    return lambda: text


@pytest.mark.parametrize("value, other", [
    (writes("a"), writes("b")), (Word("a").write, Word("b").write), (Word("a"), Word("b")),
    (functools.partial(writes, "a"), functools.partial(writes, "b")), ({3, 1}, {3, 2}),
    ({"a": 1}, {"a": 2}), (torch.zeros(2000), (torch.arange(2000) == 1000).float()),
    ([grpo.EOS], [grpo.PAD]), (Recording, grpo.GPT)])
def test_an_attribute_of_a_task_belongs_to_its_base(config, load_task, value, other):
    cfg = config()
    policy, task = grpo.GPT(cfg), load_task(cfg)
    paths = []
    for task.extra in (value, other, value):
        paths.append(plumbing.base_path(policy, task, cfg))
    assert paths[0] == paths[2] != paths[1]


TYPED = """
import common, grpo, plumbing
class Facts:
    WORD = 'a'
class Sorting(common.Task):
    def demonstration(self, rng, phase):
        return common.Problem('1=', '1', completion=Facts.WORD)
cfg = grpo.Config(device='cpu')
print(plumbing.base_path(grpo.GPT(cfg), Sorting(), cfg).name)
"""


def test_a_task_that_was_typed_has_a_base_of_its_own():
    """In python -c, as in a notebook, no file has the text of a class."""
    names = [subprocess.run([sys.executable, "-c", text], cwd=ROOT, text=True, check=True,
                            capture_output=True).stdout
             for text in (TYPED, TYPED + "#", TYPED.replace("'a'", "'b'"))]
    assert names[0] == names[1] != names[2] and names[0].startswith("sorting-")


@pytest.mark.parametrize("flags", [{"reward": "accuracy+format"}, {"curriculum": True},
                                   {"seed": 3}, {"learning_rate": 0.5}], ids=str)
def test_what_changes_only_rl_keeps_the_base(config, load_task, flags):
    cfg = config(task="arithmetic:3-7")
    changed = dataclasses.replace(cfg, **flags)
    policy = grpo.GPT(cfg)
    assert plumbing.base_path(policy, load_task(cfg), cfg) == plumbing.base_path(
        policy, load_task(changed), changed)


AGAIN = """
import common, grpo, plumbing
cfg = grpo.Config(device='cpu', task='lookup,countdown')
task = common.load_task(cfg, grpo.verify)
task.words = {*dir(common)}
for step in range(2):
    print(plumbing.base_path(grpo.GPT(cfg), task, cfg).name)
    plumbing.warm_start(grpo.GPT(cfg), task, grpo.Config(device='cpu', base_steps=1))
"""


def test_the_same_key_comes_out_again_and_in_a_process_with_another_order_of_sets():
    """tiktoken's tokenizer, which the code of a warm start mentions, changes when it is used."""
    names = []
    for seed in ("1", "2"):
        names += subprocess.run(
            [sys.executable, "-c", AGAIN], cwd=ROOT, text=True, check=True, capture_output=True,
            env=os.environ | {"PYTHONHASHSEED": seed}).stdout.split()
    assert len(names) == 4 and len({*names}) == 1


def test_what_shapes_a_base_includes_the_arithmetic_and_the_device(
        config, load_task, own_bases, monkeypatch, watch):
    class Other(grpo.GPT):
        pass
    cfg = config(base_steps=0)
    policy, task = grpo.GPT(cfg), load_task(cfg)
    monkeypatch.setattr(plumbing, "warm_start", lambda *_: None)
    suffixes = watch(plumbing, "write", lambda path, content, suffix: suffix)
    for changes in ({}, {"device": "mps"}, {"base_seed": 1}):
        plumbing.load_base(policy, task, dataclasses.replace(cfg, **changes))
    plumbing.load_base(Other(cfg), task, cfg)
    monkeypatch.setattr(common, "ARITHMETIC", ("2.0.0", "AVX2"))
    plumbing.load_base(policy, task, cfg)
    assert len(times(own_bases)) == 5
    assert len({*suffixes}) == 5            # two containers may have the same process and thread


# ---- the warm start --------------------------------------------------------------------------

def test_halves_of_a_batch_add_up_to_the_mean_over_the_tokens_that_a_policy_would_write(
        config, load_task, double):
    cfg = config(task="lookup")
    task, policy = load_task(cfg), grpo.GPT(cfg)
    examples = common.sample_problems(task, 7, 0, phase="textbook")
    batch = common.encode_examples(examples, task, "cpu")
    prompts, tokens, mask, lengths = batch
    halves = [plumbing.gradient(policy, batch, rows) for rows in lengths.argsort().chunk(2)]
    logps, _ = grpo.score(policy, prompts, tokens)
    expected = torch.autograd.grad(-(logps * mask).sum() / lengths.sum(), policy.parameters())
    close([sum(terms) for terms in zip(*halves)], list(expected))
    assert mask.sum() < lengths.sum() < mask.numel()        # what a tool inserts; padding


def test_its_rates_rise_in_50_batches_and_fall_to_0_and_those_of_matrices_are_5_times_as_high(
        config, load_task, watch):
    cfg = config(base_steps=80, base_batch_size=2, base_learning_rate=1e-5)
    policy = grpo.GPT(cfg)
    of_matrices = watch(plumbing, "muon_step", lambda matrices, momentum, rate: rate)
    steps = watch(plumbing.AdamW, "step", lambda optimizer: (
        optimizer.param_groups[0]["lr"], gradients(policy).norm().item(),
        len(optimizer.param_groups[0]["params"]), optimizer.defaults["betas"],
        optimizer.defaults["weight_decay"]))
    plumbing.warm_start(policy, load_task(cfg), cfg)
    rates, norms, *others = zip(*steps)
    expected = [1e-5 * min((step + 1) / 50, (80 - step) / 80) for step in range(80)]
    assert rates == pytest.approx(expected)
    assert sorted(of_matrices) == pytest.approx(sorted(2 * 7 * [5 * rate for rate in expected]))
    assert norms == pytest.approx([1.0] * 80, rel=1e-3)         # without a clip, 1.4 to 4.8
    assert {*zip(*others)} == {(1 + 2 * 2 + 1, (0.9, 0.95), 0.0)}       # the embedding, 5 norms


def test_its_adamw_takes_the_steps_of_torch_but_does_not_import_torch_dynamo(monkeypatch):
    gradients = torch.randn(4, 3, 5).unbind()

    def train(make):
        weight = torch.nn.Parameter(torch.ones(3, 5))
        optimizer = make([weight], lr=0.01)
        for gradient in gradients:
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.zero_grad()
            weight.grad = gradient.clone()
            optimizer.step()
        return weight, str(optimizer.state_dict())
    with monkeypatch.context() as patch:        # first, because torch's methods import it only once
        patch.setitem(sys.modules, "torch._dynamo", None)       # importing it fails
        weight, state = train(plumbing.AdamW)
    expected = train(functools.partial(torch.optim.AdamW, weight_decay=0.0))
    assert torch.equal(weight, expected[0]) and state == expected[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("task, fails", [("arithmetic:3-5", False), ("lookup", False),
                                         ("arithmetic:3-5", True)])
def test_on_cuda_a_graph_for_each_width_or_none_makes_the_base_of_a_cpu(
        config, load_task, double, monkeypatch, capsys, task, fails):
    recordings = []

    def capture(function, device):
        function()                                          # as kernels.decode.capture does
        recordings.append(Recording())
        if fails:
            raise RuntimeError("cannot be recorded")
        with recordings[-1]:
            function()
        return torch.no_grad()(recordings[-1].replay)
    bases = []
    for device in ("cpu", "cuda"):
        with pretend.cuda() if device == "cuda" else contextlib.nullcontext():
            monkeypatch.setattr(decode, "capture", capture)
            cfg = config(task=task, device=device, base_steps=30, base_batch_size=3)
            policy = grpo.GPT(cfg).to(device)
            plumbing.warm_start(policy, load_task(cfg), cfg)
            bases.append([weight.detach().cpu() for weight in policy.parameters()])
    assert 1 < len(recordings) < 10
    assert ("without CUDA graphs" in capsys.readouterr().out) == fails
    torch.testing.assert_close(*bases, atol=1e-8, rtol=1e-8)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")
@pytest.mark.parametrize("shape", [(6, 6), (12, 4), (3, 8)])
def test_the_step_of_muon_is_that_of_torch_but_for_its_bfloat16(shape, double, monkeypatch):
    """muon_step avoids bfloat16, which is slow on many CPUs. Here torch uses float64, too."""
    bfloat16 = torch.Tensor.bfloat16
    torch.manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(shape))
    theirs = torch.nn.Parameter(ours.detach().clone())
    optimizer = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.0)
    momentum = torch.zeros(shape)
    for _ in range(4):
        ours.grad = theirs.grad = torch.randn(shape)
        monkeypatch.setattr(torch.Tensor, "bfloat16", bfloat16)
        plumbing.muon_step([ours], momentum, 0.02)
        monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
        optimizer.step()
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
