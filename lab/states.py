"""Baselines by state: one number for all outputs, or one for each prefix.

Claim. A baseline may depend on the state, here on the prompt and the tokens so far, and the best is
not the value V(s), but the mean of rewards weighted by the squared length of the gradient, b*(s)
(Greensmith and others, 2004). Of constants, the long-term mean reward is the best, say Weaver and
Tao (2001). OPO takes one number for all outputs to a prompt, their rewards weighted by their
lengths (2505.23585); PPO's critic learns V(s) (1707.06347), VinePPO estimates it (2410.01679).

Prediction. b*(s) is the best of all baselines, as each state has weights of its own. V(s) has less
variance than one number in most policies, but not in all, since it may be worse than b* in the
first state, and V(s) is within a tenth of b*(s). What no baseline removes, the chance of
the steps that follow, is more than what a baseline for each state gains on one number: values of
actions, Q(s, a) instead of the reward, halve the variance again.

Method. Exactly, by enumeration: policies over outputs of three tokens out of three, so with 13
states and 27 outputs, of which 1, 3 or 9 are right; logits are normal, with a standard deviation of
1 or, for policies that have made up their mind, 3. Each state has logits of its own, so that the
variance of the gradient is the sum of those of its states.
"""
import itertools
import statistics

import torch

import reinforce
from lab.entry import CONTRADICTED, SHOWN, Claim

SEEDS = [0]
POLICIES = 200                          # of each kind
KINDS = [(spread, right) for spread in (1, 3) for right in (1, 3, 9)]
DEPTH = 3
ACTIONS = 3
EYE = torch.eye(ACTIONS, dtype=torch.float64)
PREFIXES = [prefix for length in range(DEPTH)
            for prefix in itertools.product(range(ACTIONS), repeat=length)]
OUTPUTS = list(itertools.product(range(ACTIONS), repeat=DEPTH))
WAYS = {"none": "no baseline", "mean": "one number: the mean reward", "b*": "one number: b*",
        "V(s)": "for each state: V(s)", "b*(s)": "for each state: b*(s)",
        "Q - V": "values of actions: Q(s, a) - V(s)"}


def make_policy(seed, spread, right):
    """Probabilities of the actions in each state, and the reward of each output. -> two dicts"""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(len(PREFIXES), ACTIONS, generator=generator)
    winners = torch.randperm(len(OUTPUTS), generator=generator)[:right].tolist()
    rewards = {output: float(number in winners) for number, output in enumerate(OUTPUTS)}
    probabilities = logits.double().softmax(dim=-1)
    return dict(zip(PREFIXES, probabilities)), rewards


def values(policy, rewards):
    """The mean reward from a prefix on. -> {prefix: float}, whole outputs included"""
    V = dict(rewards)
    for prefix in reversed(PREFIXES):
        V[prefix] = (policy[prefix] @ after(V, prefix)).item()
    return V


def after(V, prefix):
    """The values of what a prefix becomes with each action. -> (A,)"""
    return torch.tensor([V[(*prefix, action)] for action in range(ACTIONS)]).double()


def visits(policy):
    """How often a prefix is written, whole outputs included. -> {prefix: probability}"""
    d = {(): 1.0}
    for prefix in PREFIXES:
        for action, p in enumerate(policy[prefix]):
            d[(*prefix, action)] = d[prefix] * p.item()
    return d


def sq_lengths(p):
    """The squared length of grad log p(action) by the logits, for each action. (A,) -> (A,)"""
    gradients = EYE - p                                                         # a row for each
    return gradients.square().sum(dim=1)


def best_single(policy, V, d):
    """b*: over whole outputs, weighted by the squared length of their gradients. -> float"""
    norms = []
    for output in OUTPUTS:
        norm = 0.0
        for t, action in enumerate(output):
            norm += sq_lengths(policy[output[:t]])[action]
        norms.append(norm)
    rewards = torch.tensor([V[output] for output in OUTPUTS]).double()
    weights = torch.tensor([d[output] for output in OUTPUTS]).double()
    return reinforce.optimal_baseline(rewards, torch.stack(norms), weights).item()


