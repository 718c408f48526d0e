"""Variance: how much a baseline changes the noise of the gradient"""
import torch
from torch.nn.utils import parameters_to_vector

import reinforce
from lab.bench import Claim, numbers
from lab.training import load_base
from report import chart

SEEDS, CASES, ONE_BASE = range(5), ["arithmetic"], True
PROBLEMS = 16
SAMPLES = 160
GROUP = 8
DEALS = 20
# name -> --baseline of reinforce.py, and the number of outputs that it is computed from
NONE, RLOO, ESTIMATED, MEAN, KNOWN = (
    "no baseline", "RLOO's baseline", "an estimated b*", "the known mean", "the known b*")
ESTIMATORS = {NONE: ("none", GROUP), RLOO: ("rloo", GROUP), ESTIMATED: ("optimal", GROUP),
              MEAN: ("rloo", SAMPLES), KNOWN: ("optimal", SAMPLES)}


def group_variance(products, rewards, baseline, size):
    """Deal n outputs into groups, and compute the variance of a group's mean of A grad log pi, from
    the inner products of the grad log pi. The baseline in A is computed from `size` of the outputs.
    (n, n), (n,) -> float"""
    generator = torch.Generator().manual_seed(0)        # the same deals for all baselines
    m = len(rewards) // GROUP
    variance = 0.0
    for _ in range(DEALS):
        order = torch.randperm(len(rewards), generator=generator)
        dealt = products[order][:, order]
        norms = dealt.diag().view(-1, size)
        A = reinforce.advantages(rewards[order].view(-1, size), baseline, norms).view(m, GROUP)
        groups = torch.einsum("ia, iajb, jb -> ij", A, dealt.view(m, GROUP, m, GROUP), A)
        variance += (groups.trace() - groups.sum() / m).item() / (m - 1)
    return variance / DEALS / GROUP**2


def measure(case, seed):
    """Measure the variance with each of ESTIMATORS, summed over the problems."""
    flags = f"--seed {seed} --num_prompts {PROBLEMS} --num_generations {SAMPLES}"
    cfg, task, policy = load_base(reinforce, flags)
    batch = reinforce.sample_batch(policy, task, cfg, 0)
    columns = dict.fromkeys(ESTIMATORS, 0.0)
    norms = []                                          # squared norms of the gradients
    for rows, rewards in zip(torch.arange(PROBLEMS * SAMPLES).split(SAMPLES), batch.rewards):
        gradients = []                                  # of log pi(o | q)
        for row in rows:
            logps, _ = reinforce.score(policy, batch.prompts[row, None],
                                       batch.tokens[row, None, :batch.lengths[row]])
            gradients.append(parameters_to_vector(
                torch.autograd.grad(logps.sum(), list(policy.parameters()))))
        gradients = torch.stack(gradients)
        products = (gradients @ gradients.T).double()                           # (n, n)
        norms.append(products.diag())
        for name, (baseline, size) in ESTIMATORS.items():
            columns[name] += group_variance(products, rewards.double(), baseline, size)
    norms = torch.stack(norms)
    return columns | {"pass rate": batch.rewards.mean().item(),
                      "right": norms[batch.rewards > 0].mean().item(),
                      "wrong": norms[batch.rewards == 0].mean().item()}


def page(x):
    measured = x["arithmetic"]
    share = {name: measured[name] / measured[NONE] for name in ESTIMATORS}
    finding = (f"If {measured['pass rate'].mean():.0%} of the outputs are right, RLOO's baseline "
               f"multiplies the gradient's variance by {share[RLOO].mean():.2f}")
    for less, other, source in ((RLOO, NONE, "Ahmadian and others"), (ESTIMATED, RLOO, "after OPO"),
                                (ESTIMATED, NONE, "after OPO"),
                                (KNOWN, MEAN, "Greensmith and others, 2004")):
        yield Claim(f"the base's gradient has a lower variance with {less} than with {other}",
                    source, share[less] / share[other], at_most=0.95, ratio=True,
                    finding=finding * (less == RLOO))
    yield lambda axis: chart.dots(axis, share, xlabel="variance, relative to no baseline")
    yield numbers({"arithmetic": {
        "pass rate": measured["pass rate"],
        "squared gradient norm, right outputs": measured["right"],
        "squared gradient norm, wrong outputs": measured["wrong"],
        f"variance with {NONE}": measured[NONE]}}, "task of the base")
