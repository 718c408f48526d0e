"""SVG for the drawings of a page; colours and fonts come from the style sheet, captions and words
from pictures.txt. Each is so narrow that a telephone shows it nearly in full size."""
import html

from learn.read import words

OUTPUTS = ["", "o₁", "o₂", "o₃", "o₄"]       # their names, from 1
SECTIONS = {section.names[0]: section for section in words.read("pictures")}


class Drawing:
    """An SVG in the making. Places are in the units of its scales x and y. The rows of its section
    are lines and words that it always has."""

    def __init__(self, name, x, y):
        self.section = SECTIONS[name]
        self.x = x
        self.y = y
        self.parts = []
        for *place, kind, said in self.section.rows:
            if len(place) == 4:
                self.line(*map(float, place), kind)
            else:
                x, y, shift = place
                self.text(float(x), float(y), said, kind, shift)

    def text(self, x, y, said, kind="", shift="0 0"):
        """Words, or a number with two decimals; so many pixels to the right and below of a place is
        the middle of their height."""
        right, down = map(float, shift.split())
        said = plain(said) if isinstance(said, float) else html.escape(said)
        left = self.x(x) + right
        base = self.y(y) + down + 4
        place = f'x="{left:.1f}" y="{base:.1f}"'
        self.parts.append(f'<text class="{kind}" {place}>{said}</text>')

    def curve(self, points, kind):
        """A line through points."""
        places = [f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points]
        self.parts.append(f'<path class="{kind}" d="M{"L".join(places)}"/>')

    def line(self, x1, y1, x2, y2, kind):
        """A straight line."""
        self.curve([(x1, y1), (x2, y2)], kind)

    def range(self, x1, x2, y1, y2):
        """A shaded rectangle."""
        self.curve([(x1, y1), (x1, y2), (x2, y2), (x2, y1)], "range")

    def dot(self, x, y, kind="", said=""):
        """A dot with a text in it."""
        place = f'cx="{self.x(x):.1f}" cy="{self.y(y):.1f}"'
        self.parts.append(f'<g class="{kind}"><circle {place}/>')
        self.text(x, y, said, "m")
        self.parts.append("</g>")

    def svg(self):
        """-> HTML"""
        title, width, height = self.section.head
        shape = f'viewBox="0 0 {width} {height}" style="max-width:{width}px"'
        return f'<svg {shape} role="img" aria-label="{title}">{"".join(self.parts)}</svg>'


def scale(low, high, first, last):
    """The pixels of values: low is at the first one, high at the last. -> function"""
    step = (last - first) / (high - low)
    return lambda value: first + step * (value - low)


def plain(x, sign="", digits=2):
    """So many decimals."""
    return f"{x:{sign}.{digits}f}".replace("-", "−")


def side(x):
    """The class of what is made likelier, or less likely."""
    return "up" if x > 0 else "down"
