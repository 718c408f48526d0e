"""Read the problems and the rewards that the words of a command name; TRL's script does the rest.

Lines of JSON keep their numbers and dates as texts, because `datasets` would turn them into other
values: 007 into 7, a date into a time. So an answer is what the file says.
"""
import inspect
import itertools
import json
import re
from pathlib import Path

import datasets
import fsspec
import torch
import transformers
from trl.trainer.utils import get_callable_name, is_async_callable

import engines
from vectors.contract import restored

TRIED = 100             # problems on which rewards are tried, at most
load_dataset = datasets.load_dataset


def rows_of(file):
    """Read lines of JSON, or a JSON file with one list; it may be compressed. -> list of dicts.
    ValueError, with the line or the row, if it is not JSON, or if a row has no prompt"""
    try:
        with fsspec.open(file, "rt", encoding="utf-8-sig", compression="infer") as lines:
            text = lines.read().strip()
        if not text.startswith("["):
            text = "[" + re.sub(r"\n(?=[^\S\n]*\S)", ",\n", text) + "]"      # blank lines count
        rows = json.loads(text, parse_int=str, parse_float=str, parse_constant=str)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: {error}") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not row.get("prompt"):
            raise ValueError(f"{file}: row {number} has no prompt: {json.dumps(row):.60}")
    if not rows:
        raise ValueError(f"{file}: has no problems")
    return rows


def of_rows(rows):
    """Make a data set that gives each row as it is; without features, `datasets` would give objects
    each other's keys, and "7" and 7 one type. A column that a row lacks is None. -> Dataset"""
    names = dict.fromkeys(name for row in rows for name in row)
    texts = {name: [json.dumps(row.get(name)) for row in rows] for name in names}
    return datasets.Dataset.from_dict(
        texts, datasets.Features(dict.fromkeys(names, datasets.Json())))


def load(path, name=None, streaming=False, **more):
    """Load a data set as `datasets` does, but JSON on this machine keeps its texts. A file is the
    split train. -> {split: data set}"""
    if more or not Path(path).exists():                 # more: a part of a mixture of data sets
        return load_dataset(path, name, streaming=streaming, **more)
    files = {"train": [path]}
    if Path(path).is_file():
        path, more = str(Path(path).resolve().parent), {"data_files": Path(path).name}
    else:
        files = datasets.load_dataset_builder(path, name).config.data_files or {}
    endings = {re.sub(r"\.(gz|bz2|xz|zip|zst)$", "", str(file)).rpartition(".")[2]
               for some in files.values() for file in some}
    if endings and endings <= {"json", "jsonl", "ndjson"}:
        return {str(split): of_rows([row for file in some for row in rows_of(file)])
                for split, some in files.items()}
    return load_dataset(path, name, streaming=streaming, **more)


def rewards_of(word):
    """Find the rewards that a word of --reward_funcs names: FILE.py:a,b, or FILE.py for all public
    functions of the file that take completions. TRL's script reads all other words.
    ValueError if there is none. -> names, as TRL's script reads them"""
    match = re.fullmatch(r"(.+\.py)(?::(.+))?", word)
    if not match:
        return [word]
    module = engines.read_file(match[1])
    names = match[2].split(",") if match[2] else [
        name for name, one in vars(module).items() if name[0] != "_" and inspect.isfunction(one)
        and one.__module__ == module.__name__
        and {"completions", "completion_ids"} & inspect.signature(one).parameters.keys()]
    if not names or not all(callable(getattr(module, name, None)) for name in names):
        raise ValueError(f"--reward_funcs {word}: has no such reward, which is a function such as "
                         "right(completions, answer, **columns)")
    return [f"{module.__name__}.{name}" for name in names]


def try_rewards(rewards, problems):
    """Call each reward with the answer of each of the first problems as its completion, so that one
    that it cannot judge does not end the training at some step. Models and async functions are left
    out. ValueError, with one line that names the row, if a call fails."""
    functions = [one for one in rewards if callable(one) and not isinstance(one, torch.nn.Module)
                 and not is_async_callable(one)]
    for number, row in enumerate(itertools.islice(problems, TRIED), 1):
        columns = {name: [value] for name, value in row.items()
                   if name not in ("prompt", "completion")}
        text = str(row.get("answer", 0))
        if not isinstance(row["prompt"], str):
            text = [{"role": "assistant", "content": text}]
        for reward in functions:
            try:
                with restored():
                    found = reward(
                        prompts=[row["prompt"]], completions=[text], completion_ids=[[0]],
                        trainer_state=transformers.TrainerState(), log_extra=lambda *_: None,
                        log_metric=lambda *_: None, **columns)
                [float(one or 0) for one in found]                      # None: not rated
            except (Exception, SystemExit) as error:    # the function may be anybody's
                raise ValueError(
                    f"row {number}: the reward {get_callable_name(reward)} fails for the answer "
                    f"{row.get('answer')!r:.60}: {engines.one_line(error)}") from error


def last_number(completions, answer, **columns):
    """Reward with 1.0 if the last number of a completion is the answer, as real.py does, else 0.0.
    TRL passes texts, or lists of messages. -> list of floats"""
    import real  # here, because it measures the memory of a GPU
    return [real.verify(right, engines.text_of(one)) for right, one in zip(answer, completions)]
