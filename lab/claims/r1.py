"""R1: its four stages in small, and what each of them adds

Each stage is a command, which begins with the policy of the stage before. docs/lab/r1.md says more.
"""
import tempfile
from pathlib import Path

import numpy

from examples import coldstart
from lab.docs import run
from lab.draw import curves
from lab.experiment import Block, Experiment, numbers
from lab.verdict import Claim

TASKS = ("arithmetic", "countdown", "lookup")
COLUMNS = {task: f"pass@1/{task}" for task in TASKS} | {"tokens": "mean_length"}
ALL = f"--task {','.join(TASKS)} --stop_at 2"
COLD_START = "1. cold start: 160 worked examples"
STAGES = {                              # command lines; the cold start is made before its own
    "base": f"grpo.py {ALL} --max_steps 0",
    COLD_START: f"grpo.py {ALL} --max_steps 0",
    "2. RL, 60 steps": f"grpo.py {ALL} --max_steps 60",
    "3. its own right answers, 20 steps":
        f"reinforce.py {ALL} --method rejection --max_steps 20 --learning_rate 2e-4",
    "4. RL, 60 steps": f"grpo.py {ALL} --max_steps 60"}
SHORT = ("base", "cold start", "RL", "own right answers", "RL again")
GAIN = 0.02                             # of pass@1, what counts as one
EXPERIMENT = Experiment(__file__, seeds=range(5))
EXPERIMENT.commands += STAGES.values()


@EXPERIMENT.measure(["R1"])
def stages(seed, case):
    """After each stage, pass@1 of each task and the mean length."""
    found = {column: [] for column in COLUMNS}
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
                found[column].append(summary["trained"][name])
            begin = ["--init_from", str(folder)]
    return found


def page(stages):
    [found] = stages.values()
    mean = numpy.mean([found[task] for task in TASKS], axis=0)                  # (S, 5)
    told = ", ".join(f"{word} {value:.2f}" for word, value in zip(SHORT, mean.mean(axis=0)))
    said = f"R1 in small, mean pass@1 of three tasks: {told}"
    yield Claim("the cold start raises pass@1, the mean of the tasks", "DeepSeek-R1",
                (mean[:, 1], mean[:, 0]), at_least=GAIN, said=said)
    for number, what in enumerate(("RL", "learning from its own right answers", "the last RL"), 1):
        yield Claim(f"{what} raises it from there", "DeepSeek-R1",
                    (mean[:, number + 1], mean[:, number]), at_least=GAIN)
    yield curves({task: found[task] for task in TASKS}, said, x=range(len(STAGES)),
                 xticks=range(len(STAGES)), xticklabels=SHORT, ylim=(0, 1.02), xlabel="stage",
                 ylabel="pass@1, held out")
    rows = {stage: {column: values[:, i] for column, values in found.items()}
            for i, stage in enumerate(STAGES)}
    table = numbers(rows, form=".2f", by="stage")
    yield table
    yield Block("r1", f"{table}\npass@1, mean and span of seeds, each with its own base; "
                      "[the experiment](lab/r1.md)\n")
