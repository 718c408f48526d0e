"""The console of a run: progress, steps, samples, warnings, and what has changed at the end.

Colour and lines that overwrite themselves are for a terminal only, and NO_COLOR is respected; a
pipe gets plain lines. Nothing is wider than 80 columns, but for paths.
"""
import importlib
import os
import re
import sys
import time

import torch

import common

COLOURS = {"green": 32, "red": 31, "yellow": 33}


def is_terminal():
    """Whether stdout is a terminal, and no dumb one. -> bool"""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def say(text, colour=None):
    """Print one line, cut to 80 columns; in a colour of COLOURS where there is colour."""
    text = text[:80]
    if colour and is_terminal() and not os.environ.get("NO_COLOR"):
        text = f"\033[{COLOURS[colour]}m{text}\033[0m"
    print(text, flush=True)


def escape(text):
    """The text on one line, so that no control character of a completion reaches the terminal."""
    return text.encode("unicode_escape").decode()


def listed(head, scores):
    """A line of 80 columns: the head, and as many of the scores (name -> number) as fit behind it.
    -> str"""
    line = head
    for name, score in scores.items():
        more = f"{name} {score:.3f}"
        more = f" {more}" if line == head else f", {more}"
        if len(line + more) > 80:
            break
        line += more
    return line


def warnings(metrics):
    """What to say of a step that shows that learning cannot work. Yields sentences"""
    has_teacher = "teacher_kl" in metrics                       # who rewards each token
    is_equal = metrics["frac_reward_zero_std"] == 1 and not has_teacher
    if is_equal and metrics.get("accuracy", 0) < 0.5:
        yield "no group has signal: raise --num_generations, or take a better base"
    if metrics["completions/clipped_ratio"] > 0.5:
        yield "most completions are truncated: raise --max_completion_length"
    if metrics["entropy"] < 0.005 and metrics.get("accuracy", 1) < 0.9:
        yield "entropy has collapsed: lower --learning_rate, or raise --entropy_coef"
    if metrics.get("rewards/chosen", 0) < 0:
        yield "chosen answers lose probability, too: try a lower --learning_rate"
    has_lag = "sampling/importance_sampling_ratio/mean" in metrics          # older weights sampled
    if not has_lag and metrics.get("sampling/sampling_logp_difference/max", 0) > 1e-3:
        yield "the first ratio is not 1: try --kernel torch"
    if not has_lag and metrics.get("sampling/sampling_logp_difference/mean", 0) > 0.01:
        yield "sampler and trainer differ: --importance_sampling_correction truncate"


class RichConsole(common.Console):
    """Progress, a line a step, the best and the worst sample, warnings, report and pictures."""

    def __init__(self):
        self.columns = {}                   # those of the heading; none before the first step
        self.warned = set()

    def progress(self, label, steps):
        """The items of the list `steps`, saying how long they will take: on a terminal in a line
        that is overwritten, in a pipe at every fifth of the way, if they take over ten seconds."""
        start = time.perf_counter()
        last = start
        for done, item in enumerate(steps, 1):
            yield item
            now = time.perf_counter()
            left = (now - start) / done * (len(steps) - done)
            percent = 100 * done // len(steps)
            if is_terminal():
                if now - last > 0.2 or done == len(steps):
                    bar = "#" * (percent // 4)
                    print(f"\r{label} {bar:25} {percent:3d}%, {left:4.0f} s left",
                          end="", flush=True)
                    last = now
            elif done % max(1, len(steps) // 5) == 0 and now - start + left > 10:
                say(f"{label} {percent:3d}%, {left:.0f} s left")
        if is_terminal():
            print("\r\033[K", end="", flush=True)

    def start(self, run):
        """What a step is made of, and how good the base is."""
        cfg = run.cfg
        base = run.state["base"]
        P = cfg.num_prompts
        G = cfg.num_generations
        kernel = "torch"
        if common.kernels and common.kernels.applies(cfg.kernel, torch.empty(0, device=cfg.device)):
            kernel = "triton"
        say(f"{P} prompts x {G} completions = {P * G} per step, log-probs by {kernel}")
        shown = {name: score for name, score in base.items()
                 if score is not None and re.fullmatch("greedy|(greedy_)?return|.*@[0-9]+", name)}
        say(listed(f"base, {base['problems']} held-out problems:", shown))
        if base.get("pass@1") == 0:
            better = "another --model" if hasattr(cfg, "model") else "more --base_steps"
            say(f"warning: no sample of the base is right: try {better}, or easier tasks", "yellow")

    def step(self, run, metrics):
        """The line of a step, that of its evaluation, and warnings, each once in a run. The columns
        are those whose metric the first step has; it comes with the heading."""
        if not self.columns:
            self.columns = {heading: name for heading, name in run.columns.items()
                            if name in metrics}
            headings = "".join(f"{heading:>9}" for heading in self.columns)
            print(f" step{headings}  secs  left", flush=True)
        number = run.state["steps"]
        seconds = metrics["step_time"]
        values = [round(metrics[name], 3) + 0.0 for name in self.columns.values()]  # no -0.000
        cells = "".join(f"{value:9.3f}" for value in values)
        left = seconds * (run.cfg.max_steps - number)
        print(f"{number:5d}{cells}{seconds:6.2f}{left:5.0f}s", flush=True)
        held_out = {name.removeprefix("eval/"): value for name, value in metrics.items()
                    if re.fullmatch("eval/[^/]*", name)}
        if held_out:
            print(listed("      held out:", held_out), flush=True)
        for message in warnings(metrics):
            if message not in self.warned:
                say(f"warning: {message}", "yellow")
                self.warned.add(message)

    def samples(self, batch, advantages):
        """The best and the worst completion of the group whose rewards differ most."""
        spread = batch.rewards.amax(dim=1) - batch.rewards.amin(dim=1)              # (P,)
        group = int(spread.argmax())
        rewards = batch.rewards[group]                                              # (G,)
        by_reward = rewards.argsort(stable=True)
        for g, colour in ((by_reward[-1], "green"), (by_reward[0], "red")):
            row = group * len(rewards) + int(g)
            text = escape(batch.problems[row].prompt + batch.texts[row])
            line = f"      {rewards[g].item():5.2f} {advantages[row].item():+5.2f} {text}"
            say(line[:79], colour)

    def finish(self, run, both):
        """The scores of base and trained policy side by side, report, pictures, what to do next."""
        say(f"{'base':>32} trained")
        for name, base in both["base"].items():
            trained = both["trained"].get(name)
            if not isinstance(base, list) and not isinstance(trained, list):
                say(f"{name:>24} {cell(base):>7} {cell(trained):>7}")
        for name, function in (("report.html", "write_report"), ("curve.png", "draw_curve")):
            try:
                getattr(importlib.import_module("tools.report"), function)(run.folder)
            except (ImportError, OSError, ValueError) as error:
                say(f"no {name}: {escape(str(error))}")
        steps = run.state["steps"]
        if steps < run.cfg.max_steps and run.state["recent"]:
            accuracy = sum(run.state["recent"]) / 5
            say(f"The last 5 batches are {accuracy:.3f} accurate: --stop_at {run.cfg.stop_at}")
        seconds = run.state["seconds_total"]
        print(f"{steps} steps, {seconds:.0f} s, folder {run.folder}. Ask the policy:")
        print(f"  {run.question()}", flush=True)


def cell(score):
    """A score as the last table shows it. -> str"""
    if score is None:
        return "-"
    return f"{score:.3f}" if isinstance(score, float) else str(score)
