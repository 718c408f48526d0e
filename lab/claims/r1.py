"""R1: its four stages on a small scale, and what each of them adds"""
import tempfile

import numpy

from examples import coldstart
from lab.bench import Claim, numbers
from lab.docs import run
from report import chart

SEEDS, CASES = range(5), ["R1"]
TASKS = ("arithmetic", "countdown", "lookup")
COLD_START = "1. cold start: 160 worked examples"
STAGES = {          # command lines; that of the cold start evaluates what coldstart.main makes
    "base": "grpo.py --max_steps 0",
    COLD_START: "grpo.py --max_steps 0",
    "2. RL, 60 steps": "grpo.py --max_steps 60",
    "3. its own right answers, 20 steps":
        "reinforce.py --method rejection --max_steps 20 --learning_rate 2e-4",
    "4. RL, 60 steps": "grpo.py --max_steps 60"}


def measure(case, seed):
    """Run all stages, and collect pass@1 of each task after each of them."""
    columns = {task: [] for task in TASKS}
    begin = []
    with tempfile.TemporaryDirectory() as work:
        for number, (stage, command) in enumerate(STAGES.items()):
            if stage == COLD_START:
                coldstart.main([begin[-1], f"{work}/start"])
                begin[-1] = f"{work}/start"
            script, *flags = command.split()
            summary = run(script, f"{work}/{number}", "--task", ",".join(TASKS), *flags,
                          "--seed", seed, "--base_seed", seed, *begin)
            for task in TASKS:
                columns[task].append(summary["trained"][f"pass@1/{task}"])
            begin = ["--init_from", f"{work}/{number}"]
    return columns


def page(x):
    lines = x["R1"] | {"mean": numpy.mean([*x["R1"].values()], axis=0)}         # (S, 5) each
    mean = lines["mean"]
    base, cold_start, first_rl = mean.mean(axis=0)[:3]
    finding = (f"R1's cold start raises the mean pass@1 of three tasks from {base:.2f} to "
               f"{cold_start:.2f}, and RL then raises it to {first_rl:.2f}")
    texts = ("the cold start raises pass@1 (the mean of the three tasks)",
             "RL after the cold start raises pass@1 further",
             "after RL, learning from its own right answers raises pass@1 further",
             "RL in the last stage raises pass@1 further")
    for i, text in enumerate(texts):
        yield Claim(text, "DeepSeek-R1", (mean[:, i + 1], mean[:, i]), at_least=0.02,
                    finding=finding * (i == 0))
    yield lambda axis: chart.curves(axis, lines, range(len(STAGES)), ylim=(0, 1.02),
                                    xticks=range(len(STAGES)), xlabel="stage (0: the base)",
                                    ylabel="pass@1, held out")
    yield numbers({stage: {f"pass@1, {name}": values[:, i] for name, values in lines.items()}
                   for i, stage in enumerate(STAGES)}, "stage", ".2f")
