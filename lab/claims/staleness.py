"""Staleness: learning from samples of a different policy"""
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
# name: (script, bits of the engine's weights, whether pi_old is recomputed, correction); with 0
# bits the weights are not rounded
ENGINES = {
    "GRPO, exact": ("grpo", 0, False, "none"), "GRPO, 8 bits": ("grpo", 8, False, "none"),
    "GRPO, 4 bits": ("grpo", 4, False, "none"),
    "GRPO, 4 bits, recomputed": ("grpo", 4, True, "none"),
    "GRPO, 4 bits, truncate": ("grpo", 4, True, "truncate"),
    "GSPO, exact": ("gspo", 0, False, "none"), "GSPO, 8 bits": ("gspo", 8, False, "none"),
    "GSPO, 4 bits": ("gspo", 4, False, "none"),
    "GSPO, 4 bits, recomputed": ("gspo", 4, True, "none")}
RANGES = {"grpo": "", "gspo": "--epsilon 3e-4 --epsilon_high 4e-4"}      # from GSPO's paper
LAST = 4                        # number of batches that the final accuracy is averaged over
LOSS = 0.02                     # smallest loss of accuracy that matters
EXPERIMENT = Experiment(__file__, seeds=range(8), one_base=True, rate="1e-3")
EXPERIMENT.runs("runs", RUNS, ["accuracy"])


@torch.no_grad()
def engine(policy, bits):
    """Copy a policy and round its matrices to `bits` bits, or not at all if bits is 0. The largest
    weight of a row sets the step between its rounded values. -> policy"""
    sampler = copy.deepcopy(policy)
    if bits > 0:
        for weight in sampler.parameters():
            step = weight.abs().amax(dim=-1, keepdim=True) / (2 ** (bits - 1) - 1)
            if weight.dim() == 2:
                weight.copy_((weight / step).round() * step)
    return sampler


@EXPERIMENT.measure(ENGINES)
def engines(seed, name):
    """Train on samples of an engine. -> pass@1 of the policy, fraction of tokens clipped"""
    method, bits, is_recomputed, correction = ENGINES[name]
    script = lag.METHODS[method]
    cfg, task, policy = load_base(
        script, f"{RATE} {RANGES[method]} --num_eval_problems 128 --num_eval_samples 4 "
                f"--seed {seed}")
    corrected = lag.Config(**vars(cfg), method=method, sampler_lag=int(is_recomputed),
                           importance_sampling_correction=correction)

    def advantages(batch):
        A = script.advantages(batch.rewards, cfg.scale_rewards).view(-1, 1)     # (B, 1)
        return A * lag.correct_for_lag(policy, batch, corrected)[0]
    steps = training(script, cfg, task, policy, lambda policy: engine(policy, bits), advantages)
    clipped = [metrics["clip_ratio/region_mean"] for _, metrics in itertools.islice(steps, UPDATES)]
    return {"pass@1": script.evaluate(policy, task, cfg)["pass@1"], "clipped": clipped}


def page(runs, engines):
    # in a run with lag K, batch u + K is sampled by the policy after u updates, so the last four
    # batches of each run show the policies after 16 to 19 updates
    after = {name: runs[name]["accuracy"][:, -LAST:].mean(axis=1) for name in RUNS}
    yield Claim("samples that are 8 batches old (a lag of 8) cost accuracy", OURS,
                (after["lag 0"], after["lag 8"]), at_least=LOSS, said="At twice the usual learning "
                "rate, samples that are 8 batches old give an accuracy of "
                f"{after['lag 8'].mean():.2f} instead of {after['lag 0'].mean():.2f} in the last "
                f"{LAST} batches")
    lines = {f"lag {K}": runs[f"lag {K}"]["accuracy"][:, K:] for K in LAGS}
    yield curves(lines, range(UPDATES), ylabel="accuracy", xticks=range(0, UPDATES, 5),
                 xlabel="updates that the sampling policy has had")
    yield Claim("without a correction, a lag of 1 costs no accuracy", OURS,
                (after["lag 1"], after["lag 0"]), at_least=-LOSS)
    for name, source in CORRECTIONS.items():
        yield Claim(f"with a lag of 8, weighting the tokens ({name}) gives a higher accuracy than "
                    "no correction", source, (after[f"lag 8, {name}"], after["lag 8"]),
                    at_least=LOSS)
    score = {name: columns["pass@1"] for name, columns in engines.items()}
    for bits in (8, 4):
        grpo, gspo = (score[f"{name}, exact"] - score[f"{name}, {bits} bits"]
                      for name in ("GRPO", "GSPO"))
        yield Claim(f"sampling from an engine with {bits}-bit weights costs GSPO (with its paper's "
                    "clip range) less pass@1 than it costs GRPO", "GSPO", grpo - gspo,
                    at_least=LOSS)
    own = score["GRPO, 4 bits"]
    recomputed = score["GRPO, 4 bits, recomputed"]
    weighted = score["GRPO, 4 bits, truncate"]
    yield Claim("with a 4-bit engine, GRPO gets a higher pass@1 if the policy recomputes pi_old",
                OURS, (recomputed, own), at_least=LOSS,
                said="If GRPO trains on samples of its own 4-bit copy, its pass@1 is "
                f"{own.mean():.2f}, but {recomputed.mean():.2f} if the policy recomputes pi_old")
    yield Claim("with a 4-bit engine and pi_old recomputed, weighting the tokens raises GRPO's "
                "pass@1 further", "AReaL", (weighted, recomputed), at_least=LOSS)

    rows = {name: {"accuracy after 16 to 19 updates": values} for name, values in after.items()}
    yield numbers(rows, by="lag of the samples, and correction")
    rows = {name: {"pass@1": columns["pass@1"],
                   "fraction of tokens clipped": columns["clipped"].mean(axis=1)}
            for name, columns in engines.items()}
    yield numbers(rows, by="script and engine")
