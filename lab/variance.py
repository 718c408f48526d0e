"""Variance: what a baseline does to the noise of the gradient.

Claim. RLOO's baseline lowers the variance of REINFORCE (Ahmadian and others, 2402.14740). No number
has less than b* (Greensmith and others, 2004; OPO, 2505.23585). The mean of a group, in which the
own reward is, shrinks the gradient; other baselines leave it right on average (Williams, 1992).

Prediction. If all gradients were of one length, RLOO would have less variance than no baseline if
more than one output in G is right. Where wrong outputs have longer gradients than right ones, as on
the base of arithmetic, it takes a higher pass rate, so that RLOO has more variance there than none,
and b* less than RLOO, even if it is estimated from seven outputs. The mean of a group shrinks the
gradient to (G - 1) / G, that of a batch to (P G - 1) / (P G).

Method. Exactly: a policy of three outputs, one of them right, and all batches of two groups of
three; the variance is that of the gradient scaled back where it is shrunk. Measured: 160 outputs of
the base to each of 16 problems, the gradient of each, and the variance of groups of 8 dealt from
them; what is known is taken from the 159 other outputs.
"""
import dataclasses
import statistics

import torch

import reinforce
from lab.entry import (
    CONTRADICTED,
    SHOWN,
    Claim,
    draw_points,
    load_base,
    mean_and_spread,
    sign_test,
)
from tools.runs import joined

