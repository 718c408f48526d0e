"""The drawings of a page, as SVG. Their numbers come from the functions of the script; colours and
fonts from the style sheet. Each is so narrow that a telephone shows it nearly in full size."""
import html
import re

INDICES = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


class Drawing:
    """An SVG in the making: x and y are in the units of the data, once the axes are set."""

    def __init__(self, width, height, title):
        self.width, self.height, self.title = width, height, title
        self.parts = []
        self.x = self.y = lambda value: value

    def axes(self, xs, ys, left, right, top, bottom):
        """Data of the ranges xs and ys fill the space between the margins."""
        self.x = scale(xs, (left, self.width - right))
        self.y = scale(ys, (self.height - bottom, top))

    def add(self, tag, kind="", text=None, **attributes):
        """An element; numbers are rounded to tenths of a pixel."""
        values = "".join(f' {name.replace("_", "-")}="{short(value)}"'
                         for name, value in attributes.items())
        kind = f' class="{kind}"' if kind else ""
        inner = "/>" if text is None else f">{text}</{tag}>"
        self.parts.append(f"<{tag}{kind}{values}{inner}")

    def text(self, x, y, words, kind=""):
        """Words at a place in pixels; o_3 and L_t get an index."""
        self.add("text", kind, rich(words), x=x, y=y)

    def path(self, points, kind=""):
        """A line through points in pixels."""
        self.add("path", kind, d="M" + "L".join(f"{short(x)} {short(y)}" for x, y in points))

    def line(self, points, kind=""):
        """A line through points of the data."""
        self.path([(self.x(x), self.y(y)) for x, y in points], kind)

    def box(self, x, y, width, height, kind):
        """A rectangle in pixels, of which width or height may be negative."""
        self.add("rect", kind, x=min(x, x + width), y=min(y, y + height),
                 width=abs(width), height=abs(height))

    def arrow(self, x, y, dx, dy, kind=""):
        """An arrow in pixels, to the right or the left, or up or down."""
        self.path([(x, y), (x + dx, y + dy)], f"arrow {kind}")
        length = abs(dx) + abs(dy)
        along = dx / length, dy / length
        back = 5 if length > 7 else 3
        tip = x + dx, y + dy
        ends = [(tip[0] - back * along[0] + side * 4 * along[1],
                 tip[1] - back * along[1] + side * 4 * along[0]) for side in (-1, 1)]
        self.path([ends[0], tip, ends[1]], f"arrow {kind}")

    def token(self, x, y, token, radius=10):
        """A token as a dot with its text: hollow where the clip takes its gradient."""
        kind = "tok " + ("up" if token.A > 0 else "down") + (" hit" if token.is_clipped else "")
        self.parts.append(f'<g class="{kind} {token.name}">')
        self.add("circle", cx=x, cy=y, r=radius)
        self.add("text", "m", rich(token.text), x=x, y=y + 4)
        self.parts.append("</g>")

    def svg(self):
        """-> HTML"""
        return (f'<svg viewBox="0 0 {self.width} {self.height}" style="max-width:{self.width}px" '
                f'role="img" aria-label="{html.escape(self.title)}">{"".join(self.parts)}</svg>')


def scale(values, pixels):
    """A linear map. -> function"""
    (a, b), (p, q) = values, pixels
    return lambda value: p + (value - a) / (b - a) * (q - p)


