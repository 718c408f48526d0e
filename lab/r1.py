"""R1-Zero and the stages of R1, from one base: make r1, or python -m lab.r1 SEED ...

Each run is a command that docs/pipelines.md shows. They are run in this order, for each seed from a
base of its own. The numbers go to docs/r1.json, and from there into the page and docs/r1.svg.
"""
import os
import re
import shlex
import tempfile
import time
from statistics import fmean

import numpy
import torch

import common
import grpo
import measuring
import reinforce
from examples import coldstart
from lab.bench import UNSCORED, cell
from lab.docs import DOCS, ROOT, describe, load, measured, put, table
from report import chart, parser, start
from report.ask import load_policy, read_run
from tasks.rewards import language, well_formed

GRPO = "python grpo.py --task notation"
FORM, LANGUAGE = "--reward accuracy+format", "--reward accuracy+format+language"
WITHOUT, WITH = "2. RL, no language", "R1-Zero, language"
RUNS = {                                # name: command, which ends with the folder of the run
    "base": f"{GRPO} --max_steps 0 --output_dir runs/r1/base",
    "R1-Zero": f"{GRPO} {FORM} --max_steps 60 --init_from runs/r1/base --output_dir runs/r1/zero",
    "1. cold start": "python -m examples.coldstart runs/r1/base runs/r1/cold-start",
    "2. RL": f"{GRPO} {LANGUAGE} --max_steps 20 --init_from runs/r1/cold-start "
             "--output_dir runs/r1/rl",
    "3. rejection": "python reinforce.py --task notation --method rejection --max_steps 20 "
                    "--init_from runs/r1/rl --output_dir runs/r1/rejection",
    "4. RL": f"{GRPO} {LANGUAGE} --max_steps 20 --init_from runs/r1/rejection "
             "--output_dir runs/r1/rl-again",
    WITHOUT: f"{GRPO} {FORM} --max_steps 20 --init_from runs/r1/cold-start "
             "--output_dir runs/r1/mixed",
    WITH: f"{GRPO} {LANGUAGE} --max_steps 60 --init_from runs/r1/base "
          "--output_dir runs/r1/zero-words"}
STAGES = ["base", "1. cold start", "2. RL", "3. rejection", "4. RL"]
PAIRS = (("R1-Zero", WITH), (WITHOUT, "2. RL"))         # without and with the reward for language
MAINS = {"grpo.py": grpo.main, "reinforce.py": reinforce.main,
         "examples.coldstart": coldstart.main}
PROBLEMS, SAMPLES = 512, 8              # of an evaluation, as by default in the scripts
CASE = "all runs"                       # because a run starts from another one


# ---- 1. runs ---------------------------------------------------------------------------------

def start_of(name):
    """Find the run from which a run starts. -> its name, or "" for the base"""
    found = re.search("(?:--init_from|coldstart) (runs/r1/[a-z-]+)", RUNS[name])
    return {command.split()[-1]: run for run, command in RUNS.items()}[found[1]] if found else ""


def score(folder):
    """Score the policy of a run as the scripts do, and read its thoughts. -> {score: number}"""
    script, cfg = read_run(folder)
    task = common.load_task(cfg, script.verify)
    policy = load_policy(folder, script, cfg)
    held_out = common.held_out_problems(task, PROBLEMS)
    problems = [problem for problem in held_out for _ in range(SAMPLES)]
    batch = script.complete(policy, task, cfg, problems, common.generator("evaluation"))
    batch = task.judge(batch, SAMPLES, "evaluation")
    thoughts = [text for text in batch.texts if "<think>" in text]
    return {"pass@1": batch.is_correct.double().mean().item(),
            "tokens": batch.mask.sum(dim=1).mean().item(),
            "format": fmean(well_formed(task, None, text, 0, 0) for text in batch.texts),
            "words": fmean(language(task, None, text, 0, 0) for text in thoughts or [""])}


def measure(case, seed, flags=UNSCORED):
    """Run all commands with a seed, in an empty folder. -> {run: its scores, and its seconds of
    one core}"""
    torch.set_num_threads(1)
    flags = f"--seed {seed} --base_seed {seed} --device cpu {flags}"
    found = {}
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        for name, command in RUNS.items():
            clock = time.process_time()
            program, *words = shlex.split(re.sub("^python (-m )?", "", command))
            words += shlex.split(flags) if program.endswith(".py") else []
            found[name] = measuring.run(MAINS[program], words, score, command.split()[-1])
            found[name]["seconds"] = time.process_time() - clock
            shown = ", ".join(f"{what} {x:.3f}" for what, x in found[name].items())
            print(f"seed {seed}, {name}: {shown}", flush=True)
        os.chdir(ROOT)
    return found


