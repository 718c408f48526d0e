"""Reward hacking: a reward model that is pleased with ever worse answers

Claim. As a policy learns from a reward model, the model's score rises with the distance from the
base; true quality, here accuracy, first rises, then falls (Gao and others, 2210.10760).

Prediction. Against a frozen model, accuracy rises to 0.9 and more, and then falls, by much or
little as the seed has it; PPO, of which we had seen runs, does so. A model that is
trained on with fresh samples has seen the wrong answers that please it, so that accuracy stays.
This was written before any run. Pilots with seed 0 then showed the fall against a frozen model.
Hence a frozen model with as many pairs as the fresh one: we expect a later fall, as deep.

Method. grpo.py on arithmetic, 60 steps, with the score of a reward model as reward. The frozen one
is trained once, on samples of the base; the fresh one is trained again every 12 steps, on as many
of the policy at that time. A third has all five trainings at the start, on samples of the base. A
tenth of all pairs is labelled wrongly. Scores are those of the model at the start. Numbers are
means of five steps. A run of 30 steps, with a training every 6, on seeds 0 to 4, had left the fall
undecided (+0.24, from +0.03 to +0.45): so this one has twice the steps, and other seeds.

Outcome. Right: accuracy rises and then falls, as deep with five times the pairs. Wrong: at its
highest it is 0.85, not 0.9; and against a fresh model it falls, too, by 0.42 instead of 0.73.
"""
import numpy

import grpo
from lab.draw import BLUE, GREY, RED, curves
from lab.experiment import Experiment, numbers
from lab.training import load_base, training
from lab.verdict import OURS, Claim
from tasks import preferences

GAO = "[Gao and others](https://arxiv.org/abs/2210.10760)"
STEPS = 60
EVERY = 12                                      # steps from one training of the model to the next
MODELS = {"frozen": {0: 1}, "frozen, 5 times the pairs": {0: STEPS // EVERY},
          "fresh": dict.fromkeys(range(0, STEPS, EVERY), 1)}    # step -> trainings before it
FALL = 0.05                                     # of accuracy, what counts as one
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(5, 13), one_base=True)


@EXPERIMENT.measure(MODELS)
def models(seed, name):
    """Train against a reward model, which is trained before some steps."""
    cfg, task, policy = load_base(grpo, f"--seed {seed}")
    model = preferences.RewardModel(policy)
    task.rewards = lambda batch, step: model.rewards(batch)
    at_start = preferences.RewardModel(policy)
    steps = training(grpo, cfg, task, policy)
    found = {"score": [], "accuracy": [], "kl": []}
    for step in range(STEPS):
        for turn in range(MODELS[name].get(step, 0)):
            def sample(name, step=step, turn=turn):
                return grpo.sample_batch(policy, task, cfg, f"{name}, {step}, {turn}")
            preferences.fit(model, sample, seed)
        if step == 0:
            at_start.load_state_dict(model.state_dict())
        batch, metrics = next(steps)
        found["score"].append(at_start.rewards(batch).mean().item())
        found["accuracy"].append(batch.is_correct.double().mean().item())
        found["kl"].append(metrics["kl"] * batch.mask.sum(dim=1).mean().item())
    return found


def of_five(rows):
    """The means of five steps in a row. (S, T) -> (S, T - 4)"""
    return numpy.lib.stride_tricks.sliding_window_view(rows, 5, axis=1).mean(axis=-1)


def page(models):
    accuracy = {name: of_five(found["accuracy"]) for name, found in models.items()}
    first = {name: rows[:, 0] for name, rows in accuracy.items()}
    peak = {name: rows.max(axis=1) for name, rows in accuracy.items()}
    end = {name: rows[:, -1] for name, rows in accuracy.items()}
    score = of_five(models["frozen"]["score"])

    rise_and_fall = numpy.minimum(peak["frozen"] - first["frozen"], peak["frozen"] - end["frozen"])
    hacked = Claim(
        "against a frozen reward model, accuracy rises and then falls (the smaller of the two)",
        GAO, rise_and_fall, at_least=FALL,
        shown=f"As a frozen reward model's score rises to {score[:, -1].mean():.1f}, accuracy goes "
              f"from {first['frozen'].mean():.0%} up to {peak['frozen'].mean():.0%}, then down to "
              f"{end['frozen'].mean():.0%}")
    yield hacked
    yield Claim("against a frozen reward model, its score rises", GAO, score[:, -1] - score[:, 0],
                at_least=0.1)
    most = "frozen, 5 times the pairs"
    yield Claim(f"accuracy ends higher against a fresh model than against one that is {most}", OURS,
                (end["fresh"], end[most]), at_least=FALL)
    yield Claim(f"against a fresh model, accuracy falls by no more than {FALL}", OURS,
                peak["fresh"] - end["fresh"], at_most=FALL)

    lines = {"score\n(frozen model)": models["frozen"]["score"],
             "accuracy,\nfrozen model": models["frozen"]["accuracy"],
             f"accuracy, model\nnew every {EVERY} steps": models["fresh"]["accuracy"]}
    yield curves(lines, hacked.finding, given=dict(zip(lines, (GREY, RED, BLUE))),
                 ylabel="mean of a batch; faint: seeds", ylim=(0, 1.5))
    rows = {name: {"first": first[name], "peak": peak[name], "end": end[name],
                   "score": of_five(found["score"])[:, -1], "kl": of_five(found["kl"])[:, -1]}
            for name, found in models.items()}
    yield numbers(rows, {"first": "accuracy at first", "peak": "at its highest",
                         "end": "at the end", "score": "score at the end", "kl": "KL at the end"},
                  ".3g", by="reward model")
