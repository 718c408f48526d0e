"""A run touches only its own files, takes its folder alone, and loses no work at its end."""
import contextlib
import fcntl
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

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
    read_summary,
    resume,
    steps,
)

import common
import grpo
import plumbing
import tasks

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


def test_a_log_that_lost_its_end_is_not_filled_up_with_zero_bytes(run):
    (run / "metrics.jsonl").write_text("")              # after a power cut
    resume(run, max_steps=2)
    assert b"\0" not in (run / "metrics.jsonl").read_bytes()


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


def test_windows_gets_a_new_lock_because_another_process_may_have_the_old_one_open(
        run, monkeypatch):
    (run / "run.lock").write_text("old")
    taking = SimpleNamespace(folder=run, cfg=SimpleNamespace(resume_from_checkpoint="x"))
    for name, content in (("posix", "old"), ("nt", "")):
        with monkeypatch.context() as patch:
            patch.setattr(os, "name", name)
            assert plumbing.Run.take(taking)
        taking.lock.close()
        assert (run / "run.lock").read_text() == content


def test_a_process_that_a_run_forked_gets_the_handlers_of_before(monkeypatch):
    handled, killed = [], []
    monkeypatch.setattr(plumbing, "handle", handled.append)
    monkeypatch.setattr(os, "kill", lambda *args: killed.append(args))
    handlers = {signal.SIGTERM: signal.SIG_DFL}
    plumbing.Run.leave(SimpleNamespace(pid=-1, handlers=handlers), signal.SIGTERM, None)
    assert handled == [handlers] and killed == [(os.getpid(), signal.SIGTERM)]


def test_the_time_of_a_run_goes_on_when_it_is_resumed(run):
    saved = load(run / "checkpoint.pt")
    saved["state"]["seconds_total"] = 1000.0
    torch.save(saved, run / "checkpoint.pt")
    resume(run)
    assert 1000 < read_summary(run)["seconds_total"] < 1100


def test_a_home_folder_is_found_in_every_flag_that_takes_a_path(script, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    script.main(arguments(INSTANT | {"output_dir": "~/run"}))
    script.main(["--resume_from_checkpoint", "~/run"])
    assert not Path("~").exists()
    cfg = plumbing.parse_flags(script.Config, ["--init_from", "~/run", "--device", "cpu"])
    assert cfg.init_from == str(tmp_path / "run")


@pytest.mark.parametrize("flags", [{}, {"output_dir": "mine"}], ids=["", "named"])
def test_runs_never_share_a_folder_even_in_two_threads(script, tmp_path, monkeypatch, flags):
    """One begins while the other has only begun, so that its folder contains little. A folder that
    is not named needs no lock, which some file systems lack."""
    def no_lock(*_):
        raise OSError
    monkeypatch.chdir(tmp_path)
    if not flags:
        monkeypatch.setattr(fcntl, "flock", no_lock)
    flags = arguments(INSTANT | flags)
    begin = plumbing.Run.begin
    folders = []

    def nested(run):
        reference = begin(run)
        folders.append(run.folder)
        if len(folders) < 3:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(script.main, flags)         # exits, if the folder is named
        return reference
    monkeypatch.setattr(plumbing.Run, "begin", nested)
    script.main(flags)
    name = folders[0].name
    numbered = {name} if "mine" in flags else {name, f"{name}-2", f"{name}-3"}
    assert {folder.name for folder in folders} == numbered
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


@pytest.mark.parametrize("name", ["muon_step", "evaluate"])
def test_a_run_that_fails_at_its_start_does_not_stand_in_the_way_of_the_next(
        own_bases, script, monkeypatch, watch, name):
    flags = arguments(SMALL | {"output_dir": "run", "base_steps": 2, "max_steps": 1})
    runs = watch(plumbing.Run, "begin", lambda run: run)        # a notebook keeps it, too
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(script if name == "evaluate" else plumbing, name, lambda *_, **__: 1 / 0)
        script.main(flags)
    script.main(flags)
    assert len(steps("run")) == 1 and len(runs) == 2


# ---- what a run changes, and what it assumes -------------------------------------------------

def test_torch_has_its_settings_of_before_however_a_run_ends(tmp_path, monkeypatch):
    during = []

    def reward(problem, text, given):
        during.append((torch.get_num_threads(), torch.get_float32_matmul_precision()))
        return given if len(during) <= 4 else 1 / 0
    monkeypatch.setattr(grpo, "reward", reward)
    try:
        torch.set_num_threads(3)
        torch.set_float32_matmul_precision("medium")
        for name in ("ends", "fails"):
            with contextlib.suppress(ZeroDivisionError):
                grpo.main(arguments(INSTANT | {"output_dir": tmp_path / name}))
            assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (3, "medium")
    finally:
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("highest")
    assert len(during) == 5 and {*during} == {(1, "highest")}


def test_a_run_continues_in_its_folder_if_verify_and_reward_leave_the_current_one(
        own_bases, monkeypatch):
    """And the commands that it prints can be pasted in any folder."""
    home = Path.cwd()

    def leave(*args):
        os.chdir(Path(tempfile.mkdtemp(dir=home)))
        Path.cwd().rmdir()              # even a folder that exists no more
        return 0.0
    monkeypatch.setattr(grpo, "verify", leave)
    monkeypatch.setattr(grpo, "reward", leave)
    grpo.main(arguments(INSTANT | {"output_dir": "runs/x", "save_steps": 9, "task": "arithmetic"}))
    assert {path.name for path in (home / "runs").iterdir()} == {"base", "x"}
    assert read_summary(home / "runs/x")["steps"] == 1 and (home / "runs/x/report.html").is_file()


def test_a_run_needs_nobody_who_reads_what_it_prints(tmp_path):
    """Without stdout and stderr, the next files that are opened get their numbers, 1 and 2."""
    for name, ending, num_lines in (("pipe", "| head -1", 1), ("closed", ">&- 2>&-", 0)):
        flags = INSTANT | {"output_dir": tmp_path / name, "max_steps": 3}
        words = shlex.join([sys.executable, str(ROOT / "grpo.py"), *arguments(flags)])
        done = subprocess.run(f"{words} {ending}", shell=True, capture_output=True, text=True)
        assert done.stdout.count("\n") == num_lines and "rror" not in done.stderr
        assert (tmp_path / name / "run.lock").read_bytes() == b""
    assert len(steps(tmp_path / "closed")) == 3


def test_a_resume_with_another_version_of_torch_says_so_and_records_both(run, capfd):
    for before, after in (("2.8.0", f"2.8.0, {torch.__version__}"),
                          (f"2.8.0, {torch.__version__}",) * 2):
        record = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps(record | {"torch": before}))
        resume(run, max_steps=2)
        assert json.loads((run / "config.json").read_text())["torch"] == after
        line = f"began with torch 2.8.0, continues with {torch.__version__}"
        assert (line in capfd.readouterr().err) == (before == "2.8.0")


