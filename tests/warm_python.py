"""python WORDS as from a shell, without the seconds in which it reads torch. Nothing of ours may be
imported here: a command finds its own common.py. A fixture; no tests."""
import multiprocessing
import os
import runpy
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

FORKED = multiprocessing.get_context("forkserver")      # each command in a child that has torch


def execute(words, cwd, env, pipes, seconds):
    """What python WORDS does, in a process of its own."""
    for number, pipe in enumerate(pipes):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)            # no terminal, so it is buffered
    signal.alarm(seconds)
    os.chdir(cwd)
    os.environ |= env
    is_file = words[0] not in ("-c", "-m")
    folder = os.path.dirname(os.path.abspath(words[0])) if is_file else ""
    own = (str(Path(__file__).parent), str(Path(__file__).parent.parent))
    others = [path for path in sys.path if path not in own]     # of the process that asked
    sys.path[:] = [folder, *env.get("PYTHONPATH", folder).split(":"), *others]
    sys.argv = words if is_file else words[1:]
    sys.dont_write_bytecode = True
    if is_file:
        runpy.run_path(words[0], run_name="__main__")
    elif words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})


class Command:
    """A command that runs: its stdin and stdout, files; stderr(), all of it after the end."""

    def __init__(self, words, cwd=".", env=None, seconds=120):
        pipes = [FORKED.Pipe(duplex=False) for _ in range(3)]           # (read, write) each
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
        words = [str(word) for word in words]
        args = (words, os.path.abspath(cwd), env or {}, theirs, seconds)
        self.process = FORKED.Process(target=execute, args=args)
        self.process.start()
        for pipe in theirs:
            pipe.close()
        self.pid = self.process.pid
        self.stdin = os.fdopen(os.dup(pipes[0][1].fileno()), "w")
        self.stdout = os.fdopen(os.dup(pipes[1][0].fileno()))
        self.written = os.fdopen(os.dup(pipes[2][0].fileno()))
        for pipe in (pipes[0][1], pipes[1][0], pipes[2][0]):
            pipe.close()

    def send_signal(self, number):
        if self.process.is_alive():
            os.kill(self.pid, number)

    def wait(self):
        """-> exit code, below zero if a signal ended it"""
        self.process.join()
        return self.process.exitcode

    def stderr(self):
        return self.written.read()

    def end(self):
        """Kill it, if it still runs."""
        self.send_signal(signal.SIGKILL)
        self.wait()
        for file in (self.stdin, self.stdout, self.written):
            file.close()


def run_command(*words, **options):
    """Run python WORDS to its end. -> returncode, stdout, stderr"""
    command = Command(words, **options)
    try:
        said = command.stdout.read()
        return SimpleNamespace(
            returncode=command.wait(), stdout=said, stderr=command.stderr())
    finally:
        command.end()


@pytest.fixture(scope="session")
def warm_python():
    """start(*words, cwd, env, seconds) -> Command; run(*words, ...) -> returncode, stdout, stderr:
    python WORDS as from a shell, without the seconds in which it reads torch."""
    FORKED.set_forkserver_preload(["torch", "torch._dynamo", "warm_python"])
    return SimpleNamespace(start=lambda *words, **options: Command(words, **options),
                           run=run_command)
