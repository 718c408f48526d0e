"""The base policy: which runs share a base, and which changes require a new one. Its warm start:
the gradient, the learning rates, and the step of Muon."""
import contextlib
import dataclasses
import functools
import os
import subprocess
import sys
import types
from pathlib import Path

import pretend
import pytest
import torch
from conftest import ROOT, close, every_script
from small_models import Recording
from small_runs import INSTANT, arguments, changed_weights, load, policy_of, read_summary
from update_scenes import gradients

import common
import grpo
import plumbing
from kernels import decode
from tasks import calls
from vectors.edits import replace_once


def times(folder):
    """Map each cached base to the time it was written. -> dict"""
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


# ---- which runs share a base -----------------------------------------------------------------

@every_script
def test_a_run_begins_with_the_policy_of_another_if_told(new_run, finished):
    folder = new_run(**INSTANT | {"base_steps": 3}, init_from=finished)
    assert not changed_weights(load(folder / "base.pt")["policy"], policy_of(finished))
    base = read_summary(folder)["base"]
    assert base | read_summary(finished)["trained"] == base


def edited(file, old, new, folder):
    """Make a module of a file of the repository in which one text is replaced. -> module"""
    path = folder / Path(file).name
    path.write_text(replace_once((ROOT / file).read_text("utf-8"), old, new), "utf-8")
    module = types.ModuleType(path.stem)            # sys.modules keeps the real one
    module.__file__ = str(path)
    exec(compile(path.read_text("utf-8"), module.__file__, "exec"), vars(module))
    return module


COUNTDOWN = "number,countdown"
@pytest.mark.parametrize("task, file, old, new, is_same", [
    ("arithmetic", "grpo.py", "-?[0-9]{1,20}", "-?[0-9]{1,9}", True),           # verify
    ("arithmetic", "grpo.py", "x = x + self.out(", "x = x - self.out(", False),         # Block
    ("arithmetic", "common.py", "rng.randint(1, 9)\n        expression",
     "rng.randint(1, 8)\n        expression", False),
    ("arithmetic", "common.py", "% 10 < self.held_out_tenths", "% 9 < self.held_out_tenths", False),
    ("arithmetic", "plumbing.py", "gram = x @ x.mT", "gram = x.mT @ x", False),
    ("arithmetic", "plumbing.py", "# an orthogonal step", "# such a step", True),       # comment
    (COUNTDOWN, "tasks/countdown.py", "LIMIT = 30 ", "LIMIT = 29 ", False),
    (COUNTDOWN, "tasks/lookup.py", "CALL_LIMIT = 4 ", "CALL_LIMIT = 5 ", True)])
def test_a_base_is_made_again_if_an_edit_shows_in_what_it_learns_and_only_then(
        config, load_task, tmp_path, task, file, old, new, is_same):
    cfg = config(task=task)
    own, made = load_task(cfg), edited(file, old, new, tmp_path)
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


def test_what_an_environment_inserts_belongs_to_a_base(config, load_task, monkeypatch):
    cfg = config(task="lookup")
    policy, task = grpo.GPT(cfg), load_task(cfg)
    before = plumbing.base_path(policy, task, cfg)
    monkeypatch.setattr(calls, "sampled_masks", lambda task, examples, ids: [
        torch.ones(len(row)) for row in ids])
    assert plumbing.base_path(policy, task, cfg) != before


