"""A step that fails, Ctrl-C and kill -9: what was done is kept, and the run that goes on ends as if
nothing had happened."""
import contextlib
import itertools
import json
import random
import re
import shlex
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SCRIPTS, every_script
from small_runs import (
    SMALL,
    arguments,
    difference,
    lines,
    load,
    outcome,
    resume,
    steps,
)

import common

pytestmark = pytest.mark.usefixtures("at_work_folder")


def steps_done(folder):
    """How many steps the checkpoint of a run knows of."""
    return load(folder / "checkpoint.pt")["state"]["steps"]


# ---- a step that fails -----------------------------------------------------------------------

def always_learning(script):
    """Flags with which no step goes without a backward pass."""
    return {"dynamic_sampling": 8} if script.__name__ == "dpo" else {"entropy_coef": 1e-9}


@pytest.fixture
def fifth_loss_is_nan(script, monkeypatch):
    """A context in which the loss of the fifth step is not a number."""
    name = "dpo_loss" if script.__name__ == "dpo" else "policy_loss"
    loss = getattr(script, name)
    update = script.update
    numbers = itertools.count(1)
    now = {"step": 0}                               # it is evaluated before the first one

    def counted(*args):
        now["step"] = next(numbers)
        return update(*args)

    def failing(*args, **options):
        factor = float("nan") if now["step"] == 5 else 1
        return loss(*args, **options) * factor

    @contextlib.contextmanager
    def context():
        with monkeypatch.context() as patch:
            patch.setattr(script, name, failing)
            patch.setattr(script, "update", counted)
            yield
    return context


@pytest.mark.parametrize("script, save_steps, kept", [
    ("grpo", 2, 4), *((name, 3, 3) for name in SCRIPTS)], indirect=["script"])
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(
        script, new_run, capsys, tmp_path, fifth_loss_is_nan, save_steps, kept):
    flags = always_learning(script) | {"save_steps": save_steps, "max_steps": 6}
    with fifth_loss_is_nan(), pytest.raises(SystemExit) as stop:
        new_run(**flags)
    assert stop.value.code == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "step 5" in error and "loss" in error
    assert "log_ratio" in error or script.__name__ == "dpo"
    folder = tmp_path / "run0"
    assert steps_done(folder) == kept
    resume(folder)
    assert not difference(outcome(folder), outcome(new_run(**flags)))


@every_script
def test_a_gradient_that_is_not_finite_stops_the_run_too(
        script, new_run, capsys, monkeypatch, tmp_path):
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(
        torch.nn.utils, "clip_grad_norm_", lambda *args: clip(*args) * float("inf"))
    with pytest.raises(SystemExit) as stop:
        new_run(**always_learning(script))
    assert stop.value.code == 1
    assert "step 1:" in capsys.readouterr().err
    assert steps_done(tmp_path / "run0") == 0       # there is a checkpoint before the first step


# ---- Ctrl-C ----------------------------------------------------------------------------------

def press_ctrl_c():
    signal.raise_signal(signal.SIGINT)


@every_script
def test_ctrl_c_finishes_the_step_saves_and_says_how_to_go_on(
        script, new_run, capfd, monkeypatch, tmp_path, whole):
    update = script.update
    numbers = itertools.count(1)

    def interrupted(*args):
        if next(numbers) == 4:
            press_ctrl_c()
        return update(*args)
    with monkeypatch.context() as patch:
        patch.setattr(script, "update", interrupted)
        with pytest.raises(SystemExit) as stop:
            new_run()
    assert stop.value.code == 130
    error = capfd.readouterr().err
    assert "Traceback" not in error
    folder = tmp_path / "run0"
    assert steps_done(folder) == 4 == len(steps(folder))
    assert not (folder / "summary.json").exists()
    command = shlex.split(error.splitlines()[-1])
    assert command[0] == "python"
    assert Path(command[1]).resolve() == ROOT / f"{script.__name__}.py"     # from where we are
    script.main(command[2:])
    assert not difference(outcome(folder), outcome(whole))


