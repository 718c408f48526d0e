"""Bug hunts: a script with one planted mistake, whose run stands beside five right ones.

hunts.json stores what was measured (make hunts): of each script five right runs and, of mistakes
of learn/practice/mistakes.txt with which the reward still rises, a run.
"""
import json
import re
import textwrap
from pathlib import Path

import numpy

import common
from common import HERE as ROOT
from learn.practice.exercise import mutants
from report import COMMAND

MEASURED = Path(__file__).with_name("hunts.json")
SHORT = ("--num_iterations 2 --num_prompts 16 --micro_batch_size 16 --max_steps 20 --stop_at 2 "
         "--num_eval_problems 1 --num_eval_samples 1 --eval_steps 1000")
FLAGS = {"reinforce": "--baseline rloo --view token --gamma 0.99 --beta 0.02", "ppo": "--beta 0.02",
         "grpo": "--loss_type dapo --beta 0.05", "gspo": "--beta 0.02",
         "dpo": "--online --label_smoothing 0.1"}
# How far a metric of a hunt is at least from those of right runs, in widths of their span.
LEVELS = {1: 4.0, 2: 1.0, 3: 0.0}
WINDOWS = {"first 5 steps": slice(5), "last 5 steps": slice(-5, None)}
BLOCKS = "▁▂▃▄▅▆▇█"


def planted(source, mutant):
    """A text with a mistake, its comments in their columns, which else would betray it. -> str, its
    first line, its last"""
    old = "\n".join(mutant.old)
    first = source.partition(old)[0].count("\n")
    columns = {}
    for line in source.split("\n")[first:first + len(mutant.old)]:
        columns[line.partition("  # ")[2]] = line.find("  # ")
    lines = source.replace(old, "\n".join(mutant.new)).split("\n")
    last = first + len(mutant.new)
    for i in range(first, last):
        code, mark, comment = lines[i].partition("  # ")
        if mark and comment in columns:
            lines[i] = code.rstrip().ljust(columns[comment]) + mark + comment
    return "\n".join(lines), first + 1, last


def distances(found, right):
    """How far a run is from right ones: 0 in their span, 1 a width of the span above, -1 below.
    found: {metric: (steps,)}, right: {metric: (runs, steps)}. -> {(metric, window): float}"""
    ways = {}
    for metric, rows in right.items():
        for window, steps in WINDOWS.items():
            spans = numpy.array(rows)[:, steps].mean(axis=1)                    # (runs,)
            here = numpy.mean(found[metric][steps])
            outside = max(here - spans.max(), 0.0) + min(here - spans.min(), 0.0)
            ways[metric, window] = outside / max(numpy.ptp(spans), 1e-9)
    return ways


def load(name):
    """What was measured of a script. -> {"right": {metric: rows}, "hunts": list of dicts}"""
    return json.loads(MEASURED.read_text())[f"{name}.py"]


def plant(name, hunt):
    """-> the mistake of a hunt, planted(the script, this)"""
    [mutant] = [mutant for mutant in mutants()
                if (mutant.file, mutant.name) == (hunt["file"], hunt["mistake"])]
    source = (ROOT / f"{name}.py").read_text()
    if source.count("\n".join(mutant.old)) != 1:
        common.fail(f"{name}.py has changed where the mistake goes: make hunts measures anew")
    return mutant, *planted(source, mutant)


