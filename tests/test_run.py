"""What a run leaves in its folder, who looks at it, and what the flags of a run do."""
import dataclasses
import functools
import importlib
import json
import math
import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT, every_script
from small_runs import (
    INSTANT,
    SMALL,
    arguments,
    changed_weights,
    contents,
    load,
    policy_of,
    read_summary,
    steps,
)

import tasks
from report import observers

pytestmark = pytest.mark.usefixtures("at_work_folder")

# ---- the folder ------------------------------------------------------------------------------

@pytest.mark.quick
@every_script
def test_main_returns_the_summary(script, tmp_path):
    summary = script.main(arguments(INSTANT | {"output_dir": tmp_path / "run"}))
    assert summary == read_summary(tmp_path / "run")
    assert summary["steps"] == 1


@every_script
def test_a_run_folder_says_how_the_run_was_made_and_what_came_of_it(script, whole):
    name = f"{script.__name__}.py"
    assert {path.name for path in whole.iterdir()} == {
        "config.json", "metrics.jsonl", "samples.jsonl", "greedy.jsonl", "evaluation.jsonl",
        "summary.json", "checkpoint.pt", "base.pt", name}
    assert (whole / name).read_bytes() == (ROOT / name).read_bytes()
    saved = json.loads((whole / "config.json").read_text())
    assert (saved["script"], saved["torch"]) == (name, torch.__version__)
    assert saved["config"] == dataclasses.asdict(script.Config()) | SMALL | {
        "output_dir": str(whole)}
    summary = read_summary(whole)
    assert summary.keys() >= {"base", "trained", "steps", "seconds_warm_start", "seconds_total"}
    for scores in (summary["base"], summary["trained"]):
        assert scores.keys() >= {"greedy", "pass@1", "pass@2", "maj@2", "mean_length",
                                 "think_share"}
    assert 0 < summary["seconds_warm_start"] < summary["seconds_total"]


@every_script
def test_the_metrics_have_one_line_a_step_in_the_words_of_trl_with_its_evaluation(script, whole):
    assert [line["step"] for line in steps(whole)] == list(range(1, 11))
    for line in steps(whole):
        assert line.keys() >= {"loss", "reward", "accuracy", "entropy", "grad_norm"}
        assert all(math.isfinite(value) for value in line.values())
        assert line.get("sampling/sampling_logp_difference/max", 0) < 1e-4
    evaluations = [line for line in steps(whole) if "eval/greedy" in line]
    assert [line["step"] for line in evaluations] == [2, 4, 6, 8, 10]
    assert evaluations[-1]["eval/greedy"] == read_summary(whole)["trained"]["greedy"]