def test_ctrl_c_a_second_time_ends_the_run_at_once(script, new_run, monkeypatch, tmp_path, whole):
    def interrupted(*args):
        press_ctrl_c()
        press_ctrl_c()
        pytest.fail("the run has not ended")
    with monkeypatch.context() as patch:
        patch.setattr(script, "update", interrupted)
        with pytest.raises(SystemExit) as stop:
            new_run()
    assert stop.value.code == 130
    folder = tmp_path / "run0"
    assert steps_done(folder) == 0
    resume(folder)
    assert not difference(outcome(folder), outcome(whole))


@pytest.mark.parametrize("save_steps, max_steps, kept", [
    (3, 9, 3),              # a checkpoint that was due
    (100, 3, 3)],           # the one after the last step
    ids=["between two steps", "after the last step"])
def test_ctrl_c_while_a_checkpoint_is_written_loses_no_step_and_begins_no_other(
        new_run, monkeypatch, tmp_path, save_steps, max_steps, kept):
    save = common.Run.save

    def interrupted(run):
        if run.state["steps"] == 3 and not run.is_interrupted:
            press_ctrl_c()
        save(run)
    monkeypatch.setattr(common.Run, "save", interrupted)
    with pytest.raises(SystemExit) as stop:
        new_run(save_steps=save_steps, max_steps=max_steps)
    assert stop.value.code == 130
    folder = tmp_path / "run0"
    assert steps_done(folder) == kept == len(steps(folder))
    assert not (folder / "summary.json").exists()


def test_ctrl_c_in_the_last_evaluation_loses_no_step(script, new_run, monkeypatch, tmp_path):
    evaluate = script.evaluate
    folder = tmp_path / "run0"

    def interrupted(*args, **options):
        if len(lines(folder / "metrics.jsonl")) == 3 and not presses:
            presses.append(1)
            press_ctrl_c()
        return evaluate(*args, **options)

    presses = []
    monkeypatch.setattr(script, "evaluate", interrupted)
    with pytest.raises(SystemExit) as stop:
        new_run(max_steps=3, save_steps=100, eval_steps=100)
    assert stop.value.code == 130
    assert steps_done(folder) == 3


@pytest.mark.parametrize("console", ["of tools", "plain"])
def test_after_the_run_ctrl_c_is_what_it_was(new_run, monkeypatch, console):
    if console == "plain":
        monkeypatch.setattr(common, "make_console", common.Console)
    new_run(max_steps=0)
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()


@pytest.fixture
def process(warm_python):
    """A context, process(script, cwd, flags, pattern): python SCRIPT as from a shell, once it has
    printed a line with the pattern. Yields a function that presses Ctrl-C and returns exit code and
    stderr."""
    @contextlib.contextmanager
    def start(script, cwd, flags, pattern):
        running = warm_python.start(script, *arguments(flags), cwd=cwd)

        def interrupt():
            running.send_signal(signal.SIGINT)
            return running.wait(), running.stderr()
        try:
            assert any(re.match(pattern, line) for line in running.stdout), running.stderr()
            yield interrupt
        finally:
            running.end()
    return start


@pytest.mark.parametrize("where", ["in the repository", "with common.py alone"])
def test_ctrl_c_in_a_shell_while_training(script, process, work, tmp_path, new_run, where):
    path = ROOT / "grpo.py"
    if where == "with common.py alone":
        shutil.copy(ROOT / "common.py", tmp_path)
        path = shutil.copy(path, tmp_path)
    folder = tmp_path / "run"
    flags = {"base_steps": 20, "stop_at": 2, "eval_steps": 1000}
    with process(path, work, SMALL | flags | {"max_steps": 500, "output_dir": folder},
                 " *3 ") as interrupt:
        code, error = interrupt()
    assert code == 130
    assert "Traceback" not in error
    done = steps_done(folder)
    assert 3 <= done == len(steps(folder)) < 60     # a full buffer would bring the line later
    command = shlex.split(error.splitlines()[-1])
    script.main([*command[2:], "--max_steps", str(done + 2)])
    reference = new_run(**flags, max_steps=done + 2)
    assert not difference(outcome(folder), outcome(reference))


