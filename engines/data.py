"""Read the problems and the rewards of a run in another trainer.

Data are what the file says: an answer stays the text that the file has, so 007, None or a date do
not become 7, nothing or a time. A reward is tried on each problem before a model is loaded.
"""
import ast
import csv
import inspect
import itertools
import json
import math
import re
import textwrap
from pathlib import Path

import datasets
import huggingface_hub
import numpy
import pyarrow.parquet
import torch
import transformers

import engines

KINDS = ("jsonl", "json", "csv", "parquet")
MOST_TRIED = 10_000     # problems on which the rewards are tried, at most
CALL = 64               # problems in a call of a reward that is tried


# ---- 1. problems -----------------------------------------------------------------------------

def as_text(answer, kind):
    """Write an answer of a column of this kind, such as numbers, dates or classes, as a text. None
    stays None."""
    if answer is None:
        return None
    if isinstance(kind, datasets.ClassLabel):
        return kind.int2str(answer)
    if isinstance(answer, bytes):
        return answer.decode()
    if kind.dtype in ("float16", "float32"):                # 0.1, not 0.10000000149011612
        answer = numpy.dtype(kind.dtype).type(answer)
    return str(answer)


def json_rows(text):
    """Read a JSON object, or a list of objects. An answer that is a number, true or false becomes
    the text that the file has. -> list of dicts"""
    rows, texts = json.loads(text), json.loads(text, parse_float=str, parse_int=str,
                                               parse_constant=str)
    if not isinstance(rows, list):
        rows, texts = [rows], [texts]
    for row, exact in zip(rows, texts):
        if not isinstance(row, dict):
            raise ValueError("is not an object, {...}")
        answer = exact.get("answer")
        if answer is not None and not isinstance(answer, (list, dict)):
            row["answer"] = answer if isinstance(answer, str) else json.dumps(answer)
    return rows


def csv_rows(lines):
    """Read CSV. ValueError if a line has more or fewer fields than the first one. -> list of dicts
    """
    rows = []
    reader = csv.DictReader(lines, strict=True)
    for row in reader:
        if None in row or None in row.values():
            raise ValueError(f"line {reader.line_num}: has not as many fields as the first line")
        rows.append(row)
    return rows


def rows_of(file):
    """Read the rows of a file of JSON lines or CSV, or of a JSON file with one list. -> list of
    dicts. ValueError, with the number of the line, if one cannot be read"""
    with open(file, encoding="utf-8-sig", newline="") as lines:
        if file.suffix == ".csv":
            return csv_rows(lines)
        text = lines.read()
    if file.suffix == ".json" and text.lstrip().startswith("["):
        return json_rows(text)
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                rows += json_rows(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}: {line[:60]!r}") from None
    return rows


def read_file(file):
    """Read a file of problems. -> Dataset"""
    if file.suffix == ".parquet":
        return datasets.Dataset(pyarrow.parquet.read_table(file))
    rows = rows_of(file)
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {}
    for name in names:
        try:
            columns[name] = pyarrow.array([row.get(name) for row in rows])
        except pyarrow.ArrowException as error:
            raise ValueError(f"the column {name} has values of several kinds: {error}") from None
    return datasets.Dataset.from_dict(columns)


def read_local(path, split):
    """Read a file, or the files of a folder that are called like a split. -> Dataset, or None if
    there is none"""
    if path.is_file():
        return read_file(path)
    name = rf"{re.escape(split)}([-._].*)?\.({'|'.join(KINDS)})"
    files = [file for file in sorted(path.rglob("*")) if re.fullmatch(name, file.name)]
    return datasets.concatenate_datasets([*map(read_file, files)]) if files else None


def ask_hub(flag, name, file, revision=None, kind="model"):
    """Raise a ValueError if neither this machine nor the Hub has a model or a data set with a file.
    It asks once; the packages themselves would try to reach the Hub for half a minute."""
    try:
        cached = huggingface_hub.try_to_load_from_cache(
            name, file, revision=revision, repo_type=kind)
        if cached is None:
            huggingface_hub.repo_info(name, revision=revision, repo_type=kind, timeout=10)
    except Exception as error:              # of the network, or for a name that cannot be one
        raise ValueError(f"{flag} {name}: there is no such file or folder here, and the Hub does "
                         f"not have it: {engines.one_line(error)}") from None


