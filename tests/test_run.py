"""What a run leaves in its folder, and what each flag of a run changes there."""
import dataclasses
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, every_script, scripts
from small_runs import (
    SMALL,
    arguments,
    changed_weights,
    contents,
    difference,
    difference_but_for_flags,
    lines,
    load,
    outcome,
    policy_of,
    read_summary,
    resume,
    script_of,
    shuffle_the_global_generators,
    steps,
)

import common
from tasks.rewards import REWARDS

# What a line of metrics.jsonl holds in every script, and what it holds in one.
METRICS = {"step", "loss", "reward", "reward_std", "signal", "frac_reward_zero_std", "accuracy",
           "entropy", "grad_norm", "learning_rate", "completions/mean_length",
           "completions/clipped_ratio", "checks/share", "checks/repaired", "step_time"}
RATIO = {"kl", "sampling/sampling_logp_difference/max", "max_log_ratio"}
OWN_METRICS = {
    "reinforce": RATIO,
    "ppo": RATIO | {"clip_ratio/region_mean", "policy_kl", "value_loss", "critic_grad_norm",
                    "beta", "penalty_coef", "explained_variance"},
    "grpo": RATIO | {"clip_ratio/region_mean"},
    "gspo": RATIO | {"clip_ratio/region_mean", "clip_ratio/token_region_mean"},
    "dpo": {"pairs", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies",
            "logps/chosen", "logps/rejected"}}

pytestmark = pytest.mark.usefixtures("at_work_folder")


# ---- the folder ------------------------------------------------------------------------------

@every_script
def test_the_run_of_these_tests_has_something_to_learn_from(whole):
    """Else they would compare runs in which nothing happens."""
    assert sum(line["frac_reward_zero_std"] < 1 for line in steps(whole)) >= 5
    base = load(whole / "base.pt")
    assert changed_weights(base, policy_of(whole)) == sorted(f"/{name}" for name in base)


@scripts("grpo", "dpo")                             # whose metrics differ most
def test_a_run_folder_has_every_file_and_no_other(script, new_run, monkeypatch):
    monkeypatch.delitem(sys.modules, "tools.report")
    folder = new_run(max_steps=2)
    name = f"{script.__name__}.py"
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "metrics.jsonl", "samples.jsonl", "greedy.jsonl", "evaluation.jsonl",
        "summary.json", "checkpoint.pt", "base.pt", "curve.png", "report.html", name}
    assert script_of(folder) == name
    assert (folder / name).read_bytes() == (ROOT / name).read_bytes()
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")


@every_script
def test_the_config_tells_how_the_run_was_made(script, whole):
    saved = json.loads((whole / "config.json").read_text())
    assert saved["argv"] == arguments(SMALL | {"output_dir": whole.name})
    assert saved["script"] == f"{script.__name__}.py"
    assert saved["torch"] == torch.__version__
    assert saved["python"] == sys.version
    flags = dataclasses.asdict(script.Config()) | SMALL | {"output_dir": whole.name}
    assert saved["config"] == flags


@pytest.mark.quick
@every_script
def test_main_returns_the_summary(script, tmp_path):
    summary = script.main(arguments(SMALL | {"max_steps": 1, "output_dir": tmp_path / "run"}))
    assert summary == read_summary(tmp_path / "run")


@every_script
def test_the_summary_compares_the_base_with_the_trained_policy(script, whole, new_run):
    summary = read_summary(whole)
    assert summary.keys() == {"base", "trained", "steps", "seconds_warm_start", "seconds_total"}
    scores = {"greedy", "pass@1", "pass@2", "maj@2", "pass@k", "maj@k", "accuracy_given_think",
              "accuracy_given_direct", "think_share", "mean_length", "problems", "samples"}
    own = {name for name in summary["base"] if re.match("pairs/|kl$", name)}
    assert bool(own) == (script.__name__ == "dpo")          # of held-out pairs, and of samples
    assert summary["base"].keys() == summary["trained"].keys() == scores | own
    assert summary["steps"] == 10
    assert summary["trained"]["problems"] == 16
    assert summary["trained"]["samples"] == 2
    for curve in ("pass@", "maj@"):
        assert summary["trained"][f"{curve}k"][1:] == [summary["trained"][f"{curve}2"]]
    assert 0 < summary["seconds_warm_start"] < summary["seconds_total"]

    of_eight_samples = read_summary(new_run(max_steps=0, num_eval_samples=8))
    assert {"pass@8", "maj@8"} <= of_eight_samples["base"].keys()


