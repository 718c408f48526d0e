"""Trust regions: how far an update goes, and what that is good for

ppo.py with a clip, with a penalty and without a bound, and TRPO; then how far a clip lets the
probability of a rare token rise. docs/lab/trust.md says more.
"""
import itertools

import numpy
import torch

import grpo
from lab.draw import BLUE, GREEN, GREY, RED, curves
from lab.experiment import UNSCORED, Experiment, numbers
from lab.training import load_base, training
from lab.verdict import OURS, Claim

STEPS = 15
MAX_KL = 0.01
FIRST = 5                       # seeds that count; three more were run after these were seen
FLAGS = f"--num_iterations 4 --num_prompts 16 --max_steps {STEPS} {UNSCORED}"
RUNS = {"clip": f"ppo.py {FLAGS}",
        "penalty": f"ppo.py {FLAGS} --trust_region penalty --target_kl {MAX_KL}",
        "TRPO": f"examples/trpo.py {FLAGS} --max_kl {MAX_KL}",
        "no bound": f"ppo.py {FLAGS} --epsilon 1e9 --epsilon_high 1e9"}
CLIPS = {"epsilon_high 0.2": 0.2, "epsilon_high 0.28": 0.28, "no upper clip": 1e9}
GAIN = 0.02                                             # of the reward, what counts as one
RARE = 0.1                                              # the probability below which a token is
UPDATES = 12
COLOURS = {"clip": RED, "penalty": BLUE, "TRPO": GREEN, "no bound": GREY}
EXPERIMENT = Experiment(__file__, seeds=range(8))
EXPERIMENT.runs("runs", RUNS, ["reward", "policy_kl", "step_time"])


@EXPERIMENT.measure(CLIPS)
def rare(seed, name):
    """Train by grpo.py, eight optimizer steps a batch. Of the tokens with A > 0 that were rare, how
    many times as likely each is after the update. -> shares above 1.2 and above 2, the largest"""
    cfg, task, policy = load_base(grpo, "--num_mini_batches 8 --epsilon 0.2 --epsilon_high "
                                  f"{CLIPS[name]} --seed {seed} --base_seed {seed}")
    found = []
    for batch, _ in itertools.islice(training(grpo, cfg, task, policy), UPDATES):
        with torch.no_grad():
            logps, _ = grpo.score(policy, batch.prompts, batch.tokens, cfg.temperature)
        A = grpo.advantages(batch.rewards).view(-1, 1)                          # (B, 1)
        is_rare = (A > 0) & (batch.mask > 0) & (batch.logps.exp() < RARE)       # (B, T)
        found.append((logps - batch.logps)[is_rare].exp())
    ratio = torch.cat(found)
    above = {f"above {bound}": (ratio > bound).double().mean().item() for bound in (1.2, 2)}
    return above | {"largest": ratio.max().item(), "tokens": len(ratio)}


def page(runs, rare):
    every = {name: found["reward"].mean(axis=1) for name, found in runs.items()}
    runs, rare = ({name: {column: rows[:FIRST] for column, rows in found.items()}
                   for name, found in measured.items()} for measured in (runs, rare))
    reward = {name: values[:FIRST] for name, values in every.items()}
    farthest = {name: found["policy_kl"].max(axis=1) for name, found in runs.items()}
    said = (f"From as many samples, {STEPS} steps, PPO's clip has a mean reward of "
            f"{reward['clip'].mean():.2f}, TRPO of {reward['TRPO'].mean():.2f}")
    yield Claim("from as many samples, the clip has a higher mean reward than TRPO", "PPO",
                (reward["clip"], reward["TRPO"]), at_least=GAIN, unit="reward", said=said)
    yield Claim("the clip has as high a mean reward as the penalty, or higher", "PPO",
                (reward["clip"], reward["penalty"]), at_least=-GAIN, unit="reward")
    yield Claim("without any bound the mean reward is lower than with the clip", "PPO",
                (reward["no bound"], reward["clip"]), at_most=-GAIN, unit="reward")
    above, largest = (rare["epsilon_high 0.2"][column] for column in ("above 1.2", "largest"))
    yield Claim("with epsilon_high 0.2, a rare token gets at most 1.2 times as likely in an update "
                "(by our bound, but for one in a hundred)", "DAPO", above, at_most=0.01,
                unit="of tokens",
                contradicted="A clip takes a gradient away and bounds no ratio: with epsilon_high "
                f"0.2, {above.mean():.0%} of the rare tokens with A > 0 get more than 1.2 times as "
                f"likely in one update, the farthest {largest.max():.0f} times")
    yield Claim("without any bound the largest KL is larger than with the clip", OURS,
                farthest["no bound"] / farthest["clip"], at_least=1.2, times=True)

    yield curves({name: found["reward"] for name, found in runs.items()}, said, given=COLOURS,
                 ylabel="reward")
    rows = {name: {"mean reward": reward[name],
                   "mean KL of an update": found["policy_kl"].mean(axis=1),
                   "largest KL of an update": farthest[name],
                   "seconds a step, median": numpy.median(found["step_time"], axis=1)}
            for name, found in runs.items()}
    yield numbers(rows, form=".2g", by="trust region")
    less = {"clip - TRPO": every["clip"] - every["TRPO"]}
    yield numbers({"the first five seeds": {name: values[:FIRST] for name, values in less.items()},
                   "all eight seeds": less}, by="mean reward")
    yield numbers(rare, {"tokens": "rare tokens", "above 1.2": "above 1.2 times",
                         "above 2": "above 2 times", "largest": "the largest"}, ".2g",
                  by="grpo.py, after an update")
