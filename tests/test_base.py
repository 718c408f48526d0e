"""The base policy: which runs share a base, and which changes require a new one. Its warm start:
the gradient, and the steps of AdamW and Muon."""
import contextlib
import dataclasses
import functools
import sys
import types
from pathlib import Path

import pretend
import pytest
import torch
from conftest import ROOT, close, every_script
from small_models import Recording
from small_runs import (
    INSTANT,
    arguments,
    changed_weights,
    load,
    policy_of,
    read_summary,
    resume,
)

import common
import grpo
import plumbing
from kernels import decode
from report import ask
from vectors.edits import replace_once

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
    ("arithmetic", "common.py", '"forum": 0.3', '"forum": 0.4', False),         # shown last
    # only from the third token of a completion on
    ("arithmetic", "grpo.py", "angles = positions[", "angles = positions.clamp(max=20)[", False),
    ("arithmetic", "plumbing.py", "gram = x @ x.mT", "gram = x.mT @ x", False),
    ("arithmetic", "plumbing.py", "/ lengths.sum()", "/ mask.sum()", False),            # gradient
    ("arithmetic", "plumbing.py", "momentum, 5 * rate", "momentum, 4 * rate", False),
    ("arithmetic", "plumbing.py", "weight_decay=0.0", "weight_decay=0.1", False),
    ("arithmetic", "plumbing.py", "cfg.base_learning_rate / 2", "cfg.base_learning_rate", False),
    ("arithmetic", "grpo.py", "self.norm = nn.RMS", "self.idle = nn.RMSNorm(1)\n        "
     "self.norm = nn.RMS", False),              # the stored base would not fit
    ("lookup", "tasks/calls.py", "+ num_inserted] = 0.0", "+ num_inserted] = 1.0", False),
    ("arithmetic", "plumbing.py", "# an orthogonal step", "# such a step", True),       # comment
    (COUNTDOWN, "tasks/countdown.py", "LIMIT = 30 ", "LIMIT = 29 ", False),
    (COUNTDOWN, "tasks/lookup.py", "CALL_LIMIT = 4 ", "CALL_LIMIT = 5 ", True)])
def test_a_base_is_made_again_if_an_edit_shows_in_what_it_learns_and_only_then(
        config, load_task, tmp_path, monkeypatch, task, file, old, new, is_same):
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
    elif file == "tasks/calls.py":
        monkeypatch.setitem(sys.modules, "tasks.calls", made)
    assert (path(policy, own, cfg) == before) == is_same


@pytest.mark.parametrize("changes, is_same", [
    ({"reward": "accuracy+format"}, True), ({"curriculum": True}, True), ({"seed": 3}, True),
    ({"learning_rate": 0.5}, True), ({"task": "arithmetic:3-6"}, False),
    ({"device": "mps"}, False),
    *(({name: 0.25 + value}, False) for name, value in vars(common.Base()).items())])
def test_what_changes_only_rl_keeps_the_base(config, load_task, changes, is_same):
    cfg = config(task="arithmetic:3-7")
    changed = dataclasses.replace(cfg, **changes)
    paths = [plumbing.base_path(grpo.GPT(cfg), load_task(one), one) for one in (cfg, changed)]
    assert (paths[0] == paths[1]) == is_same


def test_another_torch_or_another_processor_makes_another_base(config, load_task, monkeypatch):
    cfg = config()
    path = functools.partial(plumbing.base_path, grpo.GPT(cfg), load_task(cfg), cfg)
    before = path()
    torch_version, processor = common.ARITHMETIC
    for arithmetic in (("2.8.0", processor), (torch_version, "DEFAULT")):
        monkeypatch.setattr(common, "ARITHMETIC", arithmetic)
        assert path() != before


# ---- the warm start --------------------------------------------------------------------------

def load_again(run):
    cfg = plumbing.parse_flags(grpo.Config, arguments(INSTANT))
    plumbing.load_base(grpo.GPT(cfg), common.load_task(cfg, grpo.verify), cfg)