def read(flags, has_eval):
    """Read a file, a folder of files, or a data set of the Hub. ValueError, with one line, if it
    has no problems. -> list: the data to train on and, with has_eval, the data to evaluate on"""
    datasets.disable_progress_bars()
    name = flags.dataset_name or ""
    path = Path(name)
    splits = [flags.dataset_train_split, *[flags.dataset_test_split] * has_eval]
    if not name:
        raise ValueError("--dataset_name: is missing; name a file, a folder or a data set")
    is_local = path.exists() or path.suffix[1:] in KINDS
    *owner, own = name.split("/")
    prepared = "___".join([*owner, datasets.naming.camelcase_to_snakecase(own)])    # in its cache
    if not is_local and not Path(datasets.config.HF_DATASETS_CACHE, prepared).exists():
        ask_hub("--dataset_name", name, "README.md", kind="dataset")
    try:
        if is_local:
            path.stat()                         # FileNotFoundError
            is_file = not path.is_dir()
            found = {split: read_local(path, split) for split in splits[:1 if is_file else 2]}
        else:
            found = datasets.load_dataset(
                name, name=flags.dataset_config, streaming=flags.dataset_streaming)
    except Exception as error:              # the packages raise nearly anything
        cause = engines.one_line(error.__cause__ or error)
        raise ValueError(f"--dataset_name {name}: cannot be read: {cause}") from None
    for split in splits:
        if split not in found or found[split] is None:
            raise ValueError(f"--dataset_name {name}: has no split {split}; to evaluate on files, "
                             "name a folder with train.jsonl and test.jsonl")
    return [checked(found[split], f"--dataset_name {name}") for split in splits]


def is_prompt(prompt):
    """Whether a prompt is a text or a conversation."""
    if isinstance(prompt, list):
        return prompt != [] and all(
            isinstance(one, dict) and one.get("role") and one.get("content") is not None
            for one in prompt)
    return isinstance(prompt, str)


def checked(data, name):
    """Write the answers as texts. ValueError if there are no rows, or no prompts. -> the data"""
    columns = data.column_names or []
    if isinstance(data, datasets.Dataset) and len(data) == 0:
        raise ValueError(f"{name}: has no rows")
    if columns and "prompt" not in columns:
        raise ValueError(f"{name}: has no column prompt, but {', '.join(columns)}")
    for row, prompt in enumerate(data["prompt"] if isinstance(data, datasets.Dataset) else (), 1):
        if not is_prompt(prompt):
            raise ValueError(f"{name}, row {row}: the prompt must be a text, or a list of messages "
                             f"with role and content, but it is {prompt!r:.60}")
    kind = (data.features or {}).get("answer")
    is_one = isinstance(kind, (datasets.Value, datasets.ClassLabel))        # no list, no dict
    if is_one and kind.dtype not in ("string", "large_string", "null"):
        features = datasets.Features({**data.features, "answer": datasets.Value("string")})
        data = data.map(lambda row: {"answer": as_text(row["answer"], kind)}, features=features)
    return data


# ---- 2. rewards ------------------------------------------------------------------------------

def is_reward(function):
    """Whether TRL can call a function as a reward: it gets completions, and all columns."""
    parameters = inspect.signature(function).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return takes_all and not parameters.keys().isdisjoint(("completions", "completion_ids"))


def called_by(function):
    """Collect the names that a function's text uses, but not those of its own variables. -> set"""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    own = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return {node.id for node in names} - own


