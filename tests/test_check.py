"""report.check names what is wrong in logs that have one thing wrong, and nothing in correct ones.
tests/trl is from a run of TRL 1.16 whose reward is a constant, with a model of random weights."""
import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT
from small_runs import SMALL, arguments, at_work
from test_pages import PAGES

from learn.practice import hunt
from report.check import check, read

FLAGS = {"num_iterations": 1, "num_mini_batches": 2}


def run(folder, samples=(), **changes):
    """Write a run whose reward rises, with some metrics replaced by lists of first and last ones,
    and check it. -> the anchors of what it finds"""
    steps = []
    for i in range(20):
        late = i >= 10
        metrics = {"reward": 0.3 + 0.02 * i, "frac_reward_zero_std": 0.2, "grad_norm": 1.0,
                   "max_log_ratio": 0.5, "kl": 0.01 * i, "entropy": 0.2, "sampling/surprise": 0.21}
        steps.append(metrics | {name: pair[late] for name, pair in changes.items()})
    (folder / "config.json").write_text(json.dumps({"script": "grpo.py", "config": FLAGS}))
    for name, records in (("metrics", steps), ("samples", samples)):
        text = "".join(json.dumps(one) + "\n" for one in records)
        (folder / f"{name}.jsonl").write_text(text)
    return [re.search(r"\(#(.*)\)", text)[1] for text in check(*read(folder))]


@pytest.mark.parametrize("anchor, changes", [
    ("", {}), ("no-gradient", {"grad_norm": [0.0, 0.0]}),
    ("no-gradient", {"max_log_ratio": [0.0, 0.0]}), ("unused", {"kl": [-1e-9, 1e-9]}),
    ("rate", {"reward": [0.5, 0.2]}), ("rate", {"entropy": [0.2, 0.5]}),
    ("rate", {"grad_norm": [1.0, 12.0]}), ("", {"reward": [0.5, 0.48]}),
    ("temperature", {"sampling/surprise": [0.1, 0.1]}), ("held-out", {"eval/greedy": [0.8, 0.5]}),
    ("stale", {"sampling/sampling_logp_difference/mean": [0.0, 0.1]}),
    ("groups", {"frac_reward_zero_std": [0.5, 1.0]}), ("", {"eval/greedy": [0.8, 0.9]})])
def test_what_is_wrong_is_named_and_nothing_else(anchor, changes, tmp_path):
    assert run(tmp_path, **changes) == [anchor] * bool(anchor)


@pytest.mark.parametrize("mask, calls, anchors", [
    ([1, 0, 1], 1.0, []), ([1, 1, 1], 1.0, ["turns"]), ([1, 1, 0], 0.0, ["rounding"]),
    ([1, 1, 1], 0.0, [])])
def test_masks_show_an_end_that_is_not_learned_or_a_tool_that_is(mask, calls, anchors, tmp_path):
    completion = {"tokens": ["a", "b", "<|eos|>"], "mask": mask}
    samples = [{"completions": [completion, {"tokens": [], "mask": []}]}]
    assert run(tmp_path, samples, **{"tools/call_frequency": [calls, calls]}) == anchors


def test_a_planted_mistake_is_found_in_its_run(tmp_path):
    with at_work(tmp_path):
        flags = SMALL | {"max_steps": 4, "num_mini_batches": 2, "output_dir": "run"}
        hunt.run("old not detached", *arguments(flags))
        assert "logps - logps" in (tmp_path / "run/grpo.py").read_text("utf-8")
        assert any("no-gradient" in text for text in check(*read("run")))


def test_a_run_of_trl_is_read_and_each_anchor_is_on_the_page():
    found = subprocess.run([sys.executable, "-m", "report.check", "tests/trl"], cwd=ROOT,
                           capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.partition(":")[0] for line in found] == [
        "no group has signal", "most completions are truncated"]
    anchors = set(re.findall(r"\(#([\w-]+)\)", (ROOT / "report/check.py").read_text("utf-8")))
    headings = re.findall("^## (.*)", PAGES["docs/why.md"], re.M)
    assert anchors <= {heading.lower().replace(" ", "-") for heading in headings}
