"""Measure how often a base fails, and where the main job then ends: with many seeds, other rates
and other rounding: make bases. The numbers go to docs/lab/bases.json and its page."""
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import common
import grpo
import plumbing
import reinforce
from lab import bench, docs
from lab.claims import imitation as ways
from report import replaced, start
from report.logs import read_summary

ONCE = "4e-3"                           # peak of the rate of matrices
MAIN, IMITATION = "grpo.py", "reinforce.py --method rejection --max_steps 45"
FEW, LATER, UNSEEN = range(120, 124), range(184, 216), range(100, 112)
LOWEST = (121, 127, 134, 137, 138, 142, 150, 156, 164)          # of the first try
OTHERS = (124, 132, 140, 148, 158, 166, 172, 180)
CASES = {ONCE: range(120, 184), MAIN: (*LOWEST, *OTHERS, *LATER, *UNSEEN), IMITATION: UNSEEN,
         f"{MAIN}, whole batches": FEW, f"{MAIN}, without AVX": FEW}
# README.md's table of the scripts, each at its best rate, by the names of lab/claims/imitation.py
WAYS = ([f"exact: {way}" for way in (ways.NONE, ways.THREE, ways.GRPO, ways.GSPO, ways.COLD)]
        + [f"points: {way}" for way in (ways.NONE, ways.TEN, ways.BATCH, ways.GRPO, ways.COLD,
                                        ways.WARM)])
SCRIPTS = {"grpo.py": grpo, "reinforce.py": reinforce}


# ---- 1. measuring ----------------------------------------------------------------------------

def whole(share_of_loss, model, batch, rows):
    """Compute the loss of a whole batch instead of that of its first half, and 0 for the second:
    the same sum, rounded differently. -> scalar"""
    every = batch[-1].argsort()
    if len(rows) == len(every):
        return share_of_loss(model, batch, rows)
    return share_of_loss(model, batch, every) * float(rows[0] == every[0])


def measure(case, seed):
    """Measure a base, or a whole run. -> {column: number}"""
    torch.set_num_threads(1)
    print(f"{case}, seed {seed}", flush=True)
    if case.startswith(("exact: ", "points: ")):
        return ways.measure(case, seed)
    what, _, how = case.partition(", ")
    if how == "without AVX" and os.environ["ATEN_CPU_CAPABILITY"] != "default":
        words = f"from lab import bases; print(bases.json.dumps(bases.measure{case, seed}))"
        done = subprocess.run([sys.executable, "-c", words], check=True, text=True, cwd=docs.ROOT,
                              stdout=subprocess.PIPE,
                              env=os.environ | {"ATEN_CPU_CAPABILITY": "default"})
        return json.loads(done.stdout.splitlines()[-1])
    share_of_loss = plumbing.share_of_loss
    if how == "whole batches":
        share_of_loss = functools.partial(whole, share_of_loss)
    seeds = ["--seed", str(seed), "--base_seed", str(seed)]
    with replaced(plumbing, share_of_loss=share_of_loss):
        return run(what, seeds) if what.startswith((MAIN, "reinforce.py")) else base(what, seeds)


def run(command, seeds):
    """Run a script in an empty folder, so that it makes its own base. -> {column: number}"""
    script, *flags = command.split()
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)
        SCRIPTS[script].main([*flags, *seeds, "--eval_steps", "1000", "--output_dir", "run"])
        summary = read_summary(Path("run"))
        os.chdir(home)
    return {f"{when} {name}": summary[when].get(name)
            for when in ("base", "trained") for name in COLUMNS}


def base(rate, seeds):
    """Make a base without the second try of load_base. `rule` is the loss by which load_base
    decides. -> {column: number}"""
    cfg = plumbing.parse_flags(grpo.Config, ["--base_learning_rate", rate, *seeds])
    task = common.load_task(cfg, grpo.verify)
    policy = grpo.GPT(cfg)
    plumbing.fix_arithmetic()
    rule = plumbing.warm_start(policy, task, cfg)
    forced = grpo.evaluate(policy, task, cfg, greedy=True, opening="<think>")
    return {"forced": forced["greedy"], "rule": rule}


COLUMNS = ("greedy", "greedy_forced_think", "pass@1", "think_share", "accuracy_given_think")


# ---- 2. the page -----------------------------------------------------------------------------

RUN = ("base greedy_forced_think", "trained greedy", "trained pass@1")
ROWS = [                                # name, case, seeds, columns
    ("64 bases", ONCE, CASES[ONCE], ("forced",)),
    ("grpo.py: the 9 lowest of 64 bases", MAIN, LOWEST, RUN),
    ("seeds 184 to 215", MAIN, LATER, RUN), ("seeds 100 to 111", MAIN, UNSEEN, RUN),
    ("whole batches", f"{MAIN}, whole batches", FEW, RUN),
    ("without AVX", f"{MAIN}, without AVX", FEW, RUN)]


def spread(values):
    """Write the median of some numbers, with the lowest and the highest. -> str"""
    values = [value for value in values if value is not None]
    if not values:
        return ""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def page():
    """Write the tables of docs/lab/bases.md."""
    results, about = docs.load("lab/bases", "run: make bases")

    def column(case, name, seeds=UNSEEN):
        return [results[case, seed].get(name) for seed in seeds if (case, seed) in results]
    rows = [[name, len(column(case, names[0], seeds)),
             *(spread(column(case, one, seeds)) for one in names), *[""] * (3 - len(names))]
            for name, case, seeds, names in ROWS]
    heads = ["", "number", "forced, before RL", "greedy, after RL", "pass@1, after RL"]
    lead = {"exact": [], "points": []}
    for (way, what), before in bench.at_best("imitation", bench.load("imitation")[0]).items():
        if way in WAYS:
            here = statistics.mean(column(f"{way}, {before['rate']}", what))
            lead[way.partition(":")[0]].append(100 * (before[what].mean() - here))
    exact, points = (f"{min(some):.1f} to {max(some):.1f}" for some in lead.values())
    text = (f"{docs.table(heads, rows)}\nOn the seeds 0 to 11, the ways of README.md get {exact} "
            f"points more of their samples right than on 100 to 111, and {points} under points.\n")
    docs.put("bases", text, "bases")


def main():
    best = bench.at_best("imitation", bench.load("imitation")[0])
    at_best = {f"{way}, {x['rate']}": UNSEEN for (way, _), x in best.items() if way in WAYS}
    jobs = [(case, seed) for case, seeds in (CASES | at_best).items() for seed in seeds]
    store = docs.measured("bases", lambda _: jobs, measure, docs.describe(2), 2)
    store.move(docs.DOCS / "lab/bases.json")
    page()


if __name__ == "__main__":
    start(main)
