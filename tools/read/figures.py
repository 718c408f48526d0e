"""The drawings of a page. Their numbers are those of its lesson, or come from the functions of the
script."""
import torch

from tools.read import example
from tools.read.draw import Drawing, plain, scale, side, signed

# Of scripts, with which drawings their pages open, and of functions, beside which one stands.
PLACES = {"reinforce": ["group"], "ppo": ["gae"], "grpo": ["group", "ratios"],
          "gspo": ["sequences"], "dpo": ["logistic"],
          "policy_loss": ["clip"], "kl": ["estimators"], "gae": ["disappointed"]}


def drawings(lesson, place):
    """The drawings of a place. -> list of pairs: name, list of SVGs"""
    found = [(name, globals()[name](lesson)) for name in PLACES.get(place, ())]
    return [(name, pictures) for name, pictures in found if pictures]


def limits(lesson):
    """The range of the clip. -> pair of floats"""
    return 1 - lesson.cfg.epsilon, 1 + lesson.cfg.epsilon_high


# ---- what an output is worth -----------------------------------------------------------------

def group(lesson):
    """Rewards as bars that begin at the mean of their group, and advantages."""
    rewards = example.RIGHT[0]
    mean = rewards.mean().item()
    left = 0.5
    returned = lesson.rows("advantages", "->advantages")
    d = Drawing("Rewards of the four outputs, above and below their mean", 440, 266,
                scale(left, 4.5, 76, 348), scale(0, 1, 160, 12))
    for reward in (0, 1):
        d.line(left, reward, 4.5, reward, "rule")
        d.text(left, reward, f"reward {reward}", "e dim", -10)
    for i, (tokens, reward, A) in enumerate(zip(example.ANSWERS, rewards, returned), start=1):
        kind = side(A[0])
        answer = "".join(tokens[:-1])
        difference = reward - mean
        d.bar(i, mean, reward, kind)
        d.text(i, mean + difference / 2, signed(difference), "m on")
        d.text(i, 0, answer + " ✓" * int(reward), f"m code {kind}", 0, 20)
        d.text(i, 0, f"o_{i}", "m dim", 0, 42)
        d.text(i, 0, A[0], f"m big {kind}", 0, 82)
    d.line(left, mean, 4.6, mean, "mean")
    d.text(4.6, mean, f"mean {plain(mean)}", "strong", 4)
    d.text(left, 0, example.QUESTIONS[lesson.name], "e code", -10, 20)
    d.text(left, 0, "A", "e big", -10, 82)
    if lesson.name == "grpo":
        d.text(4.5, 0, "each", "dim", 10, 75)
        d.text(4.5, 0, f"÷ std {plain(rewards.std())}", "dim", 10, 91)
    return [d.svg()]


def gae(lesson, row=2):
    """What a critic expects of an output while it is written, and the advantages: the surprise at
    each token, and gamma lam times the advantage of the next one."""
    V, deltas, A = (lesson.rows("gae", name)[row] for name in ("V", "delta", "A"))
    tokens = example.ANSWERS[row]
    reward = example.RIGHT[0, row].item()
    factor = lesson.cfg.gamma * lesson.cfg.lam
    count = len(tokens)
    is_up = A[0] > 0
    kind = side(A[0])
    d = Drawing("Surprises of the critic, and their sums", 440, 330, scale(0, count, 80, 410))
    d.text(0, 8, "what the critic expects, V_t, and the reward that comes", "dim", -72)
    d.text(0, 192, "A_t, the surprises from there on", "dim", -72)

    d.y = scale(0, 1, 148, 28)
    for level in (0, 1):
        d.line(0, level, count, level, "rule")
        d.text(0, level, str(level), "e dim", -16)
    d.text(count, reward, f"r = {reward:g}", "m strong", 0, -12 if is_up else 13)
    after = [*V[1:], reward]
    for t, (level, then, delta, token) in enumerate(zip(V, after, deltas, tokens)):
        said = f"δ_{t + 1} {signed(delta)}"
        end = t + 1
        d.line(t, level, end, level, "step")
        d.text(t, level, level, "dim", 4, 12)
        d.arrow(end, level, end, then, side(delta))
        d.text(end, max(level, then), said, f"e {side(delta)}", -8, 12 if delta > 0 else -10)
        d.text(t + 0.5, 0, token, "m code", 0, 20)

    zero = 310 if is_up else 214
    d.y = scale(0, abs(A[0]), zero, zero - 78)
    d.line(0, 0, count, 0, "rule")
    for t in range(count):
        total = 0.0
        middle = t + 0.5
        for ahead, delta in enumerate(deltas[t:]):
            below = total
            total += factor ** ahead * delta
            d.bar(middle, below, total, f"{side(delta)} s{ahead}")
        d.text(middle, total, A[t], f"m strong {kind}", 0, -10 if is_up else 12)
    return [d.svg()]


