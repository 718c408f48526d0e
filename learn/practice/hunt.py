"""Bug hunts: a script with one planted mistake. hunts.txt lists those with which the reward still
rises."""
import contextlib
import io
import json
import re
import tempfile
from pathlib import Path

import common
import measuring
import plumbing
from common import HERE as ROOT
from learn.path import runs
from learn.practice.exercise import MISTAKES, mistakes
from report import command
from report.logs import read_log
from vectors.edits import load, parse, replace_once

HUNTS = Path(__file__).with_name("hunts.txt")
SHORT = ("--num_iterations 2 --num_prompts 16 --micro_batch_size 16 --max_steps 20 "
         "--num_eval_problems 128 --num_eval_samples 4")
FLAGS = {"reinforce": "--baseline rloo --view token --gamma 0.99 --beta 0.02", "ppo": "--beta 0.02",
         "grpo": "--loss_type dapo --beta 0.05", "gspo": "--beta 0.02",
         "dpo": "--online --label_smoothing 0.1", "nano": "",
         "distill": "--task key --teacher self --hint sibling --distillation_mode sampled_token "
                    "--teacher_coef 0.05"}
STEPS = 20              # of nano.py
# What learn.path measures in a run of nano.py, and the name of this metric in a report.
METRICS = {"reward": "reward", "right": "accuracy", "tokens": "completions/mean_length",
           "think": "think_share", "silent": "frac_reward_zero_std",
           "cut": "completions/clipped_ratio", "kl": "kl", "step_kl": "policy_kl"}


def planted(source, mistake):
    """Plant a mistake in a text. Comments stay in their columns, or they would give it away.
    -> the text, the first and the last line of the mistake. ValueError if it does not fit"""
    [(old, new)] = mistake.hunks
    first = source.partition(old)[0].count("\n")
    columns = {}
    for line in source.split("\n")[first:first + old.count("\n") + 1]:
        columns[line.partition("  # ")[2]] = line.find("  # ")
    lines = replace_once(source, old, new).split("\n")
    last = first + new.count("\n") + 1
    for i in range(first, last):
        code, mark, comment = lines[i].partition("  # ")
        if mark and comment in columns:
            lines[i] = code.rstrip().ljust(columns[comment]) + mark + comment
    return "\n".join(lines), first + 1, last


def file_of(name):
    """Name the file of a script, grpo.py or examples/distill.py. -> str"""
    return f"examples/{name}.py" if name == "distill" else f"{name}.py"


def hunts_of(name):
    """Read the hunts of a script. -> {their file, such as grpo_level1_2.py: mistake}"""
    file = file_of(name)
    known = {mistake.name: mistake for mistake in mistakes("grpo.py") + mistakes(file)}
    hunts = {}
    for one in parse(HUNTS.read_text("utf-8")):
        if one.file == file:
            start = f"{name}_level{one.words}_"
            number = 1 + sum(path.startswith(start) for path in hunts)
            hunts[f"{start}{number}.py"] = known[one.name]
    return hunts


def metrics_of(folder):
    return read_log(folder, "metrics", "reward")


def run_text(file, text, flags, base=None, look=metrics_of):
    """Run the text of a script, in which a mistake may be planted, without printing. base: a policy
    to begin with. -> what look(folder of the run) returns, by default a dict for each step"""
    with tempfile.TemporaryDirectory() as work, contextlib.redirect_stderr(io.StringIO()):
        if base is not None:
            plumbing.write(Path(work, "checkpoint.pt"), {"policy": base.state_dict()})
            flags = f"{flags} --init_from {work}"
        return measuring.run(load(text, "practised", ROOT / file).main, flags.split(), look)


def plant(name, mistake):
    """Plant the mistake of a hunt in its script. -> what `planted` returns"""
    try:
        return planted((ROOT / file_of(name)).read_text("utf-8"), mistake)
    except ValueError:
        common.fail(f"{file_of(name)} has changed in the lines of this mistake: remove it from "
                    f"{HUNTS}")


def run(name, *flags):
    """Run the script or example in which the mistake of this name is planted, and grpo.py if it is
    in another file. The name may be cut short."""
    found = [one for path in (MISTAKES, ROOT / "lab/claims/bugs.txt")
             for one in parse(path.read_text("utf-8")) if one.name.startswith(name)]
    if not found:
        common.fail(f"{name}: no mistake of mistakes.txt or bugs.txt has this name")
    file = found[-1].file
    text, *_ = planted((ROOT / file).read_text("utf-8"), found[-1])
    if "/" in file and not file.startswith("examples/"):
        load(text, file.removesuffix(".py").replace("/", "."), ROOT / file)
        file, text = "grpo.py", (ROOT / "grpo.py").read_text("utf-8")
    path = Path("hunt/planted", file)
    plumbing.write(path, text)              # the run copies its script into its folder
    load(text, "practised", path).main(list(flags))


