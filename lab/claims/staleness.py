"""Staleness: learning from samples of another policy than the one that learns

Samples come from policies several updates old (examples/lag.py), or from a copy of the policy whose
weights are rounded. docs/lab/staleness.md says more.
"""
import copy
import itertools

import torch

from examples import lag
from lab.draw import curves
from lab.experiment import UNSCORED, Experiment, numbers
from lab.training import load_base, training
from lab.verdict import OURS, Claim

UPDATES = 20
LAGS = [0, 1, 4, 8]
CORRECTIONS = {"truncate": "AReaL", "mask": "IcePop"}
RATE = "--num_prompts 12 --learning_rate 0.001"
LAG_RUN = f"examples/lag.py {RATE} {UNSCORED} --sampler_lag"
RUNS = {f"lag {K}": f"{LAG_RUN} {K} --max_steps {UPDATES + K}" for K in LAGS}
RUNS |= {f"lag 8, {name}": f"{RUNS['lag 8']} --importance_sampling_correction {name}"
         for name in CORRECTIONS}
# name: script, bits (0: as they are), whether pi_old is recomputed, correction
ENGINES = {
    "GRPO, exact": ("grpo", 0, False, "none"), "GRPO, 8 bits": ("grpo", 8, False, "none"),
    "GRPO, 4 bits": ("grpo", 4, False, "none"),
    "GRPO, 4 bits, recomputed": ("grpo", 4, True, "none"),
    "GRPO, 4 bits, truncate": ("grpo", 4, True, "truncate"),
    "GSPO, exact": ("gspo", 0, False, "none"), "GSPO, 8 bits": ("gspo", 8, False, "none"),
    "GSPO, 4 bits": ("gspo", 4, False, "none"),
    "GSPO, 4 bits, recomputed": ("gspo", 4, True, "none")}
RANGES = {"grpo": "", "gspo": "--epsilon 3e-4 --epsilon_high 4e-4"}      # of GSPO, its paper's
LAST = 4                                                # batches, for accuracy at the end
LOSS = 0.02                                             # of accuracy, what counts as one
EXPERIMENT = Experiment(__file__, seeds=range(8), one_base=True)
EXPERIMENT.runs("runs", RUNS, ["accuracy"])


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
    cfg, task, policy = load_base(
        script, f"{RATE} {RANGES[method]} --num_eval_problems 128 --num_eval_samples 4 "
                f"--seed {seed}")
    corrected = lag.Config(**vars(cfg), method=method, sampler_lag=int(is_recomputed),
                           importance_sampling_correction=correction)
    steps = training(script, cfg, task, policy, lambda policy: engine(policy, bits),
                     lambda batch: lag.correct_for_lag(policy, batch, corrected)[0])
    clipped = [metrics["clip_ratio/region_mean"] for _, metrics in itertools.islice(steps, UPDATES)]
    return {"pass@1": script.evaluate(policy, task, cfg)["pass@1"], "clipped": clipped}


def page(runs, engines):
    # the policies after 16 to 19 updates, whenever they came to sample
    after = {name: runs[name]["accuracy"][:, -LAST:].mean(axis=1) for name in RUNS}
    said = (f"At twice the usual learning rate, samples 8 batches old give an accuracy of "
            f"{after['lag 8'].mean():.2f}, fresh ones {after['lag 0'].mean():.2f}")
    yield Claim("a lag of 8 costs accuracy", OURS, (after["lag 0"], after["lag 8"]), at_least=LOSS,
                said=said)
    lines = {f"lag {K}": runs[f"lag {K}"]["accuracy"][:, K:] for K in LAGS}
    yield curves(lines, said, range(UPDATES), ylabel="accuracy",
                 xlabel="updates before the samples", xticks=range(0, UPDATES, 5))
    yield Claim("uncorrected, a lag of 1 costs no accuracy", OURS,
                (after["lag 1"], after["lag 0"]), at_least=-LOSS)
    for name, source in CORRECTIONS.items():
        yield Claim(f"with a lag of 8, token weights ({name}) are better than none", source,
                    (after[f"lag 8, {name}"], after["lag 8"]), at_least=LOSS)
    score = {name: found["pass@1"] for name, found in engines.items()}
    for bits in (8, 4):
        grpo, gspo = (score[f"{name}, exact"] - score[f"{name}, {bits} bits"]
                      for name in ("GRPO", "GSPO"))
        yield Claim(f"an engine of {bits} bits costs GSPO, with its paper's range, less pass@1 "
                    "than GRPO", "GSPO", grpo - gspo, at_least=LOSS)
    own = score["GRPO, 4 bits"]
    recomputed = score["GRPO, 4 bits, recomputed"]
    weighted = score["GRPO, 4 bits, truncate"]
    said = (f"GRPO from samples of its 4-bit copy: {own.mean():.0%} right if pi_old is the copy's, "
            f"{recomputed.mean():.0%} if recomputed, {weighted.mean():.0%} if token-weighted, too")
    yield Claim("with 4 bits, GRPO is better if pi_old is recomputed", OURS, (recomputed, own),
                    at_least=LOSS, said=said)
    yield Claim("weighting tokens, too, adds more", "AReaL", (weighted, recomputed), at_least=LOSS)

    rows = {name: {"accuracy after 16 to 19 updates": values} for name, values in after.items()}
    yield numbers(rows, by="sampler")
    rows = {name: {"pass@1": found["pass@1"], "share clipped": found["clipped"].mean(axis=1)}
            for name, found in engines.items()}
    yield numbers(rows, by="engine")