def disappointed(lesson):
    return gae(lesson, row=1)


# ---- the ratio and its clip ------------------------------------------------------------------

def ratios(lesson):
    """All tokens by their ratio, above those that A pushes up, below those that it pushes down.
    What the answer adds has the class `told`."""
    low, high = limits(lesson)
    first, last = 0.58, 1.74
    d = Drawing("The ratios of the ten tokens, and the range of the clip", 440, 208,
                scale(first, last, 8, 432))
    d.box(low, 6, high, 178, "range")
    d.line(1, 6, 1, 178, "one")
    d.box(high, 8, last, 88, "zone told")
    d.box(first, 96, low, 176, "zone told")
    d.text(first, 20, "A > 0", "strong up")
    d.text(last, 108, "A < 0", "e strong down")
    d.arrow(0.95, 20, 1.1, 20, "told up")
    d.arrow(1.05, 108, 0.9, 108, "told down")
    d.text(high, 20, "no gradient", "clip told", 8)
    d.text(first, 108, "no gradient", "clip told", 3)
    for y in (56, 144):
        d.line(first, y, last, y, "rule")
    for value in (low, 1, high):
        d.text(value, 192, f"{value:g}", "m dim")
    d.text(last, 200, "ratio ρ →", "e dim")
    for token in lesson.tokens():
        y = 56 if token.A > 0 else 144
        if not low <= token.ratio <= high:
            d.text(token.ratio, y, token.ratio, "m dim", 0, 23)
        d.text(token.ratio, y, f"o_{token.row}", "m dim", 0, -19)
        d.token(token, token.ratio, y)
    return [d.svg()]


def sequences(lesson):
    """The ratios of tokens, and that of their output, with the range that GRPO has. What the answer
    adds has the class `told`."""
    low, high = limits(lesson)
    d = Drawing("The ratio of each output among those of its tokens", 440, 318,
                scale(0.62, 1.7, 40, 386))
    d.box(0.8, 24, 1.28, 280, "range")
    d.text(0.8, 14, "GRPO’s range, 0.8 to 1.28", "dim", 6)
    d.line(1, 24, 1, 280, "here")
    d.text(1, 294, f"{low:g} to {high:g}", "m")
    d.text(1.7, 294, "ratio →", "e dim", 46)
    for token in lesson.tokens():
        y = 8 + 62 * token.row
        kind = side(token.A)
        if token.place == 1:
            d.text(0.62, y, f"o_{token.row}", "strong", -32)
            d.text(1.7, y, "A > 0" if token.A > 0 else "A < 0", f"e {kind}", 46)
            d.line(0.62, y, 1.7, y, "rule")
            d.diamond(token.ratio, y, f"{kind} hit" if token.is_clipped else kind)
            is_above = token.ratio >= 1
            d.text(token.ratio, y, f"s {plain(token.ratio)}", "" if is_above else "e",
                   12 if is_above else -12, -21)
            if token.is_clipped:
                d.text(1.7, y, "no gradient", "e clip told", 46, -21)
            elif not low <= token.ratio <= high:
                d.text(1.7, y, "leads back", "e dim told", 46, -21)
        own = example.MOVED[token.row - 1, token.place - 1].exp().item()
        d.dot(own, y, 8, f"small {token.name}")
        d.text(own, y, token.text, "m small")
    return [d.svg()]


