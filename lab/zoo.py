"""Draw how each loss treats a token whose ratio has moved, as its own function computes it:
python -m lab.zoo (make zoo), for docs/methods.md.

A panel of docs/zoo.svg shows the gradient of a loss in log pi of one token, for all ratios up to
2.5, divided by the gradient of -A log pi: 1 is REINFORCE, and at 0 the token has no gradient.
"""
import math
from typing import NamedTuple

import torch

from examples import zoo
from lab.docs import DOCS
from report import chart, parser, start

N = 8                                       # tokens of a whole output
RATIOS = torch.arange(0.005, 2.5, 0.01)     # between the numbers at which losses have edges


class Panel(NamedTuple):
    """A caption, the flags of a loss, pi_old of the tokens, and how many tokens the output has."""
    caption: str
    flags: dict
    old: float = 0.3
    length: int = 1

    def weight(self, A, ratio):
        """The gradient in log pi of the first token, which alone has moved, divided by that of
        -A log pi. A second output has A = 0, so that the first one's covariance is the highest."""
        mask = torch.ones(2, N)
        mask[0, self.length:] = 0
        old_logps = torch.full((2, N), self.old).log()
        old_logps[1] = math.log(1e-4 if A > 0 else 0.999)
        logps = old_logps.clone()
        logps[0, 0] += math.log(ratio)
        logps.requires_grad_()
        A_of_rows = torch.tensor([[A], [0.0]])
        zoo.policy_loss(logps, old_logps, A_of_rows, mask, **self.flags).sum().backward()
        return -logps.grad[0, 0].item() / A


PANELS = {
    "PPO, GRPO": Panel(
        "no gradient: good above\n1.2, bad below 0.8", {"loss_type": "grpo", "epsilon_high": 0.2}),
    "CISPO": Panel(
        "the weight is capped,\nand never 0", {"loss_type": "cispo", "epsilon_high": 0.28}),
    "SAPO": Panel("the weight levels off,\nand falls softly", {"loss_type": "sapo"}),
    "DRO": Panel("a penalty on log rho:\nbelow 0, it pulls back", {"loss_type": "dro"}),
    "KL-Cov, some tokens": Panel(
        "pulled back to ratio 1\nwith a constant force",
        {"loss_type": "kl_cov", "kl_cov_ratio": 1e-6, "kl_cov_coef": 0.5}),
    "DPPO, a rare token": Panel(
        "p_old is 0.01: it may\ngrow 16-fold, to 0.16", {"loss_type": "dppo_tv"}, old=0.01),
    "DPPO, a likely token": Panel(
        "p_old is 0.5: it may\nmove to 0.35 or to 0.65", {"loss_type": "dppo_tv"}, old=0.5),
    "VESPO, 1 of 8 tokens": Panel(
        "outputs that moved far\nfade out, on both sides", {"loss_type": "vespo"}, length=N)}


def draw(path):
    """Draw all panels."""
    with chart.figure(path, len(PANELS) // 2, 2, height=860) as axes:
        for axis, (title, panel) in zip(axes.flat, PANELS.items()):
            ratios = RATIOS[panel.old * RATIOS <= 1].tolist()
            for A, line, label in ((1.0, "-", "A > 0, a good token"),
                                   (-1.0, "--", "A < 0, a bad token")):
                weights = [panel.weight(A, ratio) for ratio in ratios]
                axis.plot(ratios, weights, line, linewidth=2, label=label)
            axis.set(xlim=(0, 2.5), ylim=(-0.7, 2.5), xticks=(0, 1, 2), yticks=(0, 1, 2))
            axis.set_title(title, loc="left", fontsize=10.5, fontweight="bold", pad=29)
            axis.text(0, 1.03, panel.caption, transform=axis.transAxes)
        figure = axes[0, 0].figure
        figure.legend(*axis.get_legend_handles_labels(), loc="outside upper left", ncols=2)
        figure.supxlabel("ratio pi / pi_old", fontsize=10.5)
        figure.supylabel("how much it counts", fontsize=10.5)


def main():
    parser(__doc__).parse_args()
    draw(DOCS / "zoo.svg")


if __name__ == "__main__":
    start(main)
