"""SVG for the drawings of a page; colours and fonts come from the style sheet. Each is so narrow
that a telephone shows it nearly in full size."""
import html


class Drawing:
    """An SVG in the making. Places are in the units of its scales, which begin as pixels; dx and
    dy are pixels from there."""

    def __init__(self, title, width, height, x=float, y=float):
        self.title = title
        self.width = width
        self.height = height
        self.x = x
        self.y = y
        self.parts = []

    def text(self, x, y, words, kind="", dx=0, dy=0):
        """Words, or a number with two decimals, in the middle of whose height is the place."""
        words = plain(words) if isinstance(words, float) else html.escape(words)
        left = self.x(x) + dx
        base = self.y(y) + dy + 4
        self.parts.append(f'<text class="{kind}" x="{left:.1f}" y="{base:.1f}">{words}</text>')

    def curve(self, points, kind):
        """A line through points."""
        places = "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)
        self.parts.append(f'<path class="{kind}" d="M{places}"/>')

    def line(self, x1, y1, x2, y2, kind):
        """A straight line."""
        self.curve([(x1, y1), (x2, y2)], kind)

    def box(self, x1, y1, x2, y2, kind, room=0):
        """A rectangle between two corners, to the left and the right of which is room in pixels."""
        left, right = sorted([self.x(x1), self.x(x2)])
        top, bottom = sorted([self.y(y1), self.y(y2)])
        self.parts.append(
            f'<rect class="{kind}" x="{left - room:.1f}" y="{top:.1f}" '
            f'width="{right - left + 2 * room:.1f}" height="{bottom - top:.1f}"/>')

    def dot(self, x, y, radius, kind="", words=""):
        """A dot, of which the radius is in pixels, with a text in it."""
        self.parts.append(f'<g class="{kind}"><circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" '
                          f'r="{radius}"/>')
        self.text(x, y, words, "m")
        self.parts.append("</g>")

    def svg(self):
        """-> HTML"""
        return (f'<svg viewBox="0 0 {self.width} {self.height}" style="max-width:{self.width}px" '
                f'role="img" aria-label="{html.escape(self.title)}">{"".join(self.parts)}</svg>')


def scale(low, high, first, last):
    """The pixels of values: low is at the first one, high at the last. -> function"""
    return lambda value: first + (value - low) / (high - low) * (last - first)


def plain(x, digits=2, sign=""):
    """So many decimals."""
    return f"{x:{sign}.{digits}f}".replace("-", "−")


def output(i):
    """The name of output i."""
    return "o" + "₀₁₂₃₄"[i]


def side(x):
    """The class of what is made likelier, or less likely."""
    return "up" if x > 0 else "down"
