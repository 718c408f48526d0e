"""Work out the gradient of REINFORCE with numbers, for the page before rung 1.

A policy with one parameter, theta, answers one question. It writes one of eight outputs: with the
probability sigmoid(theta) it thinks first, and what it writes then does not depend on theta. So the
expected reward J and its gradient can be computed exactly.
"""
import math
import random
from statistics import fmean, stdev
from typing import NamedTuple

QUESTION, ANSWER = "((3+4)*2)=", 14
THETA = -1.0            # then a share of 0.27 thinks, as of the outputs of the base
STEP = 0.01             # of the gradient by differences
BATCH = 8               # outputs in the sample
SEED = 2
MANY = 10_000             # samples, whose mean shows that one is right on average


class Output(NamedTuple):
    text: str
    thinks: bool
    share: float        # of the outputs that think, or of those that do not
    reward: float


OUTPUTS = [
    Output("<think>3+4=7;7*2=14</think><answer>14</answer>", True, 0.69, 1.0),
    Output("<think>3+4=7;7*2=15</think><answer>15</answer>", True, 0.16, 0.0),
    Output("<think>3+4=8;8*2=16</think><answer>16</answer>", True, 0.10, 0.0),
    Output("<think>3+4=7;7*2=14</think><answer>41</answer>", True, 0.05, 0.0),
    Output("<answer>14</answer>", False, 0.08, 1.0),
    Output("<answer>12</answer>", False, 0.40, 0.0),
    Output("<answer>16</answer>", False, 0.30, 0.0),
    Output("<answer>10</answer>", False, 0.22, 0.0)]


def logp(output, theta=THETA):
    """Compute log pi(o). -> float"""
    p = 1 / (1 + math.exp(-theta))
    return math.log(output.share * (p if output.thinks else 1 - p))


def slope(output, theta=THETA):
    """Compute the derivative of log pi(o) with respect to theta. -> float"""
    p = 1 / (1 + math.exp(-theta))
    return 1 - p if output.thinks else -p


def expected_reward(theta=THETA):
    """Compute J, the sum of pi(o) r(o). -> float"""
    return sum(math.exp(logp(o, theta)) * o.reward for o in OUTPUTS)


def exact_gradient():
    """Compute the sum of pi(o) r(o) times the derivative of log pi(o). -> float"""
    return sum(math.exp(logp(o)) * o.reward * slope(o) for o in OUTPUTS)


def gradient_by_differences():
    """Compute (J(theta + STEP) - J(theta - STEP)) / (2 STEP). -> float"""
    return (expected_reward(THETA + STEP) - expected_reward(THETA - STEP)) / (2 * STEP)


def sample(rng):
    """Sample a batch of outputs. -> list of Output"""
    return rng.choices(OUTPUTS, [math.exp(logp(o)) for o in OUTPUTS], k=BATCH)


def sampled_gradient(batch):
    """Compute minus the gradient of the loss of rung 1: the mean of r_i times the derivative of
    log pi(o_i). -> float"""
    return fmean(o.reward * slope(o) for o in batch)


def rows():
    """Write the eight outputs with their numbers. -> rows of cells"""
    return [[f"`{o.text}`", f"{o.reward:.0f}", signed(logp(o), 2),
             f"{math.exp(logp(o)):.3f}", signed(slope(o), 2),
             signed(math.exp(logp(o)) * o.reward * slope(o), 4) if o.reward else "0"]
            for o in OUTPUTS]


def signed(x, digits):
    """Write a number with a minus sign. -> str"""
    return f"{x:.{digits}f}".replace("-", "−")


def values():
    """Compute the numbers of the text. -> dict of strings"""
    batch = sample(random.Random(SEED))
    rewards = [o.reward for o in batch]
    loss = -fmean(o.reward * logp(o) for o in batch)
    many = [sampled_gradient(sample(random.Random(seed))) for seed in range(MANY)]
    high, low = (expected_reward(THETA + step) for step in (STEP, -STEP))
    return {"question": QUESTION, "answer": str(ANSWER), "theta": f"{THETA:g}",
            "p": f"{1 / (1 + math.exp(-THETA)):.2f}", "J": f"{expected_reward():.4f}",
            "exact": f"{exact_gradient():.4f}", "step": f"{STEP:g}", "high": f"{high:.6f}",
            "low": f"{low:.6f}", "differences": f"{gradient_by_differences():.4f}",
            "batch": str(BATCH), "num_right": f"{sum(rewards):.0f}", "loss": f"{loss:.2f}",
            "sampled": f"{sampled_gradient(batch):.4f}", "many": f"{MANY:,}",
            "mean": f"{fmean(many):.3f}",
            "error": f"{stdev(many) / math.sqrt(MANY):.3f}"}
