"""Weight of a prompt: what dividing by the standard deviation does.

Claim. GRPO divides advantages by the std of the group's rewards, which weighs questions that are
too easy or too hard more (Dr. GRPO, 2503.20783, which does not divide). Without the small number
in the divisor, and with large groups, it climbs 2 arcsin sqrt(p) instead of p, the chance to be
right (2510.13651). MaxRL (2602.02710, --scale_rewards mean) climbs a series of log p.

Prediction. The mean gradient is w(p) times that of p, with w = E[A | right] - E[A | wrong].
Undivided, w is (G - 1) / G for all p; MaxRL's is (1 - (1 - p)^(G - 1)) / p. For large G, that of
GRPO is 1 / sqrt(p (1 - p)), which has no bound; but a group of G with one right output has an
advantage of (G - 1) / sqrt(G), and w is at most that. So with G = 8 the edges weigh only about a
fifth more than the middle, and the bias is one of large groups. Half of |A| falls on right outputs
and half on wrong ones; its mean, 2 p (1 - p) w, is highest at p = 1/2 with and without std. On
samples, dividing moves a share of all |A| to prompts that are solved rarely or nearly always.

Method. Exactly: grpo.advantages of all numbers of right outputs in a group, and their binomial
chances. Measured: 64 outputs to each of 96 problems from one policy before training and after 8, 16
and 24 steps of grpo.py, so that all pass rates occur. Half of the outputs give the pass rate of a
problem, the others the advantages of groups of 8, so that the one does not know of the other.
"""
import dataclasses
import functools
import math
import statistics

import torch

import grpo
from lab.entry import (
    CONTRADICTED,
    NOT_SHOWN,
    SHOWN,
    Claim,
    compared,
    load_base,
    mean_and_spread,
)
from lab.signal import FLAGS
from lab.training import training

SEEDS = [0, 1, 2]
SCALES = {"group": "GRPO, by the std", "none": "Dr. GRPO, undivided", "mean": "MaxRL, by the mean"}
SIZES = (4, 8, 16, 64)                          # G
GROUP = 8
RATES = [i / 100 for i in range(1, 100)]
EDGE = 0.05                                     # the pass rates of the claims: 5%, 50%, 95%
MOMENTS = (0, 8, 16, 24)                        # steps
PROBLEMS, OUTPUTS = 96, 64
BINS = ((0, 0.1), (0.1, 0.3), (0.3, 0.7), (0.7, 0.9), (0.9, 1))     # of pass rates
TOLERANCE = 0.1                                 # of a weight, relative


# ---- 1. exactly ------------------------------------------------------------------------------

@functools.cache
def every_group(G, scale):
    """The advantages of a right and of a wrong output, for 0 .. G right ones in a group; 0 where
    there is none. -> (G + 1,) each"""
    place = torch.arange(G)
    number = torch.arange(G + 1)[:, None]
    rewards = (place < number).double()                                         # (G + 1, G)
    A = grpo.advantages(rewards, scale)
    return A[:, 0] * rewards[:, 0], A[:, -1] * (1 - rewards[:, -1])


def binomial(n, p):
    """The chances of 0 .. n right outputs. -> (n + 1,)"""
    chances = [math.comb(n, k) * p ** k * (1 - p) ** (n - k) for k in range(n + 1)]
    return torch.tensor(chances, dtype=torch.float64)


def weight(p, G, scale):
    """w(p): the mean gradient of a prompt is w times that of p. -> float"""
    of_right, of_wrong = every_group(G, scale)
    others = binomial(G - 1, p)                     # how many of the G - 1 others are right
    if_right = (others * of_right[1:]).sum()        # this one is right, too
    if_wrong = (others * of_wrong[:-1]).sum()
    return (if_right - if_wrong).item()


def climbs_log(p, G):
    """The derivative of the series of log p in 1 - p, up to the power G - 1. -> float"""
    return (1 - (1 - p) ** (G - 1)) / p


def climbs_arcsin(p):
    """The derivative of 2 arcsin sqrt(p). -> float"""
    return 1 / math.sqrt(p * (1 - p))


def mean_size(p, G, scale):
    """The mean of |A|. -> float"""
    return 2 * p * (1 - p) * weight(p, G, scale)


def relative(scale, G, p):
    """What a prompt weighs beside one that is solved half of the time. -> float"""
    return weight(p, G, scale) / weight(0.5, G, scale)


# ---- 2. on samples ---------------------------------------------------------------------------

def moments(seed):
    """Outputs of the policy, before training and in between. Yields is_correct (P, n)"""
    cfg, task, policy = load_base(grpo, *FLAGS, "--seed", seed)
    asking = dataclasses.replace(cfg, num_prompts=PROBLEMS, num_generations=OUTPUTS)
    steps = training(grpo, cfg, task, policy)
    for step in range(1 + max(MOMENTS)):
        if step in MOMENTS:
            name = ("moment", step)                 # other problems than those of any step
            yield grpo.sample_batch(policy, task, asking, name).is_correct
        next(steps)


def prompts(is_correct):
    """The pass rate of each problem from one half of its outputs, and with each scale the mean |A|
    of groups of the other half. (P, n) -> list of dicts"""
    seen, others = is_correct.chunk(2, dim=1)                                   # (P, n / 2)
    groups = others.double().reshape(-1, GROUP)
    points = {"rate": seen.double().mean(dim=1)}
    for scale in SCALES:
        sizes = grpo.advantages(groups, scale).abs()
        points[scale] = sizes.view(len(seen), -1).mean(dim=1)                   # (P,)
    return [{name: round(values[i].item(), 5) for name, values in points.items()}
            for i in range(len(seen))]


