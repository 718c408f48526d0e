"""The warm start: which tokens of the demonstrations it learns, from what, and at which rates."""
import os
import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

import common
import grpo


def sampled_by_a_policy(text, ids):
    """1.0 for each token of a completion, but 0.0 for what the tool of lookup inserted. -> list"""
    spans = [found.span() for found in re.finditer("<information>.*?</information>", text)]
    mask = []
    start = 0
    for i in ids[:-1]:
        mask.append(float(not any(low <= start < high for low, high in spans)))
        start += len(grpo.decode([i]))
    return [*mask, 1.0]                                 # EOS


@pytest.mark.parametrize("task, phase, device, num_parts", [
    ("arithmetic:3", "forum", "cpu", 2), ("arithmetic:3", "forum", "cpu:0", 1),
    ("lookup", "textbook", "cpu", 2)])
def test_its_gradient_is_that_of_the_mean_over_all_tokens_of_the_completions_and_no_others(
        config, load_task, monkeypatch, task, phase, device, num_parts):
    """EOS included, before it is clipped; in halves of a batch on a CPU. cpu:0 stands for another
    device: on MPS two threads would crash. What a tool says is not learned."""
    limits = []
    monkeypatch.setattr(
        torch.nn.utils, "clip_grad_norm_", lambda weights, limit: limits.append(limit))
    executor = grpo.ThreadPoolExecutor
    asked = []
    monkeypatch.setattr(
        grpo, "ThreadPoolExecutor", lambda size: asked.append(size) or executor(size))
    cfg = config(task=task, device=device, base_steps=1, base_batch_size=7,
                 base_learning_rate=0.0, textbook_share=float(phase == "textbook"))
    task = load_task(cfg)
    model = grpo.GPT(cfg).double()
    grpo.warm_start(model, task, cfg)
    found = [weight.grad.clone() for weight in model.parameters()]
    assert (limits, asked) == ([1.0], [num_parts])

    model.zero_grad()
    total = 0.0
    masks = []
    for problem in common.sample_problems(task, 7, (0, 0), phase=phase):
        ids = [*grpo.TOKENIZER.encode(problem.completion, allowed_special="all"), grpo.EOS]
        masks.append(sampled_by_a_policy(problem.completion, ids))
        prompt = grpo.encode_prompts([problem], task, "cpu")
        logits = model(torch.cat([prompt, torch.tensor([ids])], dim=1))[0, prompt.shape[1] - 1:-1]
        logps = logits.log_softmax(dim=-1)[range(len(ids)), ids]
        total = total - (logps * torch.tensor(masks[-1])).sum()
    lengths = [len(mask) for mask in masks]
    assert len(set(lengths)) > 1                        # so that the halves differ
    assert any(0.0 in mask for mask in masks) == bool(task.call_tokens)
    (total / sum(lengths)).backward()
    torch.testing.assert_close(
        found, [weight.grad for weight in model.parameters()], atol=1e-10, rtol=0)


def test_it_reads_six_tenths_of_a_textbook_then_a_forum_and_nothing_twice(
        config, load_task, monkeypatch):
    sample_problems = common.sample_problems
    reads = []

    def remember(task, n, seed, split="train", phase=""):
        reads.append((n, seed, split, phase))
        return sample_problems(task, n, seed, split, phase)
    monkeypatch.setattr(common, "sample_problems", remember)
    cfg = config(base_steps=10, base_batch_size=2, base_seed=4)
    grpo.warm_start(grpo.GPT(cfg), load_task(cfg), cfg)
    phases = ["textbook"] * 6 + ["forum"] * 4
    assert reads == [(2, (4, step), "train", phase) for step, phase in enumerate(phases)]


def test_its_rates_rise_in_50_batches_and_fall_to_0_and_those_of_matrices_are_5_times_as_high(
        config, load_task, monkeypatch):
    rates = {"matrices": {}, "others": []}

    def remember(optimizer):
        assert len(optimizer.param_groups[0]["params"]) == 1 + 2 * 2 + 1    # embedding, five norms
        rates["others"].append(optimizer.param_groups[0]["lr"])
    monkeypatch.setattr(grpo, "muon_step", lambda matrix, momentum, rate: (
        rates["matrices"].setdefault(matrix, []).append(rate)))
    monkeypatch.setattr(torch.optim.AdamW, "step", remember)
    cfg = config(base_steps=80, base_batch_size=2, base_learning_rate=0.01)
    grpo.warm_start(grpo.GPT(cfg), load_task(cfg), cfg)
    expected = [0.01 * min((step + 1) / 50, (80 - step) / 80) for step in range(80)]
    assert rates["others"] == pytest.approx(expected)
    assert len(rates["matrices"]) == 2 * 7
    for found in rates["matrices"].values():
        assert found == pytest.approx([5 * rate for rate in expected])


@pytest.mark.parametrize("shape", [(6, 6), (12, 4), (3, 8)])
def test_the_step_of_muon_is_that_of_torch_but_for_its_bfloat16(shape, double, monkeypatch):
    """torch computes in float64 here, too: what it would cast to bfloat16 stays as it is."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    torch.manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(shape))
    theirs = torch.nn.Parameter(ours.detach().clone())
    optimizer = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.0)
    momentum = torch.zeros(shape)
    for _ in range(4):
        ours.grad = theirs.grad = torch.randn(shape)
        grpo.muon_step(ours, momentum, 0.02)
        optimizer.step()
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


SHARE_OF_THE_OPTIMIZERS = """
import time, torch, common, grpo
cfg = grpo.Config(device="cpu", base_steps=20)
torch.set_num_threads(1)
took = {}

def timed(name, function):
    def call(*args):
        start = time.process_time()
        function(*args)
        took[name] = took.get(name, 0.0) + time.process_time() - start
    return call
grpo.muon_step = timed("optimizers", grpo.muon_step)
torch.optim.AdamW.step = timed("optimizers", torch.optim.AdamW.step)
timed("all", grpo.warm_start)(grpo.GPT(cfg), common.load_task(cfg, grpo.verify), cfg)
print(took["optimizers"] / took["all"])
"""


def test_the_optimizers_take_a_small_share_of_it_on_a_cpu_without_bfloat16_too():
    """Few laptops have bfloat16 instructions, so torch's matrix products do without them here."""
    done = subprocess.run([sys.executable, "-c", SHARE_OF_THE_OPTIMIZERS], cwd=ROOT, text=True,
                          capture_output=True, env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"})
    assert float(done.stdout) < 0.2, done.stderr
