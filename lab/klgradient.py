"""KL gradients: what an estimate of the KL pulls at when it is in the loss.

Claim. A good estimate is no good loss: k1 in the loss does nothing, and no estimate summed over
tokens has the gradient of the KL of whole outputs, as k1 in the reward has (Tang and Munos,
2506.09477). k3 in the loss is the loss of KL(pi_ref || pi). Times the ratio, --kl_estimator
k3_ratio, it is that of KL(pi || pi_ref), on samples of an older policy, too (DeepSeek-V3.2,
2512.02556).

Prediction. All of this is exact. k1 is not nothing, though, where GRPO divides by the length: there
its gradient is that of the mean of 1 / |o|, which asks for longer outputs.

Method. Exactly: all outputs of at most four of three tokens, for 100 random policies, references
and older policies; "older" has samples of the last. Two gradients are the same if their cosine is
1 with all of them. The gradient of k1 on samples of an older policy was looked at after the runs of
the experiment KL, to explain what k1 does in them: a batch serves for two steps, and in the second
its samples are such.
"""
import itertools
import statistics

import torch
import torch.nn.functional as F

import grpo
import reinforce
from lab.entry import CONTRADICTED, SHOWN, Claim

SEEDS = [0]
ESTIMATORS = ["k1", "k2", "k3"]
CLOSE = 1e-9                                # of what is equal but for rounding
SAME = {                                    # claims: gradients that are then the same
    "k2 in the loss has the gradient of the KL at given prefixes": "k2 / KL(policy, base)",
    "k3 in the loss has that of KL(base, policy)": "k3 / KL(base, policy)",
    "k1 in the reward has that of the KL of whole outputs": "k1 in the reward / KL of outputs",
    "k3_ratio has that of the KL on samples of an older policy":
        "k3_ratio, older / KL(policy, base), older",
    "k1 in the loss, divided by the length, has that of the mean of 1 / length":
        "k1, by length / mean of 1 / length",
    "k1 in the loss, on samples of an older policy, has that of -KL(older, policy)":
        "k1, older / -KL(older, policy)"}
OTHER = {                                   # claims: gradients that are then not the same
    "k2 in the loss has not that of the KL of whole outputs": "k2 / KL of outputs",
    "k3 in the loss has not that of the KL of whole outputs": "k3 / KL of outputs",
    "k3 in the loss has not that of the KL": "k3 / KL(policy, base)",
    "k3 has not that of the KL on samples of an older policy":
        "k3, older / KL(policy, base), older"}
PAIRS = [pair.split(" / ", 1) for pair in [*SAME.values(), *OTHER.values()]]


def measure(seeds):
    """Of each of PAIRS, and of the norm of k1: least, mean and most over the random policies."""
    found = {}
    for name, values in enumerate_gradients(seeds[0]).items():
        numbers = [min(values), statistics.mean(values), max(values)]
        found[name] = [round(value, 12) for value in numbers]
    return {"found": found}


class Outputs:
    """All outputs of at most four tokens: 1, 2, and 0, which ends them. The chances of a token
    depend on the one before it; a policy is a table of logits (3, 3)."""
    LENGTH = 4

    def __init__(self):
        rows = []
        for length in range(1, self.LENGTH + 1):
            rows += [[*words, 0] for words in itertools.product([1, 2], repeat=length - 1)]
        rows += [[*words] for words in itertools.product([1, 2], repeat=self.LENGTH)]
        padding = [0] * self.LENGTH
        self.tokens = torch.tensor([(row + padding)[:self.LENGTH] for row in rows])     # (N, T)
        self.before = F.pad(self.tokens[:, :-1], (1, 0))        # 0 before the first token
        lengths = torch.tensor([len(row) for row in rows])
        self.mask = (torch.arange(self.LENGTH) < lengths[:, None]).double()     # (N, T)

    def logps(self, table):
        return table.log_softmax(dim=-1)[self.before, self.tokens] * self.mask

    def mean(self, x, sampler, average="constant"):
        """The mean of token losses over all outputs of a sampler, averaged as in a script."""
        chances = self.logps(sampler.detach()).sum(dim=1, keepdim=True).exp()   # (N, 1)
        return grpo.aggregate(len(x) * chances * x, self.mask, average, max_length=self.LENGTH)


