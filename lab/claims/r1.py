"""R1: its four stages on a small scale, and what each of them adds

Each stage is a command that starts from the policy of the stage before. docs/lab/r1.md explains the
claims and the outcome.
"""
import tempfile
from pathlib import Path

import numpy

from examples import coldstart
from lab.docs import run
from lab.draw import INK, curves
from lab.experiment import Experiment, numbers
from lab.verdict import Claim

TASKS = ("arithmetic", "countdown", "lookup")
COLUMNS = {task: f"pass@1/{task}" for task in TASKS} | {"tokens": "mean_length"}
ALL = f"--task {','.join(TASKS)}"
COLD_START = "1. cold start: 160 worked examples"
STAGES = {          # command lines; that of the cold start evaluates what coldstart.main makes
    "base": f"grpo.py {ALL} --max_steps 0",
    COLD_START: f"grpo.py {ALL} --max_steps 0",
    "2. RL, 60 steps": f"grpo.py {ALL} --max_steps 60",
    "3. its own right answers, 20 steps":
        f"reinforce.py {ALL} --method rejection --max_steps 20 --learning_rate 2e-4",
    "4. RL, 60 steps": f"grpo.py {ALL} --max_steps 60"}
SHORT = ("base", "cold start", "RL", "own right answers", "RL again")
GAIN = 0.02         # smallest difference of a pass@1 that matters
EXPERIMENT = Experiment(__file__, seeds=range(5), rate="5e-4, but 2e-4 in the third stage")
EXPERIMENT.commands += STAGES.values()


@EXPERIMENT.measure(["R1"])
def stages(seed, case):
    """Run all stages, and collect pass@1 of each task and the mean length after each of them."""
    results = {column: [] for column in COLUMNS}
    begin = []
    with tempfile.TemporaryDirectory() as work:
        for number, (stage, command) in enumerate(STAGES.items()):
            script, *flags = command.split()
            folder = Path(work, str(number))
            if stage == COLD_START:
                coldstart.main([begin[-1], f"{folder}-start"])
                begin[-1] = f"{folder}-start"
            flags += ["--seed", seed, "--base_seed", seed]
            summary = run(script, folder, *flags, *begin)
            for column, name in COLUMNS.items():
                results[column].append(summary["trained"][name])
            begin = ["--init_from", str(folder)]
    return results


def page(stages):
    [columns] = stages.values()
    mean = numpy.mean([columns[task] for task in TASKS], axis=0)                # (S, 5)
    title = ("R1's cold start raises the mean pass@1 of three tasks from "
             f"{mean[:, 0].mean():.2f} to {mean[:, 1].mean():.2f}, and RL then raises it to "
             f"{mean[:, 2].mean():.2f}")
    yield Claim("the cold start raises pass@1 (the mean of the three tasks)", "DeepSeek-R1",
                (mean[:, 1], mean[:, 0]), at_least=GAIN, said=title)
    further = ("RL after the cold start", "after RL, learning from its own right answers",
               "RL in the last stage")
    for number, stage in enumerate(further, 1):
        yield Claim(f"{stage} raises pass@1 further", "DeepSeek-R1",
                    (mean[:, number + 1], mean[:, number]), at_least=GAIN)
    lines = {task: columns[task] for task in TASKS} | {"mean": mean}
    yield curves(lines, title, x=range(len(STAGES)), xticks=range(len(STAGES)), xticklabels=SHORT,
                 given={"mean": INK}, ylim=(0, 1.02), xlabel="stage", ylabel="pass@1, held out")
    headings = {task: f"pass@1, {task}" for task in TASKS}
    headings |= {"mean": "mean of the three", "tokens": "tokens per completion"}
    rows = {stage: {column: values[:, i] for column, values in (columns | {"mean": mean}).items()}
            for i, stage in enumerate(STAGES)}
    yield numbers(rows, headings, form=".2f", by="stage")