SEEDS = [0, 1, 2]
P = 2                                           # of the small policy
G = 3
RATES = (0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
BASELINES = ("none", "batch", "mean", "rloo", "optimal")
PROBLEMS = 16                                   # of the base
SAMPLES = 160
GROUP = 8
DEALS = 20
# On the base: name -> baseline of reinforce.py, and from how many outputs
ESTIMATORS = {"none": ("none", GROUP), "RLOO": ("rloo", GROUP), "estimated b*": ("optimal", GROUP),
              "known mean": ("rloo", SAMPLES), "known b*": ("optimal", SAMPLES)}
SHOWN_RATES = ("0.1", "0.3", "0.5", "0.9")
LABELS = {"rloo": "RLOO, mean of the group", "batch": "mean of the batch",
          "optimal": "estimated b*", "known mean": "known mean", "known b*": "known b*"}


def measure(seeds):
    base = [measure_base(seed) for seed in seeds]
    return {"exact": {rate: small_policy(rate) for rate in RATES},
            "base": {name: [round(found[name], 5) for found in base] for name in base[0]}}


# ---- baselines, exactly ----------------------------------------------------------------------

def small_policy(rate):
    """Of a policy that is right at this rate: which part of the gradient is there on average, and
    the variance of the gradient divided by this part. -> {baseline: the two}"""
    p = torch.tensor([rate, (1 - rate) / 2, (1 - rate) / 2], dtype=torch.float64)
    rewards = torch.tensor([1, 0, 0], dtype=torch.float64)
    gradients = torch.eye(3) - p                        # of log p by its logits, a row each
    norms = gradients.square().sum(dim=1)
    true = (p * rewards) @ gradients
    batches = torch.cartesian_prod(*[torch.arange(3)] * (P * G)).view(-1, P, G)
    chance = p[batches].flatten(1).prod(dim=1)
    known = {"known mean": rate, "known b*": reinforce.optimal_baseline(rewards, norms, p)}
    found = {}
    for name in (*BASELINES, *known):
        if name in known:
            A = rewards[batches] - known[name]
        else:
            A = torch.stack([reinforce.advantages(rewards[batch], name, norms[batch])
                             for batch in batches])
        estimates = (A[..., None] * gradients[batches]).mean(dim=(1, 2))
        part = (chance @ estimates) @ true / (true @ true)
        square = (estimates / part - true).square().sum(dim=1)
        found[name] = [round(part.item(), 5), round((chance @ square).item(), 5)]
    return found


# ---- baselines on the base -------------------------------------------------------------------

def inner_products(policy, batch, rows, cfg):
    """Those of the gradients of log pi(o | q) of these rows, with each other. -> (n, n)"""
    gradients = []
    for row in rows:
        tokens = batch.tokens[row, :batch.lengths[row]]
        logps, _ = reinforce.score(policy, batch.prompts[row][None], tokens[None], cfg.temperature)
        parts = torch.autograd.grad(logps.sum(), list(policy.parameters()))
        gradients.append(torch.cat([part.flatten() for part in parts]))
    gradients = torch.stack(gradients)
    return (gradients @ gradients.T).double()


def group_variance(products, rewards, baseline, size, group=GROUP):
    """The variance of the mean of A grad log pi over a group dealt from n outputs, each A being
    from `size` of them. |mean|^2 is the inner product of different groups. (n, n), (n,) -> float"""
    generator = torch.Generator().manual_seed(0)        # the same deals for all baselines
    variances = []
    for _ in range(DEALS):
        order = torch.randperm(len(rewards), generator=generator)
        norms = products.diag()[order]
        A = reinforce.advantages(rewards[order].view(-1, size), baseline, norms.view(-1, size))
        weights = torch.zeros(len(rewards) // group, len(rewards)).double()
        weights[torch.arange(len(rewards)) // group, order] = A.flatten() / group
        between = weights @ products @ weights.T        # (groups, groups)
        n = len(between)
        of_others = (between.sum() - between.trace()) / (n * (n - 1))
        variances.append((between.trace() / n - of_others).item())
    return statistics.mean(variances)


def measure_base(seed):
    """Variances as shares of that without a baseline, summed over problems. -> {name: float}"""
    cfg, task, policy = load_base(reinforce)
    cfg = dataclasses.replace(cfg, seed=seed, num_prompts=PROBLEMS, num_generations=SAMPLES)
    batch = reinforce.sample_batch(policy, task, cfg, 0)
    variances = dict.fromkeys(ESTIMATORS, 0.0)
    norms = []
    for rows, rewards in zip(torch.arange(PROBLEMS * SAMPLES).split(SAMPLES), batch.rewards):
        products = inner_products(policy, batch, rows, cfg)
        norms.append(products.diag())
        for name, (baseline, size) in ESTIMATORS.items():
            variances[name] += group_variance(products, rewards.double(), baseline, size)
    found = {name: value / variances["none"] for name, value in variances.items()}
    is_right = batch.rewards > 0
    norms = torch.stack(norms)
    return found | {"pass rate": batch.rewards.mean().item(),
                    "squared length, gradients of right outputs": norms[is_right].mean().item(),
                    "squared length, gradients of wrong outputs": norms[~is_right].mean().item()}


# ---- what is shown ---------------------------------------------------------------------------

def relative(exact, name):
    """The variance of the small policy as a share of that without a baseline. -> {rate: float}"""
    return {rate: found[name][1] / found["none"][1] for rate, found in exact.items()}


def tables(found):
    exact = found["exact"]
    base = found["base"]
    small = []
    for name, (part, _) in exact["0.5"].items():
        shares = relative(exact, name)
        small.append([name, f"{part:.4f}", *[f"{shares[rate]:.2f}" for rate in SHOWN_RATES]])
    measured = [[name, mean_and_spread(values)] for name, values in base.items()]
    heads = ["small policy: variance as a share of none", "gradient left"]
    heads += [f"pass rate {rate}" for rate in SHOWN_RATES]
    return [(heads, small),
            (["on the base of arithmetic, variances as shares of none", "found"], measured)]


def compared(base, less, more):
    """The claim that one estimator has less variance on the base than another. -> Claim"""
    pairs = list(zip(base[less], base[more]))
    return Claim(f"on the base, {less} has less variance than {more}",
                 "; ".join(f"{one:.3f} and {other:.3f}" for one, other in pairs),
                 sign_test([other - one for one, other in pairs]))


def claims(found):
    exact = found["exact"]
    base = found["base"]
    gains = []
    for variances in exact.values():
        least = min(variances["none"][1], variances["known mean"][1])
        gains.append(least - variances["known b*"][1])
    parts = [part for part, _ in exact["0.5"].values()]
    expected = [1, 1 - 1 / (P * G), 1 - 1 / G, 1, 1, 1, 1]
    is_so = all(abs(part - other) < 1e-4 for part, other in zip(parts, expected))
    return [
        compared(base, "RLOO", "none"),
        compared(base, "estimated b*", "RLOO"),
        compared(base, "estimated b*", "none"),
        compared(base, "known b*", "known mean"),
        Claim("exactly, neither 0 nor the mean reward has less variance than b*",
              f"at least {min(gains):.5f} more", SHOWN if min(gains) >= 0 else CONTRADICTED),
        Claim("exactly, the mean of a group shrinks the gradient to (G - 1) / G, that of a batch "
              "to (P G - 1) / (P G), and no other baseline does",
              joined(parts, ".4f"), SHOWN if is_so else CONTRADICTED)]


def note(found):
    number = PROBLEMS * len(found["seeds"])
    return f"Problems of arithmetic: {PROBLEMS} for each seed, {number} in all"


def panels(found):
    def small(axis):
        for name, label in LABELS.items():
            shares = relative(found["exact"], name)
            axis.plot([float(rate) for rate in shares], shares.values(), label=label)
        axis.plot([0, 1], [G / (G - 1), 0], "k:", label="RLOO, were all of one length")
        axis.axhline(1, color="gray", linewidth=1)
        axis.set(title=f"small policy, G = {G}, exactly", xlabel="pass rate", ylim=(0, 4),
                 ylabel="variance / that without a baseline")
        axis.legend(frameon=False, fontsize=7)

    def base(axis):
        rows = {name: found["base"][name] for name in ESTIMATORS}
        draw_points(axis, rows, title=f"base of arithmetic, G = {GROUP}",
                    xlabel="variance / that without a baseline")
    return [small, base]
