"""The other tasks, three seeds each, a base for every seed: python -m tools.tasks [NAME ...].

countdown: how far GRPO with the settings of DAPO gets from what the base can do. gridworld: the
return against the best there is, and how a low temperature misses it. lookup: rewards compared, how
many of the greedy answers call the tool, and what goes wrong without it, or if what it says is
learned. Two runs go side by side. Writes docs/tasks.json and, between its marks in docs/tasks.md,
their tables (make tasks).
"""
import argparse
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import common
from tools.runs import DOCS, ROOT, joined, note, put, read_log, read_summary, record, run_all, table

SEEDS = (0, 1, 2)
CALL = re.compile("<search>[^<]+</search>")
RUNS = {                                    # task: name of a row: script and flags
    "countdown": {
        "grpo.py --loss_type dapo": ["grpo.py", "--loss_type", "dapo"]},
    "gridworld": {
        "reinforce.py --view token": ["reinforce.py", "--view", "token", "--stop_at", 2],
        "the same with --temperature 0.1": ["reinforce.py", "--view", "token", "--stop_at", 2,
                                            "--temperature", 0.1],
        "ppo.py": ["ppo.py", "--stop_at", 2]},
    "lookup": {
        "accuracy": ["grpo.py"],
        "fine": ["grpo.py", "--reward", "fine"],
        "coarse": ["grpo.py", "--reward", "coarse"],
        "accuracy, tool tokens learned": ["grpo.py", "--no-mask_tool_tokens"]}}
# A program that runs grpo.py where the tool of lookup says nothing.
SILENT_TOOL = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import grpo
from tasks.lookup import Lookup
Lookup.respond = lambda self, problem, text: ""
grpo.main(sys.argv[1:])
"""


# ---- 1. the runs -----------------------------------------------------------------------------

def run_task(task):
    """All rows of a task, each with every seed. -> summaries, a list for each row"""
    variants = {name: [*words, "--task", task] for name, words in RUNS[task].items()}
    runs = run_all(variants, SEEDS, metrics=(), at_once=2, seeded=("--seed", "--base_seed"),
                   look=look_at_calls if task == "lookup" else None)
    results = {name: [result["summary"] for result in found] for name, found in runs.items()}
    if task == "lookup":
        silent = [result["silent"] for result in runs["accuracy"]]
        results["accuracy, then without the tool"] = silent
    return results


def look_at_calls(name, folder):
    """The summary of a run of lookup with how often it calls the tool; of the row "accuracy", also
    that of the trained policy where the tool says nothing. -> dict"""
    found = {"summary": count_calls(folder)}
    if name == "accuracy":
        silent = Path(f"{folder}-silent")
        flags = ["--task", "lookup", "--init_from", folder, "--max_steps", "0"]
        command = [sys.executable, "-c", SILENT_TOOL, *flags, "--output_dir", silent]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        found["silent"] = count_calls(silent)
    return found


def count_calls(folder):
    """The summary of a run, with the score "calls": which share of the greedy answers kept in
    evaluation.jsonl call the tool. -> summary"""
    summary = read_summary(folder)
    records = read_log(folder, "evaluation")
    for policy in ("base", "trained"):
        texts = [record[policy]["text"] for record in records]
        num_calling = sum(CALL.search(text) is not None for text in texts)
        summary[policy]["calls"] = num_calling / len(texts)
    return summary


# ---- 2. the tables ---------------------------------------------------------------------------

def scores(runs, policy, name, form=".3f"):
    """A score of "base" or "trained", for each seed; - for a base that nobody trained. -> cell"""
    if policy == "base" and all(summary["steps"] == 0 for summary in runs):
        return "-"
    return joined([summary[policy][name] for summary in runs], form)


def ratios(runs, one, other, form):
    """For each seed, one score over another, each named (policy, score). -> cell"""
    quotients = []
    for summary in runs:
        numerator = summary[one[0]][one[1]]
        denominator = summary[other[0]][other[1]]
        quotients.append(numerator / denominator if denominator else math.inf)
    return joined(quotients, form)


def seconds(runs):
    """How long each seed took without the warm start. -> cell"""
    times = [summary["seconds_total"] - summary["seconds_warm_start"] for summary in runs]
    return ", ".join(f"{time:.0f} s" for time in times)


def steps(runs):
    return joined([summary["steps"] for summary in runs], "d")


def score(policy, name, form=".3f"):
    """A column: this score of the runs of a row."""
    return lambda runs: scores(runs, policy, name, form)


# task: the columns of its table, each a function of the runs of a row
TABLES = {
    "countdown": {
        "pass@1, base": score("base", "pass@1"),
        "pass@8, base": score("base", "pass@8"),
        "pass@1": score("trained", "pass@1"),
        "pass@8": score("trained", "pass@8"),
        "greedy": score("trained", "greedy"),
        "times the base's pass@1":
            lambda runs: ratios(runs, ("trained", "pass@1"), ("base", "pass@1"), ".1f"),
        "training": seconds},
    "gridworld": {
        "return, base": score("base", "return", ".2f"),
        "return": score("trained", "return", ".2f"),
        "best return": score("trained", "best_return", ".2f"),
        "of the best":
            lambda runs: ratios(runs, ("trained", "return"), ("trained", "best_return"), ".3f"),
        "optimal walks, greedy": score("trained", "greedy"),
        "training": seconds},
    "lookup": {
        "pass@1, base": score("base", "pass@1"),
        "calls the tool, base": score("base", "calls", ".2f"),
        "greedy": score("trained", "greedy"),
        "pass@1": score("trained", "pass@1"),
        "calls the tool": score("trained", "calls", ".2f"),
        "steps": steps}}
FIRST = {"countdown": "countdown", "gridworld": "gridworld", "lookup": "lookup, reward"}
REMARKS = {"lookup": "Calls the tool: share of the first 64 greedy answers that do. "}


def section(task, results):
    """The table of a task, and what is said below it. -> str"""
    columns = TABLES[task]
    rows = [[name, *(cell(runs) for cell in columns.values())] for name, runs in results.items()]
    said = note(sum(results.values(), []), SEEDS, "each with its own base")
    return f"{table([FIRST[task], *columns], rows)}\n{REMARKS.get(task, '')}{said}"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="*", default=list(RUNS), metavar="NAME")
    args = parser.parse_args(argv)

    # the tables of tasks that are not run again stay
    kept = DOCS / "tasks.json"
    results = json.loads(kept.read_text())["results"] if kept.exists() else {}
    for task in args.tasks:
        results[task] = run_task(task)
        record("tasks", results=results)
    sections = [section(task, results[task]) for task in RUNS if task in results]
    put("tasks", "\n".join(sections), "tasks")


if __name__ == "__main__":
    common.start(main)