def test_default_folders_are_numbered_when_taken_and_an_explicit_one_collides(
        script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny = SMALL | {"base_steps": 0, "max_steps": 0}
    for _ in range(3):
        script.main(arguments(tiny))
    names = {path.name for path in Path("runs").iterdir()}
    first = "grpo-arithmetic-s0"
    assert names == {"base", first, f"{first}-2", f"{first}-3"}

    before = contents(tmp_path)
    with pytest.raises(SystemExit) as stop:
        script.main(arguments(tiny | {"output_dir": f"runs/{first}"}))
    assert stop.value.code == 2
    assert contents(tmp_path) == before
    script.main(arguments(tiny | {"seed": 7}))
    assert (tmp_path / "runs/grpo-arithmetic-s7").is_dir()


@every_script
def test_the_same_seed_makes_the_same_run_and_another_seed_another(new_run, whole):
    shuffle_the_global_generators(4)
    assert not difference(outcome(new_run()), outcome(whole))
    other = outcome(new_run(seed=1))
    changed = difference(other, outcome(whole))
    assert {path for path in other if path.startswith("/checkpoint/policy/")} <= set(changed)
    assert not [path for path in changed if path.startswith("/base/")]


# ---- the logs --------------------------------------------------------------------------------

@every_script
def test_the_metrics_have_one_line_a_step_in_the_words_of_trl_with_its_evaluation(script, whole):
    names = METRICS | OWN_METRICS[script.__name__]
    assert [line["step"] for line in steps(whole)] == list(range(1, 11))
    for line in steps(whole):
        assert {name for name in line if not name.startswith("eval/")} == names
        if line["checks/share"] == 0:
            assert line.pop("checks/repaired") is None      # nothing to take a mean of
        assert all(math.isfinite(value) for value in line.values())
        assert line.get("sampling/sampling_logp_difference/max", 0) < 1e-4
    evaluations = [line for line in steps(whole) if "eval/greedy" in line]
    assert [line["step"] for line in evaluations] == [2, 4, 6, 8, 10]
    assert evaluations[-1]["eval/greedy"] == read_summary(whole)["trained"]["greedy"]


def test_the_rows_of_a_reward_add_up_to_it_at_every_step(new_run, monkeypatch):
    """Also where a row grows from step to step."""
    monkeypatch.setitem(REWARDS, "growing", lambda task, problem, text, verdict, step: step / 10)
    folder = new_run(reward="accuracy+growing", max_steps=4)
    for i, line in enumerate(steps(folder)):
        assert line["rewards/growing/mean"] == pytest.approx(i / 10)
        total = line["rewards/accuracy/mean"] + i / 10
        assert line["reward"] == pytest.approx(total, rel=1e-5)


def test_a_metric_that_is_not_finite_is_null_in_the_log(script, new_run, monkeypatch):
    update = script.update
    odd = {"kl": math.inf, "loss": -math.inf, "grad_norm": math.nan}
    monkeypatch.setattr(script, "update", lambda *args: update(*args) | odd)
    text = (new_run(max_steps=1) / "metrics.jsonl").read_text()
    line = json.loads(text, parse_constant=pytest.fail)
    assert [line[name] for name in odd] == [None, None, None]


@every_script
def test_the_samples_are_whole_groups_with_rewards_and_advantages(script, whole):
    groups = lines(whole / "samples.jsonl")
    assert [group["step"] for group in groups] == [n for n in (1, 2, 4, 6, 8, 10) for _ in range(4)]
    for group in groups:
        problem = common.Problem(group["prompt"], group["answer"])
        completions = group["completions"]
        assert len(completions) == 8
        rewards = [completion["reward"] for completion in completions]
        assert rewards == [script.verify(problem, made["text"]) for made in completions]
        A = torch.tensor([[completion["advantage"] for completion in completions]])
        assert A.isfinite().all()
        if script.__name__ in ("grpo", "gspo"):
            torch.testing.assert_close(A, script.advantages(torch.tensor([rewards])))
    assert any(made["reward"] > 0 for group in groups for made in group["completions"])


@every_script
def test_a_sample_has_its_tokens_each_with_a_mask_and_a_shade(script, whole):
    """The shade is a critic's value, or the ratio after the update."""
    groups = lines(whole / "samples.jsonl")
    shades = []
    for completion in [made for group in groups for made in group["completions"]]:
        assert 1 <= completion["length"] <= 16
        assert sum(completion["mask"]) == completion["length"]  # nothing is inserted in arithmetic
        assert len(completion["tokens"]) == len(completion["mask"]) == len(completion["shade"])
        if completion["text"].isascii():                        # else a character has several
            assert "".join(completion["tokens"]).removesuffix("<|eos|>") == completion["text"]
        shades += completion["shade"]
    assert len(set(shades)) > len(shades) / 4                   # few ratios are still 1
    if script.__name__ == "ppo":
        assert {group["shade"] for group in groups} == {"value"}
    else:
        assert {group["shade"] for group in groups} == {"ratio"}
        assert min(shades) > 0
        assert 0.9 < sum(shades) / len(shades) < 1.1


@scripts("reinforce")
def test_the_advantage_of_a_sample_is_the_mean_of_those_of_its_tokens(script, whole):
    for group in lines(whole / "samples.jsonl"):
        for completion in group["completions"]:         # without a baseline every token's A is R
            assert completion["advantage"] == completion["reward"]


@every_script
def test_the_held_out_problems_are_shown_before_and_after(script, whole, load_task):
    task = load_task(script.Config(operands="2"))
    problems = common.held_out_problems(task, 16)
    records = lines(whole / "evaluation.jsonl")
    assert [(record["prompt"], record["answer"]) for record in records] == [
        (problem.prompt, problem.answer) for problem in problems]
    for when in ("base", "trained"):
        right = [record[when]["right"] for record in records]
        assert right == [script.verify(problem, record[when]["text"]) == 1
                         for problem, record in zip(problems, records)]
        assert sum(right) / 16 == read_summary(whole)[when]["greedy"]
    assert any(record["base"]["text"] != record["trained"]["text"] for record in records)


@every_script
def test_the_likeliest_answers_are_kept_at_each_evaluation(script, whole):
    """Those of the last step are those of the trained policy."""
    logged = lines(whole / "greedy.jsonl")
    pairs = lines(whole / "evaluation.jsonl")
    assert [line["step"] for line in logged] == [2, 4, 6, 8, 10]
    assert logged[-1]["examples"] == [pair["trained"] for pair in pairs]
    for line in logged:
        assert line.keys() == {"step", "examples"}
        right = [example["right"] for example in line["examples"]]
        assert sum(right) / 16 == steps(whole)[line["step"] - 1]["eval/greedy"]
    assert logged[0] != logged[-1]


# ---- flags -----------------------------------------------------------------------------------

# What a flag changes in the logs, the weights or the summary, and what it needs to act on. Those of
# the base are in test_base.py.
ACTS = {
    "max_steps": (2, {}),
    "stop_at": (0.0, {}),
    "eval_steps": (1, {}),
    "num_eval_problems": (7, {}),
    "num_eval_samples": (3, {}),
    "task": ("lookup", {"operands": 5, "base_steps": 20}),
    "reward": ("accuracy+format", {}),
    "curriculum": (True, {"operands": "2-3", "base_steps": 20}),
    "mask_tool_tokens": (False, {"task": "lookup", "operands": 5})}


@pytest.mark.parametrize("name", ACTS)
def test_each_flag_of_a_run_changes_what_it_does(new_run, name):
    value, needs = ACTS[name]
    plain = new_run(**{"max_steps": 3} | needs)
    other = new_run(**{"max_steps": 3} | needs | {name: value})
    assert difference_but_for_flags(outcome(plain), outcome(other))


def test_the_thread_count_is_set_and_kept_with_the_run(new_run):
    folder = new_run(max_steps=1, num_threads=3, base_steps=0)
    try:
        assert torch.get_num_threads() == 3
        torch.set_num_threads(1)
        resume(folder, max_steps=2)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)
