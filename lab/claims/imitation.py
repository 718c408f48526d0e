"""Imitation: what does RL add to learning from one's own best outputs, and when is a baseline
needed?"""
import dataclasses
import functools

import dpo
import grpo
import gspo
import ppo
import reinforce
from lab.bench import OURS, Claim, at_best, numbers
from lab.docs import run_once
from report import chart, replaced
from tasks import extract

SEEDS, TUNING = range(12), (12, 13)
SCRIPTS = {module.__name__: module for module in (reinforce, grpo, gspo, ppo, dpo)}
GAIN = 0.02                                     # smallest difference of two fractions that matters
PASS = "pass@1"
SCORES = ["greedy", PASS, "pass@8", "think_share"]
SCORED = "--eval_steps 1000 --num_eval_problems 256"
STEPS, PROMPTS, UPDATES = 60, 32, 2             # of grpo.py; an update sees 128 outputs


def imitation(rounds, passes):
    """Write the command line that draws the outputs of STEPS steps in a few rounds, and after each
    of them makes some passes over the best ones."""
    size = STEPS // rounds
    return (f"reinforce.py --method rejection {SCORED} --max_steps {rounds} "
            f"--num_prompts {PROMPTS * size} --num_mini_batches {UPDATES * size} "
            f"--num_iterations {passes}")


# A way to learn: its command line, and the learning rate to begin with under the exact verifier,
# under points, and under a reward for even or odd; 0: it is left out
ROUND, THREE, FEW, TEN, MANY, EACH = (
    "imitation, 1 round, 3 passes", "imitation, 3 rounds, 3 passes", "imitation, 3 rounds, 1 pass",
    "imitation, 10 rounds, 3 passes", "imitation, 10 rounds, 6 passes",
    "imitation, each step, 1 pass")
NONE, BATCH = "REINFORCE", "REINFORCE, batch's mean as baseline"
POSITIVE, BY_LENGTH = f"{BATCH}, no negative advantages", "REINFORCE, divided by the length"
GRPO, GSPO, COLD, WARM, DPO = "GRPO", "GSPO", "PPO", "PPO, critic first", "DPO"
LESS, COLD_LESS = "REINFORCE, 5 points less", "PPO, 5.5 points less"
REINFORCE = f"reinforce.py {SCORED}"
WAYS = {
    ROUND: (imitation(1, 3), 1e-3, 1e-3, 0),
    THREE: (imitation(3, 3), 1e-3, 0, 0),
    FEW: (imitation(3, 1), 1e-3, 0, 0),
    TEN: (imitation(10, 3), 0, 1e-3, 1e-3),
    MANY: (imitation(10, 6), 0, 1e-3, 0),
    EACH: (imitation(60, 1), 1e-3, 0, 0),
    NONE: (REINFORCE, 5e-4, 2.5e-4, 2.5e-4),
    BATCH: (f"{REINFORCE} --baseline batch", 5e-4, 5e-4, 0),
    POSITIVE: (f"{REINFORCE} --baseline batch", 0, 5e-4, 0),
    BY_LENGTH: (REINFORCE, 5e-4, 2.5e-4, 2.5e-4),
    LESS: (REINFORCE, 0, 5e-4, 0),
    GRPO: (f"grpo.py {SCORED}", 5e-4, 5e-4, 5e-4),
    GSPO: (f"gspo.py {SCORED}", 5e-4, 0, 0),
    COLD: (f"ppo.py {SCORED}", 5e-4, 2.5e-4, 0),
    COLD_LESS: (f"ppo.py {SCORED}", 0, 5e-4, 0),
    WARM: (f"ppo.py {SCORED} --critic_pretrain_steps 10 --max_steps 50", 0, 5e-4, 0),
    DPO: (f"dpo.py {SCORED} --max_steps 60", 2e-4, 0, 0)}        # its default is 30 steps
EXACT, POINTS, PARITY = "exact", "points", "even or odd"
SIDES = {f"{reward}: {way}": (None, rates[place])
         for place, reward in enumerate((EXACT, POINTS, PARITY))
         for way, (_, *rates) in WAYS.items() if rates[place]}
COMPARED = [(side, PASS) for side in SIDES]
CHECK = f"{imitation(3, 3)} --reward points"


def parity(problem, text, given):
    """Reward a number that is even if the right one is, and odd otherwise. -> 1.0 or 0.0"""
    answer = extract(text) or ""
    is_number = answer.removeprefix("-").isdecimal() and len(answer) <= 20
    return float(is_number and int(answer) % 2 == int(problem.answer) % 2)


def less(constant, problem, text, given):
    """Subtract a constant from a reward, which then plays the part of a baseline."""
    return given - constant


def positive(advantages, *args):
    """Compute the advantages of a script, with 0 in place of the negative ones."""
    return advantages(*args).clamp(min=0)


def weighted(weigh, task, batch, cfg):
    """Imitate the outputs with weights of the mean 1: weigh(A), where A is the reward minus the
    group's mean. -> the rewards of the tokens, as those of reinforce.py's rejection"""
    weights = weigh(reinforce.advantages(batch.rewards, "mean"))                # (P, G)
    rewards = weights / weights.mean().clamp(min=1e-9)
    no_moves = [[]] * len(batch.texts)
    return task.token_rewards(dataclasses.replace(batch, rewards=rewards, verified=no_moves))


def by_length(aggregate, x, mask, how, *sizes):
    """Average token losses as nano.py does: each output's sum is divided by its length."""
    return aggregate(x, mask, "sequence_mean", *sizes)


