"""Distill: what a teacher gains, and what is lost if it sends less than its whole vocabulary

Trains from the same bases with GRPO, and with a teacher that writes or that reads the student's
outputs. Each run is stored in runs/lab-distill/, so an interrupted measurement continues.
docs/lab/distill.md explains the experiment.
"""
import functools
import itertools
import json
from pathlib import Path

import numpy
import torch
from torch.nn.utils import parameters_to_vector

import grpo
import plumbing
import reinforce
from examples import distill
from lab.draw import curves
from lab.experiment import Experiment, means, numbers, ratio, steps_to_level, transposed
from lab.training import clear_gradient, load_base, training
from lab.verdict import OURS, Claim

FLAGS = "--num_prompts 8 --num_generations 8"
OUTPUTS = 64                                    # in a batch
BATCHES = 24
RATES = ("2.5e-4", "5e-4", "1e-3")
LEVEL, WINDOW = 0.6, 4          # accuracy that a side has to reach, on average in four batches
FEWER = 1.2                     # smallest ratio of numbers of outputs that matters
NOISE = 2                       # smallest ratio of variances that matters
LOSS = 0.02                     # smallest difference of an accuracy that matters
HARDLY = 0.05                   # gain of accuracy that is hardly anything
MASS = 0.95                     # probability of the 8 tokens that counts as lost below
DRAWS = 24                      # batches whose gradients are compared
TEACHER = "--textbook_share 1 --base_seed 1000"         # a base that has never read the forum
MODE = "--distillation_mode"
GRPO, WHOLE, SAMPLED, IMITATION, REST, NO_REST = SIDES = (
    "GRPO", "whole vocabulary", "sampled token", "imitation", "top 8 and the rest",
    "top 8 without the rest")
TUNED = SIDES[:4]
MODES = {GRPO: "", WHOLE: "", SAMPLED: f"{MODE} sampled_token",
         IMITATION: f"{MODE} sampled_token --beta 0 --lmbda 0",
         REST: f"{MODE} topk_logits", NO_REST: f"{MODE} topk_logits --no-distillation_add_tail"}
LONG = "--task countdown --base_seed 20 --learning_rate 1e-3"
PARTS = {"all tokens": (0, 1), "first 30%": (0, 0.3), "last 30%": (0.7, 1)}
SEEDS = range(20, 28)
TUNING, JUDGED = SEEDS[:3], SEEDS[3:]
VERL = "[verl#5041](https://github.com/verl-project/verl/pull/5041)"
TAIL = "[verl#7856](https://github.com/verl-project/verl/issues/7856)"
EXPERIMENT = Experiment(__file__, JUDGED, rate="")


def stored(function):
    """Make a measure store each of its results, and load those that it has stored."""
    @functools.wraps(function)
    def measure(seed, case):
        path = Path("runs/lab-distill", f"{function.__name__}, {case}, {seed}.json")
        if not path.exists():
            plumbing.write(path, json.dumps(function(seed, case)))
        return json.loads(path.read_text("utf-8"))
    return measure


def prepare(script, flags, seed):
    """Make the student, which is a base, and its teacher. -> Config, task, student, teacher"""
    cfg = plumbing.parse_flags(
        script.Config, f"{FLAGS} --base_seed {seed} {flags} --seed {seed}".split())
    _, task, student = load_base(reinforce, f"--task {cfg.task} --base_seed {cfg.base_seed}")
    *_, teacher = load_base(reinforce, f"--task {cfg.task} {TEACHER}")
    return cfg, task, student, teacher


def batches(flags, seed, low=0, high=1):
    """Train like examples/distill.py, on the tokens of each output from the share `low` of its
    length to the share `high`. Yields what the student wrote before it learned, and metrics."""
    cfg, task, student, teacher = prepare(distill, flags, seed)
    optimizer = torch.optim.AdamW(student.parameters(), lr=cfg.learning_rate, weight_decay=0.0)
    for step in itertools.count():
        own = batch = reinforce.sample_batch(student, task, cfg, step)
        if cfg.lmbda == 0:
            batch = reinforce.sample_batch(teacher, task, cfg, step)
        place = (batch.mask.cumsum(dim=1) - 1) / batch.mask.sum(dim=1, keepdim=True)    # (B, T)
        batch.mask = batch.mask * (place >= low) * (place < high)
        yield own, distill.update(student, teacher, optimizer, batch, cfg, step)


def learn(side, rate, seed):
    """Train from a base with one side. -> {column: a number for each batch}"""
    flags = f"--learning_rate {rate} {MODES[side]}"
    if side == GRPO:
        return record(training(grpo, *prepare(grpo, flags, seed)[:3]))
    return record(batches(flags, seed))


def record(steps):
    """Record the first batches of a training. -> {column: a number for each batch}"""
    return transposed([{"accuracy": batch.is_correct.double().mean().item(),
                        "mass": metrics.get("student_mass")}
                       for batch, metrics in itertools.islice(steps, BATCHES)])


@EXPERIMENT.measure([f"{side}, {rate}" for side in TUNED for rate in RATES], TUNING)
@stored
def tuning(seed, case):
    return learn(*case.rsplit(", ", 1), seed)


