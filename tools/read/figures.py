"""The drawings of a page. Their numbers are those of its lesson, or come from the functions of the
script."""
import torch

from tools.read import example
from tools.read.draw import Drawing, output, plain, scale, side

# Of scripts, with which drawing their pages open, and of functions, beside which one stands.
PLACES = {"reinforce": "group", "ppo": "gae", "grpo": "clip", "gspo": "sequences",
          "dpo": "logistic", "advantages": "group", "policy_loss": "clip", "kl": "estimators"}


def drawing(lesson, place):
    """The drawing of a place, none that the page has at its top already. -> name, list of SVGs"""
    name = PLACES.get(place)
    is_there = place != lesson.name and name == PLACES[lesson.name]
    return name, globals()[name](lesson) if name and not is_there else []


# ---- what an output is worth -----------------------------------------------------------------

def group(lesson):
    """Rewards as bars that begin at the mean of their group, and advantages."""
    rewards = example.RIGHT[0]
    mean = rewards.mean().item()
    left = 0.5
    returned = lesson.rows("advantages", "->advantages")
    d = Drawing("Rewards of the four outputs, above and below their mean", 440, 262,
                scale(left, 4.5, 76, 348), scale(0, 1, 160, 12))
    for reward in (0, 1):
        d.line(left, reward, 4.5, reward, "rule")
        d.text(left, reward, f"reward {reward}", "e dim", -10)
    for i, (tokens, reward, A) in enumerate(zip(example.ANSWERS, rewards, returned), start=1):
        kind = side(A[0])
        difference = (reward - mean).item()
        d.box(i, mean, i, reward, kind, room=23)
        d.text(i, mean + difference / 2, plain(difference, sign="+"), "m on")
        d.text(i, 0, "".join(tokens[:-1]) + " ✓" * int(reward), f"m code {kind}", 0, 20)
        d.text(i, 0, output(i), "m dim", 0, 42)
        d.text(i, 0, A[0], f"m big {kind}", 0, 82)
    d.line(left, mean, 4.6, mean, "mean")
    d.text(4.6, mean, f"mean {plain(mean)}", "strong", 4)
    d.text(left, 0, example.QUESTIONS[lesson.name], "e code", -10, 20)
    d.text(left, 0, "A", "e big", -10, 82)
    if lesson.name != "reinforce":
        d.text(4.5, 0, f"÷ std {plain(rewards.std())}", "dim", 10, 82)
    return [d.svg()]


def gae(lesson):
    """What a critic expects of the third output while it is written, and the advantages: the
    surprise at each token, and gamma lam times the advantage of the next one."""
    V, deltas, A = (lesson.rows("gae", name)[2] for name in ("V", "delta", "A"))
    count = len(V)
    d = Drawing("Surprises of the critic, and their sums", 440, 330, scale(0, count, 80, 410))
    d.text(0, 8, "what the critic expects, V, and the reward that comes", "dim", -72)
    d.text(0, 192, "A, the surprises from there on", "dim", -72)

    d.y = scale(0, 1, 148, 28)
    for level in (0, 1):
        d.line(0, level, count, level, "rule")
        d.text(0, level, str(level), "e dim", -16)
    d.text(count, 1, "r = 1", "m strong", 0, -12)
    for t, (level, then, delta) in enumerate(zip(V, [*V[1:], 1], deltas)):
        d.line(t, level, t + 1, level, "step")
        d.text(t, level, level, "dim", 4, 12)
        d.line(t + 1, level, t + 1, then, "up")
        d.text(t + 1, then, "↑", "m up", 0, 2)
        d.text(t + 1, then, f"δ {plain(delta, sign='+')}", "e up", -8, 12)
        d.text(t + 0.5, 0, example.ANSWERS[2][t], "m code", 0, 20)

    d.y = scale(0, A[0], 310, 232)
    d.line(0, 0, count, 0, "rule")
    for t in range(count):
        total = 0.0
        for ahead, delta in enumerate(deltas[t:]):
            below = total
            total += (lesson.cfg.gamma * lesson.cfg.lam) ** ahead * delta
            d.box(t + 0.5, below, t + 0.5, total, f"up s{ahead}", room=23)
        d.text(t + 0.5, total, A[t], "m strong up", 0, -10)
    return [d.svg()]


# ---- the ratio and its clip ------------------------------------------------------------------

def sequences(lesson):
    """The ratios of tokens, and that of their output, with the range that GRPO has."""
    low, high = lesson.limits
    d = Drawing("The ratio of each output among those of its tokens", 440, 318,
                scale(0.62, 1.7, 40, 386))
    d.box(0.8, 24, 1.28, 280, "range")
    d.text(0.8, 14, "GRPO’s range, 0.8 to 1.28", "dim", 6)
    d.line(1, 24, 1, 280, "mean")
    d.text(1, 294, f"{low:g} to {high:g}", "m")
    d.text(1.7, 294, "ratio →", "e dim", 46)
    for token in lesson.tokens():
        y = 8 + 62 * token.row
        kind = side(token.A)
        if token.place == 1:
            said = "no gradient" if token.is_clipped else "leads back" if token.row == 1 else ""
            d.text(0.62, y, output(token.row), "strong", -32)
            d.text(1.7, y, "A > 0" if token.A > 0 else "A < 0", f"e {kind}", 46)
            d.text(1.7, y, said, "e clip" if token.is_clipped else "e dim", 46, -21)
            d.line(0.62, y, 1.7, y, "rule")
            d.dot(token.ratio, y - 15, 8, f"tok {kind}{' hit' * token.is_clipped}", "s")
            d.text(token.ratio, y, plain(token.ratio), "", 12, -19)
        own = example.MOVED[token.row - 1, token.place - 1].exp().item()
        d.dot(own, y, 8, f"small {token.name}", token.text)
    return [d.svg()]


