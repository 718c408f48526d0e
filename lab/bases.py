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
from lab.measure import measure_nano
from report import replaced, start
from report.logs import read_summary
from tasks.scores import count_steps

ONCE, SLOWER, HALF = "4e-3", "3e-3", "2e-3"                     # peaks of the rate of matrices
WHOLE, NO_AVX = "4e-3, whole batches", "4e-3, without AVX"
MAIN, IMITATION, NANO = "grpo.py", "reinforce.py --method rejection --max_steps 45", "nano.py"
FEW, LATER, UNSEEN = range(120, 136), range(184, 216), range(100, 112)
LOWEST = (121, 127, 134, 137, 138, 142, 150, 156, 164)          # of the first try
OTHERS = (124, 132, 140, 148, 158, 166, 172, 180)
TASKS = ("arithmetic:3-7", "abstain", "key", "notation", "countdown", "program", "lookup",
         "gridworld", "number")
CASES = {ONCE: range(120, 184), SLOWER: FEW, HALF: FEW, WHOLE: FEW, NO_AVX: FEW,
         MAIN: (*LOWEST, *OTHERS, *LATER, *UNSEEN), IMITATION: UNSEEN, NANO: FEW[:8],
         f"{MAIN}, whole batches": FEW[:4], f"{MAIN}, without AVX": FEW[:4],
         } | dict.fromkeys(TASKS, FEW[:4])
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
    if case == NANO:
        one = measure_nano(case, seed)
        return {name: one[name] for name in ("before", "forced", "after")}
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


def base(what, seeds):
    """Make a base without the second try of load_base, which `rule` decides. -> {column: number}"""
    flag = "--task" if what in TASKS else "--base_learning_rate"
    cfg = plumbing.parse_flags(grpo.Config, [flag, what, *seeds])
    task = common.load_task(cfg, grpo.verify)
    policy = grpo.GPT(cfg)
    plumbing.fix_arithmetic()
    return {"rule": plumbing.warm_start(policy, task, cfg)} | scores(policy, task, cfg)


COLUMNS = ("greedy", "greedy_forced_think", "pass@1", "think_share", "accuracy_given_think")


@torch.no_grad()
def scores(policy, task, cfg):
    """Score a base. `facts` is the share of right results of sums without a wrong belief, in
    sampled thoughts. -> {column: number}"""
    found = grpo.evaluate(policy, task, cfg, greedy=True) | grpo.evaluate(policy, task, cfg)
    columns = {name: found.get(name) for name in ("greedy", "pass@1")}
    if "greedy_think_share" in found:
        forced = grpo.evaluate(policy, task, cfg, greedy=True, opening="<think>")
        columns["forced"] = forced.get("greedy")
    for phase in ("textbook", "forum"):
        examples = common.sample_problems(task, 512, "mloss", phase=phase)
        prompts, tokens, mask, _ = common.encode_examples(examples, task, "cpu")
        logps, _ = grpo.score(policy, prompts, tokens)
        columns[phase] = -((logps * mask).sum() / mask.sum()).item()
    if type(task) is common.Arithmetic:
        problems = common.held_out_problems(task, cfg.num_eval_problems)
        texts = grpo.complete(
            policy, task, cfg, problems, common.generator("s"), "<think>").texts
        counts = [count for fact, count in count_steps(texts).items()
                  if not task.has_wrong_belief(fact)]
        columns["facts"] = sum(right for _, right in counts) / sum(n for n, _ in counts)
    return columns


# ---- 2. the page -----------------------------------------------------------------------------

TABLES = {                              # heading: the columns, and rows: (name, case, seeds)
    "peak of the rate": (("forced", "rule", "textbook", "forum", "facts"), [
        (case, case, CASES[case]) for case in (ONCE, SLOWER, HALF, WHOLE, NO_AVX)]),
    "`python grpo.py`": (("base greedy_forced_think", "trained greedy", "trained pass@1"), [
        ("the 9 lowest of 64 bases", MAIN, LOWEST), ("8 others of them", MAIN, OTHERS),
        ("seeds 184 to 215", MAIN, LATER), ("seeds 100 to 111", MAIN, UNSEEN),
        ("whole batches", f"{MAIN}, whole batches", FEW),
        ("without AVX", f"{MAIN}, without AVX", FEW)]),
    "bases of `--task`": (("forced", "greedy", "pass@1", "textbook"), [
        (task, task, FEW) for task in TASKS]),
    "`python nano.py`": (("before", "forced", "after"), [("seeds from 120 on", NANO, FEW)])}


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
    text = ""
    for heading, (names, groups) in TABLES.items():
        names = [name for name in names if any(     # `rule` is stored from the next measurement on
            column(case, name, seeds).count(None) == 0 for _, case, seeds in groups)]
        rows = [[who, len(column(case, names[0], seeds)),
                 *(spread(column(case, name, seeds)) for name in names)]
                for who, case, seeds in groups]
        text += f"{docs.table([heading, 'number', *names], rows)}\n"
    rows = []
    for (way, what), before in bench.at_best("imitation", bench.load("imitation")[0]).items():
        if way in WAYS:
            case = f"{way}, {before['rate']}"
            rows.append([case, len(column(case, what)), *(
                spread(values) for name in ("greedy", what)
                for values in (before[name].tolist(), column(case, name)))])
    heads = ["way, best rate", "number", "greedy, seeds 0 to 11", "greedy, seeds 100 to 111",
             "pass@1, seeds 0 to 11", "pass@1, seeds 100 to 111"]
    text += f"{docs.table(heads, rows)}\n{about['machine']}, torch {about['torch']}.\n"
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
