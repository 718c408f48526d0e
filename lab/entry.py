"""What those experiments have in common that are not on lab/experiment.py yet.

lab/NAME.py is an experiment, run by `python -m lab NAME` (make lab-NAME). Its docstring begins with
a title; then it says what is claimed and by whom, what we expected before the runs, and what is
done. It defines

  SEEDS               the seeds it runs with by default
  measure(seeds)      -> dict that JSON can hold: all that was found
  tables(found)       -> list of pairs (heads, rows), as tools.runs.table has them
  panels(found)       -> list of functions, each of which fills an axis of the picture
  claims(found)       -> list of Claim
  note(found)         -> one sentence for below the tables: problems, samples and the like

docs/lab/NAME.json keeps what was found, docs/lab/NAME.png shows it, and docs/lab-old.md tells it,
all made by `publish`. With --draw nothing is measured: picture and page are made anew from the
file.
"""
import importlib
import inspect
import json
import re
import shlex
import statistics
import time
from typing import NamedTuple

from lab import training
from tools.runs import DOCS, picture, put, record, table

# The order of docs/lab-old.md.
NAMES = ("zero", "languages", "compute")
SHOWN = "shown"
NOT_SHOWN = "not shown at this scale"
CONTRADICTED = "contradicted"


class Claim(NamedTuple):
    """A sentence that somebody claims, and what we saw of it."""
    text: str
    seen: str               # the numbers
    verdict: str            # SHOWN, NOT_SHOWN or CONTRADICTED


def sign_test(differences):
    """What differences say, one for each seed, that a claim says are above 0: it is shown if all of
    them are, contradicted if all are below. By luck alone, n seeds agree once in 2^n times."""
    if all(difference > 0 for difference in differences):
        return SHOWN
    if all(difference < 0 for difference in differences):
        return CONTRADICTED
    return NOT_SHOWN


def compared(text, differences, form="+.3f"):
    """The claim that differences, one for each seed, are above 0. -> Claim"""
    differences = list(differences)
    return Claim(text, mean_and_spread(differences, form), sign_test(differences))


def minus(one, other):
    """The differences of two lists, seed by seed. -> list"""
    return [a - b for a, b in zip(one, other)]


# ---- runs ------------------------------------------------------------------------------------

def load_base(script, *flags):
    """What the module of a script has before its first step. -> Config, task, policy"""
    return training.load_base(script, shlex.join(str(flag) for flag in flags))


# ---- the picture -----------------------------------------------------------------------------

def mean_curve(curves):
    """The mean of the curves of several seeds, step by step. -> list"""
    return [statistics.mean(values) for values in zip(*curves)]


def draw_curves(axis, runs, **labels):
    """The mean of the curves of the seeds of each run, {name: list of curves}, against the step."""
    for name, curves in runs.items():
        mean = mean_curve(curves)
        axis.plot(range(1, 1 + len(mean)), mean, label=name)
    axis.set(xlabel="step", **labels)
    axis.legend(frameon=False, fontsize=8)


def draw_points(axis, runs, **labels):
    """A point for each seed, in a row for each run, {name: list of numbers}, from the top down."""
    for row, values in enumerate(runs.values()):
        axis.barh(row, statistics.mean(values), color="C0", alpha=0.3)
        axis.plot(values, [row] * len(values), "k.", markersize=4)
    axis.set_yticks(range(len(runs)), runs)
    axis.invert_yaxis()
    axis.set(**labels)


# ---- the page --------------------------------------------------------------------------------

def mean_and_spread(values, form=".3f"):
    """The mean of numbers, and from which to which they go: 0.950 (0.940 - 0.960). -> str"""
    values = list(values)
    if len(set(values)) == 1:
        return f"{values[0]:{form}}"
    return f"{statistics.mean(values):{form}} ({min(values):{form}} - {max(values):{form}})"


def title(module):
    """The first line of the docstring, without its full stop. -> str"""
    return inspect.getdoc(module).splitlines()[0].rstrip(".")


def section(name, module, found):
    """What docs/lab-old.md has of an experiment, as Markdown; a function of the docstring of the
    module and of what was found. -> str"""
    told = inspect.getdoc(module).partition("\n\n")[2]
    told = re.sub(r"(\A|\n\n)(\w+\.) ", r"\1**\2** ", told)        # Claim. Prediction. Method.
    rows = [[claim.text, claim.seen, f"**{claim.verdict}**"] for claim in module.claims(found)]
    tables = [table(*pair) for pair in module.tables(found)]
    shown = f"![{title(module)}](lab/{name}.png)"
    parts = [f"### {title(module)}", told, f"`make lab-{name}`", shown, *tables,
             table(["claim", "seen", "verdict"], rows)]
    seeds = ", ".join(str(seed) for seed in found["seeds"])
    seeds = f"seeds {seeds}; " if len(found["seeds"]) > 1 else ""
    said = f"{module.note(found)}; {seeds}{found['seconds']:.0f} s; {found['machine']}.\n"
    return "\n".join(part.rstrip("\n") + "\n" for part in [*parts, said])


def index():
    """The top of docs/lab-old.md: how the claims of each experiment came out, and which of them
    were contradicted. -> str"""
    rows = []
    contradicted = ""
    for name in NAMES:
        module = importlib.import_module(f"lab.{name}")
        listed = module.claims(load(name))
        verdicts = [claim.verdict for claim in listed]
        counts = [verdicts.count(verdict) or "" for verdict in (SHOWN, NOT_SHOWN, CONTRADICTED)]
        rows.append([link(module, name), title(module), *counts])
        for claim in listed:
            if claim.verdict == CONTRADICTED:
                contradicted += f"- {link(module, name)}: {claim.text}\n"
    heads = ["experiment", "what it looks at, and how many claims are", SHOWN, NOT_SHOWN,
             CONTRADICTED]
    return f"{table(heads, rows)}\nContradicted here:\n\n{contradicted}"


def link(module, words):
    """A link to the section of an experiment, whose heading GitHub spells as an anchor. -> str"""
    anchor = re.sub(r"[^\w -]", "", title(module).lower()).replace(" ", "-")
    return f"[{words}](#{anchor})"


def load(name):
    """What docs/lab/NAME.json has. -> dict"""
    return json.loads((DOCS / "lab" / f"{name}.json").read_text())


def publish(name, module, found):
    """Write the picture and the page from what was found."""
    picture(f"lab/{name}", module.panels(found))
    put(f"lab-{name}", section(name, module, found), f"lab-{name}")
    put("index", index(), "lab")


def perform(name, module, seeds, draw=False):
    """Measure, unless it is only to draw again; then write what docs/ has of an experiment."""
    if not draw:
        clock = time.perf_counter()
        found = {"seeds": seeds} | module.measure(seeds)
        record(f"lab/{name}", **found, seconds=round(time.perf_counter() - clock))
    publish(name, module, load(name))
