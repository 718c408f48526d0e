"""KL: three estimators of the KL, used as numbers and as losses"""
import copy
import itertools

import numpy
import torch
import torch.nn.functional as F

import grpo
import reinforce
from lab.draw import BLUE, ORANGE, RED, curves
from lab.experiment import Experiment, transposed
from lab.training import load_base, training
from lab.verdict import OURS, Claim

ESTIMATORS = ["k1", "k2", "k3"]
WATCHED = [1, 2, 5, 10, 20]                 # steps after which the estimates are measured
# Tang and Munos show that the two losses of each pair in TANGS have equal gradients on samples of
# pi, and DeepSeek-V3.2 shows it for OLDER, on samples of an older policy. The two losses of a pair
# in BY_LENGTH have different gradients, because each output is divided by its length.
TANGS = [("k2", "KL(policy, base)"), ("k3", "KL(base, policy)"),
         ("k1 in the reward", "KL of outputs")]
OLDER = ("k3_ratio, older", "KL(policy, base), older")
BY_LENGTH = [("k2, by length", "KL(policy, base)"), ("k3, by length", "KL(base, policy)"),
             ("k3_ratio, by length", "KL(policy, base)")]
PLACE = -1                                  # index in WATCHED of the step that the claims judge
CLOSE = 1e-9                                # smaller differences count as rounding errors
EXPERIMENT = Experiment(__file__, seeds=range(5), rate="")


@torch.no_grad()
def log_probs(policy, batch):
    """Log-probabilities of the whole vocabulary at each of a batch's N tokens. -> (N, V)"""
    states = grpo.completion_states(policy, batch.prompts, batch.tokens)[batch.mask > 0]
    return F.linear(states, policy.embed.weight).double().log_softmax(dim=-1)


def moments(log_p, log_ref):
    """Compute the exact mean and standard deviation of each estimate over the vocabulary, averaged
    over the N tokens; the mean of k1 is the KL. (N, V), (N, V) -> {column: float}"""
    columns = {}
    for name in ESTIMATORS:
        estimate = grpo.kl(log_p, log_ref, name)
        mean = (log_p.exp() * estimate).sum(dim=-1, keepdim=True)               # (N, 1)
        variance = (log_p.exp() * (estimate - mean).square()).sum(dim=-1)       # (N,)
        columns[f"mean of {name}"] = mean.mean().item()
        columns[f"deviation of {name}"] = variance.mean().sqrt().item()
    return columns


@EXPERIMENT.measure(["on the way"])
def estimates(seed, case):
    """Measure the estimates of the KL of a token while the policy moves away from the base."""
    cfg, task, policy = load_base(grpo, f"--num_prompts 16 --seed {seed} --base_seed {seed}")
    reference = copy.deepcopy(policy)
    rows = []
    for step, _ in zip(range(1, 1 + WATCHED[-1]), training(grpo, cfg, task, policy)):
        if step in WATCHED:
            batch = grpo.sample_batch(policy, task, cfg, step)      # the next training batch
            rows.append(moments(log_probs(policy, batch), log_probs(reference, batch)))
    return transposed(rows)


# All outputs of at most four tokens. Tokens are 1, 2 and 0; 0 ends an output and pads it. (N, T)
TOKENS = torch.tensor([ids for ids in itertools.product(range(3), repeat=4)
                       if all(one > 0 or other == 0 for one, other in itertools.pairwise(ids))])
MASK = ((TOKENS == 0).cumsum(dim=1) <= 1).double()
BEFORE = F.pad(TOKENS[:, :-1], (1, 0))      # (N, T)  the token before each token; 0 at the start


def output_logps(table):
    """Compute the log-probabilities of the tokens of all outputs. Each depends only on the token
    before it, so a policy is a table of logits. (3, 3) -> (N, T)"""
    return table.log_softmax(dim=-1)[BEFORE, TOKENS] * MASK


def mean_loss(x, sampler, average="constant"):
    """Average token losses (N, T) over the tokens as `average` says, and then over all outputs of
    a sampler, weighted by their probability. -> scalar"""
    p = output_logps(sampler.detach()).sum(dim=1, keepdim=True).exp()           # (N, 1)
    return grpo.aggregate(len(x) * p * x, MASK, average, max_length=MASK.shape[1])