# ---- 2. the page -----------------------------------------------------------------------------

def columns(results):
    """Group the results of jobs. -> {run: {score: (S,)}}"""
    seeds = results.values()
    return {name: {what: numpy.array([one[name][what] for one in seeds]) for what in scores}
            for name, scores in next(iter(seeds)).items()}


def difference(values):
    """Write the mean of the seeds, and its 95% interval. -> str"""
    ends = measuring.student(values)
    mean, low, high = (f"{round(x, 2) + 0.0:+.2f}" for x in (values.mean(), *ends))
    return f"{mean} ({low} to {high})"


def text(results, about):
    """Write the commands and two tables. -> Markdown"""
    x = columns(results)
    commands = "\n".join(RUNS.values()).replace(" --init_from", " \\\n    --init_from")
    rows = []
    for name, found in x.items():
        origin = start_of(name)
        gain = difference(found["pass@1"] - x[origin]["pass@1"]) if origin else ""
        rows.append([name, origin, cell(found["pass@1"], ".2f"), gain, cell(found["tokens"], ".0f"),
                     cell(found["format"], ".2f"), cell(found["words"], ".2f")])
    heads = ["run", "starts from", "pass@1", "gain in pass@1 (95% interval)", "tokens", "format",
             "steps in words"]
    costs = [[f"{without} / {name}", difference(x[name]["pass@1"] - x[without]["pass@1"]),
              difference(x[name]["words"] - x[without]["words"])] for without, name in PAIRS]
    seeds = ", ".join(f"{seed}" for _, seed in results)
    seconds = sum(found["seconds"] for found in x.values())
    means = [x[name]["pass@1"].mean() for name in STAGES]
    cold_start, first_rl, rejection, last_rl = numpy.diff(means)
    gains = [x[name]["pass@1"] - x[before]["pass@1"] for before, name in zip(STAGES, STAGES[1:])]
    unsure = sum(low < 0 < high for low, high in map(measuring.student, gains))
    return "\n".join([
        "```", commands, "```\n",
        f"**Of R1's gain in pass@1, {means[-1] - means[0]:.2f}, the cold start adds "
        f"{cold_start:.2f}, RL {first_rl:.2f}, rejection sampling {rejection:.2f} and the last RL "
        f"{last_rl:.2f}. With {len(results)} seeds, the intervals of {unsure} of these gains "
        "include 0.**\n", "![chart](r1.svg)\n", table(heads, rows),
        table(["without / with the reward for language", "difference in pass@1 (95% interval)",
               "difference in steps in words"], costs),
        f"Means of seeds {seeds} (lowest to highest), each with its own base. The runs of a seed "
        f"take {cell(seconds, '.0f')} s of one core; the machine has {about['machine']}.\n"])


def draw(axis, results):
    """Draw pass@1, format and the share of steps in words after each stage."""
    x = columns(results)
    axis.axhline(x["R1-Zero"]["pass@1"].mean(), color=chart.GREY, linestyle="--",
                 label="pass@1 of R1-Zero")
    lines = {label: numpy.stack([x[name][what] for name in STAGES], axis=1)
             for what, label in (("pass@1", "pass@1"), ("format", "format"),
                                 ("words", "steps in words"))}
    chart.curves(axis, lines, range(len(STAGES)), ylim=(0, 1.02), xlabel="",
                 xticks=range(len(STAGES)), ylabel="share",
                 xticklabels=[name.replace("1. cold", "1. cold\n") for name in STAGES])


def page():
    """Draw the chart, and write the generated part of the page, from the stored numbers."""
    results, about = load("r1", "run: make r1")
    with chart.figure(DOCS / "r1.svg") as axis:
        draw(axis, results)
    put("r1", text(results, about), "r1")


def main(argv=None):
    flags = parser(__doc__)
    flags.add_argument("seeds", nargs="*", type=int, default=[*range(5)],
                       help="seeds [0 1 2 3 4]")
    flags.add_argument("--processes", type=int, default=os.cpu_count(),
                       help="number of seeds at a time (default: one for each core)")
    flags.add_argument("--draw", action="store_true", help="only make the page again")
    args = flags.parse_args(argv)
    if len({*args.seeds}) < 2:
        common.fail("an interval needs at least 2 different seeds")
    if not args.draw:
        store = measured("r1", lambda _: [(CASE, seed) for seed in args.seeds], measure,
                         describe(args.processes) | {"seeds": args.seeds}, args.processes)
        store.move(DOCS / "r1.json")
    page()


if __name__ == "__main__":
    start(main)
