"""What a run shows: progress, steps, samples, warnings, what has changed at the end; Ctrl-C, and --prompt.

Colour and lines that overwrite themselves are for a terminal only, and NO_COLOR is respected; a pipe gets
plain lines. Nothing is wider than 80 columns, but for paths.
"""
import dataclasses
import importlib
import json
import os
import re
import shlex
import signal
import sys
import time

import torch

import common
from tools import bases, scores

measure = scores.measure                        # for the scripts, as are progress and answer

WARNINGS = (                    # how a step looks when learning cannot work, and what to say of it, once
    (lambda m: m["frac_reward_zero_std"] == 1 and m["accuracy"] < 0.5,
     "no group has signal: raise --num_generations, or take a better base"),
    (lambda m: m["completions/clipped_ratio"] > 0.5,
     "most completions are cut: raise --max_completion_length"),
    (lambda m: m["entropy"] < 0.005 and m["accuracy"] < 0.9,
     "entropy has collapsed: lower --learning_rate, or raise --entropy_coef"),
    (lambda m: m.get("rewards/chosen", 0) < 0,
     "chosen answers lose probability, too: try a lower --learning_rate"),
    (lambda m: m.get("sampling/sampling_logp_difference/max", 0) > 1e-3,
     "the first ratio is not 1: try --kernel torch, --fused_linear off"))
COLOURS = {"green": 32, "red": 31, "yellow": 33}


@dataclasses.dataclass(frozen=True)
class Flags:
    """Flags of a run that begins at another, or of a look at one: they come with this folder."""
    init_from: str = common.run_flag("", "run folder whose trained policy takes the place of the base")
    cold_start: int = common.run_flag(0, "with --init_from: batches of worked examples to learn from first",
                                      low=0)
    prompt: str = common.run_flag("", "with --resume_from_checkpoint: print its policy's answer, then exit")


def check(cfg):
    """ValueError for flags that do not go together, or do nothing without another."""
    for f in dataclasses.fields(cfg):
        name, _, wanted = f.metadata["needs"].partition(" ")
        there = not name or (getattr(cfg, name) == wanted if wanted else getattr(cfg, name))
        if getattr(cfg, f.name) != f.default and not there:
            raise ValueError(f"--{f.name} {getattr(cfg, f.name)}: does nothing without --{name} {wanted}")
    if getattr(cfg, "overlong_buffer", 0) > cfg.max_completion_length:
        raise ValueError(f"--overlong_buffer {cfg.overlong_buffer}: is longer than a completion may be, "
                         f"{cfg.max_completion_length}")
    if cfg.cold_start and not cfg.init_from:
        raise ValueError(f"--cold_start {cfg.cold_start}: needs --init_from RUN")
    if cfg.prompt and not cfg.resume_from_checkpoint:
        raise ValueError(f"--prompt {cfg.prompt}: needs --resume_from_checkpoint RUN")
    if len(cfg.prompt.encode()) > common.load_task(cfg.task).width(**cfg.options):
        raise ValueError(f"--prompt {cfg.prompt}: is longer than the prompts of this task")


