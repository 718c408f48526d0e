"""A run: its folder, its console, and that stopping it in any way and going on changes nothing.

What a script has a part in is tested with every script, what common.py does alone with grpo.py."""
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import importlib
import io
import itertools
import json
import math
import os
import queue
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_gradient
import torch
from conftest import ROOT, SCRIPTS, every_script, scripts

import common
from tools import console

# A base of a second that knows what an answer looks like, so that some groups have signal.
SMALL = {"device": "cpu", "num_threads": 1, "operands": "2", "hidden_size": 32, "num_attention_heads": 2,
         "num_hidden_layers": 1, "intermediate_size": 32, "base_steps": 200, "base_batch_size": 16,
         "learning_rate": 3e-3, "num_prompts": 4, "num_generations": 8, "max_completion_length": 16,
         "num_mini_batches": 1, "num_eval_problems": 16, "num_eval_samples": 2, "eval_steps": 2,
         "save_steps": 3, "max_steps": 10}
# All that has a state between steps, or could have; for some scripts there are two ways.
STATEFUL = {"num_mini_batches": 2, "num_iterations": 2, "dynamic_sampling": 8, "beta": 0.05,
            "entropy_coef": 0.01, "entropy_decay_steps": 8, "warmup_steps": 7}
EVERYTHING = {
    "reinforce": [STATEFUL | {"baseline": "optimal", "view": "token", "gamma": 0.9}],
    "grpo": [STATEFUL | {"overlong_buffer": 8}],
    "gspo": [STATEFUL | {"overlong_buffer": 8}],
    "ppo": [STATEFUL | {"trust_region": "penalty", "target_kl": 0.001, "kl_target": 0.001, "nll_coef": 0.1,
                        "critic_pretrain_steps": 2, "length_adaptive": "yes", "critic_lam": 1},
            {"trust_region": "trpo", "kl_target": 0.001, "beta": 0.05}],
    "dpo": [{name: STATEFUL[name] for name in ("num_mini_batches", "num_iterations", "dynamic_sampling",
                                               "beta", "warmup_steps")} | {"online": "yes"},
            {"loss_type": "ipo", "num_mini_batches": 3}]}
# What a line of metrics.jsonl holds in every script, and what it holds in one.
METRICS = {"step", "loss", "reward", "reward_std", "signal", "frac_reward_zero_std", "accuracy", "entropy",
           "kl", "grad_norm", "learning_rate", "completions/mean_length", "completions/clipped_ratio",
           "checks/share", "checks/repaired", "step_time"}
RATIO = {"sampling/sampling_logp_difference/max", "max_log_ratio"}
OWN_METRICS = {
    "reinforce": RATIO, "grpo": RATIO | {"clip_ratio/region_mean"},
    "gspo": RATIO | {"clip_ratio/region_mean", "clip_ratio/token_region_mean"},
    "ppo": RATIO | {"clip_ratio/region_mean", "policy_kl", "value_loss", "critic_grad_norm", "beta",
                    "penalty_coef", "explained_variance"},
    "dpo": {"pairs", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies",
            "logps/chosen", "logps/rejected"}}
EXAMPLE = "(3+4)="


def arguments(flags):
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def steps(folder):
    """The lines of metrics.jsonl that are a training step, without the greedy evaluations."""
    return [line for line in lines(folder / "metrics.jsonl") if "reward" in line]


def load(path):
    return torch.load(path, weights_only=True)


def leaves(value, path=""):
    """A nest of dicts and lists -> {path: value}; of a tensor a hash, for equal means bit for bit here."""
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {name: x for key, part in items for name, x in leaves(part, f"{path}/{key}").items()}
    if isinstance(value, torch.Tensor):
        return {path: (value.dtype, value.shape, hashlib.sha256(value.numpy().tobytes()).hexdigest()[:16])}
    return {path: value}


def script_of(folder):
    """The file name of the script that made the run."""
    return json.loads((Path(folder) / "config.json").read_text())["script"]


def outcome(folder):
    """All that a run leaves, except how long it took and how it was called."""
    folder = Path(folder)
    checkpoint, summary = load(folder / "checkpoint.pt"), json.loads((folder / "summary.json").read_text())
    logs = {name: lines(folder / name) for name in ("metrics.jsonl", "samples.jsonl", "evaluation.jsonl")}
    sizes = checkpoint.pop("logs")
    assert sizes == {name: (folder / name).stat().st_size for name in ("metrics.jsonl", "samples.jsonl")}
    config = json.loads((folder / "config.json").read_text())["config"]
    everything = leaves({"checkpoint": checkpoint, "base": load(folder / "base.pt"), "logs": logs,
                         "summary": summary, "config": config,
                         "script": (folder / script_of(folder)).read_text()})
    time_or_place = re.compile(r"/(step_time|seconds\w*|output_dir)$")
    return {path: value for path, value in everything.items() if not time_or_place.search(path)}


def difference(one, other):
    """The paths at which two outcomes differ."""
    return sorted(path for path in one.keys() | other.keys() if one.get(path) != other.get(path))


def contents(folder):
    return {str(path): (path.read_bytes() if path.is_file() else None, path.stat().st_mtime_ns)
            for path in sorted(Path(folder).rglob("*"))}


