"""Read the completions that other trainers write, for the page: those of TRL with --log_completions
True, and the folder that verl calls trainer.rollout_data_dir.

TRL logs the last completions before each line of its log, and the metrics in trainer_state.json.
An evaluation has the same prompts each time, so the prompts in the files of all evaluations are
held out. verl logs all completions of a step with their scores, and no advantages.
"""
import contextlib
import json
import math
import re
from pathlib import Path
from statistics import fmean

from report.logs import loads, records

MOST_GROUPS = 4         # of a step that are shown, as of a run of ours
KNOWN = {"step", "prompt", "completion", "advantage", "input", "output", "gts", "score"}


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
    """Write a prompt or a completion as a text: a text, a message, or a list of them. -> str"""
    if isinstance(content, dict):
        content = content.get("content") or content.get("text")
    if isinstance(content, list):
        return "\n".join(map(text_of, content))
    return "" if content is None else str(content)


def number(x):
    """-> a finite float, or None"""
    return float(x) if isinstance(x, (int, float)) and math.isfinite(x) else None


def rows_of(path, names):
    """Read the completions of a step. names: TRL's rewards. Without a log that names them, a single
    column of numbers is the reward, and of several, nobody knows which are. -> list of dicts:
    prompt, text, reward, columns (all other numbers), advantage, answer"""
    if path.suffix == ".jsonl":
        found, keys = records(path, "input", "output"), ("input", "output")
    else:
        import pyarrow.parquet
        found, keys = pyarrow.parquet.read_table(path).to_pylist(), ("prompt", "completion")
    rows = []
    for row in found:
        columns = {name: x for name in row
                   if name not in KNOWN and (x := number(row[name])) is not None}
        own = names or ({*columns} if len(columns) == 1 else {})
        rewards = [columns[name] for name in own if name in columns]
        rows.append({"prompt": text_of(row[keys[0]]), "text": text_of(row[keys[1]]),
                     "reward": number(row["score"]) if "score" in row else
                     sum(rewards) if rewards else None, "columns": columns,
                     "advantage": number(row.get("advantage")), "answer": row.get("gts")})
    return rows


def readable(path, names, lost):
    """Read the completions of a step; a file that a kill or a full disk has cut off has none, and
    its name is added to `lost`. ValueError without pyarrow. -> list of dicts, as of rows_of"""
    try:
        return rows_of(path, names)
    except ImportError:
        raise ValueError(f"{path}: needs a package: pip install pyarrow") from None
    except (ValueError, LookupError, TypeError):
        lost[path.name] = True
        return []


def groups_of(step, rows):
    """Put the completions of each prompt together, at most MOST_GROUPS; verl writes a batch in
    another order. -> samples for the page"""
    groups = {}
    for row in rows:
        groups.setdefault(row["prompt"], []).append(row)
    return [{"step": step, "prompt": prompt, "answer": group[0]["answer"], "completions": [
        {"text": row["text"], "reward": row["reward"], "advantage": row["advantage"],
         "remark": ", ".join(f"{name} {x:g}" for name, x in row["columns"].items())}
        for row in group]} for prompt, group in [*groups.items()][:MOST_GROUPS]]


# ---- a run -----------------------------------------------------------------------------------

def history_of(folder):
    """Read the newest trainer_state.json of TRL that is whole. -> list of dicts, one for each step,
    empty without a state"""
    states = Path(folder).glob("**/trainer_state.json")
    for path in sorted(states, key=lambda path: path.stat().st_mtime, reverse=True):
        steps = {}
        with contextlib.suppress(ValueError, LookupError, TypeError):       # a kill has cut it off
            for one in loads(path.read_text("utf-8"))["log_history"]:
                steps.setdefault(one["step"], {}).update(one)
            return [*steps.values()]
    return []


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


def mean_rewards(files, lost):
    """Average the rewards of each file, as the metrics of a run without a log. -> list of dicts"""
    found = []
    for step, path in files.items():
        rewards = [row["reward"] for row in readable(path, (), lost) if row["reward"] is not None]
        if rewards:
            found.append({"step": step, "reward": fmean(rewards)})
    return found


def steps_in_words(steps):
    """Write steps, of many only the first and the last one. -> str"""
    few = [*map(str, steps)]
    return ", ".join(few if len(few) < 6 else [*few[:2], "...", few[-1]])


def read_completions(folder, most_samples):
    """Collect what the page shows of a run of TRL or verl. ValueError if a file cannot be read.
    -> dict, as of read_run of report/page.py"""
    files, history, lost, notes = files_of(folder), history_of(folder), {}, []
    trainer = "verl" if files[max(files)].suffix == ".jsonl" else "TRL"
    logged = {one["step"] for one in history} if trainer == "TRL" else {}
    if logged and (others := files.keys() - logged):    # of a run that was resumed before them
        notes.append(f"The log has no step {steps_in_words(sorted(others))}, so these samples are "
                     "left out.")
        files = {step: path for step, path in files.items() if step in logged}
    found = [re.fullmatch("rewards/(.+)/mean", name) for one in history for name in one]
    names = {match[1] for match in found if match}
    evaluations = {one["step"]: readable(files[one["step"]], names, lost) for one in history
                   if one["step"] in files and any(
                       re.fullmatch("eval_(.+_)?reward", name) for name in one)}
    held_out = shared_prompts(evaluations)
    samples = []
    for step in sorted(spaced([*files], most_samples)):
        rows = readable(files[step], names, lost)
        if step in evaluations:
            rows = [row for row in rows if held_out and row["prompt"] not in held_out]
        samples += groups_of(step, rows)
    metrics = history or mean_rewards(files, lost)
    if not history and metrics:
        notes.append("There is no log, so the curve is the mean reward of the completions.")
    elif not history:
        notes.append("There is no log, so the page does not know which columns are rewards.")
    if len(names) > 1:
        notes.append("The reward of a sample is the plain sum of its rewards, without weights.")
    if evaluations:
        notes.append(f"At step {steps_in_words(evaluations)}, TRL wrote the completions of an "
                     "evaluation over those of the step: evaluate less often to see more samples.")
    if len(evaluations) == 1:
        notes.append("Answers to held-out problems are shown after a second evaluation.")
    if lost:
        notes.append(f"These files cannot be read: {', '.join(lost)}.")
    config = {}
    with contextlib.suppress(OSError, ValueError):
        config = json.loads(Path(folder, "loss.json").read_text("utf-8"))      # of engines.trl
    seconds = next((one["train_runtime"] for one in history if "train_runtime" in one), None)
    return {
        "name": Path(folder).resolve().name, "command": "",
        "config": {"script": trainer} | {name: str(value) for name, value in config.items()},
        "note": "".join(f" {note}" for note in notes),
        "summary": seconds and {"base": {}, "trained": {}, "steps": history[-1]["step"],
                                "seconds_total": seconds},
        "metrics": metrics, "samples": samples,
        "evaluation": answers_of(evaluations, held_out)}
