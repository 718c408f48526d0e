"""Trackers for --report_to: send a run's flags, metrics and samples to TensorBoard, W&B or Trackio.

    python grpo.py --report_to tensorboard; tensorboard --logdir runs
    WANDB_MODE=offline python grpo.py --report_to wandb
    python grpo.py --report_to trackio; trackio show
"""
import dataclasses
import importlib
import uuid

import common
from report.observers import is_shown, per_completion, sample_rows

COLUMNS = ["reward", "advantage", "prompt", "completion"]


def tracker(name):
    """Create the tracker that --report_to names. Exits with one line if its package is missing."""
    try:
        if name == "tensorboard":
            return TensorBoard(importlib.import_module("torch.utils.tensorboard").SummaryWriter)
        return Service(importlib.import_module(name))
    except ImportError:
        common.fail(f"--report_to {name}: needs a package: pip install {name}")


class Tracker:
    """An observer that sends scores, metrics and samples. Step 0 is the base. A subclass defines
    numbers(values, step) and samples(rows, step)."""

    def evaluate(self, run, scores):
        # The first and the last evaluation also draw samples, whose mean length and think_share
        # don't belong on the curves of greedy answers. So these two send only accuracies.
        names = [name for name, x in scores.items() if isinstance(x, float)]
        if "pass@1" in scores:
            names = [name for name in names if name == "greedy" or "@" in name]
        self.numbers({f"eval/{name}": scores[name] for name in names}, run.step)

    def step(self, run, batch, advantages, metrics):
        self.numbers(metrics, run.step)
        if is_shown(run):
            A = per_completion(advantages, batch.mask)                          # (B,)
            self.samples(sample_rows(batch, A), run.step)


class TensorBoard(Tracker):
    """Writes event files to tensorboard/ in the run folder."""

    def __init__(self, writer_class):
        self.writer_class = writer_class

    def start(self, run):
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

    def finish(self, run, summary):
        self.writer.close()


class Service(Tracker):
    """Sends to Weights & Biases or Trackio, which have the same functions. A resumed run continues
    the record of the run."""

    def __init__(self, module):
        self.module = module

    def start(self, run):
        options = {"name": run.folder.name, "config": dataclasses.asdict(run.cfg)}
        if self.module.__name__ == "wandb":     # wandb finds a run by its id, not by its name
            options["id"] = run.state.setdefault("wandb_id", uuid.uuid4().hex)
            options["dir"] = str(run.folder)
        self.module.init(project=run.script.stem, resume="allow", **options)

    def numbers(self, values, step):
        self.module.log(values, step=step)

    def samples(self, rows, step):
        self.module.log({"samples": self.module.Table(columns=COLUMNS, data=rows)}, step=step)

    def finish(self, run, summary):
        self.module.finish()
