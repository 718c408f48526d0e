"""Divisors: what dividing by the standard deviation does to the weight of a prompt

Claim. GRPO divides advantages by the std of the group's rewards, which weighs questions that are
too easy or too hard more (Dr. GRPO, 2503.20783, which does not divide). Without the small number
in the divisor, and with large groups, it climbs 2 arcsin sqrt(p) instead of p, the chance to be
right (2510.13651). MaxRL (2602.02710, --scale_rewards mean) climbs a series of log p.

Prediction. The mean gradient is w(p) times that of p, with w = E[A | right] - E[A | wrong].
Undivided, w is (G - 1) / G for all p; MaxRL's is (1 - (1 - p)^(G - 1)) / p. For large G, that of
GRPO is 1 / sqrt(p (1 - p)), which has no bound; but a group of G with one right output has an
advantage of (G - 1) / sqrt(G), and w is at most that. So with G = 8 the edges weigh only about a
fifth more than the middle, and the bias is one of large groups.

Method. Exactly: grpo.advantages of all numbers of right outputs in a group, and their binomial
chances. (What is left of it on samples, and the weights of tokens, were here at commit 437be3d: on
samples of a policy that learns, dividing moved 2% of all |A| to prompts solved under 10% or over
90%; the effect has the paper's sign, and is smaller than the 5% that we had asked for.)

Outcome. As predicted, but for the edges with G = 8, which weigh a third more than the middle.
"""
import math

import torch

import grpo
from lab.draw import BLUE, GREEN, ORANGE, PINK, RED, SKY, curves
from lab.experiment import Experiment, numbers
from lab.verdict import OURS, Claim

DR_GRPO = "[Dr. GRPO](https://arxiv.org/abs/2503.20783)"
ARCSIN = "[2510.13651](https://arxiv.org/abs/2510.13651)"
MAXRL = "[MaxRL](https://arxiv.org/abs/2602.02710)"
SCALES = {"GRPO": "group", "Dr. GRPO": "none", "MaxRL": "mean"}
SIZES = (4, 8, 16, 64)                          # G
GROUP = 8
RATES = torch.arange(1, 100).double() / 100     # chances to be right
LOW, HALF, HIGH = 4, 49, 94                     # the places of 5%, 50% and 95%
EXPERIMENT = Experiment(__file__, __doc__, seeds=[0], one_base=True)


def weight(p, G, scale):
    """w: the mean gradient of a prompt that is solved with chance p is w times that of p.
    (N,) -> (N,)"""
    rewards = torch.ones(G + 1, G).tril(-1).double()        # of groups with 0 .. G right outputs
    A = grpo.advantages(rewards, scale)                                         # (G + 1, G)
    if_right = A[1:, 0]                                     # where 0 .. G - 1 others are right
    if_wrong = A[:-1, -1]                                                       # (G,)
    k = torch.arange(G)
    ways = torch.tensor([math.comb(G - 1, others) for others in range(G)])
    p = p[:, None]
    chances = ways * p ** k * (1 - p) ** (G - 1 - k)                            # (N, G)
    return (chances * (if_right - if_wrong)).sum(dim=1)


@EXPERIMENT.measure(SCALES)
def weights(seed, method):
    """w for all of RATES, for each size of a group."""
    return {str(G): weight(RATES, G, SCALES[method]).tolist() for G in SIZES}


def page(weights):
    w = {(method, int(G)): rows[0] for method, found in weights.items()
         for G, rows in found.items()}
    relative = {way: values / values[HALF] for way, values in w.items()}
    edges = {G: relative["GRPO", G][[LOW, HIGH]].min() for G in SIZES}
    biased = Claim(
        "divided by the std, prompts solved 5% and 95% of the time weigh more than those of 50%, "
        "with 4, 8, 16 and 64 outputs", DR_GRPO, list(edges.values()), at_least=1, times=True,
        exact=True, shown="Divided by the std, prompts solved 5% or 95% of the time weigh more "
        f"than those of 50%: {edges[64]:.1f} times as much with groups of 64, {edges[8]:.1f} times "
        "with 8")
    yield biased
    p = RATES.numpy()
    slope = (1 - (1 - p) ** (GROUP - 1)) / p
    yield Claim("MaxRL's weight is the slope of a series of log p: how far off", MAXRL,
                w["MaxRL", GROUP] - slope, at_least=-1e-5, at_most=1e-5, exact=True)
    for G, source in ((GROUP, OURS), (64, ARCSIN)):
        ratios = w["GRPO", G] * (p * (1 - p)) ** 0.5
        yield Claim(f"G = {G}: GRPO weighs by the slope of 2 arcsin sqrt(p), p 5% to 95%", source,
                    ratios[LOW:HIGH + 1], at_least=0.9, at_most=1.1, times=True, exact=True)
    lines = {f"GRPO, G = {G}": relative["GRPO", G][None] for G in SIZES}
    lines["Dr. GRPO, any G"] = relative["Dr. GRPO", GROUP][None]
    lines[f"MaxRL, G = {GROUP}"] = relative["MaxRL", GROUP][None]
    yield curves(lines, biased.finding, x=RATES, xlabel="p, chance to be right", ylim=(0, 3.6),
                 ylabel="weight of a prompt, 1 at p = 0.5", height=3.2,
                 given=dict(zip(lines, (SKY, BLUE, ORANGE, RED, GREEN, PINK))))
    yield numbers({name: {"5": rows[0, LOW], "50": rows[0, HALF], "95": rows[0, HIGH]}
                   for name, rows in lines.items()},
                  {"5": "p = 5%", "50": "50%", "95": "95%"}, ".2f", by="weight beside p = 50%")
