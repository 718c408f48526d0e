"""The command line: its flags, and the flags and files that it refuses. A refusal is one line that
gives the reason, exit code 2, and no change to any file."""
import dataclasses
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, every_script
from small_runs import INSTANT, SMALL, arguments, changed_weights, lines, policy_of, steps

import common
import grpo
import plumbing
from vectors.edits import replace_once


@pytest.fixture(autouse=True)
def empty_folder(own_folder, monkeypatch):
    """Run every test in an empty folder, as if on a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return own_folder


# ---- flags, and those that are refused -------------------------------------------------------

def test_a_flag_is_spelled_with_hyphens_or_underscores(script):
    flags = dataclasses.asdict(script.Config(num_prompts=7, curriculum=True, kernel="torch"))
    words = arguments({name: value for name, value in flags.items() if value != ""})
    for spelling in (words, [word.replace("_", "-") for word in words]):
        assert dataclasses.asdict(plumbing.parse_flags(script.Config, spelling)) == flags
    cfg = plumbing.parse_flags(script.Config, ["--no-curriculum", "--output-dir=a_b-c"])
    assert (cfg.curriculum, cfg.output_dir) == (False, "a_b-c")


@every_script
def test_a_number_that_cannot_work_is_refused(script):
    for field in dataclasses.fields(script.Config):
        may_be_zero = field.default == 0 or field.name in script.Config.MAY_BE_ZERO
        values = [-1, float("nan"), float("inf")] if field.type in (int, float) else []
        if field.type is int and not may_be_zero:
            values.append(0)
        for value in values:
            rules = script.Config(**{field.name: value}).rules()
            said = next(message for holds, message in rules if not holds)
            assert said.startswith(f"--{field.name} {value}")


REFUSED = """
    grpo --learning_rat 1                               | --learning_rat
    grpo --num_generations 1                            | at least 2 completions
    grpo --hidden_size 30                               | multiple of 4
    grpo --device cuda                                  | cannot use it
    grpo --kernel triton                                | use torch
    grpo --delta 1.28                                   | above 1 + epsilon_high
    grpo --scale_rewards mean --overlong_buffer 3       | 0/1 rewards
    grpo --output_dir full                              | File exists
    grpo --output_dir weights                           | File exists
    grpo --output_dir file/run                          | cannot be made
    grpo --init_from nowhere                            | nowhere
    ppo --lam 0.5 --length_adaptive                     | --length_adaptive
    ppo --cliprange_value 0                             | must be above 0
    ppo --trust_region penalty --penalty_coef 0         | must be above 0
    grpo --reward points+model                          | choose one of model, points, majority
    grpo --reward majority --task arithmetic,gridworld  | completions of gridworld have no <answer>
    grpo --reward majority --task number                | completions of number have no <answer>
    grpo --reward points --task gridworld               | rewards each move
    grpo --reward accuracy+points --task arithmetic,gridworld | rewards each move
    reinforce --method rejection --baseline rloo        | --baseline rloo
    reinforce --method rejection --view token           | --view token
    grpo --kl_estimator k3_ratio                        | needs --beta
    grpo --overlong_buffer 49                           | above --max_completion_length
    grpo --learning_rate 1e38                           | below 1e30
    grpo --loss_type cispo --delta 3                    | --delta: has no effect
    grpo --loss_type sapo --epsilon_high 0.1            | --epsilon_high: has no effect
    gspo --loss_type cispo --importance_sampling_level sequence_token | --loss_type cispo
    ppo --trust_region penalty --epsilon 0.1            | --epsilon: has no effect
    ppo --target_kl 0.1 --num_mini_batches 1            | --num_iterations
    dpo --loss_type ipo --label_smoothing 0.1           | ipo
    dpo --label_smoothing 0.5                           | below 0.5
    dpo --loss_type simpo --average_logps               | always averages
    examples.lag --importance_sampling_cap 3            | --importance_sampling_correction
    examples.lag --method gspo --loss_type sapo --epsilon 0.2       | --epsilon: has no effect
    examples.trpo --learning_rate 0.1                   | does not use it
    examples.lag --importance_sampling_correction mask --sampler_lag 0 | --importance_sampling_c
    examples.lag --importance_sampling_correction mask --importance_sampling_clip_min 2 | _cap
    examples.distill --distillation_mode topk_logits --distillation_topk 320 | 320
    examples.distill --distillation_mode sampled_token --beta 0.5   | --beta 1
    examples.distill --teacher_coef 0.5                             | sampled_token
    examples.distill --baseline mean                                | without --teacher_coef
    examples.distill --hint sibling                                 | without --teacher self
    examples.distill --teacher self --teacher_update_rate 0.1       | ema
    examples.distill --teacher self --lmbda 0.5                     | --lmbda 1
    examples.distill --teacher self                                 | --task key
    examples.turns --adv_estimator reward_to_go --step_advantage_w 0 | --step_advantage_w
    examples.zoo --loss_type gmpo --gmpo_epsilon 0      | must be above 0
    examples.zoo --advantage remax --overlong_buffer 4  | --overlong_buffer
    grpo --temperature 0.0009                           | to explore
    grpo --num_key_value_heads 3                        | must divide
    ppo --alpha 0.5                                     | --length_adaptive
    ppo --kl_target 0.1                                 | --beta
    ppo --penalty_coef 2                                | --trust_region penalty
    dpo --beta 0                                        | above 0
    dpo --simpo_gamma 1                                 | --loss_type simpo
    examples.lag --importance_sampling_level sequence_token         | --method gspo
    examples.turns --task number,countdown              | has no turns
    examples.zoo --epsilon 0.1                          | works with --loss_type grpo, not
    examples.zoo --advantage passk --scale_rewards none | --advantage group
    examples.zoo --advantage gdpo                       | several rewards
    examples.zoo --advantage remax --reward majority    | its one greedy output
    examples.zoo --advantage rpp --dynamic_sampling 1   | --dynamic_sampling
    engines.here --loss_type dapo                       | --loss_type: belongs to grpo.py's own
    grpo --resume_from_checkpoint run --seed 7          | --seed 7: the run has 0
    grpo --resume_from_checkpoint run --init_from run   | --init_from run
    gspo --resume_from_checkpoint run                   | a run of grpo.py
    grpo --init_from run --hidden_size 32               | of this shape"""


@pytest.mark.parametrize("line", [line.strip() for line in REFUSED.split("\n") if line])
def test_what_cannot_work_is_refused(refused, line, request):
    command, words = line.split("|")
    script, *argv = shlex.split(command)
    Path("file").write_text("")
    Path("full").mkdir()
    Path("full/thesis.txt").write_text("irreplaceable")
    Path("weights").mkdir()
    Path("weights/checkpoint.pt").write_text("whose logs were moved away")
    if "run" in argv:
        request.getfixturevalue("run")                  # that of grpo.py
    small = {} if {"--init_from", "--resume_from_checkpoint"} & {*argv} else INSTANT
    refused(words.strip(), importlib.import_module(script).main, [*arguments(small), *argv])


# ---- damaged files ---------------------------------------------------------------------------

@pytest.mark.parametrize("old, new", [
    ("}", ""), ('"script"', '"trainer"'), ("arithmetic:2", "chess"),
    ('"temperature": 1.0', '"temperature": -1.0')])
def test_a_damaged_config_is_refused(refused, run, old, new):
    path = run / "config.json"
    path.write_text(path.read_text().replace(old, new))
    refused("", grpo.main, ["--resume_from_checkpoint", "run"])


class Trap:
    """An object whose pickle runs code when it is loaded."""

    def __reduce__(self):
        return Path.touch, (Path("trapped"),)


DAMAGES = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:path.stat().st_size // 2]),
    "a checkpoint with code": lambda path: torch.save({"policy": {}, "state": Trap()}, path),
    "something else": lambda path: torch.save({"epoch": torch.ones(3)}, path),
    "another model": lambda path: torch.save({"policy": {"embed.weight": torch.ones(2)}}, path)}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("flag, name", [
    ("--init_from", "checkpoint.pt"), ("--resume_from_checkpoint", "checkpoint.pt"),
    ("--resume_from_checkpoint", "base.pt")])
def test_damaged_weights_are_refused_and_no_code_in_them_runs(refused, run, flag, name, damage):
    DAMAGES[damage](run / name)
    refused(f"run/{name}", grpo.main, [flag, "run"])


# ---- an edited copy of a script --------------------------------------------------------------

@pytest.fixture
def edited(import_text):
    """edited(old, new): imports a copy of grpo.py with one edit. -> its main"""
    source = (ROOT / "grpo.py").read_text("utf-8")
    return lambda old, new: import_text(replace_once(source, old, new)).main


def test_a_verify_that_returns_anything_but_right_or_wrong_ends_the_run_in_a_line(edited, stops):
    main = edited("    return float(is_one and", "    return 0.1 + float(is_one and")
    error = stops("function reward, which is next", main, arguments(INSTANT))
    assert re.match(r"error: verify returned (0|1)\.1: ", error)
    assert not Path("runs").exists()                # no base was made before


def test_an_edited_reward_is_learned_from_and_changes_no_score(edited):
    page = (ROOT / "docs/extending.md").read_text()
    removed, added = re.search(r"^-(.* given)\n\+(.*)$", page, re.M).groups()
    flags = SMALL | {"max_steps": 2, "eval_steps": 1}
    mine = edited(removed, added)(arguments(flags | {"output_dir": "mine"}))
    main = edited("    return float(is_one and", "    return bool(is_one and")
    plain = main(arguments(flags | {"output_dir": "plain"}))            # True is right, too
    for record in lines("mine/samples.jsonl"):
        for completion in record["completions"]:
            problem = common.Problem(record["prompt"], record["answer"])
            right = grpo.verify(problem, completion["text"])
            thinks = "<think>" in completion["text"]
            assert completion["reward"] == pytest.approx(right + 0.1 * thinks)
    assert steps("mine")[0]["reward"] > steps("mine")[0]["accuracy"] == steps("plain")[0]["reward"]
    assert mine["base"] == plain["base"]


# ---- scripts alone in a folder ---------------------------------------------------------------

ALONE = """
import contextlib, importlib
for name in {scripts}:
    main = importlib.import_module(name).main
    main([*{flags}, "--output_dir", name])
    main(["--resume_from_checkpoint", name, "--max_steps", "2"])
