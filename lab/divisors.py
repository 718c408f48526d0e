"""Divisors: what dividing by the standard deviation and by the length does

Claim. GRPO divides advantages by the std of the group's rewards, which weighs questions that are
too easy or too hard more (Dr. GRPO, 2503.20783, which does not divide). Without the small number
in the divisor, and with large groups, it climbs 2 arcsin sqrt(p) instead of p, the chance to be
right (2510.13651). MaxRL (2602.02710, --scale_rewards mean) climbs a series of log p. GRPO's 1/|o|
punishes each token of a long wrong output less than that of a short one, so that wrong outputs grow
longer and longer; a constant divisor stops this (Dr. GRPO). DAPO (2503.14476) averages over all
tokens alike, so that long outputs count in full.

Prediction. The mean gradient is w(p) times that of p, with w = E[A | right] - E[A | wrong].
Undivided, w is (G - 1) / G for all p; MaxRL's is (1 - (1 - p)^(G - 1)) / p. For large G, that of
GRPO is 1 / sqrt(p (1 - p)), which has no bound; but a group of G with one right output has an
advantage of (G - 1) / sqrt(G), and w is at most that. So with G = 8 the edges weigh only about a
fifth more than the middle, and the bias is one of large groups. On samples, dividing moves a share
of all |A| to prompts that are solved rarely or nearly always. Here a guess has five tokens and a
worked answer about 33, so that with 1/|o| a token of a guess weighs 6.6 times as much; with the
other two averages all tokens of a batch weigh the same. What is to be learned is to work answers
out: the digits of guesses, which are noise, then fill the gradient, and 1/|o| needs the most steps
to an accuracy of 0.9. Wrong outputs get longer with every average, because guesses die out. Among
outputs that think the length is a matter of the problem, so wrong ones do not get longer with 1/|o|
than without.

Method. Exactly: grpo.advantages of all numbers of right outputs in a group, and their binomial
chances. Measured: 64 outputs to each of 96 problems from one policy before training and after 8, 16
and 24 steps of grpo.py, so that all pass rates occur. Half of the outputs give the pass rate of a
problem, the others the advantages of groups of 8, so that the one does not know of the other. Then
grpo.py with --loss_type grpo, dr_grpo and dapo, else the same: one learning rate, and advantages
divided by the std. Lengths are those of all outputs of the last ten steps.

Outcome. The weights are as predicted, but for the edges with G = 8, which weigh a third more than
the middle, not a fifth; on samples this moves 2% of all |A|. That 1/|o| needs the most steps was
predicted wrongly: all three averages need nearly as many. Whether 1/|o| makes wrong outputs longer
is open: by 3 tokens in the mean, as more of them are thoughts, and these by 0.04.
"""
import dataclasses
import itertools
import math

import numpy
import torch

import grpo
from lab.draw import BLUE, GREEN, ORANGE, PINK, RED, SKY, curves
from lab.experiment import Experiment, numbers, steps_to_level
from lab.signal import BASE
from lab.training import load_base, training
from lab.verdict import OURS, Claim

DR_GRPO = "[Dr. GRPO](https://arxiv.org/abs/2503.20783)"
ARCSIN = "[2510.13651](https://arxiv.org/abs/2510.13651)"
MAXRL = "[MaxRL](https://arxiv.org/abs/2602.02710)"
SCALES = ("group", "none", "mean")              # GRPO, Dr. GRPO, MaxRL
SIZES = (4, 8, 16, 64)                          # G
GROUP = 8
RATES = torch.arange(1, 100).double() / 100     # chances to be right
LOW, HALF, HIGH = 4, 49, 94                     # the places of 5%, 50% and 95%
MOMENTS = (0, 8, 16, 24)                        # steps
PROBLEMS = 96
OUTPUTS = 64                                    # of each
AVERAGES = {"grpo": "1/length", "dr_grpo": "a constant", "dapo": "all tokens of a step"}
STEPS = 26
LATE = 10                                       # steps whose lengths are compared
LEVEL = 0.9                                     # of accuracy, to which steps are counted
KINDS = ("wrong outputs", "wrong thoughts")
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(8))


# ---- 1. the weight of a prompt ---------------------------------------------------------------

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


@EXPERIMENT.measure(["while it learns"], seeds=range(5))
def prompts(seed, case):
    """Of problems at MOMENTS, the pass rate from one half of the outputs, and with each scale the
    mean |A| of groups of the other half."""
    cfg, task, policy = load_base(grpo, f"{BASE} --seed {seed}")
    asking = dataclasses.replace(cfg, num_prompts=PROBLEMS, num_generations=OUTPUTS)
    steps = training(grpo, cfg, task, policy)
    found = {"rate": [], **{scale: [] for scale in SCALES}}
    for step in range(1 + max(MOMENTS)):
        if step in MOMENTS:
            name = ("moment", step)                 # other problems than those of any step
            is_correct = grpo.sample_batch(policy, task, asking, name).is_correct
            seen, others = is_correct.double().chunk(2, dim=1)                  # (P, n / 2)
            found["rate"] += seen.mean(dim=1).tolist()
            for scale in SCALES:
                sizes = grpo.advantages(others.reshape(-1, GROUP), scale).abs()
                found[scale] += sizes.view(len(seen), -1).mean(dim=1).tolist()
        next(steps)
    return found


def share(found, scale, is_inside):
    """The share that some prompts have of the sum of |A|. -> (S,)"""
    sizes = found[scale]
    return (sizes * is_inside).sum(axis=1) / sizes.sum(axis=1)


# ---- 2. the weight of a token ----------------------------------------------------------------

