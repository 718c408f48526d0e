"""Find mistakes for the bug hunts, and measure how they change a run: make hunts writes
learn/practice/hunts.json.

We plant each mistake of learn/practice/mistakes.txt in its script, train for 20 steps, and compare
with five runs of the correct script. A mistake becomes a hunt if it changes the gradient, although
neither the text of the script nor the reward gives it away.
"""
import concurrent.futures
import importlib
import json
import multiprocessing
import random
import re
from pathlib import Path

import numpy
import torch

import plumbing
from lab.docs import MACHINE, ROOT
from lab.training import load_base, run_text
from learn.practice.hunt import FLAGS, LEVELS, MEASURED, SHORT, distances, planted
from learn.practice.mistakes import MISTAKES, parse
from learn.sync import SCRIPTS

NOT_COMPARED = re.compile("step|zero_std|clipped_ratio|critic_grad|accuracy$|checks|sampling|beta|"
                          "coef|margins|reward_std|approx_kl")
# Code that nobody would write, so it would give a mistake away
ODD = re.compile(r"\b(True|False|pass)\b|\b0 ?\*|\* 1\.0|\+ 0\b|< 2\]|if .* else|numel|;")
RISE = 0.05                                 # if the reward rises less, a hunt is too easy
A_LEVEL = 4                                 # number of hunts for each level and script


def run(script, text, seed, base, num_steps=20, digits=3):
    """Run the text of a script. -> {metric: list}, {} if it fails"""
    flags = f"{FLAGS[Path(script).stem]} {SHORT} --max_steps {num_steps} --seed {seed}"
    try:
        log = run_text(script, text, base, flags)
    except (Exception, SystemExit):
        return {}
    names = [name for name in log[0] if not NOT_COMPARED.search(name)
             and all(isinstance(line.get(name), (int, float)) for line in log)]
    return {name: [float(f"{line[name]:.{digits}g}") for line in log] for name in names}


def is_fair(old, new):
    """Check that neither comments nor the look of the lines reveal that something was changed.
    -> bool"""
    added = set(new.split("\n")) - set(old.split("\n"))
    columns = [[(line.find("  # "), line.partition("  # ")[2]) for line in text.split("\n")
                if "  # " in line] for text in (old, new)]
    return columns[0] == columns[1] and not any(
        ODD.search(line) or len(line) > 100 for line in added)


def try_mistake(script, text, right, base):
    """Run a text with a mistake. -> the level of the hunt, 0 if it is not one; the run"""
    source = (ROOT / script).read_text("utf-8")
    if not is_fair(source, text):
        return 0, {}
    wrong, correct = (run(script, one, 0, base, 2, 6) for one in (text, source))
    if not wrong or numpy.allclose(wrong["grad_norm"], correct["grad_norm"], 1e-4):
        return 0, {}
    metrics = run(script, text, 0, base)
    if not metrics or numpy.mean(metrics["reward"][-5:]) < numpy.mean(metrics["reward"][:5]) + RISE:
        return 0, {}
    farthest = max(abs(distance) for distance in distances(metrics, right).values())
    return next(level for level, least in LEVELS.items() if farthest >= least), metrics


def measure(script, pool):
    """Try all mistakes of a script. -> {"right": {metric: a row for each of five seeds},
    "hunts": list of dicts}"""
    source = (ROOT / script).read_text("utf-8")
    *_, base = load_base(importlib.import_module(Path(script).stem))
    jobs = [pool.submit(run, script, source, seed, base) for seed in range(5)]
    runs = [job.result() for job in jobs]
    right = {name: [one[name] for one in runs] for name in runs[0]}
    mutants = [mutant for mutant in parse(MISTAKES.read_text("utf-8"))
               if mutant.file in ("grpo.py", script) and source.count("\n".join(mutant.old)) == 1]
    random.Random(script).shuffle(mutants)
    mutants.sort(key=lambda mutant: mutant.file != script)      # the script's own mistakes first
    jobs = [pool.submit(try_mistake, script, planted(source, mutant)[0], right, base)
            for mutant in mutants]
    hunts = []
    for mutant, job in zip(mutants, jobs):
        level, its_run = job.result()
        print(f"{script}: {mutant.name}: level {level}", flush=True)
        if level and [hunt["level"] for hunt in hunts].count(level) < A_LEVEL:
            hunts.append({"level": level, "mistake": mutant.name, "file": mutant.file,
                          "run": its_run})
    return {"right": right, "hunts": sorted(hunts, key=lambda hunt: hunt["level"])}


def main():
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, context, torch.set_num_threads, (1,)) as pool:
        measured = {script: measure(script, pool) for script in SCRIPTS}
    text = json.dumps({"machine": MACHINE} | measured)
    plumbing.write(MEASURED, re.sub(r"([\]}],) (?=[\"{])", r"\1\n", text) + "\n")


if __name__ == "__main__":
    main()
