"""Trust regions: how far one update moves the policy, and whether a bound helps"""
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
FIRST = 5                       # seeds that count; we added the other three after seeing these
FLAGS = f"--num_iterations 4 --num_prompts 16 --max_steps {STEPS} {UNSCORED}"
RUNS = {"clip": f"ppo.py {FLAGS}",
        "penalty": f"ppo.py {FLAGS} --trust_region penalty --target_kl {MAX_KL}",
        "TRPO": f"examples/trpo.py {FLAGS} --max_kl {MAX_KL}",
        "no bound": f"ppo.py {FLAGS} --epsilon 1e9 --epsilon_high 1e9"}
CLIPS = {"epsilon_high 0.2": 0.2, "epsilon_high 0.28": 0.28, "no upper clip": 1e9}
GAIN = 0.02                     # smallest difference of the mean reward that matters
RARE = 0.1                      # a token with a lower probability counts as rare
UPDATES = 12
ABOVE = "fraction more than 1.2 times as likely"
COLOURS = {"clip": RED, "penalty": BLUE, "TRPO": GREEN, "no bound": GREY}
EXPERIMENT = Experiment(__file__, seeds=range(8))
EXPERIMENT.runs("runs", RUNS, ["reward", "policy_kl", "step_time"])


@EXPERIMENT.measure(CLIPS)
def rare(seed, name):
    """Train with grpo.py, eight optimizer steps per batch, and compute how many times as likely
    each rare token with A > 0 is after an update. -> the number of these tokens, and the fraction
    above 1.2"""
    cfg, task, policy = load_base(grpo, "--num_mini_batches 8 --epsilon 0.2 --epsilon_high "
                                  f"{CLIPS[name]} --seed {seed} --base_seed {seed}")
    ratios = []
    for batch, _ in itertools.islice(training(grpo, cfg, task, policy), UPDATES):
        with torch.no_grad():
            logps, _ = grpo.score(policy, batch.prompts, batch.tokens, cfg.temperature)
        A = grpo.advantages(batch.rewards).view(-1, 1)                          # (B, 1)
        is_rare = (A > 0) & (batch.mask > 0) & (batch.logps.exp() < RARE)       # (B, T)
        ratios.append((logps - batch.logps)[is_rare].exp())
    ratio = torch.cat(ratios)
    return {"rare tokens in a run": len(ratio), ABOVE: (ratio > 1.2).double().mean().item()}


def page(runs, rare):
    every = {name: columns["reward"].mean(axis=1) for name, columns in runs.items()}
    runs, rare = ({name: {column: rows[:FIRST] for column, rows in columns.items()}
                   for name, columns in measured.items()} for measured in (runs, rare))
    reward = {name: values[:FIRST] for name, values in every.items()}
    farthest = {name: columns["policy_kl"].max(axis=1) for name, columns in runs.items()}
    yield Claim("from the same number of samples, the clip gets a higher mean reward than TRPO",
                "PPO", (reward["clip"], reward["TRPO"]), at_least=GAIN, unit="reward",
                said="Averaged over a run, PPO's clip gets a reward of "
                f"{reward['clip'].mean():.2f}, and TRPO gets {reward['TRPO'].mean():.2f} from "
                "equally many samples")
    yield Claim("the clip gets at least as high a mean reward as the penalty", "PPO",
                (reward["clip"], reward["penalty"]), at_least=-GAIN, unit="reward")
    yield Claim("without any bound, the mean reward is lower than with the clip", "PPO",
                (reward["no bound"], reward["clip"]), at_most=-GAIN, unit="reward")
    above = rare["epsilon_high 0.2"][ABOVE]
    yield Claim("with epsilon_high 0.2, a rare token becomes at most 1.2 times as likely in an "
                "update", "DAPO", above, at_most=0.01, unit="of the tokens",
                said="A clip doesn't bound the ratio: with epsilon_high 0.2, "
                f"{above.mean():.0%} of the rare tokens with a positive advantage become more than "
                "1.2 times as likely in one update")
    yield Claim("without any bound, the largest KL of an update is larger than with the clip", OURS,
                farthest["no bound"] / farthest["clip"], at_least=1.2, times=True)

    yield curves({name: columns["reward"] for name, columns in runs.items()}, given=COLOURS,
                 ylabel="reward")
    yield numbers({name: {"mean reward": reward[name], "largest KL of an update": farthest[name],
                          "median seconds per step": numpy.median(columns["step_time"], axis=1)}
                   for name, columns in runs.items()}, ".2g", "trust region")
    difference = every["clip"] - every["TRPO"]
    column = "mean reward with the clip, minus mean reward of TRPO"
    yield numbers({"the first five": {column: difference[:FIRST]},
                   "all eight": {column: difference}}, by="seeds")
    yield numbers(rare, ".2g", by="grpo.py with")