def rewards_of(word):
    """Find the rewards that a word of --reward_funcs names: FILE.py:a,b, or FILE.py for all public
    functions that have the signature of a reward, and that no other function of the file calls.
    ValueError if there is none. -> list of functions"""
    file, wanted = engines.split_name(word)
    if not file.endswith(".py"):
        raise ValueError(f"--reward_funcs {word}: must be a Python file, such as rewards.py")
    module = engines.read_file(file)
    own = {name: value for name, value in vars(module).items()
           if inspect.isfunction(value) and value.__module__ == module.__name__}
    if wanted:
        names = wanted.split(",")
    else:
        names = [name for name, value in own.items() if name[0] != "_" and is_reward(value)
                 and not any(name in called_by(other) for other in own.values()
                             if other is not value)]
    for name in names:
        if name not in own:
            raise ValueError(f"--reward_funcs {word}: has no function {name}")
        if not is_reward(own[name]):
            raise ValueError(f"--reward_funcs {word}: {name} must take completions and **columns, "
                             "because TRL calls it with all columns of the data")
    if not names:
        raise ValueError(f"--reward_funcs {word}: has no reward, which is a function such as "
                         "right(completions, answer, **columns)")
    return [own[name] for name in names]


def last_number(completions, answer, **columns):
    """Reward with 1.0 if the last number of a completion is the answer, as real.py does, else 0.0.
    TRL passes texts, or lists of messages. -> list of floats"""
    import real  # here, because it measures the memory of a GPU
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [real.verify(right, text) for right, text in zip(answer, texts)]


def read_rewards(words):
    """Find all rewards that --reward_funcs names; without names, it is real.py's `verify`. -> list
    of functions"""
    found = [one for word in words or [] for one in rewards_of(word)]
    names = [one.__name__ for one in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"--reward_funcs: has two rewards that are called {name}")
    return found or [last_number]


def call(reward, rows):
    """Call a reward as TRL does, with the answer of each row as its completion. ValueError if it
    does not return a number, or None, for each. -> (N,), nan for None"""
    texts = [str(row.get("answer", 0)) for row in rows]
    are_chats = not isinstance(rows[0]["prompt"], str)
    columns = {name: [row[name] for row in rows] for name in rows[0]
               if name not in ("prompt", "completion")}
    rewards = reward(
        prompts=[row["prompt"] for row in rows], completion_ids=[[0] for _ in rows],
        completions=[[{"role": "assistant", "content": text}] if are_chats else text
                     for text in texts],
        trainer_state=transformers.TrainerState(), log_extra=lambda *_: None,
        log_metric=lambda *_: None, **columns)
    is_list = isinstance(rewards, (list, tuple)) or hasattr(rewards, "tolist")
    if not is_list or len(rewards) != len(rows):
        raise ValueError(f"returned {rewards!r:.60} for {len(rows)} completions; it must return a "
                         "list with a number for each")
    numbers = torch.tensor([math.nan if one is None else one for one in rewards],
                           dtype=torch.float32)                             # as TRL reads them
    if numbers.dim() != 1 or numbers.isinf().any():
        raise ValueError(f"returned {rewards!r:.60}; each reward must be a finite number, or None")
    return numbers


def failure(reward, rows):
    """Call a reward. -> what is wrong, on one line, or None"""
    try:
        call(reward, rows)
    except (Exception, SystemExit) as error:            # the function may be anybody's
        return engines.one_line(error)
    return None


def try_rewards(rewards, data, name):
    """Call each reward for each problem, at most MOST_TRIED, or CALL of a stream. Without this, an
    answer that cannot be judged would end the training in some step. ValueError, with one line that
    names the row. Rewards that are models or async functions are not tried."""
    most = MOST_TRIED if isinstance(data, datasets.Dataset) else CALL
    rows = [*itertools.islice(data, most)]
    plain = [one for one in rewards if inspect.isfunction(one)
             and not inspect.iscoroutinefunction(one)]
    for reward in plain:
        for start in range(0, len(rows), CALL):
            part = rows[start:start + CALL]
            if failure(reward, part) is None:
                continue
            for number, row in enumerate(part, start + 1):
                if why := failure(reward, [row]):
                    raise ValueError(f"{name}, row {number}: the reward {reward.__name__} fails "
                                     f"for the answer {row.get('answer')!r:.60}: {why}")
            raise ValueError(f"the reward {reward.__name__} fails: {failure(reward, part)}")
        if rows and (call(reward, rows[:CALL]) <= 0).all():
            print(f"note: the reward {reward.__name__} is not above 0 for any answer alone; it "
                  f"gets answers as texts, such as {rows[0].get('answer')!r:.60}")
