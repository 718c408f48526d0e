"""Signal: how many groups teach nothing, and what to do about them

Claim. A group whose outputs are all right, or all wrong, has no gradient: it is silent. The share
of such groups grows in training; dynamic sampling, until all groups of a batch have signal, then
takes fewer steps (DAPO, 2503.14476, section 3.2). DAPO does not count samples.

Prediction. At first hard problems are all wrong, later easy ones all right, so that the share falls
before it grows. In equal steps, dynamic sampling is better. In equal samples it is not, for what it
leaves out is paid for. A curriculum refuses a problem before it is sampled, so it is a little
better in equal samples.

Method. A base that has seen two thirds of the usual demonstrations, of 2 to 7 operands, so that
problems are hard in several degrees; groups of 4, of which many are silent. grpo.py and gspo.py as
they are, and with --dynamic_sampling 4, which replaces the silent groups by as many new ones, and
again; grpo.py with attempts of a whole batch each, which discard the groups that they do not need,
as DAPO's recipe in verl does and the scripts did until commit 437be3d; and with --curriculum. All
that was sampled is counted, also what was left out.

Outcome. Right: the share of silent groups falls, from .35 to .22 in three steps, before it grows,
and from equal samples dynamic sampling is not seen to be better: worse with gspo.py, open with
grpo.py. Equal steps show no sure gain, either, nor does a curriculum. Of the groups that whole
batches discard four in ten had signal. Replacing only the silent ones is ahead of them in the mean
(.80 and .76), not surely by .02.
"""
import numpy
import torch

import common
import grpo
import gspo
from lab.draw import BLUE, GREEN, GREY, ORANGE, RED, curves
from lab.experiment import Experiment, numbers
from lab.training import load_base, training
from lab.verdict import OURS, Claim
from tasks import pass_rates

DAPO = "[DAPO](https://arxiv.org/abs/2503.14476)"
BASE = "--task arithmetic:2-7 --base_steps 600 --max_completion_length 64 --num_eval_problems 256"
P, G = 64, 4
FLAGS = f"{BASE} --num_prompts {P} --num_generations {G} --num_eval_samples 2"
DYNAMIC = f"{FLAGS} --dynamic_sampling 4"
# name: script, flags, whether an attempt samples a whole batch
WAYS = {"plain": (grpo, FLAGS, False), "dynamic sampling": (grpo, DYNAMIC, False),
        "dynamic, whole batches": (grpo, DYNAMIC, True),
        "curriculum": (grpo, f"{FLAGS} --curriculum", False),
        "GSPO, plain": (gspo, FLAGS, False), "GSPO, dynamic sampling": (gspo, DYNAMIC, False)}
PICTURE = ("plain", "dynamic sampling", "dynamic, whole batches", "curriculum")
GSPO = ("GSPO, dynamic sampling", "GSPO, plain")
BUDGET = 6400                                   # samples of a run
EVERY = 4                                       # steps from one evaluation to the next
GAIN = 0.02                                     # of pass@1, what counts as one
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(8))


def sample_whole_batches(policy, task, cfg, step):
    """As grpo.py's sample_with_signal, but each attempt samples P groups, and those of them that
    are not needed are discarded, as DAPO's recipe does."""
    batch = grpo.sample_batch(policy, task, cfg, step)
    for attempt in range(1, 1 + cfg.dynamic_sampling):
        if common.has_signal(batch.rewards).all():
            break
        batches = [batch, grpo.sample_batch(policy, task, cfg, (step, attempt))]
        is_mixed = common.has_signal(torch.cat([one.rewards for one in batches]))[:, 0]
        order = is_mixed.int().argsort(descending=True, stable=True)
        batch = common.gather(batches, order[:cfg.num_prompts].sort().values)
    return batch


