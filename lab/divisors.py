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
fifth more than the middle, and the bias is one of large groups. Half of |A| falls on right outputs
and half on wrong ones; its mean, 2 p (1 - p) w, is highest at p = 1/2 with and without std. On
samples, dividing moves a share of all |A| to prompts that are solved rarely or nearly always.
Here a guess has five tokens and a worked answer about 33, so that with 1/|o| a token of
a guess weighs 6.6 times as much; with the other two averages all tokens of a batch weigh the
same. What is to be learned is to work answers out: the digits of guesses, which are noise, then
fill the gradient, less of it points to thinking, and 1/|o| needs the most steps to an accuracy of
0.9. Wrong outputs get longer with every average, because guesses die out. Among outputs that think
the length is a matter of the problem, so wrong ones do not get longer with 1/|o| than without.

Method. Exactly: grpo.advantages of all numbers of right outputs in a group, and their binomial
chances; the weights of tokens are the gradient of grpo.aggregate. Measured: 64 outputs to each of
96 problems from one policy before training and after 8, 16 and 24 steps of grpo.py, so that all
pass rates occur. Half of the outputs give the pass rate of a problem, the others the advantages of
groups of 8, so that the one does not know of the other. Then grpo.py with --loss_type grpo, dr_grpo
and dapo, else the same: advantages are divided by the std, the learning rate is one. Lengths are
those of all outputs of the last ten steps. Before training, on batches of the base, the cosine
between the descent of the loss and the gradient of the mean log-probability that an output begins
to think says how much of a step is about thinking.
"""
import dataclasses
import functools
import itertools
import math

import numpy
import torch

import grpo
from lab.draw import BLUE, GREEN, ORANGE, RED, SKY, curves
from lab.experiment import Experiment, numbers, steps_to_level
from lab.signal import BASE
from lab.training import clear_gradient, flat_gradient, load_base, training
from lab.verdict import OURS, Claim

DR_GRPO = "[Dr. GRPO](https://arxiv.org/abs/2503.20783)"
ARCSIN = "[2510.13651](https://arxiv.org/abs/2510.13651)"
MAXRL = "[MaxRL](https://arxiv.org/abs/2602.02710)"
SCALES = {"group": "GRPO, by the std", "none": "Dr. GRPO, undivided", "mean": "MaxRL, by the mean"}
SIZES = (4, 8, 16, 64)                          # G
GROUP = 8
RATES = [i / 100 for i in range(1, 100)]
EDGES = (0.05, 0.95)                            # the pass rates of the claims, beside 0.5
MOMENTS = (0, 8, 16, 24)                        # steps
PROBLEMS, OUTPUTS = 96, 64
BINS = ((0, 0.1), (0.1, 0.3), (0.3, 0.7), (0.7, 0.9), (0.9, 1.01))      # of pass rates
AVERAGES = {"grpo": "1/length", "dr_grpo": "constant", "dapo": "all tokens of a step"}
STEPS = 26
WINDOW = 10                                     # steps whose lengths are compared, at both ends
LEVEL = 0.9                                     # of accuracy, to which steps are counted
GUESS, THOUGHT = 5, 33                          # tokens
KINDS = ("right outputs", "wrong outputs", "wrong thoughts")
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(8))


# ---- 1. the weight of a prompt ---------------------------------------------------------------

@functools.cache
def every_group(G, scale):
    """The advantages of a right and of a wrong output, for 0 .. G right ones in a group; 0 where
    there is none. -> (G + 1,) each"""
    place = torch.arange(G)
    number = torch.arange(G + 1)[:, None]
    rewards = (place < number).double()                                         # (G + 1, G)
    A = grpo.advantages(rewards, scale)
    return A[:, 0] * rewards[:, 0], A[:, -1] * (1 - rewards[:, -1])


def weight(p, G, scale):
    """w(p): the mean gradient of a prompt is w times that of p. -> float"""
    of_right, of_wrong = every_group(G, scale)
    others = torch.tensor([math.comb(G - 1, k) * p ** k * (1 - p) ** (G - 1 - k)
                           for k in range(G)], dtype=torch.float64)     # how many others are right
    if_right = (others * of_right[1:]).sum()        # this one is right, too
    if_wrong = (others * of_wrong[:-1]).sum()
    return (if_right - if_wrong).item()


def relative(scale, G, p):
    """What a prompt weighs beside one that is solved half of the time. -> float"""
    return weight(p, G, scale) / weight(0.5, G, scale)


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


def share(found, scale, low, high):
    """The share of the sum of |A| on prompts with a pass rate from low to below high. -> (S,)"""
    is_inside = (found["rate"] >= low) & (found["rate"] < high)
    return (found[scale] * is_inside).sum(axis=1) / found[scale].sum(axis=1)


# ---- 2. the weight of a token ----------------------------------------------------------------

def guess_beside_thought(loss_type):
    """How many times the weight of a token of a thought one of a guess has. -> float"""
    _, average = grpo.LOSS_TYPES[loss_type]
    lengths = torch.tensor([[GUESS], [THOUGHT]])
    mask = (torch.arange(48) < lengths).double()                                # (2, T)
    token_loss = torch.zeros_like(mask, requires_grad=True)
    grpo.aggregate(token_loss, mask, average).backward()
    guess, thought = token_loss.grad[:, 0].tolist()
    return guess / thought


def pull_to_think(policy, batch, cfg):
    """The cosine between the descent of the loss and the gradient of log pi(<think>). -> float"""
    A = grpo.advantages(batch.rewards, cfg.scale_rewards).view(-1, 1)           # (B, 1)
    clear_gradient(policy)
    grpo.backward(policy, batch, None, A, torch.arange(len(A)), cfg)
    descent = -flat_gradient(policy)
    first = torch.full((len(A), 1), grpo.TOKENIZER.encode_single_token("<think>"))
    logps, _ = grpo.score(policy, batch.prompts, first)                         # (B, 1)
    logps.mean().backward()
    return torch.cosine_similarity(descent, flat_gradient(policy), dim=0).item()


@EXPERIMENT.measure(AVERAGES)
def runs(seed, loss_type):
    """Train from the base: its pull; for each step accuracy, and of each kind of output how many
    there are, and their tokens."""
    cfg, task, policy = load_base(grpo, f"--loss_type {loss_type} --seed {seed}")
    found = {"accuracy": []}
    pull = pull_to_think(policy, grpo.sample_batch(policy, task, cfg, 0), cfg)
    for batch, _ in itertools.islice(training(grpo, cfg, task, policy), STEPS):
        found["accuracy"].append(batch.is_correct.double().mean().item())
        lengths = batch.mask.sum(dim=1)
        is_right = batch.is_correct.flatten()
        thinks = torch.tensor(["<think>" in text for text in batch.texts])
        for kind, which in zip(KINDS, (is_right, ~is_right, ~is_right & thinks)):
            found.setdefault(f"number of {kind}", []).append(int(which.sum()))
            found.setdefault(kind, []).append(int(lengths[which].sum()))
    return found | {"pull": pull}


def mean_length(found, kind, steps):
    """The mean length of the outputs of some steps. -> (S,), 0 where there are none"""
    number = found[f"number of {kind}"][:, steps].sum(axis=1)
    return found[kind][:, steps].sum(axis=1) / numpy.maximum(1, number)


# ---- 3. what was found -----------------------------------------------------------------------

def page(prompts, runs):
    [points] = prompts.values()
    edges = {G: min(relative("group", G, p) for p in EDGES) for G in SIZES}
    biased = Claim(
        "divided by the std, prompts solved 5% and 95% of the time weigh more than those of 50%, "
        "with any G", DR_GRPO, list(edges.values()), at_least=1, times=True, exact=True,
        shown="Dividing by the std favours prompts that are solved rarely or nearly always: "
        f"{edges[64]:.1f} times the weight with groups of 64, but {edges[8]:.1f} times with 8")
    yield biased
    flat = [weight(p, GROUP, "none") - (1 - 1 / GROUP) for p in RATES]
    yield Claim("undivided, all prompts weigh the same: how far off", DR_GRPO, flat,
                at_least=-1e-9, at_most=1e-9, exact=True)
    from_log = [weight(p, GROUP, "mean") - (1 - (1 - p) ** (GROUP - 1)) / p for p in RATES]
    yield Claim("divided by the mean, w is the derivative of a series of log p: how far off", MAXRL,
                from_log, at_least=-1e-9, at_most=1e-9, exact=True)
    middle = [p for p in RATES if EDGES[0] <= p <= EDGES[1]]
    for G in (GROUP, 64):
        ratios = [weight(p, G, "group") * math.sqrt(p * (1 - p)) for p in middle]
        yield Claim(f"with G = {G}, GRPO climbs 2 arcsin sqrt(p) (p from 5% to 95%)", ARCSIN,
                    ratios, at_least=0.9, at_most=1.1, times=True, exact=True)
    outer = {scale: share(points, scale, *BINS[0]) + share(points, scale, *BINS[-1])
             for scale in SCALES}
    yield Claim("on samples, dividing by the std moves a share of the sizes of A to prompts solved "
                "under 10% or over 90%", DR_GRPO, outer["group"] - outer["none"], at_least=0.05)
    rare = {scale: share(points, scale, 0, 0.3) for scale in SCALES}
    yield Claim("on samples, MaxRL moves a share of them to prompts solved under 30%, compared "
                "with GRPO", MAXRL, rare["mean"] - rare["group"], at_least=0.05)

    ratio = {name: guess_beside_thought(name) for name in AVERAGES}
    yield Claim("with 1/length, a token weighs less the longer its output is: guess beside thought",
                DR_GRPO, ratio["grpo"], at_least=1.1, times=True, exact=True)
    yield Claim("with the other averages it does not", DR_GRPO, [ratio["dr_grpo"], ratio["dapo"]],
                at_least=1 / 1.001, at_most=1.001, times=True, exact=True)
    early = slice(None, WINDOW)
    late = slice(-WINDOW, None)
    for kind in KINDS[1:]:
        lengths = {name: mean_length(found, kind, late) for name, found in runs.items()}
        yield Claim(f"1/length makes {kind} longer than a constant does", DR_GRPO,
                    lengths["grpo"] - lengths["dr_grpo"], at_least=1, unit="tokens")
    yield Claim("with 1/length, wrong thoughts get longer in training", DR_GRPO,
                lengths["grpo"] - mean_length(runs["grpo"], KINDS[2], early), at_least=1,
                unit="tokens")
    steps = {name: numpy.array([steps_to_level(row, LEVEL) for row in found["accuracy"]])
             for name, found in runs.items()}
    for name in ("dr_grpo", "dapo"):
        yield Claim(f"1/length needs more steps to an accuracy of {LEVEL} than {name}", OURS,
                    steps["grpo"] / steps[name], at_least=1.1, times=True)
    yield Claim("with 1/length, less of the first gradient is about thinking: cosine of dr_grpo "
                "minus that of grpo", OURS, runs["dr_grpo"]["pull"] - runs["grpo"]["pull"],
                at_least=0.05)

    lines = {}
    for G in SIZES:
        lines[f"GRPO, G = {G}"] = [[relative("group", G, p) for p in RATES]]
    lines["Dr. GRPO, any G"] = [[1.0] * len(RATES)]
    yield curves(lines, biased.finding, x=RATES, xlabel="p, chance to be right", ylim=(0, 4.5),
                 ylabel="weight of a prompt, 1 at p = 0.5",
                 given=dict(zip(lines, (SKY, BLUE, ORANGE, RED, GREEN))))
    grown = {name: mean_length(found, KINDS[2], late).mean() for name, found in runs.items()}
    yield curves({AVERAGES[name]: found["accuracy"] for name, found in runs.items()},
                 f"Dividing by the length: {steps['grpo'].mean():.0f} steps to {LEVEL:.0%} right, "
                 f"a constant {steps['dr_grpo'].mean():.0f}; wrong thoughts have "
                 f"{grown['grpo']:.0f} and {grown['dr_grpo']:.0f} tokens", ylim=(0.2, 1),
                 given=dict(zip(AVERAGES.values(), (BLUE, GREEN, ORANGE))), ylabel="accuracy")
    shown = (0.01, 0.05, 0.95, 0.99)
    rows = {}
    for scale, G in itertools.product(SCALES, SIZES):
        weights = {f"p = {p}": relative(scale, G, p) for p in shown}
        rows[f"{SCALES[scale]}, G = {G}"] = weights
    yield numbers(rows, {f"p = {p}": f"p = {p}" for p in shown}, ".2f",
                  by="weight of a prompt, 1 at p = 0.5")
    names = {f"{low}": f"p from {low} to {min(high, 1)}" for low, high in BINS}
    rows = {name: {f"{low}": share(points, scale, low, high) for low, high in BINS}
            for scale, name in SCALES.items()}
    yield numbers(rows, names, by=f"share of the sizes of A, G = {GROUP}")
    rows = {AVERAGES[name]: {"pull": found["pull"], "steps": steps[name],
                             **{kind: mean_length(found, kind, late) for kind in KINDS}}
            for name, found in runs.items()}
    yield numbers(rows, {"pull": "cosine to thinking", "steps": f"steps to {LEVEL}",
                         **{kind: f"tokens, {kind}" for kind in KINDS}}, ".2f", by="average")