def terminal():
    """Whether somebody watches: stdout is a terminal, and no dumb one."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def say(text, colour=None):
    """Print one line, cut to 80 columns; in a colour of COLOURS where there is colour."""
    text = text[:80]
    if colour and terminal() and not os.environ.get("NO_COLOR"):
        text = f"\033[{COLOURS[colour]}m{text}\033[0m"
    print(text, flush=True)


def shown(text):
    """On one line, escaped, so that no control character of a completion reaches the terminal."""
    return text.encode("unicode_escape").decode()


def progress(label, steps):
    """The items of the list `steps`, saying how long they will take: on a terminal in a line that keeps being
    overwritten, for a pipe at every fifth of the way, if they take longer than ten seconds."""
    start = last = time.perf_counter()
    for done, item in enumerate(steps, 1):
        yield item
        now = time.perf_counter()
        left, percent = (now - start) / done * (len(steps) - done), 100 * done // len(steps)
        if terminal():
            if now - last > 0.2 or done == len(steps):
                bar = "#" * (percent // 4)
                print(f"\r{label} {bar:25} {percent:3d}%, {left:4.0f} s left", end="", flush=True)
                last = now
        elif done % max(1, len(steps) // 5) == 0 and now - start + left > 10:
            say(f"{label} {percent:3d}%, {left:.0f} s left")
    if terminal():
        print("\r\033[K", end="", flush=True)


def command(run):
    """What goes on with the run in a shell."""
    return f"python {run.script.name} --resume_from_checkpoint {shlex.quote(str(run.folder))}"


def example(cfg):
    """The problem that a run proposes to ask."""
    return common.sample_problems(cfg.task, 1, "example", "test", **cfg.options)[0]


def answer(run, rollout, encode_prompts):
    """Print what the trained policy says to --prompt, escaped: no control character reaches the terminal.
    `rollout` and `encode_prompts` are the script's."""
    cfg, known = run.cfg, example(run.cfg)
    problem = known if known.prompt == cfg.prompt else common.Problem(cfg.task, cfg.prompt, "")
    run.model.load_state_dict(run.resumed["policy"])
    out = rollout(run.model, encode_prompts([cfg.prompt], cfg), cfg, problems=[problem])
    print(shown(out.texts()[0]), flush=True)


def leave(run):
    """End the run, saying how to go on. os.write, because a print may be under way."""
    os.write(2, f"\ninterrupted; go on with:\n  {command(run)}\n".encode())
    raise SystemExit(130)


def watch(run):
    """From now on Ctrl-C ends the run, in training when the step is done, the second time at once."""
    def on_ctrl_c(*_):
        if run.step_clock is None or run.interrupted:
            leave(run)
        run.interrupted = True

    run.step_clock, run.interrupted, run.warned = None, False, set()
    signal.signal(signal.SIGINT, on_ctrl_c)


def begin(run, train, code):
    """Once the folder is there: the first weights, see tools/bases.py."""
    watch(run)
    if not run.resumed:
        bases.begin(run, train, code)


def start(run):
    """Before training: what a step is made of, and how good the base is."""
    cfg, base, P, G = run.cfg, run.state["base"], run.cfg.num_prompts, run.cfg.num_generations
    kernels = common.kernels and common.kernels.choose(cfg.kernel, torch.device(cfg.device))
    say(f"{P} prompts x {G} completions = {P * G} per step, log-probs by {'triton' if kernels else 'torch'}")
    names = [name for name in base if re.fullmatch("greedy|return|.*@[0-9]+", name)]
    say("base: " + ", ".join(f"{name} {base[name]:.3f}" for name in names[:5]))
    if base["pass@1"] == 0:
        say("warning: no sample of the base is right: try more --base_steps, or easier tasks", "yellow")
    print(" step" + "".join(f"{heading:>8}" for heading in run.columns) + "  secs  left", flush=True)


def step(run, metrics, batch, advantages, score=None, values=None):
    """After a step: its line and its evaluation's; warnings, each once in a run; at the first step and at
    evaluations samples. Ends the run if Ctrl-C was pressed."""
    number, took = run.state["steps"], metrics["step_time"]
    cells = "".join(f"{round(metrics[key], 3) + 0.0:8.3f}" for key in run.columns.values())      # no -0.000
    print(f"{number:5d}{cells}{took:6.2f}{took * (run.cfg.max_steps - number):5.0f}s", flush=True)
    held_out = [f"{name} {x:.3f}" for name, x in metrics.items() if re.fullmatch("eval/[^/]*", name)]
    if held_out:
        print("      " + ", ".join(held_out[:3]), flush=True)
    for broken, message in WARNINGS:
        if message not in run.warned and broken(metrics):
            say(f"warning: {message}", "yellow")
            run.warned.add(message)
    if number == 1 or number % run.cfg.eval_steps == 0:
        A = advantages.sum(1) / batch.out.mask.sum(1) if advantages.dim() == 2 else advantages      # (B,)
        for record in samples(run, batch, A, score, values):
            run.append("samples.jsonl", {"step": number, **record})
        best_and_worst(batch, A)
    if run.interrupted:
        run.save()
        leave(run)


