"""Read the completions that other trainers write, for the page: those of TRL with --log_completions
True, and the folder that verl calls trainer.rollout_data_dir.

TRL logs the last completions before each line of its log, and the metrics in trainer_state.json.
An evaluation has the same prompts each time, so what the files of all evaluations share is held
out. verl logs all completions of a step with their scores, and no advantages.
"""
import itertools
import json
import math
import re
from pathlib import Path
from statistics import fmean

from report.logs import loads, records

MOST_GROUPS = 4         # of a step that are shown, as of a run of ours


def has_completions(folder):
    """Whether a folder has completions of TRL or verl."""
    return bool(files_of(folder))


def files_of(folder):
    """Find the files of completions, in the order of their steps. -> {step: Path}"""
    found = {}
    for path in [*Path(folder).glob("completions/completions_*.parquet"),
                 *Path(folder).glob("*.jsonl")]:
        if step := re.fullmatch(r"(?:completions_)?(\d+)", path.stem):
            found[int(step[1])] = path
    return dict(sorted(found.items()))


# ---- completions -----------------------------------------------------------------------------

def text_of(content):
    """Write a prompt or a completion, a text or a list of messages, as a text. -> str"""
    if isinstance(content, str):
        return content
    return "\n".join(str(message.get("content") or "") for message in content)


def number(x):
    """-> a finite float, or None"""
    return float(x) if isinstance(x, (int, float)) and math.isfinite(x) else None


def rows_of(path, names):
    """Read the completions of a step. names: TRL's rewards; without them, all columns of numbers
    between the completion and the advantage. -> list of dicts: prompt, text, reward, advantage,
    answer"""
    if path.suffix == ".jsonl":
        return [{"prompt": row["input"], "text": row["output"], "reward": number(row.get("score")),
                 "advantage": None, "answer": row.get("gts")}
                for row in records(path, "input", "output")]
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path}: needs a package: pip install pyarrow") from None
    rows = []
    for row in pyarrow.parquet.read_table(path).to_pylist():
        own = names or [name for name in row if name not in ("step", "advantage")]
        rewards = [x for x in map(number, map(row.get, own)) if x is not None]
        rows.append({"prompt": text_of(row["prompt"]), "text": text_of(row["completion"]),
                     "reward": sum(rewards) if rewards else None,
                     "advantage": number(row.get("advantage")), "answer": None})
    return rows


def groups_of(step, rows):
    """Put the completions of each prompt together, at most MOST_GROUPS. -> samples for the page"""
    found = []
    for prompt, group in itertools.groupby(rows, key=lambda row: row["prompt"]):
        group = [*group]
        found.append({"step": step, "prompt": prompt, "answer": group[0]["answer"], "completions": [
            {"text": row["text"], "reward": row["reward"], "advantage": row["advantage"]}
            for row in group]})
    return found[:MOST_GROUPS]


# ---- a run -----------------------------------------------------------------------------------

def history_of(folder):
    """Read the newest trainer_state.json of TRL. -> list of dicts, one for each step, empty without
    a state"""
    states = [*Path(folder).glob("**/trainer_state.json")]
    if not states:
        return []
    newest = max(states, key=lambda path: path.stat().st_mtime)
    steps = {}
    for one in loads(newest.read_text("utf-8"))["log_history"]:
        steps.setdefault(one["step"], {}).update(one)
    return [*steps.values()]


def spaced(steps, most):
    """Choose at most `most` of some steps, evenly, with the last one."""
    stride = max(1, math.ceil(len(steps) / most))
    return {*steps[::stride], *steps[-1:]}


def answers_of(evaluations, held_out):
    """Compare the first answers to the held-out prompts in the first and the last evaluation.
    evaluations: {step: rows}. -> records for the page"""
    if not held_out:
        return []
    ends = []
    for step in (min(evaluations), max(evaluations)):
        rows = {row["prompt"]: row for row in reversed(evaluations[step])}
        ends.append({prompt: {"text": row["text"], "right": None,
                              "label": f"evaluation at step {step}, reward {row['reward']}"}
                     for prompt, row in rows.items()})
    return [{"prompt": prompt, "answer": None, "base": ends[0][prompt], "trained": ends[1][prompt]}
            for prompt in ends[0] if prompt in held_out]


def shared_prompts(evaluations):
    """Find the prompts that all evaluations have, of several. {step: rows} -> set"""
    sets = [{row["prompt"] for row in rows} for rows in evaluations.values()]
    return set.intersection(*sets) if len(sets) > 1 else set()


def mean_rewards(files):
    """Average the rewards of each file, as the metrics of a run without a log. -> list of dicts"""
    found = []
    for step, path in files.items():
        rewards = [row["reward"] for row in rows_of(path, ()) if row["reward"] is not None]
        if rewards:
            found.append({"step": step, "reward": fmean(rewards)})
    return found


def missing(metrics, names, evaluations):
    """Say what the page cannot show. -> str, which begins with a space, or is empty"""
    texts = []
    if not metrics:
        texts.append(" There is no log, so the curve is the mean reward of the completions.")
    if len(names) > 1:
        texts.append(" A sample shows the plain sum of its rewards, without their weights.")
    if len(evaluations) == 1:
        texts.append(" Answers to held-out problems are shown after a second evaluation.")
    return "".join(texts)


def read_completions(folder, most_samples):
    """Collect what the page shows of a run of TRL or verl. ValueError if a file cannot be read.
    -> dict, as of read_run of report/page.py"""
    files = files_of(folder)
    history = history_of(folder)
    found = [re.fullmatch("rewards/(.+)/mean", name) for one in history for name in one]
    names = {match[1] for match in found if match}
    evaluations = {one["step"]: rows_of(files[one["step"]], names) for one in history
                   if "eval_reward" in one and one["step"] in files}
    held_out = shared_prompts(evaluations)
    samples = []
    for step in sorted(spaced([*files], most_samples)):
        rows = rows_of(files[step], names)
        samples += groups_of(step, [row for row in rows if row["prompt"] not in held_out])
    metrics = history or mean_rewards(files)
    seconds = next((one["train_runtime"] for one in history if "train_runtime" in one), None)
    record = Path(folder, "loss.json")                  # of engines.trl
    config = json.loads(record.read_text("utf-8")) if record.is_file() else {}
    trainer = "verl" if files[max(files)].suffix == ".jsonl" else "TRL"
    return {
        "name": Path(folder).resolve().name, "command": "",
        "config": {"script": trainer} | {name: str(value) for name, value in config.items()},
        "note": missing(history, names, evaluations),
        "summary": seconds and {"base": {}, "trained": {}, "steps": history[-1]["step"],
                                "seconds_total": seconds},
        "metrics": metrics, "samples": samples,
        "evaluation": answers_of(evaluations, held_out)}
