"""Variance: what a baseline does to the noise of the gradient, one number or one for each prefix

Claim. RLOO's baseline lowers the variance of REINFORCE (Ahmadian and others, 2402.14740). No number
has less than b*, the mean of rewards weighted by the squared length of the gradient (Greensmith and
others, 2004; OPO, 2505.23585). A baseline may depend on the state, here on the prompt and the
tokens so far: PPO's critic learns V(s) (1707.06347), VinePPO estimates it (2410.01679), and b*(s)
is best.

Prediction. If all gradients were of one length, RLOO would have less variance than no baseline if
more than one output in G is right. Where wrong outputs have longer gradients than right ones, as on
the base of arithmetic, it takes a higher pass rate, so that RLOO has more variance there than none,
and b* less than RLOO, even if it is estimated from seven outputs. V(s) has less variance than one
number in most policies, but not in all, since it may be worse than b* in the first state, and V(s)
is within a tenth of b*(s). What no baseline removes, the chance of the steps that follow, is more
than what a baseline for each state gains on one number: values of actions, Q(s, a) instead of the
reward, halve the variance again.

Method. Measured: 160 outputs of the base to each of 16 problems, the gradient of each, and the
variance of groups of 8 dealt from them; what is known is taken from the 159 other outputs. By
state, exactly: 200 policies of each kind over outputs of three tokens out of three, of which 1, 3
or 9 are right; logits are normal, with a standard deviation of 1 or, for policies that have made up
their mind, 3.

Outcome. What was said of the base is right. By state, there is no "most policies": V(s) has less
variance than b* in nine of ten of one kind and in a third of another (at commit 437be3d all kinds
were one pool), and V(s) is within a tenth of b*(s) in 67% of one kind, and 3% of another.
"""
import statistics

import numpy
import torch

import reinforce
from lab.draw import GREY, dots
from lab.experiment import Experiment, numbers
from lab.training import load_base
from lab.verdict import OURS, Claim

AHMADIAN = "[Ahmadian and others](https://arxiv.org/abs/2402.14740)"
OPO = "[OPO](https://arxiv.org/abs/2505.23585)"
GREENSMITH = "Greensmith and others, 2004"
PROBLEMS = 16
SAMPLES = 160
GROUP = 8
DEALS = 20
# On the base: name -> baseline of reinforce.py, and from how many outputs
ESTIMATORS = {"none": ("none", GROUP), "RLOO": ("rloo", GROUP), "estimated b*": ("optimal", GROUP),
              "known mean": ("rloo", SAMPLES), "known b*": ("optimal", SAMPLES)}
POLICIES = 200                                  # of each kind
KINDS = {f"spread {spread}, {right} of 27 right": (spread, right)
         for spread in (1, 3) for right in (1, 3, 9)}
WAYS = ("none", "mean", "b*", "V(s)", "b*(s)", "Q - V")
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(5), one_base=True)


# ---- 1. one number, on the base --------------------------------------------------------------

def inner_products(policy, batch, rows, cfg):
    """Those of the gradients of log pi(o | q) of these rows, with each other. -> (n, n)"""
    gradients = []
    for row in rows:
        tokens = batch.tokens[row, :batch.lengths[row]]
        logps, _ = reinforce.score(policy, batch.prompts[row][None], tokens[None], cfg.temperature)
        parts = torch.autograd.grad(logps.sum(), list(policy.parameters()))
        gradients.append(torch.nn.utils.parameters_to_vector(parts))
    gradients = torch.stack(gradients)
    return (gradients @ gradients.T).double()