@contextlib.contextmanager
def at_work(folder):
    """In the folder, without pictures, which take longer than these runs; puts Ctrl-C back after it."""
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setitem(sys.modules, "tools.report", None)
        yield
    signal.signal(signal.SIGINT, on_ctrl_c)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """The folder with runs/base, so that the base is made once."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture(autouse=True)
def here(work):
    with at_work(work):
        yield


@pytest.fixture(scope="module")
def wholes():
    """What `whole` has made: script -> folder."""
    return {}


@pytest.fixture
def whole(script, work, wholes):
    """The folder of an uninterrupted run of 10 steps."""
    if script not in wholes:
        with at_work(work):
            script.main(arguments(SMALL | {"output_dir": f"whole-{script.__name__}"}))
        wholes[script] = work / f"whole-{script.__name__}"
    return wholes[script]


@pytest.fixture
def train(script, tmp_path):
    """train(**flags) -> the folder of a new run."""
    numbers = itertools.count()

    def run(**flags):
        folder = tmp_path / f"run{next(numbers)}"
        script.main(arguments(SMALL | {"output_dir": folder} | flags))
        return folder
    return run


def resume(folder, **flags):
    script = importlib.import_module(script_of(folder).removesuffix(".py"))
    return script.main(arguments({"resume_from_checkpoint": folder} | flags))


def shuffle_the_global_generators(seed):
    """What a run draws must not depend on them: another process has others."""
    torch.manual_seed(seed)
    random.seed(seed)


# ---- the folder -------------------------------------------------------------------------------------------


@every_script
def test_the_run_of_these_tests_has_something_to_learn_from(whole):
    """Else they would compare runs in which nothing happens."""
    assert sum(line["frac_reward_zero_std"] < 1 for line in steps(whole)) >= 5
    moved = difference(leaves(load(whole / "base.pt")), leaves(load(whole / "checkpoint.pt")["policy"]))
    assert len(moved) == len(load(whole / "base.pt"))


@every_script
def test_a_run_folder_has_every_file_and_no_other(script, train, monkeypatch):
    monkeypatch.delitem(sys.modules, "tools.report")
    folder = train(max_steps=2)
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "metrics.jsonl", "samples.jsonl", "evaluation.jsonl", "summary.json", "checkpoint.pt",
        "base.pt", "curve.png", "report.html", script_of(folder)}
    assert script_of(folder) == f"{script.__name__}.py"
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / script_of(folder)).read_bytes() == (ROOT / script_of(folder)).read_bytes()


@every_script
def test_the_config_tells_how_the_run_was_made(script, whole):
    saved = json.loads((whole / "config.json").read_text())
    assert saved["argv"] == arguments(SMALL | {"output_dir": whole.name})
    assert saved["script"] == f"{script.__name__}.py"
    assert (saved["torch"], saved["python"]) == (torch.__version__, sys.version)
    flags = dataclasses.asdict(script.Config()) | SMALL | {"output_dir": whole.name}
    assert saved["config"] == flags


@every_script
def test_the_summary_compares_the_base_with_the_trained_policy(script, whole, train):
    summary = json.loads((whole / "summary.json").read_text())
    assert summary.keys() == {"base", "trained", "steps", "seconds_warm_start", "seconds_total"}
    scores = {"greedy", "pass@1", "pass@2", "maj@2", "pass@k", "maj@k", "accuracy_given_think",
              "accuracy_given_blurt", "think_share", "mean_length", "problems", "samples"}
    own = {name for name in summary["base"] if name.startswith("pairs/")}
    assert summary["base"].keys() == summary["trained"].keys() == scores | own
    assert bool(own) == (script.__name__ == "dpo")          # its loss and margins on held-out pairs
    assert summary["steps"] == 10 and summary["trained"]["problems"] == 16
    assert summary["trained"]["samples"] == 2
    for curve in ("pass@", "maj@"):
        assert summary["trained"][f"{curve}k"][1:] == [summary["trained"][f"{curve}2"]]
    assert 0 < summary["seconds_warm_start"] < summary["seconds_total"]
    eight = json.loads((train(max_steps=0, num_eval_samples=8) / "summary.json").read_text())
    assert {"pass@8", "maj@8"} <= eight["base"].keys()


@every_script
def test_main_returns_the_summary(script, tmp_path):
    summary = script.main(arguments(SMALL | {"max_steps": 1, "output_dir": tmp_path / "run"}))
    assert summary == json.loads((tmp_path / "run/summary.json").read_text())


@every_script
def test_the_metrics_have_one_line_a_step_in_the_words_of_trl_with_its_evaluation(script, whole):
    names = METRICS | OWN_METRICS[script.__name__]
    assert [line["step"] for line in lines(whole / "metrics.jsonl")] == list(range(1, 11))
    for line in steps(whole):
        assert {name for name in line if not name.startswith("eval/")} == names
        assert line["checks/share"] > 0 or line.pop("checks/repaired") is None     # nothing to take a mean of
        assert all(math.isfinite(value) for value in line.values())
        assert line.get("sampling/sampling_logp_difference/max", 0) < 1e-4
    evaluations = [line for line in steps(whole) if "eval/greedy" in line]
    assert [line["step"] for line in evaluations] == [2, 4, 6, 8, 10]
    last = json.loads((whole / "summary.json").read_text())["trained"]
    assert evaluations[-1]["eval/greedy"] == last["greedy"]


def test_the_rows_of_a_reward_add_up_to_it_at_every_step(train):
    found = steps(train(reward="accuracy+growing_length", textbook=1.0, max_steps=4))   # whose target grows
    for line in found:
        rows = line["rewards/accuracy/mean"], line["rewards/growing_length/mean"]
        assert line["reward"] == pytest.approx(sum(rows), rel=1e-5) and rows[1] > 0


def test_the_metrics_of_a_batch_are_those_computed_by_hand():
    mask = torch.tensor([[1., 1, 1, 1], [1, 0, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0]])
    batch = SimpleNamespace(
        rewards=torch.tensor([[1.0, 1.0], [0.0, 1.0], [-0.5, -0.5]]), accuracy=0.5,
        cut=torch.tensor([True, False, False, False, False, False]),
        out=SimpleNamespace(mask=mask, entropy=torch.arange(24.0).view(6, 4)))
    seen = common.describe(batch)
    assert seen == pytest.approx({
        "reward": 1 / 3, "reward_std": 0.5**0.5 / 3, "signal": 1 / 3, "frac_reward_zero_std": 2 / 3,
        "accuracy": 0.5, "completions/mean_length": 11 / 6, "completions/clipped_ratio": 1 / 6,
        "entropy": (0 + 1 + 2 + 3 + 4 + 6 + 8 + 12 + 16 + 17 + 20) / 11})


def test_a_metric_that_is_not_finite_is_null_in_the_log(script, train, monkeypatch):
    update, odd = script.update, {"kl": math.inf, "loss": -math.inf, "grad_norm": math.nan}
    monkeypatch.setattr(script, "update", lambda *args: update(*args) | odd)
    text = (train(max_steps=1) / "metrics.jsonl").read_text()
    assert [json.loads(text, parse_constant=pytest.fail)[name] for name in odd] == [None] * 3


@every_script
def test_the_samples_are_whole_groups_with_rewards_and_advantages(script, whole):
    groups = lines(whole / "samples.jsonl")
    assert [group["step"] for group in groups] == [step for step in (1, 2, 4, 6, 8, 10) for _ in range(4)]
    for group in groups:
        problem = common.Problem("arithmetic", group["prompt"], group["answer"])
        made = group["completions"]
        assert len(made) == 8
        assert [completion["reward"] for completion in made] == [
            script.verify(problem, completion["text"]) for completion in made]
        A = torch.tensor([[completion["advantage"] for completion in made]])
        if script.__name__ in ("grpo", "gspo"):
            rewards = torch.tensor([[completion["reward"] for completion in made]])
            torch.testing.assert_close(A, script.advantages(rewards))
        assert A.isfinite().all() and all(1 <= completion["length"] <= 16 for completion in made)
        for completion in made:
            if completion["text"].isascii():                # else a character has several tokens
                assert "".join(completion["tokens"]).removesuffix("<|eos|>") == completion["text"]
            assert len(completion["tokens"]) == len(completion["mask"]) == len(completion["shade"])
            assert sum(completion["mask"]) == completion["length"]      # nothing is inserted in arithmetic
        assert group["shade"] == ("value" if script.__name__ == "ppo" else "ratio")
    shades = [x for group in groups for made in group["completions"] for x in made["shade"]]
    assert group["shade"] == "value" or (min(shades) > 0 and 0.9 < sum(shades) / len(shades) < 1.1)
    assert len(set(shades)) > len(shades) / 4               # it is after the update: few ratios are still 1
    assert any(completion["reward"] for group in groups for completion in group["completions"])


@every_script
def test_the_held_out_problems_are_shown_before_and_after(script, whole):
    rows = lines(whole / "evaluation.jsonl")
    problems = common.sample_problems("arithmetic", 16, "evaluation", "test", operands=2)
    asked = [(problem.prompt, problem.answer) for problem in problems]
    assert [(row["prompt"], row["answer"]) for row in rows] == asked
    summary = json.loads((whole / "summary.json").read_text())
    for when in ("base", "trained"):
        right = [row[when]["right"] for row in rows]
        assert right == [script.verify(p, row[when]["text"]) == 1 for p, row in zip(problems, rows)]
        assert sum(right) / 16 == summary[when]["greedy"]
    assert any(row["base"]["text"] != row["trained"]["text"] for row in rows)


@scripts("reinforce")
def test_the_advantage_of_a_sample_is_the_mean_of_those_of_its_tokens(script, whole):
    for group in lines(whole / "samples.jsonl"):
        for completion in group["completions"]:             # without a baseline every token's A is R
            assert completion["advantage"] == completion["reward"]


@scripts("ppo")
def test_a_critic_that_foresees_nothing_in_returns_that_are_all_but_equal_explains_no_variance(script):
    returns = torch.tensor([[1e-7, 2e-7, -1e-7]])           # no rewards; rounding, and a KL of nothing
    explained = script.explained_variance(torch.tensor([[0.01, -0.01, 0.02]]), returns, torch.ones(1, 3))
    assert -10 < explained <= 1


def test_default_folders_are_numbered_when_taken_and_an_explicit_one_collides(
        script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny = SMALL | {"base_steps": 0, "max_steps": 0}
    for _ in range(3):
        script.main(arguments(tiny))
    names = {path.name for path in Path("runs").iterdir()}
    assert names == {"base", "grpo-arithmetic-s0", "grpo-arithmetic-s0-2", "grpo-arithmetic-s0-3"}
    before = contents(tmp_path)
    with pytest.raises(SystemExit) as stop:
        script.main(arguments(tiny | {"output_dir": "runs/grpo-arithmetic-s0"}))
    assert stop.value.code == 2 and contents(tmp_path) == before
    script.main(arguments(tiny | {"seed": 7}))
    assert (tmp_path / "runs/grpo-arithmetic-s7").is_dir()


@every_script
def test_the_same_seed_makes_the_same_run_and_another_seed_another(train, whole):
    shuffle_the_global_generators(4)
    assert not difference(outcome(train()), outcome(whole))
    other = outcome(train(seed=1))
    changed = difference(other, outcome(whole))
    assert {path for path in other if path.startswith("/checkpoint/policy/")} <= set(changed)
    assert not [path for path in changed if path.startswith("/base/")]


# ---- the base ---------------------------------------------------------------------------------------------


def bases():
    """The cached bases, with the times they were made."""
    return {path.name: path.stat().st_mtime_ns for path in Path("runs/base").iterdir()}


@pytest.fixture
def of_grpo(work):
    """The folder of a run of four steps of grpo.py."""
    if not (work / "of-grpo").exists():
        importlib.import_module("grpo").main(arguments(SMALL | {"output_dir": "of-grpo", "max_steps": 4}))
    return work / "of-grpo"


@every_script
def test_all_scripts_share_a_base(train, of_grpo):
    """Whoever comes first makes it: what it is made of has the same text in all of them."""
    before = bases()
    folder = train(max_steps=0)
    assert bases() == before
    assert not difference(leaves(load(folder / "base.pt")), leaves(load(of_grpo / "base.pt")))


SHAPES_A_BASE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "intermediate_size": 16, "base_seed": 1, "base_steps": 4,
                 "base_batch_size": 8, "base_learning_rate": 0.01, "textbook": 0.9, "operands": "3"}


@pytest.mark.parametrize("name", SHAPES_A_BASE)
def test_each_base_flag_makes_another_base(train, name):
    few = {"base_steps": 3, "max_steps": 0}
    plain = train(**few)
    count = len(bases())
    other = train(**few | {name: SHAPES_A_BASE[name]})
    assert len(bases()) == count + 1
    assert difference(leaves(load(plain / "base.pt")), leaves(load(other / "base.pt")))


def test_another_table_of_special_tokens_makes_another_base(script, train, monkeypatch):
    few = {"base_steps": 3, "max_steps": 0, "base_seed": 7}
    train(**few)
    count = len(bases())
    monkeypatch.setattr(script, "SPECIALS", script.SPECIALS[::-1])  # an edit that no function's source shows
    train(**few)
    assert len(bases()) == count + 1


def test_every_flag_of_the_base_policy_is_in_the_test_above():
    fields = dataclasses.fields(common.Config)
    group = {field.name for field in fields if field.metadata["group"].startswith("base")}
    assert group | {"operands"} == SHAPES_A_BASE.keys()


def grafted(path):
    """Right in its first weight, which is changed, and without the others."""
    torch.save({"embed.weight": load(path)["embed.weight"] + 1}, path)


def flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 64
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [
    lambda path: path.write_bytes(path.read_bytes()[:1000]), lambda path: path.write_bytes(b""),
    lambda path: path.write_text("hello"), lambda path: torch.save([1], path), flipped, grafted],
    ids=["cut off", "empty", "text", "a list", "one bit flipped", "half the weights"])
def test_a_damaged_cached_base_is_made_again(train, damage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)                     # a runs/base of its own
    few = {"base_steps": 5, "max_steps": 0}
    right, (path,) = train(**few), Path("runs/base").iterdir()
    good = path.read_bytes()
    damage(path)
    again = train(**few)
    assert not difference(leaves(load(again / "base.pt")), leaves(load(right / "base.pt")))
    assert path.read_bytes() == good


def test_a_run_that_makes_the_base_equals_one_that_reads_it(train, whole):
    for path in Path("runs/base").iterdir():
        path.unlink()
    shuffle_the_global_generators(5)
    assert not difference(outcome(train()), outcome(whole))


# ---- going on ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script, flags", [
    pytest.param(name, flags, id=f"{name}-everything{i}" if i else f"{name}-defaults")
    for name in SCRIPTS for i, flags in enumerate([{}, *EVERYTHING.get(name, [])])], indirect=["script"])
def test_ten_steps_equal_five_and_five_after_a_resume_bit_for_bit(train, flags):
    shuffle_the_global_generators(1)
    ten = train(**flags)
    shuffle_the_global_generators(2)
    five = train(**flags, max_steps=5)
    assert len(steps(five)) == 5
    assert difference(outcome(five), outcome(ten))
    kept = leaves({name: x for name, x in load(five / "checkpoint.pt").items() if name != "logs"})
    assert not {path: x for path, x in kept.items() if isinstance(x, float) and not math.isfinite(x)}
    shuffle_the_global_generators(3)
    resume(five, max_steps=10)
    assert not difference(outcome(five), outcome(ten))


@every_script
def test_a_finished_run_that_is_resumed_stays_as_it_is(train, whole):
    folder = train()
    resume(folder)
    assert not difference(outcome(folder), outcome(whole))


def test_a_log_that_was_deleted_begins_anew_on_resume(train):
    folder = train(max_steps=2)
    (folder / "metrics.jsonl").unlink()
    resume(folder, max_steps=4)
    assert [line["step"] for line in lines(folder / "metrics.jsonl")] == [3, 4]


def test_log_lines_behind_the_checkpoint_are_cut_off_on_resume(train, whole):
    folder = train(max_steps=5)
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(folder / name, "a") as log:
            log.write('{"step": 6, "reward": 1.0}\n{"step": 7, "rew')
    resume(folder, max_steps=10)
    assert not difference(outcome(folder), outcome(whole))


def test_a_run_killed_before_its_first_checkpoint_starts_over(train, whole):
    folder = train()
    for name in ("checkpoint.pt", "base.pt", "summary.json"):
        (folder / name).unlink()
    resume(folder)
    assert not difference(outcome(folder), outcome(whole))


def test_a_resumed_run_needs_no_cached_base(train, tmp_path, monkeypatch):
    folder = train(max_steps=1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    resume(folder, max_steps=2)
    assert len(steps(folder)) == 2 and not list(Path().iterdir())


def test_a_resumed_run_may_evaluate_otherwise(train):
    folder = train(max_steps=2)
    summary = resume(folder, max_steps=4, num_eval_samples=3, num_eval_problems=9, eval_steps=1, save_steps=1)
    assert summary["steps"] == 4 and summary["trained"]["problems"] == 9
    assert [line["step"] for line in steps(folder) if "eval/greedy" in line] == [2, 3, 4]


@pytest.fixture
def evaluated(script, monkeypatch):
    """The number of samples of each evaluation since the test began, and how it came out."""
    seen, evaluate = [], script.evaluate

    def seeing(policy, cfg, k, **options):
        seen.append((k, evaluate(policy, cfg, k, **options)))
        return seen[-1][1]
    monkeypatch.setattr(script, "evaluate", seeing)
    return seen


@every_script
def test_a_run_can_be_evaluated_once_more_with_more_samples(script, train, evaluated):
    folder = train(max_steps=4, num_eval_problems=32)
    before = json.loads((folder / "summary.json").read_text())
    weights, old = load(folder / "checkpoint.pt")["policy"], lines(folder / "metrics.jsonl")
    evaluated.clear()
    summary = resume(folder, max_steps=0, num_eval_samples=16)
    assert [k for k, _ in evaluated] == [0, 16, 0, 16]
    assert summary == json.loads((folder / "summary.json").read_text()) and summary["steps"] == 4
    for when, found in (("base", evaluated[:2]), ("trained", evaluated[2:])):
        scores = found[0][1] | found[1][1]
        assert summary[when]["pass@16"] == scores["pass@16"] == summary[when]["pass@k"][15]
        assert summary[when]["samples"] == 16 and summary[when]["greedy"] == before[when]["greedy"]
    assert summary["trained"]["pass@k"] != summary["base"]["pass@k"]        # each of its own policy
    assert not difference(leaves(load(folder / "checkpoint.pt")["policy"]), leaves(weights))
    assert lines(folder / "metrics.jsonl") == old


def test_a_resumed_run_evaluates_the_base_anew_only_for_other_numbers(train, evaluated):
    folder = train(max_steps=1)
    for flags, counts, n in (({}, [0, 2], 16), ({"num_eval_problems": 9}, [0, 2, 0, 2], 9), ({}, [0, 2], 9)):
        evaluated.clear()
        summary = resume(folder, **flags)
        assert [k for k, _ in evaluated] == counts
        assert summary["base"]["problems"] == summary["trained"]["problems"] == n


def test_init_from_starts_from_the_trained_weights_of_the_other_run(train, whole):
    trained, before = load(whole / "checkpoint.pt")["policy"], bases()
    folder = train(init_from=whole, max_steps=0, seed=1)
    assert not difference(leaves(load(folder / "base.pt")), leaves(trained))
    assert bases() == before                        # no base of the shared ones is made of it
    summary = [json.loads((run / "summary.json").read_text()) for run in (folder, whole)]
    assert summary[0]["base"] == summary[1]["trained"]


def test_a_cold_start_goes_on_with_worked_examples_before_the_run_begins(train, whole):
    trained, before = load(whole / "checkpoint.pt")["policy"], bases()
    folders = [train(init_from=whole, cold_start=3, max_steps=2, textbook=share) for share in (0.2, 0.9)]
    one, other = (outcome(folder) for folder in folders)
    assert difference(leaves(load(folders[0] / "base.pt")), leaves(trained))
    assert bases() == before
    assert not [path for path in difference(one, other) if "config" not in path]   # all textbook, always
    again = train(init_from=whole, cold_start=3, max_steps=1)
    resume(again, max_steps=2)                      # without a second cold start
    assert not [path for path in difference(outcome(again), one) if "config" not in path]


@every_script
def test_a_run_may_begin_with_the_policy_of_another_script(train, of_grpo):
    folder = train(init_from=of_grpo, max_steps=2)
    assert not difference(leaves(load(folder / "base.pt")), leaves(load(of_grpo / "checkpoint.pt")["policy"]))
    summary = [json.loads((run / "summary.json").read_text()) for run in (folder, of_grpo)]
    assert summary[0]["base"] | summary[1]["trained"] == summary[0]["base"]
    assert len(steps(folder)) == 2


@pytest.mark.parametrize("lost", [(), ("checkpoint.pt", "base.pt", "summary.json")],
                         ids=["later", "before its first checkpoint"])
def test_a_run_that_was_started_with_init_from_can_be_resumed(train, whole, lost):
    flags = {"init_from": whole, "seed": 1}
    four, two = train(**flags, max_steps=4), train(**flags, max_steps=2)
    for name in lost:
        (two / name).unlink()
    resume(two, max_steps=4)
    assert not difference(outcome(two), outcome(four))


@every_script
def test_no_steps_make_and_evaluate_the_base_only(train, whole):
    folder = train(max_steps=0)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["trained"] == summary["base"] == json.loads((whole / "summary.json").read_text())["base"]
    assert summary["steps"] == 0 and lines(folder / "metrics.jsonl") == []
    assert not difference(leaves(load(folder / "checkpoint.pt")["policy"]), leaves(load(folder / "base.pt")))


def test_a_run_stops_when_five_batches_in_a_row_are_accurate_enough(script, train, monkeypatch):
    update, accuracy = script.update, iter([0.8, 0.95, 1, 1, 1, 1, 1, 1, 1, 1])
    monkeypatch.setattr(script, "update", lambda *args: update(*args) | {"accuracy": next(accuracy)})
    assert len(steps(train(stop_at=0.98))) == 6     # .99 on average, from the second to the sixth
    accuracy = itertools.repeat(1)
    assert len(steps(train(stop_at=2))) == 10
    assert len(steps(train(stop_at=1))) == 5
    resumed = train(stop_at=1, max_steps=3)
    resume(resumed, max_steps=10)
    assert len(steps(resumed)) == 5


# ---- asking -----------------------------------------------------------------------------------------------


def answer(folder, prompt, capsys):
    capsys.readouterr()
    assert resume(folder, prompt=prompt) is None
    out, err = capsys.readouterr()
    assert err == "" and out.count("\n") == 1 and out.endswith("\n"), out
    return out[:-1]


@every_script
def test_a_finished_run_answers_a_prompt_in_one_line_and_changes_no_file(script, whole, capsys):
    before = contents(whole.parent)
    cfg, policy, said = script.Config(**SMALL), {}, {}
    for name, weights in (("base", load(whole / "base.pt")),
                          ("trained", load(whole / "checkpoint.pt")["policy"])):
        policy[name] = script.GPT(cfg)
        policy[name].load_state_dict(weights)
    examples = [problem.prompt for problem in common.sample_problems("arithmetic", 40, 0, "test", operands=2)]
    for name in policy:
        said[name] = script.rollout(policy[name], script.encode_prompts(examples, cfg), cfg).texts()
    changed = [i for i in range(40) if said["base"][i] != said["trained"][i]]       # by training
    assert any("<answer>" in said["trained"][i] for i in changed)
    for i in changed[:2]:
        assert answer(whole, examples[i], capsys) == ascii(said["trained"][i])[1:-1]
    assert contents(whole.parent) == before


def test_an_answer_with_control_characters_is_still_one_printable_line(script, whole, capsys, monkeypatch):
    monkeypatch.setattr(script.Rollout, "texts", lambda out: ["\x1b[2J one\ntwo\rthree\x07\x00\u202e"])
    assert answer(whole, EXAMPLE, capsys).isprintable()


# ---- the console ------------------------------------------------------------------------------------------


def escaped(text):
    return text.encode("unicode_escape").decode()


@every_script
def test_the_console_shows_base_then_steps_then_samples_then_what_changed_and_how_to_ask(train, capsys):
    folder = train(max_steps=4, dynamic_sampling=8)         # with signal in every step
    out = capsys.readouterr().out
    assert "4 prompts x 8 completions = 32 per step" in out
    shown = [line.split()[0] for line in out.splitlines() if re.match(r" +\d+ +\d", line)]
    assert shown == ["1", "2", "3", "4"]
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if len(line.split()) == 3}
    summary = json.loads((folder / "summary.json").read_text())
    assert rows["mean_length"] == [f"{summary[when]['mean_length']:.3f}" for when in ("base", "trained")]
    order = [f"greedy {summary['base']['greedy']:.3f}", "\n step ", "eval/greedy", "mean_length  ",
             f"folder {folder}.", "--prompt"]
    assert (at := [out.index(words) for words in order]) == sorted(at)
    sample = r"^ +(-?\d\.\d\d) ([+-]\d\.\d\d) (\(.*)"
    samples = re.findall(sample, out, re.M)
    assert len(samples) == 2 * 3                    # best and worst, at the first step and two evaluations
    best, worst = samples[0::2], samples[1::2]
    assert all(float(b[0]) > float(w[0]) and b[2][:6] == w[2][:6] for b, w in zip(best, worst))
    made = {f"{' ' * 6}{x['reward']:5.2f} {x['advantage']:+5.2f} {group['prompt']}{escaped(x['text'])}"[:79]
            for group in lines(folder / "samples.jsonl") for x in group["completions"]}
    assert made >= {line for line in out.splitlines() if re.match(sample, line)}


@every_script
def test_the_command_at_the_end_of_a_run_asks_the_policy(script, tmp_path, capsys):
    folder = tmp_path / "it's a run; $HOME"
    script.main(arguments(SMALL | {"output_dir": folder, "max_steps": 1}))
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert command[:4] == ["python", f"{script.__name__}.py", "--resume_from_checkpoint", str(folder)]
    script.main(command[2:])
    assert len(capsys.readouterr().out.splitlines()) == 1


@every_script
def test_no_line_of_the_console_is_wider_than_80_columns(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)                     # a default folder name: the others may have any length
    monkeypatch.setattr(script, "verify", lambda problem, text: float(len(text) % 2))
    for flags in EVERYTHING[script.__name__]:
        script.main(arguments(SMALL | flags | {"base_steps": 10, "num_generations": 2, "max_steps": 3}))
    out = capsys.readouterr().out
    assert "warning: " in out
    assert f"run folder runs/{script.__name__}-arithmetic-s0\n" in out
    command = f"  python {script.__name__}.py"      # is copied and pasted as a whole
    assert not [line for line in out.splitlines() if len(line) > 80 and not line.startswith(command)]


def test_hostile_completions_reach_the_console_escaped_and_cut_and_the_log_whole(
        script, train, monkeypatch, capsys):
    evil = ["\x1b[2J\x1b]0;owned\x07" + "x" * 100_000, "", "<script>alert(1)</script>", "\\x1b[2J",
            "\u202e\ufeff", "a\nb\r\tc\x00", "\ud800\U0001f4a9", "\x9b31m\n\r\x00" * 20]
    monkeypatch.setattr(script.Rollout, "texts", lambda out: list(
        itertools.islice(itertools.cycle(evil), len(out.tokens))))
    folder = train(max_steps=2)
    out = capsys.readouterr().out
    assert all(line.isprintable() and len(line) <= 80 for line in out.splitlines()
               if not line.startswith("  python") and "folder" not in line)
    assert all(ord(character) < 128 for character in out)
    for group in lines(folder / "samples.jsonl"):
        assert [completion["text"] for completion in group["completions"]] == evil


HEALTHY = {"reward": 0.5, "accuracy": 0.5, "frac_reward_zero_std": 0.2, "completions/clipped_ratio": 0.1,
           "entropy": 0.5, "sampling/sampling_logp_difference/max": 1e-6, "rewards/chosen": 0.1}
SICK = {"signal": {"frac_reward_zero_std": 1.0, "accuracy": 0.1}, "cut": {"completions/clipped_ratio": 0.9},
        "collapsed": {"entropy": 0.001}, "ratio": {"sampling/sampling_logp_difference/max": 0.5},
        "chosen": {"rewards/chosen": -0.1}}


@pytest.fixture
def warnings_when(train, capsys, monkeypatch):
    """warnings_when(metrics) -> the warnings of a run of three steps that all look like this."""
    log = common.Run.log

    def run(metrics):
        monkeypatch.setattr(common.Run, "log", lambda self, seen, *rest, **more: log(
            self, seen | metrics, *rest, **more))
        capsys.readouterr()
        train(max_steps=3)
        return re.findall("^warning: (.*)", capsys.readouterr().out, re.M)
    return run


@every_script
@pytest.mark.parametrize("word", SICK)
def test_what_makes_learning_impossible_is_warned_of_once(warnings_when, word):
    said = warnings_when(HEALTHY | SICK[word])
    assert len(said) == 1 and word in said[0]


def test_a_healthy_run_and_a_solved_task_are_not_warned_of(warnings_when):
    assert warnings_when(HEALTHY) == []
    solved = {"frac_reward_zero_std": 1.0, "accuracy": 1.0, "entropy": 0.001}
    assert warnings_when(HEALTHY | solved) == []


def test_a_base_that_no_reward_can_teach_is_warned_of_before_it_is_trained(train, capsys):
    train(max_steps=0)
    assert "warning" not in capsys.readouterr().out
    train(max_steps=0, base_steps=0)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(said) == 1 and "no sample of the base is right" in said[0] and "--base_steps" in said[0]


def test_every_warning_is_in_the_tests_above_and_fits_a_line():
    said = [message for _, message in console.WARNINGS]
    assert len(said) == len(SICK)
    assert not [message for message in said if len(f"warning: {message}") > 80]
    assert all(" --" in message for message in said)        # a flag to turn, or to try


def test_main_can_be_called_where_the_output_is_no_terminal_and_no_file(script, tmp_path):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        script.main(arguments(SMALL | {"max_steps": 1, "output_dir": tmp_path / "run"}))
    assert "trained" in out.getvalue()


def always(script):
    """Flags with which no step goes without a backward pass."""
    return {"dynamic_sampling": 8} if script.__name__ == "dpo" else {"entropy_coef": 1e-9}


# ---- a step that fails ------------------------------------------------------------------------------------


@pytest.mark.parametrize("script, save_steps, kept", [("grpo", 2, 4), *((name, 3, 3) for name in SCRIPTS)],
                         indirect=["script"])
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(
        script, train, capsys, monkeypatch, tmp_path, save_steps, kept):
    name = {"dpo": "dpo_loss"}.get(script.__name__, "policy_loss")
    loss, update, calls = getattr(script, name), script.update, itertools.count(1)
    with monkeypatch.context() as patch:
        patch.setattr(script, name, lambda *args, **options: loss(*args, **options) * (
            float("nan") if step == 5 else 1))

        def counted(*args):
            nonlocal step
            step = next(calls)
            return update(*args)
        step = 0
        patch.setattr(script, "update", counted)
        with pytest.raises(SystemExit) as stop:
            train(save_steps=save_steps, **always(script))
    assert stop.value.code == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "step 5" in err and "loss" in err
    assert "log_ratio" in err or script.__name__ == "dpo"
    folder = tmp_path / "run0"
    assert load(folder / "checkpoint.pt")["state"]["steps"] == kept
    resume(folder)
    reference = train(save_steps=save_steps, **always(script))
    assert not difference(outcome(folder), outcome(reference))


@every_script
def test_a_gradient_that_is_not_finite_stops_the_run_too(script, train, capsys, monkeypatch, tmp_path):
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *args: clip(*args) * float("inf"))
    with pytest.raises(SystemExit) as stop:
        train(**always(script))
    assert stop.value.code == 1 and "step 1 " in capsys.readouterr().err
    assert load(tmp_path / "run0/checkpoint.pt")["state"]["steps"] == 0  # there is one before the first step


# ---- Ctrl-C -----------------------------------------------------------------------------------------------


@every_script
def test_ctrl_c_finishes_the_step_saves_and_says_how_to_go_on(
        script, train, capfd, monkeypatch, tmp_path, whole):
    update, calls = script.update, itertools.count(1)

    def interrupted(*args):
        if next(calls) == 4:
            signal.raise_signal(signal.SIGINT)
        return update(*args)
    with monkeypatch.context() as patch:
        patch.setattr(script, "update", interrupted)
        with pytest.raises(SystemExit) as stop:
            train()
    folder, err = tmp_path / "run0", capfd.readouterr().err
    assert stop.value.code == 130 and "Traceback" not in err
    assert load(folder / "checkpoint.pt")["state"]["steps"] == 4 == len(steps(folder))
    assert not (folder / "summary.json").exists()
    script.main(shlex.split(err.splitlines()[-1])[2:])        # the command it has printed
    assert not difference(outcome(folder), outcome(whole))


def test_ctrl_c_in_the_last_evaluation_loses_no_step(script, train, capfd, monkeypatch, tmp_path):
    evaluate, folder = script.evaluate, tmp_path / "run0"

    def interrupted(*args, **options):
        if len(lines(folder / "metrics.jsonl")) == 3:
            signal.raise_signal(signal.SIGINT)
        return evaluate(*args, **options)
    monkeypatch.setattr(script, "evaluate", interrupted)
    with pytest.raises(SystemExit) as stop:
        train(max_steps=3, save_steps=100, eval_steps=100)
    assert stop.value.code == 130 and load(folder / "checkpoint.pt")["state"]["steps"] == 3


@contextlib.contextmanager
def process(cwd, flags, pattern):
    """python grpo.py as from a shell, once it has printed a line with the pattern -> press_ctrl_c()."""
    running = subprocess.Popen([sys.executable, ROOT / "grpo.py", *arguments(flags)], cwd=cwd, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""})

    def press_ctrl_c():
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=60)
        return running.returncode, err
    try:
        assert any(re.match(pattern, line) for line in running.stdout), running.stderr.read()
        yield press_ctrl_c
    finally:
        running.kill()
        running.communicate()


def test_ctrl_c_in_a_shell_while_training(script, work, whole, tmp_path, train):
    folder = tmp_path / "run"
    flags = SMALL | {"max_steps": 500, "stop_at": 2, "eval_steps": 1000, "output_dir": folder}
    with process(work, flags, " +3 ") as press_ctrl_c:
        code, err = press_ctrl_c()
    assert code == 130 and "Traceback" not in err
    done = load(folder / "checkpoint.pt")["state"]["steps"]
    assert 3 <= done == len(steps(folder)) < 60     # a full buffer would bring the line after 100 steps
    command = shlex.split(err.splitlines()[-1])
    script.main([*command[2:], "--max_steps", str(done + 2)])
    reference = train(max_steps=done + 2, stop_at=2, eval_steps=1000)
    assert not difference(outcome(folder), outcome(reference))


def test_ctrl_c_in_a_shell_during_the_warm_start(tmp_path):
    flags = SMALL | {"base_steps": 30_000, "output_dir": tmp_path / "run", "max_steps": 1}
    with process(tmp_path, flags, "grpo.py: ") as press_ctrl_c:
        time.sleep(1)
        code, err = press_ctrl_c()
    assert code == 130 and "Traceback" not in err
    command = ["python", "grpo.py", "--resume_from_checkpoint", str(tmp_path / "run")]
    assert [shlex.split(line) for line in err.strip().splitlines()[1:]] == [command]
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"config.json", "grpo.py"}
    assert not [*tmp_path.rglob("*.pt")]            # half a base is no base


# ---- kill -9 ----------------------------------------------------------------------------------------------

# A process that has imported torch forks one for each run, so that the time of a run is all its own. Started
# with "moment" it is killed after so many seconds; with "write", half-way through its write of this number.
SERVER = """
import itertools, json, os, pathlib, signal, sys, time
sys.path.insert(0, sys.argv[1])
sys.modules["tools.report"] = None
import torch, torch._dynamo         # which the first optimizer would import, in every run anew
import common
scripts = {name: __import__(name) for name in sys.argv[2:]}


