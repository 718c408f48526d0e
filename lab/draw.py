"""Draw pictures that show one finding each: curves and dots.

The title states the finding, and a label is next to the curve or dots that it names. A script has
the same colour everywhere, from the palette of Okabe and Ito, which colour-blind readers can
distinguish; on dark pages, its colours are lighter. Each picture is two SVG files, because the
letters of the wide one would be too small on a phone. All sizes are in pixels.
"""
import io
import re
import textwrap
from dataclasses import dataclass
from xml.sax.saxutils import quoteattr

import numpy

WIDE, NARROW = 720, 360                         # the site's column of text, and a phone's
INK = "#1f2328"
GREY = "#8c959f"
GRID = "#e6e8eb"
BLUE = "#0072b2"
RED = "#d55e00"
GREEN = "#009e73"
PINK = "#cc79a7"
SKY = "#56b4e9"
ORANGE = "#e69f00"
ON_DARK = {INK: "#e6edf3", GREY: "#9aa4af", GRID: "#30353d", BLUE: "#3f97e6", RED: "#f47a3c",
           GREEN: "#2fc296", PINK: "#e08fbd", SKY: "#a8dcff", ORANGE: "#f2bd3a"}
SCRIPTS = {"grpo.py": BLUE, "ppo.py": RED, "reinforce.py": GREEN, "dpo.py": PINK, "gspo.py": SKY,
           "dpo.py, online": ORANGE}
# DejaVu Sans comes with matplotlib and is wide, so a reader's own typeface has room, too
STYLE = {"font.size": 12.5, "xtick.labelsize": 12, "ytick.labelsize": 12, "axes.labelsize": 12,
         "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "svg.fonttype": "none",
         "svg.hashsalt": "lab", "savefig.transparent": True, "text.color": INK,
         "axes.labelcolor": INK, "xtick.color": GREY, "xtick.labelcolor": INK,
         "ytick.color": GREY, "ytick.labelcolor": INK, "axes.edgecolor": GREY,
         "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
         "grid.color": GRID, "axes.axisbelow": True, "ytick.major.size": 0,
         "figure.constrained_layout.w_pad": 6 / 72}


@dataclass
class Picture:
    title: str                                  # "" for the first finding of an experiment
    fill: object                                # a function that draws on an axis: wide or narrow
    heights: tuple                              # without the title, of the wide and the narrow one

    def save(self, path):
        """Write the picture as NAME.svg, and a narrow one as NAME-phone.svg."""
        import matplotlib
        matplotlib.use("svg")                   # draws into files, without a display
        from matplotlib import pyplot
        for is_narrow, height in enumerate(self.heights):
            width, room = (NARROW, 39) if is_narrow else (WIDE, 80)     # room: letters in a line
            title = wrapped(self.title, room)
            size = width / 72, (height + 20 * (1 + title.count("\n"))) / 72
            with pyplot.rc_context(STYLE):
                figure, axis = pyplot.subplots(figsize=size, layout="constrained")
                self.fill(axis, is_narrow)
                for side in (axis.xaxis, axis.yaxis):
                    if side.get_scale() == "log":
                        side.set_major_formatter(lambda x, place: short(x))
                        low, high = side.get_view_interval()
                        is_full = is_narrow and side is axis.xaxis and high > 300 * low
                        side.set_minor_formatter("" if is_full else between)
                axis.set_xlabel(wrapped(axis.get_xlabel(), 48 if is_narrow else 80))
                axis.set_ylabel(wrapped(axis.get_ylabel(), 35))
                figure.suptitle(title, x=0.008, ha="left", fontsize=14.5, fontweight="bold")
                write(figure, phone(path) if is_narrow else path)


def phone(path):
    """-> the path of the narrow version of a picture"""
    return path.with_stem(f"{path.stem}-phone")


