"""Signal: how many groups teach nothing, and what to do about them

Claim. A group whose outputs are all right, or all wrong, has no gradient: it is silent. The share
of such groups grows in training; dynamic sampling, until all groups of a batch have signal, then
takes fewer steps (DAPO, 2503.14476, section 3.2). DAPO does not count samples.

Prediction. At first hard problems are all wrong, later easy ones all right, so that the share falls
before it grows. In equal steps, dynamic sampling is better. In equal samples it is not: what it
leaves out had no gradient, and is paid for. A curriculum refuses a problem before it is sampled, so
it is a little better in equal samples.

Method. A base that has seen two thirds of the usual demonstrations, of 2 to 7 operands, so that
problems are hard in several degrees; groups of 4, of which many are silent. grpo.py as it is, with
--dynamic_sampling 4, and with --curriculum. All that was sampled is counted, also the groups that
dynamic sampling left out.

Outcome. Right: the share of silent groups falls before it grows, and from equal samples dynamic
sampling is no better. Undecided: whether it is in equal steps, and what the curriculum gains.
"""
import numpy

import grpo
from lab.draw import BLUE, GREEN, GREY, RED, curves
from lab.experiment import Experiment, numbers
from lab.training import load_base, training
from lab.verdict import OURS, Claim
from tasks import pass_rates

DAPO = "[DAPO](https://arxiv.org/abs/2503.14476)"
BASE = "--task arithmetic:2-7 --base_steps 600 --max_completion_length 64 --num_eval_problems 256"
FLAGS = f"{BASE} --num_prompts 64 --num_generations 4 --num_eval_samples 2"
WAYS = {"plain": FLAGS, "dynamic sampling": f"{FLAGS} --dynamic_sampling 4",
        "curriculum": f"{FLAGS} --curriculum"}
BUDGET = 6400                                   # samples of a run
EVERY = 4                                       # steps from one evaluation to the next
GAIN = 0.02                                     # of pass@1, what counts as one
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(8))


@EXPERIMENT.measure(WAYS)
def learning(seed, way, budget=BUDGET):
    """Train with as many samples as the budget has."""
    cfg, task, policy = load_base(grpo, f"{WAYS[way]} --seed {seed}")
    found = {"samples": [], "all wrong": [], "all right": [], "pass@1": []}
    samples = 0
    for steps, (batch, _) in enumerate(training(grpo, cfg, task, policy), 1):
        rates = [rate for _, rate in pass_rates(batch)]  # of all groups, also those left out
        samples += len(rates) * cfg.num_generations
        found["samples"].append(samples)
        found["all wrong"].append(rates.count(0.0) / len(rates))
        found["all right"].append(rates.count(1.0) / len(rates))
        score = None
        if samples >= budget or steps % EVERY == 0:
            score = grpo.evaluate(policy, task, cfg)["pass@1"]
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
    steps = min(one["pass@1"].shape[1], other["pass@1"].shape[1])
    gains = one["pass@1"][:, :steps] - other["pass@1"][:, :steps]
    return numpy.array([row[~numpy.isnan(row)][-1] for row in gains])


def page(learning):
    first = [found["samples"][numpy.isfinite(found["pass@1"])].min() for found in learning.values()]
    grid = numpy.linspace(max(first), BUDGET, 25)
    scores = {way: by_samples(found, grid) for way, found in learning.items()}
    end = {way: rows[:, -1] for way, rows in scores.items()}
    plain, dynamic = end["plain"].mean(), end["dynamic sampling"].mean()
    steps = learning["dynamic sampling"], learning["plain"]
    said = ("Counting the samples that it discards, DAPO's dynamic sampling has a pass@1 of "
            f"{dynamic:.3f} after {BUDGET}, plain GRPO {plain:.3f}")
    yield Claim("after equally many samples, pass@1 is higher with dynamic sampling", OURS,
                end["dynamic sampling"] - end["plain"], at_least=GAIN, shown=said,
                contradicted=said, undecided=said)
    yield Claim("after equally many steps, pass@1 is higher with dynamic sampling", DAPO,
                at_equal_steps(*steps), at_least=GAIN)
    yield Claim("after equally many samples, pass@1 is higher with a curriculum", OURS,
                end["curriculum"] - end["plain"], at_least=GAIN)
    silent = {kind: learning["plain"][kind] for kind in ("all wrong", "all right")}
    silent["either"] = silent["all wrong"] + silent["all right"]
    early = silent["either"][:, :5].mean(axis=1)
    late = silent["either"][:, -5:].mean(axis=1)
    yield Claim("the share of silent groups grows from the first five steps to the last", DAPO,
                late - early, at_least=0.05)

    colours = dict(zip(WAYS, (BLUE, RED, GREEN)))
    yield curves(scores, said, x=grid, given=colours, ylabel="pass@1, held out",
                 xlabel="samples, discarded ones too")
    yield curves(silent, "Groups whose outputs are all right or all wrong teach nothing: "
                 f"{early.mean():.0%} in the first 5 steps, {late.mean():.0%} in the last 5",
                 given=dict(zip(silent, (RED, GREEN, GREY))), xlabel="step of plain GRPO, G = 4",
                 ylabel="share of groups", ylim=(0, 1))
    last = {way: {"steps": numpy.isfinite(found["samples"]).sum(axis=1), "pass@1": end[way]}
            for way, found in learning.items()}
    yield numbers(last, {"steps": f"steps with {BUDGET} samples",
                         "pass@1": f"pass@1 after {BUDGET} samples"}, ".3g", by="run")
