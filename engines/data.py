"""Read the problems and the rewards of a run in another trainer, which then reads all else.

Lines of JSON keep their numbers and dates as texts, because `datasets` would turn them into other
values: 1e5 into 100000.0, a date into a time. So an answer is what the file says.
"""
import csv
import inspect
import itertools
import json
import math
import re
from pathlib import Path

import datasets
import torch
import transformers

import engines

load_dataset = datasets.load_dataset
TRIED = 100             # problems on which rewards are tried, at most


# ---- 1. problems -----------------------------------------------------------------------------

def rows_of(file):
    """Read lines of JSON, or a JSON file with one list. -> list of dicts. ValueError, with the
    place, if a line is not JSON"""
    text = Path(file).read_text("utf-8-sig")
    is_list = text.lstrip().startswith("[")
    rows = []
    for number, line in enumerate([text] if is_list else text.split("\n"), 1):
        if line.strip():
            try:
                found = json.loads(line, parse_int=str, parse_float=str, parse_constant=str)
            except ValueError as error:
                raise ValueError(f"{file}:{number}: {error}") from None
            rows += found if is_list else [found]
    return rows


def load(path, name=None, streaming=False, **more):
    """Load a data set as `datasets` does. A file is the split train, and JSON and CSV on this
    machine keep their texts. -> {split: data set}"""
    if more:                                            # a part of a mixture of data sets
        return load_dataset(path, name, streaming=streaming, **more)
    place = Path(path)
    if place.is_dir():
        files = datasets.load_dataset_builder(path, name).config.data_files or {}
    else:
        files = {"train": [path]} if place.is_file() else {}
    kinds = {Path(file).suffix[1:] for some in files.values() for file in some}
    if files and kinds <= {"json", "jsonl"}:
        found = {}
        for split, some in files.items():
            rows = [row for file in some for row in rows_of(file)]
            names = dict.fromkeys(key for row in rows for key in row)
            found[str(split)] = datasets.Dataset.from_dict(
                {key: [row.get(key) for row in rows] for key in names})
        return {split: one.to_iterable_dataset() if streaming else one
                for split, one in found.items()}
    if not place.is_file():
        return load_dataset(path, name, streaming=streaming)
    more = {}
    if kinds == {"csv"}:
        with open(path, encoding="utf-8-sig", newline="") as lines:
            texts = dict.fromkeys(next(csv.reader(lines)), datasets.Value("string"))
        more = {"features": datasets.Features(texts), "keep_default_na": False}
    return load_dataset(*kinds, data_files=path, streaming=streaming, **more)


def refuse_special(data, tokenizer):
    """Raise a ValueError if a conversation contains the text of a special token, which a tokenizer
    reads as this token, such as the end of a text. A prompt that is a text may contain them."""
    tokens = [str(one) for one in tokenizer.added_tokens_decoder.values() if one.special]
    for row, prompt in enumerate(data["prompt"] if isinstance(data, datasets.Dataset) else (), 1):
        found = [one for one in tokens if not isinstance(prompt, str) and one in str(prompt)]
        if found:
            raise ValueError(f"row {row}: the prompt contains {found[0]}, which this tokenizer "
                             f"reads as a special token, not as text: {prompt!r:.80}")


# ---- 2. rewards ------------------------------------------------------------------------------

def is_reward(function):
    """Whether TRL can call a function as a reward: it gets completions, and all columns."""
    parameters = inspect.signature(function).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return takes_all and not parameters.keys().isdisjoint(("completions", "completion_ids"))


def rewards_of(word):
    """Find the rewards that a word of --reward_funcs names: FILE.py:a,b, or FILE.py for all public
    functions of the file that have the signature of a reward. ValueError if there is none.
    -> list of functions"""
    file, wanted = engines.split_name(word)
    module = engines.read_file(file)
    own = {name: value for name, value in vars(module).items()
           if inspect.isfunction(value) and (wanted or value.__module__ == module.__name__)}
    names = wanted.split(",") if wanted else [
        name for name, value in own.items() if name[0] != "_" and is_reward(value)]
    for name in names:
        if name not in own or not is_reward(own[name]):
            raise ValueError(f"--reward_funcs {word}: {name} must be a function that takes "
                             "completions and **columns, because TRL calls it with all columns")
    if not names:
        raise ValueError(f"--reward_funcs {word}: has no reward, which is a function such as "
                         "right(completions, answer, **columns)")
    return [own[name] for name in names]


def read_rewards(words):
    """Find all rewards that --reward_funcs names: in a user's files, or those that TRL's script
    finds. Without names, it is real.py's `verify`. -> list of functions and names"""
    found = [one for word in words or [] for one in (
        rewards_of(word) if re.search(r"\.py(:|$)", word) else [word])]
    names = [getattr(one, "__name__", one) for one in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"--reward_funcs: has two rewards that are called {name}")
    return found or [last_number]


def last_number(completions, answer, **columns):
    """Reward with 1.0 if the last number of a completion is the answer, as real.py does, else 0.0.
    TRL passes texts, or lists of messages. -> list of floats"""
    import real  # here, because it measures the memory of a GPU
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [real.verify(right, text) for right, text in zip(answer, texts)]


def call(reward, rows):
    """Call a reward as TRL does, with the answer of each row as its completion. ValueError if it
    does not return a number, or None, for each. -> (N,), nan for None"""
    texts = [str(row.get("answer", 0)) for row in rows]
    columns = {name: [row[name] for row in rows] for name in rows[0]
               if name not in ("prompt", "completion")}
    with engines.restored():
        rewards = reward(
            prompts=[row["prompt"] for row in rows], completion_ids=[[0] for _ in rows],
            completions=texts if isinstance(rows[0]["prompt"], str) else [
                [{"role": "assistant", "content": text}] for text in texts],
            trainer_state=transformers.TrainerState(), log_extra=lambda *_: None,
            log_metric=lambda *_: None, **columns)
    numbers = torch.tensor([math.nan if one is None else one for one in rewards],
                           dtype=torch.float32)                             # as TRL reads them
    if numbers.shape != (len(rows),):
        raise ValueError(f"returned {rewards!r:.60} for {len(rows)} completions")
    return numbers


def failure(reward, rows):
    """Call a reward. -> its error, or None"""
    try:
        if not (call(reward, rows) > 0).any() and len(rows) > 1:
            print(f"note: the reward {reward.__name__} is not above 0 for any answer alone; it "
                  f"gets answers such as {rows[0].get('answer')!r:.60}")
    except (Exception, SystemExit) as error:            # the function may be anybody's
        return error
    return None


def try_rewards(rewards, data):
    """Call each reward for the first problems, so that an answer that cannot be judged does not end
    the training in some step. ValueError, with one line that names the row. Rewards that are
    models or async functions are not tried."""
    rows = [*itertools.islice(data, TRIED)]
    for reward in rewards:
        is_plain = inspect.isfunction(reward) and not inspect.iscoroutinefunction(reward)
        error = failure(reward, rows) if is_plain and rows else None
        if error:
            found = (one for one in enumerate(rows, 1) if failure(reward, [one[1]]))
            number, row = next(found, (1, rows[0]))
            raise ValueError(f"row {number}: the reward {reward.__name__} fails for the answer "
                             f"{row.get('answer')!r:.60}: {engines.one_line(error)}") from error
