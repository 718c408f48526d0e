"""Distill: what a teacher gains, and what is lost if it sends less than its whole vocabulary"""
import itertools

import numpy
import torch
from torch.nn.utils import parameters_to_vector

import grpo
import plumbing
import reinforce
from examples import distill
from lab.bench import OURS, Claim, means, numbers, steps_to
from lab.training import clear_gradient, load_base, training
from report import chart

FLAGS = "--num_prompts 8 --num_generations 8"
OUTPUTS = 64                                    # in a batch
BATCHES = 24
RATES = ("2.5e-4", "5e-4", "1e-3")
LEVEL, WINDOW = 0.6, 4          # accuracy that a side has to reach, on average in four batches
TEACHER = "--textbook_share 1 --base_seed 1000"         # a base that has never read the forum
MODE = "--distillation_mode"
GRPO, WHOLE, SAMPLED, IMITATION = TUNED = (
    "GRPO", "whole vocabulary", "sampled token", "imitation")
MODES = {GRPO: "", WHOLE: "", SAMPLED: f"{MODE} sampled_token",
         IMITATION: f"{MODE} sampled_token --beta 0 --lmbda 0",
         "top 8 and the rest": f"{MODE} topk_logits",
         "top 8 without the rest": f"{MODE} topk_logits --no-distillation_add_tail"}
NOISE = {f"noise, {side}": side for side in (WHOLE, SAMPLED)}
PARTS = {"all tokens": (0, 1), "first 30%": (0, 0.3), "last 30%": (0.7, 1)}     # on countdown
LONG = "--task countdown --base_seed 20 --learning_rate 1e-3"
SEEDS = range(20, 28)
# the first three seeds choose a rate for each side, and the others judge at these rates; top 8
# takes the rate of the whole vocabulary
TUNING = [f"{side}, {rate}" for side in TUNED for rate in RATES]
*JUDGED, REST, NO_REST = (
    f"{side}, {'5e-4' if side == SAMPLED else '1e-3'}" for side in MODES)
CASES = [*TUNING, REST, NO_REST, *NOISE, *PARTS]
FEWER = {case: SEEDS[:3] if case in TUNING else SEEDS[3:] for case in CASES if case not in JUDGED}


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


def noise(seed, side):
    """Compute the gradients of the base on some batches. -> their variance, summed over weights"""
    cfg, task, student, teacher = prepare(distill, MODES[side], seed)
    gradients = []
    for draw in range(24):
        batch = reinforce.sample_batch(student, task, cfg, ("noise", draw))
        clear_gradient(student)
        distill.backward(student, teacher, batch, torch.arange(OUTPUTS), cfg)
        gradients.append(parameters_to_vector(weight.grad for weight in student.parameters()))
    return torch.stack(gradients).var(dim=0).sum().item()


def measure(case, seed):
    """Train from a base with one side at one rate, or on countdown with a part of each output; or
    compute the noise of a side's gradient."""
    if case in NOISE:
        return {"variance": noise(seed, NOISE[case])}
    if case in PARTS:
        steps = batches(LONG, seed, *PARTS[case])
    else:
        side, rate = case.rsplit(", ", 1)
        flags = f"--learning_rate {rate} {MODES[side]}"
        steps = (training(grpo, *prepare(grpo, flags, seed)[:3]) if side == GRPO else
                 batches(flags, seed))
    steps = list(itertools.islice(steps, BATCHES))
    return {"accuracy": [batch.is_correct.double().mean().item() for batch, _ in steps],
            "mass": [metrics.get("student_mass") for _, metrics in steps]}


def page(x):
    accuracy = {case: x[case]["accuracy"] for case in CASES if case not in NOISE}
    outputs = {case: OUTPUTS * steps_to(rows, LEVEL, WINDOW) for case, rows in accuracy.items()}
    accuracy = {case: means(rows, WINDOW) for case, rows in accuracy.items()}

    def cost(case):
        return outputs[case][:3].clip(max=OUTPUTS * BATCHES).mean()
    best = {side: min((f"{side}, {rate}" for rate in RATES), key=cost) for side in TUNED}
    took = {side: outputs[case][3:] for side, case in best.items()}
    finding = (f"With a teacher, 6 of 10 outputs are right after {took[WHOLE].mean():.0f} "
               f"outputs, and with GRPO after {took[GRPO].mean():.0f}")
    for side, source, text in (
            (GRPO, "after Qwen3", "GRPO needs more outputs than a teacher's whole vocabulary"),
            (IMITATION, "after GKD", "imitation of the teacher's outputs needs more of them than "
             "the whole vocabulary needs of the student's own"),
            (SAMPLED, OURS, "the sampled token needs more outputs than the whole vocabulary")):
        yield Claim(text, source, took[side] / took[WHOLE], at_least=1.2, ratio=True,
                    finding=finding * (side == GRPO))
    yield lambda axis: chart.curves(
        axis, {side: accuracy[case][3:] for side, case in best.items()},
        OUTPUTS * numpy.arange(WINDOW, BATCHES + 1), ylabel="accuracy",
        xlabel=f"outputs (mean of the last {WINDOW * OUTPUTS})")
    whole, sampled = (x[case]["variance"] for case in NOISE)
    yield Claim("at the base, the gradient of the sampled token has a larger variance than that of "
                "the whole vocabulary", OURS, sampled / whole, at_least=2, ratio=True)
    of_rest, of_no_rest = (x[case]["mass"][:, -WINDOW:].mean(axis=1) for case in (REST, NO_REST))
    yield Claim("without the rest, the student takes probability away from the teacher's 8 most "
                "likely tokens (their probability at the end)", "verl#5041", of_no_rest,
                at_most=0.95)
    yield Claim("with the rest as one event, the 8 tokens keep their probability",
                "after verl#7856", of_rest, at_least=0.95)
    everything, first, last = (accuracy[part] for part in PARTS)
    yield Claim("on countdown, the first 30% of the tokens of each output end with the accuracy of "
                "all tokens", "after Zhang and others", (first[:, -1], everything[:, -1]),
                at_least=-0.02)
    yield Claim("on countdown, the last 30% of the tokens gain hardly any accuracy", OURS,
                (last[:, -1], last[:, 0]), at_most=0.05)
    yield numbers({case: {f"outputs to an accuracy of {LEVEL}": outputs[case][-5:],
                          "accuracy at the end": accuracy[case][-5:, -1]}
                   for case in (*JUDGED, REST, NO_REST)}, "side, and its learning rate")