@functools.cache
def best_rate(side):
    """Choose the rate with the fewest outputs to LEVEL on the tuning seeds. A run that never gets
    there counts as BATCHES, and top 8 takes the rate of the whole vocabulary. -> str"""
    side = side if side in TUNED else WHOLE
    return min(RATES, key=lambda rate: needed(numpy.array(
        [tuning(seed, f"{side}, {rate}")["accuracy"] for seed in TUNING])).clip(max=BATCHES).mean())


@EXPERIMENT.measure(SIDES)
@stored
def sides(seed, side):
    rate = best_rate(side)
    return learn(side, rate, seed) | {"rate": float(rate)}


@EXPERIMENT.measure([WHOLE, SAMPLED])
@stored
def noise(seed, side):
    """Compute the gradients of the base on several batches. -> the variance of their sum over
    weights, and the squared norm of their mean"""
    cfg, task, student, teacher = prepare(distill, MODES[side], seed)
    gradients = []
    for draw in range(DRAWS):
        batch = reinforce.sample_batch(student, task, cfg, ("noise", draw))
        clear_gradient(student)
        distill.backward(student, teacher, batch, torch.arange(OUTPUTS), cfg)
        gradients.append(parameters_to_vector(weight.grad for weight in student.parameters()))
    gradients = torch.stack(gradients)                                          # (DRAWS, n)
    return {"variance": gradients.var(dim=0).sum().item(),
            "squared mean": gradients.mean(dim=0).square().sum().item()}


@EXPERIMENT.measure(PARTS)
@stored
def parts(seed, part):
    """Train on countdown with a part of each output."""
    return record(batches(LONG, seed, *PARTS[part]))


def needed(accuracy):
    """Count the batches to LEVEL. (S, T) -> (S,)"""
    return steps_to_level(accuracy, LEVEL, WINDOW)


def mean(columns, place, column="accuracy"):
    """Average over four batches, the first ones (place 0) or the last ones (-1). -> (S,)"""
    return means(columns[column], WINDOW)[:, place]


def page(tuning, sides, noise, parts):
    took = {side: needed(columns["accuracy"]) for side, columns in sides.items()}
    outputs = {side: OUTPUTS * numpy.minimum(counts, BATCHES).mean()
               for side, counts in took.items()}

    def fewer(other, side):
        return ratio(took[other], took[side], BATCHES, smallest=WINDOW - 1) | {"at_least": FEWER}
    title = (f"With a teacher, 6 of 10 outputs are right after {outputs[WHOLE]:.0f} outputs, and "
             f"with GRPO after {outputs[GRPO]:.0f}")
    yield Claim("GRPO needs more outputs than a teacher's whole vocabulary", "after Qwen3",
                **fewer(GRPO, WHOLE), said=title)
    lines = {side: means(sides[side]["accuracy"], WINDOW) for side in TUNED}
    yield curves(lines, title, OUTPUTS * numpy.arange(WINDOW, BATCHES + 1), ylabel="accuracy",
                 xlabel=f"outputs, the last {WINDOW * OUTPUTS} of which are averaged")
    yield Claim("imitation of the teacher's outputs needs more of them than the whole vocabulary "
                "needs of the student's own", "after GKD", **fewer(IMITATION, WHOLE))
    yield Claim("the sampled token needs more outputs than the whole vocabulary", OURS,
                **fewer(SAMPLED, WHOLE))
    yield Claim("at the base, the gradient of the sampled token has a larger variance than that of "
                "the whole vocabulary", OURS,
                (noise[SAMPLED]["variance"], noise[WHOLE]["variance"]), at_least=NOISE, times=True)
    mass = {side: mean(sides[side], -1, "mass") for side in SIDES[1:]}
    yield Claim("without the rest, the student takes probability away from the teacher's 8 most "
                "likely tokens (their probability at the end)", VERL, mass[NO_REST], at_most=MASS)
    yield Claim("with the rest as one event, the 8 tokens keep their probability", f"after {TAIL}",
                mass[REST], at_least=MASS)
    everything, first, last = parts.values()
    yield Claim("on countdown, the first 30% of the tokens of each output end with the accuracy of "
                "all tokens", "after Zhang and others", (mean(first, -1), mean(everything, -1)),
                at_least=-LOSS)
    yield Claim("on countdown, the last 30% of the tokens gain hardly any accuracy", OURS,
                (mean(last, -1), mean(last, 0)), at_most=HARDLY)

    yield numbers({side: {
        "best rate": columns["rate"], f"outputs to an accuracy of {LEVEL}": OUTPUTS * took[side],
        "accuracy at the end": mean(columns, -1)} for side, columns in sides.items()}, by="side")
    yield numbers({side: {"at the end": values} for side, values in mass.items()},
                  by="probability of the teacher's 8 most likely tokens")
    yield numbers(noise, form=".2g", by="gradient at the base")
    yield numbers({part: {f"accuracy in the first {WINDOW} batches": mean(columns, 0),
                          f"in the last {WINDOW}": mean(columns, -1)}
                   for part, columns in parts.items()}, by="tokens that count, on countdown")