def short(value):
    """A number as it stands in SVG."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def rich(words):
    """Words in which o_3 has its index below, and symbols are italic. -> SVG"""
    found = ""
    for part in re.split(r"(\b[A-Za-zρπδ]_\w+|[ρπδ]|(?<!’)\b[ALMVhs]\b)", words):
        name, _, index = part.partition("_")
        if not re.fullmatch(r"[A-Za-zρπδ]_\w+|[ρπδALMVhs]", part):
            found += html.escape(part)
        elif index.isdigit():
            found += f'<tspan class="sym">{name}</tspan>{index.translate(INDICES)}'
        elif index:
            found += (f'<tspan class="sym">{name}</tspan><tspan class="sub" dy="3">{index}</tspan>'
                      '<tspan dy="-3">\u200b</tspan>')
        else:
            found += f'<tspan class="sym">{name}</tspan>'
    return found


def signed(x):
    """Two decimals and a sign."""
    return f"{x:+.2f}".replace("-", "−")


def plain(x):
    """Two decimals."""
    return f"{x:.2f}".replace("-", "−")


def side(x):
    """The class of what is made likelier, or less likely."""
    return "up" if x > 0 else "down"


# ---- what an output is worth -----------------------------------------------------------------

def group(question, answers, rewards, differences, A, std):
    """Rewards as bars that begin at the mean of their group."""
    d = Drawing(440, 266, "Rewards of the four outputs, above and below their mean")
    d.axes((0.5, 4.5), (0, 1), 76, 92, 12, 106)
    mean = sum(rewards) / len(rewards)
    left, right = d.x(0.5), d.x(4.5)
    for reward in (0, 1):
        d.line([(0.5, reward), (4.5, reward)], "rule")
        d.text(left - 10, d.y(reward) + 4, f"reward {reward}", "e dim")
    for index, (reward, difference) in enumerate(zip(rewards, differences), start=1):
        x, top, bottom = d.x(index), d.y(max(reward, mean)), d.y(min(reward, mean))
        d.box(x - 23, top, 46, bottom - top, side(difference))
        d.text(x, (top + bottom) / 2 + 4, signed(difference), "m on")
    d.path([(left, d.y(mean)), (right + 6, d.y(mean))], "mean")
    d.text(right + 10, d.y(mean) + 4, f"mean {plain(mean)}", "strong")
    for index, (answer, reward, a) in enumerate(zip(answers, rewards, A), start=1):
        d.text(d.x(index), 184, answer + (" ✓" if reward == 1 else ""), f"m code {side(a)}")
        d.text(d.x(index), 206, f"o_{index}", "m dim")
        d.text(d.x(index), 246, plain(a), f"m big {side(a)}")
    d.text(left - 10, 184, question, "e code")
    d.text(left - 10, 246, "A", "e big")
    d.text(right + 10, 239, "each", "dim")
    d.text(right + 10, 255, f"÷ std {plain(std)}", "dim")
    d.path([(left, 222), (right, 222)], "rule")
    return d.svg()


def baselines(question, answers, rewards, rows):
    """The advantage of each output with different baselines. rows: name of the baseline -> A."""
    d = Drawing(440, 84 + 68 * len(rows), "Advantages of the four outputs, by baseline")
    d.axes((0.5, 4.5), (0, 1), 110, 20, 0, 0)
    for index, (answer, reward) in enumerate(zip(answers, rewards), start=1):
        d.text(d.x(index), 18, answer + (" ✓" if reward == 1 else ""), "m code")
        d.text(d.x(index), 38, f"o_{index}", "m dim")
    d.text(96, 18, question, "e code")
    for number, (name, A) in enumerate(rows.items()):
        y = 104 + 68 * number
        d.text(8, y - 8, name, "strong")
        d.path([(d.x(0.5), y), (d.x(4.5), y)], "rule")
        for index, a in enumerate(A, start=1):
            if a != 0:
                d.box(d.x(index) - 16, y, 32, -38 * a, side(a))
            above = y - 38 * a - 5 if a >= 0 else y - 38 * a + 15
            d.text(d.x(index), above, plain(a), f"m {side(a) if a else 'dim'}")
    return d.svg()


# ---- the ratio and its clip ------------------------------------------------------------------

def ratios(tokens, low, high):
    """All tokens by their ratio, above those that A pushes up, below those that it pushes down.
    What the answer adds has the class `told`."""
    d = Drawing(440, 208, "The ratios of the ten tokens, and the range of the clip")
    d.axes((0.58, 1.74), (0, 1), 8, 8, 0, 0)
    rows = {True: 56, False: 144}
    d.box(d.x(low), 6, d.x(high) - d.x(low), 172, "range")
    d.path([(d.x(1.0), 6), (d.x(1.0), 178)], "one")
    for is_up, y in rows.items():
        begin, end = (d.x(high), 432) if is_up else (8, d.x(low))
        kind = "up" if is_up else "down"
        sign = 1 if is_up else -1
        d.box(begin, y - 48, end - begin, 80, "zone told")
        d.text(8 if is_up else 432, y - 32, "A > 0" if is_up else "A < 0",
               f"{'' if is_up else 'e '}strong {kind}")
        d.path([(8, y), (432, y)], "rule")
        d.arrow(d.x(1 - 0.05 * sign), y - 36, 54 * sign, 0, f"told {kind}")
        d.text(d.x(high) + 8 if is_up else 11, y - 32, "no gradient", "clip told")
    for value in (low, 1.0, high):
        d.text(d.x(value), 196, f"{value:g}", "m dim")
    d.text(432, 204, "ratio ρ →", "e dim")
    for token in tokens:
        x, y = d.x(token.ratio), rows[token.A > 0]
        if not low <= token.ratio <= high:
            d.text(x, y + 27, plain(token.ratio), "m dim")
        d.text(x, y - 15, f"o_{token.row}", "m dim")
        d.token(x, y, token)
    return d.svg()


def sequences(tokens, s, low, high, wide):
    """The ratios of tokens, and that of their output. s: that of each output; wide: the range of
    GRPO's clip. What the answer adds has the class `told`."""
    d = Drawing(440, 318, "The ratio of each output among those of its tokens")
    d.axes((0.62, 1.7), (0, 1), 40, 54, 0, 0)
    d.box(d.x(wide[0]), 24, d.x(wide[1]) - d.x(wide[0]), 256, "range")
    d.text(d.x(wide[0]) + 6, 18, f"GRPO’s range, {wide[0]:g} to {wide[1]:g}", "dim")
    d.path([(d.x(1.0), 24), (d.x(1.0), 280)], "here")
    d.text(d.x(1.0), 298, f"{low:g} to {high:g}", "m")
    d.text(432, 298, "ratio →", "e dim")
    for index, ratio in enumerate(s, start=1):
        own = [token for token in tokens if token.row == index]
        y = 8 + 62 * index
        A = own[0].A
        is_hit = own[0].is_clipped
        d.text(8, y + 4, f"o_{index}", "strong")
        d.text(432, y + 4, f"A {'>' if A > 0 else '<'} 0", f"e {side(A)}")
        d.path([(40, y), (392, y)], "rule")
        for token in own:
            d.add("circle", f"small {token.name}", cx=d.x(token.ratio), cy=y, r=8)
            d.text(d.x(token.ratio), y + 4, token.text, "m small")
        kind = f"{side(A)}{' hit' if is_hit else ''}"
        x = d.x(ratio)
        d.add("path", f"diamond {kind}", d=f"M{short(x)} {y - 30}l8 9l-8 9l-8 -9z")
        d.text(x + (12 if ratio >= 1 else -12), y - 17, f"s {plain(ratio)}",
               "" if ratio >= 1 else "e")
        if is_hit:
            d.text(432, y - 17, "no gradient", "e clip told")
        elif abs(ratio - 1) > high - 1:
            d.text(432, y - 17, "leads back", "e dim told")
    return d.svg()


