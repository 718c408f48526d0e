"""A run touches only its own files, takes its folder alone, and loses no work at its end."""
import io
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import ROOT, contents, scripts
from small_runs import (
    INSTANT,
    SMALL,
    arguments,
    at_work,
    child,
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

def test_resuming_leaves_the_users_files_as_they_are_and_cuts_only_its_logs(
        run, tmp_path, script):
    for name in ("data.jsonl", "evaluation.jsonl"):
        (run / name).write_text('{"prompt": "1+1="}\n')
    far = "far away\n" * 10_000                         # longer than any log
    (tmp_path / "far.jsonl").write_text(far)
    (run / "near.jsonl").symlink_to(tmp_path / "far.jsonl")
    (run / "samples.jsonl").unlink()
    (run / "samples.jsonl").symlink_to(tmp_path / "far.jsonl")
    (run / "notes.tmp").touch()
    (run / "checkpoint.pt.tmp").write_bytes(b"half")            # what kill -9 leaves
    with open(run / "metrics.jsonl", "a") as log:
        log.write('{"step": 2, "rew')
    resume(run)
    assert (run / "data.jsonl").read_text() == '{"prompt": "1+1="}\n'
    assert (tmp_path / "far.jsonl").read_text() == far
    assert list(run.glob("*.tmp")) == [run / "notes.tmp"]
    assert [line["step"] for line in steps(run)] == [1]


def test_a_run_without_its_checkpoint_is_refused(run, refused):
    policy = load(run / "checkpoint.pt")["policy"]
    torch.save({"policy": policy}, run / "checkpoint.pt")
    refused("contains a policy, but no run; use --init_from", resume, run)
    (run / "checkpoint.pt").unlink()
    refused("because its checkpoint.pt is gone", resume, run)
    (run / "summary.json").unlink()                     # as if it had not ended
    with open(run / "metrics.jsonl", "a") as log:
        log.write("{}\n" * 3)                           # but made more steps than --save_steps
    refused("because its checkpoint.pt is gone", resume, run)


def test_a_script_that_was_edited_in_the_folder_of_a_run_is_kept(run, capfd):
    with open(run / "grpo.py", "ab") as file:
        file.write(b"# a month of work\xff")           # in another encoding
    resume(run, max_steps=6)
    assert (run / "grpo.py").read_bytes().endswith(b"# a month of work\xff")
    assert "grpo.py: is kept, although another text runs, " in capfd.readouterr().err


def test_a_run_that_lives_cannot_be_resumed(script, tmp_path, monkeypatch, capfd):
    folder = tmp_path / "run"
    codes = []
    runs = []                           # a notebook keeps them, too

    def resumed_by_another(run, *args):
        runs.append(run)
        before = contents(folder)
        codes.append(child(lambda: resume(folder)))
        assert contents(folder) == before
    monkeypatch.setattr(plumbing.Run, "log", resumed_by_another)
    script.main(arguments(INSTANT | {"output_dir": folder, "max_steps": 2}))
    assert codes == [2, 2]
    assert capfd.readouterr().err.count("this run is still in progress") == 2
    assert child(lambda: resume(folder)) == 0               # now it has ended


def test_runs_never_share_a_folder_even_in_two_threads(script, tmp_path, monkeypatch):
    """One begins while the other has only begun, so that its folder contains little."""
    monkeypatch.chdir(tmp_path)
    flags = arguments(INSTANT)
    begin = plumbing.Run.begin
    folders = []

    def nested(run):
        reference = begin(run)
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


# ---- what other runs left --------------------------------------------------------------------

def test_a_damaged_base_is_made_again(own_bases, new_run, watch):
    written = watch(os, "replace", lambda part, path: part.name if "base" in part.parts else "")
    flags = {"base_steps": 5, "max_steps": 1}
    before = outcome(new_run(**flags))
    [path] = Path("runs/base").iterdir()
    saved = bytearray(path.read_bytes())
    middle = len(saved) // 2
    saved[middle:middle + 500] = bytes(500)
    path.write_bytes(saved)
    assert not difference(outcome(new_run(**flags)), before)
    assert not difference(outcome(new_run(**flags)), before)        # the file is whole again
    assert [*Path("runs/base").iterdir()] == [path]
    assert len({*written} - {""}) == 2                  # another process may write it, too


# ---- what a run changes, and what it assumes -------------------------------------------------


def test_a_run_needs_nobody_who_reads_what_it_prints(tmp_path):
    """Without stdout and stderr, the next files that are opened get their numbers, 1 and 2."""
    for name, ending, num_lines in (("pipe", "| head -1", 1), ("closed", ">&- 2>&-", 0)):
        flags = INSTANT | {"output_dir": tmp_path / name, "max_steps": 3}
        words = shlex.join([sys.executable, str(ROOT / "grpo.py"), *arguments(flags)])
        done = subprocess.run(f"{words} {ending}", shell=True, capture_output=True, text=True)
        assert done.stdout.count("\n") == num_lines and "rror" not in done.stderr
        assert (tmp_path / name / "run.lock").read_bytes() == b""
    assert len(steps(tmp_path / "closed")) == 3


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_leaves_environments_alone_that_it_did_not_create(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").touch()
    done = subprocess.run(["make", "-C", ROOT, "lint", "PYTHON=true"], text=True,
                          capture_output=True, env=os.environ | {"VENV": str(tmp_path / "mine")})
    assert done.returncode == 2 and "make did not create " in done.stderr
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


# ---- the end ---------------------------------------------------------------------------------

def test_a_character_that_the_console_lacks_does_not_end_a_run(script, monkeypatch):
    console = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", console)
    plumbing.parse_flags(script.Config, ["--device", "cpu"])
    print("é → 4", flush=True)
    assert console.buffer.getvalue() == b"\\xe9 \\u2192 4\n"


@scripts("grpo", "dpo")
@pytest.mark.parametrize("reward, code, words", [
    (math.inf, 1, "step 1: not finite: .*'reward': inf"), (None, 2, "reward returned None"),
    ("1", 2, "reward returned '1'"), (10**400, 2, "reward returned 1000")],
    ids=lambda value: repr(value)[:20])
def test_a_reward_that_is_not_finite_or_no_number_ends_the_run_in_one_line(
        script, reward, code, words, tmp_path, monkeypatch, stops):
    monkeypatch.setattr(script, "reward", lambda *_: reward)
    flags = arguments(INSTANT | {"output_dir": tmp_path / "run"})
    assert re.match(f"error: {words}", stops("", script.main, flags, code=code))


# ---- signals and threads ---------------------------------------------------------------------

def test_ctrl_c_twice_while_the_base_is_made_ends_without_a_traceback(
        own_bases, script, monkeypatch, capfd):
    def interrupt_twice(*_):
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
    monkeypatch.setattr(plumbing, "muon_step", interrupt_twice)
    monkeypatch.setattr(sys, "excepthook", plumbing.end_quietly)        # as in a command
    with pytest.raises(SystemExit) as stop:
        script.main(arguments(SMALL | {"output_dir": "run"}))
    error = capfd.readouterr().err
    assert error.startswith("making the base: step 0 of 150\n") and error.count("\n") == 4
    assert re.search(r"\n\ninterrupted; resume with:\n  .*\n", error)
    assert stop.value.code == 130 and signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_under_nohup_a_run_goes_on_when_the_terminal_closes(tmp_path, monkeypatch):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr(grpo, "reward", lambda *_: signal.raise_signal(signal.SIGHUP) or 1.0)
    grpo.main(arguments(INSTANT | {"output_dir": tmp_path / "run"}))
    assert steps(tmp_path / "run")[0]["reward"] == 1
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler        # also at a good end


FOUR = INSTANT | {"max_steps": 4, "save_steps": 10, "eval_steps": 50}


@pytest.fixture(scope="session")
def four_steps(tmp_path_factory):
    """What a run of FOUR that nothing disturbs writes."""
    folder = tmp_path_factory.mktemp("four")
    with at_work(folder):
        grpo.main(arguments(FOUR | {"output_dir": "run"}))
    return outcome(folder / "run")


# Each end: the call of a function that brings it (mortal explains it), the signal that comes, or
# none if the call fails, and the steps that are saved.
ENDS = {
    "the reward fails": (grpo, "reward", 13, "", "", 3),
    "the last evaluation fails": (grpo, "evaluate", 4, "", "", 4),
    # the policy has moved, but the step has no log yet
    **{name: (common, "mean_metrics", 4, "", name, 3) for name in plumbing.SIGNALS},
    "Ctrl-C while a checkpoint is written": (torch, "save", 1, "checkpoint.pt.tmp", "SIGINT", 4),
    "Ctrl-C when it gets its name": (os, "replace", 1, "checkpoint.pt", "SIGINT", 4)}


@pytest.mark.parametrize("end", ENDS)
def test_no_step_is_lost_however_a_run_ends(end, four_steps, tmp_path, monkeypatch, capfd):
    owner, name, number, file, signal_name, saved = ENDS[end]
    signal_number = getattr(signal, signal_name, 0)
    before = signal.getsignal(signal_number or signal.SIGINT)

    def die(*args):
        if owner is torch:
            args[1].write(b"half")                      # which is not on the disk yet
        return signal.raise_signal(signal_number) if signal_number else 1 / 0
    error = SystemExit if signal_number else ZeroDivisionError
    with monkeypatch.context() as patch, pytest.raises(error) as stop:
        patch.setattr(owner, name, mortal(getattr(owner, name), number, die, file))
        grpo.main(arguments(FOUR | {"output_dir": tmp_path / "run"}))
    # else a notebook would ignore it for good
    assert signal.getsignal(signal_number or signal.SIGINT) == before
    if signal_number:
        assert stop.value.code == 128 + signal_number
        assert f"--resume_from_checkpoint {tmp_path}/run" in capfd.readouterr().err
    assert load(tmp_path / "run/checkpoint.pt")["state"]["steps"] == saved
    assert not [*(tmp_path / "run").glob("*.tmp")]
    resume(tmp_path / "run")
    assert not difference(outcome(tmp_path / "run"), four_steps)
