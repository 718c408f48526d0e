"""Give losses of small repositories to the test vectors: make conform, or, for one of copied.json,
python -m vectors lab/conform/copied.py:tiny_grpo --recipe grpo

None of this code is copied. A file is downloaded at a named commit, and those of its `lines` that
compute a loss are executed unchanged. They read the names that `given` makes of our arguments, and
`call` is the loss, in their names and ours.
"""
import __future__

import inspect
import json
import textwrap
import urllib.request
from pathlib import Path

import torch

import common
from vectors.adapter import Bag

CACHE = Path(__file__).parents[2] / ".cache" / "copied"
ROWS = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
COMMITS = ROWS.pop("commits")           # repository -> commit and date


def code(repository, path, first, last):
    """Compile lines of a file. Their annotations may name what they do not import. -> code"""
    place = f"{repository}/{COMMITS[repository][0]}/{path}"
    file = CACHE / place
    if not file.exists():
        try:
            with urllib.request.urlopen(f"https://raw.githubusercontent.com/{place}") as reply:
                content = reply.read()
        except OSError as error:
            common.fail(f"cannot download {place}: {error}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    lines = file.read_text("utf-8").split("\n")[first - 1:last]
    return compile(textwrap.dedent("\n".join(lines)), place, "exec",
                   __future__.annotations.compiler_flag)


def function(row):
    """Make a function with the arguments that a row takes, for the vectors. -> function"""
    lines = code(row["repository"], row["path"], *row["lines"])

    def loss(**ours):
        names = {"torch": torch, "nn": torch.nn, "Bag": Bag} | ours
        names |= eval(f"dict({row['given']})", dict(names))
        exec(lines, names)
        return eval(row["call"], names)
    loss.__signature__ = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in row["takes"].split()])
    return loss


def __getattr__(name):
    if name in ROWS:
        return function(ROWS[name])
    raise AttributeError(name)