def clip(tokens, curve, A, low, high):
    """The loss of a token against its ratio, for one advantage. curve: pairs of ratio, loss."""
    is_up = A > 0
    kind = side(A)
    outputs = " ".join(f"o_{row}" for row in sorted({token.row for token in tokens}))
    d = Drawing(400, 262, f"The loss of a token against its ratio, where A is {plain(A)}")
    losses = [loss for _, loss in curve]
    room = 0.16 * (max(losses) - min(losses))
    d.axes((curve[0][0], curve[-1][0]), (min(losses) - 1.6 * room, max(losses) + room),
           52, 12, 32, 34)
    top, floor = 32, 228
    d.box(d.x(low), top, max(2.0, d.x(high) - d.x(low)), floor - top, "range")
    d.path([(52, floor), (388, floor)], "rule")
    flat = [(r, loss) for r, loss in curve if (r >= high if is_up else r <= low)]
    steep = [(r, loss) for r, loss in curve if not (r > high if is_up else r < low)]
    edge, end = (high, high + 0.12) if is_up else (low, low - 0.07)
    d.line([(edge, -edge * A), (end, -end * A)], "free")
    d.line(steep, f"curve {kind}")
    d.line(flat, "curve clip")
    level = d.y(flat[0][1])
    d.path([(52, level), (d.x(flat[0][0]), level)], "level")
    d.text(46, level + 4, plain(flat[0][1]), "e clip")
    for value in (low, 1.0, high) if high - low > 0.1 else (1.0,):
        d.text(d.x(value), floor + 18, f"{value:g}", "m dim")
    d.text(388, floor + 18, "ρ" if high - low > 0.1 else "s", "e")
    d.text(46, top + 10, "L_t", "e")
    d.text(0, 12, f"A = {plain(A)}" if abs(A) != 1 else f"A {'>' if is_up else '<'} 0",
           f"strong {kind}")
    d.text(86, 12, outputs if abs(A) != 1 else "L_t / |A|", "dim")
    d.text(362 if is_up else 388, 12, "pushed to the right" if is_up else "pushed to the left",
           "e dim")
    d.arrow(368 if is_up else 268, 8, 20 if is_up else -20, 0, kind)
    d.text(388 if is_up else 58, level - 16, "no gradient", "e clip" if is_up else "clip")
    for token in tokens:
        d.token(d.x(token.ratio), d.y(token.loss), token)
    return d.svg()


