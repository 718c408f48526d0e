"""Call the functions of a --reward_file, in a process that pretrained/rewards.py starts. If a call
takes too long, the process is killed, because code can catch every exception that would stop it.
It does not import torch."""
import ast
import asyncio
import contextlib
import inspect
import math
import os
import select
import sys
import threading
import traceback
import types
import typing
from multiprocessing.connection import Connection
from pathlib import Path

LOOP = asyncio.new_event_loop()         # one for all calls, because locks and clients belong to one
asyncio.set_event_loop(LOOP)


def read(path):
    """Execute the file. -> its names and values, except those that it imports"""
    source = Path(path).read_bytes()
    module = types.ModuleType("reward_file")
    module.__file__ = path
    sys.modules["reward_file"] = module
    exec(compile(source, path, "exec"), vars(module))
    imported = {alias.asname or alias.name for node in ast.walk(ast.parse(source))
                if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
    return {name: value for name, value in vars(module).items() if name not in imported}


def describe(names):
    """Collect the settings and the functions of the file. The parameters of a function are a dict
    too: {name: whether it is required}. ValueError if a setting is bad. -> dict"""
    about = {"seconds": 60, "workers": 8, "call_tokens": []}
    about = {name: names.get(name, default) for name, default in about.items()}
    for name, types_ in (("seconds", (int, float)), ("workers", (int,))):
        if type(about[name]) not in types_ or not 0 < about[name] < math.inf:
            raise ValueError(f"{name} = {about[name]!r} is not a number above 0")
    calls = about["call_tokens"]
    if type(calls) not in (list, tuple) or not all(type(x) is str and x for x in calls):
        raise ValueError(f"call_tokens = {calls!r} is not a list of texts")
    about["functions"] = {
        name: {{p.VAR_KEYWORD: "**", p.POSITIONAL_ONLY: f"{p.name}/"}.get(p.kind, p.name):
               p.default is p.empty for p in inspect.signature(value).parameters.values()
               if p.kind is not p.VAR_POSITIONAL}
        for name, value in names.items() if callable(value) and not name.startswith("_")
        and not inspect.isclass(value) and not typing.get_origin(value)}
    return about


def call(function, arguments, is_text):
    """Call a function, which must return a text or a number. TypeError or ValueError if it does
    not. -> str or float"""
    result = function(**arguments)
    if inspect.isawaitable(result):
        result = LOOP.run_until_complete(result)
    if is_text and type(result) is not str:
        raise TypeError(f"{result!r:.60} is not a text")
    if not is_text and not math.isfinite(result):
        raise ValueError(f"{result!r:.60} is not finite")
    return result if is_text else float(result)


def attempt(path, function, *arguments):
    """Call a function. -> (its result, ""), or (None, an error message) if it raises"""
    try:
        return function(*arguments), ""
    except BaseException as error:                              # a file may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        place = [f"line {frame.lineno}: " for frame in frames if frame.filename == path][-1:]
        return None, f"{''.join(place)}{type(error).__name__}: {' '.join(str(error).split())}"


def end_with_parent(pipe):
    """End this process when the parent's end of the pipe is closed, even during a call."""
    poll = select.poll()
    poll.register(pipe.fileno(), 0)
    poll.poll()
    os._exit(0)


def main(path, number):
    pipe = Connection(int(number))
    threading.Thread(target=end_with_parent, args=(pipe,), daemon=True).start()
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.path.append(str(Path(path).parent))                     # the file imports from there
    names, error = attempt(path, read, path)
    pipe.send((None, error) if error else attempt(path, describe, names))
    with contextlib.suppress(EOFError, OSError):                # the run has ended
        while True:
            name, arguments = pipe.recv()
            pipe.send(attempt(path, call, names[name], arguments, name == "respond"))


if __name__ == "__main__":
    main(*sys.argv[1:])