def write(figure, path):
    """Write a figure as an SVG whose colours follow the scheme of the page, and close it."""
    from matplotlib import pyplot
    file = io.StringIO()
    figure.savefig(file, format="svg",
                   metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    pyplot.close(figure)
    text = file.getvalue()
    text = text[text.index("<svg"):].replace("'DejaVu Sans', sans-serif", "system-ui, sans-serif")
    text = re.sub(r'(width|height)="([\d.]+)pt"', r'\1="\2"', text)     # a unit is a pixel
    text = re.sub(r"\d+\.\d{2,}(?=[^<>]*>)", lambda number: f"{float(number[0]):.1f}", text)
    text = re.sub(r' transform="rotate\(-0 [^)]*\)"| id="[a-z]+_?[\d.a-z]*_\d+"', "", text)
    text = re.sub(r"\s*\n\s*", "\n", text)
    rules = "".join(f'[style*="{part}: {shade}"]{{{part}:{ON_DARK[colour]}!important}}\n'
                    for colour in ON_DARK for shade in (colour, dark(colour))
                    for part in ("fill", "stroke") if f"{part}: {shade}" in text)
    text = text.replace("</style>", f"\n@media(prefers-color-scheme:dark){{\n{rules}}}</style>", 1)
    path.write_text(text, encoding="utf-8")


def show(name, title):
    """Write the Markdown that shows a picture, on phones the narrow one. -> str"""
    return (f'<picture><source media="(max-width: 600px)" srcset="{name}-phone.svg">'
            f'<img src="{name}.svg" alt={quoteattr(title)}></picture>\n')


def wrapped(text, room):
    """Break a text into the fewest lines of up to `room` letters, all of similar length. -> str"""
    if "\n" in text:
        return text
    ways = [textwrap.wrap(text, letters, break_on_hyphens=False, break_long_words=False)
            for letters in range(1, room + 1)]
    return "\n".join(next(lines for lines in ways if len(lines) == len(ways[-1])))


def between(x, place):
    """Label a minor tick of a logarithmic axis if it begins with 2 or 5, such as 0.2. -> str"""
    return short(x) if f"{x:e}"[0] in "25" else ""


def short(x):
    """Write a number, such as a learning rate. -> str, such as 0.02 or 5e-4"""
    return f"{x:.0e}".replace("e-0", "e-") if x < 0.01 else f"{x:g}"


def colours(names, given=None):
    """Choose a colour for each name: the given one, its script's, or the next free one. -> dict"""
    given = SCRIPTS | (given or {})
    taken = {given[name] for name in names if name in given}
    free = [colour for colour in (*SCRIPTS.values(), INK) if colour not in taken] * 3
    return {name: given.get(name) or free.pop(0) for name in names}


def dark(colour):
    """Darken a colour for letters, so that they are readable on white. -> colour"""
    return "#" + "".join(f"{round(0.7 * int(colour[i:i + 2], 16)):02x}" for i in (1, 3, 5))


def curves(lines, x=None, title="", given=None, height=280, **axes):
    """Draw {name: a row for each seed (S, T)}: the mean of the seeds (on a logarithmic axis, the
    geometric mean), each seed as a faint line, and the name at the end. x: (T,), or {name: (T,)};
    by default the steps 1, 2 ... axes: settings of the axes, such as xlabel and ylim. -> Picture"""
    def fill(axis, is_narrow):
        ends = []
        for name, colour in colours(lines, given).items():
            rows = numpy.asarray(lines[name], dtype=float)
            mean = rows.mean(axis=0)
            if axes.get("yscale") == "log":
                mean = numpy.exp(numpy.log(rows).mean(axis=0))
            place = x[name] if isinstance(x, dict) else x
            place = range(1, 1 + len(mean)) if place is None else place
            axis.plot(place, rows.T, color=colour, alpha=0.3, linewidth=0.8, zorder=1.9)
            axis.plot(place, mean, color=colour, linewidth=2.5, markersize=7, clip_on=False,
                      marker="o" * (len(mean) < 9))
            ends.append((mean[-1], wrapped(name, 15) if is_narrow else name, dark(colour)))
        axis.set(**{"xlabel": "step of training"} | axes)
        if is_narrow and "xticklabels" in axes:
            axis.set_xticklabels([wrapped(label, 5) for label in axes["xticklabels"]])
        axis.margins(x=0.01)
        if axis.get_xscale() == "linear" and x is None:
            axis.xaxis.get_major_locator().set_params(integer=True)
        name_ends(axis, ends, 24 / height)
    return Picture(title, fill, (height, height))


def name_ends(axis, ends, room):
    """Write the names of curves at their ends, and move them apart. ends: (y, name, colour); room:
    the height of a line"""
    scale = axis.transData + axis.transAxes.inverted()
    ends = sorted(ends, key=lambda end: -end[0])
    halves = [room * (1 + name.count("\n")) / 2 for _, name, _ in ends]
    places = []
    edge = 2.0
    for half, (end, _, _) in zip(halves, ends):                         # down, where they collide
        places.append(min(scale.transform((axis.get_xlim()[1], end))[1], edge - half))
        edge = places[-1] - half
    edge = -room / 2
    for row in reversed(range(len(ends))):                              # and up from the bottom
        places[row] = max(places[row], edge + halves[row])
        edge = places[row] + halves[row]
    for place, (_, name, colour) in zip(places, ends):
        axis.text(1.015, place, name, color=colour, va="center", transform=axis.transAxes)


def dots(rows, form=".2f", given=None, level=None, **axes):
    """Draw {name: a number for each seed} as rows of dots with their means (on a logarithmic axis,
    the geometric means). level: (x, label) of a vertical line, on which arrows mark the numbers
    that are inf. A row in which all are inf has the word "never" for its mean. -> Picture"""
    def fill(axis, is_narrow):
        side = axis.get_yaxis_transform()                               # x: 0 to 1; y: rows
        reach, name_at, mean_at, align = ((0.2, -0.42, 1, "right") if is_narrow else
                                          (0.38, 0, 1.01, "left"))
        for row, name in enumerate(rows):
            values = numpy.ravel(rows[name])
            is_known = numpy.isfinite(values)
            if not is_known.all():
                values = numpy.where(is_known, values, level[0])
            mean = values.mean()
            if axes.get("xscale") == "log":
                mean = numpy.exp(numpy.log(values).mean())
            shown = f"{mean:{form}}"
            if not is_known.all():
                shown = f"> {shown}" if is_known.any() else "never"
            colour = (SCRIPTS | (given or {})).get(name, BLUE)
            below = row + 0.63 * reach * numpy.linspace(-1, 1, len(values)) * (len(values) > 1)
            size = 56 if len(values) < 20 else 12
            for which, marker in ((is_known, "o"), (~is_known, ">")):
                axis.scatter(values[which], below[which], s=size, color=colour, linewidth=0,
                             marker=marker)
            if is_known.any():
                axis.plot([mean] * 2, [row - reach, row + reach], color=INK, linewidth=2,
                          zorder=0.9)
            axis.text(mean_at, row + name_at, shown, va="center", ha=align, fontweight="bold",
                      transform=side)
            if is_narrow:                       # the name is above the dots, and needs no margin
                axis.text(0, row + name_at, f" {name}", va="center", transform=side)
                axis.axhline(row - 0.68, color=GRID, linewidth=0.8)
            if level:                           # without a gap, if no names are between the rows
                axis.plot([level[0]] * 2, [row - reach, row + max(reach, 0.62 - is_narrow)],
                          color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=0.9)
        axis.set(**axes)
        top = -1.15 if is_narrow and level else -0.68 if is_narrow else -0.95
        if level:
            is_right = level[0] > sum(axis.get_xlim()) / 2
            axis.text(level[0], top + 0.3, f" {level[1]} ", va="center", fontsize=12,
                      ha="right" if is_right else "left")
        axis.set_yticks(range(len(rows)), [""] * len(rows) if is_narrow else list(rows),
                        fontsize=12.5)
        axis.set_ylim(len(rows) - 0.45, top)
        axis.grid(axis="y", visible=False)
    return Picture("", fill, (85 + 34 * len(rows), 80 + 46 * len(rows)))
