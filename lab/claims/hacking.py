"""Reward hacking: a reward model that is pleased with ever worse answers

grpo.py learns from the score of a reward model, which stays as it is, or is trained again on
samples of the policy. We watch the score and the accuracy. docs/lab/hacking.md says more.
"""
import numpy

import grpo
from lab.draw import BLUE, GREY, RED, curves
from lab.experiment import Experiment, means, numbers, transposed
from lab.training import load_base, training
from lab.verdict import OURS, Claim
from tasks import preferences

STEPS = 60
EVERY = 12                                      # steps from one training of the model to the next
MODELS = {"frozen": {0: 1}, "frozen, 5 times the pairs": {0: STEPS // EVERY},
          "fresh": dict.fromkeys(range(0, STEPS, EVERY), 1)}    # step -> trainings before it
WINDOW = 5                                      # batches over which accuracy is averaged
FALL = 0.05                                     # of accuracy, what counts as one
EXPERIMENT = Experiment(__file__, seeds=range(5, 13), one_base=True)


@EXPERIMENT.measure(MODELS)
def models(seed, name):
    """Train against a reward model, which is trained before some steps."""
    cfg, task, policy = load_base(grpo, f"--seed {seed}")
    model = preferences.RewardModel(policy)
    task.rewards = lambda batch, step: model.rewards(batch)
    at_start = preferences.RewardModel(policy)
    steps = training(grpo, cfg, task, policy)
    found = []
    for step in range(STEPS):
        for turn in range(MODELS[name].get(step, 0)):
            def sample(name, step=step, turn=turn):
                return grpo.sample_batch(policy, task, cfg, f"{name}, {step}, {turn}")
            preferences.fit(model, sample, seed)
        if step == 0:
            at_start.load_state_dict(model.state_dict())
        batch, metrics = next(steps)
        found.append({"score": at_start.rewards(batch).mean().item(),
                      "accuracy": batch.is_correct.double().mean().item(),
                      "kl": metrics["kl"] * batch.mask.sum(dim=1).mean().item()})
    return transposed(found)


def page(models):
    accuracy = {name: means(found["accuracy"], WINDOW) for name, found in models.items()}
    first = {name: rows[:, 0] for name, rows in accuracy.items()}
    peak = {name: rows.max(axis=1) for name, rows in accuracy.items()}
    end = {name: rows[:, -1] for name, rows in accuracy.items()}
    score = means(models["frozen"]["score"], WINDOW)

    rise_and_fall = numpy.minimum(peak["frozen"] - first["frozen"], peak["frozen"] - end["frozen"])
    hacked = Claim(
        "against a frozen reward model, accuracy rises and then falls (the smaller of the two)",
        "Gao and others", rise_and_fall, at_least=FALL,
        shown=f"As a frozen reward model's score rises to {score[:, -1].mean():.1f}, accuracy goes "
              f"from {first['frozen'].mean():.0%} up to {peak['frozen'].mean():.0%}, then down to "
              f"{end['frozen'].mean():.0%}")
    yield hacked
    yield Claim("against a frozen reward model, its score rises", "Gao and others",
                score[:, -1] - score[:, 0], at_least=0.1)
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
    rows = {name: {"accuracy at first": first[name], "at its highest": peak[name],
                   "at the end": end[name],
                   "score at the end": means(found["score"], WINDOW)[:, -1],
                   "KL at the end": means(found["kl"], WINDOW)[:, -1]}
            for name, found in models.items()}
    yield numbers(rows, form=".3g", by="reward model")
