"""Staleness: learning from samples of another policy than the one that learns.

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
policy whose weights are rounded, the engine's log-probabilities standing in for pi_old, or, with
truncate, corrected by the weight of each token.
"""
import copy
import itertools
import math
import statistics

import torch

import grpo
import gspo
from examples import lag
from lab.entry import compared, draw_points, load_base, mean_and_spread, minus, run_all
from lab.training import side_by_side, training
from tools.runs import rounded

SEEDS = [0, 1, 2, 3, 4]
NOISY_SEEDS = 3                             # as many of them for the rounded engines
UPDATES = 20
LAGS = [0, 1, 4, 8]
CORRECTIONS = ["truncate", "mask", "sequence_truncate", "sequence_mask"]
FLAGS = ["--num_prompts", 12, "--stop_at", 2, "--eval_steps", 1000, "--learning_rate", 0.001]
NO_EVALUATION = ["--num_eval_problems", 1, "--num_eval_samples", 1]
EVALUATION = ["--num_eval_problems", 128, "--num_eval_samples", 4]
LENGTHS = [1, 4, 16, 64, 256, 1024]
NOISES = [0.01, 0.3]                        # about what 8 and 4 bits do
CLIPS = {"GRPO": (0.2, 0.28), "GSPO": (3e-4, 4e-4)}     # the ranges that the scripts have
ENGINES = {                                 # name: script, bits (0: as they are), correction
    "GRPO, exact": ("grpo", 0, "none"),
    "GRPO, 8 bits": ("grpo", 8, "none"),
    "GRPO, 4 bits": ("grpo", 4, "none"),
    "GRPO, 4 bits, truncate": ("grpo", 4, "truncate"),
    "GSPO, exact": ("gspo", 0, "none"),
    "GSPO, 8 bits": ("gspo", 8, "none"),
    "GSPO, 4 bits": ("gspo", 4, "none")}


def variants():
    """{name: script and flags}: the lags, then the corrections of the longest."""
    named = {}
    for K in LAGS:
        flags = ["--sampler_lag", K, "--max_steps", UPDATES + K]
        named[f"lag {K}"] = ["examples/lag.py", *FLAGS, *NO_EVALUATION, *flags]
    for correction in CORRECTIONS:
        flags = ["--importance_sampling_correction", correction]
        named[f"lag 8, {correction}"] = named["lag 8"] + flags
    return named


# ---- noise whose outcomes are all known ------------------------------------------------------

def outcomes(length, noise):
    """log pi - log pi_old of outputs with 0 .. length tokens at +noise, the others at -noise, and
    the chance of each number. -> (length + 1, length), (length + 1,)"""
    numbers = torch.arange(length + 1)
    is_up = (torch.arange(length) < numbers[:, None]).double()
    chances = [math.exp(log_binomial(length, k) - length * math.log(2)) for k in range(length + 1)]
    return noise * (2 * is_up - 1), torch.tensor(chances, dtype=torch.float64)


def log_binomial(n, k):
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def exact_noise(length, noise):
    """{ratio: variance, and of GRPO's and GSPO's the share of tokens that are clipped, half of the
    outputs having A = 1, half -1}"""
    log_rho, chances = outcomes(length, noise)
    nothing = torch.zeros_like(log_rho)
    mask = torch.ones_like(log_rho)
    logs = {"GRPO": grpo.log_ratio(log_rho, nothing, mask),
            "GSPO": gspo.log_ratio(log_rho, nothing, mask)}
    weights = lag.importance_weights(log_rho, nothing, mask, "sequence_truncate", math.inf)
    found = {"product": [variance(weights, chances), None]}
    for name, log_ratio in logs.items():
        clipped = [grpo.is_clipped(log_ratio, sign * mask, *CLIPS[name]) for sign in (1, -1)]
        share = (clipped[0].double() + clipped[1].double()).mean(dim=1) / 2     # (length + 1,)
        found[name] = [variance(log_ratio.exp(), chances),
                       round((chances * share).sum().item(), 5)]
    return found


def variance(values, chances):
    """Over the tokens of all rows, which have these chances; five digits. (N, T), (N,) -> float"""
    mean = (chances * values.mean(dim=1)).sum()
    squares = (values - mean).square().mean(dim=1)                              # (N,)
    return float(f"{(chances * squares).sum().item():.5g}")


# ---- engines that round ----------------------------------------------------------------------

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


def train(name, bits, correction, seed):
    """Learn from samples of an engine. -> pass@1 of the policy, problems, share that is clipped"""
    torch.set_num_threads(1)
    script = lag.METHODS[name]
    cfg, task, policy = load_base(script, *FLAGS, "--seed", seed)
    has_lag = int(correction != "none")                 # else mu stands in for pi_old
    corrected = lag.Config(**vars(cfg), method=name, sampler_lag=has_lag,
                           importance_sampling_correction=correction)
    steps = training(script, cfg, task, policy, lambda policy: engine(policy, bits),
                     lambda batch: lag.correct_for_lag(policy, batch, corrected)[0])
    updates = [metrics for _, metrics in itertools.islice(steps, UPDATES)]
    clipped = statistics.mean(metrics["clip_ratio/region_mean"] for metrics in updates)
    scores = script.evaluate(policy, task, cfg, cfg.num_eval_samples)
    return round(scores["pass@1"], 5), scores["problems"], round(clipped, 5)


