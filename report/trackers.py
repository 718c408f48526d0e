"""What --report_to names: a run's flags, metrics and samples in TensorBoard, W&B or Trackio.

    python grpo.py --report_to tensorboard; tensorboard --logdir runs
    WANDB_MODE=offline python grpo.py --report_to wandb
    python grpo.py --report_to trackio; trackio show

A tracker has open(run), numbers(values, step), samples(rows, step) and close(); report/observers.py
tells it what there is to show.
"""
import dataclasses
import importlib
import uuid

import common

COLUMNS = ["reward", "advantage", "prompt", "completion"]


def tracker(name):
    """What --report_to names. Exits with one line without its package."""
    try:
        if name == "tensorboard":
            return TensorBoard(importlib.import_module("torch.utils.tensorboard").SummaryWriter)
        return Service(importlib.import_module(name))
    except ImportError:
        common.fail(f"--report_to {name}: needs its package; say pip install {name}")


class TensorBoard:
    """Event files in the run folder, below tensorboard/."""

    def __init__(self, writer_class):
        self.writer_class = writer_class

    def open(self, run):
        first = run.step + 1 if run.resumed else None     # later steps come once more
        self.writer = self.writer_class(run.folder / "tensorboard", purge_step=first)
        flags = dataclasses.asdict(run.cfg).items()
        self.writer.add_text("config", "".join(f"    {name}: {x}\n" for name, x in flags))

    def numbers(self, values, step):
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()                     # so that a kill loses no step

    def samples(self, rows, step):
        # Indented, so that Markdown shows tags as they are.
        lines = ["    " + "  ".join(map(str, row)) + "\n" for row in [COLUMNS, *rows]]
        self.writer.add_text("samples", "".join(lines), step)

    def close(self):
        self.writer.close()


class Service:
    """Weights & Biases, and Trackio, whose functions are the same. A resumed run goes on there."""

    def __init__(self, module):
        self.module = module

    def open(self, run):
        options = {"name": run.folder.name, "config": dataclasses.asdict(run.cfg)}
        if self.module.__name__ == "wandb":     # which knows a run by its id, not by its name
            options["id"] = run.state.setdefault("wandb_id", uuid.uuid4().hex)
            options["dir"] = str(run.folder)
        self.module.init(project=run.script.stem, resume="allow", **options)

    def numbers(self, values, step):
        self.module.log(values, step=step)

    def samples(self, rows, step):
        self.module.log({"samples": self.module.Table(columns=COLUMNS, data=rows)}, step=step)

    def close(self):
        self.module.finish()