def test_ctrl_c_in_a_shell_during_the_warm_start(process, tmp_path):
    folder = tmp_path / "run"
    flags = SMALL | {"base_steps": 30_000, "output_dir": folder, "max_steps": 1}
    with process(ROOT / "grpo.py", tmp_path, flags, "grpo.py: ") as interrupt:
        time.sleep(1)
        code, error = interrupt()
    assert code == 130
    assert "Traceback" not in error
    command = error.strip().splitlines()[-1]
    python, path, *rest = shlex.split(command)
    assert (python, rest) == ("python", ["--resume_from_checkpoint", str(folder)])
    assert (tmp_path / path).resolve() == ROOT / "grpo.py"
    assert {path.name for path in folder.iterdir()} == {"config.json", "grpo.py"}
    assert not [*tmp_path.rglob("*.pt")]            # half a base is no base


# ---- kill -9 ---------------------------------------------------------------------------------

# A process that has imported the scripts forks one for each run, so that the time of a run is all
# its own. Started with "moment" it is killed after so many seconds; with "write", half-way through
# its write of this number.
SERVER = """
import itertools, json, os, pathlib, signal, sys, time
sys.path.insert(0, sys.argv[1])
sys.modules["tools.report"] = None
import torch
import common
scripts = {name: __import__(name) for name in sys.argv[2:]}


def make_mortal(last, number):
    "Let the process die in the middle of a write: of a file, a rename, a line. Or press Ctrl-C."
    count = itertools.count()

    def dying(write, half):
        def wrapped(*args, **options):
            if next(count) == last:
                if number == signal.SIGKILL:
                    half(*args)
                os.kill(os.getpid(), number)
            return write(*args, **options)
        return wrapped

    save = torch.save
    write_text = pathlib.Path.write_text

    def save_half(content, path):
        save(content, path)
        os.truncate(path, os.path.getsize(path) // 2)

    def write_half(path, text):
        write_text(path, text[:len(text) // 2])

    def open_log(path, mode="r", *args):
        file = open(path, mode, *args)
        if mode == "a":
            write = file.write

            def append_half(line):
                write(line[:len(line) // 2])
                file.flush()
            file.write = dying(write, append_half)
        return file

    torch.save = dying(save, save_half)
    os.replace = dying(os.replace, lambda *paths: None)
    pathlib.Path.write_text = dying(write_text, write_half)
    common.open = open_log
    return count


def child(job):
    signal.alarm(100)
    os.chdir(job["cwd"])
    file = os.open("console.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    count = make_mortal(job.get("write", -1), job.get("signal", signal.SIGKILL))
    scripts[job.get("script", "grpo")].main(job["argv"])
    pathlib.Path("writes.json").open("w").write(str(next(count)))


def wait(pid, moment):
    "The exit code of a process, which is killed at that moment, if there is one."
    start = time.perf_counter()
    done = 0
    while not done:
        done, status = os.waitpid(pid, os.WNOHANG)
        if not done and moment is not None and time.perf_counter() - start > moment:
            os.kill(pid, signal.SIGKILL)
            moment = None
        time.sleep(0.0005)
    return os.waitstatus_to_exitcode(status)


for line in sys.stdin:
    job = json.loads(line)
    start = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        try:
            child(job)
            os._exit(0)
        except SystemExit as stop:
            os._exit(stop.code)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    code = wait(pid, job.get("moment"))
    print(json.dumps({"code": code, "seconds": time.perf_counter() - start}), flush=True)
"""

# The overlong penalty gives signal to any base.
BRIEF = SMALL | {"hidden_size": 16, "intermediate_size": 16, "base_steps": 40, "output_dir": "run",
                 "overlong_buffer": 12, "max_completion_length": 12, "num_generations": 4,
                 "learning_rate": 3e-3, "save_steps": 2, "num_eval_problems": 8, "max_steps": 6}


