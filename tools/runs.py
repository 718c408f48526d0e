"""What the tools that measure have in common: run scripts, read what they left, write down what was
found in docs/ and, between its marks, on the page that has them, README.md or one in docs/."""
import concurrent.futures
import functools
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import common

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
MACHINE = f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}"


# ---- 1. runs ---------------------------------------------------------------------------------

def run(script, folder, *flags, cwd=ROOT, quiet=False):
    """Run a script into a new `folder`, its lines going where ours go, or nowhere if `quiet`. Exits
    as the script does if it fails. -> its summary"""
    words = [str(flag) for flag in flags] + ["--output_dir", str(folder)]
    print(f"$ python {script} {' '.join(words)}", flush=True)
    output = subprocess.DEVNULL if quiet else None
    done = subprocess.run([sys.executable, ROOT / script, *words], cwd=cwd, stdout=output)
    if done.returncode != 0:
        raise SystemExit(done.returncode)
    return read_summary(Path(cwd, folder))


def read_summary(folder):
    """The scores of base and trained policy, and the times. -> dict"""
    return json.loads(Path(folder, "summary.json").read_text())


def read_log(folder, name):
    """The lines of NAME.jsonl. -> list of dicts"""
    text = Path(folder, f"{name}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def curve(folder, name):
    """The values of a metric of a run, step by step; None where it was not logged. -> list"""
    return [line.get(name) for line in read_log(folder, "metrics")]


def run_all(variants, seeds, metrics=("reward",), at_once=0, seeded=("--seed",), look=None):
    """Run {name: [script, flag, value ...]} with each seed, the value of the flags `seeded`;
    `at_once` of them side by side, or as many as there are cores; 1 if seconds matter. -> {name:
    [result of each seed]}; a result is a dict: the summary, for each of `metrics` its values step
    by step, and what look(name, folder) finds"""
    with tempfile.TemporaryDirectory() as work:
        make_base(next(iter(variants.values())))        # which most of them share

        def result(name, script, flags, seed):
            folder = Path(work, f"{name}-s{seed}".replace(" ", "-"))
            flags = [word for flag in seeded for word in (flag, seed)] + flags
            summary = run(script, folder, *flags, quiet=True)
            curves = {metric: rounded(curve(folder, metric)) for metric in metrics}
            return {"summary": summary} | curves | (look(name, folder) if look else {})

        with concurrent.futures.ThreadPoolExecutor(at_once or os.cpu_count()) as pool:
            futures = {name: [pool.submit(result, name, script, flags, seed) for seed in seeds]
                       for name, (script, *flags) in variants.items()}
            return {name: [future.result() for future in waiting]
                    for name, waiting in futures.items()}


def rounded(values):
    """Numbers with five decimals, None where there was none. -> list"""
    return [None if value is None else round(value, 5) for value in values]


BASE_RUN = ["--max_steps", "0", "--num_eval_problems", "1", "--num_eval_samples", "1"]


def make_base(variant):
    """Make the base of a variant, or find it in runs/base/. -> its weights"""
    script, *flags = variant
    return base_weights(script, tuple(base_flags(flags)))


@functools.cache
def base_weights(script, flags):
    with tempfile.TemporaryDirectory() as work:
        run(script, Path(work, "base"), *flags, *BASE_RUN, quiet=True)
        return torch.load(Path(work, "base", "base.pt"), weights_only=True)["policy"]


def base_flags(flags):
    """Those of the flags that shape the task or the base, with their values. -> list"""
    kept = []
    for name, value in zip(flags, flags[1:]):
        if str(name)[2:] in ("task", *common.Base.__annotations__):
            kept += [name, value]
    return kept


# ---- 2. docs/ --------------------------------------------------------------------------------

def record(name, **content):
    """Write docs/NAME.json, which says on which machine the numbers were found."""
    DOCS.mkdir(exist_ok=True)
    text = json.dumps({"machine": MACHINE} | content, indent=2)
    (DOCS / f"{name}.json").write_text(text + "\n")


def import_pyplot():
    """matplotlib's pyplot, which draws into files. -> module"""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot


def picture(name, panels, width=4.2):
    """Draw docs/NAME.png: `panels` is a list of functions, each of which fills an axis."""
    pyplot = import_pyplot()
    size = (width * len(panels), 3.4)
    figure, axes = pyplot.subplots(1, len(panels), figsize=size, squeeze=False)
    for axis, fill in zip(axes[0], panels):
        fill(axis)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(DOCS / f"{name}.png", dpi=110)
    pyplot.close(figure)


# ---- 3. pages --------------------------------------------------------------------------------

def table(head, rows):
    """A table in Markdown. head: list of headings; rows: lists of cells. -> str"""
    rule = ["---"] * len(head)
    text = ""
    for row in [head, rule, *rows]:
        cells = " | ".join(str(cell) for cell in row)
        text += f"| {cells} |\n"
    return text


def joined(values, form):
    """Numbers in one cell, such as those of several seeds: 0.95, 0.97. -> str"""
    return ", ".join(f"{value:{form}}" for value in values)


def span(values, form):
    """From the least to the greatest, or one number if they are written alike. -> str"""
    low = f"{min(values):{form}}"
    high = f"{max(values):{form}}"
    return low if low == high else f"{low} - {high}"


def note(summaries, seeds, bases, problems=""):
    """What is said below a table about the runs in it: how many different held-out problems they
    were evaluated on, their seeds, from what base or bases they start, how many steps they took,
    and where. `problems` gives the numbers where there are several tasks. -> str"""
    if not problems:
        problems = span([summary["trained"]["problems"] for summary in summaries], "d")
    steps = [summary["steps"] for summary in summaries if summary["steps"] > 0]
    word = "seeds" if len(seeds) > 1 else "seed"
    numbers = ", ".join(str(seed) for seed in seeds)
    return (f"Held-out problems, all different: {problems}; {word} {numbers}, {bases}; "
            f"{span(steps, 'd')} steps; {MACHINE}.\n")


def publish(name, head, rows, said, panels=(), width=4.2, **found):
    """Write down a table of runs: what was found in docs/NAME.json, docs/NAME.png if it has panels,
    and the table, with what is said below it, between its marks."""
    record(name, **found)
    if panels:
        picture(name, panels, width)
    put(name, f"{table(head, rows)}\n{said}", name)


def put(name, text, target):
    """Replace what stands between the mark `made by make TARGET: NAME` and the mark `end of NAME`
    on the page that has them. ValueError unless exactly one page has."""
    start = f"<!-- made by make {target}: {name} -->\n"
    end = f"<!-- end of {name} -->"
    pages = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
    marked = [page for page in pages if start in page.read_text()]
    if len(marked) != 1:
        names = ", ".join(page.name for page in marked) or "none"
        raise ValueError(f"the mark {start.strip()} has to be on one page, and is on {names}")
    [page] = marked
    before, _, rest = page.read_text().partition(start)
    old, found_end, after = rest.partition(end)
    if not found_end or "<!-- made by" in old:
        raise ValueError(f"{page}: lacks the mark {end}")
    if start in after:
        raise ValueError(f"{page}: has the mark {start.strip()} twice")
    page.write_text(f"{before}{start}{text}{end}{after}")
