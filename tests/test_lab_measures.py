"""Test the measures of the lab: they fill the columns of their stored files."""
import dataclasses
import re
import shlex

import numpy
import pytest
import torch
from conftest import ROOT
from small_runs import SMALL, arguments

import common
import grpo
import plumbing
from lab import bench, training
from lab.claims import bugs, kl, seeds
from tasks import preferences

# ---- every measure ---------------------------------------------------------------------------

def untrained(script, flags):
    """Replace load_base: make an untrained policy, and a task in which texts of odd length are
    right. -> Config, task, policy"""
    small = SMALL | {"hidden_size": 16, "intermediate_size": 16, "num_prompts": 4,
                     "num_generations": 4, "num_eval_problems": 4, "num_eval_samples": 1}
    del small["max_steps"]
    cfg = plumbing.parse_flags(script.Config, [*arguments(small), *shlex.split(flags)])
    task = common.load_task(cfg, lambda problem, text: float(len(text) % 2))
    return cfg, task, script.GPT(cfg)


@pytest.mark.parametrize("name, case, constants", [
    ("credit", "walks", {"BATCHES": 1}),
    ("credit", "answers", {"BATCHES": 1, "PROBLEMS": 1, "NUM_REFERENCE": 2}),
    ("hacking", "fresh", {"STEPS": 2, "MODELS": {"fresh": {0: 1, 1: 1}}}),
    ("kl", "on the way", {"WATCHED": [1, 2]}),
    ("masking", "outcome reward, tool tokens learned", {"STEPS": 2}),
    ("signal", "GRPO, dynamic sampling", {"BUDGET": 300}),
    ("wrongrewards", "short base: bonus for coming nearer", {"STEPS": 2}),
    ("zero", "3 to 7 operands, curriculum", {"STEPS": 2, "WINDOW": 1})])
def test_a_measure_finds_what_its_file_has(name, case, constants, monkeypatch):
    module = bench.module(name)
    monkeypatch.setattr(module, "load_base", untrained)
    monkeypatch.setattr(preferences, "BATCHES", 1)
    for constant, value in constants.items():
        monkeypatch.setattr(module, constant, value)
    found = module.measure(case, 0)
    stored, _ = bench.load(name)
    assert stored.keys() == {*getattr(module, "RUNS", ()), *module.CASES}
    assert found.keys() == stored[case].keys()
    for column, values in found.items():
        assert not numpy.isnan(numpy.array(values, dtype=float)).all(), column


# ---- numbers -----------------------------------------------------------------------------------

def test_seeds_an_interval_misses_the_truth_if_no_run_of_a_sample_collapses(monkeypatch):
    """In a sample with a very deep collapse, the interval is so wide that it contains the truth."""
    monkeypatch.setattr(seeds, "DRAWS", 800)
    monkeypatch.setattr(seeds, "DEPTH", 1e4)
    found = seeds.measure(seeds.COLLAPSING, 0)
    for rule in (seeds.BOOTSTRAP, seeds.STUDENT):
        assert found[rule][1] == pytest.approx(0.9**5, abs=0.06)
    ordinary = seeds.measure(seeds.NORMAL, 0)
    assert ordinary[seeds.SIGNS] == pytest.approx([2 / 2**n for n in seeds.SIZES], abs=0.05)
    assert ordinary[seeds.STUDENT] == pytest.approx([0.05] * 3, abs=0.03)


def test_kl_outputs_are_all_that_can_be_said_and_gradients_are_equal_where_the_math_says():
    assert len({tuple(row) for row in kl.TOKENS.tolist()}) == 31
    table = torch.randn(3, 3, generator=torch.Generator().manual_seed(3)).double()
    assert kl.output_logps(table).sum(dim=1).exp().sum().item() == pytest.approx(1)
    found = kl.gradients(draws=5)
    assert found["k1"].norm(dim=1).max() < 1e-12
    for one, other in (("k2", "KL(policy, base)"), ("k3", "KL(base, policy)"),
                       ("k1 in the reward", "KL of outputs"),
                       ("k3_ratio, older", "KL(policy, base), older")):
        cosines = torch.nn.functional.cosine_similarity(found[one], found[other])
        assert cosines.min().item() == pytest.approx(1), one


def test_a_completion_goes_on_as_it_did(config, load_task, talker):
    """Greedy decoding continues a completion identically from each of its prefixes."""
    cfg = config()
    policy = talker(cfg)
    problems = common.sample_problems(load_task(cfg), 5, 0)
    batch = grpo.complete(policy, load_task(cfg), cfg, problems)
    for t in range(int(batch.lengths.min())):
        rest = dataclasses.replace(cfg, max_completion_length=cfg.max_completion_length - t)
        _, found, mask, texts = training.continued(
            grpo, policy, rest, problems, batch.prompts, batch.tokens[:, :t])
        assert texts == batch.texts
        assert torch.equal(found, batch.tokens[:, t:]) and torch.equal(mask, batch.mask[:, t:])


@pytest.mark.parametrize("name", bugs.MISTAKES)
def test_bugs_change_one_line_of_grpo_and_name_a_test_that_exists(name):
    text = bugs.text_with(name)
    compile(text, name, "exec")
    before = (ROOT / "grpo.py").read_text().splitlines()
    after = text.splitlines()
    assert len(before) == len(after)
    assert sum(one != other for one, other in zip(before, after)) == 1
    [file] = bugs.MISTAKES[name].files
    assert re.search(rf"^def {bugs.MISTAKES[name].words}\(", (ROOT / file).read_text(), re.M)
