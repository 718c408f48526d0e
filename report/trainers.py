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
    prompt, text, reward, remark (the columns, if there are several), advantage, answer"""
    if path.suffix == ".jsonl":
        found = records(path, "input", "output")
        prompt, text, *others = "input", "output", "step", "gts", "score"
    else:
        import pyarrow.parquet
        found = pyarrow.parquet.read_table(path).to_pylist()
        prompt, text, *others = "prompt", "completion", "step", "advantage"
    rows = []
    for row in found:
        columns = {name: number(row[name]) for name in row.keys() - {prompt, text, *others}}
        columns = {name: columns[name] for name in row if columns.get(name) is not None}
        own = ["score"] if "score" in others else names or [*columns] * (len(columns) == 1)
        rewards = [x for x in (number(row.get(name)) for name in own) if x is not None]
        several = columns if len({*columns, *own}) > 1 else {}
        rows.append({"prompt": text_of(row[prompt]), "text": text_of(row[text]),
                     "remark": ", ".join(f"{name} {x:g}" for name, x in several.items()),
                     "reward": sum(rewards) if rewards else None,
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
        {name: row[name] for name in ("text", "reward", "advantage", "remark")} for row in group]}
        for prompt, group in [*groups.items()][:MOST_GROUPS]]


# ---- a run -----------------------------------------------------------------------------------

def history_of(folder):
    """Read TRL's newest trainer_state.json that is whole. -> list of dicts, one for each step"""
    states = Path(folder).glob("**/trainer_state.json")
    for path in sorted(states, key=lambda path: path.stat().st_mtime, reverse=True):
        steps = {}
        with contextlib.suppress(ValueError, LookupError, TypeError):       # a kill has cut it off
            for one in loads(path.read_text("utf-8"))["log_history"]:
                steps.setdefault(one["step"], {}).update(one)
            return [*steps.values()]
    return []


def answers_of(evaluations, held_out):
    """Compare the first answers to the held-out prompts in the first and the last evaluation.
    evaluations: {step: rows}. -> records for the page"""
    ends = []
    for step in (min(evaluations), max(evaluations)):
        rows = {row["prompt"]: row for row in reversed(evaluations[step])}
        ends.append({prompt: {"text": row["text"], "right": None,
                              "label": f"evaluation at step {step}, reward {row['reward']}"}
                     for prompt, row in rows.items()})
    return [{"prompt": prompt, "answer": None, "base": ends[0][prompt], "trained": ends[1][prompt]}
            for prompt in ends[0] if prompt in held_out]


def read_completions(folder, most_samples):
    """Collect what the page shows of a run of TRL or verl. ValueError if a file cannot be read.
    -> dict, as of read_run of report/page.py"""
    files, history, lost, notes = files_of(folder), history_of(folder), {}, []
    trainer = "verl" if files[max(files)].suffix == ".jsonl" else "TRL"
    logged = {one["step"] for one in history} if trainer == "TRL" else {}
    if number := len(logged and files.keys() - logged):
        notes.append(f"{number} of {len(files)} files of samples are left out, because the log "
                     "lacks their steps: a run that was resumed may have written them before.")
        files = {step: path for step, path in files.items() if step in logged}
    found = [re.fullmatch("rewards/(.+)/mean", name) for one in history for name in one]
    names = {match[1] for match in found if match}
    if len(names) > 1:
        notes.append("The reward of a sample is the plain sum of its rewards, without weights.")
    rows = lambda step: readable(files[step], names, lost)      # of a long run, not all at once
    evaluated = [one["step"] for one in history if one["step"] in files
                 and any(re.fullmatch("eval_(.+_)?reward", name) for name in one)]
    evaluations = {step: some for step in evaluated if (some := rows(step))}
    if evaluations:
        notes.append(f"Evaluations have replaced the samples of {len(evaluations)} of {len(files)} "
                     "logged steps, because TRL writes both to one file: evaluate less often.")
    held_out = set()                            # the prompts that all evaluations have, of several
    if len(evaluations) > 1:
        held_out = set.intersection(*({row["prompt"] for row in some}
                                      for some in evaluations.values()))
    elif evaluations:
        notes.append("Answers to held-out problems are shown after a second evaluation.")
    stride = max(1, math.ceil(len(files) / most_samples))
    samples = []
    for step in sorted({*[*files][::stride], *[*files][-1:]}):
        if held_out or step not in evaluations:         # else nobody knows which rows are of it
            samples += groups_of(step, [row for row in rows(step) if row["prompt"] not in held_out])
    metrics = history
    if not history:
        means = {step: [row["reward"] for row in rows(step) if row["reward"] is not None]
                 for step in files}
        metrics = [{"step": step, "reward": fmean(some)} for step, some in means.items() if some]
        notes.append("There is no log, so the " + (
            "curve is the mean reward of the completions." if metrics else
            "page does not know which columns are rewards."))
    if lost:
        notes.append(f"These files cannot be read: {', '.join(lost)}.")
    rates = [one["learning_rate"] for one in history if "learning_rate" in one]
    config = {"largest learning_rate of the log": f"{max(rates):.3g}"} if rates else {}
    for name in ("flags.json", "loss.json"):                                   # of engines.trl
        with contextlib.suppress(OSError, ValueError):
            config |= json.loads(Path(folder, name).read_text("utf-8"))
    seconds = next((one["train_runtime"] for one in history if "train_runtime" in one), None)
    return {
        "name": Path(folder).resolve().name, "command": "",
        "config": {"script": trainer} | {name: str(value) for name, value in config.items()},
        "note": "".join(f" {note}" for note in notes),
        "summary": seconds and {"base": {}, "trained": {}, "steps": history[-1]["step"],
                                "seconds_total": seconds},
        "metrics": metrics, "samples": samples,
        "evaluation": answers_of(evaluations, held_out) if held_out else []}
