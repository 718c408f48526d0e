"""Draw charts with matplotlib, which is imported when one is drawn. All of the project's charts are
made here:

  with chart.figure("speed.svg") as axis:
      chart.curves(axis, {"grpo.py": rows, "ppo.py": rows}, ylabel="seconds", yscale="log")

axis is matplotlib's, so axis.plot and axis.axhline add to what curves and dots draw; settings, such
as ylabel, are those of axis.set. figure(path, 2, 3) gives an array of 2 x 3 axes.

A path that ends with .svg becomes one picture for all screens: it is as wide as a phone, its
background is transparent, and its black turns white on dark pages. A path that ends with .png is
drawn on white. Sizes are in pixels.
"""
import contextlib
import io
import re
from pathlib import Path

import numpy

WIDTH, HEIGHT = 420, 300                    # on a phone of 360 pixels, letters have 11 pixels
INK, ON_DARK = "#1f2328", "#e6edf3"         # text and axes, on light and on dark pages
# Each of these is readable on white and on black, and for colour-blind readers (Okabe and Ito)
COLOURS = "#0072b2", "#d55e00", "#009e73", "#c770a1", "#7d8590", "#8a63d2"
BLUE, RED, GREEN, PINK, GREY, PURPLE = COLOURS
STYLE = {"font.size": 10.5, "font.family": "sans-serif", "svg.fonttype": "none",
         "svg.hashsalt": "chart", "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": GREY,
         "xtick.color": GREY, "xtick.labelcolor": INK, "ytick.color": GREY, "ytick.labelcolor": INK,
         "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
         "legend.borderpad": 0, "legend.handlelength": 1.2, "legend.columnspacing": 1.2}
DARK = f"""<style>@media (prefers-color-scheme: dark) {{
[style*="fill: {INK}"] {{fill: {ON_DARK} !important}}
[style*="stroke: {INK}"] {{stroke: {ON_DARK} !important}}
}}</style>
"""


@contextlib.contextmanager
def figure(path, rows=1, columns=1, width=WIDTH, height=HEIGHT):
    """Make the axes of a chart, and write the chart to a file at the end of the `with` block.
    Raises ImportError without matplotlib. -> an axis, or an array of them"""
    try:
        import matplotlib
        from matplotlib.figure import Figure  # without pyplot, which wants to open windows
    except ImportError as error:
        raise ImportError("charts need matplotlib: pip install matplotlib") from error
    colours = {"axes.prop_cycle": matplotlib.cycler(color=COLOURS)}
    with matplotlib.rc_context(STYLE | colours):
        drawn = Figure(figsize=(width / 96, height / 96), layout="constrained")
        yield drawn.subplots(rows, columns)
        for side in [side for axis in drawn.axes for side in (axis.xaxis, axis.yaxis)]:
            if side.get_scale() == "log":
                side.set_major_formatter("{x:g}")       # 0.01 instead of a power of ten
                low, high = side.get_view_interval()
                side.set_minor_formatter("{x:g}" if high < 10 * low else "")
        if Path(path).suffix == ".png":
            drawn.savefig(path, dpi=144)
            return
        file = io.StringIO()
        drawn.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = re.sub(r"\d+\.\d{3,}(?=[^<>]*>)", lambda number: f"{float(number[0]):.2f}", text)
    text = re.sub(r"(<svg[^>]*>\n)", lambda start: start[0] + DARK, text, count=1)
    Path(path).write_text(text, "utf-8")


def mean(rows, scale):
    """Average over the seeds; on a logarithmic axis, the geometric mean. (S, ...) -> (...)"""
    return numpy.exp(numpy.log(rows).mean(axis=0)) if scale == "log" else rows.mean(axis=0)


def curves(axis, lines, x=None, **settings):
    """Draw {name: a row for each seed (S, T)}: the mean of the seeds, and each seed as a faint
    line. x: (T,), by default the steps 1, 2 ..."""
    for name, rows in lines.items():
        rows = numpy.asarray(rows, dtype=float)
        place = range(1, 1 + rows.shape[1]) if x is None else x
        marker = "o" if rows.shape[1] < 9 else ""
        [line] = axis.plot(place, mean(rows, settings.get("yscale")), marker=marker, linewidth=2,
                           label=name)
        axis.plot(place, rows.T, color=line.get_color(), alpha=0.3, linewidth=0.8, zorder=1.9)
    axis.set(**{"xlabel": "step of training"} | settings)   # limits, once the curves are there
    axis.figure.legend(loc="outside upper left", ncols=2)


def dots(axis, rows, end=None, **settings):
    """Draw {name: a number for each seed} as rows of dots, below their name and mean. end: where an
    arrow marks a number that is inf, because its run never got there."""
    for place, (name, values) in enumerate(rows.items()):
        values = numpy.ravel(values).astype(float)
        is_known = numpy.isfinite(values)
        if is_known.all():
            shown = f"{values.mean():.3g}"
        elif is_known.any():
            shown = "not all arrive"
        else:
            shown = "never"
        apart = place + 0.25 * numpy.linspace(0, 1, len(values))
        axis.scatter(values[is_known], apart[is_known], 25, BLUE, linewidth=0)
        if not is_known.all():
            late = apart[~is_known]
            axis.scatter([end] * len(late), late, 25, BLUE, marker=">", linewidth=0)
        axis.text(0, place - 0.2, f"{name}: {shown}", transform=axis.get_yaxis_transform())
        axis.axhline(place + 0.4, color=GREY, alpha=0.3, linewidth=0.8)
    axis.set(**settings)                                # limits, once the dots are there
    axis.set_ylim(len(rows) - 0.6, -0.6)
    axis.set_yticks([])
    axis.spines["left"].set_visible(False)
    axis.figure.set_figheight((60 + 42 * len(rows)) / 96)