def kl_of(table, other, outputs):
    """KL(table || other), exact, at each token of the outputs. -> (N, T)"""
    log_p = table.log_softmax(dim=-1)
    log_q = other.log_softmax(dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)[outputs.before]


def gradients(theta, ref, old, outputs):
    """{name: gradient in theta (9,)} of estimates as losses, and of what they might stand for."""
    logps = outputs.logps(theta)
    ref_logps = outputs.logps(ref)
    log_rho = grpo.log_ratio(logps, outputs.logps(old), outputs.mask)
    losses = {}
    for name in ESTIMATORS:
        losses[name] = outputs.mean(grpo.kl(logps, ref_logps, name), theta)
    k1 = grpo.kl(logps, ref_logps, "k1")
    losses["k1, by length"] = outputs.mean(k1, theta, "sequence_mean")
    for name in ("k1", "k3", "k3_ratio"):
        losses[f"{name}, older"] = outputs.mean(grpo.kl(logps, ref_logps, name, log_rho), old)
    in_reward = reinforce.policy_loss(logps, -k1.detach().sum(dim=1), outputs.mask)
    losses["k1 in the reward"] = outputs.mean(in_reward, theta)
    # what they are compared with
    losses["KL(policy, base)"] = outputs.mean(kl_of(theta, ref, outputs), theta)
    losses["KL(policy, base), older"] = outputs.mean(kl_of(theta, ref, outputs), old)
    losses["KL(base, policy)"] = outputs.mean(kl_of(ref, theta, outputs), theta)
    losses["-KL(older, policy)"] = -outputs.mean(kl_of(old, theta, outputs), old)
    chances = logps.sum(dim=1).exp()
    losses["KL of outputs"] = (chances * (logps - ref_logps).sum(dim=1)).sum()
    losses["mean of 1 / length"] = (chances / outputs.mask.sum(dim=1)).sum()
    return {name: torch.autograd.grad(loss, theta, retain_graph=True)[0].flatten()
            for name, loss in losses.items()}


def enumerate_gradients(seed, draws=100):
    """The cosines of PAIRS, and the norm of k1, for random policies. -> {name: list}"""
    outputs = Outputs()
    generator = torch.Generator().manual_seed(seed)
    found = {"norm of k1": []}
    for _ in range(draws):
        theta, ref, old = torch.randn(3, 3, 3, generator=generator).double()
        gradient = gradients(theta.requires_grad_(), ref, old, outputs)
        found["norm of k1"].append(gradient["k1"].norm().item())
        for one, other in PAIRS:
            cosine = F.cosine_similarity(gradient[one], gradient[other], dim=0).item()
            found.setdefault(f"{one} / {other}", []).append(cosine)
    return found


def tables(found):
    rows = []
    for _, pair in [*SAME.items(), *OTHER.items()]:
        low, mean, high = found["found"][pair]
        rows.append([*pair.split(" / ", 1), f"{mean:.3f} ({low:.3f} - {high:.3f})"])
    return [(["the loss", "compared with", "cosine of the gradients, 100 policies"], rows)]


def claims(found):
    largest = found["found"]["norm of k1"][2]
    listed = [Claim("k1 in the loss has no gradient in the mean", f"norm {largest:.9f}",
                    SHOWN if largest < CLOSE else CONTRADICTED)]
    for text, pair in [*SAME.items(), *OTHER.items()]:
        low, _, high = found["found"][pair]
        is_so = (low > 1 - CLOSE) == (text in SAME)
        listed.append(Claim(text, f"cosine {low:.3f} - {high:.3f}",
                            SHOWN if is_so else CONTRADICTED))
    return listed


def note(found):
    return "31 outputs of at most four of three tokens; no problems, no runs"


def panels(found):
    def cosines(axis):
        pairs = [*SAME.values(), *OTHER.values()]
        for row, pair in enumerate(pairs):
            low, mean, high = found["found"][pair]
            axis.plot([low, high], [row, row], color="C0")
            axis.plot(mean, row, "o", color="C0", markersize=4)
            axis.text(-0.98, row - 0.15, pair.replace(" / ", "  and  ", 1), fontsize=6)
        axis.set_yticks([])
        axis.invert_yaxis()
        axis.set(xlabel="cosine of two gradients: mean, least, most", xlim=(-1, 1.05))
    return [cosines]
