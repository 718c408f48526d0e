"""Exploration: what the upper clip does to rare tokens, to entropy, and to pass@8

Claim. The clip lets a token of probability p rise to (1 + eps_high) p and no further, so that
likely tokens win and rare ones are held back; entropy collapses. A higher eps_high, .28 instead of
.2, keeps entropy, and with it what the policy still finds in several tries (DAPO, 2503.14476,
section 3.1). An entropy bonus is the older remedy (A3C, 1602.01783).

Prediction. The bound on one token is exact. In arithmetic, entropy falls whatever the clip, as one
way to answer, thinking first, wins; a higher clip lets this rare beginning rise sooner, so that
entropy is lower, if it differs at all, and pass@8 is near 1 for all. The bonus keeps entropy. In
the grid world at a low temperature, a better walk is rarely sampled and each sample is worth more
to a higher clip, so that the far prize is found sooner without one; the bonus helps most.

Method. Exact: 4000 small steps down (3) of grpo.py, from one batch, for one token of a softmax over
two, which was right. Then runs of grpo.py with eight optimizer steps a batch, so that the clip
acts: arithmetic, and the grid world at temperature 0.2, where four of five demonstrations of the
forum go to the near prize. Late entropy is that of the samples in the second half of a run; mean
accuracy is that of the samples over all steps: of walks, how many earn all there is to earn. Pilots
with seed 0 and eps_high .2 chose steps and temperature (at 0.1 nothing is learned in 25 steps, at
0.3 all in 10); those of arithmetic and of the other temperatures were seen before the prediction.

Outcome. Right: the bound is exact; .28 and no bound leave no more entropy than .2, in arithmetic as
in the grid world; the bonus finds the far prize sooner (+.15 of all walks). Wrong: the bonus keeps
no entropy, of which late in a run hardly any is left. Undecided: whether .28 or no bound find the
far prize sooner (+.01 each).
"""
import numpy
import torch

import grpo
from lab.draw import BLUE, GREEN, GREY, RED, curves
from lab.experiment import Experiment, numbers
from lab.verdict import OURS, Claim

DAPO = "[DAPO](https://arxiv.org/abs/2503.14476)"
A3C = "[A3C](https://arxiv.org/abs/1602.01783)"
CLIPS = {"eps_high .2": 0.2, "eps_high .28": 0.28, "no upper clip": 1e9}
BONUS = "eps_high .2, bonus"
PROBABILITIES = [0.01, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9]
SETTINGS = {name: f"--epsilon_high {clip}" for name, clip in CLIPS.items()}
SETTINGS[BONUS] = "--epsilon_high 0.2 --entropy_coef 0.01"
TASKS = {"arithmetic": "--max_steps 12",
         "gridworld": "--max_steps 20 --task gridworld --temperature 0.2"}
ALWAYS = "--stop_at 2 --num_mini_batches 8 --eval_steps 1000 --num_eval_problems 256"
RUNS = {f"{task}: {name}": f"grpo.py {flags} {task_flags} {ALWAYS}"
        for task, task_flags in TASKS.items() for name, flags in SETTINGS.items()}
GAIN = 0.02                             # of a share; of entropy, the smallest that matters is .005
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(8))
EXPERIMENT.runs("runs", RUNS, ["entropy", "accuracy"], ["pass@1", "pass@8"])


def highest(probabilities, epsilon_high, rate=0.005, steps=4000):
    """How likely tokens become that had these probabilities and an advantage of 1. -> list"""
    p = torch.tensor(probabilities, dtype=torch.float64)
    one = torch.ones_like(p)
    old_logps = torch.stack([p, 1 - p], dim=1).log()                            # (N, 2)
    logits = old_logps.clone().requires_grad_()
    for _ in range(steps):
        logps = logits.log_softmax(dim=1)[:, :1]                                # (N, 1)
        losses = grpo.policy_loss(
            logps, old_logps[:, :1], one, one[:, None], epsilon_high=epsilon_high)
        [gradient] = torch.autograd.grad(losses.sum(), logits)
        logits = (logits - rate * gradient).detach().requires_grad_()
    return logits.softmax(dim=1)[:, 0].tolist()


@EXPERIMENT.measure(CLIPS, seeds=[0])
def bounds(seed, name):
    return {"highest": highest(PROBABILITIES, CLIPS[name])}


def page(runs, bounds):
    rare = {name: found["highest"][0, 0] / PROBABILITIES[0] for name, found in bounds.items()}
    likely = {name: found["highest"][0, -1] for name, found in bounds.items()}
    late = {name: numpy.array_split(found["entropy"], 2, axis=1)[1].mean(axis=1)
            for name, found in runs.items()}
    mean = {name: found["accuracy"].mean(axis=1) for name, found in runs.items()}
    stopped = Claim(
        "exactly: the clip stops a token of probability .01 at (1 + eps_high) .01", DAPO,
        [rare["eps_high .2"] / 1.2, rare["eps_high .28"] / 1.28], at_least=0.98, at_most=1.02,
        times=True, exact=True, shown="One batch makes a token of probability .01 at most "
        f"{rare['eps_high .2']:.2f} times as likely if eps_high is .2, and "
        f"{rare['no upper clip']:.0f} times without an upper clip")
    yield stopped
    yield Claim("exactly: it does not stop one of probability .9", DAPO,
                likely["eps_high .2"] - likely["no upper clip"], at_least=-1e-6, exact=True)
    for task in TASKS:
        clipped = f"{task}: eps_high .2"
        for name, source in (("eps_high .28", DAPO), ("no upper clip", OURS), (BONUS, A3C)):
            yield Claim(f"{task}: {name} leaves more late entropy than eps_high .2", source,
                        late[f"{task}: {name}"] - late[clipped], at_least=0.005, unit="nats")
    for name, source in (("eps_high .28", DAPO), ("no upper clip", OURS), (BONUS, A3C)):
        yield Claim(f"gridworld: {name} finds more best walks in a run than eps_high .2", source,
                    mean[f"gridworld: {name}"] - mean["gridworld: eps_high .2"], at_least=GAIN)
    for task in TASKS:
        yield Claim(f"{task}: eps_high .28 ends with a higher pass@8 than eps_high .2", DAPO,
                    runs[f"{task}: eps_high .28"]["pass@8"]
                    - runs[f"{task}: eps_high .2"]["pass@8"], at_least=GAIN)

    given = dict(zip((*CLIPS, "before"), (BLUE, GREEN, RED, GREY)))
    lines = {name: found["highest"] for name, found in bounds.items()}
    yield curves(lines | {"before": [PROBABILITIES]}, stopped.finding, x=PROBABILITIES, given=given,
                 xlabel="probability of a token before a batch", ylabel="the highest after it",
                 xscale="log", yscale="log")
    walks = {name: runs[f"gridworld: {name}"]["accuracy"] for name in SETTINGS}
    said = ", ".join(f"{rows.mean():.2f} with {name}" for name, rows in walks.items())
    yield curves(walks, f"Share of best walks in the grid world, mean of a run: {said}",
                 given=given, ylabel="share of walks that earn all there is")
    rows = {name: {"late": late[name], "mean": mean[name], "pass@1": found["pass@1"],
                   "pass@8": found["pass@8"]} for name, found in runs.items()}
    yield numbers(rows, {"late": "late entropy, nats", "mean": "mean accuracy", "pass@1": "pass@1",
                         "pass@8": "pass@8"}, by="run")
