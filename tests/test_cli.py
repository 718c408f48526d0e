"""The command line: its flags, and the flags and files that it refuses. A refusal is one line that
gives the reason, exit code 2, and no change to any file."""
import contextlib
import dataclasses
import importlib
import importlib.util
import io
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, every_script
from small_runs import INSTANT, SMALL, arguments, changed_weights, lines, policy_of, steps

import common
import grpo
import plumbing
from vectors.edits import replace_once


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Run every test in an empty folder, as if on a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
            rules = plumbing.rules(script.Config(**{field.name: value}))
            said = next(message for holds, message in rules if not holds)
            assert said.startswith(f"--{field.name} {value}")


REFUSED = """
    grpo --learning_rat 1                               | --learning_rat
    grpo --output_dir=                                  | empty value
    grpo --num_generations 1                            | at least 2 completions
    grpo --hidden_size 30                               | multiple of 4
    grpo --textbook_share 1.001                         | above 1
    grpo --device cuda                                  | cannot use it
    grpo --kernel triton                                | use torch
    grpo --delta 1.28                                   | above 1 + epsilon_high
    grpo --scale_rewards mean --overlong_buffer 3       | 0/1 rewards
    grpo --output_dir full                              | not empty
    grpo --output_dir run                               | not empty
    grpo --output_dir file/run                          | cannot be written
    grpo --init_from nowhere                            | nowhere
    ppo --lam 0.5 --length_adaptive                     | --length_adaptive
    ppo --cliprange_value 0                             | must be above 0
    ppo --trust_region penalty --penalty_coef 0         | must be above 0
    grpo --reward points+model                          | choose model or points
    grpo --reward points --task gridworld               | rewards each move
    grpo --reward accuracy+points --task arithmetic,gridworld | rewards each move
    reinforce --method rejection --baseline rloo        | --baseline rloo
    reinforce --method rejection --view token           | --view token
    grpo --kl_estimator k3_ratio                        | needs --beta
    grpo --overlong_buffer 49                           | above --max_completion_length
    grpo --learning_rate 1e38                           | below 1e30
    grpo --loss_type cispo --delta 3                    | --delta: has no effect
    grpo --loss_type sapo --epsilon_high 0.1            | --epsilon_high: has no effect
    gspo --kl_estimator k1                              | needs --beta
    gspo --loss_type sapo --epsilon 0.2                 | --epsilon: has no effect
    gspo --loss_type cispo --importance_sampling_level sequence_token | --loss_type cispo
    ppo --trust_region penalty --epsilon 0.1            | --epsilon: has no effect
    ppo --trust_region penalty --epsilon_high 0.28      | --epsilon_high: has no effect
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
    examples.turns --gamma 1.1                          | --gamma
    examples.turns --adv_estimator reward_to_go --step_advantage_w 0 | --step_advantage_w
    examples.zoo --loss_type gmpo --gmpo_epsilon 0      | must be above 0
    examples.zoo --advantage remax --overlong_buffer 4  | --overlong_buffer
    grpo --temperature 0.0009                           | to explore
    grpo --num_key_value_heads 3                        | must divide
    ppo --gamma 1.1                                     | at most 1
    ppo --alpha 0.5                                     | --length_adaptive
    ppo --kl_target 0.1                                 | --beta
    ppo --penalty_coef 2                                | --trust_region penalty
    reinforce --gamma 1.1                               | at most 1
    dpo --beta 0                                        | above 0
    dpo --simpo_gamma 1                                 | --loss_type simpo
    examples.lag --importance_sampling_level sequence_token         | --method gspo
    examples.distill --beta 1.1                         | at most 1
    examples.distill --lmbda 1.1                        | at most 1
    examples.distill --gamma 0.5                        | sampled_token
    examples.trpo --max_kl 0                            | above 0
    examples.turns --task number,countdown              | has no turns
    examples.turns --task countdown                     | has no turns
    examples.zoo --gmpo_epsilon 0.3                     | --loss_type gmpo
    examples.zoo --epsilon 0.1                          | works with --loss_type grpo, not
    examples.zoo --top_entropy_quantile 0               | above 0
    examples.zoo --advantage passk --scale_rewards none | --advantage group
    examples.zoo --advantage gdpo                       | several rewards
    examples.zoo --advantage rpp --dynamic_sampling 1   | --dynamic_sampling
    engines.here --loss_type dapo                       | --loss_type: belongs to grpo.py's own
    engines.here --delta 2                              | --delta: belongs to grpo.py's own loss
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
    if "run" in argv:
        request.getfixturevalue("run")                  # that of grpo.py
    small = {} if {"--init_from", "--resume_from_checkpoint"} & {*argv} else INSTANT
    refused(words.strip(), importlib.import_module(script).main, [*arguments(small), *argv])


# The numbers and switches of each script that its parent does not have.
DEFAULTS = """
    common: hidden_size=64 num_hidden_layers=2 num_attention_heads=4 num_key_value_heads=1
      intermediate_size=176 base_seed=0 base_steps=900 base_batch_size=32 textbook_share=0.6
      base_learning_rate=0.004 curriculum=False max_steps=60 seed=0 save_steps=1 eval_steps=10
      num_eval_problems=512 num_eval_samples=8 num_generations=8 num_prompts=32
      max_completion_length=48 temperature=1.0 learning_rate=0.0005 max_grad_norm=1.0
      num_mini_batches=2 micro_batch_size=32
    reinforce common: gamma=1.0 num_iterations=1 beta=0.0 entropy_coef=0.0
    ppo common: gamma=1.0 lam=0.95 critic_lam=0.95 epsilon=0.2 epsilon_high=0.2 cliprange_value=0.2
      num_iterations=1 critic_learning_rate=0.002 entropy_coef=0.0 beta=0.0 kl_target=0.0
      target_kl=0.0 penalty_coef=1.0 critic_pretrain_steps=0 nll_coef=0.0 length_adaptive=False
      alpha=1.0
    grpo common: epsilon=0.2 epsilon_high=0.28 num_iterations=1 beta=0.0 entropy_coef=0.0
      dynamic_sampling=0 overlong_buffer=0 mask_truncated_completions=False delta=0.0
    gspo grpo: epsilon=0.03 epsilon_high=0.04
    dpo common: max_steps=30 learning_rate=0.0001 beta=0.1 label_smoothing=0.0 simpo_gamma=0.5
      average_logps=False nll_coef=0.0 online=False num_iterations=1
    examples.trpo ppo: max_steps=12 max_kl=0.002 damping=0.1
    examples.lag gspo: epsilon=None epsilon_high=None sampler_lag=4 importance_sampling_cap=2.0
      importance_sampling_clip_min=0.0
    examples.zoo grpo: top_entropy_quantile=1.0 dppo_tv_delta=0.15 dppo_kl_delta=0.05
      gmpo_epsilon=0.4 vespo_k_pos=2.0 vespo_k_neg=3.0 vespo_lambda_pos=3.0 vespo_lambda_neg=2.0
      off_policy_mask_threshold=0.5 clip_cov_ratio=0.002 clip_cov_lb=1.0 clip_cov_ub=5.0
      kl_cov_ratio=0.002 kl_cov_coef=1.0 dro_beta=1.0
    examples.distill reinforce: gamma=0.0 beta=1.0 teacher_update_rate=0.05 teacher_coef=0.0
      lmbda=1.0 distillation_topk=8 distillation_add_tail=True
    examples.turns grpo: gamma=0.95 step_advantage_w=1.0"""


@pytest.mark.parametrize("line", re.sub("\n {6}", " ", DEFAULTS).strip().split("\n"))
def test_the_defaults_are_those_of_the_published_numbers(line):
    names, _, words = line.partition(":")
    module, _, parent = names.strip().partition(" ")
    fields = {field.name: field.default for field in
              dataclasses.fields(importlib.import_module(module).Config)}
    inherited = {field.name: field.default for field in dataclasses.fields(
        importlib.import_module(parent).Config)} if parent else {}
    own = {name: value for name, value in fields.items()
           if not isinstance(value, str) and (name, value) not in inherited.items()}
    assert [f"{name}={value}" for name, value in own.items()] == words.split()


def test_on_a_gpu_a_pass_has_more_rows_and_runs_compute_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    spec = importlib.util.spec_from_file_location("common_of_a_gpu", common.__file__)
    module = sys.modules["common_of_a_gpu"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (module.Config().device, module.Config().micro_batch_size) == ("cuda", 256)
    assert (common.Config().device, common.Config().micro_batch_size) == ("cpu", 32)


def test_a_resumed_run_may_change_what_does_not_shape_it_and_nothing_else(run, refused):
    others = {"max_steps": 7, "save_steps": 5, "eval_steps": 4, "device": "cpu", "kernel": "torch",
              "micro_batch_size": 8, "report_to": "tensorboard"}
    flags = arguments({"resume_from_checkpoint": "run"} | others)
    cfg = plumbing.parse_flags(grpo.Config, flags)
    assert {name: getattr(cfg, name) for name in others} == others
    assert {*others} == grpo.Config.MAY_DIFFER - {"resume_from_checkpoint"}
    words = ["--resume_from_checkpoint", "run", "--device", "cuda"]
    refused("torch cannot use it here", plumbing.parse_flags, grpo.Config, words)
    for field in dataclasses.fields(grpo.Config):
        if field.name not in grpo.Config.MAY_DIFFER and field.type in (int, float):
            words = ["--resume_from_checkpoint", "run", f"--{field.name}", "99"]
            refused(f"--{field.name} 99", plumbing.parse_flags, grpo.Config, words)



ACCEPTED = """
    ppo --trust_region penalty --penalty_coef 2 --target_kl 0.01 --num_mini_batches 1
    ppo --target_kl 0.01 --lam 0.5
    ppo --target_kl 0.01 --num_mini_batches 1 --num_iterations 2
    ppo --length_adaptive --alpha 0.5 --beta 0.1 --kl_target 0.01
    grpo --loss_type dr_grpo --textbook_share 1 --temperature 0.001 --delta 2 --scale_rewards mean
    grpo --loss_type cispo --epsilon_high 0.5 --beta 0.1 --kl_estimator k3_ratio
    reinforce --method rejection
    reinforce --method rejection --view token --gamma 0.9
    dpo --average_logps --beta 2 --label_smoothing 0.4
    dpo --loss_type robust --label_smoothing 0.4
    dpo --loss_type simpo --simpo_gamma 1
    examples.lag --method gspo --loss_type cispo
    examples.lag --method gspo --importance_sampling_level sequence_token
    examples.lag --importance_sampling_correction mask --sampler_lag 1 --importance_sampling_cap 3
    examples.distill --distillation_mode topk_logits --distillation_topk 319
    examples.distill --distillation_mode sampled_token --beta 0 --lmbda 0
    examples.distill --distillation_mode sampled_token --gamma 0.5 --teacher_coef 1 --baseline mean
    examples.distill --teacher self --hint sibling --teacher_model_kind ema --teacher_update_rate 1
    examples.turns --task number --gamma 0.9 --step_advantage_w 2
    examples.turns --task number --gamma 1 --adv_estimator reward_to_go
    examples.zoo --loss_type clip_cov --clip_cov_ratio 0.1 --delta 2 --epsilon 0.1
    examples.zoo --advantage passk --dynamic_sampling 2 --overlong_buffer 4
    examples.zoo --loss_type dapo --advantage gdpo --reward accuracy+format"""


@pytest.mark.parametrize("line", [line.strip() for line in ACCEPTED.split("\n") if line])
def test_flags_that_fit_together_are_accepted(line):
    script, *argv = shlex.split(line)
    kind = importlib.import_module(script).Config
    assert plumbing.parse_flags(kind, ["--device", "cpu", *argv]) != kind(device="cpu")


# ---- damaged files ---------------------------------------------------------------------------

@pytest.mark.parametrize("old, new", [
    ("{", "\udcff{"), ("}", ""), ("arithmetic:2", "chess"),
    ('"temperature": 1.0', '"temperature": "warm"'),
    ('"temperature": 1.0', '"temperature": -1.0'), ('"loss_type": "grpo"', '"loss_type": "older"'),
    ('"num_prompts": 2', '"num_prompts": 2.5'), ('"seed": 0', '"seed": false'),
    ('"reward": "accuracy"', '"reward": null'), ('"curriculum": false', '"curriculum": 0')])
def test_a_damaged_config_is_refused(refused, run, old, new):
    path = run / "config.json"
    path.write_bytes(path.read_text().replace(old, new).encode(errors="surrogateescape"))
    refused("", grpo.main, ["--resume_from_checkpoint", "run"])


class Trap:
    """An object whose pickle runs code when it is loaded."""

    def __reduce__(self):
        return Path.touch, (Path("trapped"),)


def flip_one_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 64
    path.write_bytes(data)


DAMAGES = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:path.stat().st_size // 2]),
    "one bit flipped": flip_one_bit,
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
def edited(monkeypatch, tmp_path):
    """edited(old, new): imports a copy of grpo.py with one edit. -> its main"""
    def copy(old, new):
        Path("mine.py").write_text(replace_once((ROOT / "grpo.py").read_text(), old, new))
        sys.modules.pop("mine", None)
        return importlib.import_module("mine").main
    monkeypatch.syspath_prepend(tmp_path)
    yield copy
    sys.modules.pop("mine", None)


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


def test_a_run_is_named_after_the_task_that_a_script_makes_and_refuses_the_flag_of_another(
        edited, stops):
    main = edited("    task = common.load_task(cfg, verify)\n",
                  "    task = Sums(verify, 2, 3)\n")
    sys.modules["mine"].Sums = type("Sums", (common.Arithmetic,), {})
    flags = {name: value for name, value in INSTANT.items() if name != "task"}
    stops("--task countdown: mine.py makes a task of its own, sums", main,
          arguments(flags | {"task": "countdown"}))
    for flag in ({"reward": "accuracy+format"}, {"curriculum": True}):
        stops("have no effect on sums, which mine.py makes", main, arguments(flags | flag))
    main(arguments(flags))
    _, config = plumbing.read_config("runs/mine-sums-s0")
    assert config["task"] == "mine.Sums"


# ---- the end of a command --------------------------------------------------------------------

class Closed(io.StringIO):
    """A pipe that nobody reads any more."""

    def flush(self):
        raise BrokenPipeError


@pytest.mark.parametrize("kind, output, text", [
    (ValueError, io.StringIO, ""), (BrokenPipeError, io.StringIO, "\n"),
    (ValueError, Closed, None), (BrokenPipeError, Closed, None)])
def test_an_error_is_printed_unless_nobody_reads_the_output(kind, output, text, monkeypatch):
    ended, shown = [], []
    monkeypatch.setattr(sys, "stdout", output())
    monkeypatch.setattr(sys, "__excepthook__", lambda *args: shown.append(args))

    def end(code):
        ended.append(code)
        raise SystemExit
    monkeypatch.setattr(os, "_exit", end)
    error = kind("why")
    with contextlib.suppress(SystemExit):
        plumbing.end_quietly(kind, error, None)
    assert ended == ([141] if text is None else [])
    assert shown == ([] if text is None else [(kind, error, None)])
    assert text is None or sys.stdout.getvalue() == text


def test_an_interpreter_without_torch_says_what_to_type(empty_folder):
    for name in ("grpo.py", "common.py"):
        shutil.copy(ROOT / name, empty_folder)
    (empty_folder / "none").mkdir()
    (empty_folder / "none/torch.py").write_text(
        "raise ModuleNotFoundError('No module named torch', name='torch')", "utf-8")
    python = empty_folder / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    done = subprocess.run(
        [sys.executable, "-m", "grpo", "--output_dir", "a b"], encoding="utf-8",
        capture_output=True, env=os.environ | {"PYTHONPATH": str(empty_folder / "none")})
    assert (done.returncode, done.stdout, done.stderr) == (
        1, "", f"error: No module named torch; type: {python} -m grpo --output_dir 'a b'\n")


# ---- a full disk, and scripts alone in a folder ----------------------------------------------

@pytest.mark.parametrize("content", ["a text", {"policy": torch.ones(5000)}], ids=type)
def test_a_file_that_does_not_fit_on_the_disk_is_one_line_and_no_part_of_it_stays(
        refused, content, monkeypatch):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, limits[1]))
    try:
        refused("run.pt: cannot be written (", plumbing.write, Path("run.pt"), content)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    Path("log.jsonl").symlink_to("/dev/full")
    run = SimpleNamespace(folder=Path("."))
    refused("log.jsonl: cannot be written (No space", plumbing.Run.append, run, "log.jsonl", {})

    def save(content, file):
        raise RuntimeError("[enforce fail at inline_container.cc] . unexpected pos 64 vs 0")
    monkeypatch.setattr(torch, "save", save)
    refused("run.pt: cannot be written (is the disk full?)", plumbing.write, Path("run.pt"), {})


@every_script
def test_a_script_that_was_copied_alone_names_both_files_that_it_lacks(script, empty_folder):
    path = shutil.copy(script.__file__, empty_folder)
    done = subprocess.run([sys.executable, path], text=True, capture_output=True)
    assert done.returncode == 1
    assert "common.py and plumbing.py next to it" in done.stderr and "plumbing'" not in done.stderr


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
