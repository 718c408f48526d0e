"""Tables of runs, on the pages that they are about: python -m tools.tables zero rlhf passk tasks.

A table has a row for each of some runs, and in each cell the numbers of all seeds. Writes
docs/NAME.json, for some docs/NAME.png and, between its marks on a page, the table (make zero, make
rlhf, make passk, make tasks).
"""
import argparse
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import common
from lab.draw import BLUE, GREEN, GREY, ORANGE, RED, SKY, curves
from tools.runs import DOCS, ROOT, joined, note, put, read_log, read_summary, record, run_all, table

K = 64                                      # samples of a problem, in passk
TOKEN = "reinforce.py --task gridworld --view token --stop_at 2"
PPO = "ppo.py --reward model --stop_at 2 --max_steps 60"


# ---- 1. columns: functions of the results of a row, one for each seed ------------------------

def score(policy, name, form=".3f"):
    """A score of "base" or "trained"; - for a base that nobody trained."""
    def cell(results):
        if policy == "base" and all(result["steps"] == 0 for result in results):
            return "-"
        return joined([result[policy][name] for result in results], form)
    return cell


def at_k(policy, name, k):
    """Number k of a list of scores, such as pass@k."""
    return lambda results: joined([result[policy][name][k - 1] for result in results], ".3f")


def ratio(one, other, form):
    """One score over another, each named (policy, score)."""
    def cell(results):
        quotients = []
        for result in results:
            denominator = result[other[0]][other[1]]
            numerator = result[one[0]][one[1]]
            quotients.append(numerator / denominator if denominator else math.inf)
        return joined(quotients, form)
    return cell


def along(metric, form=".2f"):
    """A metric in the first step and in the last."""
    return lambda results: ", ".join(f"{result[metric][0]:{form}} -> {result[metric][-1]:{form}}"
                                     for result in results)


def at_best(metric):
    """A metric in the step in which the most samples were right."""
    def cell(results):
        values = []
        for result in results:
            best = result["accuracy"].index(max(result["accuracy"]))
            values.append(result[metric][best])
        return joined(values, ".2f")
    return cell


def steps(results):
    return joined([result["steps"] for result in results], "d")


def seconds(results):
    """How long each seed took without the warm start."""
    times = [result["seconds_total"] - result["seconds_warm_start"] for result in results]
    return ", ".join(f"{time:.0f} s" for time in times)


# ---- 2. the calls of lookup ------------------------------------------------------------------

