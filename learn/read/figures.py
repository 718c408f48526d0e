"""Draw the pictures of a page, in SVG. Numbers come from the lesson or from the functions of the
script, colours and fonts from the style sheet, captions and fixed texts from pictures.txt."""
import torch

from learn.look import Drawing, scale
from learn.read import example, words
from learn.read.code import plain

OUTPUTS = ["", "o₁", "o₂", "o₃", "o₄"]       # names of the outputs, from 1
SECTIONS = {section.names[0]: section for section in words.read("pictures")}
# The drawing at the top of a script's page, and the drawing next to a function.
PLACES = {"reinforce": "group", "ppo": "gae", "grpo": "clip", "gspo": "clip",
          "dpo": "logistic", "advantages": "group", "policy_loss": "clip"}


def begin(name, x, y):
    """Begin a drawing with the lines and texts of its section in pictures.txt. -> Drawing"""
    d = Drawing(x, y)
    for *place, kind, text in SECTIONS[name].rows:
        if len(place) == 4:
            d.line(*map(float, place), kind)
        else:
            d.text(*map(float, place[:2]), text, kind, place[2])
    return d


def group(lesson):
    """Draw rewards as bars that begin at the mean of their group, and the advantages below."""
    mean = example.RIGHT.mean().item()
    returned = lesson.rows("advantages", "->advantages")
    d = begin("group", scale(0.5, 4.5, 76, 348), scale(0, 1, 160, 12))
    for i, reward in enumerate(example.RIGHT[0].tolist()):
        at = i + 1
        A = returned[i][0]
        kind = "up" if A > 0 else "down"
        answer = "".join(example.ANSWERS[i][:-1])
        d.line(at, mean, at, reward, f"bar {kind}")
        d.text(at, (mean + reward) / 2, plain(reward - mean, "+"), "m on")
        d.text(at, 0, answer, f"m code {kind}", "0 20")
        d.text(at, 0, OUTPUTS[at], "m dim", "0 42")
        d.text(at, 0, plain(A), f"m big {kind}", "0 82")
    d.text(4.6, mean, f"mean {plain(mean)}", "strong", "4 0")
    d.text(0.5, 0, example.QUESTIONS[lesson.name], "e code", "-10 20")
    if lesson.name != "reinforce":
        std = plain(example.RIGHT.std())
        d.text(4.5, 0, f"÷ std {std}", "dim", "10 82")
    return d


def gae(lesson):
    """Draw what the critic predicts while the third output is written, and the advantages: the
    error at each token, plus gamma lam times the advantage of the next token."""
    V, deltas, A = (lesson.rows("gae", name)[2] for name in ("V", "delta", "A"))
    factor = lesson.cfg.gamma * lesson.cfg.lam
    d = begin("gae", scale(0, 3, 80, 410), scale(0, 1, 148, 28))
    for t, after in enumerate([*V[1:], 1.0]):
        end = t + 1
        error = plain(deltas[t], "+")
        d.line(t, V[t], end, V[t], "step")
        d.text(t, V[t], plain(V[t]), "dim", "4 12")
        d.line(end, V[t], end, after, "up")
        d.text(end, after, "▲", "m up", "0 4")
        d.text(end, after, f"δ {error}", "e up", "-8 12")

    d.y = scale(0, A[0], 310, 232)
    d.line(0, 0, 3, 0, "rule")
    for t in range(3):
        middle = t + 0.5
        total = 0.0
        for ahead, delta in enumerate(deltas[t:]):
            below = total
            total += factor ** ahead * delta
            d.line(middle, below, middle, total, f"bar up s{ahead}")
        d.text(middle, total, plain(A[t]), "m strong up", "0 -10")
    return d


