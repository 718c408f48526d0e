"""Reward hacking: a reward model that gives ever higher scores to ever worse answers"""
import numpy

import grpo
from lab.draw import BLUE, GREY, RED, curves
from lab.experiment import Experiment, means, numbers, transposed
from lab.training import load_base, training
from lab.verdict import OURS, Claim
from tasks import preferences

STEPS = 60
EVERY = 12                      # steps from one training of the reward model to the next
MODELS = {"frozen": {0: 1}, "frozen, 5 times the pairs": {0: STEPS // EVERY},
          "fresh": dict.fromkeys(range(0, STEPS, EVERY), 1)}    # step -> trainings before it
WINDOW = 5                      # number of batches that accuracy is averaged over
FALL = 0.05                     # smallest rise or fall of accuracy that matters
EXPERIMENT = Experiment(__file__, seeds=range(5, 13), one_base=True)


@EXPERIMENT.measure(MODELS)
def models(seed, name):
    """Train grpo.py against a reward model, which MODELS[name] trains before some of the steps.
    -> score and accuracy of each step"""
    cfg, task, policy = load_base(grpo, f"--seed {seed}")
    model = preferences.RewardModel(policy)
    task.rewards = lambda batch, step: model.rewards(batch)
    at_start = preferences.RewardModel(policy)
    steps = training(grpo, cfg, task, policy)
    rows = []
    for step in range(STEPS):
        for turn in range(MODELS[name].get(step, 0)):
            def sample(name, step=step, turn=turn):
                return grpo.sample_batch(policy, task, cfg, f"{name}, {step}, {turn}")
            preferences.fit(model, sample, seed)
        if step == 0:
            at_start.load_state_dict(model.state_dict())
        batch, _ = next(steps)
        rows.append({"score": at_start.rewards(batch).mean().item(),
                     "accuracy": batch.is_correct.double().mean().item()})
    return transposed(rows)


def page(models):
    accuracy = {name: means(columns["accuracy"], WINDOW) for name, columns in models.items()}
    score = {name: means(columns["score"], WINDOW) for name, columns in models.items()}
    first = {name: rows[:, 0] for name, rows in accuracy.items()}
    peak = {name: rows.max(axis=1) for name, rows in accuracy.items()}
    end = {name: rows[:, -1] for name, rows in accuracy.items()}

    line = accuracy["frozen"].mean(axis=0)                              # as in the picture
    rise_and_fall = numpy.minimum(peak["frozen"] - first["frozen"], peak["frozen"] - end["frozen"])
    yield Claim("against a frozen reward model, accuracy rises and then falls (the smaller of the "
                "rise and the fall)", "Gao and others", rise_and_fall, at_least=FALL,
                said=f"Accuracy rises to {line.max():.0%} and then falls to {line[-1]:.0%}, "
                "although a frozen reward model's score keeps rising")
    yield Claim("the score of a frozen reward model rises during training", "Gao and others",
                score["frozen"][:, -1] - score["frozen"][:, 0], at_least=0.1)
    most = "frozen, 5 times the pairs"
    yield Claim("accuracy ends higher against a fresh reward model than against a frozen one that "
                f"is trained on {STEPS // EVERY} times the pairs", OURS, (end["fresh"], end[most]),
                at_least=FALL)
    yield Claim(f"against a fresh reward model, accuracy falls by at most {FALL}", OURS,
                peak["fresh"] - end["fresh"], at_most=FALL)

    lines = {"score\n(frozen model)": score["frozen"],
             "accuracy,\nfrozen model": accuracy["frozen"],
             "accuracy,\nfresh model": accuracy["fresh"]}
    yield curves(lines, range(WINDOW, STEPS + 1), given=dict(zip(lines, (GREY, RED, BLUE))),
                 ylim=(0, 1.5), ylabel=f"mean of {WINDOW} steps; faint: seeds")
    yield numbers({name: {"accuracy at the start": first[name],
                          "highest accuracy of each run": peak[name],
                          "accuracy at the end": end[name],
                          "score at the end": score[name][:, -1]} for name in models},
                  ".3g", "reward model")
