"""The record of a run in another trainer: which loss and which rewards it trains on.

loss.json contains the text of the loss and the names of the rewards, with the SHA-256 of the user's
files that are loaded: those of the loss and the rewards, and all that they import. It is in the
output folder and in each checkpoint, and the folder `source` next to it has a copy of each file. A
run that resumes has to have an equal record.
"""
import functools
import hashlib
import json
import os
import re
import shutil
import sys
from pathlib import Path

import engines

FILE = "loss.json"
STATE = "trainer_state.json"        # the last file of a checkpoint that TRL writes


# ---- 1. what runs ----------------------------------------------------------------------------

def checksum(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def code_of(reward):
    """Find the function that a reward runs, or the class of an object."""
    code = reward.func if isinstance(reward, functools.partial) else reward
    return code if hasattr(code, "__qualname__") else type(code)


def files_of(loss, rewards):
    """Find the files of a loss and of rewards, and all files of the user that are loaded.
    -> {place in a folder: Path}"""
    first = [loss.module.__name__, *(code_of(one).__module__ for one in rewards)]
    modules = {loss.module.__name__: loss.module} | sys.modules
    found = {}
    for name in dict.fromkeys([*first, *modules]):
        file = Path(getattr(modules.get(name), "__file__", None) or "")     # a notebook has none
        if file.is_file() and (name == first[0] or engines.is_users(file)):
            depth = 1 + (file.stem == "__init__")
            if os.sep not in name:                              # not read by its path
                depth += name.count(".")
            place = Path(*file.parts[-depth:])
            if found.get(str(place), file) != file:             # two files of one name
                place = place.with_name(f"{checksum(file)[:8]}-{file.name}")
            found[str(place)] = file
    return found


def name_of(reward):
    """Name a reward: a function is FILE.py:FUNCTION, with the arguments of a partial, an object
    FILE.py:CLASS, and a model is called like its folder."""
    config = getattr(reward, "config", None)
    if not callable(reward) or hasattr(config, "_name_or_path"):
        return str(getattr(config, "_name_or_path", reward))
    words = ""
    if isinstance(reward, functools.partial):
        given = [*map(repr, reward.args), *(f"{key}={x!r}" for key, x in reward.keywords.items())]
        words = re.sub(" at 0x[0-9a-f]+", "", f"({', '.join(given)})")
    code = code_of(reward)
    file = getattr(sys.modules.get(code.__module__), "__file__", None) or ""
    return f"{Path(file).name}:{code.__qualname__}{words}"


def of_run(text, loss, how, rewards=()):
    """Describe a loss that `engines.load` has read from a text, and rewards. Files have no folder,
    because a copy may run instead. -> record, files as from `files_of`"""
    name, function, settings = engines.parts_of(text)
    files = files_of(loss, rewards)
    words = [f"{key}={x}" for key, x in (settings | {"how": how}).items()]
    return {"loss": " ".join([f"{Path(name).name}:{function}", *words]),
            "rewards": [*map(name_of, rewards)],
            "files": {place: checksum(path) for place, path in files.items()}}, files


def line(record):
    """Write a record on one line. -> str"""
    parts = {"loss": [record["loss"]], "rewards": record["rewards"],
             "optimizer": record.get("optimizer", []),
             "files": [f"{name} ({sha[:8]})" for name, sha in record.get("files", {}).items()]}
    return "; ".join(f"{name} {', '.join(words)}" for name, words in parts.items() if words)


def write(folder, record, files=()):
    """Write a record to a folder, and copies of files to its folder `source`. OSError if that
    fails."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    for place, file in dict(files).items():
        copy = folder / "source" / place
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not copy.exists() or not copy.samefile(file):            # a run of the copies themselves
            shutil.copyfile(file, copy)


# ---- 2. checkpoints --------------------------------------------------------------------------

def refuse_other(folder, record):
    """Raise a ValueError, with one line, if a checkpoint or a run was trained on something else. A
    folder of another program has no record, and is taken. Of the files, those count that both have:
    a notebook may have loaded others."""
    path = Path(folder, FILE)
    before = json.loads(path.read_text("utf-8")) if path.is_file() else record
    both = before["files"].keys() & record["files"].keys()
    if any(before.get(key) != x for key, x in record.items() if key != "files") or any(
            before["files"][name] != record["files"][name] for name in both):
        raise ValueError(f"--resume_from_checkpoint {folder}: was trained on {line(before)}, but "
                         f"now you ask for {line(record)}; the folder source of the run has copies "
                         "of the files")


def checkpoint_of(given, output, record):
    """Find the checkpoint that a run begins with: given names it, and True is the last one of the
    output folder. ValueError, with one line, if it was trained on something else, if it is not
    complete, because TRL would begin with a new optimizer, or if a new run would write over others.
    -> path, or None"""
    if not given:
        if any(Path(output).glob("checkpoint-*")):
            raise ValueError(f"--output_dir {output}: has checkpoints of another run; name a new "
                             f"folder, or continue with --resume_from_checkpoint {last(output)}")
        return None
    folder = last(output) if str(given) == "True" else given
    if not is_complete(Path(folder)):
        raise ValueError(f"--resume_from_checkpoint {given}: is not a complete checkpoint; the "
                         f"last one of this run is {last(output)}")
    refuse_other(folder, record)
    return str(folder)


def is_complete(checkpoint):
    """Whether a checkpoint was written to its end. The output folder has no random numbers."""
    return (checkpoint / STATE).exists() and any(checkpoint.glob("rng_state*"))


def last(folder):
    """Find the last complete checkpoint in a folder. -> path, or none"""
    found = filter(is_complete, Path(folder).glob("checkpoint-*"))
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default="none")