def measure(seeds):
    torch.set_num_threads(1)
    found = {}
    for seed in seeds:
        points = [prompts(is_correct) for is_correct in moments(seed)]
        found[str(seed)] = sum(points, [])
    return {"prompts": found}


# ---- 3. what was found -----------------------------------------------------------------------

def inside(points, low, high):
    """The prompts with a pass rate from low to high; 0 and 1 belong to the outer bins. -> list"""
    return [point for point in points
            if low <= point["rate"] < high or point["rate"] == high == 1]


def share(points, scale, bins):
    """The share of the sum of |A| that falls on prompts in some bins of the pass rate. -> float"""
    chosen = [point for low, high in bins for point in inside(points, low, high)]
    return sum(point[scale] for point in chosen) / sum(point[scale] for point in points)


def differences(found, one, other, bins):
    """How much more of |A| one scale than another has in some bins, seed by seed. -> list"""
    return [share(points, one, bins) - share(points, other, bins)
            for points in found["prompts"].values()]


def tables(found):
    heads = ["weight of a prompt, 1 at p = 0.5", *(f"p = {p}" for p in (0.01, 0.05, 0.95, 0.99))]
    rows = []
    for scale, name in SCALES.items():
        for G in SIZES if scale != "none" else [GROUP]:
            weights = [relative(scale, G, p) for p in (0.01, 0.05, 0.95, 0.99)]
            rows.append([f"{name}, G = {G}", *(f"{weight:.2f}" for weight in weights)])
    heads_of_shares = [f"share of the sizes of A, G = {GROUP}"]
    heads_of_shares += [f"p from {low} to {high}" for low, high in BINS]
    shares = []
    for scale, name in SCALES.items():
        row = [name]
        for pair in BINS:
            values = [share(points, scale, [pair]) for points in found["prompts"].values()]
            row.append(mean_and_spread(values))
        shares.append(row)
    return [(heads, rows), (heads_of_shares, shares)]


def claims(found):
    edges = {G: min(relative("group", G, EDGE), relative("group", G, 1 - EDGE)) for G in SIZES}
    flat = [weight(p, GROUP, "none") for p in RATES]
    from_log = max(abs(weight(p, GROUP, "mean") / climbs_log(p, GROUP) - 1) for p in RATES)
    from_arcsin = {}
    for G in (GROUP, 64):
        ratios = [weight(p, G, "group") / climbs_arcsin(p) for p in RATES if EDGE <= p <= 1 - EDGE]
        from_arcsin[G] = max(abs(ratio - 1) for ratio in ratios)
    seen = [f"G = {G}: {edge:.2f} times" for G, edge in edges.items()]
    listed = [
        Claim("divided by the std, prompts solved 5% and 95% of the time weigh more than those of "
              "50%, with any G", ", ".join(seen),
              SHOWN if min(edges.values()) > 1 else CONTRADICTED),
        Claim("undivided, all prompts weigh the same", f"{min(flat):.4f} - {max(flat):.4f}",
              SHOWN if max(flat) - min(flat) < 1e-9 else CONTRADICTED),
        Claim("divided by the mean, w is the derivative of a series of log p",
              f"largest error {from_log:.0e}", SHOWN if from_log < 1e-9 else CONTRADICTED)]
    for G, error in from_arcsin.items():
        listed.append(
            Claim(f"with G = {G}, GRPO climbs 2 arcsin sqrt(p) (w to {TOLERANCE:.0%}, p from 5% to "
                  "95%)", f"largest error {error:.0%}", SHOWN if error < TOLERANCE else NOT_SHOWN))
    outer = differences(found, "group", "none", [BINS[0], BINS[-1]])
    rare = differences(found, "mean", "group", BINS[:2])
    return listed + [
        compared("on samples, dividing by the std moves a share of the sizes of A to prompts "
                 "solved under 10% or over 90%", outer),
        compared("on samples, MaxRL moves a share of them to prompts solved under 30%, compared "
                 "with GRPO", rare)]


def note(found):
    return (f"Different problems: {PROBLEMS} at each of {len(MOMENTS)} moments and for each seed, "
            f"{OUTPUTS} outputs to each")


def panels(found):
    def by_size(axis):
        for G in SIZES:
            axis.plot(RATES, [relative("group", G, p) for p in RATES], label=f"GRPO, G = {G}")
        axis.axhline(1, color="black", linestyle=":", label="Dr. GRPO, any G")
        axis.set(title="divided by the std", xlabel="p, chance to be right",
                 ylabel="weight, 1 at p = 0.5", ylim=(0, 4.5))
        axis.legend(frameon=False, fontsize=8)

    def by_scale(axis):
        for scale, name in SCALES.items():
            axis.plot(RATES, [weight(p, GROUP, scale) for p in RATES], label=name)
        axis.set(title=f"weight of a prompt, G = {GROUP}", xlabel="p, chance to be right",
                 ylabel="w(p)", ylim=(0, 7.5))
        axis.legend(frameon=False, fontsize=8)

    def on_samples(axis):
        points = sum(found["prompts"].values(), [])
        middles = [inside(points, i / 10, (i + 1) / 10) for i in range(10)]
        for number, scale in enumerate(SCALES):
            axis.plot(RATES, [mean_size(p, GROUP, scale) for p in RATES], color=f"C{number}")
            for members in (group for group in middles if group):
                rate = statistics.mean(point["rate"] for point in members)
                size = statistics.mean(point[scale] for point in members)
                axis.plot(rate, size, "o", color=f"C{number}")
        axis.set(title="line exact, points measured", xlabel="pass rate", ylabel="mean of |A|",
                 ylim=(0, None))
    return [by_size, by_scale, on_samples]
