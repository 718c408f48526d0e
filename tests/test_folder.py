"""A run touches only its own files, takes its folder alone, and loses no work at its end."""
import math
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import ROOT, scripts
from small_runs import (
    INSTANT,
    arguments,
    at_work,
    difference,
    load,
    mortal,
    outcome,
    resume,
    steps,
)

import common
import grpo
import plumbing

pytestmark = pytest.mark.usefixtures("at_work_folder")


# ---- a folder for each run -------------------------------------------------------------------

def test_resuming_leaves_the_users_files_as_they_are_and_cuts_only_its_logs(run):
    for name in ("data.jsonl", "evaluation.jsonl"):
        (run / name).write_text('{"prompt": "1+1="}\n')
    (run / "notes.tmp").touch()
    (run / "checkpoint.pt.tmp").write_bytes(b"half")            # what kill -9 leaves
    with open(run / "metrics.jsonl", "a") as log:
        log.write('{"step": 2, "rew')
    resume(run)
    assert (run / "data.jsonl").read_text() == '{"prompt": "1+1="}\n'
    assert list(run.glob("*.tmp")) == [run / "notes.tmp"]
    assert [line["step"] for line in steps(run)] == [1]


def test_a_run_without_its_checkpoint_is_refused(run, refused):
    (run / "checkpoint.pt").unlink()
    refused("checkpoint.pt: contains no policy", resume, run)


def test_a_script_that_was_edited_in_the_folder_of_a_run_is_kept(run):
    with open(run / "grpo.py", "ab") as file:
        file.write(b"# a month of work\xff")           # in another encoding
    resume(run, max_steps=6)
    assert (run / "grpo.py").read_bytes().endswith(b"# a month of work\xff")


def test_runs_never_share_a_folder_even_in_two_threads(script, own_folder, monkeypatch):
    """One begins while the other has only begun, so that its folder contains little."""
    flags = arguments(INSTANT)
    begin = plumbing.Run.begin
    folders = []

    def nested(run, sample):
        reference = begin(run, sample)
        folders.append(run.folder)
        if len(folders) < 3:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(script.main, flags)
        return reference
    monkeypatch.setattr(plumbing.Run, "begin", nested)
    script.main(flags)
    name = folders[0].name
    assert {folder.name for folder in folders} == {name, f"{name}-2", f"{name}-3"}
    assert all(len(steps(folder)) == 1 for folder in folders)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_leaves_environments_alone_that_it_did_not_create(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").touch()
    done = subprocess.run(["make", "-C", ROOT, "lint", "PYTHON=true"], text=True,
                          capture_output=True, env=os.environ | {"VENV": str(tmp_path / "mine")})
    assert done.returncode == 2 and "make did not create " in done.stderr
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_verify_is_tried_on_all_kinds_of_texts_and_may_leave_the_current_folder(
        script, tmp_path, monkeypatch, watch):
    tried = {}

    def leave(problem, text):
        os.chdir("/")
        tried[text] = script.verify(problem, text)
        return tried[text]
    splits = watch(common, "sample_problems", lambda task, n, seed, split="train", **_: split)
    monkeypatch.chdir(tmp_path)
    cfg = script.Config(device="cpu")
    plumbing.Run(cfg, common.load_task(cfg, leave), None, script.COLUMNS)
    assert Path.cwd() == tmp_path and {*splits} == {"train", "test"}
    assert {*tried.values()} == {0.0, 1.0} and "" in tried


# ---- the end ---------------------------------------------------------------------------------

@scripts("grpo", "dpo")
@pytest.mark.parametrize("reward, code, words", [
    (math.inf, 1, "step 1: not finite: .*'reward': inf"), (None, 2, "reward returned None")])
def test_a_reward_that_is_not_finite_or_no_number_ends_the_run_in_one_line(
        script, reward, code, words, tmp_path, monkeypatch, stops):
    monkeypatch.setattr(script, "reward", lambda *_: reward)
    flags = arguments(INSTANT | {"output_dir": tmp_path / "run"})
    assert re.match(f"error: {words}", stops("", script.main, flags, code=code))


FOUR = INSTANT | {"base_steps": 4, "max_steps": 4, "save_steps": 1, "eval_steps": 50}


@pytest.fixture(scope="session")
def four_steps(tmp_path_factory):
    """What a run of FOUR that nothing disturbs writes."""
    folder = tmp_path_factory.mktemp("four")
    with at_work(folder):
        grpo.main(arguments(FOUR | {"output_dir": "run"}))
    return outcome(folder / "run")


# Each end: the call of a function that brings it (mortal explains it), the error that it raises,
# and the steps that are saved.
ENDS = {
    "the reward fails": (grpo, "reward", 13, "", ZeroDivisionError, 3),
    "the last evaluation fails": (grpo, "evaluate", 4, "", ZeroDivisionError, 4),
    "Ctrl-C while the base is made": (plumbing, "muon_step", 2, "", KeyboardInterrupt, None),
    # the policy has moved, but the step has no log yet
    "Ctrl-C in a step": (common, "mean_metrics", 4, "", KeyboardInterrupt, 3),
    "Ctrl-C while a checkpoint is written": (
        torch, "save", 5, "checkpoint.pt.tmp", KeyboardInterrupt, 3),
    "Ctrl-C when it gets its name": (os, "replace", 5, "checkpoint.pt", KeyboardInterrupt, 3)}


@pytest.mark.parametrize("end", ENDS)
def test_no_step_that_was_logged_is_lost_however_a_run_ends(
        end, four_steps, own_bases, monkeypatch, capfd):
    owner, name, number, file, error, saved = ENDS[end]

    def die(*args):
        if owner is torch:
            args[1].write(b"half")                      # which is not on the disk yet
        raise error
    is_ctrl_c = error is KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, mortal(getattr(owner, name), number, die, file))
        with pytest.raises(SystemExit if is_ctrl_c else error) as stop:
            grpo.main(arguments(FOUR | {"output_dir": "run"}))
    if is_ctrl_c:
        assert stop.value.code == 130
        resume_command = "grpo.py --resume_from_checkpoint " + str(Path("run").absolute())
        assert capfd.readouterr().err.endswith(f"{resume_command}\n")
    checkpoint = Path("run/checkpoint.pt")
    assert (load(checkpoint)["state"]["steps"] if checkpoint.exists() else None) == saved
    resume("run")
    assert not difference(outcome("run"), four_steps)
    assert not [*Path("run").glob("*.tmp")]