# ---- the critic ------------------------------------------------------------------------------

def gae(texts, V, reward, deltas, A, factor):
    """What a critic expects of an output while it is written, and the advantages: the surprise at
    each token, and factor times the advantage of the next one."""
    n = len(texts)
    d = Drawing(440, 330, "Surprises of the critic, and their sums")
    columns = [80 + 330 * t / n for t in range(n + 1)]
    height = scale((0, 1), (148, 28))
    for level in (0, 1):
        d.path([(64, height(level)), (432, height(level))], "rule")
        d.text(56, height(level) + 4, str(level), "e dim")
    d.text(8, 12, "what the critic expects, V_t, and the reward that comes", "dim")
    levels = [*V, reward]
    for t in range(n):
        middle = (columns[t] + columns[t + 1]) / 2
        d.path([(columns[t], height(levels[t])), (columns[t + 1], height(levels[t]))], "step")
        d.arrow(columns[t + 1], height(levels[t]), 0,
                height(levels[t + 1]) - height(levels[t]), side(deltas[t]))
        upper = min(height(levels[t]), height(levels[t + 1]))
        d.text(columns[t + 1] - 8, upper + (16 if deltas[t] > 0 else -6),
               f"δ_{t + 1} {signed(deltas[t])}", f"e {side(deltas[t])}")
        d.text(middle, 172, texts[t], "m code")
        d.text(columns[t] + 4, height(levels[t]) + 16, plain(levels[t]), "dim")
    d.text(columns[n], height(reward) + (-8 if reward > 0 else 17), f"r = {reward:g}", "m strong")
    largest = max(abs(a) for a in A)
    zero = 310 if A[0] > 0 else 214
    d.text(8, 196, "A_t, the surprises from there on", "dim")
    d.path([(64, zero), (432, zero)], "rule")
    for t in range(n):
        y = zero
        for later in range(t, n):
            part = factor ** (later - t) * deltas[later] * 78 / largest
            d.box((columns[t] + columns[t + 1]) / 2 - 24, y, 48, -part,
                  f"{side(deltas[later])} s{later - t}")
            y -= part
        d.text((columns[t] + columns[t + 1]) / 2, y + (-6 if A[t] > 0 else 16),
               plain(A[t]), f"m strong {side(A[t])}")
    return d.svg()


# ---- the KL ----------------------------------------------------------------------------------