def clip(lesson):
    """Draw the loss of a token, divided by |A|, against its ratio, for both signs of A."""
    if not lesson.clipped():
        return None
    low, high = lesson.limits
    symbol = lesson.equations[2][0].replace("r", "ρ")     # of rho_t, or s of s_i
    d = begin("clip", scale(0.5, 1.8, 52, 388), scale(-1.75, 1.75, 336, 36))
    d.curve([(low, -1.75), (low, 1.75), (high, 1.75), (high, -1.75)], "range")
    d.line(1, -1.75, 1, 1.75, "one")
    d.axes(0.5, 1.8, -1.75, {0.5: "0.5", 1: "1", 1.5: "1.5"}, {-1: "−1", 0: "0", 1: "1"})
    d.text((low + high) / 2, 1.75, f"the range, {plain(low)} to {plain(high)}", "m dim", "0 -10")
    d.text(1.8, -1.75, f"ratio {symbol}", "e", "0 18")
    for A, edge, left, right in ((1, high, "up", "clip"), (-1, low, "clip", "down")):
        d.curve(losses(lesson, A, 0.5, edge), f"curve {left}")
        d.curve(losses(lesson, A, edge, 1.8), f"curve {right}")
        d.line(edge, -A * edge, edge + A / 10, -A * edge - 0.1, "free")
    d.text(1.8, -0.6, "A > 0, pushed to the right →", "e strong up")
    d.text(1.8, 0.6, "A < 0, pushed to the left ←", "e strong down")
    d.text(1.8, -high, "no gradient", "e clip", "0 17")
    d.text(0.5, low, "no gradient", "clip", "6 17")
    rows = (lesson.rows("policy_loss", name) for name in ("A", "ratio", "token_loss"))
    for i, (A, *of_tokens) in enumerate(zip(*rows, lesson.clipped(), example.ANSWERS)):
        for t, (ratio, loss, is_clipped, text) in enumerate(zip(*of_tokens)):
            is_output = lesson.name == "gspo"           # its tokens share one ratio
            advantage = A[t % len(A)]
            if advantage != 0 and not (is_output and t > 0):
                kind = "tok up" if advantage > 0 else "tok down"
                if is_clipped:
                    kind += " hit"
                d.dot(ratio, loss / abs(advantage), kind, OUTPUTS[i + 1] if is_output else text)
    return d


def losses(lesson, A, first, last):
    """Compute the losses of tokens with advantage A at some ratios. -> pairs (ratio, loss)"""
    ratios = torch.linspace(first, last, 14)[:, None]   # one row each: GSPO averages rows
    zero = 0 * ratios
    loss = lesson.script.policy_loss(
        ratios.log(), zero, zero + A, zero + 1,
        epsilon=lesson.cfg.epsilon, epsilon_high=lesson.cfg.epsilon_high)
    return torch.cat([ratios, loss], dim=1).tolist()


def logistic(lesson):
    """Draw the loss of a pair against its margin, and the pairs of the example with slopes."""
    d = begin("logistic", scale(-14, 14, 44, 364), scale(0, 1.6, 230, 30))
    M = torch.linspace(-14, 14, 57)
    losses = lesson.script.dpo_loss(M, 0, 0, 0, lesson.cfg.beta)
    d.axes(-14, 14, 0, {-10: "−10", 0: "0", 10: "10"}, {0: "0", 0.5: "0.5", 1: "1", 1.5: "1.5"})
    middle = losses[M == 0].item()
    d.line(0, 0, 0, middle, "one")
    d.line(-14, middle, 0, middle, "free")
    d.text(-14, middle, f"log 2 = {plain(middle)}", "dim", "6 -10")
    d.curve(zip(M.tolist(), losses.tolist()), "curve")
    chosen, rejected = lesson.script.preferences(example.GRADED)
    for i, j in zip(chosen.tolist(), rejected.tolist()):
        margin, loss, slope = (lesson.rows("dpo_loss", name)[i][0]
                               for name in ("M", "->dpo_loss", "∂L/∂logπ"))
        rise = 5 * slope
        label = f"{OUTPUTS[i + 1]} over {OUTPUTS[j + 1]}"
        d.line(margin - 5, loss - rise, margin + 5, loss + rise, "tangent")
        d.dot(margin, loss, "up")
        d.text(margin, loss, label, "strong", "10 -27")
        d.text(margin, loss, f"slope {plain(slope)}", "dim", "10 -12")
    return d