@EXPERIMENT.measure(AVERAGES)
def runs(seed, loss_type):
    """Train from the base: for each step accuracy, and of each kind of output how many there are,
    and their tokens."""
    cfg, task, policy = load_base(grpo, f"--loss_type {loss_type} --seed {seed}")
    found = {"accuracy": []}
    for batch, _ in itertools.islice(training(grpo, cfg, task, policy), STEPS):
        found["accuracy"].append(batch.is_correct.double().mean().item())
        lengths = batch.mask.sum(dim=1)
        is_wrong = ~batch.is_correct.flatten()
        thinks = torch.tensor(["<think>" in text for text in batch.texts])
        for kind, which in zip(KINDS, (is_wrong, is_wrong & thinks)):
            found.setdefault(f"number of {kind}", []).append(int(which.sum()))
            found.setdefault(kind, []).append(int(lengths[which].sum()))
    return found


def late_length(found, kind):
    """The mean length of the outputs of the last steps. -> (S,), 0 where there are none"""
    number = found[f"number of {kind}"][:, -LATE:].sum(axis=1)
    tokens = found[kind][:, -LATE:].sum(axis=1)
    return tokens / numpy.maximum(1, number)


# ---- 3. what was found -----------------------------------------------------------------------

def page(prompts, runs):
    weights = {(G, scale): weight(RATES, G, scale) for G in SIZES for scale in SCALES}
    relative = {way: w / w[HALF] for way, w in weights.items()}
    edges = {G: relative[G, "group"][[LOW, HIGH]].min().item() for G in SIZES}
    biased = Claim(
        "divided by the std, prompts solved 5% and 95% of the time weigh more than those of 50%, "
        "with any G", DR_GRPO, list(edges.values()), at_least=1, times=True, exact=True,
        shown="Divided by the std, prompts solved 5% or 95% of the time weigh more than those of "
        f"50%: {edges[64]:.1f} times as much with groups of 64, {edges[8]:.1f} times with 8")
    yield biased
    slope = (1 - (1 - RATES) ** (GROUP - 1)) / RATES
    yield Claim("MaxRL's weight is the slope of a series of log p: how far off", MAXRL,
                weights[GROUP, "mean"] - slope, at_least=-1e-9, at_most=1e-9, exact=True)
    for G in (GROUP, 64):
        ratios = weights[G, "group"] * (RATES * (1 - RATES)).sqrt()
        yield Claim(f"G = {G}: GRPO weighs by the slope of 2 arcsin sqrt(p), p 5% to 95%", ARCSIN,
                    ratios[LOW:HIGH + 1], at_least=0.9, at_most=1.1, times=True, exact=True)
    [points] = prompts.values()
    is_outer = abs(points["rate"] - 0.5) > 0.4
    outer = {scale: share(points, scale, is_outer) for scale in SCALES}
    yield Claim("on samples, dividing by std moves a share of absolute advantage to prompts solved "
                "under 10% or over 90%", DR_GRPO, outer["group"] - outer["none"], at_least=0.05)
    is_rare = points["rate"] < 0.3
    rare = {scale: share(points, scale, is_rare) for scale in SCALES}
    yield Claim("on samples, MaxRL moves a share of it to prompts solved under 30%, compared "
                "with GRPO", MAXRL, rare["mean"] - rare["group"], at_least=0.05)
    lengths = {name: {kind: late_length(found, kind) for kind in KINDS}
               for name, found in runs.items()}
    for kind in KINDS:
        yield Claim(f"1/length ends with longer {kind} than a constant divisor", DR_GRPO,
                    lengths["grpo"][kind] - lengths["dr_grpo"][kind], at_least=1, unit="tokens")
    steps = {name: numpy.array([steps_to_level(row, LEVEL) for row in found["accuracy"]])
             for name, found in runs.items()}
    for name in ("dr_grpo", "dapo"):
        yield Claim(f"1/length needs more steps to {LEVEL:.0%} right than {AVERAGES[name]}", OURS,
                    steps["grpo"] / steps[name], at_least=1.1, times=True)

    lines = {f"GRPO, G = {G}": relative[G, "group"][None] for G in SIZES}
    lines["Dr. GRPO, any G"] = relative[GROUP, "none"][None]
    lines[f"MaxRL, G = {GROUP}"] = relative[GROUP, "mean"][None]
    yield curves(lines, biased.finding, x=RATES, xlabel="p, chance to be right", ylim=(0, 3.6),
                 ylabel="weight of a prompt, 1 at p = 0.5", height=3.2,
                 given=dict(zip(lines, (SKY, BLUE, ORANGE, RED, GREEN, PINK))))
    thoughts = [lengths[name]["wrong thoughts"].mean() for name in ("grpo", "dr_grpo")]
    yield curves({AVERAGES[name]: found["accuracy"] for name, found in runs.items()},
                 f"{LEVEL:.0%} right takes {steps['grpo'].mean():.0f} steps if the loss is divided "
                 f"by the length, {steps['dr_grpo'].mean():.0f} if by a constant; wrong thoughts "
                 f"have {thoughts[0]:.0f} and {thoughts[1]:.0f} tokens", ylim=(0.2, 1),
                 given=dict(zip(AVERAGES.values(), (BLUE, GREEN, ORANGE))), ylabel="accuracy")
    rows = {AVERAGES[name]: {"steps": steps[name], **lengths[name]} for name in runs}
    heads = {"steps": f"steps to {LEVEL:.0%} right"} | {kind: f"tokens, {kind}" for kind in KINDS}
    yield numbers(rows, heads, ".1f", by="loss averaged by")
