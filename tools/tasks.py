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
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import common
from tools.runs import DOCS, ROOT, joined, note, put, read_log, read_summary, record, run, table

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
        "accuracy, tool tokens learned": ["grpo.py", "--mask_tool_tokens", "false"]}}
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

def run_task(task, pool, work):
    """All rows of a task, each with every seed. -> summaries, a list for each row"""
    def start(number, command, seed):
        script, *flags = command
        flags = ["--task", task, "--seed", seed, "--base_seed", seed, *flags]
        folder = run_folder(work, task, number, seed)
        summary = run(script, folder, *flags, cwd=work, quiet=True)
        return count_calls(folder, summary) if task == "lookup" else summary

    futures = {}
    for number, (name, command) in enumerate(RUNS[task].items()):
        futures[name] = [pool.submit(start, number, command, seed) for seed in SEEDS]
    results = {name: [future.result() for future in some] for name, some in futures.items()}
    if task == "lookup":
        results["accuracy, then without the tool"] = [
            evaluate_without_tool(run_folder(work, task, 0, seed), work) for seed in SEEDS]
    return results


def run_folder(work, task, number, seed):
    """Where row `number` of a task is run with a seed. -> Path"""
    return Path(work, f"{task}-{number}-{seed}")


def evaluate_without_tool(folder, work):
    """Evaluate the trained policy of a run where the tool says nothing. -> summary"""
    silent = Path(f"{folder}-silent")
    flags = ["--task", "lookup", "--init_from", folder, "--max_steps", "0", "--output_dir", silent]
    subprocess.run([sys.executable, "-c", SILENT_TOOL, *flags], cwd=work, check=True)
    return count_calls(silent, read_summary(silent))


def count_calls(folder, summary):
    """The summary of a run, with the score "calls": which share of the greedy answers kept in
    evaluation.jsonl call the tool. -> summary"""
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


def countdown_table(results):
    head = ["countdown", "pass@1, base", "pass@8, base", "pass@1", "pass@8", "greedy",
            "times the base's pass@1", "training"]
    rows = []
    for name, runs in results.items():
        rows.append([name,
                     scores(runs, "base", "pass@1"),
                     scores(runs, "base", "pass@8"),
                     scores(runs, "trained", "pass@1"),
                     scores(runs, "trained", "pass@8"),
                     scores(runs, "trained", "greedy"),
                     ratios(runs, ("trained", "pass@1"), ("base", "pass@1"), ".1f"),
                     seconds(runs)])
    return table(head, rows)


def gridworld_table(results):
    head = ["gridworld", "return, base", "return", "best return", "of the best",
            "optimal walks, greedy", "training"]
    rows = []
    for name, runs in results.items():
        rows.append([name,
                     scores(runs, "base", "return", ".2f"),
                     scores(runs, "trained", "return", ".2f"),
                     scores(runs, "trained", "best_return", ".2f"),
                     ratios(runs, ("trained", "return"), ("trained", "best_return"), ".3f"),
                     scores(runs, "trained", "greedy"),
                     seconds(runs)])
    return table(head, rows)


def lookup_table(results):
    head = ["lookup, reward", "pass@1, base", "calls the tool, base", "greedy", "pass@1",
            "calls the tool", "steps"]
    rows = []
    for name, runs in results.items():
        rows.append([name,
                     scores(runs, "base", "pass@1"),
                     scores(runs, "base", "calls", ".2f"),
                     scores(runs, "trained", "greedy"),
                     scores(runs, "trained", "pass@1"),
                     scores(runs, "trained", "calls", ".2f"),
                     joined([summary["steps"] for summary in runs], "d")])
    return table(head, rows)


TABLES = {"countdown": countdown_table, "gridworld": gridworld_table, "lookup": lookup_table}
REMARKS = {"lookup": "Calls the tool: share of the first 64 greedy answers that do. "}


def section(task, results):
    """The table of a task, and what is said below it. -> str"""
    said = note(sum(results.values(), []), SEEDS, "each with its own base")
    return f"{TABLES[task](results)}\n{REMARKS.get(task, '')}{said}"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="*", default=list(RUNS), metavar="NAME")
    args = parser.parse_args(argv)

    # the tables of tasks that are not run again stay
    kept = DOCS / "tasks.json"
    results = json.loads(kept.read_text())["results"] if kept.exists() else {}
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(2) as pool:
        for task in args.tasks:
            results[task] = run_task(task, pool, work)
            record("tasks", results=results)

    sections = [section(task, results[task]) for task in RUNS if task in results]
    put("tasks", "\n".join(sections), "tasks")


if __name__ == "__main__":
    common.start(main)
