"""A process that calls the functions of a --reward_file for pretrained/rewards.py, which kills it
when a call takes too long, because code can catch every exception. It imports no torch."""
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


def read(path):
    """Execute the file. -> its names and values, without what it imports"""
    source = Path(path).read_bytes()
    module = types.ModuleType("reward_file")
    module.__file__ = path
    sys.modules["reward_file"] = module
    exec(compile(source, path, "exec"), vars(module))
    imported = {alias.asname or alias.name for node in ast.walk(ast.parse(source))
                if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
    return {name: value for name, value in vars(module).items() if name not in imported}


def describe(names):
    """Collect the settings, and the functions with their parameters: name -> whether it is
    required. ValueError if a setting is bad. -> dict"""
    found = {"seconds": 60, "workers": 8, "call_tokens": []}
    found = {name: names.get(name, default) for name, default in found.items()}
    for name, types_ in (("seconds", (int, float)), ("workers", (int,))):
        if type(found[name]) not in types_ or not 0 < found[name] < math.inf:
            raise ValueError(f"{name} = {found[name]!r} is not a number above 0")
    calls = found["call_tokens"]
    if type(calls) not in (list, tuple) or not all(type(x) is str and x for x in calls):
        raise ValueError(f"call_tokens = {calls!r} is not a list of texts")
    found["functions"] = {
        name: {{p.VAR_KEYWORD: "**", p.POSITIONAL_ONLY: f"{p.name}/"}.get(p.kind, p.name):
               p.default is p.empty for p in inspect.signature(value).parameters.values()
               if p.kind is not p.VAR_POSITIONAL}
        for name, value in names.items() if callable(value) and not name.startswith("_")
        and not inspect.isclass(value) and not typing.get_origin(value)}
    return found


def call(function, arguments, n):
    """Call a function, which returns a text if n is None, a number if n is 0, else n numbers or
    None. TypeError or ValueError if it does not. -> str or list of floats"""
    found = function(**arguments)
    if inspect.isawaitable(found):
        found = asyncio.run(found)
    if n is None:
        if type(found) is not str:
            raise TypeError(f"{found!r:.60} is not a text")
        return found
    rewards = list(found) if n else [found]
    if len(rewards) != max(n, 1):
        raise ValueError(f"{len(rewards)} rewards for {n} completions")
    if not all(n and reward is None or math.isfinite(reward) for reward in rewards):
        raise ValueError(f"{found!r:.60} is not finite")
    return [math.nan if reward is None else float(reward) for reward in rewards]


def attempt(path, function, *arguments):
    """What a function returns, and what to print if it raises. -> (any, str)"""
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
    sys.path.append(str(Path(path).parent))                     # for what the file imports
    names, error = attempt(path, read, path)
    pipe.send((None, error) if error else attempt(path, describe, names))
    with contextlib.suppress(EOFError, OSError):                # the run has ended
        while True:
            name, *arguments = pipe.recv()
            pipe.send(attempt(path, call, names[name], *arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
