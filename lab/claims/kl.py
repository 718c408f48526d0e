"""KL: three estimators of the KL, used as numbers and as losses"""
import copy
import itertools

import numpy
import torch
import torch.nn.functional as F

import grpo
import reinforce
from lab.bench import OURS, Claim, numbers
from lab.training import load_base, training
from report import chart

SEEDS, CASES = range(12), ["on the way"]
CHECK = "grpo.py --num_prompts 16"
ESTIMATORS = ["k1", "k2", "k3"]
WATCHED = [1, 2, 5, 10, 20]                 # steps after which the estimates are measured


@torch.no_grad()
def log_probs(policy, batch):
    """Log-probabilities of the whole vocabulary at each of a batch's N tokens. -> (N, V)"""
    states = grpo.completion_states(policy, batch.prompts, batch.tokens)[batch.mask > 0]
    return F.linear(states, policy.embed.weight).double().log_softmax(dim=-1)


def measure(case, seed):
    """While the policy moves away from the base, compute the exact mean and standard deviation of
    each estimate over the vocabulary, averaged over the tokens; the mean of k1 is the KL. The
    deviation in a batch is that of the tokens that were sampled, from the same means."""
    cfg, task, policy = load_base(grpo, f"--num_prompts 16 --seed {seed} --base_seed {seed}")
    reference = copy.deepcopy(policy)
    columns = {f"{what} of {name}": [] for name in ESTIMATORS
               for what in ("mean", "deviation", "deviation in a batch")}
    for step, _ in zip(range(1, 1 + WATCHED[-1]), training(cfg, task, policy)):
        if step in WATCHED:
            batch = grpo.sample_batch(policy, task, cfg, step)      # the next training batch
            log_p, log_ref = log_probs(policy, batch), log_probs(reference, batch)
            sampled = batch.tokens[batch.mask > 0][:, None]                             # (N, 1)
            for name in ESTIMATORS:
                estimate = grpo.kl(log_p, log_ref, name)                            # (N, V)
                mean = (log_p.exp() * estimate).sum(dim=-1, keepdim=True)           # (N, 1)
                variance = (log_p.exp() * (estimate - mean).square()).sum(dim=-1)   # (N,)
                columns[f"mean of {name}"].append(mean.mean().item())
                errors = (estimate - mean).gather(1, sampled)                       # (N, 1)
                columns[f"deviation of {name}"].append(variance.mean().sqrt().item())
                columns[f"deviation in a batch of {name}"].append(
                    errors.square().mean().sqrt().item())
    return columns


# All outputs of at most four tokens. Tokens are 1, 2 and 0; 0 ends an output and pads it. (N, T)
# A policy is a table of logits by the token before, (3, 3).
TOKENS = torch.tensor([ids for ids in itertools.product(range(3), repeat=4)
                       if all(one > 0 or other == 0 for one, other in itertools.pairwise(ids))])
MASK = ((TOKENS == 0).cumsum(dim=1) <= 1).double()
BEFORE = F.pad(TOKENS[:, :-1], (1, 0))      # (N, T)  the token before each token; 0 at the start


def output_logps(table):
    """Compute the log-probabilities of the tokens of all outputs. (3, 3) -> (N, T)"""
    return table.log_softmax(dim=-1)[BEFORE, TOKENS] * MASK


def losses(theta, ref, old):
    """Average the estimates used as losses, and the exact KLs that their gradients are compared
    with, over all outputs of theta or of an older policy. -> {name: scalar}"""
    logps, ref_logps, old_logps = map(output_logps, (theta, ref, old))

    def mean(x, sampler=logps, average="constant"):
        p = sampler.detach().sum(dim=1, keepdim=True).exp()                     # (N, 1)
        return grpo.aggregate(len(x) * p * x, MASK, average, max_length=MASK.shape[1])
    k1 = (logps - ref_logps).sum(dim=1)
    log_p, log_ref = (table.log_softmax(dim=-1)[BEFORE] for table in (theta, ref))  # (N, T, 3)
    kl, reverse = (F.kl_div(other, one, log_target=True, reduction="none").sum(dim=-1)
                   for one, other in ((log_p, log_ref), (log_ref, log_p)))
    log_rho = grpo.log_ratio(logps, old_logps, MASK)
    found = {"KL(policy, base)": mean(kl), "KL(base, policy)": mean(reverse),
             "KL(policy, base), older": mean(kl, old_logps),
             "k3_ratio, older": mean(grpo.kl(logps, ref_logps, "k3_ratio", log_rho), old_logps),
             "k1 in the reward": mean(reinforce.policy_loss(logps, -k1.detach(), MASK)),
             "KL of outputs": (logps.sum(dim=1).exp() * k1).sum()}
    for name in (*ESTIMATORS, "k3_ratio"):
        estimate = grpo.kl(logps, ref_logps, name, logps - logps.detach())
        found[name] = mean(estimate)
        found[f"{name}, by length"] = mean(estimate, average="sequence_mean")
    return found


