"""report.check names what is wrong in a run, and nothing in a correct one. tests/trainer is from a
run of TRL 1.16 with a constant reward and a model of random weights."""
import re
from types import SimpleNamespace

import pytest
from conftest import ROOT
from small_runs import SMALL, arguments, at_work
from test_pages import PAGES

from learn.practice import hunt
from report.check import check, read, warnings

CFG = SimpleNamespace(num_iterations=1, num_mini_batches=2)
GOOD = {"frac_reward_zero_std": 0.2, "grad_norm": 1.0, "max_log_ratio": 0.5, "entropy": 0.2,
        "sampling/surprise": 0.21}


def anchors(samples=(), **changes):
    """Check a run whose reward rises, with the first and the last values of some metrics replaced.
    -> the anchors of what it finds"""
    steps = [GOOD | {"reward": 0.3 + 0.02 * i, "kl": 0.01 * i}
             | {name: pair[i >= 10] for name, pair in changes.items()} for i in range(20)]
    return [re.search(r"\(#(.*)\)", text)[1] for text in check(CFG, steps, samples)]


@pytest.mark.parametrize("anchor, changes", [
    ("", {}), ("", {"reward": [0.5, 0.48]}), ("", {"eval/greedy": [0.8, 0.9]}),
    ("no-gradient", {"grad_norm": [0.0, 0.0]}), ("no-gradient", {"max_log_ratio": [0.0, 0.0]}),
    ("unused", {"kl": [-1e-9, 1e-9]}), ("temperature", {"sampling/surprise": [0.15, 0.15]}),
    ("stale", {"sampling/sampling_logp_difference/mean": [0.0, 0.1]}),
    ("groups", {"frac_reward_zero_std": [0.5, 1.0]}), ("rate", {"reward": [0.5, 0.2]}),
    ("rate", {"entropy": [0.2, 0.5], "sampling/surprise": [0.2, 0.5]}),
    ("rate", {"grad_norm": [1.0, 12.0]}), ("held-out", {"eval/greedy": [0.8, 0.5]})])
def test_what_is_wrong_is_named_and_nothing_else(anchor, changes):
    assert anchors(**changes) == [anchor] * bool(anchor)


@pytest.mark.parametrize("difference, ours, of_trl", [
    (0.01, False, False), (0.05, True, False), (0.2, True, True)])
def test_a_sampler_of_trl_may_round_more_than_ours_because_it_may_use_bfloat16(
        difference, ours, of_trl):
    step = {"sampling/sampling_logp_difference/mean": difference,
            "sampling/importance_sampling_ratio/mean": 1.0}
    for cfg, is_found in (({"num_prompts": 4}, ours), ({}, of_trl)):
        assert len([*warnings(step, SimpleNamespace(**cfg))]) == is_found


@pytest.mark.parametrize("num_problems, is_found", [(16, False), (512, True)])
def test_held_out_scores_may_fall_as_far_as_few_problems_let_them(num_problems, is_found):
    steps = [GOOD | {"reward": 0.3 + 0.02 * i, "kl": 0.01 * i, "eval/greedy": 0.8 - 0.02 * i}
             for i in range(20)]
    found = check(SimpleNamespace(num_eval_problems=num_problems), steps)
    assert any("#held-out" in text for text in found) == is_found


@pytest.mark.parametrize("mask, calls, found", [
    ([1, 0, 1], 1.0, []), ([1, 1, 1], 1.0, ["turns"]), ([1, 1, 0], 0.0, ["rounding"])])
def test_masks_show_an_end_that_is_not_learned_or_a_tool_that_is(mask, calls, found):
    samples = [{"completions": [{"tokens": ["a", "b", "<|eos|>"], "mask": mask}]}]
    assert anchors(samples, **{"tools/call_frequency": [calls, calls]}) == found


def test_a_planted_mistake_is_found_in_its_run(tmp_path):
    with at_work(tmp_path):
        flags = SMALL | {"max_steps": 4, "num_mini_batches": 2, "output_dir": "run"}
        hunt.run("old not detached", *arguments(flags))
        assert "logps - logps" in (tmp_path / "run/grpo.py").read_text("utf-8")
        assert any("no-gradient" in text for text in check(*read("run")))


def test_a_run_of_trl_is_read_and_each_anchor_is_on_the_page():
    found = [text.partition(":")[0] for text in check(*read(ROOT / "tests/trainer"))]
    assert found == ["no group has signal", "most completions are truncated"]
    named = set(re.findall(r"\(#([\w-]+)\)", (ROOT / "report/check.py").read_text("utf-8")))
    headings = re.findall("^## (.*)", PAGES["docs/why.md"], re.M)
    assert named <= {heading.lower().replace(" ", "-") for heading in headings}
