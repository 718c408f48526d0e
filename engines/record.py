"""The record of a run in another trainer: which loss and which rewards it trains on.

loss.json contains the text of the loss and the names of the rewards, with the SHA-256 of their
files. It is in the output folder and in each checkpoint, and the folder `source` next to it has a
copy of each file. A run that resumes has to have an equal record.
"""
import hashlib
import inspect
import json
import shutil
from pathlib import Path

import engines

FILE = "loss.json"
STATE = "trainer_state.json"        # the last file of a checkpoint that TRL writes


def checksum(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def name_of(reward):
    """Name a reward: a function is FILE.py:FUNCTION, and a model is called like its folder. -> str,
    its file or None"""
    if inspect.isfunction(reward):
        file = Path(inspect.getsourcefile(reward) or "")
        return f"{file.name}:{reward.__qualname__}", file if file.is_file() else None
    if isinstance(reward, str):
        return reward, None
    return getattr(getattr(reward, "config", None), "_name_or_path", type(reward).__name__), None


def of_run(text, how, rewards=()):
    """Describe a loss, a text for `engines.load` with its average, and rewards. -> record, files
    that it names"""
    name, function, settings = engines.parts_of(text)
    settings = [word for word in settings if not word.startswith("how=")]
    file = engines.file_of(name)
    files = [file]
    found = {}
    for reward in rewards:
        named, path = name_of(reward)
        found[named] = path and checksum(path)
        files += [path] if path else []
    return {"loss": " ".join([f"{name}:{function}", *settings, f"how={how}"]),
            "sha256": checksum(file), "rewards": found}, [*dict.fromkeys(files)]


def line(record):
    """Write a record on one line. -> str"""
    rewards = [f"{name} ({sha[:8]})" if sha else name for name, sha in record["rewards"].items()]
    text = f"loss {record['loss']} ({record['sha256'][:8]})"
    return f"{text}; rewards {', '.join(rewards)}" if rewards else text


def write(folder, record, files=()):
    """Write a record to a folder, and copies of files to its folder `source`, as NAME-CHECKSUM.py.
    OSError if that fails."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    for file in files:
        copy = folder / "source" / f"{file.stem}-{checksum(file)[:8]}{file.suffix}"
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)


def what_counts(record):
    """Leave the names of files out of a record, because a copy may have another name. -> tuple"""
    _, function, settings = engines.parts_of(record["loss"])
    rewards = [(engines.split_name(name)[1] or name, sha)
               for name, sha in record["rewards"].items()]
    return function, sorted(settings), record["sha256"], sorted(rewards, key=str)


def refuse_other(folder, record):
    """Raise a ValueError, with one line, if a checkpoint or a run was trained on something else. A
    folder of another program has no record, and is taken."""
    path = Path(folder, FILE)
    if not path.is_file():
        return
    before = json.loads(path.read_text("utf-8"))
    if what_counts(before) != what_counts(record):
        raise ValueError(f"--resume_from_checkpoint {folder}: was trained on {line(before)}, but "
                         f"now you ask for {line(record)}; the folder source of the run has copies "
                         "of the files")


def refuse_incomplete(checkpoint, output):
    """Raise a ValueError, with one line, if there is no complete checkpoint of TRL. The output
    folder has a trainer_state.json, too, but no random numbers to continue with."""
    folder = Path(checkpoint)
    if not is_complete(folder) or not any(folder.glob("rng_state*")):
        found = complete(folder if folder.is_dir() else folder.parent) or complete(output)
        there = f"choose one of {', '.join(map(str, found))}" if found else "there is none near it"
        raise ValueError(f"--resume_from_checkpoint {checkpoint}: is no complete checkpoint; "
                         f"{there}")


def refuse_taken(folder):
    """Raise a ValueError, with one line, if the output folder of a new run has checkpoints: TRL
    would write over them, or delete them to keep --save_total_limit."""
    if not any(Path(folder).glob("checkpoint-*")):
        return
    found = complete(folder)
    more = f", or continue with --resume_from_checkpoint {found[-1]}" if found else ""
    raise ValueError(f"--output_dir {folder}: has checkpoints of another run; name a new "
                     f"folder{more}")


def call_incomplete(checkpoint):
    """Mark a checkpoint that is about to be written over, until TRL has written its end."""
    Path(checkpoint, STATE).unlink(missing_ok=True)


def is_complete(checkpoint):
    """Whether a checkpoint was written to its end."""
    try:
        json.loads(Path(checkpoint, STATE).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return True


def complete(folder):
    """List the complete checkpoints in a folder, the oldest first. -> list of Path"""
    found = [path for path in Path(folder).glob("checkpoint-*") if is_complete(path)]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))