def begin(name="grpo", level="1"):
    """Write the next hunt of a script and a level into the current folder, and show its run."""
    if name not in FLAGS or level not in ("1", "2", "3"):
        common.fail(f"hunt {name} {level}: a script of {', '.join(FLAGS)}, and a level, 1 to 3")
    measured = load(name)
    for number, hunt in enumerate(measured["hunts"], start=1):
        path = Path("hunt", f"{name}_{number}.py")
        if hunt["level"] == int(level) and not path.exists():
            break
    else:
        common.fail(f"hunt/ has all hunts of {name}, level {level}: move them away to try again")
    common.write(path, plant(name, hunt)[1])
    print(f"{path} has one mistake. Its run, compared with five right ones:\n")
    show(hunt["run"], measured["right"])
    flags = textwrap.fill(f"{FLAGS[name]} {SHORT}", 90, break_on_hyphens=False).split("\n")
    where = "" if Path.cwd() == ROOT else f"PYTHONPATH={ROOT} "
    print("\nRead it; try it out, as these 20 steps were made:")
    print(f"  {where}python -m hunt.{path.stem}", *flags, sep=" \\\n    ")
    print(f"Then name the line, or the function:\n  {COMMAND} learn.practice answer {path} 143")


def show(run, right):
    """Print of each metric the mean of right runs and the run, as blocks for the steps, and in the
    windows the span of the means of right runs and that of the run."""
    print(" " * 56 + "         ".join(WINDOWS))
    ways = distances(run, right)
    for metric, rows in right.items():
        rows = numpy.array(rows)                                                # (runs, steps)
        both = numpy.stack([rows.mean(axis=0), run[metric]])                    # (2, steps)
        levels = 7.99 * (both - both.min()) / max(numpy.ptp(both), 1e-9)
        lines = [f"  {metric:26}right  ", f"  {'':26}here   "]
        for i, level in enumerate(levels.astype(int)):
            lines[i] += "".join(BLOCKS[x] for x in level) + "  "
        for window, steps in WINDOWS.items():
            means = rows[:, steps].mean(axis=1)
            here = both[1, steps].mean().round(5) + 0.0                         # no -0
            lines[0] += f"{means.min():.3g} to {means.max():.3g}".ljust(22)
            lines[1] += f"{here:.3g} {side(ways[metric, window])}".ljust(22)
        print(*map(str.rstrip, lines), sep="\n")


def side(way):
    """What a distance is called. -> str"""
    return "" if abs(way) < 1 else "too high" if way > 0 else "too low"


def answer(word, guess=None):
    """Print whether a line or a function has the mistake; if so, or without a guess, all about it.
    A line is compared as text, because a learner's edits may have moved it."""
    path = Path(word)
    name, _, number = path.stem.partition("_")
    hunts = load(name)["hunts"] if name in FLAGS else []
    if not path.is_file() or not number.isdecimal() or not 0 < int(number) <= len(hunts):
        common.fail(f"{word} is no hunt; hunts are files like hunt/grpo_1.py")
    hunt = hunts[int(number) - 1]
    mutant, text, first, last = plant(name, hunt)
    lines = text.split("\n")
    right = (ROOT / f"{name}.py").read_text().split("\n")
    wrong_lines = lines[first - 1:last]
    right_lines = right[first - 1:last + len(right) - len(lines)]
    place = home(lines, first)
    own = path.read_text(encoding="utf-8").split("\n")
    is_line = guess is not None and guess.isdecimal() and 0 < int(guess) <= len(own)
    if guess not in (None, place) and not (is_line and own[int(guess) - 1] in wrong_lines):
        common.fail(f"No, it is not {guess}.", 1)
    print(f"{'Yes. ' * (guess is not None)}The mistake, in {place}: {hunt['mistake']}.")
    for number, line in enumerate(wrong_lines, start=first):
        print(f"  line {number}:  {line.strip()}")
    for line in right_lines:
        print(f"  right:     {line.strip()}")
    ways = distances(hunt["run"], load(name)["right"])
    signs = [f"{metric} {side(way)} in the {window}"
             for (metric, window), way in ways.items() if side(way)]
    print(f"What shows it: {'; '.join(signs) or 'no metric'}\nTests that fail: "
          f"python -m pytest {' '.join(mutant.files)} -k '{mutant.words or 'test'}'")


def home(lines, number):
    """The function or class of a line, by number. -> its name"""
    heads = [re.match(r"(?:def|class) (\w+)", line) for line in lines[:number]]
    return next((head[1] for head in reversed(heads) if head), "no function")
