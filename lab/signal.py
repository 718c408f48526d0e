"""Signal: how many groups teach nothing, and what to do about them.

Claim. A group whose outputs are all right, or all wrong, has no gradient. If a problem is solved
with chance p, this happens with chance p^G + (1 - p)^G. The share of such groups grows in training;
sampling until all groups of a batch have signal then takes fewer steps (DAPO, 2503.14476, section
3.2). DAPO does not count samples.

Prediction. The formula holds where each problem has a p of its own. With the mean pass rate of all
problems it says too little, for it is convex in p. At first hard problems are all wrong, later easy
ones all right, so that the share falls before it grows. At a low temperature nearly every group is
silent. In equal steps, dynamic sampling is better. In equal samples it is not: what it leaves out
had no gradient, and is paid for. A curriculum refuses a problem before it is sampled, so it is a
little better in equal samples.

Method. A base that has seen two thirds of the usual demonstrations, of 2 to 7 operands, so that
problems are hard in several degrees. Half of 128 outputs to each of 96 problems predict how many
groups of the other half are silent (seed 0). Then grpo.py with 64 groups of 4, where silence is
frequent, as it is, with --dynamic_sampling 4, and with --curriculum. All that was sampled is
counted, also the groups that dynamic sampling left out.
"""
import dataclasses
import statistics

import numpy
import torch

import common
import grpo
from lab.entry import (
    NOT_SHOWN,
    SHOWN,
    Claim,
    compared,
    draw_curves,
    load_base,
    mean_and_spread,
    minus,
    sign_test,
)
from lab.training import side_by_side, training
from tools.runs import rounded

SEEDS = [0, 1, 2, 3, 4]
FLAGS = ["--task", "arithmetic:2-7", "--base_steps", 600, "--max_completion_length", 64,
         "--num_eval_problems", 256]
GROUPS = ["--num_prompts", 64, "--num_generations", 4]      # of the runs
VARIANTS = {"plain": [], "dynamic": ["--dynamic_sampling", 4], "curriculum": ["--curriculum"]}
SIZES = (4, 8, 16)                              # G
TEMPERATURES = (1.0, 0.7, 0.5, 0.3, 0.1)
PROBLEMS, OUTPUTS = 96, 128
BUDGET = 6400                                   # samples of a run
EVERY = 4                                       # steps from one evaluation to the next
TOLERANCE = 0.05                                # of a share


# ---- 1. how many groups are silent -----------------------------------------------------------

def predicted(num_right, n, G):
    """The chance that G outputs to a problem are all right or all wrong, estimated without bias
    from n others, of which num_right are right. -> float"""
    some_right = common.pass_at_k(n, num_right, G)
    some_wrong = common.pass_at_k(n, n - num_right, G)
    return (1 - some_right) + (1 - some_wrong)


def silence(is_correct, G):
    """The share of silent groups of G, from one half of the outputs (P, n) to each problem, and as
    it is in the other half. -> dict"""
    seen, others = is_correct.chunk(2, dim=1)                                   # (P, n / 2)
    n = seen.shape[1]
    rate = seen.double().mean().item()
    groups = others.double().reshape(-1, G)
    return {
        "predicted": statistics.mean(predicted(c, n, G) for c in seen.sum(dim=1).tolist()),
        "from the mean": rate ** G + (1 - rate) ** G,
        "measured": 1 - common.has_signal(groups).double().mean().item()}


def measure_silence(seed):
    """Shares of silent groups of the base, for each temperature, and at 1 for each difficulty."""
    cfg, task, policy = load_base(
        grpo, *FLAGS, "--seed", seed, "--num_prompts", PROBLEMS, "--num_generations", OUTPUTS)
    found = {}
    for temperature in TEMPERATURES:
        cfg = dataclasses.replace(cfg, temperature=temperature)
        batch = grpo.sample_batch(policy, task, cfg, 0)
        found[f"temperature {temperature}"] = batch.is_correct
        if temperature == 1:
            levels = torch.tensor([problem.difficulty for problem in batch.problems[::OUTPUTS]])
            for level in levels.unique().tolist():
                found[f"operands {level}"] = batch.is_correct[levels == level]
    return {name: cell(is_correct) for name, is_correct in found.items()}, policy