def test_the_weights_before_training_belong_to_a_base_with_their_names_shapes_and_type(
        config, load_task, monkeypatch):
    cfg = config()
    task = load_task(cfg)

    def path_of(change=lambda policy: policy):
        return plumbing.base_path(change(grpo.GPT(cfg)), task, cfg)

    def grown(policy):                                  # an unused weight changes no logit
        policy.extra = torch.nn.Parameter(torch.ones(1))
        return policy

    def dropping(policy):
        policy.norm = torch.nn.Sequential(policy.norm, torch.nn.Dropout(0.5))
        return policy
    paths = [path_of(), path_of(dropping), path_of(grown),
             path_of(lambda policy: policy.bfloat16()), path_of(lambda policy: policy.double())]
    monkeypatch.setattr(grpo, "VOCAB_SIZE", 384)
    paths.append(path_of())
    assert len({*paths}) == len(paths)
    monkeypatch.setattr(grpo, "VOCAB_SIZE", 320)
    policy = dropping(grpo.GPT(cfg))
    state = torch.random.get_rng_state()
    assert plumbing.base_path(policy, task, cfg) == paths[1]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_number_of_threads_changes_neither_the_key_nor_the_bits_of_a_base(
        config, load_task, own_bases):
    cfg = config(task="arithmetic", base_steps=3, hidden_size=128)
    bases = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision("medium")        # bfloat16 on some processors
            policy = grpo.GPT(cfg)
            plumbing.load_base(policy, load_task(cfg), cfg)
            [path] = own_bases.iterdir()
            path.unlink()
            assert torch.get_num_threads() == threads
            assert torch.get_float32_matmul_precision() == "medium"
            bases.append((path.name, policy.state_dict()))
    finally:
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("highest")
    for name, weights in bases[1:]:
        assert name == bases[0][0] and not changed_weights(weights, bases[0][1])


@pytest.mark.parametrize("changes, is_same", [
    ({"reward": "accuracy+format"}, True), ({"curriculum": True}, True), ({"seed": 3}, True),
    ({"learning_rate": 0.5}, True), ({"task": "arithmetic:3-6"}, False),
    ({"device": "mps"}, False), ({"base_seed": 1}, False), ({"textbook_share": 0.5}, False)])
def test_what_changes_only_rl_keeps_the_base(config, load_task, changes, is_same):
    cfg = config(task="arithmetic:3-7")
    changed = dataclasses.replace(cfg, **changes)
    paths = [plumbing.base_path(grpo.GPT(cfg), load_task(one), one) for one in (cfg, changed)]
    assert (paths[0] == paths[1]) == is_same


def test_the_arithmetic_belongs_to_a_base(config, load_task, own_bases, monkeypatch, watch):
    cfg = config(base_steps=0)
    suffixes = watch(plumbing, "write", lambda path, content, suffix: suffix)
    for arithmetic in (("2.0.0", "AVX2"), ("2.0.0", "AVX512")):
        monkeypatch.setattr(common, "ARITHMETIC", arithmetic)
        plumbing.load_base(grpo.GPT(cfg), load_task(cfg), cfg)
    assert len(times(own_bases)) == 2
    assert len({*suffixes}) == 2            # two containers may have the same process and thread


AGAIN = """
import common, grpo, plumbing
cfg = grpo.Config(device='cpu', task='lookup,countdown')
task = common.load_task(cfg, grpo.verify)
for step in range(2):
    print(plumbing.base_path(grpo.GPT(cfg), task, cfg).name)
    plumbing.warm_start(grpo.GPT(cfg), task, grpo.Config(device='cpu', base_steps=1))
"""


def test_the_same_key_comes_out_again_and_in_other_processes(capsys):
    exec(AGAIN, {})
    names = capsys.readouterr().out.split()
    names += subprocess.run(
        [sys.executable, "-c", AGAIN], cwd=ROOT, text=True, check=True, capture_output=True,
        env=os.environ | {"PYTHONHASHSEED": "1"}).stdout.split()
    assert len(names) == 4 and len({*names}) == 1


UNORDERED = """
from common import Arithmetic
class Unordered(Arithmetic):
    def __init__(self, cfg, level):
        super().__init__(verify=None)
    def demonstration(self, rng, phase):
        return self.sample(rng)._replace(completion=[*{'one', 'two', 'three', 'four', 'five'}][0])
"""


def test_a_task_that_shows_something_else_in_other_processes_is_refused_in_one_line(copied):
    (copied / "tasks/unordered.py").write_text(UNORDERED)
    flags = INSTANT | {"task": "unordered", "base_steps": 1, "max_steps": 0}
    done = subprocess.run([sys.executable, "grpo.py", *arguments(flags)], cwd=copied, text=True,
                          capture_output=True)
    assert done.returncode == 2
    error = "error: --task unordered: another process draws other demonstrations"
    assert done.stderr.startswith(error), done.stderr


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