def clip(lesson):
    """The loss of a token against its ratio, a panel for each sign of the advantage."""
    tokens = lesson.tokens() if lesson.clipped() else []
    if lesson.name == "gspo":
        tokens = [token for token in tokens if token.place == 1]
        for token in tokens:
            token.text = f"o_{token.row}"
    up = [token for token in tokens if token.A > 0]
    down = [token for token in tokens if token.A < 0]
    return [panel(lesson, own) for own in (up, down) if own]


def panel(lesson, tokens):
    """The loss for one advantage. Where advantages differ by token, it is 1 or -1."""
    low, high = limits(lesson)
    sizes = {abs(token.A) for token in tokens}
    size = sizes.pop() if len(sizes) == 1 else 1
    is_up = tokens[0].A > 0
    A = size if is_up else -size
    edge = high if is_up else low
    kind = side(A)
    points = curve(lesson, A, edge)
    losses = [loss for _, loss in points]
    room = 0.16 * (max(losses) - min(losses))
    floor = min(losses) - 1.6 * room
    top = max(losses) + room
    level = -A * edge
    beyond = edge + 0.1 if is_up else edge - 0.1
    before = [point for point in points if point[0] <= edge]
    behind = [point for point in points if point[0] >= edge]
    d = Drawing(f"The loss of a token against its ratio, where A is {plain(A)}", 400, 262,
                scale(0.5, 1.8, 52, 388), scale(floor, top, 228, 32))
    d.box(low, floor, high, top, "range")
    d.line(0.5, floor, 1.8, floor, "rule")
    d.line(0.5, level, edge, level, "level")
    d.line(edge, level, beyond, -A * beyond, "free")
    if is_up:
        d.curve(before, "curve up")
        d.curve(behind, "curve clip")
        d.text(1.8, level, "no gradient", "e clip", 0, -20)
        d.text(1.8, top, "pushed to the right →", "e dim", 0, -24)
    else:
        d.curve(before, "curve clip")
        d.curve(behind, "curve down")
        d.text(0.5, level, "no gradient", "clip", 6, -20)
        d.text(1.8, top, "← pushed to the left", "e dim", 0, -24)
    d.text(0.5, level, level, "e clip", -6)
    is_sequence = lesson.name == "gspo"
    for value in (1,) if is_sequence else (low, 1, high):
        d.text(value, floor, f"{value:g}", "m dim", 0, 14)
    d.text(1.8, floor, "s" if is_sequence else "ρ", "e", 0, 14)
    d.text(0.5, top, "L_t", "e", -6, 6)
    if size == 1:
        d.text(0.5, top, "A > 0" if is_up else "A < 0", f"strong {kind}", -52, -24)
        d.text(0.5, top, "L_t / |A|", "dim", 34, -24)
    else:
        outputs = dict.fromkeys(f"o_{token.row}" for token in tokens)
        d.text(0.5, top, f"A = {plain(A)}", f"strong {kind}", -52, -24)
        d.text(0.5, top, " ".join(outputs), "dim", 34, -24)
    for token in tokens:
        d.token(token, token.ratio, token.loss * size / abs(token.A))
    return d.svg()


