"""The record of a run in another trainer: which loss and which rewards it trains on.

loss.json contains the text of the loss and the names of the rewards, with the SHA-256 of their
files and of the user's files that these import. It is in the output folder and in each checkpoint,
and the folder `source` next to it has a copy of each file. A run that resumes has to have an equal
record.
"""
import ast
import contextlib
import hashlib
import importlib.util
import inspect
import json
import shutil
import sys
from pathlib import Path

import engines
import plumbing

FILE = "loss.json"
STATE = "trainer_state.json"        # the last file of a checkpoint that TRL writes


# ---- 1. what runs ----------------------------------------------------------------------------

def checksum(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def imported_by(name, file):
    """List the modules that a file imports, also inside functions, or that its variables are, and
    their packages. -> names, some of which are no modules, but functions"""
    own = vars(sys.modules[name]) if name in sys.modules else {}
    names = {one.__name__ for one in own.values() if inspect.ismodule(one)}
    package = name if file.stem == "__init__" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module
            if node.level:
                base = importlib.util.resolve_name("." * node.level + (base or ""), package)
            names |= {base, *(f"{base}.{one.name}" for one in node.names)}
    packages = {name[:n] for name in names for n, sign in enumerate(name) if sign == "."}
    return sorted(names | packages)


def files_of(named):
    """Find the files of modules, and of all that these import from the user's own files.
    -> {place in a folder: Path}"""
    found, seen, left = {}, {""}, [*named]
    while left:
        name = left.pop(0)
        parent = name.rpartition(".")[0]
        if name in seen or not (parent in seen or name in named):   # a part of no package here
            continue
        spec = None
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
        places = [getattr(sys.modules.get(name), "__file__", None), spec and spec.origin,
                  *(spec and spec.submodule_search_locations or ())]
        file = next((Path(one) for one in places if one and Path(one).exists()), None)
        is_known = file and (engines.is_users(file) or name in named and engines.is_ours(file))
        if not is_known:
            continue
        seen.add(name)
        if file.is_dir():
            continue
        folder = () if name in named else name.split(".")[:-1]
        place = Path(*folder, *name.split(".")[-1:] * (file.stem == "__init__"), file.name)
        if found.get(str(place), file) != file:                     # two files of one name
            place = place.with_name(f"{checksum(file)[:8]}-{file.name}")
        found[str(place)] = file
        left += imported_by(name, file) if file.suffix == ".py" else ()
    return found


def name_of(reward):
    """Name a reward: a function is FILE.py:FUNCTION, and a model is called like its folder."""
    if inspect.isfunction(reward):
        return f"{Path(inspect.getsourcefile(reward) or '').name}:{reward.__qualname__}"
    if isinstance(reward, str):
        return reward
    return getattr(getattr(reward, "config", None), "_name_or_path", type(reward).__name__)


def of_run(text, loss, how, rewards=()):
    """Describe a loss that `engines.load` has read from a text, and rewards. -> record, files as
    from `files_of`"""
    name, function, settings = engines.parts_of(text)
    settings = [word for word in settings if not word.startswith("how=")]
    files = files_of([loss.module, *(
        one.__module__ for one in rewards if inspect.isfunction(one))])
    return {"loss": " ".join([f"{name}:{function}", *settings, f"how={how}"]),
            "rewards": [*map(name_of, rewards)],
            "files": {place: checksum(path) for place, path in files.items()}}, files


def line(record):
    """Write a record on one line. -> str"""
    parts = {"loss": [record["loss"]], "rewards": record["rewards"],
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

def what_counts(record):
    """Leave the names of files out of a record, because a copy may have another name. -> tuple"""
    _, function, settings = engines.parts_of(record["loss"])
    rewards = [engines.split_name(name)[1] or name for name in record["rewards"]]
    return function, sorted(settings), sorted(rewards), sorted(record.get("files", {}).values())


def refuse_other(folder, record):
    """Raise a ValueError, with one line, if a checkpoint or a run was trained on something else. A
    folder of another program has no record, and is taken."""
    path = Path(folder, FILE)
    if not path.is_file():
        return
    before = json.loads(path.read_text("utf-8"))
    if "files" not in before:               # of an older version, which hashed fewer files
        record = record | {"files": {}}
    if what_counts(before) != what_counts(record):
        raise ValueError(f"--resume_from_checkpoint {folder}: was trained on {line(before)}, but "
                         f"now you ask for {line(record)}; the folder source of the run has copies "
                         "of the files")


def checkpoint_of(given, output, record):
    """Find the checkpoint that --resume_from_checkpoint names; True is the last one of the output
    folder. ValueError, with one line, if it was trained on something else, or if it is not
    complete: TRL would begin with a new optimizer. -> path"""
    folder = last(output) if str(given) == "True" else given
    if not is_complete(folder):
        raise ValueError(f"--resume_from_checkpoint {given}: is not a complete checkpoint; the "
                         f"last one of this run is {last(output)}")
    refuse_other(folder, record)
    return str(folder)


def refuse_taken(folder):
    """Raise a ValueError, with one line, if the output folder of a new run has checkpoints: TRL
    would write over them, or delete them to keep --save_total_limit."""
    if any(Path(folder).glob("checkpoint-*")):
        raise ValueError(f"--output_dir {folder}: has checkpoints of another run; name a new "
                         f"folder, or continue with --resume_from_checkpoint {last(folder)}")


def is_complete(checkpoint):
    """Whether a checkpoint was written to its end. The output folder has no random numbers."""
    try:
        json.loads(Path(checkpoint, STATE).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return any(Path(checkpoint).glob("rng_state*"))


def last(folder):
    """Find the last complete checkpoint in a folder. -> path without the current folder, or none"""
    found = [path for path in Path(folder).glob("checkpoint-*") if is_complete(path)]
    return plumbing.short(max(found, key=lambda path: int(path.name.rpartition("-")[2]),
                              default="none"))
