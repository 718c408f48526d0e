"""Signal: how many groups teach nothing, and what to do about them

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
counted, also the groups that dynamic sampling left out. Intervals are over problems, then seeds.

Outcome. Right: the formula, the share of silent groups that falls before it grows, the low
temperature, equal samples. Wrong: at a temperature of 1 the mean pass rate does as well in the
formula, as problems of this base are about equally hard. Equal steps and the curriculum are
undecided.
"""
import dataclasses

import numpy

import common
import grpo
from lab.draw import BLUE, GREEN, GREY, RED, Picture, curves, name_ends
from lab.experiment import Experiment, numbers
from lab.training import load_base, training
from lab.verdict import OURS, Claim

DAPO = "[DAPO](https://arxiv.org/abs/2503.14476)"
BASE = "--task arithmetic:2-7 --base_steps 600 --max_completion_length 64 --num_eval_problems 256"
SIZES = (4, 8, 16)                              # G
TEMPERATURES = {f"temperature {t}": t for t in (1.0, 0.7, 0.5, 0.3, 0.1)}
HOT, *_, COLD = TEMPERATURES
PROBLEMS, OUTPUTS = 96, 128
FLAGS = f"{BASE} --num_prompts 64 --num_generations 4"
WAYS = {"plain": FLAGS, "dynamic sampling": f"{FLAGS} --dynamic_sampling 4",
        "curriculum": f"{FLAGS} --curriculum"}
BUDGET = 6400                                   # samples of a run
EVERY = 4                                       # steps from one evaluation to the next
GAIN = 0.02                                     # of pass@1, what counts as one
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(8))


def predicted(num_right, n, G):
    """The chance that G outputs to a problem are all right or all wrong, estimated without bias
    from n others, of which num_right are right. -> float"""
    some_right = common.pass_at_k(n, num_right, G)
    some_wrong = common.pass_at_k(n, n - num_right, G)
    return (1 - some_right) + (1 - some_wrong)


@EXPERIMENT.measure(TEMPERATURES, seeds=[0])
def silence(seed, name):
    """Of each problem its pass rate, and of each size the share of silent groups, as predicted and
    as it is. -> (P,) each"""
    flags = f"{BASE} --seed {seed} --num_prompts {PROBLEMS} --num_generations {OUTPUTS}"
    cfg, task, policy = load_base(grpo, flags)
    cfg = dataclasses.replace(cfg, temperature=TEMPERATURES[name])
    batch = grpo.sample_batch(policy, task, cfg, 0)
    seen, others = batch.is_correct.double().chunk(2, dim=1)                    # (P, n) each
    found = {"level": [problem.difficulty for problem in batch.problems[::OUTPUTS]],
             "rate": seen.mean(dim=1).tolist()}
    for G in SIZES:
        groups = others.reshape(-1, G)
        is_silent = 1 - common.has_signal(groups).double().view(PROBLEMS, -1)
        found[f"measured {G}"] = is_silent.mean(dim=1).tolist()
        found[f"predicted {G}"] = [predicted(int(c), seen.shape[1], G) for c in seen.sum(dim=1)]
    return found


@EXPERIMENT.measure(WAYS)
def learning(seed, way, budget=BUDGET):
    """Train with as many samples as the budget has."""
    cfg, task, policy = load_base(grpo, f"{WAYS[way]} --seed {seed}")
    found = {"samples": [], "all wrong": [], "all right": [], "pass@1": []}
    samples = 0
    for steps, (batch, _) in enumerate(training(grpo, cfg, task, policy), 1):
        rates = [rate for _, rate in batch.pass_rates]  # of all groups, also those left out
        samples += len(rates) * cfg.num_generations
        found["samples"].append(samples)
        found["all wrong"].append(rates.count(0.0) / len(rates))
        found["all right"].append(rates.count(1.0) / len(rates))
        score = None
        if samples >= budget or steps % EVERY == 0:
            score = grpo.evaluate(policy, task, cfg, 2)["pass@1"]
        found["pass@1"].append(score)
        if samples >= budget:
            return found


def by_samples(found, grid):
    """pass@1 of each seed after so many samples, between two evaluations if need be. -> (S, n)"""
    rows = []
    for samples, scores in zip(found["samples"], found["pass@1"]):
        is_known = ~numpy.isnan(scores)
        rows.append(numpy.interp(grid, samples[is_known], scores[is_known]))
    return numpy.array(rows)


