"""The base policy: which runs share a base, and which changes require a new one. Its warm start:
the gradient, the learning rates, and the step of Muon."""
import contextlib
import dataclasses
import functools
import importlib
import sys
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


@pytest.mark.parametrize("file, old, new, is_same", [
    ("grpo.py", "-?[0-9]{1,20}", "-?[0-9]{1,9}", True),                 # verify
    ("grpo.py", "continues = token != EOS", "continues = token < 9", True),     # rollout
    ("grpo.py", "A decoder layer: ", "A layer: ", True),                # docstring of Block
    ("grpo.py", "x = x + self.out(", "x = x - self.out(", False),       # Block
    ("grpo.py", "return torch.cat([left * cos", "return torch.cat([left + cos", False),   # rotate
    ("common.py", "rng.randint(1, 9)", "rng.randint(1, 8)", False),
    ("common.py", "% 10 < self.held_out_tenths", "% 9 < self.held_out_tenths", False),
    ("common.py", "VOCAB_SIZE = 320 ", "VOCAB_SIZE = 384 ", False),
    ("common.py", "num_prompts: int = 32", "num_prompts: int = 16", True),
    ("plumbing.py", "gram = x @ x.mT", "gram = x.mT @ x", False),
    ("plumbing.py", "held out:", "not seen:", True),
    ("plumbing.py", "# an orthogonal step", "# such a step", True),      # comment
    ("tasks/countdown.py", "LIMIT = 30 ", "LIMIT = 29 ", False),        # a task of this test
    ("tasks/lookup.py", "CALL_LIMIT = 4 ", "CALL_LIMIT = 5 ", True)])
def test_a_base_is_made_again_if_code_that_shapes_it_changes_and_only_then(
        config, load_task, own_bases, monkeypatch, file, old, new, is_same):
    cfg = config(base_steps=0, task="number,countdown")
    given = grpo.GPT(cfg), load_task(cfg), cfg
    plumbing.load_base(*given)
    before = times(own_bases)
    read_text = Path.read_text

    def edited(path, *args, **options):
        text = read_text(path, *args, **options)
        assert old in text or path != ROOT / file
        return text.replace(old, new) if path == ROOT / file else text
    monkeypatch.setattr(Path, "read_text", edited)
    plumbing.load_base(*given)
    assert (times(own_bases) == before) == is_same


def test_what_shapes_a_base_includes_the_arithmetic_and_the_device(
        config, load_task, own_bases, monkeypatch, watch):
    class Other(grpo.GPT):
        pass
    Other.__module__ = "grpo"                           # whose file does not define it
    cfg = config(base_steps=0)
    policy, task = grpo.GPT(cfg), load_task(cfg)
    monkeypatch.setattr(plumbing, "warm_start", lambda *_: None)
    suffixes = watch(plumbing, "write", lambda path, content, suffix: suffix)
    for changes in ({}, {"device": "mps"}, {"base_seed": 1}):
        plumbing.load_base(policy, task, dataclasses.replace(cfg, **changes))
    plumbing.load_base(Other(cfg), task, cfg)
    monkeypatch.setattr(common, "ARITHMETIC", ("2.0.0", "AVX2", "AVX2"))
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
