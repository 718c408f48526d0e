"""Bug hunts: a script with one planted mistake, and its run next to five correct runs.

hunts.txt lists mistakes with which the reward still rises. Both kinds of runs are made when a hunt
begins, and stored in hunt/.
"""
import contextlib
import importlib
import io
import json
import re
import sys
import tempfile
import textwrap
import types
import zlib
from pathlib import Path

import numpy

import common
import plumbing
from common import HERE as ROOT
from learn.practice.exercise import mutants
from learn.practice.mistakes import MISTAKES, parse
from report import command
from report.logs import read_log

HUNTS = Path(__file__).with_name("hunts.txt")
SHORT = ("--num_iterations 2 --num_prompts 16 --micro_batch_size 16 --max_steps 20 "
         "--num_eval_problems 1 --num_eval_samples 1 --eval_steps 1000")
FLAGS = {"reinforce": "--baseline rloo --view token --gamma 0.99 --beta 0.02", "ppo": "--beta 0.02",
         "grpo": "--loss_type dapo --beta 0.05", "gspo": "--beta 0.02",
         "dpo": "--online --label_smoothing 0.1"}
NOT_COMPARED = re.compile("step|zero_std|clipped_ratio|critic_grad|accuracy$|checks|sampling|beta|"
                          "coef|margins|reward_std|approx_kl")
WINDOWS = {"first 5 steps": slice(5), "last 5 steps": slice(-5, None)}
BLOCKS = "▁▂▃▄▅▆▇█"


def planted(source, mutant):
    """Plant a mistake in a text. Comments stay in their columns, or they would give it away.
    -> the text, the first and the last line of the mistake"""
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
    """Measure how far a run is from correct runs: 0 inside their range, 1 if it is above by the
    width of the range, -1 if it is below by that. found: {metric: (steps,)}, right:
    {metric: (runs, steps)}. -> {(metric, window): float}"""
    ways = {}
    for metric, rows in right.items():
        for window, steps in WINDOWS.items():
            spans = numpy.array(rows)[:, steps].mean(axis=1)                    # (runs,)
            here = numpy.mean(found[metric][steps])
            outside = max(here - spans.max(), 0.0) + min(here - spans.min(), 0.0)
            ways[metric, window] = outside / max(numpy.ptp(spans), 1e-9)
    return ways


def hunts_of(name):
    """List the hunts of a script. -> list of (level, file, name of the mistake)"""
    rows = [line.split(" | ") for line in HUNTS.read_text("utf-8").splitlines()]
    return [(head[-1], file, mistake) for head, file, mistake in rows[1:]
            if head.split()[0] == name]


def run_text(file, text, flags, base=None):
    """Run the text of a script, in which a mistake may be planted, without printing. base: a policy
    to begin with. -> its metrics, a dict for each step"""
    script = sys.modules["planted"] = types.ModuleType("planted")
    script.__file__ = str(ROOT / file)
    with tempfile.TemporaryDirectory() as work, contextlib.redirect_stdout(io.StringIO()), \
            contextlib.redirect_stderr(io.StringIO()):
        if base is not None:
            plumbing.write(Path(work, "checkpoint.pt"), {"policy": base.state_dict()})
            flags = f"{flags} --init_from {work}"
        exec(compile(text, file, "exec"), vars(script))
        script.main([*flags.split(), "--output_dir", f"{work}/run"])
        return read_log(f"{work}/run", "metrics")


def measure(name, text, seed=0):
    """Run a text of a script, unless hunt/ contains this run. -> {metric: number of each step}"""
    flags = f"{FLAGS[name]} {SHORT} --seed {seed}"
    path = Path("hunt", f"{name}_{zlib.crc32((text + flags).encode()):08x}.json")
    if not path.exists():
        log = run_text(f"{name}.py", text, flags)
        names = [one for one in log[0] if not NOT_COMPARED.search(one)
                 and all(isinstance(line.get(one), (int, float)) for line in log)]
        plumbing.write(path, json.dumps({one: [line[one] for line in log] for one in names}))
    return json.loads(path.read_text("utf-8"))


def compare(name, text):
    """Run a text with a mistake, and the script with five seeds.
    -> {metric: (steps,)}, {metric: (5, steps)}"""
    source = (ROOT / f"{name}.py").read_text("utf-8")
    run, *right = measure(name, text), *(measure(name, source, seed) for seed in range(5))
    return run, {metric: [one[metric] for one in right] for metric in right[0] if metric in run}


def plant(name, hunt):
    """Plant the mistake of a hunt. -> the mistake, and what `planted` returns"""
    _, file, mistake = hunt
    [mutant] = [mutant for mutant in mutants(file) if mutant.name == mistake]
    source = (ROOT / f"{name}.py").read_text("utf-8")
    if source.count("\n".join(mutant.old)) != 1:
        common.fail(f"{name}.py has changed in the lines of this mistake: remove it from {HUNTS}")
    return mutant, *planted(source, mutant)