def estimators(curves, points):
    """Estimates of the KL against log(pi / pi_ref). curves: name -> pairs; points: (x, y, class) of
    tokens."""
    d = Drawing(400, 232, "Three estimates of the KL against the log of pi over pi_ref")
    d.axes((-1.05, 1.05), (-0.75, 0.95), 14, 62, 12, 34)
    d.path([(14, d.y(0)), (338, d.y(0))], "rule")
    d.path([(d.x(0), 12), (d.x(0), 198)], "one")
    d.add("clipPath", text='<rect x="14" y="12" width="324" height="186"/>', id="plot")
    d.parts.append('<g clip-path="url(#plot)">')
    for name, of in curves.items():
        d.line(of, f"curve {name}")
    d.parts.append("</g>")
    ends = {name: of[-1][1] for name, of in curves.items()}
    d.text(344, 22, "k1", "dim")
    d.text(344, d.y(ends["k2"]) + 4, "k2", "dim")
    d.text(344, d.y(ends["k3"]) + 6, "k3, (4)", "strong")
    d.text(d.x(-0.3) - 14, d.y(-0.3) + 4, "k1 falls below 0", "e dim")
    for x, y, kind in points:
        d.add("circle", f"dot {kind}", cx=d.x(x), cy=d.y(y), r=4.5)
    d.text(d.x(0), 216, "0", "m dim")
    d.text(14, 216, "← less likely", "dim")
    d.text(338, 216, "likelier →", "e dim")
    return d.svg()


# ---- pairs -----------------------------------------------------------------------------------

def pairs(names, chosen, rejected, M):
    """How much likelier than in the base the two outputs of each pair are, and their difference."""
    d = Drawing(440, 92 + 104 * len(M), "Chosen and rejected outputs against the base, by pair")
    least = min(0, *chosen, *rejected)
    most = max(0, *chosen, *rejected)
    d.axes((1.3 * least, most + 0.12 * (most - least)), (0, 1), 84, 24, 0, 0)
    bottom = 62 + 104 * len(M)
    d.text(d.x(0), 14, "as in the base", "m dim")
    d.path([(d.x(0), 22), (d.x(0), bottom)], "one")
    d.text(84, bottom + 20, "← less likely", "dim")
    d.text(430, bottom + 20, "h", "e")
    for number, (won, lost, h_w, h_l, m) in enumerate(zip(*names, chosen, rejected, M)):
        y = 52 + 104 * number
        for name, value, place, kind in ((won, h_w, y, "up"), (lost, h_l, y + 30, "down")):
            d.text(8, place + 4, f"o_{name} {'chosen' if kind == 'up' else 'rejected'}", kind)
            d.arrow(d.x(0), place, d.x(value) - d.x(0), 0, kind)
            is_left = value < -1.5
            d.text(d.x(value) - 8 if is_left else d.x(0) + 10, place + 4, signed(value),
                   f"{'e ' if is_left else ''}{kind}")
        ends = d.x(h_w), d.x(h_l)
        d.path([(ends[0], y + 10), (ends[0], y + 52)], "level told")
        d.path([(ends[1], y + 40), (ends[1], y + 52)], "level told")
        d.arrow(ends[1], y + 52, ends[0] - ends[1], 0, "told")
        d.text((ends[0] + ends[1]) / 2, y + 70, f"M = {plain(m)}", "m strong told")
    return d.svg()


def logistic(curve, points):
    """The loss of a pair against its margin. points: name, M, loss, slope of each pair."""
    d = Drawing(400, 262, "The loss of a pair against its margin")
    d.axes((curve[0][0], curve[-1][0]), (0, max(loss for _, loss in curve)), 44, 16, 20, 42)
    d.path([(44, 220), (384, 220)], "rule")
    d.path([(d.x(0), 20), (d.x(0), 220)], "one")
    middle = min(curve, key=lambda point: abs(point[0]))
    d.line(curve, "curve")
    d.path([(44, d.y(middle[1])), (d.x(0), d.y(middle[1]))], "level")
    d.text(40, d.y(middle[1]) + 4, plain(middle[1]), "e dim")
    d.text(40, 28, "L", "e")
    d.text(384, 238, "M", "e")
    d.text(d.x(0), 238, "0", "m dim")
    d.text(44, 256, "← rejected ahead", "dim")
    d.text(384, 256, "chosen ahead →", "e dim")
    for name, M, loss, slope in points:
        d.line([(x, loss + slope * (x - M)) for x in (M - 5, M + 5)], "tangent")
        d.add("circle", "dot up", cx=d.x(M), cy=d.y(loss), r=5.5)
        d.text(d.x(M) + 12, d.y(loss) - 22, name, "strong")
        d.text(d.x(M) + 12, d.y(loss) - 7, f"slope {slope:.3f}".replace("-", "−"), "dim")
    return d.svg()
