"""A script that was copied out, with common.py alone: it runs the main job, goes on after a kill,
and refuses what needs a folder that is not there."""
import json
import re
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPTS, every_script
from small_runs import INSTANT, arguments, changed_weights, contents, lines, load, policy_of


def copy(*names):
    """Copy these files of the repository to the working directory."""
    for name in names:
        shutil.copy(ROOT / name, name)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch, restored_ctrl_c):
    """Every test is in an empty folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, warm_python):
    """alone(script): the folder that held the script and common.py, where it was run for two
    steps."""
    # packages of the names of our folders, as PyPI has them
    others = tmp_path_factory.mktemp("others")
    for package in ("kernels", "tasks", "tools"):
        (others / package).mkdir()
        (others / package / "__init__.py").write_text("raise OSError('imported')")

    folder = tmp_path_factory.mktemp("alone")

    def run(script):
        name = script.__name__
        own = folder / name
        if not own.exists():
            own.mkdir()
            for path in (f"{name}.py", "common.py"):
                shutil.copy(ROOT / path, own)
            done = warm_python.run(f"{name}.py", *arguments(INSTANT | {"max_steps": 2}), cwd=own,
                                   env={"PYTHONPATH": str(others)})
            assert (done.returncode, done.stderr) == (0, ""), done.stderr
            (folder / f"{name}.txt").write_text(done.stdout)
        return own
    return run


@every_script
def test_a_script_and_common_alone_in_a_folder_train(script, alone):
    folder = alone(script)
    run = f"runs/{script.__name__}-arithmetic-s0"
    said = folder.with_suffix(".txt").read_text().splitlines()
    assert said[0].endswith(f"run folder {run}")
    assert said[-1] == f"2 steps, folder {run}"
    assert len([line for line in said if re.match(r"[12] [-\d]", line)]) == 2
    assert json.loads((folder / run / "summary.json").read_text())["steps"] == 2
    assert {path.name for path in (folder / run).iterdir()} == {
        "config.json", "metrics.jsonl", "samples.jsonl", "greedy.jsonl", "evaluation.jsonl",
        "summary.json", "checkpoint.pt", "base.pt", f"{script.__name__}.py"}
    assert {path.name for path in folder.iterdir()} == {
        f"{script.__name__}.py", "common.py", "runs"}
    assert {path.stem for path in folder.parent.iterdir()} <= set(SCRIPTS)


def test_a_script_alone_that_is_killed_goes_on_and_ends_as_it_does_in_the_repository(
        script, warm_python):
    copy("grpo.py", "common.py")
    flags = INSTANT | {"base_steps": 20, "entropy_coef": 0.1, "save_steps": 3, "stop_at": 2}
    running = warm_python.start(
        "grpo.py", *arguments(flags | {"output_dir": "killed", "max_steps": 500}))
    assert any(re.match("5 ", line) for line in running.stdout)
    running.end()
    killed = Path("killed")
    whole = Path("whole")
    assert not (killed / "summary.json").exists()
    num_steps = load(killed / "checkpoint.pt")["state"]["steps"] + 2
    done = warm_python.run(
        "grpo.py", "--resume_from_checkpoint", "killed", "--max_steps", num_steps)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr

    summary = script.main(arguments(flags | {"output_dir": "whole", "max_steps": num_steps}))
    alone = json.loads((killed / "summary.json").read_text())
    assert alone["steps"] == num_steps
    assert alone["base"] == summary["base"] and alone["trained"] == summary["trained"]
    assert not changed_weights(load(killed / "base.pt"), load(whole / "base.pt"))
    assert not changed_weights(policy_of(killed), policy_of(whole))
    assert changed_weights(policy_of(whole), load(whole / "base.pt"))       # it has learned
    assert [line["loss"] for line in lines(killed / "metrics.jsonl")] == [
        line["loss"] for line in lines(whole / "metrics.jsonl")]


def test_a_script_with_tasks_but_without_tools_runs_a_task_that_rewards_each_move(
        warm_python):
    copy("reinforce.py", "common.py")
    shutil.copytree(ROOT / "tasks", "tasks")
    flags = INSTANT | {"task": "gridworld", "operands": "5", "base_steps": 2}
    done = warm_python.run("reinforce.py", *arguments(flags))
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    [path] = Path().glob("runs/*/summary.json")
    assert {"return", "best_return"} <= json.loads(path.read_text())["trained"].keys()


# What is refused, and what the line says of it.
REFUSED = {
    "--task lookup": "tasks/lookup.py",
    "--task arithmetic,lookup": "tasks/lookup.py",
    "--task arithmetic,arithmetic": "there is no",
    "--reward format": "there is no",
    "--curriculum": "there is no",
    "--curriculum true": "there is no",
    "--mask_tool_tokens false": "no tools",
    "--numbers 3": "not for arithmetic",
    "--slip 0.5": "not for arithmetic",
    # taken instead of refused, it trains; not for long
    "--kernel triton --base_steps 1 --max_steps 1 --num_eval_problems 4": "there is no",
    "--kl_estimator k2": "nothing without --beta",
    "--cold_start 3": "nothing without --init_from",
    "--entropy_decay_steps 3": "nothing without --entropy_coef",
    "--epsilon 0.2 --loss_type cispo": "nothing with --loss_type cispo",
    "--epsilon_high 0.2 --loss_type sapo": "nothing with --loss_type sapo",
    "--base_steps 3 --init_from run": "nothing with --init_from run",
    "--textbook_share 0.1 --init_from run": "nothing with --init_from run",
    "--overlong_buffer 100": "longer",
    "--init_from run": "run/checkpoint.pt holds no policy",
    "--resume_from_checkpoint run": "no run of grpo.py"}
REFUSED_BY_PPO = {
    "--target_kl 0.1 --trust_region trpo": "nothing without --trust_region clip|penalty",
    "--epsilon 0.2 --trust_region penalty": "nothing without --trust_region clip",
    "--learning_rate 0.1 --trust_region trpo": "nothing with --trust_region trpo",
    "--lam 0.5 --length_adaptive": "nothing with --length_adaptive",
    "--critic_lam -1": "at least 0",
    "--reward model": "there is no"}
REFUSED_BY_REINFORCE = {
    "--reward accuracy --method rejection": "nothing with --method rejection",
    "--entropy_decay_steps 3": "nothing without --entropy_coef"}
MAIN_WITH_EACH = """
import importlib, sys
script = importlib.import_module(sys.argv[1])
for argv in sys.argv[2:]:
    try:
        script.main(argv.split())
    except SystemExit as stop:
        print(stop.code)
"""


@pytest.mark.parametrize("script, refused", [
    ("grpo", REFUSED), ("ppo", REFUSED_BY_PPO), ("reinforce", REFUSED_BY_REINFORCE)],
    indirect=["script"])
def test_a_script_alone_refuses_what_needs_a_folder_that_is_not_there_and_what_would_do_nothing(
        script, refused, alone, warm_python):
    folder = alone(script)
    before = contents(folder)
    done = warm_python.run("-c", MAIN_WITH_EACH, script.__name__, *refused, cwd=folder)
    assert done.stdout.split() == ["2"] * len(refused)
    errors = done.stderr.splitlines()
    assert len(errors) == len(refused)
    for error, (flags, words) in zip(errors, refused.items()):
        name = flags.split()[0]
        assert error.startswith(f"error: {name}") and words in error, error
        if words == "there is no" and "," not in flags:
            missing = "kernels" if "kernel" in flags else "tasks"
            assert error.endswith(f"there is no {folder / missing}")
    assert contents(folder) == before