def cell(is_correct):
    """The pass rate, and the shares of silent groups of each size. -> dict"""
    shares = {"pass rate": round(is_correct.double().mean().item(), 5)}
    for G in SIZES:
        values = silence(is_correct, G)
        shares[str(G)] = {name: round(value, 5) for name, value in values.items()}
    return shares


# ---- 2. training -----------------------------------------------------------------------------

def learn(flags, policy, budget=BUDGET):
    """Train with as many samples as the budget has. -> dict of lists, a number for each step"""
    torch.set_num_threads(1)
    cfg = common.parse_flags(grpo.Config, [str(flag) for flag in flags])
    task = common.load_task(cfg, grpo.verify)
    curves = {name: [] for name in ("samples", "all wrong", "all right", "pass@1")}
    samples = 0
    for batch, _ in training(grpo, cfg, task, policy):
        rates = [rate for _, rate in batch.pass_rates]  # of all groups, also those left out
        samples += len(rates) * cfg.num_generations
        curves["samples"].append(samples)
        curves["all wrong"].append(rates.count(0.0) / len(rates))
        curves["all right"].append(rates.count(1.0) / len(rates))
        is_over = samples >= budget
        score = None
        if is_over or len(curves["samples"]) % EVERY == 0:
            score = grpo.evaluate(policy, task, cfg, num_samples=2)["pass@1"]
        curves["pass@1"].append(score)
        if is_over:
            return {name: rounded(values) for name, values in curves.items()}


def measure(seeds):
    shares, policy = measure_silence(0)
    jobs = [([*FLAGS, *GROUPS, "--seed", seed, *flags], policy)
            for flags in VARIANTS.values() for seed in seeds]
    results = side_by_side(learn, jobs)
    runs = {}
    for name in VARIANTS:
        runs[name] = results[:len(seeds)]
        results = results[len(seeds):]
    return {"silence": shares, "runs": runs}


# ---- 3. what was found -----------------------------------------------------------------------

def evaluated(run):
    """The steps after which a run was evaluated, its samples by then, and its scores. -> lists"""
    steps = [step for step, score in enumerate(run["pass@1"]) if score is not None]
    samples = [run["samples"][step] for step in steps]
    scores = [run["pass@1"][step] for step in steps]
    return steps, samples, scores


def at_equal_samples(run):
    """pass@1 when the budget was spent, between two evaluations if need be. -> float"""
    _, samples, scores = evaluated(run)
    return float(numpy.interp(BUDGET, samples, scores))


def at_equal_steps(run, other):
    """pass@1 of two runs after the last step at which both were evaluated. -> pair of floats"""
    steps = [step for step in evaluated(run)[0] if step in evaluated(other)[0]]
    return run["pass@1"][steps[-1]], other["pass@1"][steps[-1]]


def cells(found, start):
    """The shares of silent groups: (name, G) -> predicted, from the mean, measured; of the names
    that begin with a word. -> dict"""
    listed = {}
    for name, shares in found["silence"].items():
        for G in SIZES if name.startswith(start) else ():
            listed[name, G] = shares[str(G)]
    return listed


def tables(found):
    heads = ["problems", "pass rate"]
    heads += [f"silent, G = {G}: predicted, measured" for G in SIZES]
    rows = []
    for name, shares in found["silence"].items():
        pairs = [shares[str(G)] for G in SIZES]
        rows.append([name, f"{shares['pass rate']:.3f}"])
        rows[-1] += [f"{pair['predicted']:.3f}, {pair['measured']:.3f}" for pair in pairs]
    more = []
    for name, runs in found["runs"].items():
        steps = [len(run["samples"]) for run in runs]
        samples = [run["samples"][-1] / len(run["samples"]) for run in runs]
        scores = [at_equal_samples(run) for run in runs]
        more.append([name, mean_and_spread(steps, ".0f"), mean_and_spread(samples, ".0f"),
                     mean_and_spread(scores)])
    return [(heads, rows), (["run", f"steps with {BUDGET} samples", "samples a step",
                             f"pass@1 after {BUDGET} samples"], more)]