def curve(lesson, A, edge):
    """The loss of a token against its ratio, for one advantage. -> pairs"""
    ratios = sorted([edge, *torch.linspace(0.5, 1.8, 27).tolist()])
    logps = torch.tensor([ratios]).log().T              # a row for each: GSPO takes means over rows
    loss = lesson.script.policy_loss(
        logps, torch.zeros_like(logps), torch.full_like(logps, A), torch.ones_like(logps),
        epsilon=lesson.cfg.epsilon, epsilon_high=lesson.cfg.epsilon_high)
    return list(zip(ratios, loss[:, 0].tolist()))


# ---- the KL, and pairs -----------------------------------------------------------------------

def estimators(lesson):
    """Estimates of the KL against log(pi / pi_ref), and the tokens on that of the page."""
    low, high = -1.05, 1.05
    bottom = -0.75
    x = torch.linspace(low, high, 61)
    d = Drawing("Three estimates of the KL against the log of pi over pi_ref", 400, 232,
                scale(low, high, 14, 338), scale(bottom, 0.95, 198, 12))
    d.line(low, 0, high, 0, "rule")
    d.line(0, bottom, 0, 0.95, "one")
    for name in ("k1", "k2", "k3"):
        y = lesson.script.kl(x, 0 * x, name)
        points = torch.stack([x, y], dim=1)
        is_inside = (y > bottom) & (y < 0.95)
        d.curve(points[is_inside].tolist(), f"curve {name}")
    d.text(high, 0.9, "k1", "dim", 6)
    d.text(high, 0.55, "k2", "dim", 6)
    d.text(high, 0.38, "k3, (4)", "strong", 6)
    d.text(-0.3, -0.3, "k1 falls below 0", "e dim", -14)
    d.text(0, bottom, "0", "m dim", 0, 14)
    d.text(low, bottom, "← less likely", "dim", 0, 14)
    d.text(high, bottom, "likelier →", "e dim", 0, 14)
    if "kl" in lesson.called:
        rows = zip(lesson.rows("kl", "x"), lesson.rows("kl", "->kl"), example.RIGHT[0])
        for i, (xs, ys, right) in enumerate(rows, start=1):
            for t, place in enumerate(zip(xs, ys), start=1):
                d.dot(*place, 4.5, f"dot {side(right)} t{i}{t}")
    return [d.svg()]


def logistic(lesson):
    """The loss of a pair against its margin, and the pairs of the example with their slopes."""
    right = 14
    left = -right
    M = torch.linspace(left, right, 57)
    zero = torch.zeros_like(M)
    losses = lesson.script.dpo_loss(M, zero, zero, zero, lesson.cfg.beta).tolist()
    top = losses[0]
    middle = losses[28]                                 # where M is 0
    d = Drawing("The loss of a pair against its margin", 400, 262,
                scale(left, right, 44, 364), scale(0, top, 220, 20))
    d.line(left, 0, right, 0, "rule")
    d.line(0, 0, 0, top, "one")
    d.line(left, middle, 0, middle, "level")
    d.curve(zip(M.tolist(), losses), "curve")
    d.text(left, middle, middle, "e dim", -4)
    d.text(left, top, "L", "e", -4, 4)
    d.text(right, 0, "M", "e", 0, 14)
    d.text(0, 0, "0", "m dim", 0, 14)
    d.text(left, 0, "← rejected ahead", "dim", 0, 32)
    d.text(right, 0, "chosen ahead →", "e dim", 0, 32)
    chosen, rejected = lesson.script.preferences(example.GRADED)
    for i, j in zip(chosen.tolist(), rejected.tolist()):
        margin, loss, slope = (lesson.rows("dpo_loss", name)[i][0]
                               for name in ("M", "->dpo_loss", "∂L/∂logπ"))
        rise = 5 * slope
        d.line(margin - 5, loss - rise, margin + 5, loss + rise, "tangent")
        d.dot(margin, loss, 5.5, "dot up")
        d.text(margin, loss, f"o_{i + 1} over o_{j + 1}", "strong", 12, -26)
        d.text(margin, loss, f"slope {plain(slope, 3)}", "dim", 12, -11)
    return [d.svg()]
