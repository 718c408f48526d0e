"""Variance: what a baseline does to the noise of the gradient

The variance of the gradients of groups that are dealt from many outputs of the base.
docs/lab/variance.md says more.
"""
import statistics

import torch

import reinforce
from lab.draw import GREY, dots
from lab.experiment import Experiment, numbers
from lab.training import load_base
from lab.verdict import Claim

PROBLEMS = 16
SAMPLES = 160
GROUP = 8
DEALS = 20
# On the base: name -> baseline of reinforce.py, and from how many outputs
ESTIMATORS = {"none": ("none", GROUP), "RLOO": ("rloo", GROUP), "estimated b*": ("optimal", GROUP),
              "known mean": ("rloo", SAMPLES), "known b*": ("optimal", SAMPLES)}
EXPERIMENT = Experiment(__file__, seeds=range(5), one_base=True)


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


def page(base):
    [measured] = base.values()
    share = {name: measured[name] / measured["none"] for name in ESTIMATORS}
    said = (f"Where {measured['pass rate'].mean():.0%} of outputs are right, RLOO's baseline does "
            f"not lower the variance of the gradient: it is {share['RLOO'].mean():.2f} times that "
            "without a baseline")
    yield Claim("on the base, variance is lower with RLOO's baseline than with none",
                "Ahmadian and others", share["RLOO"], at_most=0.95, times=True, contradicted=said)
    for less, other, source in (("estimated b*", "RLOO", "OPO"), ("estimated b*", "none", "OPO"),
                                ("known b*", "known mean", "Greensmith and others, 2004")):
        yield Claim(f"on the base, variance is lower with {less} than with {other}", source,
                    share[less] / share[other], at_most=0.95, times=True)

    yield dots(share, said, given={"none": GREY}, level=(1, "no baseline"),
               xlabel=f"variance / that without a baseline, base of arithmetic, groups of {GROUP}; "
               "known: from 159 other outputs; a dot for each seed")
    heads = {"pass rate": "pass rate", "right": "squared gradient norm, right outputs",
             "wrong": "the same, wrong outputs"}
    yield numbers(base, heads | {name: f"variance, {name}" for name in ESTIMATORS}, ".3g",
                  by="base")
