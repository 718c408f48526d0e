"""python WORDS, as from a shell, without the seconds in which it reads torch. Fixtures; no tests.

One process that has read torch, and nothing of ours, forks another for each command. That one goes
on to the end of the interpreter, as if it had been started alone: it has its own arguments, folder,
environment and files, an unhandled exception prints its traceback, and what is left in a buffer is
written last.
"""
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import pytest

# Between this process and the command's there is one that waits for it, and says how it ended.
SERVER = """
import importlib, json, os, runpy, signal, socket, sys
import torch, torch._dynamo             # the second, or the first optimizer would read it each time

for name in sys.argv[2:]:
    importlib.import_module(name)
channel = socket.socket(fileno=int(sys.argv[1]))
waiting = set()
while True:
    message, files, *_ = socket.recv_fds(channel, 2**20, 4)
    waiting = {pid for pid in waiting if os.waitpid(pid, os.WNOHANG) == (0, 0)}
    if not message:
        os._exit(0)
    pid = os.fork()
    if pid == 0:
        break
    waiting.add(pid)
    for file in files:
        os.close(file)

channel.close()
*standard, status = files
pid = os.fork()
if pid > 0:
    for file in standard:
        os.close(file)
    os.write(status, f"{pid}\\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(status, f"{code}\\n".encode())
    os._exit(0)

job = json.loads(message)
os.close(status)
for number, file in enumerate(standard):
    os.dup2(file, number)
    os.close(file)
signal.alarm(job["seconds"])
os.chdir(job["cwd"])
os.environ.clear()
os.environ.update(job["env"])
path = os.environ.get("PYTHONPATH", "")
words = job["words"]
sys.path[0] = "" if words[0] in ("-c", "-m") else os.path.dirname(os.path.abspath(words[0]))
sys.path[1:1] = path.split(":") if path else []
if words[0] == "-c":
    sys.argv = ["-c", *words[2:]]
    exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
elif words[0] == "-m":
    sys.argv = words[1:]
    runpy.run_module(words[1], run_name="__main__", alter_sys=True)
else:
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
"""


class Command:
    """A command that runs: its stdin and stdout, files; stderr, all of it after the end."""

    def __init__(self, stdin, stdout, stderr, status):
        self.stdin = stdin
        self.stdout = stdout
        self.status = status
        self.written = stderr
        self.pid = int(status.readline())
        self.returncode = None

    def send_signal(self, number):
        has_ended = bool(select.select([self.status], [], [], 0)[0])    # its exit code is there
        if self.returncode is None and not has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self):
        """-> exit code, below zero if a signal ended it"""
        if self.returncode is None:
            self.returncode = int(self.status.readline())
        return self.returncode

    def stderr(self):
        self.wait()
        self.written.seek(0)
        return self.written.read()

    def end(self):
        """Kill it, if it still runs."""
        self.send_signal(signal.SIGKILL)
        self.wait()
        for file in (self.stdin, self.stdout, self.status, self.written):
            file.close()


class WarmPython:
    """A process that has read torch, and more modules, with a channel to it."""

    def __init__(self, *modules):
        self.channel, theirs = socket.socketpair()
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        # -B: no __pycache__ beside the scripts that run. stdout is no terminal, so it is buffered.
        self.server = subprocess.Popen(
            [sys.executable, "-B", "-c", SERVER, str(theirs.fileno()), *modules], env=environment,
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        theirs.close()

    def start(self, *words, cwd=".", env=None, seconds=120):
        """Start python WORDS in a folder, with more variables in its environment. After so many
        seconds, if not 0, an alarm ends it. -> Command"""
        in_read, in_write = os.pipe()
        out_read, out_write = os.pipe()
        status_read, status_write = os.pipe()
        stderr = tempfile.TemporaryFile("w+")       # noqa: SIM115
        job = {"words": [str(word) for word in words], "cwd": os.path.abspath(cwd),
               "env": os.environ | (env or {}), "seconds": seconds}
        theirs = [in_read, out_write, stderr.fileno(), status_write]
        socket.send_fds(self.channel, [json.dumps(job).encode()], theirs)
        for file in (in_read, out_write, status_write):
            os.close(file)
        return Command(open(in_write, "w"), open(out_read), stderr,
                       os.fdopen(status_read, "rb", buffering=0))

    def run(self, *words, **options):
        """Run python WORDS to its end. -> returncode, stdout, stderr"""
        command = self.start(*words, **options)
        try:
            said = command.stdout.read()
            return SimpleNamespace(
                returncode=command.wait(), stdout=said, stderr=command.stderr())
        finally:
            command.end()

    def end(self):
        self.channel.close()                # at which it exits
        self.server.wait(timeout=60)


@pytest.fixture(scope="session")
def warm_python():
    """The process of this session, which takes commands."""
    python = WarmPython()
    yield python
    python.end()


@pytest.fixture(scope="session")
def warm_transformers():
    """The same for what examples/pretrained.py needs."""
    pytest.importorskip("transformers", reason="needs examples/requirements.txt")
    python = WarmPython(
        "transformers.models.llama.modeling_llama", "transformers.generation.utils",
        "transformers.models.auto.modeling_auto", "torch.distributed.fsdp",
        "torch.distributed.checkpoint.state_dict", "torch.distributed.tensor", "safetensors.torch")
    yield python
    python.end()
