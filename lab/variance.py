"""Variance: what a baseline does to the noise of the gradient, one number or one for each prefix

Claim. RLOO's baseline lowers the variance of REINFORCE (Ahmadian and others, 2402.14740). No number
has less than b* (Greensmith and others, 2004; OPO, 2505.23585). The mean of a group, in which the
own reward is, shrinks the gradient; other baselines leave it right on average (Williams, 1992). A
baseline may depend on the state, here on the prompt and the tokens so far, and the best is not the
value V(s), but the mean of rewards weighted by the squared length of the gradient, b*(s)
(Greensmith and others). PPO's critic learns V(s) (1707.06347), VinePPO estimates it (2410.01679).

Prediction. If all gradients were of one length, RLOO would have less variance than no baseline if
more than one output in G is right. Where wrong outputs have longer gradients than right ones, as on
the base of arithmetic, it takes a higher pass rate, so that RLOO has more variance there than none,
and b* less than RLOO, even if it is estimated from seven outputs. The mean of a group shrinks the
gradient to (G - 1) / G, that of a batch to (P G - 1) / (P G). b*(s) is the best of all baselines,
as each state has weights of its own. V(s) has less variance than one number in most policies, but
not in all, since it may be worse than b* in the first state, and V(s) is within a tenth of b*(s).
What no baseline removes, the chance of the steps that follow, is more than what a baseline for each
state gains on one number: values of actions, Q(s, a) instead of the reward, halve the variance
again.

Method. Exactly: a policy of three outputs, one of them right, and all batches of two groups of
three; the variance is that of the gradient scaled back where it is shrunk. Measured: 160 outputs of
the base to each of 16 problems, the gradient of each, and the variance of groups of 8 dealt from
them; what is known is taken from the 159 other outputs. By state, exactly: 200 policies of each
kind over outputs of three tokens out of three, of which 1, 3 or 9 are right; logits are normal,
with a standard deviation of 1 or, for policies that have made up their mind, 3. Each of the 13
states has logits of its own.

Outcome. Right, but for two: V(s) is within a tenth of b*(s) in a third of the policies alone, and
values of actions halve what b*(s) leaves in no more.
"""
import statistics

import numpy
import torch

import reinforce
from lab.draw import BLUE, GREY, dots
from lab.experiment import Experiment, numbers
from lab.training import load_base
from lab.verdict import OURS, Claim

AHMADIAN = "[Ahmadian and others](https://arxiv.org/abs/2402.14740)"
OPO = "[OPO](https://arxiv.org/abs/2505.23585)"
GREENSMITH = "Greensmith and others, 2004"
VINE = "[VinePPO](https://arxiv.org/abs/2410.01679)"
P = 2                                           # of the small policy
G = 3
RATES = {f"pass rate {rate}": rate for rate in (0.03, 0.1, 0.3, 0.5, 0.7, 0.9)}
LEFT = {"none": 1, "batch": 1 - 1 / (P * G), "mean": 1 - 1 / G, "rloo": 1, "optimal": 1,
        "known mean": 1, "known b*": 1}         # of the gradient, by each baseline
PROBLEMS = 16                                   # of the base
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
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(5))


# ---- 1. one number, exactly ------------------------------------------------------------------

@EXPERIMENT.measure(RATES, seeds=[0])
def small_policy(seed, case):
    """Of a policy that is right at this rate, and each baseline: which part of the gradient is
    there on average, and the variance of the gradient divided by this part."""
    rate = RATES[case]
    p = torch.tensor([rate, (1 - rate) / 2, (1 - rate) / 2], dtype=torch.float64)
    rewards = torch.tensor([1, 0, 0], dtype=torch.float64)
    gradients = torch.eye(3) - p                        # of log p by its logits, a row each
    norms = gradients.square().sum(dim=1)
    true = (p * rewards) @ gradients
    batches = torch.cartesian_prod(*[torch.arange(3)] * (P * G)).view(-1, P, G)
    chance = p[batches].flatten(1).prod(dim=1)
    known = {"known mean": rate, "known b*": reinforce.optimal_baseline(rewards, norms, p)}
    found = {}
    for name in LEFT:
        if name in known:
            A = rewards[batches] - known[name]
        else:
            A = torch.stack([reinforce.advantages(rewards[batch], name, norms[batch])
                             for batch in batches])
        estimates = (A[..., None] * gradients[batches]).mean(dim=(1, 2))
        part = (chance @ estimates) @ true / (true @ true)
        square = (estimates / part - true).square().sum(dim=1)
        found[f"{name}: part"] = part.item()
        found[name] = (chance @ square).item()
    return found


