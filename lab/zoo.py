"""How each loss treats a token whose ratio has moved, and whom each advantage credits, asked from
the functions themselves: python -m lab.zoo (make zoo), for docs/zoo.md.

A panel asks a loss for the gradient in log pi of one token, whose ratio takes all values up to 2.5,
and divides it by that of -A log pi: 1 is REINFORCE, at 0 nothing is learned. docs/zoo.svg has all
families of panels, docs/zoo-NAME.svg one. Then each loss and advantage trains on arithmetic with
three seeds, each with a base of its own. --draw leaves that out, and docs/zoo.json as it is.
"""
import functools
import html
import importlib
import json
import math
import statistics
import tempfile
from typing import NamedTuple

import torch

import common
import grpo
import gspo
import reinforce
from lab.docs import DOCS, MACHINE, put, record, run, table
from report import parser, start
from report.logs import read_log

zoo = importlib.import_module("examples.zoo")

N = 8                                       # tokens of the output, where others matter
RATIOS = torch.arange(0.005, 2.5, 0.01)     # between the numbers at which losses have edges
OLD = 0.3                                   # pi_old of a token, where it does not matter


# ---- 1. how a loss treats a token ------------------------------------------------------------

def plain(logps, old_logps, A, mask):
    return reinforce.policy_loss(logps, A.expand_as(mask), mask)


def of_script(script, **flags):
    return functools.partial(script.policy_loss, **flags)


def of_zoo(name, **flags):
    cfg = zoo.Config(device="cpu", loss_type=name, **flags)
    return functools.partial(zoo.policy_loss, cfg)


def one_moves(log_rho):
    """The ratios of N tokens if the first alone moves. -> (1, N)"""
    return torch.cat([log_rho, torch.zeros(N - 1)])[None]


def all_move(log_rho):
    return log_rho.expand(1, N)


def ask(loss, A, log_rho, old):
    """The mean gradient in log pi of the tokens that have moved, by that of -A log pi. Beside them
    are those of an output with A = 0, so that theirs is the highest covariance. -> float"""
    mask = torch.zeros(2, N)
    mask[0, :log_rho.shape[1]] = 1.0
    mask[1] = 1.0
    old_logps = torch.full((2, N), old).log()
    old_logps[1] = math.log(1e-4 if A > 0 else 0.999)
    moved = torch.zeros(2, N)
    moved[:1, :log_rho.shape[1]] = log_rho
    logps = (old_logps + moved).requires_grad_()
    losses = loss(logps, old_logps, torch.tensor([[float(A)], [0.0]]), mask)
    losses.sum().backward()
    gradient = logps.grad[moved != 0].mean()
    return -gradient.item() / A


class Panel(NamedTuple):
    """What is drawn: title, two lines below it, a loss, how its tokens move, pi_old of them."""
    title: str
    seen: str
    loss: object
    move: object = None         # None: the token is the whole output
    old: float = OLD
    note: str = ""

    def weights(self, A):
        """For each of RATIOS, as far as a token can be as likely. -> list of (ratio, weight)"""
        move = self.move or (lambda log_rho: log_rho.view(1, 1))
        found = []
        for ratio in RATIOS[self.old * RATIOS <= 1]:
            log_rho = move(ratio.log().view(1))
            found.append((ratio.item(), ask(self.loss, A, log_rho, self.old)))
        return found