@pytest.mark.parametrize("compute", [load_again, resume, lambda run: ask.answer(run, "(3+4)=")])
def test_bases_runs_and_answers_are_computed_with_one_thread_and_without_tf32(
        run, own_bases, compute):
    """Otherwise their last bits depend on the machine."""
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("high")
    try:
        compute(run)
        assert torch.get_num_threads() == 1
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        plumbing.fix_arithmetic()


@pytest.mark.parametrize("changes, losses, is_second", [
    ({}, [0.1], False), ({}, [0.11, 0.1], True), ({"base_seed": 5}, [0.2, 0.15], True),
    ({}, [0.11, 0.12], False), ({}, [torch.inf, 0.2], True), ({}, [0.2, torch.inf], False),
    ({"base_steps": 600}, [0.2], False), ({"hidden_size": 32}, [0.2], False),
    ({"base_learning_rate": 1e-3}, [0.2], False), ({"task": "key"}, [0.2], False)])
def test_a_usual_base_with_a_high_loss_is_made_again_with_half_the_rate_and_the_better_one_stays(
        load_task, own_bases, monkeypatch, capsys, changes, losses, is_second):
    rest = iter(losses)

    def warm_start(policy, task, cfg):
        policy.norm.weight.data.fill_(cfg.base_learning_rate)
        return next(rest)
    monkeypatch.setattr(plumbing, "warm_start", warm_start)
    cfg = grpo.Config(**{"device": "cpu"} | changes)
    task = load_task(cfg)
    rate = torch.tensor(cfg.base_learning_rate / (1 + is_second))
    for _ in range(2):                                      # the second time, from the file
        policy = grpo.GPT(cfg)
        plumbing.load_base(policy, task, cfg)
        assert (policy.norm.weight == rate).all()
    assert [*rest] == [] and ("with half the rate" in capsys.readouterr().err) == (len(losses) > 1)


def test_the_loss_of_a_base_is_that_of_textbook_examples_that_it_was_not_trained_on(
        config, load_task, monkeypatch):
    drawn, sample_problems = [], common.sample_problems
    monkeypatch.setattr(common, "sample_problems", lambda *args, **options: (
        drawn.append(sample_problems(*args, **options)), drawn[-1])[1])
    cfg = config(base_steps=20, task="arithmetic")
    task, policy = load_task(cfg), grpo.GPT(cfg)
    loss = plumbing.warm_start(policy, task, cfg)
    *trained, new = ([(one.prompt, one.completion) for one in examples] for examples in drawn)
    assert len(trained) == 20 and len({*new}) > 250 and len({*new} & {*sum(trained, [])}) < 10
    assert sum("<think>" in completion for _, completion in new) > 200              # no forum
    prompts, tokens, mask, _ = common.encode_examples(drawn[-1], task, "cpu")
    logps, _ = grpo.score(policy, prompts, tokens)
    assert loss == pytest.approx(-((logps * mask).sum() / mask.sum()).item(), rel=1e-5)
    cfg = dataclasses.replace(cfg, base_learning_rate=1e30)
    assert plumbing.warm_start(grpo.GPT(cfg), task, cfg) == torch.inf               # instead of nan


def test_only_the_usual_arithmetic_has_a_highest_loss(load_task, config):
    names = ("arithmetic", "arithmetic:5", "arithmetic:2-7", "key", "notation", "countdown,number")
    losses = [load_task(config(task=name)).textbook_loss for name in names]
    assert losses == [0.1, 0.1, *[torch.inf] * 4]


def test_halves_of_a_batch_add_up_to_the_mean_over_the_tokens_that_a_policy_would_write(
        config, load_task, double):
    cfg = config(task="lookup")
    task, policy = load_task(cfg), grpo.GPT(cfg)
    examples = common.sample_problems(task, 7, 0, phase="textbook")
    batch = common.encode_examples(examples, task, "cpu")
    prompts, tokens, mask, lengths = batch
    halves = [plumbing.share_of_loss(policy, batch, rows) for rows in lengths.argsort().chunk(2)]
    logps, _ = grpo.score(policy, prompts, tokens)
    close(sum(halves), -(logps * mask).sum() / lengths.sum())
    assert mask.sum() < lengths.sum() < mask.numel()        # what a tool inserts; padding


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
            cfg = config(task=task, device=device, base_steps=12, base_batch_size=3)
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