def run(name, *flags):
    """Run the script, or grpo.py if it has none, in which the mistake of this name is planted. The
    name may be cut short."""
    found = [mutant for path in (MISTAKES, ROOT / "lab/claims/bugs.txt")
             for mutant in parse(path.read_text("utf-8")) if mutant.name.startswith(name)]
    if not found:
        common.fail(f"{name}: no mistake of mistakes.txt or bugs.txt has this name")
    file = found[-1].file
    text, *_ = planted((ROOT / file).read_text("utf-8"), found[-1])
    if "/" in file:
        module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        exec(compile(text, file, "exec"), vars(module))
        file, text = "grpo.py", (ROOT / "grpo.py").read_text("utf-8")
    path = Path("hunt/planted", file)
    plumbing.write(path, text)              # the run copies its script into its folder
    script = sys.modules["planted"] = types.ModuleType("planted")
    script.__file__ = str(path)
    exec(compile(text, path, "exec"), vars(script))
    script.main(list(flags))


def begin(name="grpo", level="1"):
    """Write the next hunt of a script and a level into the current folder, and show its run."""
    if name not in FLAGS or level not in ("1", "2", "3"):
        common.fail(f"hunt {name} {level}: name one of {', '.join(FLAGS)}, and a level from 1 to 3")
    for number, hunt in enumerate(hunts_of(name), start=1):
        path = Path("hunt", f"{name}_{number}.py")
        if hunt[0] == level and not path.exists():
            break
    else:
        common.fail(f"hunt/ contains all hunts of {name}, level {level}; move one away to repeat")
    text = plant(name, hunt)[1]
    plumbing.write(path, text)
    print(f"{path} contains one mistake, which you can look for now. 20 steps with it, and five "
          "correct runs, take a minute or two:\n", flush=True)
    show(*compare(name, text))
    flags = textwrap.fill(f"{FLAGS[name]} {SHORT}", 90, break_on_hyphens=False).split("\n")
    print("\nRead the file, and try it out. This command makes the 20 steps above:")
    print(f"  {command(f'hunt.{path.stem}')}", *flags, sep=" \\\n    ")
    print("Then name the line, or the function:\n "
          f" {command('learn.practice', 'answer', path, 143)}")


def show(run, right):
    """Print each metric step by step, as blocks: the mean of the correct runs, and this run. For
    each window, print the range of the correct runs' means, and the mean of this run."""
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
    """Name a distance. -> str"""
    return "" if abs(way) < 1 else "too high" if way > 0 else "too low"


def answer(word, guess=None):
    """Print whether a line or a function has the mistake. If so, or without a guess, explain it. A
    line is compared as text, because a learner's edits may have moved it."""
    path = Path(word)
    name, _, number = path.stem.partition("_")
    hunts = hunts_of(name)
    if not path.is_file() or not number.isdecimal() or not 0 < int(number) <= len(hunts):
        common.fail(f"{word}: there is no such hunt; to write hunt/grpo_1.py, run: "
                    f"{command('learn.practice', 'hunt', 'grpo', 1)}")
    mutant, text, first, last = plant(name, hunts[int(number) - 1])
    lines = text.split("\n")
    right = (ROOT / f"{name}.py").read_text("utf-8").split("\n")
    wrong_lines = lines[first - 1:last]
    right_lines = right[first - 1:last + len(right) - len(lines)]
    heads = re.findall(r"^(?:def|class) (\w+)", "\n".join(lines[:first]), re.M)
    place = heads[-1] if heads else "no function"
    own = path.read_text(encoding="utf-8").split("\n")
    is_line = guess is not None and guess.isdecimal() and 0 < int(guess) <= len(own)
    if guess not in (None, place) and not (is_line and own[int(guess) - 1] in wrong_lines):
        print(f"No, the mistake is not in {'line ' * guess.isdecimal()}{guess}.")
        raise SystemExit(1)
    print(f"{'Yes. ' * (guess is not None)}The mistake, in {place}: {mutant.name}.")
    for number, line in enumerate(wrong_lines, start=first):
        print(f"  line {number}:  {line.strip()}")
    for line in right_lines:
        print(f"  right:     {line.strip()}")
    signs = [f"{metric} {side(way)} in the {window}"
             for (metric, window), way in distances(*compare(name, text)).items() if side(way)]
    tests = [ROOT / file for file in mutant.files]
    print(f"Metrics that show it: {'; '.join(signs) or 'none'}\nTests that catch it: "
          f"{command('pytest', '-p', f'hunt.{path.stem}', *tests, '-k', mutant.words or 'test')}")
