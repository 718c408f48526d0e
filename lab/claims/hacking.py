"""Reward hacking: a reward model that gives ever higher scores to ever worse answers"""
import copy

import numpy

import grpo
from lab.bench import OURS, Claim, means, numbers
from lab.training import load_base, training
from report import chart
from tasks import preferences

SEEDS = range(5, 17)
STEPS = 60
MODELS = {"frozen": {0: 1}, "frozen, 5 times the pairs": {0: 5},
          "fresh": dict.fromkeys(range(0, STEPS, 12), 1)}       # step -> trainings before it
CASES = list(MODELS)
FEWER = dict.fromkeys(CASES[1:], range(5, 10))
WINDOW = 5                      # number of batches that accuracy is averaged over
FALL = 0.05                     # smallest rise or fall of accuracy that matters


def measure(case, seed):
    """Train grpo.py against a reward model, which MODELS[case] trains before some of the steps."""
    cfg, task, policy = load_base(grpo, f"--reward model --seed {seed} --base_seed {seed}")
    model = task.model = preferences.RewardModel(policy)
    steps = training(cfg, task, policy)
    columns = {"score": [], "accuracy": []}
    for step in range(STEPS):
        for turn in range(MODELS[case].get(step, 0)):
            def sample(name, stream=f"{step}, {turn}"):
                return grpo.sample_batch(policy, task, cfg, f"{name}, {stream}")
            preferences.fit(model, sample, seed)
        if step == 0:
            at_start = copy.deepcopy(model)
        batch = next(steps)
        columns["score"].append(at_start.rewards(batch).mean().item())
        columns["accuracy"].append(batch.is_correct.double().mean().item())
    return columns


def page(x):
    score, accuracy = ({name: means(columns[what], WINDOW) for name, columns in x.items()}
                       for what in ("score", "accuracy"))
    peak = {name: rows.max(axis=1) for name, rows in accuracy.items()}
    end = {name: rows[:, -1] for name, rows in accuracy.items()}
    first = accuracy["frozen"][:, 0]
    line = accuracy["frozen"].mean(axis=0)                              # as in the chart
    yield (f"Accuracy rises to {line.max():.0%} and then falls to {line[-1]:.0%}, although the "
           "score of a frozen reward model keeps rising. If the model is trained again every 12 "
           f"steps, accuracy ends at {end['fresh'].mean():.0%}.")
    yield Claim("against a frozen reward model, accuracy rises and then falls (the smaller of the "
                "rise and the fall)", "Gao and others",
                (peak["frozen"], numpy.maximum(first, end["frozen"])), at_least=FALL)
    yield Claim("the score of a frozen reward model rises during training", "Gao and others",
                score["frozen"][:, -1] - score["frozen"][:, 0],
                sides=(score["frozen"][:, -1], score["frozen"][:, 0]), at_least=0.1)
    yield Claim("accuracy ends higher against a fresh reward model than against a frozen one that "
                "is trained on 5 times the pairs", OURS,
                (end["fresh"], end["frozen, 5 times the pairs"]), at_least=FALL)
    yield Claim(f"against a fresh reward model, accuracy falls by at most {FALL}", OURS,
                (peak["fresh"], end["fresh"]), at_most=FALL)
    lines = {"score, frozen model": score["frozen"], "accuracy, frozen model": accuracy["frozen"],
             "accuracy, fresh model": accuracy["fresh"]}
    yield lambda axis: chart.curves(axis, lines, range(WINDOW, STEPS + 1), ylim=(0, 1.5),
                                    ylabel=f"mean of {WINDOW} steps")
    yield numbers({name: {"highest accuracy of each run": peak[name],
                          "accuracy at the end": end[name], "score at the end": score[name][:, -1]}
                   for name in x}, "reward model")
