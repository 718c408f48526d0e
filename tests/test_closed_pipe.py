"""Whoever reads the output may stop reading: python grpo.py | head -1 ends without a traceback, and
the run can be resumed."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, every_script
from small_runs import INSTANT, arguments, difference, load, outcome, resume

import common


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch, restored_ctrl_c):
    """Every test is in an empty folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=["in the repository", "with common.py alone"])
def path(request):
    """The path of grpo.py, of the repository or copied out."""
    if request.param == "in the repository":
        return ROOT / "grpo.py"
    shutil.copy(ROOT / "common.py", "common.py")
    return Path(shutil.copy(ROOT / "grpo.py", "grpo.py"))


@pytest.fixture
def run_until(warm_python):
    """run_until(num_lines, *words): python WORDS, of which so many lines are read before the pipe
    is closed. -> those lines, exit code, stderr"""
    def run(num_lines, *words):
        running = warm_python.start(*words)
        said = [running.stdout.readline() for _ in range(num_lines)]
        running.stdout.close()
        ending = (running.wait(), running.stderr())
        running.end()
        return said, *ending
    return run


def test_help_into_a_pipe_that_nobody_reads_ends_without_a_word(path, run_until):
    _, code, error = run_until(0, path, "--help")
    assert code in (0, 1)               # argparse does not look whether its text was read
    assert error == ""


@pytest.mark.parametrize("path, num_lines", [
    ("in the repository", 4), ("with common.py alone", 1)], indirect=["path"])
def test_a_run_into_a_pipe_that_is_closed_ends_without_a_word_and_can_be_resumed(
        script, path, num_lines, run_until):
    flags = INSTANT | {"base_steps": 5, "entropy_coef": 0.1, "save_steps": 1, "stop_at": 2}
    said, code, error = run_until(
        num_lines, path, *arguments(flags | {"output_dir": "cut", "max_steps": 500}))
    assert (code, error) == (1, "")
    assert said[0].startswith("grpo.py: arithmetic on cpu")
    assert Path("cut/config.json").exists() and not Path("cut/summary.json").exists()
    num_steps = load(Path("cut/checkpoint.pt"))["state"]["steps"] + 2
    resume(Path("cut"), max_steps=num_steps)
    script.main(arguments(flags | {"output_dir": "whole", "max_steps": num_steps}))
    assert not difference(outcome("cut"), outcome("whole"))


def test_in_a_shell_head_has_its_line_and_no_other_is_printed():
    """Here Python starts as it does for a user; in the other tests it has read torch before."""
    command = f"{sys.executable} {ROOT / 'grpo.py'} --help | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("usage: grpo.py") and done.stdout.count("\n") == 1
    assert (done.returncode, done.stderr) == (0, "")


def test_bad_input_says_its_line_though_nobody_reads_the_output(run_until):
    _, code, error = run_until(0, ROOT / "grpo.py", "--seed", "x")
    assert code == 2
    assert error.startswith("error: ") and error.count("\n") == 1


# ---- start -----------------------------------------------------------------------------------

@every_script
def test_a_script_starts_its_main_so_that_a_closed_pipe_does_no_harm(script):
    assert (ROOT / f"{script.__name__}.py").read_text().endswith(
        '\n\nif __name__ == "__main__":\n    common.start(main)\n')


class Refused(Exception):
    """Something else that goes wrong."""


@pytest.mark.parametrize("error", [Refused("no"), SystemExit(2), KeyboardInterrupt()],
                         ids=lambda error: type(error).__name__)
def test_what_else_ends_main_is_passed_on(error):
    def main():
        raise error
    with pytest.raises(type(error)) as raised:
        common.start(main)
    assert raised.value is error


def test_what_was_printed_last_meets_the_closed_pipe_before_the_process_exits(monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)

    def main():
        print("last words")             # which stay in a buffer
    with open(writing, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as stop:
            common.start(main)
        assert stop.value.code == 1


def test_without_any_stdout_main_runs_and_ends(monkeypatch):
    """As with >&- in a shell."""
    monkeypatch.setattr(sys, "stdout", None)
    ran = []

    def main():
        print("nobody hears this")
        ran.append(True)
    common.start(main)
    assert ran