def watch(word, folder):
    """Run nano.py, or its file with a mistake, with seed 0. Write what the page shows of a run into
    a new folder, under the names of docs/metrics.md."""
    if not Path(word).is_file() or Path(folder).exists():
        common.fail(f"watch {word} {folder}: needs an existing file and the name of a new folder")
    found = runs.run(Path(word).read_text("utf-8"), 0, "", word, steps=STEPS)
    logged = [{name: step[key] for key, name in METRICS.items()} | {"step": number}
              for number, step in enumerate(found["steps"], 1)]
    base, trained = ({"greedy": right} for right in found["accuracy"])
    files = {"config.json": {"script": "nano.py", "config": {"steps": STEPS}},
             "summary.json": {"base": base, "trained": trained, "steps": STEPS,
                              "seconds_total": found["seconds"]}}
    for name, content in files.items():
        plumbing.write(Path(folder, name), json.dumps(content))
    lines = (f"{json.dumps(line)}\n" for line in logged)
    plumbing.write(Path(folder, "metrics.jsonl"), "".join(lines))


def begin(name="grpo", level="1"):
    """Write the next hunt of a script and a level into the current folder, and print the commands
    that run it."""
    if name not in FLAGS or level not in ("1", "2", "3"):
        common.fail(f"hunt {name} {level}: name one of {', '.join(FLAGS)}, and a level from 1 to 3")
    hunts = hunts_of(name)
    for file in hunts:
        path = Path("hunt", file)
        if file.startswith(f"{name}_level{level}_") and not path.exists():
            break
    else:
        common.fail(f"hunt/ contains all hunts of {name}, level {level}; move one away to repeat")
    text, *_ = plant(name, hunts[file])
    plumbing.write(path, text)
    flags = f"{FLAGS[name]} {SHORT}".split()
    folders = [f"hunt/{path.stem}-wrong", f"hunt/{path.stem}-right"]
    print(f"{path} is {file_of(name)} with one mistake. Read it, and try it out. These commands\n"
          "make 20 steps with the mistake, and without it, and compare the two runs on a page:\n")
    right = file_of(name).removesuffix(".py").replace("/", ".")
    commands = [(f"hunt.{path.stem}", *flags, "--output_dir", folders[0]),
                (right, *flags, "--output_dir", folders[1])]
    if name == "nano":                          # which writes no folder itself
        commands = [("learn.practice", "watch", file, folder)
                    for file, folder in zip((path, ROOT / "nano.py"), folders)]
    for words in (*commands, ("report.page", *folders)):
        print(f"  {command(*words)}\n")
    print("Then name the line, or the function:\n"
          f"  {command('learn.practice', 'answer', path, 143)}")


def answer(word, guess=None):
    """Print whether a line or a function has the mistake. If so, or without a guess, explain it. A
    line is compared as text, because a learner's edits may have moved it."""
    path = Path(word)
    name, *_ = path.stem.partition("_")
    mistake = hunts_of(name).get(path.name)
    if not path.is_file() or mistake is None:
        common.fail(f"{word}: there is no such hunt; to write hunt/grpo_level1_1.py, run: "
                    f"{command('learn.practice', 'hunt', 'grpo', 1)}")
    text, first, last = plant(name, mistake)
    lines = text.split("\n")
    right = (ROOT / file_of(name)).read_text("utf-8").split("\n")
    wrong_lines = lines[first - 1:last]
    right_lines = right[first - 1:last + len(right) - len(lines)]
    heads = re.findall(r"^(?:def|class) (\w+)", "\n".join(lines[:first]), re.M)
    place = heads[-1] if heads else "no function"
    own = path.read_text(encoding="utf-8").split("\n")
    is_line = guess is not None and guess.isdecimal() and 0 < int(guess) <= len(own)
    if guess not in (None, place) and not (is_line and own[int(guess) - 1] in wrong_lines):
        where = f"line {guess}" if guess.isdecimal() else guess
        print(f"No, the mistake is not in {where}.")
        raise SystemExit(1)
    if guess is not None:
        print("Yes. ", end="")
    print(f"The mistake, in {place}: {mistake.name}.")
    for number, line in enumerate(wrong_lines, start=first):
        print(f"  line {number}:  {line.strip()}")
    for line in right_lines:
        print(f"  right:     {line.strip()}")
    files, words = mistake.tests
    tests = [ROOT / file for file in files]
    print("Tests that catch it: "
          f"{command('pytest', '-p', f'hunt.{path.stem}', *tests, '-k', words or 'test')}")