def clip(lesson):
    """The loss of a token against its ratio, a panel for each sign of the advantage."""
    tokens = lesson.tokens() if lesson.clipped() else []
    if lesson.name == "gspo":                           # dots are outputs
        tokens = [token for token in tokens if token.place == 1]
        for token in tokens:
            token.text = output(token.row)
    up = [token for token in tokens if token.A > 0]
    down = [token for token in tokens if token.A < 0]
    return [panel(lesson, 1, up), panel(lesson, -1, down)] if tokens else []


def panel(lesson, A, tokens):
    """The loss for one sign of the advantage, divided by its size."""
    low, high = lesson.limits
    edge, end = (high, 1.8) if A > 0 else (low, 0.5)
    points = curve(lesson, A, edge)
    floor, top = (-1.6, -0.3) if A > 0 else (0.3, 1.9)
    d = Drawing(f"The loss of a token against its ratio, where A is {A}", 400, 216,
                scale(0.5, 1.8, 52, 388), scale(floor, top, 186, 32))
    d.box(low, floor, high, top, "range")
    d.line(0.5, floor, 1.8, floor, "rule")
    d.line(edge, -A * edge, edge + 0.1 * A, -edge * A - 0.1, "free")
    d.curve([(x, y) for x, y in points if (x - edge) * A <= 0], f"curve {side(A)}")
    d.curve([(x, y) for x, y in points if (x - edge) * A >= 0], "curve clip")
    d.text(end, -A * edge, "no gradient", "e clip" if A > 0 else "clip", 0, -20)
    outputs = " ".join(dict.fromkeys(output(token.row) for token in tokens))
    pushed = f"{outputs}: A > 0, pushed to the right →"
    pushed = pushed if A > 0 else f"← {outputs}: A < 0, pushed to the left"
    d.text(0.5, top, pushed, f"strong {side(A)}", 0, -18)
    d.text(0.5, top, "L / |A|", "e", -6, 6)
    for value in sorted({plain(low), "1", plain(high)}, key=float):
        d.text(float(value), floor, value, "m dim", 0, 14)
    d.text(1.8, floor, "s" if lesson.name == "gspo" else "ρ", "e", 0, 14)
    for token in tokens:
        hit = " hit" * token.is_clipped
        kind = f"tok {side(A)}{hit} {token.name}"
        d.dot(token.ratio, token.loss / abs(token.A), 10, kind, token.text)
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
    bottom, top = -0.75, 0.95
    x = torch.linspace(low, high, 61)
    d = Drawing("Three estimates of the KL against the log of pi over pi_ref", 400, 232,
                scale(low, high, 14, 338), scale(bottom, top, 198, 12))
    d.line(low, 0, high, 0, "rule")
    d.line(0, bottom, 0, top, "rule")
    for name, height in (("k1", 0.9), ("k2", 0.55), ("k3", 0.38)):
        y = lesson.script.kl(x, 0 * x, name)
        points = torch.stack([x, y], dim=1)[(y > bottom) & (y < top)]
        d.curve(points.tolist(), f"curve {name}")
        d.text(high, height, name, "strong" if name == "k3" else "dim", 6)
    d.text(-0.3, -0.3, "k1 falls below 0", "e dim", -14)
    d.text(0, bottom, "0", "m dim", 0, 14)
    d.text(low, bottom, "← less likely", "dim", 0, 14)
    d.text(high, bottom, "likelier →", "e dim", 0, 14)
    if lesson.name == "grpo":
        for x, y in zip(lesson.rows("kl", "x"), lesson.rows("kl", "->kl")):
            for place in zip(x, y):
                d.dot(*place, 4.5, "tok")
    return [d.svg()]


def logistic(lesson):
    """The loss of a pair against its margin, and the pairs of the example with their slopes."""
    M = torch.linspace(-14, 14, 57)
    zero = torch.zeros_like(M)
    losses = lesson.script.dpo_loss(M, zero, zero, zero, lesson.cfg.beta).tolist()
    top, middle = losses[0], losses[28]                 # where M is 0
    d = Drawing("The loss of a pair against its margin", 400, 262,
                scale(-14, 14, 44, 364), scale(0, top, 220, 20))
    d.line(-14, 0, 14, 0, "rule")
    d.line(0, 0, 0, top, "rule")
    d.line(-14, middle, 0, middle, "free")
    d.curve(zip(M.tolist(), losses), "curve")
    d.text(-14, middle, middle, "e dim", -4)
    d.text(-14, top, "L", "e", -4, 4)
    d.text(14, 0, "M", "e", 0, 14)
    d.text(0, 0, "0", "m dim", 0, 14)
    d.text(-14, 0, "← rejected ahead", "dim", 0, 32)
    d.text(14, 0, "chosen ahead →", "e dim", 0, 32)
    for i, j in torch.stack(lesson.script.preferences(example.GRADED), dim=1).tolist():
        margin, loss, slope = (lesson.rows("dpo_loss", name)[i][0]
                               for name in ("M", "->dpo_loss", "∂L/∂logπ"))
        d.line(margin - 5, loss - 5 * slope, margin + 5, loss + 5 * slope, "tangent")
        d.dot(margin, loss, 5.5, "tok up")
        d.text(margin, loss, f"{output(i + 1)} over {output(j + 1)}", "strong", 12, -26)
        d.text(margin, loss, f"slope {plain(slope, 3)}", "dim", 12, -11)
    return [d.svg()]
