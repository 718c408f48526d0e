"""Draw pictures that show one finding each: curves and dots.

The title states the finding, and a label is next to the curve or dots that it names. A script has
the same colour everywhere, from the palette of Okabe and Ito, which colour-blind readers can
distinguish. GitHub shows a picture 836 pixels wide (it is saved with twice as many), with letters
that are at least 11 pixels high.
"""
import textwrap
from typing import NamedTuple

import numpy
from PIL import Image

INK = "#1f2328"
GREY = "#8c959f"
BLUE = "#0072B2"
RED = "#D55E00"
GREEN = "#009E73"
PINK = "#CC79A7"
SKY = "#56B4E9"
ORANGE = "#E69F00"
SCRIPTS = {"grpo.py": BLUE, "ppo.py": RED, "reinforce.py": GREEN, "dpo.py": PINK, "gspo.py": SKY,
           "dpo.py, online": ORANGE}
STYLE = {"font.size": 9, "xtick.labelsize": 8.5, "ytick.labelsize": 8.5, "axes.labelsize": 8.5,
         "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": GREY,
         "axes.grid": True, "grid.color": "#e6e8eb", "axes.axisbelow": True, "ytick.major.size": 0}


class Picture(NamedTuple):
    title: str
    fill: object                                # a function that draws on an axis
    height: float                               # in inches of 100 pixels

    def save(self, path):
        import matplotlib
        matplotlib.use("Agg")                   # draws into files, without a display
        from matplotlib import pyplot
        lines = 1 + len(self.title) // 94
        title = textwrap.fill(self.title, len(self.title) // lines + 8)
        size = (8.36, self.height + 0.2 * lines)
        with pyplot.rc_context(STYLE):
            figure, axis = pyplot.subplots(figsize=size, layout="constrained")
            self.fill(axis)
            for side in (axis.xaxis, axis.yaxis):
                if side.get_scale() == "log":
                    side.set_major_formatter("{x:g}")
                    side.set_minor_formatter(between)
            figure.suptitle(title, x=0.008, ha="left", fontsize=10.5, fontweight="bold")
            figure.savefig(path, dpi=200)
            pyplot.close(figure)
        # 255 colours make the file a third as large
        few = Image.open(path).convert("RGB").quantize(255, Image.Quantize.MAXCOVERAGE)
        few.save(path, optimize=True)


def between(x, place):
    """Label a minor tick of a logarithmic axis if it begins with 2 or 5, such as 0.2. -> str"""
    first = f"{x:e}"[0]
    return f"{x:g}" if first in "25" else ""


def colours(names, given=None):
    """Choose a colour for each name: the given one, its script's, or the next free one. -> dict"""
    given = SCRIPTS | (given or {})
    taken = {given[name] for name in names if name in given}
    free = [colour for colour in (*SCRIPTS.values(), INK) if colour not in taken] * 3
    return {name: given.get(name) or free.pop(0) for name in names}


def dark(colour):
    """Darken a colour for letters, so that they are readable on white. -> [red, green, blue]"""
    return [0.7 * int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]


def curves(lines, title, x=None, given=None, height=2.8, **axes):
    """Draw {name: a row for each seed (S, T)}: the mean of the seeds, each seed as a faint line,
    and the name at the end. x: (T,), or {name: (T,)}; by default the steps 1, 2 ... axes: settings
    of the axes, such as xlabel and ylim. -> Picture"""
    def fill(axis):
        ends = []
        for name, colour in colours(lines, given).items():
            rows = numpy.asarray(lines[name], dtype=float)
            mean = rows.mean(axis=0)
            place = x[name] if isinstance(x, dict) else x
            place = range(1, 1 + len(mean)) if place is None else place
            axis.plot(place, rows.T, color=colour, alpha=0.25, linewidth=0.8)
            axis.plot(place, mean, color="white", linewidth=4)
            axis.plot(place, mean, color=colour, linewidth=2, marker="o" * (len(mean) < 9))
            ends.append((mean[-1], name, dark(colour)))
        axis.set(**{"xlabel": "step of training"} | axes)
        axis.margins(x=0.01)
        if axis.get_xscale() == "linear" and x is None:
            axis.xaxis.get_major_locator().set_params(integer=True)
        name_ends(axis, ends, 0.24 / height)
    return Picture(title, fill, height)


def name_ends(axis, ends, room):
    """Write the names of curves at their ends, and move them apart. ends: (y, name, colour)"""
    scale = axis.transData + axis.transAxes.inverted()
    place = 2.0
    for end, name, colour in sorted(ends, key=lambda end: -end[0]):
        place = min(scale.transform((axis.get_xlim()[1], end))[1], place - room)
        axis.text(1.008, place, name, color=colour, va="center", transform=axis.transAxes)


def dots(rows, title, form=".2f", given=None, level=None, **axes):
    """Draw {name: a number for each seed} as rows of dots with their means. level: (x, label) of a
    vertical line, on which arrows mark the numbers that are inf. A row in which all are inf has the
    word "never" for its mean. -> Picture"""
    def fill(axis):
        for row, name in enumerate(rows):
            values = numpy.ravel(rows[name])
            is_known = numpy.isfinite(values)
            bound = "" if is_known.all() else "> "
            if bound:
                values = numpy.where(is_known, values, level[0])
            mean = values.mean()
            colour = (SCRIPTS | (given or {})).get(name, BLUE)
            below = row + 0.24 * numpy.linspace(-1, 1, len(values)) * (len(values) > 1)
            size = 34 if len(values) < 20 else 7
            for which, marker in ((is_known, "o"), (~is_known, ">")):
                axis.scatter(values[which], below[which], s=size, color=colour, linewidth=0,
                             marker=marker)
            axis.plot([mean] * 2, [row - 0.38, row + 0.38], color=INK, linewidth=1.5, zorder=0.9)
            label = f"{bound}{mean:{form}}" if is_known.any() else "never"
            axis.text(1.01, row, label, va="center", fontweight="bold",
                      transform=axis.get_yaxis_transform())
        if level:
            axis.axvline(level[0], color=INK, linewidth=1, linestyle=(0, (4, 3)))
            axis.text(level[0], -0.65, f" {level[1]}", va="center", fontsize=8.5)
        axis.set_yticks(range(len(rows)), list(rows), fontsize=9)
        axis.set_ylim(len(rows) - 0.45, -0.95)
        axis.grid(axis="y", visible=False)
        axis.set(**axes)
    return Picture(title, fill, 0.85 + 0.34 * len(rows))
