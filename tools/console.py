"""What a run shows besides its plain lines: progress, samples, warnings, and what has changed at the end.

Colour and lines that overwrite themselves are for a terminal only, and NO_COLOR is respected; a pipe gets
plain lines. Nothing is wider than 80 columns.
"""
import os
import sys
import time

import torch

WARNINGS = (                    # how a step looks when learning cannot work, and what to say of it, once
    (lambda m: m["frac_reward_zero_std"] == 1 and m["accuracy"] < 0.5,
     "no group has signal: raise --num_generations, or take a better base"),
    (lambda m: m["completions/clipped_ratio"] > 0.5, "completions are cut: raise --max_completion_length"),
    (lambda m: m["entropy"] < 0.005 and m["accuracy"] < 0.9,
     "entropy has collapsed: lower --learning_rate, or raise --entropy_coef"),
    (lambda m: m.get("rewards/chosen", 0) < 0,
     "chosen answers lose probability, too: try a lower --learning_rate"),
    (lambda m: m.get("sampling/sampling_logp_difference/max", 0) > 1e-3,
     "the first ratio is not 1: do sampling and scoring use the same weights?"))
COLOURS = {"green": 32, "red": 31, "yellow": 33, "dim": 2}


def terminal():
    """Whether somebody watches: stdout is a terminal, and no dumb one."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def coloured(text, colour):
    """`text` in a colour of COLOURS, where there is colour."""
    return f"\033[{COLOURS[colour]}m{text}\033[0m" if terminal() and not os.environ.get("NO_COLOR") else text


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
            print(f"{label} {percent:3d}%, {left:.0f} s left", flush=True)
    if terminal():
        print("\r\033[K", end="", flush=True)


def warn(metrics, said):
    """Print the warnings that apply to a step. -> `said` with them"""
    for broken, message in WARNINGS:
        if message not in said and broken(metrics):
            print(coloured(f"warning: {message}", "yellow"), flush=True)
            said = said | {message}
    return said


def samples(run, batch, advantages, score=None, values=None):
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
    mean = advantages.sum(1) / lengths if advantages.dim() == 2 else advantages             # (B,)
    records = [{"prompt": problem.prompt, "answer": problem.answer, "completions": [],
                "shade": "ratio" if values is None else "value"} for problem in batch.problems[:4]]
    for i, n in enumerate(out.lengths[rows].tolist()):
        records[i // G]["completions"].append({
            "text": batch.texts[i], "reward": batch.rewards.view(-1)[i].item(), "advantage": mean[i].item(),
            "length": int(lengths[i]), "tokens": [batch.decode([t]) for t in out.tokens[i, :n].tolist()],
            "mask": out.mask[i, :n].int().tolist(), "shade": [round(x, 4) for x in shade[i, :n].tolist()]})
    return records


def best_and_worst(batch, advantages):
    """Print the best and the worst completion of the group whose rewards differ most."""
    G = batch.rewards.shape[1]
    p = int((batch.rewards.amax(1) - batch.rewards.amin(1)).argmax())
    lengths = batch.out.mask.sum(1)                                                         # (B,)
    mean = advantages.sum(1) / lengths if advantages.dim() == 2 else advantages             # (B,)
    ranked = batch.rewards[p].argsort()
    for g, colour in ((ranked[-1], "green"), (ranked[0], "red")):
        i = int(p * G + g)
        text = shown(batch.problems[p].prompt + batch.texts[i])
        line = f"      {batch.rewards[p, g].item():5.2f} {mean[i].item():+5.2f} {text}"
        print(coloured(line[:79], colour), flush=True)


def table(before, after):
    """Print the scores of base and trained policy side by side."""
    print(f"{'base':>30} trained")
    for name in before:
        if not isinstance(before[name], list):
            pair = before[name], after.get(name)
            cells = (f"{x:.3f}" if isinstance(x, float) else x or "-" for x in pair)
            print(f"{name:>22}" + "".join(f"{cell:>8}" for cell in cells), flush=True)
