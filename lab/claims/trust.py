"""Trust regions: how far one update moves the policy, and whether a bound helps"""
import itertools

import numpy
import torch

import grpo
from lab.bench import OURS, UNSCORED, Claim, numbers
from lab.training import load_base, training
from report import chart

SEEDS = range(8)
FIRST = 5                       # seeds that count; we added the other three after seeing these
MAX_KL = 0.01
FLAGS = f"--num_iterations 4 --num_prompts 16 --max_steps 15 {UNSCORED}"
RUNS = {"clip": f"ppo.py {FLAGS}",
        "penalty": f"ppo.py {FLAGS} --trust_region penalty --target_kl {MAX_KL}",
        "TRPO": f"examples/trpo.py {FLAGS} --max_kl {MAX_KL}",
        "no bound": f"ppo.py {FLAGS} --epsilon 1e9 --epsilon_high 1e9"}
METRICS = ["reward", "policy_kl", "step_time"]
CASES = {"epsilon_high 0.2": 0.2, "epsilon_high 0.28": 0.28, "no upper clip": 1e9}
GAIN = 0.02                     # smallest difference of the mean reward that matters
RARE = 0.1                      # a token with a lower probability counts as rare
UPDATES = 12
ABOVE = "fraction more than 1.2 times as likely"


def measure(case, seed):
    """Train with grpo.py, eight optimizer steps per batch, and compute how many times as likely
    each rare token with A > 0 is after an update."""
    cfg, task, policy = load_base(grpo, "--num_mini_batches 8 --epsilon 0.2 --epsilon_high "
                                  f"{CASES[case]} --seed {seed} --base_seed {seed}")
    ratios = []
    for batch, _ in itertools.islice(training(grpo, cfg, task, policy), UPDATES):
        with torch.no_grad():
            logps, _ = grpo.score(policy, batch.prompts, batch.tokens, cfg.temperature)
        A = grpo.advantages(batch.rewards).view(-1, 1)                          # (B, 1)
        is_rare = (A > 0) & (batch.mask > 0) & (batch.logps.exp() < RARE)       # (B, T)
        ratios.append((logps - batch.logps)[is_rare].exp())
    ratio = torch.cat(ratios)
    return {"rare tokens in a run": len(ratio), ABOVE: (ratio > 1.2).double().mean().item()}


def page(x):
    x = {case: {column: rows[:FIRST] for column, rows in columns.items()}
         for case, columns in x.items()}
    reward = {name: x[name]["reward"].mean(axis=1) for name in RUNS}
    farthest = {name: x[name]["policy_kl"].max(axis=1) for name in RUNS}
    yield Claim("from the same number of samples, the clip gets a higher mean reward than TRPO",
                "PPO", (reward["clip"], reward["TRPO"]), at_least=GAIN,
                finding="Averaged over a run, PPO's clip gets a reward of "
                f"{reward['clip'].mean():.2f}, and TRPO gets {reward['TRPO'].mean():.2f} from "
                "equally many samples")
    yield Claim("the clip gets at least as high a mean reward as the penalty", "PPO",
                (reward["clip"], reward["penalty"]), at_least=-GAIN)
    yield Claim("without any bound, the mean reward is lower than with the clip", "PPO",
                (reward["no bound"], reward["clip"]), at_most=-GAIN)
    above = x["epsilon_high 0.2"][ABOVE]
    yield Claim("with epsilon_high 0.2, a rare token becomes at most 1.2 times as likely in an "
                "update", "DAPO", above, at_most=0.01,
                finding="A clip doesn't bound the ratio: with epsilon_high 0.2, "
                f"{above.mean():.0%} of the rare tokens with a positive advantage become more than "
                "1.2 times as likely in one update")
    yield Claim("without any bound, the largest KL of an update is larger than with the clip", OURS,
                farthest["no bound"] / farthest["clip"], at_least=1.2, ratio=True)
    yield lambda axis: chart.dots(axis, reward, xlabel="reward, averaged over a run")
    yield numbers({name: {"largest KL of an update": farthest[name],
                          "median seconds per step": numpy.median(x[name]["step_time"], axis=1)}
                   for name in RUNS}, "trust region", ".2g")
    yield numbers({name: x[name] for name in CASES}, "grpo.py with", ".2g")