CALL = re.compile("<search>[^<]+</search>")
# A program that runs grpo.py where the tool of lookup says nothing.
SILENT_TOOL = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import grpo
from tasks.lookup import Lookup
Lookup.respond = lambda self, problem, text: ""
grpo.main(sys.argv[1:])
"""


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


# ---- 3. the pictures -------------------------------------------------------------------------

def lines(results, metrics):
    """The curves of the first seed of a row, by name. -> {name: [values]}"""
    return {name: [results[0][metric]] for name, metric in metrics.items()}


def draw_zero(results):
    [runs] = results.values()
    lengths = runs[0]["completions/mean_length"]
    shown = lines(runs, {"accuracy": "accuracy", "format": "rewards/format/mean"})
    return curves(shown, f"Format and right answers are rewarded, and answers grow from "
                  f"{lengths[0]:.0f} to {lengths[-1]:.0f} tokens", given={"accuracy": BLUE,
                  "format": ORANGE}, ylabel="share of completions", ylim=(0, 1.02))


def draw_rlhf(results):
    free, held = results.values()
    shown = lines(free, {"reward": "reward", "right": "accuracy"})
    shown |= lines(held, {"right, --beta 0.1": "accuracy"})
    right = free[0]["accuracy"]
    return curves(shown, "PPO pleases a reward model more and more, while right answers go from "
                  f"{right[0]:.0%} to {max(right):.0%} to {right[-1]:.0%}",
                  given=dict(zip(shown, (GREY, RED, BLUE))), ylabel="mean of a batch")


def draw_passk(results):
    [runs] = [runs for task, runs in results.items() if task == "countdown"]
    shown = {f"{name}, {policy}": [runs[0][policy][name]]
             for name in ("pass@k", "maj@k") for policy in ("trained", "base")}
    first, last = (runs[0][policy]["pass@k"] for policy in ("base", "trained"))
    return curves(shown, f"Countdown: with {K} samples the base solves {first[-1]:.0%}, with one "
                  f"{first[0]:.0%}, which RL raises to {last[0]:.0%}", x=range(1, K + 1),
                  given=dict(zip(shown, (BLUE, SKY, RED, GREEN))), xscale="log", xlabel="k",
                  ylim=(0, 1.02), ylabel="share of problems")


# ---- 4. the tables ---------------------------------------------------------------------------

class Table(NamedTuple):
    first: str                                  # the heading of the names of the rows
    rows: dict                                  # name -> command line
    columns: dict                               # heading -> function of the results of a row
    metrics: tuple = ()
    seeds: tuple = (0, 1, 2)
    bases: str = "from one base"
    seeded: tuple = ("--seed",)
    remark: str = ""
    look: object = None


PASSK = f"--num_eval_samples {K} --num_eval_problems 256"
OF_TASKS = {"bases": "each with its own base", "seeded": ("--seed", "--base_seed")}
TABLES = {
    "zero": {"zero": Table(
        "", {"grpo.py --reward accuracy+format": "grpo.py --reward accuracy+format"},
        {"steps": steps, "accuracy": along("accuracy"), "format": along("rewards/format/mean"),
         "tokens": along("completions/mean_length", ".0f"),
         "greedy, held out": score("trained", "greedy")},
        ("accuracy", "rewards/format/mean", "completions/mean_length"))},
    "rlhf": {"rlhf": Table(
        "PPO", {"no penalty": f"{PPO} --beta 0", "--beta 0.1": f"{PPO} --beta 0.1"},
        {"true accuracy": along("accuracy"), "at best": at_best("accuracy"),
         "proxy": along("reward"), "then": at_best("reward"),
         "KL to the base, a token": along("kl"), "greedy, held out": score("trained", "greedy")},
        ("accuracy", "reward", "kl"),
        remark="All but the last column: of the samples trained on. ")},
    "passk": {"passk": Table(
        "task", {task: f"grpo.py --task {task} {PASSK}" for task in ("arithmetic", "countdown")},
        {f"{name[:-1]}{k}, {policy}": at_k(policy, name, k) for policy in ("base", "trained")
         for name in ("pass@k", "maj@k") for k in (1, 8, K)}, seeds=(0,),
        bases="a base for each task")},
    "tasks": {
        "countdown": Table(
            "countdown", {"grpo.py --loss_type dapo": "grpo.py --task countdown --loss_type dapo"},
            {"pass@1, base": score("base", "pass@1"), "pass@8, base": score("base", "pass@8"),
             "pass@1": score("trained", "pass@1"), "pass@8": score("trained", "pass@8"),
             "greedy": score("trained", "greedy"),
             "times the base's pass@1": ratio(("trained", "pass@1"), ("base", "pass@1"), ".1f"),
             "training": seconds}, **OF_TASKS),
        "gridworld": Table(
            "gridworld", {"reinforce.py --view token": TOKEN,
                          "the same with --temperature 0.1": f"{TOKEN} --temperature 0.1",
                          "ppo.py": "ppo.py --task gridworld --stop_at 2"},
            {"return, base": score("base", "return", ".2f"),
             "return": score("trained", "return", ".2f"),
             "best return": score("trained", "best_return", ".2f"),
             "of the best": ratio(("trained", "return"), ("trained", "best_return"), ".3f"),
             "optimal walks, greedy": score("trained", "greedy"), "training": seconds},
            **OF_TASKS),
        "lookup": Table(
            "lookup, reward", {"accuracy": "grpo.py --task lookup",
                               "fine": "grpo.py --task lookup --reward fine",
                               "coarse": "grpo.py --task lookup --reward coarse",
                               "accuracy, tool tokens learned":
                                   "grpo.py --task lookup --no-mask_tool_tokens"},
            {"pass@1, base": score("base", "pass@1"),
             "calls the tool, base": score("base", "calls", ".2f"),
             "greedy": score("trained", "greedy"), "pass@1": score("trained", "pass@1"),
             "calls the tool": score("trained", "calls", ".2f"), "steps": steps},
            remark="Calls the tool: share of the first 64 greedy answers that do. ",
            look=look_at_calls, **OF_TASKS)}}
PICTURES = {"zero": draw_zero, "rlhf": draw_rlhf, "passk": draw_passk}


def measure(made):
    """All rows of a table. -> {row: [result of each seed]}: summaries, and the metrics by step"""
    variants = {name: command.split() for name, command in made.rows.items()}
    runs = run_all(variants, made.seeds, made.metrics, seeded=made.seeded, look=made.look)
    found = {}
    for name, results in runs.items():
        found[name] = [result["summary"] | {metric: result[metric] for metric in made.metrics}
                       for result in results]
    if made.look:
        found["accuracy, then without the tool"] = [one["silent"] for one in runs["accuracy"]]
    return found


def section(made, results):
    """A table, and what is said below it. -> str"""
    rows = [[name, *(cell(runs) for cell in made.columns.values())]
            for name, runs in results.items()]
    said = note(sum(results.values(), []), made.seeds, made.bases)
    return f"{table([made.first, *made.columns], rows)}\n{made.remark}{said}"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=TABLES)
    for name in parser.parse_args(argv).names:
        results = {part: measure(made) for part, made in TABLES[name].items()}
        record(name, results=results)
        if name in PICTURES:
            PICTURES[name](results[name]).save(DOCS / f"{name}.png")
        put(name, "\n".join(section(TABLES[name][part], results[part]) for part in results), name)


if __name__ == "__main__":
    common.start(main)