def test_a_picture_that_cannot_be_drawn_does_not_end_a_run(new_run, monkeypatch, capsys):
    """For example with text.usetex in a user's matplotlibrc, but without latex."""
    curve = SimpleNamespace(draw_curve=lambda folder: exec("raise RuntimeError('no latex')"))
    monkeypatch.setitem(sys.modules, "report.curve", curve)
    assert (new_run(**INSTANT) / "summary.json").is_file()
    printed = capsys.readouterr().out
    assert "no curve.png: no latex\n" in printed and "report.ask" in printed


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


@pytest.mark.parametrize("kind", [int, bool])
def test_rewards_become_floats_where_they_enter(script, config, load_task, kind, monkeypatch):
    monkeypatch.setattr(tasks.Task, "reward", lambda *_: kind(1))
    for own, expected in ((lambda problem, text, given: given / 2, 0.5), (lambda *_: kind(1), 1)):
        monkeypatch.setattr(script, "reward", own)
        for rewards in ("accuracy", "accuracy+format"):
            cfg = config(reward=rewards)
            batch = script.sample_batch(script.GPT(cfg), load_task(cfg), cfg, 0)
            assert batch.rewards.dtype == torch.float32 and (batch.rewards == expected).all()


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


def test_a_prompt_longer_than_its_task_allows_ends_a_run_in_one_line(
        tmp_path, monkeypatch, stops):
    """The width is in bytes, of which a letter may have several."""
    sample = common.Arithmetic.sample

    def sample_odd(task, rng, *shares):
        problem = sample(task, rng, *shares)
        return problem._replace(prompt=problem.prompt.replace("=", "→"))
    monkeypatch.setattr(common.Arithmetic, "sample", sample_odd)
    stops("arithmetic: a prompt has 8 bytes, but prompt_width is 6: '(", grpo.main,
          arguments(INSTANT | {"output_dir": tmp_path / "run"}))


def test_a_base_that_is_not_finite_is_not_kept(own_bases, capsys, monkeypatch):
    descend = plumbing.muon_step
    monkeypatch.setattr(plumbing, "muon_step", lambda matrices, *rest: (
        descend(matrices, *rest), matrices[0].data.fill_(math.nan)))
    with pytest.raises(SystemExit):
        grpo.main(arguments(SMALL | {"base_steps": 1}))
    assert "error: the weights of the base are not finite" in capsys.readouterr().err
    assert not [*Path("runs").rglob("*.pt")]


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
