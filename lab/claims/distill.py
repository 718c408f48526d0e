"""Distill: what a teacher gains, and what is lost if it sends less than its whole vocabulary

Trains from the same bases with GRPO, and with a teacher that writes or that reads the student's
outputs.
"""
import itertools

import numpy
import torch
from torch.nn.utils import parameters_to_vector

import grpo
import plumbing
import reinforce
from examples import distill
from lab.draw import curves
from lab.experiment import Experiment, at_best_rates, means, numbers, ratio, steps_to_level
from lab.training import clear_gradient, load_base, training
from lab.verdict import OURS, Claim

FLAGS = "--num_prompts 8 --num_generations 8"
OUTPUTS = 64                                    # in a batch
BATCHES = 24
RATES = ("2.5e-4", "5e-4", "1e-3")
LEVEL, WINDOW = 0.6, 4          # accuracy that a side has to reach, on average in four batches
MASS = 0.95                     # probability of the 8 tokens that counts as lost below
DRAWS = 24                      # batches whose gradients are compared
TEACHER = "--textbook_share 1 --base_seed 1000"         # a base that has never read the forum
MODE = "--distillation_mode"
GRPO, WHOLE, SAMPLED, IMITATION, REST, NO_REST = (
    "GRPO", "whole vocabulary", "sampled token", "imitation", "top 8 and the rest",
    "top 8 without the rest")
TUNED = (GRPO, WHOLE, SAMPLED, IMITATION)
MODES = {GRPO: "", WHOLE: "", SAMPLED: f"{MODE} sampled_token",
         IMITATION: f"{MODE} sampled_token --beta 0 --lmbda 0",
         REST: f"{MODE} topk_logits", NO_REST: f"{MODE} topk_logits --no-distillation_add_tail"}
# the cases at the best rates that `tuning` finds; top 8 takes the rate of the whole vocabulary
JUDGED = [f"{side}, {'5e-4' if side == SAMPLED else '1e-3'}" for side in MODES]
LONG = "--task countdown --base_seed 20 --learning_rate 1e-3"
PARTS = {"all tokens": (0, 1), "first 30%": (0, 0.3), "last 30%": (0.7, 1)}
SEEDS = range(20, 28)
EXPERIMENT = Experiment(__file__, SEEDS[3:], rate="")


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


def record(steps):
    """Record the first batches of a training. -> {column: a number for each batch}"""
    steps = list(itertools.islice(steps, BATCHES))
    return {"accuracy": [batch.is_correct.double().mean().item() for batch, _ in steps],
            "mass": [metrics.get("student_mass") for _, metrics in steps]}


def learn(seed, case):
    """Train from a base with one side at one rate. -> {column: a number for each batch}"""
    side, rate = case.rsplit(", ", 1)
    flags = f"--learning_rate {rate} {MODES[side]}"
    if side == GRPO:
        return record(training(grpo, *prepare(grpo, flags, seed)[:3]))
    return record(batches(flags, seed))


EXPERIMENT.measure([f"{side}, {rate}" for side in TUNED for rate in RATES], SEEDS[:3],
                   "tuning")(learn)
EXPERIMENT.measure(JUDGED, name="judging")(learn)


@EXPERIMENT.measure([WHOLE, SAMPLED])
def noise(seed, side):
    """Compute the gradients of the base on some batches. -> their variance, summed over weights"""
    cfg, task, student, teacher = prepare(distill, MODES[side], seed)
    gradients = []
    for draw in range(DRAWS):
        batch = reinforce.sample_batch(student, task, cfg, ("noise", draw))
        clear_gradient(student)
        distill.backward(student, teacher, batch, torch.arange(OUTPUTS), cfg)
        gradients.append(parameters_to_vector(weight.grad for weight in student.parameters()))
    return {"variance": torch.stack(gradients).var(dim=0).sum().item()}


@EXPERIMENT.measure(PARTS)
def parts(seed, part):
    """Train on countdown with a part of each output."""
    return record(batches(LONG, seed, *PARTS[part]))


def needed(columns):
    """Count the batches to LEVEL. -> (S,)"""
    return steps_to_level(columns["accuracy"], LEVEL, WINDOW)


def mean(columns, place, column="accuracy"):
    """Average over four batches, the first ones (place 0) or the last ones (-1). -> (S,)"""
    return means(columns[column], WINDOW)[:, place]


def page(tuning, judging, noise, parts):
    best = at_best_rates(tuning, judging, TUNED, RATES,
                         lambda columns: needed(columns).clip(max=BATCHES))
    took = {side: needed(columns) for side, columns in best.items()}
    outputs = {side: OUTPUTS * numpy.minimum(counts, BATCHES).mean()
               for side, counts in took.items()}

    def fewer(other, side):
        return ratio(took[other], took[side], BATCHES, smallest=WINDOW - 1) | {"at_least": 1.2}
    yield Claim("GRPO needs more outputs than a teacher's whole vocabulary", "after Qwen3",
                **fewer(GRPO, WHOLE), said="With a teacher, 6 of 10 outputs are right after "
                f"{outputs[WHOLE]:.0f} outputs, and with GRPO after {outputs[GRPO]:.0f}")
    yield curves({side: means(columns["accuracy"], WINDOW) for side, columns in best.items()},
                 OUTPUTS * numpy.arange(WINDOW, BATCHES + 1), ylabel="accuracy",
                 xlabel=f"outputs, the last {WINDOW * OUTPUTS} of which are averaged")
    yield Claim("imitation of the teacher's outputs needs more of them than the whole vocabulary "
                "needs of the student's own", "after GKD", **fewer(IMITATION, WHOLE))
    yield Claim("the sampled token needs more outputs than the whole vocabulary", OURS,
                **fewer(SAMPLED, WHOLE))
    yield Claim("at the base, the gradient of the sampled token has a larger variance than that of "
                "the whole vocabulary", OURS,
                (noise[SAMPLED]["variance"], noise[WHOLE]["variance"]), at_least=2, times=True)
    mass = {case: mean(judging[case], -1, "mass") for case in JUDGED[1:]}
    *_, of_rest, of_no_rest = mass.values()
    yield Claim("without the rest, the student takes probability away from the teacher's 8 most "
                "likely tokens (their probability at the end)", "verl#5041", of_no_rest,
                at_most=MASS)
    yield Claim("with the rest as one event, the 8 tokens keep their probability",
                "after verl#7856", of_rest, at_least=MASS)
    everything, first, last = parts.values()
    yield Claim("on countdown, the first 30% of the tokens of each output end with the accuracy of "
                "all tokens", "after Zhang and others", (mean(first, -1), mean(everything, -1)),
                at_least=-0.02)
    yield Claim("on countdown, the last 30% of the tokens gain hardly any accuracy", OURS,
                (mean(last, -1), mean(last, 0)), at_most=0.05)

    yield numbers({case: {f"outputs to an accuracy of {LEVEL}": OUTPUTS * needed(columns),
                          "accuracy at the end": mean(columns, -1)}
                   for case, columns in judging.items()}, by="side, and its learning rate")
    yield numbers({case: {"at the end": values} for case, values in mass.items()},
                  by="probability of the teacher's 8 most likely tokens")
    yield numbers({part: {f"accuracy in the first {WINDOW} batches": mean(columns, 0),
                          f"in the last {WINDOW}": mean(columns, -1)}
                   for part, columns in parts.items()}, by="tokens that count, on countdown")