def samples(run, batch, A, score, values):
    """Records of the first four groups of a batch, for samples.jsonl. Tokens are shaded by a critic's values
    (B, T), else by the ratio pi / pi_old after the update, for which `score` is the script's."""
    P, G = batch.rewards.shape
    out, rows = batch.out, torch.arange(min(4, P) * G)                                      # (b,)
    if values is None:
        with torch.no_grad():
            logps, _ = score(run.model, batch.prompts, batch.of[rows], out.tokens[rows], *run.cfg.scoring)
        shade = (logps - out.logps[rows]).exp()                                             # (b, T)
    else:
        shade = values[rows]                                                                # (b, T)
    lengths = out.mask.sum(1)                                                               # (B,)
    records = [{"prompt": problem.prompt, "answer": problem.answer, "completions": [],
                "shade": "ratio" if values is None else "value"} for problem in batch.problems[:4]]
    for i, n in enumerate(out.lengths[rows].tolist()):
        records[i // G]["completions"].append({
            "text": batch.texts[i], "reward": batch.rewards.view(-1)[i].item(), "advantage": A[i].item(),
            "length": int(lengths[i]), "tokens": [batch.decode([t]) for t in out.tokens[i, :n].tolist()],
            "mask": out.mask[i, :n].int().tolist(), "shade": [round(x, 4) for x in shade[i, :n].tolist()]})
    return records


def best_and_worst(batch, A):
    """Print the best and the worst completion of the group whose rewards differ most. A: (B,)"""
    G = batch.rewards.shape[1]
    p = int((batch.rewards.amax(1) - batch.rewards.amin(1)).argmax())
    ranked = batch.rewards[p].argsort(stable=True)
    for g, colour in ((ranked[-1], "green"), (ranked[0], "red")):
        i = int(p * G + g)
        text = shown(batch.problems[p].prompt + batch.texts[i])
        say(f"      {batch.rewards[p, g].item():5.2f} {A[i].item():+5.2f} {text}"[:79], colour)


def finish(run, both):
    """After training: evaluation.jsonl, the scores of base and trained policy side by side, and pictures."""
    pairs = zip(both["base"].get("examples", ()), both["trained"].get("examples", ()))
    lines = [json.dumps({"prompt": b["prompt"], "answer": b["answer"], "base": b, "trained": t}) + "\n"
             for b, t in pairs]
    common.write(run.folder / "evaluation.jsonl", "".join(lines))
    say(f"{'base':>32} trained")
    for name in both["base"]:
        pair = [scores.get(name) for scores in both.values()]
        if not any(isinstance(x, list) for x in pair):
            cells = (f"{x:.3f}" if isinstance(x, float) else "-" if x is None else str(x) for x in pair)
            say(f"{name:>24}" + "".join(f" {cell:>7}" for cell in cells))
    for name, make in (("report.html", "write_report"), ("curve.png", "draw_curve")):
        try:
            getattr(importlib.import_module("tools.report"), make)(run.folder)
        except (ImportError, OSError, ValueError) as error:
            say(f"no {name}: {shown(str(error))}")
    state = run.state
    if state["steps"] < run.cfg.max_steps:
        say(f"The last 5 batches are {sum(state['recent']) / 5:.3f} accurate: --stop_at {run.cfg.stop_at}")
    print(f"{state['steps']} steps, {state['seconds_total']:.0f} s, folder {run.folder}. Ask the policy:")
    print(f"  {command(run)} --prompt {shlex.quote(example(run.cfg).prompt)}", flush=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