def gradients(theta, ref, old):
    """Compute the gradients of the estimates used as losses, and of the exact KLs that they are
    compared with. -> {name: gradient in theta (9,)}"""
    logps, ref_logps, old_logps = map(output_logps, (theta, ref, old))
    losses = {}
    for name in (*ESTIMATORS, "k3_ratio"):
        estimate = grpo.kl(logps, ref_logps, name, logps - logps.detach())
        losses[name] = mean_loss(estimate, theta)
        losses[f"{name}, by length"] = mean_loss(estimate, theta, "sequence_mean")
    log_rho = grpo.log_ratio(logps, old_logps, MASK)
    losses["k3_ratio, older"] = mean_loss(grpo.kl(logps, ref_logps, "k3_ratio", log_rho), old)
    k1 = (logps - ref_logps).sum(dim=1)
    losses["k1 in the reward"] = mean_loss(reinforce.policy_loss(logps, -k1.detach(), MASK), theta)
    # the exact KLs
    log_p, log_ref = (table.log_softmax(dim=-1)[BEFORE] for table in (theta, ref))  # (N, T, 3)
    kl, reverse = (F.kl_div(other, one, log_target=True, reduction="none").sum(dim=-1)
                   for one, other in ((log_p, log_ref), (log_ref, log_p)))
    losses["KL(policy, base)"] = mean_loss(kl, theta)
    losses["KL(policy, base), older"] = mean_loss(kl, old)
    losses["KL(base, policy)"] = mean_loss(reverse, theta)
    losses["KL of outputs"] = (logps.sum(dim=1).exp() * k1).sum()
    return {name: torch.autograd.grad(loss, theta, retain_graph=True)[0].flatten()
            for name, loss in losses.items()}


@EXPERIMENT.measure(["policies"], seeds=[0])
def cosines(seed, case, draws=100):
    """Compare gradients of random policies: 1 - cosine of each pair, and the norm of k1's."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(draws):
        theta, ref, old = torch.randn(3, 3, 3, generator=generator).double()
        gradient = gradients(theta.requires_grad_(), ref, old)
        row = {"norm of k1": gradient["k1"].norm().item()}
        for pair in (*TANGS, OLDER, *BY_LENGTH):
            off = 1 - F.cosine_similarity(*map(gradient.get, pair), dim=0).item()
            # the file stores six digits, so a cosine is stored as 1 - cosine, and rounding errors
            # become 0: then 0 means equal, and nothing else does
            row[" / ".join(pair)] = off * (abs(off) >= CLOSE)
        rows.append(row)
    return transposed(rows)


def page(estimates, cosines):
    [way] = estimates.values()
    noise = way["deviation of k1"] / way["deviation of k3"]
    last = 1 / numpy.exp(numpy.log(noise[:, -1]).mean())                # of k3 / of k1
    yield Claim("after 20 steps, k3 is less noisy than k1 (standard deviation of k1, divided by "
                "the standard deviation of k3)", "after Schulman, 2020", noise[:, PLACE],
                at_least=1.1, times=True, said="Near the base, the KL estimate k3 is less noisy "
                f"than k1, but after 20 steps it is {last:.2g} times as noisy")
    yield curves({name: way[f"deviation of {name}"] for name in ESTIMATORS}, WATCHED,
                 given=dict(zip(ESTIMATORS, (BLUE, ORANGE, RED))), yscale="log", xticks=WATCHED,
                 xlabel="steps of training after the base",
                 ylabel="standard deviation, nats per token (geometric mean)")
    yield Claim("after 20 steps, k2's mean is within a tenth of the KL", "after Schulman, 2020",
                way["mean of k2"][:, PLACE] / way["mean of k1"][:, PLACE], at_least=0.9,
                at_most=1.1, times=True)
    columns = {name: values[0] for name, values in cosines["policies"].items()}

    def cosine(pairs):
        return numpy.concatenate([1 - columns[" / ".join(pair)] for pair in pairs])
    yield Claim("on samples of pi, k1 as a loss has a mean gradient of zero (the largest norm that "
                "we found)", "Tang and Munos", columns["norm of k1"].max(), at_most=CLOSE,
                exact=True)
    yield Claim("on samples of pi, three pairs have the same gradient: k2 as a loss and KL(pi, "
                "ref), k3 as a loss and KL(ref, pi), k1 in the reward and the KL between whole "
                "outputs (cosine of each pair)",
                "Tang and Munos", cosine(TANGS), at_least=1, exact=True)
    yield Claim("on samples of an older policy, k3_ratio as a loss has the same gradient as KL(pi, "
                "ref) (cosine)", "DeepSeek-V3.2", cosine([OLDER]), at_least=1, exact=True)
    yield Claim("if the loss of each output is divided by its length, k2, k3 and k3_ratio no "
                "longer have the gradients of these KLs (lowest cosine of each pair)", OURS,
                [cosine([pair]).min() for pair in BY_LENGTH], at_most=0.99, exact=True)
