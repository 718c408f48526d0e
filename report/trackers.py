"""Trackers for --report_to: send a run's flags, metrics and samples to TensorBoard, W&B or Trackio.

    python grpo.py --report_to tensorboard; tensorboard --logdir runs
    WANDB_MODE=offline python grpo.py --report_to wandb
    python grpo.py --report_to trackio; trackio show

A tracker has the methods open(run), numbers(values, step), samples(rows, step) and close(), which
report/observers.py calls.
"""
import dataclasses
import importlib
import uuid

import common

COLUMNS = ["reward", "advantage", "prompt", "completion"]


def tracker(name):
    """Create the tracker that --report_to names. Exits with one line if its package is missing."""
    try:
        if name == "tensorboard":
            return TensorBoard(importlib.import_module("torch.utils.tensorboard").SummaryWriter)
        return Service(importlib.import_module(name))
    except ImportError:
        common.fail(f"--report_to {name}: needs a package: pip install {name}")


class TensorBoard:
    """Writes event files to tensorboard/ in the run folder."""

    def __init__(self, writer_class):
        self.writer_class = writer_class

    def open(self, run):
        first = run.step + 1 if run.resumed else None   # purge later steps: they are logged again
        self.writer = self.writer_class(run.folder / "tensorboard", purge_step=first)
        flags = dataclasses.asdict(run.cfg).items()
        self.writer.add_text("config", "".join(f"    {name}: {x}\n" for name, x in flags))

    def numbers(self, values, step):
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()                     # if the run is killed, no step is lost

    def samples(self, rows, step):
        # TensorBoard renders Markdown. Indented lines are code, in which tags such as <think> stay.
        lines = ["    " + "  ".join(map(str, row)) + "\n" for row in [COLUMNS, *rows]]
        self.writer.add_text("samples", "".join(lines), step)

    def close(self):
        self.writer.close()


class Service:
    """Sends to Weights & Biases or Trackio, which have the same functions. A resumed run continues
    the record of the run."""

    def __init__(self, module):
        self.module = module

    def open(self, run):
        options = {"name": run.folder.name, "config": dataclasses.asdict(run.cfg)}
        if self.module.__name__ == "wandb":     # wandb finds a run by its id, not by its name
            options["id"] = run.state.setdefault("wandb_id", uuid.uuid4().hex)
            options["dir"] = str(run.folder)
        self.module.init(project=run.script.stem, resume="allow", **options)

    def numbers(self, values, step):
        self.module.log(values, step=step)

    def samples(self, rows, step):
        self.module.log({"samples": self.module.Table(columns=COLUMNS, data=rows)}, step=step)

    def close(self):
        self.module.finish()