@pytest.fixture(scope="module")
def serve(warm_python):
    """serve(cwd, flags, **job) runs a job in that folder: {"code": ..., "seconds": ...}."""
    server = warm_python.start("-c", SERVER, ROOT, *SCRIPTS, seconds=0)

    def run(cwd, flags, **job):
        line = json.dumps({"cwd": str(cwd), "argv": arguments(flags)} | job)
        server.stdin.write(line + "\n")
        server.stdin.flush()
        return json.loads(server.stdout.readline())
    yield run
    server.end()


def stop_and_go_on(serve, cwd, flags, script="grpo", **job):
    """Stop a run, then go on with it, or start it again if there is nothing to go on with.
    -> exit codes of both"""
    cwd.mkdir(exist_ok=True)
    first = serve(cwd, flags, script=script, **job)
    if (cwd / "run/config.json").exists():
        flags = {"resume_from_checkpoint": "run"}
    second = serve(cwd, flags, script=script)
    return first["code"], second["code"]


def count_kills(serve, folder, flags, reference, jobs):
    """Check that each of the jobs, stopped as it says, ends as the reference did.
    -> how many were killed"""
    num_killed = 0
    for number, job in enumerate(jobs):
        cwd = folder / str(number)
        first, second = stop_and_go_on(serve, cwd, flags, **job)
        when_stopped = 130 if job.get("signal") == signal.SIGINT else -signal.SIGKILL
        said = (cwd / "console.txt").read_text()
        is_late = "moment" in job and first == 0
        assert (first == when_stopped or is_late) and second == 0, (job, said)
        assert not difference(outcome(cwd / "run"), outcome(reference)), job
        shutil.rmtree(cwd)
        num_killed += first == -signal.SIGKILL
    return num_killed


def test_killed_at_any_of_8_moments_a_run_ends_as_if_it_had_not_been(serve, tmp_path):
    seconds = []
    for name in ("reference", "second"):
        (tmp_path / name).mkdir()
        done = serve(tmp_path / name, BRIEF)
        assert done["code"] == 0, (tmp_path / name / "console.txt").read_text()
        seconds.append(done["seconds"])
    reference = tmp_path / "reference/run"
    assert not difference(outcome(tmp_path / "second/run"), outcome(reference))
    assert all(line["frac_reward_zero_std"] < 1 for line in steps(reference))

    rng = random.Random(0)
    jobs = [{"moment": (n + rng.random()) / 8 * min(seconds)} for n in range(8)]
    num_killed = count_kills(serve, tmp_path, BRIEF, reference, jobs)
    assert num_killed >= 3                          # else they came too late


def test_killed_in_the_middle_of_any_write_a_run_ends_as_if_it_had_not_been(serve, tmp_path):
    """Moments seldom meet a write, which takes a millisecond; so each write is met on purpose."""
    flags = BRIEF | {"base_steps": 3, "max_steps": 1, "num_prompts": 2}
    (tmp_path / "reference").mkdir()
    assert serve(tmp_path / "reference", flags)["code"] == 0
    num_writes = int((tmp_path / "reference/writes.json").read_text())
    assert num_writes >= 20
    jobs = [{"write": number} for number in range(num_writes)]
    assert count_kills(serve, tmp_path, flags, tmp_path / "reference/run", jobs) == num_writes


@every_script
def test_killed_or_interrupted_a_run_of_any_script_ends_as_if_it_had_not_been(
        script, serve, tmp_path, work, whole):
    """Each in another process than the run that it is compared with."""
    jobs = []
    for write, number in ((25, signal.SIGKILL), (20, signal.SIGINT)):
        jobs.append({"write": write, "signal": number, "script": script.__name__})
    for name in ("0", "1"):
        shutil.copytree(work / "runs/base", tmp_path / name / "runs/base")
    assert count_kills(serve, tmp_path, SMALL | {"output_dir": "run"}, whole, jobs) == 1