SYMMETRIC = {"epsilon": 0.2, "epsilon_high": 0.2}
HIGHER = {"epsilon": 0.2, "epsilon_high": 0.28}
GSPO = {"epsilon": gspo.Config.epsilon, "epsilon_high": gspo.Config.epsilon_high}
ONE = "one token of 8 moves"
ALL = "all tokens move"
FAMILIES = {
    "edges": ("A ratio: ignored, or with hard edges", [
        Panel("REINFORCE", "all tokens count the same,\nwherever they have gone", plain),
        Panel("PPO, GRPO", "good ones above 1.2, bad\nones below .8 learn no more",
              of_script(grpo, **SYMMETRIC)),
        Panel("DAPO's clip-higher", "good ones may grow\na little more, to 1.28",
              of_script(grpo, **HIGHER)),
        Panel("dual clip, delta 2", "bad ones beyond 2 are\nleft alone, too",
              of_script(grpo, delta=2.0, **HIGHER))]),
    "soft": ("A ratio without a dead zone", [
        Panel("CISPO", "the weight is capped,\nand never 0",
              of_script(grpo, loss_type="cispo", **HIGHER)),
        Panel("SAPO", "the weight levels off,\nand falls softly",
              of_script(grpo, loss_type="sapo")),
        Panel("DRO", "a spring: below 0 it pulls\nback, against A", of_zoo("dro")),
        Panel("KL-Cov, some tokens", "pulled back to ratio 1\nwith a constant force",
              of_zoo("kl_cov", kl_cov_ratio=1e-6, kl_cov_coef=0.5))]),
    "chance": ("The probability of a token, too", [
        Panel("DPPO, a rare token", "p_old is .01: it may grow\n16-fold, to .16",
              of_zoo("dppo_tv"), old=0.01),
        Panel("DPPO, an even one", "p_old is .5: it may move\nto .35 or to .65",
              of_zoo("dppo_tv"), old=0.5, note="p is 1\nat 2"),
        Panel("DPPO, a sure one", "p_old is .99: it may\nfall to .84",
              of_zoo("dppo_tv"), old=0.99, note="p is 1\nat 1.01"),
        Panel("Clip-Cov, some tokens", "a few of high covariance\nlearn nothing",
              of_zoo("clip_cov", clip_cov_ratio=1e-6, clip_cov_lb=0.15, clip_cov_ub=99.0))]),
    "outputs": ("The whole output", [
        Panel("GSPO", "one edge for all its tokens,\nat .97 or 1.04",
              of_script(gspo, **GSPO), all_move, note=ALL),
        Panel("GMPO", "one weight for all; each is\nclipped, at e^-.4 or e^.4",
              of_zoo("gmpo"), one_moves, note=ONE),
        Panel("VESPO", "outputs that moved far\nfade out, on both sides",
              of_zoo("vespo"), one_moves, note=ONE),
        Panel("DeepSeek's mask", "bad outputs that the policy\nleft are dropped whole",
              of_zoo("off_policy_mask", off_policy_mask_threshold=0.1), all_move, note=ALL)])}


# ---- 2. the picture --------------------------------------------------------------------------