@EXPERIMENT.measure(WAYS)
def learning(seed, way, budget=BUDGET):
    """Train with as many samples as the budget has. wasted: the groups with signal that a step
    samples and does not learn from"""
    script, flags, is_whole = WAYS[way]
    cfg, task, policy = load_base(script, f"{flags} --seed {seed} --base_seed {seed}")
    sample = sample_whole_batches if is_whole else script.sample_with_signal
    found = {"samples": [], "all wrong": [], "all right": [], "wasted": [], "pass@1": []}
    samples = 0
    for steps, (batch, _) in enumerate(training(script, cfg, task, policy, sample=sample), 1):
        rates = [rate for _, rate in pass_rates(batch)]  # of all groups, also those left out
        samples += len(rates) * cfg.num_generations
        mixed = sum(0 < rate < 1 for rate in rates)
        found["samples"].append(samples)
        found["all wrong"].append(rates.count(0.0) / len(rates))
        found["all right"].append(rates.count(1.0) / len(rates))
        found["wasted"].append(mixed - int(common.has_signal(batch.rewards).sum()))
        score = None
        if samples >= budget or steps % EVERY == 0:
            score = script.evaluate(policy, task, cfg)["pass@1"]
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
    plain, dynamic, whole = (end[way].mean() for way in WAYS if way in PICTURE[:3])
    said = (f"After {BUDGET} samples, discarded ones too, pass@1 is {plain:.3f} with plain GRPO, "
            f"{dynamic:.3f} with dynamic sampling, {whole:.3f} if each attempt is a whole batch")
    pairs = {"grpo.py": PICTURE[1::-1], "gspo.py": GSPO}
    for script, (more, less) in pairs.items():
        told = dict.fromkeys(("shown", "contradicted", "undecided"), said * (less == "plain"))
        yield Claim(f"{script}: after equally many samples, pass@1 is not higher with dynamic "
                    "sampling", OURS, (end[more], end[less]), at_most=GAIN, **told)
    left = {way: numpy.nansum(found["wasted"], axis=1) for way, found in learning.items()}
    yield Claim("after equally many samples, pass@1 is higher if attempts replace only what has no "
                "signal than if each is a whole batch", OURS, (end[PICTURE[1]], end[PICTURE[2]]),
                at_least=GAIN)
    for script, (more, less) in pairs.items():
        yield Claim(f"{script}: after equally many steps, pass@1 is higher with dynamic sampling",
                    DAPO, at_equal_steps(learning[more], learning[less]), at_least=GAIN)
    silent = {kind: learning["plain"][kind] for kind in ("all wrong", "all right")}
    silent["either"] = silent["all wrong"] + silent["all right"]
    early = silent["either"][:, :5].mean(axis=1)
    late = silent["either"][:, -5:].mean(axis=1)
    yield Claim("the share of silent groups grows from the first five steps to the last", DAPO,
                (late, early), at_least=0.05)

    yield curves({way: scores[way] for way in PICTURE}, said, x=grid,
                 given=dict(zip(PICTURE, (BLUE, RED, ORANGE, GREEN))), ylabel="pass@1, held out",
                 xlabel="samples, discarded ones too")
    yield curves(silent, "Groups whose outputs are all right or all wrong teach nothing: "
                 f"{early.mean():.0%} in the first 5 steps, {late.mean():.0%} in the last 5",
                 given=dict(zip(silent, (RED, GREEN, GREY))), xlabel="step of plain GRPO, G = 4",
                 ylabel="share of groups", ylim=(0, 1))
    rows = {}
    for way, found in learning.items():
        steps = numpy.isfinite(found["samples"]).sum(axis=1)
        left_out = numpy.nanmax(found["samples"], axis=1) / G - P * steps       # groups
        rows[way] = {"steps": steps, "pass@1": end[way],
                     "wasted": left[way] / numpy.maximum(1, left_out)}
    yield numbers(rows, {"steps": f"steps with {BUDGET} samples",
                         "pass@1": f"pass@1 after {BUDGET} samples",
                         "wasted": "of the groups left out, had signal"}, ".3g", by="run")
