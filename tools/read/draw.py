"""SVG for the drawings of a page; colours and fonts come from the style sheet. Each is so narrow
that a telephone shows it nearly in full size."""
import html
import math
import re

INDICES = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
SYMBOL = re.compile(r"\b([A-Za-zρπδ])_(\w+)|[ρπδ]|(?<!’)\b[ALMVs]\b")


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
        """Words, or a number with two decimals, in the middle of whose height is the place; o_3 and
        L_t get an index."""
        words = plain(words) if isinstance(words, float) else words
        left = self.x(x) + dx
        base = self.y(y) + dy + 4
        self.parts.append(f'<text class="{kind}" x="{left:.1f}" y="{base:.1f}">'
                          f"{rich(words)}</text>")

    def curve(self, points, kind):
        """A line through points."""
        places = "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)
        self.parts.append(f'<path class="{kind}" d="M{places}"/>')

    def line(self, x1, y1, x2, y2, kind):
        """A straight line."""
        self.curve([(x1, y1), (x2, y2)], kind)

    def arrow(self, x1, y1, x2, y2, kind):
        """A straight line with a head at its second end."""
        self.line(x1, y1, x2, y2, kind)
        right = self.x(x2) - self.x(x1)
        down = self.y(y2) - self.y(y1)
        turn = math.degrees(math.atan2(down, right))
        self.parts.append(f'<path class="{kind}" d="M-5 -4L0 0L-5 4" transform="translate('
                          f'{self.x(x2):.1f} {self.y(y2):.1f}) rotate({turn:.1f})"/>')

    def box(self, x1, y1, x2, y2, kind, room=0):
        """A rectangle between two corners, to the left and the right of which is room in pixels."""
        left, right = sorted([self.x(x1), self.x(x2)])
        top, bottom = sorted([self.y(y1), self.y(y2)])
        self.parts.append(
            f'<rect class="{kind}" x="{left - room:.1f}" y="{top:.1f}" '
            f'width="{right - left + 2 * room:.1f}" height="{bottom - top:.1f}"/>')

    def bar(self, x, y1, y2, kind):
        """A bar from one height to another."""
        self.box(x, y1, x, y2, kind, room=23)

    def dot(self, x, y, radius, kind=""):
        """A dot, of which the radius is in pixels."""
        self.parts.append(f'<circle class="{kind}" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" '
                          f'r="{radius}"/>')

    def diamond(self, x, y, kind):
        """A diamond that stands at a place."""
        self.parts.append(f'<path class="diamond {kind}" d="M0 -30l8 9l-8 9l-8 -9z" '
                          f'transform="translate({self.x(x):.1f} {self.y(y):.1f})"/>')

    def token(self, token, x, y):
        """A token as a dot with its text: hollow where the clip takes its gradient."""
        hit = " hit" if token.is_clipped else ""
        self.parts.append(f'<g class="tok {side(token.A)}{hit} {token.name}">')
        self.dot(x, y, 10)
        self.text(x, y, token.text, "m")
        self.parts.append("</g>")

    def svg(self):
        """-> HTML"""
        return (f'<svg viewBox="0 0 {self.width} {self.height}" style="max-width:{self.width}px" '
                f'role="img" aria-label="{html.escape(self.title)}">{"".join(self.parts)}</svg>')


def scale(low, high, first, last):
    """The pixels of values: low is at the first one, high at the last. -> function"""
    return lambda value: first + (value - low) / (high - low) * (last - first)


def rich(words):
    """Words in which o_3 has its index below, and symbols are italic. -> SVG"""
    return SYMBOL.sub(symbol, html.escape(words))


def symbol(match):
    """SVG of what SYMBOL found."""
    name, index = match.groups()
    text = f'<tspan class="sym">{name or match[0]}</tspan>'
    if not index:
        return text
    if index.isdigit():
        return text + index.translate(INDICES)
    return f'{text}<tspan class="sub" dy="3">{index}</tspan><tspan dy="-3">\u200b</tspan>'


def signed(x):
    """Two decimals and a sign."""
    return f"{x:+.2f}".replace("-", "−")


def plain(x, digits=2):
    """So many decimals."""
    return f"{x:.{digits}f}".replace("-", "−")


def side(x):
    """The class of what is made likelier, or less likely."""
    return "up" if x > 0 else "down"
