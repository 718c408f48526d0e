"""Draw how each loss treats a token whose ratio has moved, and tabulate which outputs each
advantage credits: python -m lab.zoo (make zoo), for docs/zoo.md. The functions themselves compute
both.

A panel shows the gradient of a loss in log pi of one token, for all ratios up to 2.5, divided by
that of -A log pi: 1 is REINFORCE, and at 0 the token has no gradient. docs/zoo.svg shows all
families of panels, docs/zoo-NAME.svg one. Then each loss and advantage trains on arithmetic with
three seeds, each with its own base. --draw leaves the training out, and docs/zoo.json unchanged.
"""
import functools
import importlib
import json
import math
import statistics
import tempfile
from typing import NamedTuple

import torch

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
    """A title, two lines below it, a loss, how its tokens move, pi_old of these tokens, a note."""
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


# ---- 2. the pictures -------------------------------------------------------------------------

STYLE = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "zoo", "axes.grid": True,
         "grid.color": "#e6e8eb", "axes.spines.top": False, "axes.spines.right": False,
         "lines.linewidth": 2, "path.simplify_threshold": 0.5}


def draw_panel(axis, panel):
    for A, style, label in ((1, "C0-", "A > 0, a good token"), (-1, "C1--", "A < 0, a bad one")):
        axis.plot(*zip(*panel.weights(A)), style, label=label)
    axis.set(xlim=(0, 2.5), ylim=(-0.7, 2.5), xticks=(0, 1, 2), yticks=(0, 1, 2))
    axis.set_title(panel.title, loc="left", fontweight="bold", pad=26)
    axis.text(0, 1.03, panel.seen, transform=axis.transAxes, fontsize=8, va="bottom")
    axis.text(0.97, 0.05, panel.note, transform=axis.transAxes, fontsize=8, ha="right")


def draw(path, families):
    """Write a picture with a row of panels for each family."""
    import matplotlib
    matplotlib.use("svg")
    from matplotlib import pyplot
    with pyplot.rc_context(STYLE):
        figure = pyplot.figure(figsize=(9.2, 2.5 * len(families)), layout="constrained")
        rows = figure.subfigures(len(families), squeeze=False)[:, 0]
        for row, (title, panels) in zip(rows, families):
            row.suptitle(title, x=0.01, ha="left", fontweight="bold")
            row.supxlabel("ratio pi / pi_old", fontsize=8)
            axes = row.subplots(1, len(panels))
            for axis, panel in zip(axes, panels):
                draw_panel(axis, panel)
            axes[0].set_ylabel("how much it counts")
            axes[0].legend(fontsize=7, frameon=False)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


# ---- 3. which outputs an advantage credits ---------------------------------------------------

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
    draw(DOCS / "zoo.svg", FAMILIES.values())
    for name, family in FAMILIES.items():
        draw(DOCS / f"zoo-{name}.svg", [family])
    put("credit", credit_table(), "zoo")
    if not options.draw:
        measure()
    runs = json.loads((DOCS / "zoo.json").read_text())["runs"]
    put("learning", f"{learning_table(runs)}\n{MACHINE}.\n", "zoo")


if __name__ == "__main__":
    start(main)