WIDTH = 200                         # of a panel
HEIGHT = 206
PLOT_WIDTH = 168
PLOT_HEIGHT = 112
MOST = 2.5                          # of the weights, and of the ratios, that are shown
LEAST = -0.7
STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #59636e }
.title { font-weight: 600; font-size: 14px; fill: #1f2328 }
.family { font-weight: 600; font-size: 15px; fill: #1f2328 }
.card { fill: #ffffff }
.rule { stroke: #d1d9e0 }
.zero { stroke: #818b98 }
.good, .bad { fill: none; stroke-width: 2.5; stroke-linejoin: round }
.good { stroke: #0969da } .bad { stroke: #bc4c00; stroke-dasharray: 5 3 }
.tick { text-anchor: middle } .note { text-anchor: end }
@media (prefers-color-scheme: dark) {
  text { fill: #9198a1 }
  .title, .family { fill: #f0f6fc }
  .card { fill: #0d1117 }
  .rule { stroke: #3d444d } .zero { stroke: #9198a1 }
  .good { stroke: #4493f8 } .bad { stroke: #f0883e }
}"""


def across(ratio):
    return PLOT_WIDTH * ratio / MOST


def height(weight):
    return PLOT_HEIGHT * (MOST - weight) / (MOST - LEAST)


def simplify(points):
    """The points of a line without those that are less than .05 from it (Douglas and Peucker)."""
    x, y = points[0]
    end_x, end_y = points[-1]
    slope = (end_y - y) / max(end_x - x, 1e-9)
    off = []
    for between_x, between_y in points:
        expected = y + slope * (between_x - x)
        off.append(abs(between_y - expected))
    far = max(off)
    if far < 0.05:
        return [points[0], points[-1]]
    corner = off.index(far)
    before = simplify(points[:corner + 1])
    return before[:-1] + simplify(points[corner:])


def curve(points, style):
    """A line through those (ratio, weight) that the panel has room for. -> str"""
    inside = [(across(x), height(y)) for x, y in points if LEAST <= y <= MOST]
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in simplify(inside))
    return f'<polyline class="{style}" points="{places}"/>'


def say(x, y, style, text):
    return f'<text class="{style}" x="{x:g}" y="{y:g}">{html.escape(text)}</text>'


def draw_panel(panel, x, y):
    """-> str"""
    lines = [f'<g transform="translate({x},{y})">', say(0, 14, "title", panel.title)]
    for i, line in enumerate(panel.seen.split("\n")):
        lines.append(say(0, 32 + 16 * i, "seen", line))
    lines.append('<g transform="translate(14,60)">')
    for weight in (0, 1, 2):
        style = "zero" if weight == 0 else "rule"
        lines += [f'<path class="{style}" d="M0 {height(weight):.1f}h{PLOT_WIDTH}"/>',
                  say(-8, height(weight) + 4, "tick", str(weight))]
    lines.append(f'<path class="rule" d="M{across(1):.1f} 0v{PLOT_HEIGHT}"/>')
    lines += [say(across(ratio), PLOT_HEIGHT + 14, "tick", str(ratio)) for ratio in (0, 1, 2)]
    lines += [curve(panel.weights(1), "good"), curve(panel.weights(-1), "bad")]
    top = 105 if panel.note in (ONE, ALL) else 40
    for i, line in enumerate(panel.note.split("\n")):
        lines.append(say(PLOT_WIDTH, top + 16 * i, "note", line))
    return "\n".join([*lines, "</g>", "</g>"])


def draw(families, columns):
    """A picture of some of FAMILIES, with so many panels in a row. -> str"""
    rows = 4 // columns
    width = 12 + WIDTH * columns
    total = 52 + len(families) * (30 + HEIGHT * rows)
    parts = [f'<rect class="card" width="{width}" height="{total}" rx="8"/>',
             '<path class="good" d="M12 16h26"/>', say(44, 20, "key", "A > 0, a good token"),
             '<path class="bad" d="M196 16h26"/>', say(228, 20, "key", "A < 0, a bad one"),
             say(12, 40, "key", "right: its ratio pi / pi_old; up: how much it counts")]
    for i, (title, panels) in enumerate(families):
        top = 52 + i * (30 + HEIGHT * rows)
        parts += [f'<path class="rule" d="M12 {top}h{width - 24}"/>',
                  say(12, top + 20, "family", title)]
        for j, panel in enumerate(panels):
            row, column = divmod(j, columns)
            parts.append(draw_panel(panel, 12 + WIDTH * column, top + 30 + HEIGHT * row))
    title = "How much a token's gradient counts, once its ratio has moved"
    words = [f"{panel.title}: {panel.seen}".replace("\n", " ")
             for _, panels in families for panel in panels]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" width="{width}" '
        f'height="{total}" role="img" aria-labelledby="title desc">',
        f'<title id="title">{title}</title>', f'<desc id="desc">{". ".join(words)}.</desc>',
        f"<style>{STYLE}\n</style>", *parts, "</svg>\n"])


def pictures():
    """-> name of a file: its content"""
    found = {"zoo.svg": draw(FAMILIES.values(), columns=4)}
    return found | {f"zoo-{name}.svg": draw([family], columns=2)
                    for name, family in FAMILIES.items()}


# ---- 3. whom an advantage credits ------------------------------------------------------------

REWARDS = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 0]])      # a hard prompt, and an easy one
LENGTHS = torch.tensor([[4.0, 2, 1, 1], [4, 2, 4, 2]])
FORMAT = torch.tensor([[1.0, 0, 1, 0], [1, 1, 1, 1]])       # a second reward, for gdpo
GREEDY = torch.tensor([[0.0], [1.0]])


def credits():
    """What each advantage gives the outputs of two groups; for otb, their last tokens. -> table"""
    mask = (torch.arange(4) < LENGTHS.view(8, 1)).float()
    last = (LENGTHS.view(8, 1) - 1).long()
    found = {
        "group": grpo.advantages(REWARDS),
        "group, --scale_rewards none": grpo.advantages(REWARDS, "none"),
        "gdpo, with a reward for the format": zoo.gdpo([REWARDS, FORMAT]),
        "passk": zoo.passk(REWARDS),
        "rpp": zoo.rpp(REWARDS, mask),
        "rpp_baseline": zoo.rpp(REWARDS, mask, has_baseline=True),
        "opo": zoo.opo(REWARDS, LENGTHS),
        "otb, last token": zoo.otb(REWARDS, mask, mask).gather(1, last),
        "remax": REWARDS - GREEDY}
    rows = []
    for name, A in found.items():
        A = A.gather(1, last) if A.shape == mask.shape else A
        rows.append([name, *(f"{a + 0.0:+.2f}" for a in A.flatten().tolist())])
    return rows


def credit_table():
    outputs = [f"{int(r)}, {int(n)}" for r, n in zip(REWARDS.flatten(), LENGTHS.flatten())]
    return table(["r, length", *outputs], credits())


# ---- 4. what learns --------------------------------------------------------------------------

SEEDS = (0, 1, 2)
GOAL = 0.95


def commands():
    """What is trained: name -> script and flags."""
    found = {"grpo": ("grpo.py", []), "dapo": ("grpo.py", ["--loss_type", "dapo"]),
             "gspo": ("gspo.py", [])}
    for name in zoo.LOSS_TYPES:
        if name not in grpo.LOSS_TYPES:
            found[name] = ("examples/zoo.py", ["--loss_type", name])
    for name in zoo.ADVANTAGES[1:]:
        more = ["--reward", "accuracy+format"] if name == "gdpo" else []
        found[name] = ("examples/zoo.py", ["--loss_type", "grpo", "--advantage", name, *more])
    return found


def measure():
    """Train each with SEEDS, and record when it was right, for how long it ran, and its end."""
    found = {}
    for name, (script, flags) in commands().items():
        found[name] = []
        for seed in SEEDS:
            with tempfile.TemporaryDirectory() as folder:
                summary = run(script, folder, *flags, "--seed", seed, "--base_seed", seed)
                steps = [line["step"] for line in read_log(folder, "metrics", "step", "accuracy")
                         if line["accuracy"] >= GOAL]
            found[name].append({"reached": min(steps, default=None), "steps": summary["steps"],
                                "greedy": summary["trained"]["greedy"]})
        record("zoo", runs=found)


def learning_table(runs):
    rows = []
    for name, found in runs.items():
        script, flags = commands()[name]
        steps = [str(one["reached"] or "never") for one in found]
        greedy = statistics.fmean(one["greedy"] for one in found)
        command = " ".join([f"python {script}", *flags])
        rows.append([name, f"`{command}`", *steps, f"{greedy:.3f}"])
    return table(["", "command", *(f"seed {seed}" for seed in SEEDS), "greedy, mean"], rows)


def main():
    words = parser(__doc__)
    words.add_argument("--draw", action="store_true", help="train nothing")
    options = words.parse_args()
    for name, picture in pictures().items():
        common.write(DOCS / name, picture)
    put("credit", credit_table(), "zoo")
    if not options.draw:
        measure()
    runs = json.loads((DOCS / "zoo.json").read_text())["runs"]
    put("learning", f"{learning_table(runs)}\n{MACHINE}.\n", "zoo")


if __name__ == "__main__":
    start(main)
