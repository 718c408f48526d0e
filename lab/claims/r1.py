"""R1: its four stages on a small scale, and what each of them adds"""
import tempfile
from pathlib import Path

import numpy

from examples import coldstart
from lab.docs import run
from lab.draw import INK, curves
from lab.experiment import Experiment, numbers
from lab.verdict import Claim

TASKS = ("arithmetic", "countdown", "lookup")
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
EXPERIMENT = Experiment(__file__, seeds=range(5), rate="5e-4, but 2e-4 in the third stage")
EXPERIMENT.commands += STAGES.values()


@EXPERIMENT.measure(["R1"])
def stages(seed, case):
    """Run all stages, and collect pass@1 of each task after each of them."""
    results = {task: [] for task in TASKS}
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
            for task, scores in results.items():
                scores.append(summary["trained"][f"pass@1/{task}"])
            begin = ["--init_from", str(folder)]
    return results


def page(stages):
    [columns] = stages.values()
    mean = numpy.mean([columns[task] for task in TASKS], axis=0)                # (S, 5)
    base, cold_start, first_rl = mean.mean(axis=0)[:3]
    finding = (f"R1's cold start raises the mean pass@1 of three tasks from {base:.2f} to "
               f"{cold_start:.2f}, and RL then raises it to {first_rl:.2f}")
    texts = ("the cold start raises pass@1 (the mean of the three tasks)",
             "RL after the cold start raises pass@1 further",
             "after RL, learning from its own right answers raises pass@1 further",
             "RL in the last stage raises pass@1 further")
    for i, text in enumerate(texts):
        yield Claim(text, "DeepSeek-R1", (mean[:, i + 1], mean[:, i]), at_least=0.02,
                    said=finding * (i == 0))
    lines = {task: columns[task] for task in TASKS} | {"mean": mean}
    yield curves(lines, range(len(STAGES)), xticks=range(len(STAGES)), xticklabels=SHORT,
                 given={"mean": INK}, ylim=(0, 1.02), xlabel="stage", ylabel="pass@1, held out")
    yield numbers({stage: {f"pass@1, {name}": values[:, i] for name, values in lines.items()}
                   for i, stage in enumerate(STAGES)}, form=".2f", by="stage")
