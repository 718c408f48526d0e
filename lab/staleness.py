"""Staleness: learning from samples of another policy than the one that learns

Claim. Samples may be several batches old if the loss corrects for it, by a weight for each token
that is cut off (2110.00641, 2505.24298) or masked (2510.18855), or for the whole output. An engine
that rounds, or routes to other experts, is such another policy, too; the ratio of whole outputs,
GSPO's, tolerates it better than that of tokens (Zheng and others, 2507.18071), for it averages.

Prediction. One batch of lag costs nothing, eight cost much, and no correction gives it back:
weights of tokens leave the prefixes as they were, weights of outputs leave few outputs. Of noise
that is independent from token to token, GSPO's ratio keeps a share of 1 / length. Yet it is clipped
more often than GRPO's, as its range is 700 times narrower. Rounding to 8 bits hurts neither method,
4 bits hurt GSPO more.

Method. examples/lag.py at twice the usual learning rate, with which a lag of 8 hurt in a
pilot; accuracy is that of the policies after 16 to 19 updates, whenever they came to sample. Then
noise of +s or -s on the log-probability of each token, each with chance 1/2: all its outcomes are
enumerated, so variances and clipped shares are exact. Then training on samples of a copy of the
policy whose weights are rounded: the engine's log-probabilities stand in for pi_old; or pi_old is
recomputed by the policy, with weights of 1; or, with truncate, also corrected by the weight of each
token. (At commit 0516fa1 the second was missing, and what it does was taken for the weight's.)
"""
import copy
import itertools
import math

import torch

import grpo
import gspo
from examples import lag
from lab.draw import GREY, curves, dots
from lab.experiment import Experiment, numbers
from lab.training import load_base, training
from lab.verdict import OURS, Claim
from tools.runs import table

LAG = "[AReaL](https://arxiv.org/abs/2505.24298)"
ICEPOP = "[IcePop](https://arxiv.org/abs/2510.18855)"
GSPO = "[GSPO](https://arxiv.org/abs/2507.18071)"
UPDATES = 20
LAGS = [0, 1, 4, 8]
CORRECTIONS = {"truncate": LAG, "mask": ICEPOP, "sequence_truncate": OURS, "sequence_mask": OURS}
FLAGS = "--num_prompts 12 --stop_at 2 --eval_steps 1000 --learning_rate 0.001"
QUIET = f"examples/lag.py {FLAGS} --num_eval_problems 1 --num_eval_samples 1"
RUNS = {f"lag {K}": f"{QUIET} --sampler_lag {K} --max_steps {UPDATES + K}" for K in LAGS}
RUNS |= {f"lag 8, {name}": f"{RUNS['lag 8']} --importance_sampling_correction {name}"
         for name in CORRECTIONS}
LENGTHS = [1, 4, 16, 64, 256, 1024]
NOISES = {"noise 0.01": 0.01, "noise 0.3": 0.3}         # about what 8 and 4 bits do
CLIPS = {"GRPO": (0.2, 0.28), "GSPO": (3e-4, 4e-4)}     # the ranges that the scripts have
# name: script, bits (0: as they are), whether pi_old is recomputed, correction
ENGINES = {
    "GRPO, exact": ("grpo", 0, False, "none"), "GRPO, 8 bits": ("grpo", 8, False, "none"),
    "GRPO, 4 bits": ("grpo", 4, False, "none"),
    "GRPO, 4 bits, recomputed": ("grpo", 4, True, "none"),
    "GRPO, 4 bits, truncate": ("grpo", 4, True, "truncate"),
    "GSPO, exact": ("gspo", 0, False, "none"), "GSPO, 8 bits": ("gspo", 8, False, "none"),
    "GSPO, 4 bits": ("gspo", 4, False, "none"),
    "GSPO, 4 bits, recomputed": ("gspo", 4, True, "none")}
LOSS = 0.02                                             # of accuracy, what counts as one
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(8))
EXPERIMENT.runs("runs", RUNS, ["accuracy"])


# ---- 1. noise whose outcomes are all known ---------------------------------------------------

def outcomes(length, noise):
    """log pi - log pi_old of outputs with 0 .. length tokens at +noise, the others at -noise, and
    the chance of each number. -> (length + 1, length), (length + 1,)"""
    numbers = torch.arange(length + 1)
    is_up = (torch.arange(length) < numbers[:, None]).double()
    chances = [math.comb(length, k) / 2 ** length for k in range(length + 1)]
    return noise * (2 * is_up - 1), torch.tensor(chances, dtype=torch.float64)


def exact_noise(length, noise):
    """The variance of each ratio, and of GRPO's and GSPO's the share of tokens that are clipped,
    half of the outputs having A = 1, half -1. -> {name: float}"""
    log_rho, chances = outcomes(length, noise)
    nothing = torch.zeros_like(log_rho)
    mask = torch.ones_like(log_rho)
    logs = {"GRPO": grpo.log_ratio(log_rho, nothing, mask),
            "GSPO": gspo.log_ratio(log_rho, nothing, mask)}
    weights = lag.importance_weights(log_rho, nothing, mask, "sequence_truncate", math.inf)
    found = {"variance, product": variance(weights, chances)}
    for name, log_ratio in logs.items():
        clipped = [grpo.is_clipped(log_ratio, sign * mask, *CLIPS[name]) for sign in (1, -1)]
        share = torch.stack(clipped).double().mean(dim=(0, 2))                  # (length + 1,)
        found[f"variance, {name}"] = variance(log_ratio.exp(), chances)
        found[f"clipped, {name}"] = (chances * share).sum().item()
    return found


