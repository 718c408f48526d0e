"""Variance: how much a baseline changes the noise of the gradient"""
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
# name -> --baseline of reinforce.py, and the number of outputs that it is computed from
NONE, RLOO, ESTIMATED, MEAN, KNOWN = (
    "no baseline", "RLOO's baseline", "an estimated b*", "the known mean", "the known b*")
ESTIMATORS = {NONE: ("none", GROUP), RLOO: ("rloo", GROUP), ESTIMATED: ("optimal", GROUP),
              MEAN: ("rloo", SAMPLES), KNOWN: ("optimal", SAMPLES)}
EXPERIMENT = Experiment(__file__, seeds=range(5), one_base=True, rate="")


def inner_products(policy, batch, rows, cfg):
    """Compute the gradients of log pi(o | q) for n rows, and their inner products. -> (n, n)"""
    gradients = []
    for row in rows:
        tokens = batch.tokens[row, :batch.lengths[row]]
        logps, _ = reinforce.score(policy, batch.prompts[row][None], tokens[None], cfg.temperature)
        parts = torch.autograd.grad(logps.sum(), list(policy.parameters()))
        gradients.append(torch.nn.utils.parameters_to_vector(parts))
    gradients = torch.stack(gradients)
    return (gradients @ gradients.T).double()


def group_variance(products, rewards, baseline, size, group=GROUP):
    """Deal n outputs into groups, and compute the variance of a group's mean of A grad log pi. The
    baseline in A is computed from `size` of the outputs. (n, n), (n,) -> float"""
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
    """Measure the variance with each of ESTIMATORS, summed over the problems."""
    flags = f"--seed {seed} --num_prompts {PROBLEMS} --num_generations {SAMPLES}"
    cfg, task, policy = load_base(reinforce, flags)
    batch = reinforce.sample_batch(policy, task, cfg, 0)
    columns = dict.fromkeys(ESTIMATORS, 0.0)
    norms = []                                          # squared norms of the gradients
    for rows, rewards in zip(torch.arange(PROBLEMS * SAMPLES).split(SAMPLES), batch.rewards):
        products = inner_products(policy, batch, rows, cfg)
        norms.append(products.diag())
        for name, (baseline, size) in ESTIMATORS.items():
            columns[name] += group_variance(products, rewards.double(), baseline, size)
    is_right = batch.rewards > 0
    norms = torch.stack(norms)
    columns["pass rate"] = batch.rewards.mean().item()
    columns["right"] = norms[is_right].mean().item()
    columns["wrong"] = norms[~is_right].mean().item()
    return columns


def page(base):
    [measured] = base.values()
    share = {name: measured[name] / measured[NONE] for name in ESTIMATORS}
    finding = (f"If {measured['pass rate'].mean():.0%} of the outputs are right, RLOO's baseline "
               f"multiplies the gradient's variance by {share[RLOO].mean():.2f}")
    for less, other, source in ((RLOO, NONE, "Ahmadian and others"), (ESTIMATED, RLOO, "after OPO"),
                                (ESTIMATED, NONE, "after OPO"),
                                (KNOWN, MEAN, "Greensmith and others, 2004")):
        yield Claim(f"the base's gradient has a lower variance with {less} than with {other}",
                    source, share[less] / share[other], at_most=0.95, times=True,
                    said=finding * (less == RLOO))

    yield dots(share, given={NONE: GREY}, level=(1, NONE),
               xlabel="variance, divided by the variance without a baseline (groups of "
               f"{GROUP}; known: from 159 other outputs; a dot is a seed)")
    yield numbers({"arithmetic": {
        "pass rate": measured["pass rate"],
        "squared gradient norm, right outputs": measured["right"],
        "squared gradient norm, wrong outputs": measured["wrong"],
        f"variance with {NONE}": measured[NONE]}}, ".3g", by="task of the base")