def visited_variance(visits, p, Q, squares, b):
    """What a state adds to the variance of the gradient, (R - b) grad log p(action) if it is
    visited and else 0. R, what an output is credited with, has after each action the mean Q and the
    mean square `squares`. (A,) each -> float"""
    gradients = EYE - p                                                         # (A, A)
    mean = visits * (p * Q) @ gradients                                         # (A,)
    sq_errors = squares - 2 * b * Q + b ** 2                                    # mean (R - b)^2
    mean_square = visits * (p * sq_lengths(p) * sq_errors).sum()
    return (mean_square - mean @ mean).item()


def variances(seed, spread, right):
    """The variance of the gradient of a policy with each of WAYS, as a share of that without a
    baseline. -> {way: float}"""
    policy, rewards = make_policy(seed, spread, right)
    V = values(policy, rewards)
    d = visits(policy)
    single = best_single(policy, V, d)
    total = dict.fromkeys(WAYS, 0.0)
    for prefix, p in policy.items():
        Q = after(V, prefix)
        best = reinforce.optimal_baseline(Q, sq_lengths(p), p).item()
        baselines = {"none": 0.0, "mean": V[()], "b*": single, "V(s)": V[prefix], "b*(s)": best,
                     "Q - V": V[prefix]}
        squares = dict.fromkeys(WAYS, Q)                # a reward of 0 or 1 is its own square
        squares["Q - V"] = Q.square()
        for way, b in baselines.items():
            total[way] += visited_variance(d[prefix], p, Q, squares[way], b)
    return {way: total[way] / total["none"] for way in WAYS}


def measure(seeds):
    [seed] = seeds
    found = {}
    for spread, right in KINDS:
        runs = [variances(seed + number, spread, right) for number in range(POLICIES)]
        found[f"spread {spread}, {right} right"] = [
            {way: round(value, 6) for way, value in run.items()} for run in runs]
    return {"kinds": found}


# ---- what is shown ---------------------------------------------------------------------------

def median(policies, way):
    return statistics.median(policy[way] for policy in policies)


def tables(found):
    rows = []
    for name, policies in found["kinds"].items():
        rows.append([name, *[f"{median(policies, way):.2f}" for way in WAYS]])
    return [(["variance, that of none being 1; medians", *WAYS.values()], rows)]


def claim(text, found, is_so, needed=0.5):
    """The claim that something is so of more than a share of the policies. -> Claim"""
    policies = sum(found["kinds"].values(), [])
    part = statistics.mean(is_so(policy) for policy in policies)
    return Claim(text, f"in {part:.1%}", SHOWN if part > needed else CONTRADICTED)


def least(policy):
    """The least variance with another baseline. -> float"""
    return min(policy[way] for way in ("none", "mean", "b*", "V(s)"))


def claims(found):
    return [
        claim("no baseline has less variance than b*(s), in any policy", found,
              lambda v: v["b*(s)"] < least(v) + 2e-6, needed=1 - 1e-9),
        claim("V(s) has less variance than one number, b*, in most of the policies", found,
              lambda v: v["V(s)"] < v["b*"]),
        claim("V(s) has at most a tenth more variance than b*(s), in most policies", found,
              lambda v: v["V(s)"] <= 1.1 * v["b*(s)"]),
        claim("values of actions leave at most half of the variance of b*(s), in most policies",
              found, lambda v: v["Q - V"] <= v["b*(s)"] / 2)]


def note(found):
    number = sum(map(len, found["kinds"].values()))
    return f"{number} policies, without problems and samples"


def panels(found):
    def bars(axis):
        width = 0.8 / len(WAYS)
        for number, (way, label) in enumerate(WAYS.items()):
            means = [median(policies, way) for policies in found["kinds"].values()]
            places = [place + number * width for place in range(len(means))]
            axis.bar(places, means, width, label=label)
        names = [name.replace(", ", "\n") for name in found["kinds"]]
        axis.set_xticks([place + 0.33 for place in range(len(names))], names, fontsize=7)
        axis.set(ylabel="variance, that of none being 1; medians", ylim=(0, 1.7))
        axis.legend(frameon=False, fontsize=7, loc="upper left")

    def shares(axis):
        for name, policies in found["kinds"].items():
            ratios = sorted(policy["V(s)"] / policy["b*"] for policy in policies)
            axis.plot(ratios, [number / len(ratios) for number in range(len(ratios))], label=name)
        axis.axvline(1, color="0.5", linestyle=":")
        axis.set(xlabel="variance with V(s) / with b*", ylabel="share of policies", xscale="log",
                 xlim=(0.3, 10))
        axis.legend(frameon=False, fontsize=7)
    return [bars, shares]