def test_default_folders_are_numbered_when_taken(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(3):
        script.main(arguments(INSTANT | {"max_steps": 0}))
    first = "grpo-arithmetic-s0"
    assert {path.name for path in Path("runs").iterdir()} == {
        "base", first, f"{first}-2", f"{first}-3"}
    before = contents()
    with pytest.raises(SystemExit) as stop:
        script.main(arguments(INSTANT | {"output_dir": f"runs/{first}"}))
    assert stop.value.code == 2 and contents() == before


@every_script
def test_no_steps_make_and_evaluate_the_base_only(new_run, whole, capsys):
    folder = new_run(max_steps=0)
    out = capsys.readouterr().out
    assert (out.count("base:"), out.count("held out:")) == (1, 0)
    summary = read_summary(folder)
    assert summary["trained"] == summary["base"] == read_summary(whole)["base"]
    assert not changed_weights(policy_of(folder), load(folder / "base.pt")["policy"])


def test_init_from_begins_with_the_policy_of_the_other_run(
        script, whole, new_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = new_run(init_from=whole, max_steps=0)
    assert not changed_weights(load(folder / "base.pt"), {"policy": policy_of(whole)})
    assert read_summary(folder)["base"] == read_summary(whole)["trained"]
    assert not Path("runs/base").exists()           # no base of the shared ones is made of it


@every_script
def test_a_run_stops_when_five_batches_in_a_row_are_accurate_enough(new_run, monkeypatch):
    judge = tasks.Task.judge

    def fixed(task, batch, G, step):
        judge(task, batch, G, step)
        if isinstance(step, int):                   # a batch to train on
            batch.is_correct = torch.full(batch.rewards.shape, float(next(rates)))
        return batch
    monkeypatch.setattr(tasks.Task, "judge", fixed)
    rates = iter([0.8, 0.8, 0.95, 1, 1, 1, 1, 1, 1, 1])
    assert len(steps(new_run(stop_at=0.98))) == 7   # .99 on average, from the third to the seventh
    rates = iter([1] * 10)
    assert len(steps(new_run(stop_at=2))) == 10
    rates = iter([1] * 10)
    assert len(steps(new_run(stop_at=0))) == 5


def test_a_metric_that_a_step_does_not_have_is_an_empty_cell(new_run, capsys):
    new_run(max_steps=1, loss_type="cispo")             # which has no clip range
    lines = capsys.readouterr().out.splitlines()
    [row] = [number for number, line in enumerate(lines) if line.startswith(" step")]
    end = lines[row].index("clip") + len("clip")
    assert lines[row + 1][end - 9:end].strip() == "" and "nan" not in lines[row + 1]
    assert float(lines[row + 1].split()[-1]) > 0


# ---- who looks at a run ----------------------------------------------------------------------

def test_observers_are_called_in_order_and_may_add_metrics(new_run, monkeypatch):
    calls = []

    class Witness:
        def start(self, run):
            calls.append(("start", run.folder.name, run.step))

        def evaluate(self, run, scores):
            calls.append(("evaluate", sorted(scores)[0], run.step))

        def step(self, run, batch, advantages, metrics):
            metrics["mine"] = advantages.sum().item() * 0 + len(batch.texts)
            calls.append(("step", metrics["step_time"] > 0, run.step))

        def finish(self, run, summary):
            calls.append(("finish", summary["steps"], run.step))
    monkeypatch.setattr(observers, "observers", lambda cfg: [Witness()])
    folder = new_run(max_steps=3)
    assert [(name, step) for name, _, step in calls] == [
        ("start", 0), ("evaluate", 0), ("step", 1), ("step", 2), ("evaluate", 2), ("step", 3),
        ("evaluate", 3), ("finish", 3)]
    assert [line["mine"] for line in steps(folder)] == [32, 32, 32]


# ---- each flag does something ----------------------------------------------------------------

# What has to change the weights after two steps, in which scripts; behind a / what it needs.
CHANGES = {
    "grpo": "--seed=1 --base_seed=1 --num_prompts=3 --num_generations=6 --task=arithmetic:3 "
            "--max_completion_length=5 --reward=growing_length --curriculum/--task=arithmetic:2-3 "
            "--base_steps=2 --textbook_share=0/--base_steps=2 --base_learning_rate=0.01/"
            "--base_steps=2 --base_batch_size=8/--base_steps=2 --hidden_size=8 "
            "--num_hidden_layers=2 --num_attention_heads=1 --intermediate_size=8 "
            "--num_key_value_heads=2 --epsilon=0.01 --epsilon_high=0.01 --delta=1.3",
    "gspo": "--epsilon=0.5 --epsilon_high=0.5 --delta=1.001/--epsilon_high=4e-4",
    "reinforce ppo grpo gspo dpo":
        "--temperature=0.7 --num_mini_batches=2 --num_iterations=2 --max_grad_norm=0.01 "
        "--learning_rate=0.1",
    "reinforce ppo grpo gspo": "--beta=0.5 --entropy_coef=0.1",
    "grpo gspo": "--loss_type=dr_grpo --loss_type=dapo --loss_type=cispo --loss_type=sapo "
                 "--scale_rewards=batch --scale_rewards=none --scale_rewards=mean "
                 "--kl_estimator=k1/--beta=0.5 --kl_estimator=k2/--beta=0.5 "
                 "--kl_estimator=k3_ratio/--beta=0.5 --dynamic_sampling=2/--num_generations=2 "
                 "--overlong_buffer=7 --mask_truncated_completions",
    "reinforce": "--baseline=mean --baseline=rloo --baseline=batch --baseline=optimal "
                 "--view=token/--gamma=0.9 --gamma=0.9 --method=rejection",
    "ppo": "--gamma=0.9 --lam=0.5 --critic_lam=0.5 --length_adaptive --alpha=3/--length_adaptive "
           "--trust_region=penalty --epsilon=0.01 --epsilon_high=0.01 --cliprange_value=0.001 "
           "--critic_learning_rate=0.1 --penalty_coef=3/--trust_region=penalty --nll_coef=0.5 "
           "--target_kl=0.000001 --critic_pretrain_steps=1 --kl_target=0.000001/--beta=0.5",
    "dpo": "--beta=0.5 --loss_type=ipo --loss_type=hinge --loss_type=simpo --label_smoothing=0.1 "
           "--label_smoothing=0.2/--loss_type=robust --simpo_gamma=0.1/--loss_type=simpo "
           "--average_logps --nll_coef=0.1 --online"}
CASES = [(name, change) for names, changes in CHANGES.items() for change in changes.split()
         for name in names.split()]
# What changes other things, or needs files or tools, and a level that is only for functions: where
# A is one a row, both have the same gradient.
ELSEWHERE = {"max_steps", "stop_at", "device", "kernel", "output_dir", "save_steps",
             "resume_from_checkpoint", "init_from", "eval_steps", "num_eval_problems",
             "num_eval_samples", "micro_batch_size", "teacher", "pairs",
             "save_pairs", "importance_sampling_level", "report_to"}
TWO_STEPS = INSTANT | {"max_steps": 2, "eval_steps": 9, "num_eval_problems": 1, "stop_at": 2,
                       "num_prompts": 4, "num_generations": 4, "max_completion_length": 8,
                       "learning_rate": 0.02, "num_iterations": 3}


@pytest.fixture(scope="module")
def weights_of(tmp_path_factory):
    """weights_of(script, words): the policy after two steps with more flags, made once. Half of all
    texts are right."""
    known = {}

    def find(name, *words):
        if (name, words) not in known:
            script = importlib.import_module(name)
            folder = tmp_path_factory.mktemp("flags") / "run"
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(script, "verify", functools.wraps(script.verify)(
                    lambda problem, text: float(len(text) % 2)))
                script.main([*arguments(TWO_STEPS | {"output_dir": folder}), *words])
            known[name, words] = policy_of(folder)
        return known[name, words]
    return find


@pytest.mark.parametrize("name, change", CASES)
def test_a_flag_changes_what_is_learned(weights_of, name, change):
    flag, _, needs = change.partition("/")
    plain = weights_of(name, *needs.split())
    assert changed_weights(weights_of(name, *needs.split(), flag), plain)


@every_script
def test_the_table_of_changes_is_complete(script):
    shown = {re.match(r"--(?:no-)?(\w+)", change)[1] for name, change in CASES
             if name in ("grpo", script.__name__)}
    assert shown | ELSEWHERE >= {field.name for field in dataclasses.fields(script.Config)}