# What a way replaces in its script, and what a reward does
CHANGES = {POSITIVE: {"advantages": functools.partial(positive, reinforce.advantages)},
           BY_LENGTH: {"aggregate": functools.partial(by_length, reinforce.aggregate)},
           LESS: {"reward": functools.partial(less, 5)},
           COLD_LESS: {"reward": functools.partial(less, 5.5)}}
REWARDED = {EXACT: ("", {}), POINTS: ("--reward points", {}), PARITY: ("", {"reward": parity})}


def measure(case, seed):
    """Train in one way under one reward. -> {score: a number}"""
    side, _, rate = case.rpartition(", ")
    reward, _, way = side.partition(": ")
    flags, changes = REWARDED[reward]
    return train(f"{WAYS[way][0]} {flags}", rate, changes | CHANGES.get(way, {}), seed, SCORES)


def train(command, rate, changes, seed, scores):
    """Run a command line, with other functions in its script. -> {score: a number}"""
    with replaced(SCRIPTS[command.partition(".py")[0]], **changes):
        return run_once(f"{command} --learning_rate {rate} --base_seed {seed}", seed, (), scores)


# a reward; the way that is claimed to be better, the other one; by how much
JUDGED = (
    (EXACT, THREE, GRPO, GAIN, "imitation in three rounds of three passes gets a higher pass@1 "
     "than GRPO"),
    (EXACT, FEW, GRPO, -GAIN, "with as many updates, too, imitation in three rounds of one pass is "
     "not behind GRPO"),
    (EXACT, NONE, GRPO, -GAIN, "REINFORCE without a baseline is not behind GRPO"),
    (EXACT, NONE, BATCH, GAIN, "REINFORCE is better without the batch's mean as the baseline"),
    (EXACT, THREE, ROUND, GAIN, "three rounds of imitation are better than one"),
    (EXACT, NONE, BY_LENGTH, GAIN, "REINFORCE is better if its loss is not divided by each "
     "output's length"),
    (POINTS, BATCH, NONE, 0.05, "REINFORCE is better with the batch's mean as the baseline"),
    (POINTS, LESS, BATCH, -GAIN, "REINFORCE with 5 points less for each output, and no "
     "baseline, is not behind the batch's mean"),
    (POINTS, GRPO, BATCH, GAIN, "GRPO, with the group's mean, the std and the clip, is better than "
     "REINFORCE with the batch's mean"),
    (POINTS, MANY, GRPO, -GAIN, "imitation of the best of each group, in ten rounds of six passes, "
     "is not behind GRPO"),
    (POINTS, TEN, ROUND, GAIN, "ten rounds of imitation are better than one"),
    (POINTS, BATCH, POSITIVE, GAIN, "REINFORCE with the batch's mean is better if it also makes "
     "bad outputs less likely"),
    (POINTS, NONE, BY_LENGTH, GAIN, "REINFORCE without a baseline is better if its loss is not "
     "divided by each output's length"),
    (POINTS, WARM, COLD, GAIN, "PPO is better if ten of the 60 batches train the critic alone "
     "first"),
    (POINTS, COLD_LESS, WARM, -GAIN, "PPO whose critic was not trained first is not behind one "
     "whose critic was, if each output gets 5.5 points less"),
    (POINTS, WARM, GRPO, -GAIN, "PPO whose critic was trained first is not behind GRPO"),
    (PARITY, NONE, BY_LENGTH, 0.1, "REINFORCE without a baseline is better if its loss is not "
     "divided by each output's length"),
    (PARITY, NONE, GRPO, -0.05, "REINFORCE without a baseline is not behind GRPO by more than "
                                "0.05"),
    (PARITY, TEN, GRPO, -GAIN, "ten rounds of imitation are not behind GRPO"))
TITLES = {EXACT: "under the exact verifier", POINTS: "under points",
          PARITY: "under a reward for even or odd"}
TABLED = {EXACT: (ROUND, THREE, NONE, GRPO),
          POINTS: (TEN, NONE, BATCH, POSITIVE, LESS, GRPO, COLD, WARM)}


def page(x):
    best = {side: columns for (side, _), columns in at_best("imitation", x).items()}
    ends = {side: columns[PASS].mean() for side, columns in best.items()}
    yield ("From as many outputs, imitation of its own right ones gets "
           f"{ends[f'{EXACT}: {THREE}']:.1%} of its samples right, and GRPO "
           f"{ends[f'{EXACT}: {GRPO}']:.1%}. If a judge gives points, imitation of the best of "
           f"each group gets {ends[f'{POINTS}: {TEN}']:.1%}, and GRPO "
           f"{ends[f'{POINTS}: {GRPO}']:.1%}.")
    for reward, *ways, gain, text in JUDGED:
        pair = [best[f"{reward}: {way}"] for way in ways]
        yield Claim(f"{TITLES[reward]}, {text}", OURS, tuple(one[PASS] for one in pair),
                    at_least=gain, rates=tuple(one["rate"] for one in pair))
    shown = {side: best[side] for reward, ways in TABLED.items() for way in ways
             for side in [f"{reward}: {way}"]}
    yield lambda axis: chart.dots(
        axis, {side: columns[PASS] for side, columns in shown.items()}, xlim=(0, 1.03),
        xlabel="pass@1 on held-out problems")
    yield numbers({side: {"most likely output": columns["greedy"], "samples (pass@1)":
                          columns[PASS]} for side, columns in shown.items()}, "reward: way", ".2f")
