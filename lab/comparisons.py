"""Comparisons: DPO, or a reward model and PPO, on the same preferences.

Claim. DPO does as well as PPO against a reward model, or better, and needs neither that model nor
samples (2305.18290). PPO does better where both are tuned, as DPO also raises what no pair speaks
of (Xu and others, 2404.10719). A penalty on the KL keeps PPO from what the reward model wrongly
likes (Ouyang and others, 2203.02155).

Prediction. PPO ends more accurate: the reward model puts most pairs in the right order, and PPO
asks it about 7,680 new completions, where DPO reads 600 pairs of old ones three times. DPO takes a
quarter of the seconds, and half of the memory that models take: five weights' worth of numbers
where PPO, its critic and the reward model take nine. In 30 steps PPO does not go far enough to need
the penalty. We knew the 60 steps of tools/rlhf.py when this was written, and DPO on fresh pairs.

Method. The pairs are those that --reward model learns from: the first right and the first wrong
completion of the groups of 20 batches of the base, one pair in ten swapped. PPO, 30 steps, without
and with --beta 0.1, against the model that learned from them; DPO, 30 steps of 64 pairs, from a
file of them. Seconds are those of the whole run, the making of the reward model included and that
of the base not, two runs at a time; memory is the most that the process held.
"""
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import common
import ppo
from lab.entry import compared, draw_points, load_base, mean_and_spread, minus
from tasks import preferences
from tasks.pairs import encode
from tools.runs import ROOT, curve, read_summary

SEEDS = [0, 1, 2]
SAME = ["--max_steps", 30, "--eval_steps", 5, "--num_eval_problems", 256, "--num_eval_samples", 4]
PPO = ["ppo.py", "--reward", "model", "--stop_at", 2, *SAME]
METHODS = {"DPO": ["dpo.py", "--num_generations", 4, *SAME], "PPO": PPO,
           "PPO, beta 0.1": [*PPO, "--beta", 0.1]}
QUANTITIES = {"pass@1": ".3f", "best greedy": ".3f", "seconds": ".0f", "MiB": ".0f"}


def compared_pairs(seed):
    """The pairs that the reward model of a run with this seed learns from. -> list of dicts, those
    of them that can be read from a file; and how many pairs there were"""
    cfg, task, policy = load_base(ppo, "--seed", seed)
    generator = common.generator(seed, "mistakes")
    written = []
    total = 0
    for number in range(preferences.BATCHES):
        batch = ppo.sample_batch(policy, task, cfg, f"preferences {number}")
        chosen, rejected = preferences.pairs(batch, preferences.MISTAKES, generator)
        total += len(chosen)
        written += readable(batch, chosen, rejected)
    return written, total


def readable(batch, chosen, rejected):
    """The pairs of these rows that dpo.py would write into a file. -> list of dicts"""
    rows = zip(batch.tokens.tolist(), batch.lengths.tolist(), batch.texts)
    can_be_read = [ids[:n] == encode(text, ppo) for ids, n, text in rows]
    return [{"prompt": batch.problems[best].prompt,
             "chosen": batch.texts[best], "rejected": batch.texts[worst]}
            for best, worst in zip(chosen.tolist(), rejected.tolist())
            if can_be_read[best] and can_be_read[worst]]


def measure(seeds):
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        jobs = []
        numbers = []
        for seed in seeds:
            written, total = compared_pairs(seed)
            numbers.append([len(written), total])
            path = Path(work, f"pairs-{seed}.jsonl")
            path.write_text("\n".join(json.dumps(pair) for pair in written))
            for name, words in METHODS.items():
                pairs = ["--pairs", path] if name == "DPO" else []
                folder = Path(work, f"{name}-{seed}".replace(" ", "-"))
                jobs.append((name, [*words, *pairs, "--seed", seed], folder))
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            results = list(pool.map(lambda job: weighed_run(*job[1:]), jobs))
    runs = {name: [] for name in METHODS}
    for (name, *_), result in zip(jobs, results):
        runs[name].append(result)
    return {"runs": runs, "pairs": numbers}


def weighed_run(words, folder):
    """Run a script, and ask the system for the most memory that it held. -> dict"""
    script, *flags = [str(word) for word in words]
    command = [sys.executable, ROOT / script, *flags, "--output_dir", folder]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"{script} failed")
    process.returncode = 0                      # else its end would be waited for again
    summary = read_summary(folder)
    greedy = [value for value in curve(folder, "eval/greedy") if value is not None]
    return {"pass@1": round(summary["trained"]["pass@1"], 5),
            "greedy": [round(value, 5) for value in [summary["base"]["greedy"], *greedy]],
            "best greedy": round(max(greedy), 5),
            "seconds": round(summary["seconds_total"] - summary["seconds_warm_start"], 1),
            "MiB": round(usage.ru_maxrss / 1024, 1), "problems": summary["trained"]["problems"]}


def by_seed(found, name, quantity):
    return [run[quantity] for run in found["runs"][name]]


def tables(found):
    rows = []
    for name in METHODS:
        cells = [mean_and_spread(by_seed(found, name, quantity), form)
                 for quantity, form in QUANTITIES.items()]
        rows.append([name, *cells])
    return [(["from the same pairs", *QUANTITIES], rows)]


def claims(found):
    def differ(text, more, less, quantity, form="+.3f"):
        return compared(
            text, minus(by_seed(found, more, quantity), by_seed(found, less, quantity)), form)

    return [differ("DPO ends more accurate (pass@1) than PPO", "DPO", "PPO", "pass@1"),
            differ("at its best, DPO is more accurate (greedy) than PPO", "DPO", "PPO",
                   "best greedy"),
            differ("DPO takes less time (seconds) than PPO", "PPO", "DPO", "seconds", "+.0f"),
            differ("DPO takes less memory (MiB) than PPO", "PPO", "DPO", "MiB", "+.0f"),
            differ("PPO ends more accurate with a penalty on the KL", "PPO, beta 0.1", "PPO",
                   "pass@1"),
            differ("DPO ends more accurate than PPO with the penalty (asked after the runs)", "DPO",
                   "PPO, beta 0.1", "pass@1")]


def note(found):
    numbers = [f"{written} of {total}" for written, total in found["pairs"]]
    problems = found["runs"]["DPO"][0]["problems"]
    return (f"Held-out problems, all different: {problems}; pairs that can be read from a file: "
            f"{', '.join(numbers)}")


def panels(found):
    def curves(axis):
        for number, name in enumerate(METHODS):
            for seed, values in enumerate(by_seed(found, name, "greedy")):
                axis.plot(range(0, 5 * len(values), 5), values, color=f"C{number}",
                          label=name if seed == 0 else None)
        axis.set(xlabel="step", ylabel="greedy accuracy", ylim=(0, 1.03))
        axis.legend(frameon=False, fontsize=8)

    def points(quantity):
        return lambda axis: draw_points(
            axis, {name: by_seed(found, name, quantity) for name in METHODS}, xlabel=quantity)
    return [curves, points("seconds"), points("MiB")]