def group_variance(products, rewards, baseline, size, group=GROUP):
    """The variance of the mean of A grad log pi over a group dealt from n outputs, each A being
    from `size` of them. (n, n), (n,) -> float"""
    generator = torch.Generator().manual_seed(0)        # the same deals for all baselines
    variances = []
    for _ in range(DEALS):
        order = torch.randperm(len(rewards), generator=generator)
        norms = products.diag()[order]
        A = reinforce.advantages(rewards[order].view(-1, size), baseline, norms.view(-1, size))
        weights = torch.zeros(len(rewards) // group, len(rewards)).double()
        weights[torch.arange(len(rewards)) // group, order] = A.flatten() / group
        weights -= weights.mean(dim=0)
        squares = (weights @ products * weights).sum()
        variances.append(squares.item() / (len(weights) - 1))
    return statistics.mean(variances)


@EXPERIMENT.measure(["arithmetic"])
def base(seed, case):
    """The variance with each of ESTIMATORS, summed over problems."""
    flags = f"--seed {seed} --num_prompts {PROBLEMS} --num_generations {SAMPLES}"
    cfg, task, policy = load_base(reinforce, flags)
    batch = reinforce.sample_batch(policy, task, cfg, 0)
    found = dict.fromkeys(ESTIMATORS, 0.0)
    norms = []                                          # squared, of the gradients
    for rows, rewards in zip(torch.arange(PROBLEMS * SAMPLES).split(SAMPLES), batch.rewards):
        products = inner_products(policy, batch, rows, cfg)
        norms.append(products.diag())
        for name, (baseline, size) in ESTIMATORS.items():
            found[name] += group_variance(products, rewards.double(), baseline, size)
    is_right = batch.rewards > 0
    norms = torch.stack(norms)
    found["pass rate"] = batch.rewards.mean().item()
    found["right"] = norms[is_right].mean().item()
    found["wrong"] = norms[~is_right].mean().item()
    return found


# ---- 2. by state, exactly --------------------------------------------------------------------

OUTPUTS = torch.cartesian_prod(*[torch.arange(3)] * 3)                          # (N, 3) actions
# The states that an output goes through: () is 0, the prefixes of one token 1 .. 3, of two 4 .. 12.
FIRST, SECOND, _ = OUTPUTS.T
STATES = torch.stack([0 * FIRST, 1 + FIRST, 4 + 3 * FIRST + SECOND], dim=1)     # (N, 3)


def mean_behind(prefix_length, x, weights):
    """The weighted mean of x over the outputs that begin alike, for each output. (N,) -> (N, 1)"""
    x = x.view(3 ** prefix_length, -1)
    weights = weights.view(x.shape)
    means = (weights * x).sum(dim=1) / weights.sum(dim=1)
    return means.repeat_interleave(x.shape[1])[:, None]


def variances(seed, spread, right):
    """The variance of the gradient of a random policy with each of WAYS. -> {way: float}"""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(13, 3, generator=generator).double()
    p = logits.softmax(dim=-1)
    winners = torch.randperm(len(OUTPUTS), generator=generator)[:right]
    R = torch.zeros(len(OUTPUTS)).double().index_fill(0, winners, 1.0)          # (N,)
    chance = p[STATES, OUTPUTS].prod(dim=1)                                     # (N,)
    gradient = torch.eye(3).double()[OUTPUTS] - p[STATES]                       # (N, 3, 3)
    mean = torch.zeros(13, 3).double().index_put(
        (STATES,), (chance * R).view(-1, 1, 1) * gradient, accumulate=True)
    norms = gradient.square().sum(dim=-1)                                       # (N, 3)
    V = torch.cat([mean_behind(t, R, chance) for t in range(4)], dim=1)         # (N, 4)
    best = mean_behind(0, R, chance * norms.sum(dim=1))                         # (N, 1)
    by_state = torch.cat([mean_behind(t, R, chance * norms[:, t]) for t in range(3)], dim=1)
    R = R[:, None]
    credit = {"none": R, "mean": R - V[:, :1], "b*": R - best, "V(s)": R - V[:, :3],
              "b*(s)": R - by_state, "Q - V": V.diff(dim=1)}
    found = {}
    for way, A in credit.items():                       # of each token, or of all
        squares = (A.square() * norms).sum(dim=1)
        found[way] = (chance @ squares - mean.square().sum()).item()
    return found


@EXPERIMENT.measure(KINDS, seeds=[0])
def states(seed, kind):
    found = [variances(seed + number, *KINDS[kind]) for number in range(POLICIES)]
    return {way: [one[way] for one in found] for way in WAYS}


# ---- 3. what was found -----------------------------------------------------------------------

def page(base, states):
    [measured] = base.values()
    share = {name: measured[name] / measured["none"] for name in ESTIMATORS}
    noisier = Claim("on the base, variance is lower with RLOO's baseline than with none", AHMADIAN,
                    share["RLOO"], at_most=0.95, times=True, contradicted="Where "
                    f"{measured['pass rate'].mean():.0%} of outputs are right, RLOO's baseline "
                    "does not lower the variance of the gradient: it is "
                    f"{share['RLOO'].mean():.2f} times that without a baseline")
    yield noisier
    for less, other, source in (("estimated b*", "RLOO", OPO), ("estimated b*", "none", OPO),
                                ("known b*", "known mean", GREENSMITH)):
        yield Claim(f"on the base, variance is lower with {less} than with {other}", source,
                    share[less] / share[other], at_most=0.95, times=True)
    less = {kind: found["V(s)"][0] < found["b*"][0] for kind, found in states.items()}
    shares = [values.mean() for values in less.values()]
    yield Claim("V(s) as baseline has less variance than b* in most random policies of each kind",
                OURS, shares, at_least=0.5, exact=True, unit="of policies")

    yield dots(share, noisier.finding, given={"none": GREY}, level=(1, "no baseline"),
               xlabel=f"variance / that without a baseline, base of arithmetic, groups of {GROUP}; "
               "known: from 159 other outputs; a dot for each seed")
    by_kind = {kind: values["V(s)"][0] / values["b*"][0] for kind, values in states.items()}
    yield dots(by_kind, "The value of each state, V(s), is a less noisy baseline than the best "
               f"single number, b*, in {min(shares):.0%} to {max(shares):.0%} of random policies, "
               "by their kind", level=(1, "as much"), xscale="log",
               xlabel="variance with V(s) / with b*; spread: of the logits of 200 policies, dots")
    heads = {"pass rate": "pass rate", "right": "squared gradient norm, right outputs",
             "wrong": "the same, wrong outputs"}
    yield numbers(base, heads | {name: f"variance, {name}" for name in ESTIMATORS}, ".3g",
                  by="base")
    rows = {kind: {way: numpy.median(values[way] / values["none"]) for way in WAYS} | {
                "less": less[kind].mean(),
                "near": (values["V(s)"] <= 1.1 * values["b*(s)"]).mean(),
                "half": (values["Q - V"] <= values["b*(s)"] / 2).mean()}
            for kind, values in states.items()}
    heads = dict(zip(WAYS, WAYS)) | {
        "less": "policies where V(s) has less than b*", "near": "at most 1.1 times b*(s)",
        "half": "Q - V at most half of b*(s)"}
    yield numbers(rows, heads, ".2f", by="variance / none, median of 200 policies")