def mortal(last, number):
    "Let the process die in the middle of a write: of a file, a rename, a line of a log. Or press Ctrl-C."
    count = itertools.count()

    def dies(write, half):
        def wrapped(*args, **options):
            if next(count) == last:
                if number == signal.SIGKILL:
                    half(*args)
                os.kill(os.getpid(), number)
            return write(*args, **options)
        return wrapped

    def half_a_checkpoint(content, path):
        save(content, path)
        os.truncate(path, os.path.getsize(path) // 2)

    def opened(path, mode="r", *args):
        file = open(path, mode, *args)
        if mode == "a":
            write = file.write
            file.write = dies(write, lambda line: (write(line[:len(line) // 2]), file.flush()))
        return file

    save = torch.save
    torch.save = dies(torch.save, half_a_checkpoint)
    os.replace = dies(os.replace, lambda *paths: None)
    text = pathlib.Path.write_text
    pathlib.Path.write_text = dies(text, lambda path, content: text(path, content[:len(content) // 2]))
    common.open = opened
    return count


def child(job):
    signal.alarm(100)
    os.chdir(job["cwd"])
    file = os.open("console.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1), os.dup2(file, 2)
    count = mortal(job.get("write", -1), job.get("signal", signal.SIGKILL))
    scripts[job.get("script", "grpo")].main(job["argv"])
    pathlib.Path("writes.json").open("w").write(str(next(count)))


for line in sys.stdin:
    job, start = json.loads(line), time.perf_counter()
    pid = os.fork()
    if not pid:
        try:
            child(job)
            os._exit(0)
        except SystemExit as stop:
            os._exit(stop.code)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    killed, done = job.get("moment") is None, 0
    while not done:
        done, status = os.waitpid(pid, os.WNOHANG)
        if not done and not killed and time.perf_counter() - start > job["moment"]:
            os.kill(pid, signal.SIGKILL)
            killed = True
        time.sleep(0.0005)
    code = os.waitstatus_to_exitcode(status)
    print(json.dumps({"code": code, "seconds": time.perf_counter() - start}), flush=True)
"""
BRIEF = SMALL | {"hidden_size": 16, "intermediate_size": 16, "base_steps": 40, "output_dir": "run",
                 "overlong_buffer": 12, "max_completion_length": 12, "num_generations": 4, "save_steps": 2,
                 "num_eval_problems": 8, "max_steps": 6}       # the overlong penalty gives signal to any base


@pytest.fixture(scope="module")
def servers():
    """servers(cwd, flags, **job) -> {"code", "seconds"}; two may be at work at the same time."""
    started = [subprocess.Popen([sys.executable, "-c", SERVER, ROOT, *SCRIPTS], text=True,
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                env=os.environ | {"OMP_NUM_THREADS": "1"})
               for _ in range(2)]
    free = queue.Queue()
    for server in started:
        free.put(server)

    def run(cwd, flags, **job):
        server = free.get()
        try:
            server.stdin.write(json.dumps({"cwd": str(cwd), "argv": arguments(flags)} | job) + "\n")
            server.stdin.flush()
            return json.loads(server.stdout.readline())
        finally:
            free.put(server)
    yield run
    for server in started:
        server.kill()
        server.wait(timeout=10)


def killed_and_resumed(servers, cwd, flags, script="grpo", **job):
    """Kill the run, then go on with it, or start it again if there is nothing to go on with. -> exit codes"""
    cwd.mkdir(exist_ok=True)
    first = servers(cwd, flags, script=script, **job)
    there = (cwd / "run/config.json").exists()
    again = servers(cwd, {"resume_from_checkpoint": "run"} if there else flags, script=script)
    return first["code"], again["code"]


def all_equal(servers, folder, flags, reference, jobs):
    """Each of the jobs ends as the reference did. -> how many were killed"""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        codes = list(pool.map(lambda job: killed_and_resumed(servers, folder / str(job[0]), flags, **job[1]),
                              enumerate(jobs)))
    for number, (job, (first, again)) in enumerate(zip(jobs, codes)):
        cwd = folder / str(number)
        stopped = 130 if job.get("signal") == signal.SIGINT else -signal.SIGKILL
        assert first in (0, stopped) and again == 0, (job, (cwd / "console.txt").read_text())
        assert not difference(outcome(cwd / "run"), outcome(reference)), job
        shutil.rmtree(cwd)
    return sum(first == -signal.SIGKILL for first, _ in codes)


def test_killed_at_any_of_20_moments_a_run_ends_as_if_it_had_not_been(servers, tmp_path):
    seconds = []
    for name in ("reference", "second"):
        (tmp_path / name).mkdir()
        done = servers(tmp_path / name, BRIEF)
        assert done["code"] == 0, (tmp_path / name / "console.txt").read_text()
        seconds.append(done["seconds"])
    reference, draw = tmp_path / "reference/run", random.Random(0)
    assert not difference(outcome(tmp_path / "second/run"), outcome(reference))
    assert all(line["frac_reward_zero_std"] < 1 for line in steps(reference))
    jobs = [{"moment": (n + draw.random()) / 20 * min(seconds)} for n in range(20)]
    assert all_equal(servers, tmp_path, BRIEF, reference, jobs) >= 10       # else they came too late


def test_killed_in_the_middle_of_any_write_a_run_ends_as_if_it_had_not_been(servers, tmp_path):
    """Moments seldom meet a write, which takes a millisecond; so each write is met on purpose."""
    flags = BRIEF | {"base_steps": 3, "max_steps": 2, "save_steps": 1, "num_prompts": 2}
    (tmp_path / "reference").mkdir()
    assert servers(tmp_path / "reference", flags)["code"] == 0
    writes = int((tmp_path / "reference/writes.json").read_text())
    assert writes >= 25
    jobs = [{"write": number} for number in range(writes)]
    assert all_equal(servers, tmp_path, flags, tmp_path / "reference/run", jobs) == writes


@every_script
def test_killed_or_interrupted_a_run_of_any_script_ends_as_if_it_had_not_been(
        script, servers, tmp_path, work, whole):
    flags = SMALL | {"output_dir": "run"}
    for name in ("reference", "0", "1", "2", "3"):
        shutil.copytree(work / "runs/base", tmp_path / name / "runs/base")
    assert servers(tmp_path / "reference", flags, script=script.__name__)["code"] == 0
    assert not difference(outcome(tmp_path / "reference/run"), outcome(whole))    # in another process
    writes = int((tmp_path / "reference/writes.json").read_text())
    stops = ((40, signal.SIGKILL), (60, signal.SIGKILL), (80, signal.SIGKILL), (50, signal.SIGINT))
    jobs = [{"write": writes * share // 100, "signal": number, "script": script.__name__}
            for share, number in stops]
    assert all_equal(servers, tmp_path, flags, whole, jobs) == 3


# ---- flags ------------------------------------------------------------------------------------------------

# What a flag changes in the logs, the weights or the summary. Those of the base are above, those of a step in
# test_gradient.py, and those elsewhere change nothing of this or are not for every run.
ACTS = {"max_steps": 2, "stop_at": 0.0, "eval_steps": 1, "num_eval_problems": 7, "num_eval_samples": 3,
        "task": "lookup", "reward": "accuracy+format", "curriculum": "yes", "mask_tool_tokens": "no"}
NEEDS = {"task": {"operands": 5}, "curriculum": {"operands": "2-3"},       # to have something to act on
         "mask_tool_tokens": {"task": "lookup", "operands": 5}}
ELSEWHERE = {"device", "num_threads", "output_dir", "save_steps", "micro_batch_size", "init_from",
             "cold_start", "resume_from_checkpoint", "prompt", "kernel", "fused_linear", "numbers", "slip"}


@pytest.mark.parametrize("name", ACTS)
def test_each_flag_of_a_run_changes_what_it_does(train, name):
    plain = {"max_steps": 3} | NEEDS.get(name, {})
    logs = [{path: x for path, x in outcome(train(**flags)).items() if not path.startswith("/config")}
            for flags in (plain, plain | {name: ACTS[name]})]
    assert difference(*logs)


@every_script
def test_every_flag_has_a_test_that_shows_what_it_does(script):
    covered = ACTS.keys() | SHAPES_A_BASE.keys() | test_gradient.KNOBS[script.__name__].keys() | ELSEWHERE
    assert covered == {field.name for field in dataclasses.fields(script.Config)}


def test_the_thread_count_is_set_and_kept_with_the_run(train):
    folder = train(max_steps=1, num_threads=3, base_steps=0)
    try:
        assert torch.get_num_threads() == 3
        torch.set_num_threads(1)
        resume(folder, max_steps=2)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)