for words in {refused}:
    with contextlib.suppress(SystemExit):
        main(words.split())
"""


def test_three_files_alone_in_a_folder_run_and_resume_as_in_the_repository(empty_folder):
    """They refuse flags that need a missing folder. They must not import packages from elsewhere
    that have the names of our folders; PyPI has such packages."""
    others = empty_folder / "others"
    for name in ("kernels", "tasks", "report"):
        (others / name).mkdir(parents=True)
        (others / name / "__init__.py").write_text("raise OSError('imported')")
    own = empty_folder / "own"
    for name in ("report", "kernels"):                  # of the user
        (own / name).mkdir(parents=True)
    for name in ("report/__init__.py", "report/observers.py", "kernels/decode.py"):
        (own / name).touch()
    scripts = ("ppo", "grpo")
    for name in (*scripts, "common", "plumbing"):
        shutil.copy(ROOT / f"{name}.py", own)
    flags = arguments(INSTANT | {"task": "arithmetic"})
    refused = ["--task countdown", "--reward accuracy+format", "--curriculum", "--kernel triton",
               "--report_to wandb"]
    program = ALONE.format(scripts=scripts, flags=flags, refused=refused)
    done = subprocess.run([sys.executable, "-c", program], cwd=own, text=True, capture_output=True,
                          env=os.environ | {"PYTHONPATH": str(others)})
    error = done.stderr
    assert done.returncode == 0, error
    assert error.count("error: --") == error.count("\n") == len(refused), error
    for name in scripts:
        importlib.import_module(name).main([*flags, "--output_dir", name, "--max_steps", "2"])
        assert not changed_weights(policy_of(own / name), policy_of(name))