@torch.no_grad()
def deviations(bits):
    """The standard deviation of log pi - log mu of a token on the engine's samples from the base,
    that of its mean over an output, and what this would be if tokens were independent."""
    cfg, task, policy = load_base(grpo, "--num_prompts", 64)
    batch = grpo.sample_batch(engine(policy, bits), task, cfg, 0)
    logps, _ = grpo.score(policy, batch.prompts, batch.tokens)
    log_rho = grpo.log_ratio(logps, batch.logps, batch.mask)
    of_tokens = log_rho[batch.mask > 0]
    of_outputs = gspo.log_ratio(logps, batch.logps, batch.mask)[:, 0]
    independent = of_tokens.std() * (1 / batch.mask.sum(dim=1)).mean().sqrt()
    return rounded([of_tokens.std().item(), of_outputs.std().item(), independent.item()])


def measure(seeds):
    noise = {str(noise): [exact_noise(length, noise) for length in LENGTHS] for noise in NOISES}
    rounding = {str(bits): deviations(bits) for bits in (8, 4)}
    some = seeds[:NOISY_SEEDS]
    results = iter(side_by_side(train, [(*words, seed) for words in ENGINES.values()
                                        for seed in some]))
    engines = {}
    for name in ENGINES:
        columns = zip(*[next(results) for _ in some])
        engines[name] = dict(zip(["pass@1", "problems", "clipped"], columns))
    runs = {name: [result["accuracy"] for result in results]
            for name, results in run_all(variants(), seeds, ["accuracy"]).items()}
    return {"noise": noise, "rounding": rounding, "engines": engines, "runs": runs}


# ---- the page --------------------------------------------------------------------------------

def after(found, name):
    """The accuracy of the policies after 16 to 19 updates, of each seed. -> list"""
    return [statistics.mean(values[-4:]) for values in found["runs"][name]]


def tables(found):
    runs = [[name, mean_and_spread(after(found, name))] for name in found["runs"]]
    engines = [[name, mean_and_spread(values["pass@1"]), mean_and_spread(values["clipped"])]
               for name, values in found["engines"].items()]
    rounding = [[bits, *[f"{value:.4f}" for value in values]]
                for bits, values in found["rounding"].items()]
    noise = []
    for size, rows in found["noise"].items():
        for length, row in zip(LENGTHS, rows):
            variances = [f"{row[name][0]:.1e}" for name in ("GRPO", "GSPO", "product")]
            shares = [f"{row[name][1]:.2f}" for name in ("GRPO", "GSPO")]
            noise.append([size, length, *variances, *shares])
    return [(["sampler", "accuracy after 16 to 19 updates"], runs),
            (["noise of a token", "tokens", "variance of GRPO's ratio", "of GSPO's",
              "of the product", "clipped, GRPO", "clipped, GSPO"], noise),
            (["bits", "deviation of log pi / mu of a token", "of its mean over an output",
              "if tokens were independent"], rounding),
            (["engine", f"pass@1 after {UPDATES} updates", "clipped"], engines)]


def claims(found):
    listed = []

    def differences(text, values, form="+.3f"):
        listed.append(compared(text, values, form))

    fresh = after(found, "lag 0")
    for K in LAGS[1:]:
        differences(f"a lag of {K} costs accuracy", minus(fresh, after(found, f"lag {K}")))
    for correction in CORRECTIONS:
        gains = minus(after(found, f"lag 8, {correction}"), after(found, "lag 8"))
        differences(f"with a lag of 8, {correction} is better than none", gains)
    for noise, rows in found["noise"].items():
        smaller = [row["GRPO"][0] / row["GSPO"][0] - 1 for row in rows[1:]]
        differences(f"noise {noise}: GSPO's ratio has less variance, at every length above 1",
                    smaller, ".0f")
        fewer = [row["GRPO"][1] - row["GSPO"][1] for row in rows[1:]]
        differences(f"noise {noise}: GSPO's is clipped less often", fewer, "+.2f")
    scores = {name: engine["pass@1"] for name, engine in found["engines"].items()}
    for bits in (8, 4):
        lost = {name: minus(scores[f"{name}, exact"], scores[f"{name}, {bits} bits"])
                for name in ("GRPO", "GSPO")}
        differences(f"GSPO loses less than GRPO by an engine of {bits} bits",
                    minus(lost["GRPO"], lost["GSPO"]))
    differences("by the weight of a token, GRPO tolerates 4 bits better",
                minus(scores["GRPO, 4 bits, truncate"], scores["GRPO, 4 bits"]))
    return listed


def note(found):
    problems = found["engines"]["GRPO, exact"]["problems"][0]
    return ("Problems, all different: 12 in each batch, with 8 samples each; for the engines "
            f"{problems} held-out ones and {NOISY_SEEDS} seeds; a noise of 0.3 takes the ratio "
            "just past the range of GRPO")


def panels(found):
    def lags(axis):
        for K in LAGS:
            curves = [values[K:] for values in found["runs"][f"lag {K}"]]
            mean = [statistics.mean(step) for step in zip(*curves)]
            axis.plot(range(len(mean)), mean, label=f"lag {K}")
        axis.set(title="learning from old samples", xlabel="updates", ylabel="accuracy",
                 ylim=(0, 1))
        axis.legend(frameon=False, fontsize=8, loc="lower left", ncols=2)

    def corrections(axis):
        names = ["lag 0", "lag 8", *(f"lag 8, {name}" for name in CORRECTIONS)]
        rows = {name: after(found, name) for name in names}
        draw_points(axis, rows, title="corrections", xlabel="accuracy, a point for each seed")

    def variances(axis):
        for name in ("GRPO", "GSPO", "product"):
            values = [row[name][0] for row in found["noise"][str(NOISES[0])]]
            axis.plot(LENGTHS, values, "o-", label=name)
        axis.set(title=f"variance of the ratio, noise {NOISES[0]}", xlabel="tokens of the output",
                 ylabel="variance", xscale="log", yscale="log")
        axis.legend(frameon=False)
    return [lags, corrections, variances]