# ---- 2. one number, on the base --------------------------------------------------------------

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
        own = between.trace()
        of_others = (between.sum() - own) / (n * (n - 1))
        variances.append((own / n - of_others).item())
    return statistics.mean(variances)


@EXPERIMENT.measure(["arithmetic"])
def base(seed, case):
    """The variance with each of ESTIMATORS, summed over problems."""
    flags = f"--seed {seed} --num_prompts {PROBLEMS} --num_generations {SAMPLES}"
    cfg, task, policy = load_base(reinforce, flags)
    batch = reinforce.sample_batch(policy, task, cfg, 0)
    found = dict.fromkeys(ESTIMATORS, 0.0)
    norms = []
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


# ---- 3. by state, exactly --------------------------------------------------------------------

OUTPUTS = torch.cartesian_prod(*[torch.arange(3)] * 3)                          # (N, 3) actions
# The states that an output goes through: () is 0, the prefixes of one token 1 .. 3, of two 4 .. 12.
FIRST, SECOND, _ = OUTPUTS.T
STATES = torch.stack([0 * FIRST, 1 + FIRST, 4 + 3 * FIRST + SECOND], dim=1)     # (N, 3)


def mean_behind(prefix_length, x, weights):
    """The weighted mean of x over the outputs that begin alike, for each output. (N,) -> (N,)"""
    groups = (weights * x).view(3 ** prefix_length, -1).sum(dim=1)
    total = weights.view(3 ** prefix_length, -1).sum(dim=1)
    return (groups / total).repeat_interleave(len(x) // len(total))


def variances(seed, spread, right):
    """The variance of the gradient of a random policy with each of WAYS. -> {way: float}"""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(13, 3, generator=generator).double()
    p = logits.softmax(dim=-1)
    winners = torch.randperm(len(OUTPUTS), generator=generator)[:right]
    R = torch.zeros(len(OUTPUTS)).double().index_fill(0, winners, 1.0)          # (N,)
    chance = p[STATES, OUTPUTS].prod(dim=1)                                     # (N,)
    gradient = torch.eye(3).double()[OUTPUTS] - p[STATES]                                # (N, 3, 3)
    norms = gradient.square().sum(dim=-1)                                       # (N, 3)
    V = [mean_behind(t, R, chance) for t in range(4)]
    best = mean_behind(0, R, chance * norms.sum(dim=1))
    best_by_state = [mean_behind(t, R, chance * norms[:, t]) for t in range(3)]
    credit = {
        "none": [R] * 3, "mean": [R - V[0]] * 3, "b*": [R - best] * 3,
        "V(s)": [R - value for value in V[:3]], "b*(s)": [R - value for value in best_by_state],
        "Q - V": [V[t + 1] - V[t] for t in range(3)]}
    found = {}
    for way in WAYS:
        by_state = torch.zeros(len(OUTPUTS), 13, 3).double()
        row = torch.arange(len(OUTPUTS))[:, None]
        by_state[row, STATES] = torch.stack(credit[way], dim=1)[..., None] * gradient
        estimates = by_state.flatten(1)
        errors = estimates - chance @ estimates
        found[way] = (chance @ errors.square().sum(dim=1)).item()
    return found


@EXPERIMENT.measure(KINDS, seeds=[0])
def states(seed, kind):
    found = [variances(seed + number, *KINDS[kind]) for number in range(POLICIES)]
    return {way: [one[way] for one in found] for way in WAYS}


# ---- 4. what was found -----------------------------------------------------------------------

def medians(columns):
    """Of policies, the variances as shares of that without a baseline. -> {way: median}"""
    return {way: numpy.median(columns[way] / columns["none"]) for way in WAYS}


def page(small_policy, base, states):
    [measured] = base.values()
    share = {name: measured[name] / measured["none"] for name in ESTIMATORS}
    more = share["RLOO"].mean() - 1
    noisier = Claim("on the base, RLOO has less variance than none", AHMADIAN, share["RLOO"],
                    at_most=0.95, times=True, contradicted=f"RLOO's baseline adds {more:.0%} to "
                    f"the variance where {measured['pass rate'].mean():.0%} of the outputs are "
                    f"right, estimated b* {share['estimated b*'].mean() - 1:.0%}",
                    shown=f"RLOO's baseline takes {-more:.0%} of the variance")
    yield noisier
    for less, other, source in (("estimated b*", "RLOO", OPO), ("estimated b*", "none", OPO),
                                ("known b*", "known mean", GREENSMITH)):
        yield Claim(f"on the base, {less} has less variance than {other}", source,
                    share[less] / share[other], at_most=0.95, times=True)
    ratios = []
    for found in small_policy.values():
        ratios += [found["known b*"] / found["none"], found["known b*"] / found["known mean"]]
    yield Claim("exactly, neither 0 nor the mean reward has less variance than b*", GREENSMITH,
                ratios, at_most=1, times=True, exact=True)
    off = [found[f"{name}: part"] - LEFT[name] for name in LEFT for found in small_policy.values()]
    yield Claim("exactly, the mean of a group shrinks the gradient to (G - 1) / G, that of a batch "
                "to (P G - 1) / (P G), no other baseline does: how far off", "Williams, 1992", off,
                at_least=-1e-5, at_most=1e-5, exact=True)

    found = {way: numpy.concatenate([kind[way][0] for kind in states.values()]) for way in WAYS}
    least = numpy.min([found[way] for way in ("none", "mean", "b*", "V(s)")], axis=0)
    yield Claim("by state, no baseline has less variance than b*(s), in any policy", GREENSMITH,
                found["b*(s)"] / least, at_most=1 + 1e-5, times=True, exact=True)
    for text, source, is_so in (
            ("V(s) has less variance than one number, b*", VINE, found["V(s)"] < found["b*"]),
            ("V(s) has at most a tenth more variance than b*(s)", OURS,
             found["V(s)"] <= 1.1 * found["b*(s)"]),
            ("values of actions leave at most half of the variance of b*(s)", OURS,
             found["Q - V"] <= found["b*(s)"] / 2)):
        yield Claim(f"by state, in most policies {text}", source, is_so, at_least=0.5,
                    unit="of policies")

    yield dots(share, noisier.finding, given={"none": GREY}, level=(1, "no baseline"),
               xlabel=f"variance, that of none being 1, on the base; groups of {GROUP}")
    by_kind = {kind: values["V(s)"][0] / values["b*"][0] for kind, values in states.items()}
    worse = (found["V(s)"] > found["b*"]).mean()
    yield dots(by_kind, f"A value for each state is noisier than one number, b*, in {worse:.0%} of "
               "policies", given=dict.fromkeys(by_kind, BLUE), level=(1, "as much as b*"),
               xscale="log", xlabel="variance with V(s) / with b*; a dot for each of 200 policies")
    heads = {"pass rate": "pass rate", "right": "squared length, gradients of right outputs",
             "wrong": "of wrong outputs"}
    yield numbers(base, heads | {name: f"variance, {name}" for name in ESTIMATORS}, by="base")
    rows = {case: {name: columns[name] / columns["none"] for name in LEFT}
            for case, columns in small_policy.items()}
    yield numbers(rows, {name: name for name in LEFT}, ".2f", by="small policy, none being 1")
    rows = {kind: medians(columns) for kind, columns in states.items()}
    yield numbers(rows, {way: way for way in WAYS}, ".2f", by="by state, medians, none being 1")