def variance(values, chances):
    """Over the tokens of all rows, which have these chances. (N, T), (N,) -> float"""
    mean = (chances * values.mean(dim=1)).sum()
    squares = (values - mean).square().mean(dim=1)                              # (N,)
    return (chances * squares).sum().item()


@EXPERIMENT.measure(NOISES, seeds=[0])
def noise(seed, size):
    found = [exact_noise(length, NOISES[size]) for length in LENGTHS]
    return {name: [one[name] for one in found] for name in found[0]}


# ---- 2. engines that round -------------------------------------------------------------------

@torch.no_grad()
def engine(policy, bits):
    """A copy of a policy whose matrices are rounded to so many bits, each row by its largest."""
    sampler = copy.deepcopy(policy)
    if bits > 0:
        for weight in sampler.parameters():
            step = weight.abs().amax(dim=-1, keepdim=True) / (2 ** (bits - 1) - 1)
            if weight.dim() == 2:
                weight.copy_((weight / step).round() * step)
    return sampler


@EXPERIMENT.measure(ENGINES)
def engines(seed, name):
    """Learn from samples of an engine: pass@1 of the policy, and the share that is clipped."""
    method, bits, is_recomputed, correction = ENGINES[name]
    script = lag.METHODS[method]
    cfg, task, policy = load_base(script, f"{FLAGS} --num_eval_problems 128 --seed {seed}")
    corrected = lag.Config(**vars(cfg), method=method, sampler_lag=int(is_recomputed),
                           importance_sampling_correction=correction)
    steps = training(script, cfg, task, policy, lambda policy: engine(policy, bits),
                     lambda batch: lag.correct_for_lag(policy, batch, corrected)[0])
    clipped = [metrics["clip_ratio/region_mean"] for _, metrics in itertools.islice(steps, UPDATES)]
    return {"pass@1": script.evaluate(policy, task, cfg, 4)["pass@1"], "clipped": clipped}


# ---- 3. what was found -----------------------------------------------------------------------

def page(runs, noise, engines):
    # the policies after 16 to 19 updates, whenever they came to sample
    after = {name: found["accuracy"][:, -4:].mean(axis=1) for name, found in runs.items()}
    score = {name: found["pass@1"] for name, found in engines.items()}
    old = Claim("a lag of 8 costs accuracy", OURS, after["lag 0"] - after["lag 8"], at_least=LOSS,
                shown=f"Samples that are 8 batches old: accuracy {after['lag 8'].mean():.2f} "
                f"instead of {after['lag 0'].mean():.2f}")
    yield old
    for K in LAGS[1:3]:
        yield Claim(f"a lag of {K} costs no accuracy", LAG, after[f"lag {K}"] - after["lag 0"],
                    at_least=-LOSS)
    for name, source in CORRECTIONS.items():
        yield Claim(f"with a lag of 8, {name} is better than none", source,
                    after[f"lag 8, {name}"] - after["lag 8"], at_least=LOSS)
    for name, found in noise.items():
        yield Claim(f"{name}: GSPO's ratio has less variance, at every length above 1", GSPO,
                    found["variance, GSPO"][0, 1:] / found["variance, GRPO"][0, 1:],
                    at_most=1, times=True, exact=True)
        yield Claim(f"{name}: GSPO's is clipped less often", GSPO,
                    found["clipped, GSPO"][0, 1:] - found["clipped, GRPO"][0, 1:], at_most=0,
                    exact=True, unit="of tokens")
    lost = {name: score[f"{name.split(',')[0]}, exact"] - values for name, values in score.items()}
    for bits in (8, 4):
        yield Claim(f"GSPO loses less than GRPO by an engine of {bits} bits", GSPO,
                    lost[f"GRPO, {bits} bits"] - lost[f"GSPO, {bits} bits"], at_least=LOSS)
    four = score["GRPO, 4 bits"], score["GRPO, 4 bits, recomputed"], score["GRPO, 4 bits, truncate"]
    trusted = Claim("with 4 bits, GRPO is better if pi_old is recomputed", ICEPOP,
                    four[1] - four[0], at_least=LOSS, shown="Samples of an engine of 4 bits: with "
                    f"its own log-probs {four[0].mean():.2f} are right, with recomputed ones "
                    f"{four[1].mean():.2f}, with weights, too, {four[2].mean():.2f}")
    yield trusted
    yield Claim("the weight of a token adds to that", ICEPOP, four[2] - four[1], at_least=LOSS)

    lines = {}
    for K in LAGS:
        lines[f"lag {K}"] = runs[f"lag {K}"]["accuracy"][:, K:]
    yield curves(lines, old.finding, xlabel="updates", ylabel="accuracy")
    exact = {name: GREY for name in ENGINES if name.endswith("exact")}
    yield dots(score, trusted.finding, given=exact, xlabel="pass@1 after 20 updates on samples of "
               "an engine; a dot for each seed")
    yield numbers({name: {"after": values} for name, values in after.items()},
                  {"after": "accuracy after 16 to 19 updates"}, by="sampler")
    rows = {name: {"pass@1": found["pass@1"], "clipped": found["clipped"].mean(axis=1)}
            for name, found in engines.items()}
    yield numbers(rows, {"pass@1": "pass@1", "clipped": "clipped"}, by="engine")
    columns = list(next(iter(noise.values())))
    yield table(["noise of a token", "tokens", *columns], [
        [name, length, *(f"{found[column][0, i]:.2g}" for column in columns)]
        for name, found in noise.items() for i, length in enumerate(LENGTHS)])
