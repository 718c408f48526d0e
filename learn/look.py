"""What pages share that no theme builds: their frame with the header, and the drawing of charts."""
import html
import math
import re
import string
from pathlib import Path

FOLDER = Path(__file__).parent
ICON = ("data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 8 8'%3E%3Crect "
        "width='8' height='8' rx='1.5' fill='%230b62b0'/%3E%3C/svg%3E")
FRAME, HEADER, LOOK, CHART, SCRIPT = (
    (FOLDER / name).read_text(encoding="utf-8")
    for name in ("frame.html", "header.html", "look.css", "chart.css", "look.js"))
COLOURS = re.search(r":root {.*?\n}", LOOK, re.S)[0]


def small(style):
    """Shorten a style sheet. -> str"""
    return re.sub(r"/\*.*?\*/|\n\s*", "", style, flags=re.S)


def header(up, tab):
    """Make the header. up: the way to the root of the repository; tab: the current one. -> HTML"""
    return HEADER.replace("{up}", up).replace(f">{tab}</a>", f" aria-current=true>{tab}</a>")


def document(title, description, body, up, tab, styles, name=""):
    """Make a whole page. styles: paths of style sheets; name: of its script, for these. -> HTML"""
    style = LOOK + CHART + "".join(path.read_text(encoding="utf-8") for path in styles)
    return string.Template(FRAME).substitute(
        title=html.escape(title), description=html.escape(description), icon=ICON,
        style=small(style), script=SCRIPT, name=name, header=header(up, tab), body=body)


# ---- drawings --------------------------------------------------------------------------------

def scale(low, high, first, last):
    """A linear map from values to pixels: low to first, high to last. -> function"""
    step = (last - first) / (high - low)
    return lambda value: first + step * (value - low)


def ticks(low, high):
    """Choose up to five round numbers between two numbers. -> list of float"""
    step = next(first * 10**power for power in range(-3, 6) for first in (1, 2, 2.5, 5)
                if high - low <= 4 * first * 10**power)
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


class Drawing:
    """An SVG under construction. Places are in the units of the scales x and y."""

    def __init__(self, x, y):
        self.x = x
        self.y = y
        self.parts = []

    def text(self, x, y, text, kind="", shift="0 0"):
        """Write a text, vertically centred on a place. shift: pixels to the right and down."""
        right, down = map(float, shift.split())
        self.parts.append(f'<text class="{kind}" x="{self.x(x) + right:.1f}" '
                          f'y="{self.y(y) + down + 4:.1f}">{html.escape(text)}</text>')

    def curve(self, points, kind):
        """Draw a line through points."""
        places = [f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points]
        self.parts.append(f'<path class="{kind}" d="M{"L".join(places)}"/>')

    def line(self, x1, y1, x2, y2, kind):
        """Draw a straight line."""
        self.curve([(x1, y1), (x2, y2)], kind)

    def dot(self, x, y, kind, text=""):
        """Draw a dot with a text above it."""
        self.parts.append(f'<g class="{kind}"><circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}"/>')
        self.text(x, y, text, "m", "0 -15")
        self.parts.append("</g>")

    def axes(self, left, right, bottom, marks, levels):
        """Draw a dotted line at each level. marks, levels: places at the bottom and at the left,
        and their labels."""
        for x, label in marks.items():
            self.text(x, bottom, label, "m dim", "0 18")
        for y, label in levels.items():
            self.line(left, y, right, y, "grid")
            self.text(left, y, label, "e dim", "-8 0")

    def svg(self, width, height, title, more=""):
        """The finished drawing. more: further attributes. -> SVG"""
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"{more} '
                f'role="img" aria-label="{html.escape(title)}">{"".join(self.parts)}</svg>')