def at_equal_steps(one, other):
    """How much more pass@1 `one` has after the last step at which both were evaluated. -> (S,)"""
    gains = []
    for pair in zip(one["pass@1"], other["pass@1"]):
        length = min(map(len, pair))
        gain = pair[0][:length] - pair[1][:length]
        is_known = ~numpy.isnan(gain)
        gains.append(gain[is_known][-1])
    return numpy.array(gains)


def page(silence, learning):
    first = [found["samples"][numpy.isfinite(found["pass@1"])].min() for found in learning.values()]
    grid = numpy.linspace(max(first), BUDGET, 25)
    scores = {way: by_samples(found, grid) for way, found in learning.items()}
    end = {way: rows[:, -1] for way, rows in scores.items()}
    plain, dynamic = end["plain"].mean(), end["dynamic sampling"].mean()
    steps = learning["dynamic sampling"], learning["plain"]
    said = f"after {BUDGET} of them pass@1 is {dynamic:.2f}, and without it {plain:.2f}"
    paid = Claim("in equal samples, dynamic sampling has a higher pass@1", OURS,
                 end["dynamic sampling"] - end["plain"], at_least=GAIN,
                 shown=f"Dynamic sampling saves more samples than it costs: {said}",
                 contradicted=f"Dynamic sampling costs more samples than it saves: {said}",
                 undecided=f"Whether dynamic sampling saves samples is undecided: {said}")
    yield paid
    yield Claim("in equal steps, dynamic sampling has a higher pass@1", DAPO,
                at_equal_steps(*steps), at_least=GAIN)
    yield Claim("in equal samples, the curriculum has a higher pass@1", OURS,
                end["curriculum"] - end["plain"], at_least=GAIN)
    silent = learning["plain"]["all wrong"] + learning["plain"]["all right"]
    early = silent[:, :5].mean(axis=1)
    late = silent[:, -5:].mean(axis=1)
    yield Claim("in training, the share of silent groups grows", DAPO, late - early, at_least=0.05)
    hot = {name: values[0] for name, values in silence[HOT].items()}
    yield Claim("p^8 + (1 - p)^8, p of each problem, is the share of silent groups", OURS,
                hot["measured 8"] - hot["predicted 8"], at_least=-0.05, at_most=0.05)
    rate = hot["rate"].mean()
    from_mean = rate ** 8 + (1 - rate) ** 8
    yield Claim("with the mean pass rate as p, it says too little", OURS,
                hot["measured 8"] - from_mean, at_least=0.05)
    yield Claim("at a temperature of 0.1, more groups of 8 are silent than at 1", OURS,
                silence[COLD]["measured 8"][0] - hot["measured 8"], at_least=0.05)

    colours = dict(zip(WAYS, (BLUE, RED, GREEN)))
    yield curves(scores, paid.finding, x=grid, given=colours, xlabel="samples",
                 ylabel="pass@1 on held-out problems")
    shares = {kind: learning["plain"][kind].mean(axis=0) for kind in ("all wrong", "all right")}

    def fill(axis):
        sums = [shares["all wrong"], shares["all wrong"] + shares["all right"]]
        x = range(1, 1 + len(sums[0]))
        axis.fill_between(x, 0, sums[0], color=GREY, alpha=0.5, linewidth=0)
        axis.fill_between(x, *sums, color=GREEN, alpha=0.5, linewidth=0)
        axis.set(xlabel="step of plain GRPO, G = 4", ylabel="share of groups", ylim=(0, 1))
        axis.margins(x=0)
        name_ends(axis, [(sums[0][-1] / 2, "all wrong", GREY),
                         (sum(sums)[-1] / 2, "all right", GREEN)], 0.1)
    yield Picture(f"Groups that teach nothing: {early.mean():.0%} at first, {late.mean():.0%} "
                  "at the end", fill, 2.4)
    rows = {name: found | {"rate": found["rate"].mean()} for name, found in silence.items()}
    for level in numpy.unique(hot["level"]):
        is_such = hot["level"] == level
        rows[f"{level:.0f} operands"] = {name: values[is_such] for name, values in hot.items()}
    rows = {name: {column: values.mean() for column, values in found.items()}
            for name, found in rows.items()}
    heads = {f"{kind} {G}": f"silent, G = {G}: {kind}" for G in SIZES
             for kind in ("predicted", "measured")}
    yield numbers(rows, {"rate": "pass rate"} | heads, by="base")
    last = {way: {"steps": numpy.isfinite(found["samples"]).sum(axis=1), "pass@1": end[way]}
            for way, found in learning.items()}
    yield numbers(last, {"steps": f"steps with {BUDGET} samples",
                         "pass@1": f"pass@1 after {BUDGET} samples"}, by="run")