def gradients(draws=100):
    """Compute the gradients of all losses in theta, for random policies. -> {name: (draws, 9)}"""
    generator = torch.Generator().manual_seed(0)
    tables = torch.stack([torch.randn(3, 3, 3, generator=generator) for _ in range(draws)], dim=1)
    found = torch.func.vmap(torch.func.jacrev(losses))(*tables.double())
    return {name: gradient.flatten(start_dim=1) for name, gradient in found.items()}


def page(x):
    [way] = x.values()
    exact, in_batch = (way[f"deviation{where} of k3"] / way[f"deviation{where} of k1"]
                       for where in ("", " in a batch"))                        # (S, WATCHED)
    near, far = numpy.exp(numpy.log(exact[:, [0, -1]]).mean(axis=0))
    yield (f"One step from the base, the KL estimate k3 has {near:.2g} times the noise of k1 "
           f"(its standard deviation), and after 20 steps {far:.2g} times. As a loss on samples "
           "of the policy, k2 has the gradient of the KL, and k1 has none on average.")
    yield Claim("after 20 steps, k3 is less noisy than k1 (k1's standard deviation, divided "
                "by k3's)", "after Schulman, 2020", 1 / exact[:, -1],
                at_least=1.1, ratio=True)
    yield lambda axis: chart.curves(
        axis, {name: way[f"deviation of {name}"] for name in ESTIMATORS}, WATCHED, yscale="log",
        xlabel="steps of training after the base", ylabel="exact standard deviation (nats)")
    yield Claim("after 20 steps, k2's mean is within a tenth of the KL", "after Schulman, 2020",
                (way["mean of k2"] / way["mean of k1"])[:, -1], at_least=0.9, at_most=1.1,
                ratio=True)

    found = gradients()

    def cosines(*pairs):
        return torch.cat([F.cosine_similarity(found[one], found[other]) for one, other in pairs])

    largest = found["k1"].norm(dim=1).max()
    yield Claim("on samples of pi, k1 as a loss has a mean gradient of zero (the largest norm that "
                "we found)", "Tang and Munos", largest.round(decimals=12), at_most=1e-9, exact=True,
                computed=True)
    yield Claim("on samples of pi, three pairs have the same gradient: k2 as a loss and KL(pi, "
                "ref), k3 as a loss and KL(ref, pi), k1 in the reward and the KL between whole "
                "outputs (cosine of each pair)", "Tang and Munos",
                cosines(("k2", "KL(policy, base)"), ("k3", "KL(base, policy)"),
                        ("k1 in the reward", "KL of outputs")), at_least=1 - 1e-9, exact=True,
                computed=True)
    yield Claim("on samples of an older policy, k3_ratio as a loss has the same gradient as KL(pi, "
                "ref) (cosine)", "DeepSeek-V3.2",
                cosines(("k3_ratio, older", "KL(policy, base), older")), at_least=1 - 1e-9,
                exact=True, computed=True)
    yield Claim("if the loss of each output is divided by its length, k2, k3 and k3_ratio no "
                "longer have the gradients of these KLs (lowest cosine of each pair)", OURS,
                [cosines(pair).min() for pair in (("k2, by length", "KL(policy, base)"),
                                                  ("k3, by length", "KL(base, policy)"),
                                                  ("k3_ratio, by length", "KL(policy, base)"))],
                at_most=0.99, exact=True, computed=True)
    yield numbers({"1 step" if step == 1 else f"{step} steps": {
        "exact": exact[:, place], "in a batch of sampled tokens": in_batch[:, place]}
        for place, step in enumerate(WATCHED)}, "standard deviation of k3, divided by k1's")
