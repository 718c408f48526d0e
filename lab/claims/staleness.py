"""Staleness: learning from samples of a different policy"""
import copy
import itertools

import torch

import grpo
import gspo
from examples import lag
from lab.bench import OURS, UNSCORED, Claim, numbers
from lab.training import load_base, training
from report import chart

SEEDS, ONE_BASE = range(8), True
UPDATES = 20
CORRECTIONS = {"truncate": "AReaL", "mask": "IcePop"}
FLAGS = "--num_prompts 12 --learning_rate 0.001"
RUNS = {f"lag {K}":
        f"examples/lag.py {FLAGS} {UNSCORED} --sampler_lag {K} --max_steps {UPDATES + K}"
        for K in (0, 1, 4, 8)}
RUNS |= {f"lag 8, {name}": f"{RUNS['lag 8']} --importance_sampling_correction {name}"
         for name in CORRECTIONS}
METRICS = ["accuracy"]
# name: (script, bits of the engine's weights, correction); with 0 bits the weights are not rounded,
# and with a correction, even if it is "none", the policy recomputes pi_old
CASES = {"GRPO, exact": (grpo, 0, ""), "GRPO, 8 bits": (grpo, 8, ""), "GRPO, 4 bits": (grpo, 4, ""),
         "GRPO, 4 bits, recomputed": (grpo, 4, "none"),
         "GRPO, 4 bits, truncate": (grpo, 4, "truncate"),
         "GSPO, exact": (gspo, 0, ""), "GSPO, 8 bits": (gspo, 8, ""), "GSPO, 4 bits": (gspo, 4, ""),
         "GSPO, 4 bits, recomputed": (gspo, 4, "none")}
SCORED = "--num_eval_problems 128 --num_eval_samples 4"
RANGES = {grpo: "", gspo: "--epsilon 3e-4 --epsilon_high 4e-4"}     # from GSPO's paper
LAST = 4                        # number of batches that the final accuracy is averaged over
LOSS = 0.02                     # smallest loss of accuracy that matters


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


def measure(case, seed):
    """Train on samples of an engine."""
    script, bits, correction = CASES[case]
    cfg, task, policy = load_base(script, f"{FLAGS} {RANGES[script]} {SCORED} --seed {seed}")

    @torch.no_grad()
    def advantages(batch):
        A = script.advantages(batch.rewards, cfg.scale_rewards).view(-1, 1)     # (B, 1)
        if correction == "":
            return A
        mu = batch.logps
        batch.logps, _ = script.score(policy, batch.prompts, batch.tokens, cfg.temperature)
        return A * lag.importance_weights(batch.logps, mu, batch.mask, correction)  # (B, T)

    steps = training(script, cfg, task, policy, lambda policy: engine(policy, bits), advantages)
    clipped = [metrics["clip_ratio/region_mean"] for _, metrics in itertools.islice(steps, UPDATES)]
    return {"pass@1": script.evaluate(policy, task, cfg)["pass@1"], "clipped": clipped}


def page(x):
    # in a run with lag K, batch u + K is sampled by the policy after u updates, so the last four
    # batches of each run show the policies after 16 to 19 updates
    after = {name: x[name]["accuracy"][:, -LAST:].mean(axis=1) for name in RUNS}
    score = {name: x[name]["pass@1"] for name in CASES}
    yield Claim("samples that are 8 batches old (a lag of 8) cost accuracy", OURS,
                (after["lag 0"], after["lag 8"]), at_least=LOSS, finding="At twice the usual "
                "learning rate, samples that are 8 batches old give an accuracy of "
                f"{after['lag 8'].mean():.2f} instead of {after['lag 0'].mean():.2f} in the last "
                f"{LAST} batches")
    yield Claim("without a correction, a lag of 1 costs no accuracy", OURS,
                (after["lag 1"], after["lag 0"]), at_least=-LOSS)
    for name, source in CORRECTIONS.items():
        yield Claim(f"with a lag of 8, weighting the tokens ({name}) gives a higher accuracy than "
                    "no correction", source, (after[f"lag 8, {name}"], after["lag 8"]),
                    at_least=LOSS)
    for bits in (8, 4):
        of_grpo, of_gspo = (score[f"{name}, exact"] - score[f"{name}, {bits} bits"]
                            for name in ("GRPO", "GSPO"))
        yield Claim(f"sampling from an engine with {bits}-bit weights costs GSPO (with its paper's "
                    "clip range) less pass@1 than it costs GRPO", "GSPO", of_grpo - of_gspo,
                    at_least=LOSS)
    own, recomputed = score["GRPO, 4 bits"], score["GRPO, 4 bits, recomputed"]
    yield Claim("with a 4-bit engine, GRPO gets a higher pass@1 if the policy recomputes pi_old",
                OURS, (recomputed, own), at_least=LOSS,
                finding="If GRPO trains on samples of its own 4-bit copy, its pass@1 is "
                f"{own.mean():.2f}, but {recomputed.mean():.2f} if the policy recomputes pi_old")
    yield Claim("with a 4-bit engine and pi_old recomputed, weighting the tokens raises GRPO's "
                "pass@1 further", "AReaL", (score["GRPO, 4 bits, truncate"], recomputed),
                at_least=LOSS)
    yield lambda axis: chart.dots(axis, after, xlabel="accuracy after 16 to 19 updates")
    yield numbers({name: {"pass@1": score[name],
                          "fraction of tokens clipped": x[name]["clipped"].mean(axis=1)}
                   for name in CASES}, "script and engine")
