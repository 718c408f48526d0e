"""The record of a run in another trainer: which loss and which rewards it trains on.

loss.json contains the text of the loss and the names of the rewards, with the SHA-256 of their
files and of the user's files that these import. It is in the output folder and in each checkpoint,
and the folder `source` next to it has a copy of each file. A run that resumes has to have an equal
record.
"""
import ast
import contextlib
import functools
import hashlib
import importlib.util
import inspect
import json
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


def imported_by(name, package, file):
    """List the modules that a file imports, also inside functions, or that variables of its module
    are, after their packages. -> names, some of which are of functions instead"""
    own = vars(sys.modules[name]) if name in sys.modules else {}
    names = {one.__name__ for one in own.values() if inspect.ismodule(one)}
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names |= {f"{base}.{one.name}" for one in node.names}
    return sorted({name.rsplit(".", n)[0] for name in names for n in range(name.count(".") + 1)})


def file_of(name):
    """Find the file of a module, or the folder of a package that has no file. -> Path, or None"""
    with contextlib.suppress(ImportError, ValueError, AttributeError):      # of a function, say
        spec = importlib.util.find_spec(name)
        return Path(spec.origin or spec.submodule_search_locations[0])


def files_of(modules):
    """Find the files of modules, and of all that these import from the user's own files.
    -> {place in a folder: Path}"""
    found, seen = {}, {""}
    left = [(module.__name__, Path(module.__file__), 1) for module in modules
            if getattr(module, "__file__", None)]               # a notebook has none
    while left:
        name, file, depth = left.pop()
        is_package = file.stem == "__init__"
        place = Path(*file.parts[-depth - is_package:])
        if file.is_file():
            if found.get(str(place), file) != file:             # two files of one name
                place = place.with_name(f"{checksum(file)[:8]}-{file.name}")
            found[str(place)] = file
        package = name if is_package else name.rpartition(".")[0]
        for one in imported_by(name, package, file) if file.suffix == ".py" else ():
            is_new = one not in seen and one.rpartition(".")[0] in seen     # else not the user's
            its_file = file_of(one) if is_new else None
            if its_file and engines.is_users(its_file):
                seen.add(one)
                left.append((one, its_file, one.count(".") + 1))
    return found


def name_of(reward):
    """Name a reward: a function is FILE.py:FUNCTION, with the arguments of a partial, an object
    FILE.py:CLASS, and a model is called like its folder."""
    config = getattr(reward, "config", None)
    if not callable(reward) or hasattr(config, "_name_or_path"):
        return str(getattr(config, "_name_or_path", reward))
    code = engines.code_of(reward)
    file = getattr(sys.modules.get(code.__module__), "__file__", None) or ""
    given = [*map(repr, getattr(reward, "args", ())), *(
        f"{name}={x!r}" for name, x in getattr(reward, "keywords", {}).items())]
    words = f"({', '.join(given)})" if isinstance(reward, functools.partial) else ""
    return f"{Path(file).name}:{code.__qualname__}" + re.sub(" at 0x[0-9a-f]+", "", words)


def modules_of(reward):
    """List the modules that a reward is in: that of its code and, of a partial or an object, those
    of the user's that have it as a variable."""
    module = sys.modules.get(engines.code_of(reward).__module__)
    if inspect.isfunction(reward) or not callable(reward):
        return [module] if callable(reward) else []
    holders = [one for one in [*sys.modules.values()]
               if any(x is reward for x in [*getattr(one, "__dict__", {}).values()])]
    return [one for one in (module, *holders)
            if engines.is_users(getattr(one, "__file__", None) or "")]


def of_run(text, loss, how, rewards=()):
    """Describe a loss that `engines.load` has read from a text, and rewards. Files have no folder,
    because a copy may run instead. -> record, files as from `files_of`"""
    name, function, settings = engines.parts_of(text)
    files = files_of([loss.module, *(one for reward in rewards for one in modules_of(reward))])
    words = [f"{key}={x}" for key, x in (settings | {"how": how}).items()]
    return {"loss": " ".join([f"{Path(name).name}:{function}", *words]),
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

def refuse_other(folder, record):
    """Raise a ValueError, with one line, if a checkpoint or a run was trained on something else. A
    folder of another program has no record, and is taken."""
    path = Path(folder, FILE)
    before = json.loads(path.read_text("utf-8")) if path.is_file() else record
    if before != record:
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