def claims(found):
    runs = found["runs"]
    by_temperature = cells(found, "temperature")
    errors = [abs(cell["measured"] - cell["predicted"]) for cell in by_temperature.values()]
    excess = [cell["measured"] - cell["from the mean"] for cell in by_temperature.values()]
    silent = [by_temperature[f"temperature {t}", 8]["measured"] for t in TEMPERATURES]
    growth = []
    for run in runs["plain"]:
        shares = [a + b for a, b in zip(run["all wrong"], run["all right"])]
        growth.append(statistics.mean(shares[-5:]) - statistics.mean(shares[:5]))
    pairs = [at_equal_steps(*both) for both in zip(runs["dynamic"], runs["plain"])]
    after = {name: [at_equal_samples(run) for run in runs[name]] for name in VARIANTS}
    return [
        Claim(f"p^G + (1 - p)^G, p of each problem, is the share of silent groups (to {TOLERANCE})",
              f"largest error {max(errors):.3f}",
              SHOWN if max(errors) <= TOLERANCE else NOT_SHOWN),
        Claim("with the mean pass rate as p, it says too little",
              f"too little by {mean_and_spread(excess)}", sign_test(excess)),
        Claim("the lower the temperature, the more groups are silent (G = 8)",
              " - ".join(f"{share:.2f}" for share in silent),
              sign_test(minus(silent[1:], silent))),
        compared("in training, the share of silent groups grows", growth),
        compared("in equal steps, dynamic sampling has a higher pass@1",
                 [dynamic - plain for dynamic, plain in pairs]),
        compared("in equal samples, dynamic sampling has a higher pass@1",
                 minus(after["dynamic"], after["plain"])),
        compared("in equal samples, the curriculum has a higher pass@1",
                 minus(after["curriculum"], after["plain"]))]


def note(found):
    return f"Different problems: {PROBLEMS} for the shares, 256 held out for pass@1"


def panels(found):
    def shares(axis):
        for number, G in enumerate(SIZES):
            listed = {name.split()[1]: cell for (name, size), cell
                      in cells(found, "operands").items() if size == G}
            values = {kind: [cell[kind] for cell in listed.values()]
                      for kind in ("predicted", "measured")}
            axis.plot(list(listed), values["predicted"], color=f"C{number}", label=f"G = {G}")
            axis.plot(list(listed), values["measured"], "o", color=f"C{number}")
        axis.set(title="base: line predicted, points measured", xlabel="operands",
                 ylabel="share of silent groups", ylim=(0, 1))
        axis.legend(frameon=False)

    def over_training(axis):
        shares = {name: [run[name] for run in found["runs"]["plain"]]
                  for name in ("all wrong", "all right")}
        draw_curves(axis, shares, title="plain GRPO, G = 4", ylabel="share of groups", ylim=(0, 1))

    def learning(axis):
        for number, (name, runs) in enumerate(found["runs"].items()):
            for run in runs:
                _, samples, scores = evaluated(run)
                axis.plot(samples, scores, color=f"C{number}", alpha=0.2, linewidth=1)
            grid = numpy.linspace(max(evaluated(run)[1][0] for run in runs), BUDGET, 20)
            curves = [numpy.interp(grid, *evaluated(run)[1:]) for run in runs]
            axis.plot(grid, numpy.mean(curves, axis=0), color=f"C{number}", label=name)
        axis.set(title="equal samples", xlabel="samples", ylabel="pass@1 on held-out problems")
        axis.legend(frameon=False)
    return [shares, over_training, learning]
